#include "arena.h"

#include <algorithm>

namespace fsd {

bool Arena::take_core() {
    const Layout &layout = weights_.layout;
    if (layout.core_bytes == 0) {
        return true;
    }
    core_ = ledger_.allocate(Use::core, layout.core_bytes);
    if (!core_) {
        return false;
    }
    ggml_backend_buffer_set_usage(core_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(core_.get(), 0);
    core_base_ = (char *)ggml_backend_buffer_get_base(core_.get());
    for (const Weight &w : weights_.all) {
        if (w.place.core) {
            inner_.upload(nullptr, core_.get(), core_base_ + w.place.core_offset, w.host, w.bytes);
        }
    }
    return true;
}

void Arena::release_core() {
    ledger_.release(Use::core, core_);
    core_base_ = nullptr;
}

bool Arena::evict() {
    if (slabs.empty()) {
        return false;
    }
    inner_.synchronize(); // queued work may still read the slab
    Slab &s = slabs.back();
    ggml_backend_event_synchronize(s.filled); // its copies may still be under way
    inner_.give_back(s.filled);
    ledger_.release(Use::arena, s.buffer);
    slabs.pop_back();
    generation_++;
    n_evicted++;
    return true;
}

void Arena::start_round() {
    const size_t before = std::min(filled_before_, slabs.size());
    if (before > 0) {
        ggml_backend_event_synchronize(slabs[before - 1].filled);
    }
    filled_before_ = slabs.size();
}

// Starts the copies of a slab; false when its weights cannot be read from disk.
bool Arena::copy_pieces(int slab_index, const Slab &slab) {
    constexpr std::chrono::milliseconds kPatience{1000}; // with a disk that is stuck: budgets wait meanwhile
    std::vector<int> pieces;
    for (size_t i = 0; i < weights_.layout.pieces.size(); i++) {
        if (weights_.layout.pieces[i].slab == slab_index) {
            pieces.push_back((int)i);
        }
    }
    cache_.follow(pieces, false);
    for (int i : pieces) {
        const Piece &p = weights_.layout.pieces[i];
        const char *source = cache_.at(i);
        const bool buffered = !source;
        if (buffered && cache_.take(i, kPatience, source) != Taken::yes) {
            return false;
        }
        char *to = slab.base + p.slab_offset;
        inner_.upload(inner_.copy, slab.buffer.get(), to, source, p.bytes);
        // Kernels may read past the last row, where there must be numbers.
        inner_.upload_zeros(inner_.copy, slab.buffer.get(), to + p.bytes, p.padded - p.bytes);
        if (buffered) {
            cache_.taken();
        }
    }
    return true;
}

bool Arena::fill_next() {
    const int index = (int)slabs.size();
    Slab slab;
    slab.buffer = ledger_.allocate(Use::arena, weights_.layout.slab_sizes[index]);
    if (!slab.buffer) {
        return false; // another program holds the memory
    }
    ggml_backend_buffer_set_usage(slab.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    slab.base = (char *)ggml_backend_buffer_get_base(slab.buffer.get());
    if (!copy_pieces(index, slab)) {
        ggml_backend_synchronize(inner_.copy);
        ledger_.release(Use::arena, slab.buffer);
        return false;
    }
    slab.filled = inner_.take_event();
    inner_.record(slab.filled, inner_.copy);
    slabs.push_back(std::move(slab));
    n_filled++;
    return true;
}

size_t Arena::fill(size_t n_slabs, size_t max_bytes) {
    size_t done = 0;
    while (slabs.size() < n_slabs && done < max_bytes) {
        const size_t bytes = weights_.layout.slab_sizes[slabs.size()];
        if (ledger_.used() + bytes > ledger_.budget() || !fill_next()) {
            break;
        }
        done += bytes;
    }
    return done;
}

void Arena::finish_fills() {
    for (Slab &s : slabs) {
        if (!s.ready) {
            inner_.compute_waits(s.filled); // the event may only be used again when the stream has waited for it
            s.ready = true;
            generation_++;
        }
    }
}

} // namespace fsd
