#include "buffer.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace fsd {

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

KvTensor *cached(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    Buffer *b = buffer_of(root);
    return b && b->kv ? b->kv->at((size_t)((const char *)root->data - b->base)) : nullptr;
}

} // namespace fsd
