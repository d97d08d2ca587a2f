#include "expert_products.h"

#include <algorithm>

namespace fsd {

ExpertProducts::ExpertProducts(const CpuKernels &kernels, const ggml_tensor &shape, std::vector<ExpertMatrix> matrices,
                               std::function<void()> first)
    : dots_(kernels, shape.type, shape.ne[0]), n_rows_(shape.ne[1]), chunk_rows_(rows_at_once(shape)),
      row_bytes_(shape.nb[1]), matrices_(std::move(matrices)), first_(std::move(first)) {}

ExpertProducts::~ExpertProducts() { next_.load(); } // behind the last chunk of each thread

ggml_tensor *ExpertProducts::node(ggml_context *ctx, ggml_tensor *input, int64_t n) {
    next_.store(0);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, n_rows_, 1, n, 1, &input, input ? 1 : 0, compute, GGML_N_TASKS_MAX, this);
}

void ExpertProducts::compute(ggml_tensor *, int thread, int, void *self) {
    ExpertProducts &products = *(ExpertProducts *)self;
    if (thread == 0 && products.first_) {
        products.first_();
    }
    products.compute_chunks();
}

// Each thread converts the inputs that it needs to the type that the kernels take: that is quicker than to wait for another.
void ExpertProducts::compute_chunks() {
    next_.load(); // first what node() has stored, and last the chunk that there is not: see next_
    const int64_t per_matrix = (n_rows_ + chunk_rows_ - 1) / chunk_rows_, n = per_matrix * (int64_t)matrices_.size();
    const size_t input_bytes = dots_.column_bytes();
    thread_local std::vector<char> converted;
    std::vector<const float *> inputs; // of `converted`, in its order
    const auto index_of = [&](const float *input) {
        const size_t at = (size_t)(std::find(inputs.begin(), inputs.end(), input) - inputs.begin());
        if (at == inputs.size()) {
            inputs.push_back(input);
            converted.resize(std::max(converted.size(), inputs.size() * input_bytes));
            dots_.convert(input, converted.data() + at * input_bytes);
        }
        return at;
    };
    for (int64_t chunk = next_++; chunk < n; chunk = next_++) {
        const ExpertMatrix &matrix = matrices_[(size_t)(chunk / per_matrix)];
        const int64_t first = chunk % per_matrix * chunk_rows_, end = std::min(first + chunk_rows_, n_rows_);
        const char *weights = matrix.weights + (size_t)first * row_bytes_;
        for (const auto &[input, results] : matrix.rows) {
            const size_t at = index_of(input) * input_bytes; // may move the columns
            dots_.compute(weights, row_bytes_, end - first, converted.data() + at, results + first);
        }
    }
}

} // namespace fsd
