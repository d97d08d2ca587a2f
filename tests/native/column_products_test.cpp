// Tests of products with one column against ggml's own operation.
#include "check.h"
#include "column_products.h"

#include <algorithm>
#include <cmath>

using namespace fsd;

namespace {

constexpr int64_t kGuard = 32;
constexpr int64_t kMostRows = 1024;
constexpr float kUntouched = 12345.0f;

float low[kMostRows + 2 * kGuard]; // below the heap

// A product of a matrix and columns, with its results between two guards.
struct Product {
    std::vector<uint8_t> weights;
    std::vector<float> columns;
    float *results;
    int64_t n_results;
    ggml_context *ctx;
    ggml_cgraph *graph;

    Product(ggml_type type, int64_t rows, int64_t cols, int64_t n, float *memory)
        : weights(ggml_row_size(type, cols) * (size_t)rows), columns((size_t)(cols * n)), results(memory + kGuard),
          n_results(rows * n) {
        std::vector<float> values((size_t)(rows * cols));
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = std::sin((float)i);
        }
        if (type == GGML_TYPE_F32) {
            memcpy(weights.data(), values.data(), weights.size());
        } else {
            ggml_quantize_chunk(type, values.data(), weights.data(), 0, rows, cols, nullptr);
        }
        for (size_t i = 0; i < columns.size(); i++) {
            columns[i] = std::cos((float)i);
        }
        std::fill_n(memory, n_results + 2 * kGuard, kUntouched);
        ggml_init_params params = {ggml_tensor_overhead() * 8 + ggml_graph_overhead_custom(8, false), nullptr, true};
        ctx = ggml_init(params);
        ggml_tensor *a = ggml_new_tensor_2d(ctx, type, cols, rows),
                    *b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, cols, n);
        a->data = weights.data();
        b->data = columns.data();
        ggml_tensor *product = ggml_mul_mat(ctx, a, b);
        product->data = results;
        graph = ggml_new_graph_custom(ctx, 8, false);
        ggml_build_forward_expand(graph, product);
    }
    ~Product() { ggml_free(ctx); }
    ggml_tensor *&node() { return ggml_graph_nodes(graph)[0]; }
};

ggml_backend_t cpu() {
    static ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    return backend;
}

void set_threads(int n) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu()));
    auto set = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    set(cpu(), n);
}

void check_twin(ggml_type type, int64_t rows, int64_t cols, float *memory) {
    Product product(type, rows, cols, 1, memory);
    CHECK(ggml_backend_graph_compute(cpu(), product.graph) == GGML_STATUS_SUCCESS);
    const std::vector<float> expected(product.results, product.results + rows);
    std::fill_n(product.results, rows, kUntouched);

    ColumnProducts products{CpuKernels(cpu())};
    ggml_tensor *original = product.node();
    product.node() = products.of(original);
    CHECK((product.node() != original) == CpuKernels(cpu()).twins_are_faster);
    CHECK(ggml_backend_graph_compute(cpu(), product.graph) == GGML_STATUS_SUCCESS);
    for (int64_t i = 0; i < rows; i++) {
        CHECK(std::fabs(product.results[i] - expected[(size_t)i]) < 1e-2f);
    }
    for (int64_t i = 0; i < kGuard; i++) {
        CHECK(memory[i] == kUntouched && product.results[rows + i] == kUntouched);
    }
}

TEST(two_equal_columns_have_the_results_of_one) {
    float high[kMostRows + 2 * kGuard]; // above the heap
    for (float *memory : {low, high}) {
        for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16}) {
            for (int64_t rows : {4, 64, 100, 1024}) {
                check_twin(type, rows, 96, memory);
            }
        }
    }
}

TEST(builds_for_x86_64_have_the_kernels) {
#if defined(__x86_64__) || defined(_M_X64)
    CHECK(CpuKernels(cpu()).twins_are_faster);
    CHECK(CpuKernels(cpu()).q4_0);
#endif
}

TEST(four_rows_at_once_have_the_bits_of_one) {
    for (int64_t cols : {32, 96, 4096}) {
        for (int64_t rows : {1, 4, 66, 1023, 1024}) {
            Product product(GGML_TYPE_Q4_0, rows, cols, 1, low);
            CHECK(ggml_backend_graph_compute(cpu(), product.graph) == GGML_STATUS_SUCCESS);
            const std::vector<float> expected(product.results, product.results + rows);
            ColumnProducts products{CpuKernels(cpu())};
            ggml_tensor *original = product.node();
            product.node() = products.of(original);
            CHECK((product.node() != original) == (CpuKernels(cpu()).q4_0 != nullptr));
            for (int n_threads : {1, 2, 5, 2}) { // each run begins anew
                std::fill_n(product.results, rows, kUntouched);
                set_threads(n_threads);
                CHECK(ggml_backend_graph_compute(cpu(), product.graph) == GGML_STATUS_SUCCESS);
                CHECK(memcmp(product.results, expected.data(), expected.size() * sizeof(float)) == 0);
                CHECK(low[kGuard - 1] == kUntouched && product.results[rows] == kUntouched);
            }
        }
    }
}

TEST(other_products_stay_as_they_are) {
    ColumnProducts products{CpuKernels(cpu())};
    const struct {
        ggml_type type;
        int64_t rows, cols, n;
    } others[] = {
        {GGML_TYPE_F16, 64, 96, 2},  // has two columns already
        {GGML_TYPE_F16, 66, 96, 1},  // the kernels have no way for so many rows
        {GGML_TYPE_F16, 64, 100, 1}, // nor for such rows
        {GGML_TYPE_F32, 64, 96, 1},  {GGML_TYPE_Q8_0, 64, 96, 1}, {GGML_TYPE_Q4_0, 64, 96, 2},
    };
    for (const auto &o : others) {
        Product product(o.type, o.rows, o.cols, o.n, low);
        CHECK(products.of(product.node()) == product.node());
    }
}

TEST(a_longer_product_leaves_the_memory_of_a_shorter_one) {
    std::vector<float> high(kMostRows + 2 * kGuard);
    Product small(GGML_TYPE_F16, 64, 96, 1, low), large(GGML_TYPE_F16, kMostRows, 96, 1, high.data());
    CHECK(ggml_backend_graph_compute(cpu(), small.graph) == GGML_STATUS_SUCCESS);
    const std::vector<float> expected(small.results, small.results + 64);
    ColumnProducts products{CpuKernels(cpu())};
    small.node() = products.of(small.node());
    large.node() = products.of(large.node());
    for (Product *product : {&small, &large}) {
        std::fill_n(product->results, 64, kUntouched);
        CHECK(ggml_backend_graph_compute(cpu(), product->graph) == GGML_STATUS_SUCCESS);
        for (size_t i = 0; i < expected.size(); i++) {
            CHECK(std::fabs(product->results[i] - expected[i]) < 1e-2f);
        }
    }
}

} // namespace

TEST_MAIN()
