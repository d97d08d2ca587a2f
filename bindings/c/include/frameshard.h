/* frameshard: runs a language model next to your game, in a separate process that can give VRAM back while it
 * generates text.
 *
 * This is the whole C interface. A host launches a sidecar (or connects to one), asks questions, and polls for events
 * once a frame:
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
 * Waiting    Only fs_wait and fs_close wait, and both take a time limit. The library calls no callbacks. fs_poll
 *            returns events in the thread that calls it.
 * Threads    Each function is marked. [any thread]: any thread may call it at any time. [client]: any thread may call
 *            it, but only one thread at a time for the same client. Two clients share nothing.
 * Polling    The library works for a client only inside calls for that client. A host that stops polling (a
 *            breakpoint, a long load) keeps its jobs: the sidecar holds at most 48 KiB of text for each job. A job with
 *            more text ends with FS_OVERLOADED.
 * Errors     Most functions return an fs_status: FS_OK, or an error code of the protocol. fs_last_error returns a
 *            sentence about the last failed call on the calling thread. A call that fails has changed nothing. An
 *            error that occurs after the call arrives as an event. A call for a closed client returns the status of
 *            FS_EVENT_CLOSED, or FS_CONNECTION_LOST if that is FS_OK. The library throws no C++ exceptions.
 * Requests   A function with a `request` parameter sets *request to the number that the events of its answer have.
 *            `request` may be NULL.
 * Strings    Texts are UTF-8. A text for the library has a length in bytes, or FS_NUL_TERMINATED, and is copied before
 *            the call returns. A text from the library ends with a NUL byte, which its length does not count.
 * Structs    A struct that the caller fills begins with struct_size. Its _init function sets struct_size and every
 *            default. New members are added at the end only, so programs built with an older header keep working.
 * Numbers    Sizes are in bytes, times in seconds. Numbers of jobs and requests begin with 1; 0 means none.
 *
 * This header is C99. After the preprocessor, LuaJIT's ffi.cdef can read it. */
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

/* The protocol's error codes (bindings/PROTOCOL.md, "Errors"). Treat a code that is not listed as FS_INTERNAL. */
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
    FS_BAD_SAVE = 15,
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

/* Returns the protocol's name of a status, such as "budget_below_floor"; "ok" for FS_OK, "internal" for an unknown
 * status. The text is static. [any thread] */
FS_API const char *fs_status_name(fs_status status);

/* Returns 1 if the same call may succeed later without a change, else 0. [any thread] */
FS_API int32_t fs_status_retriable(fs_status status);

/* Returns a sentence about the last failed call on this thread; "" if no call has failed. Sets *length to its bytes;
 * `length` may be NULL. The text is valid until this thread calls any function of this header. [any thread] */
FS_API const char *fs_last_error(uint32_t *length);

/* ---- version --------------------------------------------------------------------------------------------------- */

/* Returns the FS_ABI_VERSION that the loaded library was built with. The version grows when an existing function or
 * struct member changes its meaning. It does not grow when functions or struct members are added. [any thread] */
FS_API uint32_t fs_abi_version(void);

/* Returns the protocol version of the library. The sidecar must have the same version or a newer one. [any thread] */
FS_API uint32_t fs_protocol_version(void);

/* Returns the library's own version, such as "0.1.0". The text is static. [any thread] */
FS_API const char *fs_version(void);

/* ---- a client -------------------------------------------------------------------------------------------------- */

/* A session with one sidecar. fs_launch or fs_connect creates it, fs_close frees it. */
typedef struct fs_client fs_client;

/* Options of fs_launch. Texts are UTF-8 with a NUL at the end; NULL means the default. */
typedef struct fs_launch_options {
    /* generated: fs_launch_options */
    /* Set by fs_launch_options_init. */
    uint32_t struct_size;
    /* Path of a GGUF file; the only option without a default. `PATH@OFFSET+SIZE` is a part of a file, such as a
       game's pak file; the offset is a multiple of 32. 1..4096 bytes. */
    const char *model;
    /* `auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device such as
       `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s. At most 256 bytes; NULL (default): auto. */
    const char *device;
    /* Limit for all VRAM that the sidecar uses; 0: no limit. Default 0. */
    uint64_t vram_budget_bytes;
    /* Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only for the
       tokens in the context. Range 1..16777216 tokens. Default 4096. */
    uint32_t n_ctx;
    /* Number of jobs that run at once, each in its own context. Range 1..64. Default 4. */
    uint32_t n_parallel;
    /* Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once for each
       graph, and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has room for
       256 tokens; in mode `stream_only` 512. Any other value holds at every budget, and the floor has room for it.
       Range 0..65536 tokens. Default 0. */
    uint32_t n_ubatch;
    /* Number of CPU threads; 0: half of the CPUs. Range 0..1024. Default 0. */
    uint32_t n_threads;
    /* A client that stays disconnected for this long loses its jobs. A client that is connected but silent (a
       breakpoint, a long load) keeps them. Range 0..1000000 s. Default 10. */
    double silent_s;
    /* How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are encrypted.
       One of ipc, tcp; NULL: the default, by system. */
    const char *transport;
    /* Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar chooses. At most
       4096 bytes; NULL (default): not given. */
    const char *endpoint;
    /* Path of the file from which other clients learn how to connect; only this user can read it. The sidecar
       removes it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it cannot be
       written, or if a file is there that is no connect file. At most 4096 bytes; NULL (default): not given. */
    const char *connect_file;
    /* Command of the Python that has frameshard installed. Default: python3, from PATH. */
    const char *python;
    /* Path of a file to which the sidecar appends its log. Default: standard error. */
    const char *log_file;
    /* Name of the client in the sidecar's log, at most 64 bytes. Default c. */
    const char *client_name;
    /* A JSON object with further launch options; they take precedence over the others. Default: none. */
    const char *extra_json;
    /* Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty: none. At most
       4096 bytes; NULL (default): not given. */
    const char *mmproj;
    /* `planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every budget. One of
       planned, stream_only; NULL: the default, planned. */
    const char *mode;
    /* Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified in one
       graph, where that is faster. `off`: never. One of auto, off; NULL: the default, auto. */
    const char *speculate;
    /* Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It drafts text
       that does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at most 16,384
       tokens) are in host memory. It is not loaded with `speculate` off, without a GPU, or with recurrent models.
       At most 4096 bytes; NULL (default): not given. */
    const char *draft_model;
    /* Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`, at some
       loss of quality. Refused with `unsupported` if the model's attention head size is not a multiple of 32. On
       NVIDIA GPUs the floor stays the same, because a prompt also needs one layer's whole context in 16 bits. One
       of f16, q8_0, q4_0; NULL: the default, f16. */
    const char *kv_type;
    /* Maximum number of unfinished jobs of all clients. Range 1..1024. Default 256. */
    uint64_t max_jobs;
    /* Maximum number of unfinished jobs of one client. Range 1..1024. Default 64. */
    uint64_t max_client_jobs;
    /* Maximum text kept for one job whose client does not read; with more, the job fails. Range 0..49152 bytes.
       Default 49152. */
    uint64_t held_bytes;
    /* An engine without work that does not answer for this long is replaced. Range 0..1000000 s. Default 5. */
    double hang_idle_s;
    /* An engine with work that does not answer for this long is replaced. Range 0..1000000 s. Default 60. */
    double hang_busy_s;
    /* An engine that loads and does not answer for this long is replaced. Range 0..1000000 s. Default 600. */
    double hang_load_s;
    /* An engine in which no thread answers for this long counts as stopped and is replaced. Range 0..1000000 s.
       Default 5. */
    double hang_still_s;
    /* Number of engine deaths within `restart_window_s` that are followed by a restart; after one more, the engine
       is off for `off_pause_s`. Deaths while a job runs do not count, and each new token starts the count again.
       Range 0..1000. Default 3. */
    uint64_t restart_limit;
    /* Time span in which `restart_limit` counts deaths. Range 0..1000000 s. Default 300. */
    double restart_window_s;
    /* How long an engine that keeps dying stays off before the next try. Each pause is twice as long as the last.
       Range 0.05..1000000 s. Default 1. */
    double off_pause_s;
    /* Maximum length of such a pause. Range 0.05..1000000 s. Default 60. */
    double off_pause_max_s;
    /* Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of texts that
       several jobs begin with. The least recently used are dropped; 0: none are kept. Default 536870912. */
    uint64_t kv_cache_bytes;
    /* `on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later loads
       only. One of off, on; NULL: the default, off. */
    const char *loading;
    /* Number of strings in `adapters`, at most 16. */
    uint64_t n_adapters;
    /* LoRA adapters that jobs may use, each as `NAME=PATH` of a GGUF file. Their weights are in VRAM at every
       budget. Each has 1..4161 bytes and a NUL at the end. */
    const char *const *adapters;
    /* Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one; empty:
       nowhere. The HTTP server is a process of its own that ends with the sidecar. Refused with `bad_argument` if
       the packages of `frameshard[http]` are not installed, or if the address cannot be listened on. At most 64
       bytes; NULL (default): not given. */
    const char *http;
    /* Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new one. At most
       256 bytes; NULL (default): not given. */
    const char *http_key;
    /* Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a process
       for it. That process encodes texts on the CPU at idle priority and uses no VRAM. At most 4096 bytes; NULL
       (default): not given. */
    const char *embedder;
    /* Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty: none. Jobs
       go there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet their
       deadline. Needs `frameshard[fallback]`. At most 2048 bytes; NULL (default): not given. */
    const char *fallback;
    /* Name of the model that the server is asked for. At most 256 bytes; NULL (default): not given. */
    const char *fallback_model;
    /* Path of a file with the server's key, which only this user may read; empty: none. At most 4096 bytes; NULL
       (default): not given. */
    const char *fallback_key_file;
    /* Name of the environment variable with the server's key; empty: none. At most 256 bytes; NULL (default): not
       given. */
    const char *fallback_key_env;
    /* Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where prompts and
       the key can be read on the way. One of loopback, anywhere; NULL: the default, loopback. */
    const char *fallback_http;
    /* Limit for all host memory that the sidecar's processes use, with the model's file in the page cache; 0: no
       limit. Only on Linux; elsewhere it is refused with `unsupported`. Default 0. */
    uint64_t host_budget_bytes;
    /* end of fs_launch_options */
} fs_launch_options;

/* Sets struct_size and every default. Pass sizeof(fs_launch_options) as `struct_size`. [any thread] */
FS_API void fs_launch_options_init(fs_launch_options *options, uint32_t struct_size);

/* Starts a sidecar and a session with it. Returns at once. FS_EVENT_READY follows when the model is loaded. If the
 * launch fails, FS_EVENT_CLOSED follows with a status such as FS_MODEL_NOT_FOUND, FS_BAD_MODEL, FS_UNKNOWN_DEVICE or
 * FS_BUDGET_BELOW_FLOOR. If the process ended without an error report, for example because frameshard is not installed,
 * the status is FS_ENGINE_DIED, and the event's text has the program, its exit status and its last output. Jobs and
 * requests made before FS_EVENT_READY wait for it. The sidecar ends when the client is closed, or when this process
 * ends in any way.
 * Returns FS_BAD_ARGUMENT if an option is invalid, FS_INTERNAL if the process cannot be started or log_file cannot be
 * opened. On success the caller owns *client and must close it with fs_close; on failure *client is NULL.
 * [any thread] */
FS_API fs_status fs_launch(const fs_launch_options *options, fs_client **client);

/* Starts a session with a running sidecar. `connect_file` is the path of the sidecar's connect file (UTF-8, NUL at the
 * end). `client_name` is for the sidecar's log and may be NULL. Returns at once. FS_EVENT_READY follows, or
 * FS_EVENT_CLOSED with FS_CONNECTION_LOST if no sidecar answers, or with FS_VERSION_MISMATCH.
 * Returns FS_CONNECTION_LOST if the file does not exist, FS_BAD_ARGUMENT if it is not a connect file. On success the
 * caller owns *client and must close it with fs_close; on failure *client is NULL. [any thread] */
FS_API fs_status fs_connect(const char *connect_file, const char *client_name, fs_client **client);

/* Ends the session: its jobs are cancelled, and a sidecar started by fs_launch ends. Frees the client and all texts
 * that its events point to. Waits at most `timeout_s` for a launched sidecar to end, then kills it; 0 kills it at once.
 * `client` may be NULL. [client] */
FS_API void fs_close(fs_client *client, double timeout_s);

/* State of a client. */
enum {
    FS_STATE_LOADING = 1, /* until FS_EVENT_READY */
    FS_STATE_READY = 2,
    FS_STATE_CLOSED = 3 /* FS_EVENT_CLOSED was polled or is the next event; every call fails */
};

/* Returns FS_STATE_...; 0 for NULL. [client] */
FS_API int32_t fs_state(const fs_client *client);

/* Returns 1 if the sidecar supports `feature`, a name from PROTOCOL.md ("Features"). Returns 0 if it does not, before
 * FS_EVENT_READY, and for NULL. Call it before you use something that older sidecars lack. [client] */
FS_API int32_t fs_has_feature(const fs_client *client, const char *feature);

/* The loaded model. Texts are valid until fs_close. */
typedef struct fs_model {
    uint32_t struct_size; /* sizeof(fs_model), set by the caller */
    uint32_t n_ctx;       /* context length of one conversation, in tokens */
    uint32_t n_parallel;  /* jobs that run at once */
    uint32_t n_vocab;     /* tokens in the vocabulary */
    uint32_t n_layer;     /* layers */
    int32_t chat;         /* 1: the model has a chat template */
    uint64_t floor_bytes; /* the smallest VRAM budget that the model can run in */
    uint64_t full_bytes;  /* with this VRAM budget all weights are resident */
    const char *name;
    const char *arch;
    const char *device;
    const char *plan_json;    /* JSON object: placements and predicted times at the budget of the launch */
    uint64_t pid;             /* process id of the sidecar */
    const char *connect_file; /* the path given to fs_connect or fs_launch_options.connect_file; "" if neither */
    const char *vision;       /* name of the vision tower; "" if the model has none */
    const char *fingerprint;  /* SHA-256 that tells model files apart, in hex; "": not known */
    const char *template_fingerprint; /* SHA-256 of the chat template, in hex; "": none, or not known */
    const char *http_url;             /* base URL of OpenAI's HTTP interface; "" unless fs_launch_options.http is set */
    const char *http_key;             /* key for HTTP requests (`Authorization: Bearer`); keep it secret */
    const char *embedder;             /* name of the sentence encoder's file; "" if there is none */
    uint64_t thinks;                  /* 1: it can think before it answers: fs_job_options.thinking */
    const char *passed_over; /* why better devices were not taken, on a line each; "": the best was, or a named one */
    uint64_t sees;           /* 1: jobs may have images */
    uint64_t hears;          /* 1: jobs may have sounds, in the place of images */
} fs_model;

/* Fills *model. Returns FS_CONNECTION_LOST before FS_EVENT_READY. [client] */
FS_API fs_status fs_get_model(const fs_client *client, fs_model *model);

/* ---- jobs ------------------------------------------------------------------------------------------------------ */

/* Makes a token, or each token of a text, more or less likely. */
typedef struct fs_logit_bias {
    const char
        *text;     /* at most 256 bytes, with a NUL at the end; NULL: `token` counts. Most words have one token with a
                         space before it and another one without it */
    int64_t token; /* id of a token */
    double bias;   /* added to the logits, -100..100. -100 in effect bans a token, 100 in effect forces it */
} fs_logit_bias;

/* How tokens are chosen. In mode stream_only the same values, prompt and seed give the same text. In mode planned the
 * plan, speculative decoding and a restart of the engine may change the text where two tokens are almost equally
 * likely. */
typedef struct fs_sampling {
    /* generated: fs_sampling */
    /* Set by fs_sampling_init. */
    uint32_t struct_size;
    /* Maximum length of the answer in tokens. Range 1..1048576 tokens. Default 256. */
    int32_t max_tokens;
    /* Choose only among this many most likely tokens; 0: off. Range 0..1048576. Default 40. */
    int32_t top_k;
    /* Number of strings in `stop`, at most 16. */
    uint32_t n_stop;
    /* Randomness of the choice; 0: always the most likely token. Range 0..5. Default 0.8. */
    double temperature;
    /* Choose only among the most likely tokens whose probabilities add up to this value; 1: off. Range 0..1.
       Default 0.95. */
    double top_p;
    /* Choose only among tokens with at least this fraction of the highest probability; 0: off. Range 0..1. Default
       0.05. */
    double min_p;
    /* Above 1, tokens that occur among the last 64 become less likely; 1: off. Range 0.5..2. Default 1. */
    double repeat_penalty;
    /* Seed of the random numbers; without it the sidecar chooses one. Range 0..4294967295, or -1: not given.
       Default -1. */
    int64_t seed;
    /* Strings that end the answer; they are not part of it. Each has 1..256 bytes and a NUL at the end. */
    const char *const *stop;
    /* A JSON schema. The answer is JSON that matches it, unless `max_tokens` or `stop` ends the answer early;
       empty: off. At most 65536 bytes; NULL (default): not given. */
    const char *json_schema;
    /* Subtracted from a token's logit for each time that the token occurs among the last 64; 0: off. Range -2..2.
       Default 0. */
    double frequency_penalty;
    /* Subtracted once from a token's logit if the token is among the last 64; 0: off. Range -2..2. Default 0. */
    double presence_penalty;
    /* Locally typical sampling: choose only among the most typical tokens whose probabilities add up to this
       value; 1: off. Range 0..1. Default 1. */
    double typical_p;
    /* XTC sampling: the chance that all tokens above `xtc_threshold`, except the least likely of them, are
       removed; 0: off. Range 0..1. Default 0. */
    double xtc_probability;
    /* XTC sampling removes only tokens with at least this probability. Range 0..0.5. Default 0.1. */
    double xtc_threshold;
    /* Number of strings in `choices`, at most 256. */
    uint64_t n_choices;
    /* The answer is exactly one of these strings. Set at most one of `json_schema`, `choices`, `regex` and `lark`.
       Each has 1..4096 bytes and a NUL at the end. */
    const char *const *choices;
    /* The whole answer matches this regular expression, in the syntax of Rust's regex crate; empty: off. At most
       65536 bytes; NULL (default): not given. */
    const char *regex;
    /* The answer matches this grammar in llguidance's variant of Lark; empty: off. At most 65536 bytes; NULL
       (default): not given. */
    const char *lark;
    /* Number of structs in `logit_bias`, at most 256. */
    uint64_t n_logit_bias;
    /* Tokens that are more or less likely than the model finds them. Several biases of one token add up. An answer
       with a form still has it. */
    const fs_logit_bias *logit_bias;
    /* DRY sampling: a token that would repeat a sequence of n tokens, n at least `dry_allowed_length`, loses
       `dry_multiplier` * `dry_base` ^ (n - `dry_allowed_length`) of its logit; 0: off. Range 0..100. Default 0. */
    double dry_multiplier;
    /* DRY sampling: growth of the penalty with each token. Range 1..10. Default 1.75. */
    double dry_base;
    /* DRY sampling: shortest repeated sequence whose next token is penalised. Range 1..1024 tokens. Default 2. */
    uint64_t dry_allowed_length;
    /* DRY sampling: how many of the last tokens are searched for repeats; 0: off, -1: the whole context. Range
       -1..1048576 tokens. Default -1. */
    int64_t dry_penalty_last_n;
    /* Number of strings in `dry_sequence_breakers`, at most 16. */
    uint64_t n_dry_sequence_breakers;
    /* DRY sampling: no sequence goes beyond one of these strings; empty: line break, colon, quotation mark and
       asterisk. Each has 1..40 bytes and a NUL at the end. */
    const char *const *dry_sequence_breakers;
    /* end of fs_sampling */
} fs_sampling;

/* Sets struct_size and every default. Pass sizeof(fs_sampling) as `struct_size`. [any thread] */
FS_API void fs_sampling_init(fs_sampling *sampling, uint32_t struct_size);

/* Format of an image. */
enum {
    /* generated: ImageFormat */
    FS_IMAGE_ENCODED = 1, /* a PNG or JPEG file, or a sound: a WAV or MP3 file */
    FS_IMAGE_RGB = 2,     /* rows of pixels from top to bottom, 8 bits a channel */
    FS_IMAGE_RGBA = 3,    /* the same with an alpha channel, which is ignored */
    /* end of ImageFormat */
};

/* An image in the caller's memory. It is copied before the call returns. Set every member. */
typedef struct fs_image {
    uint32_t format;  /* FS_IMAGE_... */
    uint32_t width;   /* pixels; 0 if encoded */
    uint32_t height;  /* pixels; 0 if encoded. width * height is at most 16777216 */
    uint32_t stride;  /* bytes from the start of one row to the start of the next; 0: no gap between rows */
    const void *data; /* the first byte */
    uint64_t size;    /* bytes at `data`, at most 67108864 */
} fs_image;

/* A LoRA adapter of a job. Set both members. */
typedef struct fs_adapter {
    const char *name; /* of an adapter that is loaded */
    double scale;     /* how strongly it changes the model, -4..4; 1: as it was trained, 0: not at all */
} fs_adapter;

/* A function of the program that the model may call. Texts end with a NUL. */
typedef struct fs_tool {
    const char *name;        /* 1 to 64 letters, digits, '_' and '-'; not "auto", "required" or "none" */
    const char *description; /* what it does and when to use it, for the model; NULL: none */
    const char *schema;      /* JSON schema of the arguments, which are an object; NULL: it has no arguments */
} fs_tool;

/* A call of a tool, in an earlier answer. Texts end with a NUL. */
typedef struct fs_tool_call {
    const char *call_id;   /* 1 to 64 bytes; different in each call of a chat */
    const char *name;      /* name of the tool */
    const char *arguments; /* JSON, an object */
} fs_tool_call;

/* The result of a call. */
typedef struct fs_tool_result {
    const char *call_id;    /* event.call_id of the call */
    const char *content;    /* the result, for the model; at most 65536 bytes */
    int32_t content_length; /* bytes, or FS_NUL_TERMINATED */
    int32_t reserved;       /* 0 */
} fs_tool_result;

/* Options of a job. */
typedef struct fs_job_options {
    uint32_t struct_size;        /* set by fs_job_options_init */
    uint32_t window;             /* maximum number of events that are sent but not polled yet. 1..256, default 32 */
    const char *conversation;    /* name of the conversation, at most 512 bytes; NULL (default): none */
    const char *system;          /* fs_ask only: sets the conversation's system text; NULL (default): unchanged */
    const fs_sampling *sampling; /* NULL (default): all defaults */
    uint64_t timeline;           /* a number that each event of the job repeats. A game that increases it when a save is
                                    loaded can discard events from before the load. Default 0 */
    const fs_image *images;      /* placed before the question, the last message or the prompt. The model needs a
                                    vision tower (fs_model.vision). NULL (default): none */
    uint32_t n_images;           /* number of `images`, at most 8 */
    uint32_t priority;           /* 0: background, 1: normal (default), 2: urgent. A job pauses a running job of lower
                                    priority if n_parallel jobs run; the paused job gets FS_EVENT_PAUSED, and
                                    FS_EVENT_RESUMED when it continues */
    uint64_t sentences;          /* 1: sentence_end of FS_EVENT_TEXT says where sentences end, for text to
                                    speech. Default 0 */
    uint64_t warm_up;            /* 1: the prompt is only read, so that later jobs whose prompt begins with it need not
                                    read it. All other jobs go first. There is no text. Default 0 */
    const fs_adapter *adapters;  /* LoRA adapters, for the whole job. Jobs with equal adapters are computed together,
                                    others in turns. NULL (default): none */
    uint64_t n_adapters;         /* number of `adapters`, at most 2 */
    uint64_t deadline_ms;        /* milliseconds from now to the job's first token, at most 3600000; 0 (default): no
                                    deadline. Of jobs of equal priority the one with the earliest deadline goes first. A
                                    job without a token by then fails with FS_DEADLINE_MISSED */
    const char *thinking;     /* "off" (NULL, default): the model answers at once. "hidden": it thinks before, and the
                                    thought is not sent. "shown": the thought comes in FS_EVENT_THOUGHT. Fails with
                                    FS_UNSUPPORTED if the model does not think (fs_model.thinks) */
    uint64_t thinking_tokens; /* maximum length of the thought, at most 1048576; then it is ended, and the answer
                                    begins. 0 (default): no limit but max_tokens, which counts thought and answer */
    const char *template_keywords; /* a JSON object with further variables for the model's chat template, at most 8192
                                      bytes; NULL (default): none */
    uint64_t local_only;           /* 1: the job never goes to the server of the launch option `fallback`. Default 0 */
    const fs_tool *tools;          /* that the model may call: FS_EVENT_TOOL_CALL; not for fs_complete. NULL (default):
                                    none */
    uint64_t n_tools;              /* number of `tools`, at most 64 */
    const char *tool_choice; /* "auto": the answer is text, or ends with calls. "required": it is calls. "none": it
                                    is text. The name of a tool: it is calls of this tool. NULL (default): auto */
} fs_job_options;

/* Sets struct_size and every default. Pass sizeof(fs_job_options) as `struct_size`. [any thread] */
FS_API void fs_job_options_init(fs_job_options *options, uint32_t struct_size);

/* One message of a chat. */
typedef struct fs_message {
    const char *role;       /* "system", "user" or "assistant" */
    const char *content;    /* at most 65536 bytes */
    int32_t content_length; /* bytes, or FS_NUL_TERMINATED */
    int32_t reserved;       /* 0 */
} fs_message;

/* One message of a chat with tools. */
typedef struct fs_chat_message {
    const char *role;               /* "system", "user", "assistant", or "tool" for the result of a call */
    const char *content;            /* at most 65536 bytes */
    int32_t content_length;         /* bytes, or FS_NUL_TERMINATED */
    uint32_t n_tool_calls;          /* number of `tool_calls`, at most 16 */
    const fs_tool_call *tool_calls; /* of an "assistant" message: the calls behind its text; NULL: none */
    const char *tool_call_id;       /* of a "tool" message: the call_id of its call. Of others NULL */
} fs_chat_message;

/* Starts a job that answers `text`, which has `text_length` bytes. With options->conversation, the prompt also contains
 * the earlier questions of the conversation and the parts of their answers that were polled. Questions of one
 * conversation are answered one after the other. When the context is full, its oldest questions and answers are
 * dropped; event.n_dropped tells how many. A question that gets no answer drops none of them. Sets *job to the number of
 * the job. `options` and `job` may be NULL.
 * Events of the job: FS_EVENT_STARTED, then FS_EVENT_TEXT any number of times, then exactly one of FS_EVENT_DONE,
 * FS_EVENT_FAILED and FS_EVENT_CANCELLED. FS_EVENT_THOUGHT, FS_EVENT_TOOL_CALL, FS_EVENT_PAUSED and FS_EVENT_RESUMED
 * may come in between. A job that ends early may have no FS_EVENT_STARTED.
 * Returns FS_BAD_ARGUMENT if an argument is invalid. [client] */
FS_API fs_status fs_ask(fs_client *client, const char *text, int32_t text_length, const fs_job_options *options,
                        uint64_t *job);

/* Has the model go on after an answer of fs_ask that ended with calls of tools: `results` has one for each call.
 * options->conversation is needed, and options->tools again if the model may call further ones. A question instead of
 * results is possible, too: then the calls are forgotten.
 * Returns FS_BAD_ARGUMENT if a result is missing, if there is no such call, or if an answer of the conversation is
 * open. [client] */
FS_API fs_status fs_tool_results(fs_client *client, const fs_tool_result *results, uint32_t n_results,
                                 const fs_job_options *options, uint64_t *job);

/* Like fs_ask, for callers that keep the history themselves: `messages` is the whole prompt. options->conversation only
 * names the KV cache to keep, so that a later prompt that begins with the same messages is computed faster. [client] */
FS_API fs_status fs_chat(fs_client *client, const fs_message *messages, uint32_t n_messages,
                         const fs_job_options *options, uint64_t *job);

/* Like fs_chat, for messages with calls of tools and their results. options->tools has the tools that the model may call
 * now. The text and the calls of an answer are the next message. [client] */
FS_API fs_status fs_chat_with_tools(fs_client *client, const fs_chat_message *messages, uint32_t n_messages,
                                    const fs_job_options *options, uint64_t *job);

/* Like fs_ask, but the model continues `prompt`, which has `prompt_length` bytes, without a chat template. [client] */
FS_API fs_status fs_complete(fs_client *client, const char *prompt, int32_t prompt_length,
                             const fs_job_options *options, uint64_t *job);

/* Ends a job early. FS_EVENT_CANCELLED follows, unless the job has ended otherwise before. Returns FS_UNKNOWN_JOB if
 * the job's last event was polled already, or if there never was such a job. [client] */
FS_API fs_status fs_cancel(fs_client *client, uint64_t job);

/* Changes the priority of a job (0..2, see fs_job_options), whether it waits or runs. Takes effect at once: it may pause
 * another job, or this one. Returns FS_UNKNOWN_JOB as fs_cancel does. [client] */
FS_API fs_status fs_set_priority(fs_client *client, uint64_t job, uint32_t priority);

/* ---- conversations --------------------------------------------------------------------------------------------- */

/* The history of a conversation of fs_ask is its system text and its questions and answers. An answer that is open, or
 * was ended early, is in it as far as it was polled; a question without any text of an answer is not. So are calls of
 * tools and their results. */

/* Sets *messages to an array of *n_messages, oldest first: the history of a conversation, without calls. Results are
 * messages with the role "tool". The array is valid until the next fs_history, fs_history_with_tools or fs_close of this
 * client. Also works after FS_EVENT_CLOSED. [client] */
FS_API fs_status fs_history(fs_client *client, const char *conversation, const fs_message **messages,
                            uint32_t *n_messages);

/* Likewise with calls, as fs_chat_with_tools takes them. [client] */
FS_API fs_status fs_history_with_tools(fs_client *client, const char *conversation, const fs_chat_message **messages,
                                       uint32_t *n_messages);

/* Clears the history of a conversation, once the questions asked before this call are answered. The system text
 * stays. [client] */
FS_API fs_status fs_forget(fs_client *client, const char *conversation);

/* Sets *data and *size to the history of a conversation as bytes, for fs_load and for the other bindings. These are
 * kilobytes, 1 MiB at most; the oldest exchanges of a longer history are left out. The bytes are valid until the next
 * fs_save or fs_close of this client. Also works after FS_EVENT_CLOSED.
 * Returns FS_CONNECTION_LOST before FS_EVENT_READY. [client] */
FS_API fs_status fs_save(fs_client *client, const char *conversation, const void **data, uint64_t *size);

/* What fs_load has found. */
typedef struct fs_load_result {
    uint32_t struct_size;  /* sizeof(fs_load_result), set by the caller */
    int32_t same_model;    /* 1: the save was made with the loaded model. Another model gives other answers */
    int32_t same_template; /* 1: it was made with the same chat template */
    int32_t reserved;      /* 0 */
} fs_load_result;

/* Replaces a conversation by the `size` bytes of a save, once the questions asked before this call are answered. The
 * next question computes its prompt again. The save may be from another sidecar, model, budget or binding. Fills
 * *result; `result` may be NULL.
 * Returns FS_BAD_SAVE if the bytes are damaged, too large, of a newer format, or no save; FS_CONNECTION_LOST before
 * FS_EVENT_READY. [client] */
FS_API fs_status fs_load(fs_client *client, const void *data, uint64_t size, const char *conversation,
                         fs_load_result *result);

/* Has the sidecar write the KV cache of a conversation to the file at `path` (UTF-8, NUL at the end), so that after
 * fs_load and fs_load_kv its next question need not read the whole text again. The file has kilobytes for each token;
 * only this user can read it. It replaces an earlier file when it is whole. FS_EVENT_KV or FS_EVENT_REFUSED follows.
 * [client] */
FS_API fs_status fs_save_kv(fs_client *client, const char *conversation, const char *path, uint64_t *request);

/* Has the sidecar read a file of fs_save_kv. FS_EVENT_KV or FS_EVENT_REFUSED follows; ask the next question after that.
 * n_tokens of the event is 0 if the file is damaged, or of another model, device, mode, kv_type or version. Then the text
 * is read anew. [client] */
FS_API fs_status fs_load_kv(fs_client *client, const char *path, const char *conversation, uint64_t *request);

/* ---- VRAM and figures ------------------------------------------------------------------------------------------ */

/* State of a lease. */
enum {
    /* generated: LeaseState */
    FS_LEASE_ACTIVE = 1,
    FS_LEASE_PARKED = 2,     /* only the driver's context is in VRAM; the KV cache is in host memory */
    FS_LEASE_HIBERNATED = 3, /* the engine process has ended and no VRAM is used. Conversations are kept */
    /* end of LeaseState */
};

/* A lease that the host proposes. */
typedef struct fs_lease {
    /* generated: fs_lease */
    /* Set by fs_lease_init. */
    uint32_t struct_size;
    /* `parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no VRAM is
       used. FS_LEASE_... Default FS_LEASE_ACTIVE. */
    int32_t state;
    /* Limit for all VRAM that the sidecar uses; 0: no limit. If `state` is not `active`: the budget to use once it
       is active again. */
    uint64_t vram_budget_bytes;
    /* The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does not.
       Default 0. */
    uint64_t floor_bytes;
    /* Version of the lease. It is refused with `stale_lease` unless it is higher than the version in force; 0:
       never refused for its version. Default 0. */
    uint64_t version;
    /* Time that the sidecar has to release the VRAM above the budget. Range 0.001..60 s. Default 5. */
    double timeout_s;
    /* Text for the sidecar's log. At most 64 bytes; NULL (default): not given. */
    const char *reason;
    /* Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the limit in
       force stays. Range 0..9007199254740991, or -1: not given. Default -1. */
    int64_t host_budget_bytes;
    /* end of fs_lease */
} fs_lease;

/* Sets struct_size and every default. Pass sizeof(fs_lease) as `struct_size`. [any thread] */
FS_API void fs_lease_init(fs_lease *lease, uint32_t struct_size);

/* Proposes a lease. Jobs continue, at the rate that the lease allows. Three events follow: FS_EVENT_LEASE with the
 * decision, FS_EVENT_BUDGET_RELEASED when the VRAM is released, and FS_EVENT_BUDGET_OBSERVED with the driver's count.
 * Instead of these, or after FS_EVENT_LEASE, FS_EVENT_REFUSED may follow. Its status is FS_BUDGET_BELOW_FLOOR (nothing
 * changes; event.floor_bytes is the floor), FS_STALE_LEASE (nothing changes), FS_ENGINE_DIED, or FS_DEADLINE_MISSED
 * (the new lease stays in force). Returns FS_BAD_ARGUMENT if a value is out of range. [client] */
FS_API fs_status fs_set_lease(fs_client *client, const fs_lease *lease, uint64_t *request);

/* fs_set_lease with this budget and deadline, and defaults for the rest. [client] */
FS_API fs_status fs_set_budget(fs_client *client, uint64_t vram_budget_bytes, double timeout_s, uint64_t *request);

/* Asks for the lease in force, the floor and the VRAM in use. FS_EVENT_BUDGET follows. [client] */
FS_API fs_status fs_get_budget(fs_client *client, uint64_t *request);

/* Loads the LoRA adapter (GGUF) at `path`, which jobs may then use by `name`. It stays loaded if the engine restarts.
 * FS_EVENT_ADAPTERS or FS_EVENT_REFUSED follows; if it is refused, nothing has changed. A relative path is taken from the
 * working directory of the host. [client] */
FS_API fs_status fs_load_adapter(fs_client *client, const char *name, const char *path, uint64_t *request);

/* Unloads a LoRA adapter and frees its VRAM. Refused while a job that has not ended uses it. FS_EVENT_ADAPTERS or
 * FS_EVENT_REFUSED follows. [client] */
FS_API fs_status fs_unload_adapter(fs_client *client, const char *name, uint64_t *request);

/* Asks for the current figures of the sidecar. FS_EVENT_STATS follows. [client] */
FS_API fs_status fs_get_stats(fs_client *client, uint64_t *request);

/* Asks how much VRAM the device has and the model needs. FS_EVENT_CAPS follows. [client] */
FS_API fs_status fs_get_caps(fs_client *client, uint64_t *request);

/* Asks how fast the model would be at a VRAM budget, with a prompt of `prompt_tokens` (1..1048576). Changes nothing.
 * FS_EVENT_PLAN follows. [client] */
FS_API fs_status fs_get_plan(fs_client *client, uint64_t vram_budget_bytes, uint32_t prompt_tokens, uint64_t *request);

/* Asks how many tokens the prompt of fs_complete has, without a job. FS_EVENT_TOKEN_COUNT follows. [client] */
FS_API fs_status fs_count_tokens(fs_client *client, const char *prompt, int32_t prompt_length, uint64_t *request);

/* Likewise for the messages of fs_chat, as the model's chat template renders them. [client] */
FS_API fs_status fs_count_chat_tokens(fs_client *client, const fs_message *messages, uint32_t n_messages,
                                      uint64_t *request);

/* Likewise for the messages of fs_chat_with_tools and the tools of its options, which are a part of the prompt. [client] */
FS_API fs_status fs_count_chat_tokens_with_tools(fs_client *client, const fs_chat_message *messages,
                                                 uint32_t n_messages, const fs_tool *tools, uint32_t n_tools,
                                                 uint64_t *request);

/* Asks the sentence encoder (launch option `embedder`) for the embeddings of 1 to 64 texts of 1 to 65536 bytes each.
 * Texts of similar meaning have rows with a large dot product. `lengths` has the length of each text in bytes; NULL:
 * each ends with a NUL. FS_EVENT_EMBEDDINGS or FS_EVENT_REFUSED follows. [client] */
FS_API fs_status fs_embed(fs_client *client, const char *const *texts, const int32_t *lengths, uint32_t n_texts,
                          uint64_t *request);

/* Ends the sidecar for all its clients, even if another program has launched it. FS_EVENT_CLOSED follows. [client] */
FS_API fs_status fs_shutdown(fs_client *client);

/* ---- VRAM shared with a streaming pool --------------------------------------------------------------------------- */

/* Decides how the VRAM that the system grants is divided between a game's pool of streamed textures and the sidecar
 * (docs/lease.md, "The deal with a texture pool"). It does no I/O: in each frame the host gives fs_arbiter_decide the
 * figures, holds its pool to the limit, and proposes the lease that comes back, if one does. It is independent of clients.
 * [arbiter] means: any thread may call the function, but only one at a time for the same arbiter. Sizes are at most
 * 2^52 bytes. */
typedef struct fs_arbiter fs_arbiter;

/* Makes an arbiter for a sidecar that runs with `budget_bytes`. Its later budgets are multiples of `step_bytes`, which is
 * also the least growth. It grows into room that has been there for `dwell_s` (0..3600). If `may_park` is not 0, it is
 * parked when the pool wants what the floor leaves; else it keeps its floor. On success the caller owns *arbiter and must
 * close it with fs_arbiter_close; on failure *arbiter is NULL. [any thread] */
FS_API fs_status fs_arbiter_open(uint64_t budget_bytes, uint64_t step_bytes, double dwell_s, int32_t may_park,
                                 fs_arbiter **arbiter);

/* Frees the arbiter. `arbiter` may be NULL. [arbiter] */
FS_API void fs_arbiter_close(fs_arbiter *arbiter);

/* What pool and sidecar need. */
typedef struct fs_vram_needs {
    uint32_t struct_size;          /* sizeof(fs_vram_needs), set by the caller */
    uint32_t reserved;             /* 0 */
    uint64_t grant_bytes;          /* VRAM that both may hold together */
    uint64_t pool_held_bytes;      /* what the pool holds; what it has evicted counts until the driver has freed it */
    uint64_t pool_now_bytes;       /* wanted for what is in view */
    uint64_t pool_soon_bytes;      /* wanted for what comes into view within the next frames */
    uint64_t sidecar_floor_bytes;  /* the smallest budget of the sidecar */
    uint64_t sidecar_useful_bytes; /* the smallest budget at which fs_get_plan predicts nearly the best rate; after a
                                      notice `gives_back`, the budget that it names, if that is less */
} fs_vram_needs;

/* What holds from now on. */
typedef struct fs_vram_decision {
    uint32_t struct_size;       /* sizeof(fs_vram_decision), set by the caller */
    int32_t state;              /* 0: propose nothing. Else propose a lease with this state, FS_LEASE_... */
    uint64_t pool_limit_bytes;  /* the pool may hold so much; if it holds more, it must evict */
    uint64_t vram_budget_bytes; /* the budget to propose; 0 with FS_LEASE_PARKED */
} fs_vram_decision;

/* Divides the grant anew. Call it in each frame; `now_s` is in seconds by any clock that does not go back. [arbiter] */
FS_API fs_status fs_arbiter_decide(fs_arbiter *arbiter, double now_s, const fs_vram_needs *needs,
                                   fs_vram_decision *decision);

/* Call it after FS_EVENT_BUDGET_RELEASED for the proposed lease, with the event's used_bytes; after a retriable error
 * (FS_DEADLINE_MISSED, FS_ENGINE_DIED) with those of fs_get_budget, if they say that the lease is in force. Returns
 * FS_BAD_ARGUMENT if no lease is proposed. [arbiter] */
FS_API fs_status fs_arbiter_released(fs_arbiter *arbiter, uint64_t used_bytes);

/* Call it if the proposed lease was refused and is not in force. No other one comes for the dwell time. Returns
 * FS_BAD_ARGUMENT if no lease is proposed, or if now_s is no number from -1e12 to 1e12. [arbiter] */
FS_API fs_status fs_arbiter_refused(fs_arbiter *arbiter, double now_s);

/* Tells what the sidecar holds, now and then: more than its budget counts too. [arbiter] */
FS_API fs_status fs_arbiter_holds(fs_arbiter *arbiter, uint64_t used_bytes);

/* ---- sharing the GPU with frames ------------------------------------------------------------------------------- */

/* How the GPU is shared between the host's frames and the sidecar. */
enum {
    /* generated: SchedulingMode */
    FS_PRIORITIZE_GRAPHICS = 1, /* the sidecar uses only the GPU time that frames leave free, and a little more if its
                                   work does not fit into that */
    FS_BALANCE = 2,             /* it uses more, as long as frames stay within their target time. The default */
    FS_PRIORITIZE_COMPUTE = 3,  /* it ignores frames */
    /* end of SchedulingMode */
};

/* Sets how the GPU is shared with the frames in the frame block. `scheduling_mode` is one of the above.
 * `target_tokens_per_second` limits all jobs together, 0.1 to 10000; 0: no limit. The newest call of any client counts.
 * If the sidecar refuses, FS_EVENT_REFUSED follows; otherwise no event does. [client] */
FS_API fs_status fs_set_pacing(fs_client *client, int32_t scheduling_mode, double target_tokens_per_second,
                               uint64_t *request);

/* Asks for the path of the sidecar's frame block, for fs_frame_block_open. FS_EVENT_FRAME_BLOCK follows. [client] */
FS_API fs_status fs_get_frame_block(fs_client *client, uint64_t *request);

/* The frame block: a page of shared memory in which the host tells the sidecar when each frame begins. It is
 * independent of clients: the render thread may write it while another thread polls. [block] means: any thread may call
 * the function, but only one at a time for the same block. Apart from fs_frame_block_open and fs_frame_block_close,
 * these functions never wait, allocate or make a system call. Only one process may write a sidecar's frame block. */
typedef struct fs_frame_block fs_frame_block;

/* Maps the frame block at `path` (UTF-8, NUL at the end). `target_frame_s` is the time that a frame should take, such
 * as 1.0 / 60. Returns FS_BAD_ARGUMENT if the file is not a frame block of a known version. On success the caller owns
 * *block and must close it with fs_frame_block_close; on failure *block is NULL. [any thread] */
FS_API fs_status fs_frame_block_open(const char *path, double target_frame_s, fs_frame_block **block);

/* Unmaps and frees the block. The sidecar ignores its last frame when four frames and 0.1 s have passed. `block` may be
 * NULL. [block] */
FS_API void fs_frame_block_close(fs_frame_block *block);

/* Call it at the start of each frame. The time since the previous call is the time of the previous frame. [block] */
FS_API fs_status fs_frame_begin(fs_frame_block *block);

/* Optional: how long the frame kept the GPU busy, in seconds, if the host measures it. The sidecar expects the same of
 * the next frames. It sees the value after the next fs_frame_begin. [block] */
FS_API fs_status fs_frame_end(fs_frame_block *block, double gpu_busy_s);

/* Lets the sidecar use the whole GPU until the next fs_frame_begin. For menus, loading screens and a game in the
 * background. [block] */
FS_API fs_status fs_frame_idle(fs_frame_block *block);

/* Like fs_set_budget, but faster: the sidecar sees the budget between two steps of the computation that runs. Sets
 * *generation to the number by which fs_frame_answer refers to this budget; `generation` may be NULL. [block] */
FS_API fs_status fs_frame_set_budget(fs_frame_block *block, uint64_t vram_budget_bytes, uint64_t *generation);

/* The sidecar's answers to fs_frame_set_budget. */
typedef struct fs_frame_answer {
    uint32_t struct_size;        /* sizeof(fs_frame_answer), set by the caller */
    uint32_t reserved;           /* 0 */
    uint64_t applied_generation; /* the newest budget that is in force, with the VRAM above it released */
    uint64_t refused_generation; /* the newest budget that was refused, because it was below the floor */
    uint64_t budget_bytes;       /* VRAM budget in force */
    uint64_t used_bytes;         /* VRAM that the sidecar uses, by its own count */
    uint64_t floor_bytes;        /* the smallest VRAM budget that the model can run in */
} fs_frame_answer;

/* Fills *answer. [block] */
FS_API fs_status fs_frame_get_answer(const fs_frame_block *block, fs_frame_answer *answer);

/* ---- events ---------------------------------------------------------------------------------------------------- */

/* Kinds of events. Each comment lists the members of fs_event that the kind sets, besides `type`. */
enum {
    /* The model is loaded. text: the file's name; floor_bytes, full_bytes; detail: the protocol's ModelInfo. */
    FS_EVENT_READY = 1,
    /* The job has started to run. job, timeline, n_prompt, seed, n_dropped, remote. */
    FS_EVENT_STARTED = 2,
    /* The next part of the answer. job, timeline, text, tokens, sentence_end. The text never ends within a UTF-8
       character. */
    FS_EVENT_TEXT = 3,
    /* The answer is complete. job, timeline, reason, n_prompt, n_generated, n_reused, n_left, n_dropped, n_thought,
       prefill_s, decode_s, remote. */
    FS_EVENT_DONE = 4,
    /* The job has failed; text sent before stays valid. job, timeline, status, text: the reason; detail. Also sent for
       jobs that wait when the launch fails, and for open jobs when the connection to the sidecar is lost. */
    FS_EVENT_FAILED = 5,
    /* The job was cancelled. job, timeline. */
    FS_EVENT_CANCELLED = 6,
    /* The sidecar has released VRAM down to the budget. request, budget_bytes, used_bytes, seconds; host_budget_bytes,
       host_used_bytes. */
    FS_EVENT_BUDGET_RELEASED = 7,
    /* The VRAM that the driver counts after the release. request, observed_bytes, host_observed_bytes, seconds. */
    FS_EVENT_BUDGET_OBSERVED = 8,
    /* Answer to fs_get_budget. request, lease_state, version, budget_bytes, floor_bytes, full_bytes, used_bytes,
       wanted_bytes; host_budget_bytes, host_floor_bytes, host_used_bytes. */
    FS_EVENT_BUDGET = 9,
    /* Answer to fs_get_stats. request, engine_state, restarts; detail: {"broker": BrokerStats, "engine": {...} or
       null}. */
    FS_EVENT_STATS = 10,
    /* The sidecar has refused a request. request, status, text: the reason; detail; floor_bytes or host_floor_bytes if
       the status is FS_BUDGET_BELOW_FLOOR. */
    FS_EVENT_REFUSED = 11,
    /* The engine process has changed its state. engine_state, restarts; status, text and detail if it is off. An engine
       that is off may come back. After a restart, jobs continue on their own. */
    FS_EVENT_ENGINE = 12,
    /* The client is closed. This is its last event; its jobs have ended before. status, text: the reason; detail. */
    FS_EVENT_CLOSED = 13,
    /* The decision about a lease. request, decision, budget_bytes, host_budget_bytes, seconds, version. */
    FS_EVENT_LEASE = 14,
    /* News from the sidecar that answers no request. notice, budget_bytes, host_budget_bytes, seconds, text: a
       sentence. */
    FS_EVENT_NOTICE = 15,
    /* Answer to fs_get_caps. request, text: name of the device; total_bytes, free_bytes, floor_bytes, full_bytes;
       host_total_bytes, host_free_bytes, host_floor_bytes; detail: the protocol's caps_and_requirements. */
    FS_EVENT_CAPS = 16,
    /* Answer to fs_get_plan. request, budget_bytes, fits, ttft_s, tokens_per_second, resident_bytes, streamed_bytes,
       cpu_bytes. */
    FS_EVENT_PLAN = 17,
    /* Answer to fs_get_frame_block. request, text: the path. */
    FS_EVENT_FRAME_BLOCK = 18,
    /* Progress of a job with images or a long prompt, for a progress bar, before its first text. job, timeline, phase,
       done, total. */
    FS_EVENT_PROGRESS = 19,
    /* How far the model is loaded, for a progress bar: before FS_EVENT_READY if the launch option `loading` is "on", and
       when an engine starts again. stage, done, total. */
    FS_EVENT_LOADING = 20,
    /* Answer to fs_load_adapter and fs_unload_adapter: the change is in force. request, floor_bytes, detail:
       {"adapters": [AdapterInfo, ...]}, all that are loaded now. */
    FS_EVENT_ADAPTERS = 21,
    /* Answer to fs_save_kv and fs_load_kv. request, n_tokens, file_bytes, text: why n_tokens is 0. */
    FS_EVENT_KV = 22,
    /* A job of higher priority has taken the job's place. It continues on its own; FS_EVENT_RESUMED follows, unless the
       job ends. job, timeline. */
    FS_EVENT_PAUSED = 23,
    /* A paused job continues. job, timeline. */
    FS_EVENT_RESUMED = 24,
    /* Answer to fs_count_tokens, fs_count_chat_tokens and fs_count_chat_tokens_with_tools. request, n_tokens, n_left. */
    FS_EVENT_TOKEN_COUNT = 25,
    /* Answer to fs_embed. request, n_dim, n_rows, rows, n_tokens. */
    FS_EVENT_EMBEDDINGS = 26,
    /* The next part of what the model thinks before it answers; in no FS_EVENT_TEXT. Only for jobs with `thinking`
       "shown". job, timeline, text, tokens. */
    FS_EVENT_THOUGHT = 27,
    /* The answer calls a tool. job, timeline, call_id, name, text: the arguments, JSON that matches the tool's schema.
       The calls come before FS_EVENT_DONE; then give their results to fs_tool_results. */
    FS_EVENT_TOOL_CALL = 28
};

/* Why an answer is complete. */
enum {
    /* generated: Reason */
    FS_REASON_STOP = 1,       /* the model ended the answer, or a stop string came */
    FS_REASON_LENGTH = 2,     /* max_tokens was reached */
    FS_REASON_TOOL_CALLS = 3, /* the answer ends with calls of tools */
    /* end of Reason */
};
/* State of the engine process. */
enum {
    /* generated: EngineState */
    FS_ENGINE_LOADING = 1,
    FS_ENGINE_READY = 2,
    FS_ENGINE_RESTARTING = 3,
    FS_ENGINE_OFF = 4,        /* it keeps dying; the sidecar tries it again after a pause */
    FS_ENGINE_HIBERNATED = 5, /* it has ended, as the lease asked */
    /* end of EngineState */
};
/* What a job with images or a long prompt does before its first token. */
enum {
    /* generated: Phase */
    FS_PHASE_ENCODE = 1,  /* images are encoded */
    FS_PHASE_PREFILL = 2, /* the prompt is computed */
    /* end of Phase */
};
/* What is done while a model is loaded. */
enum {
    /* generated: LoadingStage */

    FS_LOADING_READ = 1,    /* the model file is read */
    FS_LOADING_PROFILE = 2, /* the machine's profile is read or estimated */
    FS_LOADING_FILL = 3,    /* weights are copied to VRAM */
    /* end of LoadingStage */
};
/* The decision about a lease. */
enum {
    /* generated: Decision */
    FS_DECISION_GRANTED = 1,
    FS_DECISION_PARTIAL = 2, /* only a part of the VRAM can be released by the deadline */
    /* end of Decision */
};

/* Kinds of notices. Ignore a kind that is not listed. */
enum {
    /* generated: NoticeKind */
    FS_NOTICE_WANTS = 1,         /* jobs are open; a budget of budget_bytes would make them faster */
    FS_NOTICE_GIVES_BACK = 2,    /* the sidecar changed its own limit: down while idle, up with a job */
    FS_NOTICE_LATE = 3,          /* a release will miss its deadline; it needs about `seconds` */
    FS_NOTICE_PRESSURE = 4,      /* the device has less free VRAM than the lease grants */
    FS_NOTICE_OTHER_PROCESS = 5, /* another process uses VRAM that the lease grants */
    FS_NOTICE_STATE = 6,         /* the lease has changed its state */
    FS_NOTICE_HTTP = 7,          /* the HTTP server has ended; it is started again in `seconds` */
    FS_NOTICE_HOST_PRESSURE = 8, /* the system is short of host memory, or no longer: see host_budget_bytes */
    /* end of NoticeKind */
};

/* One event. Members that its kind does not set are 0, or "" for texts. */
typedef struct fs_event {
    /* generated: fs_event */
    /* FS_EVENT_... */
    uint32_t type;
    /* FS_OK, or the error. */
    fs_status status;
    /* Number of the job, from fs_ask, fs_chat or fs_complete. 0: the event belongs to no job. */
    uint64_t job;
    /* Number of the request, from the function that made it. 0: the event answers no request. */
    uint64_t request;
    /* The `timeline` of the job's fs_job_options. */
    uint64_t timeline;
    /* UTF-8 with a NUL at the end. Valid until the next fs_poll or fs_close of this client. */
    const char *text;
    /* A JSON object, or empty. Valid as long as `text`. */
    const char *detail;
    /* Length of `text` in bytes, without the NUL. */
    uint32_t text_length;
    /* Length of `detail` in bytes, without the NUL. */
    uint32_t detail_length;
    /* FS_EVENT_TEXT: Number of tokens of this part, including tokens without text of their own. 0 only if a
       sentence or a thought ends inside a token.
       FS_EVENT_THOUGHT: Number of tokens of this part, including tokens without text. */
    uint32_t tokens;
    /* `stop`: the model ended the answer, or a stop string came. `length`: `max_tokens` was reached. `tool_calls`:
       the answer ends with calls of tools. FS_REASON_..., or 0 for a value that this library does not know. */
    uint32_t reason;
    /* FS_EVENT_STARTED: Length of the prompt in tokens; 0: not known, because the job is at a server.
       FS_EVENT_DONE: Length of the prompt in tokens. */
    uint32_t n_prompt;
    /* Length of the answer in tokens, with its thought. */
    uint32_t n_generated;
    /* New state of the engine process. FS_ENGINE_..., or 0 for a value that this library does not know. */
    uint32_t engine_state;
    /* Number of restarts of the engine since the launch. */
    uint32_t restarts;
    /* FS_EVENT_BUDGET_RELEASED: VRAM budget in force; if parked or hibernated, the budget to use once active
       again.
       FS_EVENT_BUDGET: VRAM budget in force; 0: no limit.
       FS_EVENT_LEASE: VRAM budget that will be reached by the deadline.
       FS_EVENT_NOTICE: For `other_process`: VRAM that the other process uses (0: unknown). For `http` and
       `host_pressure`: 0. For other kinds: a VRAM budget.
       FS_EVENT_PLAN: The VRAM budget that was asked about. */
    uint64_t budget_bytes;
    /* VRAM that the sidecar uses, by its own exact count. */
    uint64_t used_bytes;
    /* FS_EVENT_READY, FS_EVENT_BUDGET, FS_EVENT_CAPS: The smallest VRAM budget that the model can run in.
       FS_EVENT_ADAPTERS: The smallest VRAM budget that the model can run in with these adapters. */
    uint64_t floor_bytes;
    /* With this VRAM budget all weights are resident. */
    uint64_t full_bytes;
    /* VRAM of the engine process as the driver counts it; missing if the driver does not report it. -1 if missing. */
    int64_t observed_bytes;
    /* FS_EVENT_BUDGET_RELEASED, FS_EVENT_BUDGET_OBSERVED: Time since the engine was asked.
       FS_EVENT_LEASE: Predicted time until the release is complete; 0: it is immediate, or nothing was measured
       yet.
       FS_EVENT_NOTICE: For `late`: predicted time until the release is complete. For `state`: how long the change
       took. For `http`: seconds until the HTTP server, which has ended, is started again. Else 0. */
    double seconds;
    /* Time from the start of the prefill to the first token. */
    double prefill_s;
    /* Time from the first token to the end of the answer. */
    double decode_s;
    /* `granted`, or `partial`: only a part of the VRAM can be released by the deadline. FS_DECISION_..., or 0 for
       a value that this library does not know. */
    uint32_t decision;
    /* State of the lease. FS_LEASE_..., or 0 for a value that this library does not know. */
    uint32_t lease_state;
    /* What the notice is about. FS_NOTICE_..., or 0 for a value that this library does not know. */
    uint32_t notice;
    /* False if the budget is below the floor; then the predictions are missing and the sizes are 0. */
    int32_t fits;
    /* Version of the lease in force; 0: it has none. */
    uint64_t version;
    /* VRAM that the sidecar would like to have: `full_bytes` while jobs are open and the budget is lower, else
       what it uses. */
    uint64_t wanted_bytes;
    /* VRAM of the device; missing if the system does not report it. -1 if missing. */
    int64_t total_bytes;
    /* Free VRAM of the device when it was last measured; missing if the system does not report it. -1 if missing. */
    int64_t free_bytes;
    /* Predicted time from the request to the first token of the answer. 0 if missing. */
    double ttft_s;
    /* Predicted rate at which one job generates tokens. 0 if missing. */
    double tokens_per_second;
    /* Weights that stay in VRAM. */
    uint64_t resident_bytes;
    /* Weights that are copied to VRAM for each token. */
    uint64_t streamed_bytes;
    /* Weights of the shards that the CPU computes. */
    uint64_t cpu_bytes;
    /* `encode`: images are encoded. `prefill`: the prompt is computed. FS_PHASE_..., or 0 for a value that this
       library does not know. */
    uint32_t phase;
    /* FS_EVENT_PROGRESS: Number of images encoded, or of prompt tokens computed.
       FS_EVENT_LOADING: What is done of `total`. */
    uint32_t done;
    /* FS_EVENT_PROGRESS: Number of images to encode (higher if the model cuts images into tiles), or of prompt
       tokens.
       FS_EVENT_LOADING: MiB of the model file, steps of the profile, or MiB of weights to copy. */
    uint32_t total;
    /* Always 0. */
    uint32_t reserved;
    /* Seed of the random numbers: the requested one, or the one that the sidecar chose. */
    uint64_t seed;
    /* Number of prompt tokens that were already in the KV cache or in the KV store. */
    uint64_t n_reused;
    /* True if the text ends a sentence, which began after the last such delta. Only for jobs with `sentences`. */
    uint64_t sentence_end;
    /* `read`: the model file is read. `profile`: the machine's profile is read or estimated. `fill`: weights are
       copied to VRAM. FS_LOADING_..., or 0 for a value that this library does not know. */
    uint64_t stage;
    /* FS_EVENT_KV: Number of tokens of the KV cache that was written or read; 0: none. Without it the text is read
       anew.
       FS_EVENT_TOKEN_COUNT: Length of the prompt in tokens.
       FS_EVENT_EMBEDDINGS: Number of tokens that the encoder has read for all texts, with the marks around each;
       0: an older sidecar, which does not tell. */
    uint64_t n_tokens;
    /* Size of the file that was written or read; 0: none. */
    uint64_t file_bytes;
    /* FS_EVENT_DONE: Number of tokens that still fit into the context behind prompt and answer.
       FS_EVENT_TOKEN_COUNT: Number of tokens that still fit into the context behind the prompt. */
    uint64_t n_left;
    /* FS_EVENT_STARTED, FS_EVENT_DONE of a job of fs_ask: how many of the conversation's oldest questions, with
       their answers, are not in the prompt because the context is full. */
    uint64_t n_dropped;
    /* Number of dimensions: the length of one row. */
    uint64_t n_dim;
    /* Number of rows in `rows`: one for each text, in the order of fs_embed. */
    uint64_t n_rows;
    /* `n_rows` times `n_dim` floats. The squares of each row add up to 1. Valid as long as `text`. */
    const float *rows;
    /* Number of the tokens in `n_generated` that were thought, sent or not. */
    uint64_t n_thought;
    /* FS_EVENT_STARTED: True if the server of the launch option `fallback` answers, not the engine.
       FS_EVENT_DONE: True if the server of the launch option `fallback` has ended the answer. The numbers of
       tokens are those that it reports; if it reports none, `n_prompt` is 0 and `n_generated` the number of parts
       that it sent. */
    uint64_t remote;
    /* Id of the call, which its result repeats. */
    const char *call_id;
    /* Name of the tool. */
    const char *name;
    /* FS_EVENT_BUDGET_RELEASED, FS_EVENT_BUDGET: Host budget in force; 0: no limit.
       FS_EVENT_LEASE: Host budget that will be reached by the deadline; 0: no limit.
       FS_EVENT_NOTICE: For `host_pressure`: the sidecar's own limit for its host memory while the system is short
       of it; 0: the pressure is over. Else 0. */
    uint64_t host_budget_bytes;
    /* FS_EVENT_BUDGET_RELEASED: Host memory that the sidecar uses, by its own count.
       FS_EVENT_BUDGET: Host memory that the sidecar uses, by its own count; 0: not known. */
    uint64_t host_used_bytes;
    /* Host memory of the sidecar's processes as the system counts it; missing if it was not measured. -1 if
       missing. */
    int64_t host_observed_bytes;
    /* The smallest host budget that the sidecar can run in; 0: not known. */
    uint64_t host_floor_bytes;
    /* Host memory of the machine; missing if the system does not report it. -1 if missing. */
    int64_t host_total_bytes;
    /* Host memory that programs can still take without swapping; missing if the system does not report it. -1 if
       missing. */
    int64_t host_free_bytes;
    /* end of fs_event */
} fs_event;

/* Does all work that is due for the client, and writes at most `capacity` events to `events`, oldest first. Pass
 * sizeof(fs_event) as `event_size`. Texts of earlier events become invalid. Never waits. With nothing to do it
 * allocates nothing and costs about as much as reading the clock. While a program does not poll, the sidecar keeps the
 * events (see "Polling" above).
 * Returns the number of events, 0 to `capacity`, or -FS_BAD_ARGUMENT if an argument is invalid. [client] */
FS_API int32_t fs_poll(fs_client *client, fs_event *events, uint32_t event_size, int32_t capacity);

/* For programs that have nothing else to do. Waits at most `timeout_s` until fs_poll has an event, and does all other
 * work that is due for the client. Uses almost no CPU time. Returns 1 if there is an event, else 0. After
 * FS_EVENT_CLOSED was polled it returns 0 after at most 0.05 s. [client] */
FS_API int32_t fs_wait(fs_client *client, double timeout_s);

#ifdef __cplusplus
}
#endif

#endif
