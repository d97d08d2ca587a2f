#include "graph_compiler.h"

#include "experts.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <tuple>
#include <unordered_set>

namespace fsd {

// Whether a tensor lies in a buffer that outlives the graph: the KV cache or recurrent state.
static bool is_persistent(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    const Buffer *b = buffer_of(root);
    return b && !b->weights && root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// The KV block that a node touches; null if it touches none.
static KvBlock *block_of(const ggml_tensor *node) {
    KvTensor *c = is_noop(node) ? nullptr : cached(node);
    for (int j = 0; j < GGML_MAX_SRC && !c && !is_noop(node); j++) {
        c = node->src[j] ? cached(node->src[j]) : nullptr;
    }
    return c ? c->block : nullptr;
}

int64_t tokens_of(const Device &d, const ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (n->op == GGML_OP_MUL_MAT && d.weights.of(n->src[0])) {
            return n->ne[1] * n->ne[2] * n->ne[3];
        }
    }
    return 1;
}

namespace {

class Compiler {
  public:
    Compiler(const Device &device, GraphKeys &keys, const ggml_cgraph *graph, Program &program)
        : d(device), keys(keys), g(graph), p(program) {}

    // Fills the program; false, with the reason, when the graph cannot be run.
    bool compile(std::string &why);

  private:
    struct Step {
        int node0 = 0, node1 = 0;
        int piece = 0; // index of the row piece, for a matrix that is always computed in row pieces
        bool row_piece = false;
        bool unsupported = false; // the inner device cannot compute it: always on the CPU
        std::vector<int> pieces;  // weights needed, in order of use
        size_t bytes = 0;
        uint32_t shard = 0;
        KvBlock *block = nullptr; // at most one, because one block at a time passes through the window
    };
    // The weights that a node needs.
    struct Needs {
        std::vector<int> pieces;
        bool row_pieces = false; // it multiplies by a matrix that is computed in row pieces
        bool other_use = false;  // it uses such a matrix in another way, which only the CPU can
        size_t bytes = 0;
    };

    void survey();
    void cut();
    void add_row_piece_steps(int node, const Needs &needs);
    bool may_join(const Step &s, const Needs &needs, const KvBlock *block) const;
    void join(Step &s, int node, const Needs &needs, KvBlock *block);
    bool allocate_shadow(std::string &why);
    void lay_segments();
    void mark_crossings();
    bool is_supported(const ExpertGroup &group) const;
    void find_groups();
    bool place_experts();
    void count_uses();
    void stage(const Segment &seg, size_t at);
    bool lower(std::string &why);
    Needs needs_of(const ggml_tensor *node) const;
    // What is read from disk is streamed: the link is quicker than the disk, and the CPU would wait for whole matrices.
    bool on_cpu(uint32_t shard) const { return p.key.tier && p.key.tier->on_cpu(shard) && d.cache.holds_shard(shard); }
    bool serves_cpu(const ExpertGroup &group, uint32_t shard) const;
    bool on_host(const Step &s) const;
    ggml_tensor *shadow(const ggml_tensor *t);
    void place_in_cache(ggml_tensor *s, const ggml_tensor *t);
    void add_shadow_node(const ggml_tensor *node);
    ggml_tensor *twin(const ggml_tensor *t);
    void add_row_piece(const Step &s);
    void add_segment_node(const Segment &seg, int node);
    void lower_cpu_steps(int step, int node0, int node1);
    size_t work_of(const Step &s) const;
    bool may_merge(int step, int node0, size_t work) const;
    void add_gpu(int step, int node0, int node1);
    void add_cpu(int node0, int node1);
    int add_cpu_rows(int step);
    ggml_tensor *product_of_rows(const Segment &seg);
    void add_results(Segment &seg, const ggml_tensor *node);
    void add_group_nodes(ExpertGroup &group);
    void add_numbers(ExpertGroup &group, ggml_tensor *key);
    void finish_cpu(Segment &seg);
    int64_t operations() const;
    void push_shadow(ggml_tensor *t);

    const Device &d;
    GraphKeys &keys;
    const ggml_cgraph *g;
    Program &p;
    std::vector<Step> steps;
    std::vector<int> step_of; // by node
    LastReaders last_reader;
    std::unordered_map<const ggml_tensor *, int> node_at;
    std::unordered_set<const ggml_tensor *> escapes; // read outside its part of the graph, or outside the graph
    std::unordered_map<const ggml_tensor *, ggml_tensor *> shadows;
    std::vector<ExpertGroup> all_groups;
    std::unordered_map<const ggml_tensor *, std::pair<size_t, size_t>>
        product_of;                         // node -> group, index of the product in it
    std::unordered_map<int, char *> staged; // piece -> address in the ring, for the segment being lowered
    int64_t n_tokens = 1;
    size_t merged_work = 0;
    bool lost = false; // a tensor has no place in the compute buffer
};

Compiler::Needs Compiler::needs_of(const ggml_tensor *node) const {
    Needs needs;
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        const ggml_tensor *src = node->src[j];
        if (!src || !buffer_of(root_of(src)) || !buffer_of(root_of(src))->weights) {
            continue;
        }
        const Weight *w = d.weights.of(src);
        if (!w || w->place.core) {
            continue;
        }
        if (w->place.n_pieces > 1) {
            const bool whole = src->view_src == nullptr && node->op == GGML_OP_MUL_MAT && j == 0;
            needs.row_pieces = needs.row_pieces || whole;
            needs.other_use = needs.other_use || !whole;
        }
        for (int piece = w->place.first_piece; piece < w->place.first_piece + w->place.n_pieces; piece++) {
            if (std::find(needs.pieces.begin(), needs.pieces.end(), piece) == needs.pieces.end()) {
                needs.pieces.push_back(piece);
                needs.bytes += d.weights.layout.pieces[piece].padded;
            }
        }
    }
    return needs;
}

void Compiler::survey() {
    n_tokens = tokens_of(d, g);
    std::unordered_map<const ggml_tensor *, int> uses;
    const size_t most = 2 * (size_t)g->n_nodes; // nodes, and leaves that they read
    node_at.reserve(most);
    last_reader.reserve(most);
    uses.reserve(most);
    shadows.reserve(most);
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        node_at[n] = i;
        for (const ggml_tensor *src : n->src) {
            if (!src) {
                continue;
            }
            last_reader[src] = i;
            if (src->view_src) {
                last_reader[root_of(src)] = i;
            }
            uses[src]++;
        }
    }
    // The graph may be a view of a larger one: a node that is used more often than here is read outside of it.
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        bool out = (n->flags & GGML_TENSOR_FLAG_OUTPUT) || last_reader.find(n) == last_reader.end() || is_persistent(n);
        if (!out && g->use_counts) {
            const size_t at = ggml_hash_find(&g->visited_hash_set, n);
            out =
                at != GGML_HASHSET_FULL && ggml_bitset_get(g->visited_hash_set.used, at) && g->use_counts[at] > uses[n];
        }
        if (out) {
            escapes.insert(root_of(n));
        }
    }
}

void Compiler::cut() {
    step_of.assign(g->n_nodes, 0);
    bool closed = true; // the next node starts a new step
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        const Needs needs = is_noop(n) ? Needs() : needs_of(n);
        const bool too_large =
            !needs.row_pieces && needs.bytes > d.weights.layout.min_ring; // several large weights in one operation
        if (!is_noop(n) && (needs.other_use || too_large || !ggml_backend_dev_supports_op(d.inner.dev, n))) {
            Step s;
            s.node0 = i;
            s.node1 = i + 1;
            s.unsupported = true;
            steps.push_back(s);
            closed = true;
        } else if (needs.row_pieces) {
            add_row_piece_steps(i, needs);
            closed = true;
        } else {
            // A product with experts' weights is a step of its own, because it may be computed expert by expert.
            const bool alone = n->op == GGML_OP_MUL_MAT_ID && !needs.pieces.empty();
            KvBlock *block = block_of(n);
            if (closed || alone || !may_join(steps.back(), needs, block)) {
                steps.emplace_back();
                steps.back().node0 = i;
            }
            join(steps.back(), i, needs, block);
            closed = alone;
        }
        step_of[i] = (int)steps.size() - 1;
    }
}

void Compiler::add_row_piece_steps(int node, const Needs &needs) {
    for (size_t k = 0; k < needs.pieces.size(); k++) {
        const Piece &piece = d.weights.layout.pieces[needs.pieces[k]];
        Step s;
        s.node0 = node;
        s.node1 = node + 1;
        s.row_piece = true;
        s.piece = (int)k;
        s.pieces = {needs.pieces[k]};
        s.bytes = piece.padded;
        s.shard = piece.shard;
        steps.push_back(s);
    }
}

// Whether a node may be part of a step that was begun before it.
bool Compiler::may_join(const Step &s, const Needs &needs, const KvBlock *block) const {
    if (block && s.block && s.block != block) {
        return false;
    }
    if (needs.pieces.empty() || s.pieces.empty()) {
        return true;
    }
    size_t more = 0;
    for (int k : needs.pieces) {
        more +=
            std::find(s.pieces.begin(), s.pieces.end(), k) == s.pieces.end() ? d.weights.layout.pieces[k].padded : 0;
    }
    return more == 0 || (s.bytes + more <= d.weights.layout.sizes.step_bytes &&
                         s.shard == d.weights.layout.pieces[needs.pieces[0]].shard);
}

void Compiler::join(Step &s, int node, const Needs &needs, KvBlock *block) {
    s.block = block ? block : s.block;
    for (int k : needs.pieces) {
        if (std::find(s.pieces.begin(), s.pieces.end(), k) == s.pieces.end()) {
            if (s.pieces.empty()) {
                s.shard = d.weights.layout.pieces[k].shard;
            }
            s.pieces.push_back(k);
            s.bytes += d.weights.layout.pieces[k].padded;
        }
    }
    s.node1 = node + 1;
}

// Sets the address of a tensor. That of a view is in the tensor that it is a view of: ggml-vulkan goes by the offset there.
static void set_address(ggml_tensor *t, char *data) {
    t->data = data;
    if (t->view_src && data) {
        t->view_offs = (size_t)(data - (const char *)t->view_src->data);
    }
}

// The shadow of a tensor: the same shape and operation, at its address in an inner buffer.
ggml_tensor *Compiler::shadow(const ggml_tensor *t) {
    if (!t) {
        return nullptr;
    }
    auto it = shadows.find(t);
    if (it != shadows.end()) {
        return it->second;
    }
    const ggml_tensor *root = root_of(t);
    ggml_tensor *s = twin(t);
    shadows[t] = s;
    Buffer *b = buffer_of(root);
    if (b && b->weights) {
        const Weight *w = d.weights.of(t);
        char *at = nullptr;
        if (w && w->place.core) {
            at = d.arena.core_base() + w->place.core_offset;
            s->buffer = d.arena.core();
        } else if (w && w->place.n_pieces == 1) {
            const Piece &piece = d.weights.layout.pieces[w->place.first_piece];
            auto in_ring = staged.find(w->place.first_piece);
            if (in_ring != staged.end()) {
                at = in_ring->second;
                s->buffer = d.ring.buffer();
            } else if (d.arena.resident(w->place.first_piece)) {
                at = d.arena.slabs[piece.slab].base + piece.slab_offset;
                s->buffer = d.arena.slabs[piece.slab].buffer.get();
            }
        }
        s->data = at ? at + ((const char *)t->data - (const char *)root->data) : nullptr;
    } else if (b && b->kv) {
        place_in_cache(s, t);
    } else if (b) {
        s->buffer = b->device_buffer();
        s->data = t->data ? b->device_address((size_t)((char *)t->data - b->base)) : nullptr;
        lost = lost || (b->graph && !s->data && !ggml_is_empty(t));
    }
    s->view_src = shadow(t->view_src);
    set_address(s, (char *)s->data);
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        s->src[j] = shadow(t->src[j]);
    }
    return s;
}

// Sets the address of a KV tensor, or of a view of one, in the storage of its block.
void Compiler::place_in_cache(ggml_tensor *s, const ggml_tensor *t) {
    const KvTensor *c = cached(t);
    if (!c) {
        return;
    }
    const KvBlock &b = *c->block;
    char *base = b.in_host_memory ? d.kv.pane_of(b) : b.base;
    s->buffer = b.in_host_memory ? d.kv.window() : b.storage.get();
    if (!base) {
        s->data = nullptr; // no node of this graph computes with it
        return;
    }
    const Reach r = reach_of(*c, t);
    const bool all = b.cells == c->cells && b.streams == c->streams;
    if (!all && (r.whole || r.cells > b.cells || r.stream0 + r.streams > b.streams)) {
        // A node writes rows into it by number: the tensor gets as many rows as the storage has.
        s->data = base + c->at;
        s->ne[1] = b.cells * b.streams;
        s->ne[2] = s->ne[3] = 1;
        s->nb[2] = s->nb[3] = s->nb[1] * s->ne[1];
    } else if (r.whole) {
        s->data = base + c->at + r.rest;
    } else {
        s->data = c->place(base, r.stream0, 0) + r.rest;
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            if (t->nb[i] >= c->stream_bytes() && t->nb[i] % c->stream_bytes() == 0) {
                s->nb[i] = t->nb[i] / c->stream_bytes() * c->row * (size_t)b.cells;
            }
        }
    }
}

void Compiler::push_shadow(ggml_tensor *t) {
    p.shadow->nodes[p.shadow->n_nodes++] = t;
    ggml_hash_insert(&p.shadow->visited_hash_set, t);
}

void Compiler::add_shadow_node(const ggml_tensor *node) {
    ggml_tensor *s = shadow(node);
    if (escapes.count(node)) {
        s->flags |= GGML_TENSOR_FLAG_OUTPUT;
    }
    push_shadow(s);
}

ggml_tensor *Compiler::twin(const ggml_tensor *t) {
    ggml_tensor *s = ggml_new_tensor_1d(p.ctx, GGML_TYPE_I8, 1);
    *s = *t;
    s->extra = nullptr;
    return s;
}

// One row piece of a matrix product. For several tokens the rows of the piece are strided in the result, and inner devices
// do not write strided products. They go through scratch, as many tokens at a time as it holds.
void Compiler::add_row_piece(const Step &st) {
    const ggml_tensor *node = g->nodes[st.node0];
    const Piece &piece = d.weights.layout.pieces[st.pieces[0]];
    ggml_tensor *w = twin(node->src[0]);
    w->ne[1] = piece.rows;
    w->nb[2] = w->nb[3] = piece.bytes;
    auto in_ring = staged.find(st.pieces[0]);
    if (in_ring != staged.end()) {
        w->data = in_ring->second;
        w->buffer = d.ring.buffer();
    } else {
        w->data = d.arena.slabs[piece.slab].base + piece.slab_offset;
        w->buffer = d.arena.slabs[piece.slab].buffer.get();
    }
    const ggml_tensor *full = shadow(node);
    const bool direct = ggml_nrows(node) == 1;
    const int64_t most = direct ? 1 : (int64_t)(d.weights.layout.scratch_bytes / (piece.rows * sizeof(float)));
    for (int64_t i3 = 0; i3 < node->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < node->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < node->ne[1]; i1 += most) {
                const int64_t n = std::min(most, node->ne[1] - i1);
                ggml_tensor *x = twin(full->src[1]);
                x->ne[1] = n;
                x->ne[2] = x->ne[3] = 1;
                set_address(x, (char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
                ggml_tensor *part = twin(full);
                part->src[0] = w;
                part->src[1] = x;
                part->ne[0] = piece.rows;
                part->ne[1] = n;
                part->ne[2] = part->ne[3] = 1;
                part->nb[1] = part->nb[0] * piece.rows;
                part->nb[2] = part->nb[3] = part->nb[1] * n;
                part->flags |= GGML_TENSOR_FLAG_OUTPUT;
                char *target = (char *)full->data + piece.row0 * full->nb[0] + i1 * full->nb[1] + i2 * full->nb[2] +
                               i3 * full->nb[3];
                if (direct) {
                    set_address(part, target);
                } else {
                    part->data = d.scratch.base;
                    part->buffer = d.scratch.buffer.get();
                    part->view_src = nullptr;
                }
                push_shadow(part);
                if (direct) {
                    continue;
                }
                ggml_tensor *rows = twin(full);
                rows->op = GGML_OP_NONE;
                rows->ne[0] = piece.rows;
                rows->ne[1] = n;
                rows->ne[2] = rows->ne[3] = 1;
                set_address(rows, target);
                std::fill(rows->src, rows->src + GGML_MAX_SRC, nullptr);
                ggml_tensor *put = twin(rows);
                put->op = GGML_OP_CPY;
                memset(put->op_params, 0, sizeof(put->op_params));
                put->src[0] = part;
                put->src[1] = rows;
                put->view_src = rows->view_src ? rows->view_src : rows;
                push_shadow(put);
            }
        }
    }
}

// A node of a GPU segment, or the row pieces of one that the segment has.
void Compiler::add_segment_node(const Segment &seg, int node) {
    if (!steps[step_of[node]].row_piece) {
        add_shadow_node(g->nodes[node]);
        return;
    }
    for (int k = seg.step0; k < seg.step1; k++) {
        if (steps[k].node0 == node) {
            add_row_piece(steps[k]);
        }
    }
}

// The numbers of the slots of the chosen experts; and the nodes that look them up, if the device can do so.
void Compiler::add_numbers(ExpertGroup &group, ggml_tensor *key) {
    group.numbers = twin(group.ids);
    group.numbers->op = GGML_OP_NONE;
    group.numbers->view_src = nullptr;
    std::fill(group.numbers->src, group.numbers->src + GGML_MAX_SRC, nullptr);
    group.numbers->nb[1] = group.numbers->nb[0] * group.ids->ne[0];
    group.numbers->nb[2] = group.numbers->nb[3] = group.numbers->nb[1] * group.ids->ne[1];
    group.numbers->data = d.ring.base() + p.arena.end;
    group.numbers->buffer = d.ring.buffer();

    const int64_t n_experts = group.weight(0)->ne[2];
    if ((int64_t)p.arena.n_slots < n_experts || !ggml_is_contiguous(group.input) ||
        ggml_nbytes(group.input) > ExpertArena::kInputBytes) {
        return;
    }
    ggml_tensor *table = twin(group.numbers), *lookup = twin(group.numbers);
    const int64_t k = group.ids->ne[0], n = group.ids->ne[1];
    table->data = d.ring.base() + p.arena.table_at(group.place);
    std::tie(table->ne[0], table->ne[1], table->ne[2]) = std::tuple(1, n_experts, n);
    std::tie(table->nb[1], table->nb[2], table->nb[3]) = std::tuple(table->nb[0], 0, 0);
    std::tie(lookup->ne[0], lookup->ne[1], lookup->ne[2]) = std::tuple(1, k, n);
    lookup->nb[1] = lookup->nb[0];
    lookup->nb[2] = lookup->nb[1] * k;
    lookup->nb[3] = lookup->nb[2] * n;
    lookup->op = GGML_OP_GET_ROWS;
    lookup->flags = GGML_TENSOR_FLAG_COMPUTE | GGML_TENSOR_FLAG_OUTPUT;
    lookup->src[0] = table;
    lookup->src[1] = shadow(group.ids);
    // A copy by a kernel: others would take their turn between kernels.
    ggml_tensor *kept = twin(group.input);
    kept->op = GGML_OP_REPEAT;
    kept->flags = lookup->flags;
    kept->view_src = nullptr;
    std::fill(kept->src, kept->src + GGML_MAX_SRC, nullptr);
    kept->src[0] = shadow(group.input);
    kept->buffer = d.ring.buffer();
    kept->data = d.ring.base() + p.arena.input_at();
    if (ggml_backend_dev_supports_op(d.inner.dev, lookup) && ggml_backend_dev_supports_op(d.inner.dev, kept)) {
        p.shadow->nodes[p.shadow->n_nodes++] = key;
        push_shadow(kept);
        push_shadow(lookup);
        group.n_lookup = 3;
        group.lookup_uid = (1ull << 62) + ggml_graph_next_uid();
    }
}

// The nodes of a group, with the slots of the expert cache as weights and the numbers of slots as the choice of experts.
void Compiler::add_group_nodes(ExpertGroup &group) {
    for (int i = group.node0; i < group.node1; i++) {
        add_shadow_node(g->nodes[i]);
    }
    for (size_t i = 0; i < group.products.size(); i++) {
        ggml_tensor *product = shadow(group.products[i]);
        ggml_tensor *slots = twin(group.weight(i));
        slots->ne[2] = (int64_t)p.arena.n_slots;
        slots->nb[2] = p.arena.stride;
        slots->nb[3] = slots->nb[2] * p.arena.n_slots;
        slots->data = d.ring.base() + p.arena.begin() + p.arena.parts[i];
        slots->buffer = d.ring.buffer();
        product->src[0] = slots;
        product->src[2] = group.numbers;
    }
    group.result = shadow(group.products.back());
}

// An estimate of the time that a step takes on the inner device: for decode the bytes of weights that it reads, for prefill
// these bytes times the number of tokens. Of experts only the chosen ones count.
size_t Compiler::work_of(const Step &s) const {
    const ggml_tensor *n = g->nodes[s.node0];
    const bool experts = n->op == GGML_OP_MUL_MAT_ID;
    const size_t all = s.bytes * (experts ? n->src[2]->ne[0] : 1) * n_tokens / (experts ? n->src[0]->ne[2] : 1);
    return n_tokens < kPrefillTokens ? std::min(s.bytes, all) : all;
}

// Whether a resident step may be computed in the segment before it.
bool Compiler::may_merge(int step, int node0, size_t work) const {
    if (p.segments.empty()) {
        return false;
    }
    const Segment &last = p.segments.back();
    const bool adjacent = steps[step].piece > 0 ? last.step1 == step : last.node1 == node0;
    return adjacent && !last.cpu && last.entry < 0 && last.group < 0 && !last.block &&
           (work == 0 || merged_work + work <= p.key.merge_limit);
}

void Compiler::add_gpu(int step, int node0, int node1) {
    const Step &s = steps[step];
    bool work = s.row_piece;
    for (int i = node0; i < node1 && !work; i++) {
        work = !is_noop(g->nodes[i]);
    }
    std::vector<int> streamed;
    size_t bytes = 0;
    for (int k : s.pieces) {
        if (!d.arena.resident(k) && !on_cpu(d.weights.layout.pieces[k].shard)) {
            streamed.push_back(k);
            bytes += d.weights.layout.pieces[k].padded;
        }
    }
    KvBlock *block = nullptr;
    for (int i = node0; i < node1 && !block; i++) {
        block = block_of(g->nodes[i]);
        block = block && block->in_host_memory ? block : nullptr;
    }
    if (!streamed.empty() || block || !may_merge(step, node0, work ? work_of(s) : 0)) {
        Segment seg;
        seg.step0 = step;
        seg.node0 = node0;
        seg.piece = s.piece;
        seg.uid = (1ull << 62) + ggml_graph_next_uid();
        p.segments.push_back(seg);
        merged_work = 0;
    }
    Segment &seg = p.segments.back();
    merged_work += work_of(s);
    seg.step1 = step + 1;
    seg.bytes += s.bytes;
    seg.node1 = node1;
    seg.block = block;
    if (!streamed.empty()) {
        seg.entry = (int)p.entries.size();
        RingEntry entry = {streamed};
        const auto product = product_of.find(g->nodes[node0]);
        if (product != product_of.end()) {
            const ExpertGroup &group = all_groups[product->second.first];
            seg.chosen = group.ids;
            entry.layer = (int)group.layer;
            entry.product = (int)product->second.second;
        }
        p.entries.push_back(std::move(entry));
        p.entry_bytes.push_back(bytes);
    }
}

void Compiler::add_cpu(int node0, int node1) {
    Segment seg;
    seg.cpu = true;
    seg.node0 = node0;
    seg.node1 = node1;
    for (int i = node0; i < node1; i++) {
        if (g->nodes[i]->op != GGML_OP_MUL_MAT && g->nodes[i]->op != GGML_OP_MUL_MAT_ID) {
            continue; // lookups read a few rows
        }
        for (int piece : needs_of(g->nodes[i]).pieces) {
            seg.bytes += d.weights.layout.pieces[piece].bytes;
        }
    }
    p.segments.push_back(seg);
}

// The row pieces of a matrix from a step on that the CPU computes. Returns the last of their steps.
int Compiler::add_cpu_rows(int step) {
    Segment seg;
    seg.cpu = seg.row_piece = true;
    seg.step0 = step;
    seg.node0 = steps[step].node0;
    seg.node1 = steps[step].node1;
    seg.piece = steps[step].piece;
    for (seg.step1 = step;
         seg.step1 < (int)steps.size() && steps[seg.step1].node0 == seg.node0 && on_host(steps[seg.step1]);
         seg.step1++) {
        seg.bytes += d.weights.layout.pieces[steps[seg.step1].pieces[0]].bytes;
    }
    p.segments.push_back(seg);
    return seg.step1 - 1;
}

// The product with the row pieces of a CPU segment.
ggml_tensor *Compiler::product_of_rows(const Segment &seg) {
    const Piece &first = d.weights.layout.pieces[steps[seg.step0].pieces[0]];
    const Piece &last = d.weights.layout.pieces[steps[seg.step1 - 1].pieces[0]];
    const ggml_tensor *node = g->nodes[seg.node0];
    ggml_tensor *weights = twin(node->src[0]), *product = twin(node);
    weights->ne[1] = product->ne[0] = last.row0 + last.rows - first.row0;
    weights->data = (char *)weights->data + first.host_offset;
    weights->nb[2] = weights->nb[3] = weights->nb[1] * (size_t)weights->ne[1];
    product->data = (char *)product->data + (size_t)first.row0 * product->nb[0];
    product->src[0] = weights;
    return product;
}

// Adds the result of a node to what a CPU segment copies to the device.
void Compiler::add_results(Segment &seg, const ggml_tensor *node) {
    Buffer *b = buffer_of(root_of(node));
    const size_t at = (size_t)((char *)node->data - b->base);
    if (!seg.row_piece || ggml_is_contiguous(node)) {
        seg.out.push_back({b, at, ggml_nbytes(node)});
        return;
    }
    for (int64_t column = 0; column < ggml_nrows(node); column++) {
        seg.out.push_back({b, at + (size_t)column * node->nb[1], (size_t)node->ne[0] * node->nb[0]});
    }
}

void Compiler::finish_cpu(Segment &seg) {
    ggml_tensor *rows = seg.row_piece ? product_of_rows(seg) : nullptr;
    std::set<const ggml_tensor *> made; // roots written in full inside the segment
    std::set<std::pair<const void *, size_t>> seen;
    auto fetch = [&](const ggml_tensor *t) {
        const ggml_tensor *root = root_of(t);
        Buffer *b = buffer_of(root);
        if (!b || b->weights || !t->data || made.count(root) || ggml_nbytes(t) == 0) {
            return;
        }
        if (root->type == GGML_TYPE_I64 && root->op == GGML_OP_NONE) {
            return; // numbers of KV rows: host memory has its own, see buffer_set
        }
        if (seen.insert({t->data, ggml_nbytes(t)}).second) {
            seg.in.push_back({b, (size_t)((char *)t->data - b->base), ggml_nbytes(t)});
        }
    };
    for (int i = seg.node0; i < seg.node1; i++) {
        const ggml_tensor *n = g->nodes[i];
        if (is_noop(n)) {
            continue;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (n->src[j]) {
                fetch(n->src[j]);
            }
        }
        if (n->view_src) {
            fetch(n); // writes a part of a larger tensor
        } else {
            made.insert(n);
        }
    }
    for (int i = seg.node0; i < seg.node1; i++) {
        const ggml_tensor *n = g->nodes[i];
        if (is_noop(n)) {
            continue;
        }
        const ggml_tensor *root = root_of(n);
        Buffer *b = buffer_of(root);
        auto last = last_reader.find(root);
        const bool later = last != last_reader.end() && last->second >= seg.node1;
        if (b && !b->weights && (later || escapes.count(root) || escapes.count(n) || is_persistent(n))) {
            add_results(seg, rows ? rows : n);
        }
    }
    for (int i = seg.node0; i < seg.node1; i++) {
        seg.nodes.push_back(p.columns.of(rows ? rows : g->nodes[i]));
    }
}

// Splits neighbouring steps whose shards the plan computes on the CPU. Products with the shards' weights run on the CPU, and
// so do nodes that depend on them and do not touch the KV cache; the others run on the GPU.
void Compiler::lower_cpu_steps(int step, int node0, int node1) {
    std::set<const ggml_tensor *> on_host;
    int run0 = node0;
    bool run_cpu = false;
    KvBlock *block = nullptr;
    auto close = [&](int end) {
        if (end > run0) {
            run_cpu ? add_cpu(run0, end) : add_gpu(step, run0, end);
        }
        run0 = end;
    };
    for (int i = node0; i < node1; i++) {
        const ggml_tensor *n = g->nodes[i];
        if (is_noop(n)) {
            continue;
        }
        bool host_weight = false, gpu_weight = false, touches_kv = is_persistent(n), follows = false;
        for (int piece : needs_of(n).pieces) {
            (d.arena.resident(piece) ? gpu_weight : host_weight) = true;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            touches_kv = touches_kv || (n->src[j] && is_persistent(n->src[j]));
            follows = follows || (n->src[j] && on_host.count(root_of(n->src[j])));
        }
        const bool cpu = host_weight || (run_cpu && !gpu_weight && follows && !touches_kv);
        if (cpu) {
            on_host.insert(root_of(n));
        }
        KvBlock *touched = block_of(n);
        if (cpu != run_cpu || (touched && block && touched != block)) {
            close(i);
            run_cpu = cpu;
            block = nullptr;
        }
        block = touched ? touched : block;
    }
    close(node1);
}

// A step runs on the CPU if the plan places any of its pieces there that is not resident.
bool Compiler::on_host(const Step &s) const {
    return !s.unsupported && std::any_of(s.pieces.begin(), s.pieces.end(), [&](int piece) {
        return !d.arena.resident(piece) && on_cpu(d.weights.layout.pieces[piece].shard);
    });
}

// Whether the CPU can compute single experts of a group, as the plan wants, though not all of its experts are held.
bool Compiler::serves_cpu(const ExpertGroup &group, uint32_t shard) const {
    const size_t most = (size_t)std::min(group.chosen(), group.weight(0)->ne[2]);
    return p.key.tier && p.key.tier->on_cpu(shard) && d.cache.serves_experts(shard, most * group.products.size());
}

// Whether the inner device can compute all nodes of a group.
bool Compiler::is_supported(const ExpertGroup &group) const {
    return std::none_of(step_of.begin() + group.node0, step_of.begin() + group.node1,
                        [this](int step) { return steps[(size_t)step].unsupported; });
}

// Finds the graph's expert groups, and chooses those that are computed expert by expert: in graphs of few tokens, the groups
// that are not fully resident.
void Compiler::find_groups() {
    std::set<uint32_t> layers;
    for (int i = 0; i < g->n_nodes; i++) {
        ExpertGroup group;
        if (find_group(d, g, i, last_reader, group) && is_supported(group) && layers.insert(group.layer).second) {
            for (size_t k = 0; k < group.products.size(); k++) {
                product_of[group.products[k]] = {all_groups.size(), k};
            }
            group.place = all_groups.size();
            i = group.node1 - 1;
            all_groups.push_back(std::move(group));
        }
    }
    for (ExpertGroup &group : all_groups) {
        bool resident = true;
        uint32_t shard = 0;
        for (size_t i = 0; i < group.products.size(); i++) {
            const int piece = d.weights.of(group.weight(i))->place.first_piece;
            resident = resident && d.arena.resident(piece);
            shard = d.weights.layout.pieces[piece].shard;
        }
        group.streamed = !(on_cpu(shard) || serves_cpu(group, shard));
        // For several tokens the kernel that an inner device picks may depend on the number of experts in the tensor.
        if (!resident && group.node0 >= p.key.first_node && n_tokens < kPrefillTokens &&
            (!group.streamed || n_tokens == 1) && group.chosen() * sizeof(int32_t) <= ExpertArena::kNumbersBytes) {
            p.groups.push_back(group);
        }
    }
}

// Lays out the expert cache in the ring. All layers share its slots, so that cached experts outlast a change of residency.
// False when the ring has no room for it beside the streamed steps.
bool Compiler::place_experts() {
    size_t needed = 0;
    for (const ExpertGroup &group : p.groups) {
        needed = std::max<size_t>(needed, group.streamed ? group.chosen() : group.ids->ne[0]);
    }
    const size_t largest = p.entry_bytes.empty() ? 0 : *std::max_element(p.entry_bytes.begin(), p.entry_bytes.end());
    // Room for three streamed steps if possible, else fewer; the rest of the ring is for experts.
    for (size_t n : {3, 2, 1}) {
        p.arena = lay_arena(all_groups, n * largest, d.ring.capacity());
        p.entry_capacity = p.arena.n_slots > 0 ? p.arena.begin() : d.ring.capacity();
        if (p.arena.n_slots >= needed) {
            return true;
        }
    }
    return false;
}

// Tensors that are made in one part of the graph and read in another must exist in between, so inner devices may not fuse
// across them. Under an exact plan the parts are the steps, which are the same at every budget; otherwise the segments.
void Compiler::mark_crossings() {
    std::vector<int> part_of = step_of;
    if (!d.plan.exact) {
        part_of.assign(g->n_nodes, -1);
        for (size_t k = 0; k < p.segments.size(); k++) {
            std::fill(part_of.begin() + p.segments[k].node0, part_of.begin() + p.segments[k].node1, (int)k);
        }
    }
    for (int i = 0; i < g->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            auto it = node_at.find(g->nodes[i]->src[j]);
            if (it != node_at.end() && part_of[it->second] != part_of[i]) {
                escapes.insert(it->first);
                escapes.insert(root_of(it->first));
            }
        }
    }
}

void Compiler::lay_segments() {
    size_t group = 0;
    for (int k = 0; k < (int)steps.size(); k++) {
        const Step &s = steps[k];
        if (s.node1 <= p.key.first_node ||
            (s.node0 == p.key.first_node && s.row_piece && s.piece < p.key.first_piece)) {
            continue; // computed by an earlier program
        }
        const int node0 = std::max(s.node0, p.key.first_node);
        const bool host = on_host(s);
        if (group < p.groups.size() && p.groups[group].node0 == node0) {
            Segment seg;
            seg.node0 = node0;
            seg.node1 = p.groups[group].node1;
            seg.group = (int)group++;
            seg.uid = (1ull << 62) + ggml_graph_next_uid();
            k = step_of[seg.node1 - 1];
            p.segments.push_back(seg);
        } else if (s.unsupported) {
            add_cpu(node0, s.node1);
        } else if (host && s.row_piece) {
            k = add_cpu_rows(k);
        } else if (host) {
            int last = k; // neighbours go together: one exchange of activations for all
            const auto starts_group = [&](const Step &next) {
                return group < p.groups.size() && p.groups[group].node0 == next.node0;
            };
            while (last + 1 < (int)steps.size() && !steps[last + 1].row_piece && on_host(steps[last + 1]) &&
                   !starts_group(steps[last + 1])) {
                last++;
            }
            lower_cpu_steps(k, node0, steps[last].node1);
            k = last;
        } else {
            add_gpu(k, node0, s.node1);
        }
    }
}

// Sets the ring addresses of a segment's weights. Shadows of the same weights in earlier segments had other addresses.
void Compiler::stage(const Segment &seg, size_t at) {
    for (int piece : p.entries[seg.entry].pieces) {
        staged[piece] = d.ring.base() + at;
        at += d.weights.layout.pieces[piece].padded;
    }
    for (int i = seg.node0; i < seg.node1; i++) {
        for (const ggml_tensor *src : g->nodes[i]->src) {
            const Buffer *b = src ? buffer_of(root_of(src)) : nullptr;
            if (b && b->weights) {
                shadows.erase(src);
                shadows.erase(root_of(src)); // of a view, the tensor that it is a view of
            }
        }
    }
}

// Operations of the matrix products of all GPU segments, as ggml-vulkan counts them.
int64_t Compiler::operations() const {
    int64_t sum = 0;
    for (int i = 0; i < p.shadow->n_nodes; i++) {
        const ggml_tensor *n = p.shadow->nodes[i];
        if (n->op == GGML_OP_MUL_MAT || n->op == GGML_OP_MUL_MAT_ID) {
            sum += ggml_nelements(n) * (2 * n->src[1]->ne[0] - 1);
        }
    }
    return sum;
}

// Capturing a graph delays a step by more than the gaps between a host's frames, so it is off while the host is paced.
bool Compiler::lower(std::string &why) {
    const bool paced = d.pacing.active();
    // Segments first: the ring must be laid out before shadows get their addresses.
    find_groups();
    lay_segments();
    if (!place_experts()) {
        p.groups.clear(); // tensors of experts are streamed whole, or computed on the CPU
        p.segments.clear();
        p.entries.clear();
        p.entry_bytes.clear();
        lay_segments();
        place_experts();
    }
    mark_crossings();

    std::vector<RingSlot> slots;
    if (!p.entries.empty()) {
        slots = lay_ring(p.entry_bytes, p.entry_capacity);
        if (slots.empty()) {
            why = "a step of " + std::to_string(*std::max_element(p.entry_bytes.begin(), p.entry_bytes.end())) +
                  " bytes does not fit the ring of " + std::to_string(p.entry_capacity);
            return false;
        }
    }
    // The last node of each segment, which the device counts and does not compute. With it every segment has at least the
    // operations of the whole graph, so that the next one is not submitted in many small parts.
    ggml_tensor *const whole = d.inner.quirks.records_kernels ? twin(keys.uncaptured(false)) : nullptr;
    for (Segment &seg : p.segments) {
        if (seg.cpu) {
            finish_cpu(seg);
            continue;
        }
        if (seg.entry >= 0) {
            stage(seg, slots[seg.entry].offset);
        }
        const bool capture = n_tokens < kPrefillTokens && !paced, one = n_tokens == 1;
        const size_t place = (size_t)(&seg - p.segments.data());
        if (seg.group >= 0) {
            add_numbers(p.groups[seg.group], capture ? keys.before_place(one, place) : keys.uncaptured(one));
        }
        seg.shadow0 = p.shadow->n_nodes;
        p.shadow->nodes[p.shadow->n_nodes++] = capture ? keys.at_place(one, place) : keys.uncaptured(one);
        if (seg.group >= 0) {
            add_group_nodes(p.groups[seg.group]);
        } else {
            for (int i = seg.node0; i < seg.node1; i++) {
                add_segment_node(seg, i);
            }
        }
        if (whole) {
            p.shadow->nodes[p.shadow->n_nodes++] = whole;
        }
        seg.shadow1 = p.shadow->n_nodes;
    }
    if (lost) {
        why = "a tensor of the graph was never allocated in its compute buffer";
        return false;
    }
    if (whole) {
        whole->ne[0] = operations(); // a product of so many rows with one column each, of one operation
        whole->src[1] = keys.uncaptured(false);
        whole->op = GGML_OP_MUL_MAT;
    }
    count_uses();
    return true;
}

// Use counts over the whole program, CPU segments included, so that inner devices do not fuse away what a later segment
// reads.
void Compiler::count_uses() {
    for (int i = 0; i < p.shadow->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (ggml_tensor *src = p.shadow->nodes[i]->src[j]) {
                p.shadow->use_counts[ggml_hash_find_or_insert(&p.shadow->visited_hash_set, src)]++;
            }
        }
    }
    for (const Segment &seg : p.segments) {
        for (int i = seg.node0; i < seg.node1 && seg.cpu; i++) {
            for (int j = 0; j < GGML_MAX_SRC; j++) {
                auto made = shadows.find(g->nodes[i]->src[j]);
                if (made != shadows.end()) {
                    p.shadow->use_counts[ggml_hash_find_or_insert(&p.shadow->visited_hash_set, made->second)]++;
                }
            }
        }
    }
}

bool Compiler::allocate_shadow(std::string &why) {
    size_t extra = 0; // shadow nodes of matrices in row pieces; each brings at most five tensors
    for (const Step &s : steps) {
        if (s.row_piece) {
            const ggml_tensor *n = g->nodes[s.node0];
            const int64_t most = std::max<int64_t>(1, d.weights.layout.scratch_bytes /
                                                          (d.weights.layout.pieces[s.pieces[0]].rows * sizeof(float)));
            extra += 2 * (n->ne[1] / most + 1) * n->ne[2] * n->ne[3];
        }
    }
    const size_t n_graph = g->n_nodes + extra;
    const size_t n_tensors = (size_t)g->n_nodes * (1 + GGML_MAX_SRC / 2) + 5 * extra + 1;
    ggml_init_params params = {};
    params.mem_size = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_graph * 5, false);
    if (p.memory.tensor_bytes < params.mem_size) {
        p.memory.tensors.reset(new (std::nothrow) char[params.mem_size]);
        p.memory.tensor_bytes = p.memory.tensors ? params.mem_size : 0;
    }
    params.mem_buffer = p.memory.tensors.get();
    params.no_alloc = true;
    p.ctx = p.memory.tensors ? ggml_init(params) : nullptr;
    if (!p.ctx) {
        why = "no memory for a compiled graph";
        return false;
    }
    p.shadow = ggml_new_graph_custom(p.ctx, n_graph * 5, false);
    std::fill_n(p.shadow->use_counts, p.shadow->visited_hash_set.size, 0);
    return true;
}

bool Compiler::compile(std::string &why) {
    survey();
    cut();
    return allocate_shadow(why) && lower(why);
}

} // namespace

// How much work (see Compiler::work_of) neighbouring resident steps may have together in one segment. A segment cannot be
// interrupted, so while the host is paced segments are short.
static size_t merge_limit(const Device &d, int64_t n_tokens) {
    const bool paced = d.pacing.active();
    const Quirks &q = d.inner.quirks;
    if (n_tokens >= kPrefillTokens) {
        return paced ? 0 : q.prefill_merge;
    }
    return paced ? q.paced_decode_merge : q.decode_merge;
}

ProgramKey program_key(Device &d, const ggml_cgraph *graph, int first_node, int first_piece) {
    const int64_t n_tokens = tokens_of(d, graph);
    ProgramKey key;
    key.uid = graph->uid;
    key.generation = d.residency_generation;
    key.first_node = first_node;
    key.first_piece = first_piece;
    key.tier = d.plan.tier_for(n_tokens);
    key.merge_limit = merge_limit(d, n_tokens);
    for (const GraphMemory *memory : d.memories.of(graph, graph_memories)) {
        key.memory.push_back(memory->version());
    }
    return key;
}

std::unique_ptr<Program> compile_graph(const Device &d, GraphKeys &keys, const ggml_cgraph *graph,
                                       const ProgramKey &key, ProgramMemory memory, std::string &why) {
    memory.image.take(graph);
    auto program = std::make_unique<Program>(key, std::move(memory), *d.kernels);
    Compiler compiler(d, keys, graph, *program);
    return compiler.compile(why) ? std::move(program) : nullptr;
}

} // namespace fsd
