// The count of host memory that the shard device holds, and its budget. The vision tower's weights count with the language
// model's.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace fsd {

// The message for a host budget below the floor.
std::string below_host_floor(uint64_t budget, uint64_t floor);

class Inner;
class KvStore;

// [any thread]
class HostLedger {
  public:
    HostLedger(const Inner &inner, const KvStore &kv) : inner_(inner), kv_(kv) {}

    // A window on the model file, or a tower's weights, are in use from now on, or no longer.
    void add_weights(uint64_t bytes) { weights_ += bytes; }
    void remove_weights(uint64_t bytes) { weights_ -= bytes; }

    uint64_t weights() const { return weights_.load(); }
    uint64_t used() const; // weights, pinned memory, and KV blocks
    // The smallest budget: all weights are held. 0 before fsd_commit.
    uint64_t floor() const { return committed_.load() ? used() : 0; }
    uint64_t budget() const { return budget_.load(); } // 0: no limit
    void set_budget(uint64_t bytes) { budget_.store(bytes); }
    bool fits(uint64_t budget) const { return budget == 0 || floor() <= budget; }
    // From now on the floor is known. Returns whether the budget is not below it.
    bool commit() {
        committed_.store(true);
        return fits(budget());
    }

  private:
    const Inner &inner_;
    const KvStore &kv_;
    std::atomic<uint64_t> weights_{0}, budget_{0};
    std::atomic<bool> committed_{false};
};

} // namespace fsd
