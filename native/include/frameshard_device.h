/* frameshard shard device: the C interface of the ggml device plugin.
 *
 * The library is a ggml backend plugin: ggml_backend_load registers the devices "FRAMESHARD0" for language models and
 * "FRAMESHARD_VISION" for vision towers. The engine controls both through this header. Call order: ggml_backend_load,
 * fsd_configure, fsd_set_shards, llama model and context, fsd_commit, then fsd_set_plan, fsd_set_budget, llama_decode.
 *
 * There is one shard device per process. Most functions return an fsd_status; fsd_last_error() describes the last failure
 * on the calling thread. Functions marked [any thread] may be called while a graph runs; the others belong to the thread
 * that calls llama_decode. Sizes are in bytes, times in seconds, unless a name says otherwise. This header is C. */
#ifndef FRAMESHARD_DEVICE_H
#define FRAMESHARD_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define FSD_API __declspec(dllexport)
#else
#define FSD_API __attribute__((visibility("default")))
#endif

#define FSD_INTERFACE_VERSION 11

typedef enum {
    FSD_OK = 0,
    FSD_BAD_ARGUMENT = 1,     /* a value is out of range or a pointer is missing */
    FSD_BAD_STATE = 2,        /* called out of order */
    FSD_NO_DEVICE = 3,        /* no ggml device of that name; the message lists the devices */
    FSD_VERSION = 4,          /* the running ggml is not the one this library was built against */
    FSD_BELOW_FLOOR = 5,      /* the budget is below the floor; fsd_get_stats gives floor_bytes */
    FSD_OUT_OF_MEMORY = 6,    /* the inner device refused an allocation that fits the budget */
    FSD_TIMEOUT = 7,          /* the time was not enough; the request stays in force */
    FSD_STOPPED = 8,          /* fsd_stop_probe, or a request for a budget, has ended the measurement */
    FSD_UNSUPPORTED = 9,      /* not with this inner device */
    FSD_BELOW_HOST_FLOOR = 10 /* the host budget is below its floor; fsd_get_stats gives host_floor_bytes */
} fsd_status;

typedef enum { FSD_STREAMED = 1, FSD_CPU = 2 } fsd_placement; /* of a shard that is not resident */

#define FSD_MAX_TIERS 8 /* of a plan */

typedef struct {
    uint32_t struct_size;     /* sizeof(fsd_config) */
    const char *inner_device; /* "emulated", or a registered ggml device such as "CUDA0" */
    uint64_t budget_bytes;    /* hard limit on all VRAM; 0: no limit */
    uint32_t n_threads;       /* for CPU shards and the emulated device's compute */
    /* Sizes that decide which kernels see which shapes: they stay for the life of the device. 0: by the model. */
    uint64_t piece_bytes; /* a 2-D matrix larger than this is always computed in row pieces of about this size */
    uint64_t step_bytes;  /* streamed weights are copied and used in steps of about this size */
    uint64_t slab_bytes;  /* size of an arena slab */
    uint64_t copy_bytes;  /* the largest copy to the inner device; 4 MiB at most while the host's frames are paced */
    double emulated_link_gbps;    /* emulated device only: copy bandwidth in 1e9 bytes/s, 0: unlimited */
    uint64_t emulated_vram_bytes; /* emulated device only: VRAM of the device, 0: 8 GiB */
    double emulated_disk_gbps;    /* emulated device only: rate of reads of weights in 1e9 bytes/s, 0: the disk's own */
} fsd_config;

typedef struct {
    const char *tensor; /* GGUF tensor name */
    uint32_t shard;     /* place in the ladder; shard 0 is evicted last */
} fsd_shard_tensor;

/* The placements for graphs of at least min_tokens tokens, up to the next tier's min_tokens. */
typedef struct {
    uint32_t min_tokens;
    const uint8_t *placement; /* n_shards values of fsd_placement, for shards that are not resident */
} fsd_tier;

/* How bytes in host memory reach the device, fastest first: as its backend copies any memory; from memory that is registered
 * with the driver, or imported as buffers of the device; from a second copy in pinned memory; through slots of pinned memory,
 * which the CPU fills. */
typedef enum {
    FSD_HOST_DIRECT = 0,
    FSD_HOST_REGISTERED = 1,
    FSD_HOST_IMPORTED = 2,
    FSD_HOST_COPIED = 3,
    FSD_HOST_STAGED = 4,
} fsd_host_path;

typedef struct {
    uint32_t struct_size;
    /* VRAM ledger, bytes */
    uint64_t budget_bytes;      /* in force */
    uint64_t used_bytes;        /* overhead + buffers + core + arena + ring + scratch */
    uint64_t peak_bytes;        /* highest used_bytes since the last fsd_reset_peak */
    uint64_t overhead_bytes;    /* driver context and library workspaces: fsd_set_overhead, and pool_bytes */
    uint64_t pool_bytes;        /* what graphs larger than those of the floor may have added to these workspaces */
    uint64_t buffers_bytes;     /* KV cache, adapters and compute buffers of llama.cpp */
    uint64_t kv_bytes;          /* part of buffers_bytes: the KV cache and recurrent state, as far as they are in use */
    uint64_t graph_bytes;       /* part of buffers_bytes: what the latest graphs hold of llama.cpp's compute buffers */
    uint64_t least_graph_bytes; /* what the smallest graphs so far have held of them */
    uint64_t most_graph_bytes;  /* what the largest graphs hold */
    uint64_t floor_graph_bytes; /* what the floor has room for: of the smallest steps, or the largest */
    uint64_t refused_graph_bytes; /* what the last graph needed that the budget had no room for */
    uint64_t kv_host_bytes;       /* KV blocks in host memory, which pass through the KV window */
    uint64_t core_bytes;          /* norms, biases and other small weights, always resident */
    uint64_t arena_bytes;         /* resident slabs */
    uint64_t ring_bytes;
    uint64_t scratch_bytes;
    uint64_t floor_bytes; /* the smallest budget that the model can run in; valid after fsd_commit */
    uint64_t full_bytes;  /* the smallest budget with which everything is resident */
    /* present placement of weights; a shard counts as resident when all of it is */
    uint64_t resident_bytes, streamed_bytes, cpu_bytes;
    uint32_t resident_shards, streamed_shards, cpu_shards;
    /* counters since load */
    uint64_t graphs, steps, copies, copied_bytes, kv_copied_bytes, cpu_segments, evicted_slabs, filled_slabs,
        recompiles;
    /* experts that were scheduled one at a time: found in the expert cache, copied to it, computed on the CPU */
    uint64_t expert_hits, experts_streamed, experts_on_cpu;
    /* times that the device was given the experts of a layer before the host had the router's choice; of these, times that it
     * had to compute them again, because one was missing */
    uint64_t experts_ahead, experts_again;
    uint64_t budget_generation; /* number of budgets applied */
    double copy_busy_s;         /* time that the copy stream was busy; 0 unless the device is the emulated one */
    double cpu_busy_s;          /* time in which the CPU computed products of graphs */
    uint64_t cpu_read_bytes;    /* weights of these products */
    uint32_t host_weights;      /* fsd_host_path: how weights are copied to the device */
    uint64_t imported_bytes;    /* copied from imported host memory; a part of what was copied */
    uint64_t staged_bytes;      /* copied through slots of pinned memory; a part of what was copied */
    uint64_t image_floor_bytes; /* the smallest budget for the latest image; 0 before the first */
    /* host memory that the shard device holds; not what llama.cpp and the calling program hold beside it */
    uint64_t host_budget_bytes;  /* in force; 0: no limit */
    uint64_t host_used_bytes;    /* weights, pinned memory, KV blocks in host memory, the vision tower's buffers */
    uint64_t host_floor_bytes;   /* the smallest host budget; it grows with the KV blocks; valid after fsd_commit */
    uint64_t host_weights_bytes; /* part of host_used_bytes: the mapped file, or what is held of it in its place */
    uint64_t disk_read_bytes;    /* read from the file by the shard device since load; 0 while the file is mapped */
    double disk_waited_s;        /* that graphs have waited for these reads; it grows while a disk is stuck */
    uint64_t disk_expert_reads;  /* matrices of single experts that were read, because host memory did not have them */
    uint32_t lacks_workspaces;   /* whether library workspaces were freed that the next prompt takes again */
    uint32_t host_mapped;        /* whether all weights are used through the mapping of the file */
} fsd_stats;

/* Version of this interface, and the ggml version and commit that it was built against. */
FSD_API uint32_t fsd_interface_version(void);
FSD_API const char *fsd_build_ggml_version(void);
FSD_API const char *fsd_build_ggml_commit(void);
FSD_API const char *fsd_last_error(void);

FSD_API fsd_status fsd_configure(const fsd_config *config);

/* The ladder: every weight tensor with its shard. Tensors of a shard are packed in this order. Tensors that are left out
 * form one more shard at the end, which is evicted first. */
FSD_API fsd_status fsd_set_shards(const fsd_shard_tensor *tensors, size_t n_tensors, uint32_t n_shards);

/* To be called once the llama context exists: checks the budget against the floor and allocates VRAM. No VRAM is allocated
 * before. */
FSD_API fsd_status fsd_commit(void);

/* The floor has room for so many bytes of compute buffers, not for all that the llama context asks for (most_graph_bytes);
 * the share stays the same when adapters change what it asks for. Graphs that need more run while the budget has room for
 * them. Otherwise they fail with GGML_STATUS_ALLOC_FAILED, and refused_graph_bytes says what they needed; a budget that has no
 * room for a running graph ends it with GGML_STATUS_ABORTED. Call it once the context exists. */
FSD_API fsd_status fsd_set_floor_graphs(uint64_t bytes);

/* While on, llama_decode returns once its graph has started, so that the next step of a prompt is prepared while this one runs.
 * Whatever needs the device waits for the graph. If it fails, the next graph fails with the same status instead, so the last
 * step runs with this off; fsd_end_graph waits for a graph and forgets its failure. Such decodes must not ask for logits. */
FSD_API fsd_status fsd_set_async(int on);

/* To be called after each decode, once its results were read: until then a smaller budget may have to wait for them. */
FSD_API fsd_status fsd_end_graph(void);

/* fsd_park frees all VRAM but the driver's own context; the KV cache moves to host memory. No graph may run until
 * fsd_unpark has allocated it again, within the budget then in force. FSD_OUT_OF_MEMORY of fsd_park: host memory has no room for
 * the KV cache, and the device is not parked. FSD_BELOW_FLOOR and FSD_OUT_OF_MEMORY of fsd_unpark leave it parked. */
FSD_API fsd_status fsd_park(void);
FSD_API fsd_status fsd_unpark(void);

/* [any thread] Free and total VRAM of the inner device; what other processes use is not free. */
FSD_API fsd_status fsd_get_memory(uint64_t *free_bytes, uint64_t *total_bytes);

/* [any thread] Host memory of the caller's, from and to which tensors are copied at the link's full rate; `memory` is for
 * fsd_free_pinned. Its bytes are undefined, and in no figure here. FSD_UNSUPPORTED: the inner device has no such memory, or no
 * more of it. */
FSD_API fsd_status fsd_take_pinned(uint64_t bytes, void **memory, void **data);
FSD_API void fsd_free_pinned(void *memory);

/* The placement of shards that are not resident, by tier, and the size of the ring (0: as it is). Tiers ascend by
 * min_tokens; the first has 0. Stream-only mode is an exact plan whose placements are all FSD_STREAMED: results have the same
 * bits at every budget. A plan that is not exact lets the inner device fuse more nodes. Default: stream-only.
 * In graphs of few tokens part of the ring is the expert cache. Of the experts that are not in it and whose shard is FSD_CPU,
 * the share expert_stream_share in [0, 1] is copied into it and computed by the device; the CPU computes the others. */
FSD_API fsd_status fsd_set_plan(const fsd_tier *tiers, size_t n_tiers, uint32_t n_shards, uint64_t ring_bytes,
                                double expert_stream_share, int exact);

/* [any thread] Requests a budget. It is applied between two steps of a running graph, otherwise at once. Waits until
 * used_bytes <= bytes, or a later request has replaced this one, at most timeout_s. A budget below the floor changes nothing and
 * returns FSD_BELOW_FLOOR. */
FSD_API fsd_status fsd_set_budget(uint64_t bytes, double timeout_s);
/* [any thread] As fsd_set_budget, but if the frame block has had a budget later than known_generation, that one stays. */
FSD_API fsd_status fsd_set_own_budget(uint64_t bytes, uint64_t known_generation, double timeout_s);

/* [any thread] Requests a limit on host_used_bytes; 0: no limit. It is applied between two steps of a running graph, otherwise
 * at once. With the first limit below what is in use, weights are no longer used through the mapping of the model file: a part
 * of them is held in memory, the others are read from the file: ahead of use, and experts when they are chosen. Only Linux can
 * do that; the floor says so. A graph fails with GGML_STATUS_FAILED when weights cannot be read, or when the file has changed.
 * A limit below the floor changes nothing and returns FSD_BELOW_HOST_FLOOR. Before fsd_commit the floor is not known:
 * fsd_commit checks the limit then, with the same result. Waits until host_used_bytes <= bytes, or a later request has replaced
 * this one, at most timeout_s. */
FSD_API fsd_status fsd_set_host_budget(uint64_t bytes, double timeout_s);

/* A sequence of llama.cpp has, or soon will have, so many cells. Memory for them is allocated at once. Memory that is no
 * longer in use is freed by fsd_fill; for a sequence that became shorter, after a graph has shown where its cells lie.
 * Without this call the KV cache grows with what graphs touch and never shrinks. FSD_OUT_OF_MEMORY: neither VRAM nor host
 * memory has room. */
FSD_API fsd_status fsd_use_kv(uint32_t sequence, uint64_t cells);

/* Starts copies of weights into unused budget, about max_bytes at most. *filled gets their bytes; 0 when the resident set is
 * as large as the budget allows. The next graph uses these weights; the compute stream waits for their copies. */
FSD_API fsd_status fsd_fill(uint64_t max_bytes, uint64_t *filled);

/* Takes spare host memory for one block of the KV cache that is in VRAM, so that a smaller budget need not wait for it, or
 * clears spare memory with cells of several layouts. *taken gets its bytes; 0 when there is no more to do. The system may need
 * 0.1 s to give it: for idle moments. */
FSD_API fsd_status fsd_add_spare(uint64_t *taken);

/* What fsd_commit will make of a model, for planning: no device, no fsd_configure and no model in memory is needed, only the
 * shapes in a GGUF header. [any thread] */
typedef struct {
    const char *name; /* GGUF tensor name */
    uint32_t shard;   /* index in the ladder; entries ascend by shard, and are in the order of fsd_set_shards */
    int32_t type;     /* a ggml type */
    int64_t ne[4];    /* contiguous dimension first, 1 where there is none */
} fsd_weight_shape;

typedef struct {
    uint32_t layer;
    int32_t type;           /* a ggml type */
    int64_t row;            /* values of a cell */
    int64_t cells, streams; /* that llama.cpp asks for; recurrent state has one stream, and a cell for each sequence */
    int64_t used;           /* cells in use of each stream */
} fsd_kv_shape;

typedef struct {
    uint32_t struct_size;
    const char *inner_device;                     /* as in fsd_config; the device need not be there */
    uint64_t piece_bytes, step_bytes, slab_bytes; /* as in fsd_config */
    const fsd_weight_shape *weights;              /* all that the device will hold, small ones too */
    size_t n_weights;
    const fsd_kv_shape *kv;
    size_t n_kv;
    const uint64_t *buffers; /* sizes of compute buffers and whatever else llama.cpp asks for beside weights and KV */
    size_t n_buffers;
    uint64_t overhead_bytes; /* as in fsd_set_overhead */
} fsd_layout_request;

typedef struct {
    uint32_t weight, shard, slab; /* weight: index in the request */
    uint64_t bytes;               /* as in the file */
    uint64_t padded_bytes;        /* on the device */
} fsd_layout_piece;

typedef struct {
    uint32_t struct_size;
    uint32_t prefill_tokens; /* graphs of at least so many tokens read experts as whole tensors, others one at a time */
    uint64_t unit_bytes;     /* whatever is allocated takes whole units */
    uint64_t piece_bytes, step_bytes, slab_bytes; /* with the defaults filled in */
    uint64_t min_ring_bytes;                      /* the smallest ring that every step fits */
    uint64_t arena_bytes;                         /* all slabs */
    uint64_t core_bytes, scratch_bytes;
    uint64_t fixed_bytes;     /* overhead, buffers, core and scratch */
    uint64_t kv_window_bytes; /* the least VRAM for KV: the largest layer's */
    uint64_t kv_bytes;        /* all of the KV cache */
    uint64_t kv_used_bytes;   /* of the cells in use, and what is held beyond them so that growth is rare */
    uint64_t floor_bytes;     /* fixed_bytes, kv_window_bytes and the least VRAM for weights */
    uint64_t full_bytes;
    uint64_t
        weights_beside_kv_bytes;   /* VRAM that the KV cache leaves for weights, the rest of it waits in host memory */
    uint32_t expert_slots_passing; /* slots of the expert cache in which experts do not stay: so many, or a quarter */
    uint32_t reserved;
    double pool_share; /* bytes of driver's workspaces for each byte of compute buffers beyond those of the floor */
    size_t n_slabs, n_pieces;
} fsd_layout;

/* Fills `layout`, and up to max_slabs sizes of slabs and max_pieces pieces, in the order of the ladder. */
FSD_API fsd_status fsd_lay_out(const fsd_layout_request *request, fsd_layout *layout, uint64_t *slabs, size_t max_slabs,
                               fsd_layout_piece *pieces, size_t max_pieces);

/* The ring and the number of resident slabs in `room` bytes beside the fixed part and the KV cache. FSD_BELOW_FLOOR: not all
 * slabs fit, and neither does the smallest ring. [any thread] */
FSD_API fsd_status fsd_fit(uint64_t room_bytes, uint64_t wanted_ring_bytes, uint64_t min_ring_bytes,
                           uint64_t unit_bytes, const uint64_t *slabs, size_t n_slabs, uint64_t *ring_bytes,
                           size_t *n_resident);

/* How often the router of a layer recently chose each expert; `shard` is the shard of the layer's experts. *n gets the number
 * of experts; 0 if no choice was counted, because choices of resident layers are not. Call between graphs. Setting continues
 * the counts of an earlier run. */
FSD_API fsd_status fsd_get_expert_uses(uint32_t shard, uint32_t *uses, size_t n_max, size_t *n);
FSD_API fsd_status fsd_set_expert_uses(uint32_t shard, const uint32_t *uses, size_t n);
/* Empties the expert cache, for measurements. Call between graphs. */
FSD_API fsd_status fsd_clear_expert_cache(void);

/* [any thread] VRAM of the process that the shard device did not allocate: driver context, library workspaces. Waits
 * for a running graph to end. */
FSD_API fsd_status fsd_set_overhead(uint64_t bytes);

/* [any thread] While on, graphs stop before their next step with GGML_STATUS_ABORTED. */
FSD_API fsd_status fsd_set_abort(int on);

/* [any thread] Maps the frame block that the host writes (bindings/PROTOCOL.md, "Frame block"). From now on steps on the GPU
 * are paced by the host's frames, and a budget in the frame block is applied between two steps. NULL: no frame block. */
FSD_API fsd_status fsd_open_frame_block(const char *path);
/* [any thread] Applies a budget in the frame block while no graph runs, and writes the present figures into it. Call it every
 * few milliseconds. *generation gets the generation of the latest budget in it that came into force, also during a graph; 0:
 * none. */
FSD_API fsd_status fsd_poll_frame_block(uint64_t *generation);

typedef enum { FSD_PRIORITIZE_GRAPHICS = 0, FSD_BALANCE = 1, FSD_PRIORITIZE_COMPUTE = 2 } fsd_scheduling_mode;
FSD_API fsd_status fsd_set_scheduling_mode(fsd_scheduling_mode mode); /* [any thread] default: FSD_BALANCE */

typedef struct {
    uint32_t struct_size;
    uint32_t pacing;      /* 1 while steps wait for the host's frames */
    uint64_t frames;      /* seen in the frame block */
    uint64_t late_frames; /* that took longer than the mode allows */
    double frame_time_s;  /* of the last frame */
    double target_frame_s;
    double longest_step_s; /* among recent steps */
    double waited_s;       /* total time that steps have waited for frames */
    double share;          /* share of the host's own GPU time that steps may use, too */
    double gpu_busy_s;     /* the host's GPU time of a frame, as it says; 0 while no frames are drawn */
} fsd_pacing;
FSD_API fsd_status fsd_get_pacing(fsd_pacing *pacing); /* [any thread] */

FSD_API fsd_status fsd_get_stats(fsd_stats *stats); /* [any thread] */
FSD_API fsd_status fsd_reset_peak(void);            /* [any thread] */

/* A time line of graphs: a span for each step's copies, for each GPU segment and for each CPU segment. Times are seconds of a
 * monotonic clock, bytes are bytes of weights. Recording costs a few percent of speed. FSD_UNSUPPORTED: no other thread may wait
 * for events of the inner device (Vulkan). */
typedef enum { FSD_LANE_COPY = 0, FSD_LANE_DEVICE = 1, FSD_LANE_CPU = 2 } fsd_lane;
typedef struct {
    uint32_t lane, reserved;
    double start_s, end_s;
    uint64_t bytes;
} fsd_span;
FSD_API fsd_status fsd_trace_start(void);
/* Ends the recording and fills in up to n_max spans in order of their start; *n gets their number. */
FSD_API fsd_status fsd_trace_stop(fsd_span *spans, size_t n_max, size_t *n);

/* Measurements of the machine for a profile. Each takes about `seconds`, and half a second more where a GPU was idle. Call
 * before fsd_commit or between graphs, not while the device is parked. Rates are bytes or floating-point operations per second;
 * 0 if there was no room or the device cannot do it. They use at most half of the budget that is free or that weights and the
 * ring can give back. A request for a budget ends them: FSD_STOPPED. */
#define FSD_PROBE_PIECES 4
#define FSD_PROBE_THREADS 3
#define FSD_PROBE_BATCHES 5

typedef struct {
    uint32_t struct_size;
    uint32_t threads[FSD_PROBE_THREADS];    /* ascending; the last is n_threads */
    uint64_t piece_bytes[FSD_PROBE_PIECES]; /* sizes of copies, ascending */
    double h2d[FSD_PROBE_PIECES];           /* copies of these sizes, the way weights are copied */
    double h2d_pinned[FSD_PROBE_PIECES];
    double h2d_pageable[FSD_PROBE_PIECES];
    double d2h_pinned[FSD_PROBE_PIECES];
    double d2h_pageable[FSD_PROBE_PIECES];
    double dram[FSD_PROBE_THREADS]; /* reads of host memory by these numbers of threads */
    double dram_beside_copies[FSD_PROBE_THREADS];
    double handoff_s; /* GPU to CPU to GPU with 8 KiB of activations */
    double kernel_s;  /* one more small kernel in a graph, with its launch; 0: not measured */
} fsd_machine_rates;
FSD_API fsd_status fsd_probe_machine(double seconds, fsd_machine_rates *rates);

typedef struct {
    uint32_t struct_size;
    uint32_t tokens[FSD_PROBE_BATCHES];  /* ascending; the first is 1 */
    double cpu_flops[FSD_PROBE_BATCHES]; /* products with so many columns; more weights than processor caches hold */
    double gpu_flops[FSD_PROBE_BATCHES];
    double cpu_beside_copies; /* products with one column while copies run, bytes of weights per second */
    double h2d_beside_cpu;    /* the copies meanwhile */
} fsd_product_rates;
/* Products of weights of a ggml type and shape. If tokens choose n_used of n_expert experts, rows are those of n_used of them,
 * and the GPU's products with several columns are those of experts; the columns are those of each expert that is chosen. 0 and 0
 * for other weights. */
FSD_API fsd_status fsd_probe_product(int type, int64_t rows, int64_t cols, int64_t n_expert, int64_t n_used,
                                     double seconds, fsd_product_rates *rates);

typedef struct {
    uint32_t struct_size;
    int32_t type;    /* set by the caller: the ggml type of keys and values */
    double kv_bytes; /* one token: bytes of the KV cache per second */
    double flops;    /* prefill */
} fsd_attention_rates;
/* Flash attention on the inner device over n_kv cells. Both rates are 0 if the device has none for the type. */
FSD_API fsd_status fsd_probe_attention(int64_t head_dim, int64_t n_head, int64_t n_head_kv, int64_t n_kv,
                                       double seconds, fsd_attention_rates *rates);

/* A look of up to a second, for a plan until the measurements above were made: one size of copies, and few products of weights
 * of a ggml type and shape. */
#define FSD_LOOK_BATCHES 3
typedef struct {
    uint32_t struct_size;
    uint32_t tokens[FSD_LOOK_BATCHES]; /* ascending; the first is 1 */
    double h2d;                        /* copies to the device, the way weights are copied */
    double cpu_flops[FSD_LOOK_BATCHES];
    double gpu_flops[FSD_LOOK_BATCHES];
} fsd_look_rates;
FSD_API fsd_status fsd_probe_look(int type, int64_t rows, int64_t cols, fsd_look_rates *rates);

/* [any thread] While on, measurements end at once with FSD_STOPPED: a running one after the operation that it measures. */
FSD_API fsd_status fsd_stop_probe(int on);

#ifdef __cplusplus
}
#endif
#endif
