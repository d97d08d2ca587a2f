#include "host_paths.h"

#include "system.h"
#include "tensors.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstring>

namespace fsd {

static constexpr unsigned kCopiers = 4;
static constexpr size_t kSlots = 2 * kCopiers; // the device copies from one half while the CPU fills the other
// Copies of this size run at the link's full rate.
static constexpr size_t kSlotBytes = HostPaths::kStagingBytes / kSlots;
static constexpr size_t kMostImported = (size_t)1 << 30;
static constexpr size_t kMostCopied = (size_t)64 << 20; // in one allocation of pinned memory

Copiers::Copiers() {
    const unsigned n = std::min(kCopiers, std::max(1u, std::thread::hardware_concurrency()));
    for (unsigned i = 1; i < n; i++) { // the caller of run() is one of them
        threads_.emplace_back([this] {
            std::unique_lock<std::mutex> lock(mutex_);
            while (!stopped_) {
                work(lock);
                begun_.wait(lock, [this] { return stopped_ || next_ < tasks_.size(); });
            }
        });
    }
}

Copiers::~Copiers() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    begun_.notify_all();
    for (std::thread &thread : threads_) {
        thread.join();
    }
}

void Copiers::work(std::unique_lock<std::mutex> &lock) {
    while (next_ < tasks_.size()) {
        const Task task = tasks_[next_++];
        lock.unlock();
        memcpy(task.to, task.from, task.bytes);
        lock.lock();
        if (--left_ == 0) {
            made_.notify_one();
        }
    }
}

void Copiers::run(const std::vector<Task> &tasks) {
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_ = tasks;
    next_ = 0;
    left_ = tasks.size();
    if (tasks.size() > 1) {
        begun_.notify_all();
    }
    work(lock);
    made_.wait(lock, [this] { return left_ == 0; });
}

static void *procedure(ggml_backend_dev_t device, const char *name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
}

static bool register_pages(ggml_backend_dev_t device, void *p, size_t bytes) {
    auto pin = (bool (*)(void *, size_t))procedure(device, "ggml_backend_register_host_buffer");
    return pin && pin(p, bytes);
}

// Whether the device reads the bytes that the CPU sees, and not those of other pages.
static bool reads_the_same(ggml_backend_buffer_t buffer, const char *begin, size_t bytes) {
    std::vector<char> got(std::min(bytes, page_bytes()));
    for (size_t at : {(size_t)0, bytes / 2 / got.size() * got.size(), bytes - got.size()}) {
        const ggml_tensor t = raw_tensor(buffer, (char *)ggml_backend_buffer_get_base(buffer) + at, got.size());
        ggml_backend_tensor_get(&t, got.data(), 0, got.size());
        if (memcmp(got.data(), begin + at, got.size()) != 0) {
            return false;
        }
    }
    return true;
}

bool HostPaths::imports_memory(ggml_backend_dev_t device) {
    char *sample = reserve_addresses(kSlotBytes);
    if (!sample) {
        return false;
    }
    memset(sample, 1, kSlotBytes);
    InnerBuffer buffer(ggml_backend_dev_buffer_from_host_ptr(device, sample, kSlotBytes, kSlotBytes));
    const bool works = buffer && reads_the_same(buffer.get(), sample, kSlotBytes);
    buffer.reset();
    release_addresses(sample, kSlotBytes);
    return works;
}

bool HostPaths::import_range(Range &range) {
    const size_t page = page_bytes();
    char *begin = range.begin - (uintptr_t)range.begin % page;
    char *end = range.end + (page - (uintptr_t)range.end % page) % page;
    const size_t bytes = (size_t)(end - begin);
    if (!range.device->iface.buffer_from_host_ptr) {
        return false;
    }
    // No driver is asked for a mapped file. None for a GPU is known to import one: NVIDIA's refuses, and has refused VRAM
    // from then on although nearly all was free (580.159); AMD's takes anonymous memory alone.
    if (has_mapped_file(begin, bytes)) {
        if (!imports_memory(range.device)) {
            return false;
        }
        GGML_LOG_WARN(
            "frameshard: the driver copies fast from memory alone: reading the file's %zu MiB into it if it has room\n",
            bytes >> 20);
        if (!own_pages(begin, bytes)) {
            return false;
        }
    }
    return import_pages(range, begin, end);
}

bool HostPaths::import_pages(Range &range, char *begin, char *end) {
    ggml_backend_dev_t device = range.device;
    const size_t page = page_bytes();
    const size_t most = ggml_backend_buft_get_max_size(ggml_backend_dev_buffer_type(device));
    const size_t each = std::min(most, kMostImported) / page * page;
    while (begin < end && each > 0) {
        Window w;
        w.begin = begin;
        w.bytes = std::min(each, (size_t)(end - begin));
        w.buffer.reset(ggml_backend_dev_buffer_from_host_ptr(device, w.begin, w.bytes, w.bytes));
        if (!w.buffer || !reads_the_same(w.buffer.get(), w.begin, w.bytes)) {
            range.windows.clear();
            return false;
        }
        begin += w.bytes;
        range.windows.push_back(std::move(w));
    }
    return begin >= end;
}

bool HostPaths::copy_range(Range &range) {
    const size_t bytes = (size_t)(range.end - range.begin);
    if (!has_room(bytes)) {
        return false;
    }
    GGML_LOG_WARN("frameshard: the driver cannot copy from the model's memory: keeping a second copy of its %zu MiB\n",
                  bytes >> 20);
    Copiers copiers;
    std::vector<Copiers::Task> tasks;
    for (char *begin = range.begin; begin < range.end; begin += kMostCopied) {
        Window w;
        w.begin = begin;
        w.bytes = std::min(kMostCopied, (size_t)(range.end - begin));
        w.buffer = allocate_pinned(range.device, w.bytes);
        if (!w.buffer) {
            range.windows.clear();
            return false;
        }
        char *to = (char *)ggml_backend_buffer_get_base(w.buffer.get());
        tasks.clear();
        for (size_t at = 0; at < w.bytes; at += kSlotBytes) {
            tasks.push_back({to + at, begin + at, std::min(kSlotBytes, w.bytes - at)});
        }
        copiers.run(tasks);
        range.windows.push_back(std::move(w));
    }
    return true;
}

HostPath HostPaths::add(ggml_backend_dev_t device, bool imports, void *p, size_t bytes, bool may_pin) {
    if (bytes == 0) {
        return HostPath::direct;
    }
    auto range = std::make_unique<Range>();
    range->begin = (char *)p;
    range->end = range->begin + bytes;
    range->device = device;
    if (may_pin && register_pages(device, p, bytes)) {
        range->path = HostPath::registered;
    } else if (may_pin && imports && import_range(*range)) {
        range->path = HostPath::imported;
    } else if (ggml_backend_dev_host_buffer_type(device)) {
        range->path = may_pin && copy_range(*range) ? HostPath::copied : HostPath::staged;
    }
    const HostPath path = range->path;
    pinned_bytes += path == HostPath::copied ? bytes : 0;
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.push_back(std::move(range));
    return path;
}

void HostPaths::remove(void *p) {
    std::unique_ptr<Range> range;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto it = std::find_if(ranges_.begin(), ranges_.end(), [&](const auto &r) { return r->begin == p; });
        if (it == ranges_.end()) {
            return;
        }
        range = std::move(*it);
        ranges_.erase(it);
    }
    pinned_bytes -= range->path == HostPath::copied ? (uint64_t)(range->end - range->begin) : 0;
    auto unpin = (void (*)(void *))procedure(range->device, "ggml_backend_unregister_host_buffer");
    if (range->path == HostPath::registered && unpin) {
        unpin(p);
    }
}

const HostPaths::Range *HostPaths::find(const char *from, size_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &r : ranges_) {
        if (from >= r->begin && from + bytes <= r->end) {
            return r.get();
        }
    }
    return nullptr;
}

bool HostPaths::copy(ggml_backend_t stream, const ggml_tensor &to, const char *from, size_t bytes) {
    const Range *range = find(from, bytes);
    if (range && !stream && range->path != HostPath::imported) {
        return false; // read from where it lies
    }
    if (range && !range->windows.empty()) {
        copy_from_windows(stream, *range, to, from, bytes);
        imported_bytes += range->path == HostPath::imported ? bytes : 0;
        return true;
    }
    if (range && range->path == HostPath::staged && take_slots(range->device)) {
        copy_staged(stream, to, from, bytes);
        return true;
    }
    return false;
}

void HostPaths::copy_from_windows(ggml_backend_t stream, const Range &range, const ggml_tensor &to, const char *from,
                                  size_t bytes) {
    const size_t first = (size_t)(from - range.windows[0].begin) / range.windows[0].bytes;
    size_t done = 0;
    for (size_t i = first; done < bytes; i++) {
        const Window &w = range.windows[i];
        const size_t at = (size_t)(from + done - w.begin), n = std::min(bytes - done, w.bytes - at);
        ggml_backend_buffer_t buffer = w.buffer.get();
        ggml_tensor src = raw_tensor(buffer, (char *)ggml_backend_buffer_get_base(buffer) + at, n);
        ggml_tensor dst = raw_tensor(to.buffer, (char *)to.data + done, n);
        if (!stream) {
            ggml_backend_tensor_copy(&src, &dst);
        } else if (range.path == HostPath::imported) {
            ggml_backend_tensor_copy_async(stream, stream, &src, &dst);
        } else {
            ggml_backend_tensor_set_async(stream, &dst, src.data, 0, n);
        }
        done += n;
    }
}

bool HostPaths::take_slots(ggml_backend_dev_t device) {
    if (!slot_memory_) {
        slot_memory_ = allocate_pinned(device, kStagingBytes);
        pinned_bytes += slot_memory_ ? kStagingBytes : 0;
    }
    if (!slot_memory_) {
        return false;
    }
    if (!copiers_) {
        copiers_ = std::make_unique<Copiers>();
    }
    while (slots_.size() < kSlots) {
        slots_.push_back({ggml_backend_event_new(device), false});
    }
    return true;
}

void HostPaths::copy_staged(ggml_backend_t stream, const ggml_tensor &to, const char *from, size_t bytes) {
    char *memory = (char *)ggml_backend_buffer_get_base(slot_memory_.get());
    std::vector<Copiers::Task> tasks;
    for (size_t at = 0; at < bytes;) {
        const size_t first = next_slot_;
        tasks.clear();
        for (size_t end = at; end < bytes && tasks.size() < kCopiers; end += kSlotBytes) {
            if (slots_[next_slot_].in_use) {
                ggml_backend_event_synchronize(slots_[next_slot_].taken);
            }
            tasks.push_back({memory + next_slot_ * kSlotBytes, from + end, std::min(kSlotBytes, bytes - end)});
            next_slot_ = (next_slot_ + 1) % kSlots;
        }
        copiers_->run(tasks);
        for (size_t i = 0; i < tasks.size(); i++) {
            Slot &slot = slots_[(first + i) % kSlots];
            ggml_tensor dst = raw_tensor(to.buffer, (char *)to.data + at, tasks[i].bytes);
            ggml_backend_tensor_set_async(stream, &dst, tasks[i].to, 0, tasks[i].bytes);
            ggml_backend_event_record(slot.taken, stream);
            slot.in_use = true;
            at += tasks[i].bytes;
        }
    }
    staged_bytes += bytes;
}

void HostPaths::close() {
    for (Slot &slot : slots_) {
        ggml_backend_event_free(slot.taken);
    }
    slots_.clear();
    copiers_.reset();
    pinned_bytes -= slot_memory_ ? kStagingBytes : 0;
    slot_memory_.reset();
    next_slot_ = 0;
}

} // namespace fsd
