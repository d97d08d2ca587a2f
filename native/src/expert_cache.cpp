#include "expert_cache.h"

#include <numeric>

namespace fsd {

static constexpr uint32_t kHeatWindow = 1 << 16; // uses after which all heats are halved
static constexpr int kCandidates = 8;            // slots looked at for the one to evict

size_t ExpertArena::slots(size_t product) const {
    return offset + kNumbersBytes +
           n_slots * std::accumulate(strides.begin(), strides.begin() + (ptrdiff_t)product, (size_t)0);
}

bool ExpertCache::adopt(const ExpertArena &arena) {
    if (arena == arena_) {
        return false;
    }
    arena_ = arena;
    slots_.assign(arena.n_slots, {});
    at_.clear();
    filled_ = 0;
    return true;
}

void ExpertCache::clear() { adopt({}); }

int ExpertCache::find(int weight, int expert) {
    const uint64_t k = key(weight, expert);
    heat_[k]++;
    if (++asked_ == kHeatWindow) {
        asked_ = 0;
        for (auto &[_, heat] : heat_) {
            heat /= 2;
        }
    }
    const auto it = at_.find(k);
    if (it == at_.end()) {
        return -1;
    }
    slots_[it->second].used = use_;
    return it->second;
}

uint32_t ExpertCache::heat_of(uint64_t key) const {
    const auto it = heat_.find(key);
    return it == heat_.end() ? 0 : it->second;
}

uint32_t ExpertCache::heat(int weight, int expert) const { return heat_of(key(weight, expert)); }

int ExpertCache::take(int weight, int expert) {
    int victim = -1;
    if (filled_ < slots_.size()) {
        victim = (int)filled_++;
    } else {
        uint32_t coldest = UINT32_MAX;
        const auto consider = [&](size_t i) {
            if (slots_[i].used != use_ && (victim < 0 || heat_of(slots_[i].key) < coldest)) {
                victim = (int)i;
                coldest = heat_of(slots_[i].key);
            }
        };
        for (int i = 0; i < kCandidates && !slots_.empty(); i++) {
            consider(random_() % slots_.size());
        }
        for (size_t i = 0; i < slots_.size() && victim < 0; i++) {
            consider(i);
        }
        if (victim < 0) {
            return -1;
        }
        at_.erase(slots_[victim].key);
    }
    slots_[victim] = {key(weight, expert), use_};
    at_[slots_[victim].key] = victim;
    return victim;
}

} // namespace fsd
