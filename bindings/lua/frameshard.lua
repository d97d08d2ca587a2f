--- frameshard for LuaJIT: runs a language model next to your game, in a separate process.
--
--     local frameshard = require("frameshard")
--     local sidecar = frameshard.launch({ model = "innkeeper.gguf", vram_budget_mb = 2048 })
--     sidecar:ask("Any rooms left?", { conversation = "mira", response_updated = function(delta) io.write(delta) end })
--
--     function love.update()
--       sidecar:poll() -- never waits; callbacks run in here and nowhere else
--     end
--
-- This module wraps the C library, which it loads with LuaJIT's ffi. It looks for the library in $FRAMESHARD_LIBRARY,
-- then beside this file or, in LÖVE, in the game's folder and beside the game, then under the name "frameshard" in the
-- system's library path.
--
-- A call that fails raises an error object (see `Error`). An error that occurs later is passed to the callbacks and
-- comes as an event. All texts are valid UTF-8, so LÖVE can draw them; a delta never ends within a character. Sizes
-- are in bytes unless a name ends in `_mb` (MiB); times are in seconds. A sidecar ends when it is garbage-collected,
-- and when the process ends.

local ffi = require("ffi")

-- generated: declarations
ffi.cdef([[
typedef int32_t fs_status;
enum { FS_OK = 0, FS_INTERNAL = 1, FS_BAD_ARGUMENT = 10, FS_BAD_MESSAGE = 11, FS_UNKNOWN_JOB = 12,
  FS_CONTEXT_OVERFLOW = 13, FS_UNSUPPORTED = 14, FS_BAD_SAVE = 15, FS_MODEL_NOT_FOUND = 20, FS_BAD_MODEL = 21,
  FS_UNKNOWN_DEVICE = 22, FS_BUDGET_BELOW_FLOOR = 23, FS_VERSION_MISMATCH = 24, FS_OUT_OF_MEMORY = 25,
  FS_STALE_LEASE = 26, FS_ENDPOINT_IN_USE = 30, FS_CONNECTION_LOST = 31, FS_ENGINE_DIED = 32, FS_OVERLOADED = 33,
  FS_DEADLINE_MISSED = 34, FS_CANCELLED = 40, FS_DOWNLOAD_FAILED = 41 };
const char *fs_status_name(fs_status status);
int32_t fs_status_retriable(fs_status status);
const char *fs_last_error(uint32_t *length);
uint32_t fs_abi_version(void);
uint32_t fs_protocol_version(void);
const char *fs_version(void);
typedef struct fs_client fs_client;
typedef struct fs_launch_options {
  uint32_t struct_size;
  const char *model;
  const char *device;
  uint64_t vram_budget_bytes;
  uint32_t n_ctx;
  uint32_t n_parallel;
  uint32_t n_ubatch;
  uint32_t n_threads;
  double silent_s;
  const char *transport;
  const char *endpoint;
  const char *connect_file;
  const char *python;
  const char *log_file;
  const char *client_name;
  const char *extra_json;
  const char *mmproj;
  const char *mode;
  const char *speculate;
  const char *draft_model;
  const char *kv_type;
  uint64_t max_jobs;
  uint64_t max_client_jobs;
  uint64_t held_bytes;
  double hang_idle_s;
  double hang_busy_s;
  double hang_load_s;
  double hang_still_s;
  uint64_t restart_limit;
  double restart_window_s;
  double off_pause_s;
  double off_pause_max_s;
  uint64_t kv_cache_bytes;
  const char *loading;
  uint64_t n_adapters;
  const char *const *adapters;
  const char *http;
  const char *http_key;
  const char *embedder;
  const char *fallback;
  const char *fallback_model;
  const char *fallback_key_file;
  const char *fallback_key_env;
  const char *fallback_http;
  uint64_t host_budget_bytes;
} fs_launch_options;
void fs_launch_options_init(fs_launch_options *options, uint32_t struct_size);
fs_status fs_launch(const fs_launch_options *options, fs_client **client);
fs_status fs_connect(const char *connect_file, const char *client_name, fs_client **client);
void fs_close(fs_client *client, double timeout_s);
enum { FS_STATE_LOADING = 1, FS_STATE_READY = 2, FS_STATE_CLOSED = 3 };
int32_t fs_state(const fs_client *client);
int32_t fs_has_feature(const fs_client *client, const char *feature);
typedef struct fs_model {
  uint32_t struct_size;
  uint32_t n_ctx;
  uint32_t n_parallel;
  uint32_t n_vocab;
  uint32_t n_layer;
  int32_t chat;
  uint64_t floor_bytes;
  uint64_t full_bytes;
  const char *name;
  const char *arch;
  const char *device;
  const char *plan_json;
  uint64_t pid;
  const char *connect_file;
  const char *vision;
  const char *fingerprint;
  const char *template_fingerprint;
  const char *http_url;
  const char *http_key;
  const char *embedder;
  uint64_t thinks;
  const char *passed_over;
  uint64_t sees;
  uint64_t hears;
} fs_model;
fs_status fs_get_model(const fs_client *client, fs_model *model);
typedef struct fs_logit_bias {
  const char *text;
  int64_t token;
  double bias;
} fs_logit_bias;
typedef struct fs_sampling {
  uint32_t struct_size;
  int32_t max_tokens;
  int32_t top_k;
  uint32_t n_stop;
  double temperature;
  double top_p;
  double min_p;
  double repeat_penalty;
  int64_t seed;
  const char *const *stop;
  const char *json_schema;
  double frequency_penalty;
  double presence_penalty;
  double typical_p;
  double xtc_probability;
  double xtc_threshold;
  uint64_t n_choices;
  const char *const *choices;
  const char *regex;
  const char *lark;
  uint64_t n_logit_bias;
  const fs_logit_bias *logit_bias;
  double dry_multiplier;
  double dry_base;
  uint64_t dry_allowed_length;
  int64_t dry_penalty_last_n;
  uint64_t n_dry_sequence_breakers;
  const char *const *dry_sequence_breakers;
} fs_sampling;
void fs_sampling_init(fs_sampling *sampling, uint32_t struct_size);
enum { FS_IMAGE_ENCODED = 1, FS_IMAGE_RGB = 2, FS_IMAGE_RGBA = 3, };
typedef struct fs_image {
  uint32_t format;
  uint32_t width;
  uint32_t height;
  uint32_t stride;
  const void *data;
  uint64_t size;
} fs_image;
typedef struct fs_adapter {
  const char *name;
  double scale;
} fs_adapter;
typedef struct fs_tool {
  const char *name;
  const char *description;
  const char *schema;
} fs_tool;
typedef struct fs_tool_call {
  const char *call_id;
  const char *name;
  const char *arguments;
} fs_tool_call;
typedef struct fs_tool_result {
  const char *call_id;
  const char *content;
  int32_t content_length;
  int32_t reserved;
} fs_tool_result;
typedef struct fs_job_options {
  uint32_t struct_size;
  uint32_t window;
  const char *conversation;
  const char *system;
  const fs_sampling *sampling;
  uint64_t timeline;
  const fs_image *images;
  uint32_t n_images;
  uint32_t priority;
  uint64_t sentences;
  uint64_t warm_up;
  const fs_adapter *adapters;
  uint64_t n_adapters;
  uint64_t deadline_ms;
  const char *thinking;
  uint64_t thinking_tokens;
  const char *template_keywords;
  uint64_t local_only;
  const fs_tool *tools;
  uint64_t n_tools;
  const char *tool_choice;
} fs_job_options;
void fs_job_options_init(fs_job_options *options, uint32_t struct_size);
typedef struct fs_message {
  const char *role;
  const char *content;
  int32_t content_length;
  int32_t reserved;
} fs_message;
typedef struct fs_chat_message {
  const char *role;
  const char *content;
  int32_t content_length;
  uint32_t n_tool_calls;
  const fs_tool_call *tool_calls;
  const char *tool_call_id;
} fs_chat_message;
fs_status fs_ask(fs_client *client, const char *text, int32_t text_length, const fs_job_options *options,
  uint64_t *job);
fs_status fs_tool_results(fs_client *client, const fs_tool_result *results, uint32_t n_results, const
  fs_job_options *options, uint64_t *job);
fs_status fs_chat(fs_client *client, const fs_message *messages, uint32_t n_messages, const fs_job_options *options,
  uint64_t *job);
fs_status fs_chat_with_tools(fs_client *client, const fs_chat_message *messages, uint32_t n_messages, const
  fs_job_options *options, uint64_t *job);
fs_status fs_complete(fs_client *client, const char *prompt, int32_t prompt_length, const fs_job_options *options,
  uint64_t *job);
fs_status fs_cancel(fs_client *client, uint64_t job);
fs_status fs_set_priority(fs_client *client, uint64_t job, uint32_t priority);
fs_status fs_history(fs_client *client, const char *conversation, const fs_message **messages, uint32_t *n_messages);
fs_status fs_history_with_tools(fs_client *client, const char *conversation, const fs_chat_message **messages,
  uint32_t *n_messages);
fs_status fs_forget(fs_client *client, const char *conversation);
fs_status fs_save(fs_client *client, const char *conversation, const void **data, uint64_t *size);
typedef struct fs_load_result {
  uint32_t struct_size;
  int32_t same_model;
  int32_t same_template;
  int32_t reserved;
} fs_load_result;
fs_status fs_load(fs_client *client, const void *data, uint64_t size, const char *conversation, fs_load_result *result);
fs_status fs_save_kv(fs_client *client, const char *conversation, const char *path, uint64_t *request);
fs_status fs_load_kv(fs_client *client, const char *path, const char *conversation, uint64_t *request);
enum { FS_LEASE_ACTIVE = 1, FS_LEASE_PARKED = 2, FS_LEASE_HIBERNATED = 3, };
typedef struct fs_lease {
  uint32_t struct_size;
  int32_t state;
  uint64_t vram_budget_bytes;
  uint64_t floor_bytes;
  uint64_t version;
  double timeout_s;
  const char *reason;
  int64_t host_budget_bytes;
} fs_lease;
void fs_lease_init(fs_lease *lease, uint32_t struct_size);
fs_status fs_set_lease(fs_client *client, const fs_lease *lease, uint64_t *request);
fs_status fs_set_budget(fs_client *client, uint64_t vram_budget_bytes, double timeout_s, uint64_t *request);
fs_status fs_get_budget(fs_client *client, uint64_t *request);
fs_status fs_load_adapter(fs_client *client, const char *name, const char *path, uint64_t *request);
fs_status fs_unload_adapter(fs_client *client, const char *name, uint64_t *request);
fs_status fs_get_stats(fs_client *client, uint64_t *request);
fs_status fs_get_caps(fs_client *client, uint64_t *request);
fs_status fs_get_plan(fs_client *client, uint64_t vram_budget_bytes, uint32_t prompt_tokens, uint64_t *request);
fs_status fs_count_tokens(fs_client *client, const char *prompt, int32_t prompt_length, uint64_t *request);
fs_status fs_count_chat_tokens(fs_client *client, const fs_message *messages, uint32_t n_messages, uint64_t *request);
fs_status fs_count_chat_tokens_with_tools(fs_client *client, const fs_chat_message *messages, uint32_t n_messages, const
  fs_tool *tools, uint32_t n_tools, uint64_t *request);
fs_status fs_embed(fs_client *client, const char *const *texts, const int32_t *lengths, uint32_t n_texts,
  uint64_t *request);
fs_status fs_shutdown(fs_client *client);
typedef struct fs_arbiter fs_arbiter;
fs_status fs_arbiter_open(uint64_t budget_bytes, uint64_t step_bytes, double dwell_s, int32_t may_park,
  fs_arbiter **arbiter);
void fs_arbiter_close(fs_arbiter *arbiter);
typedef struct fs_vram_needs {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t grant_bytes;
  uint64_t pool_held_bytes;
  uint64_t pool_now_bytes;
  uint64_t pool_soon_bytes;
  uint64_t sidecar_floor_bytes;
  uint64_t sidecar_useful_bytes;
} fs_vram_needs;
typedef struct fs_vram_decision {
  uint32_t struct_size;
  int32_t state;
  uint64_t pool_limit_bytes;
  uint64_t vram_budget_bytes;
} fs_vram_decision;
fs_status fs_arbiter_decide(fs_arbiter *arbiter, double now_s, const fs_vram_needs *needs, fs_vram_decision *decision);
fs_status fs_arbiter_released(fs_arbiter *arbiter, uint64_t used_bytes);
fs_status fs_arbiter_refused(fs_arbiter *arbiter, double now_s);
fs_status fs_arbiter_holds(fs_arbiter *arbiter, uint64_t used_bytes);
enum { FS_PRIORITIZE_GRAPHICS = 1, FS_BALANCE = 2, FS_PRIORITIZE_COMPUTE = 3, };
fs_status fs_set_pacing(fs_client *client, int32_t scheduling_mode, double target_tokens_per_second, uint64_t *request);
fs_status fs_get_frame_block(fs_client *client, uint64_t *request);
typedef struct fs_frame_block fs_frame_block;
fs_status fs_frame_block_open(const char *path, double target_frame_s, fs_frame_block **block);
void fs_frame_block_close(fs_frame_block *block);
fs_status fs_frame_begin(fs_frame_block *block);
fs_status fs_frame_end(fs_frame_block *block, double gpu_busy_s);
fs_status fs_frame_idle(fs_frame_block *block);
fs_status fs_frame_set_budget(fs_frame_block *block, uint64_t vram_budget_bytes, uint64_t *generation);
typedef struct fs_frame_answer {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t applied_generation;
  uint64_t refused_generation;
  uint64_t budget_bytes;
  uint64_t used_bytes;
  uint64_t floor_bytes;
} fs_frame_answer;
fs_status fs_frame_get_answer(const fs_frame_block *block, fs_frame_answer *answer);
enum { FS_EVENT_READY = 1, FS_EVENT_STARTED = 2, FS_EVENT_TEXT = 3, FS_EVENT_DONE = 4, FS_EVENT_FAILED = 5,
  FS_EVENT_CANCELLED = 6, FS_EVENT_BUDGET_RELEASED = 7, FS_EVENT_BUDGET_OBSERVED = 8, FS_EVENT_BUDGET = 9,
  FS_EVENT_STATS = 10, FS_EVENT_REFUSED = 11, FS_EVENT_ENGINE = 12, FS_EVENT_CLOSED = 13, FS_EVENT_LEASE = 14,
  FS_EVENT_NOTICE = 15, FS_EVENT_CAPS = 16, FS_EVENT_PLAN = 17, FS_EVENT_FRAME_BLOCK = 18, FS_EVENT_PROGRESS = 19,
  FS_EVENT_LOADING = 20, FS_EVENT_ADAPTERS = 21, FS_EVENT_KV = 22, FS_EVENT_PAUSED = 23, FS_EVENT_RESUMED = 24,
  FS_EVENT_TOKEN_COUNT = 25, FS_EVENT_EMBEDDINGS = 26, FS_EVENT_THOUGHT = 27, FS_EVENT_TOOL_CALL = 28 };
enum { FS_REASON_STOP = 1, FS_REASON_LENGTH = 2, FS_REASON_TOOL_CALLS = 3, };
enum { FS_ENGINE_LOADING = 1, FS_ENGINE_READY = 2, FS_ENGINE_RESTARTING = 3, FS_ENGINE_OFF = 4,
  FS_ENGINE_HIBERNATED = 5, };
enum { FS_PHASE_ENCODE = 1, FS_PHASE_PREFILL = 2, };
enum { FS_LOADING_READ = 1, FS_LOADING_PROFILE = 2, FS_LOADING_FILL = 3, };
enum { FS_DECISION_GRANTED = 1, FS_DECISION_PARTIAL = 2, };
enum { FS_NOTICE_WANTS = 1, FS_NOTICE_GIVES_BACK = 2, FS_NOTICE_LATE = 3, FS_NOTICE_PRESSURE = 4,
  FS_NOTICE_OTHER_PROCESS = 5, FS_NOTICE_STATE = 6, FS_NOTICE_HTTP = 7, FS_NOTICE_HOST_PRESSURE = 8, };
typedef struct fs_event {
  uint32_t type;
  fs_status status;
  uint64_t job;
  uint64_t request;
  uint64_t timeline;
  const char *text;
  const char *detail;
  uint32_t text_length;
  uint32_t detail_length;
  uint32_t tokens;
  uint32_t reason;
  uint32_t n_prompt;
  uint32_t n_generated;
  uint32_t engine_state;
  uint32_t restarts;
  uint64_t budget_bytes;
  uint64_t used_bytes;
  uint64_t floor_bytes;
  uint64_t full_bytes;
  int64_t observed_bytes;
  double seconds;
  double prefill_s;
  double decode_s;
  uint32_t decision;
  uint32_t lease_state;
  uint32_t notice;
  int32_t fits;
  uint64_t version;
  uint64_t wanted_bytes;
  int64_t total_bytes;
  int64_t free_bytes;
  double ttft_s;
  double tokens_per_second;
  uint64_t resident_bytes;
  uint64_t streamed_bytes;
  uint64_t cpu_bytes;
  uint32_t phase;
  uint32_t done;
  uint32_t total;
  uint32_t reserved;
  uint64_t seed;
  uint64_t n_reused;
  uint64_t sentence_end;
  uint64_t stage;
  uint64_t n_tokens;
  uint64_t file_bytes;
  uint64_t n_left;
  uint64_t n_dropped;
  uint64_t n_dim;
  uint64_t n_rows;
  const float *rows;
  uint64_t n_thought;
  uint64_t remote;
  const char *call_id;
  const char *name;
  uint64_t host_budget_bytes;
  uint64_t host_used_bytes;
  int64_t host_observed_bytes;
  uint64_t host_floor_bytes;
  int64_t host_total_bytes;
  int64_t host_free_bytes;
} fs_event;
int32_t fs_poll(fs_client *client, fs_event *events, uint32_t event_size, int32_t capacity);
int32_t fs_wait(fs_client *client, double timeout_s);
]])
-- end of declarations

local ABI_VERSION = 2
local MIB = 1024 * 1024
local BATCH = 32

local frameshard = {}

-- ---- the library ----------------------------------------------------------------------------------------------------

local function load_library(path)
  local loaded, library = pcall(ffi.load, path)
  if not loaded then
    error(("frameshard's C library cannot be loaded (%s): build bindings/c and set FRAMESHARD_LIBRARY to the path of "
      .. "the library"):format(tostring(library)), 0)
  end
  return library
end

local function open_library()
  local chosen = os.getenv("FRAMESHARD_LIBRARY")
  if chosen and chosen ~= "" then
    return load_library(chosen)
  end
  local name = ({ Windows = "frameshard.dll", OSX = "libframeshard.dylib" })[ffi.os] or "libframeshard.so"
  local folders = { debug.getinfo(1, "S").source:match("^@(.*)[/\\]") or "." }
  if love and love.filesystem then
    folders = { love.filesystem.getSource(), love.filesystem.getSourceBaseDirectory() }
  end
  for _, folder in ipairs(folders) do
    local path = folder .. "/" .. name
    local file = io.open(path, "rb")
    if file then
      file:close()
      return load_library(path)
    end
  end
  return load_library("frameshard")
end

local lib = open_library()
if lib.fs_abi_version() ~= ABI_VERSION then
  error(("frameshard.lua is made for version %d of the library's interface; the library that was found has %d")
    :format(ABI_VERSION, lib.fs_abi_version()))
end

--- The library's version, such as "0.1.0".
frameshard.version = ffi.string(lib.fs_version())

-- ---- errors ---------------------------------------------------------------------------------------------------------

--- An error: what failed calls raise, and the value of `event.error` and `job.error`. Fields: `code`, `name`
-- ("budget_below_floor", ...), `message` (a sentence for a person), `retriable` (true if the same call may succeed
-- later) and `detail` (a JSON object with values that belong to the error, or ""). `tostring` gives "name: message".
local Error = {}
Error.__index = Error
Error.__tostring = function(self)
  return self.name .. ": " .. self.message
end
Error.__concat = function(left, right)
  return tostring(left) .. tostring(right)
end

local function new_error(status, message, detail)
  return setmetatable({
    code = status,
    name = ffi.string(lib.fs_status_name(status)),
    message = message,
    retriable = lib.fs_status_retriable(status) ~= 0,
    detail = detail or "",
  }, Error)
end

local length_of_error = ffi.new("uint32_t[1]")

local function check(status)
  if status ~= lib.FS_OK then
    local text = lib.fs_last_error(length_of_error)
    error(new_error(status, ffi.string(text, length_of_error[0])), 0)
  end
end

local function wrong(message)
  error(new_error(lib.FS_BAD_ARGUMENT, message), 0)
end

-- ---- what goes in ---------------------------------------------------------------------------------------------------

local function text_of(value, name)
  if type(value) ~= "string" then
    wrong(name .. " must be a string")
  end
  return value
end

-- For texts that C reads up to the first NUL.
local function name_of(value, name)
  if text_of(value, name):find("\0", 1, true) then
    wrong(name .. " must not contain a NUL character")
  end
  return value
end

local function number_of(value, name, low, high)
  if type(value) ~= "number" or not (value >= low and value <= high) then
    wrong(("%s must be a number from %.16g to %.16g"):format(name, low, high))
  end
  return value
end

local function integer_of(value, name, low, high)
  if number_of(value, name, low, high) ~= math.floor(value) then
    wrong(name .. " must be an integer")
  end
  return value
end

local function table_of(value, name)
  if type(value) ~= "table" then
    wrong(name .. " must be a table")
  end
  return value
end

local function check_callback(value, name)
  local meta = getmetatable(value)
  local callable = type(value) == "function" or type(meta) == "table" and meta.__call
  if value ~= nil and not callable then
    wrong(name .. " must be a function")
  end
end

-- Returns the length of a list that has no other keys and no holes, such as `nil` makes.
local function length_of(value, name)
  local count = 0
  for _ in pairs(table_of(value, name)) do
    count = count + 1
  end
  for index = 1, count do
    if value[index] == nil then
      wrong(name .. " must be a list without holes and other keys")
    end
  end
  return count
end

-- Returns the bytes of so many MiB, rounded up: a size above 0 must not become 0, "no limit".
local function bytes_of(mebibytes, name)
  return math.ceil(number_of(mebibytes, name, 0, 2 ^ 32) * MIB)
end

-- Returns the number of a word in one of the lists below.
local function place_of(word, words, name)
  for number, known in pairs(words) do
    if known == word then
      return number
    end
  end
  wrong(("%s must be one of: %s"):format(name, table.concat(words, ", ")))
end

local EVENTS = { "ready", "started", "text", "done", "failed", "cancelled", "budget_released", "budget_observed",
  "budget", "stats", "refused", "engine", "closed", "lease", "notice", "caps", "plan", "frame_block", "progress",
  "loading", "adapters", "kv", "paused", "resumed", "token_count", "embeddings", "thought", "tool_call" }
local STATES = { "loading", "ready", "closed" }
-- generated: words
local DECISIONS = { "granted", "partial" }
local ENGINE_STATES = { "loading", "ready", "restarting", "off", "hibernated" }
local IMAGE_FORMATS = { "encoded", "rgb", "rgba" }
local LEASE_STATES = { "active", "parked", "hibernated" }
local LOADING_STAGES = { "read", "profile", "fill" }
local NOTICES = { "wants", "gives_back", "late", "pressure", "other_process", "state", "http", "host_pressure" }
local PHASES = { "encode", "prefill" }
local REASONS = { "stop", "length", "tool_calls" }
local SCHEDULING_MODES = { "prioritize_graphics", "balance", "prioritize_compute" }
-- end of words

-- The options of `launch`, `sampling` and `set_lease`, by C struct. Each option has the kind of its value. After the
-- kind follows, for "mebibytes", the member of the struct; for numbers, the bounds; for "word", the allowed words.
-- generated: options
local OPTIONS = {
  fs_launch_options = {
    -- Path of a GGUF file; the only option without a default. `PATH@OFFSET+SIZE` is a part of a file, such as a game's
    -- pak file; the offset is a multiple of 32.
    model = { "text" },
    -- `auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device such as
    -- `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s. Default auto.
    device = { "text" },
    -- Limit for all VRAM that the sidecar uses; 0: no limit. In MiB.
    vram_budget_mb = { "mebibytes", "vram_budget_bytes" },
    -- Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only for the tokens
    -- in the context. Default 4096.
    n_ctx = { "integer", 1, 16777216 },
    -- Number of jobs that run at once, each in its own context. Default 4.
    n_parallel = { "integer", 1, 64 },
    -- Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once for each graph,
    -- and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has room for 256 tokens;
    -- in mode `stream_only` 512. Any other value holds at every budget, and the floor has room for it.
    n_ubatch = { "integer", 0, 65536 },
    -- Number of CPU threads; 0: half of the CPUs.
    n_threads = { "integer", 0, 1024 },
    -- A client that stays disconnected for this long loses its jobs. A client that is connected but silent (a
    -- breakpoint, a long load) keeps them. Default 10.0.
    silent_s = { "number", 0, 1000000 },
    -- How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are encrypted. One
    -- of ipc, tcp.
    transport = { "text" },
    -- Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar chooses.
    endpoint = { "text" },
    -- Path of the file from which other clients learn how to connect; only this user can read it. The sidecar removes
    -- it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it cannot be written, or if
    -- a file is there that is no connect file.
    connect_file = { "text" },
    -- Command of the Python that has frameshard installed. Default: python3, from PATH.
    python = { "text" },
    -- Path of a file to which the sidecar appends its log. Default: standard error.
    log_file = { "text" },
    -- Name of the client in the sidecar's log, at most 64 bytes. Default c.
    client_name = { "text" },
    -- A JSON object with further launch options; they take precedence over the others. Default: none.
    extra_json = { "text" },
    -- Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty: none.
    mmproj = { "text" },
    -- `planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every budget. One of
    -- planned, stream_only. Default planned.
    mode = { "text" },
    -- Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified in one graph,
    -- where that is faster. `off`: never. One of auto, off. Default auto.
    speculate = { "text" },
    -- Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It drafts text that
    -- does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at most 16,384 tokens)
    -- are in host memory. It is not loaded with `speculate` off, without a GPU, or with recurrent models.
    draft_model = { "text" },
    -- Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`, at some loss
    -- of quality. Refused with `unsupported` if the model's attention head size is not a multiple of 32. On NVIDIA GPUs
    -- the floor stays the same, because a prompt also needs one layer's whole context in 16 bits. One of f16, q8_0,
    -- q4_0. Default f16.
    kv_type = { "text" },
    -- Maximum number of unfinished jobs of all clients. Default 256.
    max_jobs = { "integer", 1, 1024 },
    -- Maximum number of unfinished jobs of one client. Default 64.
    max_client_jobs = { "integer", 1, 1024 },
    -- Maximum text kept for one job whose client does not read; with more, the job fails. Default 49152.
    held_bytes = { "integer", 0, 49152 },
    -- An engine without work that does not answer for this long is replaced. Default 5.0.
    hang_idle_s = { "number", 0, 1000000 },
    -- An engine with work that does not answer for this long is replaced. Default 60.0.
    hang_busy_s = { "number", 0, 1000000 },
    -- An engine that loads and does not answer for this long is replaced. Default 600.0.
    hang_load_s = { "number", 0, 1000000 },
    -- An engine in which no thread answers for this long counts as stopped and is replaced. Default 5.0.
    hang_still_s = { "number", 0, 1000000 },
    -- Number of engine deaths within `restart_window_s` that are followed by a restart; after one more, the engine is
    -- off for `off_pause_s`. Deaths while a job runs do not count, and each new token starts the count again. Default
    -- 3.
    restart_limit = { "integer", 0, 1000 },
    -- Time span in which `restart_limit` counts deaths. Default 300.0.
    restart_window_s = { "number", 0, 1000000 },
    -- How long an engine that keeps dying stays off before the next try. Each pause is twice as long as the last.
    -- Default 1.0.
    off_pause_s = { "number", 0.05, 1000000 },
    -- Maximum length of such a pause. Default 60.0.
    off_pause_max_s = { "number", 0.05, 1000000 },
    -- Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of texts that
    -- several jobs begin with. The least recently used are dropped; 0: none are kept. In MiB. Default 512.
    kv_cache_mb = { "mebibytes", "kv_cache_bytes" },
    -- `on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later loads only.
    -- One of off, on. Default off.
    loading = { "text" },
    -- LoRA adapters that jobs may use, each as `NAME=PATH` of a GGUF file. Their weights are in VRAM at every budget.
    adapters = { "texts" },
    -- Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one; empty: nowhere.
    -- The HTTP server is a process of its own that ends with the sidecar. Refused with `bad_argument` if the packages
    -- of `frameshard[http]` are not installed, or if the address cannot be listened on.
    http = { "text" },
    -- Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new one.
    http_key = { "text" },
    -- Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a process for it.
    -- That process encodes texts on the CPU at idle priority and uses no VRAM.
    embedder = { "text" },
    -- Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty: none. Jobs go
    -- there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet their deadline.
    -- Needs `frameshard[fallback]`.
    fallback = { "text" },
    -- Name of the model that the server is asked for.
    fallback_model = { "text" },
    -- Path of a file with the server's key, which only this user may read; empty: none.
    fallback_key_file = { "text" },
    -- Name of the environment variable with the server's key; empty: none.
    fallback_key_env = { "text" },
    -- Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where prompts and the
    -- key can be read on the way. One of loopback, anywhere. Default loopback.
    fallback_http = { "text" },
    -- Limit for all host memory that the sidecar's processes use, with the model's file in the page cache; 0: no limit.
    -- Only on Linux; elsewhere it is refused with `unsupported`. In MiB.
    host_budget_mb = { "mebibytes", "host_budget_bytes" },
  },
  fs_sampling = {
    -- Maximum length of the answer in tokens. Default 256.
    max_tokens = { "integer", 1, 1048576 },
    -- Choose only among this many most likely tokens; 0: off. Default 40.
    top_k = { "integer", 0, 1048576 },
    -- Randomness of the choice; 0: always the most likely token. Default 0.8.
    temperature = { "number", 0, 5 },
    -- Choose only among the most likely tokens whose probabilities add up to this value; 1: off. Default 0.95.
    top_p = { "number", 0, 1 },
    -- Choose only among tokens with at least this fraction of the highest probability; 0: off. Default 0.05.
    min_p = { "number", 0, 1 },
    -- Above 1, tokens that occur among the last 64 become less likely; 1: off. Default 1.0.
    repeat_penalty = { "number", 0.5, 2 },
    -- Seed of the random numbers; without it the sidecar chooses one.
    seed = { "integer", 0, 4294967295 },
    -- Strings that end the answer; they are not part of it.
    stop = { "texts" },
    -- A JSON schema. The answer is JSON that matches it, unless `max_tokens` or `stop` ends the answer early; empty:
    -- off.
    json_schema = { "text" },
    -- Subtracted from a token's logit for each time that the token occurs among the last 64; 0: off.
    frequency_penalty = { "number", -2, 2 },
    -- Subtracted once from a token's logit if the token is among the last 64; 0: off.
    presence_penalty = { "number", -2, 2 },
    -- Locally typical sampling: choose only among the most typical tokens whose probabilities add up to this value; 1:
    -- off. Default 1.0.
    typical_p = { "number", 0, 1 },
    -- XTC sampling: the chance that all tokens above `xtc_threshold`, except the least likely of them, are removed; 0:
    -- off.
    xtc_probability = { "number", 0, 1 },
    -- XTC sampling removes only tokens with at least this probability. Default 0.1.
    xtc_threshold = { "number", 0, 0.5 },
    -- The answer is exactly one of these strings. Set at most one of `json_schema`, `choices`, `regex` and `lark`.
    choices = { "texts" },
    -- The whole answer matches this regular expression, in the syntax of Rust's regex crate; empty: off.
    regex = { "text" },
    -- The answer matches this grammar in llguidance's variant of Lark; empty: off.
    lark = { "text" },
    -- Tokens that are more or less likely than the model finds them. Several biases of one token add up. An answer with
    -- a form still has it.
    logit_bias = { "biases" },
    -- DRY sampling: a token that would repeat a sequence of n tokens, n at least `dry_allowed_length`, loses
    -- `dry_multiplier` * `dry_base` ^ (n - `dry_allowed_length`) of its logit; 0: off.
    dry_multiplier = { "number", 0, 100 },
    -- DRY sampling: growth of the penalty with each token. Default 1.75.
    dry_base = { "number", 1, 10 },
    -- DRY sampling: shortest repeated sequence whose next token is penalised. Default 2.
    dry_allowed_length = { "integer", 1, 1024 },
    -- DRY sampling: how many of the last tokens are searched for repeats; 0: off, -1: the whole context. Default -1.
    dry_penalty_last_n = { "integer", -1, 1048576 },
    -- DRY sampling: no sequence goes beyond one of these strings; empty: line break, colon, quotation mark and
    -- asterisk.
    dry_sequence_breakers = { "texts" },
  },
  fs_lease = {
    -- `parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no VRAM is used. One
    -- of active, parked, hibernated. Default active.
    state = { "word", LEASE_STATES },
    -- Limit for all VRAM that the sidecar uses; 0: no limit. If `state` is not `active`: the budget to use once it is
    -- active again. In MiB.
    vram_budget_mb = { "mebibytes", "vram_budget_bytes" },
    -- The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does not. In MiB.
    floor_mb = { "mebibytes", "floor_bytes" },
    -- Version of the lease. It is refused with `stale_lease` unless it is higher than the version in force; 0: never
    -- refused for its version.
    version = { "integer", 0, 9007199254740991 },
    -- Time that the sidecar has to release the VRAM above the budget. Default 5.0.
    timeout_s = { "number", 0.001, 60 },
    -- Text for the sidecar's log.
    reason = { "text" },
    -- Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the limit in force
    -- stays. In MiB.
    host_budget_mb = { "mebibytes", "host_budget_bytes" },
  },
}
-- end of options

local KNOWN = {
  launch = OPTIONS.fs_launch_options,
  sampling = OPTIONS.fs_sampling,
  lease = OPTIONS.fs_lease,
  job = { conversation = true, system = true, sampling = true, timeline = true, window = true, priority = true,
    deadline_ms = true, thinking = true, thinking_tokens = true, template_keywords = true, images = true, sentences = true, warm_up = true, local_only = true, adapters = true, response_updated = true,
    response_finished = true, response_failed = true, tools = true, tool_choice = true },
  tool = { name = true, description = true, schema = true },
  logit_bias = { bias = true, token = true, text = true },
  image = { format = true, width = true, height = true, stride = true, data = true },
}

local function known(options, kind)
  if type(options) ~= "table" then
    wrong(kind .. " options must be a table")
  end
  for name in pairs(options) do
    if not KNOWN[kind][name] then
      wrong(("there is no %s option %q"):format(kind, tostring(name)))
    end
  end
end

-- Sets a member of a C struct. The struct points into Lua strings, which the caller's tables keep alive during the
-- call. `keep` keeps alive the arrays that are made here.
local SET = {
  text = function(made, member, value)
    made[member] = name_of(value, member)
  end,
  mebibytes = function(made, member, value, field)
    made[field[2]] = bytes_of(value, member)
  end,
  integer = function(made, member, value, field)
    made[member] = integer_of(value, member, field[2], field[3])
  end,
  number = function(made, member, value, field)
    made[member] = number_of(value, member, field[2], field[3])
  end,
  word = function(made, member, value, field)
    made[member] = place_of(value, field[2], member)
  end,
  texts = function(made, member, value, _, keep)
    local count = length_of(value, member)
    local texts = ffi.new("const char *[?]", count + 1)
    for index, text in ipairs(value) do
      texts[index - 1] = name_of(text, member)
    end
    made[member], made["n_" .. member] = texts, count
    keep[#keep + 1] = texts
  end,
  biases = function(made, member, value, _, keep)
    local count = length_of(value, member)
    local biases = ffi.new("fs_logit_bias[?]", count + 1)
    for index, bias in ipairs(value) do
      known(bias, "logit_bias")
      local one = biases[index - 1]
      one.bias = number_of(bias.bias, "bias", -100, 100)
      if (bias.token == nil) == (bias.text == nil) then
        wrong("a logit_bias has either a token or a text")
      elseif bias.text ~= nil then
        one.text = name_of(bias.text, "text")
      else
        one.token = integer_of(bias.token, "token", 0, 2 ^ 31 - 1)
      end
    end
    made[member], made["n_" .. member] = biases, count
    keep[#keep + 1] = biases
  end,
}

local function struct_of(name, options, kind, keep)
  known(options, kind)
  local made = ffi.new(name)
  lib[name .. "_init"](made, ffi.sizeof(made))
  for option, field in pairs(OPTIONS[name]) do
    if options[option] ~= nil then
      SET[field[1]](made, option, options[option], field, keep)
    end
  end
  keep[#keep + 1] = made
  return made
end

local function images_of(images, keep)
  local count = length_of(images, "images")
  local made = ffi.new("fs_image[?]", count + 1)
  for index, image in ipairs(images) do
    known(image, "image")
    local one = made[index - 1]
    one.format = place_of(image.format or "encoded", IMAGE_FORMATS, "format")
    for _, name in ipairs({ "width", "height", "stride" }) do
      one[name] = integer_of(image[name] or 0, name, 0, 2 ^ 31 - 1)
    end
    one.data = ffi.cast("const char *", text_of(image.data, "data"))
    one.size = #image.data
  end
  keep[#keep + 1] = made
  return made, count
end

local function adapters_of(adapters, keep)
  local names = {}
  for name in pairs(table_of(adapters, "adapters")) do
    names[#names + 1] = name_of(name, "adapters")
  end
  table.sort(names)
  local made = ffi.new("fs_adapter[?]", #names + 1)
  for index, name in ipairs(names) do
    made[index - 1].name, made[index - 1].scale = name, number_of(adapters[name], "adapters", -4, 4)
  end
  keep[#keep + 1] = made
  return made, #names
end

local function tools_of(tools, keep)
  local count = length_of(tools, "tools")
  local made = ffi.new("fs_tool[?]", count + 1)
  for index, tool in ipairs(tools) do
    known(tool, "tool")
    local one = made[index - 1]
    one.name = name_of(tool.name, "name")
    for _, name in ipairs({ "description", "schema" }) do
      if tool[name] ~= nil then
        one[name] = name_of(tool[name], name)
      end
    end
  end
  keep[#keep + 1] = made
  return made, count
end

local function job_options_of(options, keep)
  known(options, "job")
  for _, name in ipairs({ "response_updated", "response_finished", "response_failed" }) do
    check_callback(options[name], name)
  end
  local made = ffi.new("fs_job_options")
  lib.fs_job_options_init(made, ffi.sizeof(made))
  if options.conversation ~= nil then
    made.conversation = name_of(options.conversation, "conversation")
  end
  if options.system ~= nil then
    made.system = name_of(options.system, "system")
  end
  if options.sampling ~= nil then
    made.sampling = struct_of("fs_sampling", options.sampling, "sampling", keep)
  end
  if options.timeline ~= nil then
    made.timeline = integer_of(options.timeline, "timeline", 0, 2 ^ 53 - 1)
  end
  if options.window ~= nil then
    made.window = integer_of(options.window, "window", 1, 256)
  end
  for _, name in ipairs({ "sentences", "warm_up", "local_only" }) do
    if options[name] ~= nil then
      if type(options[name]) ~= "boolean" then
        wrong(name .. " must be true or false")
      end
      made[name] = options[name] and 1 or 0
    end
  end
  if options.priority ~= nil then
    made.priority = integer_of(options.priority, "priority", 0, 2)
  end
  if options.deadline_ms ~= nil then
    made.deadline_ms = integer_of(options.deadline_ms, "deadline_ms", 0, 3600000)
  end
  if options.thinking ~= nil then
    made.thinking = name_of(options.thinking, "thinking")
  end
  if options.thinking_tokens ~= nil then
    made.thinking_tokens = integer_of(options.thinking_tokens, "thinking_tokens", 0, 2 ^ 20)
  end
  if options.template_keywords ~= nil then
    made.template_keywords = name_of(options.template_keywords, "template_keywords")
  end
  if options.tools ~= nil then
    made.tools, made.n_tools = tools_of(options.tools, keep)
  end
  if options.tool_choice ~= nil then
    made.tool_choice = name_of(options.tool_choice, "tool_choice")
  end
  if options.adapters ~= nil then
    made.adapters, made.n_adapters = adapters_of(options.adapters, keep)
  end
  if options.images ~= nil then
    made.images, made.n_images = images_of(options.images, keep)
  end
  return made
end

-- ---- jobs -----------------------------------------------------------------------------------------------------------

--- A job. `text` is the answer so far; `thought` is what the model has thought before it answers (with `thinking`
-- "shown"). `tool_calls` are the calls of tools so far. `paused` is true while a job of higher priority has its place;
-- it continues on its own. `ended` is true when the job has ended; then `result` (the event "done") or `error` is set.
-- Fields change only inside `poll`.
local Job = {}
Job.__index = Job

--- Ends the answer early. `response_failed` is called with the error "cancelled", unless the job has ended before.
function Job:stop_generation()
  if not self.ended and self.sidecar._client then
    local status = lib.fs_cancel(self.sidecar._client, self.number)
    if status ~= lib.FS_UNKNOWN_JOB and status ~= lib.FS_CONNECTION_LOST then
      check(status)
    end
  end
end

--- Changes the priority of the job: 0 for background, 1 for normal, 2 for urgent. Takes effect at once: it may pause
-- another job, or this one.
function Job:set_priority(priority)
  local wanted = integer_of(priority, "priority", 0, 2)
  if not self.ended and self.sidecar._client then
    local status = lib.fs_set_priority(self.sidecar._client, self.number, wanted)
    if status ~= lib.FS_UNKNOWN_JOB and status ~= lib.FS_CONNECTION_LOST then
      check(status)
    end
  end
end

-- ---- sidecars -------------------------------------------------------------------------------------------------------

--- A session with one sidecar. `frameshard.launch` and `frameshard.connect` make it. Use it in one Lua state only.
local Sidecar = {}
Sidecar.__index = Sidecar

local function new_sidecar(status, client)
  check(status)
  return setmetatable({
    _client = ffi.gc(client[0], function(lost)
      lib.fs_close(lost, 0)
    end),
    _buffer = ffi.new("fs_event[?]", BATCH),
    _jobs = {},
    _pending = {}, -- events that are not handled yet
    _taken = {}, -- events that are handled and in no list of `poll` yet
    _number = ffi.new("uint64_t[1]"),
  }, Sidecar)
end

--- Starts a sidecar. Returns at once. The event "ready" follows when the model is loaded, or "closed" with the reason.
-- Questions asked before "ready" wait for it. Raises an error if an option is wrong or the process cannot be started.
-- @param options `model` (path of a GGUF file); the others are in the table OPTIONS above, under `fs_launch_options`.
function frameshard.launch(options)
  local keep = {}
  local made = struct_of("fs_launch_options", options, "launch", keep)
  if options.client_name == nil then
    made.client_name = "lua"
  end
  local client = ffi.new("fs_client *[1]")
  local status = lib.fs_launch(made, client)
  keep[1] = nil -- the use here keeps the table alive until after the call
  return new_sidecar(status, client)
end

--- Connects to a running sidecar by the path of its connect file. Raises an error if there is no such file.
-- @param client_name name for the sidecar's log; "lua" by default.
function frameshard.connect(connect_file, client_name)
  local client = ffi.new("fs_client *[1]")
  local name = client_name and name_of(client_name, "client_name") or "lua"
  return new_sidecar(lib.fs_connect(name_of(connect_file, "connect_file"), name, client), client)
end

local function client_of(self)
  if not self._client then
    error(new_error(lib.FS_CONNECTION_LOST, "the sidecar is closed"), 0)
  end
  return self._client
end

--- Returns "loading", "ready" or "closed".
function Sidecar:state()
  return self._client and STATES[lib.fs_state(self._client)] or "closed"
end

--- Returns true if the sidecar supports a feature, a name from PROTOCOL.md ("Features"). False before "ready".
function Sidecar:has_feature(feature)
  return lib.fs_has_feature(client_of(self), name_of(feature, "feature")) ~= 0
end

--- Returns a table about the loaded model: `name`, `arch`, `device`, `n_ctx`, `n_parallel`, `n_vocab`, `n_layer`,
-- `chat`, `floor_bytes`, `full_bytes`, `plan_json`, `pid`, `connect_file`, `vision`, `fingerprint`,
-- `template_fingerprint`, `http_url`, `http_key`, `embedder`, `thinks`, `passed_over`, `sees`, `hears`; fs_model in
-- frameshard.h says what they mean. Raises an error before "ready".
function Sidecar:model()
  local model = ffi.new("fs_model")
  model.struct_size = ffi.sizeof(model)
  check(lib.fs_get_model(client_of(self), model))
  return {
    name = ffi.string(model.name),
    arch = ffi.string(model.arch),
    device = ffi.string(model.device),
    n_ctx = model.n_ctx,
    n_parallel = model.n_parallel,
    n_vocab = model.n_vocab,
    n_layer = model.n_layer,
    chat = model.chat ~= 0,
    floor_bytes = tonumber(model.floor_bytes),
    full_bytes = tonumber(model.full_bytes),
    plan_json = ffi.string(model.plan_json),
    pid = tonumber(model.pid),
    connect_file = ffi.string(model.connect_file),
    vision = ffi.string(model.vision),
    fingerprint = ffi.string(model.fingerprint),
    template_fingerprint = ffi.string(model.template_fingerprint),
    http_url = ffi.string(model.http_url),
    http_key = ffi.string(model.http_key),
    embedder = ffi.string(model.embedder),
    thinks = model.thinks ~= 0,
    passed_over = ffi.string(model.passed_over),
    sees = model.sees ~= 0,
    hears = model.hears ~= 0,
  }
end

local function begin(self, options, submit)
  options = options or {}
  local keep = {}
  check(submit(client_of(self), job_options_of(options, keep), self._number))
  local job = setmetatable({
    sidecar = self,
    number = tonumber(self._number[0]),
    text = "",
    thought = "",
    tool_calls = {},
    paused = false,
    ended = false,
    _updated = options.response_updated,
    _finished = options.response_finished,
    _failed = options.response_failed,
    _kept = keep, -- the use here keeps the table alive until after the call
  }, Job)
  job._kept = nil
  self._jobs[job.number] = job
  return job
end

--- Asks the model `text` and returns a job. With a `conversation`, its earlier questions and answers are part of the
-- prompt.
-- @param options a table; all fields are optional:
--   - `conversation`: name of the conversation;
--   - `system`: sets the system text of the conversation;
--   - `sampling`: a table with fields of OPTIONS above, under `fs_sampling`;
--   - `timeline`: a number that each event of the job repeats;
--   - `window`: maximum number of events that are sent but not polled yet, 1 to 256;
--   - `sentences`: if true, `sentence_end` of text events says where sentences end, for text to speech;
--   - `priority`: 0 for background, 1 for normal, 2 for urgent; a job pauses a running job of lower priority if
--     `n_parallel` jobs run, and the paused job continues later;
--   - `warm_up`: if true, the prompt is only read, so that later jobs whose prompt begins with it need not read it. All
--     other jobs go first. There is no text;
--   - `deadline_ms`: the job fails with "deadline_missed" if it has no token after so many milliseconds; among jobs of
--     equal priority the earliest deadline goes first;
--   - `thinking`: "hidden" or "shown" lets the model think before it answers. With "shown" the thought comes in events
--     "thought". "off" (the default): it answers at once;
--   - `thinking_tokens`: maximum length of the thought;
--   - `template_keywords`: a JSON object (a string) with further variables for the model's chat template;
--   - `local_only`: if true, the job never goes to the server of the launch option `fallback`;
--   - `tools`: a list of tables with `name`, `description` and `schema` (the JSON schema of the arguments, a string):
--     functions that the model may call. Each call is an event "tool_call", and is in `job.tool_calls`;
--   - `tool_choice`: "auto" (the default: text, or calls at its end), "required", "none" or the name of a tool;
--   - `images`: a list of tables, for models with a vision tower. `data` is a string: a PNG or JPEG file (or a
--     sound, a WAV or MP3 file, for a tower that hears), or pixels with `format` ("rgb" or "rgba"),
--     `width`, `height` and `stride` (bytes). They are placed before the text;
--   - callbacks: `response_updated(delta, job, sentence_end)`, `response_finished(text, job)`,
--     `response_failed(error, job)`.
function Sidecar:ask(text, options)
  text_of(text, "text")
  return begin(self, options, function(client, made, number)
    return lib.fs_ask(client, text, #text, made, number)
  end)
end

--- Has the model go on after an answer that ended with calls of tools. `results` has a text for each call, by its
-- `call_id`. `options.conversation` is needed. A question instead is possible, too: then the calls are forgotten.
function Sidecar:tool_results(results, options)
  local ids = {}
  for id in pairs(table_of(results, "results")) do
    ids[#ids + 1] = name_of(id, "call_id")
  end
  local made_results = ffi.new("fs_tool_result[?]", #ids + 1)
  for index, id in ipairs(ids) do
    local made = made_results[index - 1]
    made.call_id, made.content = id, text_of(results[id], "content")
    made.content_length = #results[id]
  end
  local keep = { results }
  local job = begin(self, options, function(client, made, number)
    return lib.fs_tool_results(client, made_results, #ids, made, number)
  end)
  keep[1] = nil -- the use here keeps the texts alive until after the call
  return job
end

local function calls_of(calls, keep)
  local count = length_of(calls, "tool_calls")
  local made = ffi.new("fs_tool_call[?]", count + 1)
  for index, call in ipairs(calls) do
    table_of(call, "a tool_call")
    local one = made[index - 1]
    one.call_id = name_of(call.call_id, "call_id")
    one.name = name_of(call.name, "name")
    one.arguments = name_of(call.arguments, "arguments")
  end
  keep[#keep + 1] = made
  return made, count
end

local function messages_of(messages, keep)
  local count = length_of(messages, "messages")
  local made_messages = ffi.new("fs_chat_message[?]", count + 1)
  for index, message in ipairs(messages) do
    table_of(message, "a message")
    local made = made_messages[index - 1]
    made.role = name_of(message.role, "role")
    made.content = text_of(message.content, "content")
    made.content_length = #message.content
    if message.tool_calls ~= nil then
      made.tool_calls, made.n_tool_calls = calls_of(message.tool_calls, keep)
    end
    if message.tool_call_id ~= nil then
      made.tool_call_id = name_of(message.tool_call_id, "tool_call_id")
    end
  end
  keep[#keep + 1] = made_messages
  return made_messages
end

--- Like `ask`, for games that keep the history themselves. `messages` is the whole prompt: a list of tables with `role`
-- ("system", "user", "assistant", or "tool" for the result of a call) and `content`. Answers with calls of tools have
-- `tool_calls` (a list like `job.tool_calls`), results have `tool_call_id`, the `call_id` of the call.
function Sidecar:chat(messages, options)
  local keep = {}
  local made_messages = messages_of(messages, keep)
  local job = begin(self, options, function(client, made, number)
    return lib.fs_chat_with_tools(client, made_messages, #messages, made, number)
  end)
  keep[1] = nil -- the use here keeps the table alive until after the call
  return job
end

--- Like `ask`, but the model continues `prompt`, without a chat template.
function Sidecar:complete(prompt, options)
  text_of(prompt, "prompt")
  return begin(self, options, function(client, made, number)
    return lib.fs_complete(client, prompt, #prompt, made, number)
  end)
end

-- The calls of a message; nil if it has none.
local function called(message)
  local calls = {}
  for index = 1, message.n_tool_calls do
    local call = message.tool_calls[index - 1]
    calls[index] = {
      call_id = ffi.string(call.call_id),
      name = ffi.string(call.name),
      arguments = ffi.string(call.arguments),
    }
  end
  return calls[1] and calls
end

--- Returns the history of a conversation, oldest first: a list of tables as `chat` takes them, the system text first. An
-- answer that is open, or was ended early, is in it as far as it was polled. Also works after "closed".
function Sidecar:history(conversation)
  local first, count = ffi.new("const fs_chat_message *[1]"), ffi.new("uint32_t[1]")
  check(lib.fs_history_with_tools(client_of(self), name_of(conversation, "conversation"), first, count))
  local messages = {}
  for index = 1, count[0] do
    local message = first[0][index - 1]
    messages[index] = {
      role = ffi.string(message.role),
      content = ffi.string(message.content, message.content_length),
      tool_calls = called(message),
      tool_call_id = message.tool_call_id ~= nil and ffi.string(message.tool_call_id) or nil,
    }
  end
  return messages
end

--- Clears the history of a conversation, once the questions asked before this call are answered. The system text stays.
function Sidecar:forget(conversation)
  check(lib.fs_forget(client_of(self), name_of(conversation, "conversation")))
end

--- Returns the history of a conversation as a string of bytes, for `load` and for the other bindings. These are
-- kilobytes, 1 MiB at most; the oldest exchanges of a longer history are left out. Also works after "closed".
function Sidecar:save(conversation)
  local data, size = ffi.new("const void *[1]"), ffi.new("uint64_t[1]")
  check(lib.fs_save(client_of(self), name_of(conversation, "conversation"), data, size))
  return ffi.string(data[0], tonumber(size[0]))
end

--- Replaces a conversation by a save, once the questions asked before this call are answered. The next question computes
-- its prompt again. The save may be from another sidecar, model, budget or binding. Returns a table with `same_model`
-- and `same_template`: whether the save was made with what is loaded now. Raises "bad_save" if the bytes are damaged,
-- too large, of a newer format, or no save; nothing changes.
function Sidecar:load(data, conversation)
  local result = ffi.new("fs_load_result")
  result.struct_size = ffi.sizeof(result)
  check(lib.fs_load(client_of(self), text_of(data, "data"), #data, name_of(conversation, "conversation"), result))
  return { same_model = result.same_model ~= 0, same_template = result.same_template ~= 0 }
end

--- Has the sidecar write the KV cache of a conversation to a file, so that after `load` and `load_kv` its next question
-- need not read the whole text again. Returns the request number of the event "kv".
function Sidecar:save_kv(conversation, path)
  check(lib.fs_save_kv(client_of(self), name_of(conversation, "conversation"), name_of(path, "path"), self._number))
  return tonumber(self._number[0])
end

--- Has the sidecar read a file of `save_kv`. Returns the request number of the event "kv"; ask the conversation's next
-- question after that. A file that is damaged, or of another model, device, mode, `kv_type` or version, is not used; then
-- `n_tokens` of the event is 0 and the text is read anew.
function Sidecar:load_kv(path, conversation)
  check(lib.fs_load_kv(client_of(self), name_of(path, "path"), name_of(conversation, "conversation"), self._number))
  return tonumber(self._number[0])
end

--- Proposes a lease, which limits all VRAM that the sidecar uses. Answers continue. The events "lease",
-- "budget_released" and "budget_observed" follow, or "refused". Returns the number that these have as `request`.
-- @param lease the fields of the table OPTIONS above, under `fs_lease`; all are optional.
function Sidecar:set_lease(lease)
  local keep = {}
  local status = lib.fs_set_lease(client_of(self), struct_of("fs_lease", lease, "lease", keep), self._number)
  keep[1] = nil -- the use here keeps the table alive until after the call
  check(status)
  return tonumber(self._number[0])
end

--- `set_lease` with this budget (MiB; 0: no limit) and deadline (seconds), and defaults for the rest.
function Sidecar:set_budget(vram_budget_mb, timeout_s)
  return self:set_lease({ vram_budget_mb = vram_budget_mb, timeout_s = timeout_s })
end

--- Asks for the lease in force, the floor and the VRAM in use. Returns the request number of the event "budget".
function Sidecar:get_budget()
  check(lib.fs_get_budget(client_of(self), self._number))
  return tonumber(self._number[0])
end

--- Loads the LoRA adapter (GGUF) at `path`, which jobs may then use: `adapters = { [name] = 0.8 }`. Returns the request
-- number of the event "adapters", or "refused" if nothing has changed.
function Sidecar:load_adapter(name, path)
  check(lib.fs_load_adapter(client_of(self), name_of(name, "name"), name_of(path, "path"), self._number))
  return tonumber(self._number[0])
end

--- Unloads a LoRA adapter. Refused while a job that has not ended uses it. Returns the request number of the event
-- "adapters" or "refused".
function Sidecar:unload_adapter(name)
  check(lib.fs_unload_adapter(client_of(self), name_of(name, "name"), self._number))
  return tonumber(self._number[0])
end

--- Asks for the current figures of the sidecar. Returns the request number of the event "stats".
function Sidecar:get_stats()
  check(lib.fs_get_stats(client_of(self), self._number))
  return tonumber(self._number[0])
end

--- Asks how much VRAM the device has and the model needs. Returns the request number of the event "caps".
function Sidecar:get_caps()
  check(lib.fs_get_caps(client_of(self), self._number))
  return tonumber(self._number[0])
end

--- Asks how fast the model would be at a VRAM budget (MiB) with a prompt of `prompt_tokens`. Changes nothing. Returns
-- the request number of the event "plan".
function Sidecar:get_plan(vram_budget_mb, prompt_tokens)
  local tokens = integer_of(prompt_tokens, "prompt_tokens", 1, 2 ^ 32 - 1)
  check(lib.fs_get_plan(client_of(self), bytes_of(vram_budget_mb, "vram_budget_mb"), tokens, self._number))
  return tonumber(self._number[0])
end

--- Asks how many tokens a prompt has, and how many still fit into the context behind it. Returns the request number of
-- the event "token_count".
-- @param content a prompt as for `complete`, or a list of messages as for `chat`.
-- @param tools those of the chat, as in the options of `ask`: the prompt describes them. They may be left out.
function Sidecar:count_tokens(content, tools)
  if type(content) == "table" then
    local keep = {}
    local messages, made_tools, n_tools = messages_of(content, keep), tools_of(tools or {}, keep)
    local status = lib.fs_count_chat_tokens_with_tools(
      client_of(self), messages, #content, made_tools, n_tools, self._number)
    keep[1] = nil -- the use here keeps the table alive until after the call
    check(status)
  else
    check(lib.fs_count_tokens(client_of(self), text_of(content, "content"), #content, self._number))
  end
  return tonumber(self._number[0])
end

--- Asks the sentence encoder (launch option `embedder`) for the embeddings of 1 to 64 texts. Texts of similar meaning
-- have rows with a large dot product. Returns the request number of the event "embeddings" or "refused".
-- @param texts a list of strings.
function Sidecar:embed(texts)
  local n = length_of(texts, "texts")
  local starts, lengths = ffi.new("const char *[?]", n), ffi.new("int32_t[?]", n)
  for i, text in ipairs(texts) do
    starts[i - 1], lengths[i - 1] = text_of(text, "texts"), #text
  end
  check(lib.fs_embed(client_of(self), starts, lengths, n, self._number))
  return tonumber(self._number[0])
end

--- Sets how the GPU is shared with the game's frames. Returns the request number that an event "refused" would have; no
-- other event follows.
-- @param scheduling_mode "prioritize_graphics" (the sidecar uses only the GPU time that frames leave free), "balance"
--   (more, as long as frames stay within their target time) or "prioritize_compute" (frames are ignored).
-- @param target_tokens_per_second limit for all jobs together, 0.1 to 10,000; 0 (default): no limit.
function Sidecar:set_pacing(scheduling_mode, target_tokens_per_second)
  local mode = place_of(scheduling_mode, SCHEDULING_MODES, "scheduling_mode")
  local rate = number_of(target_tokens_per_second or 0, "target_tokens_per_second", 0, 10000)
  check(lib.fs_set_pacing(client_of(self), mode, rate, self._number))
  return tonumber(self._number[0])
end

--- Asks for the path of the frame block, for `frameshard.frame_block`. Returns the request number of the event
-- "frame_block".
function Sidecar:get_frame_block()
  check(lib.fs_get_frame_block(client_of(self), self._number))
  return tonumber(self._number[0])
end

--- Ends the sidecar for all its clients. The event "closed" follows.
function Sidecar:shutdown()
  check(lib.fs_shutdown(client_of(self)))
end

-- nil stands for a size that the system does not report.
local function known_bytes(bytes)
  return bytes >= 0 and tonumber(bytes) or nil
end

-- The rows of an event "embeddings", as lists of numbers.
local function rows_of(raw)
  local rows, n_dim = {}, tonumber(raw.n_dim)
  for i = 1, tonumber(raw.n_rows) do
    local row = {}
    for j = 1, n_dim do
      row[j] = raw.rows[(i - 1) * n_dim + j - 1]
    end
    rows[i] = row
  end
  return rows
end

-- Makes the caller's event table. Copies everything, because the next fs_poll overwrites `raw`.
local function convert(self, raw)
  local kind = EVENTS[raw.type]
  local event = { type = kind } -- kind is nil for an event of a newer library
  local text = raw.text_length > 0 and ffi.string(raw.text, raw.text_length) or ""
  if raw.job ~= 0 then
    event.job = self._jobs[tonumber(raw.job)]
    event.timeline = tonumber(raw.timeline)
  end
  if raw.request ~= 0 then
    event.request = tonumber(raw.request)
  end
  if raw.status ~= lib.FS_OK then
    event.error = new_error(raw.status, text, ffi.string(raw.detail, raw.detail_length))
  end
  if kind == "text" then
    event.text, event.tokens, event.sentence_end = text, raw.tokens, raw.sentence_end ~= 0
  elseif kind == "thought" then
    event.text, event.tokens = text, raw.tokens
  elseif kind == "tool_call" then
    event.call_id, event.name, event.arguments = ffi.string(raw.call_id), ffi.string(raw.name), text
  elseif kind == "started" then
    event.n_prompt, event.seed, event.n_dropped = raw.n_prompt, tonumber(raw.seed), tonumber(raw.n_dropped)
    event.remote = raw.remote ~= 0
  elseif kind == "progress" then
    event.phase, event.done, event.total = PHASES[raw.phase] or "unknown", raw.done, raw.total
  elseif kind == "done" then
    event.reason, event.n_prompt, event.n_generated = REASONS[raw.reason], raw.n_prompt, raw.n_generated
    event.n_reused, event.n_left = tonumber(raw.n_reused), tonumber(raw.n_left)
    event.n_dropped, event.n_thought = tonumber(raw.n_dropped), tonumber(raw.n_thought)
    event.remote = raw.remote ~= 0
    event.prefill_s, event.decode_s = raw.prefill_s, raw.decode_s
  elseif kind == "cancelled" then
    event.error = new_error(lib.FS_CANCELLED, "the job was cancelled")
  elseif kind == "budget_released" then
    event.budget_bytes, event.used_bytes = tonumber(raw.budget_bytes), tonumber(raw.used_bytes)
    event.host_budget_bytes, event.host_used_bytes = tonumber(raw.host_budget_bytes), tonumber(raw.host_used_bytes)
    event.seconds = raw.seconds
  elseif kind == "budget_observed" then
    event.observed_bytes = known_bytes(raw.observed_bytes)
    event.host_observed_bytes = known_bytes(raw.host_observed_bytes)
    event.seconds = raw.seconds
  elseif kind == "lease" then
    event.decision, event.version = DECISIONS[raw.decision], tonumber(raw.version)
    event.budget_bytes, event.seconds = tonumber(raw.budget_bytes), raw.seconds
    event.host_budget_bytes = tonumber(raw.host_budget_bytes)
  elseif kind == "budget" then
    event.state, event.version = LEASE_STATES[raw.lease_state], tonumber(raw.version)
    event.budget_bytes, event.used_bytes = tonumber(raw.budget_bytes), tonumber(raw.used_bytes)
    event.floor_bytes, event.full_bytes = tonumber(raw.floor_bytes), tonumber(raw.full_bytes)
    event.wanted_bytes = tonumber(raw.wanted_bytes)
    event.host_budget_bytes, event.host_used_bytes = tonumber(raw.host_budget_bytes), tonumber(raw.host_used_bytes)
    event.host_floor_bytes = tonumber(raw.host_floor_bytes)
  elseif kind == "notice" then
    event.kind, event.text = NOTICES[raw.notice] or "unknown", text
    event.budget_bytes, event.seconds = tonumber(raw.budget_bytes), raw.seconds
    event.host_budget_bytes = tonumber(raw.host_budget_bytes)
  elseif kind == "loading" then
    event.stage, event.done, event.total = LOADING_STAGES[tonumber(raw.stage)] or "unknown", raw.done, raw.total
  elseif kind == "caps" then
    event.device, event.detail = text, ffi.string(raw.detail, raw.detail_length)
    event.total_bytes, event.free_bytes = known_bytes(raw.total_bytes), known_bytes(raw.free_bytes)
    event.floor_bytes, event.full_bytes = tonumber(raw.floor_bytes), tonumber(raw.full_bytes)
    event.host_total_bytes, event.host_free_bytes = known_bytes(raw.host_total_bytes), known_bytes(raw.host_free_bytes)
    event.host_floor_bytes = tonumber(raw.host_floor_bytes)
  elseif kind == "plan" then
    event.budget_bytes, event.fits = tonumber(raw.budget_bytes), raw.fits ~= 0
    event.ttft_s, event.tokens_per_second = raw.ttft_s, raw.tokens_per_second
    event.resident_bytes, event.streamed_bytes = tonumber(raw.resident_bytes), tonumber(raw.streamed_bytes)
    event.cpu_bytes = tonumber(raw.cpu_bytes)
  elseif kind == "kv" then
    event.n_tokens, event.file_bytes, event.detail = tonumber(raw.n_tokens), tonumber(raw.file_bytes), text
  elseif kind == "token_count" then
    event.n_tokens, event.n_left = tonumber(raw.n_tokens), tonumber(raw.n_left)
  elseif kind == "embeddings" then
    event.n_dim, event.n_tokens, event.rows = tonumber(raw.n_dim), tonumber(raw.n_tokens), rows_of(raw)
  elseif kind == "frame_block" then
    event.path = text
  elseif kind == "refused" then
    event.floor_bytes = raw.floor_bytes > 0 and tonumber(raw.floor_bytes) or nil
  elseif kind == "adapters" then
    event.detail, event.floor_bytes = ffi.string(raw.detail, raw.detail_length), tonumber(raw.floor_bytes)
  elseif kind == "stats" then
    event.detail = ffi.string(raw.detail, raw.detail_length)
  elseif kind == "engine" then
    event.state, event.restarts = ENGINE_STATES[raw.engine_state] or "unknown", raw.restarts
  elseif kind == "ready" then
    event.name, event.detail = text, ffi.string(raw.detail, raw.detail_length)
    event.floor_bytes, event.full_bytes = tonumber(raw.floor_bytes), tonumber(raw.full_bytes)
  end
  return event
end

local function deliver(self, event)
  local job, kind = event.job, event.type
  if not job then
    return
  end
  if kind == "text" then
    job.text = job.text .. event.text
    if job._updated then
      job._updated(event.text, job, event.sentence_end)
    end
  elseif kind == "thought" then
    job.thought = job.thought .. event.text
  elseif kind == "tool_call" then
    job.tool_calls[#job.tool_calls + 1] = { call_id = event.call_id, name = event.name, arguments = event.arguments }
  elseif kind == "paused" or kind == "resumed" then
    job.paused = kind == "paused"
  elseif kind == "done" then
    self._jobs[job.number], job.ended, job.result = nil, true, event
    if job._finished then
      job._finished(job.text, job)
    end
  elseif kind == "failed" or kind == "cancelled" then
    self._jobs[job.number], job.ended, job.paused, job.error = nil, true, false, event.error
    if job._failed then
      job._failed(event.error, job)
    end
  end
end

--- Call it once a frame. Runs the callbacks and returns a list of events, oldest first; the list may be empty. Never
-- waits. An event has `type` and these fields:
--
-- | type | fields |
-- | --- | --- |
-- | "ready" | `name`, `floor_bytes`, `full_bytes`, `detail` (the protocol's ModelInfo) |
-- | "started" | `job`, `n_prompt`, `seed`, `n_dropped`, `remote` (true if the server of `fallback` answers) |
-- | "text" | `job`, `text`, `tokens`, `sentence_end` (true if a sentence ends; only for jobs with `sentences`) |
-- | "done" | `job`, `reason`, `n_prompt`, `n_generated`, `n_reused`, `n_left`, `remote`, `n_dropped` (oldest
--   questions of the conversation that are not in the prompt, because the context is full), `n_thought`, `prefill_s`,
--   `decode_s` |
-- | "tool_call" | `job`, `call_id`, `name`, `arguments` (JSON); give the results to `tool_results` after "done" |
-- | "thought" | `job`, `text`, `tokens`; only for jobs with `thinking` "shown" |
-- | "progress" | `job`, `phase` ("encode", "prefill"), `done`, `total`; with images or a long prompt |
-- | "paused" (a job of higher priority has its place), "resumed" | `job` |
-- | "failed", "cancelled" | `job`, `error` |
-- | "lease" | `request`, `decision` ("granted", "partial"), `budget_bytes`, `seconds`, `version`,
--   `host_budget_bytes` |
-- | "budget_released" | `request`, `budget_bytes`, `used_bytes`, `seconds`, `host_budget_bytes`, `host_used_bytes` |
-- | "budget_observed" | `request`, `observed_bytes`, `host_observed_bytes`, `seconds` |
-- | "budget" | `request`, `state`, `version`, `budget_bytes`, `floor_bytes`, `full_bytes`, `used_bytes`,
--   `wanted_bytes`, `host_budget_bytes`, `host_floor_bytes`, `host_used_bytes` |
-- | "stats" | `request`, `detail` |
-- | "adapters" | `request`, `detail` (JSON: all that are loaded), `floor_bytes` |
-- | "caps" | `request`, `device`, `total_bytes`, `free_bytes`, `floor_bytes`, `full_bytes`, `host_total_bytes`,
--   `host_free_bytes`, `host_floor_bytes`, `detail` |
-- | "plan" | `request`, `budget_bytes`, `fits`, `ttft_s`, `tokens_per_second`, `resident_bytes`, `streamed_bytes`,
--   `cpu_bytes` |
-- | "token_count" | `request`, `n_tokens`, `n_left` |
-- | "embeddings" | `request`, `n_dim`, `n_tokens`, `rows` (for each text a list of `n_dim` numbers) |
-- | "frame_block" | `request`, `path` |
-- | "kv" | `request`, `n_tokens`, `file_bytes`, `detail` (here a sentence: why `n_tokens` is 0) |
-- | "refused" | `request`, `error`, `floor_bytes` |
-- | "notice" | `kind`, `budget_bytes`, `host_budget_bytes`, `seconds`, `text` |
-- | "engine" | `state`, `restarts`, `error` |
-- | "loading" | `stage` ("read", "profile", "fill"), `done`, `total`; before "ready" with `loading = "on"` |
-- | "closed" | `error`; the last event |
--
-- Events of a job also have its `timeline`. `detail` is a JSON object, or "". Sizes that the system does not report are
-- nil. fs_event in frameshard.h says what each field means.
--
-- An error in a callback is raised from here. All events that this poll would have returned, and the remaining ones, come
-- with the next poll.
-- @param limit maximum number of events that are handled, 256 by default.
function Sidecar:poll(limit)
  limit = integer_of(limit or 256, "limit", 0, 2 ^ 31 - 1)
  local pending, client = self._pending, self._client
  while client and #pending < limit do
    local room = math.min(BATCH, limit - #pending)
    local count = lib.fs_poll(client, self._buffer, ffi.sizeof("fs_event"), room)
    if count < 0 then
      check(-count)
    end
    for index = 0, count - 1 do
      pending[#pending + 1] = convert(self, self._buffer[index])
    end
    if count < room then
      break
    end
  end
  local handled = 0
  while handled < limit and self._pending[1] do -- not `pending`: `close` in a callback drops the rest
    local event = table.remove(self._pending, 1)
    handled = handled + 1
    self._taken[#self._taken + 1] = event -- before its callback, which may raise an error
    deliver(self, event)
  end
  local events = self._taken
  self._taken = {}
  return events
end

--- For scripts without a frame loop. Waits at most `timeout_s` until `poll` has an event. Returns true if it has one.
-- After the event "closed" it returns false within 0.05 s.
function Sidecar:wait(timeout_s)
  return #self._pending + #self._taken > 0 or lib.fs_wait(client_of(self), number_of(timeout_s, "timeout_s", 0, 1e6)) ~= 0
end

--- Ends the session, and the sidecar if this session has launched it. Callbacks of open jobs are not called any more.
-- Waits at most `timeout_s` (1 by default) for the sidecar to end, then kills it. Further calls do nothing.
function Sidecar:close(timeout_s)
  local limit_s = number_of(timeout_s or 1, "timeout_s", 0, 1e6)
  local client = self._client
  if client then
    self._client = nil
    self._pending, self._jobs = {}, {}
    lib.fs_close(ffi.gc(client, nil), limit_s)
  end
end

-- ---- frames ---------------------------------------------------------------------------------------------------------

--- The frame block: shared memory in which the game tells the sidecar when each frame begins, so that the sidecar
-- leaves GPU time to frames. None of its functions waits.
local FrameBlock = {}
FrameBlock.__index = FrameBlock

--- Opens the frame block. Raises an error if there is no frame block at `path`.
-- @param path `path` of an event "frame_block".
-- @param target_frame_s time that a frame should take, such as 1 / 60.
function frameshard.frame_block(path, target_frame_s)
  local block = ffi.new("fs_frame_block *[1]")
  check(lib.fs_frame_block_open(name_of(path, "path"), number_of(target_frame_s, "target_frame_s", 1e-6, 10), block))
  return setmetatable({ _block = ffi.gc(block[0], lib.fs_frame_block_close), _number = ffi.new("uint64_t[1]") },
    FrameBlock)
end

--- Call it at the start of each frame.
function FrameBlock:frame_begin()
  check(lib.fs_frame_begin(self._block))
end

--- Optional: how long the frame kept the GPU busy, in seconds, if the game measures it.
function FrameBlock:frame_end(gpu_busy_s)
  check(lib.fs_frame_end(self._block, number_of(gpu_busy_s, "gpu_busy_s", 0, 1e6)))
end

--- Lets the sidecar use the whole GPU until the next `frame_begin`, for example in a menu.
function FrameBlock:idle()
  check(lib.fs_frame_idle(self._block))
end

--- Like `Sidecar:set_budget`, but faster: the sidecar sees the budget between two steps of the computation that runs.
-- Returns the generation by which `answer` refers to this budget.
function FrameBlock:set_budget(vram_budget_mb)
  check(lib.fs_frame_set_budget(self._block, bytes_of(vram_budget_mb, "vram_budget_mb"), self._number))
  return tonumber(self._number[0])
end

--- Returns the sidecar's answer to `set_budget`: `applied_generation` (the newest budget that is in force),
-- `refused_generation` (the newest one that was below the floor), `budget_bytes`, `used_bytes`, `floor_bytes`.
function FrameBlock:answer()
  local answer = ffi.new("fs_frame_answer")
  answer.struct_size = ffi.sizeof(answer)
  check(lib.fs_frame_get_answer(self._block, answer))
  local made = {}
  for _, name in ipairs({ "applied_generation", "refused_generation", "budget_bytes", "used_bytes", "floor_bytes" }) do
    made[name] = tonumber(answer[name])
  end
  return made
end

--- Closes the frame block. Further calls do nothing.
function FrameBlock:close()
  local block = self._block
  if block then
    self._block = nil
    lib.fs_frame_block_close(ffi.gc(block, nil))
  end
end

return frameshard
