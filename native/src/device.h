// The state of the shard device, shared by ggml's vtables (plugin.cpp), the graph compiler, the executor and the C interface
// (api.cpp).
//
// Guarantees: used bytes never exceed the budget, because every inner allocation passes Device::allocate, which makes
// room first; a resident set is a prefix of the ladder; under an exact plan, which kernels see which shapes does not depend
// on the budget (pieces and steps are fixed at commit), so stream-only output is bit-identical at every budget.
//
// Locks: `graph_mutex` is held while a graph runs, and by whoever changes arena, ring or buffers. The members for any thread
// have locks of their own, which are taken last.
#pragma once

#include "budget_request.h"
#include "cache.h"
#include "counters.h"
#include "expert_cache.h"
#include "frameshard_device.h"
#include "inner.h"
#include "layout.h"
#include "ledger.h"
#include "pacing.h"
#include "plan.h"
#include "program.h"
#include "tensors.h"
#include "trace.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fsd {

struct Weight {
    std::string name;
    ggml_tensor shape; // a copy of the model's tensor, for type, ne and nb
    const char *host = nullptr;
    size_t bytes = 0;
    uint32_t shard = 0;
    WeightPlace place; // in the layout
};

// One buffer that llama.cpp asked for. Its addresses are reserved host addresses; the bytes live in `inner` once
// committed. CPU segments compute in the reserved range itself, which therefore serves as the host mirror.
struct Buffer {
    char *base = nullptr;
    size_t size = 0;
    bool weights = false; // a window on the model file: no inner buffer, base is the mapping
    bool pinned = false;
    bool parked = false;          // its bytes wait in the reserved range for a new inner buffer
    std::unique_ptr<Cache> cache; // has storage of its own instead of `inner`
    ggml_backend_buffer_t inner = nullptr;
    char *inner_base = nullptr;
};

struct LadderPlace {
    uint32_t shard = 0;
    size_t position = 0; // in the whole ladder
};

struct Slab {
    InnerBuffer buffer;
    char *base = nullptr;
    bool ready = false;                    // usable by graphs that start from now on
    ggml_backend_event_t filled = nullptr; // recorded on the copy stream after its last byte
};

struct Ring {
    InnerBuffer buffer;
    char *base = nullptr;
    size_t capacity = 0;
    std::vector<RingEntry> entries; // of the pass that it is laid out for
    std::vector<RingSlot> slots;
    size_t entry_capacity = 0;                     // what the slots are laid out in
    std::vector<ggml_backend_event_t> ready, done; // by entry
    std::vector<std::vector<bool>> held;           // by entry of experts: those in its latest copy
    uint64_t next_copy = 0, next_use = 0;          // endless sequence numbers; index = n % entries.size()
};

struct Device {
    Device(Inner &inner, Pacing &pacing);
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    Inner &inner; // shared by the language model and the vision tower
    Pacing &pacing;

    // fixed by fsd_configure
    ggml_backend_t cpu = nullptr;
    LayoutSizes sizes; // asked for
    uint32_t n_threads = 1;
    std::atomic<bool> configured{false};

    // fixed by commit
    bool committed = false;
    std::vector<Weight> weights;
    std::unordered_map<const void *, int> weight_at; // host address -> index
    std::map<std::string, LadderPlace> ladder;       // by tensor name, as fsd_set_shards gave it
    uint32_t n_named_shards = 0;                     // of fsd_set_shards
    uint32_t n_shards = 0;                           // with the one for what it left out
    Layout layout;
    InnerBuffer core;
    char *core_base = nullptr;

    // guarded by graph_mutex
    std::mutex graph_mutex;
    std::vector<Buffer *> buffers;
    InnerBuffer window; // that blocks of caches on the host pass through
    char *window_base = nullptr;
    size_t n_panes = 0, pane_bytes = 0; // two, so that one is filled while the other is in use, or else one
    std::deque<std::pair<uint64_t, CacheAccess>> accesses; // by graph
    std::vector<Slab> slabs;                               // the resident prefix
    size_t filled_before = 0;                              // how many there were when fill() was last called
    Ring ring;
    size_t wanted_ring = 0;
    InnerBuffer scratch;
    char *scratch_base = nullptr;
    Plan plan;
    ExpertCache experts;               // in the ring, behind the streamed steps
    uint64_t residency_generation = 1; // changes when compiled programs are no longer valid
    ProgramCache programs;

    // any thread
    Ledger ledger;
    BudgetRequest request; // applied between two steps
    std::atomic<uint64_t> floor{0}, full{0};
    std::atomic<bool> abort{false};
    Device *host = this; // of a vision tower the language model's device, to whose budget it belongs
    std::atomic<uint64_t> cache_on_host{0};
    Counters counters;

    // --- memory (memory.cpp); all need graph_mutex
    bool materialise(Buffer *b);
    void apply_budget();
    void pop_slab();
    bool resize_ring(size_t bytes);
    bool ensure_ring();
    size_t fill(size_t max_bytes); // returns bytes whose copies were started
    void finish_fills();
    void update_floor();
    void update_placements();
    bool piece_resident(int piece) const {
        const int s = layout.pieces[piece].slab;
        return s < (int)slabs.size() && slabs[s].ready;
    }
    fsd_status commit(std::string &why);
    bool lay_out_weights(std::string &why);
    bool take_core();
    void park();
    bool parked = false;
    bool apply_budget_if_idle();
    void read_frame_budget();   // [any thread] a budget in the frame block becomes the requested budget
    void answer_frame_budget(); // [any thread]

    // --- cache.cpp; all need graph_mutex
    template <typename F> void each_block(F use);
    size_t lay_out_block(const CacheBlock &b, int64_t cells, int64_t streams, std::vector<size_t> &at) const;
    bool relocate(CacheBlock &b, int64_t cells, int64_t streams, bool to_host);
    void release_block(CacheBlock &b);
    size_t window_bytes() const { return window ? ggml_backend_buffer_get_size(window.get()) : 0; }
    size_t window_lacks();
    bool cache_fits(int64_t more);
    bool spill_block();
    void spill_surplus();
    bool ensure_window();
    void release_window();
    char *pane_of(const CacheBlock &b) const { return window_base + b.pane * pane_bytes; }
    size_t fetch_blocks();
    bool settle_caches(bool may_shrink);
    bool hold_range(Buffer *buffer, size_t offset, size_t bytes);
    void clear_caches(Buffer *buffer, uint8_t value);
    void release_caches(Buffer *buffer);
    void caches_to_host();
    void pin_caches();
    KvNeed kv_need();
    void use_cells(uint32_t stream, uint64_t cells);
    const CacheAccess *access(const ggml_cgraph *graph);
    bool prepare_caches(const CacheAccess &a);

    // --- executor.cpp
    void reset_ring();
    void lay_out_ring(const Program &p);
    void pump_copies();
    void copy_piece(const Piece &p, size_t at, size_t from, size_t to);
    uint64_t copy_experts(size_t entry);

    void add_weight(const ggml_tensor *t); // once for tied embeddings, two tensors on the same bytes
    const Weight *weight_of(const ggml_tensor *t) const {
        auto it = weight_at.find(root_of(t)->data);
        return it == weight_at.end() ? nullptr : &weights[it->second];
    }
};

Device &device();

// The context of one of our ggml buffers, or null for a foreign buffer.
Buffer *buffer_of(const ggml_tensor *t);

// What a tensor or the one that it is a view of is in a cache, or null.
CacheTensor *cached(const ggml_tensor *t);
bool writes_rows(const ggml_tensor *node, const CacheTensor &c);

// Runs `use` on the inner bytes of [offset, offset + size) of a buffer, a part at a time; null stands for a part of a cache
// that was never written, which reads as zeros.
template <typename F> void each_inner(const Buffer &b, size_t offset, size_t size, F use) {
    if (!b.cache) {
        ggml_tensor raw = raw_tensor(b.inner, b.inner_base + offset, size);
        use(&raw, (size_t)0, size);
        return;
    }
    for (const CacheRun &run : b.cache->runs(offset, size)) {
        ggml_tensor raw = run.address ? raw_tensor(run.block->storage.get(), run.address, run.bytes) : ggml_tensor();
        use(run.address ? &raw : nullptr, run.from, run.bytes);
    }
}

// Zeroed host memory; pages that are never touched take no RAM. Null when the system refuses.
char *reserve_addresses(size_t size);
void release_addresses(char *p, size_t size);
// Gives the pages of a range back to the system; on Linux and macOS they may read as zeros from then on.
void forget_pages(char *p, size_t size);

// A budget as it is compared: 0 means no limit.
inline uint64_t limit_of(uint64_t budget_bytes) { return budget_bytes ? budget_bytes : UINT64_MAX / 4; }

} // namespace fsd
