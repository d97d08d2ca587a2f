// How weights are cut into pieces and packed into slabs, and how much VRAM a model needs. Pure functions: they allocate no
// VRAM and ask no device. The shard device calls them at commit, the planner calls them through fsd_lay_out.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsd {

// Every inner device accepts offsets of this alignment.
constexpr size_t kAlign = 256;
// Kernels for a few tokens compute quantised rows in blocks and read all of the last block, also where the matrix ends
// within it. The largest block of any kernel has so many rows.
constexpr int64_t kRowBlock = 32;
// Kernels read quantised rows in runs of so many weights (MATRIX_ROW_PADDING of ggml-cuda).
constexpr int64_t kRowRun = 512;
// Weights up to this size (norms, biases, router scales) are always resident: they are small, and each of them would be
// a step of its own.
constexpr size_t kCoreBytes = 64 * 1024;
// Results of matrices in row pieces pass through scratch of this size, some tokens at a time.
constexpr size_t kScratchBytes = 2 * 1024 * 1024;
// The KV cache leaves room for a ring of so many of the largest steps, so that copies of weights run ahead.
constexpr size_t kRingBesideKv = 3;
// Graphs of at least so many tokens count as prefill: they are bound by computing, not by reading weights. Experts stream as
// whole tensors there.
constexpr int kPrefillTokens = 32;

inline size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// What `bytes` of rows of `row` values take on an inner device, its kernels' reads past the last row included.
size_t device_bytes(ggml_type type, int64_t row, size_t bytes);

// How many rows the pieces have of a matrix that is larger than `piece_bytes`.
inline int64_t rows_of_piece(size_t piece_bytes, size_t row_bytes) {
    return std::max<int64_t>(1, (int64_t)(piece_bytes / row_bytes) / kRowBlock) * kRowBlock;
}

// A weight tensor, as the model file has it.
struct WeightShape {
    std::string name;
    uint32_t shard = 0; // index in the ladder
    ggml_type type = GGML_TYPE_F32;
    int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};

    size_t row_bytes() const { return ggml_row_size(type, ne[0]); }
    size_t bytes() const { return row_bytes() * (size_t)(ne[1] * ne[2] * ne[3]); }
    bool is_matrix() const { return ne[2] == 1 && ne[3] == 1; }
};

// A run of rows of one weight tensor: the unit of residency, and what kernels are launched on.
struct Piece {
    int tensor = -1; // index of the weight
    uint32_t shard = 0;
    int64_t row0 = 0, rows = 0;
    size_t host_offset = 0; // from the tensor's first byte
    size_t bytes = 0;       // as in the file
    size_t padded = 0;      // on the inner device
    int slab = -1;
    size_t slab_offset = 0;
};

struct LayoutSizes {
    size_t piece_bytes = 0, step_bytes = 0, slab_bytes = 0; // 0: chosen by the model
    size_t unit_bytes = 1;                                  // in multiples of which the driver allocates VRAM
};

// Where a weight went: into the core, or into consecutive pieces.
struct WeightPlace {
    bool core = false;
    size_t core_offset = 0;
    int first_piece = -1;
    int n_pieces = 0;
};

struct Layout {
    LayoutSizes sizes;                // with the defaults filled in
    std::vector<WeightPlace> weights; // in the order of the input
    std::vector<Piece> pieces;        // in the order of the ladder
    std::vector<size_t> slab_sizes;   // whole units
    size_t slabs_total = 0;
    std::vector<size_t> shard_bytes;  // as in the file, without the core
    std::vector<int> shard_last_slab; // -1: the shard has no pieces
    size_t min_ring = 0;              // the smallest ring that every streamed step fits
    size_t core_bytes = 0, scratch_bytes = 0;

    size_t granular(size_t bytes) const { return round_up(bytes, sizes.unit_bytes); }
    // The least VRAM for weights that are not in the core: a model smaller than one step is simply resident.
    size_t least_weights() const { return std::min(min_ring, slabs_total); }
    // What the KV cache leaves for weights.
    size_t weights_beside_kv() const { return std::min(kRingBesideKv * min_ring, slabs_total); }
};

// `weights` ascend by shard. The result depends on them and on `sizes` alone, never on the budget: it decides which
// kernels see which shapes.
Layout lay_out(const std::vector<WeightShape> &weights, LayoutSizes sizes, uint32_t n_shards);

// Packs pieces, in the order of the ladder, into slabs. A slab holds at least one piece, so a large piece has a slab of its
// own. Returns the size of each slab. The resident set is a prefix of the slabs and therefore a prefix of the ladder.
std::vector<size_t> pack_slabs(std::vector<Piece> &pieces, size_t slab_bytes);

// VRAM for the KV cache: for the window and the blocks that stay, and when all of it is in VRAM.
struct KvNeed {
    uint64_t least = 0, whole = 0;
};

// VRAM that neither placement nor the context in use changes. `buffers` are llama.cpp's compute buffers and whatever else it
// asks for beside weights and KV cache.
uint64_t fixed_bytes(const Layout &layout, uint64_t overhead, const std::vector<size_t> &buffers);

// The smallest budget, and the one with which everything is resident.
inline uint64_t floor_bytes(const Layout &layout, uint64_t fixed, const KvNeed &kv) {
    return fixed + kv.least + layout.least_weights();
}
inline uint64_t full_bytes(const Layout &layout, uint64_t fixed, const KvNeed &kv) {
    return fixed + kv.whole + layout.slabs_total;
}

// What a budget holds beside the fixed part: the ring and a prefix of the slabs.
struct Residency {
    bool fits = false; // false: the budget is below the floor
    size_t ring = 0;   // whole units; 0: everything is resident and nothing is staged
    size_t slabs = 0;
};

Residency residency(uint64_t budget, uint64_t fixed, size_t min_ring, size_t wanted_ring,
                    const std::vector<size_t> &slabs, size_t unit_bytes);

} // namespace fsd
