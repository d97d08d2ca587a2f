// Weights that are held in memory of this process: read from their file once, into memory that takes the place of the mapping's
// pages, so that all who read weights find them where they always were. A range that is held needs nothing of the file: its
// first and last page are held too, also where a neighbour has a part of them.
//
// One thread says what is to be held. Readers of the disk start the next reads themselves, so that memory fills while no graph
// runs.
#pragma once

#include "disk.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

namespace fsd {

struct PageCopy;

class HeldWeights {
  public:
    HeldWeights() = default;
    HeldWeights(const HeldWeights &) = delete;
    HeldWeights &operator=(const HeldWeights &) = delete;

    // Nothing is held at first. The disk must be there until stop().
    void start(Disk &disk, std::vector<FileRange> ranges);
    // Waits for reads under way. What is held stays in the mapping.
    void stop();

    // From now on these ranges are to be held, and are read in this order, with at most `room` bytes at a time. All others
    // are freed at once, but for reads under way.
    void want(const std::vector<int> &ranges, uint64_t room);
    bool has(int range) const; // [any thread]
    // [any thread] Bytes that are held or being read, in whole pages; one that two ranges share counts twice.
    uint64_t bytes() const { return bytes_.load(); }
    // Whether some of them could not be read, or the system has refused memory for them, a second ago or earlier: want() them
    // again.
    bool lacks() const;
    // Whether has() may have changed since this was asked last, and no read is under way.
    bool changed();

    // Drops what was read through the mapping, of all pages of these files that are not held.
    void forget_others(const std::vector<const MappedFile *> &files) const;

  private:
    struct State {
        bool wanted = false, held = false, reading = false;
    };
    void read_more();
    void note_failure();
    bool finish(int range, bool ok, PageCopy &copy);
    void release(int range);
    bool is_held(const char *page) const;

    Disk *disk_ = nullptr;
    std::vector<FileRange> ranges_;
    std::vector<int> by_address_;
    std::atomic<uint64_t> bytes_{0};
    mutable std::mutex mutex_; // of what follows; Disk's is taken after it
    std::vector<State> states_;
    std::deque<int> to_read_;
    std::vector<Disk::Read> reads_;
    uint64_t room_ = 0;
    size_t n_reading_ = 0;
    bool changed_ = false;
    bool failed_ = false; // a range since want(), at failed_at_ the last
    std::chrono::steady_clock::time_point failed_at_{};
};

} // namespace fsd
