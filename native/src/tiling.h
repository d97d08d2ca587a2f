// Rewrites a vision tower's graph so that what grows with the square of an image, or is wider than the tower, is never
// there as a whole: attention that sees a window only is computed some queries at a time, feed-forward blocks and other
// products some rows at a time. How a graph is cut depends on the model and the image alone, so results do not depend on
// the budget.
#pragma once

#include "device.h"

#include <set>

namespace fsd {

// A graph in memory of its own. To be destroyed after the last run, and after its buffer's VRAM has been given back.
class Tiling {
  public:
    // Null when nothing is to be gained. `out` is what is read of the graph when it has run.
    static std::unique_ptr<Tiling> make(const ggml_cgraph *graph, const std::set<const ggml_tensor *> &out,
                                        ggml_backend_buffer_type_t buft, int n_threads);
    Tiling() = default;
    Tiling(const Tiling &) = delete;
    Tiling &operator=(const Tiling &) = delete;
    ~Tiling();

    ggml_cgraph *graph = nullptr; // what it reads is at its tensors' addresses

    // Copies what the graph has made to where it belongs.
    void finish() const;

  private:
    friend class Tiler;
    ggml_context *ctx = nullptr;
    ggml_gallocr_t memory = nullptr;
    std::vector<std::pair<const ggml_tensor *, const ggml_tensor *>> out; // made here, of the graph that was rewritten
};

// A run of queries, and the keys that any of them sees.
struct QueryTile {
    int64_t row0, row1, key0, key1;
};

// By what a mask of `rows` x `keys` values leaves to be seen, found by looking at all of it. Empty when a row sees nothing.
std::vector<QueryTile> tiles_of_mask(const float *mask, int64_t rows, int64_t keys, int n_threads);

} // namespace fsd
