#include "experts.h"

#include "expert_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace fsd {

// --------------------------------------------------------------------------------------------------------------- groups

// Whether an operation computes each row by itself; a row is one expert's result for one token.
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

bool find_group(const Device &d, const ggml_cgraph *graph, int node, const LastReaders &readers, ExpertGroup &group) {
    const ggml_tensor *first = graph->nodes[node];
    if (!is_expert_product(first)) {
        return false;
    }
    group = {};
    group.node0 = node;
    group.ids = first->src[2];
    group.input = first->src[1];
    // The group ends with the last product of the same choice; only operations by row may lie between.
    for (int i = node; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (is_expert_product(n) && n->src[2] == group.ids) {
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
            // Allowed from outside: the products' input, their weights, and biases by expert.
            const bool product = is_expert_product(n),
                       weight = buffer_of(root_of(src)) && buffer_of(root_of(src))->weights;
            const bool bias = n->op == GGML_OP_ADD_ID && j == 1 && weight && src->view_src == nullptr;
            if (!(product && j == 0 && weight && src->view_src == nullptr) && !(product && src == group.input) &&
                !bias) {
                return false;
            }
        }
    }
    for (size_t i = 0; i < group.products.size(); i++) {
        const Weight *w = d.weights.of(group.weight(i));
        if (!w || w->place.core || w->place.n_pieces != 1) {
            return false;
        }
        group.layer = i == 0 ? w->shard : group.layer;
    }
    // Of the group only the last product may be read later.
    return std::none_of(graph->nodes + node, graph->nodes + group.node1, [&](const ggml_tensor *n) {
        const auto last = readers.find(n);
        return n != group.products.back() && last != readers.end() && last->second >= group.node1;
    });
}

ExpertArena lay_arena(const std::vector<ExpertGroup> &groups, size_t entries, size_t capacity) {
    ExpertArena arena;
    std::vector<size_t> sizes; // by product
    int64_t n_experts = 0;
    size_t unit = kAlign; // a slot is a multiple of the block size of each type in it
    for (const ExpertGroup &g : groups) {
        sizes.resize(std::max(sizes.size(), g.products.size()), 0);
        n_experts = std::max(n_experts, g.weight(0)->ne[2]);
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
    arena.table_bytes = align_up((size_t)n_experts * sizeof(int32_t));
    const size_t behind = arena.table_at(groups.size()) - arena.end;
    arena.end = capacity > behind ? (capacity - behind) / kAlign * kAlign : 0;
    arena.n_slots = arena.stride > 0 && arena.end > entries ? (arena.end - entries) / arena.stride : 0;
    return arena;
}

// --------------------------------------------------------------------------------------------------------------- running

namespace {

// The bytes of a tensor on the inner device.
ggml_tensor on_device(const ggml_tensor *t) {
    const Buffer *b = buffer_of(root_of(t));
    return raw_tensor(b->device_buffer(), b->device_address((size_t)((char *)t->data - b->base)), ggml_nbytes(t));
}

// Starts a copy of a tensor from the inner device.
void fetch(const ggml_tensor *t, ggml_backend_t stream, char *to) {
    const ggml_tensor raw = on_device(t);
    ggml_backend_tensor_get_async(stream, &raw, to, 0, ggml_nbytes(t));
}

int32_t expert_at(const char *ids, const ggml_tensor *t, int64_t j, int64_t token) {
    int32_t expert;
    memcpy(&expert, ids + j * t->nb[0] + token * t->nb[1], sizeof(expert));
    return expert;
}

// A group's data in staging memory.
struct Exchange {
    char *ids, *input; // copied from the device
    int32_t *slots;    // copied to the device: slot numbers in place of the chosen experts
    char *table;       // copied to the device: the slot numbers of all of the layer's experts
    char *rows;        // results of the CPU
    int64_t *places;   // their row numbers in the group's result
    Exchange(Device &d, const ExpertGroup &group) {
        const size_t sizes[] = {align_up(ggml_nbytes(group.ids)), align_up(ggml_nbytes(group.input)),
                                align_up(group.chosen() * sizeof(int32_t)),
                                align_up((size_t)group.weight(0)->ne[2] * sizeof(int32_t)),
                                align_up(group.chosen() * group.products.back()->nb[1])};
        const size_t all = std::accumulate(std::begin(sizes), std::end(sizes), (size_t)0);
        ids = d.inner.staging(all + group.chosen() * sizeof(int64_t));
        input = ids + sizes[0];
        slots = (int32_t *)(input + sizes[1]);
        table = input + sizes[1] + sizes[2];
        rows = table + sizes[3];
        places = (int64_t *)(rows + sizes[4]);
    }
};

// How long the CPU waits for a disk before it looks for what else there is to do.
constexpr std::chrono::milliseconds kLook{2};

// One run of a group: the choice is read back, missing experts are copied or left to the CPU, and both parts are started.
class GroupRun {
  public:
    GroupRun(Device &device, ExpertGroup &expert_group, const ggml_cgraph *g)
        : d(device), group(expert_group), graph(g), exchange(device, expert_group) {}

    ggml_status run(ggml_cgraph &view, const GroupHooks &hooks);

  private:
    void start_ahead(const ggml_cgraph &view);
    void begin_again();
    void read_choice();
    void look_up();
    void count_use();
    size_t n_to_copy();
    void take_slots();
    ggml_status read_missing(const GroupHooks &hooks);
    Taken copy_read(std::vector<int> &to_copy, std::vector<int> &on_cpu);
    bool take_slot(int expert);
    void start(ggml_cgraph &view, const GroupHooks &hooks);
    void copy_expert(int expert, int slot);
    bool singly() const { return d.cache.takes_singly(piece_of(0)); }
    int piece_of(size_t product) const { return d.weights.of(group.weight(product))->place.first_piece; }
    Taken all_read(int expert, std::chrono::milliseconds most);
    const char *matrix(size_t product, int expert) const;
    void assign_slots();
    ggml_status launch(ggml_cgraph &view, uint64_t bytes);
    void give_numbers();
    ggml_status compute_on_cpu(const std::function<void()> &start_others);
    uint64_t weight_bytes(size_t n_experts) const;

    Device &d;
    ExpertGroup &group;
    const ggml_cgraph *graph;
    const Exchange exchange;
    std::vector<ExpertRow> rows;             // in the order of the group's result
    std::vector<int> wanted;                 // chosen experts without repetition, in order of appearance
    std::vector<int> missed;                 // those that are not cached, most often chosen first
    std::unordered_map<int, int> slot_of;    // of experts that the device computes
    std::vector<std::pair<int, int>> copies; // to start: experts and their slots
    std::vector<ExpertRow> cpu_rows;         // by expert
    size_t n_hits = 0, n_copies = 0;         // of wanted experts
    ggml_status launched = GGML_STATUS_SUCCESS;
};

ggml_status GroupRun::run(ggml_cgraph &view, const GroupHooks &hooks) {
    // If the device can find the slots itself, and they were right the last time.
    const bool ahead = group.n_lookup > 0 && d.experts.has_table(group.layer) && d.inner.can_fetch_ahead();
    if (ahead) {
        start_ahead(view);
    } else {
        fetch(group.ids, d.inner.compute, exchange.ids);
        if (!group.streamed) {
            fetch(group.input, d.inner.compute, exchange.input);
        }
        d.inner.compute_pending = true;
        d.inner.synchronize();
    }
    read_choice();
    look_up();
    if (ahead && missed.empty()) {
        hooks.copy_ahead();
        count_use();
        return launched;
    }
    if (ahead) {
        begin_again();
    }
    if (singly()) {
        const ggml_status read = read_missing(hooks);
        if (read != GGML_STATUS_SUCCESS) {
            ggml_backend_synchronize(d.inner.copy); // who finds these experts in the cache waits for no copies
            return read;
        }
    } else {
        take_slots();
    }
    assign_slots();
    const auto start_others = [&] { start(view, hooks); };
    ggml_status computed = GGML_STATUS_SUCCESS;
    if (cpu_rows.empty()) {
        start_others();
    } else {
        computed = compute_on_cpu(start_others);
    }
    count_use();
    return launched == GGML_STATUS_SUCCESS ? computed : launched;
}

void GroupRun::count_use() {
    d.counters.update([&](fsd_stats &c) {
        c.expert_hits += n_hits;
        c.experts_streamed += n_copies;
        c.experts_on_cpu += missed.size() - n_copies;
    });
}

// Starts the group before the CPU has the choice, which is copied beside it or, with one queue, before it.
void GroupRun::start_ahead(const ggml_cgraph &view) {
    fetch(group.ids, d.inner.begin_fetch(), exchange.ids);
    d.inner.end_fetch();
    ggml_cgraph ahead = view;
    ahead.nodes -= group.n_lookup;
    ahead.n_nodes += group.n_lookup;
    ahead.uid = group.lookup_uid;
    launched = launch(ahead, weight_bytes((size_t)group.chosen()));
    d.counters.update([](fsd_stats &c) { c.experts_ahead++; });
    d.inner.wait_for_fetch();
}

// An expert was missing. The group's results may lie where its input was, so the device has kept that elsewhere.
void GroupRun::begin_again() {
    const ggml_tensor input = on_device(group.input);
    const size_t bytes = ggml_nbytes(&input);
    const ggml_tensor kept = raw_tensor(d.ring.buffer(), d.ring.base() + d.experts.arena().input_at(), bytes);
    ggml_backend_tensor_get_async(d.inner.compute, &kept, exchange.input, 0, bytes);
    d.inner.synchronize(); // now no slot is read that gets another expert
    d.inner.upload(d.inner.compute, input.buffer, input.data, exchange.input, bytes);
    d.inner.compute_pending = true;
    d.experts.set_table(group.layer, false);
    d.counters.update([](fsd_stats &c) { c.experts_again++; });
}

// Starts the copies and the device's part.
void GroupRun::start(ggml_cgraph &view, const GroupHooks &hooks) {
    for (const auto &[expert, slot] : copies) {
        copy_expert(expert, slot);
    }
    launched = GGML_STATUS_SUCCESS;
    if (!slot_of.empty()) {
        give_numbers();
        if (n_copies > 0) {
            d.inner.wait_for_copies();
        }
        launched = launch(view, weight_bytes(slot_of.size()));
    }
    hooks.copy_ahead();
}

// The CPU has waited for the choice: staging memory is free, and no slot is read but by what was started ahead.
void GroupRun::read_choice() {
    d.ring.computed(d.ring.next_use());
    for (int64_t t = 0; t < group.ids->ne[1]; t++) {
        for (int64_t j = 0; j < group.ids->ne[0]; j++) {
            const int32_t expert = expert_at(exchange.ids, group.ids, j, t);
            rows.push_back({j, t, expert});
            d.experts.count(group.layer, expert);
            if (std::find(wanted.begin(), wanted.end(), expert) == wanted.end()) {
                wanted.push_back(expert);
            }
        }
    }
}

void GroupRun::look_up() {
    d.experts.begin_use();
    for (int expert : wanted) {
        const int slot = d.experts.find(group.layer, expert);
        if (slot >= 0) {
            slot_of[expert] = slot;
        } else {
            missed.push_back(expert);
        }
    }
    n_hits = slot_of.size();
    // Experts that are chosen often are worth a copy: they will be chosen again.
    std::stable_sort(missed.begin(), missed.end(),
                     [&](int a, int b) { return d.experts.heat(group.layer, a) > d.experts.heat(group.layer, b); });
}

size_t GroupRun::n_to_copy() {
    const size_t n = missed.size();
    return group.streamed ? n : std::min(n, d.experts.n_to_copy(n, d.plan.expert_stream_share));
}

// Gives an expert a slot in the cache. False: there is none for it.
bool GroupRun::take_slot(int expert) {
    const int slot = d.experts.take(group.layer, expert, group.streamed);
    if (slot >= 0) {
        slot_of[expert] = slot;
        n_copies++;
    }
    return slot >= 0;
}

void GroupRun::take_slots() {
    const size_t wanted_copies = n_to_copy();
    while (n_copies < wanted_copies && take_slot(missed[n_copies])) {
        const int expert = missed[n_copies - 1];
        copies.emplace_back(expert, slot_of.at(expert));
    }
}

// The same where experts come from disk: they are copied as they are read. Those that the CPU computes are all in host memory
// in the end, until the next begin_use().
ggml_status GroupRun::read_missing(const GroupHooks &hooks) {
    d.cache.experts().begin_use();
    const auto first_on_cpu = missed.begin() + (ptrdiff_t)n_to_copy();
    std::vector<int> to_copy(missed.begin(), first_on_cpu), on_cpu(first_on_cpu, missed.end());
    for (;;) {
        const Taken taken = copy_read(to_copy, on_cpu);
        const ggml_status status = taken == Taken::yes ? GGML_STATUS_SUCCESS : hooks.wait(taken);
        if (taken == Taken::yes || status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
}

// Queues the reads of all experts that are not there, as far as there is room, copies those that are, and waits a little for
// the first of the others.
Taken GroupRun::copy_read(std::vector<int> &to_copy, std::vector<int> &on_cpu) {
    for (const std::vector<int> *list : {&to_copy, &on_cpu}) {
        for (int expert : *list) {
            for (size_t p = 0; p < group.products.size(); p++) {
                if (d.cache.experts().ask(piece_of(p), expert, true) == Taken::failed) {
                    return Taken::failed;
                }
            }
        }
    }
    constexpr std::chrono::milliseconds none{0};
    std::vector<std::pair<int, int>> copied;
    std::vector<int> left;
    int missing = -1;
    Taken all = Taken::yes;
    for (int expert : to_copy) {
        const Taken taken = all_read(expert, none);
        if (taken == Taken::yes && take_slot(expert)) {
            copy_expert(expert, slot_of.at(expert));
            for (size_t p = 0; p < group.products.size(); p++) {
                copied.emplace_back(piece_of(p), expert);
            }
        } else if (taken == Taken::yes) {
            on_cpu.push_back(expert);
        } else {
            all = std::max(all, taken);
            left.push_back(expert);
        }
    }
    d.cache.experts().copied(copied);
    to_copy = std::move(left);
    for (size_t i = 0; i < on_cpu.size() && all != Taken::failed; i++) {
        const Taken taken = all_read(on_cpu[i], none);
        missing = taken == Taken::yes || missing >= 0 ? missing : on_cpu[i];
        all = std::max(all, taken);
    }
    missing = to_copy.empty() ? missing : to_copy[0];
    return all == Taken::not_yet ? std::max(all, all_read(missing, kLook)) : all;
}

// Whether all matrices of an expert are in host memory. Waits `most` for one that is not.
Taken GroupRun::all_read(int expert, std::chrono::milliseconds most) {
    const char *data = nullptr;
    for (size_t p = 0; p < group.products.size(); p++) {
        const Taken taken = d.cache.experts().take(piece_of(p), expert, most, data);
        if (taken != Taken::yes) {
            return taken;
        }
    }
    return Taken::yes;
}

// A matrix in host memory, with what lies behind it.
const char *GroupRun::matrix(size_t product, int expert) const {
    if (!singly()) {
        const ggml_tensor *w = group.weight(product);
        return (const char *)w->data + (size_t)expert * w->nb[2];
    }
    const char *data = nullptr;
    const Taken taken = d.cache.experts().take(piece_of(product), expert, std::chrono::milliseconds(0), data);
    GGML_ASSERT(taken == Taken::yes);
    return data;
}

// Kernels read past the end of a row, so each matrix is followed by the first weights of the next expert, or zeros.
void GroupRun::copy_expert(int expert, int slot) {
    const ExpertArena &arena = d.experts.arena();
    d.ring.before_fill();
    if (d.inner.trace) {
        d.inner.trace->begin(FSD_LANE_COPY, d.inner.copy);
    }
    uint64_t bytes = 0;
    for (size_t p = 0; p < group.products.size(); p++) {
        const ggml_tensor *w = group.weight(p);
        const size_t size = w->nb[2] + ggml_row_size(w->type, kRowRun);
        const size_t there = std::min(size, (size_t)(w->ne[2] - expert) * w->nb[2]);
        char *to = d.ring.base() + arena.at(slot) + arena.parts[p];
        d.inner.upload(d.inner.copy, d.ring.buffer(), to, matrix(p, expert), there);
        d.inner.upload_zeros(d.inner.copy, d.ring.buffer(), to + there, size - there);
        bytes += there;
    }
    if (d.inner.trace) {
        d.inner.trace->end(FSD_LANE_COPY, d.inner.copy, bytes);
    }
    d.counters.update([&](fsd_stats &c) {
        c.copies++;
        c.copied_bytes += bytes;
    });
}

// Rows that the CPU computes take room in the device's product, too, so they get slots that no other row of the token has:
// devices sort rows by expert and rely on a token choosing each expert at most once.
void GroupRun::assign_slots() {
    const size_t k = (size_t)group.ids->ne[0];
    std::vector<int32_t> numbers(k); // of one token's rows; -1: computed by the CPU
    for (size_t first = 0; first < rows.size(); first += k) {
        for (size_t i = 0; i < k; i++) {
            const auto it = slot_of.find(rows[first + i].expert);
            numbers[i] = it == slot_of.end() ? -1 : (int32_t)d.experts.arena().number(it->second);
        }
        int32_t spare = 0;
        for (size_t i = 0; i < k; i++) {
            if (numbers[i] < 0) {
                cpu_rows.push_back(rows[first + i]);
                while (std::find(numbers.begin(), numbers.end(), spare) != numbers.end()) {
                    spare++;
                }
                exchange.slots[first + i] = spare++;
            } else {
                exchange.slots[first + i] = numbers[i];
            }
        }
    }
}

uint64_t GroupRun::weight_bytes(size_t n_experts) const {
    uint64_t bytes = 0;
    for (size_t p = 0; p < group.products.size(); p++) {
        bytes += group.weight(p)->nb[2] * n_experts;
    }
    return bytes;
}

// The slots of the chosen experts; and of all of the layer's, if the device may look the next ones up.
void GroupRun::give_numbers() {
    d.inner.compute_pending = true;
    d.inner.upload(d.inner.compute, group.numbers->buffer, group.numbers->data, exchange.slots,
                   rows.size() * sizeof(int32_t));
    if (group.n_lookup > 0 && missed.empty()) {
        const std::vector<int32_t> numbers = d.experts.numbers(group.layer, (size_t)group.weight(0)->ne[2]);
        const size_t bytes = numbers.size() * sizeof(numbers[0]);
        memcpy(exchange.table, numbers.data(), bytes);
        d.inner.upload(d.inner.compute, d.ring.buffer(), d.ring.base() + d.experts.arena().table_at(group.place),
                       exchange.table, bytes);
        d.experts.set_table(group.layer, true);
    }
}

ggml_status GroupRun::launch(ggml_cgraph &view, uint64_t bytes) {
    d.inner.compute_pending = true;
    if (d.inner.trace) {
        d.inner.trace->begin(FSD_LANE_DEVICE, d.inner.compute);
    }
    const ggml_status status = ggml_backend_graph_compute_async(d.inner.compute, &view);
    if (d.inner.trace) {
        d.inner.trace->end(FSD_LANE_DEVICE, d.inner.compute, bytes);
    }
    return status;
}

// Computes the CPU's rows and writes them into the device's result, behind the device's part in the compute stream.
ggml_status GroupRun::compute_on_cpu(const std::function<void()> &start_others) {
    const double start = Trace::now();
    std::stable_sort(cpu_rows.begin(), cpu_rows.end(),
                     [](const ExpertRow &a, const ExpertRow &b) { return a.expert < b.expert; });
    const auto find_matrix = [this](size_t product, int expert) { return matrix(product, expert); };
    ggml_status status =
        ExpertRows(d, group, graph, cpu_rows, find_matrix).compute(exchange.input, exchange.rows, start_others);
    ggml_tensor to = *group.result;
    to.ne[1] *= to.ne[2];
    to.ne[2] = 1;
    for (size_t i = 0; i < cpu_rows.size(); i++) {
        exchange.places[i] = cpu_rows[i].t * group.ids->ne[0] + cpu_rows[i].j;
    }
    if (status == GGML_STATUS_SUCCESS && launched == GGML_STATUS_SUCCESS) {
        status = d.inner.put_rows(group.rows, to, exchange.rows, exchange.places, (int64_t)cpu_rows.size());
    }
    if (d.inner.trace) {
        d.inner.trace->add(FSD_LANE_CPU, start, Trace::now(), weight_bytes(missed.size() - n_copies));
    }
    return status;
}

} // namespace

std::vector<uint32_t> count_chosen(Device &d, const ggml_tensor *chosen, int64_t n_experts) {
    const char *ids = d.inner.staging(ggml_nbytes(chosen));
    fetch(chosen, d.inner.compute, (char *)ids);
    d.inner.compute_pending = true;
    d.inner.synchronize();
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

ggml_status run_experts(Device &d, ExpertGroup &group, const ggml_cgraph *graph, ggml_cgraph &view,
                        const GroupHooks &hooks) {
    return GroupRun(d, group, graph).run(view, hooks);
}

} // namespace fsd
