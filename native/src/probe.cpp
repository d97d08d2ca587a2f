// Measures the machine: copies, host memory, and products and attention of given shapes on the inner device and the CPU.
#include "copy_thread.h"
#include "device.h"
#include "last_error.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

namespace fsd {

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether the measurement must end: something else wants the device.
static bool stopped() { return device().probe_stopped.load() || device().requests.pending(); }

// Median seconds of a call, repeated for about `budget_s`, at least once. Of no meaning once the measurement is stopped.
static double timed(double budget_s, const std::function<void()> &call) {
    if (stopped()) {
        return 1.0;
    }
    call(); // warm-up: the first call allocates memory and faults pages in
    std::vector<double> runs;
    const double start_s = now();
    while (runs.empty() ||
           (!stopped() && runs.size() < 200 && now() - start_s < (runs.size() < 3 ? 3 : 1) * budget_s)) {
        const double start = now();
        call();
        runs.push_back(now() - start);
    }
    std::sort(runs.begin(), runs.end());
    return runs[runs.size() / 2];
}

static constexpr size_t kCopyTarget = (size_t)64 << 20;
static constexpr int64_t kRandomRows = 64; // repeated to fill a matrix

// How the tokens of a product choose experts. Each expert's matrix is multiplied by the columns of the tokens that chose it.
struct Choice {
    int64_t used = 0;    // by each token; 0: the weights are no experts
    int64_t experts = 0; // to choose from
    bool alike = false;  // all are chosen equally often; otherwise all tokens choose the same
    int64_t tokens(int64_t n) const { return alike ? n * experts / used : n; } // if each chosen expert gets n columns
};

// Products of weight matrices of rows x cols with n columns each, queued together: as many matrices as make up `total` bytes,
// at least one. For experts these are the rows of one of them, and the columns of each that is chosen.
struct Products {
    // A device with ordered graphs computes two products at once and then waits for both, as results in the same place need
    // it. In a model the queries, keys and values are computed together, and so are the gate and the up projection.
    static constexpr int kPlaces = 2;
    Device *ledger = nullptr;
    ggml_context *ctx = nullptr;
    ggml_cgraph *graph = nullptr;
    InnerBuffer memory;
    ColumnProducts columns; // as the CPU computes such products in a graph of a model
    size_t weight_bytes = 0;
    double flops = 0;
    int count = 0;

    // On the inner device, counted in its ledger, or on the CPU if `device` is null.
    Products(Device *device, ggml_type type, int64_t rows, int64_t cols, int64_t n, size_t total, Choice choice = {})
        : ledger(device), columns(*fsd::device().kernels) {
        const int64_t n_matrices = std::max<int64_t>(choice.experts, 1), n_tokens = choice.used ? choice.tokens(n) : n;
        const size_t each = ggml_row_size(type, cols) * (size_t)(rows * n_matrices);
        count = (int)std::min<size_t>(std::max<size_t>(total / each, 1), 4096);
        weight_bytes = each * count;
        flops = 2.0 * (double)rows * (double)cols * (double)(n_tokens * std::max<int64_t>(choice.used, 1)) * count;
        ggml_init_params params = {};
        params.mem_size = (2 * count + 8) * ggml_tensor_overhead() + ggml_graph_overhead_custom(2 * count + 8, false);
        params.no_alloc = true;
        ctx = ggml_init(params);
        ggml_tensor *x = choice.used ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, cols, 1, n_tokens)
                                     : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, cols, n_tokens);
        ggml_tensor *chosen = choice.used ? ggml_new_tensor_2d(ctx, GGML_TYPE_I32, choice.used, n_tokens) : nullptr;
        graph = ggml_new_graph_custom(ctx, 2 * count + 8, false);
        std::vector<ggml_tensor *> weights;
        for (int i = 0; i < count; i++) {
            weights.push_back(ggml_new_tensor_3d(ctx, type, cols, rows, n_matrices));
            ggml_build_forward_expand(graph, chosen ? ggml_mul_mat_id(ctx, weights.back(), x, chosen)
                                                    : ggml_mul_mat(ctx, weights.back(), x));
        }
        ggml_backend_buffer_type_t buft = ledger ? ledger->inner.buffer_type() : ggml_backend_cpu_buffer_type();
        if (chosen && !ggml_backend_supports_op(ledger->inner.compute, graph->nodes[0])) {
            return;
        }
        size_t size = kAlign;
        each_placed([&](ggml_tensor *t) { size += align_up(ggml_backend_buft_get_alloc_size(buft, t)); });
        memory = ledger ? ledger->ledger.allocate(Use::scratch, size)
                        : InnerBuffer(ggml_backend_buft_alloc_buffer(buft, size));
        if (!memory || stopped()) {
            return;
        }
        ggml_tallocr place = ggml_tallocr_new(memory.get());
        each_placed([&](ggml_tensor *t) { ggml_tallocr_alloc(&place, t); });
        for (int i = kPlaces; i < graph->n_nodes; i++) {
            ggml_backend_tensor_alloc(memory.get(), graph->nodes[i], graph->nodes[i % kPlaces]->data);
        }
        if (!ledger) {
            for (int i = 0; i < graph->n_nodes; i++) {
                graph->nodes[i] = columns.of(graph->nodes[i]);
            }
        }
        // Quantised from small random numbers, because zeros may compute faster than real data.
        const int64_t n_rows = std::min(rows, kRandomRows);
        std::vector<float> values((size_t)std::max(n_rows, n_tokens) * cols);
        uint32_t state = 1;
        for (float &v : values) {
            state = state * 1664525u + 1013904223u;
            v = ((float)(state >> 8) / 16777216.0f - 0.5f) * 0.1f;
        }
        set(x, values.data());
        if (chosen) {
            std::vector<int32_t> experts((size_t)ggml_nelements(chosen));
            for (size_t i = 0; i < experts.size(); i++) {
                experts[i] = (int32_t)(i % (size_t)(choice.alike ? choice.experts : choice.used));
            }
            set(chosen, experts.data());
        }
        std::vector<uint8_t> bytes(each);
        const size_t random = ggml_row_size(type, cols) * (size_t)n_rows;
        if (type == GGML_TYPE_F32) {
            memcpy(bytes.data(), values.data(), random);
        } else if (ggml_quantize_requires_imatrix(type)) {
            memset(bytes.data(), 0x11, random); // such types cannot be quantised without a matrix; any bits will do
        } else {
            ggml_quantize_chunk(type, values.data(), bytes.data(), 0, n_rows, cols, nullptr);
        }
        for (size_t done = random; done < each; done += random) {
            memcpy(bytes.data() + done, bytes.data(), std::min(random, each - done));
        }
        for (ggml_tensor *w : weights) {
            if (!stopped()) {
                set(w, bytes.data());
            }
        }
    }
    ~Products() {
        if (ledger) {
            ledger->ledger.release(Use::scratch, memory);
        }
        memory.reset();
        ggml_free(ctx);
    }
    Products(const Products &) = delete;
    bool ok() const { return memory != nullptr; }
    // Of all results, which nobody reads, only the first kPlaces have places of their own.
    void each_placed(const std::function<void(ggml_tensor *)> &use) {
        for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (t->op == GGML_OP_NONE) {
                use(t);
            }
        }
        std::for_each_n(graph->nodes, std::min(kPlaces, graph->n_nodes), use);
    }
    void set(ggml_tensor *t, const void *data) {
        if (ledger) {
            ledger->inner.upload(nullptr, memory.get(), t->data, data, ggml_nbytes(t));
        } else {
            memcpy(t->data, data, ggml_nbytes(t));
        }
    }
};

static double seconds_on_cpu(Products &p, double budget_s) {
    return timed(budget_s, [&] { ggml_backend_graph_compute(device().cpu, p.graph); });
}

// The clock of an idle GPU is low. So that rates are those of a busy one, it computes for a while before it is measured.
static double seconds_on_device(Device &d, ggml_cgraph *graph, double budget_s) {
    static double busy_s = 0; // when the last measurement ended
    constexpr double kKeepsClockS = 0.2;
    const auto compute = [&] { ggml_backend_graph_compute(d.inner.compute, graph); };
    if (!stopped()) {
        compute(); // the driver may compile its kernels first, for seconds in which the GPU is idle
    }
    const double start_s = now(), idle_s = start_s - busy_s;
    while (idle_s > kKeepsClockS && !stopped() && now() - start_s < d.inner.quirks.warm_up_s) {
        compute();
    }
    const double seconds = timed(budget_s, compute);
    busy_s = now();
    return seconds;
}

// Host memory, of which each thread reads a part of its own.
struct HostMemory {
    static constexpr size_t kPart = (size_t)64 << 20;
    // More than 16 threads read smaller parts, so that this memory does not grow with their number.
    static constexpr size_t kMost = (size_t)1 << 30;
    std::vector<uint64_t> values;

    explicit HostMemory(uint32_t n_threads) {
        const size_t n_values = std::min(kPart * n_threads, kMost) / 8;
        values.reserve(n_values);
        while (values.size() < n_values && !stopped()) {
            values.resize(values.size() + kPart / 8, 1);
        }
    }
    double rate(uint32_t n_threads, double budget_s) {
        const size_t n_each = std::min(kPart / 8, values.size() / n_threads) / 4 * 4;
        std::vector<uint64_t> sums(n_threads);
        const double t = timed(budget_s, [&] {
            std::vector<std::thread> threads;
            for (uint32_t i = 0; i < n_threads; i++) {
                threads.emplace_back([&, i] {
                    const uint64_t *part = values.data() + i * n_each;
                    uint64_t sum[4] = {};
                    for (size_t k = 0; k < n_each; k += 4) {
                        for (int j = 0; j < 4; j++) {
                            sum[j] += part[k + j];
                        }
                    }
                    sums[i] = sum[0] + sum[1] + sum[2] + sum[3];
                });
            }
            for (auto &th : threads) {
                th.join();
            }
        });
        return (double)(8 * n_each * n_threads) / t;
    }
};

// Half of the budget that is unused, or that weights and the ring's surplus would give back, for measurements on the device.
static size_t room_of(Device &d) {
    const size_t ring = std::min(d.ledger.used(Use::ring), (uint64_t)d.weights.layout.min_ring);
    const uint64_t held = d.ledger.fixed() + ring, limit = d.ledger.budget();
    return limit > held ? (size_t)std::min<uint64_t>(limit - held, SIZE_MAX) / 2 : 0;
}

// Host memory of a probe's copies: pinned as the device's own host memory, pageable, or copied the way weights are.
enum class Source { pinned, pageable, weights };

// Copies between host and device. Each starts at another place in host memory, so that no processor cache serves it.
struct Copies {
    Device &d;
    InnerBuffer target, pinned;
    std::vector<char> pageable;
    char *as_weights = nullptr;         // memory that takes the same path as weights
    std::unique_ptr<CopyThread> thread; // which copies it, where the ring has one
    size_t target_bytes = 0, source_bytes = 0, at = 0;

    Copies(Device &device, size_t most_source_bytes) : d(device) {
        target_bytes = std::min(kCopyTarget, room_of(d) / 4 / kAlign * kAlign);
        source_bytes = target_bytes * (most_source_bytes / kCopyTarget);
        if (target_bytes == 0) {
            return;
        }
        target = d.ledger.allocate(Use::scratch, target_bytes);
        pinned = allocate_of_host_type(d.inner.dev, source_bytes);
        if (pinned) {
            memset(ggml_backend_buffer_get_base(pinned.get()), 1, source_bytes);
        }
    }
    ~Copies() {
        thread.reset();
        if (as_weights) {
            d.inner.detach(as_weights);
            release_addresses(as_weights, source_bytes);
        }
        d.ledger.release(Use::scratch, target);
    }
    Copies(const Copies &) = delete;
    bool ok() const { return target != nullptr; }
    // Whether copies of weights are neither like those of pinned memory nor like those of other memory.
    bool weights_differ() const { return d.weights.path == HostPath::imported || d.weights.path == HostPath::staged; }
    char *host(Source source) {
        if (source == Source::weights && weights_differ()) {
            if (!as_weights && (as_weights = reserve_addresses(source_bytes))) {
                memset(as_weights, 1, source_bytes);
                d.inner.attach(as_weights, source_bytes, d.weights.path == HostPath::imported);
            }
            if (as_weights) {
                return as_weights;
            }
        }
        if (source != Source::pageable && pinned) {
            return (char *)ggml_backend_buffer_get_base(pinned.get());
        }
        pageable.resize(source_bytes, 1);
        return pageable.data();
    }
    // Frees the host memory that copies of weights do not use.
    void keep_weights_only() {
        const char *kept = host(Source::weights);
        if (kept != pageable.data()) {
            std::vector<char>().swap(pageable);
        }
        if (pinned && kept != ggml_backend_buffer_get_base(pinned.get())) {
            pinned.reset();
        }
    }

    // Bytes per second of copies of `copy_bytes`.
    double rate(bool to_device, Source source, size_t copy_bytes, double budget_s) {
        copy_bytes = std::min(copy_bytes, target_bytes);
        char *from = host(source);
        return (double)target_bytes / timed(budget_s, [&] { once(to_device, from, copy_bytes); });
    }
    void once(bool to_device, char *from, size_t copy_bytes) {
        const bool in_thread = from == as_weights && d.inner.quirks.one_queue && d.weights.path == HostPath::imported;
        if (in_thread && !thread) {
            thread = std::make_unique<CopyThread>(d.inner);
        }
        char *base = (char *)ggml_backend_buffer_get_base(target.get());
        ggml_tensor t = raw_tensor(target.get(), base, target_bytes);
        uint64_t queued = 0;
        for (size_t done = 0; done < target_bytes; done += copy_bytes) {
            const size_t n = std::min(copy_bytes, target_bytes - done);
            if (in_thread) {
                queued = thread->queue({raw_tensor(target.get(), base + done, n), from + at + done, {}});
            } else if (to_device) {
                d.inner.upload(d.inner.copy, target.get(), base + done, from + at + done, n);
            } else {
                ggml_backend_tensor_get_async(d.inner.copy, &t, from + at + done, done, n);
            }
        }
        if (in_thread) {
            thread->wait(queued);
        }
        ggml_backend_synchronize(d.inner.copy);
        at = (at + target_bytes) % source_bytes;
    }
};

// Runs copies in a thread of its own while it exists.
struct Copying {
    Copies &copies;
    size_t copy_bytes;
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> bytes{0};
    double start = 0;
    std::thread thread;

    Copying(Copies &c, size_t most_bytes) : copies(c), copy_bytes(std::min(most_bytes, c.target_bytes)) {
        char *from = copies.host(Source::weights);
        start = now();
        thread = std::thread([this, from] {
            while (!stop.load()) {
                copies.once(true, from, copy_bytes);
                bytes += copies.target_bytes;
            }
        });
    }
    ~Copying() {
        stop.store(true);
        thread.join();
    }
    double rate() const { return (double)bytes.load() / (now() - start); }
};

// Seconds that one more small kernel takes, from graphs of few and of many. Each runs beside another one and waits for the
// two before them, as in a model's graph that the device has ordered.
static double seconds_per_kernel(Device &d, double budget_s) {
    constexpr int64_t kValues = 2048;
    constexpr int kFew = 1, kMany = 32;
    constexpr size_t kBytes = kValues * sizeof(float);
    InnerBuffer memory = d.ledger.allocate(Use::scratch, 2 * kBytes + kAlign);
    if (!memory) {
        return 0;
    }
    ggml_backend_buffer_clear(memory.get(), 0);
    const auto seconds = [&](int n_pairs) {
        ggml_init_params params = {};
        params.mem_size = (2 * n_pairs + 2) * ggml_tensor_overhead() + ggml_graph_overhead();
        params.no_alloc = true;
        ggml_context *ctx = ggml_init(params);
        ggml_cgraph *graph = ggml_new_graph(ctx);
        ggml_tensor *pair[2];
        for (int i = 0; i < 2; i++) {
            pair[i] = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, kValues);
            ggml_backend_tensor_alloc(memory.get(), pair[i],
                                      (char *)ggml_backend_buffer_get_base(memory.get()) + i * kBytes);
        }
        for (int i = 0; i < 2 * n_pairs; i++) {
            ggml_tensor *&y = pair[i % 2];
            y = ggml_sqr_inplace(ctx, y);
            ggml_backend_view_init(y);
            ggml_build_forward_expand(graph, y);
        }
        const double s = seconds_on_device(d, graph, budget_s);
        ggml_free(ctx);
        return s;
    };
    const double few = seconds(kFew), many = seconds(kMany);
    d.ledger.release(Use::scratch, memory);
    return std::max(0.0, (many - few) / (2 * (kMany - kFew)));
}

// Makes products of weights of a type and shape with n columns. Rates do not depend on the number of rows, so of a matrix
// that is too large, or too slow, only some are measured. `total`: bytes of weights at most. `most`: bytes of memory.
// `most_flops`: of all products together.
static Products products_of(Device *ledger, ggml_type type, int64_t rows, int64_t cols, uint32_t n, size_t total,
                            size_t most, double most_flops) {
    const size_t row = ggml_row_size(type, cols);
    const double most_rows = most_flops / 2 / (double)cols / n;
    const double fit = std::min((double)most / 2 / (double)(row + 4 * Products::kPlaces * n), most_rows);
    const int64_t n_rows = std::min<int64_t>(rows, std::max<int64_t>(32, (int64_t)fit / 32 * 32));
    return Products(ledger, type, n_rows, cols, n, std::min({total, most / 2, (size_t)(most_rows * (double)row)}));
}

// The same for products of a layer's experts on the device, with n columns for each expert that is chosen. Of many experts only
// some are measured, if there is no memory for all.
static Products products_of_experts(Device &d, ggml_type type, int64_t rows, int64_t cols, uint32_t n, Choice choice,
                                    double most_flops) {
    const double most = (double)room_of(d) / 2, most_rows = most_flops / 2 / (double)cols / n;
    const auto fit = (int64_t)(most_rows / (double)choice.used);
    const int64_t n_rows = std::min(rows, std::max<int64_t>(32, fit / 32 * 32));
    const double expert = (double)n_rows * (double)ggml_row_size(type, cols),
                 results = 4.0 * Products::kPlaces * (double)n_rows * n;
    double n_expert = std::min((double)choice.experts, (most - results * (double)choice.used) / expert);
    if (choice.alike) {
        n_expert = std::min({(double)choice.experts, most / (expert + results), most_rows / (double)n_rows});
    }
    choice.experts = std::max((int64_t)n_expert / choice.used, (int64_t)1) * choice.used;
    const double chosen = (double)(choice.alike ? choice.experts : choice.used);
    const double n_products = std::min(most / expert / (double)choice.experts, most_rows / (double)n_rows / chosen);
    const double total = std::max(n_products, 1.0) * expert * (double)choice.experts;
    return Products(&d, type, n_rows, cols, n, std::min((size_t)total, d.inner.quirks.probe_bytes), choice);
}

static constexpr double kCpuFlops = 4e9; // of one measured call at most
// So long may a call on the device take: much longer than the driver needs to begin work and to tell its end.
static constexpr double kCallSeconds = 0.01;
// The CPU's rates do not rise with more columns.
static constexpr uint32_t kMostCpuColumns = 512;
// So few columns for each expert are measured with all experts chosen equally often, more with few experts: a prompt's step
// of 1,024 tokens has 64 for each of 128 experts, or 1,024 for each of 8.
static constexpr uint32_t kMostColumnsAlike = 64;
// Rates of experts hardly rise with more columns, but the driver's pools would grow.
static constexpr uint32_t kMostColumnsOfExperts = 1024;
static constexpr size_t kLookBytes = (size_t)128 << 20;

static bool is_kind(int type, int64_t rows, int64_t cols) {
    return type >= 0 && type < GGML_TYPE_COUNT && rows > 0 && cols > 0 && cols % ggml_blck_size((ggml_type)type) == 0;
}

// Seconds of the attention of n_q queries over one of `count` KV caches. With several, no processor cache holds them.
static double attention_seconds(Device &d, ggml_type type, int64_t head_dim, int64_t n_head, int64_t n_head_kv,
                                int64_t n_kv, int64_t n_q, int count, double budget_s) {
    const int n_tensors = 5 * count + 8;
    ggml_init_params params = {};
    params.mem_size = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false);
    params.no_alloc = true;
    ggml_context *ctx = ggml_init(params);
    ggml_cgraph *graph = ggml_new_graph_custom(ctx, n_tensors, false);
    ggml_tensor *q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim, n_q, n_head);
    ggml_tensor *mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, n_q);
    bool supported = true;
    for (int i = 0; i < count; i++) {
        ggml_tensor *k = ggml_new_tensor_3d(ctx, type, head_dim, n_kv, n_head_kv);
        ggml_tensor *v = ggml_new_tensor_3d(ctx, type, head_dim, n_kv, n_head_kv);
        ggml_tensor *y = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f / std::sqrt((float)head_dim), 0.0f, 0.0f);
        supported = supported && ggml_backend_supports_op(d.inner.compute, y);
        ggml_build_forward_expand(graph, y);
    }
    double seconds = 0;
    ggml_backend_buffer_type_t buft = d.inner.buffer_type();
    size_t size = kAlign;
    for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        size += align_up(ggml_backend_buft_get_alloc_size(buft, t));
    }
    InnerBuffer memory = supported && size <= room_of(d) ? d.ledger.allocate(Use::scratch, size) : nullptr;
    if (memory) {
        ggml_backend_buffer_clear(memory.get(), 0);
        ggml_tallocr place = ggml_tallocr_new(memory.get());
        for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            ggml_tallocr_alloc(&place, t);
        }
        seconds = seconds_on_device(d, graph, budget_s) / count;
        d.ledger.release(Use::scratch, memory);
    }
    ggml_free(ctx);
    return seconds;
}

static fsd_status no_room() { return fail(FSD_OUT_OF_MEMORY, "the measurement finds no room for its data"); }

// The streams are closed then.
static fsd_status is_parked() { return fail(FSD_BAD_STATE, "a parked device measures nothing: call fsd_unpark first"); }

static fsd_status was_stopped() { return fail(FSD_STOPPED, "the measurement was stopped"); }

} // namespace fsd

using namespace fsd;

extern "C" fsd_status fsd_probe_machine(double seconds, fsd_machine_rates *r) {
    Device &d = device();
    if (!r || r->struct_size != sizeof(*r) || !(seconds > 0)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_probe_machine: struct_size or the time is wrong");
    }
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.parked) {
        return is_parked();
    }
    d.inner.synchronize();
    const double each = seconds / (5 * FSD_PROBE_PIECES + 2 * FSD_PROBE_THREADS + 4);
    {
        Copies copies(d, d.inner.quirks.probe_bytes);
        if (!copies.ok()) {
            return no_room();
        }
        for (int i = 0; i < FSD_PROBE_PIECES && !stopped(); i++) {
            const size_t copy_bytes = (size_t)256 << 10 << 2 * i;
            r->piece_bytes[i] = copy_bytes;
            r->h2d_pinned[i] = copies.rate(true, Source::pinned, copy_bytes, each);
            r->h2d[i] =
                copies.weights_differ() ? copies.rate(true, Source::weights, copy_bytes, each) : r->h2d_pinned[i];
            r->h2d_pageable[i] = copies.rate(true, Source::pageable, copy_bytes, each);
            r->d2h_pinned[i] = copies.rate(false, Source::pinned, copy_bytes, each);
            r->d2h_pageable[i] = copies.rate(false, Source::pageable, copy_bytes, each);
        }
        const uint32_t threads[FSD_PROBE_THREADS] = {1, std::max(1u, d.n_threads / 2), d.n_threads};
        if (stopped()) {
            return was_stopped();
        }
        copies.keep_weights_only(); // before the threads' memory is taken
        HostMemory memory(d.n_threads);
        for (int i = 0; i < FSD_PROBE_THREADS && !stopped(); i++) {
            r->threads[i] = threads[i];
            r->dram[i] = memory.rate(threads[i], each);
            Copying copying(copies, d.inner.copy_bytes);
            r->dram_beside_copies[i] = memory.rate(threads[i], each);
        }
    }
    // A hand-off: the end of a GPU segment, its activations to the CPU, and the CPU's results back.
    r->handoff_s = 0;
    Products tiny(&d, GGML_TYPE_F32, 2048, 32, 1, 0);
    if (tiny.ok()) {
        std::vector<char> on_host(8192);
        ggml_tensor *y = ggml_graph_node(tiny.graph, -1);
        const double with = timed(each, [&] {
            ggml_backend_graph_compute_async(d.inner.compute, tiny.graph);
            ggml_backend_synchronize(d.inner.compute);
            ggml_backend_tensor_get(y, on_host.data(), 0, on_host.size());
            d.inner.upload(nullptr, tiny.memory.get(), y->data, on_host.data(), on_host.size());
        });
        const double without = timed(each, [&] {
            for (int i = 0; i < 16; i++) {
                ggml_backend_graph_compute_async(d.inner.compute, tiny.graph);
            }
            ggml_backend_synchronize(d.inner.compute);
        });
        r->handoff_s = std::max(0.0, with - without / 16);
    }
    r->kernel_s = d.inner.quirks.records_kernels ? seconds_per_kernel(d, each) : 0;
    return stopped() ? was_stopped() : FSD_OK;
}

extern "C" fsd_status fsd_probe_product(int type, int64_t rows, int64_t cols, int64_t n_expert, int64_t n_used,
                                        double seconds, fsd_product_rates *r) {
    Device &d = device();
    if (!r || r->struct_size != sizeof(*r) || !is_kind(type, rows, cols) || n_used < 0 || n_expert < n_used ||
        (n_used > 0 && rows % n_used != 0) || !(seconds > 0)) {
        return fail(FSD_BAD_ARGUMENT,
                    "fsd_probe_product: the type has no such shape, or struct_size or the time is wrong");
    }
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.parked) {
        return is_parked();
    }
    d.inner.synchronize();
    const uint32_t batches[FSD_PROBE_BATCHES] = {1, 16, 64, 512, 2048};
    const double each = seconds / (2 * FSD_PROBE_BATCHES + 1);
    const Quirks &quirks = d.inner.quirks;
    double most_flops = quirks.probe_flops;
    for (int i = 0; i < FSD_PROBE_BATCHES && !stopped(); i++) {
        const uint32_t n = r->tokens[i] = batches[i];
        if (n > kMostCpuColumns) {
            r->cpu_flops[i] = r->cpu_flops[i - 1];
        } else {
            Products on_cpu =
                products_of(nullptr, (ggml_type)type, rows, cols, n, quirks.probe_bytes / n, SIZE_MAX, kCpuFlops);
            r->cpu_flops[i] = on_cpu.ok() ? on_cpu.flops / seconds_on_cpu(on_cpu, each) : 0;
            if (n == 1) {
                Copies copies(d, quirks.probe_bytes);
                if (!on_cpu.ok() || !copies.ok()) {
                    return no_room();
                }
                Copying copying(copies, d.inner.copy_bytes);
                r->cpu_beside_copies = (double)on_cpu.weight_bytes / seconds_on_cpu(on_cpu, each);
                r->h2d_beside_cpu = copying.rate();
            }
        }
        if (stopped()) {
            break;
        }
        const auto rate = [&](const Products &p) { return p.ok() ? p.flops / seconds_on_device(d, p.graph, each) : 0; };
        r->gpu_flops[i] = 0;
        if (n_used > 0 && n > 1) {
            const Choice choice = {n_used, n_expert, n <= kMostColumnsAlike};
            r->gpu_flops[i] = rate(products_of_experts(d, (ggml_type)type, rows / n_used, cols,
                                                       std::min(n, kMostColumnsOfExperts), choice, most_flops));
        }
        if (r->gpu_flops[i] == 0 && !stopped()) { // no experts, or there is no room for any
            r->gpu_flops[i] =
                rate(products_of(&d, (ggml_type)type, rows, cols, n, quirks.probe_bytes, room_of(d), most_flops));
        }
        if (r->gpu_flops[i] > 0) { // more columns take longer for each weight
            most_flops = std::min(quirks.probe_flops, kCallSeconds * r->gpu_flops[i]);
        }
    }
    if (stopped()) {
        return was_stopped();
    }
    return r->gpu_flops[0] > 0 ? FSD_OK : no_room();
}

extern "C" fsd_status fsd_probe_look(int type, int64_t rows, int64_t cols, fsd_look_rates *r) {
    Device &d = device();
    if (!r || r->struct_size != sizeof(*r) || !is_kind(type, rows, cols)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_probe_look: the type has no such shape, or struct_size is wrong");
    }
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.parked) {
        return is_parked();
    }
    d.inner.synchronize();
    constexpr double each = 0.01; // fast calls are made up to three times, slow ones once
    {
        Copies copies(d, kCopyTarget);
        if (!copies.ok()) {
            return no_room();
        }
        r->h2d = copies.rate(true, Source::weights, d.inner.copy_bytes, each);
    }
    const Quirks &quirks = d.inner.quirks;
    const size_t total = std::min(quirks.probe_bytes / 4, kLookBytes);
    const uint32_t batches[FSD_LOOK_BATCHES] = {1, 64, 512};
    for (int i = 0; i < FSD_LOOK_BATCHES; i++) {
        const uint32_t n = r->tokens[i] = batches[i];
        Products on_cpu = products_of(nullptr, (ggml_type)type, rows, cols, n, total, SIZE_MAX, kCpuFlops / 16);
        Products on_gpu = products_of(&d, (ggml_type)type, rows, cols, n, total, room_of(d), quirks.probe_flops / 16);
        if (!on_cpu.ok() || !on_gpu.ok()) {
            return no_room();
        }
        r->cpu_flops[i] = on_cpu.flops / seconds_on_cpu(on_cpu, each);
        r->gpu_flops[i] = on_gpu.flops / seconds_on_device(d, on_gpu.graph, each);
    }
    return stopped() ? was_stopped() : FSD_OK;
}

extern "C" fsd_status fsd_stop_probe(int on) {
    device().probe_stopped.store(on != 0);
    return FSD_OK;
}

extern "C" fsd_status fsd_probe_attention(int64_t head_dim, int64_t n_head, int64_t n_head_kv, int64_t n_kv,
                                          double seconds, fsd_attention_rates *r) {
    Device &d = device();
    if (!r || r->struct_size != sizeof(*r) || head_dim <= 0 || n_head_kv <= 0 || n_head % n_head_kv != 0 ||
        n_head <= 0 || n_kv <= 0 || n_kv % 256 != 0 || r->type < 0 || r->type >= GGML_TYPE_COUNT ||
        ggml_blck_size((ggml_type)r->type) == 0 || head_dim % ggml_blck_size((ggml_type)r->type) != 0 ||
        !(seconds > 0)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_probe_attention: the type has no such rows, or a number is wrong");
    }
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.parked) {
        return is_parked();
    }
    d.inner.synchronize();
    const ggml_type type = (ggml_type)r->type;
    const double bytes = 2.0 * (double)((size_t)(n_kv * n_head_kv) * ggml_row_size(type, head_dim));
    const int count = std::max(1, std::min(32, (int)((double)(128 << 20) / bytes)));
    const double one = attention_seconds(d, type, head_dim, n_head, n_head_kv, n_kv, 1, count, seconds / 2);
    const int64_t n_q = d.inner.quirks.probe_queries;
    const double many = attention_seconds(d, type, head_dim, n_head, n_head_kv, n_kv, n_q, 1, seconds / 2);
    r->kv_bytes = one > 0 ? bytes / one : 0;
    r->flops = many > 0 ? 4.0 * (double)(head_dim * n_head * n_q * n_kv) / many : 0;
    return stopped() ? was_stopped() : FSD_OK;
}
