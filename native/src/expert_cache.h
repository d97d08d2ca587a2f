// The cache of experts in the ring: where its slots lie and which expert lies in which. No ggml and no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

namespace fsd {

// Where in the ring the cache lies: the numbers of slots for the device, then for each product of a group (up, gate, down)
// the same number of slots, each of which holds that matrix of one expert of any layer.
struct ExpertArena {
    static constexpr size_t kNumbersBytes = 4096;

    size_t offset = 0;
    size_t n_slots = 0;
    std::vector<size_t> strides; // by product
    bool operator==(const ExpertArena &o) const {
        return offset == o.offset && n_slots == o.n_slots && strides == o.strides;
    }
    size_t numbers() const { return offset; }
    size_t slots(size_t product) const;
};

// Which expert lies in which slot. Experts that are asked for often stay.
class ExpertCache {
  public:
    // The arena to use from now on; true when what it held is gone.
    bool adopt(const ExpertArena &arena);
    void clear();
    const ExpertArena &arena() const { return arena_; }
    // Counts a use of an expert, in which it is not evicted; its slot or -1.
    int find(int weight, int expert);
    // How often an expert was asked for of late.
    uint32_t heat(int weight, int expert) const;
    // A slot for an expert that has none: -1 when all are in use.
    int take(int weight, int expert);
    void begin_use() { use_++; }

  private:
    struct Slot {
        uint64_t key = 0; // 0: empty
        uint64_t used = 0;
    };
    static uint64_t key(int weight, int expert) { return ((uint64_t)(weight + 1) << 32) | (uint32_t)expert; }
    uint32_t heat_of(uint64_t key) const;

    ExpertArena arena_;
    std::vector<Slot> slots_;
    size_t filled_ = 0;
    std::unordered_map<uint64_t, int> at_;
    std::unordered_map<uint64_t, uint32_t> heat_;
    uint64_t use_ = 1, asked_ = 0;
    std::minstd_rand random_;
};

} // namespace fsd
