// Runs graphs on the shard device through ggml's public API, as llama.cpp does. The results must have the same bits as
// those of ggml-cpu.
#include "apart.h"
#include "check.h"
#include "device.h"
#include "emulated.h"
#include "host_block.h"
#include "host_file.h"
#include "plugin.h"
#include "system.h"

#include "ggml-alloc.h"
#include "ggml-impl.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace {

// Exit code of a child process. The other codes are 0 (passed), 1 (CHECK failed) and, on Windows, 3 (abort).
constexpr int kFaultNotReached = 2;

// ---------------------------------------------------------------------------------------------------------------- model

constexpr int64_t kEmbd = 384; // not a multiple of 512, so quantised rows need padding
constexpr int64_t kFfn = 640, kVocab = 3008;
constexpr int kLayers = 4;
constexpr int kExperts = 12, kChosen = 3, kExpertLayers = 2; // the last two layers have experts
constexpr int64_t kExpertFfn = 96;
// Not a multiple of a block of rows. 736 rows of the head and 384 rows of blk.1.ffn_up fit into a piece.
constexpr size_t kPieceBytes = 301 * 1024;
constexpr int kThreads = 1; // scenarios start threads, and ggml's threads would take their CPU time

struct Layer {
    ggml_tensor *attn_norm, *q, *k, *v, *o, *ffn_norm, *router, *gate, *up, *down;
};

// The tensors of the model, without data.
struct Weights {
    Weights() : ctx(ggml_init({ggml_tensor_overhead() * 128, nullptr, true})) {
        auto add = [&](const std::string &name, ggml_type type, int64_t cols, int64_t rows, int64_t experts = 1) {
            ggml_tensor *t = rows == 1      ? ggml_new_tensor_1d(ctx, type, cols)
                             : experts == 1 ? ggml_new_tensor_2d(ctx, type, cols, rows)
                                            : ggml_new_tensor_3d(ctx, type, cols, rows, experts);
            ggml_set_name(t, name.c_str());
            all.push_back(t);
            return t;
        };
        for (int i = 0; i < kLayers; i++) {
            const std::string blk = "blk." + std::to_string(i) + ".";
            Layer l;
            l.attn_norm = add(blk + "attn_norm.weight", GGML_TYPE_F32, kEmbd, 1);
            l.q = add(blk + "attn_q.weight", GGML_TYPE_Q4_1, kEmbd, kEmbd);
            l.k = add(blk + "attn_k.weight", GGML_TYPE_Q8_0, kEmbd, kEmbd);
            l.v = add(blk + "attn_v.weight", GGML_TYPE_Q4_1, kEmbd, kEmbd);
            l.o = add(blk + "attn_output.weight", GGML_TYPE_Q8_0, kEmbd, kEmbd);
            l.ffn_norm = add(blk + "ffn_norm.weight", GGML_TYPE_F32, kEmbd, 1);
            l.router = nullptr;
            if (i >= kLayers - kExpertLayers) {
                l.router = add(blk + "ffn_gate_inp.weight", GGML_TYPE_F32, kEmbd, kExperts);
                l.gate = add(blk + "ffn_gate_exps.weight", GGML_TYPE_Q8_0, kEmbd, kExpertFfn, kExperts);
                l.up = add(blk + "ffn_up_exps.weight", GGML_TYPE_Q4_1, kEmbd, kExpertFfn, kExperts);
                l.down = add(blk + "ffn_down_exps.weight", GGML_TYPE_Q4_1, kExpertFfn, kEmbd, kExperts);
                layers.push_back(l);
                continue;
            }
            l.gate = add(blk + "ffn_gate.weight", GGML_TYPE_Q8_0, kEmbd, kFfn);
            // In layer 1 the matrix is larger than a piece, and is cut into two pieces of different sizes.
            l.up = add(blk + "ffn_up.weight", i == 1 ? GGML_TYPE_F16 : GGML_TYPE_Q4_1, kEmbd, kFfn);
            l.down = add(blk + "ffn_down.weight", GGML_TYPE_Q4_1, kFfn, kEmbd);
            layers.push_back(l);
        }
        output_norm = add("output_norm.weight", GGML_TYPE_F32, kEmbd, 1);
        head = add("token_embd.weight", GGML_TYPE_Q8_0, kEmbd, kVocab); // both the embedding and the output head
        for (ggml_tensor *t : all) {
            offsets.push_back(bytes);
            bytes += (ggml_nbytes(t) + 31) / 32 * 32;
        }
    }
    ~Weights() { ggml_free(ctx); }
    Weights(const Weights &) = delete;
    Weights &operator=(const Weights &) = delete;

    void write(char *file) const {
        std::mt19937 random(7);
        for (size_t i = 0; i < all.size(); i++) {
            const ggml_tensor *t = all[i];
            std::vector<float> values(ggml_nelements(t));
            const float scale = ggml_n_dims(t) == 1 ? 1.0f : 4.0f / std::sqrt((float)t->ne[0]);
            for (float &v : values) {
                v = ((float)random() / 4294967296.0f - 0.5f) * scale + (ggml_n_dims(t) == 1 ? 1.0f : 0.0f);
            }
            ggml_quantize_chunk(t->type, values.data(), file + offsets[i], 0, ggml_nrows(t), t->ne[0], nullptr);
        }
    }

    void place(ggml_backend_buffer_t buffer, char *file) {
        for (size_t i = 0; i < all.size(); i++) {
            CHECK(ggml_backend_tensor_alloc(buffer, all[i], file + offsets[i]) == GGML_STATUS_SUCCESS);
        }
    }

    ggml_context *ctx;
    std::vector<ggml_tensor *> all;
    std::vector<size_t> offsets;
    size_t bytes = 0;
    std::vector<Layer> layers;
    ggml_tensor *output_norm, *head;
};

// A decode of n tokens. Their KV cells start at `pos`.
struct Batch {
    int n, pos;
};

// A model and its KV cache on one backend.
class Net {
  public:
    Net(ggml_backend_t backend, char *file, int n_ctx) : backend(backend), n_ctx(n_ctx) {
        ggml_backend_dev_t dev = ggml_backend_get_device(backend);
        weights_buffer = ggml_backend_dev_buffer_from_host_ptr(dev, file, weights.bytes, weights.bytes);
        CHECK(weights_buffer != nullptr);
        ggml_backend_buffer_set_usage(weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        weights.place(weights_buffer, file);
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
        kv_ctx = ggml_init({ggml_tensor_overhead() * (2 * kLayers + 1), nullptr, true});
        seen = ggml_new_tensor_2d(kv_ctx, GGML_TYPE_F32, n_ctx, kEmbd);
        for (int i = 0; i < kLayers; i++) {
            k_cache[i] = ggml_new_tensor_2d(kv_ctx, GGML_TYPE_F16, kEmbd, n_ctx);
            v_cache[i] = ggml_new_tensor_2d(kv_ctx, GGML_TYPE_F16, n_ctx, kEmbd);
        }
        kv_buffer = ggml_backend_alloc_ctx_tensors_from_buft(kv_ctx, buft);
        CHECK(kv_buffer != nullptr);
        ggml_backend_buffer_clear(kv_buffer, 0);
        allocator = ggml_gallocr_new(buft);
    }
    ~Net() {
        free_graph();
        ggml_gallocr_free(allocator);
        ggml_backend_buffer_free(kv_buffer);
        ggml_free(kv_ctx);
        ggml_backend_buffer_free(weights_buffer);
    }
    Net(const Net &) = delete;
    Net &operator=(const Net &) = delete;

    // Gives the compute buffer its final size, as llama.cpp does before it decodes.
    void reserve(int n) {
        build({n, 0});
        CHECK(ggml_gallocr_reserve(allocator, graph));
    }

    void forget() { ggml_backend_buffer_clear(kv_buffer, 0); }

    void prepare(Batch b) {
        build(b);
        CHECK(ggml_gallocr_alloc_graph(allocator, graph));
    }

    void write_input() {
        std::vector<int32_t> ids(batch.n);
        std::vector<int64_t> at(batch.n);
        for (int i = 0; i < batch.n; i++) {
            ids[i] = (batch.pos + i) * 7919 % kVocab;
            at[i] = batch.pos + i;
        }
        ggml_backend_tensor_set(tokens, ids.data(), 0, ggml_nbytes(tokens));
        ggml_backend_tensor_set(rows, at.data(), 0, ggml_nbytes(rows));
    }

    ggml_status start() { return ggml_backend_graph_compute_async(backend, graph); }

    // Computes the prepared graph. A second call has the same result, because it writes the same KV cells.
    ggml_status compute() {
        write_input();
        return start();
    }

    ggml_status compute(std::vector<float> &result) {
        write_input();
        return run(result);
    }

    // Computes the prepared graph, whose input was written before.
    ggml_status run(std::vector<float> &result) {
        const ggml_status status = start();
        if (status == GGML_STATUS_SUCCESS) {
            result.resize(ggml_nelements(logits));
            ggml_backend_tensor_get(logits, result.data(), 0, ggml_nbytes(logits));
        }
        return status;
    }

    ggml_status decode(Batch b, std::vector<float> &result) {
        prepare(b);
        return compute(result);
    }

    // With uid 0, the value that ggml sets, the shard device cannot recognise the graph.
    void set_uid(uint64_t uid) { graph->uid = uid; }

    Weights weights;

  private:
    void free_graph() {
        if (graph_ctx) {
            ggml_free(graph_ctx);
        }
        graph_ctx = nullptr;
    }

    // Builds the graph of the experts as llama.cpp does.
    static ggml_tensor *mix_experts(ggml_context *c, const Layer &l, ggml_tensor *a) {
        const int64_t n = a->ne[1];
        ggml_tensor *shares = ggml_soft_max(c, ggml_mul_mat(c, l.router, a));
        ggml_tensor *chosen = ggml_argsort_top_k(c, shares, kChosen);
        ggml_tensor *share = ggml_get_rows(c, ggml_reshape_3d(c, shares, 1, kExperts, n), chosen);
        a = ggml_reshape_3d(c, a, kEmbd, 1, n);
        ggml_tensor *up = ggml_mul_mat_id(c, l.up, a, chosen), *gate = ggml_mul_mat_id(c, l.gate, a, chosen);
        ggml_tensor *down = ggml_mul_mat_id(c, l.down, ggml_swiglu_split(c, gate, up), chosen);
        down = ggml_mul(c, down, share);
        ggml_tensor *sum = nullptr;
        for (int i = 0; i < kChosen; i++) {
            ggml_tensor *one = ggml_view_2d(c, down, kEmbd, n, down->nb[2], i * down->nb[1]);
            sum = sum ? ggml_add(c, sum, one) : one;
        }
        return sum;
    }

    void build(Batch b) {
        free_graph();
        batch = b;
        graph_ctx = ggml_init({ggml_tensor_overhead() * 1024 + ggml_graph_overhead_custom(1024, false), nullptr, true});
        ggml_context *c = graph_ctx;
        graph = ggml_new_graph_custom(c, 1024, false);
        tokens = ggml_new_tensor_1d(c, GGML_TYPE_I32, b.n);
        rows = ggml_new_tensor_1d(c, GGML_TYPE_I64, b.n);
        ggml_set_input(tokens);
        ggml_set_input(rows);
        ggml_tensor *x = ggml_get_rows(c, weights.head, tokens);
        // Reads a view of a matrix that is cut into row pieces, and writes to a strided part of a persistent buffer.
        // Only the CPU can compute this.
        ggml_tensor *split = weights.layers[1].up;
        const int64_t n_rows = std::min<int64_t>(b.n, split->ne[1]);
        ggml_build_forward_expand(graph,
                                  ggml_cpy(c, ggml_transpose(c, ggml_view_2d(c, split, kEmbd, n_rows, split->nb[1], 0)),
                                           ggml_view_2d(c, seen, n_rows, kEmbd, seen->nb[1], b.pos * seen->nb[0])));
        for (int i = 0; i < kLayers; i++) {
            const Layer &l = weights.layers[i];
            ggml_tensor *a = ggml_mul(c, ggml_rms_norm(c, x, 1e-5f), l.attn_norm);
            ggml_tensor *q = ggml_mul_mat(c, l.q, a);
            ggml_build_forward_expand(graph, q);
            // One step reads both the norm and the scaled norm, so a fused kernel must still write the norm.
            ggml_tensor *norm = ggml_rms_norm(c, x, 1e-4f), *scaled = ggml_mul(c, norm, l.attn_norm);
            ggml_build_forward_expand(graph, scaled);
            ggml_tensor *k = ggml_mul_mat(c, l.k, norm), *v = ggml_mul_mat(c, l.v, scaled);
            ggml_build_forward_expand(graph, ggml_set_rows(c, k_cache[i], k, rows));
            // The cache of values is transposed, so the write is strided.
            ggml_tensor *v_at =
                ggml_view_2d(c, v_cache[i], b.n, kEmbd, v_cache[i]->nb[1], b.pos * ggml_element_size(v_cache[i]));
            ggml_build_forward_expand(graph, ggml_cpy(c, ggml_transpose(c, v), v_at));
            ggml_tensor *scores = ggml_mul_mat(c, k_cache[i], q);
            scores = ggml_soft_max(c, ggml_scale(c, scores, 0.05f));
            x = ggml_add(c, x, ggml_mul_mat(c, l.o, ggml_mul_mat(c, v_cache[i], scores)));
            if (i == 0) {
                x = ggml_add(c, x, ggml_mul_mat(c, seen, scores));
            }
            a = ggml_mul(c, ggml_rms_norm(c, x, 1e-5f), l.ffn_norm);
            if (l.router) {
                x = ggml_add(c, x, mix_experts(c, l, a));
                continue;
            }
            ggml_tensor *gate = ggml_mul_mat(c, l.gate, a);
            ggml_tensor *ffn = ggml_swiglu_split(c, gate, ggml_mul_mat(c, l.up, a));
            x = ggml_add(c, x, ggml_mul_mat(c, l.down, ffn));
        }
        x = ggml_mul(c, ggml_rms_norm(c, x, 1e-5f), weights.output_norm);
        logits = ggml_mul_mat(c, weights.head, x);
        ggml_set_output(logits);
        ggml_build_forward_expand(graph, logits);
    }

    ggml_backend_t backend;
    const int n_ctx;
    ggml_backend_buffer_t weights_buffer = nullptr, kv_buffer = nullptr;
    ggml_context *kv_ctx = nullptr, *graph_ctx = nullptr;
    ggml_tensor *k_cache[kLayers], *v_cache[kLayers], *seen = nullptr;
    ggml_gallocr_t allocator = nullptr;
    ggml_cgraph *graph = nullptr;
    ggml_tensor *tokens = nullptr, *rows = nullptr, *logits = nullptr;
    Batch batch{};
};

using Logits = std::vector<std::vector<float>>;

const std::vector<Batch> kConversation = {{40, 0}, {1, 40}, {1, 41}, {7, 42}, {1, 49}};
constexpr int kContext = 64, kLargestBatch = 40;

Logits on_cpu(const std::vector<Batch> &conversation, char *file, int n_ctx) {
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    auto set_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), "ggml_backend_set_n_threads");
    set_threads(cpu, kThreads);
    Logits expected(conversation.size());
    {
        Net net(cpu, file, n_ctx);
        for (size_t i = 0; i < conversation.size(); i++) {
            CHECK(net.decode(conversation[i], expected[i]) == GGML_STATUS_SUCCESS);
            for (float v : expected[i]) {
                CHECK(std::isfinite(v));
            }
        }
        CHECK(expected[0] != expected[1]);
    }
    ggml_backend_free(cpu);
    return expected;
}

// --------------------------------------------------------------------------------------------------------------- device

fsd_config config_of(uint64_t budget) {
    fsd_config c = {};
    c.struct_size = sizeof(c);
    c.inner_device = "emulated";
    c.budget_bytes = budget;
    c.n_threads = kThreads;
    c.piece_bytes = kPieceBytes;
    c.step_bytes = 260 * 1024;
    c.slab_bytes = 300 * 1024;
    c.copy_bytes = 64 * 1024;
    return c;
}

fsd_stats stats() {
    fsd_stats s = {};
    s.struct_size = sizeof(s);
    CHECK(fsd_get_stats(&s) == FSD_OK);
    return s;
}

// Sets the ladder: attention of all layers, then feed-forward weights, then the head. Other weights are the last shard.
uint32_t set_shards(const Weights &weights) {
    const uint32_t n_shards = 2 * kLayers + 1;
    std::vector<fsd_shard_tensor> list;
    for (const ggml_tensor *t : weights.all) {
        const std::string name = t->name;
        if (name == "blk.2.attn_output.weight") {
            continue;
        }
        if (name.compare(0, 4, "blk.") == 0) {
            const uint32_t layer = (uint32_t)(name[4] - '0');
            list.push_back({t->name, name.find("ffn") == std::string::npos ? layer : kLayers + layer});
        } else {
            list.push_back({t->name, n_shards - 1});
        }
    }
    CHECK(fsd_set_shards(list.data(), list.size(), n_shards) == FSD_OK);
    return n_shards + 1;
}

// A model and its context on the shard device, ready for fsd_commit.
struct Session {
    explicit Session(const fsd_config &config, const std::vector<Batch> &conversation = kConversation,
                     int n_ctx = kContext, int largest = kLargestBatch, bool on_disk = false)
        : file(Weights().bytes), conversation(conversation) {
        Weights().write(file.data);
#if defined(__linux__) // elsewhere no weights come from disk
        if (on_disk) {
            file.move_to_disk();
        }
#else
        CHECK(!on_disk);
#endif
        expected = on_cpu(conversation, file.data, n_ctx);
        CHECK(fsd_configure(&config) == FSD_OK);
        backend = ggml_backend_dev_init(fsd::plugin_device(), nullptr);
        CHECK(backend != nullptr);
        net = std::make_unique<Net>(backend, file.data, n_ctx);
        net->reserve(largest);
        n_shards = set_shards(net->weights);
    }
    ~Session() {
        net.reset();
        ggml_backend_free(backend);
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;

    void commit() {
        CHECK(fsd_commit() == FSD_OK);
        floor = stats().floor_bytes;
        full = stats().full_bytes;
        CHECK(floor < full);
    }

    void check_decode(size_t i) {
        std::vector<float> logits;
        CHECK(net->decode(conversation[i], logits) == GGML_STATUS_SUCCESS);
        CHECK(logits == expected[i]);
    }

    // Decodes every batch and checks the results. Some batches run twice with the same graph.
    void check_conversation(std::mt19937 *random = nullptr, const std::function<void()> &between = {}) {
        net->forget();
        for (size_t i = 0; i < conversation.size(); i++) {
            net->prepare(conversation[i]);
            const bool repeat = random && (*random)() % 3 == 0;
            if (repeat || (random && (*random)() % 2)) {
                net->set_uid(ggml_graph_next_uid());
            }
            for (int n = 0; n <= (repeat ? 1 : 0); n++) {
                std::vector<float> logits;
                CHECK(net->compute(logits) == GGML_STATUS_SUCCESS);
                CHECK(logits == expected[i]);
                if (between) {
                    between();
                }
            }
        }
    }

    // The same, and prepares each batch while the one before is computed. Only the last result is checked, which follows from
    // all before.
    void check_asynchronous_conversation() {
        net->forget();
        for (size_t i = 0; i + 1 < conversation.size(); i++) {
            net->prepare(conversation[i]);
            CHECK(fsd_set_async(1) == FSD_OK);
            CHECK(net->compute() == GGML_STATUS_SUCCESS);
            CHECK(fsd_set_async(0) == FSD_OK);
        }
        check_decode(conversation.size() - 1);
        CHECK(fsd_end_graph() == FSD_OK);
    }

    void check_ledger() {
        const fsd_stats s = stats();
        CHECK(s.used_bytes <= s.budget_bytes);
        CHECK(s.used_bytes == s.overhead_bytes + fs_emulated_get_stats(fsd::device().inner.dev).used_bytes);
        CHECK(s.floor_bytes == floor && s.full_bytes == full);
    }

    // Returns a budget from floor to full, often exactly one of these.
    uint64_t random_budget(std::mt19937 &random) const {
        switch (random() % 8) {
        case 0:
            return floor;
        case 1:
            return full;
        default:
            return floor + (uint64_t)((double)(full - floor) * ((double)random() / 4294967296.0));
        }
    }

    // Sets random placements, different ones for single tokens and for batches.
    void set_random_plan(std::mt19937 &random) {
        std::vector<uint8_t> decode(n_shards), batches(n_shards);
        for (uint32_t i = 0; i < n_shards; i++) {
            decode[i] = random() % 2 ? FSD_STREAMED : FSD_CPU;
            batches[i] = random() % 2 ? FSD_STREAMED : FSD_CPU;
        }
        const fsd_tier tiers[] = {{0, decode.data()}, {5, batches.data()}};
        CHECK(fsd_set_plan(tiers, 2, n_shards, (random() % 4) * 2 * kPieceBytes, (random() % 5) * 0.25, random() % 2) ==
              FSD_OK);
    }

    HostFile file;
    std::vector<Batch> conversation;
    Logits expected;
    ggml_backend_t backend = nullptr;
    std::unique_ptr<Net> net;
    uint32_t n_shards = 0;
    uint64_t floor = 0, full = 0;
};

// ------------------------------------------------------------------------------------------------------------ scenarios

SCENARIO(stream_only_is_the_cpu_backends_result_at_any_budget) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    fsd_stats st = stats();
    CHECK(st.streamed_bytes == 0 && st.ring_bytes == 0 && st.kv_bytes == 0);
    s.check_conversation();
    CHECK(stats().kv_bytes > 0 && stats().used_bytes == s.full);
    std::mt19937 random(1);
    std::vector<uint64_t> budgets = {s.full, s.floor, s.floor + 1, s.full - 1, s.full, s.full + 1, s.floor};
    for (int i = 0; i < 20; i++) {
        budgets.push_back(s.random_budget(random));
    }
    for (uint64_t budget : budgets) {
        CHECK(fsd_set_budget(budget, 0) == FSD_OK);
        CHECK(stats().used_bytes <= budget);
        CHECK(fsd_reset_peak() == FSD_OK);
        s.check_conversation(&random); // before fsd_fill, with the slabs that are already there
        s.check_ledger();
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        s.check_ledger();
        st = stats();
        CHECK((st.streamed_bytes == 0) == (budget >= s.full) && st.cpu_bytes == 0);
        const uint64_t computed_before = st.cpu_segments;
        s.check_conversation(&random);
        s.check_ledger();
        st = stats();
        CHECK(st.peak_bytes <= budget);
        CHECK(st.resident_bytes + st.streamed_bytes + st.core_bytes >= s.net->weights.bytes);
        CHECK(st.cpu_segments > computed_before); // only for the embedding, which is cut into row pieces
    }
}

SCENARIO(a_parked_device_holds_nothing_and_goes_on_where_it_was) {
    Session s(config_of(0));
    CHECK(fsd_park() == FSD_BAD_STATE);
    s.commit();
    CHECK(fsd_unpark() == FSD_BAD_STATE);
    std::mt19937 random(3);
    for (size_t park_at = 0; park_at < s.conversation.size(); park_at++) {
        s.set_random_plan(random);
        s.net->forget();
        for (size_t i = 0; i < s.conversation.size(); i++) {
            if (i == park_at) {
                CHECK(fsd_park() == FSD_OK);
                CHECK(stats().used_bytes == 0 && stats().resident_bytes == 0);
                CHECK(fs_emulated_get_stats(fsd::device().inner.dev).used_bytes == 0);
                CHECK(fsd_park() == FSD_BAD_STATE && fsd_fill(UINT64_MAX, nullptr) == FSD_BAD_STATE);
                CHECK(fsd_commit() == FSD_BAD_STATE && fsd_set_shards(nullptr, 0, 1) == FSD_BAD_STATE);
                CHECK(fsd_set_budget(s.floor - 1, 0) == FSD_BELOW_FLOOR);
                CHECK(fsd_set_budget(s.random_budget(random), 0) == FSD_OK);
                CHECK(stats().used_bytes == 0);
                CHECK(fsd_unpark() == FSD_OK);
                s.check_ledger();
            }
            s.check_decode(i);
        }
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        s.check_ledger();
    }
}

SCENARIO(the_ring_streams_on_between_graphs) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    s.check_conversation();
    s.net->prepare({1, 49});
    s.net->set_uid(ggml_graph_next_uid());
    std::vector<float> logits;
    CHECK(s.net->compute(logits) == GGML_STATUS_SUCCESS);
    const fsd_stats before = stats();
    constexpr int n = 10;
    for (int i = 0; i < n; i++) {
        CHECK(s.net->compute(logits) == GGML_STATUS_SUCCESS);
        CHECK(logits == s.expected.back());
    }
    const fsd_stats after = stats();
    CHECK(after.recompiles == before.recompiles);
    // Each graph copies every streamed byte once, except the experts that it does not use.
    uint64_t experts = 0;
    for (const ggml_tensor *t : s.net->weights.all) {
        experts += ggml_n_dims(t) == 3 ? ggml_nbytes(t) : 0;
    }
    const uint64_t all = before.streamed_bytes, used = all - experts + experts * kChosen / kExperts;
    CHECK(after.copied_bytes - before.copied_bytes <= n * (used + experts / kExperts) + kPieceBytes);
    CHECK(after.copied_bytes - before.copied_bytes >= n * (all - experts) - kPieceBytes);
}

void with_random_placements(unsigned seed, const std::function<void(Session &, std::mt19937 &)> &check) {
    Session s(config_of(0));
    s.commit();
    std::mt19937 random(seed);
    for (int i = 0; i < 40; i++) {
        s.set_random_plan(random);
        CHECK(fsd_set_budget(s.random_budget(random), 0) == FSD_OK);
        if (i % 4) {
            CHECK(fsd_fill(random() % 2 ? UINT64_MAX : kPieceBytes, nullptr) == FSD_OK);
        }
        check(s, random);
        s.check_ledger();
    }
    CHECK(stats().cpu_segments > 0 && stats().copies > 0);
}

SCENARIO(placements_do_not_change_the_result) {
    with_random_placements(2, [](Session &s, std::mt19937 &random) { s.check_conversation(&random); });
}

SCENARIO(asynchronous_graphs_compute_the_same) {
    with_random_placements(5, [](Session &s, std::mt19937 &) { s.check_asynchronous_conversation(); });
}

// The device computes cached experts before the host has the router's choice, and computes them again if one was missing.
SCENARIO(cached_experts_do_not_wait_for_the_host) {
    std::vector<Batch> conversation = {{40, 0}};
    for (int pos = 40; pos < kContext; pos++) {
        conversation.push_back({1, pos});
    }
    Session s(config_of(0), conversation);
    s.commit();
    const auto decode = [&s](size_t n_slots, fsd_placement where) {
        const std::vector<uint8_t> placement(s.n_shards, where);
        const fsd_tier tier = {0, placement.data()};
        const uint64_t ring = n_slots * (88 << 10);
        CHECK(fsd_set_budget(s.floor + ring, 0) == FSD_OK);
        CHECK(fsd_set_plan(&tier, 1, s.n_shards, ring, 0.5, 0) == FSD_OK);
        for (int i = 0; i < 3; i++) {
            s.check_conversation();
        }
        const fsd_stats before = stats();
        s.check_conversation();
        const fsd_stats after = stats();
        return std::pair(after.experts_ahead - before.experts_ahead, after.experts_again - before.experts_again);
    };
    constexpr size_t all = kExperts * kExpertLayers, n_groups = (kContext - 40) * kExpertLayers;
    CHECK(decode(all, FSD_CPU) == std::pair(uint64_t{n_groups}, uint64_t{0}));
    // Experts replace others. Where weights are streamed, three steps of them take a part of the ring.
    for (const auto &[n_slots, where] : {std::pair(all - 6, FSD_CPU), std::pair(all + 3, FSD_STREAMED)}) {
        const auto [ahead, again] = decode(n_slots, where);
        CHECK(0 < again && again < ahead && ahead < n_groups);
    }
    CHECK(decode(kExperts - 1, FSD_CPU).first == 0); // two could have the same number
    CHECK(fsd_clear_expert_cache() == FSD_OK);
    CHECK(decode(all, FSD_CPU) == std::pair(uint64_t{n_groups}, uint64_t{0}));
}

// Some devices have no products with experts' weights of a type.
decltype(ggml_backend_device::iface.supports_op) emulated_supports_op;
decltype(ggml_backend::iface.graph_compute) emulated_graph_compute;

bool is_q4_1_expert_product(const ggml_tensor *op) {
    return op->op == GGML_OP_MUL_MAT_ID && op->src[0]->type == GGML_TYPE_Q4_1;
}

void refuse_q4_1_experts() {
    fsd::Inner &inner = fsd::device().inner;
    emulated_supports_op = inner.dev->iface.supports_op;
    inner.dev->iface.supports_op = [](ggml_backend_dev_t device, const ggml_tensor *op) {
        return !is_q4_1_expert_product(op) && emulated_supports_op(device, op);
    };
    emulated_graph_compute = inner.compute->iface.graph_compute;
    inner.compute->iface.graph_compute = [](ggml_backend_t backend, ggml_cgraph *graph) {
        const bool refused = std::any_of(graph->nodes, graph->nodes + graph->n_nodes, is_q4_1_expert_product);
        return refused ? GGML_STATUS_FAILED : emulated_graph_compute(backend, graph);
    };
}

SCENARIO(experts_that_the_device_cannot_multiply_are_not_sent_to_it) {
    Session s(config_of(0));
    refuse_q4_1_experts();
    s.commit();
    for (const fsd_placement where : {FSD_STREAMED, FSD_CPU}) {
        const std::vector<uint8_t> placement(s.n_shards, where);
        const fsd_tier tier = {0, placement.data()};
        for (const uint64_t budget : {s.floor + (2 << 20), s.full}) {
            CHECK(fsd_set_budget(budget, 0) == FSD_OK);
            CHECK(fsd_set_plan(&tier, 1, s.n_shards, 2 << 20, 0.5, 0) == FSD_OK);
            CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
            s.check_conversation();
        }
    }
    CHECK(stats().experts_streamed == 0 && stats().experts_on_cpu == 0);
}

// Copies of a few KiB would wait behind copies of weights. So kernels read results of the CPU from host memory, where
// the device can do that.
SCENARIO(what_the_cpu_has_computed_takes_no_turn_on_the_link) {
    Session s(config_of(0));
    s.commit();
    const std::vector<uint8_t> on_cpu(s.n_shards, FSD_CPU);
    const fsd_tier tier = {0, on_cpu.data()};
    CHECK(fsd_set_plan(&tier, 1, s.n_shards, 0, 0.0, 0) == FSD_OK && fsd_set_budget(s.floor, 0) == FSD_OK);
    uint64_t sent[2], rows = 0;
    for (const bool kernels : {false, true}) {
        fsd::device().inner.quirks.host_reads = kernels ? fsd::HostReads::always : fsd::HostReads::never;
        const uint64_t before = fs_emulated_get_stats(fsd::device().inner.dev).h2d_bytes;
        s.check_conversation();
        sent[kernels] = fs_emulated_get_stats(fsd::device().inner.dev).h2d_bytes - before;
    }
    for (const Batch &b : s.conversation) {
        rows += (uint64_t)b.n * kLayers;
    }
    CHECK(sent[true] + rows * kEmbd * sizeof(float) < sent[false]);
}

SCENARIO(row_pieces_of_many_tokens) {
    // The results of so many tokens do not fit into scratch, so they are computed in parts.
    Session s(config_of(0), {{900, 0}, {1, 900}}, 1024, 900);
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    s.check_conversation();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    s.check_conversation();
}

SCENARIO(resident_neighbours_share_a_segment_and_wait_for_no_event) {
    Session s(config_of(0), {{1, 0}, {1, 1}}); // the head is computed in row pieces
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    s.check_decode(0);
    const auto events = [] { return fs_emulated_get_stats(fsd::device().inner.dev).events; };
    const uint64_t steps = stats().steps, events_before = events();
    s.check_decode(0);
    CHECK(stats().steps - steps <= 4); // 12 if each of the head's six pieces were a segment; some nodes are the CPU's
    CHECK(events() == events_before);
}

SCENARIO(the_cpu_computes_no_row_pieces_that_are_resident) {
    Session s(config_of(0), {{1, 0}, {3, 1}});
    s.commit();
    const std::vector<uint8_t> on_cpu(s.n_shards, FSD_CPU);
    const fsd_tier tier = {0, on_cpu.data()};
    CHECK(fsd_set_plan(&tier, 1, s.n_shards, kPieceBytes, 0.0, 0) == FSD_OK);
    const uint64_t head = s.conversation.size() * ggml_nbytes(s.net->weights.head);
    std::set<uint64_t> read;
    for (uint64_t budget = s.full; budget > s.full - (2 << 20); budget -= 128 << 10) {
        CHECK(fsd_set_budget(budget, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        const uint64_t before = stats().cpu_read_bytes;
        s.check_conversation();
        const uint64_t now = stats().cpu_read_bytes - before;
        CHECK(read.empty() ||
              (now >= *read.rbegin() && now - *read.rbegin() < head * 3 / 4)); // never all of it at once
        read.insert(now);
        s.check_ledger();
    }
    CHECK(*read.rbegin() - *read.begin() >= head && stats().cpu_busy_s > 0);
}

// Predictions are made at any time from what takes VRAM beside the compute buffers.
SCENARIO(figures_are_of_one_moment_while_graphs_run) {
    Session s(config_of(0), {{900, 0}, {1, 900}}, 1024, 900);
    s.commit();
    s.check_conversation();
    std::atomic<bool> done{false};
    std::set<uint64_t> beside, graphs;
    std::thread reader([&] {
        while (!done.load()) {
            const fsd_stats st = stats();
            beside.insert(st.buffers_bytes - st.kv_bytes - st.graph_bytes);
            graphs.insert(st.graph_bytes);
        }
    });
    for (int i = 0; i < 10; i++) {
        s.check_conversation();
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    }
    done.store(true);
    reader.join();
    CHECK(graphs.size() > 1 && beside.size() == 1);
}

#ifdef __linux__
LINUX_SCENARIO(budgets_start_no_step_in_the_hosts_gpu_time) {
    constexpr uint64_t ms = 1000000, busy = 300 * ms;
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK);
    HostBlock host;
    CHECK(fsd_open_frame_block(host.path().c_str()) == FSD_OK);
    CHECK(fsd_set_scheduling_mode(FSD_PRIORITIZE_GRAPHICS) == FSD_OK);
    uint64_t generation = 0;
    // The first budgets change nothing, so that the program stays valid; the others do.
    for (uint64_t least : {s.full, s.floor}) {
        const uint64_t begin = fsd::clock_ns();
        host.draw(begin, 1000 * ms, busy);
        std::atomic<bool> done{false};
        std::thread game([&] {
            for (; !done.load(); generation++) {
                host.ask(generation + 1, generation % 2 ? least : s.full + 1);
                std::this_thread::sleep_for(std::chrono::milliseconds(3));
            }
        });
        s.check_conversation();
        const uint64_t took = fsd::clock_ns() - begin;
        done.store(true);
        game.join();
        CHECK(took >= busy);
        CHECK(host.block->applied_generation.load() > 0);
    }
    fsd_pacing pacing = {};
    pacing.struct_size = sizeof(pacing);
    CHECK(fsd_get_pacing(&pacing) == FSD_OK && pacing.waited_s > 0);
}
#endif

void change_budgets_while_graphs_run(bool placements, unsigned seed, bool one_queue = false, bool async = false) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 4; // makes copies take as long as the computation
    Session s(config);
    fsd::device().inner.quirks.one_queue = one_queue;
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK);
    CHECK(fsd_reset_peak() == FSD_OK);
    std::atomic<bool> done{false};
    std::thread changer([&] {
        std::mt19937 random(seed);
        for (int i = 0; i < 250; i++) {
            // Waits for some steps, so that most changes come in the middle of a graph.
            const uint64_t steps = stats().steps + random() % 40;
            while (stats().steps < steps) {
                std::this_thread::yield();
            }
            const uint64_t budget = s.random_budget(random);
            if (random() % 8 == 0) {
                // If a graph runs, the call times out at once. The budget stays in force, and the graph applies it.
                const fsd_status status = fsd_set_budget(budget, 0);
                CHECK(status == FSD_OK || status == FSD_TIMEOUT);
            } else {
                CHECK(fsd_set_budget(budget, 60) == FSD_OK);
                const fsd_stats st = stats();
                CHECK(st.budget_bytes == budget && st.used_bytes <= budget);
                CHECK(st.peak_bytes <= s.full);
            }
            if (random() % 4 == 0) {
                CHECK(fsd_set_budget(s.floor - 1, 60) == FSD_BELOW_FLOOR);
            }
        }
        done.store(true);
    });
    std::mt19937 random(seed + 1);
    while (!done.load()) {
        if (placements) {
            s.set_random_plan(random);
        }
        const auto fill = [&] {
            if (random() % 2) {
                CHECK(fsd_fill(random() % 2 ? UINT64_MAX : 2 * kPieceBytes, nullptr) == FSD_OK);
            }
        };
        if (async) {
            s.check_asynchronous_conversation();
            fill();
        } else {
            s.check_conversation(&random, fill);
        }
    }
    changer.join();
    s.check_conversation();
    s.check_ledger();
    CHECK(stats().peak_bytes <= s.full);
    CHECK(stats().evicted_slabs > 0 && stats().filled_slabs > 0 && stats().copies > 0);
}

SCENARIO(budget_changes_while_streamed_graphs_run) { change_budgets_while_graphs_run(false, 3); }

SCENARIO(budget_changes_while_placed_graphs_run) { change_budgets_while_graphs_run(true, 4); }

SCENARIO(budget_changes_while_asynchronous_graphs_run) { change_budgets_while_graphs_run(true, 5, false, true); }

// A thread makes the copies, of experts in the cache too, whose slots get other experts meanwhile.
SCENARIO(budget_changes_while_a_thread_copies) { change_budgets_while_graphs_run(true, 5, true); }

SCENARIO(a_budget_below_the_floor_is_refused) {
    Session s(config_of(1 << 20));
    CHECK(fsd_commit() == FSD_BELOW_FLOOR);
    CHECK(std::strstr(fsd_last_error(), "below the floor") != nullptr);
    fsd_stats st = stats();
    CHECK(st.used_bytes == 0 && st.floor_bytes > 1 << 20);
    // The engine may ask for another budget and commit again.
    CHECK(fsd_set_budget(st.floor_bytes - 1, 0) == FSD_BELOW_FLOOR);
    CHECK(fsd_set_budget(st.floor_bytes, 0) == FSD_OK);
    s.commit();
    CHECK(s.floor == st.floor_bytes);
    CHECK(s.full <= s.floor + s.net->weights.bytes + (1 << 20)); // `full` counts every weight once
    s.check_conversation();
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    st = stats();
    CHECK(fsd_set_budget(s.floor - 1, 1) == FSD_BELOW_FLOOR);
    const fsd_stats now = stats();
    CHECK(now.budget_bytes == st.budget_bytes && now.used_bytes == st.used_bytes);
    CHECK(now.budget_generation == st.budget_generation && now.evicted_slabs == st.evicted_slabs);
    s.check_conversation();
    s.check_ledger();
}

SCENARIO(a_budget_that_a_later_one_replaces_is_not_late) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK && stats().used_bytes > s.floor);
    fsd::Device &d = fsd::device();
    fsd_status status = FSD_TIMEOUT;
    std::thread first;
    {
        std::lock_guard<std::mutex> busy(d.graph_mutex); // as while a graph runs
        first = std::thread([&] { status = fsd_set_budget(s.floor, 60); });
        while (!d.requests.pending()) {
            std::this_thread::yield();
        }
        uint64_t full = s.full;
        d.requests.ask(full, UINT64_MAX);
    }
    first.join();
    CHECK(status == FSD_OK);
    CHECK(stats().budget_bytes == s.full && stats().used_bytes > s.floor);
}

SCENARIO(the_largest_budget_is_no_limit) {
    Session s(config_of(UINT64_MAX));
    s.commit();
    for (const uint64_t budget : {UINT64_MAX, UINT64_MAX / 2, uint64_t{0}}) {
        CHECK(fsd_set_budget(budget, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        s.check_conversation();
        CHECK(stats().kv_host_bytes == 0 && stats().streamed_bytes == 0 && stats().used_bytes == s.full);
    }
}

struct Probes {
    Probes() {
        machine.struct_size = sizeof(machine);
        product.struct_size = sizeof(product);
        attention.struct_size = sizeof(attention);
        attention.type = GGML_TYPE_F16;
        look.struct_size = sizeof(look);
    }
    static void expect(fsd_status status, fsd_status wanted, const char *why) {
        CHECK(status == wanted && std::strstr(fsd_last_error(), why) != nullptr);
        CHECK(fsd_set_plan(nullptr, 0, 0, 0, 2, 0) == FSD_BAD_ARGUMENT); // leaves another message
    }
    void expect_of_all(fsd_status wanted, const char *why) {
        expect(fsd_probe_machine(0.01, &machine), wanted, why);
        expect(fsd_probe_product(GGML_TYPE_F16, 256, 256, 0, 0, 0.01, &product), wanted, why);
        expect(fsd_probe_attention(64, 2, 2, 256, 0.01, &attention), wanted, why);
        expect(fsd_probe_look(GGML_TYPE_F16, 256, 256, &look), wanted, why);
    }

    fsd_machine_rates machine = {};
    fsd_product_rates product = {};
    fsd_attention_rates attention = {};
    fsd_look_rates look = {};
};

SCENARIO(probes_say_why_they_fail) {
    Probes p;
    p.expect(fsd_probe_machine(0, &p.machine), FSD_BAD_ARGUMENT, "fsd_probe_machine");
    p.expect(fsd_probe_product(GGML_TYPE_Q4_1, 256, 33, 0, 0, 0.01, &p.product), FSD_BAD_ARGUMENT, "fsd_probe_product");
    p.expect(fsd_probe_product(GGML_TYPE_F16, 256, 64, 8, 3, 0.01, &p.product), FSD_BAD_ARGUMENT, "fsd_probe_product");
    p.expect(fsd_probe_attention(64, 3, 2, 256, 0.01, &p.attention), FSD_BAD_ARGUMENT, "fsd_probe_attention");
    p.expect(fsd_probe_look(GGML_TYPE_Q4_1, 256, 33, &p.look), FSD_BAD_ARGUMENT, "fsd_probe_look");
    p.expect_of_all(FSD_BAD_STATE, "fsd_configure comes first");
    const fsd_config config = config_of(64);
    CHECK(fsd_configure(&config) == FSD_OK);
    p.expect(fsd_probe_machine(0.01, &p.machine), FSD_OUT_OF_MEMORY, "no room");
    p.expect(fsd_probe_product(GGML_TYPE_F16, 256, 256, 0, 0, 0.01, &p.product), FSD_OUT_OF_MEMORY, "no room");
    p.expect(fsd_probe_look(GGML_TYPE_F16, 256, 256, &p.look), FSD_OUT_OF_MEMORY, "no room");
    CHECK(fsd_set_budget(0, 1) == FSD_OK && fsd_stop_probe(1) == FSD_OK);
    p.expect_of_all(FSD_STOPPED, "stopped");
}

SCENARIO(a_parked_device_measures_nothing) {
    Session s(config_of(0));
    s.commit();
    Probes p;
    CHECK(fsd_park() == FSD_OK);
    p.expect_of_all(FSD_BAD_STATE, "fsd_unpark");
    CHECK(fsd_unpark() == FSD_OK && fsd_probe_look(GGML_TYPE_F16, 256, 256, &p.look) == FSD_OK);
    s.check_conversation();
}

SCENARIO(host_memory_is_counted_and_limited) {
    Session s(config_of(0));
    CHECK(fsd_set_host_budget(1, 0) == FSD_OK); // the floor is not known yet
    CHECK(fsd_commit() == FSD_BELOW_HOST_FLOOR &&
          std::string(fsd_last_error()).find("host memory") != std::string::npos);
    CHECK(fsd_set_host_budget(0, 0) == FSD_OK);
    s.commit();
    s.check_conversation();
    fsd_stats st = stats();
    CHECK(st.host_budget_bytes == 0 && st.host_weights_bytes == s.net->weights.bytes);
    CHECK(st.kv_host_bytes == 0 && st.host_used_bytes >= st.host_weights_bytes && st.disk_read_bytes == 0);
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK); // KV blocks move to host memory
    const fsd_stats small = stats();
    CHECK(small.kv_host_bytes > 0 && small.host_used_bytes == st.host_used_bytes + small.kv_host_bytes);
    CHECK(fsd_set_host_budget(small.host_floor_bytes - 1, 0) == FSD_BELOW_HOST_FLOOR);
    CHECK(stats().host_budget_bytes == 0);
    CHECK(fsd_set_host_budget(small.host_floor_bytes, 0) == FSD_OK);
    CHECK(stats().host_budget_bytes == small.host_floor_bytes);
    s.check_conversation();
}

SCENARIO(blocks_have_host_memory_before_they_leave_vram) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK);
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    for (uint64_t taken = 1; taken > 0;) {
        CHECK(fsd_add_spare(&taken) == FSD_OK);
    }
    s.check_conversation();
    const fsd_stats whole = stats();
    CHECK(whole.kv_host_bytes == 0 && whole.host_used_bytes > whole.host_weights_bytes);
    for (int i = 0; i < 3; i++) {
        CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
        CHECK(stats().kv_host_bytes > 0 && stats().host_used_bytes == whole.host_used_bytes);
        s.check_conversation();
        CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        CHECK(stats().kv_host_bytes == 0 && stats().host_used_bytes == whole.host_used_bytes);
        s.check_conversation();
    }
    // A limit needs no room for what only makes the next change quicker.
    CHECK(whole.host_floor_bytes < whole.host_used_bytes);
    CHECK(fsd_set_host_budget(whole.host_floor_bytes, 0) == FSD_OK);
    CHECK(stats().host_used_bytes <= whole.host_floor_bytes);
    uint64_t taken = 0;
    CHECK(fsd_add_spare(&taken) == FSD_OK && taken == 0 && stats().host_used_bytes <= whole.host_floor_bytes);
    s.check_conversation();
}

// A buffer that is allocated after fsd_commit, such as one of a second context, takes VRAM from the arena, never from
// the floor.
SCENARIO(a_buffer_after_commit_takes_from_the_arena) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    CHECK(fsd_reset_peak() == FSD_OK);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(fsd::plugin_device());
    const uint64_t spare = s.full - s.floor;
    CHECK(ggml_backend_buft_alloc_buffer(buft, spare + 1) == nullptr);
    CHECK(stats().streamed_bytes == 0); // the refused allocation has evicted nothing
    for (uint64_t size : {uint64_t{1} << 20, spare}) {
        ggml_backend_buffer_t more = ggml_backend_buft_alloc_buffer(buft, size);
        CHECK(more != nullptr && stats().streamed_bytes == 0); // an adapter takes VRAM with its first tensor
        ggml_tensor adapter = fsd::raw_tensor(nullptr, nullptr, size);
        CHECK(ggml_backend_tensor_alloc(more, &adapter, ggml_backend_buffer_get_base(more)) == GGML_STATUS_SUCCESS);
        CHECK(stats().floor_bytes == s.floor + size && stats().streamed_bytes > 0);
        s.check_conversation();
        CHECK(fsd_set_budget(s.full - 1, 0) == (size == spare ? FSD_BELOW_FLOOR : FSD_OK));
        ggml_backend_buffer_free(more);
        CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        CHECK(stats().streamed_bytes == 0);
        s.check_conversation();
        s.check_ledger();
    }
    CHECK(stats().peak_bytes <= s.full);
}

SCENARIO(overhead_counts) {
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    s.check_conversation();
    const uint64_t more = (s.full - s.floor) / 2, budget = s.full;
    CHECK(fsd_set_overhead(more) == FSD_OK);
    s.floor += more;
    s.full += more;
    CHECK(stats().used_bytes <= budget && stats().streamed_bytes > 0);
    s.check_conversation();
    s.check_ledger();
    CHECK(fsd_set_budget(s.floor - 1, 0) == FSD_BELOW_FLOOR);
    CHECK(fsd_set_overhead(budget) == FSD_BELOW_FLOOR);
    CHECK(fsd_set_overhead(0) == FSD_OK);
    s.floor -= more;
    s.full -= more;
    s.check_conversation();
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK && stats().streamed_bytes == 0);
    s.check_conversation();
    s.check_ledger();
    CHECK(fsd_park() == FSD_OK && fsd_set_overhead(more) == FSD_OK && stats().floor_bytes == s.floor + more);
    CHECK(fsd_set_overhead(0) == FSD_OK && stats().floor_bytes == s.floor && fsd_unpark() == FSD_OK);
    s.check_conversation();
    s.check_ledger();
}

// The driver alone holds more than the budget before anything is committed: the refusal names the floor.
SCENARIO(overhead_before_the_commit) {
    Session s(config_of(uint64_t{1} << 20));
    CHECK(fsd_set_overhead(uint64_t{64} << 20) == FSD_OK);
    CHECK(fsd_commit() == FSD_BELOW_FLOOR);
    CHECK(stats().floor_bytes > uint64_t{64} << 20);
    CHECK(fsd_set_overhead(0) == FSD_OK && fsd_set_budget(0, 0) == FSD_OK);
    s.commit();
    s.check_conversation();
}

// The budget is larger than the free VRAM of the device. This happens when another program uses VRAM.
SCENARIO(a_card_smaller_than_the_budget) {
    fsd_config config = config_of(0);
    config.emulated_vram_bytes = 5 << 20;
    Session s(config);
    s.commit();
    CHECK(s.floor < config.emulated_vram_bytes && config.emulated_vram_bytes < s.full);
    for (int i = 0; i < 3; i++) {
        s.check_conversation();
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        CHECK(stats().streamed_bytes > 0);
    }
    s.check_conversation();
    s.check_ledger();
}

SCENARIO(abort_stops_a_graph_in_the_middle) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.05; // a graph takes 0.1 s
    Session s(config);
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    s.check_decode(0);
    const fsd_stats before = stats();
    s.check_decode(1);
    const uint64_t steps = stats().steps - before.steps;
    for (uint64_t after : {uint64_t{1}, steps / 2, steps - 4}) {
        std::vector<float> logits;
        bool in_the_middle = false;
        // On a busy machine the abort may come after the last step.
        for (int tries = 0; !in_the_middle && tries < 100; tries++) {
            CHECK(fsd_set_abort(0) == FSD_OK);
            const uint64_t begin = stats().steps;
            std::thread player([&] {
                while (stats().steps < begin + after) {
                    std::this_thread::yield();
                }
                CHECK(fsd_set_abort(1) == FSD_OK);
            });
            const bool aborted = s.net->decode(s.conversation[1], logits) == GGML_STATUS_ABORTED;
            player.join();
            in_the_middle = aborted && stats().steps - begin < steps;
        }
        CHECK(in_the_middle);
        CHECK(s.net->compute(logits) == GGML_STATUS_ABORTED); // the abort stays set until it is cleared
        CHECK(fsd_set_abort(0) == FSD_OK);
        s.check_decode(1);
    }
    s.check_decode(2);
    s.check_ledger();
}

SCENARIO(the_failure_of_an_asynchronous_graph_is_that_of_the_next) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.05; // a graph takes 0.1 s
    Session s(config);
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    s.check_decode(0);
    uint64_t begin = stats().steps;
    s.check_decode(1);
    const uint64_t steps = stats().steps - begin;
    std::vector<float> logits;
    bool in_the_middle = false;
    for (int tries = 0; !in_the_middle && tries < 100;
         tries++) { // on a busy machine the abort may come after the last step
        s.net->forget();
        s.check_decode(0);
        begin = stats().steps;
        s.net->prepare(s.conversation[1]);
        CHECK(fsd_set_async(1) == FSD_OK && s.net->compute() == GGML_STATUS_SUCCESS);
        s.net->prepare(s.conversation[2]); // does not wait
        CHECK(fsd_set_async(0) == FSD_OK && fsd_set_abort(1) == FSD_OK);
        ggml_backend_synchronize(s.backend);
        in_the_middle = stats().steps - begin < steps;
        CHECK(fsd_set_abort(0) == FSD_OK);
        if (tries % 2 == 0) {
            CHECK(fsd_end_graph() == FSD_OK); // forgets the failure
            in_the_middle = false;
        }
        const bool aborted = s.net->compute(logits) == GGML_STATUS_ABORTED;
        CHECK(aborted == in_the_middle);
        s.check_asynchronous_conversation(); // a failure is told once
    }
    CHECK(in_the_middle);
    s.check_ledger();
}

// The floor has room for small graphs only, and a large one takes what the budget leaves.
SCENARIO(a_budget_without_room_for_a_graph_ends_it) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.05;
    Session s(config, {{900, 0}, {1, 900}}, 1024, 900);
    fsd::device().inner.quirks.pool_share = 0.25;
    CHECK(fsd_set_floor_graphs(stats().most_graph_bytes / 8) == FSD_OK);
    s.commit();
    CHECK(stats().floor_graph_bytes < stats().most_graph_bytes / 7);
    std::vector<float> logits;
    for (const bool repeated : {false, true}) { // llama.cpp runs a graph that it has laid out before
        bool in_the_middle = false;
        for (int tries = 0; !in_the_middle && tries < 100; tries++) {
            CHECK(fsd_set_budget(s.full, 0) == FSD_OK);
            s.net->prepare(s.conversation[0]);
            if (repeated) {
                CHECK(s.net->compute(logits) == GGML_STATUS_SUCCESS && fsd_end_graph() == FSD_OK);
            }
            const uint64_t begin = stats().steps;
            std::thread host([&] {
                while (stats().steps < begin + 2) {
                    std::this_thread::yield();
                }
                CHECK(fsd_set_budget(s.floor, 60) == FSD_OK);
                CHECK(stats().used_bytes <= s.floor);
            });
            in_the_middle = s.net->compute(logits) == GGML_STATUS_ABORTED;
            CHECK(fsd_end_graph() == FSD_OK); // a graph that has ended by itself gives its memory back now
            host.join();
        }
        CHECK(in_the_middle && stats().graph_bytes == 0 && stats().pool_bytes == 0 && stats().lacks_workspaces);
    }
    CHECK(s.net->decode(s.conversation[0], logits) == GGML_STATUS_ALLOC_FAILED);
    const fsd_stats refused = stats();
    CHECK(refused.refused_graph_bytes > refused.floor_graph_bytes && refused.used_bytes <= s.floor);
    const uint64_t room = s.floor + refused.refused_graph_bytes - refused.floor_graph_bytes;
    const uint64_t pool = (refused.refused_graph_bytes - refused.floor_graph_bytes) / 4;
    for (const uint64_t budget : {room + pool + 1024, s.full}) {
        CHECK(fsd_set_budget(budget, 0) == FSD_OK && fsd_reset_peak() == FSD_OK);
        s.check_conversation();
        CHECK(fsd_end_graph() == FSD_OK && stats().refused_graph_bytes == 0 && stats().peak_bytes <= budget);
        CHECK(stats().pool_bytes > 0 && stats().pool_bytes <= pool + 1024 && !stats().lacks_workspaces);
    }
    CHECK(fsd_set_budget(room + pool - 1024, 0) == FSD_OK);
    CHECK(s.net->decode(s.conversation[0], logits) == GGML_STATUS_ALLOC_FAILED);

    s.net->prepare(s.conversation[0]);
    s.net->write_input(); // there is no room for it
    CHECK(fsd_set_budget(s.full, 0) == FSD_OK && s.net->start() == GGML_STATUS_ABORTED);
    s.check_conversation();
}

// With everything in VRAM the memory of a large graph is kept. A budget that takes it must leave a small graph its input.
SCENARIO(a_budget_between_the_input_of_a_graph_and_its_run) {
    constexpr int kPrompt = 900;
    constexpr uint64_t kSmallGraphs = 1 << 20; // their memory, beside that of a large one
    Session s(config_of(0), {{kPrompt, 0}, {1, kPrompt}, {2, kPrompt + 1}, {1, kPrompt + 3}}, 1024, kPrompt);
    s.commit();
    std::mt19937 random(6);
    bool freed = false; // memory of a large graph
    for (int round = 0; round < 4; round++) {
        CHECK(fsd_set_budget(s.full + kSmallGraphs, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        s.net->forget();
        s.check_decode(0);
        CHECK(fsd_end_graph() == FSD_OK);
        for (size_t i = 1; i < s.conversation.size(); i++) {
            s.net->prepare(s.conversation[i]);
            s.net->write_input();
            const uint64_t held = stats().graph_bytes;
            CHECK(fsd_set_budget(s.random_budget(random), 0) == FSD_OK);
            freed = freed || stats().graph_bytes < held;
            std::vector<float> logits;
            CHECK(s.net->run(logits) == GGML_STATUS_SUCCESS);
            CHECK(logits == s.expected[i]);
            CHECK(fsd_end_graph() == FSD_OK);
        }
    }
    CHECK(freed);
}

// Copies run ahead of the next graph. After the model is freed, they must not read from the unmapped file.
SCENARIO(a_model_can_go_while_copies_are_under_way) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.02;
    Session s(config);
    s.commit();
    CHECK(fsd_set_budget(s.floor + 4 * kPieceBytes, 0) == FSD_OK);
    s.check_decode(0);
    s.net.reset();
    s.file.unmap();
    ggml_backend_synchronize(fsd::device().inner.copy);
}

SCENARIO(a_model_can_go_while_the_arena_fills) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.02;
    Session s(config);
    s.commit();
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK); // copies start, and no graph follows that would wait for them
    s.net.reset();
    s.file.unmap();
    ggml_backend_synchronize(fsd::device().inner.copy);
}

SCENARIO(calls_out_of_order) {
    fsd_config config = config_of(0);
    const uint8_t placement[1] = {FSD_STREAMED};
    const fsd_tier tier = {0, placement};
    fsd_stats st = {};
    CHECK(fsd_get_stats(&st) == FSD_BAD_ARGUMENT); // struct_size is not set
    CHECK(stats().used_bytes == 0);
    CHECK(fsd_commit() == FSD_BAD_STATE);
    CHECK(fsd_fill(1, nullptr) == FSD_BAD_STATE);
    CHECK(fsd_set_budget(1 << 30, 0) == FSD_BAD_STATE);
    CHECK(fsd_set_plan(&tier, 1, 1, 0, 0, 1) == FSD_BAD_STATE);
    CHECK(ggml_backend_dev_init(fsd::plugin_device(), nullptr) == nullptr);

    CHECK(fsd_configure(nullptr) == FSD_BAD_ARGUMENT);
    config.struct_size--;
    CHECK(fsd_configure(&config) == FSD_BAD_ARGUMENT);
    config = config_of(0);
    config.n_threads = 0;
    CHECK(fsd_configure(&config) == FSD_BAD_ARGUMENT);
    config = config_of(0);
    for (const char *name : {"", "CUDA99", "CPU", "FRAMESHARD0"}) {
        config.inner_device = name;
        CHECK(fsd_configure(&config) == FSD_NO_DEVICE);
        CHECK(std::strstr(fsd_last_error(), "emulated") != nullptr);
    }
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", "nonsense"));
    config = config_of(0);
    CHECK(fsd_configure(&config) == FSD_BAD_ARGUMENT);
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", nullptr));
    CHECK(stats().used_bytes == 0); // a failed fsd_configure has changed nothing

    Session s(config);
    CHECK(fsd_configure(&config) == FSD_BAD_STATE);
    CHECK(fsd_fill(1, nullptr) == FSD_BAD_STATE);
    CHECK(fsd_set_plan(&tier, 1, 1, 0, 0, 1) == FSD_BAD_STATE);
    std::vector<float> logits;
    CHECK(s.net->decode(s.conversation[0], logits) == GGML_STATUS_FAILED);
    s.commit();
    CHECK(fsd_commit() == FSD_BAD_STATE);
    CHECK(fsd_set_shards(nullptr, 0, 1) == FSD_BAD_STATE);
    const uint8_t bad_placement[1] = {0};
    const fsd_tier bad[] = {{1, placement}, {0, nullptr}, {0, bad_placement}};
    for (const fsd_tier &t : bad) {
        CHECK(fsd_set_plan(&t, 1, 1, 0, 0, 1) == FSD_BAD_ARGUMENT);
    }
    const fsd_tier descending[] = {{0, placement}, {0, placement}};
    CHECK(fsd_set_plan(descending, 2, 1, 0, 0, 1) == FSD_BAD_ARGUMENT);
    s.check_conversation();
}

// --------------------------------------------------------------------------------------------------------------- faults

void set_fault(const char *kind, uint64_t number) {
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", (std::string(kind) + "=" + std::to_string(number)).c_str()));
}

SCENARIO(pinned_memory_is_the_callers) {
    for (uint64_t pins : {0, 1}) {
        CHECK(run_apart([pins] {
                  void *memory = nullptr, *data = nullptr;
                  CHECK(fsd_take_pinned(1 << 20, &memory, &data) == FSD_BAD_STATE);
                  set_fault("unpinned", pins); // the device has memory that it pins itself
                  fsd_config config = config_of(0);
                  CHECK(fsd_configure(&config) == FSD_OK);
                  const fsd_status status = fsd_take_pinned(1 << 20, &memory, &data);
                  CHECK(status == (pins ? FSD_OK : FSD_UNSUPPORTED));
                  if (pins) {
                      std::memset(data, 1, 1 << 20);
                      fsd_free_pinned(memory);
                  }
                  return 0;
              }) == 0);
    }
}

// The k-th allocation fails once. The call that needs it must return an error, and succeed when it is repeated.
int with_refused_allocation(uint64_t k) {
    set_fault("alloc", k);
    fsd_config config = config_of(0);
    config.slab_bytes = 2 << 20; // fewer allocations, so fewer cases
    Session s(config);
    int failures = 0;
    fsd_status status = fsd_commit();
    if (status != FSD_OK) {
        CHECK(status == FSD_OUT_OF_MEMORY);
        failures++;
    }
    if (failures > 0) {
        s.commit();
    }
    s.floor = stats().floor_bytes;
    s.full = stats().full_bytes;
    s.check_ledger();
    auto decode = [&] {
        for (size_t i : {0, 1}) {
            s.net->prepare(s.conversation[i]);
            std::vector<float> logits;
            if (s.net->compute(logits) != GGML_STATUS_SUCCESS) {
                failures++;
                CHECK(s.net->compute(logits) == GGML_STATUS_SUCCESS);
            }
            CHECK(logits == s.expected[i]);
        }
        s.check_ledger();
    };
    std::vector<uint8_t> placement(s.n_shards, FSD_STREAMED);
    const fsd_tier tier = {0, placement.data()};
    for (uint64_t ring : {2 * kPieceBytes, 5 * kPieceBytes}) {
        for (uint64_t budget : {(s.floor + s.full) / 2, s.full, s.floor}) {
            CHECK(fsd_set_budget(budget, 0) == FSD_OK);
            s.net->forget();
            decode();
            status = fsd_set_plan(&tier, 1, s.n_shards, ring, 0.5, 1);
            if (status != FSD_OK) {
                CHECK(status == FSD_OUT_OF_MEMORY);
                failures++;
            }
            CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK); // weights without a slab are streamed
            s.net->forget();
            decode();
        }
    }
    CHECK(failures <= 1);
    return fs_emulated_get_stats(fsd::device().inner.dev).allocations < k ? kFaultNotReached : 0;
}

TEST(every_allocation_may_be_refused) {
    int result = 0;
    uint64_t k = 1;
    for (; result == 0; k++) {
        result = run_apart([k] { return with_refused_allocation(k); });
    }
    CHECK(result == kFaultNotReached);
    CHECK(k > 10); // otherwise hardly any allocation was tested
}

// The k-th computation fails and the device is lost. Every later graph must return an error, without a crash or a hang.
int with_failed_compute(uint64_t k) {
    set_fault("compute_fail", k);
    Session s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget((s.floor + s.full) / 2, 0) == FSD_OK);
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    bool failed = false;
    for (size_t i = 0; i < s.conversation.size(); i++) {
        std::vector<float> logits;
        const ggml_status status = s.net->decode(s.conversation[i], logits);
        failed = failed || status != GGML_STATUS_SUCCESS;
        CHECK(failed ? status != GGML_STATUS_SUCCESS : logits == s.expected[i]);
    }
    const fsd_status status = fsd_set_budget(s.floor, 0);
    CHECK(status == FSD_OK && stats().used_bytes <= s.floor);
    uint64_t filled = 0;
    CHECK(fsd_fill(UINT64_MAX, &filled) == FSD_OK);
    return failed ? 0 : kFaultNotReached;
}

// The driver pins none of the model file. Streamed bytes come from a second copy, or all pass the staging slots, for which
// copies may wait.
void with_unpinned_weights(uint64_t fault, fsd_host_path path) {
    set_fault("unpinned", fault);
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 2;
    Session s(config);
    s.commit();
    CHECK(stats().host_weights == path);
    std::mt19937 random(5);
    for (uint64_t budget : {s.floor, s.random_budget(random), s.random_budget(random), s.full, s.floor}) {
        CHECK(fsd_set_budget(budget, 0) == FSD_OK);
        CHECK(fsd_reset_peak() == FSD_OK);
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        const fsd_stats before = stats();
        s.check_conversation(&random);
        s.check_ledger();
        const fsd_stats after = stats();
        CHECK(after.peak_bytes <= budget);
        const uint64_t copied_bytes = after.copied_bytes - before.copied_bytes;
        CHECK((copied_bytes > 0) == (budget < s.full));
        CHECK(after.staged_bytes - before.staged_bytes == (path == FSD_HOST_STAGED ? copied_bytes : 0));
    }
    CHECK(fsd_park() == FSD_OK && fsd_unpark() == FSD_OK); // the slots' events belong to streams, which are new now
    s.check_conversation(&random);
}

SCENARIO(a_second_copy_of_weights_gives_the_same_result) { with_unpinned_weights(1, FSD_HOST_COPIED); }

SCENARIO(staged_weights_give_the_same_result) { with_unpinned_weights(2, FSD_HOST_STAGED); }

// Where all streams share one queue, a thread copies the weights that are streamed.
SCENARIO(copies_in_a_thread_give_the_same_result) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 2;
    config.copy_bytes = 10'000; // steps are copied in several parts
    Session s(config);
    fsd::device().inner.quirks.one_queue = true;
    s.commit();
    std::mt19937 random(6);
    for (const bool planned : {false, true}) {
        for (uint64_t budget : {s.floor, s.random_budget(random), s.random_budget(random), s.full, s.floor}) {
            if (planned) {
                s.set_random_plan(random);
            }
            CHECK(fsd_set_budget(budget, 0) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
            const fsd_stats before = stats();
            s.check_conversation(&random);
            s.check_ledger();
            const bool copied = stats().copied_bytes > before.copied_bytes;
            CHECK(planned || copied == (budget < s.full));
            CHECK(planned || copied == fsd::device().ring.has_thread());
        }
    }
    CHECK(fsd_park() == FSD_OK && fsd_unpark() == FSD_OK);
    s.check_conversation(&random);
}

SCENARIO(a_model_can_go_while_a_thread_copies) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.02;
    Session s(config);
    fsd::device().inner.quirks.one_queue = true;
    s.commit();
    CHECK(fsd_set_budget(s.floor + 4 * kPieceBytes, 0) == FSD_OK);
    s.check_decode(0);
    CHECK(fsd::device().ring.has_thread());
    s.net.reset();
    s.file.unmap();
}

#if defined(__linux__)

// A model whose weights are mapped from a file, as llama.cpp maps them.
struct DiskSession : Session {
    explicit DiskSession(const fsd_config &config) : Session(config, kConversation, kContext, kLargestBatch, true) {}

    void commit() {
        Session::commit();
        host_floor = stats().host_floor_bytes;
        host_full = stats().host_used_bytes;
        CHECK(host_floor < host_full);
    }
    uint64_t random_host_budget(std::mt19937 &random) const {
        const uint64_t kv = 1 << 20; // KV blocks may go to host memory
        return host_floor + kv + (uint64_t)((double)(host_full - host_floor) * ((double)random() / 4294967296.0));
    }
    uint64_t expert_bytes() const {
        uint64_t bytes = 0;
        for (const ggml_tensor *t : net->weights.all) {
            bytes += ggml_n_dims(t) == 3 ? ggml_nbytes(t) : 0;
        }
        return bytes;
    }
    // From now on the budgets have room for all weights but experts. Returns the host budget.
    uint64_t set_budgets_without_experts(bool planned) {
        const uint64_t budget = host_floor + ggml_nbytes(net->weights.head) + (768 << 10);
        CHECK(fsd_set_budget(full - expert_bytes(), 0) == FSD_OK && fsd_set_host_budget(budget, 10) == FSD_OK);
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
        const std::vector<uint8_t> placement(n_shards, planned ? FSD_CPU : FSD_STREAMED);
        const fsd_tier tier = {0, placement.data()};
        const uint64_t ring = 3 * kPieceBytes; // with room for a few experts
        CHECK(fsd_set_plan(&tier, 1, n_shards, ring, 0.5, !planned) == FSD_OK);
        return budget;
    }
    // From now on all weights but experts are in VRAM or held. Returns the host budget.
    uint64_t leave_experts(bool planned) {
        const uint64_t budget = set_budgets_without_experts(planned);
        const auto waits = [this] {
            const fsd_stats before = stats();
            check_decode(conversation.size() - 1);
            return stats().disk_read_bytes - before.disk_read_bytes > expert_bytes();
        };
        check_conversation();
        CHECK(fsd::device().cache.is_open());
        while (waits()) { // until what is to be held has been read
        }
        return budget;
    }
    // Decodes until a graph fails.
    void expect_failure(const char *why) {
        ggml_status status = GGML_STATUS_SUCCESS;
        for (size_t i = 0; i < 40 * conversation.size() && status == GGML_STATUS_SUCCESS; i++) {
            if (i % conversation.size() == 0) {
                net->forget();
            }
            std::vector<float> logits;
            status = net->decode(conversation[i % conversation.size()], logits);
            CHECK(status != GGML_STATUS_SUCCESS || logits == expected[i % conversation.size()]);
        }
        CHECK(status == GGML_STATUS_FAILED);
        CHECK(std::strstr(fsd_last_error(), why) != nullptr);
    }
    // Decodes until what is still to fail has failed.
    void decode_after_failures() {
        std::vector<float> logits;
        net->forget();
        for (int tries = 0; net->decode(conversation[0], logits) != GGML_STATUS_SUCCESS; tries++) {
            CHECK(tries < 8);
            net->forget();
        }
    }

    uint64_t host_floor = 0, host_full = 0;
};

LINUX_SCENARIO(weights_from_disk_give_the_same_result) {
    DiskSession s(config_of(0));
    s.commit();
    s.check_conversation();
    CHECK(stats().disk_read_bytes == 0);
    CHECK(fsd_set_host_budget(stats().host_floor_bytes - 1, 0) == FSD_BELOW_HOST_FLOOR);
    std::mt19937 random(11);
    for (int i = 0; i < 24; i++) {
        CHECK(fsd_set_budget(s.random_budget(random), 0) == FSD_OK);
        const uint64_t least = stats().host_floor_bytes;
        const uint64_t budget = i % 6 == 5 ? 0 : i % 3 == 0 ? least : s.random_host_budget(random);
        CHECK(fsd_set_host_budget(budget, 10) == FSD_OK);
        if (i > 12) {
            s.set_random_plan(random);
        }
        const uint64_t before = stats().disk_read_bytes;
        s.check_conversation(i > 12 ? nullptr : &random, [&] {
            const fsd_stats st = stats();
            CHECK(budget == 0 || st.host_used_bytes <= std::max(budget, st.host_floor_bytes));
            CHECK(st.host_used_bytes >= st.host_weights_bytes + st.kv_host_bytes);
        });
        CHECK(i % 3 != 0 || stats().disk_read_bytes > before);
        CHECK(fsd_fill(random() % 2 ? UINT64_MAX : 2 * kPieceBytes, nullptr) == FSD_OK);
        s.check_conversation();
        s.check_ledger();
    }
    CHECK(fsd_park() == FSD_OK && fsd_unpark() == FSD_OK);
    s.check_conversation();
}

void read_experts(bool planned) {
    DiskSession s(config_of(0));
    s.commit();
    const uint64_t experts = s.expert_bytes();
    CHECK(s.host_floor < experts); // not all of them are held
    const uint64_t budget = s.leave_experts(planned);
    const fsd_stats before = stats();
    s.check_conversation();
    const uint64_t read = stats().disk_read_bytes - before.disk_read_bytes;
    CHECK(read > 0 && read < s.conversation.size() * experts);
    for (int i = 0; i < 20; i++) { // until the cache in VRAM is full, nothing is left to the CPU
        s.check_conversation();
        CHECK(stats().host_used_bytes <= budget);
    }
    CHECK((stats().experts_on_cpu > before.experts_on_cpu) == planned);
    CHECK(stats().experts_streamed > before.experts_streamed);
    CHECK(stats().disk_expert_reads > before.disk_expert_reads);
    // With more room they stay.
    CHECK(fsd_set_host_budget(0, 10) == FSD_OK);
    for (int i = 0; i < 20; i++) {
        s.check_conversation();
    }
    const fsd_stats there = stats();
    s.check_conversation();
    CHECK(stats().disk_read_bytes == there.disk_read_bytes && stats().disk_expert_reads == there.disk_expert_reads);
    CHECK(fsd_park() == FSD_OK && fsd_unpark() == FSD_OK);
    s.check_conversation();
}

LINUX_SCENARIO(experts_are_read_one_by_one) { read_experts(false); }

LINUX_SCENARIO(experts_are_read_one_by_one_for_the_cpu) { read_experts(true); }

// They are still under way when the next graph needs other experts, and no more room than the slots have.
LINUX_SCENARIO(reads_of_an_aborted_graph_give_their_slots_back) {
    fsd_config c = config_of(0);
    c.emulated_disk_gbps = 0.02;
    DiskSession s(c);
    s.commit();
    s.leave_experts(true);
    const std::vector<uint8_t> placement(s.n_shards, FSD_CPU);
    const fsd_tier tier = {0, placement.data()};
    // The CPU computes all experts that are read, so they keep their slots until the end of their layer.
    CHECK(fsd_set_plan(&tier, 1, s.n_shards, 3 * kPieceBytes, 0.0, 0) == FSD_OK);
    s.check_conversation();
    for (size_t round = 0; round < 30; round++) {
        CHECK(fsd_clear_expert_cache() == FSD_OK);
        std::vector<float> logits;
        std::atomic<bool> done{false};
        std::thread aborter([&, reads = stats().disk_expert_reads + 1 + round % 15] {
            while (!done.load() && stats().disk_expert_reads < reads) {
                std::this_thread::yield();
            }
            CHECK(fsd_set_abort(1) == FSD_OK);
        });
        const ggml_status aborted = s.net->decode(s.conversation[1 + round % 2], logits);
        done.store(true);
        aborter.join();
        CHECK(aborted == GGML_STATUS_ABORTED || aborted == GGML_STATUS_SUCCESS);
        CHECK(fsd_set_abort(0) == FSD_OK && fsd_end_graph() == FSD_OK && fsd_clear_expert_cache() == FSD_OK);
        CHECK(s.net->decode(s.conversation[2 - round % 2], logits) == GGML_STATUS_SUCCESS);
    }
    s.check_conversation();
}

LINUX_SCENARIO(host_budget_changes_while_graphs_run) {
    DiskSession s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget((s.floor + s.full) / 2, 0) == FSD_OK);
    std::atomic<bool> done{false};
    std::thread changer([&] {
        std::mt19937 random(12);
        for (int i = 0; i < 150; i++) {
            const uint64_t steps = stats().steps + random() % 30;
            while (stats().steps < steps) {
                std::this_thread::yield();
            }
            const uint64_t budget = s.random_host_budget(random);
            CHECK(fsd_set_host_budget(budget, 60) == FSD_OK);
            CHECK(stats().host_used_bytes <= budget);
        }
        done.store(true);
    });
    std::mt19937 random(13);
    while (!done.load()) {
        if (random() % 2) {
            s.set_random_plan(random);
        }
        s.check_conversation(&random);
    }
    changer.join();
    s.check_ledger();
}

// The limit has room for the whole mapping, so weights stay there. Then KV blocks leave VRAM.
void move_blocks_to_host_memory(const std::function<void(DiskSession &)> &move) {
    DiskSession s(config_of(0));
    s.commit();
    s.check_conversation();
    const uint64_t budget = stats().host_used_bytes + 1;
    CHECK(fsd_set_host_budget(budget, 0) == FSD_OK);
    CHECK(stats().host_mapped && stats().kv_host_bytes == 0);
    move(s);
    const fsd_stats st = stats();
    CHECK(st.kv_host_bytes > 1 && st.host_floor_bytes <= budget && st.host_budget_bytes == budget);
    CHECK(st.host_used_bytes <= budget);
    if (fsd::device().parked) {
        CHECK(fsd_unpark() == FSD_OK);
    }
    s.check_conversation(nullptr, [budget] { CHECK(stats().host_used_bytes <= budget); });
}

LINUX_SCENARIO(a_host_budget_holds_when_the_vram_budget_falls) {
    move_blocks_to_host_memory([](DiskSession &s) { CHECK(fsd_set_budget(s.floor, 0) == FSD_OK); });
}

LINUX_SCENARIO(a_host_budget_holds_when_the_device_is_parked) {
    move_blocks_to_host_memory([](DiskSession &) { CHECK(fsd_park() == FSD_OK); });
}

// A vision tower that multiplies `n_columns` columns by one matrix of 1 MiB after the other.
class Tower {
  public:
    Tower(int n_matrices, int64_t n_columns) {
        backend = ggml_backend_dev_init(fsd::vision_device(), nullptr);
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(fsd::vision_device());
        const size_t n = (size_t)n_matrices + 1;
        weights_ctx = ggml_init({ggml_tensor_overhead() * n, nullptr, true});
        graph_ctx = ggml_init({ggml_tensor_overhead() * n + ggml_graph_overhead(), nullptr, true});
        ggml_tensor *x = input = ggml_new_tensor_2d(graph_ctx, GGML_TYPE_F32, kRows, n_columns);
        ggml_set_input(input);
        std::vector<ggml_tensor *> matrices;
        for (int i = 0; i < n_matrices; i++) {
            matrices.push_back(ggml_new_tensor_2d(weights_ctx, GGML_TYPE_F32, kRows, kRows));
            ggml_set_name(matrices.back(), ("v." + std::to_string(i) + ".weight").c_str());
            x = ggml_mul_mat(graph_ctx, matrices.back(), x);
        }
        ggml_set_output(x);
        weights_buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx, buft);
        CHECK(weights_buffer != nullptr);
        ggml_backend_buffer_set_usage(weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const std::vector<float> values(kRows * kRows, 0.01f);
        for (ggml_tensor *t : matrices) {
            ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
        }
        graph = ggml_new_graph(graph_ctx);
        ggml_build_forward_expand(graph, x);
        allocator = ggml_gallocr_new(buft);
        CHECK(ggml_gallocr_alloc_graph(allocator, graph));
    }
    ~Tower() {
        ggml_gallocr_free(allocator);
        ggml_free(graph_ctx);
        ggml_backend_buffer_free(weights_buffer);
        ggml_free(weights_ctx);
        ggml_backend_free(backend);
    }
    Tower(const Tower &) = delete;
    Tower &operator=(const Tower &) = delete;

    ggml_status encode() {
        const std::vector<float> values((size_t)ggml_nelements(input), 1.0f);
        ggml_backend_tensor_set(input, values.data(), 0, ggml_nbytes(input));
        return ggml_backend_graph_compute(backend, graph);
    }

  private:
    static constexpr int64_t kRows = 512;
    ggml_backend_t backend;
    ggml_context *weights_ctx, *graph_ctx;
    ggml_backend_buffer_t weights_buffer;
    ggml_tensor *input;
    ggml_cgraph *graph;
    ggml_gallocr_t allocator;
};

// The limit has room for the whole mapping. Then an image takes the VRAM of the KV blocks.
LINUX_SCENARIO(a_host_budget_holds_when_an_image_is_encoded) {
    DiskSession s(config_of(0));
    s.commit();
    s.check_conversation();
    Tower tower(4, 2048);
    CHECK(tower.encode() == GGML_STATUS_SUCCESS);
    CHECK(fsd_set_budget(stats().image_floor_bytes, 0) == FSD_OK); // has room for the KV cache, or for the image
    s.check_conversation();
    const uint64_t budget = stats().host_used_bytes + 1;
    CHECK(fsd_set_host_budget(budget, 0) == FSD_OK);
    CHECK(stats().host_mapped && stats().kv_host_bytes == 0);
    CHECK(tower.encode() == GGML_STATUS_SUCCESS);
    const fsd_stats st = stats();
    CHECK(st.kv_host_bytes > 1 && st.host_floor_bytes <= budget && st.host_used_bytes <= budget);
    s.check_conversation();
}

LINUX_SCENARIO(a_host_budget_does_not_wait_for_an_image) {
    fsd_config config = config_of(0);
    config.emulated_link_gbps = 0.01; // the image takes seconds
    DiskSession s(config);
    s.commit();
    Tower tower(32, 4);
    const fsd_stats before = stats();
    std::thread limiter([&] {
        while (stats().steps == before.steps) {
            std::this_thread::yield();
        }
        CHECK(fsd_set_host_budget(before.host_floor_bytes, 60) == FSD_OK);
        CHECK(stats().host_used_bytes <= before.host_floor_bytes);
        CHECK(fsd_set_abort(1) == FSD_OK);
    });
    CHECK(tower.encode() == GGML_STATUS_ABORTED); // the limit was reached before its end
    limiter.join();
    CHECK(fsd_set_abort(0) == FSD_OK);
    s.check_conversation();
}

LINUX_SCENARIO(a_host_budget_that_a_later_one_replaces_is_not_late) {
    DiskSession s(config_of(0));
    s.commit();
    fsd::Device &d = fsd::device();
    fsd_status status = FSD_TIMEOUT;
    std::thread first;
    {
        std::lock_guard<std::mutex> busy(d.graph_mutex); // as while a graph runs
        first = std::thread([&] { status = fsd_set_host_budget(s.host_floor, 5); });
        while (d.host.asked() == 0) {
            std::this_thread::yield();
        }
        d.host.ask(0);
    }
    first.join();
    CHECK(status == FSD_OK);
    CHECK(stats().host_budget_bytes == 0 && stats().host_used_bytes > s.host_floor);
}

// The address space of this process may grow by no more than so much while this exists.
struct SmallAddressSpace {
    explicit SmallAddressSpace(uint64_t more) {
        uint64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        CHECK(getrlimit(RLIMIT_AS, &before) == 0);
        const rlimit now = {pages * (uint64_t)sysconf(_SC_PAGESIZE) + more, before.rlim_max};
        CHECK(setrlimit(RLIMIT_AS, &now) == 0);
    }
    ~SmallAddressSpace() { CHECK(setrlimit(RLIMIT_AS, &before) == 0); }
    rlimit before = {};
};

// Host memory has room for one KV block, and not for the others.
LINUX_SCENARIO(a_device_without_host_memory_for_its_cache_is_not_parked) {
    Session s(config_of(0), kConversation, 16 * 1024);
    s.commit();
    CHECK(fsd_use_kv(0, 16 * 1024) == FSD_OK && fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    s.net->forget();
    s.check_decode(0);
    const fsd_stats before = stats();
    CHECK(before.kv_bytes > 64 << 20 && before.kv_host_bytes == 0);
    {
        const SmallAddressSpace small(before.kv_bytes / kLayers * 3 / 2);
        CHECK(fsd_park() == FSD_OUT_OF_MEMORY);
        CHECK(std::strstr(fsd_last_error(), "KV cache") != nullptr);
        const fsd_stats st = stats();
        CHECK(st.used_bytes == before.used_bytes && st.kv_bytes == before.kv_bytes && st.kv_host_bytes == 0);
        CHECK(st.resident_bytes == before.resident_bytes && fsd_unpark() == FSD_BAD_STATE);
        s.check_decode(1);
    }
    CHECK(fsd_park() == FSD_OK && stats().used_bytes == 0 && fsd_unpark() == FSD_OK);
    for (size_t i = 2; i < s.conversation.size(); i++) {
        s.check_decode(i);
    }
}

LINUX_SCENARIO(a_host_budget_can_be_set_before_the_model_is_loaded) {
    const uint64_t budget = Weights().bytes * 3 / 4;
    CHECK(fsd_set_host_budget(budget, 0) == FSD_BAD_STATE);
    DiskSession s(config_of(0));
    CHECK(fsd_set_host_budget(budget, 0) == FSD_OK);
    s.Session::commit();
    CHECK(stats().host_used_bytes <= budget && stats().host_budget_bytes == budget);
    s.check_conversation();
    CHECK(stats().disk_read_bytes > 0 && stats().host_used_bytes <= budget);
}

LINUX_SCENARIO(a_host_budget_holds_while_the_model_is_freed) {
    DiskSession s(config_of(0));
    s.commit();
    const uint64_t budget = Weights().bytes * 3 / 4;
    CHECK(fsd_set_host_budget(budget, 10) == FSD_OK);
    s.check_conversation();
    std::atomic<bool> done{false};
    std::atomic<uint64_t> looks{0};
    uint64_t most = 0;
    std::thread sampler([&] {
        while (!done.load()) {
            most = std::max(most, stats().host_used_bytes);
            looks++;
        }
    });
    while (looks.load() == 0) {
        std::this_thread::yield();
    }
    s.net.reset();
    done.store(true);
    sampler.join();
    CHECK(most <= budget && stats().host_weights_bytes == 0);
}

LINUX_SCENARIO(a_read_that_fails_ends_one_graph) {
    set_fault("disk_fail", 40);
    DiskSession s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    CHECK(fsd_set_host_budget(stats().host_floor_bytes, 10) == FSD_OK);
    s.expect_failure("cannot be read");
    s.decode_after_failures();
    s.check_conversation();
}

LINUX_SCENARIO(an_error_of_the_disk_that_passes_fails_no_graph) {
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", "disk_fail=40,disk_fails=1"));
    DiskSession s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    CHECK(fsd_set_host_budget(stats().host_floor_bytes, 10) == FSD_OK);
    for (int i = 0; i < 3; i++) {
        s.check_conversation();
    }
}

LINUX_SCENARIO(an_error_of_the_disk_that_passes_while_an_expert_is_read_fails_no_graph) {
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", "disk_fail=600,disk_fails=1"));
    DiskSession s(config_of(0));
    s.commit();
    s.leave_experts(false);
    for (int i = 0; i < 3; i++) {
        s.check_conversation();
    }
}

// `all`: experts are not all that is read while graphs run.
void stall(bool all, bool planned) {
    const char *number =
        all ? "2" : "600"; // of the reads: the first are of other weights, leave_experts() takes fewer than 600
    CHECK(fsd::set_environment("FRAMESHARD_FAULTS", (std::string("stuck_ms=3000,disk_stall=") + number).c_str()));
    DiskSession s(config_of(0));
    s.commit();
    uint64_t host_budget = 0;
    if (all) {
        CHECK(fsd_set_budget((s.floor + s.full) / 2, 0) == FSD_OK);
        host_budget = stats().host_floor_bytes + (1 << 20);
        CHECK(fsd_set_host_budget(host_budget, 10) == FSD_OK);
    } else {
        host_budget = s.leave_experts(planned);
    }
    std::atomic<bool> done{false};
    std::thread changer([&] {
        while (!done.load() && stats().disk_waited_s < 0.5) { // it grows while the disk is stuck
            std::this_thread::yield();
        }
        CHECK(!done.load());
        CHECK(fsd_set_host_budget(0, 1.5) == FSD_OK);           // a larger buffer for reads ahead
        CHECK(fsd_set_host_budget(host_budget, 1.5) == FSD_OK); // a smaller one
        CHECK(stats().host_used_bytes <= host_budget);
        CHECK(fsd_set_budget(s.floor, 1.5) == FSD_OK && stats().used_bytes <= s.floor);
    });
    for (int i = 0; i < 100 && stats().disk_waited_s < 0.5; i++) {
        s.check_conversation();
    }
    done.store(stats().disk_waited_s < 0.5);
    changer.join();
    CHECK(stats().disk_waited_s >= 0.5);
}

LINUX_SCENARIO(a_disk_that_stalls_does_not_hold_up_budgets) { stall(true, false); }

LINUX_SCENARIO(a_disk_that_stalls_on_an_expert_does_not_hold_up_budgets) { stall(false, false); }

LINUX_SCENARIO(a_disk_that_stalls_on_an_expert_of_the_cpu_does_not_hold_up_budgets) { stall(false, true); }

LINUX_SCENARIO(an_expert_that_cannot_be_read_ends_one_graph) {
    set_fault("disk_fail", 600);
    DiskSession s(config_of(0));
    s.commit();
    s.leave_experts(false);
    s.expect_failure("cannot be read");
    s.decode_after_failures();
    for (int i = 0; i < 3; i++) {
        s.check_conversation();
    }
}

LINUX_SCENARIO(refused_memory_for_reads_ends_one_graph) {
    set_fault("pages", 1);
    DiskSession s(config_of(0));
    s.commit();
    CHECK(fsd_set_budget(s.floor, 0) == FSD_OK);
    CHECK(fsd_set_host_budget(stats().host_floor_bytes, 10) == FSD_OK);
    s.expect_failure("the system refuses memory for reads of weights");
    s.decode_after_failures();
    s.check_conversation();
}

void refuse_memory_for_experts(bool planned) {
    set_fault("pages", 2); // the first is that for other weights
    DiskSession s(config_of(0));
    s.commit();
    s.set_budgets_without_experts(planned);
    s.expect_failure("the system refuses memory for experts");
    s.decode_after_failures();
    s.check_conversation();
}

LINUX_SCENARIO(refused_memory_for_experts_ends_one_graph) { refuse_memory_for_experts(false); }

LINUX_SCENARIO(refused_memory_for_experts_of_the_cpu_ends_one_graph) { refuse_memory_for_experts(true); }

LINUX_SCENARIO(a_file_that_changes_ends_every_graph) {
    DiskSession s(config_of(0));
    s.commit();
    CHECK(fsd_set_host_budget(s.host_floor + (1 << 20), 10) == FSD_OK);
    s.check_conversation();
    s.file.cut_on_disk(s.net->weights.bytes / 2);
    s.expect_failure("was changed");
    s.expect_failure("was changed");
}

#endif

TEST(every_computation_may_fail) {
    int result = 0;
    uint64_t k = 1;
    for (; result == 0; k += 1 + k / 4) {
        result = run_apart([k] { return with_failed_compute(k); });
    }
    CHECK(result == kFaultNotReached);
    CHECK(k > 20);
}

} // namespace

TEST_MAIN()
