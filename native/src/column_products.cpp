#include "column_products.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace fsd {

static constexpr int64_t kRows = 4;   // llamafile's kernels compute so many at once
static constexpr int64_t kWidth = 32; // the most weights of a row that they compute at once

bool ColumnProducts::has_twin_kernels(ggml_backend_t cpu) {
    return has_feature(cpu, "LLAMAFILE") && has_feature(cpu, "AVX2");
}

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
    return has_twin_kernels_ && (weights.type == GGML_TYPE_F16 || weights.type == GGML_TYPE_BF16) &&
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
    return products.are_quicker() ? dots_of(node, products) : node;
}

ggml_tensor *ColumnProducts::dots_of(ggml_tensor *node, const DotProducts &products) {
    const ggml_custom_op_params params = {compute_dots, GGML_N_TASKS_MAX, &dots_.emplace_back(products)};
    ggml_tensor &quicker = tensors_.emplace_back(*node);
    quicker.op = GGML_OP_CUSTOM;
    static_assert(sizeof(params) <= sizeof(quicker.op_params), "see ggml_custom_4d");
    memcpy(quicker.op_params, &params, sizeof(params));
    return &quicker;
}

// Each thread converts the column: that is quicker than to wait for another.
void ColumnProducts::compute_dots(ggml_tensor *node, int, int n_threads, void *dots) {
    const DotProducts &products = ((Dots *)dots)->products;
    std::atomic<int64_t> &next = ((Dots *)dots)->next;
    const ggml_tensor &weights = *node->src[0];
    const int64_t n_rows = weights.ne[1], chunk_rows = rows_at_once(weights);
    const int64_t n_chunks = (n_rows + chunk_rows - 1) / chunk_rows;
    thread_local std::vector<char> column;
    column.resize(std::max(column.size(), products.column_bytes()));
    products.convert((const float *)node->src[1]->data, column.data());
    int64_t chunk = next++;
    for (; chunk < n_chunks; chunk = next++) {
        const int64_t first = chunk * chunk_rows;
        products.compute((const char *)weights.data + (size_t)first * weights.nb[1], weights.nb[1],
                         std::min(chunk_rows, n_rows - first), column.data(), (float *)node->data + first);
    }
    if (chunk == n_chunks + n_threads - 1) { // no other thread takes any more
        next = 0;
    }
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
