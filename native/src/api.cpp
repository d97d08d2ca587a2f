// The C interface, frameshard_device.h: checks arguments and the order of calls, takes the locks.
#include "device.h"
#include "emulated.h"
#include "kv_layout.h"
#include "last_error.h"
#include "plugin.h"
#include "tower.h"
#include "unread_load.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

using namespace fsd;

static std::string device_list() {
    std::string names = "emulated";
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (dev != plugin_device() && dev != vision_device() &&
            ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            names += std::string(", ") + ggml_backend_dev_name(dev);
        }
    }
    if (names == "emulated") {
        names += " (ggml sees no GPU: `frameshard doctor` says why)";
    }
    return names;
}

// The device that fsd_configure names.
static fsd_status find_device(const fsd_config &config, ggml_backend_dev_t &dev) {
    if (strcmp(config.inner_device, "emulated") == 0) {
        fs_emulated_config emulated;
        emulated.link_gbps = config.emulated_link_gbps;
        emulated.n_threads = config.n_threads;
        if (config.emulated_vram_bytes > 0) {
            emulated.vram_bytes = config.emulated_vram_bytes;
        }
        if (!fs_emulated_config_from_env(emulated)) {
            return fail(FSD_BAD_ARGUMENT, "FRAMESHARD_FAULTS is not of the form alloc=7,compute_fail=12");
        }
        dev = fs_emulated_device(emulated);
        device().cache.set_script({config.emulated_disk_gbps, emulated.faults.disk_fail, emulated.faults.disk_fails,
                                   emulated.faults.disk_stall, emulated.faults.stuck_ms});
    } else {
        dev = ggml_backend_dev_by_name(config.inner_device);
    }
    const bool usable = dev && dev != plugin_device() && dev != vision_device() &&
                        ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
    return usable ? FSD_OK
                  : fail(FSD_NO_DEVICE,
                         std::string("no device named '") + config.inner_device + "'; there are: " + device_list());
}

extern "C" {

uint32_t fsd_interface_version(void) { return FSD_INTERFACE_VERSION; }

const char *fsd_build_ggml_version(void) { return FSD_BUILD_GGML_VERSION; }

const char *fsd_build_ggml_commit(void) { return FSD_BUILD_GGML_COMMIT; }

const char *fsd_last_error(void) { return last_error().c_str(); }

fsd_status fsd_configure(const fsd_config *config) {
    Device &d = device();
    if (!config || config->struct_size != sizeof(fsd_config) || !config->inner_device || config->n_threads == 0 ||
        config->copy_bytes == 0 || !(config->emulated_link_gbps >= 0) || !(config->emulated_disk_gbps >= 0)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_config: a size, name or number is missing or out of range");
    }
    if (d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure can be called once per process");
    }
    if (!same_ggml()) {
        return fail(FSD_VERSION, std::string("built for ggml ") + FSD_BUILD_GGML_VERSION + " (" +
                                     FSD_BUILD_GGML_COMMIT + "), running " + ggml_version() + " (" + ggml_commit() +
                                     ")");
    }
    ggml_backend_dev_t dev = nullptr;
    if (const fsd_status status = find_device(*config, dev); status != FSD_OK) {
        return status;
    }
    d.cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!d.cpu || !d.inner.open(dev, config->copy_bytes)) {
        return fail(FSD_OUT_OF_MEMORY, std::string("the device '") + config->inner_device + "' could not be opened");
    }
    d.kernels.emplace(d.cpu);
    if (!d.kernels->of) {
        return fail(FSD_VERSION, "ggml's CPU backend does not offer its kernels: reinstall llama-cpp-python");
    }
    ggml_backend_reg_t cpu_reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(d.cpu));
    if (auto set =
            (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(cpu_reg, "ggml_backend_set_n_threads")) {
        set(d.cpu, (int)config->n_threads);
    }
    d.n_threads = config->n_threads;
    d.weights.sizes = d.weights.layout.sizes = {config->piece_bytes, config->step_bytes, config->slab_bytes,
                                                d.inner.quirks.vram_unit_bytes};
    d.ledger.set_budget(limit_of(config->budget_bytes));
    // Measurements without a model are of copies as those of a model's weights will be.
    if (d.inner.quirks.imports_memory && HostPaths::imports_memory(dev)) {
        d.set_path(HostPath::imported);
    }
    d.configured.store(true);
    return FSD_OK;
}

fsd_status fsd_set_shards(const fsd_shard_tensor *tensors, size_t n_tensors, uint32_t n_shards) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.committed || d.parked) {
        return fail(FSD_BAD_STATE, "fsd_set_shards comes before fsd_commit");
    }
    std::map<std::string, LadderPlace> ladder;
    for (size_t i = 0; i < n_tensors; i++) {
        if (!tensors || !tensors[i].tensor || tensors[i].shard >= n_shards) {
            return fail(FSD_BAD_ARGUMENT, "a tensor has no name or its shard is not below n_shards");
        }
        ladder[tensors[i].tensor] = {tensors[i].shard, i};
    }
    d.weights.ladder = std::move(ladder);
    d.weights.n_named_shards = n_shards;
    return FSD_OK;
}

fsd_status fsd_commit(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.configured.load() || d.committed || d.parked) {
        return fail(FSD_BAD_STATE, "fsd_commit comes once, after fsd_configure and the llama context; fsd_unpark ends "
                                   "the parking of a device");
    }
    std::string why;
    d.count_weights();
    const fsd_status status = d.commit(why);
    return status == FSD_OK ? FSD_OK : fail(status, why);
}

fsd_status fsd_set_floor_graphs(uint64_t bytes) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.set_floor_graphs(bytes)) {
        return fail(FSD_BAD_STATE, "fsd_set_floor_graphs comes after the llama context");
    }
    return FSD_OK;
}

fsd_status fsd_end_graph(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    d.end_graph();
    d.async_failure = GGML_STATUS_SUCCESS;
    return FSD_OK;
}

fsd_status fsd_set_async(int on) {
    device().async.store(on != 0);
    return FSD_OK;
}

fsd_status fsd_park(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed) {
        return fail(FSD_BAD_STATE, "fsd_park comes after fsd_commit");
    }
    if (!d.park()) {
        return fail(FSD_OUT_OF_MEMORY, "host memory has no room for the KV cache, so the device was not parked: end "
                                       "conversations, or free host memory, and park again");
    }
    return FSD_OK;
}

fsd_status fsd_unpark(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.parked) {
        return fail(FSD_BAD_STATE, "fsd_unpark comes after fsd_park");
    }
    std::string why;
    const fsd_status status = d.unpark(why);
    return status == FSD_OK ? FSD_OK : fail(status, why);
}

fsd_status fsd_get_memory(uint64_t *free_bytes, uint64_t *total_bytes) {
    Device &d = device();
    if (!d.configured.load() || !free_bytes || !total_bytes) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(d.inner.dev, &free, &total);
    *free_bytes = free;
    *total_bytes = total;
    return FSD_OK;
}

fsd_status fsd_take_pinned(uint64_t bytes, void **memory, void **data) {
    Device &d = device();
    if (!d.configured.load() || !memory || !data) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    InnerBuffer pinned = d.inner.host_buffer_type() ? allocate_pinned(d.inner.dev, bytes) : nullptr;
    if (!pinned) {
        return fail(FSD_UNSUPPORTED, "no pinned memory of " + std::to_string(bytes) + " bytes");
    }
    *data = ggml_backend_buffer_get_base(pinned.get());
    *memory = pinned.release();
    return FSD_OK;
}

void fsd_free_pinned(void *memory) { ggml_backend_buffer_free((ggml_backend_buffer_t)memory); }

static bool is_type(int32_t type) { return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type)type) > 0; }

// False for what no file can have. The bounds keep every product of sizes below 2^63.
static bool read_shape(const fsd_weight_shape &from, uint32_t least_shard, WeightShape &to) {
    constexpr int64_t most = (int64_t)1 << 48;
    if (!from.name || from.shard < least_shard || from.shard > (1u << 24) || !is_type(from.type)) {
        return false;
    }
    to = {from.name, from.shard, (ggml_type)from.type, {}};
    int64_t values = 1;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (from.ne[i] <= 0 || from.ne[i] > most / values) {
            return false;
        }
        values *= to.ne[i] = from.ne[i];
    }
    return to.ne[0] % ggml_blck_size(to.type) == 0;
}

static bool read_kv(const fsd_kv_shape &from, KvUse &to) {
    constexpr int64_t most = (int64_t)1 << 24;
    to = {from.layer, {(ggml_type)from.type, from.row, from.cells, from.streams}, from.used};
    return is_type(from.type) && from.row > 0 && from.row <= most && from.cells > 0 && from.cells <= most &&
           from.streams > 0 && from.streams <= 4096 && from.used >= 0 && from.used <= from.cells &&
           from.row % ggml_blck_size((ggml_type)from.type) == 0;
}

fsd_status fsd_lay_out(const fsd_layout_request *request, fsd_layout *layout, uint64_t *slabs, size_t max_slabs,
                       fsd_layout_piece *pieces, size_t max_pieces) {
    const fsd_layout_request *r = request;
    if (!r || r->struct_size != sizeof(fsd_layout_request) || !layout || layout->struct_size != sizeof(fsd_layout) ||
        !r->inner_device || (r->n_weights > 0 && !r->weights) || (r->n_kv > 0 && !r->kv) ||
        (r->n_buffers > 0 && !r->buffers) || (max_slabs > 0 && !slabs) || (max_pieces > 0 && !pieces)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_lay_out: a size or a pointer is missing");
    }
    std::vector<WeightShape> weights(r->n_weights);
    for (size_t i = 0; i < weights.size(); i++) {
        if (!read_shape(r->weights[i], i > 0 ? weights[i - 1].shard : 0, weights[i])) {
            return fail(FSD_BAD_ARGUMENT, "fsd_lay_out: weight " + std::to_string(i) +
                                              " has no name, an impossible shape, or a shard below the one before it");
        }
    }
    std::vector<KvUse> kv(r->n_kv);
    for (size_t i = 0; i < kv.size(); i++) {
        if (!read_kv(r->kv[i], kv[i])) {
            return fail(FSD_BAD_ARGUMENT, "fsd_lay_out: KV tensor " + std::to_string(i) + " has an impossible shape");
        }
    }
    const LayoutSizes sizes = {r->piece_bytes, r->step_bytes, r->slab_bytes,
                               quirks_of(r->inner_device).vram_unit_bytes};
    const Layout l = lay_out(weights, sizes, weights.empty() ? 1 : weights.back().shard + 1);
    const KvBytes held = kv_bytes(kv, sizes.unit_bytes);
    const uint64_t fixed =
        fixed_bytes(l, r->overhead_bytes, std::vector<size_t>(r->buffers, r->buffers + r->n_buffers));
    *layout = {};
    layout->struct_size = sizeof(fsd_layout);
    layout->prefill_tokens = kPrefillTokens;
    layout->unit_bytes = l.sizes.unit_bytes;
    layout->piece_bytes = l.sizes.piece_bytes;
    layout->step_bytes = l.sizes.step_bytes;
    layout->slab_bytes = l.sizes.slab_bytes;
    layout->min_ring_bytes = l.min_ring;
    layout->arena_bytes = l.slabs_total;
    layout->core_bytes = l.granular(l.core_bytes);
    layout->scratch_bytes = l.granular(l.scratch_bytes);
    layout->fixed_bytes = fixed;
    layout->kv_window_bytes = held.need.least;
    layout->kv_bytes = held.need.whole;
    layout->kv_used_bytes = held.used;
    layout->floor_bytes = floor_bytes(l, fixed, held.need);
    layout->full_bytes = full_bytes(l, fixed, held.need);
    layout->weights_beside_kv_bytes = l.weights_beside_kv();
    layout->expert_slots_passing = ExpertCache::kPassing;
    layout->pool_share = quirks_of(r->inner_device).pool_share;
    layout->n_slabs = l.slab_sizes.size();
    layout->n_pieces = l.pieces.size();
    std::copy_n(l.slab_sizes.begin(), std::min(max_slabs, l.slab_sizes.size()), slabs);
    for (size_t i = 0; i < std::min(max_pieces, l.pieces.size()); i++) {
        const Piece &p = l.pieces[i];
        pieces[i] = {(uint32_t)p.tensor, p.shard, (uint32_t)p.slab, p.bytes, p.padded};
    }
    return FSD_OK;
}

fsd_status fsd_fit(uint64_t room_bytes, uint64_t wanted_ring_bytes, uint64_t min_ring_bytes, uint64_t unit_bytes,
                   const uint64_t *slabs, size_t n_slabs, uint64_t *ring_bytes, size_t *n_resident) {
    if (!ring_bytes || !n_resident || unit_bytes == 0 || (n_slabs > 0 && !slabs)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_fit: a size or a pointer is missing");
    }
    const Residency r = residency(room_bytes, 0, min_ring_bytes, wanted_ring_bytes,
                                  std::vector<size_t>(slabs, slabs + n_slabs), unit_bytes);
    *ring_bytes = r.ring;
    *n_resident = r.slabs;
    return r.fits ? FSD_OK : fail(FSD_BELOW_FLOOR, "there is no room for the smallest ring");
}

fsd_status fsd_set_plan(const fsd_tier *tiers, size_t n_tiers, uint32_t n_shards, uint64_t ring_bytes,
                        double expert_stream_share, int exact) {
    Device &d = device();
    if (!(expert_stream_share >= 0 && expert_stream_share <= 1)) {
        return fail(FSD_BAD_ARGUMENT, "expert_stream_share must be in [0, 1]");
    }
    if (n_tiers > FSD_MAX_TIERS || (n_tiers > 0 && !tiers)) {
        return fail(FSD_BAD_ARGUMENT, "too many tiers");
    }
    Plan plan;
    plan.expert_stream_share = expert_stream_share;
    plan.exact = exact != 0;
    for (size_t i = 0; i < n_tiers; i++) {
        if (!tiers[i].placement ||
            (i == 0 ? tiers[i].min_tokens != 0 : tiers[i].min_tokens <= tiers[i - 1].min_tokens)) {
            return fail(FSD_BAD_ARGUMENT, "tiers must ascend by min_tokens from 0, and each needs placements");
        }
        Tier t;
        t.min_tokens = tiers[i].min_tokens;
        t.placement.assign(tiers[i].placement, tiers[i].placement + n_shards);
        for (uint8_t p : t.placement) {
            if (p != FSD_STREAMED && p != FSD_CPU) {
                return fail(FSD_BAD_ARGUMENT, "a placement is neither FSD_STREAMED nor FSD_CPU");
            }
        }
        plan.tiers.push_back(std::move(t));
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed) {
        return fail(FSD_BAD_STATE, "fsd_set_plan comes after fsd_commit");
    }
    d.inner.synchronize();
    d.plan = std::move(plan);
    d.residency_generation++;
    if (ring_bytes > 0) {
        d.ring.wanted = ring_bytes;
    }
    const Residency r = d.residency_at(d.ledger.fixed());
    if (d.ring.capacity() > 0 && r.ring > 0 && d.ring.capacity() != r.ring) {
        while (d.arena.slabs.size() > r.slabs) {
            d.arena.evict();
        }
        if (!d.ring.resize(r.ring)) {
            return fail(FSD_OUT_OF_MEMORY, "the device refused memory for the ring");
        }
    }
    d.update_placements();
    return FSD_OK;
}

fsd_status fsd_set_budget(uint64_t bytes, double timeout_s) { return fsd_set_own_budget(bytes, UINT64_MAX, timeout_s); }

fsd_status fsd_set_own_budget(uint64_t bytes, uint64_t known_generation, double timeout_s) {
    Device &d = device();
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    uint64_t wanted = limit_of(bytes);
    if (wanted < d.ledger.floor()) {
        return fail(FSD_BELOW_FLOOR, "a VRAM budget of " + std::to_string(wanted >> 20) +
                                         " MiB is below the floor of " +
                                         std::to_string((d.ledger.floor() + (1 << 20) - 1) >> 20) + " MiB");
    }
    const uint64_t number = d.requests.ask(wanted, known_generation);
    if (d.ledger.used() > wanted) {
        interrupt_tower(); // the encode frees its VRAM; the caller encodes again within the new budget
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    while (!d.requests.applied(number)) {
        if (d.apply_budget_if_idle() || d.requests.applied(number)) {
            continue;
        }
        if (std::chrono::steady_clock::now() >= deadline) {
            return fail(FSD_TIMEOUT, "the budget was not reached in time; it stays in force");
        }
        d.requests.wait();
    }
    if (d.ledger.used() > wanted && !d.requests.replaced(number)) {
        return fail(FSD_TIMEOUT, "more is in use than the budget allows; it stays in force");
    }
    return FSD_OK;
}

fsd_status fsd_set_host_budget(uint64_t bytes, double timeout_s) {
    Device &d = device();
    if (!d.configured.load()) {
        return fail(FSD_BAD_STATE, "fsd_configure comes first");
    }
    if (!d.host.fits(bytes)) {
        return fail(FSD_BELOW_HOST_FLOOR, below_host_floor(bytes, d.host.floor()));
    }
    if (d.host.floor() == 0) { // nothing was committed
        std::lock_guard<std::mutex> lock(d.graph_mutex);
        expect_unread_load(bytes > 0 && d.weights.all.empty());
    }
    const uint64_t number = d.host.ask(bytes);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    const auto reached = [&] {
        const bool known = d.host.floor() > 0; // before fsd_commit nothing can be freed
        return d.host.applied(number) && (bytes == 0 || !known || d.host.used() <= bytes || d.host.replaced(number));
    };
    while (!reached()) {
        if (!d.host.applied(number) && d.apply_host_budget_if_idle()) {
            continue;
        }
        if (std::chrono::steady_clock::now() >= deadline) {
            return fail(FSD_TIMEOUT, "the limit on host memory was not reached in time; it stays in force");
        }
        sleep_for(std::chrono::milliseconds(1));
    }
    return FSD_OK;
}

fsd_status fsd_use_kv(uint32_t sequence, uint64_t cells) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed) {
        return fail(FSD_BAD_STATE, "fsd_use_kv comes after fsd_commit");
    }
    d.requests.apply();
    d.kv.use_cells(sequence, cells);
    if (!d.kv.settle(false)) {
        return fail(FSD_OUT_OF_MEMORY, "no memory for a KV cache of this length");
    }
    d.update_placements(); // slabs may have been evicted
    return FSD_OK;
}

fsd_status fsd_fill(uint64_t max_bytes, uint64_t *filled) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed) {
        return fail(FSD_BAD_STATE, "fsd_fill comes after fsd_commit");
    }
    d.requests.apply();
    const size_t n = d.fill(max_bytes);
    if (filled) {
        *filled = n;
    }
    return FSD_OK;
}

fsd_status fsd_add_spare(uint64_t *taken) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed || !taken) {
        return fail(FSD_BAD_STATE, "fsd_add_spare comes after fsd_commit");
    }
    d.requests.apply();
    *taken = d.kv.add_spare();
    return FSD_OK;
}

fsd_status fsd_get_expert_uses(uint32_t shard, uint32_t *uses, size_t n_max, size_t *n) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    const std::vector<uint32_t> &counted = d.experts.uses(shard);
    std::copy_n(counted.begin(), std::min(n_max, counted.size()), uses);
    *n = counted.size();
    return FSD_OK;
}

fsd_status fsd_set_expert_uses(uint32_t shard, const uint32_t *uses, size_t n) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    d.experts.set_uses(shard, std::vector<uint32_t>(uses, uses + n));
    return FSD_OK;
}

fsd_status fsd_clear_expert_cache(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    d.experts.clear();
    return FSD_OK;
}

fsd_status fsd_set_overhead(uint64_t bytes) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    const uint64_t before = d.ledger.overhead();
    d.set_overhead(bytes);
    if (!d.committed) {
        d.ledger.note_peak();
        return FSD_OK;
    }
    if (bytes > before && !d.ledger.make_room(0)) {
        return fail(FSD_BELOW_FLOOR, "the overhead leaves less VRAM than the model's floor");
    }
    d.ledger.note_peak();
    d.update_placements();
    return FSD_OK;
}

fsd_status fsd_open_frame_block(const char *path) {
    std::string why;
    return device().pacing.open(path, why) ? FSD_OK : fail(FSD_BAD_ARGUMENT, why);
}

fsd_status fsd_poll_frame_block(uint64_t *generation) {
    Device &d = device();
    *generation = 0;
    if (!d.pacing.active()) {
        return FSD_OK;
    }
    d.requests.read_frame_block();
    if (d.requests.pending()) {
        d.apply_budget_if_idle();
    }
    *generation = d.requests.answer_frame_block();
    return FSD_OK;
}

fsd_status fsd_set_scheduling_mode(fsd_scheduling_mode mode) {
    if (mode < FSD_PRIORITIZE_GRAPHICS || mode > FSD_PRIORITIZE_COMPUTE) {
        return fail(FSD_BAD_ARGUMENT, "no such scheduling mode");
    }
    device().pacing.set_mode((Mode)mode);
    return FSD_OK;
}

fsd_status fsd_get_pacing(fsd_pacing *pacing) {
    if (!pacing || pacing->struct_size != sizeof(fsd_pacing)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_pacing: struct_size is not sizeof(fsd_pacing)");
    }
    const PacingFigures f = device().pacing.figures();
    pacing->pacing = f.pacing;
    pacing->frames = f.frames;
    pacing->late_frames = f.late_frames;
    pacing->frame_time_s = f.frame_time_s;
    pacing->target_frame_s = f.target_frame_s;
    pacing->longest_step_s = f.longest_step_s;
    pacing->waited_s = f.waited_s;
    pacing->share = f.share;
    pacing->gpu_busy_s = f.gpu_busy_s;
    return FSD_OK;
}

fsd_status fsd_set_abort(int on) {
    device().abort.store(on != 0);
    if (on) {
        interrupt_tower();
    }
    return FSD_OK;
}

fsd_status fsd_trace_start(void) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.configured.load() || d.inner.trace) {
        return fail(FSD_BAD_STATE, "fsd_trace_start comes after fsd_configure, and once before each fsd_trace_stop");
    }
    if (d.inner.quirks.keeps_until_waited) {
        return fail(FSD_UNSUPPORTED, std::string("no time line on ") + ggml_backend_dev_name(d.inner.dev) +
                                         ": no other thread may wait for its events");
    }
    d.inner.trace = std::make_unique<Trace>(d.inner.dev);
    return FSD_OK;
}

fsd_status fsd_trace_stop(fsd_span *spans, size_t n_max, size_t *n) {
    Device &d = device();
    if (!n || (n_max > 0 && !spans)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_trace_stop: a pointer is missing");
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.inner.trace) {
        return fail(FSD_BAD_STATE, "fsd_trace_start comes first");
    }
    const std::vector<fsd_span> all = d.inner.trace->finish();
    d.inner.trace.reset();
    *n = all.size();
    std::copy_n(all.begin(), std::min(n_max, all.size()), spans);
    return FSD_OK;
}

fsd_status fsd_get_stats(fsd_stats *stats) {
    Device &d = device();
    if (!stats || stats->struct_size != sizeof(fsd_stats)) {
        return fail(FSD_BAD_ARGUMENT, "fsd_stats: struct_size is not sizeof(fsd_stats)");
    }
    *stats = d.counters.read();
    stats->struct_size = sizeof(fsd_stats);
    stats->kv_host_bytes = d.kv.spilled_bytes();
    stats->evicted_slabs = d.arena.n_evicted.load();
    stats->filled_slabs = d.arena.n_filled.load();
    stats->budget_generation = d.requests.rounds();
    const Ledger::Figures f = d.ledger.figures();
    const auto used_by = [&](Use use) { return f.used_by[(int)use]; };
    stats->overhead_bytes = f.overhead + used_by(Use::pool);
    stats->pool_bytes = used_by(Use::pool);
    stats->lacks_workspaces = d.inner.lacks_workspaces.load();
    stats->buffers_bytes = used_by(Use::graph) + used_by(Use::buffers) + used_by(Use::kv) + used_by(Use::image);
    stats->graph_bytes = used_by(Use::graph);
    stats->kv_bytes = used_by(Use::kv);
    stats->core_bytes = used_by(Use::core);
    stats->arena_bytes = used_by(Use::arena);
    stats->ring_bytes = used_by(Use::ring);
    stats->scratch_bytes = used_by(Use::scratch);
    stats->used_bytes = f.used;
    stats->peak_bytes = f.peak;
    add_tower_counters(*stats);
    stats->imported_bytes = d.inner.host_paths.imported_bytes.load();
    stats->staged_bytes = d.inner.host_paths.staged_bytes.load();
    stats->host_budget_bytes = d.host.budget();
    stats->host_used_bytes = d.host.used();
    stats->host_floor_bytes = d.host.floor();
    stats->host_weights_bytes = d.host.weights();
    stats->disk_read_bytes = d.cache.counts().read_bytes;
    stats->disk_waited_s = d.cache.counts().all_waited_s();
    stats->disk_expert_reads = d.cache.experts().n_read();
    stats->host_mapped = !d.cache.is_open();
    stats->budget_bytes = d.ledger.budget();
    stats->floor_bytes = d.ledger.floor();
    stats->full_bytes = d.ledger.full();
    if (d.configured.load() && d.inner.quirks.emulated) {
        stats->copy_busy_s = fs_emulated_get_stats(d.inner.dev).h2d_busy_s;
    }
    return FSD_OK;
}

fsd_status fsd_reset_peak(void) {
    device().ledger.reset_peak();
    return FSD_OK;
}

} // extern "C"
