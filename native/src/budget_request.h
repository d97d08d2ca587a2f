// The latest budget that was requested, and whether it is applied. [any thread]
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace fsd {

class BudgetRequest {
  public:
    // Sets the first budget, which needs not be applied.
    void start(uint64_t bytes) { bytes_.store(bytes); }
    // Requests a budget; returns the number of the request.
    uint64_t ask(uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        bytes_.store(bytes);
        return asked_.fetch_add(1) + 1;
    }
    uint64_t bytes() const { return bytes_.load(); }
    bool pending() const { return asked_.load() != applied_.load(); }
    bool is_applied(uint64_t number) const { return applied_.load() >= number; }

    // To apply a request: note its number, then take bytes(), then report the number.
    uint64_t number() const { return asked_.load(); }
    void set_applied(uint64_t number) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            applied_.store(number);
        }
        changed_.notify_all();
    }
    // Waits a millisecond, or until the request is applied.
    void wait(uint64_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return is_applied(number); });
    }

  private:
    std::atomic<uint64_t> bytes_{0}, asked_{0}, applied_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

} // namespace fsd
