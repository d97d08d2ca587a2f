// Products with one column, in the form that the CPU computes fastest.
//
// With one column, ggml's CPU backend reads one row of weights at a time, and a core gets a part of the memory bandwidth that
// it could use. With two columns its kernels (llamafile's) read four rows at once. So a product of 16-bit weights with one
// column is computed with this column twice: 14 threads of a Xeon (Sapphire Rapids) read 104e9 bytes/s so, instead of 84e9.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <deque>
#include <vector>

namespace fsd {

class TwinColumns {
  public:
    // `cpu`: the backend that computes the products.
    explicit TwinColumns(ggml_backend_t cpu) : has_kernels_(has_kernels(cpu)) {}
    TwinColumns(const TwinColumns &) = delete;
    TwinColumns &operator=(const TwinColumns &) = delete;

    // An operation with the results of `node` at the same place: `node` itself if two columns would not be faster. It must
    // not outlive this object, and such operations must not run at the same time. All tensors have their memory already.
    ggml_tensor *of(ggml_tensor *node);

    // Whether the backend has such kernels. Those of other processors than x86-64 are for more columns.
    static bool has_kernels(ggml_backend_t cpu);

  private:
    bool is_faster(const ggml_tensor &node) const;
    char *second_column(int64_t rows);

    const bool has_kernels_;
    std::deque<ggml_tensor> tensors_;
    std::deque<std::vector<float>> columns_; // the results that nobody reads; the last one is the longest
};

} // namespace fsd
