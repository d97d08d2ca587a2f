// The CPU's part of a mixture of experts: some rows of a group's result, each one expert's for one token.
#pragma once

#include "device.h"

#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

namespace fsd {

// Whether a node multiplies by the matrices of chosen experts.
inline bool is_expert_product(const ggml_tensor *n) { return n->op == GGML_OP_MUL_MAT_ID; }

struct ExpertRow {
    int64_t j, t; // the j-th choice of token t
    int expert;
};

class ExpertRows {
  public:
    // `rows`: by expert. `matrix` finds an expert's matrix of the group's product with a number.
    ExpertRows(Device &device, ExpertGroup &expert_group, const ggml_cgraph *group_graph,
               const std::vector<ExpertRow> &expert_rows, std::function<const char *(size_t, int)> find_matrix)
        : d(device), group(expert_group), graph(group_graph), rows(expert_rows), matrix(std::move(find_matrix)) {}

    // Computes rows of the group's nodes. `input` is the group's input in host memory, `results` gets the rows one behind the
    // other. The calling thread calls `first` when the other threads compute already.
    ggml_status compute(const char *input, char *results, std::function<void()> first);

  private:
    char *place(size_t bytes);
    void place_products(char *results);
    bool joins_first(size_t product) const;
    ggml_tensor *add_product(size_t product, std::function<void()> first);
    void add_matrices(size_t product, std::vector<ExpertMatrix> &matrices);
    const float *input_of(const ggml_tensor *node, size_t row) const;
    ggml_tensor *add_node(const ggml_tensor *node);

    Device &d;
    ExpertGroup &group;
    const ggml_cgraph *graph;
    const std::vector<ExpertRow> &rows;
    const std::function<const char *(size_t, int)> matrix;
    const char *group_input = nullptr;
    ggml_context *ctx = nullptr;
    size_t n_placed = 0;
    uint64_t weight_bytes = 0;
    std::vector<char *> products;                                   // results
    std::unordered_map<const ggml_tensor *, ggml_tensor *> compact; // nodes on the rows alone
    std::deque<ExpertProducts> operations;
};

} // namespace fsd
