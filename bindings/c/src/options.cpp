// Written by `make generate` from bindings/generated-manifest.json; do not edit.

#include "options.h"

#include "seam.h"
#include "words.h"

namespace frameshard_core {

json fields_of(const fs_launch_options &given) {
    json fields = json::object();
    fields["model"] = text_of("model", given.model, 1, 4096);
    if (given.device != nullptr) {
        fields["device"] = text_of("device", given.device, 1, 256);
    }
    if (given.vram_budget_bytes != 0) {
        check_range("vram_budget_bytes", double(given.vram_budget_bytes), 0, 9007199254740991);
        fields["vram_budget_bytes"] = given.vram_budget_bytes;
    }
    if (given.n_ctx != 4096) {
        check_range("n_ctx", double(given.n_ctx), 1, 16777216);
        fields["n_ctx"] = given.n_ctx;
    }
    if (given.n_parallel != 4) {
        check_range("n_parallel", double(given.n_parallel), 1, 64);
        fields["n_parallel"] = given.n_parallel;
    }
    if (given.n_ubatch != 0) {
        check_range("n_ubatch", double(given.n_ubatch), 0, 65536);
        fields["n_ubatch"] = given.n_ubatch;
    }
    if (given.n_threads != 0) {
        check_range("n_threads", double(given.n_threads), 0, 1024);
        fields["n_threads"] = given.n_threads;
    }
    if (given.silent_s != 10) {
        check_range("silent_s", double(given.silent_s), 0, 1000000);
        fields["silent_s"] = given.silent_s;
    }
    if (given.transport != nullptr) {
        fields["transport"] = word_of("transport", given.transport, {"ipc", "tcp"});
    }
    if (given.endpoint != nullptr) {
        fields["endpoint"] = text_of("endpoint", given.endpoint, 0, 4096);
    }
    if (given.connect_file != nullptr) {
        fields["connect_file"] = text_of("connect_file", given.connect_file, 0, 4096);
    }
    if (given.mmproj != nullptr) {
        fields["mmproj"] = text_of("mmproj", given.mmproj, 0, 4096);
    }
    if (given.mode != nullptr) {
        fields["mode"] = word_of("mode", given.mode, {"planned", "stream_only"});
    }
    if (given.speculate != nullptr) {
        fields["speculate"] = word_of("speculate", given.speculate, {"auto", "off"});
    }
    if (given.draft_model != nullptr) {
        fields["draft_model"] = text_of("draft_model", given.draft_model, 0, 4096);
    }
    if (given.kv_type != nullptr) {
        fields["kv_type"] = word_of("kv_type", given.kv_type, {"f16", "q8_0", "q4_0"});
    }
    if (given.max_jobs != 256) {
        check_range("max_jobs", double(given.max_jobs), 1, 1024);
        fields["max_jobs"] = given.max_jobs;
    }
    if (given.max_client_jobs != 64) {
        check_range("max_client_jobs", double(given.max_client_jobs), 1, 1024);
        fields["max_client_jobs"] = given.max_client_jobs;
    }
    if (given.held_bytes != 49152) {
        check_range("held_bytes", double(given.held_bytes), 0, 49152);
        fields["held_bytes"] = given.held_bytes;
    }
    if (given.hang_idle_s != 5) {
        check_range("hang_idle_s", double(given.hang_idle_s), 0, 1000000);
        fields["hang_idle_s"] = given.hang_idle_s;
    }
    if (given.hang_busy_s != 60) {
        check_range("hang_busy_s", double(given.hang_busy_s), 0, 1000000);
        fields["hang_busy_s"] = given.hang_busy_s;
    }
    if (given.hang_load_s != 600) {
        check_range("hang_load_s", double(given.hang_load_s), 0, 1000000);
        fields["hang_load_s"] = given.hang_load_s;
    }
    if (given.hang_still_s != 5) {
        check_range("hang_still_s", double(given.hang_still_s), 0, 1000000);
        fields["hang_still_s"] = given.hang_still_s;
    }
    if (given.restart_limit != 3) {
        check_range("restart_limit", double(given.restart_limit), 0, 1000);
        fields["restart_limit"] = given.restart_limit;
    }
    if (given.restart_window_s != 300) {
        check_range("restart_window_s", double(given.restart_window_s), 0, 1000000);
        fields["restart_window_s"] = given.restart_window_s;
    }
    if (given.off_pause_s != 1) {
        check_range("off_pause_s", double(given.off_pause_s), 0.05, 1000000);
        fields["off_pause_s"] = given.off_pause_s;
    }
    if (given.off_pause_max_s != 60) {
        check_range("off_pause_max_s", double(given.off_pause_max_s), 0.05, 1000000);
        fields["off_pause_max_s"] = given.off_pause_max_s;
    }
    if (given.kv_cache_bytes != 536870912) {
        check_range("kv_cache_bytes", double(given.kv_cache_bytes), 0, 9007199254740991);
        fields["kv_cache_bytes"] = given.kv_cache_bytes;
    }
    if (given.loading != nullptr) {
        fields["loading"] = word_of("loading", given.loading, {"off", "on"});
    }
    if (given.n_adapters != 0) {
        fields["adapters"] = texts_of("adapters", given.adapters, given.n_adapters, 16, 1, 4161);
    }
    if (given.http != nullptr) {
        fields["http"] = text_of("http", given.http, 0, 64);
    }
    if (given.http_key != nullptr) {
        fields["http_key"] = text_of("http_key", given.http_key, 0, 256);
    }
    if (given.embedder != nullptr) {
        fields["embedder"] = text_of("embedder", given.embedder, 0, 4096);
    }
    if (given.fallback != nullptr) {
        fields["fallback"] = text_of("fallback", given.fallback, 0, 2048);
    }
    if (given.fallback_model != nullptr) {
        fields["fallback_model"] = text_of("fallback_model", given.fallback_model, 0, 256);
    }
    if (given.fallback_key_file != nullptr) {
        fields["fallback_key_file"] = text_of("fallback_key_file", given.fallback_key_file, 0, 4096);
    }
    if (given.fallback_key_env != nullptr) {
        fields["fallback_key_env"] = text_of("fallback_key_env", given.fallback_key_env, 0, 256);
    }
    if (given.fallback_http != nullptr) {
        fields["fallback_http"] = word_of("fallback_http", given.fallback_http, {"loopback", "anywhere"});
    }
    if (given.host_budget_bytes != 0) {
        check_range("host_budget_bytes", double(given.host_budget_bytes), 0, 9007199254740991);
        fields["host_budget_bytes"] = given.host_budget_bytes;
    }
    return fields;
}

json fields_of(const fs_sampling &given) {
    json fields = json::object();
    if (given.max_tokens != 256) {
        check_range("max_tokens", double(given.max_tokens), 1, 1048576);
        fields["max_tokens"] = given.max_tokens;
    }
    if (given.top_k != 40) {
        check_range("top_k", double(given.top_k), 0, 1048576);
        fields["top_k"] = given.top_k;
    }
    if (given.temperature != 0.8) {
        check_range("temperature", double(given.temperature), 0, 5);
        fields["temperature"] = given.temperature;
    }
    if (given.top_p != 0.95) {
        check_range("top_p", double(given.top_p), 0, 1);
        fields["top_p"] = given.top_p;
    }
    if (given.min_p != 0.05) {
        check_range("min_p", double(given.min_p), 0, 1);
        fields["min_p"] = given.min_p;
    }
    if (given.repeat_penalty != 1) {
        check_range("repeat_penalty", double(given.repeat_penalty), 0.5, 2);
        fields["repeat_penalty"] = given.repeat_penalty;
    }
    if (given.seed != -1) {
        check_range("seed", double(given.seed), 0, 4294967295);
        fields["seed"] = given.seed;
    }
    if (given.n_stop != 0) {
        fields["stop"] = texts_of("stop", given.stop, given.n_stop, 16, 1, 256);
    }
    if (given.json_schema != nullptr) {
        fields["json_schema"] = text_of("json_schema", given.json_schema, 0, 65536);
    }
    if (given.frequency_penalty != 0) {
        check_range("frequency_penalty", double(given.frequency_penalty), -2, 2);
        fields["frequency_penalty"] = given.frequency_penalty;
    }
    if (given.presence_penalty != 0) {
        check_range("presence_penalty", double(given.presence_penalty), -2, 2);
        fields["presence_penalty"] = given.presence_penalty;
    }
    if (given.typical_p != 1) {
        check_range("typical_p", double(given.typical_p), 0, 1);
        fields["typical_p"] = given.typical_p;
    }
    if (given.xtc_probability != 0) {
        check_range("xtc_probability", double(given.xtc_probability), 0, 1);
        fields["xtc_probability"] = given.xtc_probability;
    }
    if (given.xtc_threshold != 0.1) {
        check_range("xtc_threshold", double(given.xtc_threshold), 0, 0.5);
        fields["xtc_threshold"] = given.xtc_threshold;
    }
    if (given.n_choices != 0) {
        fields["choices"] = texts_of("choices", given.choices, given.n_choices, 256, 1, 4096);
    }
    if (given.regex != nullptr) {
        fields["regex"] = text_of("regex", given.regex, 0, 65536);
    }
    if (given.lark != nullptr) {
        fields["lark"] = text_of("lark", given.lark, 0, 65536);
    }
    if (given.n_logit_bias != 0) {
        fields["logit_bias"] = records_of("logit_bias", given.logit_bias, given.n_logit_bias, 256);
    }
    if (given.dry_multiplier != 0) {
        check_range("dry_multiplier", double(given.dry_multiplier), 0, 100);
        fields["dry_multiplier"] = given.dry_multiplier;
    }
    if (given.dry_base != 1.75) {
        check_range("dry_base", double(given.dry_base), 1, 10);
        fields["dry_base"] = given.dry_base;
    }
    if (given.dry_allowed_length != 2) {
        check_range("dry_allowed_length", double(given.dry_allowed_length), 1, 1024);
        fields["dry_allowed_length"] = given.dry_allowed_length;
    }
    if (given.dry_penalty_last_n != -1) {
        check_range("dry_penalty_last_n", double(given.dry_penalty_last_n), -1, 1048576);
        fields["dry_penalty_last_n"] = given.dry_penalty_last_n;
    }
    if (given.n_dry_sequence_breakers != 0) {
        fields["dry_sequence_breakers"] =
            texts_of("dry_sequence_breakers", given.dry_sequence_breakers, given.n_dry_sequence_breakers, 16, 1, 40);
    }
    return fields;
}

json fields_of(const fs_lease &given) {
    json fields = json::object();
    if (given.state != FS_LEASE_ACTIVE) {
        fields["state"] = word_of("state", given.state, kLeaseState);
    }
    check_range("vram_budget_bytes", double(given.vram_budget_bytes), 0, 9007199254740991);
    fields["vram_budget_bytes"] = given.vram_budget_bytes;
    if (given.floor_bytes != 0) {
        check_range("floor_bytes", double(given.floor_bytes), 0, 9007199254740991);
        fields["floor_bytes"] = given.floor_bytes;
    }
    if (given.version != 0) {
        check_range("version", double(given.version), 0, 9007199254740991);
        fields["version"] = given.version;
    }
    if (given.timeout_s != 5) {
        check_range("timeout_s", double(given.timeout_s), 0.001, 60);
        fields["timeout_s"] = given.timeout_s;
    }
    if (given.reason != nullptr) {
        fields["reason"] = text_of("reason", given.reason, 0, 64);
    }
    if (given.host_budget_bytes != -1) {
        check_range("host_budget_bytes", double(given.host_budget_bytes), 0, 9007199254740991);
        fields["host_budget_bytes"] = given.host_budget_bytes;
    }
    return fields;
}

} // namespace frameshard_core

void fs_launch_options_init(fs_launch_options *options, uint32_t struct_size) {
    fs_launch_options defaults{};
    defaults.struct_size = struct_size;
    defaults.n_ctx = 4096;
    defaults.n_parallel = 4;
    defaults.silent_s = 10;
    defaults.max_jobs = 256;
    defaults.max_client_jobs = 64;
    defaults.held_bytes = 49152;
    defaults.hang_idle_s = 5;
    defaults.hang_busy_s = 60;
    defaults.hang_load_s = 600;
    defaults.hang_still_s = 5;
    defaults.restart_limit = 3;
    defaults.restart_window_s = 300;
    defaults.off_pause_s = 1;
    defaults.off_pause_max_s = 60;
    defaults.kv_cache_bytes = 536870912;
    frameshard_core::fill(options, struct_size, defaults);
}

void fs_sampling_init(fs_sampling *options, uint32_t struct_size) {
    fs_sampling defaults{};
    defaults.struct_size = struct_size;
    defaults.max_tokens = 256;
    defaults.top_k = 40;
    defaults.temperature = 0.8;
    defaults.top_p = 0.95;
    defaults.min_p = 0.05;
    defaults.repeat_penalty = 1;
    defaults.seed = -1;
    defaults.typical_p = 1;
    defaults.xtc_threshold = 0.1;
    defaults.dry_base = 1.75;
    defaults.dry_allowed_length = 2;
    defaults.dry_penalty_last_n = -1;
    frameshard_core::fill(options, struct_size, defaults);
}

void fs_lease_init(fs_lease *options, uint32_t struct_size) {
    fs_lease defaults{};
    defaults.struct_size = struct_size;
    defaults.state = FS_LEASE_ACTIVE;
    defaults.timeout_s = 5;
    defaults.host_budget_bytes = -1;
    frameshard_core::fill(options, struct_size, defaults);
}
