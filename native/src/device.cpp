#include "device.h"

namespace fsd {

// While a prompt is read, the ring has room for so many of the largest steps.
static constexpr size_t kRingForPrompts = 4;
// Smaller pools are not freed after a prompt. Without its pool the next prompt takes about 10 ms longer, and graphs that the
// device has captured are lost.
static constexpr uint64_t kPoolKept = 16 << 20;

Device &device() {
    // Never destroyed: ggml does not unload plugins, and buffers may outlive main.
    static Pacing *pacing = new Pacing;
    static Inner *inner = new Inner(*pacing);
    static BudgetRequests *requests = new BudgetRequests(*pacing);
    static Device *d = [] {
        Device *device = new Device(*inner, *pacing, *requests);
        requests->serve(device->ledger, [device](uint64_t bytes) { device->apply_budget(bytes); });
        return device;
    }();
    return *d;
}

// Who gives VRAM back, first to last.
static std::vector<Ledger::Reclaimer> reclaimers(Device &d) {
    const auto shrink_ring = [&d](size_t bytes) {
        if (d.ring.capacity() <= bytes) {
            return false;
        }
        d.ring.resize(bytes);
        return true;
    };
    const auto drop_pane = [&d] {
        if (d.kv.n_panes() < 2) {
            return false;
        }
        d.kv.release_window();
        return true;
    };
    return {
        // What the next prompt takes again.
        {Ledger::kIdle, [&d] { return d.drop_idle_graphs(); }},
        // The last slab of the arena: weights from the end of the ladder, which are streamed from then on.
        {Ledger::kWeights, [&d] { return d.arena.evict(); }},
        // Down to what the KV cache leaves it, then to one step.
        {Ledger::kRingSurplus, [&d, shrink_ring] { return shrink_ring(d.weights.layout.weights_beside_kv()); }},
        {Ledger::kRingSurplus, [&d, shrink_ring] { return shrink_ring(d.weights.layout.min_ring); }},
        // All of the ring; the next graph of the language model takes it again.
        {Ledger::kRing, [shrink_ring] { return shrink_ring(0); }},
        // A KV block moves to host memory.
        {Ledger::kKv, [&d] { return d.kv.spill_block(); }},
        // The second pane of the KV window: with one pane, copies and computing take turns.
        {Ledger::kKv, drop_pane},
    };
}

Device::Device(Inner &inner, Pacing &pacing, BudgetRequests &requests)
    : inner(inner), pacing(pacing), requests(requests), cache(inner, weights, experts),
      arena(inner, ledger, weights, cache, residency_generation),
      ring(inner, ledger, weights, cache, experts, residency_generation),
      kv(inner, ledger, weights, residency_generation), ledger(inner, reclaimers(*this)), host(inner, kv, cache) {}

void Device::count(const Ring::Copied &copied) {
    counters.update([&](fsd_stats &c) {
        c.copies += copied.copies;
        c.copied_bytes += copied.bytes;
    });
}

ggml_status Device::compute_on_cpu(ggml_cgraph *graph, uint64_t weight_bytes) {
    const double start_s = Trace::now();
    const ggml_status status = ggml_backend_graph_compute(cpu, graph);
    const double busy_s = Trace::now() - start_s;
    counters.update([&](fsd_stats &c) {
        c.cpu_busy_s += busy_s;
        c.cpu_read_bytes += weight_bytes;
    });
    return status;
}

// ------------------------------------------------------------------------------------------------ commit, park and unpark

bool Device::take_scratch() {
    if (weights.layout.scratch_bytes == 0) {
        return true;
    }
    scratch.buffer = ledger.allocate(Use::scratch, weights.layout.scratch_bytes);
    scratch.base = scratch.buffer ? (char *)ggml_backend_buffer_get_base(scratch.buffer.get()) : nullptr;
    return scratch.buffer != nullptr;
}

fsd_status Device::commit(std::string &why) {
    if (weights.all.empty()) {
        why = "the model was loaded without memory mapping: load it with LLAMA_LOAD_MODE_MMAP on this device";
        return FSD_BAD_STATE;
    }
    // An attempt that was refused is made again with another budget: nothing of it may count twice.
    arena.release_core();
    ledger.release(Use::scratch, scratch.buffer);
    if (!weights.lay_out(inner.buffer_type(), why)) {
        return FSD_BAD_STATE;
    }
    const Layout &layout = weights.layout;
    if (ring.wanted == 0) {
        ring.wanted = 3 * layout.min_ring;
    }
    update_floor();
    if (ledger.floor() > ledger.budget()) {
        why = "a VRAM budget of " + std::to_string(ledger.budget() >> 20) +
              " MiB is below the floor: this model and context need at least " +
              std::to_string((ledger.floor() + (1 << 20) - 1) >> 20) + " MiB";
        return FSD_BELOW_FLOOR;
    }
    cache.plan();
    if (!parked && !host.commit()) { // while parked, all KV blocks count as host memory
        why = below_host_floor(host.budget(), host.floor());
        return FSD_BELOW_HOST_FLOOR;
    }
    open_cache();
    for (Buffer *b : buffers) {
        if (b->lasting && !materialise(b)) {
            why = "the device refused " + std::to_string(b->size >> 20) + " MiB for an adapter or a KV cache";
            return FSD_OUT_OF_MEMORY;
        }
    }
    if (!arena.take_core() || !take_scratch()) {
        why = "the device refused memory for small weights or scratch";
        return FSD_OUT_OF_MEMORY;
    }
    kv.fetch_blocks();
    const Residency r = residency_at(ledger.fixed());
    if (!r.fits || !ring.resize(r.ring)) {
        why = "the device refused memory for the ring";
        return FSD_OUT_OF_MEMORY;
    }
    committed = true;
    update_floor();
    if (cache.is_open()) {
        cache.forget_unheld(); // small weights were read through the mapping
        balance_host();
    }
    update_placements();
    return FSD_OK;
}

bool Device::park() {
    inner.synchronize();
    if (!kv.park()) { // before all else, so that there is little to take back
        kv.fetch_blocks();
        kv.unpark(); // blocks that were in host memory before
        apply_host_budget();
        update_placements();
        return false;
    }
    parked = true;
    give_back();
    return true;
}

void Device::give_back() {
    while (arena.evict()) {
    }
    ring.resize(0);
    programs.clear();
    for (Buffer *b : buffers) {
        if (b->graph) {
            b->graph->release(inner, ledger);
        }
        if (b->inner) {
            ggml_tensor raw = raw_tensor(b->inner, b->inner_base, b->size);
            ggml_backend_tensor_get(&raw, b->base, 0, b->size);
            InnerBuffer given(b->inner);
            ledger.release(Use::buffers, given);
            b->inner = nullptr;
            b->inner_base = nullptr;
            b->parked = true;
        }
    }
    arena.release_core();
    ledger.release(Use::scratch, scratch.buffer);
    scratch.base = nullptr;
    cache.rest();
    inner.close_streams();
    ledger.count(Use::pool, 0);
    committed = false;
    apply_host_budget(); // the KV cache has gone to host memory
    count_graph_memory();
    update_placements();
}

fsd_status Device::unpark(std::string &why) {
    requests.apply();
    why = "the device could not be opened again";
    const bool opened = inner.open_streams();
    const fsd_status status = opened ? commit(why) : FSD_OUT_OF_MEMORY;
    if (status != FSD_OK) {
        if (opened) {
            kv.park(); // blocks without host memory wait in VRAM
            give_back();
        }
        return status;
    }
    parked = false;
    kv.unpark();
    return FSD_OK;
}

// Room for the smallest ring stays, even while everything is resident and there is no ring. A buffer that replaces freed
// compute buffers is a compute buffer, and takes no VRAM by itself: a graph that has no room is refused when it runs. If the
// buffer were refused, llama.cpp would end the process.
bool Device::has_room_for(size_t bytes) const {
    const uint64_t size = weights.layout.granular(bytes), held = graph_bytes();
    if (held < most_graph_bytes()) {
        return true;
    }
    const double share = held == 0 ? floor_share : 1;
    return ledger.floor() + (uint64_t)(share * (double)size) <= ledger.budget();
}

bool Device::materialise(Buffer *b) {
    if (b->inner || b->size == 0) {
        return true;
    }
    InnerBuffer inner_buffer = ledger.allocate(Use::buffers, b->size);
    if (!inner_buffer) {
        return false;
    }
    b->inner_base = (char *)ggml_backend_buffer_get_base(inner_buffer.get());
    if (b->parked) {
        inner.upload(nullptr, inner_buffer.get(), b->inner_base, b->base, b->size);
        forget_pages(b->base, b->size);
        b->parked = false;
    } else {
        ggml_backend_buffer_clear(inner_buffer.get(), 0);
    }
    b->inner = inner_buffer.release();
    return true;
}

bool Device::all_in_vram() const { return arena.full() && kv.spilled_bytes() == 0; }

bool Device::hold(GraphMemory &memory) {
    size_t bytes = 0;
    const bool held_before = memory.fits(inner, bytes);
    if (!all_in_vram()) {
        memory.drop_idle(inner, ledger);
    }
    if (held_before) {
        return true;
    }
    const bool runs = !abort.load();
    memory.drop(inner, ledger);
    const uint64_t others = graph_bytes_in_use() - (memory.bytes() - memory.idle_bytes()), graphs = others + bytes;
    const uint64_t room = room_for_graphs(ledger.budget());
    const uint64_t pool = pool_bytes(graphs), had = ledger.used(Use::pool);
    if (!runs || ledger.used() - had + bytes + std::max(had, pool) > ledger.budget()) {
        memory.release(inner, ledger); // before weights are evicted
    }
    if (graphs + ledger.used(Use::pool) > room) {
        drop_pool();
    }
    if (graphs + pool > room) {
        counters.update([&](fsd_stats &c) { c.refused_graph_bytes = bytes; });
        return false;
    }
    counters.update([](fsd_stats &c) { c.refused_graph_bytes = 0; });
    if (runs) {
        ledger.count(Use::pool, std::max<uint64_t>(ledger.used(Use::pool), pool));
    }
    const size_t ring_for_prompts = kRingForPrompts * weights.layout.min_ring;
    const uint64_t used = ledger.used() + bytes, most = ledger.budget() + weights.layout.sizes.slab_bytes;
    if (used > most && ring.capacity() > ring_for_prompts) {
        ring.resize(ring_for_prompts); // cached experts are of less use to a prompt than what all its tokens need
    }
    kv.spill_surplus(bytes); // before the ring gives up the room in which copies of weights run ahead
    const bool held = take_evicting([&] { return memory.take(inner, ledger, bytes); });
    if (held && runs && weights.has_experts()) {
        inner.grow_pool(memory.storage(), (size_t)(inner.quirks.pool_share * (double)bytes));
    }
    if (ring.capacity() == 0 && !arena.full()) {
        ledger.make_room(std::min(ring.wanted, ring_for_prompts), Ledger::kIdle | Ledger::kWeights);
    }
    count_graph_memory();
    update_placements(); // slabs may have been evicted
    return held;
}

// ---------------------------------------------------------------------------------------------------- budget and residency

Residency Device::residency_at(uint64_t fixed) const {
    const Layout &l = weights.layout;
    return residency(ledger.budget(), fixed, l.min_ring, ring.wanted, l.slab_sizes, l.sizes.unit_bytes);
}

uint64_t Device::fixed_without_graphs() const {
    if (committed) {
        return ledger.fixed() - ledger.used(Use::kv) - ledger.used(Use::graph) - ledger.used(Use::pool);
    }
    std::vector<size_t> asked;
    for (const Buffer *b : buffers) {
        if (!b->weights && !b->kv) {
            asked.push_back(b->size);
        }
    }
    return fixed_bytes(weights.layout, ledger.overhead(), asked) - graph_bytes();
}

void Device::update_floor() {
    set_limits(fixed_without_graphs() + floor_graph_bytes());
    count_graph_memory();
}

void Device::set_limits(uint64_t fixed) {
    const KvNeed need = kv.need();
    const uint64_t most = most_graph_bytes(), largest = most - std::min(most, floor_graph_bytes()) + pool_bytes(most);
    ledger.set_limits(floor_bytes(weights.layout, fixed, need), full_bytes(weights.layout, fixed + largest, need));
}

uint64_t Device::graph_bytes() const {
    uint64_t bytes = 0;
    for (const Buffer *b : buffers) {
        if (!b->weights && !b->kv && !b->lasting) {
            bytes += weights.layout.granular(b->size);
        }
    }
    return bytes;
}

uint64_t Device::most_graph_bytes() const { return std::max(graph_bytes_before, graph_bytes()); }

bool Device::set_floor_graphs(uint64_t bytes) {
    const uint64_t most = most_graph_bytes();
    if (most == 0) {
        return false;
    }
    floor_share = std::min(1.0, (double)bytes / (double)most);
    if (committed) {
        update_floor();
    } else {
        count_graph_memory();
    }
    return true;
}

uint64_t Device::floor_graph_bytes() const {
    return weights.layout.granular((size_t)(floor_share * (double)most_graph_bytes()));
}

// The overhead has the pools of the smallest steps.
uint64_t Device::pool_bytes(uint64_t graphs) const {
    const uint64_t more = graphs - std::min(graphs, floor_graph_bytes());
    return weights.layout.granular((size_t)(inner.quirks.pool_share * (double)more));
}

uint64_t Device::room_for_graphs(uint64_t budget) const {
    const uint64_t room = budget + floor_graph_bytes();
    return room - std::min(room, ledger.floor());
}

void Device::drop_pool() {
    if (ledger.used(Use::pool) > 0 && inner.renew_compute()) {
        ledger.count(Use::pool, 0);
    }
}

void Device::set_overhead(uint64_t bytes) {
    ledger.set_overhead(bytes);
    if (!committed && !parked) { // commit() checks it, and knows the floor
        return;
    }
    update_floor();
    if (committed && !graph_in_use() && !graphs_fit(ledger.budget())) {
        drop_graphs();
    }
}

void Device::drop_graphs() {
    for (Buffer *b : buffers) {
        if (b->graph) {
            b->graph->release(inner, ledger);
        }
    }
    drop_pool();
}

void Device::end_graph() {
    for (Buffer *b : buffers) {
        if (b->graph) {
            b->graph->end_use();
        }
    }
}

bool Device::graph_in_use() const {
    return std::any_of(buffers.begin(), buffers.end(), [](const Buffer *b) { return b->graph && b->graph->in_use(); });
}

uint64_t Device::graph_bytes_in_use() const {
    uint64_t bytes = ledger.used(Use::graph);
    for (const Buffer *b : buffers) {
        bytes -= b->graph ? b->graph->idle_bytes() : 0;
    }
    return bytes;
}

bool Device::drop_idle_graphs() {
    bool any = false;
    for (Buffer *b : buffers) {
        any = (b->graph && b->graph->drop_idle(inner, ledger)) || any;
    }
    return any;
}

bool Device::graphs_fit(uint64_t budget) const {
    const uint64_t graphs = graph_bytes_in_use();
    const bool uses_pool = pool_bytes(graphs) > 0; // otherwise it can be freed
    return graphs + (uses_pool ? ledger.used(Use::pool) : 0) <= room_for_graphs(budget);
}

bool Device::must_stop() const {
    return committed && requests.pending() && !graphs_fit(requests.requested()) && graph_in_use();
}

ggml_status Device::give_way() {
    end_graph();
    drop_graphs();
    requests.apply();
    return GGML_STATUS_ABORTED;
}

void Device::note_graph_bytes() { graph_bytes_before = most_graph_bytes(); }

void Device::forget_graph_bytes() {
    if (std::none_of(buffers.begin(), buffers.end(), [](const Buffer *b) { return b->lasting; })) {
        graph_bytes_before = 0;
    }
    if (buffers.empty()) {
        floor_share = 1;
    }
}

void Device::count_graph_memory() {
    uint64_t least = 0;
    for (const Buffer *b : buffers) {
        least += b->graph ? b->graph->least_bytes() : 0;
    }
    counters.update([&](fsd_stats &c) {
        c.least_graph_bytes = least;
        c.most_graph_bytes = most_graph_bytes();
        c.floor_graph_bytes = floor_graph_bytes();
    });
}

bool Device::apply_requested_budget() {
    const bool encodes = ledger.parent() != nullptr;
    if (encodes ? requests.must_free() : must_stop()) {
        return false;
    }
    requests.apply();
    // The host budget is the language model's. An encode holds that one's mutex.
    (encodes ? device() : *this).apply_host_budget();
    return true;
}

bool Device::apply_budget_if_idle() {
    std::unique_lock<std::mutex> lock(graph_mutex, std::try_to_lock);
    if (!lock.owns_lock() || must_stop()) {
        return false;
    }
    requests.apply();
    return true;
}

// ------------------------------------------------------------------------------------------------------------ host memory

void Device::count_weights() {
    for (Buffer *b : buffers) {
        if (b->attached && !cache.is_open()) {
            host.remove_weights(b->host_bytes);
            b->host_bytes = cache.narrow(b->base);
            host.add_weights(b->host_bytes);
        }
    }
}

void Device::open_cache() {
    if (!cache.is_open() && cache.floor() > 0 && !host.within_budget()) {
        ring.reset(); // its copies read the mapping, also in a thread
        residency_generation++;
        cache.open();
        set_path(inner.host_buffer_type() ? HostPath::staged : HostPath::direct);
    }
}

void Device::set_path(HostPath path) {
    weights.path = path;
    counters.update([path](fsd_stats &stats) { stats.host_weights = (uint32_t)path; });
}

bool Device::uses_cpu() const {
    return std::any_of(plan.tiers.begin(), plan.tiers.end(), [](const Tier &t) {
        return std::find(t.placement.begin(), t.placement.end(), FSD_CPU) != t.placement.end();
    });
}

void Device::apply_host_budget() {
    const uint64_t request = host.asked();
    const bool is_new = !host.applied(request);
    if (is_new) {
        host.bring_into_force();
        kv.allow_spares(host.budget() == 0);
    }
    // KV blocks or memory for exchanges may have taken more since the last request.
    if ((committed || parked) && (is_new || !host.within_budget())) {
        open_cache();
        balance_host();
    }
    host.note_applied(request);
}

bool Device::apply_host_budget_if_idle() {
    std::unique_lock<std::mutex> lock(graph_mutex, std::try_to_lock);
    if (lock.owns_lock()) {
        apply_host_budget();
    }
    return lock.owns_lock();
}

void Device::balance_host() {
    if (!cache.is_open()) {
        return;
    }
    const auto state = std::make_pair(host.room_for_weights(), arena.slabs.size());
    bool changed = cache.adopt();
    if (state != balanced || cache.is_settling()) {
        changed = cache.set_room(state.first, state.second) || changed;
        balanced = state;
    }
    if (changed) {
        residency_generation += uses_cpu(); // what is not held is streamed
        update_placements();
    }
}

// Frees slabs at once; fill() fills growth in later.
void Device::apply_budget(uint64_t bytes) {
    ledger.set_budget(bytes);
    if (!committed) {
        return;
    }
    if (ledger.used() > bytes) {
        drop_idle_graphs(); // before weights are evicted
    }
    if (!graphs_fit(bytes)) {
        drop_graphs();
    } else if (ledger.used(Use::graph) + ledger.used(Use::pool) > room_for_graphs(bytes)) {
        drop_pool();
    }
    kv.spill_surplus();
    const Residency r = residency_at(ledger.fixed() + kv.window_lacks());
    while (arena.slabs.size() > r.slabs) {
        arena.evict();
    }
    // A ring that still fits stays as it is: its addresses are in compiled programs.
    if (r.ring > 0 && (ring.capacity() == 0 || ledger.used() > bytes)) {
        ledger.make_room(0);
        ring.resize(r.ring);
    }
    ledger.make_room(0);
    kv.ensure_window();
    apply_host_budget(); // KV blocks may have gone to host memory
    balance_host();      // slabs may have been evicted
    update_placements();
}

// A budget with room for everything needs no ring once the arena is full; until then weights stream.
bool Device::ensure_ring() {
    if (ring.capacity() > 0 || arena.full()) {
        return true;
    }
    const size_t least = weights.layout.min_ring;
    const uint64_t limit = ledger.budget(), held = ledger.used();
    const uint64_t room = std::max<uint64_t>(least, limit > held ? limit - held : 0);
    if (ring.resize(std::min<uint64_t>(room, std::max(ring.wanted, least)))) {
        return true;
    }
    return take_evicting([&] { return ring.resize(least); });
}

bool Device::take_evicting(const std::function<bool()> &take) {
    while (!take()) {
        if (!drop_idle_graphs() && !arena.evict()) {
            return false;
        }
    }
    return true;
}

size_t Device::fill(size_t max_bytes) {
    if (!committed) {
        return 0;
    }
    for (const Buffer *b : buffers) {
        if (b->graph && !all_in_vram()) {
            b->graph->trim(inner, ledger);
        }
    }
    arena.start_round();
    kv.settle(true);
    if (ledger.used(Use::pool) >= kPoolKept && !all_in_vram()) {
        drop_pool();
    }
    count_graph_memory();
    size_t done = kv.fetch_blocks();
    const Residency want = residency_at(ledger.fixed());
    if (want.fits && want.ring == 0 && ring.capacity() > 0) {
        inner.synchronize();
        ring.resize(0); // everything is going to be resident
    } else if (want.fits && ring.capacity() > 0 && want.ring >= ring.capacity() + weights.layout.min_ring) {
        while (arena.slabs.size() > want.slabs) {
            arena.evict();
        }
        ring.resize(want.ring); // a prompt has made it smaller
    }
    if (done < max_bytes) {
        done += arena.fill(want.slabs, max_bytes - done);
    }
    update_placements();
    return done;
}

void Device::update_placements() {
    const Tier *decode = plan.tier_for(1);
    uint64_t bytes[3] = {};
    uint32_t shards[3] = {};
    for (uint32_t s = 0; s < weights.n_shards; s++) {
        if (weights.layout.shard_bytes[s] == 0) {
            continue;
        }
        int kind = 0;
        if (weights.layout.shard_last_slab[s] >= (int)arena.slabs.size()) {
            kind = decode && decode->on_cpu(s) && cache.serves_experts(s, 0) ? 2 : 1;
        }
        shards[kind]++;
        if (kind == 0) {
            bytes[0] += weights.layout.shard_bytes[s];
        }
    }
    for (const Piece &p : weights.layout.pieces) {
        if (weights.layout.shard_last_slab[p.shard] < (int)arena.slabs.size()) {
            continue; // counted with its shard
        }
        const bool on_cpu = decode && decode->on_cpu(p.shard) && cache.serves_experts(p.shard, 0);
        bytes[p.slab < (int)arena.slabs.size() ? 0 : on_cpu ? 2 : 1] += p.bytes;
    }
    counters.update([&](fsd_stats &c) {
        c.resident_bytes = bytes[0];
        c.streamed_bytes = bytes[1];
        c.cpu_bytes = bytes[2];
        c.resident_shards = shards[0];
        c.streamed_shards = shards[1];
        c.cpu_shards = shards[2];
    });
}

} // namespace fsd
