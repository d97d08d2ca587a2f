/* The conformance runner of the C interface. tests/conformance/README.md describes its commands and answers. */
#define _POSIX_C_SOURCE 200809L
#include <cjson/cJSON.h>
#include <frameshard.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_TOOLS = 17 };

static fs_client *client;

static const char *const states[] = {NULL, "active", "parked", "hibernated"};
static const char *const modes[] = {NULL, "prioritize_graphics", "balance", "prioritize_compute"};
static const char *const reasons[] = {NULL, "stop", "length", "tool_calls"};
static const char *const engines[] = {NULL, "loading", "ready", "restarting", "off", "hibernated"};
static const char *const decisions[] = {NULL, "granted", "partial"};
static const char *const notices[] = {NULL,    "wants", "gives_back",   "late", "pressure", "other_process",
                                      "state", "http",  "host_pressure"};
static const char *const formats[] = {NULL, "encoded", "rgb", "rgba"};
static const char *const phases[] = {NULL, "encode", "prefill"};
static const char *const types[] = {
    NULL,          "ready",           "started",         "text",     "done",     "failed",
    "cancelled",   "budget_released", "budget_observed", "budget",   "stats",    "refused",
    "engine",      "closed",          "lease",           "notice",   "caps",     "plan",
    "frame_block", "progress",        "loading",         "adapters", "kv",       "paused",
    "resumed",     "token_count",     "embeddings",      "thought",  "tool_call"};
static const char *const stages[] = {NULL, "read", "profile", "fill"};

/* ---- what the driver says -------------------------------------------------------------------------------------- */

static const char *text(const cJSON *object, const char *name, const char *otherwise) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsString(found) ? found->valuestring : otherwise;
}

static double number(const cJSON *object, const char *name, double otherwise) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(found) ? found->valuedouble : otherwise;
}

/* Returns the index of a word in a list whose first word has index 1; -1 if it is not there. */
static int32_t place(const char *word, const char *const *words, int32_t count) {
    for (int32_t i = 1; i < count; ++i)
        if (strcmp(word, words[i]) == 0)
            return i;
    return -1;
}

static fs_status launch(const cJSON *command) {
    cJSON *options = cJSON_GetObjectItemCaseSensitive(command, "options");
    fs_launch_options launch;
    fs_launch_options_init(&launch, sizeof launch);
    cJSON *python = cJSON_DetachItemFromObjectCaseSensitive(options, "python");
    char *extra = cJSON_PrintUnformatted(options);
    launch.model = text(options, "model", "none");
    launch.python = cJSON_IsString(python) ? python->valuestring : NULL;
    launch.extra_json = extra;
    launch.client_name = "C runner";
    fs_status status = fs_launch(&launch, &client);
    cJSON_Delete(python);
    free(extra);
    return status;
}

/* Reads a file. Sets *size to 0 if it does not exist. */
static void *content(const char *path, uint64_t *size) {
    FILE *file = fopen(path, "rb");
    void *bytes = NULL;
    *size = 0;
    if (file != NULL && fseek(file, 0, SEEK_END) == 0 && (bytes = malloc((size_t)ftell(file))) != NULL) {
        size_t whole = (size_t)ftell(file);
        rewind(file);
        *size = fread(bytes, 1, whole, file);
    }
    if (file != NULL)
        fclose(file);
    return bytes;
}

/* Fills at most MAX_TOOLS tools and returns their number. */
static uint32_t tools_of(const cJSON *given, fs_tool tools[MAX_TOOLS]) {
    const cJSON *tool;
    uint32_t count = 0;
    cJSON_ArrayForEach(tool, cJSON_GetObjectItemCaseSensitive(given, "tools")) if (count < MAX_TOOLS) tools[count++] =
        (fs_tool){text(tool, "name", NULL), text(tool, "description", NULL), text(tool, "schema", NULL)};
    return count;
}

/* What a job's options point to. */
typedef struct kept_options {
    fs_sampling sampling;
    const char *stop[16], *choices[16];
    fs_logit_bias biases[16];
    fs_image images[8];
    fs_adapter adapters[8];
    fs_tool tools[MAX_TOOLS];
} kept_options;

/* Fills `found` with the strings of a list, and returns their number. */
static uint32_t texts(const cJSON *object, const char *name, const char *found[16]) {
    const cJSON *word;
    uint32_t count = 0;
    cJSON_ArrayForEach(word, cJSON_GetObjectItemCaseSensitive(object, name)) if (count < 16) found[count++] =
        word->valuestring;
    return count;
}

static void fill_sampling(const cJSON *wanted, kept_options *kept) {
    fs_sampling *sampling = &kept->sampling;
    const cJSON *word;
    fs_sampling_init(sampling, sizeof *sampling);
    sampling->max_tokens = (int32_t)number(wanted, "max_tokens", sampling->max_tokens);
    sampling->top_k = (int32_t)number(wanted, "top_k", sampling->top_k);
    sampling->temperature = number(wanted, "temperature", sampling->temperature);
    sampling->top_p = number(wanted, "top_p", sampling->top_p);
    sampling->min_p = number(wanted, "min_p", sampling->min_p);
    sampling->repeat_penalty = number(wanted, "repeat_penalty", sampling->repeat_penalty);
    sampling->seed = (int64_t)number(wanted, "seed", -1);
    sampling->frequency_penalty = number(wanted, "frequency_penalty", sampling->frequency_penalty);
    sampling->presence_penalty = number(wanted, "presence_penalty", sampling->presence_penalty);
    sampling->typical_p = number(wanted, "typical_p", sampling->typical_p);
    sampling->xtc_probability = number(wanted, "xtc_probability", sampling->xtc_probability);
    sampling->xtc_threshold = number(wanted, "xtc_threshold", sampling->xtc_threshold);
    sampling->dry_multiplier = number(wanted, "dry_multiplier", sampling->dry_multiplier);
    sampling->dry_base = number(wanted, "dry_base", sampling->dry_base);
    sampling->n_stop = texts(wanted, "stop", kept->stop);
    sampling->stop = kept->stop;
    sampling->json_schema = text(wanted, "json_schema", NULL);
    sampling->n_choices = texts(wanted, "choices", kept->choices);
    sampling->choices = kept->choices;
    sampling->regex = text(wanted, "regex", NULL);
    sampling->lark = text(wanted, "lark", NULL);
    cJSON_ArrayForEach(word, cJSON_GetObjectItemCaseSensitive(wanted, "logit_bias")) if (sampling->n_logit_bias < 16)
        kept->biases[sampling->n_logit_bias++] =
        (fs_logit_bias){text(word, "text", NULL), (int64_t)number(word, "token", 0), number(word, "bias", 0)};
    sampling->logit_bias = kept->biases;
}

/* Makes the job's options. They point into `kept`. The caller frees the images' bytes. */
static fs_job_options job_options(const cJSON *command, kept_options *kept) {
    fs_image *images = kept->images;
    fs_adapter *adapters = kept->adapters;
    fs_tool *tools = kept->tools;
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(command, "options"), *wanted;
    fs_job_options options;
    fs_job_options_init(&options, sizeof options);
    options.conversation = text(given, "conversation", NULL);
    options.system = text(given, "system", NULL);
    options.timeline = (uint64_t)number(given, "timeline", 0);
    options.window = (uint32_t)number(given, "window", options.window);
    options.sentences = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(given, "sentences"));
    options.warm_up = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(given, "warm_up"));
    options.local_only = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(given, "local_only"));
    options.priority = (uint32_t)number(given, "priority", options.priority);
    options.deadline_ms = (uint64_t)number(given, "deadline_ms", 0);
    options.thinking = text(given, "thinking", NULL);
    options.thinking_tokens = (uint64_t)number(given, "thinking_tokens", 0);
    options.template_keywords = text(given, "template_keywords", NULL);
    if ((wanted = cJSON_GetObjectItemCaseSensitive(given, "sampling")) != NULL) {
        fill_sampling(wanted, kept);
        options.sampling = &kept->sampling;
    }
    options.adapters = adapters;
    cJSON_ArrayForEach(wanted, cJSON_GetObjectItemCaseSensitive(given, "adapters")) if (options.n_adapters < 8) {
        adapters[options.n_adapters].name = wanted->string;
        adapters[options.n_adapters++].scale = wanted->valuedouble;
    }
    options.tools = tools;
    options.n_tools = tools_of(given, tools);
    options.tool_choice = text(given, "tool_choice", NULL);
    options.images = images;
    cJSON_ArrayForEach(wanted, cJSON_GetObjectItemCaseSensitive(given, "images")) if (options.n_images < 8) {
        fs_image *image = &images[options.n_images++];
        image->format = (uint32_t)place(text(wanted, "format", ""), formats, 4);
        image->width = (uint32_t)number(wanted, "width", 0);
        image->height = (uint32_t)number(wanted, "height", 0);
        image->stride = (uint32_t)number(wanted, "stride", 0);
        image->data = content(text(wanted, "file", ""), &image->size);
    }
    return options;
}

static const char *item(const cJSON *list, int index) {
    const cJSON *found = cJSON_GetArrayItem(list, index);
    return cJSON_IsString(found) ? found->valuestring : NULL;
}

/* Makes the messages of a chat. The caller frees them with free_messages. */
static fs_chat_message *messages_of(const cJSON *command, uint32_t *count) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(command, "messages"), *said, *call;
    fs_chat_message *messages = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *messages);
    cJSON_ArrayForEach(said, list) {
        fs_chat_message *message = &messages[(*count)++];
        const cJSON *calls = cJSON_GetArrayItem(said, 2);
        fs_tool_call *made = calloc((size_t)cJSON_GetArraySize(calls) + 1, sizeof *made);
        message->role = item(said, 0);
        message->content = item(said, 1);
        message->content_length = FS_NUL_TERMINATED;
        message->tool_call_id = item(said, 2);
        message->tool_calls = made;
        cJSON_ArrayForEach(call, calls) made[message->n_tool_calls++] =
            (fs_tool_call){item(call, 0), item(call, 1), item(call, 2)};
    }
    return messages;
}

static void free_messages(fs_chat_message *messages, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i)
        free((void *)(uintptr_t)messages[i].tool_calls);
    free(messages);
}

/* A chat without calls and results is played by the functions that do not know them. */
static fs_message *plain(const fs_chat_message *messages, uint32_t count) {
    fs_message *made = calloc((size_t)count + 1, sizeof *made);
    for (uint32_t i = 0; i < count; ++i) {
        if (messages[i].n_tool_calls != 0 || messages[i].tool_call_id != NULL) {
            free(made);
            return NULL;
        }
        made[i] = (fs_message){messages[i].role, messages[i].content, FS_NUL_TERMINATED, 0};
    }
    return made;
}

static fs_status count_tokens(const cJSON *command, uint64_t *request) {
    if (text(command, "prompt", NULL) != NULL)
        return fs_count_tokens(client, text(command, "prompt", NULL), FS_NUL_TERMINATED, request);
    fs_tool tools[MAX_TOOLS];
    uint32_t count = 0, n_tools = tools_of(command, tools);
    fs_chat_message *messages = messages_of(command, &count);
    fs_message *without = n_tools == 0 ? plain(messages, count) : NULL;
    fs_status status = without != NULL
                           ? fs_count_chat_tokens(client, without, count, request)
                           : fs_count_chat_tokens_with_tools(client, messages, count, tools, n_tools, request);
    free(without);
    free_messages(messages, count);
    return status;
}

static fs_status embed(const cJSON *command, uint64_t *request) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(command, "texts"), *each;
    const char **texts = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *texts);
    uint32_t count = 0;
    cJSON_ArrayForEach(each, list) texts[count++] = each->valuestring;
    fs_status status = fs_embed(client, texts, NULL, count, request);
    free(texts);
    return status;
}

/* The dot products of the first row with each row. */
static cJSON *cosines(const fs_event *event) {
    cJSON *list = cJSON_CreateArray();
    for (uint64_t i = 0; i < event->n_rows; i++) {
        double sum = 0;
        for (uint64_t j = 0; j < event->n_dim; j++)
            sum += event->rows[j] * event->rows[i * event->n_dim + j];
        cJSON_AddItemToArray(list, cJSON_CreateNumber(sum));
    }
    return list;
}

static fs_status tool_results(const cJSON *command, const fs_job_options *options, uint64_t *job) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(command, "results"), *pair;
    fs_tool_result *results = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *results);
    uint32_t count = 0;
    cJSON_ArrayForEach(pair, list) {
        results[count].call_id = cJSON_GetArrayItem(pair, 0)->valuestring;
        results[count].content = cJSON_GetArrayItem(pair, 1)->valuestring;
        results[count++].content_length = FS_NUL_TERMINATED;
    }
    fs_status status = fs_tool_results(client, results, count, options, job);
    free(results);
    return status;
}

static fs_status submit(const cJSON *command, const char *what, uint64_t *job) {
    kept_options kept;
    fs_job_options options = job_options(command, &kept);
    fs_status status = FS_OK;
    if (strcmp(what, "ask") == 0) {
        status = fs_ask(client, text(command, "text", NULL), FS_NUL_TERMINATED, &options, job);
    } else if (strcmp(what, "tool_results") == 0) {
        status = tool_results(command, &options, job);
    } else if (strcmp(what, "complete") == 0) {
        status = fs_complete(client, text(command, "prompt", NULL), FS_NUL_TERMINATED, &options, job);
    } else {
        uint32_t count = 0;
        fs_chat_message *messages = messages_of(command, &count);
        fs_message *without = plain(messages, count);
        status = without != NULL ? fs_chat(client, without, count, &options, job)
                                 : fs_chat_with_tools(client, messages, count, &options, job);
        free(without);
        free_messages(messages, count);
    }
    for (uint32_t i = 0; i < options.n_images; ++i)
        free((void *)(uintptr_t)kept.images[i].data); /* the library has copied it */
    return status;
}

static void add_text(cJSON *object, const char *name, const char *value);

static fs_status history(const cJSON *command, cJSON *answer) {
    const char *conversation = text(command, "conversation", NULL);
    const fs_message *texts = NULL;
    const fs_chat_message *messages = NULL;
    uint32_t count = 0;
    fs_status status = fs_history(client, conversation, &texts, &count);
    cJSON *list = cJSON_AddArrayToObject(answer, "messages");
    for (uint32_t i = 0; i < count; ++i) {
        const char *pair[] = {texts[i].role, texts[i].content};
        cJSON_AddItemToArray(list, cJSON_CreateStringArray(pair, 2));
    }
    if (status == FS_OK)
        status = fs_history_with_tools(client, conversation, &messages, &count);
    for (uint32_t i = 0; i < count; ++i) {
        cJSON *said = cJSON_GetArrayItem(list, (int)i), *calls = NULL;
        if (messages[i].tool_call_id != NULL)
            cJSON_AddItemToArray(said, cJSON_CreateString(messages[i].tool_call_id));
        if (messages[i].n_tool_calls != 0)
            cJSON_AddItemToArray(said, calls = cJSON_CreateArray());
        for (uint32_t at = 0; at < messages[i].n_tool_calls; ++at) {
            const fs_tool_call *call = &messages[i].tool_calls[at];
            const char *parts[] = {call->call_id, call->name, call->arguments};
            cJSON_AddItemToArray(calls, cJSON_CreateStringArray(parts, 3));
        }
    }
    return status;
}

static fs_status get_http(cJSON *answer) {
    fs_model model = {.struct_size = sizeof model};
    fs_status status = fs_get_model(client, &model);
    if (status == FS_OK) {
        const char *told[] = {model.http_url, model.http_key};
        cJSON_AddItemToObject(answer, "data", cJSON_CreateStringArray(told, 2));
    }
    return status;
}

static fs_status save(const cJSON *command, cJSON *answer) {
    const void *data = NULL;
    uint64_t size = 0;
    fs_status status = fs_save(client, text(command, "conversation", NULL), &data, &size);
    char *hex = calloc((size_t)size + 1, 2);
    for (uint64_t i = 0; i < size; ++i)
        snprintf(hex + 2 * i, 3, "%02x", ((const unsigned char *)data)[i]);
    add_text(answer, "data", hex);
    free(hex);
    return status;
}

static fs_status load(const cJSON *command, cJSON *answer) {
    const char *hex = text(command, "data", "");
    size_t size = strlen(hex) / 2;
    unsigned char *data = malloc(size + 1);
    fs_load_result result = {0};
    result.struct_size = sizeof result;
    for (size_t i = 0; i < size; ++i) {
        char byte[3] = {hex[2 * i], hex[2 * i + 1], 0};
        data[i] = (unsigned char)strtoul(byte, NULL, 16);
    }
    fs_status status = fs_load(client, data, size, text(command, "conversation", NULL), &result);
    free(data);
    cJSON_AddBoolToObject(answer, "same_model", result.same_model);
    cJSON_AddBoolToObject(answer, "same_template", result.same_template);
    return status;
}

static fs_status set_lease(const cJSON *command, uint64_t *request) {
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(command, "lease");
    fs_lease lease;
    fs_lease_init(&lease, sizeof lease);
    lease.vram_budget_bytes = (uint64_t)number(given, "vram_budget_bytes", 0);
    lease.floor_bytes = (uint64_t)number(given, "floor_bytes", 0);
    lease.version = (uint64_t)number(given, "version", 0);
    lease.host_budget_bytes = (int64_t)number(given, "host_budget_bytes", -1);
    lease.timeout_s = number(given, "timeout_s", lease.timeout_s);
    lease.state = place(text(given, "state", "active"), states, 4);
    lease.reason = text(given, "reason", NULL);
    return fs_set_lease(client, &lease, request);
}

static fs_status draw(const cJSON *command) {
    fs_frame_block *block;
    fs_status status = fs_frame_block_open(text(command, "path", ""), number(command, "target_frame_s", 0), &block);
    for (int frames = (int)number(command, "frames", 0); status == FS_OK && frames > 0; --frames)
        if ((status = fs_frame_begin(block)) == FS_OK)
            status = fs_frame_end(block, number(command, "gpu_busy_s", 0));
    fs_frame_block_close(block);
    return status;
}

/* ---- what it hears --------------------------------------------------------------------------------------------- */

static void add(cJSON *object, const char *name, double value) { cJSON_AddNumberToObject(object, name, value); }

static void add_text(cJSON *object, const char *name, const char *value) {
    cJSON_AddStringToObject(object, name, value);
}

/* -1 stands for a size that the system does not report. */
static void add_known(cJSON *object, const char *name, int64_t bytes) {
    if (bytes < 0)
        cJSON_AddNullToObject(object, name);
    else
        add(object, name, (double)bytes);
}

/* Makes an object with all fields of an event. The driver ignores fields that its type does not set. */
static cJSON *told(const fs_event *event) {
    cJSON *object = cJSON_CreateObject();
    add_text(object, "type", types[event->type]);
    add_text(object, "status", fs_status_name(event->status));
    add(object, "job", (double)event->job);
    add(object, "request", (double)event->request);
    add(object, "timeline", (double)event->timeline);
    add_text(object, "text", event->text);
    cJSON_AddItemToObject(object, "detail", event->detail_length ? cJSON_Parse(event->detail) : cJSON_CreateObject());
    add(object, "tokens", event->tokens);
    add(object, "n_tokens", (double)event->n_tokens);
    add(object, "file_bytes", (double)event->file_bytes);
    cJSON_AddBoolToObject(object, "sentence_end", event->sentence_end != 0);
    add(object, "n_prompt", event->n_prompt);
    add(object, "n_generated", event->n_generated);
    add(object, "n_reused", (double)event->n_reused);
    add(object, "n_left", (double)event->n_left);
    cJSON_AddBoolToObject(object, "remote", event->remote != 0);
    add(object, "n_dropped", (double)event->n_dropped);
    add(object, "n_thought", (double)event->n_thought);
    add(object, "n_tokens", (double)event->n_tokens);
    add(object, "n_dim", (double)event->n_dim);
    cJSON_AddItemToObject(object, "cosines", cosines(event));
    add(object, "seed", (double)event->seed);
    add(object, "restarts", event->restarts);
    add(object, "budget_bytes", (double)event->budget_bytes);
    add(object, "used_bytes", (double)event->used_bytes);
    add(object, "floor_bytes", (double)event->floor_bytes);
    add(object, "full_bytes", (double)event->full_bytes);
    add(object, "wanted_bytes", (double)event->wanted_bytes);
    add(object, "host_budget_bytes", (double)event->host_budget_bytes);
    add(object, "host_used_bytes", (double)event->host_used_bytes);
    add(object, "host_floor_bytes", (double)event->host_floor_bytes);
    add_known(object, "host_observed_bytes", event->host_observed_bytes);
    add_known(object, "host_total_bytes", event->host_total_bytes);
    add_known(object, "host_free_bytes", event->host_free_bytes);
    add(object, "seconds", event->seconds);
    add(object, "prefill_s", event->prefill_s);
    add(object, "decode_s", event->decode_s);
    add(object, "version", (double)event->version);
    add(object, "ttft_s", event->ttft_s);
    add(object, "tokens_per_second", event->tokens_per_second);
    add(object, "resident_bytes", (double)event->resident_bytes);
    add(object, "streamed_bytes", (double)event->streamed_bytes);
    add(object, "cpu_bytes", (double)event->cpu_bytes);
    cJSON_AddBoolToObject(object, "fits", event->fits);
    add(object, "done", event->done);
    add(object, "total", event->total);
    add_known(object, "observed_bytes", event->observed_bytes);
    add_known(object, "total_bytes", event->total_bytes);
    add_known(object, "free_bytes", event->free_bytes);
    if (event->reason)
        add_text(object, "reason", reasons[event->reason]);
    if (event->phase)
        add_text(object, "phase", phases[event->phase]);
    if (event->stage)
        add_text(object, "stage", stages[event->stage]);
    if (event->decision)
        add_text(object, "decision", decisions[event->decision]);
    if (event->notice)
        add_text(object, "kind", notices[event->notice]);
    if (event->engine_state || event->lease_state)
        add_text(object, "state", event->engine_state ? engines[event->engine_state] : states[event->lease_state]);
    if (event->type == FS_EVENT_CAPS)
        add_text(object, "device", event->text);
    if (event->type == FS_EVENT_TOOL_CALL) {
        add_text(object, "call_id", event->call_id);
        add_text(object, "name", event->name);
        add_text(object, "arguments", event->text);
    }
    if (event->type == FS_EVENT_FRAME_BLOCK)
        add_text(object, "path", event->text);
    return object;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static fs_status poll(const cJSON *command, cJSON *answer) {
    fs_event events[64];
    int32_t limit = (int32_t)number(command, "limit", 64), count;
    double deadline = now() + number(command, "timeout_s", 0);
    if (limit > 64)
        limit = 64;
    while ((count = fs_poll(client, events, sizeof events[0], limit)) == 0 && now() < deadline)
        fs_wait(client, deadline - now());
    if (count < 0)
        return -count;
    cJSON *list = cJSON_AddArrayToObject(answer, "events");
    for (int32_t i = 0; i < count; ++i)
        cJSON_AddItemToArray(list, told(&events[i]));
    return FS_OK;
}

/* ---- the loop -------------------------------------------------------------------------------------------------- */

static fs_status obey(const cJSON *command, cJSON *answer) {
    const char *what = text(command, "do", "");
    uint64_t job = 0, request = 0;
    fs_status status = FS_UNSUPPORTED;
    if (strcmp(what, "launch") == 0)
        status = launch(command);
    else if (strcmp(what, "connect") == 0)
        status = fs_connect(text(command, "file", ""), "C runner", &client);
    else if (strcmp(what, "ask") == 0 || strcmp(what, "chat") == 0 || strcmp(what, "complete") == 0 ||
             strcmp(what, "tool_results") == 0)
        status = submit(command, what, &job);
    else if (strcmp(what, "cancel") == 0)
        status = fs_cancel(client, (uint64_t)number(command, "job", 0));
    else if (strcmp(what, "history") == 0)
        status = history(command, answer);
    else if (strcmp(what, "get_http") == 0)
        status = get_http(answer);
    else if (strcmp(what, "save") == 0)
        status = save(command, answer);
    else if (strcmp(what, "load") == 0)
        status = load(command, answer);
    else if (strcmp(what, "save_kv") == 0)
        status = fs_save_kv(client, text(command, "conversation", NULL), text(command, "path", NULL), &request);
    else if (strcmp(what, "load_kv") == 0)
        status = fs_load_kv(client, text(command, "path", NULL), text(command, "conversation", NULL), &request);
    else if (strcmp(what, "set_priority") == 0)
        status = fs_set_priority(client, (uint64_t)number(command, "job", 0), (uint32_t)number(command, "priority", 0));
    else if (strcmp(what, "forget") == 0)
        status = fs_forget(client, text(command, "conversation", NULL));
    else if (strcmp(what, "set_lease") == 0)
        status = set_lease(command, &request);
    else if (strcmp(what, "get_budget") == 0)
        status = fs_get_budget(client, &request);
    else if (strcmp(what, "load_adapter") == 0)
        status = fs_load_adapter(client, text(command, "name", ""), text(command, "path", ""), &request);
    else if (strcmp(what, "unload_adapter") == 0)
        status = fs_unload_adapter(client, text(command, "name", ""), &request);
    else if (strcmp(what, "get_stats") == 0)
        status = fs_get_stats(client, &request);
    else if (strcmp(what, "get_caps") == 0)
        status = fs_get_caps(client, &request);
    else if (strcmp(what, "get_plan") == 0)
        status = fs_get_plan(client, (uint64_t)number(command, "vram_budget_bytes", 0),
                             (uint32_t)number(command, "prompt_tokens", 1), &request);
    else if (strcmp(what, "count_tokens") == 0)
        status = count_tokens(command, &request);
    else if (strcmp(what, "embed") == 0)
        status = embed(command, &request);
    else if (strcmp(what, "set_pacing") == 0)
        status = fs_set_pacing(client, place(text(command, "scheduling_mode", ""), modes, 4),
                               number(command, "target_tokens_per_second", 0), &request);
    else if (strcmp(what, "get_frame_block") == 0)
        status = fs_get_frame_block(client, &request);
    else if (strcmp(what, "draw") == 0)
        status = draw(command);
    else if (strcmp(what, "poll") == 0)
        status = poll(command, answer);
    else if (strcmp(what, "shutdown") == 0)
        status = fs_shutdown(client);
    else if (strcmp(what, "close") == 0)
        fs_close(client, 10), client = NULL, status = FS_OK;
    if (job)
        add(answer, "job", (double)job);
    if (request)
        add(answer, "request", (double)request);
    return status;
}

/* Reads a line into *line, which it makes longer. Returns false at the end of the input. Windows has no getline. */
static bool next_line(char **line, size_t *room) {
    size_t length = 0;
    do {
        if (*room - length < 2) {
            *room = *room * 2 + 4096;
            if ((*line = realloc(*line, *room)) == NULL)
                abort();
        }
        if (fgets(*line + length, (int)(*room - length), stdin) == NULL)
            return length > 0;
        length += strlen(*line + length);
    } while (length == 0 || (*line)[length - 1] != '\n');
    return true;
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    while (next_line(&line, &room)) {
        cJSON *command = cJSON_Parse(line), *answer = cJSON_CreateObject();
        fs_status status = obey(command, answer);
        cJSON_AddBoolToObject(answer, "ok", status == FS_OK);
        if (status != FS_OK)
            add_text(answer, "error", fs_status_name(status));
        char *said = cJSON_PrintUnformatted(answer);
        puts(said);
        fflush(stdout);
        free(said);
        cJSON_Delete(answer);
        cJSON_Delete(command);
    }
    fs_close(client, 10);
    free(line);
    return 0;
}
