// The KV cache of one buffer of llama.cpp: keys, values and recurrent state, in no more memory than is in use of them.
//
// llama.cpp sees every cached tensor whole: rows of so many cells, stream after stream. Behind that a KV block has storage for
// the first cells of the first streams only, which grows when a graph reaches further. The shapes that kernels see stay as
// they are; addresses and the stride from stream to stream differ. A block that has no room in VRAM lies in host memory and
// passes through the window for the nodes that touch it.
#pragma once

#include "inner.h"
#include "kv_layout.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace fsd {

struct KvGroup;
struct KvTensor;

// A layer's tensors: the unit that moves between VRAM and host memory.
struct KvBlock {
    KvGroup *group = nullptr;
    std::string key;  // the end that the names of its tensors share
    size_t place = 0; // among the blocks of its cache
    InnerBuffer storage;
    // Host memory for when the block leaves VRAM, and by stream how many cells are there already, laid out as in `storage`.
    InnerBuffer spare;
    std::vector<int64_t> mirrored;
    // The layout of cells that were ever copied to the spare memory; elsewhere it is zero. 0 cells: none. -1: of several layouts.
    int64_t spare_cells = 0, spare_streams = 0;
    char *base = nullptr;
    size_t bytes = 0;
    int64_t cells = 0, streams = 0; // that each tensor has storage for
    bool in_host_memory = false;
    size_t pane = 0;    // of the window, while it is in host memory
    bool stays = false; // in VRAM: a node needs it beside another block, and the window has one at a time for a node
    std::vector<KvTensor *> tensors;
};

struct KvTensor {
    KvBlock *block = nullptr;
    ggml_tensor shape = {};
    size_t offset = 0; // in the buffer's reserved addresses
    size_t row = 0;    // bytes of a cell
    int64_t cells = 0, streams = 0;
    size_t at = 0; // in the block's storage

    KvShape kv_shape() const {
        const int64_t block = ggml_blck_size(shape.type);
        return {shape.type, (int64_t)(row / ggml_type_size(shape.type)) * block, cells, streams};
    }
    size_t stream_bytes() const { return row * (size_t)cells; }
    size_t bytes() const { return stream_bytes() * (size_t)streams; }
    char *place(char *base, int64_t stream, int64_t cell) const {
        return base + at + row * (size_t)(stream * block->cells + cell);
    }
};

// Tensors with the same number of cells and streams. They grow together, because one list of row numbers is for all of them.
struct KvGroup {
    int64_t cells = 0, streams = 0;
    std::vector<int64_t> used;    // cells by stream, as seen in graphs
    std::vector<int64_t> asked;   // by stream, what fsd_use_kv said; -1: nothing yet
    bool by_rows = false;         // written by row number, so that the number of cells in use is known by stream
    std::vector<int64_t> written; // by stream: no cell from here on was written since the stream was empty
    std::vector<KvBlock *> blocks;
};

// Which part of a cached tensor a view of it covers.
struct Reach {
    bool whole = true; // the view is not a run of cells in each of neighbouring streams
    int64_t stream0 = 0, streams = 0, cells = 0;
    size_t rest = 0; // bytes from the start of the first stream
};

// Bytes of a buffer that lie together in the storage of a block. Null address: they have no storage.
struct KvRun {
    KvBlock *block;
    char *address;
    size_t from, bytes; // `from`: from the start of the range that was asked for
};

class KvCache {
  public:
    void add(const ggml_tensor *t, size_t offset);
    KvTensor *at(size_t offset); // null between tensors
    std::vector<KvRun> runs(size_t offset, size_t bytes);
    std::deque<KvGroup> groups;
    std::deque<KvBlock> blocks;
    std::deque<KvTensor> tensors; // in ascending order of offset
};

Reach reach_of(const KvTensor &c, const ggml_tensor *t);

} // namespace fsd
