// VRAM: the ledger, the arena of slabs, the ring's memory, and what a change of budget does to them.
#include "device.h"

#include <cstring>

namespace fsd {

static constexpr ggml_backend_buffer_usage kWeights = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;

// Who gives VRAM back, first to last.
Device::Device(Inner &inner, Pacing &pacing)
    : inner(inner), pacing(pacing),
      ledger(inner,
             {
                 // The last slab of the arena: weights from the end of the ladder, which are streamed from then on.
                 {Ledger::kWeights, [this] { return !slabs.empty() && (pop_slab(), true); }},
                 {Ledger::kRingSurplus,
                  [this] { return ring.capacity > layout.min_ring && (resize_ring(layout.min_ring), true); }},
                 // All of the ring; the next graph of the language model takes it again.
                 {Ledger::kRing, [this] { return ring.capacity > 0 && resize_ring(0); }},
                 // A KV block moves to host memory.
                 {Ledger::kKv, [this] { return spill_block(); }},
                 // The second pane of the KV window: with one pane, copies and computing take turns.
                 {Ledger::kKv, [this] { return n_panes == 2 && (release_window(), true); }},
             }) {}

void Device::pop_slab() {
    inner.synchronize(); // queued work may still read the slab
    Slab &s = slabs.back();
    ggml_backend_event_synchronize(s.filled); // and its copies may still be under way
    ggml_backend_event_free(s.filled);
    ledger.release(Use::arena, s.buffer);
    slabs.pop_back();
    residency_generation++;
    counters.update([&](fsd_stats &c) { c.evicted_slabs++; });
}

bool Device::resize_ring(size_t bytes) {
    bytes = bytes / sizes.unit_bytes * sizes.unit_bytes;
    if (bytes == ring.capacity) {
        return true;
    }
    inner.synchronize();
    reset_ring();
    experts.clear();
    ledger.release(Use::ring, ring.buffer);
    ring.base = nullptr;
    ring.capacity = 0;
    residency_generation++;
    if (bytes == 0) {
        return true;
    }
    ring.buffer = ledger.allocate(Use::ring, bytes);
    if (!ring.buffer) {
        return false;
    }
    ggml_backend_buffer_set_usage(ring.buffer.get(), kWeights);
    ring.base = (char *)ggml_backend_buffer_get_base(ring.buffer.get());
    ring.capacity = bytes;
    return true;
}

// A budget that has room for everything needs no ring once the arena is full; until then weights stream.
bool Device::ensure_ring() {
    if (ring.capacity > 0 || slabs.size() == layout.slab_sizes.size()) {
        return true;
    }
    const uint64_t limit = ledger.budget(), held = ledger.used();
    const uint64_t room = std::max<uint64_t>(layout.min_ring, limit > held ? limit - held : 0);
    if (resize_ring(std::min<uint64_t>(room, std::max(wanted_ring, layout.min_ring)))) {
        return true;
    }
    // The device has less than the budget allows: another program holds the rest. Slabs give way to the smallest ring.
    while (!resize_ring(layout.min_ring)) {
        if (slabs.empty()) {
            return false;
        }
        pop_slab();
    }
    return true;
}

bool Device::materialise(Buffer *b) {
    if (b->inner || b->weights || b->cache || b->size == 0) {
        return true;
    }
    if (committed && floor.load() + layout.granular(b->size) > ledger.budget()) {
        return false; // the ring's smallest size stays free, even while everything is resident and there is no ring
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

// All VRAM is given back but the driver's context; KV and compute buffers go to the host addresses that were reserved for
// them. commit() takes it all again.
void Device::park() {
    inner.synchronize();
    while (!slabs.empty()) {
        pop_slab();
    }
    resize_ring(0);
    programs.clear();
    parked = true;
    caches_to_host();
    if (window) {
        release_window();
    }
    for (Buffer *b : buffers) {
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
    ledger.release(Use::core, core);
    ledger.release(Use::scratch, scratch);
    core_base = scratch_base = nullptr;
    inner.close_streams();
    committed = false;
    update_placements();
}

void Device::update_floor() {
    const uint64_t rest = ledger.fixed() - ledger.used(Use::kv);
    const KvNeed kv = kv_need();
    floor.store(floor_bytes(layout, rest, kv));
    full.store(full_bytes(layout, rest, kv));
}

// A new budget takes effect: slabs go at once, growth is filled in later by fill().
void Device::apply_budget() {
    const uint64_t number = request.number();
    const uint64_t bytes = request.bytes();
    ledger.set_budget(bytes);
    if (committed) {
        spill_surplus();
        const Residency r = residency(bytes, ledger.fixed() + window_lacks(), layout.min_ring, wanted_ring,
                                      layout.slab_sizes, sizes.unit_bytes);
        while (slabs.size() > r.slabs) {
            pop_slab();
        }
        // A ring that is already there stays as it is if it still fits: its addresses are in compiled programs.
        if (r.ring > 0 && (ring.capacity == 0 || ledger.used() > bytes)) {
            ledger.make_room(0);
            resize_ring(r.ring);
        }
        ledger.make_room(0);
        ensure_window();
        update_placements();
    }
    counters.update([](fsd_stats &c) { c.budget_generation++; });
    request.set_applied(number);
}

// Starts copies into free budget, in ladder order; the next graph uses them, and only its compute stream waits. The ring is
// given up when everything is to be resident.
size_t Device::fill(size_t max_bytes) {
    if (!committed) {
        return 0;
    }
    // At most the copies of this call and of the one before are under way, since a shrink waits for them.
    const size_t before = std::min(filled_before, slabs.size());
    if (before > 0) {
        ggml_backend_event_synchronize(slabs[before - 1].filled);
    }
    filled_before = slabs.size();
    settle_caches(true);
    size_t done = fetch_blocks();
    const Residency want =
        residency(ledger.budget(), ledger.fixed(), layout.min_ring, wanted_ring, layout.slab_sizes, sizes.unit_bytes);
    if (want.fits && want.ring == 0 && ring.capacity > 0) {
        inner.synchronize();
        resize_ring(0);
    }
    while (slabs.size() < want.slabs && done < max_bytes) {
        const size_t i = slabs.size();
        if (ledger.used() + layout.slab_sizes[i] > ledger.budget()) {
            break;
        }
        Slab slab;
        slab.buffer = ledger.allocate(Use::arena, layout.slab_sizes[i]);
        if (!slab.buffer) {
            break; // another program holds the memory: go on with what we have
        }
        ggml_backend_buffer_set_usage(slab.buffer.get(), kWeights);
        slab.base = (char *)ggml_backend_buffer_get_base(slab.buffer.get());
        for (const Piece &p : layout.pieces) {
            if (p.slab != (int)i) {
                continue;
            }
            const Weight &w = weights[p.tensor];
            char *to = slab.base + p.slab_offset;
            inner.upload(inner.copy, slab.buffer.get(), to, w.host + p.host_offset, p.bytes);
            // Kernels may read past the last row, where there must be numbers.
            inner.upload_zeros(inner.copy, slab.buffer.get(), to + p.bytes, p.padded - p.bytes);
        }
        slab.filled = ggml_backend_event_new(inner.dev);
        ggml_backend_event_record(slab.filled, inner.copy);
        done += layout.slab_sizes[i];
        slabs.push_back(std::move(slab));
        counters.update([&](fsd_stats &c) { c.filled_slabs++; });
    }
    update_placements();
    return done;
}

// Slabs whose copies were started become usable: the compute stream waits for them on the device, not the host.
void Device::finish_fills() {
    for (Slab &s : slabs) {
        if (!s.ready) {
            ggml_backend_event_wait(inner.compute, s.filled);
            s.ready = true;
            residency_generation++;
        }
    }
}

void Device::update_placements() {
    const Tier *decode = plan.tier_for(1);
    uint64_t bytes[3] = {};
    uint32_t shards[3] = {};
    for (uint32_t s = 0; s < n_shards; s++) {
        if (layout.shard_bytes[s] == 0) {
            continue;
        }
        int kind = 0;
        if (layout.shard_last_slab[s] >= (int)slabs.size()) {
            kind = decode && decode->on_cpu(s) ? 2 : 1;
        }
        shards[kind]++;
        if (kind == 0) {
            bytes[0] += layout.shard_bytes[s];
        }
    }
    for (const Piece &p : layout.pieces) {
        if (layout.shard_last_slab[p.shard] < (int)slabs.size()) {
            continue; // counted with its shard
        }
        const bool on_cpu = decode && decode->on_cpu(p.shard);
        bytes[p.slab < (int)slabs.size() ? 0 : on_cpu ? 2 : 1] += p.bytes;
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

// Orders the weights by the ladder, those that it does not name last, and cuts them.
bool Device::lay_out_weights(std::string &why) {
    std::vector<int> order(weights.size());
    std::vector<LadderPlace> places(weights.size());
    n_shards = std::max(1u, n_named_shards);
    for (size_t i = 0; i < weights.size(); i++) {
        const auto named = ladder.find(weights[i].name);
        places[i] = named == ladder.end() ? LadderPlace{n_shards, ladder.size() + i} : named->second;
        order[i] = (int)i;
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return std::make_pair(places[a].shard, places[a].position) <
               std::make_pair(places[b].shard, places[b].position);
    });
    n_shards = std::max(n_shards, places[order.back()].shard + 1);
    std::vector<WeightShape> shapes;
    ggml_backend_buffer_type_t buft = inner.buffer_type();
    for (int i : order) {
        Weight &w = weights[i];
        w.shard = places[i].shard;
        WeightShape shape = {w.name, w.shard, w.shape.type, {}};
        std::copy_n(w.shape.ne, GGML_MAX_DIMS, shape.ne);
        if (ggml_backend_buft_get_alloc_size(buft, &w.shape) > device_bytes(shape.type, shape.ne[0], w.bytes)) {
            why = "the device wants more memory for " + w.name + " than the shard device knows of";
            return false;
        }
        shapes.push_back(std::move(shape));
    }
    layout = lay_out(shapes, sizes, n_shards);
    for (size_t i = 0; i < order.size(); i++) {
        weights[order[i]].place = layout.weights[i];
    }
    for (Piece &p : layout.pieces) {
        p.tensor = order[p.tensor];
    }
    return true;
}

bool Device::take_core() {
    if (layout.core_bytes == 0) {
        return true;
    }
    core = ledger.allocate(Use::core, layout.core_bytes);
    if (!core) {
        return false;
    }
    ggml_backend_buffer_set_usage(core.get(), kWeights);
    ggml_backend_buffer_clear(core.get(), 0);
    core_base = (char *)ggml_backend_buffer_get_base(core.get());
    for (const Weight &w : weights) {
        if (w.place.core) {
            inner.upload(nullptr, core.get(), core_base + w.place.core_offset, w.host, w.bytes);
        }
    }
    return true;
}

// Fixes the layout from the weights and the ladder, then takes the memory that the model cannot do without.
fsd_status Device::commit(std::string &why) {
    if (weights.empty()) {
        why = "the model was loaded without memory mapping: load it with LLAMA_LOAD_MODE_MMAP on this device";
        return FSD_BAD_STATE;
    }
    // An attempt that was refused is made again with another budget: nothing of it may count twice.
    ledger.release(Use::core, core);
    ledger.release(Use::scratch, scratch);
    if (!lay_out_weights(why)) {
        return FSD_BAD_STATE;
    }
    if (wanted_ring == 0) {
        wanted_ring = 3 * layout.min_ring;
    }
    std::vector<size_t> asked;
    for (Buffer *b : buffers) {
        if (!b->weights && !b->cache) {
            asked.push_back(b->size);
        }
    }
    const uint64_t rest = fixed_bytes(layout, ledger.overhead(), asked);
    const KvNeed kv = kv_need();
    floor.store(floor_bytes(layout, rest, kv));
    full.store(full_bytes(layout, rest, kv));
    if (floor.load() > ledger.budget()) {
        why = "a VRAM budget of " + std::to_string(ledger.budget() >> 20) +
              " MiB is below the floor: this model and context need at least " +
              std::to_string((floor.load() + (1 << 20) - 1) >> 20) + " MiB";
        return FSD_BELOW_FLOOR;
    }
    for (Buffer *b : buffers) {
        if (!materialise(b)) {
            why = "the device refused " + std::to_string(b->size >> 20) + " MiB for KV or compute buffers";
            return FSD_OUT_OF_MEMORY;
        }
    }
    if (!take_core()) {
        why = "the device refused memory for small weights";
        return FSD_OUT_OF_MEMORY;
    }
    if (layout.scratch_bytes > 0) {
        scratch = ledger.allocate(Use::scratch, layout.scratch_bytes);
        if (!scratch) {
            why = "the device refused memory for scratch";
            return FSD_OUT_OF_MEMORY;
        }
        scratch_base = (char *)ggml_backend_buffer_get_base(scratch.get());
    }
    fetch_blocks();
    committed = true;
    const Residency r =
        residency(ledger.budget(), ledger.fixed(), layout.min_ring, wanted_ring, layout.slab_sizes, sizes.unit_bytes);
    if (!r.fits || !resize_ring(r.ring)) {
        committed = false;
        why = "the device refused memory for the ring";
        return FSD_OUT_OF_MEMORY;
    }
    update_floor();
    update_placements();
    return FSD_OK;
}

} // namespace fsd
