#include "copy_thread.h"

#include <algorithm>
#include <chrono>

namespace fsd {

// ggml-vulkan holds a lock during each synchronous call. After so many bytes there is time for other threads to get it.
static constexpr auto kTurn = std::chrono::microseconds(20);
static constexpr size_t kTurnBytes = 4 * 1024 * 1024;

CopyThread::CopyThread(Inner &inner) : inner_(inner), thread_([this] { work(); }) {}

CopyThread::~CopyThread() {
    cancel();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

uint64_t CopyThread::queue(const Copy &copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back(copy);
    changed_.notify_all();
    return ++queued_;
}

bool CopyThread::made(uint64_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    return made_ >= n;
}

void CopyThread::wait(uint64_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return made_ >= n; });
}

void CopyThread::cancel() {
    std::unique_lock<std::mutex> lock(mutex_);
    copies_.clear();
    changed_.wait(lock, [&] { return !busy_; });
    made_ = queued_;
}

void CopyThread::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stopped_ || !copies_.empty(); });
        if (stopped_) {
            return;
        }
        const Copy copy = copies_.front();
        const size_t bytes = std::min((size_t)copy.to.ne[0], inner_.largest_copy());
        busy_ = true;
        lock.unlock();
        copy_part(copy, bytes);
        lock.lock();
        busy_ = false;
        if (!copies_.empty()) { // else it was cancelled
            Copy &rest = copies_.front();
            rest.host = rest.host ? rest.host + bytes : nullptr;
            rest.from.data = (char *)rest.from.data + bytes;
            rest.to.data = (char *)rest.to.data + bytes;
            rest.to.ne[0] -= (int64_t)bytes;
            if (rest.to.ne[0] == 0) {
                copies_.pop_front();
                made_++;
            }
        }
        changed_.notify_all();
    }
}

void CopyThread::copy_part(const Copy &copy, size_t bytes) {
    if (copy.host) {
        inner_.upload(nullptr, copy.to.buffer, copy.to.data, copy.host, bytes);
    } else {
        ggml_tensor from = raw_tensor(copy.from.buffer, copy.from.data, bytes);
        ggml_tensor to = raw_tensor(copy.to.buffer, copy.to.data, bytes);
        ggml_backend_tensor_copy(&from, &to);
    }
    since_turn_ += bytes;
    if (since_turn_ < kTurnBytes) {
        return;
    }
    since_turn_ = 0;
    const auto end = std::chrono::steady_clock::now() + kTurn;
    while (std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
    }
}

} // namespace fsd
