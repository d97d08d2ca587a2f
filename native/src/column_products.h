// Products with one column, in the form that the CPU computes fastest.
//
// With one column, ggml's CPU backend reads one row of weights at a time, and a core gets a part of the memory bandwidth that
// it could use. With two columns its kernels (llamafile's) read four rows at once. So a product of 16-bit weights with one
// column is computed with this column twice: 14 threads of a Xeon (Sapphire Rapids) read 104e9 bytes/s so, instead of 84e9.
// A product of Q4_0, which takes the cores more time than the memory, is a DotOperation.
#pragma once

#include "dot_products.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <deque>
#include <vector>

namespace fsd {

class ColumnProducts {
  public:
    // `kernels`: of the backend that computes the products.
    explicit ColumnProducts(const CpuKernels &kernels) : kernels_(kernels) {}
    ColumnProducts(const ColumnProducts &) = delete;
    ColumnProducts &operator=(const ColumnProducts &) = delete;

    // An operation with the results of `node` at the same place: `node` itself if no other would be faster. It must not
    // outlive this object, and such operations must not run at the same time. All tensors have their memory already.
    ggml_tensor *of(ggml_tensor *node);

  private:
    bool is_faster_twice(const ggml_tensor &node) const;
    ggml_tensor *twin_of(ggml_tensor *node);
    char *second_column(int64_t rows);

    const CpuKernels kernels_;
    std::deque<ggml_tensor> tensors_;
    std::deque<DotOperation> operations_;
    std::deque<std::vector<float>> columns_; // the results that nobody reads; the last one is the longest
};

} // namespace fsd
