#include "ring.h"

#include <algorithm>
#include <utility>

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
    if (buffer_) {
        ggml_backend_synchronize(inner_.copy); // copies of experts
    }
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

// Memory that must be staged for a copy is copied by the CPU in any case, and the second copy of weights has no fast
// synchronous path. The cache frees its memory when the copy stream has passed an event.
bool Ring::wants_thread() const {
    return inner_.quirks.one_queue && !cache_.is_open() && weights_.path != HostPath::copied &&
           weights_.path != HostPath::staged;
}

Ring::Copied Ring::wait_for(size_t entry) {
    if (!thread_) {
        ggml_backend_event_wait(inner_.compute, ready_[entry]);
        return {};
    }
    const Copied started = pump_next();
    if (!thread_->made(last_copy_[entry])) {
        inner_.synchronize(); // the CPU has to wait anyway, and more slots may be free then
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

void Ring::before_fill() {
    if (thread_) {
        thread_->wait(last_cached_);
    }
    filling_ = true;
}

void Ring::use(size_t entry) {
    if (!thread_) {
        inner_.record(done_[entry], inner_.compute);
    }
    next_use_++;
}

Taken Ring::copy_missing_experts(size_t entry, std::chrono::milliseconds most, Copied &copied) {
    const Copied started = pump_next();
    copied.copies += started.copies;
    copied.bytes += started.bytes;
    Taken taken = Taken::yes;
    if (cache_.takes_singly(entries_[entry].pieces[0])) {
        taken = read_experts(entry, most, copied.bytes);
    } else {
        const std::vector<bool> predicted = held_[entry];
        copied.bytes += copy_experts(entry);
        if (held_[entry] == predicted) {
            return taken; // nothing lacked: the step need not wait for the copies of later ones, which are queued already
        }
    }
    if (taken == Taken::yes && thread_) {
        last_copy_[entry] = given_;
    } else if (taken == Taken::yes) {
        inner_.record(ready_[entry], inner_.copy);
    }
    return taken;
}

void Ring::reset() {
    if (entries_.empty()) {
        return;
    }
    thread_.reset();
    ggml_backend_synchronize(inner_.copy);
    inner_.synchronize();
    for (const auto &events : {ready_, done_}) {
        for (ggml_backend_event_t e : events) {
            inner_.give_back(e);
        }
    }
    ready_.clear();
    done_.clear();
    entries_.clear();
    held_.clear();
    slots_.clear();
    last_copy_.clear();
    next_copy_ = next_use_ = rested_at_ = given_ = last_cached_ = computed_ = 0;
    n_copied_ = copied_bytes_ = 0;
}

void Ring::lay_out(const Program &p) {
    std::vector<int> pieces; // in the order of use
    for (const RingEntry &e : p.entries) {
        if (e.layer < 0) {
            pieces.insert(pieces.end(), e.pieces.begin(), e.pieces.end());
        }
    }
    cache_.follow(pieces, true);
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
        ready_.push_back(inner_.take_event());
        done_.push_back(inner_.take_event());
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

// Copies the range [from, to) of a piece, which is at `source`, to its place `at` in the ring, and the padding behind the
// piece's last byte.
void Ring::copy_piece(const Piece &p, const char *source, size_t at, size_t from, size_t to) {
    copy_from_host(base_ + at + from, source, to - from);
    if (to == p.bytes) {
        ggml_backend_t stream = thread_ ? inner_.compute : inner_.copy;
        inner_.compute_pending = inner_.compute_pending || thread_ != nullptr;
        inner_.upload_zeros(stream, buffer_.get(), base_ + at + to, p.padded - to);
    }
}

// Copies an expert that is in a slot of the expert cache, within the device. The slot has the padding of the last expert, too.
void Ring::copy_cached(size_t entry, int expert, int slot) {
    const RingEntry &e = entries_[entry];
    const Piece &p = weights_.layout.pieces[e.pieces[0]];
    const ggml_tensor &shape = weights_.all[p.tensor].shape;
    const size_t each = shape.nb[2], at = (size_t)expert * each;
    const size_t size = std::min(each + ggml_row_size(shape.type, kRowRun), p.padded - at);
    char *cached = base_ + experts_.arena().at((size_t)slot) + experts_.arena().parts[(size_t)e.product];
    ggml_tensor src = raw_tensor(buffer_.get(), cached, size);
    ggml_tensor dst = raw_tensor(buffer_.get(), base_ + slots_[entry].offset + at, size);
    if (thread_) {
        if (std::exchange(filling_, false)) {
            ggml_backend_synchronize(inner_.copy);
        }
        given_ = last_cached_ = thread_->queue({dst, nullptr, src});
    } else {
        ggml_backend_tensor_copy_async(inner_.copy, inner_.copy, &src, &dst);
    }
    held_[entry][(size_t)expert] = true;
}

// The experts that the layer's router chose last and that the entry's place in the ring lacks, but for those in the expert
// cache, whose copies it starts.
std::vector<int> Ring::lacking(size_t entry) {
    const RingEntry &e = entries_[entry];
    const std::vector<uint32_t> &chosen = experts_.latest_choice((uint32_t)e.layer);
    std::vector<bool> &held = held_[entry];
    held.resize((size_t)weights_.all[weights_.layout.pieces[e.pieces[0]].tensor].shape.ne[2]);
    std::vector<int> lacking;
    for (size_t i = 0; i < std::min(held.size(), chosen.size()); i++) {
        if (chosen[i] == 0 || held[i]) {
            continue;
        }
        const int slot = experts_.where((uint32_t)e.layer, (int)i);
        if (slot >= 0) {
            copy_cached(entry, (int)i, slot);
        } else {
            lacking.push_back((int)i);
        }
    }
    return lacking;
}

// Copies the experts that an entry lacks, neighbours in one copy. Returns the bytes copied from the host. Kernels read past the
// end of a row, so the first weights of the next expert are copied, too.
uint64_t Ring::copy_experts(size_t entry) {
    const Piece &p = weights_.layout.pieces[entries_[entry].pieces[0]];
    const Weight &w = weights_.all[p.tensor];
    const size_t each = w.shape.nb[2], run = ggml_row_size(w.shape.type, kRowRun);
    const std::vector<int> experts = lacking(entry);
    uint64_t bytes = 0;
    for (size_t i = 0, end = 0; i < experts.size(); i = end) {
        for (end = i; end < experts.size() && experts[end] == experts[i] + (int)(end - i); end++) {
            held_[entry][(size_t)experts[end]] = true;
        }
        const size_t from = (size_t)experts[i] * each, to = std::min(from + (end - i) * each + run, p.bytes);
        copy_piece(p, w.host + p.host_offset + from, slots_[entry].offset, from, to);
        bytes += to - from;
    }
    return bytes;
}

// The same, one by one, for those of them that are read. False: a read has failed.
bool Ring::copy_read_experts(size_t entry, uint64_t &bytes) {
    const int piece = entries_[entry].pieces[0];
    const Piece &p = weights_.layout.pieces[piece];
    const ggml_tensor &shape = weights_.all[p.tensor].shape;
    const size_t each = shape.nb[2], run = ggml_row_size(shape.type, kRowRun);
    std::vector<std::pair<int, int>> copied;
    bool failed = false;
    for (int expert : lacking(entry)) {
        const char *data = nullptr;
        const Taken taken = cache_.experts().take(piece, expert, std::chrono::milliseconds(0), data);
        failed = failed || taken == Taken::failed;
        if (taken == Taken::yes) {
            const size_t from = (size_t)expert * each, to = std::min(from + each + run, p.bytes);
            copy_piece(p, data, slots_[entry].offset, from, to);
            held_[entry][(size_t)expert] = true;
            copied.emplace_back(piece, expert);
            bytes += to - from;
        }
    }
    cache_.experts().copied(copied);
    return !failed;
}

// Copies the experts that an entry lacks, and reads as many as there are slots for.
Taken Ring::read_experts(size_t entry, std::chrono::milliseconds most, uint64_t &bytes) {
    HostExperts &experts = cache_.experts();
    const int piece = entries_[entry].pieces[0];
    if (!copy_read_experts(entry, bytes)) {
        return Taken::failed;
    }
    const std::vector<int> left = lacking(entry);
    if (left.empty()) {
        return Taken::yes;
    }
    Taken asked = Taken::yes;
    for (size_t i = 0; i < left.size() && asked == Taken::yes; i++) {
        asked = experts.ask(piece, left[i], i == 0);
    }
    if (asked == Taken::failed) {
        return asked;
    }
    const char *data = nullptr;
    return experts.take(piece, left[0], most, data) == Taken::failed ? Taken::failed : Taken::not_yet;
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

// Copies what an entry lacks of its pieces, as far as they are read.
Taken Ring::copy_pieces(size_t entry, std::chrono::milliseconds most, uint64_t &bytes) {
    const std::vector<int> &pieces = entries_[entry].pieces;
    Taken taken = Taken::yes;
    for (; n_copied_ < pieces.size(); n_copied_++) {
        const Piece &p = weights_.layout.pieces[pieces[n_copied_]];
        const char *source = cache_.at(pieces[n_copied_]);
        const bool buffered = !source;
        if (buffered) {
            taken = cache_.take(pieces[n_copied_], most, source);
            if (taken != Taken::yes) {
                break;
            }
        }
        if (inner_.trace && bytes == 0) {
            inner_.trace->begin(FSD_LANE_COPY, inner_.copy);
        }
        copy_piece(p, source, slots_[entry].offset + copied_bytes_, 0, p.bytes);
        if (buffered) {
            cache_.taken();
        }
        copied_bytes_ += p.padded;
        bytes += p.bytes;
    }
    if (inner_.trace && bytes > 0) {
        inner_.trace->end(FSD_LANE_COPY, inner_.copy, bytes);
    }
    if (taken == Taken::yes) {
        n_copied_ = copied_bytes_ = 0;
    }
    return taken;
}

// Copies the next entry, whose place is free.
Taken Ring::copy_next(std::chrono::milliseconds most, Copied &copied) {
    const size_t i = next_copy_ % entries_.size();
    uint64_t bytes = 0;
    Taken taken = Taken::yes;
    if (entries_[i].layer >= 0) {
        if (inner_.trace) {
            inner_.trace->begin(FSD_LANE_COPY, inner_.copy);
        }
        held_[i].clear();
        // A prediction: the router may not have chosen yet. Nothing is read from disk for it.
        if (cache_.takes_singly(entries_[i].pieces[0])) {
            copy_read_experts(i, bytes);
        } else {
            bytes = copy_experts(i);
        }
        if (inner_.trace) {
            inner_.trace->end(FSD_LANE_COPY, inner_.copy, bytes);
        }
    } else {
        taken = copy_pieces(i, most, bytes);
    }
    copied.bytes += bytes;
    if (taken == Taken::yes) {
        if (thread_) {
            last_copy_[i] = given_;
        } else {
            inner_.record(ready_[i], inner_.copy);
        }
        next_copy_++;
        copied.copies++;
    }
    return taken;
}

bool Ring::bring_next(std::chrono::milliseconds most, Copied &copied) {
    const uint64_t back = slots_[next_copy_ % entries_.size()].reuse_distance;
    if (next_copy_ >= back && n_copied_ == 0) {
        ggml_backend_event_wait(inner_.copy, done_[(next_copy_ - back) % entries_.size()]);
    }
    return copy_next(most, copied) != Taken::failed;
}

Ring::Copied Ring::pump(uint64_t least_bytes) {
    Copied all;
    const size_t n = entries_.size();
    if (!thread_ && inner_.quirks.keeps_until_waited && next_copy_ - rested_at_ >= kRest) {
        rest();
    }
    while (n > 0 && next_copy_ < next_use_ + n && all.bytes < least_bytes) {
        const size_t back = slots_[next_copy_ % n].reuse_distance;
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
        if (copy_next(std::chrono::milliseconds(0), all) != Taken::yes) {
            return all; // a failure comes up again when the step is used
        }
    }
    return all;
}

} // namespace fsd
