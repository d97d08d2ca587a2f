#include "column_products.h"

#include <algorithm>
#include <functional>

namespace fsd {

static constexpr int64_t kRows = 4;   // llamafile's kernels compute so many at once
static constexpr int64_t kWidth = 32; // the most weights of a row that they compute at once

// Whether a node is the product of a whole matrix and one column.
static bool has_one_column(const ggml_tensor &node) {
    if (node.op != GGML_OP_MUL_MAT || node.type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_tensor &weights = *node.src[0], &input = *node.src[1];
    return ggml_is_matrix(&weights) && ggml_is_contiguous(&weights) && input.type == GGML_TYPE_F32 &&
           ggml_nelements(&input) == input.ne[0] && ggml_is_contiguous(&input);
}

bool ColumnProducts::is_faster_twice(const ggml_tensor &node) const {
    const ggml_tensor &weights = *node.src[0];
    return kernels_.twins_are_faster && (weights.type == GGML_TYPE_F16 || weights.type == GGML_TYPE_BF16) &&
           weights.ne[0] % kWidth == 0 && weights.ne[1] % kRows == 0;
}

char *ColumnProducts::second_column(int64_t rows) {
    if (columns_.empty() || (int64_t)columns_.back().size() < rows) {
        columns_.emplace_back((size_t)rows);
    }
    return (char *)columns_.back().data();
}

ggml_tensor *ColumnProducts::of(ggml_tensor *node) {
    if (!has_one_column(*node)) {
        return node;
    }
    if (is_faster_twice(*node)) {
        return twin_of(node);
    }
    const DotProducts products(kernels_, node->src[0]->type, node->src[0]->ne[0]);
    if (!products.are_quicker()) {
        return node;
    }
    ggml_tensor &quicker = tensors_.emplace_back(*node);
    operations_.emplace_back(products).become(quicker);
    return &quicker;
}

ggml_tensor *ColumnProducts::twin_of(ggml_tensor *node) {
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
