// Mixture of experts, one expert at a time: which of a layer's experts a token needs is known only once the router has
// run, so a group of products with experts' weights is decided on as it is met. Experts found in the cache are computed
// by the inner device; those that are missing are copied into the cache and computed there as well, or computed on the
// CPU beside that, by the plan's share.
#pragma once

#include "device.h"

#include "ggml-impl.h"

#include <functional>
#include <vector>

namespace fsd {

// Products with experts' weights that the same choice of experts goes into, and what is computed between them.
struct ExpertGroup {
    int node0 = 0, node1 = 0;
    std::vector<const ggml_tensor *> products;
    const ggml_tensor *ids = nullptr;      // I32 [experts chosen, tokens]
    const ggml_tensor *input = nullptr;    // of the first products
    bool streamed = false;                 // nothing is left to the CPU
    ggml_tensor *result = nullptr;         // shadow of the last product
    ggml_tensor *numbers = nullptr;        // device: the chosen experts' slots
    std::vector<std::vector<char>> memory; // that the CPU's part computes in
    HostRows rows;                         // what it has computed, on its way to the device

    int64_t chosen() const { return ids->ne[0] * ids->ne[1]; }
    const ggml_tensor *weight(size_t product) const { return products[product]->src[0]; }
    uint32_t shard(const Device &d) const { return d.weights[d.weight_at.at(weight(0)->data)].shard; }
};

// The group that starts with `node`, if it is one that can be computed expert by expert.
bool find_group(const Device &d, const ggml_cgraph *graph, int node, ExpertGroup &group);

// The largest arena in a ring of that capacity that leaves `entries` bytes in front of it. All groups share the slots.
ExpertArena lay_arena(const std::vector<ExpertGroup> &groups, size_t entries, size_t capacity);

// How often a graph on the inner device has chosen each expert; waits for the choice.
std::vector<uint32_t> count_chosen(Device &d, const ggml_tensor *chosen, int64_t n_experts);

// Runs a group whose inner-device part is `view`. Once its copies are under way, `copy_ahead` starts those of later layers.
ggml_status run_experts(Device &d, ExpertGroup &group, const ggml_cgraph *graph, ggml_cgraph &view,
                        const std::function<void()> &copy_ahead);

} // namespace fsd
