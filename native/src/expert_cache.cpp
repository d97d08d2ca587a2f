#include "expert_cache.h"

#include <algorithm>

namespace fsd {

static constexpr uint64_t kWindow = 1 << 16; // a layer's counts are halved after so many choices
static constexpr double kPrior = 256;        // added to a layer's choices, so that shares of few choices are small

void ExpertCache::adopt(const ExpertArena &arena) {
    if (!arena.same_slots(arena_)) {
        slots_.resize(0);
    }
    arena_ = arena;
    slots_.resize(arena.n_slots);
    for (auto &[_, layer] : layers_) {
        layer.has_table = false;
    }
}

int ExpertCache::take(uint32_t layer, int expert, bool must) {
    const int slot = slots_.take(key(layer, expert), must);
    if (slot >= 0) {
        set_table(layer, false);
    }
    if (slot >= 0 && slots_.replaced() != 0) {
        set_table(layer_of(slots_.replaced()), false);
    }
    return slot;
}

std::vector<int32_t> ExpertCache::numbers(uint32_t layer, size_t n_experts) const {
    std::vector<int32_t> numbers(n_experts, -1);
    std::vector<bool> taken(arena_.n_slots, false);
    for (size_t i = 0; i < n_experts; i++) {
        const int slot = where(layer, (int)i);
        if (slot >= 0) {
            numbers[i] = (int32_t)arena_.number((size_t)slot);
            taken[(size_t)numbers[i]] = true;
        }
    }
    size_t spare = 0;
    for (int32_t &number : numbers) {
        if (number < 0) {
            spare = (size_t)(std::find(taken.begin() + (ptrdiff_t)spare, taken.end(), false) - taken.begin());
            number = (int32_t)spare++;
        }
    }
    return numbers;
}

bool ExpertCache::has_table(uint32_t layer) const {
    const auto it = layers_.find(layer);
    return it != layers_.end() && it->second.has_table;
}

bool ExpertCache::keeps(uint32_t layer, int expert) const {
    const int slot = where(layer, expert);
    return slot >= 0 && (size_t)slot < slots_.n_kept();
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
