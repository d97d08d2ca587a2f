#include "dot_products.h"

#include "system.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fsd {

// Whether ggml's CPU backend was compiled with a feature, by ggml's name of it.
static bool has_feature(ggml_backend_t cpu, const char *name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    auto *get = (ggml_backend_get_features_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature *f = get ? get(reg) : nullptr; f && f->name; f++) {
        if (strcmp(f->name, name) == 0) {
            return strcmp(f->value, "0") != 0;
        }
    }
    return false;
}

CpuKernels::CpuKernels(ggml_backend_t cpu) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    of = (decltype(of))symbol_beside((void *)registry->iface.get_name, "ggml_get_type_traits_cpu");
    const bool has_avx2 = has_feature(cpu, "AVX2");
    // Without AVX2 ggml adds in another order.
    q4_0 = has_avx2 && has_feature(cpu, "FMA") && has_feature(cpu, "F16C") ? q4_0_rows() : nullptr;
    twins_are_faster = has_avx2 && has_feature(cpu, "LLAMAFILE");
}

int64_t rows_at_once(const ggml_tensor &matrix) {
    constexpr size_t kBytes = 32 << 10;
    const auto rows = (int64_t)(kBytes / ggml_row_size(matrix.type, matrix.ne[0]));
    return std::max(kQ4Rows, rows / kQ4Rows * kQ4Rows);
}

DotProducts::DotProducts(const CpuKernels &kernels, ggml_type type, int64_t width)
    : rows_(*kernels.of(type)), columns_(*kernels.of(rows_.vec_dot_type)),
      four_rows_(type == GGML_TYPE_Q4_0 ? kernels.q4_0 : nullptr), width_(width),
      column_bytes_(ggml_row_size(rows_.vec_dot_type, width)) {}

void DotProducts::compute(const char *rows, size_t row_bytes, int64_t n_rows, const char *column,
                          float *results) const {
    int64_t r = 0;
    for (; four_rows_ && r + kQ4Rows <= n_rows; r += kQ4Rows) {
        four_rows_(width_ / ggml_blck_size(GGML_TYPE_Q4_0), rows + (size_t)r * row_bytes, row_bytes, column,
                   results + r);
    }
    for (; r < n_rows; r++) {
        rows_.vec_dot((int)width_, results + r, 0, rows + (size_t)r * row_bytes, 0, column, 0, 1);
    }
}

void DotOperation::become(ggml_tensor &node) {
    const ggml_custom_op_params params = {compute, GGML_N_TASKS_MAX, this};
    static_assert(sizeof(params) <= sizeof(node.op_params), "see ggml_custom_4d");
    node.op = GGML_OP_CUSTOM;
    memcpy(node.op_params, &params, sizeof(params));
}

void DotOperation::compute(ggml_tensor *node, int, int n_threads, void *self) {
    ((DotOperation *)self)->compute(*node, n_threads);
}

// Each thread converts the column: that is quicker than to wait for another.
void DotOperation::compute(const ggml_tensor &node, int n_threads) {
    const ggml_tensor &weights = *node.src[0];
    const int64_t n_rows = weights.ne[1], chunk_rows = rows_at_once(weights);
    const int64_t n_chunks = (n_rows + chunk_rows - 1) / chunk_rows;
    thread_local std::vector<char> column;
    column.resize(std::max(column.size(), products_.column_bytes()));
    products_.convert((const float *)node.src[1]->data, column.data());
    int64_t chunk = next_++;
    for (; chunk < n_chunks; chunk = next_++) {
        const int64_t first = chunk * chunk_rows;
        products_.compute((const char *)weights.data + (size_t)first * weights.nb[1], weights.nb[1],
                          std::min(chunk_rows, n_rows - first), column.data(), (float *)node.data + first);
    }
    if (chunk == n_chunks + n_threads - 1) { // no other thread takes any more
        next_ = 0;
    }
}

} // namespace fsd
