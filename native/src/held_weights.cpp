#include "held_weights.h"

#include "system.h"

#include <algorithm>
#include <utility>

namespace fsd {

static constexpr size_t kReadsAtOnce = 2;
static constexpr std::chrono::seconds kAfterFailure{1};

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

void HeldWeights::start(Disk &disk, std::vector<FileRange> ranges) {
    disk_ = &disk;
    ranges_ = std::move(ranges);
    by_address_.resize(ranges_.size());
    for (size_t i = 0; i < by_address_.size(); i++) {
        by_address_[i] = (int)i;
    }
    std::sort(by_address_.begin(), by_address_.end(), [&](int a, int b) { return ranges_[a].from < ranges_[b].from; });
    states_.assign(ranges_.size(), {});
}

void HeldWeights::stop() {
    std::vector<Disk::Read> reads;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        to_read_.clear();
        reads = reads_;
    }
    for (const Disk::Read &read : reads) {
        disk_->drop(read);
    }
    reads_.clear();
    states_.clear();
    ranges_.clear();
    n_reading_ = 0;
    changed_ = failed_ = false;
    bytes_ = 0;
}

void HeldWeights::want(const std::vector<int> &ranges, uint64_t room) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        room_ = room;
        failed_ = false;
        to_read_.clear();
        for (State &s : states_) {
            s.wanted = false;
        }
        for (int i : ranges) {
            State &s = states_[i];
            s.wanted = true;
            if (!s.held && !s.reading) {
                to_read_.push_back(i);
            }
        }
        for (size_t i = 0; i < states_.size(); i++) {
            if (states_[i].held && !states_[i].wanted) {
                release((int)i);
            }
        }
        changed_ = true;
    }
    read_more();
}

bool HeldWeights::has(int range) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return states_[range].held;
}

bool HeldWeights::changed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return n_reading_ == 0 && std::exchange(changed_, false);
}

bool HeldWeights::lacks() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_ && std::chrono::steady_clock::now() - failed_at_ >= kAfterFailure;
}

// The caller holds mutex_.
void HeldWeights::note_failure() {
    failed_ = true;
    failed_at_ = std::chrono::steady_clock::now();
}

void HeldWeights::read_more() {
    std::vector<Disk::Read> reads;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        reads_.erase(std::remove_if(reads_.begin(), reads_.end(),
                                    [&](const Disk::Read &r) { return disk_->state(r) > DiskRead::State::running; }),
                     reads_.end());
        while (n_reading_ < kReadsAtOnce && !to_read_.empty()) {
            const int range = to_read_.front();
            const FileRange &r = ranges_[range];
            if (bytes_.load() + r.span_bytes() > room_) {
                break; // until reads that are no longer wanted have ended
            }
            to_read_.pop_front();
            auto copy = std::make_shared<PageCopy>(r.span_bytes());
            if (!copy->data) {
                note_failure();
                continue;
            }
            auto read = std::make_shared<DiskRead>();
            read->file = r.file;
            read->offset = r.file->offset_of(r.span());
            read->to = copy->data;
            read->bytes = r.span_bytes();
            read->finish = [this, range, copy](bool ok) { return finish(range, ok, *copy); };
            states_[range].reading = true;
            bytes_ += r.span_bytes();
            n_reading_++;
            reads_.push_back(read);
            reads.push_back(std::move(read));
        }
    }
    for (const Disk::Read &read : reads) {
        disk_->submit(read, false);
    }
}

// A reader calls this.
bool HeldWeights::finish(int range, bool ok, PageCopy &copy) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        State &s = states_[range];
        s.reading = false;
        n_reading_--;
        if (ok && s.wanted && MappedFile::hold(ranges_[range].span(), copy.data, copy.bytes)) {
            copy.data = nullptr; // the mapping's
            s.held = true;
        } else {
            bytes_ -= copy.bytes;
            copy.free();
            if (s.wanted) {
                note_failure();
            }
        }
        changed_ = true;
    }
    read_more();
    return ok;
}

// Whether a range that is held has a page. The caller holds mutex_.
bool HeldWeights::is_held(const char *page) const {
    auto it = std::upper_bound(by_address_.begin(), by_address_.end(), page + MappedFile::kUnit - 1,
                               [&](const char *last, int range) { return last < ranges_[range].from; });
    while (it != by_address_.begin() && ranges_[*--it].span_end() > page) {
        if (states_[*it].held) {
            return true;
        }
    }
    return false;
}

// The caller holds mutex_.
void HeldWeights::release(int range) {
    const FileRange &r = ranges_[range];
    states_[range].held = false;
    char *from = r.span(), *to = r.span_end();
    from += is_held(from) ? MappedFile::kUnit : 0;
    to -= to > from && is_held(to - MappedFile::kUnit) ? MappedFile::kUnit : 0;
    if (to > from && !r.file->give_back(from, (size_t)(to - from))) {
        states_[range].held = true;
        return;
    }
    bytes_ -= r.span_bytes();
}

void HeldWeights::forget_others(const std::vector<const MappedFile *> &files) const {
    std::lock_guard<std::mutex> lock(mutex_); // nothing becomes held meanwhile
    for (const MappedFile *file : files) {
        char *from = file->begin();
        const auto forget_to = [&](char *to) {
            if (to > from) {
                file->forget(from, (size_t)(to - from));
            }
        };
        for (int i : by_address_) {
            const FileRange &r = ranges_[i];
            if (states_[i].held && r.file == file) {
                forget_to(r.span());
                from = r.span_end();
            }
        }
        forget_to(file->end());
    }
}

} // namespace fsd
