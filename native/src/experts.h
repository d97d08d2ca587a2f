// Mixture of experts, one expert at a time. Which of a layer's experts a token needs is known only once the router has run,
// so a group of products with experts' weights is scheduled when it is reached. Experts in the expert cache are computed by
// the inner device. Missing ones are copied into the cache and computed there too, or computed by the CPU meanwhile; the
// plan says how many.
//
// Where all experts that a layer's router chose last were cached, the device is given the layer's group before the CPU has
// the choice: the device looks up itself in which slots the chosen experts are. If one is missing the group is run again.
#pragma once

#include "device.h"

#include <functional>
#include <unordered_map>
#include <vector>

namespace fsd {

// The last node of a graph that reads a tensor or a view of it.
using LastReaders = std::unordered_map<const ggml_tensor *, int>;

// Finds the group that starts at a node; false if none does that can be computed expert by expert.
bool find_group(const Device &d, const ggml_cgraph *graph, int node, const LastReaders &readers, ExpertGroup &group);

// The largest expert cache in a ring of `capacity` bytes that leaves `entries` bytes in front of it. All groups share the
// slots.
ExpertArena lay_arena(const std::vector<ExpertGroup> &groups, size_t entries, size_t capacity);

// How often a graph on the inner device has chosen each expert. Waits for the choice.
std::vector<uint32_t> count_chosen(Device &d, const ggml_tensor *chosen, int64_t n_experts);

// What a group needs of who runs it.
struct GroupHooks {
    // Called once the group's own copies are queued.
    std::function<void()> copy_ahead;
    // Called while experts are not read from disk yet, or when they cannot be. The group goes on if it returns success.
    std::function<ggml_status(Taken)> wait;
};

// Runs a group whose shadow nodes are `view`. Nothing of it is computed if GroupHooks::wait has ended it.
ggml_status run_experts(Device &d, ExpertGroup &group, const ggml_cgraph *graph, ggml_cgraph &view,
                        const GroupHooks &hooks);

} // namespace fsd
