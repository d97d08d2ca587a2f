#include "inner.h"

#include "emulated.h"
#include "layout.h"
#include "mapped_file.h"
#include "pacing.h"
#include "system.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace fsd {

static constexpr size_t MiB = 1024 * 1024;

static constexpr size_t kInputBytes = MiB / 2; // of all inputs of a graph of few tokens

static constexpr Quirks kQuirks[] = {
    // Prefill is merged to 0.5 ms of an H100, 10 ms of a laptop.
    {"CUDA", false, 2 * MiB, HostReads::pinned, false, false, false, false, false, 2048 * MiB, 512 * MiB,
     (size_t)1 << 38, 768 * MiB, 1e13, 0.5, 512, 0.25, true},
    {"Vulkan", false, 2 * MiB, HostReads::never, true, true, true, true, true, 2048 * MiB, 512 * MiB, (size_t)1 << 38,
     768 * MiB, 1e13, 0.5, 512, 0.25, false},
    {"emulated", true, 1, HostReads::always, false, false, false, false, false, 64 * MiB, 64 * MiB, 0, 64 * MiB, 4e9, 0,
     64, 0, false},
    {"", false, 2 * MiB, HostReads::never, false, false, false, false, false, 2048 * MiB, 512 * MiB, (size_t)1 << 38,
     768 * MiB, 1e13, 0.5, 512, 0.25, false},
};

const Quirks &quirks_of(const char *name) {
    return *std::find_if(std::begin(kQuirks), std::end(kQuirks),
                         [&](const Quirks &q) { return strncmp(name, q.registry, strlen(q.registry)) == 0; });
}

ggml_tensor *GraphKeys::key(bool one_token, size_t index) {
    auto &keys = keys_[one_token];
    while (keys.size() <= index) {
        keys.push_back(std::make_unique<ggml_tensor>());
        *keys.back() = {};
        std::fill_n(keys.back()->ne, GGML_MAX_DIMS, 1);
    }
    return keys[index].get();
}

bool Inner::open(ggml_backend_dev_t device, size_t copy_bytes) {
    dev = device;
    quirks = quirks_of(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)));
    if (strstr(ggml_backend_dev_description(device),
               "llvmpipe")) { // Vulkan in software: measured like the emulated one
        const Quirks &emulated = quirks_of("emulated");
        quirks.probe_bytes = emulated.probe_bytes;
        quirks.probe_flops = emulated.probe_flops;
        quirks.warm_up_s = emulated.warm_up_s;
        quirks.probe_queries = emulated.probe_queries;
    }
    if (quirks.emulated) {
        quirks.vram_unit_bytes = fs_emulated_vram_unit(device);
    }
    this->copy_bytes = copy_bytes;
    // ggml-cuda registers host memory only if this is set. llama.cpp's own use of it does not apply to our buffers.
    if (!std::getenv("GGML_CUDA_REGISTER_HOST")) {
        set_environment("GGML_CUDA_REGISTER_HOST", "1");
    }
    if (!open_streams()) {
        close_streams();
        dev = nullptr;
        return false;
    }
    return true;
}

bool Inner::open_streams() {
    compute = compute ? compute : ggml_backend_dev_init(dev, nullptr);
    copy = copy ? copy : ggml_backend_dev_init(dev, nullptr);
    mirror = mirror || quirks.one_queue ? mirror : ggml_backend_dev_init(dev, nullptr);
    aside = aside || quirks.one_queue ? aside : ggml_backend_dev_init(dev, nullptr);
    return compute && copy && ((mirror && aside) || quirks.one_queue);
}

bool Inner::renew_compute() {
    ggml_backend_t renewed = ggml_backend_dev_init(dev, nullptr);
    if (!renewed) {
        return false;
    }
    ggml_backend_synchronize(compute);
    rest_recorded();
    ggml_backend_free(compute);
    compute = renewed;
    compute_pending = graph_pending = inputs_pending = false;
    pool_bytes_ = 0;
    lacks_workspaces.store(true);
    return true;
}

void Inner::grow_pool(ggml_backend_buffer_t memory, size_t bytes) {
    constexpr int64_t columns = 4096; // of 16-bit values, into which a pool takes the other operand
    const int64_t rows = (int64_t)(bytes / (columns * sizeof(ggml_fp16_t)));
    const size_t result_at = rows * columns * sizeof(float), weights_at = result_at + align_up(rows * sizeof(float));
    const size_t needed = weights_at + columns * sizeof(ggml_fp16_t);
    constexpr int64_t few = 64; // other kernels take none of a pool
    if (!quirks.reads_beyond_pool || bytes <= pool_bytes_ || rows < few ||
        needed > ggml_backend_buffer_get_size(memory)) {
        return;
    }
    const auto matrix = [&](ggml_type type, size_t at, int64_t row, int64_t n_rows) {
        ggml_tensor t = raw_tensor(memory, (char *)ggml_backend_buffer_get_base(memory) + at, 0);
        t.type = type;
        t.ne[0] = row;
        t.ne[1] = n_rows;
        t.nb[0] = ggml_type_size(type);
        t.nb[1] = row * t.nb[0];
        t.nb[2] = t.nb[3] = n_rows * t.nb[1];
        return t;
    };
    ggml_tensor input = matrix(GGML_TYPE_F32, 0, columns, rows);
    ggml_tensor weights = matrix(GGML_TYPE_F16, weights_at, columns, 1);
    ggml_tensor product = matrix(GGML_TYPE_F32, result_at, 1, rows);
    product.op = GGML_OP_MUL_MAT;
    product.flags = GGML_TENSOR_FLAG_COMPUTE;
    product.src[0] = &weights;
    product.src[1] = &input;
    ggml_tensor *nodes[] = {keys.uncaptured(false), &product};
    ggml_cgraph graph = {};
    graph.nodes = nodes;
    graph.size = graph.n_nodes = 2;
    if (ggml_backend_graph_compute(compute, &graph) == GGML_STATUS_SUCCESS) {
        pool_bytes_ = bytes;
    }
}

void Inner::order_graph(ggml_cgraph *graph, ggml_backend_graph_optimize_params *params) const {
    if (quirks.orders_graphs && compute && compute->iface.graph_optimize) {
        compute->iface.graph_optimize(compute, graph, params);
    }
}

void Inner::close_streams() {
    if (copy && compute) {
        ggml_backend_synchronize(copy);
        ggml_backend_synchronize(compute);
    }
    if (mirror) {
        ggml_backend_synchronize(mirror);
    }
    host_paths.close();
    rest_recorded();
    give_back(std::exchange(copied, nullptr));
    give_back(std::exchange(computed, nullptr));
    for (ggml_backend_event_t event : spare_events_) {
        ggml_backend_event_free(event);
    }
    spare_events_.clear();
    ggml_backend_free(aside);
    ggml_backend_free(mirror);
    ggml_backend_free(copy);
    ggml_backend_free(compute);
    aside = mirror = copy = compute = nullptr;
    pool_bytes_ = 0;
    n_waits_ = 0;
}

HostPath Inner::attach(void *p, size_t bytes, bool may_pin) {
    return host_paths.add(dev, quirks.imports_memory, p, bytes, may_pin);
}

void Inner::detach(void *p) { host_paths.remove(p); }

size_t Inner::largest_copy() const {
    if (pacing.active()) {
        return std::min(copy_bytes, kPacedCopyBytes);
    }
    return large_copies.load() ? kLargeCopies * copy_bytes : copy_bytes;
}

void Inner::upload(ggml_backend_t stream, ggml_backend_buffer_t buffer, void *to, const void *from, size_t bytes) {
    for (size_t at = 0, most = largest_copy(); at < bytes; at += most) {
        const size_t n = std::min(most, bytes - at);
        const char *part = (const char *)from + at;
        ggml_tensor dst = raw_tensor(buffer, (char *)to + at, n);
        if (host_paths.copy(stream, dst, part, n)) {
            continue;
        }
        if (stream) {
            ggml_backend_tensor_set_async(stream, &dst, part, 0, n);
        } else {
            ggml_backend_tensor_set(&dst, part, 0, n);
        }
    }
}

void Inner::upload_zeros(ggml_backend_t stream, ggml_backend_buffer_t buffer, void *to, size_t bytes) {
    static const char unpinned[65536] = {};
    if (bytes == 0) {
        return;
    }
    if (ggml_backend_buffer_type_t host = host_buffer_type(); host && !pinned_zeros) {
        pinned_zeros.reset(ggml_backend_buft_alloc_buffer(host, sizeof(unpinned)));
        if (pinned_zeros) {
            ggml_backend_buffer_clear(pinned_zeros.get(), 0);
        }
    }
    const void *zeros = pinned_zeros ? ggml_backend_buffer_get_base(pinned_zeros.get()) : unpinned;
    for (size_t at = 0; at < bytes; at += sizeof(unpinned)) {
        upload(stream, buffer, (char *)to + at, zeros, std::min(sizeof(unpinned), bytes - at));
    }
}

void Inner::synchronize() {
    if (compute_pending || inputs_pending) {
        ggml_backend_synchronize(compute);
        compute_pending = graph_pending = inputs_pending = false;
    }
}

// ggml-vulkan's synchronize submits a fence of its own, and another one within each graph before it.
void Inner::wait_for_computing() {
    if (!quirks.one_queue) {
        synchronize();
    } else if (compute_pending || inputs_pending) {
        record_computed();
        ggml_backend_event_synchronize(computed);
    }
}

void Inner::wait_for_copies() {
    copied = copied ? copied : take_event();
    record(copied, copy);
    compute_waits(copied);
}

void Inner::compute_waits(ggml_backend_event_t event) {
    ggml_backend_event_wait(compute, event);
    compute_pending = true;
    n_waits_++;
}

void Inner::rest() {
    constexpr int kRest = 128; // waits take 7 KiB each on Vulkan
    if (quirks.keeps_until_waited && n_waits_ >= kRest) {
        ggml_backend_synchronize(copy);
        if (copied) {
            ggml_backend_event_synchronize(copied);
        }
        n_waits_ = 0;
    }
}

ggml_backend_event_t Inner::take_event() {
    if (spare_events_.empty()) {
        return ggml_backend_event_new(dev);
    }
    ggml_backend_event_t event = spare_events_.back();
    spare_events_.pop_back();
    return event;
}

void Inner::give_back(ggml_backend_event_t event) {
    if (!event) {
        return;
    }
    if (quirks.keeps_until_waited) {
        ggml_backend_event_synchronize(event);
        recorded_.erase(event);
    }
    spare_events_.push_back(event);
}

void Inner::record(ggml_backend_event_t event, ggml_backend_t stream) {
    ggml_backend_event_record(event, stream);
    if (quirks.keeps_until_waited && stream == compute) {
        recorded_.insert(event);
    }
}

void Inner::rest_recorded() {
    for (ggml_backend_event_t event : recorded_) {
        ggml_backend_event_synchronize(event);
    }
    recorded_.clear();
}

void Inner::record_computed() {
    computed = computed ? computed : take_event();
    record(computed, compute);
}

void Inner::stream_waits(ggml_backend_t stream) {
    record_computed();
    ggml_backend_event_wait(stream, computed);
}

ggml_backend_t Inner::begin_fetch() {
    if (!aside) {
        compute_pending = true;
        return compute;
    }
    stream_waits(aside);
    return aside;
}

void Inner::end_fetch() {
    if (!aside) {
        record_computed();
    }
}

void Inner::wait_for_fetch() {
    if (aside) {
        ggml_backend_synchronize(aside);
    } else {
        ggml_backend_event_synchronize(computed);
    }
}

void Inner::put_input(ggml_backend_buffer_t buffer, void *to, const void *from, size_t bytes) {
    if (graph_pending) { // it may read what is written
        synchronize();
    }
    if (!asked_for_inputs) { // once: a refusal takes the driver time
        asked_for_inputs = true;
        pinned_inputs = allocate_of_host_type(dev, kInputBytes);
        input_bytes = pinned_inputs ? kInputBytes : 0;
    }
    if (bytes > kInputBytes || !pinned_inputs) {
        synchronize();
        upload(nullptr, buffer, to, from, bytes);
        return;
    }
    if (inputs_pending && inputs_end + bytes > kInputBytes) {
        synchronize();
    }
    inputs_end = inputs_pending ? inputs_end : 0;
    char *const at = (char *)ggml_backend_buffer_get_base(pinned_inputs.get()) + inputs_end;
    memcpy(at, from, bytes);
    upload(compute, buffer, to, at, bytes);
    inputs_pending = true;
    inputs_end += align_up(bytes);
}

char *Inner::staging(size_t bytes) {
    if (staging_bytes < bytes) {
        synchronize(); // it may be in use
        staging_bytes = align_up(2 * bytes);
        pinned_staging = allocate_of_host_type(dev, staging_bytes.load());
        pageable_staging.resize(pinned_staging ? 0 : staging_bytes.load());
    }
    return pinned_staging ? (char *)ggml_backend_buffer_get_base(pinned_staging.get()) : pageable_staging.data();
}

std::shared_ptr<char> Inner::pages(size_t bytes) const {
    if (quirks.emulated && fs_emulated_refuses_pages(dev)) {
        return nullptr;
    }
    const size_t all = bytes + MappedFile::kUnit;
    std::shared_ptr<ggml_backend_buffer> memory = host_buffer_type() ? allocate_pinned(dev, all) : nullptr;
    if (!memory) {
        memory = allocate_pages(all);
        if (!memory) {
            return nullptr;
        }
        ggml_backend_buffer_clear(memory.get(), 0); // now the system gives its pages, and counts them as used() does
    }
    return {memory, FileRange::up((char *)ggml_backend_buffer_get_base(memory.get()))};
}

// If the device's kernels can read staging memory a kernel fetches the rows, because a copy would wait behind the copies of
// weights that are under way.
ggml_status Inner::put_rows(HostRows &rows, const ggml_tensor &to, const char *from, const int64_t *places, int64_t n) {
    compute_pending = true;
    if (quirks.host_reads == HostReads::never || (quirks.host_reads == HostReads::pinned && !pinned_staging)) {
        for (int64_t i = 0, end = 0; i < n; i = end) { // neighbours in one copy
            for (end = i + 1; end < n && places[end] == places[end - 1] + 1; end++) {
            }
            upload(compute, to.buffer, (char *)to.data + places[i] * to.nb[1], from + i * to.nb[1],
                   (end - i) * to.nb[1]);
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
    rows.from = plain(GGML_TYPE_F32, pinned_staging.get(), from, to.ne[0], n);
    rows.places = plain(GGML_TYPE_I64, pinned_staging.get(), places, n, 1);
    rows.set = rows.to;
    rows.set.op = GGML_OP_SET_ROWS;
    rows.set.flags = GGML_TENSOR_FLAG_COMPUTE;
    rows.set.src[0] = &rows.from;
    rows.set.src[1] = &rows.places;
    rows.set.src[2] = &rows.to;
    rows.set.view_src = &rows.to;
    rows.nodes[0] = keys.uncaptured(false);
    rows.nodes[1] = &rows.set;
    ggml_cgraph graph = {};
    graph.nodes = rows.nodes;
    graph.size = graph.n_nodes = 2;
    return ggml_backend_graph_compute_async(compute, &graph);
}

} // namespace fsd
