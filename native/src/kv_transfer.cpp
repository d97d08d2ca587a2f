#include "kv_transfer.h"

#include <algorithm>

namespace fsd {

KvTransfer::~KvTransfer() {
    const bool events_in_use = full[0] && d.inner.quirks.keeps_until_waited;
    if (filled > used || events_in_use) { // the graph was stopped while copies run, or these may wait for events
        ggml_backend_synchronize(d.inner.copy);
    }
    if (events_in_use) {
        d.inner.synchronize();
    }
    for (ggml_backend_event_t e : {full[0], full[1], free[0], free[1]}) {
        d.inner.give_back(e);
    }
}

void KvTransfer::begin(const Program &program) {
    passes.clear();
    for (size_t i = 0; i < program.segments.size(); i++) {
        if (program.segments[i].block) {
            passes.push_back(i);
        }
    }
    filled = used = 0;
}

void KvTransfer::record(ggml_backend_event_t &event, ggml_backend_t stream) {
    event = event ? event : d.inner.take_event();
    d.inner.record(event, stream);
}

void KvTransfer::fill_panes(const Program &program, size_t at) {
    for (; d.kv.n_panes() == 2 && filled < passes.size(); filled++) {
        const Segment &s = program.segments[passes[filled]];
        const size_t pane = s.block->pane;
        for (size_t i = used; i < filled; i++) {
            if (program.segments[passes[i]].block->pane == pane) {
                return; // a segment has yet to use the pane
            }
        }
        for (size_t i = at; i < passes[filled]; i++) {
            const std::vector<Span> &out = program.segments[i].out;
            if (std::any_of(out.begin(), out.end(), [](const Span &span) { return span.buffer->kv != nullptr; })) {
                return; // a CPU segment before it may write to the block
            }
        }
        if (free[pane]) {
            ggml_backend_event_wait(d.inner.copy, free[pane]);
        }
        if (d.inner.trace) {
            d.inner.trace->begin(FSD_LANE_COPY, d.inner.copy);
        }
        const uint64_t bytes = to_pane(s, d.inner.copy);
        if (d.inner.trace) {
            d.inner.trace->end(FSD_LANE_COPY, d.inner.copy, bytes);
        }
        record(full[pane], d.inner.copy);
    }
}

void KvTransfer::before(const Segment &s) {
    if (d.kv.n_panes() == 2) {
        ggml_backend_event_wait(d.inner.compute, full[s.block->pane]);
    } else {
        to_pane(s, d.inner.compute);
    }
}

void KvTransfer::after(const Segment &s) {
    to_host(s, d.inner.compute);
    used++;
    if (d.kv.n_panes() == 2) {
        record(free[s.block->pane], d.inner.compute);
    }
}

uint64_t KvTransfer::copy(const Segment &s, const KvTensor &t, int64_t sequence, int64_t cell, int64_t n,
                          ggml_backend_t stream, bool back) {
    char *host = t.place(s.block->base, sequence, cell);
    char *in_pane = t.place(d.kv.pane_of(*s.block), sequence, cell);
    const size_t bytes = t.row * (size_t)n;
    if (back) {
        ggml_tensor raw = raw_tensor(d.kv.window(), in_pane, bytes);
        ggml_backend_tensor_get_async(stream, &raw, host, 0, bytes);
    } else {
        d.inner.upload(stream, d.kv.window(), in_pane, host, bytes);
    }
    d.counters.update([&](fsd_stats &c) { c.kv_copied_bytes += bytes; });
    return bytes;
}

// The cells of a tensor that the graph reads or writes.
uint64_t KvTransfer::copy_wanted(const Segment &s, const KvTensor &t, ggml_backend_t stream, bool back) {
    uint64_t bytes = 0;
    for (const auto &w : access.wants) {
        for (int64_t i = 0; w.group == s.block->group && i < w.streams; i++) {
            bytes += copy(s, t, w.stream0 + i, 0, std::min(w.cells, s.block->cells), stream, back);
        }
    }
    return bytes;
}

uint64_t KvTransfer::to_pane(const Segment &s, ggml_backend_t stream) {
    uint64_t bytes = 0;
    for (const KvTensor *t : s.block->tensors) {
        bytes += copy_wanted(s, *t, stream, false);
    }
    return bytes;
}

void KvTransfer::to_host(const Segment &s, ggml_backend_t stream) {
    for (int i = s.node0; i < s.node1; i++) {
        const ggml_tensor *n = graph->nodes[i];
        const KvTensor *t = is_noop(n) ? nullptr : cached(n);
        if (!t) {
            continue;
        }
        if (!writes_rows(n, *t)) {
            copy_wanted(s, *t, stream, true);
            continue;
        }
        const int64_t *rows = (const int64_t *)n->src[1]->data, count = n->src[1]->ne[0];
        for (int64_t from = 0, to; from < count; from = to) { // neighbours in one copy
            for (to = from + 1; to < count && rows[to] == rows[to - 1] + 1 && rows[to] % t->cells != 0; to++) {
            }
            copy(s, *t, rows[from] / t->cells, rows[from] % t->cells, to - from, stream, true);
        }
    }
}

} // namespace fsd
