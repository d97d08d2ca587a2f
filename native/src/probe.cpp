// Measures this machine: copies, host memory, and products of the model's shape on both processors.
#include "device.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

namespace fsd {

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Median seconds of one call, repeated for about `budget_s`.
static double timed(double budget_s, const std::function<void()> &call) {
    call(); // warm-up: first use allocates and pages in
    std::vector<double> runs;
    const double end = now() + budget_s;
    while (runs.size() < 3 || (now() < end && runs.size() < 200)) {
        const double start = now();
        call();
        runs.push_back(now() - start);
    }
    std::sort(runs.begin(), runs.end());
    return runs[runs.size() / 2];
}

// Decoding reads weights that no cache holds, so the products below go through at least this many bytes of them.
static constexpr size_t kBeyondCaches = (size_t)512 << 20;

// Products of rows x cols weight matrices with n columns each, in memory of one buffer type: as many matrices as make up
// `total` bytes, at least one.
struct Products {
    Device *ledger = nullptr;
    ggml_context *ctx = nullptr;
    ggml_cgraph *graph = nullptr;
    InnerBuffer memory;
    size_t weight_bytes = 0;
    int count = 0;

    // `device`, if given, has the memory in its ledger.
    Products(Device *device, ggml_type type, int64_t rows, int64_t cols, int64_t n, size_t total) : ledger(device) {
        const size_t each = ggml_row_size(type, cols) * (size_t)rows;
        count = (int)std::min<size_t>(std::max<size_t>(total / each, 1), 4096);
        weight_bytes = each * count;
        ggml_init_params params = {};
        params.mem_size = (2 * count + 8) * ggml_tensor_overhead() + ggml_graph_overhead_custom(2 * count + 8, false);
        params.no_alloc = true;
        ctx = ggml_init(params);
        ggml_tensor *x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, cols, n);
        graph = ggml_new_graph_custom(ctx, 2 * count + 8, false);
        std::vector<ggml_tensor *> weights;
        for (int i = 0; i < count; i++) {
            weights.push_back(ggml_new_tensor_2d(ctx, type, cols, rows));
            ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weights.back(), x));
        }
        ggml_backend_buffer_type_t buft =
            ledger ? ggml_backend_dev_buffer_type(ledger->inner) : ggml_backend_cpu_buffer_type();
        size_t size = kAlign;
        for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            size += align_up(ggml_backend_buft_get_alloc_size(buft, t));
        }
        memory =
            ledger ? ledger->allocate(Use::scratch, size) : InnerBuffer(ggml_backend_buft_alloc_buffer(buft, size));
        if (!memory) {
            return;
        }
        ggml_tallocr place = ggml_tallocr_new(memory.get());
        for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            ggml_tallocr_alloc(&place, t);
        }
        // Quantised from small random numbers: zeros can run faster than real data.
        std::vector<float> values((size_t)std::max(rows, n) * cols);
        uint32_t state = 1;
        for (float &v : values) {
            state = state * 1664525u + 1013904223u;
            v = ((float)(state >> 8) / 16777216.0f - 0.5f) * 0.1f;
        }
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
        std::vector<uint8_t> bytes(each);
        if (type == GGML_TYPE_F32) {
            memcpy(bytes.data(), values.data(), bytes.size());
        } else if (ggml_quantize_requires_imatrix(type)) {
            memset(bytes.data(), 0x11, bytes.size()); // such types cannot be quantised without one; any bits will do
        } else {
            ggml_quantize_chunk(type, values.data(), bytes.data(), 0, rows, cols, nullptr);
        }
        for (ggml_tensor *w : weights) {
            ggml_backend_tensor_set(w, bytes.data(), 0, bytes.size());
        }
    }
    ~Products() {
        if (ledger) {
            ledger->release(Use::scratch, memory);
        }
        memory.reset();
        ggml_free(ctx);
    }
    bool ok() const { return memory != nullptr; }
};

static double seconds_of(ggml_backend_t backend, Products &p, double budget_s) {
    return timed(budget_s, [&] { ggml_backend_graph_compute(backend, p.graph); });
}

static double read_dram(uint32_t n_threads, double budget_s) {
    const size_t each = (size_t)64 << 20;
    std::vector<std::vector<uint64_t>> blocks(n_threads);
    for (auto &b : blocks) {
        b.assign(each / 8, 1);
    }
    std::vector<uint64_t> sums(n_threads);
    const double t = timed(budget_s, [&] {
        std::vector<std::thread> threads;
        for (uint32_t i = 0; i < n_threads; i++) {
            threads.emplace_back([&, i] {
                uint64_t sum[4] = {};
                for (size_t k = 0; k + 4 <= blocks[i].size(); k += 4) {
                    for (int j = 0; j < 4; j++) {
                        sum[j] += blocks[i][k + j];
                    }
                }
                sums[i] = sum[0] + sum[1] + sum[2] + sum[3];
            });
        }
        for (auto &th : threads) {
            th.join();
        }
    });
    return (double)(each * n_threads) / t;
}

} // namespace fsd

using namespace fsd;

extern "C" fsd_status fsd_probe(int type, int64_t rows, int64_t cols, double seconds_max, fsd_probe_result *result) {
    Device &d = device();
    if (!result || result->struct_size != sizeof(fsd_probe_result) || type < 0 || type >= GGML_TYPE_COUNT ||
        rows <= 0 || cols <= 0 || cols % ggml_blck_size((ggml_type)type) != 0 || !(seconds_max > 0)) {
        return FSD_BAD_ARGUMENT;
    }
    if (!d.configured.load()) {
        return FSD_BAD_STATE;
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    d.synchronize();
    const double each = seconds_max / 10;
    // A small budget is measured with small matrices: rates are per byte.
    const uint64_t held = d.used(), limit = d.budget.load();
    const size_t room = limit > held ? (size_t)std::min<uint64_t>(limit - held, SIZE_MAX) / 2 : 0;
    const size_t piece = std::min<size_t>((size_t)4 << 20, room / 8 / kAlign * kAlign);
    constexpr int n_pieces = 8;
    if (piece == 0) {
        return FSD_OUT_OF_MEMORY;
    }
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(d.inner);

    InnerBuffer target = d.allocate(Use::scratch, piece * n_pieces);
    if (!target) {
        return FSD_OUT_OF_MEMORY;
    }
    auto copies = [&](const char *from) {
        ggml_tensor t = raw_tensor(target.get(), ggml_backend_buffer_get_base(target.get()), piece * n_pieces);
        const double s = timed(each, [&] {
            for (int i = 0; i < n_pieces; i++) {
                ggml_backend_tensor_set_async(d.copy, &t, from + i * piece, i * piece, piece);
            }
            ggml_backend_synchronize(d.copy);
        });
        return (double)(piece * n_pieces) / s;
    };
    std::vector<char> pageable(piece * n_pieces, 1);
    result->h2d_pageable = copies(pageable.data());
    result->h2d_pinned = result->h2d_pageable;
    if (host) {
        InnerBuffer pinned(ggml_backend_buft_alloc_buffer(host, piece * n_pieces));
        if (pinned) {
            result->h2d_pinned = copies((const char *)ggml_backend_buffer_get_base(pinned.get()));
        }
    }
    {
        ggml_tensor t = raw_tensor(target.get(), ggml_backend_buffer_get_base(target.get()), piece * n_pieces);
        const double s = timed(each, [&] { ggml_backend_tensor_get(&t, pageable.data(), 0, piece * n_pieces); });
        result->d2h = (double)(piece * n_pieces) / s;
    }
    d.release(Use::scratch, target);
    result->dram_read = read_dram(d.n_threads, each);

    fsd_status status = FSD_OK;
    auto measure = [&](ggml_backend_t backend, Device *ledger, size_t most, double &gemv, double &gemm) {
        const size_t row = ggml_row_size((ggml_type)type, cols);
        const int64_t fit = std::min<int64_t>(rows, std::max<int64_t>(32, (int64_t)(most / 2 / row)));
        {
            Products one(ledger, (ggml_type)type, fit, cols, 1, std::min(kBeyondCaches, most / 2));
            if (!one.ok()) {
                status = FSD_OUT_OF_MEMORY;
                return;
            }
            gemv = (double)one.weight_bytes / seconds_of(backend, one, each);
        }
        Products many(ledger, (ggml_type)type, fit, cols, 256, 0);
        if (!many.ok()) {
            status = FSD_OUT_OF_MEMORY;
            return;
        }
        gemm = 2.0 * (double)fit * (double)cols * 256 / seconds_of(backend, many, each);
    };
    measure(d.cpu, nullptr, SIZE_MAX, result->cpu_gemv, result->cpu_gemm);
    measure(d.compute, &d, room, result->gpu_gemv, result->gpu_gemm);

    // A hand-off: the end of a GPU segment, its activations to the host, and what the CPU made of them back.
    Products tiny(&d, GGML_TYPE_F32, 2048, 32, 1, 0);
    if (tiny.ok()) {
        std::vector<char> on_host(8192);
        ggml_tensor *y = ggml_graph_node(tiny.graph, -1);
        const double with = timed(each, [&] {
            ggml_backend_graph_compute_async(d.compute, tiny.graph);
            ggml_backend_synchronize(d.compute);
            ggml_backend_tensor_get(y, on_host.data(), 0, on_host.size());
            ggml_backend_tensor_set(y, on_host.data(), 0, on_host.size());
        });
        const double without = timed(each, [&] {
            for (int i = 0; i < 16; i++) {
                ggml_backend_graph_compute_async(d.compute, tiny.graph);
            }
            ggml_backend_synchronize(d.compute);
        });
        result->handoff_s = std::max(0.0, with - without / 16);
    }
    return status;
}
