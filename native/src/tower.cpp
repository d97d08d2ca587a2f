// The vision tower: its buffers, and the run of its graphs.
//
// Guarantees: its weights and the scheduler's compute buffers are host memory. A graph borrows all the VRAM that it needs
// (buffers, core, ring, scratch) from the language model's ledger before its first allocation, and gives it back at its end,
// also after a failure, so the two never hold more than the budget. A budget that falls below what is in use ends the encode
// at its next step; the caller encodes again.
#include "tower.h"

#include "executor.h"
#include "plugin.h"
#include "tiling.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <thread>

namespace fsd {

static Device &tower() {
    static Device *d = new Device(device().inner, device().pacing, device().requests); // never destroyed, as device()
    return *d;
}

// Buffers without weights. A graph gets VRAM for the part of them that it uses, so they are not among the device's `buffers`,
// for all of which commit() takes VRAM. Guarded by the tower's graph_mutex.
static std::vector<Buffer *> &activations() {
    static auto *v = new std::vector<Buffer *>;
    return *v;
}

// --------------------------------------------------------------------------------------------------------------- buffer

static Buffer *ctx(ggml_backend_buffer_t b) { return (Buffer *)b->context; }

static void buffer_free(ggml_backend_buffer_t b) {
    Device &t = tower();
    std::lock_guard<std::mutex> lock(t.graph_mutex);
    Buffer *c = ctx(b);
    if (c->weights) {
        t.weights.clear(); // all buffers with weights, one for images and one for sounds, go at once
        device().host.remove_tower(c->size);
    }
    if (c->attached) {
        t.inner.detach(c->base);
    }
    release_addresses(c->base, std::max<size_t>(c->size, 1));
    for (std::vector<Buffer *> *of : {&t.buffers, &activations()}) {
        of->erase(std::remove(of->begin(), of->end(), c), of->end());
    }
    delete c;
}

static void *buffer_base(ggml_backend_buffer_t b) { return ctx(b)->base; }

static void buffer_memset(ggml_backend_buffer_t, ggml_tensor *t, uint8_t value, size_t offset, size_t size) {
    memset((char *)t->data + offset, value, size);
}

// A large image's mask has a GiB: one thread would take long.
static void copy_with_threads(char *to, const char *from, size_t size) {
    constexpr size_t least = (size_t)32 << 20;
    const size_t n = std::max<size_t>(1, std::min<size_t>(device().n_threads, size / least));
    const size_t each = (size + n - 1) / n;
    std::vector<std::thread> threads;
    for (size_t at = each; at < size; at += each) {
        threads.emplace_back([=] { memcpy(to + at, from + at, std::min(each, size - at)); });
    }
    memcpy(to, from, std::min(each, size));
    for (std::thread &t : threads) {
        t.join();
    }
}

// ggml sets the usage of a buffer after it is made, so only now is it known whether it holds weights.
static void buffer_set(ggml_backend_buffer_t b, ggml_tensor *t, const void *data, size_t offset, size_t size) {
    copy_with_threads((char *)t->data + offset, (const char *)data, size);
    if (b->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        return;
    }
    Device &d = tower();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!ctx(b)->weights) {
        ctx(b)->weights = true;
        device().host.add_tower(ctx(b)->size);
        activations().erase(std::remove(activations().begin(), activations().end(), ctx(b)), activations().end());
        d.buffers.push_back(ctx(b));
    }
    d.weights.add(t);
}

static void buffer_get(ggml_backend_buffer_t, const ggml_tensor *t, void *data, size_t offset, size_t size) {
    memcpy(data, (const char *)t->data + offset, size);
}

static void buffer_clear(ggml_backend_buffer_t b, uint8_t value) { memset(ctx(b)->base, value, ctx(b)->size); }

static const ggml_backend_buffer_i buffer_vtable = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

bool is_tower_buffer(ggml_backend_buffer_t b) { return b->iface.free_buffer == buffer_free; }

static const char *buft_name(ggml_backend_buffer_type_t) { return "FRAMESHARD_VISION"; }

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    auto c = std::make_unique<Buffer>();
    c->size = size;
    c->base = reserve_addresses(std::max<size_t>(size, 1));
    if (!c->base) {
        return nullptr;
    }
    prefer_large_pages(c->base, size); // page faults took most of the time of a large copy
    Device &t = tower();
    std::lock_guard<std::mutex> lock(t.graph_mutex);
    activations().push_back(c.get());
    return ggml_backend_buffer_init(buft, buffer_vtable, c.release(), size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(device().inner.buffer_type());
}

static size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *t) {
    return ggml_backend_buft_get_alloc_size(device().inner.buffer_type(), t);
}

ggml_backend_buffer_type_t tower_buffer_type() {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ {buft_name, buft_alloc, buft_alignment, nullptr, buft_alloc_size, nullptr},
        /* .device  = */ vision_device(),
        /* .context = */ nullptr,
    };
    return &buft;
}

// -------------------------------------------------------------------------------------------------------------- running

// How much of each buffer a graph uses, and the tensors that it reads from before and that are read after it.
struct Traffic {
    std::map<Buffer *, size_t> extent;
    std::set<const ggml_tensor *> in, out;
};

static Traffic traffic_of(const ggml_cgraph *graph) {
    Traffic r;
    std::set<const ggml_tensor *> made;
    std::map<const ggml_tensor *, int> uses;
    auto touch = [&](const ggml_tensor *t) {
        Buffer *b = buffer_of(root_of(t));
        if (b && !b->weights && t->data) {
            const size_t end =
                (size_t)((char *)t->data - b->base) + ggml_backend_buft_get_alloc_size(tower_buffer_type(), t);
            r.extent[b] = std::max(r.extent[b], end); // Parakeet's views end behind the buffer
        }
        return b && !b->weights;
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (const ggml_tensor *src = n->src[j]) {
                uses[src]++;
                uses[root_of(src)] += src->view_src ? 1 : 0;
                if (src != n && touch(src) && !made.count(root_of(src))) { // a cast has itself among its sources
                    touch(root_of(src));
                    r.in.insert(root_of(src));
                }
            }
        }
        touch(n);
        made.insert(root_of(n));
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        const size_t at = ggml_hash_find(&graph->visited_hash_set, n);
        const bool known = at != GGML_HASHSET_FULL && ggml_bitset_get(graph->visited_hash_set.used, at);
        const bool elsewhere = graph->use_counts && known && graph->use_counts[at] > uses[n];
        if ((n->flags & GGML_TENSOR_FLAG_OUTPUT) || uses[n] == 0 || elsewhere) {
            if (!ggml_is_empty(n) && buffer_of(root_of(n)) && !buffer_of(root_of(n))->weights) {
                r.out.insert(n);
            }
        }
    }
    return r;
}

static void start_tower(Device &t, Device &d) {
    if (!t.configured.load()) {
        t.cpu = d.cpu;
        t.n_threads = d.n_threads;
        t.configured.store(true);
    }
    t.weights.sizes = d.weights.layout.sizes; // so that no piece is larger than the language model's ring
    for (Buffer *b : t.buffers) {
        // Only now, when all bytes are written: a driver that pins untouched pages for reading would go on seeing zeros.
        if (!b->attached) {
            t.inner.attach(b->base, b->size);
            b->attached = true;
        }
    }
}

static void stop_tower(Device &t) {
    t.inner.synchronize();
    t.ring.reset();
    ggml_backend_synchronize(t.inner.copy);
    t.programs.clear();
    for (Buffer *b : activations()) {
        if (b->inner) {
            InnerBuffer inner(b->inner);
            t.ledger.release(Use::buffers, inner);
            b->inner = nullptr;
            b->inner_base = nullptr;
        }
    }
    t.ring.resize(0);
    t.arena.release_core();
    t.ledger.release(Use::scratch, t.scratch.buffer);
    t.residency_generation++;
    t.committed = false;
}

static ggml_status encode(Device &t, Device &d, ggml_cgraph *graph, const Traffic &traffic) {
    std::string why;
    if (!t.weights.lay_out(t.inner.buffer_type(), why)) {
        GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
        return GGML_STATUS_FAILED;
    }
    std::vector<size_t> extents;
    for (const auto &[buffer, bytes] : traffic.extent) {
        extents.push_back(bytes);
    }
    d.drop_graphs(); // of the language model, which reads an image only when the graph before it has ended
    const uint64_t least = floor_bytes(t.weights.layout, fixed_bytes(t.weights.layout, 0, extents), {});
    {
        // All of it can go to host memory, but a window of one pane.
        const uint64_t blocks = d.ledger.used(Use::kv) - (d.kv.n_panes() < 2 ? d.kv.window_bytes() : 0);
        d.counters.update(
            [&](fsd_stats &c) { c.image_floor_bytes = std::max(d.ledger.floor(), d.ledger.fixed() - blocks + least); });
    }
    t.ring.wanted = 0;
    if (!t.ledger.borrow(d.ledger, least, least + 2 * t.weights.layout.min_ring)) {
        GGML_LOG_ERROR("frameshard: this image needs %llu MiB of VRAM beside the language model's %llu MiB, the budget "
                       "is %llu MiB\n",
                       (unsigned long long)(least >> 20), (unsigned long long)(d.ledger.fixed() >> 20),
                       (unsigned long long)(d.ledger.budget() >> 20));
        return GGML_STATUS_ALLOC_FAILED;
    }
    d.update_placements();
    for (const auto &[buffer, bytes] : traffic.extent) {
        InnerBuffer inner = t.ledger.allocate(Use::buffers, bytes);
        if (!inner) {
            GGML_LOG_ERROR("frameshard: the device refused %zu MiB for an image\n", bytes >> 20);
            return GGML_STATUS_ALLOC_FAILED;
        }
        buffer->inner_base = (char *)ggml_backend_buffer_get_base(inner.get());
        buffer->inner = inner.release();
    }
    if (t.commit(why) != FSD_OK) {
        GGML_LOG_ERROR("frameshard: %s\n", why.c_str());
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (const ggml_tensor *in : traffic.in) {
        Buffer *b = buffer_of(in);
        const size_t bytes = std::min(ggml_nbytes(in), b->size - (size_t)((char *)in->data - b->base));
        d.inner.upload(nullptr, b->inner, b->inner_base + ((char *)in->data - b->base), in->data, bytes);
    }
    const ggml_status status = run_graph(t, graph);
    t.inner.synchronize();
    if (status == GGML_STATUS_SUCCESS) {
        for (const ggml_tensor *out : traffic.out) {
            Buffer *b = buffer_of(root_of(out));
            ggml_tensor raw = raw_tensor(b->inner, b->inner_base + ((char *)out->data - b->base), ggml_nbytes(out));
            ggml_backend_tensor_get(&raw, out->data, 0, ggml_nbytes(out));
        }
    }
    return status;
}

ggml_status encode_image(ggml_cgraph *graph) {
    Device &d = device(), &t = tower();
    Traffic traffic = traffic_of(graph);
    const auto tiling = Tiling::make(graph, traffic.out, tower_buffer_type(), (int)d.n_threads);
    if (tiling) {
        graph = tiling->graph;
        traffic = traffic_of(graph);
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (!d.committed) {
        GGML_LOG_ERROR("frameshard: an image was encoded before fsd_commit\n");
        return GGML_STATUS_FAILED;
    }
    t.abort.store(false); // before the language model's is read: fsd_set_abort sets that one first
    if (d.abort.load()) {
        return GGML_STATUS_ABORTED;
    }
    d.requests.apply();
    d.inner.synchronize();
    const size_t ring = d.ring.capacity();
    start_tower(t, d);
    const ggml_status status = encode(t, d, graph, traffic); // run_graph() locks the tower's graph_mutex
    stop_tower(t);
    t.ledger.give_back();
    if (d.requests.pending()) {
        d.requests.apply();
    } else if (d.ring.capacity() < ring && d.ledger.used() + ring <= d.ledger.budget() + d.ring.capacity()) {
        d.ring.resize(ring); // before fill() takes its VRAM for weights
    }
    d.apply_host_budget(); // KV blocks may have gone to host memory
    if (tiling && status == GGML_STATUS_SUCCESS) {
        tiling->finish();
    }
    return status;
}

void interrupt_tower() { tower().abort.store(true); }

void add_tower_counters(fsd_stats &stats) {
    const fsd_stats c = tower().counters.read();
    stats.graphs += c.graphs;
    stats.steps += c.steps;
    stats.copies += c.copies;
    stats.copied_bytes += c.copied_bytes;
    stats.cpu_segments += c.cpu_segments;
    stats.cpu_busy_s += c.cpu_busy_s;
    stats.cpu_read_bytes += c.cpu_read_bytes;
    stats.recompiles += c.recompiles;
}

} // namespace fsd
