#include "graph_memory.h"

#include "layout.h"

#include <algorithm>

namespace fsd {

// Less than this is not given back before a larger graph follows: an allocation takes longer than copies of so many bytes.
static constexpr size_t kNotWorthwhile = 1 << 20;

void GraphMemory::add(size_t at, size_t bytes) {
    std::lock_guard<std::mutex> lock(adding_mutex_);
    if (!adding_) {
        tensors_.clear();
        adding_ = in_use_ = true;
    }
    tensors_.emplace_back(at, at + bytes);
}

void GraphMemory::begin_use() {
    std::lock_guard<std::mutex> lock(adding_mutex_);
    in_use_ = true;
}

bool GraphMemory::in_use() const {
    std::lock_guard<std::mutex> lock(adding_mutex_);
    return in_use_;
}

void GraphMemory::end_use() {
    std::lock_guard<std::mutex> lock(adding_mutex_);
    in_use_ = false;
}

// Merges the tensors, many of which share memory, into extents, and places these one after the other.
void GraphMemory::pack(size_t alignment) {
    std::sort(tensors_.begin(), tensors_.end());
    std::vector<Extent> extents;
    for (const auto &[at, end] : tensors_) {
        if (extents.empty() || at > extents.back().end) {
            extents.push_back({at, end, 0});
        }
        extents.back().end = std::max(extents.back().end, end);
    }
    size_t packed = 0;
    for (Extent &e : extents) {
        e.packed_at = packed;
        packed += round_up(e.end - e.at, alignment);
    }
    const auto same = [](const Extent &a, const Extent &b) { return a.at == b.at && a.end == b.end; };
    if (!std::equal(extents.begin(), extents.end(), extents_.begin(), extents_.end(), same)) {
        version_++;
    }
    extents_ = std::move(extents);
    packed_ = packed;
}

bool GraphMemory::take(Inner &inner, Ledger &ledger, size_t bytes) {
    release(inner, ledger);
    storage_ = ledger.allocate(Use::graph, bytes);
    if (!storage_) {
        return false;
    }
    ggml_backend_buffer_clear(storage_.get(), 0); // kernels may read past the last row of a tensor
    return true;
}

bool GraphMemory::fits(const Inner &inner, size_t &needed) {
    {
        std::lock_guard<std::mutex> lock(adding_mutex_);
        if (std::exchange(adding_, false)) {
            pack(ggml_backend_buft_get_alignment(inner.buffer_type()));
            input = Input::kept;
        }
    }
    if (packed_ == 0) {
        return true;
    }
    needed = round_up(packed_, inner.quirks.vram_unit_bytes);
    least_ = least_ == 0 ? needed : std::min(least_, needed);
    const bool far_too_large = bytes() > 2 * needed && bytes() - needed >= kNotWorthwhile;
    return bytes() >= needed && !far_too_large;
}

void GraphMemory::trim(Inner &inner, Ledger &ledger) {
    if (bytes() >= least_ + kNotWorthwhile) {
        take(inner, ledger, least_); // if there is none, fits() is false for the next graph
    }
}

void GraphMemory::release(Inner &inner, Ledger &ledger) {
    if (storage_) {
        inner.synchronize(); // queued work may still use it
        ledger.release(Use::graph, storage_);
        version_++;
    }
}

char *GraphMemory::address(size_t at) const {
    auto after =
        std::upper_bound(extents_.begin(), extents_.end(), at, [](size_t a, const Extent &e) { return a < e.at; });
    if (after == extents_.begin() || !storage_) {
        return nullptr;
    }
    const Extent &e = *(after - 1);
    return at < e.end && e.packed_at + (e.end - e.at) <= bytes()
               ? (char *)ggml_backend_buffer_get_base(storage_.get()) + e.packed_at + (at - e.at)
               : nullptr;
}

} // namespace fsd
