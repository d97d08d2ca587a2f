// Tests of the emulated device through ggml's public API, as the shard device uses it.
#include "check.h"
#include "emulated.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

namespace {

using seconds = std::chrono::duration<double>;

double now() { return seconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Device {
    explicit Device(const fs_emulated_config &config = {}) : dev(fs_emulated_device(config)) { CHECK(dev != nullptr); }
    ~Device() { fs_emulated_free(dev); }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    ggml_backend_dev_t dev;
};

struct Backend {
    explicit Backend(ggml_backend_dev_t dev) : b(ggml_backend_dev_init(dev, nullptr)) { CHECK(b != nullptr); }
    ~Backend() { ggml_backend_free(b); }
    Backend(const Backend &) = delete;
    Backend &operator=(const Backend &) = delete;
    operator ggml_backend_t() const { return b; }

    ggml_backend_t b;
};

struct Event {
    explicit Event(ggml_backend_dev_t dev) : e(ggml_backend_event_new(dev)) { CHECK(e != nullptr); }
    ~Event() { ggml_backend_event_free(e); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    operator ggml_backend_event_t() const { return e; }

    ggml_backend_event_t e;
};

// A ggml context without data, with a buffer for its tensors.
struct Tensors {
    Tensors() : ctx(ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true})) {}
    ~Tensors() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    Tensors(const Tensors &) = delete;
    Tensors &operator=(const Tensors &) = delete;

    void allocate(ggml_backend_dev_t dev) {
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(dev));
        CHECK(buffer != nullptr);
    }

    ggml_cgraph *graph_of(ggml_tensor *result) {
        ggml_cgraph *graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, result);
        return graph;
    }

    ggml_context *ctx;
    ggml_backend_buffer_t buffer = nullptr;
};

std::vector<float> random_floats(size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<float> values(n);
    for (float &v : values) {
        v = static_cast<float>(random()) / 4294967296.0f - 0.5f;
    }
    return values;
}

// Computes a norm, a scale (which may be fused) and a product with a quantised matrix. Returns the bytes of the result.
std::vector<char> small_model(ggml_backend_dev_t dev, ggml_backend_t backend) {
    const int64_t n_in = 576, n_out = 192, n_tokens = 3;
    Tensors t;
    ggml_tensor *x = ggml_new_tensor_2d(t.ctx, GGML_TYPE_F32, n_in, n_tokens);
    ggml_tensor *scale = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, n_in);
    ggml_tensor *w = ggml_new_tensor_2d(t.ctx, GGML_TYPE_Q4_1, n_in, n_out);
    ggml_tensor *y = ggml_mul_mat(t.ctx, w, ggml_mul(t.ctx, ggml_rms_norm(t.ctx, x, 1e-5f), scale));
    ggml_cgraph *graph = t.graph_of(y);
    t.allocate(dev);

    const std::vector<float> x_data = random_floats(n_in * n_tokens, 1), scale_data = random_floats(n_in, 2),
                             w_data = random_floats(n_in * n_out, 3);
    std::vector<char> w_quantised(ggml_nbytes(w));
    ggml_quantize_chunk(w->type, w_data.data(), w_quantised.data(), 0, n_out, n_in, nullptr);
    std::vector<char> result(ggml_nbytes(y));
    ggml_backend_tensor_set_async(backend, x, x_data.data(), 0, ggml_nbytes(x));
    ggml_backend_tensor_set_async(backend, scale, scale_data.data(), 0, ggml_nbytes(scale));
    ggml_backend_tensor_set_async(backend, w, w_quantised.data(), 0, ggml_nbytes(w));
    CHECK(ggml_backend_graph_compute_async(backend, graph) == GGML_STATUS_SUCCESS);
    ggml_backend_tensor_get_async(backend, y, result.data(), 0, result.size());
    ggml_backend_synchronize(backend);
    return result;
}

TEST(result_is_the_cpu_backends_bit_for_bit) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    Backend cpu_backend(cpu);
    Device d;
    Backend backend(d.dev);
    CHECK(small_model(cpu, cpu_backend) == small_model(d.dev, backend));
}

TEST(looks_like_a_gpu) {
    fs_emulated_config config;
    config.vram_bytes = 1 << 20;
    Device d(config);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(d.dev, &props);
    CHECK(props.type == GGML_BACKEND_DEVICE_TYPE_GPU && props.caps.async && props.caps.events);
    CHECK(props.memory_free == config.vram_bytes && props.memory_total == config.vram_bytes);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(d.dev);
    CHECK(!ggml_backend_buft_is_host(buft));
    CHECK(ggml_backend_dev_supports_buft(d.dev, buft));
    Device other;
    CHECK(!ggml_backend_dev_supports_buft(other.dev, buft));
    CHECK(ggml_backend_dev_by_name(ggml_backend_dev_name(d.dev)) == nullptr); // the device is not in ggml's registry
}

TEST(rows_of_quantised_tensors_are_padded_with_zeros) {
    Device d;
    Tensors t;
    ggml_tensor *w = ggml_new_tensor_2d(t.ctx, GGML_TYPE_Q4_1, 576, 4);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(d.dev);
    const size_t size = ggml_backend_buft_get_alloc_size(buft, w);
    CHECK(size == ggml_nbytes(w) + ggml_row_size(w->type, 1024 - 576));
    t.buffer = ggml_backend_buft_alloc_buffer(buft, size);
    ggml_backend_buffer_clear(t.buffer, 0xff);
    CHECK(ggml_backend_tensor_alloc(t.buffer, w, ggml_backend_buffer_get_base(t.buffer)) == GGML_STATUS_SUCCESS);
    const char *data = static_cast<const char *>(w->data);
    CHECK(data[ggml_nbytes(w) - 1] == '\xff');
    for (size_t i = ggml_nbytes(w); i < size; i++) {
        CHECK(data[i] == 0);
    }
}

TEST(data_arrives_by_every_way_of_copying) {
    Device d;
    Backend one(d.dev), two(d.dev);
    Tensors t;
    ggml_tensor *a = ggml_new_tensor_2d(t.ctx, GGML_TYPE_F32, 64, 48);
    ggml_tensor *b = ggml_new_tensor_2d(t.ctx, GGML_TYPE_F32, 64, 48);
    t.allocate(d.dev);
    const std::vector<float> in = random_floats(64 * 48, 4);
    std::vector<float> out(in.size());
    const size_t size = ggml_nbytes(a), row = 64 * sizeof(float);

    ggml_backend_tensor_set(a, in.data(), 0, size);
    ggml_backend_tensor_copy(a, b);
    ggml_backend_tensor_get(b, out.data(), 0, size);
    CHECK(out == in);

    ggml_backend_tensor_memset(b, 0, 0, size);
    ggml_backend_tensor_copy_async(one, two, a, b);
    ggml_backend_tensor_get_async(two, b, out.data(), 0, size);
    ggml_backend_synchronize(two);
    CHECK(out == in);

    // Copies every second row, in both directions. The rows between must not change.
    ggml_backend_buffer_clear(t.buffer, 0);
    std::vector<float> expected(in.size());
    for (size_t r = 0; r < 48; r += 2) {
        std::memcpy(&expected[r * 64], &in[r / 2 * 64], row);
    }
    ggml_backend_tensor_set_2d(a, in.data(), 0, row, 24, 2 * row, row);
    ggml_backend_tensor_set_2d_async(one, b, in.data(), 0, row, 24, 2 * row, row);
    ggml_backend_tensor_get_async(one, b, out.data(), 0, size);
    ggml_backend_synchronize(one);
    CHECK(out == expected);
    ggml_backend_tensor_get(a, out.data(), 0, size);
    CHECK(out == expected);
    std::vector<float> packed(24 * 64), packed_async(24 * 64);
    ggml_backend_tensor_get_2d(a, packed.data(), 0, row, 24, 2 * row, row);
    ggml_backend_tensor_get_2d_async(one, b, packed_async.data(), 0, row, 24, 2 * row, row);
    ggml_backend_synchronize(one);
    CHECK(packed == std::vector<float>(in.begin(), in.begin() + 24 * 64));
    CHECK(packed_async == packed);
}

TEST(a_copy_overlaps_an_independent_compute) {
    fs_emulated_config config;
    config.link_gbps = 0.016;
    Device d(config);
    Tensors big, small;
    const size_t size = 32 << 20; // takes 2 s on this link
    ggml_tensor *dst = ggml_new_tensor_1d(big.ctx, GGML_TYPE_I8, size);
    big.allocate(d.dev);
    ggml_tensor *x = ggml_new_tensor_1d(small.ctx, GGML_TYPE_F32, 256);
    ggml_cgraph *graph = small.graph_of(ggml_sqr(small.ctx, x));
    small.allocate(d.dev);
    ggml_backend_buffer_clear(small.buffer, 0);

    Backend copies(d.dev), compute(d.dev);
    Event computed(d.dev), copied(d.dev);
    const std::vector<char> src(size, 1);
    ggml_backend_tensor_set_async(copies, dst, src.data(), 0, size);
    ggml_backend_event_record(copied, copies);
    CHECK(ggml_backend_graph_compute_async(compute, graph) == GGML_STATUS_SUCCESS);
    ggml_backend_event_record(computed, compute);
    ggml_backend_event_synchronize(computed);
    CHECK(fs_emulated_get_stats(d.dev).h2d_bytes < size); // the large copy, which was queued first, still runs
    ggml_backend_event_synchronize(copied);
    CHECK(fs_emulated_get_stats(d.dev).h2d_bytes == size);
}

TEST(copies_keep_to_the_links_rate) {
    fs_emulated_config config;
    config.link_gbps = 0.4;
    Device d(config);
    Tensors t;
    const size_t piece = 64 << 10, n = 1024; // takes 0.17 s
    ggml_tensor *dst[] = {ggml_new_tensor_1d(t.ctx, GGML_TYPE_I8, piece),
                          ggml_new_tensor_1d(t.ctx, GGML_TYPE_I8, piece)};
    t.allocate(d.dev);
    const std::vector<char> src(piece, 1);
    Backend one(d.dev), two(d.dev);
    const double start = now();
    for (size_t i = 0; i < n; i++) { // two streams share the link
        ggml_backend_tensor_set_async(i % 2 == 0 ? one : two, dst[i % 2], src.data(), 0, piece);
    }
    ggml_backend_synchronize(one);
    ggml_backend_synchronize(two);
    const double took = now() - start, expected = piece * n / (config.link_gbps * 1e9);
    const fs_emulated_stats stats = fs_emulated_get_stats(d.dev);
    CHECK(stats.h2d_bytes == piece * n && stats.d2h_bytes == 0);
    CHECK(std::fabs(stats.h2d_busy_s - expected) < 1e-4);
    CHECK(took > expected - 1e-4);
    std::printf("1024 paced copies: %.4f s for %.4f s of link\n", took, expected);
}

// One stream fills a slot and another uses it, as in the ring. Each waits for the other's event. If a wait took a
// record that was made after it, or none, the sum would be wrong or the streams would deadlock.
TEST(events_order_streams) {
    const int n_rounds = 500;
    Device d;
    Tensors t;
    ggml_tensor *slot = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 1000);
    ggml_tensor *sum = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 1000);
    ggml_cgraph *graph = t.graph_of(ggml_add_inplace(t.ctx, sum, slot));
    t.allocate(d.dev);
    ggml_backend_buffer_clear(t.buffer, 0);
    Backend copies(d.dev), compute(d.dev);
    Event full(d.dev), empty(d.dev);
    std::vector<std::vector<float>> sources;
    for (int i = 0; i < n_rounds; i++) {
        sources.emplace_back(1000, static_cast<float>(i));
    }
    ggml_backend_event_synchronize(full); // an event without a record counts as complete
    for (int i = 0; i < n_rounds; i++) {
        ggml_backend_event_wait(copies, empty);
        ggml_backend_tensor_set_async(copies, slot, sources[i].data(), 0, ggml_nbytes(slot));
        ggml_backend_event_record(full, copies);
        ggml_backend_event_wait(compute, full);
        CHECK(ggml_backend_graph_compute_async(compute, graph) == GGML_STATUS_SUCCESS);
        ggml_backend_event_record(empty, compute);
    }
    std::vector<float> result(1000);
    ggml_backend_event_synchronize(empty);
    ggml_backend_tensor_get(sum, result.data(), 0, ggml_nbytes(sum));
    CHECK(result == std::vector<float>(1000, n_rounds * (n_rounds - 1) / 2.0f));
}

TEST(the_graph_struct_may_be_reused_at_once) {
    Device d;
    Tensors t;
    ggml_tensor *x = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 100000);
    ggml_tensor *y = ggml_scale(t.ctx, x, 2.0f);
    ggml_cgraph *graph = t.graph_of(y);
    t.allocate(d.dev);
    Backend backend(d.dev);
    const std::vector<float> in(100000, 1.0f);
    std::vector<float> out(100000);
    ggml_backend_tensor_set_async(backend, x, in.data(), 0, ggml_nbytes(x));
    CHECK(ggml_backend_graph_compute_async(backend, graph) == GGML_STATUS_SUCCESS);
    ggml_graph_clear(graph);
    ggml_backend_tensor_get_async(backend, y, out.data(), 0, ggml_nbytes(y));
    ggml_backend_synchronize(backend);
    CHECK(out == std::vector<float>(100000, 2.0f));
}

TEST(the_ledger_never_exceeds_the_card) {
    fs_emulated_config config;
    config.vram_bytes = 1 << 24;
    Device d(config);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(d.dev);
    const unsigned seed = 20250101;
    std::printf("seed %u\n", seed);
    const auto churn = [&](unsigned thread_seed) {
        std::mt19937 random(thread_seed);
        std::vector<ggml_backend_buffer_t> held;
        for (int i = 0; i < 3000; i++) {
            if (random() % 3 != 0) {
                const uint64_t before = fs_emulated_get_stats(d.dev).used_bytes;
                CHECK(before <= config.vram_bytes);
                if (ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(buft, 1 + random() % (1 << 21))) {
                    held.push_back(b);
                }
            } else if (!held.empty()) {
                const size_t which = random() % held.size();
                ggml_backend_buffer_free(held[which]);
                held.erase(held.begin() + which);
            }
        }
        for (ggml_backend_buffer_t b : held) {
            ggml_backend_buffer_free(b);
        }
    };
    std::thread other(churn, seed);
    churn(seed + 1);
    other.join();
    const fs_emulated_stats stats = fs_emulated_get_stats(d.dev);
    CHECK(stats.used_bytes == 0);
    CHECK(stats.peak_bytes <= config.vram_bytes && stats.peak_bytes > config.vram_bytes / 2);
    fs_emulated_reset_peak(d.dev);
    CHECK(fs_emulated_get_stats(d.dev).peak_bytes == 0);
    CHECK(ggml_backend_buft_alloc_buffer(buft, config.vram_bytes + 1) == nullptr);
    ggml_backend_buffer_t all = ggml_backend_buft_alloc_buffer(buft, config.vram_bytes);
    CHECK(all != nullptr);
    CHECK(ggml_backend_buft_alloc_buffer(buft, 1) == nullptr);
    size_t free_bytes = 1, total = 0;
    ggml_backend_dev_memory(d.dev, &free_bytes, &total);
    CHECK(free_bytes == 0 && total == config.vram_bytes);
    ggml_backend_buffer_free(all);
}

TEST(the_kth_allocation_fails_and_no_other) {
    for (uint64_t k = 1; k <= 8; k++) {
        fs_emulated_config config;
        config.faults.alloc = k;
        Device d(config);
        for (uint64_t i = 1; i <= 8; i++) {
            ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(d.dev), 4096);
            CHECK((b == nullptr) == (i == k));
            ggml_backend_buffer_free(b);
        }
        CHECK(fs_emulated_get_stats(d.dev).used_bytes == 0);
    }
}

TEST(a_failed_compute_loses_the_device) {
    fs_emulated_config config;
    config.faults.compute_fail = 3;
    Device d(config);
    Tensors t;
    ggml_tensor *x = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 16);
    ggml_cgraph *graph = t.graph_of(ggml_sqr(t.ctx, x));
    t.allocate(d.dev);
    Backend backend(d.dev), another(d.dev);
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    CHECK(ggml_backend_graph_compute(another, graph) == GGML_STATUS_SUCCESS);
    CHECK(!fs_emulated_get_stats(d.dev).lost);
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_FAILED);
    CHECK(fs_emulated_get_stats(d.dev).lost);
    CHECK(ggml_backend_graph_compute(another, graph) == GGML_STATUS_FAILED);
    CHECK(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(d.dev), 16) == nullptr);
}

TEST(a_stuck_compute_holds_up_its_own_stream_only) {
    fs_emulated_config config;
    config.faults.compute_stuck = 1; // the computation would take a minute, but freeing the stream ends it
    Device d(config);
    Tensors t;
    ggml_tensor *x = ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 16);
    ggml_cgraph *graph = t.graph_of(ggml_sqr(t.ctx, x));
    t.allocate(d.dev);
    Backend stuck(d.dev), fine(d.dev);
    CHECK(ggml_backend_graph_compute_async(stuck, graph) == GGML_STATUS_SUCCESS);
    CHECK(ggml_backend_graph_compute(fine, graph) == GGML_STATUS_SUCCESS);
    CHECK(fs_emulated_get_stats(d.dev).computes == 2);
}

TEST(a_graph_that_uses_host_memory_is_refused) {
    Device d;
    Backend backend(d.dev);
    Tensors host;
    ggml_tensor *x = ggml_new_tensor_1d(host.ctx, GGML_TYPE_F32, 16);
    ggml_cgraph *graph = host.graph_of(ggml_sqr(host.ctx, x));
    host.allocate(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_FAILED);
}

TEST(a_token_that_chooses_an_expert_twice_loses_the_device) {
    for (const bool made : {false, true}) { // the graph itself writes the choice: what was there before does not matter
        Device device;
        Backend backend(device.dev);
        Tensors t;
        ggml_tensor *weights = ggml_new_tensor_3d(t.ctx, GGML_TYPE_F32, 4, 4, 2);
        ggml_tensor *table = ggml_new_tensor_2d(t.ctx, GGML_TYPE_I32, 1, 2);
        ggml_tensor *rows = ggml_new_tensor_1d(t.ctx, GGML_TYPE_I32, 2);
        ggml_tensor *lookup = ggml_get_rows(t.ctx, table, rows);
        ggml_tensor *chosen = ggml_new_tensor_2d(t.ctx, GGML_TYPE_I32, 2, 1);
        ggml_tensor *product =
            ggml_mul_mat_id(t.ctx, weights, ggml_new_tensor_3d(t.ctx, GGML_TYPE_F32, 4, 1, 1), chosen);
        t.allocate(device.dev);
        ggml_backend_buffer_clear(t.buffer, 0); // expert 0, twice
        const int32_t both[] = {0, 1};
        ggml_backend_tensor_set(table, both, 0, sizeof(both));
        ggml_backend_tensor_set(rows, both, 0, sizeof(both));
        chosen->data = lookup->data;
        ggml_cgraph *graph = ggml_new_graph(t.ctx);
        if (made) {
            ggml_build_forward_expand(graph, lookup);
        }
        ggml_build_forward_expand(graph, product);
        CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
        CHECK(fs_emulated_get_stats(device.dev).lost == !made);
    }
}

TEST(tensors_without_elements_have_no_memory_to_check) {
    Device d;
    Backend backend(d.dev);
    Tensors t;
    ggml_cgraph *graph = t.graph_of(ggml_sqr(t.ctx, ggml_new_tensor_1d(t.ctx, GGML_TYPE_F32, 0)));
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
}

TEST(a_slow_free_counts_until_it_is_done) {
    fs_emulated_config config;
    config.faults.free_ms = 30;
    Device d(config);
    ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(d.dev), 4096);
    const double start = now();
    ggml_backend_buffer_free(b);
    CHECK(now() - start >= 0.03);
    CHECK(fs_emulated_get_stats(d.dev).used_bytes == 0);
}

TEST(fault_scripts) {
    fs_emulated_faults f;
    CHECK(fs_emulated_read_faults("alloc=7,compute_fail=12,compute_stuck=13,stuck_ms=5,free_ms=20", f));
    CHECK(f.alloc == 7 && f.compute_fail == 12 && f.compute_stuck == 13 && f.stuck_ms == 5 && f.free_ms == 20);
    for (const char *bad : {"alloc", "alloc=", "alloc=x", "alloc=-1", "alloc=1x", "alloc=1;free_ms=2", "allo=1", "=1",
                            ",", "alloc=1,,free_ms=2", "alloc=1234567890"}) {
        CHECK(!fs_emulated_read_faults(bad, f));
        CHECK(f.alloc == 7);
    }
    CHECK(fs_emulated_read_faults("free_ms=1", f) && f.alloc == 0 && f.free_ms == 1);
    CHECK(fs_emulated_read_faults(nullptr, f) && f.free_ms == 0);
    CHECK(fs_emulated_read_faults("", f));
}

} // namespace

TEST_MAIN()
