#include "twin_columns.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace fsd {

static constexpr int64_t kRows = 4;   // the kernels compute so many at once
static constexpr int64_t kWidth = 32; // the most weights of a row that they compute at once

static bool has_feature(ggml_backend_reg_t reg, const char *name) {
    auto *get = (ggml_backend_get_features_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature *f = get ? get(reg) : nullptr; f && f->name; f++) {
        if (strcmp(f->name, name) == 0) {
            return strcmp(f->value, "0") != 0;
        }
    }
    return false;
}

bool TwinColumns::has_kernels(ggml_backend_t cpu) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    return has_feature(reg, "LLAMAFILE") && has_feature(reg, "AVX2");
}

bool TwinColumns::is_faster(const ggml_tensor &node) const {
    if (!has_kernels_ || node.op != GGML_OP_MUL_MAT || node.type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_tensor &weights = *node.src[0], &input = *node.src[1];
    return (weights.type == GGML_TYPE_F16 || weights.type == GGML_TYPE_BF16) && ggml_is_matrix(&weights) &&
           ggml_is_contiguous(&weights) && weights.ne[0] % kWidth == 0 && weights.ne[1] % kRows == 0 &&
           input.type == GGML_TYPE_F32 && ggml_nelements(&input) == input.ne[0] && ggml_is_contiguous(&input);
}

char *TwinColumns::second_column(int64_t rows) {
    if (columns_.empty() || (int64_t)columns_.back().size() < rows) {
        columns_.emplace_back((size_t)rows);
    }
    return (char *)columns_.back().data();
}

ggml_tensor *TwinColumns::of(ggml_tensor *node) {
    if (!is_faster(*node)) {
        return node;
    }
    ggml_tensor &input = tensors_.emplace_back(*node->src[1]);
    input.ne[1] = 2;
    input.nb[1] = 0; // both columns are the same memory
    ggml_tensor &twin = tensors_.emplace_back(*node);
    twin.src[1] = &input;
    twin.ne[1] = 2;
    // ggml wants the second column behind the first. The results are equal, so either may be the one that is read.
    char *ends[2] = {(char *)node->data, second_column(node->ne[0])};
    std::sort(ends, ends + 2, std::less<char *>());
    twin.data = ends[0];
    twin.nb[1] = (size_t)(ends[1] - ends[0]);
    twin.nb[2] = twin.nb[3] = 2 * twin.nb[1];
    return &twin;
}

} // namespace fsd
