#include "host_cache.h"

#include "system.h"

#include <algorithm>

namespace fsd {

using std::chrono::milliseconds;

static constexpr size_t kMiB = (size_t)1 << 20;
// The buffer for reads ahead takes a quarter of the room, up to so much.
static constexpr uint64_t kMostBuffer = 64 * kMiB;
// The most room for pages of the file that come into memory because llama.cpp reads rows of the embedding: a row may touch two
// pages, and graphs seldom have more than 512 tokens.
static constexpr uint64_t kEmbeddingBytes = 4 * kMiB;
static constexpr size_t kHoldsAtOnce = 2;

static size_t pages_up(size_t n) { return (n + MappedFile::kUnit - 1) / MappedFile::kUnit * MappedFile::kUnit; }
static char *page_up(const char *p) { return (char *)pages_up((size_t)(uintptr_t)p); }
static char *page_down(const char *p) { return (char *)((uintptr_t)p / MappedFile::kUnit * MappedFile::kUnit); }

// Memory from reserve_addresses() until it becomes part of a mapping.
struct PageCopy {
    explicit PageCopy(size_t n) : data(reserve_addresses(n)), bytes(n) {}
    ~PageCopy() { free(); }
    void free() {
        if (data) {
            release_addresses(data, bytes);
        }
        data = nullptr;
    }
    PageCopy(const PageCopy &) = delete;
    PageCopy &operator=(const PageCopy &) = delete;
    char *data;
    size_t bytes;
};

// ----------------------------------------------------------------------------------------------------------------- files

uint64_t HostCache::add(char *window, size_t bytes) {
    std::unique_ptr<MappedFile> file = MappedFile::find(window);
    all_files_ = all_files_ && file;
    const uint64_t mapped = file ? (uint64_t)(file->end() - file->begin()) : bytes;
    files_.push_back({std::move(file), window, bytes});
    return mapped;
}

void HostCache::close() {
    std::vector<Disk::Read> holds;
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        to_hold_.clear();
        holds = holds_;
    }
    if (disk_) {
        drop_slots(0);
        for (const Disk::Read &read : holds) {
            disk_->drop(read);
        }
    }
    open_.store(false);
    disk_.reset();
    holds_.clear();
    slots_.clear();
    order_.clear();
    places_.clear();
    shard_held_.clear();
    files_.clear();
    buffer_.reset();
    buffer_size_ = 0;
    all_files_ = true;
    n_holding_ = 0;
    floor_ = held_bytes_ = buffer_bytes_ = embedding_bytes_ = 0;
}

size_t HostCache::span_of(int piece) const {
    const Piece &p = weights_.layout.pieces[piece];
    const char *from = weights_.all[p.tensor].host + p.host_offset;
    return (size_t)(page_up(from + p.bytes) - page_down(from));
}

void HostCache::plan() {
    if (is_open() || !all_files_ || files_.empty()) {
        return;
    }
    const Layout &layout = weights_.layout;
    places_.assign(layout.pieces.size(), {});
    uint64_t always = 0, mapped = 0;
    size_t largest = 0;
    for (size_t i = 0; i < places_.size(); i++) {
        const Piece &p = layout.pieces[i];
        const Weight &w = weights_.all[p.tensor];
        const char *from = w.host + p.host_offset;
        Place &place = places_[i];
        for (const Window &window : files_) {
            place.file = window.file->contains(from) ? window.file.get() : place.file;
        }
        place.page = page_up(from);
        place.page_bytes = (size_t)std::max<ptrdiff_t>(page_up(from + p.bytes) - place.page, 0);
        place.always = w.shape.ne[2] > 1;
        always += place.always ? place.page_bytes : 0;
        largest = std::max(largest, place.always ? 0 : span_of((int)i));
    }
    for (const Window &window : files_) {
        mapped += (uint64_t)(window.file->end() - window.file->begin());
    }
    least_buffer_ = 2 * largest;
    embedding_room_ = std::min(kEmbeddingBytes, mapped / 16);
    const uint64_t least = least_buffer_ + always + embedding_room_;
    floor_.store(least < mapped ? least : 0);
}

void HostCache::open() {
    if (is_open() || floor_.load() == 0) {
        return;
    }
    if (inner_.copy) {
        ggml_backend_synchronize(inner_.copy); // copies from pinned memory
    }
    disk_ = std::make_unique<Disk>(script_, read_bytes_);
    by_address_.resize(places_.size());
    for (size_t i = 0; i < by_address_.size(); i++) {
        by_address_[i] = (int)i;
    }
    std::sort(by_address_.begin(), by_address_.end(), [&](int a, int b) { return places_[a].page < places_[b].page; });
    for (Window &w : files_) {
        inner_.detach(w.begin);
        inner_.attach(w.begin, w.bytes, false);
        w.file->narrow(w.begin, w.bytes);
        w.file->give_back(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
        w.file->forget(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
    }
    shard_held_.assign(weights_.n_shards, false);
    embedding_bytes_ = embedding_room_;
    open_.store(true);
}

// ------------------------------------------------------------------------------------------------------- held in memory

bool HostCache::readable(int piece) const {
    std::lock_guard<std::mutex> lock(hold_mutex_);
    return places_[piece].held || places_[piece].always;
}

bool HostCache::set_room(uint64_t room, size_t n_resident) {
    room -= std::min(room, embedding_room_);
    const uint64_t buffer = std::max(least_buffer_, std::min(kMostBuffer, room / 4) / kMiB * kMiB);
    const bool parked = !inner_.copy; // nothing will be taken
    if (!parked && (buffer_size_ < least_buffer_ || buffer_size_ > std::max(least_buffer_, room / 3) ||
                    buffer_size_ < buffer / 2)) {
        resize_buffer((size_t)buffer);
    }
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        hold_room_ = room - std::min<uint64_t>(room, buffer_size_);
        uint64_t left = hold_room_;
        bool more = true;
        to_hold_.clear();
        for (int always : {1, 0}) {
            for (size_t i = 0; i < places_.size(); i++) {
                Place &p = places_[i];
                if (p.always != (bool)always) {
                    continue;
                }
                more = more && p.page_bytes <= left;
                p.wanted = more && weights_.layout.pieces[i].slab >= (int)n_resident;
                left -= p.wanted ? p.page_bytes : 0;
                if (p.held && !p.wanted) {
                    release((int)i);
                } else if (!p.held && !p.reading && p.wanted) {
                    to_hold_.push_back((int)i);
                }
            }
        }
        hold_changed_ = true;
    }
    n_resident_ = n_resident;
    hold_more();
    return note_held(true);
}

bool HostCache::adopt() {
    bool filling;
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        filling = n_holding_ > 0;
    }
    return !filling && hold_changed_.exchange(false) && note_held(false);
}

// Whether shards are held, in the eyes of holds_shard(). Returns whether that has changed.
bool HostCache::note_held(bool only_less) {
    std::vector<bool> held(shard_held_.size(), true);
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        for (size_t i = 0; i < places_.size(); i++) {
            const Piece &p = weights_.layout.pieces[i];
            if (p.slab >= (int)n_resident_ && !places_[i].held && places_[i].page_bytes > 0) {
                held[p.shard] = false;
            }
        }
    }
    for (size_t s = 0; s < held.size(); s++) {
        held[s] = held[s] && (shard_held_[s] || !only_less);
    }
    const bool changed = held != shard_held_;
    shard_held_ = std::move(held);
    return changed;
}

// Starts reads of what is to be held.
void HostCache::hold_more() {
    std::vector<Disk::Read> reads;
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        holds_.erase(std::remove_if(holds_.begin(), holds_.end(),
                                    [&](const Disk::Read &r) { return disk_->state(r) > DiskRead::State::running; }),
                     holds_.end());
        while (n_holding_ < kHoldsAtOnce && !to_hold_.empty()) {
            const int piece = to_hold_.front();
            Place &p = places_[piece];
            if (held_bytes_.load() + p.page_bytes > hold_room_) {
                break; // until reads that are no longer wanted have ended
            }
            to_hold_.pop_front();
            auto copy = std::make_shared<PageCopy>(p.page_bytes);
            if (!copy->data) {
                continue;
            }
            auto read = std::make_shared<DiskRead>();
            read->file = p.file;
            read->offset = p.file->offset_of(p.page);
            read->to = copy->data;
            read->bytes = p.page_bytes;
            read->finish = [this, piece, copy](bool ok) { return finish_hold(piece, ok, *copy); };
            p.reading = true;
            held_bytes_ += p.page_bytes;
            n_holding_++;
            holds_.push_back(read);
            reads.push_back(std::move(read));
        }
    }
    for (const Disk::Read &read : reads) {
        disk_->submit(read, false);
    }
}

// A reader calls this.
bool HostCache::finish_hold(int piece, bool ok, PageCopy &copy) {
    {
        std::lock_guard<std::mutex> lock(hold_mutex_);
        Place &p = places_[piece];
        p.reading = false;
        n_holding_--;
        if (ok && p.wanted && MappedFile::hold(p.page, copy.data, copy.bytes)) {
            copy.data = nullptr; // the mapping's
            p.held = true;
        } else {
            copy.free();
            held_bytes_ -= p.page_bytes;
        }
        hold_changed_ = true;
    }
    hold_more();
    return ok;
}

// The caller holds hold_mutex_.
void HostCache::release(int piece) {
    Place &p = places_[piece];
    if (p.page_bytes == 0 || p.file->give_back(p.page, p.page_bytes)) {
        p.held = false;
        held_bytes_ -= p.page_bytes;
    }
}

void HostCache::forget_unheld() {
    std::lock_guard<std::mutex> lock(hold_mutex_); // nothing becomes held meanwhile
    touched_bytes_ = 0;
    for (const Window &w : files_) {
        char *from = w.file->begin();
        const auto forget_to = [&](char *to) {
            if (to > from) {
                w.file->forget(from, (size_t)(to - from));
            }
        };
        for (int i : by_address_) {
            const Place &p = places_[i];
            if (p.held && p.file == w.file.get() && p.page_bytes > 0) {
                forget_to(p.page);
                from = p.page + p.page_bytes;
            }
        }
        forget_to(w.file->end());
    }
}

bool HostCache::begin_graph(int64_t n_tokens) {
    if (!is_open()) {
        return true;
    }
    for (const Window &w : files_) {
        if (w.file->changed(why_)) {
            return false;
        }
    }
    touched_bytes_ += (uint64_t)n_tokens * 2 * MappedFile::kUnit;
    if (touched_bytes_ > embedding_room_ / 2) {
        forget_unheld();
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------- the buffer

void HostCache::resize_buffer(size_t bytes) {
    drop_slots(0);
    ggml_backend_synchronize(inner_.copy);
    slots_.clear();
    freed_.reset();
    buffer_.reset();
    buffer_base_ = nullptr;
    buffer_size_ = 0;
    if (bytes > 0) {
        const size_t all = bytes + MappedFile::kUnit;
        ggml_backend_buffer_type_t host = inner_.host_buffer_type();
        if (InnerBuffer pinned(host ? ggml_backend_buft_alloc_buffer(host, all) : nullptr); pinned) {
            buffer_base_ = page_up((char *)ggml_backend_buffer_get_base(pinned.get()));
            buffer_ = std::shared_ptr<ggml_backend_buffer>(pinned.release(), BufferDeleter());
        } else {
            auto pages = std::make_shared<PageCopy>(all);
            buffer_base_ = pages->data ? page_up(pages->data) : nullptr;
            buffer_ = pages;
        }
        buffer_size_ = buffer_base_ ? bytes : 0;
    }
    buffer_bytes_ = buffer_size_;
    next_ = 0;
}

void HostCache::rest() {
    if (is_open()) {
        resize_buffer(0);
    }
}

// Drops slots that were not taken, from this one on.
void HostCache::drop_slots(size_t from) {
    while (slots_.size() > from && !slots_.back().taken) {
        disk_->drop(slots_.back().read);
        slots_.pop_back();
    }
}

size_t HostCache::first_waiting() const {
    return (size_t)(std::find_if(slots_.begin(), slots_.end(), [](const Slot &s) { return !s.taken; }) -
                    slots_.begin());
}

void HostCache::follow(const std::vector<int> &pieces, bool again) {
    if (!is_open()) {
        return;
    }
    if (pieces == order_ && again == again_) {
        read_ahead();
        return;
    }
    order_ = pieces;
    again_ = again;
    next_ = 0;
    const size_t first = first_waiting();
    if (first < slots_.size()) {
        // Graphs of another kind often go through the same weights in the same order: what was read stays.
        next_ = (size_t)(std::find(order_.begin(), order_.end(), slots_[first].piece) - order_.begin());
        size_t same = first;
        while (same < slots_.size() && next_piece() == slots_[same].piece) {
            next_++;
            same++;
        }
        drop_slots(same);
        next_ = same == first ? 0 : next_;
    }
    read_ahead();
}

// The next piece to read, or -1.
int HostCache::next_piece() {
    for (size_t tries = 0; tries <= order_.size(); tries++) {
        if (next_ >= order_.size()) {
            if (!again_ || order_.empty()) {
                return -1;
            }
            next_ = 0;
        }
        if (!at(order_[next_])) {
            return order_[next_];
        }
        next_++;
    }
    return -1; // all are held
}

// A place for the next slot, behind the last one; false: there is none yet.
bool HostCache::find_place(size_t bytes, size_t &at) {
    at = slots_.empty() ? 0 : slots_.back().at + slots_.back().bytes;
    at = at + bytes > buffer_size_ ? 0 : at;
    const auto in_the_way = [&](const Slot &s) { return s.at < at + bytes && at < s.at + s.bytes; };
    if (bytes > buffer_size_ ||
        std::any_of(slots_.begin(), slots_.end(), [&](const Slot &s) { return in_the_way(s) && !s.copied; })) {
        return false;
    }
    while (std::any_of(slots_.begin(), slots_.end(), in_the_way)) {
        freed_ = slots_.front().copied;
        slots_.pop_front();
    }
    return true;
}

void HostCache::read_ahead() {
    for (;;) {
        const int piece = next_piece();
        const size_t first = first_waiting();
        const bool there = std::any_of(slots_.begin() + (ptrdiff_t)first, slots_.end(),
                                       [&](const Slot &s) { return s.piece == piece; });
        Slot slot;
        slot.piece = piece;
        if (piece < 0 || there || !find_place(slot.bytes = span_of(piece), slot.at)) {
            return;
        }
        const Piece &p = weights_.layout.pieces[piece];
        const char *from = weights_.all[p.tensor].host + p.host_offset;
        slot.skip = (size_t)(from - page_down(from));
        slot.read = std::make_shared<DiskRead>();
        slot.read->file = places_[piece].file;
        slot.read->offset = slot.read->file->offset_of(page_down(from));
        slot.read->to = buffer_base_ + slot.at;
        slot.read->bytes = slot.bytes;
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

// Makes a piece the first of the slots that wait.
void HostCache::seek(int piece) {
    const size_t first = first_waiting();
    size_t i = first;
    while (i < slots_.size() && slots_[i].piece != piece) {
        i++;
    }
    if (i < slots_.size()) { // those before it are not needed: they are held by now, or resident
        for (size_t k = first; k < i; k++) {
            disk_->drop(slots_[k].read);
        }
        slots_.erase(slots_.begin() + (ptrdiff_t)first, slots_.begin() + (ptrdiff_t)i);
        return;
    }
    drop_slots(first);
    const auto found = std::find(order_.begin(), order_.end(), piece);
    if (found == order_.end()) {
        order_ = {piece};
        again_ = false;
    }
    next_ = found == order_.end() ? 0 : (size_t)(found - order_.begin());
    read_ahead();
}

HostCache::Taken HostCache::take(int piece, milliseconds most, const char *&data) {
    size_t first = first_waiting();
    if (first == slots_.size() || slots_[first].piece != piece) {
        seek(piece);
        first = first_waiting();
    }
    if (first == slots_.size() || slots_[first].piece != piece) {
        // A reader has made it held since at() was asked, or copies that are under way have all of the buffer.
        data = at(piece);
        return data ? Taken::yes : Taken::not_yet;
    }
    Slot &slot = slots_[first];
    DiskRead::State state = disk_->state(slot.read);
    if (state <= DiskRead::State::running && most.count() > 0) {
        const double start = seconds();
        waiting_since_s_ = start;
        state = disk_->wait(slot.read, most);
        waiting_since_s_ = 0;
        waited_s_ = waited_s_ + (seconds() - start);
    }
    if (state == DiskRead::State::done) {
        slot.taken = true;
        data = buffer_base_ + slot.at + slot.skip;
        return Taken::yes;
    }
    if (state <= DiskRead::State::running) {
        return Taken::not_yet;
    }
    why_ = slot.read->why;
    drop_slots(first);
    return Taken::failed;
}

void HostCache::taken() {
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
    read_ahead();
}

double HostCache::seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double HostCache::waited_s() const {
    const double since = waiting_since_s_.load();
    return waited_s_.load() + (since > 0 ? seconds() - since : 0);
}

} // namespace fsd
