#include "ring.h"

#include <algorithm>

namespace fsd {

static constexpr uint64_t kRest = 1024;

std::vector<RingSlot> lay_ring(const std::vector<size_t> &step_bytes, size_t capacity) {
    std::vector<RingSlot> slots;
    size_t at = 0;
    for (size_t bytes : step_bytes) {
        if (bytes > capacity) {
            return {};
        }
        if (at + bytes > capacity) {
            at = 0;
        }
        slots.push_back({at, bytes, 0});
        at += bytes;
    }
    const size_t n = slots.size();
    for (size_t i = 0; i < n; i++) {
        size_t d = 1;
        for (; d < n; d++) {
            const RingSlot &a = slots[i];
            const RingSlot &b = slots[(i + n - d) % n];
            if (a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes) {
                break;
            }
        }
        slots[i].reuse_distance = d;
    }
    return slots;
}

bool Ring::resize(size_t bytes) {
    bytes = bytes / inner_.quirks.vram_unit_bytes * inner_.quirks.vram_unit_bytes;
    if (bytes == capacity_) {
        return true;
    }
    inner_.synchronize();
    reset();
    experts_.clear();
    ledger_.release(Use::ring, buffer_);
    base_ = nullptr;
    capacity_ = 0;
    generation_++;
    if (bytes == 0) {
        return true;
    }
    buffer_ = ledger_.allocate(Use::ring, bytes);
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    base_ = (char *)ggml_backend_buffer_get_base(buffer_.get());
    capacity_ = bytes;
    return true;
}

// Memory that must be staged for a copy is copied by the host in any case, and the second copy of weights has no fast
// synchronous path.
bool Ring::wants_thread() const {
    return inner_.quirks.one_queue && weights_.path != HostPath::copied && weights_.path != HostPath::staged;
}

Ring::Copied Ring::wait_for(size_t entry) {
    if (!thread_) {
        ggml_backend_event_wait(inner_.compute, ready_[entry]);
        return {};
    }
    const Copied started = pump_next();
    if (!thread_->made(last_copy_[entry])) {
        inner_.synchronize(); // the host has to wait anyway, and more slots may be free then
        computed(next_use_);
        const Copied more = pump();
        thread_->wait(last_copy_[entry]);
        return {started.copies + more.copies, started.bytes + more.bytes};
    }
    return started;
}

// Starts the copies of the next step at the latest, and those behind it that can be started.
Ring::Copied Ring::pump_next() {
    if (thread_ && next_copy_ <= next_use_) {
        inner_.synchronize();
        computed(next_use_);
    }
    return pump();
}

void Ring::synchronize(size_t entry) {
    if (!thread_) {
        ggml_backend_event_synchronize(ready_[entry]);
    } else if (next_copy_ > next_use_) {
        thread_->wait(last_copy_[entry]);
    }
}

void Ring::use(size_t entry) {
    if (!thread_) {
        ggml_backend_event_record(done_[entry], inner_.compute);
    }
    next_use_++;
}

Ring::Copied Ring::copy_missing_experts(size_t entry) {
    Copied c = pump_next();
    c.bytes += copy_experts(entry);
    if (thread_) {
        last_copy_[entry] = given_;
    } else {
        ggml_backend_event_record(ready_[entry], inner_.copy);
    }
    return c;
}

void Ring::reset() {
    if (entries_.empty()) {
        return;
    }
    thread_.reset();
    ggml_backend_synchronize(inner_.copy);
    inner_.synchronize();
    for (ggml_backend_event_t e : ready_) {
        ggml_backend_event_free(e);
    }
    for (ggml_backend_event_t e : done_) {
        ggml_backend_event_free(e);
    }
    ready_.clear();
    done_.clear();
    entries_.clear();
    held_.clear();
    slots_.clear();
    last_copy_.clear();
    next_copy_ = next_use_ = rested_at_ = given_ = computed_ = 0;
}

void Ring::lay_out(const Program &p) {
    if (entries_ == p.entries && entry_capacity_ == p.entry_capacity &&
        (entries_.empty() || next_use_ % entries_.size() == 0)) {
        return;
    }
    reset();
    entries_ = p.entries;
    slots_ = lay_ring(p.entry_bytes, p.entry_capacity);
    entry_capacity_ = p.entry_capacity;
    held_.assign(entries_.size(), {});
    if (!entries_.empty() && wants_thread()) {
        thread_ = std::make_unique<CopyThread>(inner_);
        last_copy_.assign(entries_.size(), 0);
        return;
    }
    for (size_t i = 0; i < entries_.size(); i++) {
        ready_.push_back(ggml_backend_event_new(inner_.dev));
        done_.push_back(ggml_backend_event_new(inner_.dev));
    }
}

void Ring::copy_from_host(char *to, const char *from, size_t bytes) {
    if (thread_) {
        CopyThread::Copy copy;
        copy.to = raw_tensor(buffer_.get(), to, bytes);
        copy.host = from;
        given_ = thread_->queue(copy);
    } else {
        inner_.upload(inner_.copy, buffer_.get(), to, from, bytes);
    }
}

// Copies the range [from, to) of a piece to its place `at` in the ring, and the padding behind its last byte.
void Ring::copy_piece(const Piece &p, size_t at, size_t from, size_t to) {
    const char *source = weights_.all[p.tensor].host + p.host_offset;
    copy_from_host(base_ + at + from, source + from, to - from);
    if (to == p.bytes) {
        ggml_backend_t stream = thread_ ? inner_.compute : inner_.copy;
        inner_.compute_pending = inner_.compute_pending || thread_ != nullptr;
        inner_.upload_zeros(stream, buffer_.get(), base_ + at + to, p.padded - to);
    }
}

// Copies the experts that the layer's router chose last and that the entry's place in the ring lacks; cached experts are
// copied within the device. Returns the bytes copied from the host. Kernels read past the end of a row, so the first
// weights of the next expert are copied, too.
uint64_t Ring::copy_experts(size_t entry) {
    const RingEntry &e = entries_[entry];
    const Piece &p = weights_.layout.pieces[e.pieces[0]];
    const ggml_tensor &shape = weights_.all[p.tensor].shape;
    const size_t each = shape.nb[2], n = shape.ne[2], run = ggml_row_size(shape.type, kRowRun);
    const std::vector<uint32_t> &chosen = experts_.latest_choice((uint32_t)e.layer);
    std::vector<bool> &held = held_[entry];
    held.resize(n);
    uint64_t bytes = 0;
    size_t from = n; // start of a run of neighbours to copy from the host; n: none
    for (size_t i = 0; i <= n; i++) {
        const bool lacks = i < chosen.size() && chosen[i] > 0 && !held[i];
        const int slot = lacks ? experts_.where(e.layer, (int)i) : -1;
        if (from < i && !(lacks && slot < 0)) {
            const size_t to = std::min(i * each + run, p.bytes);
            copy_piece(p, slots_[entry].offset, from * each, to);
            bytes += to - from * each;
            from = n;
        }
        if (!lacks) {
            continue;
        }
        held[i] = true;
        if (slot < 0) {
            from = std::min(from, i);
        } else {
            // The slot has the padding of the last expert, too.
            const size_t size = std::min(each + run, p.padded - i * each);
            char *cached = base_ + experts_.arena().at(slot) + experts_.arena().parts[e.product];
            ggml_tensor src = raw_tensor(buffer_.get(), cached, size);
            ggml_tensor dst = raw_tensor(buffer_.get(), base_ + slots_[entry].offset + i * each, size);
            if (thread_) {
                given_ = thread_->queue({dst, nullptr, src});
            } else {
                ggml_backend_tensor_copy_async(inner_.copy, inner_.copy, &src, &dst);
            }
        }
    }
    return bytes;
}

// Waits for the streams and events, so that a device frees what finished work has used.
void Ring::rest() {
    ggml_backend_synchronize(inner_.copy);
    for (const auto &events : {ready_, done_}) {
        for (ggml_backend_event_t e : events) {
            ggml_backend_event_synchronize(e);
        }
    }
    rested_at_ = next_copy_;
}

Ring::Copied Ring::pump(uint64_t least_bytes) {
    Copied all;
    const size_t n = entries_.size();
    if (!thread_ && inner_.quirks.keeps_until_waited && next_copy_ - rested_at_ >= kRest) {
        rest();
    }
    while (n > 0 && next_copy_ < next_use_ + n && all.bytes < least_bytes) {
        const size_t i = next_copy_ % n;
        const size_t back = slots_[i].reuse_distance;
        if (next_copy_ >= back) {
            const uint64_t previous = next_copy_ - back;
            if (previous >= next_use_) {
                return all; // a queued step has yet to use the place
            }
            if (thread_ && previous >= computed_) {
                return all;
            }
            if (!thread_) {
                ggml_backend_event_wait(inner_.copy, done_[previous % n]);
            }
        }
        if (inner_.trace) {
            inner_.trace->begin(FSD_LANE_COPY, inner_.copy);
        }
        size_t at = slots_[i].offset;
        uint64_t bytes = 0;
        if (entries_[i].layer >= 0) {
            held_[i].clear();
            bytes = copy_experts(i); // a prediction: the router may not have chosen yet
        } else {
            for (int k : entries_[i].pieces) {
                copy_piece(weights_.layout.pieces[k], at, 0, weights_.layout.pieces[k].bytes);
                at += weights_.layout.pieces[k].padded;
                bytes += weights_.layout.pieces[k].bytes;
            }
        }
        if (inner_.trace) {
            inner_.trace->end(FSD_LANE_COPY, inner_.copy, bytes);
        }
        if (thread_) {
            last_copy_[i] = given_;
        } else {
            ggml_backend_event_record(ready_[i], inner_.copy);
        }
        next_copy_++;
        all.copies++;
        all.bytes += bytes;
    }
    return all;
}

} // namespace fsd
