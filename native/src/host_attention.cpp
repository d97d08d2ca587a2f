#include "host_attention.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FSD_X86 1
#endif

namespace fsd {

#if !defined(__GNUC__)

// Needs vector types of GCC and Clang.
bool HostAttention::supports(const ggml_tensor *) { return false; }
HostAttention::HostAttention(const ggml_tensor *node, int n_threads, std::vector<float> &memory)
    : node_(node), n_threads_(n_threads), memory_(memory) {}
void HostAttention::append(ggml_context *, std::vector<ggml_tensor *> &) {}
size_t HostAttention::kv_bytes() const { return 0; }
void HostAttention::attend(int, int) {}
void HostAttention::merge(int, int) {}

#else

namespace {

// Functions with vectors are all inlined into one, which is compiled for each instruction set.
#pragma GCC diagnostic ignored "-Wpsabi"
#define FSD_INLINE inline __attribute__((always_inline))

// Queries go in groups of so many lanes: a lane is one query head of one token.
constexpr int64_t kLanes = 8;
constexpr int64_t kTile = 32; // cells that are computed together

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <typename V> FSD_INLINE V load(const float *p) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
}

template <typename V> FSD_INLINE void store(float *p, V v) { memcpy(p, &v, sizeof(v)); }

FSD_INLINE Lanes all(float x) { return Lanes{} + x; }

FSD_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// e^x, to about 1e-7 of it; 0 below -87.
FSD_INLINE Lanes exp_of(Lanes x) {
    const Lanes least = all(-87.0f), most = all(87.0f);
    Lanes y = larger(x, least);
    y = y > most ? most : y;
    const Lanes shifted = y * 1.44269504f + 12582912.0f; // its lowest bits are the nearest integer to y / ln 2
    const Lanes n = shifted - 12582912.0f;
    const Lanes r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes p = all(1.0f / 720) * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints scaled = (Ints)p + ((Ints)shifted << 23);
    return x < least ? Lanes{} : (Lanes)scaled;
}

struct Shape {
    int64_t dk, dv, n_kv, n_tokens, n_heads, n_kv_heads, n_streams;
    int64_t shared, groups; // query heads that share keys and values; groups of lanes for these heads of all tokens
    float scale, max_bias, softcap;

    explicit Shape(const ggml_tensor *node) {
        const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
        dk = k->ne[0];
        dv = v->ne[0];
        n_kv = k->ne[1];
        n_kv_heads = k->ne[2];
        n_tokens = q->ne[1];
        n_heads = q->ne[2];
        n_streams = q->ne[3];
        shared = n_heads / n_kv_heads;
        groups = (shared * n_tokens + kLanes - 1) / kLanes;
        memcpy(&scale, (const float *)node->op_params + 0, sizeof(float));
        memcpy(&max_bias, (const float *)node->op_params + 1, sizeof(float));
        memcpy(&softcap, (const float *)node->op_params + 2, sizeof(float));
    }
    // Of a group of lanes: the largest score and the sum of the weights of each lane, and the weighted sum of the values.
    int64_t partial() const { return kLanes * (2 + dv); }
    int64_t partials() const { return n_streams * n_kv_heads * groups * partial(); }
    // Queries by dimension and lane, a tile of keys, one of values, the weights of its cells, its mask.
    int64_t scratch() const {
        return n_kv_heads * groups * dk * kLanes + kTile * (dk + dv + kLanes) + n_tokens * kTile;
    }
    int64_t per_thread() const { return (partials() + scratch() + 63) / 64 * 64; }

    // ALiBi's slope of a head.
    float slope(int64_t head) const {
        if (max_bias <= 0) {
            return 1;
        }
        const uint32_t n = 1u << (uint32_t)std::floor(std::log2((float)n_heads));
        return head < n ? std::pow(std::pow(2.0f, -max_bias / (float)n), (float)(head + 1))
                        : std::pow(std::pow(2.0f, -max_bias / 2 / (float)n), (float)(2 * (head - n) + 1));
    }
};

const char *row_of(const ggml_tensor *t, int64_t i1, int64_t i2, int64_t i3) {
    return (const char *)t->data + i1 * (int64_t)t->nb[1] + i2 * (int64_t)t->nb[2] + i3 * (int64_t)t->nb[3];
}

// How the instruction sets differ: in the conversion of 16-bit values.
struct Plain {
    static FSD_INLINE void from_f16(const ggml_fp16_t *from, float *to, int64_t n) {
        ggml_fp16_to_fp32_row(from, to, n);
    }
};

#ifdef FSD_X86
struct Avx2 {
    static __attribute__((target("avx2,fma,f16c"))) void from_f16(const ggml_fp16_t *from, float *to, int64_t n) {
        for (int64_t i = 0; i < n; i += 8) {
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
        }
    }
};
#endif

// Rows of a cache as floats.
template <typename Isa> FSD_INLINE void convert(ggml_type type, const char *from, float *to, int64_t n) {
    if (type == GGML_TYPE_F16) {
        Isa::from_f16((const ggml_fp16_t *)from, to, n);
    } else if (type == GGML_TYPE_Q8_0) {
        constexpr int64_t kBlock = 32;
        for (int64_t i = 0; i < n; i += kBlock, from += sizeof(ggml_fp16_t) + kBlock) {
            ggml_fp16_t scale;
            memcpy(&scale, from, sizeof(scale));
            const float d = ggml_fp16_to_fp32(scale);
            const int8_t *values = (const int8_t *)from + sizeof(scale);
            for (int64_t k = 0; k < kBlock; k++) {
                to[i + k] = d * (float)values[k];
            }
        }
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n);
    }
}

// Fetches the rows of the next tile, a line at a time between the computing of this one, which hides how long memory takes.
class Ahead {
  public:
    FSD_INLINE Ahead(const ggml_tensor *t, int64_t cell, int64_t head, int64_t stream) {
        constexpr int64_t kLine = 64;
        const int64_t rows = std::max<int64_t>(0, std::min(kTile, t->ne[1] - cell));
        at_ = rows > 0 ? row_of(t, cell, head, stream) : nullptr;
        row_bytes_ = ((int64_t)ggml_row_size(t->type, t->ne[0]) + kLine - 1) / kLine * kLine;
        skip_ = (int64_t)t->nb[1] - row_bytes_;
        in_row_ = row_bytes_;
        lines_ = rows * (row_bytes_ / kLine);
    }
    FSD_INLINE void fetch_line() {
        if (lines_ == 0) {
            return;
        }
        __builtin_prefetch(at_, 0, 2);
        lines_--;
        at_ += 64;
        in_row_ -= 64;
        if (in_row_ == 0) {
            at_ += skip_;
            in_row_ = row_bytes_;
        }
    }

  private:
    const char *at_;
    int64_t row_bytes_, skip_, in_row_, lines_;
};

// The scores of a tile: products of keys, by cell, and queries, by dimension and lane.
FSD_INLINE void score(const float *keys, const float *queries, int64_t dk, float *scores, Ahead &ahead) {
    constexpr int kRows = 8, kDims = 4;
    for (int64_t t = 0; t < kTile; t += kRows) {
        Lanes sum[kRows] = {};
        const float *key = keys + t * dk;
        for (int64_t d = 0; d < dk; d += kDims) {
            ahead.fetch_line();
#pragma GCC unroll 4
            for (int k = 0; k < kDims; k++) {
                const Lanes q = load<Lanes>(queries + (d + k) * kLanes);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; i++) {
                    sum[i] += q * key[i * dk + d + k];
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kRows; i++) {
            store(scores + (t + i) * kLanes, sum[i]);
        }
    }
}

// Adds a tile's values, times the weights of its cells, to the sums of each lane.
FSD_INLINE void add_values(const float *values, const float *weights, int64_t dv, float *sums, Ahead &ahead) {
    for (int64_t d = 0; d < dv; d += kLanes) {
        Lanes sum[kLanes];
#pragma GCC unroll 8
        for (int64_t l = 0; l < kLanes; l++) {
            sum[l] = load<Lanes>(sums + l * dv + d);
        }
        for (int64_t t = 0; t < kTile; t += 2) {
            ahead.fetch_line();
#pragma GCC unroll 2
            for (int64_t k = t; k < t + 2; k++) {
                const Lanes value = load<Lanes>(values + k * dv + d);
#pragma GCC unroll 8
                for (int64_t l = 0; l < kLanes; l++) {
                    sum[l] += value * weights[k * kLanes + l];
                }
            }
        }
#pragma GCC unroll 8
        for (int64_t l = 0; l < kLanes; l++) {
            store(sums + l * dv + d, sum[l]);
        }
    }
}

// One thread's part of a stream: its tiles of cells.
template <typename Isa> struct Part {
    const ggml_tensor *node;
    const Shape &shape;
    int64_t stream;
    float *partials;
    float *queries, *keys, *values, *weights, *mask;

    FSD_INLINE Part(const ggml_tensor *n, const Shape &s, int64_t st, float *memory) : node(n), shape(s), stream(st) {
        partials = memory + st * (s.partials() / s.n_streams);
        queries = memory + s.partials();
        keys = queries + s.n_kv_heads * s.groups * s.dk * kLanes;
        values = keys + kTile * s.dk;
        weights = values + kTile * s.dv;
        mask = weights + kTile * kLanes;
    }

    FSD_INLINE void begin() {
        const ggml_tensor *q = node->src[0];
        const float scale = shape.softcap != 0 ? shape.scale / shape.softcap : shape.scale;
        for (int64_t h = 0; h < shape.n_kv_heads; h++) {
            for (int64_t i = 0; i < shape.groups * kLanes; i++) {
                const int64_t group = h * shape.groups + i / kLanes;
                float *to = queries + group * shape.dk * kLanes + i % kLanes;
                const bool padding = i >= shape.shared * shape.n_tokens;
                const float *from =
                    padding ? nullptr
                            : (const float *)row_of(q, i / shape.shared, h * shape.shared + i % shape.shared, stream);
                for (int64_t d = 0; d < shape.dk; d++) {
                    to[d * kLanes] = padding ? 0 : from[d] * scale;
                }
                float *partial = partials + group * shape.partial();
                partial[i % kLanes] = -INFINITY;
                partial[kLanes + i % kLanes] = 0;
                memset(partial + 2 * kLanes + i % kLanes * shape.dv, 0, (size_t)shape.dv * sizeof(float));
            }
        }
    }

    // The tile's mask, by token. False if no token sees any of its cells.
    FSD_INLINE bool read_mask(int64_t cell, int64_t n) {
        const ggml_tensor *m = node->src[3];
        bool any = false;
        for (int64_t j = 0; j < shape.n_tokens; j++) {
            const ggml_fp16_t *row = (const ggml_fp16_t *)row_of(m, j, 0, stream % m->ne[3]) + cell;
            for (int64_t t = 0; t < kTile; t++) {
                constexpr ggml_fp16_t kNone = 0xfc00; // minus infinity
                const ggml_fp16_t x = t < n ? row[t] : kNone;
                mask[j * kTile + t] = x == 0 ? 0.0f : ggml_fp16_to_fp32(x);
                any = any || x != kNone;
            }
        }
        return any;
    }

    FSD_INLINE void add(int64_t cell, int64_t n) {
        if (!read_mask(cell, n)) {
            return;
        }
        const ggml_tensor *k = node->src[1], *v = node->src[2];
        for (int64_t h = 0; h < shape.n_kv_heads; h++) {
            for (int64_t t = 0; t < n; t++) {
                convert<Isa>(k->type, row_of(k, cell + t, h, stream), keys + t * shape.dk, shape.dk);
                convert<Isa>(v->type, row_of(v, cell + t, h, stream), values + t * shape.dv, shape.dv);
            }
            if (n < kTile) {
                memset(keys + n * shape.dk, 0, (size_t)((kTile - n) * shape.dk) * sizeof(float));
                memset(values + n * shape.dv, 0, (size_t)((kTile - n) * shape.dv) * sizeof(float));
            }
            Ahead next_keys(k, cell + kTile, h, stream), next_values(v, cell + kTile, h, stream);
            for (int64_t g = 0; g < shape.groups; g++) {
                const int64_t group = h * shape.groups + g;
                float *partial = partials + group * shape.partial();
                score(keys, queries + group * shape.dk * kLanes, shape.dk, weights, next_keys);
                weigh(partial, h, g);
                add_values(values, weights, shape.dv, partial + 2 * kLanes, next_values);
            }
        }
    }

    // Scores become weights, relative to the largest score so far.
    FSD_INLINE void weigh(float *partial, int64_t kv_head, int64_t g) {
        int64_t token[kLanes];
        float slopes[kLanes];
        for (int64_t l = 0; l < kLanes; l++) {
            const int64_t i = g * kLanes + l;
            const bool padding = i >= shape.shared * shape.n_tokens;
            token[l] = padding ? 0 : i / shape.shared;
            slopes[l] = padding ? 1 : shape.slope(kv_head * shape.shared + i % shape.shared);
        }
        const Lanes slope = load<Lanes>(slopes), before = load<Lanes>(partial);
        Lanes most = before;
        for (int64_t t = 0; t < kTile; t++) {
            Lanes s = load<Lanes>(weights + t * kLanes), m;
            if (shape.softcap != 0) {
                s = shape.softcap * (1.0f - 2.0f / (exp_of(s + s) + 1.0f)); // tanh
            }
            if (shape.n_tokens == 1) {
                m = all(mask[t]);
            } else {
                for (int64_t l = 0; l < kLanes; l++) {
                    m[l] = mask[token[l] * kTile + t];
                }
            }
            s += m * slope;
            store(weights + t * kLanes, s);
            most = larger(most, s);
        }
        const Lanes none = all(-INFINITY), base = most == none ? Lanes{} : most;
        Lanes sum = {};
        for (int64_t t = 0; t < kTile; t++) {
            const Lanes w = exp_of(load<Lanes>(weights + t * kLanes) - base);
            store(weights + t * kLanes, w);
            sum += w;
        }
        const Lanes rescale = exp_of(before - base);
        store(partial, most);
        store(partial + kLanes, load<Lanes>(partial + kLanes) * rescale + sum);
        for (int64_t l = 0; l < kLanes; l++) {
            if (rescale[l] != 1.0f) {
                float *lane = partial + 2 * kLanes + l * shape.dv;
                for (int64_t d = 0; d < shape.dv; d += kLanes) {
                    store(lane + d, load<Lanes>(lane + d) * rescale[l]);
                }
            }
        }
    }
};

template <typename Isa> FSD_INLINE void attend_part(const ggml_tensor *node, float *memory, int ith, int nth) {
    const Shape shape(node);
    const int64_t tiles = (shape.n_kv + kTile - 1) / kTile;
    const int64_t from = tiles * ith / nth * kTile, to = std::min(tiles * (ith + 1) / nth * kTile, shape.n_kv);
    for (int64_t stream = 0; stream < shape.n_streams; stream++) {
        Part<Isa> part(node, shape, stream, memory);
        part.begin();
        for (int64_t cell = from; cell < to; cell += kTile) {
            part.add(cell, std::min(kTile, to - cell));
        }
    }
}

void attend_plain(const ggml_tensor *node, float *memory, int ith, int nth) {
    attend_part<Plain>(node, memory, ith, nth);
}

#ifdef FSD_X86
__attribute__((target("avx2,fma,f16c"))) void attend_avx2(const ggml_tensor *node, float *memory, int ith, int nth) {
    attend_part<Avx2>(node, memory, ith, nth);
}
#endif

using Attend = void (*)(const ggml_tensor *, float *, int, int);

Attend best_attend() {
#ifdef FSD_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        return attend_avx2;
    }
#endif
    return attend_plain;
}

void run_attend(ggml_tensor *, int ith, int nth, void *self) { ((HostAttention *)self)->attend(ith, nth); }

void run_merge(ggml_tensor *, int ith, int nth, void *self) { ((HostAttention *)self)->merge(ith, nth); }

} // namespace

bool HostAttention::supports(const ggml_tensor *node) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3],
                      *sinks = node->src[4];
    const auto readable = [](const ggml_tensor *t) {
        return ggml_get_type_traits(t->type)->to_float != nullptr && t->nb[0] == ggml_type_size(t->type) &&
               t->ne[0] % 16 == 0 && t->ne[0] % ggml_blck_size(t->type) == 0;
    };
    return node->op == GGML_OP_FLASH_ATTN_EXT && node->type == GGML_TYPE_F32 && ggml_is_contiguous(node) &&
           q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && readable(k) && readable(v) &&
           k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && mask &&
           mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[2] == 1 &&
           mask->ne[1] >= q->ne[1] && (!sinks || sinks->type == GGML_TYPE_F32);
}

HostAttention::HostAttention(const ggml_tensor *node, int n_threads, std::vector<float> &memory)
    : node_(node), n_threads_(n_threads), memory_(memory) {
    const size_t needed = (size_t)(Shape(node).per_thread() * n_threads);
    if (memory_.size() < needed) {
        memory_.resize(needed);
    }
}

void HostAttention::append(ggml_context *ctx, std::vector<ggml_tensor *> &nodes) {
    for (ggml_custom_op_t run : {run_attend, run_merge}) {
        ggml_tensor *t = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run, GGML_N_TASKS_MAX, this);
        t->flags |= GGML_TENSOR_FLAG_COMPUTE;
        t->data = node_->data;
        nodes.push_back(t);
    }
}

size_t HostAttention::kv_bytes() const {
    const ggml_tensor *k = node_->src[1], *v = node_->src[2];
    return (size_t)(k->ne[1] * k->ne[2] * k->ne[3]) *
           (ggml_row_size(k->type, k->ne[0]) + ggml_row_size(v->type, v->ne[0]));
}

void HostAttention::attend(int ith, int nth) {
    static const Attend best = best_attend();
    const int parts = std::min(nth, n_threads_);
    if (ith < parts) {
        best(node_, memory_.data() + Shape(node_).per_thread() * ith, ith, parts);
    }
}

void HostAttention::merge(int ith, int nth) {
    const Shape s(node_);
    const int parts = std::min(nth, n_threads_);
    const ggml_tensor *sinks = node_->src[4];
    std::vector<float> sum((size_t)s.dv);
    for (int64_t row = ith; row < s.n_streams * s.n_tokens * s.n_heads; row += nth) {
        const int64_t head = row % s.n_heads, token = row / s.n_heads % s.n_tokens,
                      stream = row / s.n_heads / s.n_tokens;
        const int64_t lane = token * s.shared + head % s.shared;
        const int64_t group = (stream * s.n_kv_heads + head / s.shared) * s.groups + lane / kLanes;
        const auto partial = [&](int part) { return memory_.data() + s.per_thread() * part + group * s.partial(); };
        float most = sinks ? ((const float *)sinks->data)[head] : -INFINITY;
        float total = sinks ? 1.0f : 0.0f;
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int part = 0; part < parts; part++) {
            const float *p = partial(part);
            const float part_most = p[lane % kLanes], part_total = p[kLanes + lane % kLanes];
            if (part_most == -INFINITY) {
                continue;
            }
            const float larger = std::max(most, part_most);
            const float old = std::exp(most - larger), added = std::exp(part_most - larger);
            const float *values = p + 2 * kLanes + lane % kLanes * s.dv;
            for (int64_t d = 0; d < s.dv; d++) {
                sum[(size_t)d] = sum[(size_t)d] * old + values[d] * added;
            }
            total = total * old + part_total * added;
            most = larger;
        }
        float *to = (float *)((char *)node_->data + row * (int64_t)node_->nb[1]);
        for (int64_t d = 0; d < s.dv; d++) {
            to[d] = total == 0 ? 0 : sum[(size_t)d] / total;
        }
    }
}

#endif

} // namespace fsd
