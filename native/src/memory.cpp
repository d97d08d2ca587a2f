// VRAM: the ledger, the arena of slabs, the ring's memory, and what a change of budget does to them.
#include "device.h"

#include <cstring>

namespace fsd {

static constexpr ggml_backend_buffer_usage kWeights = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;

uint64_t Device::used() {
    std::lock_guard<std::mutex> lock(state_mutex);
    uint64_t sum = overhead.load();
    for (size_t u : used_by) {
        sum += u;
    }
    return sum;
}

uint64_t Device::fixed() {
    std::lock_guard<std::mutex> lock(state_mutex);
    return overhead.load() + used_by[(int)Use::buffers] + used_by[(int)Use::cache] + used_by[(int)Use::core] +
           used_by[(int)Use::scratch];
}

// Drivers hand out VRAM in units of 2 MiB: the ledger counts what really goes.
size_t Device::granular(size_t bytes) const {
    constexpr size_t unit = (size_t)2 << 20;
    return emulated ? bytes : (bytes + unit - 1) / unit * unit;
}

InnerBuffer Device::allocate(Use use, size_t bytes, bool may_spill) {
    bytes = granular(bytes);
    if (!make_room(bytes, may_spill)) {
        return nullptr;
    }
    InnerBuffer b(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(inner), bytes));
    if (!b) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(state_mutex);
    used_by[(int)use] += ggml_backend_buffer_get_size(b.get());
    uint64_t sum = overhead.load();
    for (size_t u : used_by) {
        sum += u;
    }
    peak = std::max<uint64_t>(peak, sum);
    return b;
}

void Device::release(Use use, InnerBuffer &buffer) {
    if (!buffer) {
        return;
    }
    const size_t size = ggml_backend_buffer_get_size(buffer.get());
    buffer.reset();
    std::lock_guard<std::mutex> lock(state_mutex);
    used_by[(int)use] -= size;
}

void Device::synchronize() {
    if (compute_pending) {
        ggml_backend_synchronize(compute);
        compute_pending = false;
    }
}

char *Device::staged(size_t bytes) {
    if (staged_bytes < bytes) {
        synchronize(); // it may be in use
        staged_bytes = align_up(2 * bytes);
        ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(inner);
        staging.reset(host ? ggml_backend_buft_alloc_buffer(host, staged_bytes) : nullptr);
        unpinned.resize(staging ? 0 : staged_bytes);
    }
    return staging ? (char *)ggml_backend_buffer_get_base(staging.get()) : unpinned.data();
}

// Gives up residency from the ladder's tail, then the ring's surplus, then the caches', until `bytes` more fit the budget.
bool Device::make_room(size_t bytes, bool may_spill) {
    const uint64_t limit = budget.load();
    while (used() + bytes > limit) {
        if (!slabs.empty()) {
            pop_slab();
        } else if (ring.capacity > min_ring) {
            if (!resize_ring(min_ring)) {
                return false;
            }
        } else if (!may_spill) {
            return false;
        } else if (!spill_block()) {
            if (n_panes < 2) {
                return false;
            }
            release_window(); // with one pane it does too
        }
    }
    return true;
}

void Device::pop_slab() {
    synchronize(); // queued work may still read the slab
    Slab &s = slabs.back();
    ggml_backend_event_synchronize(s.filled); // and its copies may still be under way
    ggml_backend_event_free(s.filled);
    release(Use::arena, s.buffer);
    slabs.pop_back();
    residency_generation++;
    std::lock_guard<std::mutex> lock(state_mutex);
    counters.evicted_slabs++;
}

bool Device::resize_ring(size_t bytes) {
    if (granular(bytes) > bytes) {
        bytes = granular(bytes) - granular(1); // whole units only, and not more than asked for
    }
    if (bytes == ring.capacity) {
        return true;
    }
    synchronize();
    reset_ring();
    experts.clear();
    release(Use::ring, ring.buffer);
    ring.base = nullptr;
    ring.capacity = 0;
    residency_generation++;
    if (bytes == 0) {
        return true;
    }
    ring.buffer = allocate(Use::ring, bytes);
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
    if (ring.capacity > 0 || slabs.size() == slab_sizes.size()) {
        return true;
    }
    const uint64_t limit = budget.load(), held = used();
    const uint64_t room = std::max<uint64_t>(min_ring, limit > held ? limit - held : 0);
    if (resize_ring(std::min<uint64_t>(room, std::max(wanted_ring, min_ring)))) {
        return true;
    }
    // The device has less than the budget allows: another program holds the rest. Slabs give way to the smallest ring.
    while (!resize_ring(min_ring)) {
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
    if (committed && floor.load() + granular(b->size) > budget.load()) {
        return false; // the ring's smallest size stays free, even while everything is resident and there is no ring
    }
    InnerBuffer inner_buffer = allocate(Use::buffers, b->size);
    if (!inner_buffer) {
        return false;
    }
    b->inner_base = (char *)ggml_backend_buffer_get_base(inner_buffer.get());
    if (b->parked) {
        ggml_tensor raw = raw_tensor(inner_buffer.get(), b->inner_base, b->size);
        ggml_backend_tensor_set(&raw, b->base, 0, b->size);
        forget_pages(b->base, b->size);
        b->parked = false;
    } else {
        ggml_backend_buffer_clear(inner_buffer.get(), 0);
    }
    b->inner = inner_buffer.release();
    return true;
}

bool Device::open_streams() {
    compute = compute ? compute : ggml_backend_dev_init(inner, nullptr);
    copy = copy ? copy : ggml_backend_dev_init(inner, nullptr);
    return compute && copy;
}

// All VRAM is given back but the driver's context; KV and compute buffers go to the host addresses that were reserved for
// them. commit() takes it all again.
void Device::park() {
    synchronize();
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
            release(Use::buffers, given);
            b->inner = nullptr;
            b->inner_base = nullptr;
            b->parked = true;
        }
    }
    release(Use::core, core);
    release(Use::scratch, scratch);
    core_base = scratch_base = nullptr;
    // The inner device's pools and workspaces belong to its backends.
    ggml_backend_free(copy);
    ggml_backend_free(compute);
    copy = compute = nullptr;
    committed = false;
    update_placements();
}

void Device::update_floor() {
    uint64_t least, most, held;
    cache_limits(least, most);
    {
        std::lock_guard<std::mutex> lock(state_mutex);
        held = used_by[(int)Use::cache];
    }
    // A model smaller than one step is simply resident.
    floor.store(fixed() - held + least + std::min(min_ring, slabs_total));
    full.store(fixed() - held + most + slabs_total);
}

// A new budget takes effect: slabs go at once, growth is filled in later by fill().
void Device::apply_budget() {
    const uint64_t generation = requested_generation.load();
    const uint64_t bytes = requested_budget.load();
    budget.store(bytes);
    if (committed) {
        spill_surplus();
        const Residency r = residency(bytes, fixed() + window_lacks(), min_ring, wanted_ring, slab_sizes);
        while (slabs.size() > r.slabs) {
            pop_slab();
        }
        // A ring that is already there stays as it is if it still fits: its addresses are in compiled programs.
        if (r.ring > 0 && (ring.capacity == 0 || used() > bytes)) {
            make_room(0);
            resize_ring(r.ring);
        }
        make_room(0);
        ensure_window();
        update_placements();
    }
    {
        std::lock_guard<std::mutex> lock(state_mutex);
        counters.budget_generation++;
        applied_generation.store(generation);
    }
    applied.notify_all();
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
    const Residency want = residency(budget.load(), fixed(), min_ring, wanted_ring, slab_sizes);
    if (want.fits && want.ring == 0 && ring.capacity > 0) {
        synchronize();
        resize_ring(0);
    }
    while (slabs.size() < want.slabs && done < max_bytes) {
        const size_t i = slabs.size();
        if (used() + slab_sizes[i] > budget.load()) {
            break;
        }
        Slab slab;
        slab.buffer = allocate(Use::arena, slab_sizes[i]);
        if (!slab.buffer) {
            break; // another program holds the memory: go on with what we have
        }
        ggml_backend_buffer_set_usage(slab.buffer.get(), kWeights);
        slab.base = (char *)ggml_backend_buffer_get_base(slab.buffer.get());
        for (const Piece &p : pieces) {
            if (p.slab != (int)i) {
                continue;
            }
            const Weight &w = weights[p.tensor];
            if (p.padded > p.bytes) {
                // Kernels may read past the last row: what lies there must at least be numbers.
                ggml_tensor pad =
                    raw_tensor(slab.buffer.get(), slab.base + p.slab_offset + p.bytes, p.padded - p.bytes);
                ggml_backend_tensor_memset(&pad, 0, 0, p.padded - p.bytes);
            }
            ggml_tensor dst = raw_tensor(slab.buffer.get(), slab.base + p.slab_offset, p.bytes);
            for (size_t at = 0, most = largest_copy(); at < p.bytes; at += most) {
                const size_t n = std::min(most, p.bytes - at);
                ggml_backend_tensor_set_async(copy, &dst, w.host + p.host_offset + at, at, n);
            }
        }
        slab.filled = ggml_backend_event_new(inner);
        ggml_backend_event_record(slab.filled, copy);
        done += slab_sizes[i];
        slabs.push_back(std::move(slab));
        std::lock_guard<std::mutex> lock(state_mutex);
        counters.filled_slabs++;
    }
    update_placements();
    return done;
}

// Slabs whose copies were started become usable: the compute stream waits for them on the device, not the host.
void Device::finish_fills() {
    for (Slab &s : slabs) {
        if (!s.ready) {
            ggml_backend_event_wait(compute, s.filled);
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
        if (shard_bytes[s] == 0) {
            continue;
        }
        int kind = 0;
        if (shard_last_slab[s] >= (int)slabs.size()) {
            kind = decode && decode->on_cpu(s) ? 2 : 1;
        }
        shards[kind]++;
        if (kind == 0) {
            bytes[0] += shard_bytes[s];
        }
    }
    for (const Piece &p : pieces) {
        if (shard_last_slab[p.shard] < (int)slabs.size()) {
            continue; // counted with its shard
        }
        const bool on_cpu = decode && decode->on_cpu(p.shard);
        bytes[p.slab < (int)slabs.size() ? 0 : on_cpu ? 2 : 1] += p.bytes;
    }
    std::lock_guard<std::mutex> lock(state_mutex);
    counters.resident_bytes = bytes[0];
    counters.streamed_bytes = bytes[1];
    counters.cpu_bytes = bytes[2];
    counters.resident_shards = shards[0];
    counters.streamed_shards = shards[1];
    counters.cpu_shards = shards[2];
}

// Fixes pieces, slabs and the smallest ring from the weights and the ladder, then takes the memory that the model cannot
// do without.
fsd_status Device::commit(std::string &why) {
    if (weights.empty()) {
        why = "the model was loaded without memory mapping: load it with LLAMA_LOAD_MODE_MMAP on this device";
        return FSD_BAD_STATE;
    }
    // An attempt that was refused is made again with another budget: nothing of it may count twice.
    n_shards = std::max(1u, n_named_shards);
    pieces.clear();
    release(Use::core, core);
    release(Use::scratch, scratch);
    size_t total = 0;
    size_t largest_matrix = 0; // of a layer
    bool has_tail = false;
    for (Weight &w : weights) {
        auto it = shard_of.find(w.name);
        w.shard = it == shard_of.end() ? n_shards : it->second;
        has_tail = has_tail || it == shard_of.end();
        w.core = w.bytes <= kCoreBytes;
        total += w.bytes;
        if (w.name.compare(0, 4, "blk.") == 0 && w.is_matrix()) {
            largest_matrix = std::max(largest_matrix, w.bytes);
        }
    }
    n_shards += has_tail ? 1 : 0;

    // Defaults depend on the model alone, never on the budget: they decide which kernels see which shapes.
    constexpr size_t MiB = 1024 * 1024;
    if (step_bytes == 0) {
        step_bytes = std::min<size_t>(std::max<size_t>(2 * MiB, total / 64), 32 * MiB);
    }
    if (piece_bytes == 0) {
        piece_bytes = std::max({4 * MiB, largest_matrix, step_bytes});
    }
    if (slab_bytes == 0) {
        slab_bytes = std::min<size_t>(std::max<size_t>({1 * MiB, 4 * granular(1), total / 64}), 64 * MiB);
    }

    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(inner);
    const auto padded_bytes = [&](const ggml_tensor &t) {
        const int64_t lacks = ggml_is_quantized(t.type) ? (kRowBlock - t.ne[1] % kRowBlock) % kRowBlock : 0;
        return align_up(ggml_backend_buft_get_alloc_size(buft, &t) + (size_t)lacks * t.nb[1]);
    };
    std::vector<int> order(weights.size());
    for (size_t i = 0; i < order.size(); i++) {
        order[i] = (int)i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weights[a].shard < weights[b].shard; });

    shard_bytes.assign(n_shards, 0);
    shard_last_slab.assign(n_shards, -1);
    core_size = 0;
    size_t largest_piece = 0;
    int64_t largest_split_rows = 0;
    for (int i : order) {
        Weight &w = weights[i];
        const size_t padded = padded_bytes(w.shape);
        if (w.core) {
            w.core_offset = core_size;
            core_size += padded;
            continue;
        }
        shard_bytes[w.shard] += w.bytes;
        w.first_piece = (int)pieces.size();
        const size_t row = w.shape.nb[1];
        const int64_t rows_each =
            w.is_matrix() && w.bytes > piece_bytes ? rows_of_piece(piece_bytes, row) : w.shape.ne[1];
        for (int64_t r = 0; r < w.shape.ne[1]; r += rows_each) {
            Piece p;
            p.tensor = i;
            p.shard = w.shard;
            p.row0 = r;
            p.rows = std::min(rows_each, w.shape.ne[1] - r);
            if (p.rows == w.shape.ne[1]) {
                p.bytes = w.bytes;
                p.padded = padded;
            } else {
                largest_split_rows = std::max(largest_split_rows, p.rows);
                p.host_offset = (size_t)r * row;
                p.bytes = (size_t)p.rows * row;
                ggml_tensor part = w.shape;
                part.ne[1] = p.rows;
                part.nb[2] = part.nb[3] = p.bytes;
                p.padded = padded_bytes(part);
            }
            largest_piece = std::max(largest_piece, p.padded);
            pieces.push_back(p);
        }
        w.n_pieces = (int)pieces.size() - w.first_piece;
    }
    slab_sizes = pack_slabs(pieces, slab_bytes);
    slabs_total = 0;
    for (size_t &s : slab_sizes) {
        s = granular(s);
        slabs_total += s;
    }
    size_t largest_shard = 0;
    std::vector<size_t> padded_of(n_shards, 0);
    for (const Piece &p : pieces) {
        padded_of[p.shard] += p.padded;
        largest_shard = std::max(largest_shard, padded_of[p.shard]);
        shard_last_slab[p.shard] = std::max(shard_last_slab[p.shard], p.slab);
    }
    min_ring = std::max(largest_piece, std::min(step_bytes, largest_shard));
    if (wanted_ring == 0) {
        wanted_ring = 3 * min_ring;
    }

    if (largest_split_rows > 0) {
        scratch_size = align_up(std::max(kScratchBytes, (size_t)largest_split_rows * sizeof(float)));
    }

    min_ring = granular(min_ring);
    uint64_t need = overhead.load() + granular(core_size) + granular(scratch_size) + std::min(min_ring, slabs_total);
    for (Buffer *b : buffers) {
        need += b->weights || b->cache ? 0 : granular(b->size);
    }
    uint64_t least, most;
    cache_limits(least, most);
    full.store(need - std::min(min_ring, slabs_total) + slabs_total + most);
    need += least;
    floor.store(need);
    if (need > budget.load()) {
        why = "a VRAM budget of " + std::to_string(budget.load() >> 20) +
              " MiB is below the floor: this model and context need at least " +
              std::to_string((need + (1 << 20) - 1) >> 20) + " MiB";
        return FSD_BELOW_FLOOR;
    }
    for (Buffer *b : buffers) {
        if (!materialise(b)) {
            why = "the device refused " + std::to_string(b->size >> 20) + " MiB for KV or compute buffers";
            return FSD_OUT_OF_MEMORY;
        }
    }
    if (core_size > 0) {
        core = allocate(Use::core, core_size);
        if (!core) {
            why = "the device refused memory for small weights";
            return FSD_OUT_OF_MEMORY;
        }
        ggml_backend_buffer_set_usage(core.get(), kWeights);
        ggml_backend_buffer_clear(core.get(), 0);
        core_base = (char *)ggml_backend_buffer_get_base(core.get());
        for (const Weight &w : weights) {
            if (w.core) {
                ggml_tensor dst = raw_tensor(core.get(), core_base + w.core_offset, w.bytes);
                ggml_backend_tensor_set(&dst, w.host, 0, w.bytes);
            }
        }
    }
    if (scratch_size > 0) {
        scratch = allocate(Use::scratch, scratch_size);
        if (!scratch) {
            why = "the device refused memory for scratch";
            return FSD_OUT_OF_MEMORY;
        }
        scratch_base = (char *)ggml_backend_buffer_get_base(scratch.get());
    }
    fetch_blocks();
    committed = true;
    const Residency r = residency(budget.load(), fixed(), min_ring, wanted_ring, slab_sizes);
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
