// Compiled with AVX2, FMA and F16C: no header with inline functions may be included that other files include too.
#include "q4_0_rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fsd {

#if defined(__AVX2__)

namespace {

// ggml's block_q4_0 and block_q8_0. Scales are 16-bit floats. Of each pair the low half is a weight of the first 16.
struct Q4Block {
    uint16_t scale;
    uint8_t pairs[16];
};
struct Q8Block {
    uint16_t scale;
    int8_t values[32];
};

// How far ahead rows are prefetched, in whole groups of four. What is prefetched behind the last row is never read.
constexpr size_t kLeastAhead = 4096;

__m256 scale_of(uint16_t half) { return _mm256_cvtph_ps(_mm_set1_epi16((short)half)); }

// Eight sums of four neighbouring products each.
__m256i products(__m256i unsigned_bytes, __m256i signed_bytes) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_bytes, signed_bytes), _mm256_set1_epi16(1));
}

// In ggml's order, on which the rounding depends.
float sum_of(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

void compute(int64_t n_blocks, const char *rows, size_t row_bytes, const char *column, float *results) {
    const auto *x0 = (const Q4Block *)rows, *x1 = (const Q4Block *)(rows + row_bytes),
               *x2 = (const Q4Block *)(rows + 2 * row_bytes), *x3 = (const Q4Block *)(rows + 3 * row_bytes);
    const auto *y = (const Q8Block *)column;
    const size_t group_bytes = kQ4Rows * row_bytes;
    const char *ahead = rows + (kLeastAhead + group_bytes - 1) / group_bytes * group_bytes;
    const __m256i low = _mm256_set1_epi8(15), eight = _mm256_set1_epi8(8), shifts = _mm256_set_epi64x(4, 4, 0, 0);
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t b = 0; b < n_blocks; b++, ahead += kQ4Rows * sizeof(Q4Block)) {
        _mm_prefetch(ahead, _MM_HINT_T0); // two for 72 bytes: no line is left out
        _mm_prefetch(ahead + kQ4Rows * sizeof(Q4Block) / 2, _MM_HINT_T0);
        const __m256i values = _mm256_loadu_si256((const __m256i *)y[b].values);
        const __m256i eights = products(eight, values); // weights are stored with 8 added
        const __m256 scale = scale_of(y[b].scale);
        const auto add = [&](const Q4Block &block, __m256 sum) {
            const __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)block.pairs));
            const __m256i weights = _mm256_and_si256(_mm256_srlv_epi64(pairs, shifts), low);
            const __m256i dots = _mm256_sub_epi32(products(weights, values), eights);
            return _mm256_fmadd_ps(_mm256_mul_ps(scale_of(block.scale), scale), _mm256_cvtepi32_ps(dots), sum);
        };
        s0 = add(x0[b], s0);
        s1 = add(x1[b], s1);
        s2 = add(x2[b], s2);
        s3 = add(x3[b], s3);
    }
    results[0] = sum_of(s0);
    results[1] = sum_of(s1);
    results[2] = sum_of(s2);
    results[3] = sum_of(s3);
}

} // namespace

Q4Rows q4_0_rows() { return compute; }

#else

Q4Rows q4_0_rows() { return nullptr; }

#endif

} // namespace fsd
