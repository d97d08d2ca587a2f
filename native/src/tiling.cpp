#include "tiling.h"

#include "ggml-alloc.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

namespace fsd {

static constexpr int64_t kQueries = 512;    // queries of a tile
static constexpr int64_t kKeys = 256;       // key ranges are aligned to this, because kernels are faster then
static constexpr int64_t kRows = 2048;      // rows of a feed-forward block or product that are computed at a time
static constexpr float kUnseen = -65520.0f; // this and lower values become minus infinity in F16, which attention reads
static constexpr int kAfter = GGML_MAX_SRC - 1; // a source that no operation uses: orders a node behind another

// ---------------------------------------------------------------------------------------------------------------- masks

static bool seen(const float *values, int64_t n) {
    int any = 0; // no early exit, so that the loop is vectorised
    for (int64_t i = 0; i < n; i++) {
        any |= values[i] > kUnseen;
    }
    return any != 0;
}

static QueryTile tile_of(const float *mask, int64_t row0, int64_t row1, int64_t keys) {
    QueryTile t = {row0, row1, keys, 0};
    for (int64_t row = row0; row < row1; row++) {
        const float *values = mask + row * keys;
        int64_t first = 0, last = keys; // keys before `first` and from `last` on are not seen by this row
        while (first < t.key0 && !seen(values + first, std::min(kKeys, t.key0 - first))) {
            first = std::min(first + kKeys, t.key0);
        }
        t.key0 = first;
        while (last > t.key1 && !seen(values + std::max(last - kKeys, t.key1), last - std::max(last - kKeys, t.key1))) {
            last = std::max(last - kKeys, t.key1);
        }
        t.key1 = last;
        if (!seen(values + t.key0, t.key1 - t.key0)) {
            return {row0, row1, 0, 0};
        }
    }
    t.key0 = t.key0 / kKeys * kKeys;
    t.key1 = std::min(keys, (t.key1 + kKeys - 1) / kKeys * kKeys);
    return t;
}

std::vector<QueryTile> tiles_of_mask(const float *mask, int64_t rows, int64_t keys, int n_threads) {
    std::vector<QueryTile> tiles((size_t)((rows + kQueries - 1) / kQueries));
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < tiles.size();) {
            tiles[i] = tile_of(mask, (int64_t)i * kQueries, std::min(rows, (int64_t)(i + 1) * kQueries), keys);
        }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads && i < (int)tiles.size(); i++) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread &t : threads) {
        t.join();
    }
    for (const QueryTile &t : tiles) {
        if (t.key1 <= t.key0) {
            return {};
        }
    }
    return tiles;
}

// ------------------------------------------------------------------------------------------------------------ rewriting

namespace {

bool is_weight(const ggml_tensor *t) {
    const Buffer *b = buffer_of(root_of(t));
    return b && b->weights;
}

bool is_matrix(const ggml_tensor *t, int64_t rows) {
    return t->ne[1] == rows && t->ne[2] == 1 && t->ne[3] == 1 && ggml_is_contiguous(t);
}

} // namespace

class Tiler {
  public:
    Tiler(const ggml_cgraph *graph, const std::set<const ggml_tensor *> &out, Tiling &result)
        : old(graph), outs(out), r(result) {}

    void plan(int n_threads);
    bool build(ggml_backend_buffer_type_t buft);

  private:
    using Made = std::unordered_map<const ggml_tensor *, ggml_tensor *>;

    struct Attention { // all attention with one mask
        std::vector<QueryTile> tiles;
        std::vector<ggml_tensor *> masks;
    };

    const ggml_tensor *mask_of(const ggml_tensor *attention) const;
    std::set<const ggml_tensor *> interior(const ggml_tensor *narrow);
    void plan_block(const ggml_tensor *product);
    void need(const ggml_tensor *t);

    ggml_tensor *blank(const ggml_tensor *like);
    ggml_tensor *copy(const ggml_tensor *t);
    ggml_tensor *get(const ggml_tensor *t);
    ggml_tensor *view(ggml_tensor *of, int dim, int64_t first, int64_t n);
    void place(ggml_tensor *t, ggml_tensor *root, size_t offset);
    ggml_tensor *whole(const ggml_tensor *t);
    void join(const ggml_tensor *t, ggml_tensor *whole, ggml_tensor *last);
    void push(ggml_tensor *t) { r.graph->nodes[r.graph->n_nodes++] = t; }
    void attend(const ggml_tensor *t, Attention &attention);
    void feed(const ggml_tensor *product, std::vector<const ggml_tensor *> nodes);

    const ggml_cgraph *old;
    const std::set<const ggml_tensor *> &outs;
    Tiling &r;
    std::unordered_map<const ggml_tensor *, int> index, uses;
    std::map<const ggml_tensor *, Attention> attentions; // by mask, in the order of addresses
    // By product that is computed some rows at a time: the nodes before it that are computed with it.
    std::unordered_map<const ggml_tensor *, std::vector<const ggml_tensor *>> blocks;
    std::set<const ggml_tensor *> in_block, needed;
    std::vector<std::pair<ggml_tensor *, const ggml_tensor *>> inputs;
    Made made;
};

// The mask, an input of the graph, of an attention that can be tiled; null if it cannot.
const ggml_tensor *Tiler::mask_of(const ggml_tensor *t) const {
    const ggml_tensor *m = t->src[3];
    while (m && index.count(m) && (m->op == GGML_OP_CPY || m->op == GGML_OP_CONT || m->op == GGML_OP_DUP)) {
        m = m->src[0];
    }
    const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2];
    const bool fits = m && !index.count(m) && !is_weight(m) && buffer_of(m) && !m->view_src &&
                      m->type == GGML_TYPE_F32 && is_matrix(m, q->ne[1]) && m->ne[0] == k->ne[1] &&
                      v->ne[1] == k->ne[1] && q->ne[3] == 1 && k->ne[3] == 1 && v->ne[3] == 1;
    return fits ? m : nullptr;
}

// The nodes between a product that narrows a feed-forward block and the products that widened it, if all of them can be
// computed some rows at a time; else none.
std::set<const ggml_tensor *> Tiler::interior(const ggml_tensor *narrow) {
    const int64_t rows = narrow->ne[1];
    const ggml_tensor *wide = narrow->src[1];
    auto by_rows = [&](const ggml_tensor *t) {
        const bool known = t->op == GGML_OP_ADD || t->op == GGML_OP_MUL || t->op == GGML_OP_SCALE ||
                           t->op == GGML_OP_SQR || t->op == GGML_OP_UNARY || t->op == GGML_OP_GLU ||
                           (t->op == GGML_OP_MUL_MAT && is_weight(t->src[0]));
        auto block = blocks.find(t);
        return known && index.count(t) && !t->view_src && is_matrix(t, rows) && !outs.count(t) &&
               (block == blocks.end() || block->second.empty());
    };
    std::set<const ggml_tensor *> nodes = {wide};
    std::unordered_map<const ggml_tensor *, int> inside = {{wide, 1}};
    std::vector<const ggml_tensor *> next = {wide};
    while (!next.empty()) {
        const ggml_tensor *t = next.back();
        next.pop_back();
        if (!by_rows(t)) {
            return {};
        }
        for (const ggml_tensor *src : t->src) {
            if (!src || is_weight(src)) {
                if (src && t->op != GGML_OP_MUL_MAT && ggml_nrows(src) != 1) {
                    return {};
                }
                continue;
            }
            if (!is_matrix(src, rows)) {
                return {};
            }
            if (t->op != GGML_OP_MUL_MAT) { // the block ends at the widening products, whose inputs are held whole
                inside[src]++;
                if (nodes.insert(src).second) {
                    next.push_back(src);
                }
            }
        }
    }
    for (const ggml_tensor *t : nodes) {
        if (uses[t] != inside[t]) {
            return {};
        }
    }
    return nodes;
}

// Plans a product of many rows to be computed some rows at a time, because inner devices make copies of what they multiply.
// The narrowing product of a feed-forward block takes the whole block with it.
void Tiler::plan_block(const ggml_tensor *product) {
    const int64_t rows = product->ne[1];
    if (rows <= kRows || !is_weight(product->src[0]) || product->view_src || !is_matrix(product, rows) ||
        !is_matrix(product->src[1], rows)) {
        return;
    }
    std::set<const ggml_tensor *> nodes;
    if (product->src[1]->ne[0] > product->ne[0]) {
        nodes = interior(product);
    }
    std::vector<const ggml_tensor *> &block = blocks[product];
    block.assign(nodes.begin(), nodes.end());
    std::sort(block.begin(), block.end(),
              [&](const ggml_tensor *a, const ggml_tensor *b) { return index[a] < index[b]; });
    in_block.insert(nodes.begin(), nodes.end());
}

void Tiler::need(const ggml_tensor *t) {
    if (!index.count(t) || !needed.insert(t).second) {
        return;
    }
    const bool tiled = t->op == GGML_OP_FLASH_ATTN_EXT && attentions.count(mask_of(t));
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        if (t->src[j] && !(tiled && j == 3)) {
            need(t->src[j]);
        }
    }
    if (t->view_src) {
        need(t->view_src);
    }
}

void Tiler::plan(int n_threads) {
    for (int i = 0; i < old->n_nodes; i++) {
        const ggml_tensor *t = old->nodes[i];
        index[t] = i;
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (t->src[j]) {
                uses[t->src[j]]++;
            }
        }
    }
    std::set<const ggml_tensor *> seen_whole;
    for (int i = 0; i < old->n_nodes; i++) {
        const ggml_tensor *t = old->nodes[i];
        if (t->op == GGML_OP_MUL_MAT) {
            plan_block(t);
        }
        const ggml_tensor *m = t->op == GGML_OP_FLASH_ATTN_EXT ? mask_of(t) : nullptr;
        if (!m || m->ne[1] <= kQueries || attentions.count(m) || seen_whole.count(m)) {
            continue;
        }
        std::vector<QueryTile> tiles = tiles_of_mask((const float *)m->data, m->ne[1], m->ne[0], n_threads);
        int64_t left = 0;
        for (const QueryTile &tile : tiles) {
            left += (tile.row1 - tile.row0) * (tile.key1 - tile.key0);
        }
        if (left > 0 && left <= m->ne[0] * m->ne[1] / 2) {
            attentions[m].tiles = std::move(tiles);
        } else {
            seen_whole.insert(m);
        }
    }
}

ggml_tensor *Tiler::blank(const ggml_tensor *like) {
    ggml_tensor *s = ggml_new_tensor_1d(r.ctx, GGML_TYPE_I8, 1);
    *s = *like;
    s->data = nullptr;
    s->buffer = nullptr;
    s->extra = nullptr;
    s->view_src = nullptr;
    s->view_offs = 0;
    std::fill(s->src, s->src + GGML_MAX_SRC, nullptr);
    return s;
}

void Tiler::place(ggml_tensor *t, ggml_tensor *root, size_t offset) {
    t->view_src = root->view_src ? root->view_src : root;
    t->view_offs = offset + (root->view_src ? root->view_offs : 0);
}

ggml_tensor *Tiler::copy(const ggml_tensor *t) {
    ggml_tensor *s = blank(t);
    made[t] = s; // before its sources: a copy operation names itself as a source
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        s->src[j] = t->src[j] ? get(t->src[j]) : nullptr;
    }
    if (t->view_src) {
        place(s, get(t->view_src), t->view_offs);
    }
    return s;
}

// The new graph's tensor for one of the old graph: weights are used as they are, inputs are copied.
ggml_tensor *Tiler::get(const ggml_tensor *t) {
    auto it = made.find(t);
    if (it != made.end()) {
        return it->second;
    }
    ggml_tensor *s = const_cast<ggml_tensor *>(t);
    if (!is_weight(t)) {
        s = blank(t);
        if (t->view_src) {
            place(s, get(t->view_src), t->view_offs);
        } else {
            s->flags |= GGML_TENSOR_FLAG_INPUT;
            inputs.emplace_back(s, t);
        }
    }
    r.graph->leafs[r.graph->n_leafs++] = s;
    return made[t] = s;
}

ggml_tensor *Tiler::view(ggml_tensor *of, int dim, int64_t first, int64_t n) {
    ggml_tensor *s = blank(of);
    s->op = GGML_OP_VIEW;
    s->flags = 0;
    memset(s->op_params, 0, sizeof(s->op_params));
    s->ne[dim] = n;
    s->src[0] = of;
    place(s, of, first * of->nb[dim]);
    push(s);
    return s;
}

// A tensor whose parts are written by several nodes.
ggml_tensor *Tiler::whole(const ggml_tensor *t) {
    ggml_tensor *s = blank(t);
    s->op = GGML_OP_NONE;
    push(s);
    return s;
}

// Makes the whole available to later nodes. Each part is a source of the next, so that the allocator sees when their memory
// is free again.
void Tiler::join(const ggml_tensor *t, ggml_tensor *whole, ggml_tensor *last) {
    ggml_tensor *s = view(whole, 1, 0, whole->ne[1]);
    s->src[kAfter] = last;
    made[t] = s;
}

void Tiler::attend(const ggml_tensor *t, Attention &attention) {
    ggml_tensor *q = get(t->src[0]), *k = get(t->src[1]), *v = get(t->src[2]);
    ggml_tensor *sinks = t->src[4] ? get(t->src[4]) : nullptr;
    ggml_tensor *result = whole(t), *last = nullptr;
    for (size_t i = 0; i < attention.tiles.size(); i++) {
        const QueryTile &tile = attention.tiles[i];
        const int64_t rows = tile.row1 - tile.row0, keys = tile.key1 - tile.key0;
        if (attention.masks.size() <= i) {
            ggml_tensor *mask = ggml_new_tensor_2d(r.ctx, GGML_TYPE_F16, keys, rows);
            mask->flags |= GGML_TENSOR_FLAG_INPUT;
            r.graph->leafs[r.graph->n_leafs++] = mask;
            attention.masks.push_back(mask);
        }
        ggml_tensor *part = blank(t);
        part->src[0] = view(q, 1, tile.row0, rows);
        part->src[1] = view(k, 1, tile.key0, keys);
        part->src[2] = view(v, 1, tile.key0, keys);
        part->src[3] = attention.masks[i];
        part->src[4] = sinks;
        part->src[kAfter] = last;
        part->ne[2] = rows;
        part->nb[3] = part->nb[2] * rows;
        place(part, result, tile.row0 * result->nb[2]);
        push(part);
        last = part;
    }
    join(t, result, last);
}

void Tiler::feed(const ggml_tensor *product, std::vector<const ggml_tensor *> nodes) {
    ggml_tensor *result = whole(product), *last = nullptr;
    nodes.push_back(product);
    for (int64_t row = 0; row < product->ne[1]; row += kRows) {
        const int64_t rows = std::min(kRows, product->ne[1] - row);
        Made here;
        for (const ggml_tensor *t : nodes) {
            ggml_tensor *part = blank(t);
            for (int j = 0; j < GGML_MAX_SRC; j++) {
                const ggml_tensor *src = t->src[j];
                if (!src || is_weight(src)) {
                    part->src[j] = src ? get(src) : nullptr;
                    continue;
                }
                ggml_tensor *&of_rows = here[src];
                of_rows = of_rows ? of_rows : view(get(src), 1, row, rows);
                part->src[j] = of_rows;
            }
            part->ne[1] = rows;
            part->nb[2] = part->nb[3] = part->nb[1] * rows;
            if (t == product) {
                place(part, result, row * result->nb[1]);
                part->src[kAfter] = last;
                last = part;
            }
            push(part);
            here[t] = part;
        }
    }
    join(product, result, last);
}

bool Tiler::build(ggml_backend_buffer_type_t buft) {
    for (const ggml_tensor *t : outs) {
        need(t);
    }
    size_t n = 2 * (size_t)old->n_nodes;
    for (const ggml_tensor *t : needed) {
        if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            auto it = attentions.find(mask_of(t));
            n += it != attentions.end() ? 5 * it->second.tiles.size() : 0;
        }
        auto block = blocks.find(t);
        n += block != blocks.end() ? 2 * (block->second.size() + 1) * (t->ne[1] / kRows + 1) : 0;
    }
    for (const auto &each : uses) {
        n += index.count(each.first) ? 0 : 1; // inputs and weights
    }
    ggml_init_params params = {};
    params.mem_size = n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false);
    params.no_alloc = true;
    r.ctx = ggml_init(params);
    r.graph = r.ctx ? ggml_new_graph_custom(r.ctx, n, false) : nullptr;
    if (!r.graph) {
        return false;
    }
    for (int i = 0; i < old->n_nodes; i++) {
        const ggml_tensor *t = old->nodes[i];
        if (!needed.count(t) || in_block.count(t)) {
            continue;
        }
        auto attention = attentions.end();
        if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            attention = attentions.find(mask_of(t));
        }
        auto block = blocks.find(t);
        if (attention != attentions.end()) {
            attend(t, attention->second);
        } else if (block != blocks.end()) {
            feed(t, block->second);
        } else {
            push(copy(t));
        }
    }
    for (const ggml_tensor *t : outs) {
        const ggml_tensor *s = made[t];
        const_cast<ggml_tensor *>(root_of(s))->flags |= GGML_TENSOR_FLAG_OUTPUT;
        r.out.emplace_back(s, t);
    }
    r.memory = ggml_gallocr_new(buft);
    if (!ggml_gallocr_alloc_graph(r.memory, r.graph)) {
        return false;
    }
    for (const auto &[here, there] : inputs) {
        memcpy(here->data, there->data, ggml_nbytes(there));
    }
    for (const auto &[mask, attention] : attentions) {
        for (size_t i = 0; i < attention.masks.size(); i++) {
            const QueryTile &t = attention.tiles[i];
            const int64_t keys = t.key1 - t.key0;
            for (int64_t row = t.row0; row < t.row1; row++) {
                ggml_fp32_to_fp16_row((const float *)mask->data + row * mask->ne[0] + t.key0,
                                      (ggml_fp16_t *)attention.masks[i]->data + (row - t.row0) * keys, keys);
            }
        }
    }
    return true;
}

std::unique_ptr<Tiling> Tiling::make(const ggml_cgraph *graph, const std::set<const ggml_tensor *> &out,
                                     ggml_backend_buffer_type_t buft, int n_threads) {
    auto tiling = std::make_unique<Tiling>();
    Tiler tiler(graph, out, *tiling);
    tiler.plan(n_threads);
    return tiler.build(buft) ? std::move(tiling) : nullptr;
}

Tiling::~Tiling() {
    if (memory) {
        ggml_gallocr_free(memory);
    }
    if (ctx) {
        ggml_free(ctx);
    }
}

void Tiling::finish() const {
    for (const auto &[here, there] : out) {
        memcpy(there->data, here->data, ggml_nbytes(there));
    }
}

} // namespace fsd
