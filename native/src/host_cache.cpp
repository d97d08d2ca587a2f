#include "host_cache.h"

#include <algorithm>

namespace fsd {

static constexpr size_t kMiB = (size_t)1 << 20;
// The buffer for reads ahead takes a quarter of the room, up to so much.
static constexpr uint64_t kMostBuffer = 64 * kMiB;
// The most room for pages of the file that come into memory because llama.cpp reads rows of the embedding: a row may touch two
// pages, and graphs seldom have more than 512 tokens.
static constexpr uint64_t kEmbeddingBytes = 4 * kMiB;

uint64_t HostCache::add(char *window, size_t bytes) {
    std::unique_ptr<MappedFile> file = MappedFile::find(window);
    all_files_ = all_files_ && file;
    const uint64_t mapped = file ? (uint64_t)(file->end() - file->begin()) : bytes;
    files_.push_back({std::move(file), window, bytes});
    return mapped;
}

void HostCache::close() {
    if (disk_) {
        ahead_.stop();
        held_.stop();
    }
    open_.store(false);
    disk_.reset();
    ranges_.clear();
    always_.clear();
    shard_held_.clear();
    files_.clear();
    changed_.clear();
    all_files_ = true;
    floor_ = embedding_bytes_ = 0;
}

void HostCache::plan() {
    if (is_open() || !all_files_ || files_.empty()) {
        return;
    }
    const Layout &layout = weights_.layout;
    ranges_.clear();
    always_.clear();
    uint64_t always = 0, mapped = 0;
    size_t largest = 0;
    for (const Piece &p : layout.pieces) {
        const Weight &w = weights_.all[p.tensor];
        FileRange range;
        range.from = w.host + p.host_offset;
        range.bytes = p.bytes;
        for (const Window &window : files_) {
            range.file = window.file->contains(range.from) ? window.file.get() : range.file;
        }
        const bool experts = w.shape.ne[2] > 1;
        always += experts ? range.page_bytes() : 0;
        largest = std::max(largest, experts ? 0 : range.span_bytes());
        always_.push_back(experts);
        ranges_.push_back(range);
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
    for (Window &w : files_) {
        inner_.detach(w.begin);
        inner_.attach(w.begin, w.bytes, false);
        w.file->narrow(w.begin, w.bytes);
        w.file->give_back(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
        w.file->forget(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
    }
    disk_ = std::make_unique<Disk>(script_, read_bytes_);
    held_.start(*disk_, ranges_);
    ahead_.start(*disk_, ranges_, [this](int piece) { return readable(piece); });
    shard_held_.assign(weights_.n_shards, false);
    embedding_bytes_ = embedding_room_;
    open_.store(true);
}

bool HostCache::set_room(uint64_t room, size_t n_resident) {
    room -= std::min(room, embedding_room_);
    const uint64_t buffer = std::max(least_buffer_, std::min(kMostBuffer, room / 4) / kMiB * kMiB);
    const bool parked = !inner_.copy; // nothing will be taken
    const uint64_t now = ahead_.bytes();
    if (!parked && (now < least_buffer_ || now > std::max(least_buffer_, room / 3) || now < buffer / 2)) {
        ahead_.resize((size_t)buffer);
    }
    const uint64_t to_hold = room - std::min<uint64_t>(room, ahead_.bytes());
    uint64_t left = to_hold;
    bool more = true;
    std::vector<int> wanted;
    for (bool always : {true, false}) {
        for (size_t i = 0; i < ranges_.size(); i++) {
            const size_t bytes = ranges_[i].page_bytes();
            if (always_[i] != always) {
                continue;
            }
            more = more && bytes <= left;
            if (more && weights_.layout.pieces[i].slab >= (int)n_resident) {
                wanted.push_back((int)i);
                left -= bytes;
            }
        }
    }
    held_.want(wanted, to_hold);
    n_resident_ = n_resident;
    return note_held(true);
}

bool HostCache::adopt() { return held_.changed() && note_held(false); }

// Whether shards are held, in the eyes of holds_shard(). Returns whether that has changed.
bool HostCache::note_held(bool only_less) {
    std::vector<bool> held(shard_held_.size(), true);
    for (size_t i = 0; i < ranges_.size(); i++) {
        const Piece &p = weights_.layout.pieces[i];
        if (p.slab >= (int)n_resident_ && ranges_[i].page_bytes() > 0 && !held_.has((int)i)) {
            held[p.shard] = false;
        }
    }
    for (size_t s = 0; s < held.size(); s++) {
        held[s] = held[s] && (shard_held_[s] || !only_less);
    }
    const bool changed = held != shard_held_;
    shard_held_ = std::move(held);
    return changed;
}

void HostCache::forget_unheld() {
    touched_bytes_ = 0;
    std::vector<const MappedFile *> files;
    for (const Window &w : files_) {
        files.push_back(w.file.get());
    }
    held_.forget_others(files);
}

bool HostCache::begin_graph(int64_t n_tokens) {
    if (!is_open()) {
        return true;
    }
    for (const Window &w : files_) {
        if (w.file->changed(changed_)) {
            return false;
        }
    }
    touched_bytes_ += (uint64_t)n_tokens * 2 * MappedFile::kUnit;
    if (touched_bytes_ > embedding_room_ / 2) {
        forget_unheld();
    }
    return true;
}

HostCache::Taken HostCache::take(int piece, std::chrono::milliseconds most, const char *&data) {
    const Taken taken = ahead_.take(piece, most, data);
    data = taken == Taken::yes && !data ? at(piece) : data;
    return taken;
}

void HostCache::rest() {
    if (is_open()) {
        ahead_.resize(0);
    }
}

} // namespace fsd
