#include "host_ledger.h"

#include "host_cache.h"
#include "kv_store.h"

#include <algorithm>

namespace fsd {

std::string below_host_floor(uint64_t budget, uint64_t floor) {
    return "a host memory budget of " + std::to_string(budget >> 20) + " MiB is below the floor of " +
           std::to_string((floor + (1 << 20) - 1) >> 20) + " MiB";
}

uint64_t HostLedger::weights() const { return (cache_.is_open() ? cache_.used() : mapped_.load()) + tower_.load(); }

// What the budget must leave room for beside the cache: staging memory too, where copies will pass through it.
uint64_t HostLedger::beside_cache() const {
    const bool stages = cache_.floor() > 0 && inner_.host_buffer_type();
    const uint64_t pinned = std::max<uint64_t>(inner_.pinned_bytes(), stages ? HostPaths::kStagingBytes : 0);
    return tower_.load() + pinned + kv_.host_bytes();
}

uint64_t HostLedger::used() const { return weights() + inner_.pinned_bytes() + kv_.host_bytes() + kv_.spare_bytes(); }

uint64_t HostLedger::floor() const {
    if (!committed_.load()) {
        return 0;
    }
    return beside_cache() + (cache_.floor() > 0 ? cache_.floor() : mapped_.load());
}

bool HostLedger::commit() {
    committed_.store(true);
    return fits(budget());
}

uint64_t HostLedger::room_for_weights() const {
    const uint64_t limit = budget() ? budget() : UINT64_MAX / 4, beside = beside_cache();
    return limit - (beside < limit ? beside : limit);
}

uint64_t HostLedger::ask(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_.store(bytes);
    return asked_.fetch_add(1) + 1;
}

} // namespace fsd
