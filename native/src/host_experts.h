// Single experts in host memory, where it has no room for all of them: the cache between the disk and the expert cache in VRAM.
//
// A slot holds one matrix of one expert. What a graph needs and no slot holds is read from disk into the slot of a matrix
// that routers have chosen rarely, by ExpertCache's counts. Slots are taken in blocks, when they are needed, of the device's
// pinned memory if it has any.
//
// A matrix that was asked for keeps its slot until its copy to the device is queued, or until the next begin_use(), and while it
// is read. A slot is read into again only when copies from it have run.
#pragma once

#include "disk.h"
#include "expert_cache.h"

#include <vector>

namespace fsd {

// The matrices of a piece of weights that has experts. A piece without experts has none.
struct ExpertPiece {
    FileRange range; // of all of them, one behind the other
    uint32_t layer = 0;
    int n_experts = 0;
    size_t each = 0; // bytes
    size_t more = 0; // behind a matrix, which kernels read too
    // One matrix, and what lies behind it.
    FileRange matrix(int expert) const;
};

class HostExperts {
  public:
    static constexpr size_t kBlockSlots = 64; // a token's experts in a layer of most models need fewer
    static constexpr size_t kLeastBlocks = 8; // for all experts: the blocks of small models have fewer slots,
    static constexpr size_t kLeastSlots = 8;  // but so many, so that all matrices of one expert are there at once
    static constexpr size_t kPassing = 64;    // slots for what is not hot enough to stay

    HostExperts(const Inner &inner, const ExpertCache &counts) : inner_(inner), counts_(counts) {}
    HostExperts(const HostExperts &) = delete;
    HostExperts &operator=(const HostExperts &) = delete;

    // Finds the size of slots, before start().
    void plan(std::vector<ExpertPiece> pieces); // by piece
    // Of the memory that is taken at once, and needed at least; 0: the model has no experts.
    uint64_t block_bytes() const { return slot_bytes_ * block_slots_; }

    // At first there are no slots. `may_grow` says whether host memory has room for one more block, beside the first. The disk
    // must be there until stop().
    void start(Disk &disk, std::function<bool()> may_grow);
    void stop();
    bool has(int piece) const { return pieces_[(size_t)piece].n_experts > 0; }

    // From now on slots take at most `room` bytes, but a block at least; what is more is given back at once, but for blocks that
    // are being read into. Pieces that are not `needed` are resident in VRAM.
    void set_room(uint64_t room, const std::vector<bool> &needed);
    // [any thread] Of blocks, those included that are given back as soon as reads under way have ended.
    uint64_t bytes() const { return bytes_.load(); }
    size_t most_slots() const { return most_blocks_ * block_slots_; }
    uint64_t most_bytes() const { return most_blocks_ * block_bytes(); }

    void begin_use();
    uint64_t n_read() const { return n_read_.load(); } // [any thread] matrices, so far
    // Makes sure that a matrix is in a slot or read into one; what has failed for an earlier use is read again.
    // Taken::not_yet: no slot is free for it; one that it `must` have may take the place of any that is not in use.
    // Taken::failed: the system refuses memory for the first slots.
    Taken ask(int piece, int expert, bool must);
    // A matrix at `data`, with what lies behind it. Waits `most` for it. Taken::not_yet also when it was not asked for in this
    // use.
    Taken take(int piece, int expert, std::chrono::milliseconds most, const char *&data);
    // Copies of these matrices, which were taken, are queued on the copy stream: their slots are free.
    void copied(const std::vector<std::pair<int, int>> &matrices);
    // The streams have run, and go away.
    void forget_copies();
    const std::string &why() const { return why_; } // of the latest failure

  private:
    struct Slot {
        Disk::Read read;    // under way or failed; null: what the slot is for is there
        uint64_t use = 0;   // that has asked for the read
        uint64_t asked = 0; // the latest use that needs the matrix
        size_t skip = 0;    // to its first byte
        SharedEvent copied; // the latest copy from it
    };
    static uint64_t key(int piece, int expert) { return ((uint64_t)piece + 1) << 32 | (uint32_t)expert; }
    double heat(uint64_t key) const;
    const std::shared_ptr<char> &block_of(int slot) const { return blocks_[(size_t)slot / block_slots_]; }
    char *memory(int slot) const { return block_of(slot).get() + (size_t)slot % block_slots_ * slot_bytes_; }
    bool add_block();
    void release_read();
    void free_blocks(size_t left);
    void read(int slot, const FileRange &range);

    const Inner &inner_;
    const ExpertCache &counts_;
    std::vector<ExpertPiece> pieces_;
    std::vector<bool> needed_; // by piece
    size_t slot_bytes_ = 0, block_slots_ = 0;
    Disk *disk_ = nullptr;
    std::function<bool()> may_grow_;
    HotSlots table_{[this](uint64_t key) { return heat(key); }, kPassing, 2};
    std::vector<std::shared_ptr<char>> blocks_;
    std::vector<Slot> slots_;
    std::vector<int> reading_; // slots, those of late
    size_t most_blocks_ = 0;
    uint64_t use_ = 1;
    std::atomic<uint64_t> bytes_{0}, n_read_{0};
    std::string why_;
};

} // namespace fsd
