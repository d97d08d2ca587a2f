// Reads of model files by a few threads, ahead of use.
//
// A read that fails is made once more a little later, because errors of disks may pass.
// Reads that graphs wait for come first, but every second one may be a read that only makes later graphs quicker: where the
// disk is the slowest part there is always a read of the first kind.
#pragma once

#include "inner.h"
#include "mapped_file.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fsd {

// An event of the inner device that other threads may wait for, for as long as one of them does.
using SharedEvent = std::shared_ptr<ggml_backend_event>;

// What the emulated device does to reads that graphs wait for, for tests. They are counted from 1; 0: none. Eight reads fail,
// so that one of them is sure to be needed; each of them `fails` times, or always if that is 0.
struct DiskScript {
    double gbps = 0; // 1e9 bytes/s; 0: as fast as the disk is
    uint64_t fail = 0, fails = 0, stall = 0;
    uint32_t stall_ms = 0;
};

// Whether bytes that a graph needs have been read.
enum class Taken { yes, not_yet, failed };

// What reads have taken. [any thread]
struct DiskCounts {
    std::atomic<uint64_t> read_bytes{0};
    // Of graphs, by the clock that never goes back; `waiting_since_s` is 0 while none waits.
    std::atomic<double> waited_s{0}, waiting_since_s{0};

    double all_waited_s() const; // the wait of now included
};

struct DiskRead {
    const MappedFile *file = nullptr;
    uint64_t offset = 0; // whole units, like `bytes`
    char *to = nullptr;
    size_t bytes = 0;
    std::shared_ptr<char> memory; // of `to`, if the read must keep it
    SharedEvent after;            // the memory is free once this has happened; null: it is free
    // Called by the thread that has read, with whether it could, before others see the state; false becomes a failure.
    std::function<bool(bool)> finish;
    enum class State { queued, running, done, failed, dropped } state = State::queued; // guarded by Disk's mutex
    std::string why;                                                                   // of a failure
};

class Disk {
  public:
    using Read = std::shared_ptr<DiskRead>;

    Disk(const DiskScript &script, DiskCounts &counts);
    ~Disk();
    Disk(const Disk &) = delete;
    Disk &operator=(const Disk &) = delete;

    void submit(const Read &read, bool urgent);
    DiskRead::State state(const Read &read) const;
    // A graph waits until a read is done or has failed, at most so long; returns its state.
    DiskRead::State wait(const Read &read, std::chrono::milliseconds most);
    // A read that has not begun never will; waits for one that has. Its memory is free then.
    void drop(const Read &read);
    // The same without waiting: a read that has begun goes on.
    void cancel(const Read &read);

  private:
    void work();
    void pass(const DiskRead &read);
    bool fails(uint64_t number, uint64_t n_tries) const;
    bool read_file(const DiskRead &read, uint64_t number, std::string &why) const;

    mutable std::mutex mutex_;
    std::condition_variable submitted_, finished_;
    std::deque<Read> urgent_, others_;
    bool other_next_ = false, stopped_ = false;
    const DiskScript script_;
    DiskCounts &counts_;
    uint64_t n_urgent_ = 0;                           // that have begun
    std::chrono::steady_clock::time_point free_at_{}; // of the emulated disk
    std::vector<std::thread> threads_;
};

} // namespace fsd
