#include "host_ledger.h"

#include "kv_store.h"

namespace fsd {

std::string below_host_floor(uint64_t budget, uint64_t floor) {
    return "a host memory budget of " + std::to_string(budget >> 20) + " MiB is below the floor of " +
           std::to_string((floor + (1 << 20) - 1) >> 20) + " MiB";
}

uint64_t HostLedger::used() const { return weights() + inner_.pinned_bytes() + kv_.host_bytes(); }

} // namespace fsd
