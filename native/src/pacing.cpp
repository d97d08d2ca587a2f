#include "pacing.h"

#include "ggml-impl.h"
#include "system.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace fsd {

static constexpr uint32_t kMagic = 0x42465346; // "FSFB"
static constexpr uint32_t kVersion = 1;
static constexpr uint32_t kIdle = 1; // flag: the host's frames need not be protected

static constexpr uint64_t kMs = 1000000;
static constexpr uint64_t kSilent = 100 * kMs; // after this and four frames without a new one the host is not paced
static constexpr uint64_t kNap = kMs / 2;      // between two checks of abort, budget and frame block
static constexpr uint64_t kMostFrames = 4;     // that a step waits, so that the engine makes progress beside every host

// By mode: by what share of its target a frame may be late before it counts, and how much of the host's GPU time steps may
// use. The least share is above 0 so that a host whose frames are always late does not stop the engine.
struct ModeLimits {
    double tolerance, most_share, least_share, growth;
};
static constexpr ModeLimits kModeLimits[] = {{0.03, 0.0, 0.0, 0.0}, {0.10, 0.8, 0.1, 0.01}, {1.0, 1.0, 1.0, 1.0}};
// Limits for a host that does not say how long it uses the GPU: its whole frame counts as busy.
static constexpr double kLeastShare = 0.04;
static constexpr double kBlindShare = 0.30;

// ------------------------------------------------------------------------------------------------------------- decision

void FramePacer::set_mode(Mode mode) {
    if (mode != mode_) {
        mode_ = mode;
        share_ = mode == Mode::balance ? 0.25 : 0.0;
        guard_ = 0;
        resume_ = 0;
    }
}

bool FramePacer::drawing(uint64_t now) const {
    return frame_.number > 0 && frame_.target > 0 && !(frame_.flags & kIdle) &&
           now < frame_.start + 4 * frame_.target + kSilent;
}

void FramePacer::see(const Frame &f, uint64_t now) {
    const bool fresh = f.number != frame_.number;
    const bool worked = last_frame_with_step_ == frame_.number && frame_.number > 0;
    frame_ = f;
    figures_.pacing = paced(now);
    figures_.gpu_busy_s = drawing(now) ? std::min(f.gpu_busy, f.target) * 1e-9 : 0.0;
    if (!fresh || f.number == 0) {
        return;
    }
    figures_.frames++;
    figures_.frame_time_s = f.time * 1e-9;
    figures_.target_frame_s = f.target * 1e-9;
    const ModeLimits &m = kModeLimits[(int)mode_];
    const bool late = f.time > f.target * (1 + m.tolerance);
    figures_.late_frames += late;
    const double most = f.gpu_busy > 0 ? m.most_share : std::max(m.most_share, kBlindShare);
    if (late && worked) { // a late frame without a step in it was not delayed by steps
        share_ *= 0.5;
        guard_ = std::min(guard_ + 0.25 * kMs, 0.25 * f.target);
    } else if (!late) {
        share_ = std::min(most, share_ + std::max(m.growth, f.gpu_busy > 0 ? 0.0 : 0.005));
        guard_ *= 0.98;
    }
    share_ = std::max(share_, f.gpu_busy > 0 ? m.least_share : std::max(m.least_share, kLeastShare));
    figures_.share = mode_ == Mode::compute ? 1.0 : share_;
}

uint64_t FramePacer::start_at(uint64_t now, uint64_t ready) const {
    if (!paced(now)) {
        return now;
    }
    // Without a share of the host's GPU time a step gets it all the same once it has waited for kMostFrames: it may be a
    // little shorter than the gap, and each look at the frame block too late for it.
    const uint64_t resume = share_ > 0 ? resume_ : ready + kMostFrames * frame_.target;
    // A frame whose successor is overdue is still being drawn.
    const uint64_t end = frame_.start + frame_.target;
    const uint64_t needed = longest_ + (uint64_t)guard_;
    if (frame_.gpu_busy > 0 && frame_.gpu_busy < frame_.target) {
        const uint64_t free_from = frame_.start + frame_.gpu_busy;
        const bool fits = now >= free_from && now + needed <= end;
        // A step that is longer than the gap starts at the gap's begin, once per frame, so that the engine makes progress.
        const bool too_long = needed > end - free_from;
        if (fits || (now >= free_from && now < end && too_long && last_frame_with_step_ != frame_.number)) {
            return now;
        }
        if (now < free_from) {
            return std::max(now, std::min(resume, free_from));
        }
        return std::max(now, resume); // or in the next frame's gap
    }
    if (frame_.gpu_busy > 0 && last_frame_with_step_ != frame_.number) {
        return now; // the host uses the GPU for the whole frame: one step per frame
    }
    return std::max(now, resume);
}

void FramePacer::ran(uint64_t start, uint64_t end) {
    uint64_t took = end - std::min(start, end);
    // In the host's GPU time a step takes longer than alone, so its own time is measured in free time.
    const bool free_time = start >= frame_.start + frame_.gpu_busy && start < frame_.start + frame_.target;
    if (free_time != measured_free_) {
        longest_ = free_time || longest_ == 0 ? took : longest_;
    } else {
        // One delayed step must not count in full. Steps longer than the gap are forgotten sooner, because until then there
        // is only one step per frame.
        const uint64_t gap = frame_.target - std::min(frame_.gpu_busy, frame_.target);
        longest_ = std::max(std::min(took, 2 * longest_), longest_ - longest_ / (longest_ > gap ? 8 : 64));
    }
    measured_free_ = measured_free_ || free_time;
    took = std::min(took, longest_);
    figures_.longest_step_s = longest_ * 1e-9;
    last_frame_with_step_ = frame_.number;
    const double most = (double)(kMostFrames * frame_.target);
    resume_ = share_ > 0 ? end + (uint64_t)std::min(took * (1 / share_ - 1), most) : 0;
}

// ----------------------------------------------------------------------------------------------------------------- frame block

bool Pacing::open(const char *path, std::string &why) {
    FrameBlock *block = nullptr;
    if (path && !(block = (FrameBlock *)map_shared(path, sizeof(FrameBlock), why))) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    // An earlier frame block stays mapped, because another thread may be reading it. There are few in a process's life.
    block_.store(block, std::memory_order_release);
    // A budget that was already answered is not taken again: a later one may have come by message.
    budget_seen_ = block ? std::max(block->applied_generation.load(), block->refused_generation.load()) : 0;
    const Mode mode = pacer_.mode();
    pacer_ = FramePacer();
    pacer_.set_mode(mode);
    return true;
}

void Pacing::set_mode(Mode mode) {
    std::lock_guard<std::mutex> lock(mutex_);
    pacer_.set_mode(mode);
}

// Reads under the sequence lock. If the host died while it wrote, the sequence stays odd, and the last frame becomes old.
bool Pacing::read(Frame &f) {
    FrameBlock *b = block_.load(std::memory_order_acquire);
    if (!b || b->magic != kMagic || b->version != kVersion) {
        return false;
    }
    // Each load acquires, so that the second load of the sequence comes after all of them. ThreadSanitizer does not
    // understand fences.
    for (int attempt = 0; attempt < 16; attempt++) {
        const uint32_t before = b->sequence.load(std::memory_order_acquire);
        if (before & 1) {
            std::this_thread::yield();
            continue;
        }
        f.flags = load_acquire(b->flags);
        f.number = load_acquire(b->frame);
        f.start = load_acquire(b->frame_start_ns);
        f.target = load_acquire(b->target_frame_ns);
        f.time = load_acquire(b->frame_time_ns);
        f.gpu_busy = load_acquire(b->gpu_busy_ns);
        f.budget_generation = load_acquire(b->budget_generation);
        f.vram_budget_bytes = load_acquire(b->vram_budget_bytes);
        if (b->sequence.load(std::memory_order_relaxed) == before) {
            // The host's values are not trusted: frames last a second at most and do not start in the future.
            const uint64_t now = clock_ns();
            f.target = std::min<uint64_t>(f.target, 1000 * kMs);
            if (f.start > now && f.start - now > f.target) {
                foreign_clock(f.start - now);
                f.number = 0;
            }
            f.start = std::min(f.start, now);
            f.time = std::min<uint64_t>(f.time, 60000 * kMs);
            return true;
        }
    }
    return false;
}

// A frame more than its length in the future has the time of another clock. Such a host would be drawing one frame for ever.
void Pacing::foreign_clock(uint64_t ahead_ns) {
    if (!std::exchange(foreign_clock_, true)) {
        GGML_LOG_WARN(
            "frameshard: the frame block's frame_start_ns is %.1f s ahead of the system's monotonic clock, so "
            "steps do not wait for these frames: the host must use the clock that the protocol names\n",
            ahead_ns * 1e-9);
    }
}

bool Pacing::before_step(uint64_t ready, const std::function<bool()> &hurry, bool &timed) {
    const uint64_t begin = clock_ns();
    for (uint64_t now = begin;; now = clock_ns()) {
        uint64_t at = now;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            Frame f;
            if (read(f)) {
                pacer_.see(f, now);
            }
            at = pacer_.start_at(now, ready);
            if (at <= now) {
                waited_s_ += (now - begin) * 1e-9;
                timed = pacer_.paced(now);
                return true;
            }
        }
        if (hurry()) {
            std::lock_guard<std::mutex> lock(mutex_);
            waited_s_ += (clock_ns() - begin) * 1e-9;
            return false;
        }
        sleep_for(std::chrono::nanoseconds(std::min(at - now, kNap)));
    }
}

void Pacing::after_step(uint64_t start, uint64_t end) {
    std::lock_guard<std::mutex> lock(mutex_);
    pacer_.ran(start, end);
}

bool Pacing::new_budget(uint64_t &generation, uint64_t &bytes) {
    Frame f;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!read(f) || f.budget_generation <= budget_seen_) {
        return false;
    }
    budget_seen_ = generation = f.budget_generation;
    bytes = f.vram_budget_bytes;
    return true;
}

void Pacing::show(uint64_t budget, uint64_t used, uint64_t floor) {
    if (FrameBlock *b = block_.load(std::memory_order_acquire)) {
        b->budget_bytes.store(budget, std::memory_order_relaxed);
        b->used_bytes.store(used, std::memory_order_relaxed);
        b->floor_bytes.store(floor, std::memory_order_relaxed);
    }
}

void Pacing::answer(uint64_t generation, bool refused) {
    FrameBlock *b = block_.load(std::memory_order_acquire);
    if (b) {
        (refused ? b->refused_generation : b->applied_generation).store(generation, std::memory_order_release);
    }
}

PacingFigures Pacing::figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    Frame f;
    if (read(f)) {
        pacer_.see(f, clock_ns());
    }
    PacingFigures figures = pacer_.figures();
    figures.waited_s = waited_s_;
    return figures;
}

} // namespace fsd
