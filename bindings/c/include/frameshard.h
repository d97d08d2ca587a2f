/* frameshard: a language model beside your game, in a process of its own that gives VRAM back while it talks.
 *
 * This is the whole C interface. A host launches (or connects to) a sidecar, asks, and polls once a frame:
 *
 *     fs_launch_options options;
 *     fs_launch_options_init(&options, sizeof options);
 *     options.model = "innkeeper.gguf";
 *     fs_client *client = NULL;
 *     if (fs_launch(&options, &client) != FS_OK) puts(fs_last_error(NULL));
 *     fs_ask(client, "Any rooms left?", FS_NUL_TERMINATED, NULL, NULL);
 *     ... each frame:
 *     fs_event events[16];
 *     int32_t n = fs_poll(client, events, sizeof events[0], 16);
 *     ... at the end:
 *     fs_close(client, 3.0);
 *
 * Rules that hold for every function:
 *
 * Waiting    No function waits but fs_wait and fs_close, which take a time limit. There are no callbacks and no threads
 *            that the caller would notice: fs_poll returns what has happened, in the thread that calls it.
 * Threads    Each function is marked. [any thread]: no state, or only the calling thread's. [client]: any thread, but
 *            one at a time for a client; two clients never share anything.
 * Polling    All work for a client is done inside calls for it. A host that does not poll (a breakpoint, a long load)
 *            keeps its jobs: the sidecar holds their text, 48 KiB a job at most; beyond, the job ends by FS_OVERLOADED.
 * Errors     Functions return an fs_status: FS_OK, or the protocol's error code. fs_last_error has the sentence for the
 *            last failure on the calling thread. A call that fails has changed nothing. Later failures come as
 *            events. No C++ exception leaves the library.
 * Strings    UTF-8. A text given to the library has a length or FS_NUL_TERMINATED, and is copied before the call
 *            returns. A text from the library has a length and a NUL byte behind it that the length does not count.
 * Structs    Those the caller fills begin with struct_size and are made by their _init function, which sets every
 *            default. They grow at the end only, so a program built against an older header goes on working.
 * Numbers    Sizes are bytes, times are seconds. Numbers of jobs and requests begin with 1; 0 is none.
 *
 * This header is C99, needs nothing at run time that is not exported, and can be read by LuaJIT's ffi.cdef after the
 * preprocessor. */
#ifndef FRAMESHARD_H
#define FRAMESHARD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FS_STATIC)
#define FS_API
#elif defined(_WIN32)
#ifdef FS_BUILD
#define FS_API __declspec(dllexport)
#else
#define FS_API __declspec(dllimport)
#endif
#else
#define FS_API __attribute__((visibility("default")))
#endif

#define FS_ABI_VERSION 2
#define FS_NUL_TERMINATED (-1)

/* ---- status ---------------------------------------------------------------------------------------------------- */

/* The protocol's error codes (bindings/PROTOCOL.md, "Errors"). A code that is not listed means FS_INTERNAL. */
typedef int32_t fs_status;
enum {
    /* generated: statuses */
    FS_OK = 0,
    FS_INTERNAL = 1,
    FS_BAD_ARGUMENT = 10,
    FS_BAD_MESSAGE = 11,
    FS_UNKNOWN_JOB = 12,
    FS_CONTEXT_OVERFLOW = 13,
    FS_UNSUPPORTED = 14,
    FS_MODEL_NOT_FOUND = 20,
    FS_BAD_MODEL = 21,
    FS_UNKNOWN_DEVICE = 22,
    FS_BUDGET_BELOW_FLOOR = 23,
    FS_VERSION_MISMATCH = 24,
    FS_OUT_OF_MEMORY = 25,
    FS_STALE_LEASE = 26,
    FS_ENDPOINT_IN_USE = 30,
    FS_CONNECTION_LOST = 31,
    FS_ENGINE_DIED = 32,
    FS_OVERLOADED = 33,
    FS_DEADLINE_MISSED = 34,
    FS_CANCELLED = 40,
    FS_DOWNLOAD_FAILED = 41
    /* end of statuses */
};

/* The protocol's name of a status, such as "budget_below_floor"; "ok" for FS_OK, "internal" for what is unknown.
 * The text is static. [any thread] */
FS_API const char *fs_status_name(fs_status status);

/* 1 if the same call may succeed later without a change, else 0. [any thread] */
FS_API int32_t fs_status_retriable(fs_status status);

/* The sentence for the last call that failed on this thread; "" if none has. `length` may be NULL.
 * The text is the library's and lives until the next call of any function here on this thread. [any thread] */
FS_API const char *fs_last_error(uint32_t *length);

/* ---- version --------------------------------------------------------------------------------------------------- */

/* FS_ABI_VERSION of the library that is loaded. It grows when something that was there changes its meaning; functions
 * and trailing struct fields are added without. [any thread] */
FS_API uint32_t fs_abi_version(void);

/* The protocol version that the library was written for; the sidecar must have it or a newer one. [any thread] */
FS_API uint32_t fs_protocol_version(void);

/* The library's own version, such as "0.1.0". The text is static. [any thread] */
FS_API const char *fs_version(void);

/* ---- a client -------------------------------------------------------------------------------------------------- */

/* A session with one sidecar. Made by fs_launch or fs_connect, ended by fs_close. */
typedef struct fs_client fs_client;

/* How to start a sidecar. Texts are UTF-8 with a NUL at the end; NULL is the default. */
typedef struct fs_launch_options {
    /* generated: fs_launch_options */
    /* Set by fs_launch_options_init. */
    uint32_t struct_size;
    /* Path of a GGUF file; the only option without a default. 1..4096 bytes. */
    const char *model;
    /* `auto` (the first GPU, else the CPU), `cpu`, `emulated`, or a ggml device such as `CUDA0`. For tests:
       `emulated:25` copies 25e9 bytes/s at most. At most 256 bytes; NULL (default): auto. */
    const char *device;
    /* All that the sidecar may hold in VRAM; 0: no limit. Default 0. */
    uint64_t vram_budget_bytes;
    /* Context of each conversation, rounded up to a multiple of 256; VRAM is taken for the tokens in use.
       1..16777216. Default 4096. */
    uint32_t n_ctx;
    /* Jobs that run at once, each in a context of its own. 1..64. Default 4. */
    uint32_t n_parallel;
    /* Tokens of a prompt that are computed at once. Streamed weights are copied once for each so many, and the
       buffers for them are part of the floor. 0: chosen at launch, for the least time of a long prompt and the
       first 16 tokens of its answer, with a floor of about half of the budget at most (or that of 512, if it is
       higher); without a budget 512. 0..65536. Default 512. */
    uint32_t n_ubatch;
    /* CPU threads; 0: half of the CPUs. 0..1024. Default 0. */
    uint32_t n_threads;
    /* A client whose connection is gone and that does not come back for so long loses its jobs. One that is
       connected and silent (a breakpoint, a long load) keeps them. 0..1000000. Default 10. */
    double silent_s;
    /* How clients connect: `ipc`, or `tcp` on the loopback (the default on Windows). Both are encrypted. One of
       ipc, tcp; NULL: the default, by system. */
    const char *transport;
    /* Where to listen: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, a fresh place. At most 4096 bytes;
       NULL (default): none. */
    const char *endpoint;
    /* Where to leave what further clients need to connect, readable by this user only; without it, a fresh place.
       Refused with `bad_argument` where it cannot be written. At most 4096 bytes; NULL (default): none. */
    const char *connect_file;
    /* Python in which frameshard is installed. Default python3, from PATH. */
    const char *python;
    /* The sidecar appends its log here. Default: standard error. */
    const char *log_file;
    /* At most 64 bytes, for the sidecar's log. Default c. */
    const char *client_name;
    /* A JSON object with further fields of the sidecar's first line; they win. Default: none. */
    const char *extra_json;
    /* Path of the GGUF file that reads images for this model; empty: none. At most 4096 bytes; NULL (default):
       none. */
    const char *mmproj;
    /* `stream_only`: the same bits at any budget, at the cost of speed. One of planned, stream_only; NULL: the
       default, planned. */
    const char *mode;
    /* Speculative decoding: `auto` drafts repeated text by lookup and verifies several tokens at a time where that
       pays; `off`: never. One of auto, off; NULL: the default, auto. */
    const char *speculate;
    /* Path of the GGUF file of a small model with the same vocabulary (empty: none), which drafts what does not
       repeat, where that pays. It runs on the CPU, with its weights and its KV cache (16,384 tokens at most) in
       host memory. Not loaded where nothing can be drafted: with `speculate` off, on the CPU alone or with
       recurrent models. At most 4096 bytes; NULL (default): none. */
    const char *draft_model;
    /* Type of the KV cache: `q8_0` takes half, `q4_0` little more than a quarter of the bytes of `f16`, at some
       loss. Refused with `unsupported` where the model's heads are no multiple of 32. The floor is not lower by it
       on NVIDIA's GPUs, where prompts have a layer's whole context in 16 bits beside it. One of f16, q8_0, q4_0;
       NULL: the default, f16. */
    const char *kv_type;
    /* Jobs of all clients that have not ended. 1..1024. Default 256. */
    uint64_t max_jobs;
    /* Jobs of one client that have not ended. 1..1024. Default 64. */
    uint64_t max_client_jobs;
    /* Text kept for one job whose client does not read; beyond, the job fails. 0..49152. Default 49152. */
    uint64_t held_bytes;
    /* An engine without work that does not answer for so long is replaced. 0..1000000. Default 5. */
    double hang_idle_s;
    /* An engine with work that does not answer for so long is replaced. 0..1000000. Default 60. */
    double hang_busy_s;
    /* An engine that loads and does not answer for so long is replaced. 0..1000000. Default 600. */
    double hang_load_s;
    /* An engine of which no thread runs for so long is stopped, and replaced whatever it does. 0..1000000. Default
       5. */
    double hang_still_s;
    /* Deaths of the engine within `restart_window_s`, without a new token in between and while no job runs, after
       which it is off for `off_pause_s`. 0..1000. Default 3. */
    uint64_t restart_limit;
    /* Span of time for `restart_limit`. 0..1000000. Default 300. */
    double restart_window_s;
    /* Pause of an engine that cannot be kept alive; then it is tried again. Each is twice as long as the last.
       0..1000000. Default 1. */
    double off_pause_s;
    /* The longest such pause. 0..1000000. Default 60. */
    double off_pause_max_s;
    /* end of fs_launch_options */
} fs_launch_options;

/* Sets struct_size and every default; `struct_size` is sizeof(fs_launch_options). [any thread] */
FS_API void fs_launch_options_init(fs_launch_options *options, uint32_t struct_size);

/* Starts a sidecar and a session with it. Returns at once: FS_EVENT_READY follows when the model is loaded, or
 * FS_EVENT_CLOSED with the reason (FS_MODEL_NOT_FOUND, FS_BAD_MODEL, FS_UNKNOWN_DEVICE, FS_BUDGET_BELOW_FLOOR, ...;
 * FS_ENGINE_DIED if the process ended before it could say one: text has its program, its exit status and what it wrote
 * last, such as that frameshard is not installed there). What is asked before that waits. The sidecar ends with the
 * client, and with this process however that ends.
 * FS_BAD_ARGUMENT for options that are wrong by themselves, FS_INTERNAL if the process cannot be started or log_file
 * cannot be opened.
 * On success *client is the caller's, to be given to fs_close; on failure it is NULL. [any thread] */
FS_API fs_status fs_launch(const fs_launch_options *options, fs_client **client);

/* Joins a sidecar that runs, by the path of its connect file (UTF-8, NUL at the end). `client_name` may be NULL.
 * Returns at once: FS_EVENT_READY follows, or FS_EVENT_CLOSED with FS_CONNECTION_LOST when nobody answers there, or
 * FS_VERSION_MISMATCH.
 * FS_CONNECTION_LOST if there is no such file, FS_BAD_ARGUMENT if it is no connect file.
 * On success *client is the caller's, to be given to fs_close; on failure it is NULL. [any thread] */
FS_API fs_status fs_connect(const char *connect_file, const char *client_name, fs_client **client);

/* Ends the session: its jobs are cancelled, and a launched sidecar ends. Frees the client and all texts that its events
 * point to. Waits at most `timeout_s` for the sidecar to take its leave, then kills it; 0 kills it at once. NULL is
 * allowed. [client] */
FS_API void fs_close(fs_client *client, double timeout_s);

/* Where a client stands. */
enum {
    FS_STATE_LOADING = 1, /* until FS_EVENT_READY */
    FS_STATE_READY = 2,
    FS_STATE_CLOSED = 3 /* FS_EVENT_CLOSED has come or will with the next poll; every call now fails */
};

/* One of the above; 0 for NULL. [client] */
FS_API int32_t fs_state(const fs_client *client);

/* 1 if the sidecar supports `feature`, a name from PROTOCOL.md ("Features"); 0 if it does not, before FS_EVENT_READY, and
 * for NULL. A program asks before it uses what an older sidecar lacks. [client] */
FS_API int32_t fs_has_feature(const fs_client *client, const char *feature);

/* What is loaded. Texts live as long as the client. */
typedef struct fs_model {
    uint32_t struct_size; /* sizeof(fs_model), set by the caller */
    uint32_t n_ctx;       /* tokens of one conversation */
    uint32_t n_parallel;
    uint32_t n_vocab;
    uint32_t n_layer;
    int32_t chat;         /* 1: has a chat template */
    uint64_t floor_bytes; /* no VRAM budget below it is possible */
    uint64_t full_bytes;  /* with it all weights are resident */
    const char *name;
    const char *arch;
    const char *device;
    const char *plan_json;    /* placements and predicted times at the budget of the load, a JSON object */
    uint64_t pid;             /* of the sidecar */
    const char *connect_file; /* what fs_connect was given, or options.connect_file; "" if neither */
    const char *vision;       /* the name of what reads images; "" where nothing does */
} fs_model;

/* Fills *model. FS_CONNECTION_LOST before FS_EVENT_READY. [client] */
FS_API fs_status fs_get_model(const fs_client *client, fs_model *model);

/* ---- jobs ------------------------------------------------------------------------------------------------------ */

/* How tokens are chosen. In mode stream_only the same values, prompt and seed give the same text. In mode planned the
 * plan, speculative decoding and a restart of the engine may change it where two tokens are nearly as likely. */
typedef struct fs_sampling {
    /* generated: fs_sampling */
    /* Set by fs_sampling_init. */
    uint32_t struct_size;
    /* Length of the answer at most. 1..1048576. Default 256. */
    int32_t max_tokens;
    /* Only so many of the likeliest tokens; 0: off. 0..1048576. Default 40. */
    int32_t top_k;
    /* Of `stop`; at most 16. */
    uint32_t n_stop;
    /* Randomness of the choice; 0: always the likeliest token. 0..5. Default 0.8. */
    double temperature;
    /* Only the likeliest tokens of so much probability; 1: off. 0..1. Default 0.95. */
    double top_p;
    /* Only tokens of at least this share of the likeliest one's probability; 0: off. 0..1. Default 0.05. */
    double min_p;
    /* Makes tokens of the last ones less likely; 1: off. 0.5..2. Default 1. */
    double repeat_penalty;
    /* Seed of the random numbers; without it the sidecar draws one. 0..4294967295, or -1: not given. Default -1. */
    int64_t seed;
    /* The answer ends before any of these. Each of 1..256 bytes with a NUL at the end. */
    const char *const *stop;
    /* A JSON schema: the answer is JSON that fits it, unless `max_tokens` or `stop` ends it before; empty: off. At
       most 65536 bytes; NULL (default): none. */
    const char *json_schema;
    /* Taken from a token's logit for each time that it is among the last 64; 0: off. -2..2. Default 0. */
    double frequency_penalty;
    /* Taken from a token's logit once if it is among the last 64; 0: off. -2..2. Default 0. */
    double presence_penalty;
    /* end of fs_sampling */
} fs_sampling;

/* Sets struct_size and every default; `struct_size` is sizeof(fs_sampling). [any thread] */
FS_API void fs_sampling_init(fs_sampling *sampling, uint32_t struct_size);

/* What the bytes of an image are. */
enum {
    /* generated: ImageFormat */
    FS_IMAGE_ENCODED = 1, /* a PNG or JPEG file */
    FS_IMAGE_RGB = 2,     /* rows of pixels from the top, 8 bits a channel */
    FS_IMAGE_RGBA = 3,    /* the same; alpha is not looked at */
    /* end of ImageFormat */
};

/* An image in the caller's memory, which is copied before the call returns. All fields count. */
typedef struct fs_image {
    uint32_t format;  /* FS_IMAGE_... */
    uint32_t width;   /* of pixels; 0 of an encoded image */
    uint32_t height;  /* likewise; at most 16777216 pixels in all */
    uint32_t stride;  /* bytes from one row to the next; 0: rows follow each other without a gap */
    const void *data; /* the first byte */
    uint64_t size;    /* bytes, at most 67108864 */
} fs_image;

/* What else a job may be given. */
typedef struct fs_job_options {
    uint32_t struct_size;        /* set by fs_job_options_init */
    uint32_t window;             /* 1..256: events that may be under way before they are polled. Default 32 */
    const char *conversation;    /* name of at most 128 bytes; NULL (default): none */
    const char *system;          /* fs_ask only: the conversation's persona from now on; NULL (default): as it is */
    const fs_sampling *sampling; /* NULL (default): all defaults */
    uint64_t timeline;           /* comes back in each event: a game that loads a save counts it up, and can tell
                                    tokens that were meant for another past. Default 0 */
    const fs_image *images;      /* stand before the question, the last message or the prompt; for models that see
                                    (fs_model.vision). NULL (default): none */
    uint32_t n_images;           /* of images; at most 8 */
    uint32_t reserved;           /* 0 */
} fs_job_options;

/* Sets struct_size and every default; `struct_size` is sizeof(fs_job_options). [any thread] */
FS_API void fs_job_options_init(fs_job_options *options, uint32_t struct_size);

/* One message of a chat. */
typedef struct fs_message {
    const char *role;       /* "system", "user" or "assistant" */
    const char *content;    /* at most 65536 bytes */
    int32_t content_length; /* or FS_NUL_TERMINATED */
    int32_t reserved;       /* 0 */
} fs_message;

/* Says `text` to the model. With options->conversation, what was said in it before belongs to the prompt: questions, and
 * answers as far as they were polled. Questions of one conversation are answered one after the other; its oldest
 * exchanges are forgotten when the context is full. `options` and `job` may be NULL.
 * The job's events follow: FS_EVENT_STARTED, FS_EVENT_TEXT..., then exactly one of FS_EVENT_DONE, FS_EVENT_FAILED and
 * FS_EVENT_CANCELLED. FS_BAD_ARGUMENT, FS_CONNECTION_LOST when the client is closed. [client] */
FS_API fs_status fs_ask(fs_client *client, const char *text, int32_t text_length, const fs_job_options *options,
                        uint64_t *job);

/* Like fs_ask for callers that keep the history themselves: `messages` is the whole prompt. A conversation only names
 * what the engine should keep in its cache, so that a prompt which begins as the last one did is read faster.
 * [client] */
FS_API fs_status fs_chat(fs_client *client, const fs_message *messages, uint32_t n_messages,
                         const fs_job_options *options, uint64_t *job);

/* Completes `prompt`, without a chat template. [client] */
FS_API fs_status fs_complete(fs_client *client, const char *prompt, int32_t prompt_length,
                             const fs_job_options *options, uint64_t *job);

/* Ends a job early; FS_EVENT_CANCELLED follows, unless another end came first. FS_UNKNOWN_JOB if its last event has been
 * polled or it never was. [client] */
FS_API fs_status fs_cancel(fs_client *client, uint64_t job);

/* Clears the history of a conversation of fs_ask, after the questions that were asked before. The system text stays.
 * [client] */
FS_API fs_status fs_forget(fs_client *client, const char *conversation);

/* ---- VRAM and figures ------------------------------------------------------------------------------------------ */

/* Where a lease may stand. */
enum {
    /* generated: LeaseState */
    FS_LEASE_ACTIVE = 1,
    FS_LEASE_PARKED = 2,     /* the KV cache is in host memory, no weights are in VRAM: the driver's context is left */
    FS_LEASE_HIBERNATED = 3, /* the engine process has ended: no VRAM at all. Conversations go on with the next lease */
    /* end of LeaseState */
};

/* What the host proposes. */
typedef struct fs_lease {
    /* generated: fs_lease */
    /* Set by fs_lease_init. */
    uint32_t struct_size;
    /* `parked` keeps no more than the driver's context in VRAM, `hibernated` ends the engine process. FS_LEASE_...
       Default FS_LEASE_ACTIVE. */
    int32_t state;
    /* All that the sidecar holds in VRAM has to fit; 0: no limit. Not `active`: the budget to come back to. */
    uint64_t vram_budget_bytes;
    /* What the sidecar keeps while it is idle; 0: it gives nothing back on its own. Default 0. */
    uint64_t floor_bytes;
    /* Refused with `stale_lease` unless it is above the one in force; 0: the last word counts. Default 0. */
    uint64_t version;
    /* Deadline of the release. 0.001..60. Default 5. */
    double timeout_s;
    /* For the sidecar's log. At most 64 bytes; NULL (default): none. */
    const char *reason;
    /* end of fs_lease */
} fs_lease;

/* Sets struct_size and every default; `struct_size` is sizeof(fs_lease). [any thread] */
FS_API void fs_lease_init(fs_lease *lease, uint32_t struct_size);

/* Proposes a lease. Jobs go on, at the rate that it allows. Three events follow: FS_EVENT_LEASE (what was decided),
 * FS_EVENT_BUDGET_RELEASED when the memory is given back, FS_EVENT_BUDGET_OBSERVED. Or FS_EVENT_REFUSED, also after the
 * first: FS_BUDGET_BELOW_FLOOR (nothing changes; event.floor_bytes), FS_STALE_LEASE (nothing changes), FS_ENGINE_DIED,
 * FS_DEADLINE_MISSED (stays in force). `request` may be NULL. [client] */
FS_API fs_status fs_set_lease(fs_client *client, const fs_lease *lease, uint64_t *request);

/* fs_set_lease with nothing but a budget and a deadline. [client] */
FS_API fs_status fs_set_budget(fs_client *client, uint64_t vram_budget_bytes, double timeout_s, uint64_t *request);

/* Asks for the lease in force and its bounds: FS_EVENT_BUDGET follows. [client] */
FS_API fs_status fs_get_budget(fs_client *client, uint64_t *request);

/* Asks for the figures of this moment: FS_EVENT_STATS follows. [client] */
FS_API fs_status fs_get_stats(fs_client *client, uint64_t *request);

/* Asks what the device has and what the model needs: FS_EVENT_CAPS follows. [client] */
FS_API fs_status fs_get_caps(fs_client *client, uint64_t *request);

/* Asks how fast the model would be at a budget, for a prompt of so many tokens (1..1048576), changing nothing:
 * FS_EVENT_PLAN follows. [client] */
FS_API fs_status fs_get_plan(fs_client *client, uint64_t vram_budget_bytes, uint32_t prompt_tokens, uint64_t *request);

/* Ends the sidecar for all its clients, also one that was not launched by this one. FS_EVENT_CLOSED follows. [client] */
FS_API fs_status fs_shutdown(fs_client *client);

/* ---- sharing the GPU with frames ------------------------------------------------------------------------------- */

/* Whose work comes first. */
enum {
    /* generated: SchedulingMode */
    FS_PRIORITIZE_GRAPHICS = 1, /* use only what the frames leave */
    FS_BALANCE = 2,             /* some more, as long as they keep their time. What a sidecar begins with */
    FS_PRIORITIZE_COMPUTE = 3,  /* take no notice of frames */
    /* end of SchedulingMode */
};

/* How the GPU is shared with the frames that a frame block tells of. `target_tokens_per_second` is a limit for all jobs
 * together, 0.1 to 10000; 0: as fast as they can. The last word counts, whichever client says it. FS_EVENT_REFUSED
 * follows if it is refused, else nothing. `request` may be NULL. [client] */
FS_API fs_status fs_set_pacing(fs_client *client, int32_t scheduling_mode, double target_tokens_per_second,
                               uint64_t *request);

/* Asks where the sidecar's frame block is: FS_EVENT_FRAME_BLOCK follows, with the path for fs_frame_block_open.
 * [client] */
FS_API fs_status fs_get_frame_block(fs_client *client, uint64_t *request);

/* A page of shared memory in which the host tells the sidecar when it draws, each frame. It belongs to no client: the thread that
 * draws may write it while another polls. In the functions below, [block] is: any thread, one at a time for a block.
 * None of them waits, allocates or makes a system call but the first two. One process writes a sidecar's page. */
typedef struct fs_frame_block fs_frame_block;

/* Maps the page at `path` (UTF-8, NUL at the end). `target_frame_s` is the time that a frame should take, such as
 * 1.0 / 60. FS_BAD_ARGUMENT if it is no frame block of a version that the library knows.
 * On success *block is the caller's, to be given to fs_frame_block_close; on failure it is NULL. [any thread] */
FS_API fs_status fs_frame_block_open(const char *path, double target_frame_s, fs_frame_block **block);

/* Unmaps the page; the sidecar takes no more notice of frames 0.1 s later. NULL is allowed. [block] */
FS_API void fs_frame_block_close(fs_frame_block *block);

/* A frame begins now; the time since the last one began is that frame's time. Once a frame is enough. [block] */
FS_API fs_status fs_frame_begin(fs_frame_block *block);

/* So long the frame has kept the GPU busy, where the host measures it; the next ones are expected to do the same.
 * Told to the sidecar with the next fs_frame_begin. [block] */
FS_API fs_status fs_frame_end(fs_frame_block *block, double gpu_busy_s);

/* Nothing that matters is drawn until the next fs_frame_begin (a menu, alt-tab, loading): the sidecar may use all of the
 * GPU. [block] */
FS_API fs_status fs_frame_idle(fs_frame_block *block);

/* fs_set_budget without a message: taken between two steps of the computation that runs. *generation is what
 * fs_frame_answer will name; it may be NULL. [block] */
FS_API fs_status fs_frame_set_budget(fs_frame_block *block, uint64_t vram_budget_bytes, uint64_t *generation);

/* What the sidecar says of budgets in the page. */
typedef struct fs_frame_answer {
    uint32_t struct_size;        /* sizeof(fs_frame_answer), set by the caller */
    uint32_t reserved;           /* 0 */
    uint64_t applied_generation; /* this budget is in force and what did not fit is released */
    uint64_t refused_generation; /* this one was below the floor */
    uint64_t budget_bytes;       /* in force */
    uint64_t used_bytes;         /* held, by the sidecar's own count */
    uint64_t floor_bytes;        /* no budget below it is possible */
} fs_frame_answer;

/* Fills *answer. [block] */
FS_API fs_status fs_frame_get_answer(const fs_frame_block *block, fs_frame_answer *answer);

/* ---- events ---------------------------------------------------------------------------------------------------- */

enum {
    FS_EVENT_READY = 1,     /* the model is loaded; text: its name, detail: the protocol's ModelInfo */
    FS_EVENT_STARTED = 2,   /* job, n_prompt */
    FS_EVENT_TEXT = 3,      /* job, text: more of the answer, never cut within a character; tokens */
    FS_EVENT_DONE = 4,      /* job, reason, n_prompt, n_generated, prefill_s, decode_s */
    FS_EVENT_FAILED = 5,    /* job, status, text: why, detail. The text so far stands. Also of what was asked before a
                               launch that failed, and when the sidecar is lost */
    FS_EVENT_CANCELLED = 6, /* job */
    FS_EVENT_BUDGET_RELEASED =
        7, /* request, budget_bytes, used_bytes, seconds: released, exact by the sidecar's count */
    FS_EVENT_BUDGET_OBSERVED = 8, /* request, observed_bytes, seconds: what the driver counts */
    FS_EVENT_BUDGET = 9,          /* request, lease_state, version, budget_bytes, floor_bytes, full_bytes, used_bytes,
                                     wanted_bytes: what the sidecar would like to have now */
    FS_EVENT_STATS = 10,          /* request, detail: {"broker": BrokerStats, "engine": {...} or null} */
    FS_EVENT_REFUSED = 11,        /* request, status, text: why, detail; floor_bytes with FS_BUDGET_BELOW_FLOOR */
    FS_EVENT_ENGINE = 12,         /* engine_state, restarts; status, text and detail if it is off, which need not be
                                     the end: it may come back. Jobs go on by themselves
                                     after a restart */
    FS_EVENT_CLOSED = 13, /* the last event of all: status, text and detail say why. All jobs have ended before */
    FS_EVENT_LEASE = 14,  /* request, decision, budget_bytes (reached by the deadline), seconds (until all of it is
                             reached, as predicted), version */
    FS_EVENT_NOTICE = 15, /* unasked: notice, budget_bytes, seconds, text: a sentence */
    FS_EVENT_CAPS = 16,   /* request, text: the device; total_bytes, free_bytes, floor_bytes, full_bytes; detail: the
                             protocol's caps_and_requirements */
    FS_EVENT_PLAN = 17,   /* request, budget_bytes, fits, ttft_s, tokens_per_second, resident_bytes, streamed_bytes,
                             cpu_bytes */
    FS_EVENT_FRAME_BLOCK = 18, /* request, text: the path */
    FS_EVENT_PROGRESS = 19     /* job, phase, done, total; only of a job with images, between its first event and its
                                  last, for a progress bar */
};

enum {
    /* generated: Reason */
    FS_REASON_STOP = 1,
    FS_REASON_LENGTH = 2,
    /* end of Reason */
};
enum {
    /* generated: EngineState */
    FS_ENGINE_LOADING = 1,
    FS_ENGINE_READY = 2,
    FS_ENGINE_RESTARTING = 3,
    FS_ENGINE_OFF = 4,
    FS_ENGINE_HIBERNATED = 5,
    /* end of EngineState */
};
/* images are encoded; the prompt is read */
enum {
    /* generated: Phase */
    FS_PHASE_ENCODE = 1,
    FS_PHASE_PREFILL = 2,
    /* end of Phase */
};
enum {
    /* generated: Decision */
    FS_DECISION_GRANTED = 1,
    FS_DECISION_PARTIAL = 2,
    /* end of Decision */
};

/* What a notice is about. A kind that is not listed may be ignored. */
enum {
    /* generated: NoticeKind */
    FS_NOTICE_WANTS = 1,         /* the sidecar would like to have budget_bytes: jobs wait or are slow */
    FS_NOTICE_GIVES_BACK = 2,    /* it has gone down to budget_bytes, as the lease's floor allows it to */
    FS_NOTICE_LATE = 3,          /* a release takes `seconds` longer than predicted */
    FS_NOTICE_PRESSURE = 4,      /* the device has less memory than the lease grants */
    FS_NOTICE_OTHER_PROCESS = 5, /* another program holds memory that the lease grants */
    FS_NOTICE_STATE = 6,         /* the lease has changed its state */
    /* end of NoticeKind */
};

/* One event. Fields that its type does not name are 0, texts "". */
typedef struct fs_event {
    /* generated: fs_event */
    /* FS_EVENT_... */
    uint32_t type;
    /* FS_OK, or what went wrong. */
    fs_status status;
    /* As fs_ask, fs_chat or fs_complete gave it. */
    uint64_t job;
    /* As the function that asked gave it. */
    uint64_t request;
    /* The job's. */
    uint64_t timeline;
    /* Valid until the next fs_poll or fs_close of this client. */
    const char *text;
    /* A JSON object, or empty; likewise. */
    const char *detail;
    /* Bytes. */
    uint32_t text_length;
    /* Bytes. */
    uint32_t detail_length;
    /* Since the last delta, those without text of their own included. */
    uint32_t tokens;
    /* The model ended or a stop string came (`stop`), or `max_tokens` were reached (`length`). FS_REASON_..., 0: a
       word of a newer sidecar. */
    uint32_t reason;
    /* Length of the prompt. */
    uint32_t n_prompt;
    /* Length of the answer. */
    uint32_t n_generated;
    /* New state of the engine process. FS_ENGINE_..., 0: a word of a newer sidecar. */
    uint32_t engine_state;
    /* Restarts of the engine since the launch. */
    uint32_t restarts;
    /* BUDGET_RELEASED: in force now; parked or hibernated: to come back to. BUDGET: in force; 0: no limit. LEASE:
       reached by the deadline. NOTICE: of `other_process` what that one holds (0: not known), of the others a
       budget. PLAN: as asked. */
    uint64_t budget_bytes;
    /* What the sidecar holds, exact by its own count. */
    uint64_t used_bytes;
    /* No VRAM budget below it is possible. */
    uint64_t floor_bytes;
    /* With this budget all weights are resident. */
    uint64_t full_bytes;
    /* What the driver counts for the engine process; missing where it does not tell. -1: not told. */
    int64_t observed_bytes;
    /* BUDGET_RELEASED, BUDGET_OBSERVED: since the engine was asked. LEASE: until all of it is reached, predicted;
       0: at once, or nothing was measured yet. NOTICE: of `late` until all is released, predicted; of `state` how
       long the change took; else 0. */
    double seconds;
    /* From the start of the prompt to the first token. */
    double prefill_s;
    /* From the first token to the end. */
    double decode_s;
    /* `partial`: the deadline is too short for all of it. FS_DECISION_..., 0: a word of a newer sidecar. */
    uint32_t decision;
    /* State of the lease. FS_LEASE_..., 0: a word of a newer sidecar. */
    uint32_t lease_state;
    /* What the notice is about. FS_NOTICE_..., 0: a word of a newer sidecar. */
    uint32_t notice;
    /* False: below the floor. The predictions are missing then and the sizes 0. */
    int32_t fits;
    /* Version of the lease in force; 0: none was given. */
    uint64_t version;
    /* What the sidecar would like: `full_bytes` while jobs are open and the budget is below it, else what it
       holds. */
    uint64_t wanted_bytes;
    /* VRAM of the device; missing where the system does not tell. -1: not told. */
    int64_t total_bytes;
    /* Free VRAM of the device when last looked at; missing where the system does not tell. -1: not told. */
    int64_t free_bytes;
    /* Time to the first token of a prompt. 0: not told. */
    double ttft_s;
    /* Rate of decoding, of one job. 0: not told. */
    double tokens_per_second;
    /* Weights that stay in VRAM. */
    uint64_t resident_bytes;
    /* Weights that are copied to the device for each token. */
    uint64_t streamed_bytes;
    /* Weights that the CPU computes with. */
    uint64_t cpu_bytes;
    /* Images are encoded, or the prompt is read. FS_PHASE_..., 0: a word of a newer sidecar. */
    uint32_t phase;
    /* Images, or tokens of the prompt. */
    uint32_t done;
    /* Images (more where a model cuts one into tiles), or tokens of the prompt. */
    uint32_t total;
    /* 0. */
    uint32_t reserved;
    /* end of fs_event */
} fs_event;

/* Takes at most `capacity` events, oldest first, into `events`, and does all work that is due for the client. Never
 * waits; with nothing pending it costs about as much as one look at the clock and allocates nothing.
 * `event_size` is sizeof(fs_event). Texts of the last call's events are invalid from now on. A program that does not
 * poll loses nothing: the sidecar holds back, as for any slow reader.
 * Returns the number of events, 0 to `capacity`, or -FS_BAD_ARGUMENT. [client] */
FS_API int32_t fs_poll(fs_client *client, fs_event *events, uint32_t event_size, int32_t capacity);

/* For programs that have nothing else to do: waits until fs_poll has something, at most `timeout_s`, and does all other
 * work that is due for the client. It takes next to no CPU time. Returns 1 if there is something, else 0. When
 * FS_EVENT_CLOSED has been polled nothing will come any more: it then returns 0 after 0.05 s at most. [client] */
FS_API int32_t fs_wait(fs_client *client, double timeout_s);

#ifdef __cplusplus
}
#endif

#endif
