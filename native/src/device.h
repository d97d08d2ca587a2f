// The shard device's state for one model: its weights, arena, ring and KV cache. There is one for the language model and one
// for the vision tower, over the same inner device.
//
// Guarantees: used bytes never exceed the budget (ledger.h); a resident set is a prefix of the ladder; under an exact plan
// which kernels see which shapes does not depend on the budget (pieces and steps are fixed at commit), so stream-only output
// is bit-identical at every budget.
//
// Locks: `graph_mutex` is held while a graph runs, and by whoever changes arena, ring or buffers. The members for any thread
// have locks of their own, which are taken last.
#pragma once

#include "arena.h"
#include "buffer.h"
#include "counters.h"
#include "expert_products.h"
#include "frameshard_device.h"
#include "graph_thread.h"
#include "host_ledger.h"
#include "kv_store.h"
#include "latest_graphs.h"
#include "plan.h"
#include "requests.h"
#include "ring.h"

#include "ggml-backend-impl.h"

#include <optional>

namespace fsd {

struct Device {
    Device(Inner &inner, Pacing &pacing, BudgetRequests &requests);
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // Shared by the language model and the vision tower.
    Inner &inner;
    Pacing &pacing;
    BudgetRequests &requests;

    // Fixed by fsd_configure.
    ggml_backend_t cpu = nullptr;
    std::optional<CpuKernels> kernels; // of the CPU
    uint32_t n_threads = 1;
    std::atomic<bool> configured{false};

    // Guarded by graph_mutex.
    std::mutex graph_mutex;
    bool committed = false, parked = false;
    Weights weights;
    std::vector<Buffer *> buffers;
    uint64_t residency_generation = 1; // changes when compiled programs are no longer right
    ExpertCache experts;               // in the ring, behind what is streamed
    HostCache cache;                   // weights in host memory
    Arena arena;
    Ring ring;
    KvStore kv;
    struct {
        InnerBuffer buffer;
        char *base = nullptr;
    } scratch;
    Plan plan;
    ProgramCache programs;
    LatestGraphs<std::vector<GraphMemory *>> memories; // compute buffers
    ggml_status async_failure = GGML_STATUS_SUCCESS;   // of the latest asynchronous graph: the next graph fails with it

    // For run_graph.
    std::unique_ptr<GraphThread> graph_thread; // null: there was no asynchronous graph yet

    // Any thread.
    std::atomic<bool> async{false}; // graphs run in graph_thread: run_graph returns when they have started
    Ledger ledger;
    HostLedger host;
    std::atomic<bool> abort{false};
    std::atomic<bool> probe_stopped{false};
    Counters counters;

    // What of the model's file is mapped now, once it is loaded, counts as weights.
    void count_weights();
    // Cuts the weights, checks the budget against the floor and takes the VRAM that the model cannot do without. `why` is the
    // reason of a failure.
    fsd_status commit(std::string &why);
    // Gives all VRAM back but the driver's; KV and compute buffers wait in host memory. unpark() takes it again. False: host
    // memory for the KV cache was refused; the device is not parked.
    bool park();
    fsd_status unpark(std::string &why);

    // Brings a requested budget into force. False: the running graph must stop first, so that what it holds is free.
    bool apply_requested_budget();
    // False while a graph runs; its executor applies the budget. Also false between a graph and end_graph(), if the budget has
    // no room for its memory.
    bool apply_budget_if_idle();
    void set_path(HostPath path);      // how weights are copied to the device, also in the counters
    void set_overhead(uint64_t bytes); // in the ledger; frees memory of graphs for which there is no more room
    // Whether a graph is in use that a requested budget has no room for.
    bool must_stop() const;
    // Frees the memory of a graph that must stop, and applies the budget.
    ggml_status give_way();
    // The results of the last graph were read.
    void end_graph();
    // Frees the memory of graphs, none of which is in use.
    void drop_graphs();
    // Frees what is kept for large graphs beside small ones that are in use. Returns whether there was any.
    bool drop_idle_graphs();

    // Brings a requested host budget into force. The second one does nothing and returns false while a graph runs, whose
    // executor applies the budget.
    void apply_host_budget();
    bool apply_host_budget_if_idle();
    // Divides the host budget again, if anything has changed.
    void balance_host();

    bool has_room_for(size_t bytes) const; // whether the floor with one more buffer is within the budget
    bool materialise(Buffer *b);           // gives a lasting buffer its VRAM; false: there is none within the budget
    bool all_in_vram() const;              // all weights, keys and values
    bool hold(GraphMemory &memory);        // gives a graph its memory; false: there is none, or the graph is too large
    bool ensure_ring();                    // false: there is no VRAM for the smallest ring
    // Calls `take` until it succeeds, and frees what is kept for large graphs, then a slab, after each failure: the device may
    // have less than the budget allows, because another program holds the rest. False: it fails with all slabs evicted, too.
    bool take_evicting(const std::function<bool()> &take);
    // Starts copies of weights and KV blocks into free budget; returns bytes.
    size_t fill(size_t max_bytes);
    Residency residency_at(uint64_t fixed) const;
    void update_floor();
    // llama.cpp allocates its compute buffers again whenever other adapters are used, and their size depends on the
    // adapters. While there are adapters the floor has room for the largest size so far, so that the change always fits.
    void note_graph_bytes();               // before a buffer is freed
    void forget_graph_bytes();             // if no adapter is left
    bool set_floor_graphs(uint64_t bytes); // see fsd_set_floor_graphs; false: there are no compute buffers
    void count_graph_memory();
    void update_placements();
    void count(const Ring::Copied &copied);
    ggml_status compute_on_cpu(ggml_cgraph *graph, uint64_t weight_bytes); // counts its time, and the bytes

    void apply_budget(uint64_t bytes); // for BudgetRequests

  private:
    void give_back(); // all VRAM but the driver's and that of KV blocks
    bool take_scratch();
    void open_cache();
    bool uses_cpu() const;
    uint64_t graph_bytes() const;               // of compute buffers, for the largest graphs
    uint64_t most_graph_bytes() const;          // the same, or what they have been if that is more
    uint64_t floor_graph_bytes() const;         // what the floor has room for
    uint64_t graph_bytes_in_use() const;        // in VRAM, without what drop_idle_graphs() would free
    uint64_t pool_bytes(uint64_t graphs) const; // that graphs of so many bytes may need
    // What graphs and pools may hold at a budget, so that all else that the model cannot do without has its place.
    uint64_t room_for_graphs(uint64_t budget) const;
    bool graphs_fit(uint64_t budget) const;
    bool graph_in_use() const;
    void drop_pool();
    uint64_t fixed_without_graphs() const; // parked, or before commit: what will be held
    void set_limits(uint64_t fixed);

    uint64_t graph_bytes_before = 0; // the most so far
    double floor_share = 1;          // of most_graph_bytes() that the floor has room for
    // Room for weights in host memory, and resident slabs, when it was divided last.
    std::pair<uint64_t, size_t> balanced;
};

Device &device();

} // namespace fsd
