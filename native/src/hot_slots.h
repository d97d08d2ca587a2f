// Which of many things each slot of a cache holds. Things that are used often are kept. Pure bookkeeping.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <unordered_map>
#include <vector>

namespace fsd {

class HotSlots {
  public:
    // `heat` says how often the thing with a key is used. The last slots are for things that are not hot enough to replace a
    // kept one: at most `n_passing` slots, and at most one slot in every `passing_share`.
    HotSlots(std::function<double(uint64_t)> heat, size_t n_passing, size_t passing_share)
        : heat_(std::move(heat)), n_passing_(n_passing), passing_share_(passing_share) {}

    // What lies in slots that there are no longer is dropped.
    void resize(size_t n);
    size_t size() const { return slots_.size(); }
    // Slots from here on are for what is needed once.
    size_t n_kept() const { return slots_.size() - std::min(n_passing_, slots_.size() / passing_share_); }
    size_t n_empty() const { return empty_.size(); } // among the slots of what is kept

    // The slot of a key, which is not 0, or -1. It is not given to another key until the next begin_use().
    int find(uint64_t key);
    // Like find(), without protecting it.
    int where(uint64_t key) const;
    // Gives a slot to a key that has none. -1 when all slots are in use, or, unless it `must` have one, when they hold what is
    // hotter.
    int take(uint64_t key, bool must);
    // What the latest take() has replaced; 0: nothing.
    uint64_t replaced() const { return replaced_; }
    void begin_use() { use_++; }
    // The slot is no longer in use.
    void release(int slot) { slots_[(size_t)slot].used = 0; }
    // The slot holds nothing.
    void drop(int slot);
    uint64_t key(int slot) const { return slots_[(size_t)slot].key; } // 0: it is empty

  private:
    struct Slot {
        uint64_t key = 0; // 0: empty
        uint64_t used = 0;
    };
    int place(size_t slot, uint64_t key);
    void find_empty();

    const std::function<double(uint64_t)> heat_;
    const size_t n_passing_, passing_share_;
    std::vector<Slot> slots_;
    std::vector<size_t> empty_; // among the kept slots, the next to fill last
    size_t next_passing_ = 0;
    std::unordered_map<uint64_t, int> at_;
    uint64_t use_ = 1;
    uint64_t replaced_ = 0;
    std::minstd_rand random_;
};

} // namespace fsd
