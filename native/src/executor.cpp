// The executor: cuts a graph into segments by shard, walks them, and keeps the ring filled ahead of use.
//
// A graph is first cut into steps, the same way at every budget: a step is a run of nodes that need one shard's weights,
// at most step_bytes of them. A step becomes one GPU segment (its weights resident, or staged in the ring), or a few
// CPU and GPU segments when its shard is computed on the CPU. Neighbouring resident steps are merged into one inner graph;
// under an exact plan tensors that cross a step's border carry the output flag there too, so that inner devices fuse the
// same nodes in every arrangement and results do not depend on the budget.
//
// The host never waits for the copy stream. It runs at most kRunAhead segments ahead of the compute stream, so that abort,
// budget and pacing take effect within that many steps.
#include "executor.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace fsd {

static constexpr int kRunAhead = 2;
static constexpr int kPrefillTokens = 32;
static constexpr size_t kNear = 4; // segments from a layer's attention to its experts, about

// KV caches and recurrent state: buffers that outlive the graph.
static bool is_persistent(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    const Buffer *b = buffer_of(root);
    return b && !b->weights && root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// The layer's caches that a node touches, or null.
static CacheBlock *block_of(const ggml_tensor *node) {
    CacheTensor *c = is_noop(node) ? nullptr : cached(node);
    for (int j = 0; j < GGML_MAX_SRC && !c && !is_noop(node); j++) {
        c = node->src[j] ? cached(node->src[j]) : nullptr;
    }
    return c ? c->block : nullptr;
}

static int64_t tokens_of(const ggml_cgraph *graph, Device &d) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (n->op == GGML_OP_MUL_MAT && d.weight_of(n->src[0])) {
            return n->ne[1] * n->ne[2] * n->ne[3];
        }
    }
    return 1;
}

const Tier *Device::tier_for(int64_t n_tokens) const {
    const Tier *best = nullptr;
    for (const Tier &t : tiers) {
        if (n_tokens >= t.min_tokens) {
            best = &t;
        }
    }
    return best;
}

// ---------------------------------------------------------------------------------------------------------- compiling

namespace {

class Compiler {
  public:
    Compiler(Device &device, ggml_cgraph *graph, Program &program) : d(device), g(graph), p(program) {}

    // Fills program.segments from first_node on; false with a message when the graph cannot be run.
    bool compile(std::string &why);

  private:
    struct Step {
        int node0 = 0, node1 = 0;
        int piece = 0; // row piece of a matrix that is always computed in pieces
        bool row_piece = false;
        bool odd = false;        // an operation that the inner device does not have: always on the CPU
        std::vector<int> pieces; // weights needed, in order of use
        size_t bytes = 0;
        uint32_t shard = 0;
        CacheBlock *block = nullptr; // at most one, so that one at a time comes into the window
    };

    void survey();
    void cut();
    void lay_segments();
    void mark_crossings();
    void find_groups();
    bool place_experts();
    void stage(const Segment &seg, size_t at);
    bool lower(std::string &why);
    std::vector<int> pieces_of(const ggml_tensor *node, bool &split, bool &odd_use) const;
    bool on_cpu(uint32_t shard) const {
        return p.tier && shard < p.tier->placement.size() && p.tier->placement[shard] == FSD_CPU;
    }
    bool on_host(const Step &s) const;
    ggml_tensor *shadow(const ggml_tensor *t);
    void place_in_cache(ggml_tensor *s, const ggml_tensor *t);
    void add_shadow_node(const ggml_tensor *node);
    ggml_tensor *twin(const ggml_tensor *t);
    void add_row_piece(const Step &s);
    void lower_cpu_steps(int step, int node0, int node1);
    size_t work_of(const Step &s) const;
    void add_gpu(int step, int node0, int node1);
    void add_cpu(int step, int node0, int node1);
    void add_group_nodes(ExpertGroup &group);
    void finish_cpu(Segment &seg);
    void push_shadow(ggml_tensor *t);

    Device &d;
    ggml_cgraph *g;
    Program &p;
    std::vector<Step> steps;
    std::vector<int> step_of;                               // by node
    std::unordered_map<const ggml_tensor *, int> last_user; // root -> last node that reads it
    std::unordered_map<const ggml_tensor *, int> node_at;
    std::unordered_map<const ggml_tensor *, bool> escapes; // read outside its part of the graph, or outside the graph
    std::unordered_map<const ggml_tensor *, ggml_tensor *> shadows;
    std::vector<ExpertGroup> all_groups;
    std::unordered_map<const ggml_tensor *, std::pair<size_t, size_t>>
        product_of;                         // node -> group, which of its products
    std::unordered_map<int, char *> staged; // piece -> address in the ring, for the segment being lowered
    int64_t n_tokens = 1;
    size_t merged_work = 0;
};

std::vector<int> Compiler::pieces_of(const ggml_tensor *node, bool &split, bool &odd_use) const {
    std::vector<int> found;
    split = false;
    odd_use = false;
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        const ggml_tensor *src = node->src[j];
        if (!src || !buffer_of(root_of(src)) || !buffer_of(root_of(src))->weights) {
            continue;
        }
        const Weight *w = d.weight_of(src);
        if (!w || w->core) {
            continue;
        }
        if (w->n_pieces > 1) {
            const bool whole = src->view_src == nullptr && node->op == GGML_OP_MUL_MAT && j == 0;
            split = split || whole;
            odd_use = odd_use || !whole;
        }
        for (int k = 0; k < w->n_pieces; k++) {
            const int piece = w->first_piece + k;
            if (std::find(found.begin(), found.end(), piece) == found.end()) {
                found.push_back(piece);
            }
        }
    }
    return found;
}

void Compiler::survey() {
    n_tokens = tokens_of(g, d);
    std::unordered_map<const ggml_tensor *, int> uses;
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        node_at[n] = i;
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (n->src[j]) {
                last_user[root_of(n->src[j])] = i;
                last_user[n->src[j]] = i;
                uses[n->src[j]]++;
            }
        }
    }
    // The scheduler's graph may be a view of a larger one: a node used more often than seen here is read elsewhere.
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        bool out = (n->flags & GGML_TENSOR_FLAG_OUTPUT) || last_user.find(n) == last_user.end() || is_persistent(n);
        if (!out && g->use_counts) {
            const size_t at = ggml_hash_find(&g->visited_hash_set, n);
            out =
                at != GGML_HASHSET_FULL && ggml_bitset_get(g->visited_hash_set.used, at) && g->use_counts[at] > uses[n];
        }
        if (out) {
            escapes[root_of(n)] = true;
        }
    }
}

void Compiler::cut() {
    step_of.assign(g->n_nodes, 0);
    bool closed = true; // the next node starts a new step
    for (int i = 0; i < g->n_nodes; i++) {
        const ggml_tensor *n = g->nodes[i];
        bool split = false, odd_use = false;
        std::vector<int> need = is_noop(n) ? std::vector<int>() : pieces_of(n, split, odd_use);
        size_t bytes = 0;
        for (int k : need) {
            bytes += d.pieces[k].padded;
        }
        const bool too_large = !split && bytes > d.min_ring; // several large weights in one operation
        const bool odd = !is_noop(n) && (odd_use || too_large || !ggml_backend_dev_supports_op(d.inner, n));
        if (odd) {
            Step s;
            s.node0 = i;
            s.node1 = i + 1;
            s.odd = true;
            step_of[i] = (int)steps.size();
            steps.push_back(s);
            closed = true;
            continue;
        }
        if (split) {
            for (size_t k = 0; k < need.size(); k++) {
                Step s;
                s.node0 = i;
                s.node1 = i + 1;
                s.row_piece = true;
                s.piece = (int)k;
                s.pieces = {need[k]};
                s.bytes = d.pieces[need[k]].padded;
                s.shard = d.pieces[need[k]].shard;
                step_of[i] = (int)steps.size();
                steps.push_back(s);
            }
            closed = true;
            continue;
        }
        // A product with experts' weights stands alone, so that it may be computed expert by expert.
        const bool alone = n->op == GGML_OP_MUL_MAT_ID && !need.empty();
        CacheBlock *block = block_of(n);
        closed = closed || alone || (block && steps.back().block && steps.back().block != block);
        if (!closed && !need.empty() && !steps.back().pieces.empty()) {
            Step &s = steps.back();
            size_t more = 0;
            for (int k : need) {
                more += std::find(s.pieces.begin(), s.pieces.end(), k) == s.pieces.end() ? d.pieces[k].padded : 0;
            }
            closed = more > 0 && (s.bytes + more > d.step_bytes || s.shard != d.pieces[need[0]].shard);
        }
        if (closed) {
            steps.emplace_back();
            steps.back().node0 = i;
            closed = false;
        }
        Step &s = steps.back();
        s.block = block ? block : s.block;
        for (int k : need) {
            if (std::find(s.pieces.begin(), s.pieces.end(), k) == s.pieces.end()) {
                if (s.pieces.empty()) {
                    s.shard = d.pieces[k].shard;
                }
                s.pieces.push_back(k);
                s.bytes += d.pieces[k].padded;
            }
        }
        s.node1 = i + 1;
        step_of[i] = (int)steps.size() - 1;
        closed = alone;
    }
}

// The inner device's twin of a tensor: same shape and operation, inner buffer, inner address.
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
        const Weight *w = d.weight_of(t);
        char *at = nullptr;
        if (w && w->core) {
            at = d.core_base + w->core_offset;
            s->buffer = d.core.get();
        } else if (w && w->n_pieces == 1) {
            const Piece &piece = d.pieces[w->first_piece];
            auto in_ring = staged.find(w->first_piece);
            if (in_ring != staged.end()) {
                at = in_ring->second;
                s->buffer = d.ring.buffer.get();
            } else if (d.piece_resident(w->first_piece)) {
                at = d.slabs[piece.slab].base + piece.slab_offset;
                s->buffer = d.slabs[piece.slab].buffer.get();
            }
        }
        s->data = at ? at + ((const char *)t->data - (const char *)root->data) : nullptr;
    } else if (b && b->cache) {
        place_in_cache(s, t);
    } else if (b) {
        s->buffer = b->inner;
        s->data = t->data ? b->inner_base + ((char *)t->data - b->base) : nullptr;
    }
    s->view_src = shadow(t->view_src);
    for (int j = 0; j < GGML_MAX_SRC; j++) {
        s->src[j] = shadow(t->src[j]);
    }
    return s;
}

// Where a cached tensor, or a view of one, lies in the storage of its block.
void Compiler::place_in_cache(ggml_tensor *s, const ggml_tensor *t) {
    const CacheTensor *c = cached(t);
    if (!c) {
        return;
    }
    const CacheBlock &b = *c->block;
    char *base = b.on_host ? d.pane_of(b) : b.base;
    s->buffer = b.on_host ? d.window.get() : b.storage.get();
    if (!base) {
        s->data = nullptr; // no node of this graph computes with it
        return;
    }
    const Reach r = reach_of(*c, t);
    const bool all = b.cells == c->cells && b.streams == c->streams;
    if (!all && (r.whole || r.cells > b.cells || r.stream0 + r.streams > b.streams)) {
        // A node writes rows into it by number: so many there are.
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

// One row piece of a matrix product. With several tokens the piece's rows are strided in the result, which inner devices
// do not write, so they go through scratch, as many tokens at a time as it holds.
void Compiler::add_row_piece(const Step &st) {
    const ggml_tensor *node = g->nodes[st.node0];
    const Piece &piece = d.pieces[st.pieces[0]];
    ggml_tensor *w = twin(node->src[0]);
    w->ne[1] = piece.rows;
    w->nb[2] = w->nb[3] = piece.bytes;
    auto in_ring = staged.find(st.pieces[0]);
    if (in_ring != staged.end()) {
        w->data = in_ring->second;
        w->buffer = d.ring.buffer.get();
    } else {
        w->data = d.slabs[piece.slab].base + piece.slab_offset;
        w->buffer = d.slabs[piece.slab].buffer.get();
    }
    const ggml_tensor *full = shadow(node);
    const bool direct = ggml_nrows(node) == 1;
    const int64_t most = direct ? 1 : (int64_t)(d.scratch_size / (piece.rows * sizeof(float)));
    for (int64_t i3 = 0; i3 < node->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < node->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < node->ne[1]; i1 += most) {
                const int64_t n = std::min(most, node->ne[1] - i1);
                ggml_tensor *x = twin(full->src[1]);
                x->ne[1] = n;
                x->ne[2] = x->ne[3] = 1;
                x->data = (char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
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
                part->data = direct ? target : d.scratch_base;
                part->buffer = direct ? full->buffer : d.scratch.get();
                part->view_src = direct ? full->view_src : nullptr;
                push_shadow(part);
                if (direct) {
                    continue;
                }
                ggml_tensor *rows = twin(full);
                rows->op = GGML_OP_NONE;
                rows->ne[0] = piece.rows;
                rows->ne[1] = n;
                rows->ne[2] = rows->ne[3] = 1;
                rows->data = target;
                std::fill(rows->src, rows->src + GGML_MAX_SRC, nullptr);
                ggml_tensor *put = twin(rows);
                put->op = GGML_OP_CPY;
                memset(put->op_params, 0, sizeof(put->op_params));
                put->src[0] = part;
                put->src[1] = rows;
                put->view_src = rows;
                push_shadow(put);
            }
        }
    }
}

// The group's nodes with the experts' slots for their weights, and the slots' numbers for the choice.
void Compiler::add_group_nodes(ExpertGroup &group) {
    group.numbers = twin(group.ids);
    group.numbers->op = GGML_OP_NONE;
    group.numbers->view_src = nullptr;
    std::fill(group.numbers->src, group.numbers->src + GGML_MAX_SRC, nullptr);
    group.numbers->nb[1] = group.numbers->nb[0] * group.ids->ne[0];
    group.numbers->nb[2] = group.numbers->nb[3] = group.numbers->nb[1] * group.ids->ne[1];
    group.numbers->data = d.ring.base + p.arena.end;
    group.numbers->buffer = d.ring.buffer.get();
    for (int i = group.node0; i < group.node1; i++) {
        add_shadow_node(g->nodes[i]);
    }
    for (size_t i = 0; i < group.products.size(); i++) {
        ggml_tensor *product = shadow(group.products[i]);
        ggml_tensor *slots = twin(group.weight(i));
        slots->ne[2] = (int64_t)p.arena.n_slots;
        slots->nb[2] = p.arena.stride;
        slots->nb[3] = slots->nb[2] * p.arena.n_slots;
        slots->data = d.ring.base + p.arena.begin() + p.arena.parts[i];
        slots->buffer = d.ring.buffer.get();
        product->src[0] = slots;
        product->src[2] = group.numbers;
    }
    group.result = shadow(group.products.back());
}

// What a step takes of the device's time, in bytes that it reads or, of many tokens, in such bytes times tokens. Of experts
// only those count that the tokens choose.
size_t Compiler::work_of(const Step &s) const {
    const ggml_tensor *n = g->nodes[s.node0];
    const bool experts = n->op == GGML_OP_MUL_MAT_ID;
    const size_t all = s.bytes * (experts ? n->src[2]->ne[0] : 1) * n_tokens / (experts ? n->src[0]->ne[2] : 1);
    return n_tokens < kPrefillTokens ? std::min(s.bytes, all) : all;
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
        if (!d.piece_resident(k) && !on_cpu(d.pieces[k].shard)) {
            streamed.push_back(k);
            bytes += d.pieces[k].padded;
        }
    }
    CacheBlock *block = nullptr;
    for (int i = node0; i < node1 && !block; i++) {
        block = block_of(g->nodes[i]);
        block = block && block->on_host ? block : nullptr;
    }
    Segment *last = p.segments.empty() ? nullptr : &p.segments.back();
    const bool merge = last && !last->cpu && last->entry < 0 && last->group < 0 && streamed.empty() &&
                       last->node1 == node0 && (!work || merged_work + work_of(s) <= p.merge_limit) && !s.row_piece &&
                       !last->row_piece && !block && !last->block;
    if (!merge) {
        Segment seg;
        seg.step = step;
        seg.row_piece = s.row_piece;
        seg.node0 = node0;
        seg.piece = s.piece;
        seg.uid = (1ull << 62) + ggml_graph_next_uid();
        p.segments.push_back(seg);
        merged_work = 0;
    }
    Segment &seg = p.segments.back();
    merged_work += work_of(s);
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
            entry.layer = (int)group.shard(d);
            entry.product = (int)product->second.second;
        }
        p.entries.push_back(std::move(entry));
        p.entry_bytes.push_back(bytes);
    }
}

void Compiler::add_cpu(int step, int node0, int node1) {
    Segment seg;
    seg.cpu = true;
    seg.step = step;
    seg.node0 = node0;
    seg.node1 = node1;
    for (int i = node0; i < node1; i++) {
        bool split, odd_use;
        for (int piece : pieces_of(g->nodes[i], split, odd_use)) {
            seg.bytes += d.pieces[piece].bytes;
        }
    }
    p.segments.push_back(seg);
}

void Compiler::finish_cpu(Segment &seg) {
    std::set<const ggml_tensor *> made; // roots written in full inside the segment
    std::set<std::pair<const void *, size_t>> seen;
    auto fetch = [&](const ggml_tensor *t) {
        const ggml_tensor *root = root_of(t);
        Buffer *b = buffer_of(root);
        if (!b || b->weights || !t->data || made.count(root) || ggml_nbytes(t) == 0) {
            return;
        }
        if (root->type == GGML_TYPE_I64 && root->op == GGML_OP_NONE) {
            return; // numbers of rows: the host has its own
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
            fetch(n); // writes into part of something larger
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
        auto last = last_user.find(root);
        const bool later = last != last_user.end() && last->second >= seg.node1;
        if (b && !b->weights && (later || escapes.count(root) || escapes.count(n) || is_persistent(n))) {
            seg.out.push_back({b, (size_t)((char *)n->data - b->base), ggml_nbytes(n)});
        }
    }
}

// Nodes of neighbouring steps whose weights the plan computes on the CPU: products with those weights, and what hangs on
// them without touching KV, run on the CPU, the rest on the GPU.
void Compiler::lower_cpu_steps(int step, int node0, int node1) {
    std::set<const ggml_tensor *> on_host;
    int run0 = node0;
    bool run_cpu = false;
    CacheBlock *block = nullptr;
    auto close = [&](int end) {
        if (end > run0) {
            run_cpu ? add_cpu(step, run0, end) : add_gpu(step, run0, end);
        }
        run0 = end;
    };
    for (int i = node0; i < node1; i++) {
        const ggml_tensor *n = g->nodes[i];
        if (is_noop(n)) {
            continue;
        }
        bool split, odd_use, host_weight = false, gpu_weight = false, touches_kv = is_persistent(n), follows = false;
        for (int piece : pieces_of(n, split, odd_use)) {
            (d.piece_resident(piece) ? gpu_weight : host_weight) = true;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            touches_kv = touches_kv || (n->src[j] && is_persistent(n->src[j]));
            follows = follows || (n->src[j] && on_host.count(root_of(n->src[j])));
        }
        const bool cpu = host_weight || (run_cpu && !gpu_weight && follows && !touches_kv);
        if (cpu) {
            on_host.insert(root_of(n));
        }
        CacheBlock *touched = block_of(n);
        if (cpu != run_cpu || (touched && block && touched != block)) {
            close(i);
            run_cpu = cpu;
            block = nullptr;
        }
        block = touched ? touched : block;
    }
    close(node1);
}

// A step is computed on the CPU when the plan says so for what is not resident of it.
bool Compiler::on_host(const Step &s) const {
    return !s.odd && std::any_of(s.pieces.begin(), s.pieces.end(),
                                 [&](int piece) { return !d.piece_resident(piece) && on_cpu(d.pieces[piece].shard); });
}

// The graph's groups of experts, and those that are computed expert by expert: of graphs with few tokens those of which
// not all is resident.
void Compiler::find_groups() {
    std::set<uint32_t> shards; // a layer's experts are one shard, and known by it
    for (int i = 0; i < g->n_nodes; i++) {
        ExpertGroup group;
        if (find_group(d, g, i, group) && shards.insert(group.shard(d)).second) {
            for (size_t k = 0; k < group.products.size(); k++) {
                product_of[group.products[k]] = {all_groups.size(), k};
            }
            i = group.node1 - 1;
            all_groups.push_back(std::move(group));
        }
    }
    for (ExpertGroup &group : all_groups) {
        bool resident = true;
        uint32_t shard = 0;
        for (size_t i = 0; i < group.products.size(); i++) {
            const int piece = d.weight_of(group.weight(i))->first_piece;
            resident = resident && d.piece_resident(piece);
            shard = d.pieces[piece].shard;
        }
        group.streamed = !on_cpu(shard);
        // Inner devices may compute several tokens in ways that depend on how many experts there are.
        if (!resident && group.node0 >= p.first_node && n_tokens < kPrefillTokens &&
            (!group.streamed || n_tokens == 1) && group.chosen() * sizeof(int32_t) <= ExpertArena::kNumbersBytes) {
            p.groups.push_back(group);
        }
    }
}

// All experts of the model share the slots, so that what is in them outlasts a change of residency. False when the ring
// has no room for them beside what is streamed.
bool Compiler::place_experts() {
    size_t needed = 0;
    for (const ExpertGroup &group : p.groups) {
        needed = std::max<size_t>(needed, group.streamed ? group.chosen() : group.ids->ne[0]);
    }
    const size_t largest = p.entry_bytes.empty() ? 0 : *std::max_element(p.entry_bytes.begin(), p.entry_bytes.end());
    // What streams whole through the ring may take turns in three places; experts that lie behind those stay.
    for (size_t n : {3, 2, 1}) {
        p.arena = lay_arena(all_groups, n * largest, d.ring.capacity);
        p.entry_capacity = p.arena.n_slots > 0 ? p.arena.begin() : d.ring.capacity;
        if (p.arena.n_slots >= needed) {
            return true;
        }
    }
    return false;
}

// What is made in one part of the graph and read in another has to be there in between, so inner devices may not fuse over
// it. Where the same bits are promised at every budget the parts are the steps, otherwise what runs together now.
void Compiler::mark_crossings() {
    std::vector<int> part_of = step_of;
    if (!d.exact) {
        part_of.assign(g->n_nodes, -1);
        for (size_t k = 0; k < p.segments.size(); k++) {
            std::fill(part_of.begin() + p.segments[k].node0, part_of.begin() + p.segments[k].node1, (int)k);
        }
    }
    for (int i = 0; i < g->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            auto it = node_at.find(g->nodes[i]->src[j]);
            if (it != node_at.end() && part_of[it->second] != part_of[i]) {
                escapes[it->first] = true;
                escapes[root_of(it->first)] = true;
            }
        }
    }
}

void Compiler::lay_segments() {
    size_t group = 0;
    for (int k = 0; k < (int)steps.size(); k++) {
        const Step &s = steps[k];
        if (s.node1 <= p.first_node || (s.node0 == p.first_node && s.row_piece && s.piece < p.first_piece)) {
            continue; // computed before the program was compiled anew
        }
        const int node0 = std::max(s.node0, p.first_node);
        const bool host = on_host(s);
        if (group < p.groups.size() && p.groups[group].node0 == node0) {
            Segment seg;
            seg.step = k;
            seg.node0 = node0;
            seg.node1 = p.groups[group].node1;
            seg.group = (int)group++;
            seg.uid = (1ull << 62) + ggml_graph_next_uid();
            k = step_of[seg.node1 - 1];
            p.segments.push_back(seg);
        } else if (s.odd) {
            add_cpu(k, node0, s.node1);
        } else if (host && s.row_piece) {
            add_cpu(k, node0, s.node1); // the CPU takes the matrix whole
            while (k + 1 < (int)steps.size() && steps[k + 1].node0 == s.node0) {
                k++;
            }
        } else if (host) {
            int last = k; // neighbours go together: one hand-over there and back
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

// The segment's weights are at its own place in the ring, wherever an earlier one has had them.
void Compiler::stage(const Segment &seg, size_t at) {
    for (int piece : p.entries[seg.entry].pieces) {
        staged[piece] = d.ring.base + at;
        at += d.pieces[piece].padded;
    }
    for (int i = seg.node0; i < seg.node1; i++) {
        for (const ggml_tensor *src : g->nodes[i]->src) {
            const Buffer *b = src ? buffer_of(root_of(src)) : nullptr;
            if (b && b->weights) {
                shadows.erase(src);
            }
        }
    }
}

bool Compiler::lower(std::string &why) {
    // Segments first: the ring must be laid out before shadows can know their addresses.
    find_groups();
    lay_segments();
    if (!place_experts()) {
        p.groups.clear(); // whole tensors of experts are streamed, or left to the CPU
        p.segments.clear();
        p.entries.clear();
        p.entry_bytes.clear();
        lay_segments();
        place_experts();
    }
    mark_crossings();

    // The ring's layout follows from the list of streamed steps.
    std::vector<RingSlot> slots;
    if (!p.entries.empty()) {
        slots = lay_ring(p.entry_bytes, p.entry_capacity);
        if (slots.empty()) {
            why = "a step of " + std::to_string(*std::max_element(p.entry_bytes.begin(), p.entry_bytes.end())) +
                  " bytes does not fit the ring of " + std::to_string(p.entry_capacity);
            return false;
        }
    }
    for (Segment &seg : p.segments) {
        if (seg.cpu) {
            finish_cpu(seg);
            continue;
        }
        if (seg.entry >= 0) {
            stage(seg, slots[seg.entry].offset);
        }
        seg.shadow0 = p.shadow->n_nodes;
        p.shadow->nodes[p.shadow->n_nodes++] = d.graph_key(n_tokens, (size_t)(&seg - p.segments.data()));
        if (seg.row_piece) {
            add_row_piece(steps[seg.step]);
        } else if (seg.group >= 0) {
            add_group_nodes(p.groups[seg.group]);
        } else {
            for (int i = seg.node0; i < seg.node1; i++) {
                add_shadow_node(g->nodes[i]);
            }
        }
        seg.shadow1 = p.shadow->n_nodes;
    }
    // Use counts over the whole program, CPU segments included: an inner device then never fuses away what a later segment
    // reads.
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
    return true;
}

bool Compiler::compile(std::string &why) {
    survey();
    cut();
    size_t extra = 0; // shadow nodes of matrices in row pieces; each brings at most five tensors
    for (const Step &s : steps) {
        if (s.row_piece) {
            const ggml_tensor *n = g->nodes[s.node0];
            const int64_t most = std::max<int64_t>(1, d.scratch_size / (d.pieces[s.pieces[0]].rows * sizeof(float)));
            extra += 2 * (n->ne[1] / most + 1) * n->ne[2] * n->ne[3];
        }
    }
    const size_t n_graph = g->n_nodes + extra;
    const size_t n_tensors = (size_t)g->n_nodes * (1 + GGML_MAX_SRC / 2) + 5 * extra;
    ggml_init_params params = {};
    params.mem_size = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_graph * 5, false);
    params.no_alloc = true;
    p.ctx = ggml_init(params);
    if (!p.ctx) {
        why = "no memory for a compiled graph";
        return false;
    }
    p.shadow = ggml_new_graph_custom(p.ctx, n_graph * 5, false);
    std::fill_n(p.shadow->use_counts, p.shadow->visited_hash_set.size, 0);
    return lower(why);
}

} // namespace

// ---------------------------------------------------------------------------------------------------------------- ring

void Device::reset_ring() {
    if (ring.entries.empty()) {
        return;
    }
    ggml_backend_synchronize(copy);
    synchronize();
    for (ggml_backend_event_t e : ring.ready) {
        ggml_backend_event_free(e);
    }
    for (ggml_backend_event_t e : ring.done) {
        ggml_backend_event_free(e);
    }
    ring.ready.clear();
    ring.done.clear();
    ring.entries.clear();
    ring.held.clear();
    ring.slots.clear();
    ring.next_copy = ring.next_use = 0;
}

// Inner devices that capture graphs know them by their first node and hold memory for each that they know. So segments
// begin with a node that does nothing and outlives the program: one for each place in a graph of few tokens, which is
// captured anew when the program changes, and one for all long graphs, which then are never captured. Nor is anything
// beside a game's frames: capturing holds a step up for longer than the gaps between them.
ggml_tensor *Device::graph_key(int64_t n_tokens, size_t place) {
    auto &keys = graph_keys[n_tokens == 1];
    const size_t at = n_tokens >= kPrefillTokens || host->pacing.active() ? 0 : place + 1;
    while (keys.size() <= at) {
        keys.push_back(std::make_unique<ggml_tensor>());
        *keys.back() = {};
        std::fill_n(keys.back()->ne, GGML_MAX_DIMS, 1);
    }
    return keys[at].get();
}

// Puts rows of floats in staging memory to their places, by number, in a tensor on the inner device. Where its kernels read
// such memory one of them fetches the rows: a copy would queue behind those of weights that are under way.
ggml_status Device::put_rows(HostRows &rows, const ggml_tensor &to, const char *from, const int64_t *places,
                             int64_t n) {
    compute_pending = true;
    if (!kernels_read_host || (!staging && !emulated)) {
        for (int64_t i = 0, end = 0; i < n; i = end) { // neighbours in one go
            for (end = i + 1; end < n && places[end] == places[end - 1] + 1; end++) {
            }
            ggml_tensor run = raw_tensor(to.buffer, (char *)to.data + places[i] * to.nb[1], (end - i) * to.nb[1]);
            ggml_backend_tensor_set_async(compute, &run, from + i * to.nb[1], 0, (end - i) * to.nb[1]);
        }
        return GGML_STATUS_SUCCESS;
    }
    const auto plain = [](ggml_type type, ggml_backend_buffer_t buffer, const void *data, int64_t row, int64_t n_rows) {
        ggml_tensor t = raw_tensor(buffer, const_cast<void *>(data), (size_t)(row * n_rows) * ggml_type_size(type));
        t.type = type;
        t.ne[0] = row;
        t.ne[1] = n_rows;
        t.nb[0] = ggml_type_size(type);
        t.nb[1] = row * t.nb[0];
        return t;
    };
    rows.to = plain(GGML_TYPE_F32, to.buffer, to.data, to.ne[0], to.ne[1]);
    rows.from = plain(GGML_TYPE_F32, staging.get(), from, to.ne[0], n);
    rows.places = plain(GGML_TYPE_I64, staging.get(), places, n, 1);
    rows.set = rows.to;
    rows.set.op = GGML_OP_SET_ROWS;
    rows.set.flags = GGML_TENSOR_FLAG_COMPUTE;
    rows.set.src[0] = &rows.from;
    rows.set.src[1] = &rows.places;
    rows.set.src[2] = &rows.to;
    rows.set.view_src = &rows.to;
    rows.nodes[0] = graph_key(kPrefillTokens, 0); // never captured
    rows.nodes[1] = &rows.set;
    ggml_cgraph graph = {};
    graph.nodes = rows.nodes;
    graph.size = graph.n_nodes = 2;
    return ggml_backend_graph_compute_async(compute, &graph);
}

// Copies a range of a piece that lies at `at` in the ring; with its last byte goes what pads it.
void Device::copy_piece(const Piece &p, size_t at, size_t from, size_t to) {
    static const char zeros[65536] = {};
    const char *source = weights[p.tensor].host + p.host_offset;
    ggml_tensor dst = raw_tensor(ring.buffer.get(), ring.base + at, p.padded);
    const size_t most = largest_copy();
    for (size_t i = from; i < to; i += most) {
        ggml_backend_tensor_set_async(copy, &dst, source + i, i, std::min(most, to - i));
    }
    for (size_t i = to; to == p.bytes && i < p.padded; i += sizeof(zeros)) {
        ggml_backend_tensor_set_async(copy, &dst, zeros, i, std::min(sizeof(zeros), p.padded - i));
    }
}

// Copies those experts that the layer's router chose last and that the entry's place in the ring lacks, cached ones within
// the device; returns the bytes that came from the host. Kernels read past the end of a row, so the first weights of the
// expert behind come along.
uint64_t Device::copy_experts(size_t entry) {
    const RingEntry &e = ring.entries[entry];
    const Piece &p = pieces[e.pieces[0]];
    const ggml_tensor &shape = weights[p.tensor].shape;
    const size_t each = shape.nb[2], n = shape.ne[2], run = ggml_row_size(shape.type, kRowRun);
    const std::vector<uint32_t> &chosen = chosen_experts[e.layer];
    std::vector<bool> &held = ring.held[entry];
    held.resize(n);
    uint64_t bytes = 0;
    size_t from = n; // of a run of neighbours that come from the host
    for (size_t i = 0; i <= n; i++) {
        const bool lacks = i < chosen.size() && chosen[i] > 0 && !held[i];
        const int slot = lacks ? experts.where(e.layer, (int)i) : -1;
        if (from < i && !(lacks && slot < 0)) {
            const size_t to = std::min(i * each + run, p.bytes);
            copy_piece(p, ring.slots[entry].offset, from * each, to);
            bytes += to - from * each;
            from = n;
        }
        if (!lacks) {
            continue;
        }
        held[i] = true;
        if (slot < 0) {
            from = std::min(from, i);
        } else {
            // The last expert's padding is in its slot, too.
            const size_t size = std::min(each + run, p.padded - i * each);
            char *cached = ring.base + experts.arena().at(slot) + experts.arena().parts[e.product];
            ggml_tensor src = raw_tensor(ring.buffer.get(), cached, size);
            ggml_tensor dst = raw_tensor(ring.buffer.get(), ring.base + ring.slots[entry].offset + i * each, size);
            ggml_backend_tensor_copy_async(copy, copy, &src, &dst);
        }
    }
    return bytes;
}

// Starts every copy whose place in the ring is free or will be once queued work is done; never waits.
void Device::pump_copies() {
    const size_t n = ring.entries.size();
    if (n == 0) {
        return;
    }
    while (ring.next_copy < ring.next_use + n) {
        const size_t i = ring.next_copy % n;
        const size_t back = ring.slots[i].reuse_distance;
        if (ring.next_copy >= back) {
            const uint64_t previous = ring.next_copy - back;
            if (previous >= ring.next_use) {
                return; // its bytes are still waiting to be used
            }
            ggml_backend_event_wait(copy, ring.done[previous % n]);
        }
        if (trace) {
            trace->begin(FSD_LANE_COPY, copy);
        }
        size_t at = ring.slots[i].offset;
        uint64_t bytes = 0;
        if (ring.entries[i].layer >= 0) {
            ring.held[i].clear();
            bytes = copy_experts(i); // a guess: the router may not have chosen yet
        } else {
            for (int k : ring.entries[i].pieces) {
                copy_piece(pieces[k], at, 0, pieces[k].bytes);
                at += pieces[k].padded;
                bytes += pieces[k].bytes;
            }
        }
        if (trace) {
            trace->end(FSD_LANE_COPY, copy, bytes);
        }
        ggml_backend_event_record(ring.ready[i], copy);
        ring.next_copy++;
        std::lock_guard<std::mutex> lock(state_mutex);
        counters.copies++;
        counters.copied_bytes += bytes;
    }
}

// ------------------------------------------------------------------------------------------------------------- running

namespace {

struct Runner {
    Device &d;
    ggml_cgraph *graph;
    const ggml_tensor *known_choice = nullptr; // of experts, which all products of a layer share
    const CacheAccess *access = nullptr;
    ggml_backend_event_t ahead[kRunAhead] = {};
    uint64_t queued = 0;
    std::vector<size_t> passes; // segments whose block comes through the window
    size_t filled = 0, passed = 0;
    ggml_backend_event_t full[2] = {}, free[2] = {}; // by pane

    Runner(Device &device, ggml_cgraph *g) : d(device), graph(g) {}
    ~Runner() {
        if (filled > passed) {
            ggml_backend_synchronize(d.copy); // an abort has left copies under way
        }
        for (ggml_backend_event_t e : {ahead[0], ahead[1], full[0], full[1], free[0], free[1]}) {
            if (e) {
                ggml_backend_event_free(e);
            }
        }
    }

    Program *program(int first_node, int first_piece, const Tier *tier, std::string &why);
    ggml_status gpu(Program &p, const Segment &s);
    void through_window(const Segment &s, ggml_backend_t stream, bool back);
    void fill_panes(const Program &p, size_t at);
    bool experts_first(const Program &p, size_t at) const;
    void copy_ahead(const Program &p, size_t at);
    ggml_status cpu(Segment &s);
    void bring_experts(const Segment &s);
};

// How much neighbouring resident steps may take together, in the measure of Compiler::work_of: a segment is not
// interrupted, so beside a game's frames the device is taken for short whiles only.
static size_t merge_limit_of(const Device &d, int64_t n_tokens) {
    const bool paced = d.host->pacing.active();
    if (n_tokens >= kPrefillTokens) {
        return d.emulated || paced ? 0 : (size_t)1 << 38; // half a millisecond of an H100, ten of a laptop
    }
    return (size_t)(d.emulated ? 64 : paced ? 512 : 2048) << 20;
}

Program *Runner::program(int first_node, int first_piece, const Tier *tier, std::string &why) {
    static uint64_t clock = 0;
    clock++;
    const size_t merge_limit = merge_limit_of(d, tokens_of(graph, d));
    for (auto &p : d.programs) {
        if (graph->uid != 0 && p->uid == graph->uid && p->generation == d.residency_generation &&
            p->first_node == first_node && p->first_piece == first_piece && p->tier == tier &&
            p->merge_limit == merge_limit) {
            p->used_at = clock;
            return p.get();
        }
    }
    d.synchronize(); // queued work may read the shadows of the program that makes way
    // The least recently used program goes first, and any that a change of residency has outdated.
    while (d.programs.size() >= kMaxPrograms) {
        auto oldest = std::min_element(d.programs.begin(), d.programs.end(), [&](const auto &a, const auto &b) {
            return std::make_pair(a->generation == d.residency_generation, a->used_at) <
                   std::make_pair(b->generation == d.residency_generation, b->used_at);
        });
        d.programs.erase(oldest);
    }
    auto p = std::make_unique<Program>();
    p->uid = graph->uid;
    p->generation = d.residency_generation;
    p->first_node = first_node;
    p->first_piece = first_piece;
    p->tier = tier;
    p->merge_limit = merge_limit;
    p->used_at = clock;
    Compiler compiler(d, graph, *p);
    if (!compiler.compile(why)) {
        return nullptr;
    }
    {
        std::lock_guard<std::mutex> lock(d.state_mutex);
        d.counters.recompiles++;
    }
    d.programs.push_back(std::move(p));
    return d.programs.back().get();
}

// Once the router has chosen, copies what was not guessed.
void Runner::bring_experts(const Segment &s) {
    const int layer = d.ring.entries[s.entry].layer;
    if (s.chosen != known_choice) {
        known_choice = s.chosen;
        std::vector<uint32_t> &chosen = d.chosen_experts[layer];
        chosen = count_chosen(d, s.chosen, graph->nodes[s.node0]->src[0]->ne[2]);
        for (size_t i = 0; i < chosen.size(); i++) {
            d.experts.count(layer, (int)i, chosen[i]);
        }
    }
    d.pump_copies();
    const uint64_t bytes = d.copy_experts(s.entry);
    ggml_backend_event_record(d.ring.ready[s.entry], d.copy);
    std::lock_guard<std::mutex> lock(d.state_mutex);
    d.counters.copied_bytes += bytes;
}

ggml_status Runner::gpu(Program &p, const Segment &s) {
    ggml_cgraph view = *p.shadow;
    view.nodes += s.shadow0;
    view.n_nodes = s.shadow1 - s.shadow0;
    view.n_leafs = 0;
    view.leafs = nullptr;
    view.uid = s.uid;
    if (s.group >= 0) {
        const size_t next = (size_t)(&s - p.segments.data()) + 1;
        return run_experts(d, p.groups[s.group], graph, view, [&] { copy_ahead(p, next); });
    }
    if (s.chosen) {
        bring_experts(s);
    }
    if (s.entry >= 0) {
        ggml_backend_event_wait(d.compute, d.ring.ready[s.entry]);
    }
    if (d.trace) {
        d.trace->begin(FSD_LANE_DEVICE, d.compute);
    }
    if (s.block && d.n_panes == 2) {
        ggml_backend_event_wait(d.compute, full[s.block->pane]);
    } else if (s.block) {
        through_window(s, d.compute, false);
    }
    const ggml_status status = ggml_backend_graph_compute_async(d.compute, &view);
    d.compute_pending = true;
    if (s.block) {
        through_window(s, d.compute, true);
        passed++;
    }
    if (s.block && d.n_panes == 2) {
        ggml_backend_event_t &e = free[s.block->pane];
        e = e ? e : ggml_backend_event_new(d.inner);
        ggml_backend_event_record(e, d.compute);
    }
    if (d.trace) {
        d.trace->end(FSD_LANE_DEVICE, d.compute, s.bytes);
    }
    if (s.entry >= 0) {
        ggml_backend_event_record(d.ring.done[s.entry], d.compute);
        d.ring.next_use++;
    }
    return status;
}

// Starts copies into panes that are free, or will be once queued work is done, for the segments from `at` on.
void Runner::fill_panes(const Program &p, size_t at) {
    for (; d.n_panes == 2 && filled < passes.size(); filled++) {
        const Segment &s = p.segments[passes[filled]];
        for (size_t i = passed; i < filled; i++) {
            if (p.segments[passes[i]].block->pane == s.block->pane) {
                return; // still to be used
            }
        }
        for (size_t i = at; i < passes[filled]; i++) {
            const auto writes = [](const Span &span) { return span.buffer->cache != nullptr; };
            if (std::any_of(p.segments[i].out.begin(), p.segments[i].out.end(), writes)) {
                return; // the CPU may write what would be copied
            }
        }
        const size_t pane = s.block->pane;
        if (free[pane]) {
            ggml_backend_event_wait(d.copy, free[pane]);
        }
        if (d.trace) {
            d.trace->begin(FSD_LANE_COPY, d.copy);
        }
        const uint64_t before = d.counters.kv_copied_bytes;
        through_window(s, d.copy, false);
        if (d.trace) {
            d.trace->end(FSD_LANE_COPY, d.copy, d.counters.kv_copied_bytes - before);
        }
        full[pane] = full[pane] ? full[pane] : ggml_backend_event_new(d.inner);
        ggml_backend_event_record(full[pane], d.copy);
    }
}

// A router is about to choose, and what is needed until then is on its way. Copies run in order: the experts that it asks
// for would queue behind what a later layer needs, and the copy engine would then idle while they are computed.
bool Runner::experts_first(const Program &p, size_t at) const {
    uint64_t uses = d.ring.next_use;
    size_t blocks = passed;
    for (size_t i = at; i < std::min(at + kNear, p.segments.size()); i++) {
        const Segment &s = p.segments[i];
        uses += s.entry >= 0;
        blocks += s.block != nullptr;
        if (uses > d.ring.next_copy || (d.n_panes == 2 && blocks > filled)) {
            return false;
        }
        if (s.group >= 0) {
            return true;
        }
    }
    return false;
}

// Starts the copies that can be, for the segments from `at` on.
void Runner::copy_ahead(const Program &p, size_t at) {
    fill_panes(p, at);
    d.pump_copies();
}

// Copies what the graph needs of a block on the host into its pane, or what the segment has written `back`.
void Runner::through_window(const Segment &s, ggml_backend_t stream, bool back) {
    uint64_t bytes = 0;
    const auto copy = [&](const CacheTensor &t, int64_t sequence, int64_t cell, int64_t n) {
        char *host = t.place(s.block->base, sequence, cell);
        ggml_tensor raw = raw_tensor(d.window.get(), t.place(d.pane_of(*s.block), sequence, cell), t.row * (size_t)n);
        if (back) {
            ggml_backend_tensor_get_async(stream, &raw, host, 0, ggml_nbytes(&raw));
        } else {
            ggml_backend_tensor_set_async(stream, &raw, host, 0, ggml_nbytes(&raw));
        }
        bytes += ggml_nbytes(&raw);
    };
    const auto copy_wanted = [&](const CacheTensor &t) {
        for (const auto &w : access->wants) {
            for (int64_t i = 0; w.group == s.block->group && i < w.streams; i++) {
                copy(t, w.stream0 + i, 0, std::min(w.cells, s.block->cells));
            }
        }
    };
    for (const CacheTensor *t : s.block->tensors) {
        if (!back) {
            copy_wanted(*t);
        }
    }
    for (int i = s.node0; i < s.node1 && back; i++) {
        const ggml_tensor *n = graph->nodes[i];
        const CacheTensor *t = is_noop(n) ? nullptr : cached(n);
        if (!t) {
            continue;
        }
        if (!writes_rows(n, *t)) {
            copy_wanted(*t);
            continue;
        }
        const int64_t *numbers = (const int64_t *)n->src[1]->data, count = n->src[1]->ne[0];
        for (int64_t from = 0, to; from < count; from = to) { // neighbours in one go
            for (to = from + 1; to < count && numbers[to] == numbers[to - 1] + 1 && numbers[to] % t->cells != 0; to++) {
            }
            copy(*t, numbers[from] / t->cells, numbers[from] % t->cells, to - from);
        }
    }
    std::lock_guard<std::mutex> lock(d.state_mutex);
    d.counters.kv_copied_bytes += bytes;
}

// Staging memory for what a segment of few tokens gives back; none for what has to be copied.
static size_t staging_for(const Span &out) {
    constexpr size_t kMost = 256 << 10; // a kernel reads the host's memory more slowly than a copy does
    return out.buffer->cache || out.bytes > kMost || out.bytes % sizeof(float) ? 0 : kAlign + align_up(out.bytes);
}

ggml_status Runner::cpu(Segment &s) {
    d.synchronize();
    const double start = Trace::now();
    for (const Span &in : s.in) {
        each_inner(*in.buffer, in.offset, in.bytes, [&](const ggml_tensor *raw, size_t from, size_t n) {
            if (raw) {
                ggml_backend_tensor_get(raw, in.buffer->base + in.offset + from, 0, n);
            }
        });
    }
    ggml_cgraph view = *graph;
    view.nodes += s.node0;
    view.n_nodes = s.node1 - s.node0;
    view.n_leafs = 0;
    view.leafs = nullptr;
    view.uid = 0;
    ggml_status status = ggml_backend_graph_compute(d.cpu, &view);
    size_t staged = 0;
    for (const Span &out : s.out) {
        staged += staging_for(out);
    }
    char *stage = staged > 0 ? d.staged(staged) : nullptr;
    s.rows.resize(s.out.size());
    for (size_t i = 0; i < s.out.size(); i++) {
        const Span &out = s.out[i];
        each_inner(*out.buffer, out.offset, out.bytes, [&](ggml_tensor *raw, size_t from, size_t n) {
            const char *made = out.buffer->base + out.offset + from;
            if (out.buffer->cache && raw) {
                ggml_backend_tensor_set(raw, made, 0, n); // may lie on the host
            } else if (raw && staging_for(out) > 0 && status == GGML_STATUS_SUCCESS) {
                int64_t *place = (int64_t *)stage; // one row
                *place = 0;
                memcpy(stage + kAlign, made, n);
                ggml_tensor to = *raw;
                to.ne[0] = (int64_t)(n / sizeof(float));
                status = d.put_rows(s.rows[i], to, stage + kAlign, place, 1);
                stage += staging_for(out);
            } else if (raw) {
                ggml_backend_tensor_set_async(d.compute, raw, made, 0, n);
            }
        });
    }
    d.compute_pending = d.compute_pending || !s.out.empty();
    if (d.trace) {
        d.trace->add(FSD_LANE_CPU, start, Trace::now(), s.bytes);
    }
    std::lock_guard<std::mutex> lock(d.state_mutex);
    d.counters.cpu_segments++;
    return status;
}

} // namespace

// Waits for the step's weights and for the host's frame, and does what has come meanwhile.
bool Device::before_step(const Segment *next, bool &timed) {
    const auto pending = [this] {
        host->read_page_budget();
        if (host != this && host->budget_is_pending() && host->requested_budget.load() < host->used()) {
            abort.store(true); // what is borrowed goes back first
        }
        return abort.load() || budget_is_pending();
    };
    timed = false;
    if (!pending() && !(next && next->cpu)) {
        if (next && next->entry >= 0) {
            ggml_backend_event_synchronize(ring.ready[next->entry]); // free time is not for waiting
        }
        timed = host->pacing.before_step(pending);
    }
    if (abort.load()) {
        return false;
    }
    if (budget_is_pending()) {
        apply_budget();
    }
    host->answer_page();
    return true;
}

ggml_status Device::run(ggml_cgraph *graph) {
    std::lock_guard<std::mutex> graph_lock(graph_mutex);
    if (!committed) {
        GGML_LOG_ERROR("frameshard: a graph was run before fsd_commit\n");
        return GGML_STATUS_FAILED;
    }
    if (abort.load()) {
        return GGML_STATUS_ABORTED;
    }
    if (budget_is_pending()) {
        apply_budget();
    }
    finish_fills();
    {
        std::lock_guard<std::mutex> lock(state_mutex);
        counters.graphs++;
    }
    const Tier *tier = tier_for(tokens_of(graph, *this));
    Runner runner(*this, graph);
    runner.access = access(graph);
    if (!prepare_caches(*runner.access)) {
        GGML_LOG_ERROR("frameshard: no memory for so long a context\n");
        return GGML_STATUS_ALLOC_FAILED;
    }
    std::string why;
    int node = 0, piece = 0;
    Program *p = nullptr;
    size_t at = 0;
    uint64_t compiled_for = 0;
    while (node < graph->n_nodes) {
        bool timed = false;
        const Segment *next = p && compiled_for == residency_generation ? &p->segments[at] : nullptr;
        if (host->pacing.active() && !before_step(next, timed)) {
            synchronize();
            reset_ring();
            return GGML_STATUS_ABORTED;
        }
        if (!p || compiled_for != residency_generation) {
            do {
                if (!ensure_ring() || !ensure_window()) {
                    GGML_LOG_ERROR("frameshard: the device refused memory for the ring or the window\n");
                    return GGML_STATUS_ALLOC_FAILED;
                }
            } while (ring.capacity == 0 && slabs.size() < slab_sizes.size()); // the window may have taken slabs
            p = runner.program(node, piece, tier, why);
            if (!p) {
                GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
                return GGML_STATUS_ALLOC_FAILED;
            }
            compiled_for = residency_generation;
            at = 0;
            if (ring.entries != p->entries || ring.entry_capacity != p->entry_capacity ||
                (!ring.entries.empty() && ring.next_use % ring.entries.size() != 0)) {
                reset_ring();
                ring.entries = p->entries;
                ring.slots = lay_ring(p->entry_bytes, p->entry_capacity);
                ring.entry_capacity = p->entry_capacity;
                for (size_t i = 0; i < ring.entries.size(); i++) {
                    ring.ready.push_back(ggml_backend_event_new(inner));
                    ring.done.push_back(ggml_backend_event_new(inner));
                }
                ring.held.assign(ring.entries.size(), {});
            }
            const bool cached = !p->groups.empty();
            if ((cached || !p->entries.empty()) && !(p->arena == experts.arena())) {
                ggml_backend_synchronize(copy);
                synchronize();
                experts.adopt(p->arena);
            }
            if (cached && !experts_ready) {
                experts_ready = ggml_backend_event_new(inner);
            }
            runner.passes.clear();
            for (size_t i = 0; i < p->segments.size(); i++) {
                if (p->segments[i].block) {
                    runner.passes.push_back(i);
                }
            }
            runner.filled = runner.passed = 0; // a change of residency has waited for all copies
            runner.copy_ahead(*p, at);
        }
        Segment &s = p->segments[at];
        const uint64_t start = clock_ns();
        const ggml_status status = s.cpu ? runner.cpu(s) : runner.gpu(*p, s);
        if (status != GGML_STATUS_SUCCESS) {
            synchronize();
            reset_ring();
            return status;
        }
        if (!runner.experts_first(*p, at + 1)) {
            runner.copy_ahead(*p, at + 1);
        }
        {
            std::lock_guard<std::mutex> lock(state_mutex);
            counters.steps++;
        }
        // Where to go on if the program has to be compiled anew here.
        at++;
        if (at < p->segments.size()) {
            node = p->segments[at].node0;
            piece = p->segments[at].piece;
        } else {
            node = graph->n_nodes;
            piece = 0;
        }
        // At most kRunAhead segments are queued, so that what follows takes effect soon.
        ggml_backend_event_t &slot = runner.ahead[runner.queued++ % kRunAhead];
        if (!slot) {
            slot = ggml_backend_event_new(inner);
        } else {
            ggml_backend_event_synchronize(slot);
        }
        ggml_backend_event_record(slot, compute);
        if (timed) {
            ggml_backend_event_synchronize(slot);
            host->pacing.after_step(start, clock_ns());
        }
        if (host != this && host->budget_is_pending()) {
            if (host->requested_budget.load() < host->used()) {
                abort.store(true); // what is borrowed goes back first
            } else {
                host->apply_budget();
            }
        }
        if (abort.load()) {
            synchronize();
            reset_ring();
            return GGML_STATUS_ABORTED;
        }
        if (budget_is_pending()) {
            apply_budget();
        }
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace fsd
