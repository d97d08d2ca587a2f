#include "hot_slots.h"

namespace fsd {

static constexpr size_t kCandidates = 8; // random slots among which the coldest is replaced
static constexpr double kHotter = 1.25;  // how much hotter something must be than what it replaces

void HotSlots::resize(size_t n) {
    for (size_t i = n; i < slots_.size(); i++) {
        at_.erase(slots_[i].key);
    }
    slots_.resize(n);
    find_empty();
}

void HotSlots::find_empty() {
    empty_.clear();
    for (size_t i = n_kept(); i-- > 0;) {
        if (slots_[i].key == 0) {
            empty_.push_back(i);
        }
    }
}

void HotSlots::drop(int slot) {
    at_.erase(slots_[(size_t)slot].key);
    slots_[(size_t)slot] = {};
    find_empty();
}

int HotSlots::find(uint64_t key) {
    const int slot = where(key);
    if (slot >= 0) {
        slots_[(size_t)slot].used = use_;
    }
    return slot;
}

int HotSlots::where(uint64_t key) const {
    const auto it = at_.find(key);
    return it == at_.end() ? -1 : it->second;
}

int HotSlots::place(size_t slot, uint64_t key) {
    replaced_ = slots_[slot].key;
    at_.erase(replaced_);
    slots_[slot] = {key, use_};
    at_[key] = (int)slot;
    return (int)slot;
}

int HotSlots::take(uint64_t key, bool must) {
    if (!empty_.empty()) {
        const size_t slot = empty_.back();
        empty_.pop_back();
        return place(slot, key);
    }
    const size_t kept = n_kept();
    int victim = -1;
    double coldest = 0;
    const auto consider = [&](size_t i) {
        const double heat = heat_(slots_[i].key);
        if (slots_[i].used != use_ && (victim < 0 || heat < coldest)) {
            victim = (int)i;
            coldest = heat;
        }
    };
    for (size_t i = 0; i < kCandidates && kept > 0; i++) {
        consider(random_() % kept);
    }
    if (victim >= 0 && heat_(key) > kHotter * coldest) {
        return place((size_t)victim, key);
    }
    for (size_t i = 0; i < slots_.size() - kept; i++) {
        const size_t slot = kept + next_passing_++ % (slots_.size() - kept);
        if (slots_[slot].used != use_) {
            return place(slot, key);
        }
    }
    if (!must) {
        return -1;
    }
    for (size_t i = 0; i < kept && victim < 0; i++) {
        consider(i);
    }
    return victim < 0 ? -1 : place((size_t)victim, key);
}

} // namespace fsd
