#include "host_cache.h"

#include <algorithm>

namespace fsd {

static constexpr size_t kMiB = (size_t)1 << 20;
// The buffer for reads ahead takes a quarter of the room, up to so much.
static constexpr uint64_t kMostBuffer = 64 * kMiB;
// The most room for pages of the file that come into memory because llama.cpp reads rows of the embedding: a row may touch two
// pages, and graphs seldom have more than 512 tokens.
static constexpr uint64_t kEmbeddingBytes = 4 * kMiB;

void HostCache::add(char *window, size_t bytes) {
    std::unique_ptr<MappedFile> file = MappedFile::find(window);
    all_files_ = all_files_ && file;
    files_.push_back({std::move(file), window, bytes});
}

uint64_t HostCache::narrow(const char *window) {
    const auto w =
        std::find_if(files_.begin(), files_.end(), [window](const Window &each) { return each.begin == window; });
    GGML_ASSERT(!is_open() && w != files_.end());
    if (!w->file) {
        return w->bytes;
    }
    w->file->narrow(w->begin, w->bytes);
    return (uint64_t)(w->file->end() - w->file->begin());
}

void HostCache::close() {
    if (disk_) {
        ahead_.stop();
        experts_.stop();
        held_.stop();
    }
    open_.store(false);
    disk_.reset();
    ranges_.clear();
    held_of_.clear();
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
    uint64_t mapped = 0;
    size_t largest = 0;
    std::vector<ExpertPiece> experts;
    for (const Piece &p : layout.pieces) {
        const Weight &w = weights_.all[p.tensor];
        FileRange range;
        range.from = w.host + p.host_offset;
        range.bytes = p.bytes;
        for (const Window &window : files_) {
            range.file = window.file->contains(range.from) ? window.file.get() : range.file;
        }
        largest = std::max(largest, range.span_bytes());
        ranges_.push_back(range);
        experts.emplace_back();
        if (w.shape.ne[2] > 1) {
            experts.back() = {range, p.shard, (int)w.shape.ne[2], w.shape.nb[2], ggml_row_size(w.shape.type, kRowRun)};
        }
    }
    for (const Window &window : files_) {
        mapped += (uint64_t)(window.file->end() - window.file->begin());
    }
    experts_.plan(std::move(experts));
    least_buffer_ = 2 * largest;
    embedding_room_ = std::min(kEmbeddingBytes, mapped / 16);
    const uint64_t least = least_buffer_ + experts_.block_bytes() + embedding_room_;
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
        w.file->give_back(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
        w.file->forget(w.file->begin(), (size_t)(w.file->end() - w.file->begin()));
    }
    disk_ = std::make_unique<Disk>(script_, counts_);
    held_.start(*disk_, ranges_);
    ahead_.start(*disk_, ranges_, [this](int piece) { return held_.has(piece); });
    experts_.start(*disk_, [this] { return used() + experts_.block_bytes() <= room_; });
    held_of_.assign(weights_.n_shards, Part::some);
    embedding_bytes_ = embedding_room_;
    open_.store(true);
}

// What to hold, in `room` bytes, of weights that are not resident. What is left is for experts.
std::vector<int> HostCache::choose(uint64_t &room) const {
    std::vector<int> chosen;
    for (size_t i = 0; i < ranges_.size(); i++) {
        const size_t bytes = ranges_[i].span_bytes();
        if (experts_.has((int)i) || weights_.layout.pieces[i].slab < (int)n_resident_) {
            continue;
        }
        if (bytes > room) {
            break;
        }
        chosen.push_back((int)i);
        room -= bytes;
    }
    return chosen;
}

bool HostCache::set_room(uint64_t room, size_t n_resident) {
    n_resident_ = n_resident;
    room_ = room;
    room -= std::min(room, embedding_room_ + experts_.block_bytes());
    const uint64_t buffer = std::max(least_buffer_, std::min(kMostBuffer, room / 4) / kMiB * kMiB);
    const bool parked = !inner_.copy; // nothing will be taken
    const uint64_t now = ahead_.size();
    if (!parked && (now < least_buffer_ || now > std::max(least_buffer_, room / 3) || now < buffer / 2)) {
        ahead_.resize((size_t)buffer);
    }
    room -= std::min<uint64_t>(room, std::max(ahead_.size(), ahead_.bytes()));
    uint64_t left = room;
    const std::vector<int> to_hold = choose(left);
    std::vector<bool> needed;
    for (const Piece &p : weights_.layout.pieces) {
        needed.push_back(p.slab >= (int)n_resident);
    }
    const size_t slots = experts_.most_slots();
    experts_.set_room(left + experts_.block_bytes(), needed);
    room += experts_.block_bytes();
    held_.want(to_hold, room - std::min(room, std::max(experts_.most_bytes(), experts_.bytes())));
    settling_ = ahead_.bytes() > ahead_.size() || experts_.bytes() > experts_.most_bytes();
    const bool fewer = note_held(true);
    return fewer || slots != experts_.most_slots();
}

bool HostCache::adopt() { return held_.changed() && note_held(false); }

// What is held of shards, in the eyes of the CPU. Returns whether that has changed.
bool HostCache::note_held(bool only_less) {
    std::vector<Part> held(held_of_.size(), Part::all);
    for (size_t i = 0; i < ranges_.size(); i++) {
        const Piece &p = weights_.layout.pieces[i];
        if (p.slab >= (int)n_resident_ && !held_.has((int)i)) {
            held[p.shard] = std::min(held[p.shard], experts_.has((int)i) ? Part::all_but_experts : Part::some);
        }
    }
    for (size_t s = 0; s < held.size(); s++) {
        held[s] = only_less ? std::min(held[s], held_of_[s]) : held[s];
    }
    const bool changed = held != held_of_;
    held_of_ = std::move(held);
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

Taken HostCache::take(int piece, std::chrono::milliseconds most, const char *&data) {
    const Taken taken = ahead_.take(piece, most, data);
    data = taken == Taken::yes && !data ? at(piece) : data;
    return taken;
}

void HostCache::rest() {
    if (is_open()) {
        ahead_.resize(0);
        experts_.forget_copies();
    }
}

} // namespace fsd
