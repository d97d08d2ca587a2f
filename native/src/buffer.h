// A buffer that llama.cpp asked for.
#pragma once

#include "graph_memory.h"
#include "kv_cache.h"
#include "system.h"
#include "tensors.h"

namespace fsd {

// Its addresses are reserved host addresses; the bytes lie in `inner` once committed. CPU segments compute in the reserved
// range itself, which therefore serves as the copy in host memory.
struct Buffer {
    char *base = nullptr;
    size_t size = 0;
    bool weights = false;    // a window on the model file: no inner buffer, base is the mapping
    bool attached = false;   // weights whose memory is prepared for copies
    uint64_t host_bytes = 0; // that they count for
    bool parked = false;     // its bytes wait in the reserved range for a new inner buffer
    bool late = false;       // made after commit
    bool lasting = false;    // outlives graphs: an adapter, or the KV cache of a context that was made after commit
    // These have storage of their own instead of `inner`: the KV cache, and compute buffers.
    std::unique_ptr<KvCache> kv;
    std::unique_ptr<GraphMemory> graph;
    ggml_backend_buffer_t inner = nullptr;
    char *inner_base = nullptr;

    // Where a byte lies on the device, if this is no KV cache. Null: it has no VRAM now.
    ggml_backend_buffer_t device_buffer() const { return graph ? graph->storage() : inner; }
    char *device_address(size_t offset) const {
        return graph ? graph->address(offset) : inner ? inner_base + offset : nullptr;
    }
};

// The context of one of our ggml buffers, or null for a foreign buffer.
Buffer *buffer_of(const ggml_tensor *t);

// What a tensor or the one that it is a view of is in the KV cache, or null.
KvTensor *cached(const ggml_tensor *t);

// The memory of the compute buffers that a graph uses.
std::vector<GraphMemory *> graph_memories(const ggml_cgraph *graph);

// Runs `use` on the inner bytes of [offset, offset + size) of a buffer, a part at a time; null stands for a part of the KV
// cache that was never written, which reads as zeros.
template <typename F> void each_inner(const Buffer &b, size_t offset, size_t size, F use) {
    if (!b.kv) {
        ggml_tensor raw = raw_tensor(b.device_buffer(), b.device_address(offset), size);
        use(&raw, (size_t)0, size);
        return;
    }
    for (const KvRun &run : b.kv->runs(offset, size)) {
        ggml_tensor raw = run.address ? raw_tensor(run.block->storage.get(), run.address, run.bytes) : ggml_tensor();
        use(run.address ? &raw : nullptr, run.from, run.bytes);
    }
}

} // namespace fsd
