#include "requests.h"

#include <chrono>

namespace fsd {

void BudgetRequests::serve(const Ledger &ledger, std::function<void(uint64_t)> apply) {
    ledger_ = &ledger;
    apply_ = std::move(apply);
}

uint64_t BudgetRequests::ask(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
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
    std::lock_guard<std::mutex> lock(
        mutex_); // reading and asking are one step, so an older budget cannot replace a newer one
    uint64_t generation, bytes;
    if (!pacing_.new_budget(generation, bytes)) {
        return;
    }
    const uint64_t wanted = limit_of(bytes);
    if (wanted < ledger_->floor()) {
        pacing_.refuse(generation, ledger_->budget(), ledger_->used(), ledger_->floor());
        return;
    }
    bytes_.store(wanted);
    pacing_.accept(generation);
    asked_.fetch_add(1);
}

void BudgetRequests::answer_frame_block() {
    std::lock_guard<std::mutex> lock(mutex_); // no budget is accepted meanwhile
    if (!pending()) {
        pacing_.answer_accepted(ledger_->budget(), ledger_->used(), ledger_->floor());
    }
}

} // namespace fsd
