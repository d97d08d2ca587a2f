#include "emulated.h"

#include "system.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void *p, unsigned long size);
extern "C" void __tsan_write_range(void *p, unsigned long size);
#endif

namespace {

using clock_type = std::chrono::steady_clock;
using time_point = clock_type::time_point;

constexpr size_t kAlignment = 128;   // ggml-cuda's
constexpr int64_t kRowPadding = 512; // ggml-cuda's MATRIX_ROW_PADDING
constexpr size_t kSlice = 1 << 20;   // bytes of one reservation of the link
constexpr auto kSpin =
    std::chrono::microseconds(10); // how long a waiter spins before it sleeps: about a wake-up's time
constexpr auto kShortestSleep =
    std::chrono::microseconds(20); // the link's clock is absolute, so skipped sleeps add up to no drift

void cpu_relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ volatile("yield");
#endif
}

template <typename Predicate> bool spin_until(Predicate done) {
    const time_point end = clock_type::now() + kSpin;
    do {
        for (int i = 0; i < 16; i++) {
            if (done()) {
                return true;
            }
            cpu_relax();
        }
    } while (clock_type::now() < end);
    return done();
}

// A flag that is set once and that any number of threads wait for.
class Marker {
  public:
    bool is_set() const { return done.load(std::memory_order_acquire); }

    void set() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            done.store(true, std::memory_order_release);
        }
        reached.notify_all();
    }

    void wait() {
        if (spin_until([this] { return is_set(); })) {
            return;
        }
        std::unique_lock<std::mutex> lock(mutex);
        reached.wait(lock, [this] { return is_set(); });
    }

  private:
    std::atomic<bool> done{false};
    std::mutex mutex;
    std::condition_variable reached;
};

// Rows to copy; a plain copy is one row.
struct Block {
    char *dst;
    const char *src;
    size_t size;
    size_t rows;
    size_t dst_stride;
    size_t src_stride;
};

// One direction of the bus. The copies of all streams take turns, kSlice bytes at a time. Its clock advances by bytes over
// bandwidth, independent of when threads run: a copy that memcpy or the scheduler delayed catches up, because a DMA engine
// would not have been delayed.
class CopyLink {
  public:
    explicit CopyLink(double gbps) : bytes_per_s(gbps * 1e9) {}

    // Copies, and sleeps until the link would be done if it started at `ready` or later; returns that time.
    time_point copy(const Block &b, time_point ready) {
        const time_point begin = clock_type::now();
        size_t slice = 0;
        for (size_t row = 0; row < b.rows; row++) {
            for (size_t done = 0; done < b.size;) {
                const size_t n = std::min(b.size - done, kSlice - slice);
                std::memcpy(b.dst + row * b.dst_stride + done, b.src + row * b.src_stride + done, n);
                done += n;
                slice += n;
                if (slice == kSlice) {
                    ready = reserve(slice, ready);
                    slice = 0;
                }
            }
        }
        ready = reserve(slice, ready);
        if (bytes_per_s <= 0.0) {
            ready = clock_type::now();
            std::lock_guard<std::mutex> lock(mutex);
            busy += ready - begin;
        }
        return ready;
    }

    void read(uint64_t &bytes_out, double &busy_out) {
        std::lock_guard<std::mutex> lock(mutex);
        bytes_out = bytes;
        busy_out = std::chrono::duration<double>(busy).count();
    }

  private:
    time_point reserve(size_t n, time_point ready) {
        std::unique_lock<std::mutex> lock(mutex);
        bytes += n;
        if (bytes_per_s <= 0.0) {
            return ready;
        }
        const auto taken =
            std::chrono::duration_cast<clock_type::duration>(std::chrono::duration<double>(n / bytes_per_s));
        free_at = std::max(free_at, ready) + taken;
        busy += taken;
        const time_point end = free_at;
        lock.unlock();
        if (end - clock_type::now() > kShortestSleep) {
            fsd::sleep_until(end);
        }
        return end;
    }

    const double bytes_per_s;
    std::mutex mutex;
    time_point free_at{};
    clock_type::duration busy{};
    uint64_t bytes = 0;
};

struct Emulated;

// A ggml_backend: a FIFO queue and the thread that runs its tasks.
class Stream {
  public:
    struct Task {
        time_point enqueued;
        std::function<void(Stream &, time_point)> run; // gets the time from which the stream could have run it
    };

    explicit Stream(Emulated &device);
    ~Stream();
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    // noexcept: exceptions must not pass ggml's C interface, so a lack of memory ends the process, as in ggml.
    void push(std::function<void(Stream &, time_point)> run) noexcept;
    void drain();
    void compute(ggml_cgraph *graph, uint32_t hang_ms);

    Emulated &device;
    std::atomic<int> n_threads;
    // When the last task ended. The end of a copy is by the link's clock, which may be a little ahead of real time.
    time_point ready{};

  private:
    void work();
    bool next(Task &out);

    ggml_backend_t cpu = nullptr; // made by the first compute: a stream that only copies needs none
    int cpu_threads = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::condition_variable finished;
    std::deque<Task> queue;
    std::atomic<uint64_t> n_pushed{0};
    std::atomic<uint64_t> n_done{0};
    bool stopping = false;
    std::thread thread;
};

struct Emulated {
    explicit Emulated(const fs_emulated_config &c)
        : config(c), n_threads(static_cast<int>(std::max(c.n_threads, 1u))), h2d(c.link_gbps), d2h(c.link_gbps) {}

    ggml_backend_device device{};
    ggml_backend_reg reg{};
    ggml_backend_buffer_type buft{};
    ggml_backend_buffer_type pinned_buft{}; // used where memory cannot be pinned where it lies
    std::atomic<bool> pinned_refused{false};
    ggml_backend_dev_t cpu = nullptr;
    ggml_backend_set_n_threads_t set_n_threads = nullptr;
    const fs_emulated_config config;
    const int n_threads;

    CopyLink h2d;
    CopyLink d2h;

    std::mutex ledger;
    uint64_t used = 0;
    uint64_t peak = 0;
    uint64_t n_allocations = 0;
    time_point other_since; // the epoch: the other process was not found yet

    std::atomic<uint64_t> n_computes{0}, n_events{0};
    std::atomic<uint64_t> n_pages{0}; // allocations for reads from disk
    std::atomic<bool> lost{false};

    // The caller holds `ledger`.
    uint64_t others() {
        const fs_emulated_faults &faults = config.faults;
        if (n_computes.load() < faults.other_from) {
            return 0;
        }
        other_since = other_since == time_point() ? clock_type::now() : other_since;
        const bool left =
            faults.other_ms > 0 && clock_type::now() - other_since > std::chrono::milliseconds(faults.other_ms);
        return left ? 0 : (uint64_t)faults.other_mb << 20;
    }
};

struct Event {
    std::mutex mutex;
    std::shared_ptr<Marker> last; // of the latest record; null before the first
};

bool is_computed(const ggml_tensor *node) {
    return !ggml_op_is_empty(node->op) && !ggml_is_empty(node) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

// A copy of what an asynchronous compute needs of a ggml_cgraph: the nodes and their use counts, which ggml-cpu's fusion
// reads. The hash set is built anew, because that of a view has all nodes of the large graph.
struct GraphCopy {
    explicit GraphCopy(const ggml_cgraph *source)
        : nodes(source->nodes, source->nodes + source->n_nodes), keys(2 * nodes.size() + 1),
          used(ggml_bitset_size(keys.size())), use_counts(keys.size()) {
        graph.size = source->n_nodes;
        graph.n_nodes = source->n_nodes;
        graph.nodes = nodes.data();
        graph.visited_hash_set = {keys.size(), used.data(), keys.data()};
        graph.use_counts = use_counts.data();
        graph.order = source->order;
        graph.uid = source->uid;
        if (source->use_counts == nullptr || source->visited_hash_set.size == 0) {
            return;
        }
        for (int i = 0; i < graph.n_nodes; i++) {
            const size_t slot = ggml_hash_find_or_insert(&graph.visited_hash_set, graph.nodes[i]);
            use_counts[slot] = ggml_node_get_use_count(source, i);
        }
    }
    GraphCopy(const GraphCopy &) = delete;
    GraphCopy &operator=(const GraphCopy &) = delete;

    std::vector<ggml_tensor *> nodes;
    std::vector<ggml_tensor *> keys;
    std::vector<ggml_bitset_t> used;
    std::vector<int32_t> use_counts;
    ggml_cgraph graph{};
};

// ggml-cpu is not instrumented. With its accesses declared here TSan finds copies and host accesses that run at the same
// time because an event is missing.
void declare_accesses([[maybe_unused]] const ggml_cgraph *graph) {
#if defined(__SANITIZE_THREAD__)
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (!is_computed(node)) {
            continue;
        }
        for (const ggml_tensor *src : node->src) {
            if (src != nullptr) {
                __tsan_read_range(src->data, ggml_nbytes(src));
            }
        }
        const ggml_tensor *rows = node->op == GGML_OP_SET_ROWS ? node->src[1] : nullptr;
        if (rows != nullptr && rows->type == GGML_TYPE_I64 &&
            ggml_nrows(rows) == 1) { // the others may be read meanwhile
            for (int64_t r = 0; r < rows->ne[0]; r++) {
                char *row = (char *)node->data + (size_t)((const int64_t *)rows->data)[r] * node->nb[1];
                __tsan_write_range(row, ggml_row_size(node->type, node->ne[0]));
            }
        } else {
            __tsan_write_range(node->data, ggml_nbytes(node));
        }
    }
#endif
}

// --- stream ---

Stream::Stream(Emulated &d) : device(d), n_threads(d.n_threads), thread([this] { work(); }) {}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    thread.join();
    ggml_backend_free(cpu);
}

void Stream::push(std::function<void(Stream &, time_point)> run) noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back({clock_type::now(), std::move(run)});
        n_pushed.fetch_add(1, std::memory_order_release);
    }
    changed.notify_one();
}

void Stream::drain() {
    const uint64_t target = n_pushed.load(std::memory_order_acquire);
    const auto reached = [this, target] { return n_done.load(std::memory_order_acquire) >= target; };
    if (spin_until(reached)) {
        return;
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, reached);
}

bool Stream::next(Task &out) {
    // A stream that only copies does not spin: it gets its tasks early, and spinning would slow the compute stream.
    if (cpu != nullptr) {
        spin_until(
            [this] { return n_pushed.load(std::memory_order_acquire) != n_done.load(std::memory_order_relaxed); });
    }
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return stopping || !queue.empty(); });
    if (queue.empty()) {
        return false;
    }
    out = std::move(queue.front());
    queue.pop_front();
    return true;
}

void Stream::work() {
    fsd::wake_exactly(); // Linux may delay a wake-up by 50 us, as long as a copy takes
    Task t;
    while (next(t)) {
        t.run(*this, std::max(t.enqueued, ready));
        t.run = nullptr;
        {
            std::lock_guard<std::mutex> lock(mutex);
            n_done.fetch_add(1, std::memory_order_release);
        }
        finished.notify_all();
    }
}

// Whether no token chooses an expert twice. GPUs sort the rows of a product with experts' weights by expert and would write
// out of bounds; ggml-cpu does not. Only choices that come from outside of the graph need the check: before it runs, the
// memory of others has what was there before.
bool each_expert_once(const ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i], *ids = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
        const auto makes_ids = [ids](const ggml_tensor *n) { return is_computed(n) && n->data == ids->data; };
        if (ids == nullptr || ids->op != GGML_OP_NONE ||
            std::any_of(graph->nodes, graph->nodes + i, makes_ids)) { // as the lookup of slots does
            continue;
        }
        for (int64_t t = 0; t < ids->ne[1]; t++) {
            std::set<int32_t> seen;
            for (int64_t j = 0; j < ids->ne[0]; j++) {
                const char *at = static_cast<const char *>(ids->data) + j * ids->nb[0] + t * ids->nb[1];
                if (!seen.insert(*reinterpret_cast<const int32_t *>(at)).second) {
                    GGML_LOG_ERROR("emulated device: '%s' chooses an expert twice for one token\n", node->name);
                    return false;
                }
            }
        }
    }
    return true;
}

bool lies_in(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, size_t bytes) {
    const char *base = static_cast<const char *>(buffer->context), *data = static_cast<const char *>(tensor->data);
    return base <= data && data + bytes <= base + buffer->size;
}

// Whether tensors lie in their buffers, and views where the tensors that they are views of, and their offsets say. ggml-vulkan
// goes by these, and by no view's own address.
bool in_place(const ggml_tensor *t) {
    if (t == nullptr || t->data == nullptr) {
        return true;
    }
    if (t->view_src != nullptr && t->data != static_cast<const char *>(t->view_src->data) + t->view_offs) {
        return false;
    }
    return t->buffer == nullptr || lies_in(t->buffer, t, ggml_nbytes(t)); // null: host memory that kernels read
}

bool all_in_place(const ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (!in_place(node) || !std::all_of(std::begin(node->src), std::end(node->src), in_place)) {
            GGML_LOG_ERROR("emulated device: '%s' or a source of it is not where its buffer and offset say\n",
                           node->name);
            return false;
        }
    }
    return true;
}

void Stream::compute(ggml_cgraph *graph, uint32_t hang_ms) {
    if (hang_ms > 0) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait_for(lock, std::chrono::milliseconds(hang_ms), [this] { return stopping; });
    }
    if (cpu == nullptr) {
        cpu = ggml_backend_dev_init(device.cpu, nullptr);
    }
    const int threads = n_threads.load(std::memory_order_relaxed);
    if (cpu != nullptr && threads != cpu_threads) {
        device.set_n_threads(cpu, threads);
        cpu_threads = threads;
    }
    declare_accesses(graph);
    const bool valid = each_expert_once(graph) && all_in_place(graph);
    if (cpu == nullptr || !valid || ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) {
        device.lost.store(true);
    }
    ready = clock_type::now();
}

Stream &stream_of(ggml_backend_t backend) { return *static_cast<Stream *>(backend->context); }

Emulated &device_of(ggml_backend_dev_t device) { return *static_cast<Emulated *>(device->context); }

Emulated &device_of(ggml_backend_buffer_t buffer) { return device_of(buffer->buft->device); }

ggml_backend_buffer_t buffer_of(const ggml_tensor *tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

// --- buffer ---

void buffer_free(ggml_backend_buffer_t buffer) {
    Emulated &d = device_of(buffer);
    if (d.config.faults.free_ms > 0) {
        fsd::sleep_for(std::chrono::milliseconds(d.config.faults.free_ms));
    }
    fsd::release_addresses((char *)buffer->context, buffer->size);
    std::lock_guard<std::mutex> lock(d.ledger);
    d.used -= buffer->size;
}

void *buffer_base(ggml_backend_buffer_t buffer) { return buffer->context; }

size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *tensor) {
    const size_t size = ggml_nbytes(tensor);
    const int64_t rest = tensor->ne[0] % kRowPadding;
    return ggml_is_quantized(tensor->type) && rest != 0 ? size + ggml_row_size(tensor->type, kRowPadding - rest) : size;
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    if (tensor->view_src == nullptr && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        const size_t size = ggml_nbytes(tensor);
        std::memset(static_cast<char *>(tensor->data) + size, 0, buft_alloc_size(buffer->buft, tensor) - size);
    }
    return GGML_STATUS_SUCCESS;
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

Block set_block(ggml_tensor *tensor, const void *data, size_t offset, size_t size, size_t rows = 1,
                size_t stride_tensor = 0, size_t stride_data = 0) {
    return {static_cast<char *>(tensor->data) + offset,
            static_cast<const char *>(data),
            size,
            rows,
            stride_tensor,
            stride_data};
}

Block get_block(const ggml_tensor *tensor, void *data, size_t offset, size_t size, size_t rows = 1,
                size_t stride_tensor = 0, size_t stride_data = 0) {
    return {static_cast<char *>(data),
            static_cast<const char *>(tensor->data) + offset,
            size,
            rows,
            stride_data,
            stride_tensor};
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                       size_t size) {
    device_of(buffer).h2d.copy(set_block(tensor, data, offset, size), clock_type::now());
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                       size_t size) {
    device_of(buffer).d2h.copy(get_block(tensor, data, offset, size), clock_type::now());
}

void buffer_set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                          size_t size, size_t rows, size_t stride_tensor, size_t stride_data) {
    device_of(buffer).h2d.copy(set_block(tensor, data, offset, size, rows, stride_tensor, stride_data),
                               clock_type::now());
}

void buffer_get_tensor_2d(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                          size_t size, size_t rows, size_t stride_tensor, size_t stride_data) {
    device_of(buffer).d2h.copy(get_block(tensor, data, offset, size, rows, stride_tensor, stride_data),
                               clock_type::now());
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *src, ggml_tensor *dst) {
    if (buffer_of(src)->buft != buffer->buft) {
        return false;
    }
    std::memcpy(dst->data, src->data, ggml_nbytes(src)); // within the device: does not use the link
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); }

const ggml_backend_buffer_i kBuffer = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ buffer_set_tensor_2d,
    /* .get_tensor_2d = */ buffer_get_tensor_2d,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// --- buffer type ---

const char *buft_name(ggml_backend_buffer_type_t) { return "EMULATED0"; }

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    Emulated &d = device_of(buft->device);
    {
        std::lock_guard<std::mutex> lock(d.ledger);
        d.n_allocations++;
        if (d.n_allocations == d.config.faults.alloc || d.lost.load() ||
            d.used + d.others() + size > d.config.vram_bytes) {
            return nullptr;
        }
        d.used += size;
        d.peak = std::max(d.peak, d.used);
    }
    // Counted before it is mapped, so that two threads cannot both take the last bytes.
    char *memory = fsd::reserve_addresses(size); // a free returns the pages at once, like cudaFree
    if (memory == nullptr) {
        std::lock_guard<std::mutex> lock(d.ledger);
        d.used -= size;
        return nullptr;
    }
    fsd::prefer_large_pages(memory, size); // faults of 4 KiB pages would take longer than the copy
    return ggml_backend_buffer_init(buft, kBuffer, memory, size);
}

size_t buft_alignment(ggml_backend_buffer_type_t) { return kAlignment; }

const ggml_backend_buffer_type_i kBufferType = {
    /* .get_name       = */ buft_name,
    /* .alloc_buffer   = */ buft_alloc,
    /* .get_alignment  = */ buft_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ buft_alloc_size,
    /* .is_host        = */ nullptr,
};

// Like other backends', it gives memory of the CPU's type where it has no more to pin.
ggml_backend_buffer_t pinned_buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    Emulated &d = device_of(buft->device);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    const bool refused = d.config.faults.unpinned > 1 && !d.pinned_refused.exchange(true);
    if (buffer != nullptr && !refused) {
        buffer->buft = buft;
    }
    return buffer;
}

// --- backend ---

ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x6d, 0x0b, 0x5e, 0x1f, 0x2a, 0x88, 0x4c, 0x3d,
                             0x93, 0x57, 0xf1, 0x44, 0xae, 0x20, 0xd7, 0x69};
    return &guid;
}

const char *backend_name(ggml_backend_t) { return "EMULATED0"; }

void backend_free(ggml_backend_t backend) {
    delete &stream_of(backend);
    delete backend;
}

void copy_async(ggml_backend_t backend, CopyLink &link, const Block &b) {
    stream_of(backend).push([&link, b](Stream &s, time_point since) { s.ready = link.copy(b, since); });
}

void backend_set_tensor(ggml_backend_t backend, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    copy_async(backend, stream_of(backend).device.h2d, set_block(tensor, data, offset, size));
}

void backend_get_tensor(ggml_backend_t backend, const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    copy_async(backend, stream_of(backend).device.d2h, get_block(tensor, data, offset, size));
}

void backend_set_tensor_2d(ggml_backend_t backend, ggml_tensor *tensor, const void *data, size_t offset, size_t size,
                           size_t rows, size_t stride_tensor, size_t stride_data) {
    copy_async(backend, stream_of(backend).device.h2d,
               set_block(tensor, data, offset, size, rows, stride_tensor, stride_data));
}

void backend_get_tensor_2d(ggml_backend_t backend, const ggml_tensor *tensor, void *data, size_t offset, size_t size,
                           size_t rows, size_t stride_tensor, size_t stride_data) {
    copy_async(backend, stream_of(backend).device.d2h,
               get_block(tensor, data, offset, size, rows, stride_tensor, stride_data));
}

std::shared_ptr<Marker> record(Stream &s) noexcept {
    auto m = std::make_shared<Marker>();
    s.push([m](Stream &, time_point) { m->set(); });
    return m;
}

void wait_for(Stream &s, std::shared_ptr<Marker> m) {
    s.push([m = std::move(m)](Stream &self, time_point) {
        // A marker that is set already takes no time, so that copies follow one another without a gap.
        if (!m->is_set()) {
            m->wait();
            self.ready = clock_type::now();
        }
    });
}

bool backend_cpy_tensor(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *src, ggml_tensor *dst) {
    ggml_backend_buffer_type_t buft = &stream_of(to).device.buft;
    if (from->device != to->device || buffer_of(src)->buft != buft || buffer_of(dst)->buft != buft) {
        return false;
    }
    stream_of(from).push([src = src->data, dst = dst->data, size = ggml_nbytes(src)](Stream &s, time_point) {
        std::memcpy(dst, src, size);
        s.ready = clock_type::now();
    });
    if (from != to) {
        wait_for(stream_of(to), record(stream_of(from)));
    }
    return true;
}

void backend_synchronize(ggml_backend_t backend) { stream_of(backend).drain(); }

// How many bytes a node's kernels read of a source. For a few tokens GPUs compute products with quantised weights in blocks
// of rows (of 8 at most in ggml-cuda's mul_mat_vec_q) and read all of the last block.
size_t bytes_read(const ggml_tensor *node, const ggml_tensor *src) {
    constexpr int64_t kBlock = 8;
    const bool weight = src == node->src[0] && (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID);
    const int64_t lacks = weight && ggml_is_quantized(src->type) ? (kBlock - src->ne[1] % kBlock) % kBlock : 0;
    return ggml_nbytes(src) + (size_t)lacks * src->nb[1];
}

// A GPU faults on host memory and past the end of its own memory; ggml-cpu would use both.
bool is_on_device(const Emulated &d, const ggml_tensor *tensor, size_t bytes) {
    ggml_backend_buffer_t buffer = buffer_of(tensor);
    return buffer != nullptr && buffer->buft == &d.buft && lies_in(buffer, tensor, bytes);
}

bool all_on_device(const Emulated &d, const ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (!is_computed(node)) {
            continue;
        }
        const ggml_tensor *bad = is_on_device(d, node, ggml_nbytes(node)) ? nullptr : node;
        for (int j = 0; j < GGML_MAX_SRC && bad == nullptr; j++) {
            const ggml_tensor *src = node->src[j];
            // GPU kernels may read pinned host memory. Here that is memory without a buffer, or of the host buffer type.
            const bool host = src != nullptr && node->op == GGML_OP_SET_ROWS && src->data &&
                              (src->buffer == nullptr || src->buffer->buft == &d.pinned_buft);
            bad = src == nullptr || host || is_on_device(d, src, bytes_read(node, src)) ? nullptr : src;
        }
        if (bad != nullptr) {
            GGML_LOG_ERROR("emulated device: %s '%s' uses '%s', which is not in its memory\n", ggml_op_name(node->op),
                           node->name, bad->name);
            return false;
        }
    }
    return true;
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph *graph) noexcept {
    Stream &s = stream_of(backend);
    const uint64_t number = s.device.n_computes.fetch_add(1) + 1;
    const fs_emulated_faults &faults = s.device.config.faults;
    if (number == faults.compute_fail || !all_on_device(s.device, graph)) {
        s.device.lost.store(true);
    }
    if (s.device.lost.load()) {
        return GGML_STATUS_FAILED;
    }
    auto copy = std::make_shared<GraphCopy>(graph);
    const uint32_t hang_ms = number == faults.compute_stuck ? faults.stuck_ms : 0;
    s.push([copy = std::move(copy), hang_ms](Stream &self, time_point) { self.compute(&copy->graph, hang_ms); });
    return GGML_STATUS_SUCCESS;
}

void backend_event_record(ggml_backend_t backend, ggml_backend_event_t e) {
    auto m = record(stream_of(backend));
    stream_of(backend).device.n_events++;
    Event &ev = *static_cast<Event *>(e->context);
    std::lock_guard<std::mutex> lock(ev.mutex);
    ev.last = std::move(m);
}

std::shared_ptr<Marker> last_record(ggml_backend_event_t e) {
    Event &ev = *static_cast<Event *>(e->context);
    std::lock_guard<std::mutex> lock(ev.mutex);
    return ev.last;
}

void backend_event_wait(ggml_backend_t backend, ggml_backend_event_t e) {
    if (auto m = last_record(e)) {
        wait_for(stream_of(backend), std::move(m));
    }
}

const ggml_backend_i kBackend = {
    /* .get_name            = */ backend_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ backend_set_tensor,
    /* .get_tensor_async    = */ backend_get_tensor,
    /* .set_tensor_2d_async = */ backend_set_tensor_2d,
    /* .get_tensor_2d_async = */ backend_get_tensor_2d,
    /* .cpy_tensor_async    = */ backend_cpy_tensor,
    /* .synchronize         = */ backend_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ backend_graph_compute,
    /* .event_record        = */ backend_event_record,
    /* .event_wait          = */ backend_event_wait,
    /* .graph_optimize      = */ nullptr,
};

// --- device ---

const char *device_name(ggml_backend_dev_t) { return "EMULATED0"; }

const char *device_description(ggml_backend_dev_t) { return "emulated GPU (ggml-cpu behind a copy link)"; }

void device_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    Emulated &d = device_of(device);
    std::lock_guard<std::mutex> lock(d.ledger);
    *free = d.config.vram_bytes - std::min(d.config.vram_bytes, d.used + d.others());
    *total = d.config.vram_bytes;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps = {
        /* .async                = */ true,
        /* .host_buffer          = */ false,
        /* .buffer_from_host_ptr = */ false,
        /* .events               = */ true,
        /* .mmap_support         = */ true,
    };
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    try {
        auto s = std::make_unique<Stream>(device_of(device));
        auto *backend = new ggml_backend{backend_guid(), kBackend, device, s.get()};
        s.release();
        return backend;
    } catch (const std::exception &) { // no memory or no thread
        return nullptr;
    }
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) { return &device_of(device).buft; }

ggml_backend_buffer_type_t device_host_buffer_type(ggml_backend_dev_t device) {
    Emulated &d = device_of(device);
    return d.config.faults.unpinned ? &d.pinned_buft : nullptr;
}

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor *op) {
    return ggml_backend_dev_supports_op(device_of(device).cpu, op);
}

bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft) {
    return buft == &device_of(device).buft;
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t device) noexcept {
    return new ggml_backend_event{device, new Event};
}

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t e) {
    delete static_cast<Event *>(e->context);
    delete e;
}

void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t e) {
    if (auto m = last_record(e)) {
        m->wait();
    }
}

const ggml_backend_device_i kDevice = {
    /* .get_name             = */ device_name,
    /* .get_description      = */ device_description,
    /* .get_memory           = */ device_memory,
    /* .get_type             = */ device_type,
    /* .get_props            = */ device_props,
    /* .init_backend         = */ device_init,
    /* .get_buffer_type      = */ device_buffer_type,
    /* .get_host_buffer_type = */ device_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

// --- reg ---

const char *reg_name(ggml_backend_reg_t) { return "emulated"; }

size_t reg_device_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t) { return &static_cast<Emulated *>(reg->context)->device; }

void set_n_threads(ggml_backend_t backend, int n) { stream_of(backend).n_threads.store(std::max(n, 1)); }

void *reg_proc_address(ggml_backend_reg_t, const char *name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(static_cast<ggml_backend_set_n_threads_t>(set_n_threads));
    }
    return nullptr;
}

const ggml_backend_reg_i kReg = {
    /* .get_name         = */ reg_name,
    /* .get_device_count = */ reg_device_count,
    /* .get_device       = */ reg_device,
    /* .get_proc_address = */ reg_proc_address,
};

} // namespace

bool fs_emulated_read_faults(const char *script, fs_emulated_faults &faults) {
    fs_emulated_faults read;
    const struct {
        const char *name;
        uint64_t *wide;
        uint32_t *narrow;
    } keys[] = {
        {"alloc", &read.alloc, nullptr},
        {"compute_fail", &read.compute_fail, nullptr},
        {"compute_stuck", &read.compute_stuck, nullptr},
        {"stuck_ms", nullptr, &read.stuck_ms},
        {"disk_fail", &read.disk_fail, nullptr},
        {"disk_fails", &read.disk_fails, nullptr},
        {"disk_stall", &read.disk_stall, nullptr},
        {"pages", &read.pages, nullptr},
        {"free_ms", nullptr, &read.free_ms},
        {"other_mb", nullptr, &read.other_mb},
        {"other_from", &read.other_from, nullptr},
        {"other_ms", nullptr, &read.other_ms},
        {"unpinned", nullptr, &read.unpinned},
        {"unit_kb", nullptr, &read.unit_kb},
    };
    std::string rest = script != nullptr ? script : "";
    while (!rest.empty()) {
        const size_t comma = rest.find(',');
        const std::string item = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const size_t equals = item.find('=');
        const std::string digits = equals == std::string::npos ? "" : item.substr(equals + 1);
        if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) {
            return false;
        }
        const unsigned long value = std::strtoul(digits.c_str(), nullptr, 10);
        const auto key = std::find_if(std::begin(keys), std::end(keys),
                                      [&](const auto &k) { return item.compare(0, equals, k.name) == 0; });
        if (key == std::end(keys)) {
            return false;
        }
        if (key->wide != nullptr) {
            *key->wide = value;
        } else {
            *key->narrow = static_cast<uint32_t>(value);
        }
    }
    faults = read;
    return true;
}

bool fs_emulated_config_from_env(fs_emulated_config &config) {
    return fs_emulated_read_faults(std::getenv("FRAMESHARD_FAULTS"), config.faults);
}

ggml_backend_dev_t fs_emulated_device(const fs_emulated_config &config) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) {
        return nullptr;
    }
    auto *d = new (std::nothrow) Emulated(config);
    if (d == nullptr) {
        return nullptr;
    }
    d->cpu = cpu;
    d->set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads"));
    d->reg = {GGML_BACKEND_API_VERSION, kReg, d};
    d->device = {kDevice, &d->reg, d};
    d->buft = {kBufferType, &d->device, d};
    d->pinned_buft = {ggml_backend_cpu_buffer_type()->iface, &d->device, d};
    d->pinned_buft.iface.alloc_buffer = pinned_buft_alloc;
    return &d->device;
}

void fs_emulated_free(ggml_backend_dev_t device) { delete &device_of(device); }

bool fs_emulated_refuses_pages(ggml_backend_dev_t device) {
    Emulated &d = device_of(device);
    const uint64_t number = d.n_pages.fetch_add(1) + 1, first = d.config.faults.pages;
    return first > 0 && number >= first && number < first + 8;
}

size_t fs_emulated_vram_unit(ggml_backend_dev_t device) {
    return std::max<size_t>(1, (size_t)device_of(device).config.faults.unit_kb * 1024);
}

fs_emulated_stats fs_emulated_get_stats(ggml_backend_dev_t device) {
    Emulated &d = device_of(device);
    fs_emulated_stats s{};
    {
        std::lock_guard<std::mutex> lock(d.ledger);
        s.vram_bytes = d.config.vram_bytes;
        s.used_bytes = d.used;
        s.peak_bytes = d.peak;
        s.allocations = d.n_allocations;
    }
    s.computes = d.n_computes.load();
    s.events = d.n_events.load();
    d.h2d.read(s.h2d_bytes, s.h2d_busy_s);
    d.d2h.read(s.d2h_bytes, s.d2h_busy_s);
    s.lost = d.lost.load();
    return s;
}

void fs_emulated_reset_peak(ggml_backend_dev_t device) {
    Emulated &d = device_of(device);
    std::lock_guard<std::mutex> lock(d.ledger);
    d.peak = d.used;
}
