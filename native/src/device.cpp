#include "device.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace fsd {

Device &device() {
    // Never destroyed: ggml does not unload plugins, and buffers may outlive main.
    static Pacing *pacing = new Pacing;
    static Inner *inner = new Inner(*pacing);
    static Device *d = new Device(*inner, *pacing);
    return *d;
}

char *reserve_addresses(size_t size) {
#if defined(_WIN32)
    return (char *)VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char *)p;
#endif
}

void release_addresses(char *p, size_t size) {
#if defined(_WIN32)
    (void)size;
    VirtualFree(p, 0, MEM_RELEASE);
#else
    munmap(p, size);
#endif
}

void forget_pages(char *p, size_t size) {
#if defined(_WIN32)
    (void)p, (void)size;
#else
    madvise(p, size, MADV_DONTNEED);
#endif
}

void Device::add_weight(const ggml_tensor *t) {
    if (weight_at.emplace(t->data, (int)weights.size()).second) {
        Weight w;
        w.name = t->name;
        w.shape = *t;
        w.host = (const char *)t->data;
        w.bytes = ggml_nbytes(t);
        weights.push_back(std::move(w));
    }
}

// A budget in the frame block becomes the requested budget, unless it is below the floor.
void Device::read_frame_budget() {
    uint64_t generation, bytes;
    if (!pacing.new_budget(generation, bytes)) {
        return;
    }
    const uint64_t wanted = limit_of(bytes);
    if (wanted < floor.load()) {
        pacing.refuse(generation, ledger.budget(), ledger.used(), floor.load());
        return;
    }
    request.ask(wanted);
    pacing.accept(generation);
}

// False while a graph runs; its executor applies the budget.
bool Device::apply_budget_if_idle() {
    std::unique_lock<std::mutex> lock(graph_mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
        return false;
    }
    if (request.pending()) {
        apply_budget();
    }
    return true;
}

// Tells the host through the frame block that its budget is in force.
void Device::answer_frame_budget() {
    if (pacing.has_accepted() && !request.pending()) {
        pacing.answer_accepted(ledger.budget(), ledger.used(), floor.load());
    }
}

} // namespace fsd
