// The shard device as ggml sees it: its buffers, buffer type, backend, device and registry.
#include "plugin.h"

#include "device.h"
#include "executor.h"
#include "tower.h"
#include "unread_load.h"

#include <algorithm>
#include <cstring>

#if !defined(FSD_BUILD_GGML_VERSION) || !defined(FSD_BUILD_GGML_COMMIT)
#error "FSD_BUILD_GGML_VERSION and FSD_BUILD_GGML_COMMIT come from CMakeLists.txt"
#endif

namespace fsd {

// --------------------------------------------------------------------------------------------------------------- buffer

static Buffer *ctx(ggml_backend_buffer_t b) { return (Buffer *)b->context; }

static void buffer_free(ggml_backend_buffer_t b) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    Buffer *c = ctx(b);
    d.inner.synchronize();
    d.programs.clear(); // their shadow nodes may point into the buffer
    d.memories.clear();
    d.note_graph_bytes();
    if (c->weights && d.inner.copy) {
        d.ring.reset();
        ggml_backend_synchronize(d.inner.copy); // copies ahead of the next graph may still read the model file
    }
    if (c->inner) {
        InnerBuffer inner(c->inner);
        d.ledger.release(Use::buffers, inner);
    }
    if (c->kv) {
        d.kv.remove(*c->kv);
    }
    if (c->graph) {
        c->graph->release(d.inner, d.ledger);
    }
    if (c->attached) {
        d.host.remove_weights(c->host_bytes); // first: without the cache the whole mapping would be counted
        d.cache.close();                      // the mapping goes away with the model
        d.inner.detach(c->base);
    }
    if (!c->weights && c->base) {
        release_addresses(c->base, std::max<size_t>(c->size, 1));
    }
    d.buffers.erase(std::remove(d.buffers.begin(), d.buffers.end(), c), d.buffers.end());
    d.forget_graph_bytes();
    if (d.committed || d.parked) {
        d.update_floor();
    }
    delete c;
}

static void *buffer_base(ggml_backend_buffer_t b) { return ctx(b)->base; }

static ggml_status buffer_init_tensor(ggml_backend_buffer_t b, ggml_tensor *t) {
    Buffer *c = ctx(b);
    if (t->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    Device &d = device();
    const size_t at = (size_t)((char *)t->data - c->base);
    const size_t bytes = ggml_backend_buft_get_alloc_size(d.inner.buffer_type(), t);
    if (c->graph) { // a graph may run meanwhile
        c->graph->add(at, bytes);
        return GGML_STATUS_SUCCESS;
    }
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (b->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        c->graph = std::make_unique<GraphMemory>();
        c->graph->add(at, bytes);
    } else if (c->weights) {
        d.weights.add(t);
    } else if (c->late) {
        c->lasting = true;
        if (!d.materialise(c)) {
            return GGML_STATUS_ALLOC_FAILED;
        }
        d.update_floor();
        d.update_placements(); // slabs may have been evicted
    } else {
        if (!c->kv) {
            c->kv = std::make_unique<KvCache>();
            d.kv.add(*c->kv);
        }
        c->kv->add(t, at);
    }
    return GGML_STATUS_SUCCESS;
}

// each_inner() for a part of a tensor, after memory for it is allocated. Waiting for queued work is left to `use`. Weights are
// read-only.
template <typename F>
static void with_inner(ggml_backend_buffer_t b, const ggml_tensor *t, size_t offset, size_t size, bool writes, F use) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    Buffer *c = ctx(b);
    GGML_ASSERT(!c->weights && "frameshard: model weights are read-only");
    if (d.parked) {
        GGML_ABORT("frameshard: a buffer is used while the device is parked");
    }
    const size_t begin = (size_t)((char *)t->data - c->base) + offset;
    if (c->kv) {
        if (writes && !d.kv.hold_range(*c->kv, begin, size)) {
            GGML_ABORT("frameshard: no memory for %zu bytes of the KV cache", size);
        }
    } else if (c->graph) {
        if (writes) {
            c->graph->begin_use();
        }
        if (!d.hold(*c->graph)) {
            if (writes) {
                const bool no_room = d.counters.read().refused_graph_bytes > 0;
                c->graph->input = no_room ? GraphMemory::Input::no_room : GraphMemory::Input::refused;
            }
            GGML_LOG_DEBUG("frameshard: no VRAM for the compute buffer of a graph\n");
            return;
        }
    } else if (!d.materialise(c)) {
        GGML_ABORT("frameshard: no VRAM for a buffer of %zu bytes within the budget", c->size);
    }
    each_inner(*c, begin, size, use);
}

static void buffer_memset(ggml_backend_buffer_t b, ggml_tensor *t, uint8_t value, size_t offset, size_t size) {
    with_inner(b, t, offset, size, value != 0, [&](ggml_tensor *raw, size_t, size_t n) {
        device().inner.synchronize();
        if (raw && ctx(b)->kv) {
            device().kv.note_change(*ctx(b)->kv, (size_t)((char *)t->data - ctx(b)->base) + offset, size);
        }
        if (raw) {
            ggml_backend_tensor_memset(raw, value, 0, n);
        }
    });
}

static void buffer_set(ggml_backend_buffer_t b, ggml_tensor *t, const void *data, size_t offset, size_t size) {
    with_inner(b, t, offset, size, true, [&](ggml_tensor *raw, size_t from, size_t n) {
        Inner &inner = device().inner;
        if (ctx(b)->graph) {
            inner.put_input(raw->buffer, raw->data, (const char *)data + from, n);
            return;
        }
        inner.synchronize();
        inner.upload(nullptr, raw->buffer, raw->data, (const char *)data + from, n);
    });
    if (t->type == GGML_TYPE_I64) { // numbers of KV rows: the device may get others, host memory keeps these
        memcpy((char *)t->data + offset, data, size);
    }
}

static void buffer_get(ggml_backend_buffer_t b, const ggml_tensor *t, void *data, size_t offset, size_t size) {
    if (ctx(b)->weights) {
        memcpy(data, (const char *)t->data + offset, size);
        return;
    }
    with_inner(b, t, offset, size, false, [&](ggml_tensor *raw, size_t from, size_t n) {
        device().inner.synchronize();
        if (raw) {
            ggml_backend_tensor_get(raw, (char *)data + from, 0, n);
        } else {
            memset((char *)data + from, 0, n);
        }
    });
}

static void buffer_clear(ggml_backend_buffer_t b, uint8_t value) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    Buffer *c = ctx(b);
    if (c->kv) {
        d.kv.clear(*c->kv, value);
    }
    if (c->inner) { // otherwise it is cleared when it is allocated
        d.inner.synchronize();
        ggml_backend_buffer_clear(c->inner, value);
    }
}

static const ggml_backend_buffer_i buffer_vtable = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

Buffer *buffer_of(const ggml_tensor *t) {
    return t->buffer && (t->buffer->iface.free_buffer == buffer_free || is_tower_buffer(t->buffer)) ? ctx(t->buffer)
                                                                                                    : nullptr;
}

// ---------------------------------------------------------------------------------------------------------- buffer type

static ggml_backend_buffer_type_t buffer_type();

static const char *buft_name(ggml_backend_buffer_type_t) { return "FRAMESHARD"; }

// A buffer is only addresses. It takes VRAM at commit, or when its first tensor shows what it is for, so that the floor is
// known exactly before VRAM is allocated.
static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    auto c = std::make_unique<Buffer>();
    c->size = size;
    c->base = reserve_addresses(std::max<size_t>(size, 1));
    if (!c->base) {
        return nullptr;
    }
    if (d.committed && !d.has_room_for(size)) {
        release_addresses(c->base, std::max<size_t>(size, 1));
        return nullptr;
    }
    c->late = d.committed;
    d.buffers.push_back(c.get());
    if (d.committed || d.parked) {
        d.update_floor();
    } else {
        d.count_graph_memory();
    }
    return ggml_backend_buffer_init(buft, buffer_vtable, c.release(), size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(device().inner.buffer_type());
}

static size_t buft_max_size(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_max_size(device().inner.buffer_type());
}

static size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *t) {
    return ggml_backend_buft_get_alloc_size(device().inner.buffer_type(), t);
}

static ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ {buft_name, buft_alloc, buft_alignment, buft_max_size, buft_alloc_size, nullptr},
        /* .device  = */ plugin_device(),
        /* .context = */ nullptr,
    };
    return &buft;
}

// -------------------------------------------------------------------------------------------------------------- backend

static const char *backend_name(ggml_backend_t) { return "FRAMESHARD0"; }

static void backend_free(ggml_backend_t backend) {
    Device &d = device();
    {
        std::lock_guard<std::mutex> lock(d.graph_mutex);
        d.inner.synchronize();
        d.programs.clear();
    }
    delete backend;
}

// llama.cpp also waits before each input that it writes. Inputs alone need no wait: what uses them is queued behind them.
static void backend_synchronize(ggml_backend_t) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    if (d.inner.compute_pending) {
        d.inner.synchronize();
    }
}

// Reads results behind the work that is queued, so that ggml waits once for both.
static void backend_get_async(ggml_backend_t, const ggml_tensor *t, void *data, size_t offset, size_t size) {
    const Buffer *c = buffer_of(root_of(t));
    if (!c || !c->graph) {
        ggml_backend_tensor_get(t, data, offset, size);
        return;
    }
    with_inner(root_of(t)->buffer, t, offset, size, false, [&](const ggml_tensor *raw, size_t from, size_t n) {
        Inner &inner = device().inner;
        ggml_backend_tensor_get_async(inner.compute, raw, (char *)data + from, 0, n);
        inner.compute_pending = true;
    });
}

static ggml_status backend_compute(ggml_backend_t, ggml_cgraph *graph) { return run_graph(device(), graph); }

// Called before memory is given to the nodes, so that they may still change places.
static void backend_optimize(ggml_backend_t, ggml_cgraph *graph, ggml_backend_graph_optimize_params *params) {
    Device &d = device();
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    d.inner.order_graph(graph, params);
}

static ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x66, 0x72, 0x61, 0x6d, 0x65, 0x73, 0x68, 0x61,
                             0x72, 0x64, 0x2d, 0x64, 0x65, 0x76, 0x30, 0x31};
    return &guid;
}

static ggml_backend_t dev_init(ggml_backend_dev_t dev, const char *) {
    if (!device().configured.load()) {
        GGML_LOG_ERROR("frameshard: call fsd_configure before the model is loaded\n");
        return nullptr;
    }
    ggml_backend_i iface = {};
    iface.get_name = backend_name;
    iface.free = backend_free;
    iface.synchronize = backend_synchronize;
    iface.get_tensor_async = backend_get_async;
    iface.graph_compute = backend_compute;
    iface.graph_optimize = backend_optimize;
    return new ggml_backend{backend_guid(), iface, dev, nullptr};
}

// --------------------------------------------------------------------------------------------------------------- device

static const char *dev_name(ggml_backend_dev_t) { return "FRAMESHARD0"; }

static const char *dev_description(ggml_backend_dev_t) {
    Device &d = device();
    return d.inner.dev ? ggml_backend_dev_description(d.inner.dev) : "frameshard, not configured";
}

// llama.cpp asks this to fit a model. Weights that are not resident are in host memory, so that counts, too.
static void dev_memory(ggml_backend_dev_t, size_t *free, size_t *total) {
    size_t host_free = 0, host_total = 0;
    if (ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        ggml_backend_dev_memory(cpu, &host_free, &host_total);
    }
    const size_t budget = std::min<uint64_t>(device().ledger.budget(), SIZE_MAX / 4);
    *free = budget + host_free;
    *total = budget + host_total;
}

static enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

// Pinned if the inner device has such memory, so that inputs and results are copied at the link's full rate.
static ggml_backend_buffer_type_t dev_host_buffer_type(ggml_backend_dev_t) {
    Inner &inner = device().inner;
    return inner.dev ? inner.host_buffer_type() : nullptr;
}

static void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props *props) {
    *props = {};
    props->name = dev_name(dev);
    props->description = dev_description(dev);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    dev_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.buffer_from_host_ptr = true; // weights stay in the mapped model file
}

static ggml_backend_buffer_type_t dev_buffer_type(ggml_backend_dev_t) { return buffer_type(); }

static ggml_backend_buffer_t dev_from_host_ptr(ggml_backend_dev_t, void *ptr, size_t size, size_t) {
    Device &d = device();
    if (!d.configured.load()) {
        return nullptr;
    }
    auto c = std::make_unique<Buffer>();
    c->base = (char *)ptr;
    c->size = size;
    c->weights = true;
    {
        std::lock_guard<std::mutex> lock(d.graph_mutex);
        expect_unread_load(false); // llama.cpp has mapped its files
        d.cache.add((char *)ptr, size);
    }
    c->host_bytes = size; // until commit() knows what of the file stays mapped
    d.host.add_weights(c->host_bytes);
    const bool all = d.host.budget() == 0 || c->host_bytes <= d.host.budget(); // otherwise it will not be held as it is
    const HostPath path = d.inner.attach(ptr, size, all);
    c->attached = true;
    std::lock_guard<std::mutex> lock(d.graph_mutex);
    const bool first = std::none_of(d.buffers.begin(), d.buffers.end(), [](const Buffer *b) { return b->weights; });
    d.buffers.push_back(c.get());
    d.set_path(first ? path : std::max(d.weights.path, path));
    // ggml checks that the padding of the last tensor lies in the buffer. The file has none, and nothing reads it here.
    constexpr size_t padding = 64 * 1024;
    return ggml_backend_buffer_init(buffer_type(), buffer_vtable, c.release(), size + padding);
}

static bool dev_supports_op(ggml_backend_dev_t, const ggml_tensor *op) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return ggml_backend_dev_supports_op(device().inner.dev, op) || ggml_backend_dev_supports_op(cpu, op);
}

static bool dev_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) { return buft == buffer_type(); }

// ------------------------------------------------------------------------------------------------------------- registry

static const char *reg_name(ggml_backend_reg_t) { return "frameshard"; }

static size_t reg_count(ggml_backend_reg_t) { return 2; }

static ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t i) {
    return i == 0 ? plugin_device() : vision_device();
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ {reg_name, reg_count, reg_device, nullptr},
        /* .context     = */ nullptr,
    };
    return &reg;
}

ggml_backend_dev_t plugin_device() {
    static ggml_backend_device dev = [] {
        ggml_backend_device x = {};
        x.iface.get_name = dev_name;
        x.iface.get_description = dev_description;
        x.iface.get_memory = dev_memory;
        x.iface.get_type = dev_type;
        x.iface.get_props = dev_props;
        x.iface.init_backend = dev_init;
        x.iface.get_buffer_type = dev_buffer_type;
        x.iface.get_host_buffer_type = dev_host_buffer_type;
        x.iface.buffer_from_host_ptr = dev_from_host_ptr;
        x.iface.supports_op = dev_supports_op;
        x.iface.supports_buft = dev_supports_buft;
        x.reg = registry();
        return x;
    }();
    return &dev;
}

bool same_ggml() {
    return strcmp(ggml_version(), FSD_BUILD_GGML_VERSION) == 0 && strcmp(ggml_commit(), FSD_BUILD_GGML_COMMIT) == 0;
}

} // namespace fsd

using namespace fsd;

// ggml_backend_load calls this. ggml's structs change without a change of its interface number, so the ggml that runs must
// be the one whose headers were compiled.
extern "C" FSD_API ggml_backend_reg_t ggml_backend_init(void) {
    if (!same_ggml()) {
        GGML_LOG_ERROR("frameshard: built for ggml %s (%s), running %s (%s); reinstall frameshard\n",
                       FSD_BUILD_GGML_VERSION, FSD_BUILD_GGML_COMMIT, ggml_version(), ggml_commit());
        return nullptr;
    }
    return registry();
}
