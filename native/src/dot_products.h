// Dot products of a matrix's rows with columns, by the kernels of ggml's CPU backend or by quicker ones with the same bits.
#pragma once

#include "q4_0_rows.h"

#include "ggml-cpu.h"

#include <atomic>

namespace fsd {

// The kernels of a CPU backend. It may be a module of its own, so they cannot be linked.
struct CpuKernels {
    explicit CpuKernels(ggml_backend_t cpu);

    decltype(&ggml_get_type_traits_cpu) of = nullptr; // null: the backend does not say
    Q4Rows q4_0 = nullptr;                            // null: ggml's own, or other bits
    // 16-bit weights times two columns are faster than times one. Kernels of other processors than x86-64 are for more columns.
    bool twins_are_faster = false;
};

// Of a matrix, what a thread takes at once: little, so that all threads end together.
int64_t rows_at_once(const ggml_tensor &matrix);

class DotProducts {
  public:
    // Of rows with `width` weights of a type.
    DotProducts(const CpuKernels &kernels, ggml_type type, int64_t width);

    // Whether this is quicker than ggml's own.
    bool are_quicker() const { return four_rows_ != nullptr; }
    size_t column_bytes() const { return column_bytes_; }
    // Converts a column to the form that compute() takes.
    void convert(const float *column, char *to) const { columns_.from_float(column, to, width_); }
    void compute(const char *rows, size_t row_bytes, int64_t n_rows, const char *column, float *results) const;

  private:
    const ggml_type_traits_cpu &rows_, &columns_;
    const Q4Rows four_rows_; // null: there are only ggml's
    const int64_t width_;
    const size_t column_bytes_;
};

// A matrix times one column, as an operation of ggml's threads.
class DotOperation {
  public:
    explicit DotOperation(const DotProducts &products) : products_(products) {}

    // Makes this the operation of a node, whose sources are the matrix and the column. It must not outlive this object.
    void become(ggml_tensor &node);

  private:
    static void compute(ggml_tensor *node, int thread, int n_threads, void *self);
    void compute(const ggml_tensor &node, int n_threads);

    const DotProducts products_;
    std::atomic<int64_t> next_{0}; // the next chunk of rows
};

} // namespace fsd
