// Pacing: when the next step may start, so that the host's frames keep their time.
//
// The host writes a frame block each frame (bindings/PROTOCOL.md, "Frame block"). From it follows where in the frame the
// GPU is the host's and where it is free. Steps wait for free time; a closed loop on the host's own frame times widens or
// narrows what counts as free. A host that has said nothing for a few frames, or says that it is idle, is not paced for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace fsd {

// The shared page as it lies in memory.
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

// One whole frame of the host, as read from the page.
struct Frame {
    uint32_t flags = 0;
    uint64_t number = 0, start = 0, target = 0, time = 0, gpu_busy = 0; // nanoseconds
    uint64_t budget_generation = 0, vram_budget_bytes = 0;
};

struct PacingFigures {
    uint64_t frames = 0, late_frames = 0;
    double frame_time_s = 0, target_frame_s = 0;
    double longest_step_s = 0; // of recent steps
    double waited_s = 0;       // all that steps have waited for frames
    double share = 1;          // of the host's own GPU time that steps may use beside it
    double gpu_busy_s = 0;     // of a frame, by the host's word; 0 while no frames are drawn
    bool pacing = false;       // the host's frames are being looked after right now
};

// The decision, without clock, page or device: what test programs drive with times of their own.
class FramePacer {
  public:
    void set_mode(Mode mode);
    Mode mode() const { return mode_; }
    // A frame as it stands now: learns from it when it is new.
    void see(const Frame &f, uint64_t now);
    // When the next step may start, if it takes as long as the longest of late; now or earlier: at once.
    uint64_t start_at(uint64_t now) const;
    // A step ran from `start` to `end`.
    void ran(uint64_t start, uint64_t end);
    bool drawing(uint64_t now) const; // the host is at its frames right now
    bool paced(uint64_t now) const { return mode_ != Mode::compute && drawing(now); }
    const PacingFigures &figures() const { return figures_; }

  private:
    Mode mode_ = Mode::balance;
    Frame frame_;
    double share_ = 0.25;
    double guard_ = 0;           // nanoseconds kept free before the next frame begins, beside the step's own time
    uint64_t longest_ = 0;       // decays
    bool measured_free_ = false; // longest_ is of steps in the host's free time
    uint64_t resume_ = 0;        // a step inside the host's busy time is followed by a gap until then
    uint64_t last_frame_with_step_ = 0;
    PacingFigures figures_;
};

// The page, mapped, and the pacer behind it. One per device.
class Pacing {
  public:
    // Maps the page at `path`; null unmaps. False with the reason in `why`. [any thread]
    bool open(const char *path, std::string &why);
    void set_mode(Mode mode); // [any thread]
    // Whether wait() may have to wait: one atomic load where no page is mapped.
    bool active() const { return block_.load(std::memory_order_acquire) != nullptr; }
    // Before a step on the GPU: waits until it may start, or `hurry`. True when after_step() wants to hear of its end.
    bool before_step(const std::function<bool()> &hurry);
    void after_step(uint64_t start, uint64_t end);
    // A budget in the page that has not been looked at yet. [any thread]
    bool new_budget(uint64_t &generation, uint64_t &bytes);
    void answer(uint64_t generation, bool refused, uint64_t budget, uint64_t used, uint64_t floor);
    PacingFigures figures();

  private:
    bool read(Frame &f);
    std::atomic<FrameBlock *> block_{nullptr};
    std::mutex mutex_; // guards what follows
    FramePacer pacer_;
    uint64_t budget_seen_ = 0;
    double waited_s_ = 0;
};

uint64_t clock_ns(); // the clock that the page's times are of

} // namespace fsd
