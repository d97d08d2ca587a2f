// Rewrites a vision tower's graph so that its large intermediate tensors are never held whole: attention whose mask shows
// only windows is computed some queries at a time, feed-forward blocks and other products some rows at a time. How a graph
// is cut depends on the model and the image alone, so results do not depend on the budget. Its VRAM does not depend on the
// images before: ggml's allocator leaves a smaller image's tensors where those of a larger one were, so every graph is laid
// out anew, also where there is nothing to cut.
#pragma once

#include "device.h"

#include <set>

namespace fsd {

// A rewritten graph with its own tensors and buffer. Destroy it after its last run and after the VRAM of its buffer was
// released.
class Tiling {
  public:
    // Null when host memory is short. `out` are the tensors that are read after the graph has run.
    static std::unique_ptr<Tiling> make(const ggml_cgraph *graph, const std::set<const ggml_tensor *> &out,
                                        ggml_backend_buffer_type_t buft, int n_threads);
    Tiling() = default;
    Tiling(const Tiling &) = delete;
    Tiling &operator=(const Tiling &) = delete;
    ~Tiling();

    ggml_cgraph *graph = nullptr; // its inputs have been copied to its tensors

    // Copies the results to the tensors of the original graph.
    void finish() const;

  private:
    friend class Tiler;
    ggml_context *ctx = nullptr;
    ggml_gallocr_t memory = nullptr;
    std::vector<std::pair<const ggml_tensor *, const ggml_tensor *>> out; // tensor here, tensor of the original graph
};

// A range of queries, and the range of keys that any of them sees.
struct QueryTile {
    int64_t row0, row1, key0, key1;
};

// The tiles of a mask of `rows` x `keys` values. Reads the whole mask. Empty when a row sees no key.
std::vector<QueryTile> tiles_of_mask(const float *mask, int64_t rows, int64_t keys, int n_threads);

} // namespace fsd
