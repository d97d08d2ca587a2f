// Dot products of Q4_0 weights with a column in Q8_0, on x86-64, with the same bits as ggml's.
//
// ggml's kernel takes one row, in which each block waits for the sum of the block before. Here four neighbouring rows are
// computed at once: four sums that do not wait for each other share what is made of the column, and later rows are
// prefetched, because processors do not foresee four short streams. 14 threads of a Xeon (Sapphire Rapids) read 59 to 71e9
// bytes/s so, and 41 to 54e9 with ggml's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsd {

// Computes `results`, of four rows that begin `row_bytes` apart, from `n_blocks` blocks of 32 weights each.
using Q4Rows = void (*)(int64_t n_blocks, const char *rows, size_t row_bytes, const char *column, float *results);
constexpr int64_t kQ4Rows = 4;

// Needs AVX2, FMA and F16C; null if the compiler has none.
Q4Rows q4_0_rows();

} // namespace fsd
