// The arena: resident weights. The core, and the slabs of the shards that fit, a prefix of the ladder.
#pragma once

#include "host_cache.h"
#include "ledger.h"
#include "weights.h"

#include <atomic>

namespace fsd {

struct Slab {
    InnerBuffer buffer;
    char *base = nullptr;
    bool ready = false;                    // usable by graphs that start from now on
    ggml_backend_event_t filled = nullptr; // recorded on the copy stream after its last byte
};

class Arena {
  public:
    // `generation` counts changes after which compiled programs are no longer right.
    Arena(Inner &inner, Ledger &ledger, const Weights &weights, HostCache &cache, uint64_t &generation)
        : inner_(inner), ledger_(ledger), weights_(weights), cache_(cache), generation_(generation) {}

    bool take_core(); // false: there is no VRAM for it
    void release_core();
    ggml_backend_buffer_t core() const { return core_.get(); }
    char *core_base() const { return core_base_; }

    bool resident(int piece) const {
        const int s = weights_.layout.pieces[piece].slab;
        return s < (int)slabs.size() && slabs[s].ready;
    }
    bool full() const { return slabs.size() == weights_.layout.slab_sizes.size(); }
    // Frees the last slab: the end of the resident part of the ladder. False: there is none.
    bool evict();
    // Waits until at most the copies of the latest round are under way, since an eviction waits for them.
    void start_round();
    // Starts the copies of slabs up to `n_slabs` and about `max_bytes`; returns bytes. Stops where there is no VRAM, or where
    // weights cannot be read.
    size_t fill(size_t n_slabs, size_t max_bytes);
    // Slabs whose copies were started become usable: the compute stream waits for them, the CPU does not.
    void finish_fills();

    std::vector<Slab> slabs;
    std::atomic<uint64_t> n_evicted{0}, n_filled{0}; // slabs

  private:
    bool fill_next();
    bool copy_pieces(int slab_index, const Slab &slab);

    Inner &inner_;
    Ledger &ledger_;
    const Weights &weights_;
    HostCache &cache_;
    uint64_t &generation_;
    InnerBuffer core_;
    char *core_base_ = nullptr;
    size_t filled_before_ = 0; // slabs when the latest round began
};

} // namespace fsd
