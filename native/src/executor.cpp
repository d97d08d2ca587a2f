#include "executor.h"

#include "experts.h"
#include "graph_compiler.h"
#include "kv_transfer.h"
#include "last_error.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsd {

static constexpr int kRunAhead = 2;
// About how many segments lie between a layer's attention and its router.
static constexpr size_t kSegmentsToRouter = 4;
// Graphs of so many tokens use the driver's libraries.
static constexpr int64_t kPromptTokens = 64;

static ggml_status disk_failed(const std::string &why) {
    last_error() = why;
    GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
    return GGML_STATUS_FAILED;
}

namespace {

class Executor {
  public:
    Executor(Device &device, const ggml_cgraph *g)
        : d(device), graph(g), access(device.kv.access(g)), kv(device, g, access) {}
    ~Executor();
    Executor(const Executor &) = delete;
    Executor &operator=(const Executor &) = delete;

    ggml_status run();

  private:
    bool program_is_valid() const { return program && program->key.generation == d.residency_generation; }
    bool load_program();
    Program *find_or_compile(std::string &why);
    void adopt_expert_cache();
    ggml_status wait_for_frame(bool &timed);
    ggml_status bring_weights();
    ggml_status run_cpu(Segment &s);
    void take_inputs(const Segment &s);
    ggml_status give_back(Segment &s);
    ggml_status run_gpu(const Segment &s);
    ggml_status copy_missing_experts(const Segment &s);
    using Time = std::chrono::steady_clock::time_point;
    ggml_status wait_for_experts(Taken taken, Time end);
    bool experts_first(size_t at) const;
    void copy_ahead(size_t at);
    void meter_copies();
    void copy_beside(const Segment &s);
    void finish_segment();
    bool waits_soon(const Segment &done) const;
    void limit_queue(uint64_t start_ns, bool timed);
    bool apply_requests();
    ggml_status stop(ggml_status status);

    Device &d;
    const ggml_cgraph *graph;
    const KvAccess &access;
    KvTransfer kv;
    Program *program = nullptr;
    size_t next = 0;                           // segment of the program
    int node = 0, piece = 0;                   // that segment's first node and row piece: where a new program starts
    bool again = false;                        // the segment ended before it computed anything: the program is old
    const ggml_tensor *known_choice = nullptr; // the latest choice of experts, which all products of a layer share
    // Where copies share one queue with all else, what the CPU waits for would stand behind all that were queued before. So
    // they are queued while the CPU computes: for each byte of weights that it reads so many bytes of copies. 0: not metered.
    double copies_per_byte = 0;
    double owed_bytes = 0; // of copies that are not queued yet
    ggml_backend_event_t queued[kRunAhead] = {};
    uint64_t uses[kRunAhead] = {}; // of the ring, by `queued`
    uint64_t n_queued = 0;
};

Executor::~Executor() {
    for (ggml_backend_event_t e : queued) {
        d.inner.give_back(e);
    }
    d.inner.large_copies.store(false);
}

// What was copied ahead is of no use to a later graph.
ggml_status Executor::stop(ggml_status status) {
    d.inner.synchronize();
    d.ring.reset();
    return status;
}

ggml_status Executor::run() {
    if (d.kv.keep_together(access)) {
        d.update_floor();
    }
    if (!d.take_evicting([this] { return d.kv.prepare(access); })) {
        GGML_LOG_ERROR("frameshard: no memory for the KV cache of a context of this length\n");
        return GGML_STATUS_ALLOC_FAILED;
    }
    while (node < graph->n_nodes) {
        bool timed = false;
        if (d.pacing.active()) {
            const ggml_status waited = wait_for_frame(timed);
            if (waited != GGML_STATUS_SUCCESS) {
                return stop(waited);
            }
        }
        if (!program_is_valid() && !load_program()) {
            return stop(GGML_STATUS_ALLOC_FAILED);
        }
        Segment &s = program->segments[next];
        if (s.entry >= 0 && d.cache.is_open() && !d.ring.has_next()) {
            const ggml_status read = bring_weights();
            if (read != GGML_STATUS_SUCCESS) {
                return stop(read);
            }
            if (!program_is_valid()) {
                continue; // a budget was applied meanwhile
            }
        }
        const uint64_t start_ns = clock_ns();
        const ggml_status status = s.cpu ? run_cpu(s) : run_gpu(s);
        if (std::exchange(again, false)) {
            continue;
        }
        if (status != GGML_STATUS_SUCCESS) {
            return stop(status);
        }
        finish_segment();
        if (timed || !waits_soon(s)) {
            limit_queue(start_ns, timed);
        }
        if (!apply_requests()) {
            return stop(GGML_STATUS_ABORTED);
        }
    }
    return GGML_STATUS_SUCCESS;
}

Program *Executor::find_or_compile(std::string &why) {
    const ProgramKey key = program_key(d, graph, node, piece);
    if (Program *known = d.programs.find(key, graph)) {
        return known;
    }
    d.inner.synchronize(); // queued work may read the shadow graph of a program that is dropped
    auto compiled = compile_graph(d, d.inner.keys, graph, key, d.programs.make_room(key.generation), why);
    if (!compiled) {
        return nullptr;
    }
    d.counters.update([&](fsd_stats &c) { c.recompiles++; });
    return d.programs.add(std::move(compiled));
}

// Gets a program for the residency of now, and makes the ring ready for it.
bool Executor::load_program() {
    do {
        if (!d.ensure_ring() || !d.take_evicting([this] { return d.kv.ensure_window(); })) {
            GGML_LOG_ERROR("frameshard: the inner device refused memory for the ring or the KV window\n");
            return false;
        }
    } while (d.ring.capacity() == 0 && !d.arena.full()); // the window may have evicted slabs
    std::string why;
    program = find_or_compile(why);
    if (!program) {
        GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
        return false;
    }
    next = 0;
    d.ring.lay_out(*program);
    std::fill_n(uses, kRunAhead, 0); // the ring may have begun anew
    adopt_expert_cache();
    kv.begin(*program); // a change of residency has waited for all copies
    meter_copies();
    copy_ahead(0);
    return true;
}

void Executor::meter_copies() {
    uint64_t on_cpu = 0, streamed = 0;
    for (const Segment &s : program->segments) {
        on_cpu += s.cpu ? s.bytes : 0;
    }
    for (size_t bytes : program->entry_bytes) {
        streamed += bytes;
    }
    const bool metered = d.inner.quirks.one_queue && !d.ring.has_thread() && on_cpu > 0;
    copies_per_byte = metered ? (double)streamed / (double)on_cpu : 0;
    owed_bytes = 0;
    // Neither the CPU nor experts that a router chooses wait for what is copied before it.
    d.inner.large_copies.store(d.ring.has_thread() && on_cpu == 0 && !d.weights.has_experts());
}

void Executor::adopt_expert_cache() {
    const bool uses_ring = !program->groups.empty() || !program->entries.empty();
    if (uses_ring && !(program->arena == d.experts.arena())) {
        ggml_backend_synchronize(d.inner.copy);
        d.inner.synchronize();
        d.experts.adopt(program->arena);
    }
}

// Waits until the weights of the next segment are read from disk and their copies queued. Does meanwhile what other threads
// ask for.
ggml_status Executor::bring_weights() {
    const auto end = std::chrono::steady_clock::now() + HostCache::kPatience;
    while (program_is_valid() && !d.ring.has_next()) {
        Ring::Copied copied;
        const bool readable = d.ring.bring_next(std::chrono::milliseconds(2), copied);
        d.count(copied);
        if (!readable) {
            return disk_failed(d.cache.why());
        }
        if (!d.ring.has_next() && std::chrono::steady_clock::now() > end) {
            return disk_failed("the disk does not answer");
        }
        if (!apply_requests()) {
            return GGML_STATUS_ABORTED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

// Waits until the next segment may start beside the host's frames, and brings budgets into force meanwhile. `timed` is set when
// the pacer wants to know how long the segment took.
ggml_status Executor::wait_for_frame(bool &timed) {
    const uint64_t ready = clock_ns();
    const auto hurry = [this] {
        d.requests.read_frame_block();
        return d.abort.load() || d.requests.pending();
    };
    for (bool may_start = false; !may_start;) {
        if (!program_is_valid() && !load_program()) {
            return GGML_STATUS_ALLOC_FAILED;
        }
        const Segment &segment = program->segments[next];
        if (!hurry() && !segment.cpu && segment.entry >= 0) {
            d.ring.synchronize(segment.entry); // its copies should not take from free time
        }
        // A budget ends the wait, but does not start the segment. One that may start is not kept by budget after budget.
        may_start = segment.cpu || d.pacing.before_step(ready, hurry, timed);
        if (!apply_requests()) {
            return GGML_STATUS_ABORTED;
        }
        d.requests.answer_frame_block();
    }
    return GGML_STATUS_SUCCESS;
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

// Whether the CPU waits for the compute stream before kRunAhead further segments are queued: it does for its own segments, and
// for the router of a group. Then an event would only cost time: with ggml-vulkan recording it and waiting for it take 25 us on
// an H100 machine.
bool Executor::waits_soon(const Segment &done) const {
    const size_t end = std::min(next + kRunAhead, program->segments.size());
    return done.cpu ||
           std::any_of(program->segments.begin() + (ptrdiff_t)next, program->segments.begin() + (ptrdiff_t)end,
                       [](const Segment &s) { return s.cpu || s.group >= 0; });
}

// Waits until at most kRunAhead segments are queued, and for this one if it is timed. No event is recorded for the last
// segments: no later segment waits for one, and ggml's synchronize wakes sooner than a wait for an event.
void Executor::limit_queue(uint64_t start_ns, bool timed) {
    ggml_backend_event_t &event = queued[n_queued % kRunAhead];
    uint64_t &use = uses[n_queued++ % kRunAhead];
    if (event) {
        ggml_backend_event_synchronize(event);
        d.ring.computed(use);
    }
    if (!timed && next + kRunAhead > program->segments.size()) {
        return;
    }
    event = event ? event : d.inner.take_event();
    d.inner.record(event, d.inner.compute);
    use = d.ring.next_use();
    if (timed) {
        ggml_backend_event_synchronize(event);
        d.ring.computed(use);
        d.pacing.after_step(start_ns, clock_ns());
    }
}

// Does what other threads have asked for since the last segment; false when the graph is to be aborted.
bool Executor::apply_requests() { return !d.abort.load() && d.apply_requested_budget(); }

// ------------------------------------------------------------------------------------------------------------- segments

// Starts the copies that can be started, for segments from `at` on.
void Executor::copy_ahead(size_t at) {
    kv.fill_panes(*program, at);
    if (copies_per_byte == 0) {
        d.count(d.ring.pump());
    } else if (at < program->segments.size() && program->segments[at].entry >= 0 &&
               d.ring.next_copy() == d.ring.next_use()) {
        d.count(d.ring.pump(1)); // needed now
    }
}

// Starts the copies that are to run while the CPU computes a segment.
void Executor::copy_beside(const Segment &s) {
    if (d.ring.has_thread()) {
        d.count(d.ring.pump()); // the CPU has waited for the compute stream
    }
    owed_bytes += copies_per_byte * (double)s.bytes;
    if (owed_bytes >= 1) {
        const Ring::Copied started = d.ring.pump((uint64_t)owed_bytes);
        owed_bytes -= (double)started.bytes;
        d.count(started);
    }
}

// Whether the copies for segments from `at` on should wait for a router: it chooses soon, and all that is needed until then
// is on its way. Copies run in order, so the chosen experts would wait behind the weights of later layers, and the copy
// engine would be idle while the experts are computed.
bool Executor::experts_first(size_t at) const {
    uint64_t uses = d.ring.next_use();
    size_t blocks = 0;
    for (size_t i = at; i < std::min(at + kSegmentsToRouter, program->segments.size()); i++) {
        const Segment &s = program->segments[i];
        uses += s.entry >= 0;
        blocks += s.block != nullptr;
        if (uses > d.ring.next_copy() || !kv.filled_ahead(blocks)) {
            return false;
        }
        if (s.group >= 0) {
            return true;
        }
    }
    return false;
}

// Copies the chosen experts of a streamed tensor that pump() did not predict.
ggml_status Executor::copy_missing_experts(const Segment &s) {
    const int layer = d.ring.layer_of(s.entry);
    if (s.chosen != known_choice) {
        known_choice = s.chosen;
        d.experts.set_choice(layer, count_chosen(d, s.chosen, graph->nodes[s.node0]->src[0]->ne[2]));
    }
    const Time end = std::chrono::steady_clock::now() + HostCache::kPatience;
    d.cache.experts().begin_use();
    for (;;) {
        Ring::Copied copied;
        const Taken taken = d.ring.copy_missing_experts(s.entry, std::chrono::milliseconds(2), copied);
        d.count(copied);
        const ggml_status status = taken == Taken::yes ? GGML_STATUS_SUCCESS : wait_for_experts(taken, end);
        if (taken == Taken::yes || status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
}

// Experts that the segment needs are not read yet, or cannot be. Does what other threads ask for, and returns whether the
// segment goes on.
ggml_status Executor::wait_for_experts(Taken taken, Time end) {
    if (taken == Taken::failed) {
        return disk_failed(d.cache.experts().why());
    }
    if (std::chrono::steady_clock::now() > end) {
        return disk_failed("the disk does not answer");
    }
    if (!apply_requests()) {
        return GGML_STATUS_ABORTED;
    }
    again = !program_is_valid();
    return again ? GGML_STATUS_ABORTED : GGML_STATUS_SUCCESS;
}

ggml_status Executor::run_gpu(const Segment &s) {
    ggml_cgraph view = *program->shadow;
    view.nodes += s.shadow0;
    view.n_nodes = s.shadow1 - s.shadow0;
    view.n_leafs = 0;
    view.leafs = nullptr;
    view.uid = s.uid;
    if (s.group >= 0) {
        const Time end = std::chrono::steady_clock::now() + HostCache::kPatience;
        const GroupHooks hooks = {[this] { copy_ahead(next + 1); },
                                  [this, end](Taken taken) { return wait_for_experts(taken, end); }};
        return run_experts(d, program->groups[s.group], graph, view, hooks);
    }
    if (s.chosen) {
        const ggml_status read = copy_missing_experts(s);
        if (read != GGML_STATUS_SUCCESS) {
            return read;
        }
    }
    if (s.entry >= 0) {
        d.count(d.ring.wait_for(s.entry));
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
        d.ring.use(s.entry);
    }
    return status;
}

// Bytes of staging memory for what a CPU segment of few tokens takes or gives back; 0 where it is copied instead.
size_t staging_for(const Span &span) {
    constexpr size_t kMost = 256 << 10; // kernels read host memory more slowly than copies do
    return span.buffer->kv || span.bytes > kMost || span.bytes % sizeof(float) ? 0 : kAlign + align_up(span.bytes);
}

// Waits for the compute stream and copies what a CPU segment reads from the device. What is small is copied in the stream
// where a synchronous copy would wait for one of the CopyThread.
void Executor::take_inputs(const Segment &s) {
    const auto staging_for = [this](const Span &in) { return d.ring.has_thread() ? fsd::staging_for(in) : 0; };
    size_t staged = 0;
    for (const Span &in : s.in) {
        staged += staging_for(in);
    }
    char *const stage = staged > 0 ? d.inner.staging(staged) : nullptr;
    char *at = stage;
    for (const Span &in : s.in) {
        each_inner(*in.buffer, in.offset, in.bytes, [&](const ggml_tensor *raw, size_t from, size_t n) {
            if (raw && staging_for(in) > 0) {
                ggml_backend_tensor_get_async(d.inner.compute, raw, at + from, 0, n);
                d.inner.compute_pending = true;
            }
        });
        at += staging_for(in);
    }
    d.inner.wait_for_computing();
    d.ring.computed(d.ring.next_use());
    at = stage;
    for (const Span &in : s.in) {
        char *to = in.buffer->base + in.offset;
        each_inner(*in.buffer, in.offset, in.bytes, [&](const ggml_tensor *raw, size_t from, size_t n) {
            if (raw && staging_for(in) > 0) {
                memcpy(to + from, at + from, n);
            } else if (raw) {
                ggml_backend_tensor_get(raw, to + from, 0, n);
            }
        });
        at += staging_for(in);
    }
}

ggml_status Executor::run_cpu(Segment &s) {
    take_inputs(s);
    const double start = Trace::now();
    copy_beside(s);
    ggml_cgraph view = *graph;
    view.nodes = s.nodes.data();
    view.n_nodes = (int)s.nodes.size();
    view.n_leafs = 0;
    view.leafs = nullptr;
    view.uid = 0;
    ggml_status status = d.compute_on_cpu(&view, s.bytes);
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
            if (out.buffer->kv && raw) {
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

// Whether a graph can start now; takes memory for it. The caller holds the graph mutex.
static ggml_status begin_graph(Device &d, const ggml_cgraph *graph) {
    const ggml_status before = std::exchange(d.async_failure, GGML_STATUS_SUCCESS);
    if (before != GGML_STATUS_SUCCESS) {
        return before;
    }
    if (!d.committed) {
        GGML_LOG_ERROR("frameshard: a graph was run before fsd_commit\n");
        return GGML_STATUS_FAILED;
    }
    if (d.abort.load()) {
        return GGML_STATUS_ABORTED;
    }
    if (d.must_stop()) {
        return d.give_way();
    }
    d.apply_requested_budget();
    if (!d.cache.begin_graph(tokens_of(d, graph))) {
        return disk_failed(d.cache.why());
    }
    for (GraphMemory *memory : d.memories.of(graph, graph_memories)) {
        memory->begin_use();
        const bool held = d.hold(*memory);
        const GraphMemory::Input input = std::exchange(memory->input, GraphMemory::Input::kept);
        if (!held || input == GraphMemory::Input::refused) {
            GGML_LOG_DEBUG("frameshard: no memory for a graph\n"); // the caller decides whether this is an error
            return GGML_STATUS_ALLOC_FAILED;
        }
        if (input == GraphMemory::Input::no_room) {
            return GGML_STATUS_ABORTED; // the budget has grown since: it runs when its input is written again
        }
    }
    return GGML_STATUS_SUCCESS;
}

// Runs a graph that has its memory. The caller holds the graph mutex.
static ggml_status run_begun(Device &d, const ggml_cgraph *graph) {
    d.arena.finish_fills();
    d.inner.rest();
    d.balance_host();
    d.counters.update([&](fsd_stats &c) { c.graphs++; });
    d.inner.graph_pending = true;
    const ggml_status status = Executor(d, graph).run();
    if (tokens_of(d, graph) >= kPromptTokens) {
        d.inner.lacks_workspaces.store(false);
    }
    return status == GGML_STATUS_ABORTED && d.must_stop() ? d.give_way() : status;
}

// For GraphThread. The mutex stays locked from the start to the end: whoever needs the device waits.
static void run_async(Device &d, const ggml_cgraph *graph, const GraphThread::Started &started) {
    std::lock_guard<std::mutex> graph_lock(d.graph_mutex);
    const ggml_status status = begin_graph(d, graph);
    started(status);
    if (status == GGML_STATUS_SUCCESS) {
        d.async_failure = run_begun(d, graph);
    }
}

ggml_status run_graph(Device &d, const ggml_cgraph *graph) {
    if (d.async.load()) {
        if (!d.graph_thread) {
            d.graph_thread = std::make_unique<GraphThread>(
                [&d](const ggml_cgraph *copy, const auto &started) { run_async(d, copy, started); });
        }
        return d.graph_thread->start(graph);
    }
    std::lock_guard<std::mutex> graph_lock(d.graph_mutex);
    const ggml_status status = begin_graph(d, graph);
    return status == GGML_STATUS_SUCCESS ? run_begun(d, graph) : status;
}

} // namespace fsd
