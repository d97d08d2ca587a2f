// The expert cache: where its slots lie in the ring, which expert each slot holds, and how often each expert was chosen.
// Pure bookkeeping, without ggml or a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

namespace fsd {

// The cache's place in the ring. A slot holds one expert of any layer: its matrices (up, gate, down) one behind the other.
// Slots are counted from the end of the ring, so that a graph that needs more of the ring for streamed steps takes the last
// slots and leaves the others as they are. Inner devices number slots from the lowest address.
struct ExpertArena {
    static constexpr size_t kNumbersBytes = 4096; // behind the slots: the slot numbers of the chosen experts

    size_t end = 0; // offset of the end of the slots in the ring
    size_t stride = 0;
    std::vector<size_t> parts; // offsets in a slot, by product
    size_t n_slots = 0;

    bool same_slots(const ExpertArena &o) const { return end == o.end && stride == o.stride && parts == o.parts; }
    bool operator==(const ExpertArena &o) const { return same_slots(o) && n_slots == o.n_slots; }
    size_t begin() const { return end - n_slots * stride; }
    size_t at(size_t slot) const { return end - (slot + 1) * stride; }
    size_t number(size_t slot) const { return n_slots - 1 - slot; }
};

// Which expert each slot holds. Experts that are chosen often are kept.
class ExpertCache {
  public:
    static constexpr size_t kPassing = 32; // slots for experts that are not hot enough to replace a kept one

    // Changes the arena. Experts in slots that it no longer has are dropped.
    void adopt(const ExpertArena &arena);
    void clear() { adopt({}); }
    const ExpertArena &arena() const { return arena_; }
    // The slot of an expert, or -1. The expert is not dropped until the next begin_use().
    int find(uint32_t layer, int expert);
    // Like find(), without protecting the expert.
    int where(uint32_t layer, int expert) const;
    // Assigns a slot to an expert that has none. -1 when all slots are in use, or, unless it `must` have one, when they hold
    // experts that are chosen more often.
    int take(uint32_t layer, int expert, bool must);
    void begin_use() { use_++; }
    size_t n_empty() const { return empty_.size(); } // among the slots of kept experts

    // How many of a layer's missing experts to copy, for a share of them in [0, 1]. The fraction that rounding leaves is
    // carried to the next call. Empty slots are filled whatever the share.
    size_t n_to_copy(size_t n_missing, double share);

    // Counts that a router chose experts, by expert, and remembers it as the layer's latest choice.
    void set_choice(uint32_t layer, std::vector<uint32_t> chosen);
    const std::vector<uint32_t> &latest_choice(uint32_t layer) const; // empty: none
    // Counts that an expert was chosen.
    void count(uint32_t layer, int expert, uint32_t times = 1);
    // Its share of the layer's recent choices.
    double heat(uint32_t layer, int expert) const;
    // Counts by expert; empty if no choice of the layer was counted.
    const std::vector<uint32_t> &uses(uint32_t layer) const;
    void set_uses(uint32_t layer, std::vector<uint32_t> uses);

  private:
    struct Slot {
        uint64_t key = 0; // 0: empty
        uint64_t used = 0;
    };
    struct Layer {
        std::vector<uint32_t> latest; // choice
        std::vector<uint32_t> uses;
        uint64_t total = 0;
    };
    static uint64_t key(uint32_t layer, int expert) { return ((uint64_t)layer + 1) << 32 | (uint32_t)expert; }
    double heat_of(uint64_t key) const { return heat((uint32_t)(key >> 32) - 1, (int)(uint32_t)key); }
    size_t n_kept() const; // slots of kept experts; the other slots are for experts that are needed once
    int place(size_t slot, uint64_t key);

    ExpertArena arena_;
    std::vector<Slot> slots_;
    std::vector<size_t> empty_; // among the kept slots, the next to fill last
    size_t next_passing_ = 0;
    std::unordered_map<uint64_t, int> at_;
    std::unordered_map<uint32_t, Layer> layers_;
    uint64_t use_ = 1;
    double carry_ = 0; // of n_to_copy()
    std::minstd_rand random_;
};

} // namespace fsd
