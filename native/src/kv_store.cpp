#include "kv_store.h"

#include "buffer.h"
#include "system.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

namespace fsd {

// The most spare host memory for blocks in VRAM, and the share of the free host memory that it may take: one in so many.
static constexpr uint64_t kMostSpare = (uint64_t)8 << 30;
static constexpr uint64_t kSpareShare = 6;
// While no sequence has cells, their room stays for the next one: one part in so many of the budget at most.
static constexpr uint64_t kKeptShare = 8;
// Cells that are mirrored at a time.
static constexpr int64_t kLeastMirrored = 64;

static size_t size_of(const InnerBuffer &buffer) { return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0; }

void KvStore::add(KvCache &cache) { caches_.push_back(&cache); }

void KvStore::remove(KvCache &cache) {
    for (KvBlock &b : cache.blocks) {
        take_spare(b);
        release_block(b);
    }
    accesses_.clear();
    caches_.erase(std::remove(caches_.begin(), caches_.end(), &cache), caches_.end());
}

template <typename F> void KvStore::each_block(F use) {
    for (KvCache *cache : caches_) {
        for (KvBlock &block : cache->blocks) {
            use(block);
        }
    }
}

size_t KvStore::lay_out(const KvBlock &b, int64_t cells, int64_t streams, std::vector<size_t> &at) {
    size_t bytes = 0;
    at.clear();
    for (const KvTensor *t : b.tensors) {
        at.push_back(bytes);
        bytes += kv_tensor_bytes(t->kv_shape(), cells, streams);
    }
    return bytes;
}

void KvStore::release_block(KvBlock &b) {
    if (b.in_host_memory) {
        host_bytes_ -= size_of(b.storage);
        spilled_bytes_ -= b.bytes;
        b.storage.reset();
    } else {
        ledger_.release(Use::kv, b.storage);
    }
    b.base = nullptr;
    b.bytes = 0;
    b.cells = b.streams = 0;
    b.in_host_memory = false;
    generation_++;
}

// Zeroed. A parked cache is not read for long, so it need not be pinned.
InnerBuffer KvStore::host_memory(size_t bytes) const {
    const bool pins = !pageable_ && inner_.host_buffer_type();
    InnerBuffer pinned = pins ? allocate_pinned(inner_.dev, bytes) : nullptr;
    return pinned ? std::move(pinned) : allocate_pages(bytes);
}

InnerBuffer KvStore::take_spare(KvBlock &b) {
    finish_mirror();
    std::fill(b.mirrored.begin(), b.mirrored.end(), 0);
    spare_bytes_ -= size_of(b.spare);
    return std::move(b.spare);
}

void KvStore::set_spare(KvBlock &b, InnerBuffer memory, int64_t cells, int64_t streams) {
    take_spare(b);
    spare_bytes_ += size_of(memory);
    b.spare = std::move(memory);
    b.spare_cells = cells;
    b.spare_streams = streams;
}

void KvStore::allow_spares(bool allowed) {
    spares_allowed_ = allowed;
    if (!allowed) {
        each_block([this](KvBlock &b) { take_spare(b); });
    }
}

size_t KvStore::add_spare() {
    const std::vector<KvBlock *> blocks = last_to_spill();
    std::vector<size_t> at;
    for (auto it = blocks.rbegin(); spares_allowed_ && !pageable_ && it != blocks.rend(); it++) {
        KvBlock &b = **it;
        const size_t bytes = lay_out(b, b.group->cells, b.group->streams, at); // it never needs more
        const bool large = size_of(b.spare) >= bytes;
        if (b.in_host_memory || b.stays || (large && b.spare_cells >= 0)) {
            continue;
        }
        const uint64_t all = spare_bytes() + bytes;
        InnerBuffer memory;
        if (large) {
            memory = take_spare(b);
            ggml_backend_buffer_clear(memory.get(), 0);
        } else if (all <= kMostSpare && has_room(kSpareShare * all)) {
            memory = host_memory(bytes);
        }
        if (!memory) {
            return 0;
        }
        set_spare(b, std::move(memory), 0, 0);
        return size_of(b.spare);
    }
    return 0;
}

// How many cells of each stream a block keeps in storage of another size: a prompt has room for cells that it has not written.
static std::vector<int64_t> cells_of(const KvBlock &b, int64_t cells, int64_t streams) {
    const KvGroup &g = *b.group;
    std::vector<int64_t> n;
    for (int64_t s = 0; s < std::min(b.streams, streams); s++) {
        n.push_back(std::min({g.used[(size_t)s], g.written[(size_t)s], b.cells, cells}));
    }
    return n;
}

static void set_extent(KvBlock &b, size_t bytes, const std::vector<size_t> &at, int64_t cells, int64_t streams) {
    for (size_t i = 0; i < b.tensors.size(); i++) {
        b.tensors[i]->at = at[i];
    }
    b.bytes = bytes;
    b.cells = cells;
    b.streams = streams;
}

// Clears what a block's storage in host memory has beyond the first `n` cells of its streams: kernels read past the cells in
// use and multiply by zero.
static void clear_rest(const KvBlock &b, char *base, size_t bytes, const std::vector<size_t> &at, int64_t cells,
                       const std::vector<int64_t> &n) {
    for (size_t i = 0; i < b.tensors.size(); i++) {
        const size_t row = b.tensors[i]->row;
        size_t from = at[i];
        for (size_t s = 0; s < n.size(); s++) {
            const size_t stream = at[i] + s * row * (size_t)cells;
            memset(base + from, 0, stream - from);
            from = stream + row * (size_t)n[s];
        }
        memset(base + from, 0, (i + 1 < at.size() ? at[i + 1] : bytes) - from);
    }
}

// Lays out a block in host memory anew, in the same storage. Either no place of a cell is before the one that it had, or none
// is behind it.
void KvStore::lay_out_again(KvBlock &b, size_t bytes, const std::vector<size_t> &at, int64_t cells, int64_t streams) {
    const std::vector<int64_t> n = cells_of(b, cells, streams);
    const size_t all = b.tensors.size() * n.size();
    for (size_t k = 0; k < all; k++) {
        const size_t next = cells > b.cells || streams > b.streams ? all - 1 - k : k;
        const size_t i = next / n.size(), s = next % n.size();
        const KvTensor &t = *b.tensors[i];
        memmove(b.base + at[i] + t.row * s * (size_t)cells, t.place(b.base, (int64_t)s, 0), t.row * (size_t)n[s]);
    }
    clear_rest(b, b.base, bytes, at, cells, n);
    spilled_bytes_ += bytes - b.bytes;
    set_extent(b, bytes, at, cells, streams);
    generation_++;
}

bool KvStore::relocate(KvBlock &b, int64_t cells, int64_t streams, bool to_host) {
    inner_.synchronize();
    ggml_backend_synchronize(inner_.copy); // it may be reading the block
    finish_mirror();
    const bool same = cells == b.cells && streams == b.streams;
    std::vector<size_t> at;
    const size_t bytes = lay_out(b, cells, streams, at);
    const bool grows = cells >= b.cells && streams >= b.streams, shrinks = cells <= b.cells && streams <= b.streams;
    if (to_host && b.in_host_memory && !same && (grows || shrinks) && bytes > 0 && bytes <= size_of(b.storage)) {
        lay_out_again(b, bytes, at, cells, streams);
        return true;
    }
    const std::vector<int64_t> n = cells_of(b, cells, streams);
    std::vector<int64_t> there(n.size(), 0); // cells that the storage has already
    InnerBuffer storage;
    char *base = nullptr;
    const bool spare = to_host && bytes > 0 && size_of(b.spare) >= bytes;
    const bool cleared = !spare || b.spare_cells == 0 || (b.spare_cells == cells && b.spare_streams == streams);
    if (bytes > 0) {
        if (to_host) {
            std::copy_n(b.mirrored.begin(), spare && same ? n.size() : 0, there.begin());
            storage = spare ? take_spare(b) : host_memory(bytes);
        } else {
            storage = ledger_.allocate(Use::kv, bytes, Ledger::kForKv);
        }
        if (!storage) {
            return false;
        }
        base = (char *)ggml_backend_buffer_get_base(storage.get());
        if (!to_host) {
            ggml_backend_buffer_clear(storage.get(), 0); // as clear_rest()
        } else if (!cleared) {
            clear_rest(b, base, bytes, at, cells, n);
        }
    }
    for (size_t i = 0; i < b.tensors.size(); i++) {
        const KvTensor &t = *b.tensors[i];
        for (size_t s = 0; s < n.size(); s++) {
            if (n[s] > there[s]) {
                const size_t size = t.row * (size_t)(n[s] - there[s]), cell = s * (size_t)cells + (size_t)there[s];
                ggml_tensor from = raw_tensor(b.storage.get(), t.place(b.base, (int64_t)s, there[s]), size);
                ggml_tensor to = raw_tensor(storage.get(), base + at[i] + t.row * cell, size);
                ggml_backend_tensor_copy(&from, &to);
            }
        }
    }
    if (b.in_host_memory && (!to_host || bytes == 0) && spares_allowed_ && !pageable_) {
        host_bytes_ -= size_of(b.storage);
        set_spare(b, std::move(b.storage), b.cells, b.streams);
        std::copy_n(n.begin(), same ? n.size() : 0, b.mirrored.begin());
    } else if (!same) {
        std::fill(b.mirrored.begin(), b.mirrored.end(), 0);
    }
    release_block(b);
    set_extent(b, bytes, at, cells, streams);
    b.storage = std::move(storage);
    b.base = base;
    b.in_host_memory = to_host && bytes > 0;
    spilled_bytes_ += b.in_host_memory ? bytes : 0;
    host_bytes_ += b.in_host_memory ? size_of(b.storage) : 0;
    return true;
}

void KvStore::finish_mirror() {
    if (mirroring_) {
        ggml_backend_synchronize(inner_.mirror);
        mirroring_ = false;
    }
}

void KvStore::mirror(KvBlock &b, const std::vector<int64_t> &end, bool &waits) {
    char *spare = size_of(b.spare) > 0 ? (char *)ggml_backend_buffer_get_base(b.spare.get()) : nullptr;
    for (int64_t s = 0; s < b.streams && !b.in_host_memory && size_of(b.spare) >= b.bytes; s++) {
        int64_t &from = b.mirrored[(size_t)s];
        const int64_t to = std::min(end[(size_t)s], b.cells);
        if (to - from < kLeastMirrored) {
            continue;
        }
        if (!std::exchange(waits, true)) {
            inner_.stream_waits(inner_.mirror);
            mirroring_ = true;
        }
        for (const KvTensor *t : b.tensors) {
            const size_t size = t->row * (size_t)(to - from);
            const ggml_tensor raw = raw_tensor(b.storage.get(), t->place(b.base, s, from), size);
            ggml_backend_tensor_get_async(inner_.mirror, &raw, t->place(spare, s, from), 0, size);
        }
        from = to;
        if (b.spare_cells == 0) {
            b.spare_cells = b.cells;
            b.spare_streams = b.streams;
        } else if (b.spare_cells != b.cells || b.spare_streams != b.streams) {
            b.spare_cells = -1;
        }
    }
}

// A graph is about to run. The cells that it writes are no longer mirrored; those before them may be.
void KvStore::mirror_written(const KvAccess &a) {
    std::map<KvGroup *, std::vector<int64_t>> ends, written;
    for (const auto &r : a.rows) {
        std::vector<int64_t> &end = ends.try_emplace(r.group, r.group->written).first->second;
        std::vector<int64_t> &last = written.try_emplace(r.group, r.group->written).first->second;
        const int64_t *numbers = (const int64_t *)r.numbers->data;
        for (int64_t i = 0; i < r.numbers->ne[0]; i++) {
            const size_t s = (size_t)(numbers[i] / r.group->cells);
            end[s] = std::min(end[s], numbers[i] % r.group->cells);
            last[s] = std::max(last[s], numbers[i] % r.group->cells + 1);
        }
    }
    for (KvGroup *g : a.changed) {
        ends[g].assign((size_t)g->streams, 0);
        written[g] = g->used;
    }
    bool waits = false;
    for (auto &[group, end] : ends) {
        for (KvBlock *b : group->blocks) {
            for (size_t s = 0; s < end.size(); s++) {
                b->mirrored[s] = std::min(b->mirrored[s], end[s]);
            }
            if (inner_.mirror) {
                mirror(*b, end, waits);
            }
        }
    }
    for (auto &[group, last] : written) {
        group->written = last;
    }
}

size_t KvStore::window_lacks() {
    size_t largest = 0, n = 0;
    each_block([&](const KvBlock &b) {
        largest = std::max(largest, b.in_host_memory ? b.bytes : 0);
        n += b.in_host_memory;
    });
    const size_t held = window_bytes(), needed = weights_.layout.granular(std::min<size_t>(n, 2) * largest);
    return needed > held ? needed - held : 0;
}

bool KvStore::fits(int64_t more) {
    return (int64_t)(ledger_.fixed() + weights_.layout.weights_beside_kv()) + more <= (int64_t)ledger_.budget();
}

// All blocks, those first that stay in VRAM longest. However many have moved to host memory, they are spread evenly over the
// layers, so that copies have the computing of other layers beside them: the multiples of the golden ratio, modulo 1, divide
// their range evenly at any number of them.
std::vector<KvBlock *> KvStore::last_to_spill() const {
    constexpr double kGoldenRatio = 0.6180339887498949;
    std::vector<std::pair<double, KvBlock *>> order;
    for (KvCache *cache : caches_) {
        for (KvBlock &b : cache->blocks) {
            order.push_back({std::fmod((double)(b.place + 1) * kGoldenRatio, 1.0), &b});
        }
    }
    std::stable_sort(order.begin(), order.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
    std::vector<KvBlock *> blocks;
    std::transform(order.begin(), order.end(), std::back_inserter(blocks),
                   [](const auto &each) { return each.second; });
    return blocks;
}

bool KvStore::drop_kept() {
    bool dropped = false;
    each_block([&](KvBlock &b) {
        const std::vector<int64_t> &used = b.group->used;
        if (b.bytes > 0 && std::all_of(used.begin(), used.end(), [](int64_t n) { return n == 0; })) {
            dropped = relocate(b, 0, 0, true) || dropped;
        }
    });
    return dropped;
}

bool KvStore::spill_block() {
    if (drop_kept()) {
        return true;
    }
    const std::vector<KvBlock *> blocks = last_to_spill();
    const auto next = std::find_if(blocks.rbegin(), blocks.rend(),
                                   [](const KvBlock *b) { return b->bytes > 0 && !b->in_host_memory && !b->stays; });
    return next != blocks.rend() && relocate(**next, (*next)->cells, (*next)->streams, true);
}

bool KvStore::ensure_window() {
    for (;;) {
        size_t largest = 0, n = 0;
        each_block([&](KvBlock &b) {
            largest = std::max(largest, b.in_host_memory ? b.bytes : 0);
            b.pane = b.in_host_memory ? n++ % 2 : 0;
        });
        const bool two = n > 1 && fits((int64_t)weights_.layout.granular(2 * largest) - (int64_t)window_bytes());
        if (window_ && (n == 0 || pane_bytes_ < largest || (two && n_panes_ < 2))) {
            release_window();
        }
        if (n > 0 && !window_) {
            for (n_panes_ = two ? 2 : 1; n_panes_ > 0 && !window_; n_panes_ -= window_ ? 0 : 1) {
                window_ = ledger_.allocate(Use::kv, n_panes_ * largest, Ledger::kForKv);
            }
            if (!window_) {
                if (!spill_block()) {
                    return false;
                }
                continue;
            }
            window_base_ = (char *)ggml_backend_buffer_get_base(window_.get());
            pane_bytes_ = largest;
            generation_++;
        }
        if (n_panes_ < 2) {
            each_block([](KvBlock &b) { b.pane = 0; });
        }
        return true;
    }
}

void KvStore::release_window() {
    inner_.synchronize();
    ggml_backend_synchronize(inner_.copy);
    ledger_.release(Use::kv, window_);
    window_base_ = nullptr;
    n_panes_ = pane_bytes_ = 0;
    generation_++;
}

void KvStore::spill_surplus(size_t more) {
    while (!fits((int64_t)(window_lacks() + more)) && spill_block()) {
    }
}

size_t KvStore::fetch_blocks() {
    size_t all = 0, done = 0;
    each_block([&](const KvBlock &b) { all += b.in_host_memory ? weights_.layout.granular(b.bytes) : 0; });
    const bool all_fit = fits((int64_t)all - (int64_t)window_bytes());
    if (window_ && all_fit) {
        release_window();
    }
    for (KvBlock *b : last_to_spill()) {
        if (b->in_host_memory && (all_fit || fits((int64_t)(weights_.layout.granular(b->bytes) + window_lacks()))) &&
            relocate(*b, b->cells, b->streams, false)) {
            done += b->bytes;
        }
    }
    ensure_window();
    return done;
}

// The cells and streams that each block of a group should have storage for. `keep`: it keeps what it has if none is in use.
static std::pair<int64_t, int64_t> extent_of(const KvGroup &g, bool may_shrink, bool keep) {
    int64_t used = 0, streams = 0, held = 0, held_streams = 0;
    for (int64_t s = 0; s < g.streams; s++) {
        used = std::max(used, g.used[(size_t)s]);
        streams = g.used[(size_t)s] > 0 ? s + 1 : streams;
    }
    for (const KvBlock *b : g.blocks) {
        held = std::max(held, b->cells);
        held_streams = std::max(held_streams, b->streams);
    }
    const int64_t cells = cells_to_hold(used, g.cells);
    if (may_shrink && !(keep && used == 0) && cells * streams * 2 <= held * held_streams) {
        return {cells, streams};
    }
    if (used > held) {
        return {cells, streams}; // storage is made anew anyway: sequences that have ended get none of it
    }
    return {held, std::max(streams, held_streams)};
}

// Gives a block storage of another size, in VRAM if it fits there.
bool KvStore::resize(KvBlock &b, int64_t cells, int64_t streams) {
    std::vector<size_t> at;
    const size_t bytes = weights_.layout.granular(lay_out(b, cells, streams, at));
    const int64_t more = (int64_t)bytes - (int64_t)(b.in_host_memory ? 0 : weights_.layout.granular(b.bytes));
    const bool in_vram = !b.in_host_memory && fits(more);
    // With no room for both, the block grows by way of host memory.
    if (!(in_vram && relocate(b, cells, streams, false)) && !relocate(b, cells, streams, true)) {
        return false;
    }
    if (in_vram && b.in_host_memory) {
        relocate(b, cells, streams, false);
    }
    return true;
}

bool KvStore::settle(bool may_shrink) {
    std::map<const KvGroup *, std::pair<int64_t, int64_t>> extents;
    const bool keep = ledger_.used(Use::kv) <= ledger_.budget() / kKeptShare;
    for (KvBlock *b : last_to_spill()) {
        extents.try_emplace(b->group, extent_of(*b->group, may_shrink, keep));
    }
    for (KvBlock *b : last_to_spill()) {
        const auto [cells, streams] = extents[b->group];
        if ((b->cells != cells || b->streams != streams) && !resize(*b, cells, streams)) {
            return false;
        }
    }
    spill_surplus();
    ensure_window(); // where there is no room for it now, the next graph tries again
    return true;
}

bool KvStore::hold_range(KvCache &cache, size_t offset, size_t bytes) {
    for (const KvRun &run : cache.runs(offset, bytes)) {
        if (!run.address) {
            const KvTensor &t = *cache.at(offset + run.from);
            const size_t in = offset + run.from - t.offset;
            int64_t &used = run.block->group->used[in / t.stream_bytes()];
            used = std::max(used, (int64_t)((in % t.stream_bytes() + run.bytes + t.row - 1) / t.row));
        }
    }
    const bool held = settle(false);
    note_change(cache, offset, bytes);
    return held;
}

void KvStore::note_change(KvCache &cache, size_t offset, size_t bytes) {
    for (const KvRun &run : cache.runs(offset, bytes)) {
        const KvTensor &t = *cache.at(offset + run.from);
        const size_t in = offset + run.from - t.offset, s = in / t.stream_bytes();
        const int64_t first = (int64_t)(in % t.stream_bytes() / t.row);
        const int64_t end = (int64_t)((in % t.stream_bytes() + run.bytes + t.row - 1) / t.row);
        for (KvBlock *b : run.block->group->blocks) {
            b->mirrored[s] = std::min(b->mirrored[s], first);
        }
        int64_t &written = run.block->group->written[s];
        written = std::max(written, end);
    }
}

void KvStore::clear(KvCache &cache, uint8_t value) {
    inner_.synchronize();
    for (KvGroup &g : cache.groups) {
        std::fill(g.used.begin(), g.used.end(), 0);
        std::fill(g.written.begin(), g.written.end(), 0);
    }
    finish_mirror();
    for (KvBlock &b : cache.blocks) {
        std::fill(b.mirrored.begin(), b.mirrored.end(), 0);
        b.spare_cells = b.spare_cells == 0 ? 0 : -1;
        if (b.storage) {
            ggml_backend_buffer_clear(b.storage.get(), value);
        }
    }
}

bool KvStore::park() {
    pageable_ = true;
    drop_kept();
    bool moved = true;
    each_block([&](KvBlock &b) {
        take_spare(b);
        if (b.bytes > 0 && !b.in_host_memory) {
            moved = relocate(b, b.cells, b.streams, true) && moved;
        }
    });
    if (window_) {
        release_window();
    }
    return moved;
}

void KvStore::unpark() {
    pageable_ = false;
    each_block([&](KvBlock &b) {
        if (b.in_host_memory) {
            relocate(b, b.cells, b.streams, true);
        }
    });
}

KvNeed KvStore::need() {
    uint64_t largest = 0, stay = 0, whole = 0;
    std::vector<size_t> at;
    each_block([&](const KvBlock &b) {
        const uint64_t bytes = weights_.layout.granular(lay_out(b, b.group->cells, b.group->streams, at));
        stay += b.stays ? bytes : 0;
        largest = std::max(largest, b.stays ? 0 : bytes);
        whole += bytes;
    });
    return {stay + largest, whole};
}

void KvStore::use_cells(uint32_t stream, uint64_t cells) {
    for (KvCache *cache : caches_) {
        for (KvGroup &g : cache->groups) {
            if (g.by_rows && stream < g.used.size()) {
                g.asked[stream] = (int64_t)std::min<uint64_t>(cells, (uint64_t)g.cells);
                // Where the cells of a shortened sequence lie is known from its next graph. An empty one has none.
                g.used[stream] = cells == 0 ? 0 : std::max(g.used[stream], g.asked[stream]);
                g.written[stream] = cells == 0 ? 0 : g.written[stream];
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- graphs

bool writes_rows(const ggml_tensor *node, const KvTensor &c) {
    const ggml_tensor *ids = node->src[1];
    const Buffer *b = node->op == GGML_OP_SET_ROWS ? buffer_of(ids) : nullptr;
    return b && ids->op == GGML_OP_NONE && !ids->view_src && ids->type == GGML_TYPE_I64 && ggml_is_contiguous(ids) &&
           ids->ne[1] == 1 && ids->ne[2] == 1 && ids->ne[3] == 1 &&
           ids->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && node->data == c.shape.data &&
           ggml_row_size(node->type, node->ne[0]) == c.row && node->nb[1] == c.row &&
           node->ne[1] * node->ne[2] == c.cells * c.streams && node->ne[3] == 1 && node->src[0]->ne[2] == 1;
}

static KvAccess access_of(const ggml_cgraph *graph) {
    KvAccess a;
    const auto want = [&](KvGroup *g, int64_t stream0, int64_t streams, int64_t cells) {
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
        KvBlock *touched = nullptr;
        for (int j = -1; j < GGML_MAX_SRC; j++) {
            const ggml_tensor *t = j < 0 ? n : n->src[j];
            KvTensor *c = t ? cached(t) : nullptr;
            if (!c) {
                continue;
            }
            if (touched && touched != c->block) {
                a.together.push_back(touched);
                a.together.push_back(c->block);
            }
            touched = c->block;
            KvGroup *g = c->block->group;
            if ((j < 0 || j == 2) && writes_rows(n, *c)) {
                const bool known = std::any_of(a.rows.begin(), a.rows.end(),
                                               [&](const auto &r) { return r.numbers == n->src[1] && r.group == g; });
                if (!known) {
                    a.rows.push_back({n->src[1], g});
                }
                continue;
            }
            if (j < 0) {
                a.changed.push_back(g);
            }
            const Reach r = reach_of(*c, t);
            want(g, r.stream0, r.streams, r.cells);
        }
    }
    // One list of row numbers can be changed for only one group: the others hold all of their cells.
    for (const auto &r : a.rows) {
        for (const auto &other : a.rows) {
            if (r.numbers == other.numbers && r.group != other.group) {
                want(r.group, 0, r.group->streams, r.group->cells);
            }
        }
    }
    return a;
}

const KvAccess &KvStore::access(const ggml_cgraph *graph) {
    static const KvAccess none;
    if (caches_.empty()) {
        return none;
    }
    return accesses_.of(graph, access_of);
}

bool KvStore::keep_together(const KvAccess &a) {
    bool more = false;
    for (KvBlock *b : a.together) {
        more = !std::exchange(b->stays, true) || more;
    }
    return more;
}

// Moves blocks to VRAM that a node reads together. The floor has room for them and a window for the largest of the others.
bool KvStore::bring(const std::vector<KvBlock *> &together) {
    for (KvBlock *b : together) {
        if (!b->in_host_memory || relocate(*b, b->cells, b->streams, false)) {
            continue;
        }
        release_window(); // it may be larger than the others need
        while (!relocate(*b, b->cells, b->streams, false)) {
            if (!spill_block()) {
                return false;
            }
        }
    }
    return ensure_window();
}

bool KvStore::prepare(const KvAccess &a) {
    for (const auto &w : a.wants) {
        for (int64_t s = w.stream0; s < w.stream0 + w.streams; s++) {
            int64_t &used = w.group->used[(size_t)s], &written = w.group->written[(size_t)s];
            const int64_t asked = w.group->asked[(size_t)s];
            used = std::max(asked < 0 ? used : asked, w.cells);
            if (asked >= 0) {
                written = std::min(written, w.cells); // those behind belong to a sequence that was cut
            }
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
    if (!settle(false)) {
        return false;
    }
    if (!bring(a.together)) {
        return false;
    }
    mirror_written(a);
    std::vector<int64_t> inside;
    for (const auto &r : a.rows) {
        const KvBlock &b = *r.group->blocks.front(); // all blocks of a group have the same size
        if (b.streams == 1) {
            continue; // row numbers of the first stream are the same in both
        }
        inner_.synchronize();
        const int64_t *numbers = (const int64_t *)r.numbers->data;
        inside.assign(numbers, numbers + r.numbers->ne[0]);
        for (int64_t &n : inside) {
            n = n / r.group->cells * b.cells + n % r.group->cells;
        }
        const Buffer *buffer = buffer_of(r.numbers);
        const size_t at = (size_t)((char *)r.numbers->data - buffer->base);
        inner_.upload(nullptr, buffer->device_buffer(), buffer->device_address(at), inside.data(),
                      inside.size() * sizeof(int64_t));
    }
    return true;
}

} // namespace fsd
