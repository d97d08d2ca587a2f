// The count of VRAM by use, and the budget.
//
// Used bytes never exceed the budget, because every VRAM allocation passes Ledger::allocate, which makes room first. Who gives
// VRAM back, and in which order, is the list of reclaimers (Device::Device).
#pragma once

#include "inner.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace fsd {

// What VRAM is for. `graph`: what the graph in use needs of llama.cpp's compute buffers (GraphMemory); `pool`: what such graphs
// make the driver's libraries hold; `buffers`: llama.cpp's other buffers; `image`: lent to the vision tower while it encodes.
enum class Use { graph, pool, buffers, kv, core, arena, ring, scratch, image, count };

class Ledger {
  public:
    // Something that can give VRAM back. `give` returns false when it has no more to give.
    struct Reclaimer {
        unsigned kind;
        std::function<bool()> give;
    };
    // Kinds of reclaimers, for callers that may not use all of them.
    static constexpr unsigned kWeights = 1, kRing = 2, kKv = 4;
    static constexpr unsigned kRingSurplus = 8; // what the ring has beyond its smallest size
    static constexpr unsigned kIdle = 16;       // what is kept for large graphs
    // For an allocation while graphs run: the smallest ring stays.
    static constexpr unsigned kForGraphs = kIdle | kWeights | kRingSurplus | kKv;
    static constexpr unsigned kForKv = kIdle | kWeights | kRingSurplus;
    static constexpr unsigned kForImages = kIdle | kWeights | kRingSurplus | kRing | kKv;

    // `reclaimers`: the first in the list gives first.
    Ledger(const Inner &inner, std::vector<Reclaimer> reclaimers) : inner_(inner), reclaimers_(std::move(reclaimers)) {}
    Ledger(const Ledger &) = delete;
    Ledger &operator=(const Ledger &) = delete;

    // [any thread] The hard limit on all VRAM. Setting it frees nothing.
    uint64_t budget() const { return budget_.load(); }
    void set_budget(uint64_t bytes) { budget_.store(bytes); }
    // [any thread] The smallest budget, and the one with which everything is resident; 0 before fsd_commit.
    uint64_t floor() const { return floor_.load(); }
    uint64_t full() const { return full_.load(); }
    void set_limits(uint64_t floor, uint64_t full) {
        floor_.store(floor);
        full_.store(full);
    }
    // [any thread] What the driver's context and libraries hold.
    uint64_t overhead() const { return overhead_.load(); }
    void set_overhead(uint64_t bytes) { overhead_.store(bytes); }

    // [any thread]
    uint64_t used() const;
    uint64_t used(Use use) const;
    uint64_t fixed() const; // all but weights that can be evicted or streamed: the arena and the ring
    struct Figures {
        uint64_t used_by[(int)Use::count], overhead, used, peak;
    };
    Figures figures() const; // of one moment
    void note_peak();        // after the overhead has grown
    void reset_peak();

    // Null when it does not fit the budget after all that `reclaim` allows, or the inner device refuses.
    InnerBuffer allocate(Use use, size_t bytes, unsigned reclaim = kForGraphs);
    void release(Use use, InnerBuffer &buffer);
    void count(Use use, size_t bytes); // of a use whose VRAM others allocate
    // Has VRAM given back until `bytes` more fit the budget; false when they do not.
    bool make_room(size_t bytes, unsigned reclaim = kForGraphs);

    // Makes part of the parent's budget this ledger's budget: `wanted` bytes or what is there of them, and at least
    // `least`, for which the parent makes room. Returns whether it could.
    bool borrow(Ledger &parent, uint64_t least, uint64_t wanted);
    // Gives back what was borrowed. All allocations must have been released.
    void give_back();
    // The ledger that this one has borrowed from; null: none.
    const Ledger *parent() const { return parent_; }

  private:
    uint64_t sum() const; // the caller holds mutex_

    const Inner &inner_;
    const std::vector<Reclaimer> reclaimers_;
    std::atomic<uint64_t> budget_{0}, overhead_{0}, floor_{0}, full_{0};
    Ledger *parent_ = nullptr; // while something is borrowed
    mutable std::mutex mutex_;
    size_t used_by_[(int)Use::count] = {};
    uint64_t peak_ = 0;
};

} // namespace fsd
