// Tests of the KV cache with graphs as llama.cpp builds them. It takes VRAM only for the cells in use, and results have
// the same bits as those of ggml-cpu.
#include "apart.h"
#include "check.h"
#include "device.h"
#include "emulated.h"
#include "plugin.h"

#include "ggml-alloc.h"
#include "ggml-impl.h"

#include <atomic>
#include <cmath>
#include <random>
#include <string>
#include <thread>

namespace {

constexpr int64_t kEmbd = 256, kHeads = 4, kHeadDim = 64, kVocab = 96;
constexpr int kLayers = 3, kStreams = 3, kCells = 1024;

// A decode of n tokens for each of `streams` neighbouring streams, from stream0 on.
struct Batch {
    int stream0, streams, n;
};

// A model and its KV cache on one backend, with the number of tokens of each stream.
class Net {
  public:
    Net(ggml_backend_t backend, char *file, ggml_type kv) : backend(backend) {
        ggml_backend_dev_t dev = ggml_backend_get_device(backend);
        weights_ctx = ggml_init({ggml_tensor_overhead() * 64, nullptr, true});
        auto weight = [&](const std::string &name, int64_t cols, int64_t rows) {
            ggml_tensor *t = ggml_new_tensor_2d(weights_ctx, GGML_TYPE_F16, cols, rows);
            ggml_set_name(t, name.c_str());
            weights.push_back(t);
            return t;
        };
        embedding = weight("token_embd.weight", kEmbd, kVocab);
        for (int i = 0; i < kLayers; i++) {
            const std::string blk = "blk." + std::to_string(i) + ".attn_";
            for (const char *part : {"q", "k", "v", "output"}) {
                layers[i].push_back(weight(blk + part + ".weight", kEmbd, kEmbd));
            }
        }
        weights_buffer = ggml_backend_dev_buffer_from_host_ptr(dev, file, file_bytes(), file_bytes());
        CHECK(weights_buffer != nullptr);
        ggml_backend_buffer_set_usage(weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (ggml_tensor *t : weights) {
            CHECK(ggml_backend_tensor_alloc(weights_buffer, t, file) == GGML_STATUS_SUCCESS);
            file += ggml_nbytes(t);
        }
        kv_ctx = ggml_init({ggml_tensor_overhead() * (2 * kLayers + 2), nullptr, true});
        for (int i = 0; i < kLayers; i++) {
            for (auto [part, cache] : {std::pair{'k', &k[i]}, std::pair{'v', &v[i]}}) {
                *cache = ggml_new_tensor_3d(kv_ctx, kv, kEmbd, kCells, kStreams);
                ggml_format_name(*cache, "cache_%c_l%d", part, i);
            }
        }
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
        kv_buffer = ggml_backend_alloc_ctx_tensors_from_buft(kv_ctx, buft);
        CHECK(kv_buffer != nullptr);
        ggml_backend_buffer_clear(kv_buffer, 0);
        allocator = ggml_gallocr_new(buft);
        build({0, kStreams, kLargest / kStreams}, kCells);
        CHECK(ggml_gallocr_reserve(allocator, graph));
    }
    ~Net() {
        ggml_free(graph_ctx);
        ggml_gallocr_free(allocator);
        ggml_backend_buffer_free(kv_buffer);
        ggml_free(kv_ctx);
        ggml_backend_buffer_free(weights_buffer);
        ggml_free(weights_ctx);
    }
    Net(const Net &) = delete;
    Net &operator=(const Net &) = delete;

    static size_t file_bytes() { return (kVocab + 4 * kLayers * kEmbd) * kEmbd * sizeof(ggml_fp16_t); }
    static constexpr int kLargest = 600;

    std::vector<float> decode(Batch b) {
        int n_kv = 0;
        for (int s = b.stream0; s < b.stream0 + b.streams; s++) {
            n_kv = std::max(n_kv, (lengths[s] + b.n + 255) / 256 * 256);
        }
        build(b, n_kv);
        CHECK(ggml_gallocr_alloc_graph(allocator, graph));
        std::vector<int32_t> ids;
        std::vector<int64_t> at;
        std::vector<ggml_fp16_t> visible(ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
        for (int s = 0; s < b.streams; s++) {
            for (int i = 0; i < b.n; i++) {
                const int pos = lengths[b.stream0 + s] + i;
                ids.push_back(((b.stream0 + s + 1) * 31 + pos * 7) % kVocab);
                at.push_back((b.stream0 + s) * kCells + pos);
                std::fill_n(visible.begin() + s * mask->nb[3] / mask->nb[0] + i * mask->nb[1] / mask->nb[0], pos + 1,
                            ggml_fp32_to_fp16(0.0f));
            }
        }
        ggml_backend_tensor_set(tokens, ids.data(), 0, ggml_nbytes(tokens));
        ggml_backend_tensor_set(rows, at.data(), 0, ggml_nbytes(rows));
        ggml_backend_tensor_set(mask, visible.data(), 0, ggml_nbytes(mask));
        CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
        for (int s = b.stream0; s < b.stream0 + b.streams; s++) {
            lengths[s] += b.n;
        }
        std::vector<float> result(ggml_nelements(logits));
        ggml_backend_tensor_get(logits, result.data(), 0, ggml_nbytes(logits));
        return result;
    }

    int lengths[kStreams] = {};
    ggml_tensor *k[kLayers], *v[kLayers];
    std::vector<ggml_tensor *> weights;

  private:
    void build(Batch b, int64_t n_kv) {
        if (graph_ctx) {
            ggml_free(graph_ctx);
        }
        graph_ctx = ggml_init({ggml_tensor_overhead() * 512 + ggml_graph_overhead_custom(512, false), nullptr, true});
        ggml_context *c = graph_ctx;
        graph = ggml_new_graph_custom(c, 512, false);
        const int64_t n = b.n * b.streams;
        tokens = ggml_new_tensor_1d(c, GGML_TYPE_I32, n);
        rows = ggml_new_tensor_1d(c, GGML_TYPE_I64, n);
        mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, n_kv, b.n, 1, b.streams);
        for (ggml_tensor *input : {tokens, rows, mask}) {
            ggml_set_input(input);
        }
        ggml_tensor *x = ggml_get_rows(c, embedding, tokens);
        for (int i = 0; i < kLayers; i++) {
            ggml_tensor *a = ggml_rms_norm(c, x, 1e-5f);
            ggml_tensor *q = ggml_mul_mat(c, layers[i][0], a);
            q = ggml_permute(c, ggml_reshape_4d(c, q, kHeadDim, kHeads, b.n, b.streams), 0, 2, 1, 3);
            ggml_tensor *seen[2];
            for (int part = 0; part < 2; part++) {
                ggml_tensor *cache = part == 0 ? k[i] : v[i];
                ggml_tensor *all = ggml_reshape_2d(c, cache, kEmbd, kCells * kStreams);
                ggml_tensor *now = ggml_mul_mat(c, layers[i][1 + part], a);
                ggml_build_forward_expand(graph, ggml_set_rows(c, all, now, rows));
                const size_t row = cache->nb[1], head = ggml_row_size(cache->type, kHeadDim);
                seen[part] = ggml_permute(c,
                                          ggml_view_4d(c, cache, kHeadDim, kHeads, n_kv, b.streams, head, row,
                                                       row * kCells, row * kCells * b.stream0),
                                          0, 2, 1, 3);
            }
            ggml_tensor *out = ggml_flash_attn_ext(c, q, seen[0], seen[1], mask, 0.2f, 0.0f, 0.0f);
            x = ggml_add(c, x, ggml_mul_mat(c, layers[i][3], ggml_reshape_2d(c, out, kEmbd, n)));
        }
        logits = ggml_mul_mat(c, embedding, ggml_rms_norm(c, x, 1e-5f));
        ggml_set_output(logits);
        ggml_build_forward_expand(graph, logits);
    }

    ggml_backend_t backend;
    ggml_context *weights_ctx, *kv_ctx, *graph_ctx = nullptr;
    ggml_backend_buffer_t weights_buffer, kv_buffer;
    ggml_gallocr_t allocator;
    ggml_cgraph *graph = nullptr;
    ggml_tensor *embedding, *tokens = nullptr, *rows = nullptr, *mask = nullptr, *logits = nullptr;
    std::vector<ggml_tensor *> layers[kLayers];
};

fsd_stats stats() {
    fsd_stats s = {};
    s.struct_size = sizeof(s);
    CHECK(fsd_get_stats(&s) == FSD_OK);
    return s;
}

// The same model on the shard device and on ggml-cpu.
struct Session {
    explicit Session(ggml_type kv = GGML_TYPE_F16, double link_gbps = 0)
        : file(Net::file_bytes() / sizeof(ggml_fp16_t) + 16) {
        std::mt19937 random(11);
        for (ggml_fp16_t &w : file) {
            w = ggml_fp32_to_fp16(((float)random() / 4294967296.0f - 0.5f) * 0.4f);
        }
        cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
        auto set_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), "ggml_backend_set_n_threads");
        set_threads(cpu, 1);
        expected = std::make_unique<Net>(cpu, begin(), kv);
        fsd_config c = {};
        c.struct_size = sizeof(c);
        c.inner_device = "emulated";
        c.n_threads = 1;
        c.step_bytes = 200 * 1024;
        c.slab_bytes = 200 * 1024;
        c.copy_bytes = 64 * 1024;
        c.emulated_link_gbps = link_gbps;
        CHECK(fsd_configure(&c) == FSD_OK);
        backend = ggml_backend_dev_init(fsd::plugin_device(), nullptr);
        net = std::make_unique<Net>(backend, begin(), kv);
        std::vector<fsd_shard_tensor> shards;
        for (const ggml_tensor *t : net->weights) {
            shards.push_back({t->name, t->name[0] == 'b' ? (uint32_t)(t->name[4] - '0') : kLayers});
        }
        CHECK(fsd_set_shards(shards.data(), shards.size(), kLayers + 1) == FSD_OK);
        CHECK(fsd_commit() == FSD_OK);
        floor = stats().floor_bytes;
        full = stats().full_bytes;
    }
    ~Session() {
        net.reset();
        ggml_backend_free(backend);
        expected.reset();
        ggml_backend_free(cpu);
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;

    // Start of the weights, aligned as ggml requires.
    char *begin() { return (char *)(((uintptr_t)file.data() + 31) / 32 * 32); }

    void check(Batch b) {
        decode(b);
        check_ledger();
    }

    void decode(Batch b) {
        const std::vector<float> result = net->decode(b), wanted = expected->decode(b);
        CHECK(std::isfinite(wanted[0]));
        CHECK(result == wanted);
    }

    void check_ledger() {
        const fsd_stats s = stats();
        CHECK(s.used_bytes <= s.budget_bytes && s.peak_bytes <= s.budget_bytes);
        CHECK(s.used_bytes == fs_emulated_get_stats(fsd::device().inner.dev).used_bytes);
        CHECK(s.floor_bytes == floor && s.full_bytes == full);
    }

    // Shortens a sequence as llama.cpp does: the cells keep their content.
    void cut(int stream, int length) {
        net->lengths[stream] = expected->lengths[stream] = length;
        CHECK(fsd_use_kv((uint32_t)stream, (uint64_t)length) == FSD_OK);
    }

    void set_budget(uint64_t budget) {
        CHECK(fsd_set_budget(budget, 60) == FSD_OK);
        CHECK(fsd_reset_peak() == FSD_OK);
    }

    std::vector<ggml_fp16_t> file;
    ggml_backend_t cpu, backend;
    std::unique_ptr<Net> net, expected;
    uint64_t floor = 0, full = 0;
};

constexpr uint64_t kCellBytes = 2 * kLayers * kEmbd * sizeof(ggml_fp16_t);

SCENARIO(room_for_keys_and_values_goes_with_what_is_in_use) {
    Session s;
    CHECK(stats().kv_bytes == 0);
    s.check({0, 1, 1});
    CHECK(stats().kv_bytes == 256 * kCellBytes);
    s.check({0, 1, 255});
    CHECK(stats().kv_bytes == 256 * kCellBytes);
    s.check({0, 1, 1});
    CHECK(stats().kv_bytes == 512 * kCellBytes);
    // With several sequences, each has room for as many cells as the longest one.
    s.check({1, 2, 20});
    CHECK(stats().kv_bytes == 3 * 512 * kCellBytes);
    s.check({0, 3, 1});
    // fsd_use_kv allocates at once. Graphs that use these cells allocate nothing more.
    CHECK(fsd_use_kv(1, 1000) == FSD_OK);
    CHECK(stats().kv_bytes == 3 * 1024 * kCellBytes);
    for (int i = 0; i < 2; i++) {
        s.check({1, 1, 400});
        CHECK(stats().kv_bytes == 3 * 1024 * kCellBytes);
    }
    // The room of a shortened or cleared sequence is given back in fsd_fill. Other sequences keep theirs.
    s.cut(1, 100);
    CHECK(stats().kv_bytes == 3 * 1024 * kCellBytes);
    s.check({1, 1, 1});
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    CHECK(stats().kv_bytes == 3 * 512 * kCellBytes);
    s.cut(1, 0);
    s.cut(2, 0);
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    CHECK(stats().kv_bytes == 512 * kCellBytes);
    // While no sequence has cells, their room stays for the next one, unless it is a large part of the budget.
    s.check({0, 1, 1});
    s.cut(0, 0);
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    CHECK(stats().kv_bytes == 512 * kCellBytes);
    const auto use_all_and_none = [] {
        for (uint64_t cells : {(uint64_t)kCells, (uint64_t)0}) {
            for (int i = 0; i < kStreams; i++) {
                CHECK(fsd_use_kv((uint32_t)i, cells) == FSD_OK);
            }
        }
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
    };
    use_all_and_none();
    CHECK(stats().kv_bytes == kStreams * kCells * kCellBytes); // there is no budget yet
    s.set_budget(s.floor);
    CHECK(stats().kv_bytes == 0 && stats().kv_host_bytes == 0); // nobody moves what nobody uses
    s.set_budget(s.full);
    use_all_and_none();
    CHECK(8 * kStreams * kCells * kCellBytes > s.full && stats().kv_bytes == 0 && stats().streamed_bytes == 0);
    // When a sequence needs more room, those that have ended get none.
    s.check({0, 3, 20});
    CHECK(stats().kv_bytes == 3 * 256 * kCellBytes);
    s.cut(1, 0);
    s.cut(2, 0);
    s.check({0, 1, 300});
    CHECK(stats().kv_bytes == 512 * kCellBytes);
    s.cut(0, 0);
    s.check({0, 2, 3});
    // The cache never gets larger than its context.
    for (int i = 0; i < kStreams; i++) {
        CHECK(fsd_use_kv((uint32_t)i, UINT64_MAX) == FSD_OK);
    }
    CHECK(stats().kv_bytes == kStreams * kCells * kCellBytes);
    CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK); // blocks that grew may have evicted a slab for a moment
    CHECK(stats().used_bytes + stats().most_graph_bytes - stats().graph_bytes == s.full);
    s.check({0, 3, 200});
}

// At the floor, VRAM has room for the keys and values of one layer. Those of other layers are in host memory.
SCENARIO(what_has_no_room_passes_through_the_window) {
    for (ggml_type kv : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        CHECK(run_apart([kv] {
                  Session s(kv);
                  s.set_budget(s.floor);
                  for (int i = 0; i < 3; i++) {
                      s.check({0, 1, 300});
                  }
                  s.check({1, 2, 30});
                  s.check({0, 3, 1});
                  fsd_stats st = stats();
                  CHECK(st.kv_host_bytes > 0 && st.kv_bytes > 0 && st.kv_copied_bytes > 0);
                  CHECK(fsd_park() == FSD_OK && stats().used_bytes == 0 && fsd_unpark() == FSD_OK);
                  s.check({0, 3, 1});
                  // With a larger budget, the KV cache returns to VRAM once the ring has room for two steps. Only
                  // then do weights become resident.
                  const uint64_t on_host = stats().kv_host_bytes, step = fsd::device().weights.layout.min_ring;
                  const uint64_t without_window = on_host / kLayers * (kLayers - 1);
                  const auto spare = [] {
                      return stats().most_graph_bytes - stats().graph_bytes;
                  }; // of a smaller graph
                  s.set_budget(s.floor + without_window + step - spare());
                  CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
                  CHECK(stats().kv_host_bytes > 0);
                  s.check({0, 3, 1});
                  s.set_budget(s.floor + without_window + 2 * step - spare());
                  CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK);
                  CHECK(stats().kv_host_bytes == 0 && stats().streamed_bytes > 0);
                  s.check({0, 3, 1});
                  s.set_budget(s.floor);
                  CHECK(stats().kv_host_bytes > 0);
                  s.check({0, 3, 1});
                  return 0;
              }) == 0);
    }
}

// What earlier graphs have written is in host memory before the block must go there, and never what was written since.
SCENARIO(cells_are_mirrored_while_graphs_run) {
    Session s;
    for (uint64_t taken = 1; taken > 0;) {
        CHECK(fsd_add_spare(&taken) == FSD_OK);
    }
    const auto d2h_bytes = [] { return fs_emulated_get_stats(fsd::device().inner.dev).d2h_bytes; };
    s.check({0, 1, 300});
    s.check({1, 2, 90});
    s.check({0, 3, 1});
    for (int round = 0; round < 3; round++) {
        ggml_backend_synchronize(fsd::device().inner.mirror);
        const uint64_t before = d2h_bytes();
        while (fsd::device().kv.spill_block()) {
        }
        // Blocks have 512 cells of each sequence. The cells of the tokens are mirrored, but for the latest.
        CHECK(stats().kv_bytes == 0 && d2h_bytes() - before + 400 * kCellBytes < stats().kv_host_bytes);
        s.check({0, 1, 1});
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK && stats().kv_host_bytes == 0);
        s.check({0, 1, 1});
        s.cut(0, 250 - 20 * round); // other tokens are written to the same cells
        s.check({0, 1, 60});
        s.check({1, 2, 90});
        s.check({0, 3, 1});
    }
}

// Whether no cell that was never written has another value than zero, in blocks that are in host memory.
static bool unwritten_cells_are_zero() {
    for (const fsd::Buffer *buffer : fsd::device().buffers) {
        for (size_t i = 0; buffer->kv && i < buffer->kv->blocks.size(); i++) {
            const fsd::KvBlock &b = buffer->kv->blocks[i];
            for (size_t t = 0; b.in_host_memory && t < b.tensors.size(); t++) {
                for (int64_t s = 0; s < b.streams; s++) {
                    const int64_t written = b.group->written[(size_t)s];
                    const char *from = b.tensors[t]->place(b.base, s, written);
                    const char *to = from + b.tensors[t]->row * (size_t)std::max<int64_t>(0, b.cells - written);
                    if (std::any_of(from, to, [](char c) { return c != 0; })) {
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

// A prompt has room for all its cells before it writes them. What spare memory has of another layout does not remain there.
SCENARIO(room_without_written_cells_is_zero_and_not_copied) {
    Session s;
    for (uint64_t taken = 1; taken > 0;) {
        CHECK(fsd_add_spare(&taken) == FSD_OK);
    }
    const auto d2h_bytes = [] { return fs_emulated_get_stats(fsd::device().inner.dev).d2h_bytes; };
    for (uint64_t cells : {kCells / 4, kCells / 2, kCells}) {
        for (uint32_t stream = 0; stream < kStreams; stream++) {
            CHECK(fsd_use_kv(stream, cells) == FSD_OK);
        }
        s.check({0, kStreams, 70});
        s.check({0, 1, 1}); // what came before is mirrored
        ggml_backend_synchronize(fsd::device().inner.mirror);
        const uint64_t before = d2h_bytes();
        while (fsd::device().kv.spill_block()) {
        }
        CHECK(stats().kv_bytes == 0 && stats().kv_host_bytes == cells * kStreams * kCellBytes);
        CHECK(d2h_bytes() - before <= 3 * 80 * kStreams * kCellBytes);
        CHECK(unwritten_cells_are_zero());
        s.check({0, kStreams, 1});
        CHECK(fsd_fill(UINT64_MAX, nullptr) == FSD_OK && stats().kv_host_bytes == 0);
    }
}

// However many blocks are in host memory, no two of them are neighbours while there are others to choose from.
SCENARIO(blocks_in_host_memory_are_spread_over_the_layers) {
    Session s;
    s.check({0, 1, 300});
    const auto on_host = [] {
        std::vector<size_t> places;
        for (const fsd::Buffer *b : fsd::device().buffers) {
            for (size_t i = 0; b->kv && i < b->kv->blocks.size(); i++) {
                if (b->kv->blocks[i].in_host_memory) {
                    places.push_back(i);
                }
            }
        }
        return places;
    };
    CHECK(on_host().empty());
    CHECK(fsd::device().kv.spill_block() && on_host() == std::vector<size_t>{2});
    CHECK(fsd::device().kv.spill_block() && on_host() == (std::vector<size_t>{0, 2}));
    s.check({0, 1, 1});
}

void converse(unsigned seed, bool budgets_beside) {
    Session s(GGML_TYPE_F16, 2);
    std::mt19937 random(seed);
    std::atomic<bool> done{false};
    std::thread changer;
    if (budgets_beside) {
        changer = std::thread([&] {
            std::mt19937 chance(seed + 1);
            while (!done.load()) {
                const uint64_t budget =
                    s.floor + (uint64_t)((double)chance() / 4294967296.0 * (double)(s.full - s.floor));
                const uint64_t steps = stats().steps + chance() % 20;
                CHECK(fsd_set_budget(chance() % 3 ? budget : s.floor, 60) == FSD_OK);
                CHECK(stats().used_bytes <= stats().budget_bytes);
                while (stats().steps < steps && !done.load()) {
                    std::this_thread::yield();
                }
            }
        });
    }
    for (int i = 0; i < 80; i++) {
        const int stream0 = (int)(random() % kStreams), streams = 1 + (int)(random() % (unsigned)(kStreams - stream0));
        int n = random() % 3 ? 1 + (int)(random() % 3) : 1 + (int)(random() % (unsigned)(Net::kLargest / streams));
        for (int k = stream0; k < stream0 + streams; k++) {
            if (s.net->lengths[k] + n > kCells || random() % 16 == 0) {
                s.cut(k, (int)(random() % 3) * s.net->lengths[k] / 3 * (s.net->lengths[k] + n <= kCells ? 1 : 0));
            }
        }
        s.decode({stream0, streams, n});
        switch (random() % (budgets_beside ? 4u : 6u)) {
        case 0:
            CHECK(fsd_fill(random() % 2 ? UINT64_MAX : 1 << 16, nullptr) == FSD_OK);
            break;
        case 1:
            CHECK(fsd_use_kv((uint32_t)stream0, (uint64_t)s.net->lengths[stream0] + random() % 500) == FSD_OK);
            break;
        case 4:
            CHECK(fsd_park() == FSD_OK && stats().used_bytes == 0 && fsd_unpark() == FSD_OK);
            break;
        case 5:
            s.set_budget(random() % 3 ? s.floor + random() % (s.full - s.floor) : s.floor);
            s.check_ledger();
            break;
        }
    }
    done.store(true);
    if (changer.joinable()) {
        changer.join();
    }
    s.set_budget(s.full);
    s.check({0, 1, 1});
}

SCENARIO(conversations_of_all_lengths_come_and_go) { converse(21, false); }

SCENARIO(budgets_change_while_conversations_grow) { converse(22, true); }

// Reads and writes the cache as llama.cpp does when it saves and restores a sequence.
SCENARIO(caches_are_read_and_written_from_outside) {
    Session s;
    s.set_budget(s.floor);
    s.check({0, 2, 300});
    const size_t row = s.net->k[0]->nb[1], stream = row * kCells;
    std::vector<char> saved(2 * stream), wanted(2 * stream);
    for (int i = 0; i < kLayers; i++) {
        for (auto [ours, theirs] :
             {std::pair{s.net->k[i], s.expected->k[i]}, std::pair{s.net->v[i], s.expected->v[i]}}) {
            ggml_backend_tensor_get(ours, saved.data(), 0, saved.size());
            ggml_backend_tensor_get(theirs, wanted.data(), 0, wanted.size());
            CHECK(saved == wanted);
            // Writes cells of the first stream to the third, beyond the end of the cells that are held there.
            ggml_backend_tensor_set(ours, saved.data() + 10 * row, 2 * stream, 600 * row);
            ggml_backend_tensor_set(theirs, saved.data() + 10 * row, 2 * stream, 600 * row);
            ggml_backend_tensor_memset(ours, 0, stream + 290 * row, 500 * row);
            ggml_backend_tensor_memset(theirs, 0, stream + 290 * row, 500 * row);
        }
    }
    for (Net *net : {s.net.get(), s.expected.get()}) {
        net->lengths[2] = 290;
        net->lengths[1] = 290;
    }
    s.check({0, 3, 1});
}

} // namespace

TEST_MAIN()
