// The ring: staging memory in VRAM through which streamed steps pass.
//
// Its policy: steps get slots in the order of use, one behind the other, and start again at the front when the end is reached
// (lay_ring). The next step of that order is copied next (pump). A slot may be overwritten once the last step whose bytes
// overlap it has been computed (RingSlot::reuse_distance). Behind the slots the rest of the ring is the expert cache.
//
// Copies are queued on the copy stream, and events order them and the compute stream. Where all streams share one queue, a
// thread makes them instead (CopyThread). Then the CPU waits for copies, and copies wait until the CPU knows that a step
// has been computed.
#pragma once

#include "copy_thread.h"
#include "expert_cache.h"
#include "host_cache.h"
#include "ledger.h"
#include "program.h"
#include "weights.h"

namespace fsd {

// Where each streamed step of one pass lies in the ring, and which earlier step must have been computed before its bytes
// may be overwritten. Offsets are the same in every pass, so addresses that an inner device has captured stay valid.
struct RingSlot {
    size_t offset = 0;
    size_t bytes = 0;
    // Distance back in the endless sequence of steps to the last one whose bytes overlap; at most the number of slots
    // (then it is this step's own previous pass).
    size_t reuse_distance = 0;
};

// Steps that do not fit the capacity make the result empty.
std::vector<RingSlot> lay_ring(const std::vector<size_t> &step_bytes, size_t capacity);

class Ring {
  public:
    // `generation` counts changes after which compiled programs are no longer right.
    Ring(Inner &inner, Ledger &ledger, const Weights &weights, HostCache &cache, ExpertCache &experts,
         uint64_t &generation)
        : inner_(inner), ledger_(ledger), weights_(weights), cache_(cache), experts_(experts), generation_(generation) {
    }

    // Takes VRAM of another size, rounded down to whole units; all that is in the ring is lost. False: there is none.
    bool resize(size_t bytes);
    // Lays the slots out for a program's streamed steps, if they are not already.
    void lay_out(const Program &p);
    // Waits for queued copies and forgets all slots.
    void reset();

    struct Copied {
        uint64_t copies = 0, bytes = 0;
    };
    // Starts copies whose slot is free, or will be once queued work is done, until `least_bytes` are under way. Waits only
    // for staging memory, and now and then for all work, on devices that keep what finished work has used.
    Copied pump(uint64_t least_bytes = UINT64_MAX);
    // Whether the copies of the step that is used next are queued. They may not be while its weights are read from disk.
    bool has_next() const { return next_copy_ > next_use_; }
    // Queues them, and waits for the disk as long as `most`. False when the weights cannot be read (HostCache::why).
    bool bring_next(std::chrono::milliseconds most, Copied &copied);
    // Copies the chosen experts that pump() did not predict, as far as they are read from disk, for which it waits `most`. To be
    // called again until it returns Taken::yes; Taken::failed: HostExperts::why.
    Taken copy_missing_experts(size_t entry, std::chrono::milliseconds most, Copied &copied);

    // The next step, which is `entry`, may be queued on the compute stream after this: the stream waits for its copies, or
    // the CPU does, and starts them if it had to wait for their slot.
    Copied wait_for(size_t entry);
    void synchronize(size_t entry); // the CPU waits
    void use(size_t entry);         // the step's computing is queued
    // The first `uses` steps have been computed. To be called where the CPU has waited for the compute stream.
    void computed(uint64_t uses) { computed_ = std::max(computed_, uses); }
    bool has_thread() const { return thread_ != nullptr; }
    // A slot of the expert cache is about to be filled by the copy stream. The thread's copies from slots do not wait for that
    // stream, nor it for them.
    void before_fill();

    ggml_backend_buffer_t buffer() const { return buffer_.get(); }
    char *base() const { return base_; }
    size_t capacity() const { return capacity_; }
    // Of the endless sequence of steps: the next to be copied, and the next to be used.
    uint64_t next_copy() const { return next_copy_; }
    uint64_t next_use() const { return next_use_; }
    int layer_of(size_t entry) const { return entries_[entry].layer; }

    size_t wanted = 0; // capacity that the plan asks for

  private:
    bool wants_thread() const;
    Copied pump_next();
    void copy_from_host(char *to, const char *from, size_t bytes);
    void copy_piece(const Piece &p, const char *source, size_t at, size_t from, size_t to);
    void copy_cached(size_t entry, int expert, int slot);
    Taken copy_pieces(size_t entry, std::chrono::milliseconds most, uint64_t &bytes);
    Taken copy_next(std::chrono::milliseconds most, Copied &copied);
    uint64_t copy_experts(size_t entry);
    bool copy_read_experts(size_t entry, uint64_t &bytes);
    Taken read_experts(size_t entry, std::chrono::milliseconds most, uint64_t &bytes);
    std::vector<int> lacking(size_t entry);
    void rest();

    Inner &inner_;
    Ledger &ledger_;
    const Weights &weights_;
    HostCache &cache_;
    ExpertCache &experts_;
    uint64_t &generation_;
    InnerBuffer buffer_;
    char *base_ = nullptr;
    size_t capacity_ = 0;
    std::vector<RingEntry> entries_;                 // of the program that the slots are for
    std::vector<RingSlot> slots_;                    // by entry
    size_t entry_capacity_ = 0;                      // what the slots are laid out in
    std::vector<ggml_backend_event_t> ready_, done_; // by entry: copied, computed
    std::vector<std::vector<bool>> held_;            // by entry of experts: those in its latest copy
    uint64_t next_copy_ = 0, next_use_ = 0;
    // Of the next entry to copy: the pieces that are copied already, and their bytes in the ring.
    size_t n_copied_ = 0, copied_bytes_ = 0;
    uint64_t rested_at_ = 0; // the next copy then
    std::unique_ptr<CopyThread> thread_;
    std::vector<uint64_t> last_copy_; // by entry: how many copies the thread had been given then
    uint64_t given_ = 0;              // to the thread so far
    uint64_t last_cached_ = 0;        // `given_` with the latest copy from the expert cache
    bool filling_ = false;            // slots of the cache, since the CPU has waited for the copy stream
    uint64_t computed_ = 0;           // steps, as far as the CPU knows
};

} // namespace fsd
