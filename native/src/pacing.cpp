#include "pacing.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#if defined(_WIN32)
#include <windows.h>
#else
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#endif

namespace fsd {

static constexpr uint32_t kMagic = 0x42465346; // "FSFB"
static constexpr uint32_t kVersion = 1;
static constexpr uint32_t kIdle = 1; // flag: the host draws nothing that matters

static constexpr uint64_t kMs = 1000000;
static constexpr uint64_t kSilent = 100 * kMs; // beside four frames: then the host is loading, paused or gone
static constexpr uint64_t kNap = kMs / 2;      // between two looks at abort, budget and page

// By mode: how late a frame may be before it counts, and how much of the host's own GPU time may be used at most and at
// least: a host whose frames are late whatever we do is not a reason to stop.
struct Manners {
    double tolerance, most_share, least_share, growth;
};
static constexpr Manners kManners[] = {{0.03, 0.0, 0.0, 0.0}, {0.10, 0.8, 0.1, 0.01}, {1.0, 1.0, 1.0, 1.0}};
// Without a hint of the host's GPU time its whole frame counts as busy, and something must still get through.
static constexpr double kLeastShare = 0.04;
static constexpr double kBlindShare = 0.30;

uint64_t clock_ns() {
#if defined(__APPLE__)
    return clock_gettime_nsec_np(CLOCK_MONOTONIC_RAW);
#else
    return (uint64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
#endif
}

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
    const Manners &m = kManners[(int)mode_];
    const bool late = f.time > f.target * (1 + m.tolerance);
    figures_.late_frames += late;
    const double most = f.gpu_busy > 0 ? m.most_share : std::max(m.most_share, kBlindShare);
    if (late && worked) { // a frame that is late by itself says nothing about us
        share_ *= 0.5;
        guard_ = std::min(guard_ + 0.25 * kMs, 0.25 * f.target);
    } else if (!late) {
        share_ = std::min(most, share_ + std::max(m.growth, f.gpu_busy > 0 ? 0.0 : 0.005));
        guard_ *= 0.98;
    }
    share_ = std::max(share_, f.gpu_busy > 0 ? m.least_share : std::max(m.least_share, kLeastShare));
    figures_.share = mode_ == Mode::compute ? 1.0 : share_;
}

uint64_t FramePacer::start_at(uint64_t now) const {
    if (!paced(now)) {
        return now;
    }
    // A frame that has not been followed by another when it should have been is still being drawn.
    const uint64_t end = frame_.start + frame_.target;
    const uint64_t needed = longest_ + (uint64_t)guard_;
    if (frame_.gpu_busy > 0 && frame_.gpu_busy < frame_.target) {
        const uint64_t free_from = frame_.start + frame_.gpu_busy;
        const bool fits = now >= free_from && now + needed <= end;
        // A step longer than any gap begins as early in the gap as it can, once a frame: tokens keep flowing.
        const bool too_long = needed > end - free_from;
        if (fits || (now >= free_from && now < end && too_long && last_frame_with_step_ != frame_.number)) {
            return now;
        }
        if (now < free_from) {
            return share_ > 0 ? std::max(now, std::min(resume_, free_from)) : free_from;
        }
        return share_ > 0 ? std::max(now, resume_) : now + kNap; // until the next frame is begun
    }
    if (frame_.gpu_busy > 0 && last_frame_with_step_ != frame_.number) {
        return now; // the host has no time to spare; one step a frame
    }
    return share_ > 0 ? std::max(now, resume_) : now + kNap;
}

void FramePacer::ran(uint64_t start, uint64_t end) {
    uint64_t took = end - std::min(start, end);
    // Beside the host's own work a step takes turns with it: how long it takes by itself shows in free time alone.
    const bool free_time = start >= frame_.start + frame_.gpu_busy && start < frame_.start + frame_.target;
    if (free_time != measured_free_) {
        longest_ = free_time || longest_ == 0 ? took : longest_;
    } else {
        // A single step that something held up is no measure of others. What no gap holds is soon forgotten, because until
        // then there is one step a frame.
        const uint64_t gap = frame_.target - std::min(frame_.gpu_busy, frame_.target);
        longest_ = std::max(std::min(took, 2 * longest_), longest_ - longest_ / (longest_ > gap ? 8 : 64));
    }
    measured_free_ = measured_free_ || free_time;
    took = std::min(took, longest_);
    figures_.longest_step_s = longest_ * 1e-9;
    last_frame_with_step_ = frame_.number;
    resume_ = share_ > 0 ? end + (uint64_t)(took * (1 / share_ - 1)) : 0;
    // However long the step was: one in four frames gets another.
    resume_ = std::min(resume_, end + 4 * frame_.target);
}

// ----------------------------------------------------------------------------------------------------------------- page

static FrameBlock *map_page(const char *path, std::string &why) {
#if defined(_WIN32)
    HANDLE file = CreateFileA(path, GENERIC_READ | GENERIC_WRITE, FILE_SHARE_READ | FILE_SHARE_WRITE, nullptr,
                              OPEN_EXISTING, 0, nullptr);
    if (file == INVALID_HANDLE_VALUE) {
        why = "cannot open the frame block";
        return nullptr;
    }
    HANDLE mapping = CreateFileMappingA(file, nullptr, PAGE_READWRITE, 0, sizeof(FrameBlock), nullptr);
    CloseHandle(file);
    void *p = mapping ? MapViewOfFile(mapping, FILE_MAP_ALL_ACCESS, 0, 0, sizeof(FrameBlock)) : nullptr;
    if (mapping) {
        CloseHandle(mapping);
    }
    if (!p) {
        why = "cannot map the frame block";
        return nullptr;
    }
#else
    const int fd = ::open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        why = std::string("cannot open the frame block: ") + strerror(errno);
        return nullptr;
    }
    struct stat st = {};
    bool whole = fstat(fd, &st) == 0 && st.st_size == (off_t)sizeof(FrameBlock);
#if defined(F_GET_SEALS)
    // Whoever could shrink the page could end this process.
    const int seals = fcntl(fd, F_GET_SEALS);
    whole = whole && (seals < 0 || (seals & F_SEAL_SHRINK));
#endif
    void *p = whole ? mmap(nullptr, sizeof(FrameBlock), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    ::close(fd);
    if (p == MAP_FAILED) {
        why = "the frame block is no page of " + std::to_string(sizeof(FrameBlock)) + " bytes that stays so";
        return nullptr;
    }
#endif
    return (FrameBlock *)p;
}

bool Pacing::open(const char *path, std::string &why) {
    FrameBlock *page = nullptr;
    if (path && !(page = map_page(path, why))) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    // An earlier page stays mapped: another thread may just be reading it, and there are few in a process's life.
    block_.store(page, std::memory_order_release);
    // A budget that was answered before is not asked again: later words may have come by message.
    budget_seen_ = page ? std::max(page->applied_generation.load(), page->refused_generation.load()) : 0;
    const Mode mode = pacer_.mode();
    pacer_ = FramePacer();
    pacer_.set_mode(mode);
    return true;
}

void Pacing::set_mode(Mode mode) {
    std::lock_guard<std::mutex> lock(mutex_);
    pacer_.set_mode(mode);
}

// The seqlock's reader. A host that died while it wrote leaves the sequence odd: the last whole frame stands, and ages.
bool Pacing::read(Frame &f) {
    FrameBlock *b = block_.load(std::memory_order_acquire);
    if (!b || b->magic != kMagic || b->version != kVersion) {
        return false;
    }
    // Each load acquires, so that the second look at the sequence comes after all of them (a fence would do, but
    // ThreadSanitizer knows none).
    auto load = [](const auto &field) { return __atomic_load_n(&field, __ATOMIC_ACQUIRE); };
    for (int attempt = 0; attempt < 16; attempt++) {
        const uint32_t before = b->sequence.load(std::memory_order_acquire);
        if (before & 1) {
            std::this_thread::yield();
            continue;
        }
        f.flags = load(b->flags);
        f.number = load(b->frame);
        f.start = load(b->frame_start_ns);
        f.target = load(b->target_frame_ns);
        f.time = load(b->frame_time_ns);
        f.gpu_busy = load(b->gpu_busy_ns);
        f.budget_generation = load(b->budget_generation);
        f.vram_budget_bytes = load(b->vram_budget_bytes);
        if (b->sequence.load(std::memory_order_relaxed) == before) {
            // What a host writes is not trusted: a second and more is no frame, and nothing starts in the future.
            const uint64_t now = clock_ns();
            f.target = std::min<uint64_t>(f.target, 1000 * kMs);
            f.start = std::min(f.start, now);
            f.time = std::min<uint64_t>(f.time, 60000 * kMs);
            return true;
        }
    }
    return false;
}

bool Pacing::before_step(const std::function<bool()> &hurry) {
    const uint64_t begin = clock_ns();
    for (uint64_t now = begin;; now = clock_ns()) {
        uint64_t at = now;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            Frame f;
            if (read(f)) {
                pacer_.see(f, now);
            }
            at = pacer_.start_at(now);
            if (at <= now) {
                waited_s_ += (now - begin) * 1e-9;
                return pacer_.paced(now);
            }
        }
        if (hurry()) {
            return true;
        }
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(at - now, kNap)));
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

void Pacing::answer(uint64_t generation, bool refused, uint64_t budget, uint64_t used, uint64_t floor) {
    FrameBlock *b = block_.load(std::memory_order_acquire);
    if (!b) {
        return;
    }
    b->budget_bytes.store(budget, std::memory_order_relaxed);
    b->used_bytes.store(used, std::memory_order_relaxed);
    b->floor_bytes.store(floor, std::memory_order_relaxed);
    (refused ? b->refused_generation : b->applied_generation).store(generation, std::memory_order_release);
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
