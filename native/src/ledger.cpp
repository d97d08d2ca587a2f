#include "ledger.h"

#include "layout.h"

#include <algorithm>

namespace fsd {

uint64_t Ledger::sum() const {
    uint64_t sum = overhead_.load();
    for (size_t u : used_by_) {
        sum += u;
    }
    return sum;
}

uint64_t Ledger::used() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return sum();
}

uint64_t Ledger::used(Use use) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_by_[(int)use];
}

uint64_t Ledger::fixed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return sum() - used_by_[(int)Use::arena] - used_by_[(int)Use::ring];
}

Ledger::Figures Ledger::figures() const {
    std::lock_guard<std::mutex> lock(mutex_);
    Figures f;
    std::copy_n(used_by_, (int)Use::count, f.used_by);
    f.overhead = overhead_.load();
    f.used = sum();
    f.peak = peak_;
    return f;
}

void Ledger::note_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = std::max(peak_, sum());
}

void Ledger::reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = sum();
}

bool Ledger::make_room(size_t bytes, unsigned reclaim) {
    const auto fits = [&] { return used() + bytes <= budget(); };
    for (const Reclaimer &r : reclaimers_) {
        while (!fits() && (r.kind & reclaim) && r.give()) {
        }
    }
    return fits();
}

InnerBuffer Ledger::allocate(Use use, size_t bytes, unsigned reclaim) {
    bytes = round_up(bytes, inner_.quirks.vram_unit_bytes);
    if (!make_room(bytes, reclaim)) {
        return nullptr;
    }
    InnerBuffer b(ggml_backend_buft_alloc_buffer(inner_.buffer_type(), bytes));
    if (b) {
        std::lock_guard<std::mutex> lock(mutex_);
        used_by_[(int)use] += ggml_backend_buffer_get_size(b.get());
        peak_ = std::max(peak_, sum());
    }
    return b;
}

void Ledger::release(Use use, InnerBuffer &buffer) {
    if (!buffer) {
        return;
    }
    const size_t size = ggml_backend_buffer_get_size(buffer.get());
    buffer.reset();
    std::lock_guard<std::mutex> lock(mutex_);
    used_by_[(int)use] -= size;
}

void Ledger::count(Use use, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_by_[(int)use] = bytes;
    peak_ = std::max(peak_, sum());
}

bool Ledger::borrow(Ledger &parent, uint64_t least, uint64_t wanted) {
    if (!parent.make_room(least, kForImages)) {
        return false;
    }
    const uint64_t limit = parent.budget();
    std::lock_guard<std::mutex> lock(parent.mutex_);
    const uint64_t taken = std::max(least, std::min(wanted, limit - parent.sum()));
    parent.used_by_[(int)Use::image] += taken;
    parent.peak_ = std::max(parent.peak_, parent.sum());
    set_budget(taken);
    parent_ = &parent;
    return true;
}

void Ledger::give_back() {
    if (!parent_) {
        return;
    }
    std::lock_guard<std::mutex> lock(parent_->mutex_);
    parent_->used_by_[(int)Use::image] = 0;
    parent_ = nullptr;
    set_budget(0);
}

} // namespace fsd
