#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace fsd {

// ---------------------------------------------------------------------------------------------------------------- groups

// An operation that treats each row of experts and tokens by itself.
static bool by_row(ggml_op op) {
    switch (op) {
    case GGML_OP_VIEW:
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_MUL:
    case GGML_OP_ADD:
    case GGML_OP_ADD_ID:
        return true;
    default:
        return false;
    }
}

static bool is_product(const ggml_tensor *n) { return n->op == GGML_OP_MUL_MAT_ID; }

bool find_group(const Device &d, const ggml_cgraph *graph, int node, ExpertGroup &group) {
    const ggml_tensor *first = graph->nodes[node];
    if (!is_product(first)) {
        return false;
    }
    group = {};
    group.node0 = node;
    group.ids = first->src[2];
    group.input = first->src[1];
    // To the last product with the same choice of experts, over operations by row.
    for (int i = node; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (is_product(n) && n->src[2] == group.ids) {
            group.products.push_back(n);
            group.node1 = i + 1;
        } else if (!by_row(n->op)) {
            break;
        }
    }
    const int64_t k = group.ids->ne[0], n_tokens = group.ids->ne[1];
    if (group.ids->nb[0] != sizeof(int32_t) || !buffer_of(root_of(group.ids)) || !buffer_of(root_of(group.input)) ||
        group.input->type != GGML_TYPE_F32 || group.input->nb[0] != sizeof(float) || group.input->ne[2] != n_tokens ||
        group.input->ne[3] != 1) {
        return false;
    }
    const auto inside = [&](const ggml_tensor *t) {
        return std::find(graph->nodes + node, graph->nodes + group.node1, t) != graph->nodes + group.node1;
    };
    for (int i = node; i < group.node1; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (n->ne[1] != k || n->ne[2] != n_tokens || n->ne[3] != 1 || n->type != GGML_TYPE_F32 ||
            (n->view_src && (n->op != GGML_OP_VIEW || !inside(n->view_src)))) {
            return false;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor *src = n->src[j];
            if (!src || inside(src) || src == group.ids) {
                continue;
            }
            // From outside come the input of products, weights of products, and biases by expert.
            const bool product = is_product(n), weight = buffer_of(root_of(src)) && buffer_of(root_of(src))->weights;
            const bool bias = n->op == GGML_OP_ADD_ID && j == 1 && weight && src->view_src == nullptr;
            if (!(product && j == 0 && weight && src->view_src == nullptr) && !(product && src == group.input) &&
                !bias) {
                return false;
            }
        }
    }
    for (size_t i = 0; i < group.products.size(); i++) {
        const auto it = d.weight_at.find(group.weight(i)->data);
        if (it == d.weight_at.end() || d.weights[it->second].core || d.weights[it->second].n_pieces != 1) {
            return false;
        }
    }
    // What is computed on the way is needed nowhere else.
    for (int i = group.node1; i < graph->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor *src = graph->nodes[i]->src[j];
            if (src && root_of(src) != group.products.back() && inside(root_of(src))) {
                return false;
            }
        }
    }
    return true;
}

ExpertArena lay_arena(const std::vector<ExpertGroup> &groups, size_t entries, size_t capacity) {
    ExpertArena arena;
    std::vector<size_t> sizes; // by product
    size_t unit = kAlign;      // a slot is a whole number of blocks of each type that lies there
    for (const ExpertGroup &g : groups) {
        sizes.resize(std::max(sizes.size(), g.products.size()), 0);
        for (size_t p = 0; p < g.products.size(); p++) {
            const ggml_tensor *w = g.weight(p);
            sizes[p] = std::max(sizes[p], align_up(w->nb[2] + ggml_row_size(w->type, kRowRun)));
            unit = std::lcm(unit, ggml_type_size(w->type));
        }
    }
    for (size_t size : sizes) {
        arena.parts.push_back(arena.stride);
        arena.stride += size;
    }
    arena.stride = (arena.stride + unit - 1) / unit * unit;
    arena.end = capacity > ExpertArena::kNumbersBytes ? (capacity - ExpertArena::kNumbersBytes) / kAlign * kAlign : 0;
    arena.n_slots = arena.stride > 0 && arena.end > entries ? (arena.end - entries) / arena.stride : 0;
    return arena;
}

// --------------------------------------------------------------------------------------------------------------- running

namespace {

struct Row {
    int64_t j, t;
    int expert;
};

// Starts to copy what a tensor on the inner device holds.
void fetch(Device &d, const ggml_tensor *t, char *to) {
    const Buffer *b = buffer_of(root_of(t));
    const size_t bytes = ggml_nbytes(t);
    ggml_tensor raw = raw_tensor(b->inner, b->inner_base + ((char *)t->data - b->base), bytes);
    ggml_backend_tensor_get_async(d.compute, &raw, to, 0, bytes);
    d.compute_pending = true;
}

int32_t expert_at(const char *ids, const ggml_tensor *t, int64_t j, int64_t token) {
    int32_t expert;
    memcpy(&expert, ids + j * t->nb[0] + token * t->nb[1], sizeof(expert));
    return expert;
}

// What goes between host and device for a group, in staging memory.
struct Exchange {
    char *ids, *input; // from the device
    int32_t *slots;    // to the device
    char *rows;        // computed by the CPU, to the device
    int64_t *places;   // of these rows in the result
    Exchange(Device &d, const ExpertGroup &group) {
        const size_t sizes[] = {align_up(ggml_nbytes(group.ids)), align_up(ggml_nbytes(group.input)),
                                align_up(group.chosen() * sizeof(int32_t)),
                                align_up(group.chosen() * group.products.back()->nb[1])};
        ids = d.staged(sizes[0] + sizes[1] + sizes[2] + sizes[3] + group.chosen() * sizeof(int64_t));
        input = ids + sizes[0];
        slots = (int32_t *)(input + sizes[1]);
        rows = input + sizes[1] + sizes[2];
        places = (int64_t *)(rows + sizes[3]);
    }
};

// Computes rows on the CPU, by the graph's own operations on tensors of one row an expert; results follow each other.
ggml_status compute_rows(Device &d, ExpertGroup &group, const ggml_cgraph *graph, const std::vector<Row> &rows,
                         const Exchange &exchange) {
    const int64_t n = (int64_t)rows.size();
    const size_t n_nodes = (size_t)(group.node1 - group.node0);
    std::vector<char> meta(ggml_tensor_overhead() * (2 * n_nodes + 8) +
                           ggml_graph_overhead_custom(4 * n_nodes + 8, false));
    ggml_init_params params = {};
    params.mem_size = meta.size();
    params.mem_buffer = meta.data();
    params.no_alloc = true;
    ggml_context *ctx = ggml_init(params);
    size_t n_placed = 0;
    const auto place = [&](ggml_tensor *t) {
        group.memory.resize(std::max(group.memory.size(), ++n_placed));
        std::vector<char> &memory = group.memory[n_placed - 1];
        memory.resize(std::max(memory.size(), ggml_nbytes(t)));
        t->data = memory.data();
    };
    ggml_tensor *ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n);
    ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, group.input->ne[0], 1, n);
    place(ids);
    place(x);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *)ids->data)[i] = rows[i].expert;
        const int64_t j = group.input->ne[1] == 1 ? 0 : rows[i].j;
        memcpy((char *)x->data + i * x->nb[2], exchange.input + j * group.input->nb[1] + rows[i].t * group.input->nb[2],
               x->nb[1]);
    }
    std::unordered_map<const ggml_tensor *, ggml_tensor *> compact = {{group.ids, ids}, {group.input, x}};
    ggml_tensor *result = nullptr;
    for (int i = group.node0; i < group.node1; i++) {
        const ggml_tensor *node = graph->nodes[i];
        ggml_tensor *c = result = ggml_new_tensor_3d(ctx, node->type, node->ne[0], 1, n);
        c->op = node->op;
        c->flags = node->flags;
        memcpy(c->op_params, node->op_params, sizeof(c->op_params));
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const auto it = compact.find(node->src[j]);
            c->src[j] = it == compact.end() ? node->src[j] : it->second;
        }
        if (node->view_src) {
            c->view_src = compact.at(node->view_src);
            c->view_offs = node->view_offs;
            c->data = (char *)c->view_src->data + node->view_offs;
            c->nb[1] = c->view_src->nb[1];
            c->nb[2] = c->nb[3] = c->view_src->nb[2];
        } else if (i + 1 < group.node1) {
            place(c);
        }
        compact[node] = c;
    }
    result->data = exchange.rows;
    ggml_cgraph *cpu_graph = ggml_new_graph_custom(ctx, 4 * n_nodes + 8, false);
    ggml_build_forward_expand(cpu_graph, result);
    const ggml_status status = ggml_backend_graph_compute(d.cpu, cpu_graph);
    ggml_free(ctx);
    return status;
}

} // namespace

std::vector<uint32_t> count_chosen(Device &d, const ggml_tensor *chosen, int64_t n_experts) {
    const char *ids = d.staged(ggml_nbytes(chosen));
    fetch(d, chosen, (char *)ids);
    d.synchronize();
    std::vector<uint32_t> counts(n_experts);
    for (int64_t t = 0; t < chosen->ne[1]; t++) {
        for (int64_t j = 0; j < chosen->ne[0]; j++) {
            const int32_t expert = expert_at(ids, chosen, j, t);
            if (expert >= 0 && expert < n_experts) {
                counts[expert]++;
            }
        }
    }
    return counts;
}

// With each matrix comes the start of the next expert's, since kernels read past the end of a row.
static void copy_expert(Device &d, const ExpertGroup &group, int expert, int slot) {
    static const char zeros[8192] = {};
    const ExpertArena &arena = d.experts.arena();
    if (d.trace) {
        d.trace->begin(FSD_LANE_COPY, d.copy);
    }
    uint64_t bytes = 0;
    for (size_t p = 0; p < group.products.size(); p++) {
        const ggml_tensor *w = group.weight(p);
        const size_t size = w->nb[2] + ggml_row_size(w->type, kRowRun);
        const size_t there = std::min(size, (size_t)(w->ne[2] - expert) * w->nb[2]);
        const char *host = (const char *)w->data + expert * w->nb[2];
        ggml_tensor dst = raw_tensor(d.ring.buffer.get(), d.ring.base + arena.at(slot) + arena.parts[p], size);
        for (size_t from = 0, most = d.largest_copy(); from < there; from += most) {
            ggml_backend_tensor_set_async(d.copy, &dst, host + from, from, std::min(most, there - from));
        }
        for (size_t from = there; from < size; from += sizeof(zeros)) {
            ggml_backend_tensor_set_async(d.copy, &dst, zeros, from, std::min(sizeof(zeros), size - from));
        }
        bytes += there;
    }
    if (d.trace) {
        d.trace->end(FSD_LANE_COPY, d.copy, bytes);
    }
    std::lock_guard<std::mutex> lock(d.state_mutex);
    d.counters.copies++;
    d.counters.copied_bytes += bytes;
}

ggml_status run_experts(Device &d, ExpertGroup &group, const ggml_cgraph *graph, ggml_cgraph &view,
                        const std::function<void()> &copy_ahead) {
    const Exchange exchange(d, group);
    fetch(d, group.ids, exchange.ids);
    if (!group.streamed) {
        fetch(d, group.input, exchange.input);
    }
    d.synchronize(); // from here on no slot is being read, and what was sent before has arrived
    const int64_t k = group.ids->ne[0];
    const uint32_t layer = group.shard(d);
    std::vector<Row> rows;
    std::vector<int> wanted; // without repetition, in order of appearance
    for (int64_t t = 0; t < group.ids->ne[1]; t++) {
        for (int64_t j = 0; j < k; j++) {
            const int32_t expert = expert_at(exchange.ids, group.ids, j, t);
            rows.push_back({j, t, expert});
            d.experts.count(layer, expert);
            if (std::find(wanted.begin(), wanted.end(), expert) == wanted.end()) {
                wanted.push_back(expert);
            }
        }
    }
    d.experts.begin_use();
    std::unordered_map<int, int> slot_of;
    std::vector<int> missed;
    for (int expert : wanted) {
        const int slot = d.experts.find(layer, expert);
        if (slot >= 0) {
            slot_of[expert] = slot;
        } else {
            missed.push_back(expert);
        }
    }
    const size_t n_hits = slot_of.size();
    // The hottest of those that are missing are worth a copy, because they will be asked for again.
    std::stable_sort(missed.begin(), missed.end(),
                     [&](int a, int b) { return d.experts.heat(layer, a) > d.experts.heat(layer, b); });
    size_t n_copies = missed.size();
    if (!group.streamed) {
        // What rounding leaves is made up for by later layers; an empty slot is filled whatever the share.
        d.experts_to_stream += (double)missed.size() * d.expert_stream_share;
        n_copies = std::max((size_t)d.experts_to_stream, std::min(missed.size(), d.experts.n_empty()));
        d.experts_to_stream = std::max(d.experts_to_stream - (double)n_copies, 0.0);
    }
    for (size_t i = 0; i < n_copies; i++) {
        const int slot = d.experts.take(layer, missed[i], group.streamed);
        if (slot < 0) {
            n_copies = i;
            break;
        }
        slot_of[missed[i]] = slot;
        copy_expert(d, group, missed[i], slot);
    }
    std::vector<Row> on_cpu;
    std::vector<int32_t> numbers((size_t)k); // of one token's experts in the arena, -1 for the CPU's
    for (size_t first = 0; first < rows.size(); first += (size_t)k) {
        for (size_t i = 0; i < (size_t)k; i++) {
            const auto it = slot_of.find(rows[first + i].expert);
            numbers[i] = it == slot_of.end() ? -1 : (int32_t)d.experts.arena().number(it->second);
        }
        // Rows that the CPU computes take room in the device's product too. No two of a token may be in one slot: devices
        // sort rows by expert and count on that.
        int32_t spare = 0;
        for (size_t i = 0; i < (size_t)k; i++) {
            if (numbers[i] < 0) {
                on_cpu.push_back(rows[first + i]);
                while (std::find(numbers.begin(), numbers.end(), spare) != numbers.end()) {
                    spare++;
                }
                exchange.slots[first + i] = spare++;
            } else {
                exchange.slots[first + i] = numbers[i];
            }
        }
    }
    ggml_status status = GGML_STATUS_SUCCESS;
    d.compute_pending = true;
    if (!slot_of.empty()) {
        ggml_backend_tensor_set_async(d.compute, group.numbers, exchange.slots, 0, rows.size() * sizeof(int32_t));
        if (n_copies > 0) {
            ggml_backend_event_record(d.experts_ready, d.copy);
            ggml_backend_event_wait(d.compute, d.experts_ready);
        }
        if (d.trace) {
            d.trace->begin(FSD_LANE_DEVICE, d.compute);
        }
        status = ggml_backend_graph_compute_async(d.compute, &view);
        if (d.trace) {
            uint64_t bytes = 0;
            for (size_t p = 0; p < group.products.size(); p++) {
                bytes += group.weight(p)->nb[2] * slot_of.size();
            }
            d.trace->end(FSD_LANE_DEVICE, d.compute, bytes);
        }
    }
    copy_ahead();
    if (status == GGML_STATUS_SUCCESS && !on_cpu.empty()) {
        const double start = Trace::now();
        status = compute_rows(d, group, graph, on_cpu, exchange);
        // Behind the device's part, in whose result these rows are only room.
        ggml_tensor to = *group.result;
        to.ne[1] *= to.ne[2];
        to.ne[2] = 1;
        for (size_t i = 0; i < on_cpu.size(); i++) {
            exchange.places[i] = on_cpu[i].t * k + on_cpu[i].j;
        }
        if (status == GGML_STATUS_SUCCESS) {
            status = d.put_rows(group.rows, to, exchange.rows, exchange.places, (int64_t)on_cpu.size());
        }
        if (d.trace) {
            uint64_t bytes = 0;
            for (size_t p = 0; p < group.products.size(); p++) {
                bytes += group.weight(p)->nb[2] * (missed.size() - n_copies);
            }
            d.trace->add(FSD_LANE_CPU, start, Trace::now(), bytes);
        }
    }
    std::lock_guard<std::mutex> lock(d.state_mutex);
    d.counters.expert_hits += n_hits;
    d.counters.experts_streamed += n_copies;
    d.counters.experts_on_cpu += missed.size() - n_copies;
    return status;
}

} // namespace fsd
