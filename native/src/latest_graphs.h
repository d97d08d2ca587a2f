// What was found in the latest graphs, so that a graph that runs again is not searched again.
#pragma once

#include "ggml-impl.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

namespace fsd {

// By ggml's id of a graph; a graph with the id 0 is not known again. Clear it when a buffer of a graph is freed.
template <typename Found> class LatestGraphs {
  public:
    static constexpr size_t kMost = 6;

    // What `find` returns for the graph. Valid until kMost other graphs have been asked for.
    template <typename F> const Found &of(const ggml_cgraph *graph, F find) {
        auto it = std::find_if(known_.begin(), known_.end(),
                               [&](const auto &known) { return graph->uid != 0 && known.first == graph->uid; });
        if (it != known_.end()) {
            return it->second;
        }
        if (known_.size() >= kMost) {
            known_.pop_front();
        }
        return known_.emplace_back(graph->uid, find(graph)).second;
    }
    void clear() { known_.clear(); }

  private:
    std::deque<std::pair<uint64_t, Found>> known_;
};

} // namespace fsd
