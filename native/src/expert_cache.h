// The cache of experts in the ring: where its slots lie, which expert lies in which, and how often each was chosen. No
// ggml and no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

namespace fsd {

// Where in the ring the cache lies. A slot holds one expert of any layer, its matrices (up, gate, down) one after the
// other. Slots are counted from the end of the ring, so that a graph that needs more of the ring for other things takes
// the last of them and leaves the others as they are; inner devices count them from the lowest address.
struct ExpertArena {
    static constexpr size_t kNumbersBytes = 4096; // behind the slots: the numbers of slots, for the device

    size_t end = 0; // of the slots
    size_t stride = 0;
    std::vector<size_t> parts; // offsets in a slot, by product
    size_t n_slots = 0;

    bool same_slots(const ExpertArena &o) const { return end == o.end && stride == o.stride && parts == o.parts; }
    bool operator==(const ExpertArena &o) const { return same_slots(o) && n_slots == o.n_slots; }
    size_t begin() const { return end - n_slots * stride; }
    size_t at(size_t slot) const { return end - (slot + 1) * stride; }
    size_t number(size_t slot) const { return n_slots - 1 - slot; }
};

// Which expert lies in which slot. Experts that are chosen often stay.
class ExpertCache {
  public:
    static constexpr size_t kPassing = 32; // slots for experts that are not worth evicting another

    // The arena to use from now on; what lies in slots that it has no longer is forgotten.
    void adopt(const ExpertArena &arena);
    void clear() { adopt({}); }
    const ExpertArena &arena() const { return arena_; }
    // The slot of an expert, which is not evicted in the present use, or -1.
    int find(uint32_t layer, int expert);
    // Like find, but for whoever reads the slot at once.
    int where(uint32_t layer, int expert) const;
    // A slot for an expert that has none: -1 when all are in use, or hold experts that are hotter unless it must be.
    int take(uint32_t layer, int expert, bool must);
    void begin_use() { use_++; }
    size_t n_empty() const { return empty_.size(); } // slots of those that are to stay

    // That an expert was chosen so many times.
    void count(uint32_t layer, int expert, uint32_t times = 1);
    // Its share of the layer's choices of late.
    double heat(uint32_t layer, int expert) const;
    // By expert, as counted; empty if the layer's choices were never seen.
    const std::vector<uint32_t> &uses(uint32_t layer) const;
    void set_uses(uint32_t layer, std::vector<uint32_t> uses);

  private:
    struct Slot {
        uint64_t key = 0; // 0: empty
        uint64_t used = 0;
    };
    struct Layer {
        std::vector<uint32_t> uses;
        uint64_t total = 0;
    };
    static uint64_t key(uint32_t layer, int expert) { return ((uint64_t)layer + 1) << 32 | (uint32_t)expert; }
    double heat_of(uint64_t key) const { return heat((uint32_t)(key >> 32) - 1, (int)(uint32_t)key); }
    size_t n_kept() const; // slots of experts that are to stay; the others are for those that are needed once
    int place(size_t slot, uint64_t key);

    ExpertArena arena_;
    std::vector<Slot> slots_;
    std::vector<size_t> empty_; // of those to keep; the next to fill last
    size_t next_passing_ = 0;
    std::unordered_map<uint64_t, int> at_;
    std::unordered_map<uint32_t, Layer> layers_;
    uint64_t use_ = 1;
    std::minstd_rand random_;
};

} // namespace fsd
