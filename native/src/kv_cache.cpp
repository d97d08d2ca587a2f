#include "kv_cache.h"

#include <algorithm>

namespace fsd {

// "_l12" of "cache_k_l12": the layer.
static std::string key_of(const ggml_tensor *t) {
    const std::string name = t->name;
    const size_t at = name.rfind("_l");
    const bool layer = at != std::string::npos && at + 2 < name.size() &&
                       name.find_first_not_of("0123456789", at + 2) == std::string::npos;
    return layer ? name.substr(at) : name;
}

void KvCache::add(const ggml_tensor *t, size_t offset) {
    KvTensor c;
    c.shape = *t;
    c.offset = offset;
    const bool rows = ggml_is_contiguous(t) && t->ne[3] == 1;
    c.cells = rows ? t->ne[1] : 1;
    c.streams = rows ? t->ne[2] : 1;
    c.row = rows ? t->nb[1] : ggml_nbytes(t);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const KvGroup &g) { return g.cells == c.cells && g.streams == c.streams; });
    if (group == groups.end()) {
        groups.emplace_back();
        group = groups.end() - 1;
        group->cells = c.cells;
        group->streams = c.streams;
        group->used.assign((size_t)c.streams, 0);
        group->asked.assign((size_t)c.streams, -1);
        group->written.assign((size_t)c.streams, 0);
    }
    const std::string key = key_of(t);
    auto block = std::find_if(blocks.begin(), blocks.end(),
                              [&](const KvBlock &b) { return b.group == &*group && b.key == key; });
    if (block == blocks.end()) {
        blocks.emplace_back();
        block = blocks.end() - 1;
        block->place = blocks.size() - 1;
        block->group = &*group;
        block->key = key;
        block->mirrored.assign((size_t)c.streams, 0);
        group->blocks.push_back(&*block);
    }
    c.block = &*block;
    tensors.push_back(c);
    block->tensors.push_back(&tensors.back());
}

KvTensor *KvCache::at(size_t offset) {
    auto it = std::upper_bound(tensors.begin(), tensors.end(), offset,
                               [](size_t o, const KvTensor &t) { return o < t.offset; });
    if (it == tensors.begin() || offset >= (it - 1)->offset + (it - 1)->bytes()) {
        return nullptr;
    }
    return &*(it - 1);
}

std::vector<KvRun> KvCache::runs(size_t offset, size_t bytes) {
    std::vector<KvRun> found;
    const size_t end = offset + bytes;
    for (size_t at = offset; at < end;) {
        const KvTensor *t = this->at(at);
        if (!t) {
            const auto next =
                std::find_if(tensors.begin(), tensors.end(), [&](const auto &c) { return c.offset > at; });
            at = next == tensors.end() ? end : next->offset;
            continue;
        }
        KvBlock *b = t->block;
        const int64_t stream = (int64_t)((at - t->offset) / t->stream_bytes());
        const size_t in = (at - t->offset) % t->stream_bytes(),
                     held = stream < b->streams ? (size_t)b->cells * t->row : 0;
        const size_t n = std::min(end - at, (in < held ? held : t->stream_bytes()) - in);
        found.push_back({b, in < held ? t->place(b->base, stream, 0) + in : nullptr, at - offset, n});
        at += n;
    }
    return found;
}

Reach reach_of(const KvTensor &c, const ggml_tensor *t) {
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

} // namespace fsd
