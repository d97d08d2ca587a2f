// Records when copies, GPU segments and CPU segments ran, for time lines.
#pragma once

#include "frameshard_device.h"

#include "ggml-backend.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace fsd {

// ggml's streams have no timestamps, so events are recorded around each span of work, and a thread for each stream waits for
// them. Only the thread that runs graphs records; any thread may start and stop.
class Trace {
  public:
    explicit Trace(ggml_backend_dev_t device);
    ~Trace();

    // Before and after work is queued on a stream.
    void begin(fsd_lane lane, ggml_backend_t stream);
    void end(fsd_lane lane, ggml_backend_t stream, uint64_t bytes);
    // Work that the CPU has done, in seconds of now().
    void add(fsd_lane lane, double start_s, double end_s, uint64_t bytes);

    static double now();

    // Waits until all recorded work has run; the spans in order of their start.
    std::vector<fsd_span> finish();

  private:
    struct Pending {
        ggml_backend_event_t start, end;
        uint64_t bytes;
    };
    struct Lane {
        std::deque<Pending> pending;
        ggml_backend_event_t open = nullptr;
        std::thread watcher;
    };
    void watch(fsd_lane lane);

    ggml_backend_dev_t device;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    Lane lanes[2]; // copy and device
    std::vector<fsd_span> spans;
};

} // namespace fsd
