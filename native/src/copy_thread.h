// Copies to the inner device in a thread of its own, for devices whose streams share one queue. What is asynchronous on such
// a device (ggml-vulkan) waits for all that was queued before, kernels and copies alike. Synchronous copies have a queue of
// their own, and this thread waits for them.
#pragma once

#include "inner.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace fsd {

class CopyThread {
  public:
    struct Copy {
        ggml_tensor to;             // raw
        const char *host = nullptr; // host memory; null: within the device
        ggml_tensor from = {};      // in that case
    };

    explicit CopyThread(Inner &inner);
    ~CopyThread(); // as cancel()
    CopyThread(const CopyThread &) = delete;
    CopyThread &operator=(const CopyThread &) = delete;

    // Copies are made in the order of the calls, the first one at once: nothing may use `to` any more. Returns how many were
    // queued so far.
    uint64_t queue(const Copy &copy);
    bool made(uint64_t n); // whether the first n are
    void wait(uint64_t n); // until the first n are made
    // Those that are not made yet never will be; they count as made.
    void cancel();

  private:
    void work();
    void copy_part(const Copy &copy, size_t bytes);

    Inner &inner_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Copy> copies_; // of the first one what is left
    uint64_t queued_ = 0, made_ = 0;
    bool busy_ = false, stopped_ = false;
    size_t since_turn_ = 0; // bytes that were copied since other threads could use the device
    std::thread thread_;
};

} // namespace fsd
