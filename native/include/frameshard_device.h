/* frameshard shard device: the C control interface of the ggml device plugin.
 *
 * The library is a ggml backend plugin (ggml_backend_load registers device "FRAMESHARD0") and this header is how the
 * engine steers it. Call order: ggml_backend_load -> fsd_configure -> fsd_set_shards -> llama model and context ->
 * fsd_commit -> fsd_set_plan / fsd_set_budget -> llama_decode ...
 *
 * One device per process. Every function returns an fsd_status; fsd_last_error() has the words for the last failure on
 * the calling thread. Functions marked [any thread] may be called while a graph runs; the others belong to the thread
 * that calls llama_decode. Sizes are bytes, times seconds unless a name says otherwise. This header is C. */
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

#define FSD_INTERFACE_VERSION 1

typedef enum {
    FSD_OK = 0,
    FSD_BAD_ARGUMENT = 1,  /* a value is out of range or a pointer is missing */
    FSD_BAD_STATE = 2,     /* called out of order */
    FSD_NO_DEVICE = 3,     /* no ggml device of that name; the message lists those there are */
    FSD_VERSION = 4,       /* the running ggml is not the one this library was built against */
    FSD_BELOW_FLOOR = 5,   /* the budget is below what the model needs; fsd_get_stats gives floor_bytes */
    FSD_OUT_OF_MEMORY = 6, /* the inner device refused an allocation that fits the budget */
    FSD_TIMEOUT = 7        /* the time given ran out; the request stays in force */
} fsd_status;

typedef enum { FSD_STREAMED = 1, FSD_CPU = 2 } fsd_placement; /* of a shard that is not resident */

/* A tier of plans: graphs of at least min_tokens tokens use it, up to the next tier's min_tokens. */
#define FSD_MAX_TIERS 8

typedef struct {
    uint32_t struct_size;     /* sizeof(fsd_config) */
    const char *inner_device; /* "emulated", or a registered ggml device such as "CUDA0" */
    uint64_t budget_bytes;    /* hard limit on everything in VRAM; 0: no limit (the inner device's memory) */
    uint32_t n_threads;       /* for CPU shards and the emulated device's compute */
    uint64_t piece_bytes; /* a 2-D matrix larger than this is always computed in row pieces of this size; fixed for the
                                   life of the device because it decides which kernels see which shapes */
    uint64_t step_bytes;  /* streamed weights are gathered into steps of about this size; fixed likewise */
    uint64_t slab_bytes;  /* arena slab; also fixed */
    uint64_t copy_bytes; /* the largest transfer to the inner device; 4 MiB at most while the host's frames are paced */
    double emulated_link_gbps;    /* emulated device only: copy bandwidth in 1e9 bytes/s, 0: unlimited */
    uint64_t emulated_vram_bytes; /* emulated device only: size of the card, 0: 8 GiB */
} fsd_config;

typedef struct {
    const char *tensor; /* GGUF tensor name */
    uint32_t shard;     /* index into the ladder; 0 is given up last */
} fsd_shard_tensor;

typedef struct {
    uint32_t min_tokens;
    const uint8_t *placement; /* n_shards values of fsd_placement: what a shard is while it is not resident */
} fsd_tier;

typedef struct {
    uint32_t struct_size;
    /* VRAM ledger, bytes */
    uint64_t budget_bytes;   /* in force */
    uint64_t used_bytes;     /* everything counted: overhead + kv_and_compute + arena + ring + scratch */
    uint64_t peak_bytes;     /* highest used_bytes since the last fsd_reset_peak, taken at every allocation */
    uint64_t overhead_bytes; /* driver context and library workspaces, from fsd_set_overhead */
    uint64_t buffers_bytes;  /* KV and compute buffers that llama.cpp asked for */
    uint64_t kv_bytes;       /* of them for KV caches and recurrent state: what is in use, not what was asked for */
    uint64_t kv_host_bytes;  /* KV that has no room in VRAM and passes through it */
    uint64_t core_bytes;     /* norms, biases and other small weights, always resident */
    uint64_t arena_bytes;    /* slabs held */
    uint64_t ring_bytes;
    uint64_t scratch_bytes;
    uint64_t floor_bytes; /* no budget below this can be met (valid after fsd_commit) */
    uint64_t full_bytes;  /* with this budget everything is resident */
    /* placement of weights right now, bytes and shards; a shard is resident when all of it is */
    uint64_t resident_bytes, streamed_bytes, cpu_bytes;
    uint32_t resident_shards, streamed_shards, cpu_shards;
    /* counters since load */
    uint64_t graphs, steps, copies, copied_bytes, kv_copied_bytes, cpu_segments, evicted_slabs, filled_slabs,
        recompiles;
    uint64_t expert_hits, experts_streamed,
        experts_on_cpu;           /* experts asked for one at a time, by what became of them */
    uint64_t budget_generation;   /* counts budgets applied */
    double copy_busy_s;           /* time the copy stream had work (emulated device: exact; others: 0) */
    uint32_t host_weights_pinned; /* 1 when the model mapping is registered with the driver */
    uint64_t image_floor_bytes;   /* the smallest budget for the image that came last; 0 before the first */
} fsd_stats;

/* Version of this interface, and the ggml version and commit that it was built against. */
FSD_API uint32_t fsd_interface_version(void);
FSD_API const char *fsd_build_ggml_version(void);
FSD_API const char *fsd_build_ggml_commit(void);
FSD_API const char *fsd_last_error(void);

FSD_API fsd_status fsd_configure(const fsd_config *config);

/* The ladder: every weight tensor with the index of its shard. Tensors of a shard are packed in this order. Tensors left out
 * form one more shard at the tail. */
FSD_API fsd_status fsd_set_shards(const fsd_shard_tensor *tensors, size_t n_tensors, uint32_t n_shards);

/* After the llama context exists: checks the budget against the floor and takes the VRAM. Until then nothing is allocated. */
FSD_API fsd_status fsd_commit(void);

/* Gives all VRAM back but the driver's own context; what the KV cache holds waits in host memory. No graph may run until
 * fsd_unpark has taken it again, within the budget in force then: FSD_BELOW_FLOOR and FSD_OUT_OF_MEMORY leave it parked. */
FSD_API fsd_status fsd_park(void);
FSD_API fsd_status fsd_unpark(void);

/* [any thread] What the inner device says of its memory, that of other processes included. */
FSD_API fsd_status fsd_get_memory(uint64_t *free_bytes, uint64_t *total_bytes);

/* What non-resident shards do, by tier, and the size of the ring. Tiers in ascending min_tokens, the first with 0.
 * stream-only mode is a plan whose placements are all FSD_STREAMED, and which is exact: results have the same bits at
 * every budget. A plan that is not lets the inner device fuse what happens to run together. Default: stream, exactly.
 * In graphs of few tokens the ring is a cache of single experts. Of those that are missing there, and whose shard is
 * FSD_CPU, expert_stream_share in [0, 1] are copied into it and computed by the device, the others by the CPU. */
FSD_API fsd_status fsd_set_plan(const fsd_tier *tiers, size_t n_tiers, uint32_t n_shards, uint64_t ring_bytes,
                                double expert_stream_share, int exact);

/* [any thread] Ask for a new budget; acts at the next step boundary of a running graph, at once otherwise. Waits until
 * used_bytes <= bytes, at most timeout_s. A budget below the floor is refused with FSD_BELOW_FLOOR and changes nothing. */
FSD_API fsd_status fsd_set_budget(uint64_t bytes, double timeout_s);

/* A sequence (llama.cpp's, each with cells of its own) has so many tokens or soon will: room for them is taken at once, what
 * is no longer in use is given back by fsd_fill; of a sequence that was cut, once a graph has shown where its cells lie.
 * Without this the KV cache grows with what graphs touch, and never shrinks. FSD_OUT_OF_MEMORY: neither VRAM nor the host has so much. */
FSD_API fsd_status fsd_use_kv(uint32_t sequence, uint64_t cells);

/* Starts copies of weights into free budget until the resident set is as large as it may be, at most about max_bytes;
 * *filled gets the bytes, 0 when there is nothing to do. The next graph uses them and waits for them on the device. */
FSD_API fsd_status fsd_fill(uint64_t max_bytes, uint64_t *filled);

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

/* How often a layer's router chose each expert of late; the layer is that whose experts are `shard`. *n gets how many
 * experts there are, 0 as long as the layer was not seen: layers of which all is resident are not looked at. Between
 * graphs. Setting tells what an earlier run has seen. */
FSD_API fsd_status fsd_get_expert_uses(uint32_t shard, uint32_t *uses, size_t n_max, size_t *n);
FSD_API fsd_status fsd_set_expert_uses(uint32_t shard, const uint32_t *uses, size_t n);
/* Forgets which experts lie in the ring, so that what their cache is worth can be measured; between graphs. */
FSD_API fsd_status fsd_clear_expert_cache(void);

/* [any thread] VRAM that the process holds but that no allocation of ours explains (driver context, workspaces). */
FSD_API fsd_status fsd_set_overhead(uint64_t bytes);

/* [any thread] The running graph, and later ones until cleared, stop at the next step boundary with GGML_STATUS_ABORTED. */
FSD_API fsd_status fsd_set_abort(int on);

/* [any thread] The page that the host writes each frame (bindings/PROTOCOL.md, "Frame block"). Steps on the GPU keep out
 * of its frames' way from now on, and a budget in it is taken between two steps. NULL: no page. */
FSD_API fsd_status fsd_open_frame_block(const char *path);
/* [any thread] Takes a budget in the page while no graph runs; to be called every few milliseconds. */
FSD_API fsd_status fsd_poll_frame_block(void);

typedef enum { FSD_PRIORITIZE_GRAPHICS = 0, FSD_BALANCE = 1, FSD_PRIORITIZE_COMPUTE = 2 } fsd_scheduling_mode;
FSD_API fsd_status fsd_set_scheduling_mode(fsd_scheduling_mode mode); /* [any thread] default: FSD_BALANCE */

typedef struct {
    uint32_t struct_size;
    uint32_t pacing; /* 1 while steps wait for the host's frames */
    uint64_t frames; /* seen, and those of them that took longer than the mode allows */
    uint64_t late_frames;
    double frame_time_s; /* of the last frame */
    double target_frame_s;
    double longest_step_s; /* of late */
    double waited_s;       /* all that steps have waited for frames */
    double share;          /* of the host's own GPU time that steps may use beside it */
    double gpu_busy_s;     /* of a frame, by the host's word; 0 while no frames are drawn */
} fsd_pacing;
FSD_API fsd_status fsd_get_pacing(fsd_pacing *pacing); /* [any thread] */

FSD_API fsd_status fsd_get_stats(fsd_stats *stats); /* [any thread] */
FSD_API fsd_status fsd_reset_peak(void);            /* [any thread] */

/* A time line of what graphs do: one span for each copy of a step's weights, each run of nodes on the inner device and
 * each on the CPU. Seconds of a monotonic clock; bytes of weights. Recording costs a few percent of speed. */
typedef enum { FSD_LANE_COPY = 0, FSD_LANE_DEVICE = 1, FSD_LANE_CPU = 2 } fsd_lane;
typedef struct {
    uint32_t lane, reserved;
    double start_s, end_s;
    uint64_t bytes;
} fsd_span;
FSD_API fsd_status fsd_trace_start(void);
/* Ends the recording and gives up to n_max spans in order of their start; *n gets how many there were. */
FSD_API fsd_status fsd_trace_stop(fsd_span *spans, size_t n_max, size_t *n);

/* Measuring this machine for a profile, each in about `seconds`; before fsd_commit or between graphs. Rates are bytes or
 * floating-point operations per second, 0 where there was no room or the device cannot do it. */
#define FSD_PROBE_PIECES 4
#define FSD_PROBE_THREADS 3
#define FSD_PROBE_BATCHES 4

typedef struct {
    uint32_t struct_size;
    uint32_t threads[FSD_PROBE_THREADS];    /* ascending; the last is n_threads */
    uint64_t piece_bytes[FSD_PROBE_PIECES]; /* ascending */
    double h2d_pinned[FSD_PROBE_PIECES];    /* copies in pieces of that size */
    double h2d_pageable[FSD_PROBE_PIECES];
    double d2h_pinned[FSD_PROBE_PIECES];
    double d2h_pageable[FSD_PROBE_PIECES];
    double dram[FSD_PROBE_THREADS]; /* host memory, read by that many threads */
    double dram_beside_copies[FSD_PROBE_THREADS];
    double handoff_s; /* GPU -> CPU -> GPU with 8 KiB of activations */
} fsd_machine_rates;
FSD_API fsd_status fsd_probe_machine(double seconds, fsd_machine_rates *rates);

typedef struct {
    uint32_t struct_size;
    uint32_t tokens[FSD_PROBE_BATCHES];  /* ascending; the first is 1 */
    double cpu_flops[FSD_PROBE_BATCHES]; /* products with that many columns, weights beyond all caches */
    double gpu_flops[FSD_PROBE_BATCHES];
    double cpu_beside_copies; /* one column while copies run, weight bytes per second */
    double h2d_beside_cpu;    /* those copies */
} fsd_product_rates;
/* Products of weights of a ggml type and shape. */
FSD_API fsd_status fsd_probe_product(int type, int64_t rows, int64_t cols, double seconds, fsd_product_rates *rates);

typedef struct {
    uint32_t struct_size;
    int32_t type;    /* set by the caller: of keys and values, a ggml type */
    double kv_bytes; /* one token: bytes of keys and values read */
    double flops;    /* a prompt */
} fsd_attention_rates;
/* Flash attention on the inner device over n_kv cells. Both rates are 0 where it has none for that type. */
FSD_API fsd_status fsd_probe_attention(int64_t head_dim, int64_t n_head, int64_t n_head_kv, int64_t n_kv,
                                       double seconds, fsd_attention_rates *rates);

#ifdef __cplusplus
}
#endif
#endif
