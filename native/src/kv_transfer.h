// Copies of KV blocks that lie in host memory: into a pane of the KV window before the segments that use them, and back
// from it what a segment has written.
#pragma once

#include "device.h"

namespace fsd {

// The copies of one run of a graph.
class KvTransfer {
  public:
    // `access` is what the graph needs of the KV cache.
    KvTransfer(Device &device, const ggml_cgraph *graph, const KvAccess &access)
        : d(device), graph(graph), access(access) {}
    ~KvTransfer();
    KvTransfer(const KvTransfer &) = delete;
    KvTransfer &operator=(const KvTransfer &) = delete;

    // The segments to come are those of `program`. All earlier copies must have finished.
    void begin(const Program &program);
    // With two panes: starts the copies for segments from `at` on whose pane is free, or will be once queued work is done.
    void fill_panes(const Program &program, size_t at);
    // Whether the panes hold the blocks of the next `n` segments that use one, `n` counted from the last one used.
    bool filled_ahead(size_t n) const { return d.kv.n_panes() < 2 || used + n <= filled; }

    // Around the compute of a segment that uses a block.
    void before(const Segment &s);
    void after(const Segment &s);

  private:
    void to_host(const Segment &s, ggml_backend_t stream);
    // These return the bytes.
    uint64_t to_pane(const Segment &s, ggml_backend_t stream);
    uint64_t copy_wanted(const Segment &s, const KvTensor &t, ggml_backend_t stream, bool back);
    uint64_t copy(const Segment &s, const KvTensor &t, int64_t sequence, int64_t cell, int64_t n, ggml_backend_t stream,
                  bool back);
    void record(ggml_backend_event_t &event, ggml_backend_t stream);

    Device &d;
    const ggml_cgraph *graph;
    const KvAccess &access;
    std::vector<size_t> passes;                      // segments that use a block, in order
    size_t filled = 0, used = 0;                     // of them, those whose copies were started, and that have run
    ggml_backend_event_t full[2] = {}, free[2] = {}; // by pane
};

} // namespace fsd
