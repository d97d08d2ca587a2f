#include "expert_rows.h"

#include <algorithm>
#include <cstring>

namespace fsd {

ggml_status ExpertRows::compute(const char *input, char *results, std::function<void()> first) {
    const size_t n_nodes = (size_t)(group.node1 - group.node0);
    std::vector<char> meta(ggml_tensor_overhead() * (n_nodes + 8) + ggml_graph_overhead_custom(n_nodes + 8, false));
    ggml_init_params params = {};
    params.mem_size = meta.size();
    params.mem_buffer = meta.data();
    params.no_alloc = true;
    ctx = ggml_init(params);
    ggml_cgraph *compact_graph = ggml_new_graph_custom(ctx, n_nodes + 8, false);
    group_input = input;
    ggml_tensor *ids = compact[group.ids] = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, (int64_t)rows.size());
    ids->data = place(ggml_nbytes(ids));
    for (size_t i = 0; i < rows.size(); i++) {
        ((int32_t *)ids->data)[i] = rows[i].expert;
    }
    place_products(results);
    size_t product = 0;
    for (int i = group.node0; i < group.node1; i++) {
        const ggml_tensor *node = graph->nodes[i];
        const bool is_first = i == group.node0;
        compact[node] =
            is_expert_product(node) ? add_product(product++, is_first ? std::move(first) : nullptr) : add_node(node);
        ggml_build_forward_expand(compact_graph, compact[node]);
    }
    const ggml_status status = d.compute_on_cpu(compact_graph, weight_bytes);
    ggml_free(ctx);
    return status;
}

// Memory that lasts until the group's next run.
char *ExpertRows::place(size_t bytes) {
    group.memory.resize(std::max(group.memory.size(), ++n_placed));
    std::vector<char> &memory = group.memory[n_placed - 1];
    memory.resize(std::max(memory.size(), bytes));
    return memory.data();
}

void ExpertRows::place_products(char *results) {
    for (const ggml_tensor *product : group.products) {
        const bool is_last = product == group.products.back();
        products.push_back(is_last ? results : place(rows.size() * (size_t)product->ne[0] * sizeof(float)));
    }
}

// Whether a product is computed together with the first one, which has the same input.
bool ExpertRows::joins_first(size_t product) const {
    const ggml_tensor *one = group.products[0]->src[0], *other = group.weight(product);
    return group.products[product]->src[1] == group.input && other->type == one->type &&
           ggml_are_same_shape(other, one);
}

ggml_tensor *ExpertRows::add_product(size_t product, std::function<void()> first) {
    const ggml_tensor *node = group.products[product];
    const int64_t n = (int64_t)rows.size();
    ggml_tensor *result = nullptr;
    if (product > 0 && joins_first(product)) {
        result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, node->ne[0], 1, n);
    } else {
        std::vector<ExpertMatrix> matrices;
        for (size_t p = product; p < group.products.size(); p++) {
            if (p == product || (product == 0 && joins_first(p))) {
                add_matrices(p, matrices);
            }
        }
        const auto input = compact.find(node->src[1]);
        operations.emplace_back(*d.kernels, *group.weight(product), std::move(matrices), std::move(first));
        result = operations.back().node(ctx, input == compact.end() ? nullptr : input->second, n);
    }
    result->data = products[product];
    return result;
}

// The matrices of a product, with the rows that each computes.
void ExpertRows::add_matrices(size_t product, std::vector<ExpertMatrix> &matrices) {
    const ggml_tensor *node = group.products[product];
    for (size_t i = 0; i < rows.size(); i++) {
        if (i == 0 || rows[i].expert != rows[i - 1].expert) {
            matrices.push_back({matrix(product, rows[i].expert), {}});
            weight_bytes += node->src[0]->nb[2];
        }
        float *const result = (float *)products[product] + i * (size_t)node->ne[0];
        matrices.back().rows.emplace_back(input_of(node, i), result);
    }
}

// What a product multiplies one of the rows with.
const float *ExpertRows::input_of(const ggml_tensor *node, size_t row) const {
    if (node->src[1] == group.input) {
        const int64_t j = group.input->ne[1] == 1 ? 0 : rows[row].j;
        return (const float *)(group_input + (size_t)j * group.input->nb[1] + (size_t)rows[row].t * group.input->nb[2]);
    }
    const ggml_tensor *made = compact.at(node->src[1]);
    return (const float *)((const char *)made->data + row * made->nb[2]);
}

ggml_tensor *ExpertRows::add_node(const ggml_tensor *node) {
    ggml_tensor *c = ggml_new_tensor_3d(ctx, node->type, node->ne[0], 1, (int64_t)rows.size());
    c->op = node->op;
    c->flags = node->flags;
    memcpy(c->op_params, node->op_params, sizeof(c->op_params));
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        const auto it = compact.find(node->src[j]);
        c->src[j] = it == compact.end() ? node->src[j] : it->second;
    }
    if (node->view_src) {
        c->view_src = compact.at(node->view_src);
        c->view_offs = node->view_offs;
        c->data = (char *)c->view_src->data + node->view_offs;
        c->nb[1] = c->view_src->nb[1];
        c->nb[2] = c->nb[3] = c->view_src->nb[2];
    } else {
        c->data = place(ggml_nbytes(c));
    }
    return c;
}

} // namespace fsd
