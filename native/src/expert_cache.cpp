#include "expert_cache.h"

#include <algorithm>

namespace fsd {

static constexpr uint64_t kWindow = 1 << 16; // a layer's counts are halved after so many choices
static constexpr double kPrior = 256;        // added to a layer's choices, so that shares of few choices are small
static constexpr size_t kCandidates = 8;     // random slots among which the coldest expert is replaced
static constexpr double kHotter = 1.25;      // how much hotter an expert must be than the one it replaces

void ExpertCache::adopt(const ExpertArena &arena) {
    if (!arena.same_slots(arena_)) {
        slots_.clear();
        at_.clear();
    }
    arena_ = arena;
    for (size_t i = arena.n_slots; i < slots_.size(); i++) {
        at_.erase(slots_[i].key);
    }
    slots_.resize(arena.n_slots);
    empty_.clear();
    for (size_t i = n_kept(); i-- > 0;) {
        if (slots_[i].key == 0) {
            empty_.push_back(i);
        }
    }
}

size_t ExpertCache::n_kept() const { return slots_.size() - std::min(kPassing, slots_.size() / 4); }

int ExpertCache::find(uint32_t layer, int expert) {
    const auto it = at_.find(key(layer, expert));
    if (it == at_.end()) {
        return -1;
    }
    slots_[it->second].used = use_;
    return it->second;
}

int ExpertCache::where(uint32_t layer, int expert) const {
    const auto it = at_.find(key(layer, expert));
    return it == at_.end() ? -1 : it->second;
}

int ExpertCache::place(size_t slot, uint64_t key) {
    at_.erase(slots_[slot].key);
    slots_[slot] = {key, use_};
    at_[key] = (int)slot;
    return (int)slot;
}

int ExpertCache::take(uint32_t layer, int expert, bool must) {
    const uint64_t k = key(layer, expert);
    if (!empty_.empty()) {
        const size_t slot = empty_.back();
        empty_.pop_back();
        return place(slot, k);
    }
    const size_t kept = n_kept();
    int victim = -1;
    double coldest = 0;
    const auto consider = [&](size_t i) {
        const double heat = heat_of(slots_[i].key);
        if (slots_[i].used != use_ && (victim < 0 || heat < coldest)) {
            victim = (int)i;
            coldest = heat;
        }
    };
    for (size_t i = 0; i < kCandidates && kept > 0; i++) {
        consider(random_() % kept);
    }
    if (victim >= 0 && heat(layer, expert) > kHotter * coldest) {
        return place((size_t)victim, k);
    }
    for (size_t i = 0; i < slots_.size() - kept; i++) {
        const size_t slot = kept + next_passing_++ % (slots_.size() - kept);
        if (slots_[slot].used != use_) {
            return place(slot, k);
        }
    }
    if (!must) {
        return -1;
    }
    for (size_t i = 0; i < kept && victim < 0; i++) {
        consider(i);
    }
    return victim < 0 ? -1 : place((size_t)victim, k);
}

size_t ExpertCache::n_to_copy(size_t n_missing, double share) {
    carry_ += (double)n_missing * share;
    const size_t n = std::max((size_t)carry_, std::min(n_missing, n_empty()));
    carry_ = std::max(carry_ - (double)n, 0.0);
    return n;
}

void ExpertCache::set_choice(uint32_t layer, std::vector<uint32_t> chosen) {
    for (size_t i = 0; i < chosen.size(); i++) {
        count(layer, (int)i, chosen[i]);
    }
    layers_[layer].latest = std::move(chosen);
}

const std::vector<uint32_t> &ExpertCache::latest_choice(uint32_t layer) const {
    static const std::vector<uint32_t> none;
    const auto it = layers_.find(layer);
    return it == layers_.end() ? none : it->second.latest;
}

void ExpertCache::count(uint32_t layer, int expert, uint32_t times) {
    Layer &l = layers_[layer];
    l.uses.resize(std::max(l.uses.size(), (size_t)expert + 1));
    l.uses[(size_t)expert] += times;
    l.total += times;
    while (l.total >= kWindow) {
        l.total = 0;
        for (uint32_t &uses : l.uses) {
            l.total += uses /= 2;
        }
    }
}

double ExpertCache::heat(uint32_t layer, int expert) const {
    const auto it = layers_.find(layer);
    if (it == layers_.end() || (size_t)expert >= it->second.uses.size()) {
        return 0;
    }
    return it->second.uses[(size_t)expert] / ((double)it->second.total + kPrior);
}

const std::vector<uint32_t> &ExpertCache::uses(uint32_t layer) const {
    static const std::vector<uint32_t> none;
    const auto it = layers_.find(layer);
    return it == layers_.end() ? none : it->second.uses;
}

void ExpertCache::set_uses(uint32_t layer, std::vector<uint32_t> uses) {
    Layer &l = layers_[layer];
    l.uses.clear();
    l.total = 0;
    for (size_t i = 0; i < uses.size(); i++) {
        count(layer, (int)i, uses[i]);
    }
}

} // namespace fsd
