// A compiled graph: what the graph compiler makes and the executor runs.
#pragma once

#include "expert_cache.h"
#include "inner.h"
#include "plan.h"
#include "column_products.h"

#include <memory>
#include <vector>

namespace fsd {

struct Buffer;
struct KvBlock;

constexpr size_t kMaxPrograms = 6;

struct Span {
    Buffer *buffer;
    size_t offset, bytes;
};

// One streamed step: the pieces that are copied into the ring together.
struct RingEntry {
    std::vector<int> pieces;
    // Of an entry that is one tensor of experts, of which only the chosen ones are copied: its layer (the shard of the
    // layer's experts) and its place among the layer's products. -1: not such an entry.
    int layer = -1, product = 0;
    bool operator==(const RingEntry &o) const { return pieces == o.pieces && layer == o.layer && product == o.product; }
};

// Products with experts' weights that share one choice of experts, and the nodes between them.
struct ExpertGroup {
    int node0 = 0, node1 = 0;
    uint32_t layer = 0; // the shard of its weights
    std::vector<const ggml_tensor *> products;
    const ggml_tensor *ids = nullptr;   // I32 [experts chosen, tokens]
    const ggml_tensor *input = nullptr; // of the first products
    bool streamed = false;              // all missing experts are copied to the device, none computed on the CPU
    ggml_tensor *result = nullptr;      // shadow of the last product
    size_t place = 0;                   // among the groups of the whole graph
    ggml_tensor *numbers = nullptr;     // on the inner device: the slots of the chosen experts
    // How many shadow nodes before those of the group keep its input and look the numbers up in the layer's table, on the
    // device; 0: it cannot do so.
    int n_lookup = 0;
    uint64_t lookup_uid = 0;               // of the group with them
    std::vector<std::vector<char>> memory; // that the CPU's part computes in
    HostRows rows;                         // writes the CPU's rows to the device

    int64_t chosen() const { return ids->ne[0] * ids->ne[1]; }
    const ggml_tensor *weight(size_t product) const { return products[product]->src[0]; }
};

// A run of nodes on one device. GPU segments are a range of the program's shadow nodes.
struct Segment {
    bool cpu = false;
    bool row_piece = false;              // CPU: the segment is row pieces of one matrix and nothing else
    int step0 = 0, step1 = 0;            // steps covered, if there are row pieces among them
    int node0 = 0, node1 = 0;            // original nodes covered
    int piece = 0;                       // index of the first row piece, for resuming after an eviction
    int shadow0 = 0, shadow1 = 0;        // GPU: range of shadow nodes
    int entry = -1;                      // index into the program's ring entries; -1: nothing is streamed
    int group = -1;                      // index into the program's expert groups; -1: not a group
    const ggml_tensor *chosen = nullptr; // the choice of experts, where the entry is a tensor of experts
    KvBlock *block = nullptr;            // KV block in host memory, copied to the window before and written back after
    uint64_t uid = 0;
    uint64_t bytes = 0;               // of weights
    std::vector<ggml_tensor *> nodes; // CPU: the original nodes, or what computes their results faster
    std::vector<Span> in, out;        // CPU: activations to copy from the device before and to the device after
    std::vector<HostRows> rows;       // by `out`
};

// A copy of a graph's nodes and of what they read that is no node, and where they were. llama.cpp builds each graph in the same
// memory: one that it builds again, like the graph of a token after a prompt, often is the same to the byte.
class GraphImage {
  public:
    void take(const ggml_cgraph *graph);
    bool is_of(const ggml_cgraph *graph) const;

  private:
    std::vector<const ggml_tensor *> at_;
    std::vector<ggml_tensor> tensors_; // by at_
};

// The memory of a program. A new program takes over that of the one that it replaces: with memory from the system a third
// of a compile goes to page faults.
struct ProgramMemory {
    GraphImage image; // empty if the graph has no id
    std::unique_ptr<char[]> tensors;
    size_t tensor_bytes = 0;
};

// What a program depends on beside the weights.
struct ProgramKey {
    uint64_t uid = 0;        // ggml's id of the graph; 0: the graph is not known again
    uint64_t generation = 0; // of the residency
    int first_node = 0, first_piece = 0;
    const Tier *tier = nullptr;
    size_t merge_limit = 0;       // how much work neighbouring resident steps may have together in one segment
    std::vector<uint64_t> memory; // the versions of its compute buffers' memory

    bool same_but_for_id(const ProgramKey &o) const {
        return generation == o.generation && first_node == o.first_node && first_piece == o.first_piece &&
               tier == o.tier && merge_limit == o.merge_limit && memory == o.memory;
    }
};

struct Program {
    Program(const ProgramKey &k, ProgramMemory &&m, const CpuKernels &kernels)
        : key(k), memory(std::move(m)), columns(kernels) {}
    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;
    ~Program() { ggml_free(ctx); }

    ProgramKey key;
    ProgramMemory memory;
    uint64_t used_at = 0;
    std::vector<Segment> segments;
    std::vector<RingEntry> entries;
    std::vector<size_t> entry_bytes;
    size_t entry_capacity = 0; // of the ring; the rest is the expert cache
    std::vector<ExpertGroup> groups;
    ExpertArena arena;
    ColumnProducts columns;        // of the CPU segments
    ggml_cgraph *shadow = nullptr; // owned by ctx
    ggml_context *ctx = nullptr;   // in `memory`
};

// The programs of the latest graphs. Before one is dropped, by make_room() or clear(), the compute stream must have
// finished: queued work reads the shadow graphs.
class ProgramCache {
  public:
    // The graph's program; null: none. A graph with a new id that is the same as an earlier one has that one's program.
    Program *find(const ProgramKey &key, const ggml_cgraph *graph);
    // For one more, which gets the memory of the one that is dropped. Programs that cannot be found again go first.
    ProgramMemory make_room(uint64_t generation);
    Program *add(std::unique_ptr<Program> program);
    void clear() { programs_.clear(); }

  private:
    std::vector<std::unique_ptr<Program>> programs_;
    uint64_t clock_ = 0;
};

} // namespace fsd
