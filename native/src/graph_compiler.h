// The graph compiler: cuts a graph into segments that run on the inner device or on the CPU.
//
// A graph is first cut into steps, in the same way at every budget: a step is a run of nodes that need the weights of one
// shard, at most step_bytes of them. A step becomes one GPU segment (its weights resident, or staged in the ring), or
// several CPU and GPU segments if its shard is computed on the CPU. Neighbouring resident steps are merged into one
// segment. Under an exact plan, tensors that cross the border of a step have the output flag in every program, so that
// inner devices fuse the same nodes at every budget and results have the same bits.
//
// Compiling reads the state of the device and changes nothing but its graph keys. It does not touch the streams.
#pragma once

#include "device.h"

namespace fsd {

// The number of tokens that a graph computes.
int64_t tokens_of(const Device &d, const ggml_cgraph *graph);

// What a program for the graph, from a node and row piece on, depends on right now.
ProgramKey program_key(Device &d, const ggml_cgraph *graph, int first_node, int first_piece);

// Compiles the graph from the key's first node on. Null, with the reason in `why`, when the graph cannot be run. The
// layout of the ring must be known: call after Device::ensure_ring and ensure_window.
std::unique_ptr<Program> compile_graph(const Device &d, GraphKeys &keys, const ggml_cgraph *graph,
                                       const ProgramKey &key, ProgramMemory memory, std::string &why);

} // namespace fsd
