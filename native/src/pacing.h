// Pacing: when the next step may start, so that the host's frames are not delayed.
//
// The host writes a frame block each frame (bindings/PROTOCOL.md, "Frame block"). It shows when in the frame the host uses
// the GPU. Steps wait for the rest of the frame; a closed loop on the host's frame times widens or narrows what steps may
// use. A host that has written nothing for a few frames, or says that it is idle, is not paced.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace fsd {

// The frame block's layout in shared memory.
struct FrameBlock {
    uint32_t magic, version;
    std::atomic<uint32_t> sequence; // odd while the host writes
    uint32_t flags;
    uint64_t frame, frame_start_ns, target_frame_ns, frame_time_ns, gpu_busy_ns;
    uint64_t budget_generation, vram_budget_bytes;
    uint8_t reserved[1976];
    // From here on the sidecar writes.
    std::atomic<uint64_t> applied_generation, refused_generation, budget_bytes, used_bytes, floor_bytes;
    uint8_t reserved_too[2008];
};
static_assert(sizeof(FrameBlock) == 4096 && offsetof(FrameBlock, flags) == 12 && offsetof(FrameBlock, frame) == 16 &&
                  offsetof(FrameBlock, frame_start_ns) == 24 && offsetof(FrameBlock, target_frame_ns) == 32 &&
                  offsetof(FrameBlock, frame_time_ns) == 40 && offsetof(FrameBlock, gpu_busy_ns) == 48 &&
                  offsetof(FrameBlock, budget_generation) == 56 && offsetof(FrameBlock, vram_budget_bytes) == 64 &&
                  offsetof(FrameBlock, applied_generation) == 2048 && offsetof(FrameBlock, floor_bytes) == 2080,
              "the layout in bindings/PROTOCOL.md");

enum class Mode { graphics = 0, balance = 1, compute = 2 };

// One frame of the host, as read from the frame block.
struct Frame {
    uint32_t flags = 0;
    uint64_t number = 0, start = 0, target = 0, time = 0, gpu_busy = 0; // nanoseconds
    uint64_t budget_generation = 0, vram_budget_bytes = 0;
};

struct PacingFigures {
    uint64_t frames = 0, late_frames = 0;
    double frame_time_s = 0, target_frame_s = 0;
    double longest_step_s = 0; // among recent steps
    double waited_s = 0;       // total time that steps have waited for frames
    double share = 1;          // share of the host's own GPU time that steps may use, too
    double gpu_busy_s = 0;     // GPU time of a frame, as the host says; 0 while no frames are drawn
    bool pacing = false;       // steps wait for the host's frames now
};

// The decision, without clock, frame block or device, so that tests can drive it with times of their own.
class FramePacer {
  public:
    void set_mode(Mode mode);
    Mode mode() const { return mode_; }
    // The frame block's present frame; learns from it when it is new.
    void see(const Frame &f, uint64_t now);
    // When the next step may start, if it takes as long as the longest recent step. A time up to `now` means at once.
    // It waits since `ready`.
    uint64_t start_at(uint64_t now, uint64_t ready) const;
    // A step ran from `start` to `end`.
    void ran(uint64_t start, uint64_t end);
    bool drawing(uint64_t now) const; // the host is drawing frames
    bool paced(uint64_t now) const { return mode_ != Mode::compute && drawing(now); }
    const PacingFigures &figures() const { return figures_; }

  private:
    Mode mode_ = Mode::balance;
    Frame frame_;
    double share_ = 0.25;
    double guard_ = 0;           // nanoseconds kept free between a step's expected end and the next frame
    uint64_t longest_ = 0;       // step, nanoseconds; decays
    bool measured_free_ = false; // longest_ was measured while the host did not use the GPU
    uint64_t resume_ = 0;        // end of the gap after a step in the host's GPU time
    uint64_t last_frame_with_step_ = 0;
    PacingFigures figures_;
};

// The mapped frame block and its pacer. One per device.
class Pacing {
  public:
    // Maps the frame block at `path`; null: none. False with the reason in `why`. [any thread]
    bool open(const char *path, std::string &why);
    void set_mode(Mode mode); // [any thread]
    // Whether a frame block is mapped.
    bool active() const { return block_.load(std::memory_order_acquire) != nullptr; }
    // Waits until a step on the GPU, which waits since `ready`, may start; false when `hurry` comes first. `timed` is set when
    // after_step() should be called.
    bool before_step(uint64_t ready, const std::function<bool()> &hurry, bool &timed);
    void after_step(uint64_t start, uint64_t end);
    // Takes a budget in the frame block that was not taken before; false when there is none. It has to be answered.
    // [any thread]
    bool new_budget(uint64_t &generation, uint64_t &bytes);
    // Writes the budget in force (0: no limit), what is in use, and the floor. [any thread]
    void show(uint64_t budget, uint64_t used, uint64_t floor);
    // Tells the host that this budget was refused or is in force. show() comes first. [any thread]
    void answer(uint64_t generation, bool refused);
    PacingFigures figures();

  private:
    bool read(Frame &f);
    void foreign_clock(uint64_t ahead_ns);
    std::atomic<FrameBlock *> block_{nullptr};
    std::mutex mutex_; // guards what follows
    FramePacer pacer_;
    uint64_t budget_seen_ = 0;
    bool foreign_clock_ = false; // was logged
    double waited_s_ = 0;
};

} // namespace fsd
