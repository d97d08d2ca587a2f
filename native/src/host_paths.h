// How bytes in host memory reach the device.
//
// Copies run at the link's full rate, and beside computing, only from memory that the driver has pinned. Weights are pinned
// where they lie: registered with the driver, or imported as buffers of the device. Mapped files are imported as memory of
// this process, which takes their addresses. Where both are impossible, and host memory has room, the device copies
// from a second copy in pinned memory. Where it has no room they are staged: the CPU copies them to slots of pinned memory,
// from which the device takes them while the CPU fills the next slot. Memory that was not added here is copied as the
// device's own backend does it.
#pragma once

#include "frameshard_device.h"
#include "pinned.h"

#include "ggml-backend.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fsd {

enum class HostPath : uint32_t {
    direct = FSD_HOST_DIRECT,
    registered = FSD_HOST_REGISTERED,
    imported = FSD_HOST_IMPORTED,
    copied = FSD_HOST_COPIED,
    staged = FSD_HOST_STAGED,
};

// Copies within host memory by several threads: one reaches a fraction of the memory's bandwidth.
class Copiers {
  public:
    struct Task {
        char *to;
        const char *from;
        size_t bytes;
    };

    Copiers();
    ~Copiers();
    Copiers(const Copiers &) = delete;
    Copiers &operator=(const Copiers &) = delete;

    void run(const std::vector<Task> &tasks); // returns when all copies are made

  private:
    void work(std::unique_lock<std::mutex> &lock);

    std::mutex mutex_;
    std::condition_variable begun_, made_;
    std::vector<Task> tasks_;
    size_t next_ = 0, left_ = 0;
    bool stopped_ = false;
    std::vector<std::thread> threads_;
};

class HostPaths {
  public:
    static constexpr size_t kStagingBytes = (size_t)32 << 20; // of the slots

    HostPaths() = default;
    HostPaths(const HostPaths &) = delete;
    HostPaths &operator=(const HostPaths &) = delete;

    // Whether the device copies from memory of this process, tried with a sample.
    static bool imports_memory(ggml_backend_dev_t device);
    // Finds the fastest path for a range of host memory: whole pages, which stay mapped until remove(). `imports`: whether
    // the device can copy from imported memory. `may_pin`: false takes the path of memory that cannot be pinned.
    HostPath add(ggml_backend_dev_t device, bool imports, void *p, size_t bytes, bool may_pin);
    // All copies from the range must have run. A range that was not added is ignored.
    void remove(void *p);

    // Queues the copy of `bytes` at `from` to a tensor of as many bytes; without a stream it is made on return [any thread].
    // False: the memory was not added, or has no path of its own, and nothing is done.
    bool copy(ggml_backend_t stream, const ggml_tensor &to, const char *from, size_t bytes);
    // Frees what belongs to the streams, whose work must have run.
    void close();

    std::atomic<uint64_t> imported_bytes{0}, staged_bytes{0}; // copied so far
    // Held: the slots, and second copies of ranges.
    std::atomic<uint64_t> pinned_bytes{0};

  private:
    struct Window {
        char *begin = nullptr;
        size_t bytes = 0;
        InnerBuffer buffer;
    };
    struct Range {
        char *begin = nullptr, *end = nullptr;
        HostPath path = HostPath::direct;
        ggml_backend_dev_t device = nullptr;
        std::vector<Window> windows; // of imported memory, or of the second copy; all but the last have the same size
    };
    struct Slot {
        ggml_backend_event_t taken = nullptr; // the device has copied from it
        bool in_use = false;
    };

    // Imports the pages of a range. A mapped file is replaced by memory of this process before.
    static bool import_range(Range &range);
    static bool import_pages(Range &range, char *begin, char *end);
    // Makes the second copy in pinned memory.
    static bool copy_range(Range &range);
    const Range *find(const char *from, size_t bytes) const;
    static void copy_from_windows(ggml_backend_t stream, const Range &range, const ggml_tensor &to, const char *from,
                                  size_t bytes);
    void copy_staged(ggml_backend_t stream, const ggml_tensor &to, const char *from, size_t n);
    bool take_slots(ggml_backend_dev_t device);

    mutable std::mutex mutex_; // of ranges_
    std::vector<std::unique_ptr<Range>> ranges_;
    InnerBuffer slot_memory_;
    std::unique_ptr<Copiers> copiers_; // while there are slots
    std::vector<Slot> slots_;
    size_t next_slot_ = 0;
};

} // namespace fsd
