// The expert cache: where its slots lie in the ring, which expert each slot holds, and how often each expert was chosen.
// Pure bookkeeping, without ggml or a device.
#pragma once

#include "hot_slots.h"

namespace fsd {

// The cache's place in the ring. A slot holds one expert of any layer: its matrices (up, gate, down) one behind the other.
// Slots are counted from the end of the ring, so that a graph that needs more of the ring for streamed steps takes the last
// slots and leaves the others as they are. Inner devices number slots from the lowest address.
struct ExpertArena {
    // Behind the slots: the slot numbers of the chosen experts, and the input of a layer.
    static constexpr size_t kNumbersBytes = 4096, kInputBytes = 64 * 1024;

    size_t end = 0;         // offset of the end of the slots in the ring
    size_t table_bytes = 0; // of each layer's table of slot numbers, by expert; the tables are behind the input
    size_t stride = 0;
    std::vector<size_t> parts; // offsets in a slot, by product
    size_t n_slots = 0;

    bool same_slots(const ExpertArena &o) const { return end == o.end && stride == o.stride && parts == o.parts; }
    bool operator==(const ExpertArena &o) const { return same_slots(o) && n_slots == o.n_slots; }
    size_t begin() const { return end - n_slots * stride; }
    size_t at(size_t slot) const { return end - (slot + 1) * stride; }
    size_t number(size_t slot) const { return n_slots - 1 - slot; }
    size_t input_at() const { return end + kNumbersBytes; }
    size_t table_at(size_t layer) const { return input_at() + kInputBytes + layer * table_bytes; }
};

// Which expert each slot holds. Experts that are chosen often are kept.
class ExpertCache {
  public:
    static constexpr size_t kPassing = 32; // slots for experts that are not hot enough to replace a kept one

    ExpertCache() = default;
    ExpertCache(const ExpertCache &) = delete;
    ExpertCache &operator=(const ExpertCache &) = delete;

    // Changes the arena. Experts in slots that it no longer has are dropped.
    void adopt(const ExpertArena &arena);
    void clear() { adopt({}); }
    const ExpertArena &arena() const { return arena_; }
    // The slot of an expert, or -1. The expert is not dropped until the next begin_use().
    int find(uint32_t layer, int expert) { return slots_.find(key(layer, expert)); }
    // Like find(), without protecting the expert.
    int where(uint32_t layer, int expert) const { return slots_.where(key(layer, expert)); }
    // Whether it has a slot in which it will stay while it is hot.
    bool keeps(uint32_t layer, int expert) const;
    // Assigns a slot to an expert that has none. -1 when all slots are in use, or, unless it `must` have one, when they hold
    // experts that are chosen more often.
    int take(uint32_t layer, int expert, bool must);
    // The numbers of a layer's slots, by expert. An expert without a slot gets the number of a slot that no other expert of the
    // layer has: devices rely on a token choosing each at most once. Needs as many slots as experts.
    std::vector<int32_t> numbers(uint32_t layer, size_t n_experts) const;
    // Whether the device has a layer's numbers as they are now.
    bool has_table(uint32_t layer) const;
    void set_table(uint32_t layer, bool has) { layers_[layer].has_table = has; }
    void begin_use() { slots_.begin_use(); }
    size_t n_empty() const { return slots_.n_empty(); } // among the slots of kept experts

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
    struct Layer {
        std::vector<uint32_t> latest; // choice
        std::vector<uint32_t> uses;
        uint64_t total = 0;
        bool has_table = false;
    };
    static uint64_t key(uint32_t layer, int expert) { return ((uint64_t)layer + 1) << 32 | (uint32_t)expert; }
    static uint32_t layer_of(uint64_t key) { return (uint32_t)(key >> 32) - 1; }
    double heat_of(uint64_t key) const { return heat(layer_of(key), (int)(uint32_t)key); }

    ExpertArena arena_;
    HotSlots slots_{[this](uint64_t key) { return heat_of(key); }, kPassing, 4};
    std::unordered_map<uint32_t, Layer> layers_;
    double carry_ = 0; // of n_to_copy()
};

} // namespace fsd
