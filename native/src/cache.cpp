#include "device.h"

#include <cstring>

namespace fsd {

// "_l12" of "cache_k_l12": the layer.
static std::string key_of(const ggml_tensor *t) {
    const std::string name = t->name;
    const size_t at = name.rfind("_l");
    const bool layer = at != std::string::npos && at + 2 < name.size() &&
                       name.find_first_not_of("0123456789", at + 2) == std::string::npos;
    return layer ? name.substr(at) : name;
}

void Cache::add(const ggml_tensor *t, size_t offset) {
    CacheTensor c;
    c.shape = *t;
    c.offset = offset;
    const bool rows = ggml_is_contiguous(t) && t->ne[3] == 1;
    c.cells = rows ? t->ne[1] : 1;
    c.streams = rows ? t->ne[2] : 1;
    c.row = rows ? t->nb[1] : ggml_nbytes(t);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const CacheGroup &g) { return g.cells == c.cells && g.streams == c.streams; });
    if (group == groups.end()) {
        groups.emplace_back();
        group = groups.end() - 1;
        group->cells = c.cells;
        group->streams = c.streams;
        group->used.assign((size_t)c.streams, 0);
        group->asked.assign((size_t)c.streams, -1);
    }
    const std::string key = key_of(t);
    auto block = std::find_if(blocks.begin(), blocks.end(),
                              [&](const CacheBlock &b) { return b.group == &*group && b.key == key; });
    if (block == blocks.end()) {
        blocks.emplace_back();
        block = blocks.end() - 1;
        block->group = &*group;
        block->key = key;
        group->blocks.push_back(&*block);
    }
    c.block = &*block;
    tensors.push_back(c);
    block->tensors.push_back(&tensors.back());
}

CacheTensor *Cache::at(size_t offset) {
    auto it = std::upper_bound(tensors.begin(), tensors.end(), offset,
                               [](size_t o, const CacheTensor &t) { return o < t.offset; });
    if (it == tensors.begin() || offset >= (it - 1)->offset + (it - 1)->bytes()) {
        return nullptr;
    }
    return &*(it - 1);
}

std::vector<CacheRun> Cache::runs(size_t offset, size_t bytes) {
    std::vector<CacheRun> found;
    const size_t end = offset + bytes;
    for (size_t at = offset; at < end;) {
        const CacheTensor *t = this->at(at);
        if (!t) {
            const auto next =
                std::find_if(tensors.begin(), tensors.end(), [&](const auto &c) { return c.offset > at; });
            at = next == tensors.end() ? end : next->offset;
            continue;
        }
        CacheBlock *b = t->block;
        const int64_t stream = (int64_t)((at - t->offset) / t->stream_bytes());
        const size_t in = (at - t->offset) % t->stream_bytes(),
                     held = stream < b->streams ? (size_t)b->cells * t->row : 0;
        const size_t n = std::min(end - at, (in < held ? held : t->stream_bytes()) - in);
        found.push_back({b, in < held ? t->place(b->base, stream, 0) + in : nullptr, at - offset, n});
        at += n;
    }
    return found;
}

Reach reach_of(const CacheTensor &c, const ggml_tensor *t) {
    Reach r;
    const size_t each = c.stream_bytes();
    const size_t offset = (size_t)((const char *)t->data - (const char *)c.shape.data);
    size_t end = ggml_row_size(t->type, t->ne[0]);
    if (t->nb[0] != ggml_type_size(t->type)) {
        end = (size_t)(t->ne[0] - 1) * t->nb[0] + ggml_type_size(t->type);
    }
    r.rest = offset % each;
    r.stream0 = (int64_t)(offset / each);
    r.streams = 1;
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        if (t->ne[i] > 1 && t->nb[i] >= each && t->nb[i] % each == 0) {
            r.streams += (t->ne[i] - 1) * (int64_t)(t->nb[i] / each);
        } else {
            end += (size_t)(t->ne[i] - 1) * t->nb[i];
        }
    }
    r.cells = (int64_t)((r.rest + end + c.row - 1) / c.row);
    r.whole = r.rest + end > each;
    if (r.whole) {
        r.stream0 = 0;
        r.streams = c.streams;
        r.cells = c.cells;
        r.rest = offset;
    }
    return r;
}

// ------------------------------------------------------------------------------------------------------------- storage

CacheTensor *cached(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    Buffer *b = buffer_of(root);
    return b && b->cache ? b->cache->at((size_t)((const char *)root->data - b->base)) : nullptr;
}

template <typename F> void Device::each_block(F use) {
    for (Buffer *b : buffers) {
        if (b->cache) {
            for (CacheBlock &block : b->cache->blocks) {
                use(block);
            }
        }
    }
}

size_t Device::lay_out_block(const CacheBlock &b, int64_t cells, int64_t streams, std::vector<size_t> &at) const {
    size_t bytes = 0;
    at.clear();
    for (const CacheTensor *t : b.tensors) {
        at.push_back(bytes);
        bytes += kv_tensor_bytes(t->kv_shape(), cells, streams);
    }
    return bytes;
}

void Device::release_block(CacheBlock &b) {
    if (b.on_host) {
        b.storage.reset();
        cache_on_host -= b.bytes;
    } else {
        ledger.release(Use::kv, b.storage);
    }
    b.base = nullptr;
    b.bytes = 0;
    b.cells = b.streams = 0;
    b.on_host = false;
    residency_generation++;
}

// Moves a block to storage of another size or on the other side; what is in use of it goes along. False leaves it as it
// was.
bool Device::relocate(CacheBlock &b, int64_t cells, int64_t streams, bool to_host) {
    inner.synchronize();
    ggml_backend_synchronize(inner.copy); // may be reading it into the window
    std::vector<size_t> at;
    const size_t bytes = lay_out_block(b, cells, streams, at);
    InnerBuffer storage;
    char *base = nullptr;
    if (bytes > 0) {
        if (to_host) {
            // Copies from memory that the driver knows run at the link's full speed; parked, none of it is read for long.
            ggml_backend_buffer_type_t buft = parked ? nullptr : inner.host_buffer_type();
            storage.reset(ggml_backend_buft_alloc_buffer(buft ? buft : ggml_backend_cpu_buffer_type(), bytes));
        } else {
            storage = ledger.allocate(Use::kv, bytes, Ledger::kForKv);
        }
        if (!storage) {
            return false;
        }
        ggml_backend_buffer_clear(storage.get(), 0); // kernels read past what is in use, and multiply it by zero
        base = (char *)ggml_backend_buffer_get_base(storage.get());
    }
    for (size_t i = 0; i < b.tensors.size(); i++) {
        const CacheTensor &t = *b.tensors[i];
        for (int64_t s = 0; s < std::min(b.streams, streams); s++) {
            const int64_t n = std::min({b.group->used[(size_t)s], b.cells, cells});
            if (n > 0) {
                const size_t size = t.row * (size_t)n;
                ggml_tensor from = raw_tensor(b.storage.get(), t.place(b.base, s, 0), size);
                ggml_tensor to = raw_tensor(storage.get(), base + at[i] + t.row * (size_t)(s * cells), size);
                ggml_backend_tensor_copy(&from, &to);
            }
        }
    }
    release_block(b);
    for (size_t i = 0; i < b.tensors.size(); i++) {
        b.tensors[i]->at = at[i];
    }
    b.storage = std::move(storage);
    b.base = base;
    b.bytes = bytes;
    b.cells = cells;
    b.streams = streams;
    b.on_host = to_host && bytes > 0;
    cache_on_host += b.on_host ? bytes : 0;
    return true;
}

// What the window lacks of the room that blocks on the host need: for two of them, if there are so many.
size_t Device::window_lacks() {
    size_t largest = 0, n = 0;
    each_block([&](const CacheBlock &b) {
        largest = std::max(largest, b.on_host ? b.bytes : 0);
        n += b.on_host;
    });
    const size_t held = window_bytes(), needed = layout.granular(std::min<size_t>(n, 2) * largest);
    return needed > held ? needed - held : 0;
}

// A ring must have room beside the caches, also while everything is resident and there is none: one in which copies run
// ahead, since a token waits longer for all the weights that stream than for a part of its context.
bool Device::cache_fits(int64_t more) {
    return (int64_t)(ledger.fixed() + layout.weights_beside_kv()) + more <= (int64_t)ledger.budget();
}

// To the host with one more block, a layer's near the output first: those that stay have their copies hidden longest.
bool Device::spill_block() {
    CacheBlock *last = nullptr;
    each_block([&](CacheBlock &b) { last = b.bytes > 0 && !b.on_host && !b.stays ? &b : last; });
    return last && relocate(*last, last->cells, last->streams, true);
}

bool Device::ensure_window() {
    for (;;) {
        size_t largest = 0, n = 0;
        each_block([&](CacheBlock &b) {
            largest = std::max(largest, b.on_host ? b.bytes : 0);
            b.pane = b.on_host ? n++ % 2 : 0;
        });
        const bool two = n > 1 && cache_fits((int64_t)layout.granular(2 * largest) - (int64_t)window_bytes());
        if (window && (n == 0 || pane_bytes < largest || (two && n_panes < 2))) {
            release_window();
        }
        if (n > 0 && !window) {
            for (n_panes = two ? 2 : 1; n_panes > 0 && !window; n_panes -= window ? 0 : 1) {
                window = ledger.allocate(Use::kv, n_panes * largest, Ledger::kForKv);
            }
            if (!window) {
                if (!spill_block()) {
                    return false;
                }
                continue;
            }
            window_base = (char *)ggml_backend_buffer_get_base(window.get());
            pane_bytes = largest;
            residency_generation++;
        }
        if (n_panes < 2) {
            each_block([](CacheBlock &b) { b.pane = 0; });
        }
        return true;
    }
}

void Device::release_window() {
    inner.synchronize();
    ggml_backend_synchronize(inner.copy);
    ledger.release(Use::kv, window);
    window_base = nullptr;
    n_panes = pane_bytes = 0;
    residency_generation++;
}

// Blocks go to the host until the others fit the budget.
void Device::spill_surplus() {
    while (!cache_fits((int64_t)window_lacks()) && spill_block()) {
    }
}

// Back into VRAM with what has room there; returns bytes.
size_t Device::fetch_blocks() {
    size_t all = 0, done = 0;
    each_block([&](const CacheBlock &b) { all += b.on_host ? layout.granular(b.bytes) : 0; });
    const bool fits = cache_fits((int64_t)all - (int64_t)window_bytes());
    if (window && fits) {
        release_window();
    }
    each_block([&](CacheBlock &b) {
        if (b.on_host && (fits || cache_fits((int64_t)(layout.granular(b.bytes) + window_lacks()))) &&
            relocate(b, b.cells, b.streams, false)) {
            done += b.bytes;
        }
    });
    ensure_window();
    return done;
}

// Storage for all that is in use. Shrinks only when it is to, and by no less than half.
bool Device::settle_caches(bool may_shrink) {
    for (Buffer *buffer : buffers) {
        if (!buffer->cache) {
            continue;
        }
        for (CacheGroup &g : buffer->cache->groups) {
            int64_t used = 0, streams = 0, held = 0, held_streams = 0;
            for (int64_t s = 0; s < g.streams; s++) {
                used = std::max(used, g.used[(size_t)s]);
                streams = g.used[(size_t)s] > 0 ? s + 1 : streams;
            }
            for (const CacheBlock *b : g.blocks) {
                held = std::max(held, b->cells);
                held_streams = std::max(held_streams, b->streams);
            }
            int64_t c = cells_to_hold(used, g.cells), n = streams;
            if (!may_shrink || c * n * 2 > held * held_streams) {
                c = used > held ? c : held;
                n = std::max(n, held_streams);
            }
            for (CacheBlock *b : g.blocks) {
                if (b->cells == c && b->streams == n) {
                    continue;
                }
                std::vector<size_t> at;
                const size_t bytes = layout.granular(lay_out_block(*b, c, n, at));
                const int64_t more = (int64_t)bytes - (int64_t)(b->on_host ? 0 : layout.granular(b->bytes));
                const bool fits = !b->on_host && cache_fits(more);
                // With no room for both, the block grows by way of the host.
                if (!(fits && relocate(*b, c, n, false)) && !relocate(*b, c, n, true)) {
                    return false;
                }
                if (fits && b->on_host) {
                    relocate(*b, c, n, false);
                }
            }
        }
    }
    spill_surplus();
    return ensure_window();
}

// Room for bytes that are written from outside a graph.
bool Device::hold_range(Buffer *buffer, size_t offset, size_t bytes) {
    for (const CacheRun &run : buffer->cache->runs(offset, bytes)) {
        if (!run.address) {
            const CacheTensor &t = *buffer->cache->at(offset + run.from);
            const size_t in = offset + run.from - t.offset;
            int64_t &used = run.block->group->used[in / t.stream_bytes()];
            used = std::max(used, (int64_t)((in % t.stream_bytes() + run.bytes + t.row - 1) / t.row));
        }
    }
    return settle_caches(false);
}

void Device::clear_caches(Buffer *buffer, uint8_t value) {
    inner.synchronize();
    for (CacheGroup &g : buffer->cache->groups) {
        std::fill(g.used.begin(), g.used.end(), 0);
    }
    for (CacheBlock &b : buffer->cache->blocks) {
        if (b.storage) {
            ggml_backend_buffer_clear(b.storage.get(), value);
        }
    }
}

void Device::release_caches(Buffer *buffer) {
    for (CacheBlock &b : buffer->cache->blocks) {
        release_block(b);
    }
    accesses.clear();
}

void Device::caches_to_host() {
    each_block([&](CacheBlock &b) {
        if (b.bytes > 0 && !b.on_host) {
            relocate(b, b.cells, b.streams, true);
        }
    });
}

// What a park has left on the host comes into memory that is copied at full speed.
void Device::pin_caches() {
    each_block([&](CacheBlock &b) {
        if (b.on_host) {
            relocate(b, b.cells, b.streams, true);
        }
    });
}

// VRAM that the KV cache takes at least and at most.
KvNeed Device::kv_need() {
    KvNeed need;
    std::vector<size_t> at;
    each_block([&](const CacheBlock &b) {
        const uint64_t whole = layout.granular(lay_out_block(b, b.group->cells, b.group->streams, at));
        need.window = std::max(need.window, whole);
        need.whole += whole;
    });
    return need;
}

void Device::use_cells(uint32_t stream, uint64_t cells) {
    for (Buffer *b : buffers) {
        if (b->cache) {
            for (CacheGroup &g : b->cache->groups) {
                if (g.by_rows && stream < g.used.size()) {
                    g.asked[stream] = (int64_t)std::min<uint64_t>(cells, (uint64_t)g.cells);
                    // Where the cells of a shortened sequence lie shows in its next graph; an empty one has none.
                    g.used[stream] = cells == 0 ? 0 : std::max(g.used[stream], g.asked[stream]);
                }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- graphs

// Rows by number into all of a cached tensor, the numbers being an input of the graph that the host knows.
bool writes_rows(const ggml_tensor *node, const CacheTensor &c) {
    const ggml_tensor *ids = node->src[1];
    const Buffer *b = node->op == GGML_OP_SET_ROWS ? buffer_of(ids) : nullptr;
    return b && ids->op == GGML_OP_NONE && !ids->view_src && ids->type == GGML_TYPE_I64 && ggml_is_contiguous(ids) &&
           ids->ne[1] == 1 && ids->ne[2] == 1 && ids->ne[3] == 1 &&
           ids->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && node->data == c.shape.data &&
           ggml_row_size(node->type, node->ne[0]) == c.row && node->nb[1] == c.row &&
           node->ne[1] * node->ne[2] == c.cells * c.streams && node->ne[3] == 1 && node->src[0]->ne[2] == 1;
}

CacheAccess access_of(const ggml_cgraph *graph) {
    CacheAccess a;
    const auto want = [&](CacheGroup *g, int64_t stream0, int64_t streams, int64_t cells) {
        auto it = std::find_if(a.wants.begin(), a.wants.end(), [&](const auto &w) { return w.group == g; });
        if (it == a.wants.end()) {
            a.wants.push_back({g, stream0, streams, cells});
            return;
        }
        const int64_t end = std::max(it->stream0 + it->streams, stream0 + streams);
        it->stream0 = std::min(it->stream0, stream0);
        it->streams = end - it->stream0;
        it->cells = std::max(it->cells, cells);
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *n = graph->nodes[i];
        if (is_noop(n)) {
            continue;
        }
        CacheBlock *touched = nullptr;
        for (int j = -1; j < GGML_MAX_SRC; j++) {
            const ggml_tensor *t = j < 0 ? n : n->src[j];
            CacheTensor *c = t ? cached(t) : nullptr;
            if (!c) {
                continue;
            }
            if (touched && touched != c->block) {
                a.together.push_back(touched);
                a.together.push_back(c->block);
            }
            touched = c->block;
            CacheGroup *g = c->block->group;
            if ((j < 0 || j == 2) && writes_rows(n, *c)) {
                const bool known = std::any_of(a.rows.begin(), a.rows.end(),
                                               [&](const auto &r) { return r.numbers == n->src[1] && r.group == g; });
                if (!known) {
                    a.rows.push_back({n->src[1], g});
                }
                continue;
            }
            const Reach r = reach_of(*c, t);
            want(g, r.stream0, r.streams, r.cells);
        }
    }
    // One list of numbers can serve but one layout.
    for (const auto &r : a.rows) {
        for (const auto &other : a.rows) {
            if (r.numbers == other.numbers && r.group != other.group) {
                want(r.group, 0, r.group->streams, r.group->cells);
            }
        }
    }
    return a;
}

const CacheAccess *Device::access(const ggml_cgraph *graph) {
    static const CacheAccess none;
    if (std::none_of(buffers.begin(), buffers.end(), [](const Buffer *b) { return b->cache != nullptr; })) {
        return &none;
    }
    auto it = std::find_if(accesses.begin(), accesses.end(),
                           [&](const auto &known) { return graph->uid != 0 && known.first == graph->uid; });
    if (it == accesses.end()) {
        if (accesses.size() >= kMaxPrograms) {
            accesses.pop_front();
        }
        accesses.emplace_back(graph->uid, access_of(graph));
        it = accesses.end() - 1;
    }
    return &it->second;
}

// Makes room for what the graph reads and writes, and tells the device where its rows lie.
bool Device::prepare_caches(const CacheAccess &a) {
    for (CacheBlock *b : a.together) {
        b->stays = true;
    }
    for (const auto &w : a.wants) {
        for (int64_t s = w.stream0; s < w.stream0 + w.streams; s++) {
            int64_t &used = w.group->used[(size_t)s];
            const int64_t asked = w.group->asked[(size_t)s];
            used = std::max(asked < 0 ? used : asked, w.cells);
        }
    }
    for (const auto &r : a.rows) {
        r.group->by_rows = true;
        const int64_t *numbers = (const int64_t *)r.numbers->data;
        for (int64_t i = 0; i < r.numbers->ne[0]; i++) {
            int64_t &used = r.group->used[(size_t)(numbers[i] / r.group->cells)];
            used = std::max(used, numbers[i] % r.group->cells + 1);
        }
    }
    if (!settle_caches(false)) {
        return false;
    }
    for (CacheBlock *b : a.together) {
        if (b->on_host && !relocate(*b, b->cells, b->streams, false)) {
            return false;
        }
    }
    std::vector<int64_t> inside;
    for (const auto &r : a.rows) {
        const CacheBlock &b = *r.group->blocks.front(); // all of the group hold as much
        if (b.streams == 1) {
            continue; // the first sequence's numbers are right as they are
        }
        inner.synchronize();
        const int64_t *numbers = (const int64_t *)r.numbers->data;
        inside.assign(numbers, numbers + r.numbers->ne[0]);
        for (int64_t &n : inside) {
            n = n / r.group->cells * b.cells + n % r.group->cells;
        }
        const Buffer *buffer = buffer_of(r.numbers);
        inner.upload(nullptr, buffer->inner, buffer->inner_base + ((char *)r.numbers->data - buffer->base),
                     inside.data(), inside.size() * sizeof(int64_t));
    }
    return true;
}

} // namespace fsd
