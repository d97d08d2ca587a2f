/* Divides VRAM between a streaming pool and the sidecar. The rules, and the same code in Python, are in
 * sdk/frameshard/arbiter.py; bindings/arbiter.json has runs of it, which tests/bindings/arbiter.cpp repeats. */
#include <deque>
#include <limits>
#include <memory>
#include <optional>

#include "seam.h"

using frameshard_core::check_range;
using frameshard_core::guarded;
using frameshard_core::refuse;

namespace {

constexpr double kMostBytes = 4503599627370496.0; // 2^52: sums of sizes, and sizes as doubles, are exact

struct Step {
    int64_t budget_bytes;
    int32_t state;
};

struct Needs {
    int64_t grant, held, now, soon, floor, useful;
};

int64_t size_of(const char *what, uint64_t bytes) {
    check_range(what, double(bytes), 0, kMostBytes);
    return int64_t(bytes);
}

void check_now(double now_s) { check_range("now_s", now_s, -1e12, 1e12); }

} // namespace

struct fs_arbiter {
    int64_t step_bytes;
    double dwell_s;
    bool may_park;
    int64_t budget;  // in force; 0 while the sidecar is parked
    int64_t charged; // what the sidecar may hold at most
    int64_t charged_before = 0;
    std::optional<Step> pending;
    double refused_at = -std::numeric_limits<double>::infinity();
    std::optional<double> began_at;
    std::deque<std::pair<double, int64_t>> rooms; // within the dwell time: when last seen, bytes, both rising

    int64_t round_up(int64_t bytes) const { return (bytes + step_bytes - 1) / step_bytes * step_bytes; }

    /* The least room within the dwell time; nothing if it has not passed since the first call. */
    std::optional<int64_t> lasting_room(double now, int64_t room) {
        if (!began_at) {
            began_at = now;
        }
        while (!rooms.empty() && rooms.back().second >= room) {
            rooms.pop_back();
        }
        rooms.emplace_back(now, room);
        while (rooms.front().first < now - dwell_s) {
            rooms.pop_front();
        }
        return now - *began_at >= dwell_s ? std::optional<int64_t>(rooms.front().second) : std::nullopt;
    }

    std::optional<Step> wanted_step(int64_t room, std::optional<int64_t> lasting, const Needs &needs) const {
        int64_t least = round_up(needs.floor);
        int64_t useful = std::max(least, round_up(needs.useful));
        bool parked = budget == 0;
        if (may_park && room < least) {
            return parked ? std::nullopt : std::optional<Step>({0, FS_LEASE_PARKED});
        }
        if (!parked && room < budget) {
            int64_t shrunk = std::min(useful, std::max(least, room / step_bytes * step_bytes));
            return shrunk < budget ? std::optional<Step>({shrunk, FS_LEASE_ACTIVE}) : std::nullopt;
        }
        if (useful <= budget - step_bytes) {
            return Step{useful, FS_LEASE_ACTIVE};
        }
        int64_t grown = lasting ? std::min(useful, *lasting / step_bytes * step_bytes) : 0;
        if (grown >= std::max(least, budget + step_bytes)) {
            return Step{grown, FS_LEASE_ACTIVE};
        }
        return std::nullopt;
    }

    /* Returns the pool's limit. Sets *step if one must be asked for. */
    int64_t decide(double now, const Needs &needs, std::optional<Step> *step) {
        int64_t room = needs.grant - std::max(needs.now, needs.soon);
        std::optional<int64_t> lasting = lasting_room(now, room);
        std::optional<Step> wanted;
        if (!pending && now >= refused_at + dwell_s) {
            wanted = wanted_step(room, lasting, needs);
        }
        int64_t most = wanted ? std::max(charged, wanted->budget_bytes) : charged;
        int64_t limit = std::max<int64_t>(0, needs.grant - most);
        if (!wanted || (most > charged && needs.held > limit)) { // the pool evicts before the sidecar grows
            return limit;
        }
        pending = wanted;
        charged_before = charged;
        charged = most;
        *step = wanted;
        return limit;
    }

    Step answered() {
        if (!pending) {
            refuse(FS_BAD_ARGUMENT, "no step is under way");
        }
        Step step = *pending;
        pending.reset();
        return step;
    }

    void holds(int64_t used) {
        if (!pending) {
            charged = std::max(budget, used);
        }
    }
};

namespace {

fs_arbiter &open_arbiter(fs_arbiter *arbiter) {
    if (arbiter == nullptr) {
        refuse(FS_BAD_ARGUMENT, "arbiter is NULL");
    }
    return *arbiter;
}

} // namespace

fs_status fs_arbiter_open(uint64_t budget_bytes, uint64_t step_bytes, double dwell_s, int32_t may_park,
                          fs_arbiter **arbiter) {
    return guarded([&] {
        if (arbiter == nullptr) {
            refuse(FS_BAD_ARGUMENT, "arbiter is NULL");
        }
        *arbiter = nullptr;
        check_range("budget_bytes", double(budget_bytes), 1, kMostBytes);
        check_range("step_bytes", double(step_bytes), 1, kMostBytes);
        check_range("dwell_s", dwell_s, 0, 3600);
        auto made = std::make_unique<fs_arbiter>();
        made->step_bytes = int64_t(step_bytes);
        made->dwell_s = dwell_s;
        made->may_park = may_park != 0;
        made->budget = made->charged = int64_t(budget_bytes);
        *arbiter = made.release();
    });
}

void fs_arbiter_close(fs_arbiter *arbiter) { delete arbiter; }

fs_status fs_arbiter_decide(fs_arbiter *arbiter, double now_s, const fs_vram_needs *needs, fs_vram_decision *decision) {
    return guarded([&] {
        if (needs == nullptr || needs->struct_size < sizeof(fs_vram_needs) || decision == nullptr ||
            decision->struct_size < sizeof(uint32_t)) {
            refuse(FS_BAD_ARGUMENT, "needs or decision is NULL, or its struct_size is not set");
        }
        check_now(now_s);
        fs_arbiter &open = open_arbiter(arbiter);
        Needs checked{size_of("grant_bytes", needs->grant_bytes),
                      size_of("pool_held_bytes", needs->pool_held_bytes),
                      size_of("pool_now_bytes", needs->pool_now_bytes),
                      size_of("pool_soon_bytes", needs->pool_soon_bytes),
                      size_of("sidecar_floor_bytes", needs->sidecar_floor_bytes),
                      size_of("sidecar_useful_bytes", needs->sidecar_useful_bytes)};
        std::optional<Step> step;
        fs_vram_decision found{};
        found.struct_size = decision->struct_size;
        found.pool_limit_bytes = uint64_t(open.decide(now_s, checked, &step));
        if (step) {
            found.state = step->state;
            found.vram_budget_bytes = uint64_t(step->budget_bytes);
        }
        frameshard_core::fill(decision, decision->struct_size, found);
    });
}

fs_status fs_arbiter_released(fs_arbiter *arbiter, uint64_t used_bytes) {
    return guarded([&] {
        int64_t used = size_of("used_bytes", used_bytes);
        fs_arbiter &open = open_arbiter(arbiter);
        open.budget = open.answered().budget_bytes;
        open.holds(used);
    });
}

fs_status fs_arbiter_refused(fs_arbiter *arbiter, double now_s) {
    return guarded([&] {
        check_now(now_s);
        fs_arbiter &open = open_arbiter(arbiter);
        open.answered();
        open.charged = open.charged_before;
        open.refused_at = now_s;
    });
}

fs_status fs_arbiter_holds(fs_arbiter *arbiter, uint64_t used_bytes) {
    return guarded([&] { open_arbiter(arbiter).holds(size_of("used_bytes", used_bytes)); });
}
