// Products of single experts' matrices with rows of activations, computed by the threads of ggml's CPU backend.
//
// With ggml's own operation the threads meet twice in each product of a layer's experts, and the caller must have started all
// else before. Here all products of one input are one operation without a meeting, and the first thread, which is the caller's,
// may have other work first: the others take its part meanwhile. Results have the same bits.
#pragma once

#include "dot_products.h"

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

namespace fsd {

// A matrix of an expert in host memory, and the rows that it is multiplied with: inputs and results.
struct ExpertMatrix {
    const char *weights = nullptr;
    std::vector<std::pair<const float *, float *>> rows;
};

class ExpertProducts {
  public:
    // `shape`: a tensor of experts; matrices have its type and the shape of one of its experts. `first` is called by the first
    // thread before it computes.
    ExpertProducts(const CpuKernels &kernels, const ggml_tensor &shape, std::vector<ExpertMatrix> matrices,
                   std::function<void()> first = {});
    ~ExpertProducts();
    ExpertProducts(const ExpertProducts &) = delete;
    ExpertProducts &operator=(const ExpertProducts &) = delete;

    // A node that computes them once, behind `input` unless it is null. It says of results only its own shape, [rows of a
    // matrix, 1, n]. It must not outlive this object.
    ggml_tensor *node(ggml_context *ctx, ggml_tensor *input, int64_t n);

  private:
    static void compute(ggml_tensor *node, int thread, int n_threads, void *self);
    void compute_chunks();

    const DotProducts dots_;
    const int64_t n_rows_, chunk_rows_;
    const size_t row_bytes_;
    std::vector<ExpertMatrix> matrices_;
    std::function<void()> first_;
    // The next chunk. It orders what the threads read, too: they meet through OpenMP, which TSan does not see.
    std::atomic<int64_t> next_{0};
};

} // namespace fsd
