// Tests of products of single experts' matrices against ggml's own operation.
#include "check.h"
#include "expert_products.h"

#include "ggml-backend.h"

#include <cmath>
#include <cstring>

using namespace fsd;

namespace {

constexpr int64_t kWidth = 256, kRows = 200; // rows are no multiple of what a thread takes at once
constexpr int kExperts = 5;

ggml_backend_t cpu() {
    static ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    return backend;
}

void check_type(ggml_type type, const std::vector<int> &experts) {
    const int64_t n = (int64_t)experts.size();
    std::vector<float> values((size_t)(kWidth * kRows * kExperts)), inputs((size_t)(kWidth * n));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = std::sin((float)i);
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        inputs[i] = std::cos((float)i);
    }
    std::vector<char> weights(ggml_row_size(type, kWidth) * (size_t)(kRows * kExperts));
    if (type == GGML_TYPE_F32) {
        memcpy(weights.data(), values.data(), weights.size());
    } else {
        ggml_quantize_chunk(type, values.data(), weights.data(), 0, kRows * kExperts, kWidth, nullptr);
    }
    ggml_init_params params = {ggml_tensor_overhead() * 16 + 2 * ggml_graph_overhead_custom(8, false), nullptr, true};
    ggml_context *ctx = ggml_init(params);
    ggml_tensor *all = ggml_new_tensor_3d(ctx, type, kWidth, kRows, kExperts);
    ggml_tensor *input = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kWidth, 1, n);
    ggml_tensor *ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n);
    std::vector<int32_t> numbers(experts.begin(), experts.end());
    std::vector<float> expected((size_t)(kRows * n)), found(expected.size() + 1, -7.0f);
    all->data = weights.data();
    input->data = inputs.data();
    ids->data = numbers.data();
    ggml_tensor *product = ggml_mul_mat_id(ctx, all, input, ids);
    product->data = expected.data();

    std::vector<ExpertMatrix> matrices;
    for (int64_t i = 0; i < n; i++) {
        if (i == 0 || experts[(size_t)i] != experts[(size_t)i - 1]) {
            matrices.push_back({weights.data() + (size_t)experts[(size_t)i] * all->nb[2], {}});
        }
        matrices.back().rows.emplace_back(inputs.data() + i * kWidth, found.data() + i * kRows);
    }
    int n_first = 0;
    ExpertProducts products(CpuKernels(cpu()), *all, matrices, [&] { n_first++; });
    ggml_tensor *node = products.node(ctx, input, n);
    node->data = found.data();
    for (ggml_tensor *result : {product, node}) {
        ggml_cgraph *graph = ggml_new_graph_custom(ctx, 8, false);
        ggml_build_forward_expand(graph, result);
        CHECK(ggml_backend_graph_compute(cpu(), graph) == GGML_STATUS_SUCCESS);
    }
    CHECK(memcmp(expected.data(), found.data(), expected.size() * sizeof(float)) == 0);
    CHECK(found.back() == -7.0f && n_first == 1 && ggml_are_same_shape(product, node));
    ggml_free(ctx);
}

} // namespace

TEST(products_have_the_bits_of_ggmls) {
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K,
                           GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4}) {
        check_type(type, {3});
        check_type(type, {0, 0, 2, 4, 4, 4});
    }
}

TEST_MAIN()
