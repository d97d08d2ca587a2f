#include "disk.h"

#include "system.h"

#include <algorithm>

namespace fsd {

static constexpr uint64_t kFailures = 8; // that a script makes
static constexpr size_t kReaders = 4;    // so many reads of a MiB keep an NVMe disk busy
static constexpr uint64_t kTries = 2;    // of a read that fails
static constexpr std::chrono::milliseconds kBetweenTries{100};

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double DiskCounts::all_waited_s() const {
    const double since = waiting_since_s.load();
    return waited_s.load() + (since > 0 ? seconds() - since : 0);
}

Disk::Disk(const DiskScript &script, DiskCounts &counts) : script_(script), counts_(counts) {
    for (size_t i = 0; i < kReaders; i++) {
        threads_.emplace_back([this] { work(); });
    }
}

Disk::~Disk() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    submitted_.notify_all();
    for (std::thread &thread : threads_) {
        thread.join();
    }
}

void Disk::submit(const Read &read, bool urgent) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        (urgent ? urgent_ : others_).push_back(read);
    }
    submitted_.notify_one();
}

DiskRead::State Disk::state(const Read &read) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return read->state;
}

DiskRead::State Disk::wait(const Read &read, std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (read->state > DiskRead::State::running || most.count() == 0) {
        return read->state;
    }
    const double start = seconds();
    counts_.waiting_since_s = start;
    finished_.wait_for(lock, most, [&] { return read->state > DiskRead::State::running; });
    counts_.waiting_since_s = 0;
    counts_.waited_s = counts_.waited_s + (seconds() - start);
    return read->state;
}

void Disk::cancel(const Read &read) {
    std::shared_ptr<char> memory; // freed without the lock; the queue may keep the read for long
    std::lock_guard<std::mutex> lock(mutex_);
    if (read->state == DiskRead::State::queued) {
        read->state = DiskRead::State::dropped;
        memory = std::move(read->memory);
    }
}

void Disk::drop(const Read &read) {
    cancel(read);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return read->state > DiskRead::State::running; });
}

// Waits as long as the emulated disk would take.
void Disk::pass(const DiskRead &read) {
    if (script_.gbps <= 0) {
        return;
    }
    using clock = std::chrono::steady_clock;
    const auto taken = std::chrono::duration_cast<clock::duration>(
        std::chrono::duration<double>((double)read.bytes / (script_.gbps * 1e9)));
    std::unique_lock<std::mutex> lock(mutex_);
    const clock::time_point end = free_at_ = std::max(free_at_, clock::now()) + taken;
    lock.unlock();
    sleep_until(end);
}

// Whether a try of a read fails by the script; `number` 0: no graph waits for it.
bool Disk::fails(uint64_t number, uint64_t n_tries) const {
    return script_.fail > 0 && number >= script_.fail && number < script_.fail + kFailures &&
           (script_.fails == 0 || n_tries <= script_.fails);
}

bool Disk::read_file(const DiskRead &read, uint64_t number, std::string &why) const {
    for (uint64_t n_tries = 1; n_tries <= kTries; n_tries++) {
        if (n_tries > 1) {
            sleep_for(kBetweenTries);
        }
        if (fails(number, n_tries)) {
            why = "the model file cannot be read: the emulated disk has failed";
        } else if (read.file->read(read.offset, read.to, read.bytes, why)) {
            return true;
        }
    }
    return false;
}

void Disk::work() {
    wake_exactly();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        submitted_.wait(lock, [this] { return stopped_ || !urgent_.empty() || !others_.empty(); });
        if (stopped_) {
            return;
        }
        const bool urgent = !urgent_.empty() && !(other_next_ && !others_.empty());
        std::deque<Read> &queue = urgent ? urgent_ : others_;
        other_next_ = !other_next_;
        const Read read = queue.front();
        queue.pop_front();
        if (read->state == DiskRead::State::dropped) {
            continue;
        }
        read->state = DiskRead::State::running;
        const uint64_t number = n_urgent_ += urgent;
        lock.unlock();
        if (read->after) {
            ggml_backend_event_synchronize(read->after.get());
        }
        pass(*read);
        if (urgent && number == script_.stall) {
            sleep_for(std::chrono::milliseconds(script_.stall_ms));
        }
        std::string why;
        bool ok = read_file(*read, urgent ? number : 0, why);
        counts_.read_bytes += ok ? read->bytes : 0;
        if (read->finish && !read->finish(ok) && ok) {
            ok = false;
            why = "the system refuses memory for weights";
        }
        lock.lock();
        read->why = ok ? "" : why;
        read->state = ok ? DiskRead::State::done : DiskRead::State::failed;
        finished_.notify_all();
    }
}

} // namespace fsd
