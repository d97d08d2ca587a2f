// The count of host memory that the shard device holds, and its budget. The vision tower's weights count with the language
// model's.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace fsd {

class HostCache;
class Inner;
class KvStore;

// The message for a host budget below the floor.
std::string below_host_floor(uint64_t budget, uint64_t floor);

// [any thread], but for commit() and what brings budgets into force.
class HostLedger {
  public:
    HostLedger(const Inner &inner, const KvStore &kv, const HostCache &cache) : inner_(inner), kv_(kv), cache_(cache) {}

    // A window on the model file is in use from now on, or no longer.
    void add_weights(uint64_t bytes) { mapped_ += bytes; }
    void remove_weights(uint64_t bytes) { mapped_ -= bytes; }
    // The same for a tower's weights.
    void add_tower(uint64_t bytes) { tower_ += bytes; }
    void remove_tower(uint64_t bytes) { tower_ -= bytes; }

    uint64_t weights() const; // in the mapping, or what the cache has of them
    uint64_t used() const;    // weights, pinned memory, and KV blocks
    // The smallest budget. 0 before fsd_commit.
    uint64_t floor() const;
    uint64_t budget() const { return budget_.load(); } // 0: no limit
    bool fits(uint64_t budget) const { return budget == 0 || floor() <= budget; }
    bool within_budget() const { return budget() == 0 || used() <= budget(); }
    // From now on the floor is known. Returns whether the budget is not below it.
    bool commit();
    // What the budget leaves to the cache.
    uint64_t room_for_weights() const;

    // Asks for a budget; returns the number of the request.
    uint64_t ask(uint64_t bytes);
    uint64_t asked() const { return asked_.load(); }
    // Whether a later request has come.
    bool replaced(uint64_t request) const { return asked_.load() != request; }
    bool applied(uint64_t request) const { return applied_.load() >= request; }
    void bring_into_force() { budget_.store(wanted_.load()); }
    void note_applied(uint64_t request) { applied_.store(request); }

  private:
    uint64_t beside_cache() const;

    const Inner &inner_;
    const KvStore &kv_;
    const HostCache &cache_;
    std::mutex mutex_; // of asking
    std::atomic<uint64_t> mapped_{0}, tower_{0}, budget_{0}, wanted_{0}, asked_{0}, applied_{0};
    std::atomic<bool> committed_{false};
};

} // namespace fsd
