#include "requests.h"

#include <chrono>

namespace fsd {

void BudgetRequests::serve(const Ledger &ledger, std::function<void(uint64_t)> apply) {
    ledger_ = &ledger;
    apply_ = std::move(apply);
}

uint64_t BudgetRequests::ask(uint64_t &bytes, uint64_t known) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known != UINT64_MAX) {
        take_from_frame_block();
    }
    if (taken_ > known) {
        bytes = bytes_.load();
        return asked_.load();
    }
    bytes_.store(bytes);
    return asked_.fetch_add(1) + 1;
}

void BudgetRequests::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    applied_changed_.wait_for(lock, std::chrono::milliseconds(1));
}

void BudgetRequests::apply() {
    if (!pending()) {
        return;
    }
    const uint64_t request = asked_.load(); // before the bytes: a later request is applied in a round of its own
    apply_(bytes_.load());
    {
        std::lock_guard<std::mutex> lock(mutex_);
        applied_.store(request);
        rounds_++;
    }
    applied_changed_.notify_all();
}

void BudgetRequests::read_frame_block() {
    // Reading and asking are one step, so an older budget cannot replace a newer one.
    std::lock_guard<std::mutex> lock(mutex_);
    take_from_frame_block();
}

// The caller holds the mutex.
void BudgetRequests::take_from_frame_block() {
    uint64_t generation, bytes;
    if (!pacing_.new_budget(generation, bytes)) {
        return;
    }
    const uint64_t wanted = limit_of(bytes);
    if (wanted < ledger_->floor()) {
        show();
        pacing_.answer(generation, true);
        return;
    }
    bytes_.store(wanted);
    taken_ = generation;
    asked_.fetch_add(1);
}

void BudgetRequests::show() {
    const uint64_t budget = ledger_->budget();
    pacing_.show(budget < kNoLimit ? budget : 0, ledger_->used(), ledger_->floor());
}

uint64_t BudgetRequests::answer_frame_block() {
    std::lock_guard<std::mutex> lock(mutex_); // no budget is taken meanwhile
    if (!pending()) {
        show();
        if (answered_ != taken_) {
            answered_ = taken_;
            pacing_.answer(answered_, false);
        }
    }
    return answered_;
}

} // namespace fsd
