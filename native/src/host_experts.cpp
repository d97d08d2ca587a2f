#include "host_experts.h"

#include <algorithm>

namespace fsd {

// What the expert cache in VRAM keeps is needed here only after it has gone from there.
static constexpr double kInVram = 0.25;

FileRange ExpertPiece::matrix(int expert) const {
    const size_t at = (size_t)expert * each;
    return {range.file, range.from + at, std::min(each + more, range.bytes - at)};
}

void HostExperts::plan(std::vector<ExpertPiece> pieces) {
    pieces_ = std::move(pieces);
    needed_.assign(pieces_.size(), true);
    slot_bytes_ = 0;
    size_t n = 0;
    for (const ExpertPiece &p : pieces_) {
        for (int expert = 0; expert < p.n_experts; expert++, n++) {
            slot_bytes_ = std::max(slot_bytes_, p.matrix(expert).span_bytes());
        }
    }
    block_slots_ = std::min(kBlockSlots, std::max(n / kLeastBlocks, kLeastSlots));
}

void HostExperts::start(Disk &disk, std::function<bool()> may_grow) {
    disk_ = &disk;
    may_grow_ = std::move(may_grow);
    most_blocks_ = 1;
}

void HostExperts::stop() {
    for (const Slot &s : slots_) {
        if (s.read) {
            disk_->drop(s.read);
        }
    }
    free_blocks(0);
    most_blocks_ = 0;
}

void HostExperts::set_room(uint64_t room, const std::vector<bool> &needed) {
    if (block_bytes() == 0) {
        return;
    }
    needed_ = needed;
    size_t n = 0;
    for (size_t i = 0; i < pieces_.size(); i++) {
        n += needed_[i] ? (size_t)pieces_[i].n_experts : 0;
    }
    const size_t for_all = (n + block_slots_ - 1) / block_slots_;
    most_blocks_ = std::max<size_t>(1, std::min((size_t)(room / block_bytes()), for_all));
    free_blocks(most_blocks_);
}

void HostExperts::free_blocks(size_t left) {
    if (blocks_.size() <= left) {
        return;
    }
    const size_t n = left * block_slots_;
    for (size_t i = n; i < slots_.size(); i++) {
        if (slots_[i].read) {
            disk_->cancel(slots_[i].read); // one that has begun keeps the block
        }
        if (slots_[i].copied) {
            ggml_backend_event_synchronize(slots_[i].copied.get());
        }
    }
    reading_.erase(std::remove_if(reading_.begin(), reading_.end(), [n](int slot) { return (size_t)slot >= n; }),
                   reading_.end());
    slots_.resize(n);
    table_.resize(n);
    blocks_.resize(left);
}

bool HostExperts::add_block() {
    if (blocks_.size() >= most_blocks_ || (!blocks_.empty() && !may_grow_())) {
        return false;
    }
    std::shared_ptr<char> memory = inner_.pages(block_bytes());
    if (!memory) {
        why_ = "the system refuses memory for experts";
        return false;
    }
    bytes_ += block_bytes();
    blocks_.emplace_back(memory.get(), [this, memory](char *) mutable {
        memory.reset();
        bytes_ -= block_bytes();
    });
    slots_.resize(blocks_.size() * block_slots_);
    table_.resize(slots_.size());
    return true;
}

void HostExperts::begin_use() {
    table_.begin_use();
    use_++;
    release_read();
    for (int slot : reading_) {
        table_.find(table_.key(slot)); // what is read into its memory now is no other's
    }
}

// Slots that only an earlier use has asked for are free once their reads have ended.
void HostExperts::release_read() {
    reading_.erase(std::remove_if(reading_.begin(), reading_.end(),
                                  [this](int slot) {
                                      const Slot &s = slots_[(size_t)slot];
                                      const bool ended = !s.read || disk_->state(s.read) > DiskRead::State::running;
                                      if (ended && s.asked != use_) {
                                          table_.release(slot);
                                      }
                                      return ended;
                                  }),
                   reading_.end());
}

double HostExperts::heat(uint64_t key) const {
    const size_t piece = (size_t)(key >> 32) - 1;
    const uint32_t layer = pieces_[piece].layer;
    const int expert = (int)(uint32_t)key;
    if (!needed_[piece]) {
        return -1;
    }
    return counts_.heat(layer, expert) * (counts_.keeps(layer, expert) ? kInVram : 1.0);
}

Taken HostExperts::ask(int piece, int expert, bool must) {
    const uint64_t k = key(piece, expert);
    int slot = table_.find(k);
    if (slot >= 0) {
        Slot &s = slots_[(size_t)slot];
        s.asked = use_;
        if (!s.read || s.use == use_ || disk_->state(s.read) != DiskRead::State::failed) {
            return Taken::yes;
        }
    } else {
        if (table_.n_empty() == 0) {
            add_block();
        }
        if (slots_.empty()) {
            return Taken::failed;
        }
        release_read();
        slot = table_.take(k, must);
    }
    if (slot >= 0) {
        read(slot, pieces_[(size_t)piece].matrix(expert));
    }
    return slot >= 0 ? Taken::yes : Taken::not_yet;
}

void HostExperts::read(int slot, const FileRange &range) {
    Slot &s = slots_[(size_t)slot];
    GGML_ASSERT(!s.read || disk_->state(s.read) > DiskRead::State::running);
    s.use = s.asked = use_;
    s.skip = (size_t)(range.from - range.span());
    s.read = std::make_shared<DiskRead>();
    s.read->file = range.file;
    s.read->offset = range.file->offset_of(range.span());
    s.read->to = memory(slot);
    s.read->bytes = range.span_bytes();
    s.read->memory = block_of(slot);
    if (s.copied && inner_.quirks.keeps_until_waited) { // no other thread may wait for its events
        ggml_backend_event_synchronize(s.copied.get());
    } else {
        s.read->after = std::move(s.copied);
    }
    s.copied.reset();
    disk_->submit(s.read, true);
    n_read_++;
    reading_.push_back(slot);
}

Taken HostExperts::take(int piece, int expert, std::chrono::milliseconds most, const char *&data) {
    const int slot = table_.where(key(piece, expert));
    if (slot < 0) {
        return Taken::not_yet;
    }
    Slot &s = slots_[(size_t)slot];
    const DiskRead::State state = s.read ? disk_->wait(s.read, most) : DiskRead::State::done;
    const bool failed = state > DiskRead::State::done;
    if (state <= DiskRead::State::running || (failed && s.use != use_)) {
        return Taken::not_yet;
    }
    if (failed) {
        why_ = s.read->why;
        s.read.reset();
        table_.drop(slot);
        return Taken::failed;
    }
    s.read.reset();
    data = memory(slot) + s.skip;
    return Taken::yes;
}

void HostExperts::copied(const std::vector<std::pair<int, int>> &matrices) {
    if (matrices.empty()) {
        return;
    }
    const bool wait = inner_.quirks.keeps_until_waited; // before an event is freed
    const SharedEvent now(ggml_backend_event_new(inner_.dev), [wait](ggml_backend_event_t e) {
        if (wait) {
            ggml_backend_event_synchronize(e);
        }
        ggml_backend_event_free(e);
    });
    ggml_backend_event_record(now.get(), inner_.copy);
    for (const auto &[piece, expert] : matrices) {
        const int slot = table_.where(key(piece, expert));
        slots_[(size_t)slot].copied = now;
        table_.release(slot);
    }
}

void HostExperts::forget_copies() {
    for (Slot &s : slots_) {
        s.copied.reset();
    }
}

} // namespace fsd
