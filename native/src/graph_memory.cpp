#include "graph_memory.h"

#include "layout.h"

#include <algorithm>

namespace fsd {

// Less than this is not given back before a larger graph follows: an allocation takes longer than copies of so many bytes.
static constexpr size_t kNotWorthwhile = 1 << 20;
static constexpr size_t kMostKnown = 8;

static bool far_larger(size_t bytes, size_t needed) { return bytes > 2 * needed && bytes - needed >= kNotWorthwhile; }

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
    extents_ = std::move(extents);
    packed_ = packed;
}

void GraphMemory::find_version() {
    const auto same = [](const Extent &a, const Extent &b) { return a.at == b.at && a.end == b.end; };
    const auto found = std::find_if(known_.begin(), known_.end(), [&](const Addresses &a) {
        return a.storage == now_->id &&
               std::equal(extents_.begin(), extents_.end(), a.extents.begin(), a.extents.end(), same);
    });
    if (found == known_.end()) {
        known_.insert(known_.begin(), {now_->id, ++ids_, extents_});
        known_.resize(std::min(known_.size(), kMostKnown));
    } else {
        std::rotate(known_.begin(), found, found + 1);
    }
    version_ = known_.front().version;
}

bool GraphMemory::take(Inner &inner, Ledger &ledger, size_t bytes) {
    drop(inner, ledger);
    now_->buffer = ledger.allocate(Use::graph, bytes);
    if (!now_->buffer) {
        return false;
    }
    now_->id = ++ids_;
    find_version();
    ggml_backend_buffer_clear(storage(), 0); // kernels may read past the last row of a tensor
    return true;
}

bool GraphMemory::fits(const Inner &inner, size_t &needed) {
    bool other = false;
    {
        std::lock_guard<std::mutex> lock(adding_mutex_);
        other = std::exchange(adding_, false);
        if (other) {
            pack(ggml_backend_buft_get_alignment(inner.buffer_type()));
            input = Input::kept;
        }
    }
    if (packed_ == 0) {
        return true;
    }
    needed = round_up(packed_, inner.quirks.vram_unit_bytes);
    least_ = least_ == 0 ? needed : std::min(least_, needed);
    Storage *before = std::exchange(now_, far_larger(needed, least_) ? &large_ : &small_);
    const bool fits = now_->bytes() >= needed && !far_larger(now_->bytes(), needed);
    if (fits && (other || now_ != before)) {
        find_version();
    }
    return fits;
}

size_t GraphMemory::idle_bytes() const { return now_ == &small_ ? large_.bytes() : 0; }

bool GraphMemory::drop_idle(Inner &inner, Ledger &ledger) {
    if (idle_bytes() == 0) {
        return false;
    }
    release(inner, ledger, large_);
    return true;
}

void GraphMemory::trim(Inner &inner, Ledger &ledger) {
    const bool had_any = small_.buffer || large_.buffer;
    release(inner, ledger, large_);
    if (had_any && (small_.bytes() < least_ || far_larger(small_.bytes(), least_))) {
        now_ = &small_;
        take(inner, ledger, least_); // if there is none, fits() is false for the next graph
    }
}

void GraphMemory::release(Inner &inner, Ledger &ledger) {
    release(inner, ledger, small_);
    release(inner, ledger, large_);
}

void GraphMemory::release(Inner &inner, Ledger &ledger, Storage &storage) {
    if (storage.buffer) {
        inner.synchronize(); // queued work may still use it
        ledger.release(Use::graph, storage.buffer);
        known_.erase(
            std::remove_if(known_.begin(), known_.end(), [&](const Addresses &a) { return a.storage == storage.id; }),
            known_.end());
    }
}

char *GraphMemory::address(size_t at) const {
    auto after =
        std::upper_bound(extents_.begin(), extents_.end(), at, [](size_t a, const Extent &e) { return a < e.at; });
    if (after == extents_.begin() || !storage()) {
        return nullptr;
    }
    const Extent &e = *(after - 1);
    return at < e.end && e.packed_at + (e.end - e.at) <= now_->bytes()
               ? (char *)ggml_backend_buffer_get_base(storage()) + e.packed_at + (at - e.at)
               : nullptr;
}

} // namespace fsd
