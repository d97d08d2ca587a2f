// What fsd_set_plan sets: the placement of shards that are not resident.
#pragma once

#include "frameshard_device.h"

#include <cstdint>
#include <vector>

namespace fsd {

// Placements for graphs of at least `min_tokens` tokens, up to the next tier's.
struct Tier {
    uint32_t min_tokens = 0;
    std::vector<uint8_t> placement; // fsd_placement by shard; shards behind its end are streamed

    bool on_cpu(uint32_t shard) const { return shard < placement.size() && placement[shard] == FSD_CPU; }
};

struct Plan {
    std::vector<Tier> tiers;        // in ascending order of min_tokens
    double expert_stream_share = 0; // share of the missing experts of CPU shards that are copied to the device
    bool exact = true;              // the same bits at every budget; costs fused kernels

    // The tier of a graph with so many tokens; null without a plan: everything is streamed.
    const Tier *tier_for(int64_t n_tokens) const {
        const Tier *best = nullptr;
        for (const Tier &t : tiers) {
            if (n_tokens >= t.min_tokens) {
                best = &t;
            }
        }
        return best;
    }
};

} // namespace fsd
