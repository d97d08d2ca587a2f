// The inner device: the GPU device that the shard device drives, or the emulated one. Its two streams, how it differs from
// other devices, and the one way for bytes from host memory to it.
#pragma once

#include "host_paths.h"
#include "tensors.h"
#include "trace.h"

#include "ggml-backend.h"

#include <memory>
#include <set>
#include <vector>

struct ggml_backend_graph_optimize_params;

namespace fsd {

class Pacing;

// An operation that writes rows from staging memory into a tensor of the inner device. It must outlive the queued work.
struct HostRows {
    ggml_tensor to = {}, from = {}, places = {}, set = {};
    ggml_tensor *nodes[2] = {};
};

// First nodes of segments: nodes that do nothing and outlive programs. Inner devices that capture graphs identify a graph
// by its first node and hold memory for each that they know.
class GraphKeys {
  public:
    // For a segment that may be captured, by its place in a graph of one token or of several; it is captured again when
    // the program changes.
    ggml_tensor *at_place(bool one_token, size_t place) { return key(one_token, 2 * place + 1); }
    // For the same segment with more nodes before it.
    ggml_tensor *before_place(bool one_token, size_t place) { return key(one_token, 2 * place + 2); }
    // For all segments that should not be captured. Its graph changes all the time, so none is.
    ggml_tensor *uncaptured(bool one_token) { return key(one_token, 0); }

  private:
    ggml_tensor *key(bool one_token, size_t index);
    std::vector<std::unique_ptr<ggml_tensor>> keys_[2];
};

enum class HostReads { never, pinned, always };

// How inner devices differ.
struct Quirks {
    const char *registry; // ggml's name of it, with which the names of its devices begin; "": any other
    bool emulated;
    size_t vram_unit_bytes; // the driver allocates VRAM in multiples of this
    HostReads host_reads;   // which host memory its kernels can read
    bool imports_memory;    // it can copy from host memory that is imported as one of its buffers
    // Its streams and events keep what finished work has used until the CPU waits for them, and an event may be freed
    // only after that.
    bool keeps_until_waited;
    // Work of all streams runs in the order in which it is queued. Synchronous copies do not wait for it (CopyThread).
    bool one_queue;
    // The CPU records all kernels of a graph anew each time, and submits them in parts of 1/40 to 1/5 of the operations of
    // the graph before. Others replay what they have captured.
    bool records_kernels;
    // If it orders the nodes of a graph, independent kernels run at once and more of them are fused.
    bool orders_graphs;
    // How much work neighbouring resident steps may have together in one segment: bytes of weights for decode, normally
    // and while the host is paced, and bytes times tokens for prefill.
    size_t decode_merge, paced_decode_merge, prefill_merge;
    // Probes: bytes of weights or copies, more than the largest caches of processors (300 MiB); operations of the products
    // that are timed together; the load after which the clock is as high as it gets (on an H100 0.2 to 0.4 s); queries of
    // one attention. Absolute rates of the emulated device mean little, so its probes are small.
    size_t probe_bytes;
    double probe_flops;
    double warm_up_s;
    int64_t probe_queries;
    // How much the pools of its streams grow with graphs: bytes for each byte of compute buffers. An upper bound: on an H100
    // it was 0.16 with 16-bit weights, 0.06 with 4-bit ones and 0.10 with experts, from 256 to 4,096 tokens.
    double pool_share;
    // Products with experts read up to 18 KiB beyond their input, which may be the end of the pool.
    bool reads_beyond_pool;
};

// The quirks of a device or registry, by its name.
const Quirks &quirks_of(const char *name);

// While the host is paced, its own uploads wait for at most one copy of this size.
constexpr size_t kPacedCopyBytes = 4 * 1024 * 1024;

// A CopyThread waits for each copy. On an H100 machine copies of 16 MiB reach 41 GB/s so, those of 64 MiB 48.
constexpr size_t kLargeCopies = 4;

class Inner {
  public:
    explicit Inner(const Pacing &pacing) : pacing(pacing) {}
    Inner(const Inner &) = delete;
    Inner &operator=(const Inner &) = delete;

    // Takes the device and opens its streams; false when they cannot be opened.
    bool open(ggml_backend_dev_t device, size_t copy_bytes);
    bool open_streams();
    // Makes the compute stream's pools at least so large, by a product with zeros in `memory`, which is not in use. For
    // kernels that read beyond a pool.
    void grow_pool(ggml_backend_buffer_t memory, size_t bytes);
    bool renew_compute(); // frees the compute stream's pools; false: another stream cannot be opened
    // Orders the nodes of a graph, which have no memory yet, as the device computes them best, and says what must keep its
    // memory for longer.
    void order_graph(ggml_cgraph *graph, ggml_backend_graph_optimize_params *params) const;
    void close_streams(); // frees the device's pools and workspaces, which belong to its streams

    ggml_backend_buffer_type_t buffer_type() const { return ggml_backend_dev_buffer_type(dev); }
    // Of memory that copies at the link's full rate; null if the device has none.
    ggml_backend_buffer_type_t host_buffer_type() const { return ggml_backend_dev_host_buffer_type(dev); }

    // Prepares host memory, in which weights are, for copies to the device; returns how they are made. `may_pin`: see
    // HostPaths::add.
    HostPath attach(void *p, size_t bytes, bool may_pin = true);
    void detach(void *p); // its copies must have run

    // Copies host memory to an address in an inner buffer, in copies of at most copy_bytes. With a stream the copies are
    // queued, and the host memory must stay as it is until they have run; without one they are done on return. [without a
    // stream: any thread]
    void upload(ggml_backend_t stream, ggml_backend_buffer_t buffer, void *to, const void *from, size_t bytes);
    void upload_zeros(ggml_backend_t stream, ggml_backend_buffer_t buffer, void *to, size_t bytes);

    size_t largest_copy() const; // [any thread]

    // The CPU waits for the compute stream.
    void synchronize();
    // The same at less cost: what the stream keeps of finished work it keeps until synchronize(), which still has to follow.
    void wait_for_computing();
    // The compute stream waits for all copies queued so far; the CPU does not.
    void wait_for_copies();
    // The compute stream waits for an event of the copy stream; the CPU does not.
    void compute_waits(ggml_backend_event_t event);
    // Waits for the copy stream from time to time, if the device keeps what finished copies have used until then.
    void rest();
    // Another stream waits for all computing queued so far; the CPU does not.
    void stream_waits(ggml_backend_t stream);
    // Whether the CPU can wait for a copy from the device into staging memory and not for what is queued after it.
    bool can_fetch_ahead() const { return aside || pinned_staging; }
    // Such copies are queued on the stream that begin_fetch() returns, behind all computing queued before it.
    ggml_backend_t begin_fetch();
    void end_fetch();
    void wait_for_fetch();
    // An event that give_back() got, or a new one: NVIDIA's Vulkan driver takes some 0.4 ms to make one, and as long to free
    // it (H200).
    ggml_backend_event_t take_event();
    // Waits for the event first, if the device keeps what it was recorded in until then. Null: does nothing.
    void give_back(ggml_backend_event_t event);
    // Records an event in a stream. The compute stream may be renewed before the CPU waits for the event.
    void record(ggml_backend_event_t event, ggml_backend_t stream);
    // Writes an input of the next graph. Small ones go through pinned memory and are queued: nothing waits for each of them.
    void put_input(ggml_backend_buffer_t buffer, void *to, const void *from, size_t bytes);
    // Host memory for small exchanges with the device, pinned if possible; the same at every call.
    char *staging(size_t bytes);
    // Memory of whole pages for reads from disk, pinned if the device has such memory; null: there is none.
    std::shared_ptr<char> pages(size_t bytes) const;
    // [any thread] Host memory that is held for copies: staging memory, and that of the host paths.
    uint64_t pinned_bytes() const { return staging_bytes.load() + input_bytes.load() + host_paths.pinned_bytes.load(); }
    // Writes `n` rows of floats in staging memory to rows `places`, also in staging memory, of a tensor on the device.
    ggml_status put_rows(HostRows &rows, const ggml_tensor &to, const char *from, const int64_t *places, int64_t n);

    ggml_backend_dev_t dev = nullptr;
    Quirks quirks = {};
    size_t copy_bytes = 0; // the largest copy while the host is not paced
    // [any thread] Copies may be kLargeCopies times as large: nobody waits for a part of one.
    std::atomic<bool> large_copies{false};
    ggml_backend_t compute = nullptr, copy = nullptr; // the streams
    // Copies from the device beside both, of keys and values and of what a router has chosen; null where they share a queue.
    ggml_backend_t mirror = nullptr, aside = nullptr;
    bool compute_pending = false; // work other than inputs is queued on the compute stream since synchronize()
    bool graph_pending = false;   // a graph was, too
    std::atomic<bool> lacks_workspaces{false}; // [any thread] they were freed, and no prompt has taken them again
    GraphKeys keys;
    HostPaths host_paths;
    std::unique_ptr<Trace> trace; // while a time line is recorded

  private:
    void record_computed();
    void rest_recorded();

    const Pacing &pacing;
    std::vector<ggml_backend_event_t> spare_events_;
    // Of the compute stream, if the device keeps what it was recorded in: that belongs to the stream, so the CPU has to wait
    // for these before the stream is freed.
    std::set<ggml_backend_event_t> recorded_;
    size_t pool_bytes_ = 0;                  // the least size of the pools
    ggml_backend_event_t copied = nullptr;   // of wait_for_copies()
    int n_waits_ = 0;                        // of the compute stream for the copy stream, since rest()
    ggml_backend_event_t computed = nullptr; // of record_computed()
    InnerBuffer pinned_staging, pinned_inputs, pinned_zeros;
    bool asked_for_inputs = false;
    bool inputs_pending = false;        // inputs are queued since synchronize()
    size_t inputs_end = 0;              // of what is in use of pinned_inputs
    std::vector<char> pageable_staging; // where there is no pinned memory
    std::atomic<size_t> staging_bytes{0}, input_bytes{0};
};

} // namespace fsd
