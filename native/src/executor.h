// A compiled graph: what the executor walks.
#pragma once

#include "experts.h"

#include "ggml-impl.h"

namespace fsd {

constexpr size_t kMaxPrograms = 6;

inline bool is_noop(const ggml_tensor *t) {
    return ggml_op_is_empty(t->op) || ggml_is_empty(t) || (t->flags & GGML_TENSOR_FLAG_COMPUTE) == 0;
}

struct Span {
    Buffer *buffer;
    size_t offset, bytes;
};

// A run of nodes on one device. GPU segments are a range of the program's shadow nodes, CPU segments a range of the
// original graph's nodes.
struct Segment {
    bool cpu = false;
    bool row_piece = false;       // one row piece of a matrix; the segment is this and nothing else
    int step = 0;                 // first step that it covers
    int node0 = 0, node1 = 0;     // original nodes covered
    int piece = 0;                // of a matrix computed in row pieces: which one, for resuming after an eviction
    int shadow0 = 0, shadow1 = 0; // GPU: range of shadow nodes
    int entry = -1;               // index into the ring's entries, if streamed
    int group = -1;               // index into the program's groups of experts
    const ggml_tensor *chosen = nullptr; // experts, where the entry is a tensor of them
    CacheBlock *block = nullptr;         // comes into the window before, and what was written goes back after
    uint64_t uid = 0;
    uint64_t bytes = 0;         // of weights
    std::vector<Span> in, out;  // CPU: activations to fetch before and to put back after
    std::vector<HostRows> rows; // what puts back, by `out`
};

struct Program {
    uint64_t uid = 0;
    uint64_t generation = 0;
    int first_node = 0, first_piece = 0;
    const Tier *tier = nullptr;
    size_t merge_limit = 0; // of neighbouring resident steps
    uint64_t used_at = 0;
    std::vector<Segment> segments;
    std::vector<RingEntry> entries;
    std::vector<size_t> entry_bytes;
    size_t entry_capacity = 0; // of the ring; the rest is for experts
    std::vector<ExpertGroup> groups;
    ExpertArena arena;
    ggml_cgraph *shadow = nullptr; // owned by ctx
    ggml_context *ctx = nullptr;
    ~Program() {
        if (ctx) {
            ggml_free(ctx);
        }
    }
};

} // namespace fsd
