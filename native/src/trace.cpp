#include "trace.h"

#include <algorithm>
#include <chrono>

namespace fsd {

Trace::Trace(ggml_backend_dev_t d) : device(d) {
    for (fsd_lane lane : {FSD_LANE_COPY, FSD_LANE_DEVICE}) {
        lanes[lane].watcher = std::thread([this, lane] { watch(lane); });
    }
}

Trace::~Trace() {
    finish();
    for (Lane &lane : lanes) {
        if (lane.open) {
            ggml_backend_event_free(lane.open);
        }
    }
}

double Trace::now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Trace::begin(fsd_lane lane, ggml_backend_t stream) {
    if (!lanes[lane].open) {
        lanes[lane].open = ggml_backend_event_new(device);
    }
    ggml_backend_event_record(lanes[lane].open, stream);
}

void Trace::end(fsd_lane lane, ggml_backend_t stream, uint64_t bytes) {
    ggml_backend_event_t event = ggml_backend_event_new(device);
    ggml_backend_event_record(event, stream);
    {
        std::lock_guard<std::mutex> lock(mutex);
        lanes[lane].pending.push_back({lanes[lane].open, event, bytes});
        lanes[lane].open = nullptr;
    }
    changed.notify_all();
}

void Trace::add(fsd_lane lane, double start_s, double end_s, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    spans.push_back({(uint32_t)lane, 0, start_s, end_s, bytes});
}

void Trace::watch(fsd_lane lane) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return closing || !lanes[lane].pending.empty(); });
        if (lanes[lane].pending.empty()) {
            return;
        }
        const Pending p = lanes[lane].pending.front();
        lanes[lane].pending.pop_front();
        lock.unlock();
        ggml_backend_event_synchronize(p.start);
        const double start = now();
        ggml_backend_event_synchronize(p.end);
        const double end = now();
        ggml_backend_event_free(p.start);
        ggml_backend_event_free(p.end);
        lock.lock();
        spans.push_back({(uint32_t)lane, 0, start, end, p.bytes});
    }
}

std::vector<fsd_span> Trace::finish() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        closing = true;
    }
    changed.notify_all();
    for (Lane &lane : lanes) {
        if (lane.watcher.joinable()) {
            lane.watcher.join();
        }
    }
    std::sort(spans.begin(), spans.end(), [](const fsd_span &a, const fsd_span &b) { return a.start_s < b.start_s; });
    return spans;
}

} // namespace fsd
