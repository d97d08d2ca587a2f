// Budgets that other threads ask for, which the thread that runs graphs brings into force between two steps.
#pragma once

#include "ledger.h"
#include "pacing.h"

#include <algorithm>
#include <condition_variable>

namespace fsd {

// A budget as it is compared: 0 means no limit. Sums and signed differences of larger numbers would overflow.
inline constexpr uint64_t kNoLimit = UINT64_MAX / 4;
inline uint64_t limit_of(uint64_t budget_bytes) { return budget_bytes ? std::min(budget_bytes, kNoLimit) : kNoLimit; }

// [any thread], but for serve() and apply().
class BudgetRequests {
  public:
    explicit BudgetRequests(Pacing &pacing) : pacing_(pacing) {}

    // `apply` brings a budget into force in `ledger`. To be called once, before all else.
    void serve(const Ledger &ledger, std::function<void(uint64_t)> apply);

    // Asks for a budget; returns the number of the request. If the frame block has had a budget later than `known`, that one
    // stays the latest, and `bytes` becomes it.
    uint64_t ask(uint64_t &bytes, uint64_t known);
    bool pending() const { return asked_.load() != applied_.load(); }
    uint64_t requested() const { return bytes_.load(); } // the latest budget asked for
    // Whether a later request has come.
    bool replaced(uint64_t request) const { return asked_.load() != request; }
    bool applied(uint64_t request) const { return applied_.load() >= request; }
    uint64_t rounds() const { return rounds_.load(); } // how often budgets were brought into force
    // Waits a millisecond, or less if a budget is applied meanwhile.
    void wait();
    // Whether the requested budget is below what is in use.
    bool must_free() const { return pending() && bytes_.load() < ledger_->used(); }

    // Brings the latest request into force, if it is not. The caller holds the graph mutex of `ledger`'s device.
    void apply();

    // A budget in the frame block becomes a request, unless it is below the floor.
    void read_frame_block();
    // Writes the present figures into the frame block, and which of its budgets is in force, unless a request is pending.
    // Returns the generation of the latest of its budgets that came into force; 0: none.
    uint64_t answer_frame_block();

  private:
    void take_from_frame_block();
    void show();
    Pacing &pacing_;
    const Ledger *ledger_ = nullptr;
    std::function<void(uint64_t)> apply_;
    std::mutex mutex_;                  // of asking
    uint64_t taken_ = 0, answered_ = 0; // generations of budgets in the frame block
    std::condition_variable applied_changed_;
    std::atomic<uint64_t> bytes_{0};
    std::atomic<uint64_t> asked_{0}, applied_{0}, rounds_{0};
};

} // namespace fsd
