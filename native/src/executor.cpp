#include "executor.h"

#include "experts.h"
#include "graph_compiler.h"
#include "kv_transfer.h"

#include <algorithm>
#include <cstring>

namespace fsd {

static constexpr int kRunAhead = 2;
// About how many segments lie between a layer's attention and its router.
static constexpr size_t kSegmentsToRouter = 4;

// ---------------------------------------------------------------------------------------------------------------- ring

void Device::reset_ring() {
    if (ring.entries.empty()) {
        return;
    }
    ggml_backend_synchronize(inner.copy);
    inner.synchronize();
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

// Lays the ring out for a program's streamed steps, if it is not already.
void Device::lay_out_ring(const Program &p) {
    if (ring.entries == p.entries && ring.entry_capacity == p.entry_capacity &&
        (ring.entries.empty() || ring.next_use % ring.entries.size() == 0)) {
        return;
    }
    reset_ring();
    ring.entries = p.entries;
    ring.slots = lay_ring(p.entry_bytes, p.entry_capacity);
    ring.entry_capacity = p.entry_capacity;
    for (size_t i = 0; i < ring.entries.size(); i++) {
        ring.ready.push_back(ggml_backend_event_new(inner.dev));
        ring.done.push_back(ggml_backend_event_new(inner.dev));
    }
    ring.held.assign(ring.entries.size(), {});
}

// Copies the range [from, to) of a piece to its place `at` in the ring, and the padding behind its last byte.
void Device::copy_piece(const Piece &p, size_t at, size_t from, size_t to) {
    const char *source = weights[p.tensor].host + p.host_offset;
    inner.upload(inner.copy, ring.buffer.get(), ring.base + at + from, source + from, to - from);
    if (to == p.bytes) {
        inner.upload_zeros(inner.copy, ring.buffer.get(), ring.base + at + to, p.padded - to);
    }
}

// Copies the experts that the layer's router chose last and that the entry's place in the ring lacks; cached experts are
// copied within the device. Returns the bytes copied from the host. Kernels read past the end of a row, so the first
// weights of the next expert are copied, too.
uint64_t Device::copy_experts(size_t entry) {
    const RingEntry &e = ring.entries[entry];
    const Piece &p = layout.pieces[e.pieces[0]];
    const ggml_tensor &shape = weights[p.tensor].shape;
    const size_t each = shape.nb[2], n = shape.ne[2], run = ggml_row_size(shape.type, kRowRun);
    const std::vector<uint32_t> &chosen = experts.latest_choice((uint32_t)e.layer);
    std::vector<bool> &held = ring.held[entry];
    held.resize(n);
    uint64_t bytes = 0;
    size_t from = n; // start of a run of neighbours to copy from the host; n: none
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
            // The slot has the padding of the last expert, too.
            const size_t size = std::min(each + run, p.padded - i * each);
            char *cached = ring.base + experts.arena().at(slot) + experts.arena().parts[e.product];
            ggml_tensor src = raw_tensor(ring.buffer.get(), cached, size);
            ggml_tensor dst = raw_tensor(ring.buffer.get(), ring.base + ring.slots[entry].offset + i * each, size);
            ggml_backend_tensor_copy_async(inner.copy, inner.copy, &src, &dst);
        }
    }
    return bytes;
}

// Starts every copy whose place in the ring is free, or will be once queued work is done. Never waits.
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
                return; // a queued step has yet to use the place
            }
            ggml_backend_event_wait(inner.copy, ring.done[previous % n]);
        }
        if (inner.trace) {
            inner.trace->begin(FSD_LANE_COPY, inner.copy);
        }
        size_t at = ring.slots[i].offset;
        uint64_t bytes = 0;
        if (ring.entries[i].layer >= 0) {
            ring.held[i].clear();
            bytes = copy_experts(i); // a prediction: the router may not have chosen yet
        } else {
            for (int k : ring.entries[i].pieces) {
                copy_piece(layout.pieces[k], at, 0, layout.pieces[k].bytes);
                at += layout.pieces[k].padded;
                bytes += layout.pieces[k].bytes;
            }
        }
        if (inner.trace) {
            inner.trace->end(FSD_LANE_COPY, inner.copy, bytes);
        }
        ggml_backend_event_record(ring.ready[i], inner.copy);
        ring.next_copy++;
        counters.update([&](fsd_stats &c) {
            c.copies++;
            c.copied_bytes += bytes;
        });
    }
}

// ------------------------------------------------------------------------------------------------------------- running

namespace {

class Executor {
  public:
    Executor(Device &device, const ggml_cgraph *g)
        : d(device), graph(g), access(*device.access(g)), kv(device, g, access) {}
    ~Executor();
    Executor(const Executor &) = delete;
    Executor &operator=(const Executor &) = delete;

    ggml_status run();

  private:
    bool program_is_valid() const { return program && program->key.generation == d.residency_generation; }
    bool load_program();
    Program *find_or_compile(std::string &why);
    void adopt_expert_cache();
    bool wait_for_frame(bool &timed);
    ggml_status run_cpu(Segment &s);
    ggml_status give_back(Segment &s);
    ggml_status run_gpu(const Segment &s);
    void copy_missing_experts(const Segment &s);
    bool experts_first(size_t at) const;
    void copy_ahead(size_t at);
    void finish_segment();
    void limit_queue(uint64_t start_ns, bool timed);
    bool apply_requests();
    ggml_status stop(ggml_status status);

    Device &d;
    const ggml_cgraph *graph;
    const CacheAccess &access;
    KvTransfer kv;
    Program *program = nullptr;
    size_t next = 0;                           // segment of the program
    int node = 0, piece = 0;                   // that segment's first node and row piece: where a new program starts
    const ggml_tensor *known_choice = nullptr; // the latest choice of experts, which all products of a layer share
    ggml_backend_event_t queued[kRunAhead] = {};
    uint64_t n_queued = 0;
};

Executor::~Executor() {
    for (ggml_backend_event_t e : queued) {
        ggml_backend_event_free(e);
    }
}

// What was copied ahead is of no use to a later graph.
ggml_status Executor::stop(ggml_status status) {
    d.inner.synchronize();
    d.reset_ring();
    return status;
}

ggml_status Executor::run() {
    if (!d.prepare_caches(access)) {
        GGML_LOG_ERROR("frameshard: no memory for the KV cache of a context of this length\n");
        return GGML_STATUS_ALLOC_FAILED;
    }
    while (node < graph->n_nodes) {
        bool timed = false;
        if (d.pacing.active() && !wait_for_frame(timed)) {
            return stop(GGML_STATUS_ABORTED);
        }
        if (!program_is_valid() && !load_program()) {
            return GGML_STATUS_ALLOC_FAILED;
        }
        Segment &s = program->segments[next];
        const uint64_t start_ns = clock_ns();
        const ggml_status status = s.cpu ? run_cpu(s) : run_gpu(s);
        if (status != GGML_STATUS_SUCCESS) {
            return stop(status);
        }
        finish_segment();
        limit_queue(start_ns, timed);
        if (!apply_requests()) {
            return stop(GGML_STATUS_ABORTED);
        }
    }
    return GGML_STATUS_SUCCESS;
}

Program *Executor::find_or_compile(std::string &why) {
    const ProgramKey key = program_key(d, graph, node, piece);
    if (Program *known = d.programs.find(key)) {
        return known;
    }
    d.inner.synchronize(); // queued work may read the shadow graph of a program that is dropped
    d.programs.make_room(key.generation);
    std::unique_ptr<Program> compiled = compile_graph(d, d.inner.keys, graph, key, why);
    if (!compiled) {
        return nullptr;
    }
    d.counters.update([&](fsd_stats &c) { c.recompiles++; });
    return d.programs.add(std::move(compiled));
}

// Gets a program for the residency of now, and makes the ring ready for it.
bool Executor::load_program() {
    do {
        if (!d.ensure_ring() || !d.ensure_window()) {
            GGML_LOG_ERROR("frameshard: the inner device refused memory for the ring or the KV window\n");
            return false;
        }
    } while (d.ring.capacity == 0 && d.slabs.size() < d.layout.slab_sizes.size()); // the window may have evicted slabs
    std::string why;
    program = find_or_compile(why);
    if (!program) {
        GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
        return false;
    }
    next = 0;
    d.lay_out_ring(*program);
    adopt_expert_cache();
    kv.begin(*program); // a change of residency has waited for all copies
    copy_ahead(0);
    return true;
}

void Executor::adopt_expert_cache() {
    const bool uses_ring = !program->groups.empty() || !program->entries.empty();
    if (uses_ring && !(program->arena == d.experts.arena())) {
        ggml_backend_synchronize(d.inner.copy);
        d.inner.synchronize();
        d.experts.adopt(program->arena);
    }
}

// Waits until the next segment may start beside the host's frames; false when the graph is to be aborted. `timed` is set
// when the pacer wants to know how long the segment took.
bool Executor::wait_for_frame(bool &timed) {
    const auto hurry = [this] {
        d.host->read_frame_budget();
        if (d.host != &d && d.host->request.pending() && d.host->request.bytes() < d.host->ledger.used()) {
            d.abort.store(true); // borrowed memory is given back first
        }
        return d.abort.load() || d.request.pending();
    };
    const Segment *segment = program_is_valid() ? &program->segments[next] : nullptr;
    timed = false;
    if (!hurry() && !(segment && segment->cpu)) {
        if (segment && segment->entry >= 0) {
            ggml_backend_event_synchronize(d.ring.ready[segment->entry]); // its copies should not take from free time
        }
        timed = d.pacing.before_step(hurry);
    }
    if (d.abort.load()) {
        return false;
    }
    if (d.request.pending()) {
        d.apply_budget();
    }
    d.host->answer_frame_budget();
    return true;
}

// Starts the next copies and moves on to the next segment.
void Executor::finish_segment() {
    next++;
    if (!experts_first(next)) {
        copy_ahead(next);
    }
    d.counters.update([&](fsd_stats &c) { c.steps++; });
    const bool last = next == program->segments.size();
    node = last ? graph->n_nodes : program->segments[next].node0;
    piece = last ? 0 : program->segments[next].piece;
}

// Waits until at most kRunAhead segments are queued, and for this one if it is timed.
void Executor::limit_queue(uint64_t start_ns, bool timed) {
    ggml_backend_event_t &event = queued[n_queued++ % kRunAhead];
    if (event) {
        ggml_backend_event_synchronize(event);
    } else {
        event = ggml_backend_event_new(d.inner.dev);
    }
    ggml_backend_event_record(event, d.inner.compute);
    if (timed) {
        ggml_backend_event_synchronize(event);
        d.pacing.after_step(start_ns, clock_ns());
    }
}

// Does what other threads have asked for since the last segment; false when the graph is to be aborted.
bool Executor::apply_requests() {
    if (d.host != &d && d.host->request.pending()) {
        if (d.host->request.bytes() < d.host->ledger.used()) {
            d.abort.store(true); // borrowed memory is given back first
        } else {
            d.host->apply_budget();
        }
    }
    if (d.abort.load()) {
        return false;
    }
    if (d.request.pending()) {
        d.apply_budget();
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------- segments

// Starts the copies that can be started, for segments from `at` on.
void Executor::copy_ahead(size_t at) {
    kv.fill_panes(*program, at);
    d.pump_copies();
}

// Whether the copies for segments from `at` on should wait for a router: it chooses soon, and all that is needed until then
// is on its way. Copies run in order, so the chosen experts would wait behind the weights of later layers, and the copy
// engine would be idle while the experts are computed.
bool Executor::experts_first(size_t at) const {
    uint64_t uses = d.ring.next_use;
    size_t blocks = 0;
    for (size_t i = at; i < std::min(at + kSegmentsToRouter, program->segments.size()); i++) {
        const Segment &s = program->segments[i];
        uses += s.entry >= 0;
        blocks += s.block != nullptr;
        if (uses > d.ring.next_copy || !kv.filled_ahead(blocks)) {
            return false;
        }
        if (s.group >= 0) {
            return true;
        }
    }
    return false;
}

// Copies the chosen experts of a streamed tensor that pump_copies() did not predict.
void Executor::copy_missing_experts(const Segment &s) {
    const int layer = d.ring.entries[s.entry].layer;
    if (s.chosen != known_choice) {
        known_choice = s.chosen;
        d.experts.set_choice(layer, count_chosen(d, s.chosen, graph->nodes[s.node0]->src[0]->ne[2]));
    }
    d.pump_copies();
    const uint64_t bytes = d.copy_experts(s.entry);
    ggml_backend_event_record(d.ring.ready[s.entry], d.inner.copy);
    d.counters.update([&](fsd_stats &c) { c.copied_bytes += bytes; });
}

ggml_status Executor::run_gpu(const Segment &s) {
    ggml_cgraph view = *program->shadow;
    view.nodes += s.shadow0;
    view.n_nodes = s.shadow1 - s.shadow0;
    view.n_leafs = 0;
    view.leafs = nullptr;
    view.uid = s.uid;
    if (s.group >= 0) {
        return run_experts(d, program->groups[s.group], graph, view, [&] { copy_ahead(next + 1); });
    }
    if (s.chosen) {
        copy_missing_experts(s);
    }
    if (s.entry >= 0) {
        ggml_backend_event_wait(d.inner.compute, d.ring.ready[s.entry]);
    }
    if (d.inner.trace) {
        d.inner.trace->begin(FSD_LANE_DEVICE, d.inner.compute);
    }
    if (s.block) {
        kv.before(s);
    }
    const ggml_status status = ggml_backend_graph_compute_async(d.inner.compute, &view);
    d.inner.compute_pending = true;
    if (s.block) {
        kv.after(s);
    }
    if (d.inner.trace) {
        d.inner.trace->end(FSD_LANE_DEVICE, d.inner.compute, s.bytes);
    }
    if (s.entry >= 0) {
        ggml_backend_event_record(d.ring.done[s.entry], d.inner.compute);
        d.ring.next_use++;
    }
    return status;
}

// Bytes of staging memory for what a CPU segment of few tokens gives back; 0 where it is copied instead.
size_t staging_for(const Span &out) {
    constexpr size_t kMost = 256 << 10; // kernels read host memory more slowly than copies do
    return out.buffer->cache || out.bytes > kMost || out.bytes % sizeof(float) ? 0 : kAlign + align_up(out.bytes);
}

ggml_status Executor::run_cpu(Segment &s) {
    d.inner.synchronize();
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
    if (status == GGML_STATUS_SUCCESS) {
        status = give_back(s);
    }
    if (d.inner.trace) {
        d.inner.trace->add(FSD_LANE_CPU, start, Trace::now(), s.bytes);
    }
    d.counters.update([&](fsd_stats &c) { c.cpu_segments++; });
    return status;
}

// Writes the results of a CPU segment to the inner device.
ggml_status Executor::give_back(Segment &s) {
    size_t staged = 0;
    for (const Span &out : s.out) {
        staged += staging_for(out);
    }
    char *stage = staged > 0 ? d.inner.staging(staged) : nullptr;
    ggml_status status = GGML_STATUS_SUCCESS;
    s.rows.resize(s.out.size());
    for (size_t i = 0; i < s.out.size(); i++) {
        const Span &out = s.out[i];
        each_inner(*out.buffer, out.offset, out.bytes, [&](ggml_tensor *raw, size_t from, size_t n) {
            const char *made = out.buffer->base + out.offset + from;
            if (out.buffer->cache && raw) {
                d.inner.upload(nullptr, raw->buffer, raw->data, made, n); // may lie in host memory
            } else if (raw && staging_for(out) > 0 && status == GGML_STATUS_SUCCESS) {
                int64_t *place = (int64_t *)stage; // one row
                *place = 0;
                memcpy(stage + kAlign, made, n);
                ggml_tensor to = *raw;
                to.ne[0] = (int64_t)(n / sizeof(float));
                status = d.inner.put_rows(s.rows[i], to, stage + kAlign, place, 1);
                stage += staging_for(out);
            } else if (raw) {
                d.inner.upload(d.inner.compute, raw->buffer, raw->data, made, n);
            }
        });
    }
    d.inner.compute_pending = d.inner.compute_pending || !s.out.empty();
    return status;
}

} // namespace

ggml_status run_graph(Device &d, const ggml_cgraph *graph) {
    std::lock_guard<std::mutex> graph_lock(d.graph_mutex);
    if (!d.committed) {
        GGML_LOG_ERROR("frameshard: a graph was run before fsd_commit\n");
        return GGML_STATUS_FAILED;
    }
    if (d.abort.load()) {
        return GGML_STATUS_ABORTED;
    }
    if (d.request.pending()) {
        d.apply_budget();
    }
    d.finish_fills();
    d.counters.update([&](fsd_stats &c) { c.graphs++; });
    return Executor(d, graph).run();
}

} // namespace fsd
