#include "expert_products.h"

#include "system.h"

#include "ggml-backend-impl.h"

#include <algorithm>

namespace fsd {

// Of a matrix, what a thread takes at once: little, so that all threads end together.
static constexpr size_t kChunkBytes = 32 << 10;

ExpertProducts::Kernels ExpertProducts::kernels_of(ggml_backend_t cpu) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    return (Kernels)symbol_beside((void *)registry->iface.get_name, "ggml_get_type_traits_cpu");
}

ExpertProducts::ExpertProducts(Kernels kernels, const ggml_tensor &shape, std::vector<ExpertMatrix> matrices,
                               std::function<void()> first)
    : kernels_(*kernels(shape.type)), inputs_(*kernels(kernels_.vec_dot_type)), input_type_(kernels_.vec_dot_type),
      width_(shape.ne[0]), n_rows_(shape.ne[1]),
      chunk_rows_(std::max<int64_t>(1, (int64_t)(kChunkBytes / ggml_row_size(shape.type, shape.ne[0])))),
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
    const size_t input_bytes = ggml_row_size(input_type_, width_);
    thread_local std::vector<char> converted;
    std::vector<const float *> inputs; // of `converted`, in its order
    const auto index_of = [&](const float *input) {
        const size_t at = (size_t)(std::find(inputs.begin(), inputs.end(), input) - inputs.begin());
        if (at == inputs.size()) {
            inputs.push_back(input);
            converted.resize(std::max(converted.size(), inputs.size() * input_bytes));
            inputs_.from_float(input, converted.data() + at * input_bytes, width_);
        }
        return at;
    };
    std::vector<size_t> columns;
    for (int64_t chunk = next_++; chunk < n; chunk = next_++) {
        const ExpertMatrix &matrix = matrices_[(size_t)(chunk / per_matrix)];
        columns.clear();
        for (const auto &row : matrix.rows) {
            columns.push_back(index_of(row.first));
        }
        const int64_t first = chunk % per_matrix * chunk_rows_, end = std::min(first + chunk_rows_, n_rows_);
        for (int64_t r = first; r < end; r++) {
            const char *weights = matrix.weights + (size_t)r * row_bytes_;
            for (size_t i = 0; i < columns.size(); i++) {
                const char *input = converted.data() + columns[i] * input_bytes;
                kernels_.vec_dot((int)width_, matrix.rows[i].second + r, 0, weights, 0, input, 0, 1);
            }
        }
    }
}

} // namespace fsd
