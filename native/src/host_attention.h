// Attention of few tokens over keys and values in host memory, computed by the threads of ggml-cpu. All query heads that
// share keys and values are computed together, so that each byte of the KV cache is read and converted once: ggml-cpu's own
// operation does that for each query head again, and computes longer than memory needs to supply the bytes.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <vector>

namespace fsd {

class HostAttention {
  public:
    // Whether it computes a node.
    static bool supports(const ggml_tensor *node);

    // `node`: GGML_OP_FLASH_ATTN_EXT; its operands and its result are in host memory when the nodes run. `memory` is for one
    // node at a time, of any object. All must outlive this object.
    HostAttention(const ggml_tensor *node, int n_threads, std::vector<float> &memory);
    HostAttention(const HostAttention &) = delete;
    HostAttention &operator=(const HostAttention &) = delete;

    // Appends the nodes that compute it, made in `ctx`.
    void append(ggml_context *ctx, std::vector<ggml_tensor *> &nodes);
    size_t kv_bytes() const; // that it reads

    // For its nodes: the part of thread `ith` of `nth`, and the sum of all parts.
    void attend(int ith, int nth);
    void merge(int ith, int nth);

  private:
    const ggml_tensor *node_;
    int n_threads_;
    std::vector<float> &memory_;
};

} // namespace fsd
