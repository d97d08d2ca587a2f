// The KV cache's storage: blocks in VRAM or in host memory, and the window in VRAM through which the latter pass.
#pragma once

#include "kv_cache.h"
#include "latest_graphs.h"
#include "ledger.h"
#include "weights.h"

#include <atomic>

namespace fsd {

// What a graph needs of the KV cache.
struct KvAccess {
    struct Want {
        KvGroup *group;
        int64_t stream0, streams, cells;
    };
    struct Rows {
        // Row numbers, an input of the graph. In host memory they count in the whole tensor, on the device in what is
        // held of it.
        const ggml_tensor *numbers;
        KvGroup *group;
    };
    std::vector<Want> wants; // one for each group
    std::vector<Rows> rows;
    std::vector<KvBlock *> together; // blocks that a node needs beside another block
    std::vector<KvGroup *> changed;  // groups that are written in another way than by row number
};

// Whether a node writes rows by number into all of a cached tensor, the numbers being an input that the CPU knows.
bool writes_rows(const ggml_tensor *node, const KvTensor &c);

// Needs the graph mutex but for what is marked [any thread].
class KvStore {
  public:
    // `generation` counts changes after which compiled programs are no longer right.
    KvStore(Inner &inner, Ledger &ledger, const Weights &weights, uint64_t &generation)
        : inner_(inner), ledger_(ledger), weights_(weights), generation_(generation) {}

    void add(KvCache &cache);
    void remove(KvCache &cache); // frees its storage

    KvNeed need();
    // [any thread] Of blocks in host memory: what they need, and the memory that they have.
    uint64_t spilled_bytes() const { return spilled_bytes_.load(); }
    uint64_t host_bytes() const { return host_bytes_.load(); }
    uint64_t spare_bytes() const { return spare_bytes_.load(); } // [any thread] of host memory that waits for blocks

    // What a graph reads and writes. Valid as in LatestGraphs.
    const KvAccess &access(const ggml_cgraph *graph);
    // Blocks that one node needs stay in VRAM from now on. Whether there are new ones: then the floor has risen.
    bool keep_together(const KvAccess &access);
    // Makes room for it, and tells the device where its rows lie.
    bool prepare(const KvAccess &access);

    // The engine says that a stream has so many cells or soon will; settle() acts on it.
    void use_cells(uint32_t stream, uint64_t cells);
    // Makes room for bytes that are written from outside a graph.
    bool hold_range(KvCache &cache, size_t offset, size_t bytes);
    void note_change(KvCache &cache, size_t offset, size_t bytes); // the bytes are about to be written
    void clear(KvCache &cache, uint8_t value);
    // Gives every block storage for the cells in use. It shrinks only if it may, and then by no less than half. False: host
    // memory was refused.
    bool settle(bool may_shrink);

    // Moves all blocks to host memory and frees the window; unpark() moves them to pinned memory. False: host memory was
    // refused for some, which stay in VRAM.
    bool park();
    void unpark();

    // The system needs more time to give pinned memory than the device needs to copy cells into it. So blocks in VRAM have
    // spare host memory, where it may be had: a budget that falls need not wait for the system.
    void allow_spares(bool allowed); // if not, they are freed
    size_t add_spare(); // takes or clears it for one block; returns its bytes, 0 when there is no more to do

    bool spill_block();                  // one block moves to host memory; false: none is left
    void spill_surplus(size_t more = 0); // until the others fit the budget, with `more` bytes beside them
    size_t fetch_blocks();               // back into VRAM with what fits there; returns bytes
    bool ensure_window();                // false: there is no room for one pane
    void release_window();
    size_t window_lacks(); // bytes that the window lacks of two panes, or of one if there is one block in host memory
    size_t window_bytes() const { return window_ ? ggml_backend_buffer_get_size(window_.get()) : 0; }
    ggml_backend_buffer_t window() const { return window_.get(); }
    // Two, so that one is filled while the other is in use, or one, or none.
    size_t n_panes() const { return n_panes_; }
    char *pane_of(const KvBlock &b) const { return window_base_ + b.pane * pane_bytes_; }

  private:
    template <typename F> void each_block(F use);
    std::vector<KvBlock *> last_to_spill() const;
    static size_t lay_out(const KvBlock &b, int64_t cells, int64_t streams, std::vector<size_t> &at);
    // Moves a block to storage of another size or in the other memory, with the cells in use. False leaves it as it was.
    bool relocate(KvBlock &b, int64_t cells, int64_t streams, bool to_host);
    bool resize(KvBlock &b, int64_t cells, int64_t streams);
    bool bring(const std::vector<KvBlock *> &together);
    bool drop_kept(); // frees the room that was kept while no sequence has cells; false: there is none
    void release_block(KvBlock &b);
    InnerBuffer host_memory(size_t bytes) const;
    InnerBuffer take_spare(KvBlock &b);
    void set_spare(KvBlock &b, InnerBuffer memory, int64_t cells, int64_t streams); // with cells in that layout
    void lay_out_again(KvBlock &b, size_t bytes, const std::vector<size_t> &at, int64_t cells, int64_t streams);
    // The mirror: cells that earlier graphs have written are copied to spare memory while a graph runs, so that little is left
    // to copy when the block must leave VRAM.
    void mirror_written(const KvAccess &access);
    // `end`: by stream, the cells from here on are not mirrored yet. `waits`: the mirror stream waits for earlier graphs already.
    void mirror(KvBlock &b, const std::vector<int64_t> &end, bool &waits);
    void finish_mirror();
    // Whether the cache may take `more` bytes of VRAM. Room for a ring stays, also while everything is resident: a token
    // waits longer for streamed weights than for a part of its context.
    bool fits(int64_t more);

    Inner &inner_;
    Ledger &ledger_;
    const Weights &weights_;
    uint64_t &generation_;
    std::vector<KvCache *> caches_;
    LatestGraphs<KvAccess> accesses_;
    InnerBuffer window_;
    char *window_base_ = nullptr;
    size_t n_panes_ = 0, pane_bytes_ = 0;
    bool pageable_ = false; // host memory for blocks is not pinned
    bool spares_allowed_ = true;
    bool mirroring_ = false; // copies to spare memory may be under way
    std::atomic<uint64_t> spilled_bytes_{0}, host_bytes_{0}, spare_bytes_{0};
};

} // namespace fsd
