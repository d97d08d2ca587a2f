// How much storage the KV cache takes. Pure functions, which the shard device and, through fsd_lay_out, the planner call.
//
// A cached tensor has a row for each cell of each stream (a stream is the cells of one sequence; recurrent state is a tensor
// of one stream, whose cells are sequences). A KV block is one layer's tensors of as many cells and streams.
#pragma once

#include "layout.h"

namespace fsd {

// What a cached tensor has room for, as llama.cpp asks for it.
struct KvShape {
    ggml_type type = GGML_TYPE_F16;
    int64_t row = 0; // values of a cell
    int64_t cells = 0, streams = 0;
};

constexpr int64_t kCellPage =
    256; // the smallest number of cells that is added; llama.cpp pads what attention reads to it

// Cells to hold for so many in use: up to an eighth more, so that growth is rare.
inline int64_t cells_to_hold(int64_t used, int64_t cells) {
    int64_t step = kCellPage;
    while (16 * step <= used) {
        step *= 2;
    }
    return std::min(cells, (used + step - 1) / step * step);
}

// Storage of one tensor for so many cells and streams; a block's tensors lie one after the other.
inline size_t kv_tensor_bytes(const KvShape &t, int64_t cells, int64_t streams) {
    const size_t bytes = ggml_row_size(t.type, t.row) * (size_t)(cells * streams);
    return bytes > 0 ? align_up(device_bytes(t.type, t.row, bytes)) : 0; // padding alone is no storage
}

// A tensor of a layer, and how many of its cells are in use in each stream.
struct KvUse {
    uint32_t layer = 0;
    KvShape shape;
    int64_t used = 0;
};

// VRAM of all blocks: `need`, and `used` for the cells in use. Each block takes whole units.
struct KvBytes {
    KvNeed need;
    uint64_t used = 0;
};

KvBytes kv_bytes(const std::vector<KvUse> &tensors, size_t unit_bytes);

} // namespace fsd
