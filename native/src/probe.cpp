// Measures this machine: copies, host memory, and products of the model's shape on both processors.
#include "device.h"

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

// A product of a rows x cols weight matrix with n columns, in memory of one buffer type.
struct Product {
    ggml_context *ctx = nullptr;
    ggml_cgraph *graph = nullptr;
    ggml_tensor *w = nullptr, *x = nullptr, *y = nullptr;
    InnerBuffer memory;

    Product(ggml_backend_buffer_type_t buft, ggml_type type, int64_t rows, int64_t cols, int64_t n) {
        ggml_init_params params = {};
        params.mem_size = 8 * ggml_tensor_overhead() + ggml_graph_overhead();
        params.no_alloc = true;
        ctx = ggml_init(params);
        w = ggml_new_tensor_2d(ctx, type, cols, rows);
        x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, cols, n);
        y = ggml_mul_mat(ctx, w, x);
        graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, y);
        memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
        if (!memory) {
            return;
        }
        // Quantised from small random numbers: zeros can run faster than real data.
        std::vector<float> values((size_t)std::max(rows, n) * cols);
        uint32_t state = 1;
        for (float &v : values) {
            state = state * 1664525u + 1013904223u;
            v = ((float)(state >> 8) / 16777216.0f - 0.5f) * 0.1f;
        }
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
        std::vector<uint8_t> bytes(ggml_nbytes(w));
        const bool plain = type == GGML_TYPE_F32;
        if (plain) {
            memcpy(bytes.data(), values.data(), bytes.size());
        } else if (ggml_quantize_requires_imatrix(type)) {
            memset(bytes.data(), 0x11, bytes.size()); // such types cannot be quantised without one; any bits will do
        } else {
            ggml_quantize_chunk(type, values.data(), bytes.data(), 0, rows, cols, nullptr);
        }
        ggml_backend_tensor_set(w, bytes.data(), 0, bytes.size());
    }
    ~Product() {
        memory.reset();
        ggml_free(ctx);
    }
    bool ok() const { return memory != nullptr; }
};

static double seconds_of(ggml_backend_t backend, Product &p, double budget_s) {
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
    const double each = seconds_max / 9;
    constexpr size_t piece = (size_t)4 << 20;
    constexpr int n_pieces = 8;
    ggml_backend_buffer_type_t vram = ggml_backend_dev_buffer_type(d.inner);
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(d.inner);
    ggml_backend_buffer_type_t ram = ggml_backend_cpu_buffer_type();

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

    const double weight_bytes = (double)ggml_row_size((ggml_type)type, cols) * (double)rows;
    const double flops = 2.0 * (double)rows * (double)cols * 256;
    fsd_status status = FSD_OK;
    auto measure = [&](ggml_backend_t backend, ggml_backend_buffer_type_t buft, double &gemv, double &gemm) {
        Product one(buft, (ggml_type)type, rows, cols, 1);
        Product many(buft, (ggml_type)type, rows, cols, 256);
        if (!one.ok() || !many.ok()) {
            status = FSD_OUT_OF_MEMORY;
            return;
        }
        gemv = weight_bytes / seconds_of(backend, one, each);
        gemm = flops / seconds_of(backend, many, each);
    };
    measure(d.cpu, ram, result->cpu_gemv, result->cpu_gemm);
    measure(d.compute, vram, result->gpu_gemv, result->gpu_gemm);

    // A hand-off: activations to the host and back around an empty CPU segment.
    InnerBuffer activations(ggml_backend_buft_alloc_buffer(vram, 8192));
    if (activations) {
        ggml_tensor t = raw_tensor(activations.get(), ggml_backend_buffer_get_base(activations.get()), 8192);
        std::vector<char> on_host(8192);
        result->handoff_s = timed(each, [&] {
            ggml_backend_synchronize(d.compute);
            ggml_backend_tensor_get(&t, on_host.data(), 0, 8192);
            ggml_backend_tensor_set(&t, on_host.data(), 0, 8192);
        });
    }
    return status;
}
