#include "read_ahead.h"

#include <algorithm>

namespace fsd {

using std::chrono::milliseconds;

void ReadAhead::start(Disk &disk, std::vector<FileRange> ranges, std::function<bool(int)> passes) {
    disk_ = &disk;
    ranges_ = std::move(ranges);
    passes_ = std::move(passes);
}

void ReadAhead::stop() {
    drop_slots(first_waiting());
    for (const Disk::Read &read : left_) {
        disk_->drop(read);
    }
    left_.clear();
    slots_.clear();
    freed_.reset();
    order_.clear();
    ranges_.clear();
    base_.reset();
    size_ = 0;
    next_ = 0;
}

void ReadAhead::resize(size_t bytes) {
    drop_slots(first_waiting());
    ggml_backend_synchronize(inner_.copy);
    slots_.clear();
    freed_.reset();
    base_.reset();
    size_ = bytes;
    next_ = 0;
    if (!take_memory() && !is_held()) {
        size_ = 0; // set_room() asks again
    }
}

// False: a read under way still has the memory of before, and both would be too much, or the system refuses memory.
bool ReadAhead::take_memory() {
    if (base_ || size_ == 0) {
        return base_ != nullptr;
    }
    forget_ended();
    std::shared_ptr<char> memory = is_held() ? nullptr : inner_.pages(size_);
    if (!memory) {
        return false;
    }
    bytes_ = size_; // before a reader can free it
    base_ = std::shared_ptr<char>(memory.get(), [this, memory](char *) mutable {
        memory.reset();
        bytes_ = 0;
    });
    return true;
}

// Drops slots that were not taken. Reads that have begun go on, into memory that they keep.
void ReadAhead::drop_slots(size_t from, size_t to) {
    to = std::min(to, slots_.size());
    for (size_t i = from; i < to; i++) {
        disk_->cancel(slots_[i].read);
        left_.push_back(slots_[i].read);
    }
    slots_.erase(slots_.begin() + (ptrdiff_t)from, slots_.begin() + (ptrdiff_t)to);
    forget_ended();
}

void ReadAhead::forget_ended() {
    left_.erase(std::remove_if(left_.begin(), left_.end(),
                               [this](const Disk::Read &r) { return disk_->state(r) > DiskRead::State::running; }),
                left_.end());
}

size_t ReadAhead::first_waiting() const {
    return (size_t)(std::find_if(slots_.begin(), slots_.end(), [](const Slot &s) { return !s.taken; }) -
                    slots_.begin());
}

void ReadAhead::follow(const std::vector<int> &ranges, bool again) {
    if (ranges == order_ && again == again_) {
        read();
        return;
    }
    order_ = ranges;
    again_ = again;
    next_ = 0;
    const size_t first = first_waiting();
    if (first < slots_.size()) {
        // Graphs of another kind often go through the same weights in the same order: what was read stays.
        next_ = (size_t)(std::find(order_.begin(), order_.end(), slots_[first].range) - order_.begin());
        size_t same = first;
        while (same < slots_.size() && next_range() == slots_[same].range) {
            next_++;
            same++;
        }
        drop_slots(same);
        next_ = same == first ? 0 : next_;
    }
    read();
}

// The next range to read, or -1.
int ReadAhead::next_range() {
    for (size_t tries = 0; tries <= order_.size(); tries++) {
        if (next_ >= order_.size()) {
            if (!again_ || order_.empty()) {
                return -1;
            }
            next_ = 0;
        }
        if (!passes_(order_[next_])) {
            return order_[next_];
        }
        next_++;
    }
    return -1; // all pass
}

// A place for the next slot, behind the last one; false: there is none yet.
bool ReadAhead::find_place(size_t bytes, size_t &at) {
    at = slots_.empty() ? 0 : slots_.back().at + slots_.back().bytes;
    at = at + bytes > size_ ? 0 : at;
    const auto in_the_way = [&](const Slot &s) { return s.at < at + bytes && at < s.at + s.bytes; };
    const char *place = base_.get() + at;
    forget_ended();
    if (bytes > size_ ||
        std::any_of(slots_.begin(), slots_.end(), [&](const Slot &s) { return in_the_way(s) && !s.copied; }) ||
        std::any_of(left_.begin(), left_.end(),
                    [&](const Disk::Read &r) { return r->to < place + bytes && place < r->to + r->bytes; })) {
        return false;
    }
    while (std::any_of(slots_.begin(), slots_.end(), in_the_way)) {
        freed_ = slots_.front().copied;
        slots_.pop_front();
    }
    return true;
}

void ReadAhead::read() {
    while (take_memory()) {
        const int range = next_range();
        const size_t first = first_waiting();
        const bool there = std::any_of(slots_.begin() + (ptrdiff_t)first, slots_.end(),
                                       [&](const Slot &s) { return s.range == range; });
        Slot slot;
        slot.range = range;
        if (range < 0 || there || !find_place(slot.bytes = ranges_[range].span_bytes(), slot.at)) {
            return;
        }
        const FileRange &r = ranges_[range];
        slot.skip = (size_t)(r.from - r.span());
        slot.read = std::make_shared<DiskRead>();
        slot.read->file = r.file;
        slot.read->offset = r.file->offset_of(r.span());
        slot.read->to = base_.get() + slot.at;
        slot.read->bytes = slot.bytes;
        slot.read->memory = base_;
        if (freed_ && inner_.quirks.keeps_until_waited) { // no other thread may wait for its events
            ggml_backend_event_synchronize(freed_.get());
        } else {
            slot.read->after = freed_;
        }
        disk_->submit(slot.read, true);
        slots_.push_back(std::move(slot));
        next_++;
    }
}

// Makes a range the first of the slots that wait.
void ReadAhead::seek(int range) {
    const size_t first = first_waiting();
    size_t i = first;
    while (i < slots_.size() && slots_[i].range != range) {
        i++;
    }
    if (i < slots_.size()) { // those before it are not needed: they are held by now, or resident
        drop_slots(first, i);
        return;
    }
    drop_slots(first);
    const auto found = std::find(order_.begin(), order_.end(), range);
    if (found == order_.end()) {
        order_ = {range};
        again_ = false;
    }
    next_ = found == order_.end() ? 0 : (size_t)(found - order_.begin());
    read();
}

bool ReadAhead::is_next(int range) const {
    const size_t first = first_waiting();
    return first < slots_.size() && slots_[first].range == range;
}

Taken ReadAhead::take(int range, milliseconds most, const char *&data) {
    const auto end = std::chrono::steady_clock::now() + most;
    const auto left = [end] {
        const auto now = std::chrono::steady_clock::now();
        return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(end - now));
    };
    while (!is_next(range)) {
        seek(range);
        if (is_next(range)) {
            break;
        }
        // It passes since it was asked for, or copies or reads that are under way have the buffer, or there is none.
        data = nullptr;
        if (passes_(range)) {
            return Taken::yes;
        }
        if (size_ < ranges_[(size_t)range].span_bytes() || (!take_memory() && !is_held())) {
            size_ = base_ ? size_ : 0; // set_room() asks again
            why_ = "the system refuses memory for reads of weights";
            return Taken::failed;
        }
        if (left_.empty() || left() == milliseconds(0)) {
            return Taken::not_yet;
        }
        disk_->wait(left_.front(), left());
    }
    const size_t first = first_waiting();
    Slot &slot = slots_[first];
    const DiskRead::State state = disk_->wait(slot.read, left());
    if (state == DiskRead::State::done) {
        slot.taken = true;
        data = base_.get() + slot.at + slot.skip;
        return Taken::yes;
    }
    if (state <= DiskRead::State::running) {
        return Taken::not_yet;
    }
    why_ = slot.read->why;
    drop_slots(first);
    return Taken::failed;
}

void ReadAhead::taken() {
    if (slots_.empty() || !slots_.front().taken) {
        return;
    }
    SharedEvent copied;
    for (Slot &s : slots_) {
        if (s.taken && !s.copied) {
            if (!copied) {
                copied.reset(ggml_backend_event_new(inner_.dev), ggml_backend_event_free);
                ggml_backend_event_record(copied.get(), inner_.copy);
            }
            s.copied = copied;
        }
    }
    read();
}

} // namespace fsd
