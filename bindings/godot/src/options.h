/* Properties of the nodes that are options of a launch or of an answer. */
#ifndef FRAMESHARD_GODOT_OPTIONS_H
#define FRAMESHARD_GODOT_OPTIONS_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include <frameshard.h>

/* What a property holds. */
enum class Kind { text, texts, integer, number, boolean };

/* A property, which is a member of a struct of values. */
struct Property {
    const char *name;
    Kind kind;
    size_t offset; // in the struct of values
    int hint;      // PropertyHint
    const char *hint_text;
};

/* A path for the sidecar, which knows nothing of `res://` and `user://`. */
std::string plain_path(const std::string &path);

/* Keeps converted texts alive during one call into the client library. */
class Texts {
  public:
    /* NULL, the library's default, for an empty text. */
    const char *text(const std::string &value) { return value.empty() ? nullptr : kept_.emplace_back(value).c_str(); }
    const char *path(const std::string &value) { return text(plain_path(value)); }
    /* Of `NAME=PATH`. */
    const char *const *adapters(std::vector<std::string> values) {
        for (std::string &value : values) {
            const size_t path = value.find('=') + 1; // 0: the library refuses it
            value = value.substr(0, path) + (path == 0 ? value : plain_path(value.substr(path)));
        }
        return list(values);
    }
    const char *const *list(const std::vector<std::string> &values) {
        std::vector<const char *> &list = lists_.emplace_back();
        for (const std::string &value : values) {
            list.push_back(kept_.emplace_back(value).c_str());
        }
        return list.data();
    }

  private:
    std::deque<std::string> kept_;
    std::deque<std::vector<const char *>> lists_;
};

/* Converts MiB to bytes, rounded up: a size above 0 must not become 0, "no limit". A negative, infinite or undefined size becomes INT64_MAX, which the library
 * refuses for signed and unsigned sizes. */
inline uint64_t bytes_of(double size_mb) {
    return size_mb >= 0 && size_mb < 1e12 ? uint64_t(std::ceil(size_mb * 1048576)) : INT64_MAX;
}

/* A number that does not fit becomes the largest one, which the library refuses. */
template <class Whole> Whole saturated(int64_t value) {
    constexpr auto most = std::numeric_limits<Whole>::max();
    const bool too_small = value < int64_t(std::numeric_limits<Whole>::min());
    const bool too_large = value > 0 && uint64_t(value) > uint64_t(most);
    return too_small || too_large ? most : Whole(value);
}

// clang-format off
// generated: options
struct LaunchValues {
    std::string model;
    std::string device = "auto";
    double vram_budget_mb = 2048;
    int64_t n_ctx = 4096;
    int64_t n_parallel = 4;
    int64_t n_ubatch = 0;
    int64_t n_threads = 0;
    double silent_s = 10;
    std::string transport;
    std::string endpoint;
    std::string connect_file;
    std::string python;
    std::string log_file;
    std::string extra_json;
    std::string mmproj;
    std::string mode = "planned";
    std::string speculate = "auto";
    std::string draft_model;
    std::string kv_type = "f16";
    int64_t max_jobs = 256;
    int64_t max_client_jobs = 64;
    int64_t held_bytes = 49152;
    double hang_idle_s = 5;
    double hang_busy_s = 60;
    double hang_load_s = 600;
    double hang_still_s = 5;
    int64_t restart_limit = 3;
    double restart_window_s = 300;
    double off_pause_s = 1;
    double off_pause_max_s = 60;
    double kv_cache_mb = 512;
    std::string loading = "off";
    std::vector<std::string> adapters;
    std::string http;
    std::string http_key;
    std::string embedder;
    std::string fallback;
    std::string fallback_model;
    std::string fallback_key_file;
    std::string fallback_key_env;
    std::string fallback_http = "loopback";
    double host_budget_mb = 0;
};

inline const Property LAUNCH_PROPERTIES[] = {
    {"model", Kind::text, offsetof(LaunchValues, model), 13, "*.gguf"},
    {"device", Kind::text, offsetof(LaunchValues, device), 0, ""},
    {"vram_budget_mb", Kind::number, offsetof(LaunchValues, vram_budget_mb), 1, "0,1048576,1,or_greater,suffix:MiB"},
    {"n_ctx", Kind::integer, offsetof(LaunchValues, n_ctx), 1, "1,16777216,1"},
    {"n_parallel", Kind::integer, offsetof(LaunchValues, n_parallel), 1, "1,64,1"},
    {"n_ubatch", Kind::integer, offsetof(LaunchValues, n_ubatch), 1, "0,65536,1"},
    {"n_threads", Kind::integer, offsetof(LaunchValues, n_threads), 1, "0,1024,1"},
    {"silent_s", Kind::number, offsetof(LaunchValues, silent_s), 1, "0,1000000,0.001"},
    {"transport", Kind::text, offsetof(LaunchValues, transport), 2, "ipc,tcp"},
    {"endpoint", Kind::text, offsetof(LaunchValues, endpoint), 0, ""},
    {"connect_file", Kind::text, offsetof(LaunchValues, connect_file), 13, ""},
    {"python", Kind::text, offsetof(LaunchValues, python), 13, ""},
    {"log_file", Kind::text, offsetof(LaunchValues, log_file), 13, ""},
    {"extra_json", Kind::text, offsetof(LaunchValues, extra_json), 0, ""},
    {"mmproj", Kind::text, offsetof(LaunchValues, mmproj), 13, "*.gguf"},
    {"mode", Kind::text, offsetof(LaunchValues, mode), 2, "planned,stream_only"},
    {"speculate", Kind::text, offsetof(LaunchValues, speculate), 2, "auto,off"},
    {"draft_model", Kind::text, offsetof(LaunchValues, draft_model), 13, "*.gguf"},
    {"kv_type", Kind::text, offsetof(LaunchValues, kv_type), 2, "f16,q8_0,q4_0"},
    {"max_jobs", Kind::integer, offsetof(LaunchValues, max_jobs), 1, "1,1024,1"},
    {"max_client_jobs", Kind::integer, offsetof(LaunchValues, max_client_jobs), 1, "1,1024,1"},
    {"held_bytes", Kind::integer, offsetof(LaunchValues, held_bytes), 1, "0,49152,1"},
    {"hang_idle_s", Kind::number, offsetof(LaunchValues, hang_idle_s), 1, "0,1000000,0.001"},
    {"hang_busy_s", Kind::number, offsetof(LaunchValues, hang_busy_s), 1, "0,1000000,0.001"},
    {"hang_load_s", Kind::number, offsetof(LaunchValues, hang_load_s), 1, "0,1000000,0.001"},
    {"hang_still_s", Kind::number, offsetof(LaunchValues, hang_still_s), 1, "0,1000000,0.001"},
    {"restart_limit", Kind::integer, offsetof(LaunchValues, restart_limit), 1, "0,1000,1"},
    {"restart_window_s", Kind::number, offsetof(LaunchValues, restart_window_s), 1, "0,1000000,0.001"},
    {"off_pause_s", Kind::number, offsetof(LaunchValues, off_pause_s), 1, "0.05,1000000,0.001"},
    {"off_pause_max_s", Kind::number, offsetof(LaunchValues, off_pause_max_s), 1, "0.05,1000000,0.001"},
    {"kv_cache_mb", Kind::number, offsetof(LaunchValues, kv_cache_mb), 1, "0,1048576,1,or_greater,suffix:MiB"},
    {"loading", Kind::text, offsetof(LaunchValues, loading), 2, "off,on"},
    {"adapters", Kind::texts, offsetof(LaunchValues, adapters), 0, ""},
    {"http", Kind::text, offsetof(LaunchValues, http), 0, ""},
    {"http_key", Kind::text, offsetof(LaunchValues, http_key), 0, ""},
    {"embedder", Kind::text, offsetof(LaunchValues, embedder), 13, "*.gguf"},
    {"fallback", Kind::text, offsetof(LaunchValues, fallback), 0, ""},
    {"fallback_model", Kind::text, offsetof(LaunchValues, fallback_model), 0, ""},
    {"fallback_key_file", Kind::text, offsetof(LaunchValues, fallback_key_file), 13, ""},
    {"fallback_key_env", Kind::text, offsetof(LaunchValues, fallback_key_env), 0, ""},
    {"fallback_http", Kind::text, offsetof(LaunchValues, fallback_http), 2, "loopback,anywhere"},
    {"host_budget_mb", Kind::number, offsetof(LaunchValues, host_budget_mb), 1, "0,1048576,1,or_greater,suffix:MiB"},
};

inline void fill(fs_launch_options &made, const LaunchValues &from, Texts &texts) {
    made.model = texts.path(from.model);
    made.device = texts.text(from.device);
    made.vram_budget_bytes = bytes_of(from.vram_budget_mb);
    made.n_ctx = saturated<decltype(made.n_ctx)>(from.n_ctx);
    made.n_parallel = saturated<decltype(made.n_parallel)>(from.n_parallel);
    made.n_ubatch = saturated<decltype(made.n_ubatch)>(from.n_ubatch);
    made.n_threads = saturated<decltype(made.n_threads)>(from.n_threads);
    made.silent_s = decltype(made.silent_s)(from.silent_s);
    made.transport = texts.text(from.transport);
    made.endpoint = texts.text(from.endpoint);
    made.connect_file = texts.path(from.connect_file);
    made.python = texts.path(from.python);
    made.log_file = texts.path(from.log_file);
    made.extra_json = texts.text(from.extra_json);
    made.mmproj = texts.path(from.mmproj);
    made.mode = texts.text(from.mode);
    made.speculate = texts.text(from.speculate);
    made.draft_model = texts.path(from.draft_model);
    made.kv_type = texts.text(from.kv_type);
    made.max_jobs = saturated<decltype(made.max_jobs)>(from.max_jobs);
    made.max_client_jobs = saturated<decltype(made.max_client_jobs)>(from.max_client_jobs);
    made.held_bytes = saturated<decltype(made.held_bytes)>(from.held_bytes);
    made.hang_idle_s = decltype(made.hang_idle_s)(from.hang_idle_s);
    made.hang_busy_s = decltype(made.hang_busy_s)(from.hang_busy_s);
    made.hang_load_s = decltype(made.hang_load_s)(from.hang_load_s);
    made.hang_still_s = decltype(made.hang_still_s)(from.hang_still_s);
    made.restart_limit = saturated<decltype(made.restart_limit)>(from.restart_limit);
    made.restart_window_s = decltype(made.restart_window_s)(from.restart_window_s);
    made.off_pause_s = decltype(made.off_pause_s)(from.off_pause_s);
    made.off_pause_max_s = decltype(made.off_pause_max_s)(from.off_pause_max_s);
    made.kv_cache_bytes = bytes_of(from.kv_cache_mb);
    made.loading = texts.text(from.loading);
    made.n_adapters = decltype(made.n_adapters)(from.adapters.size());
    made.adapters = texts.adapters(from.adapters);
    made.http = texts.text(from.http);
    made.http_key = texts.text(from.http_key);
    made.embedder = texts.path(from.embedder);
    made.fallback = texts.text(from.fallback);
    made.fallback_model = texts.text(from.fallback_model);
    made.fallback_key_file = texts.path(from.fallback_key_file);
    made.fallback_key_env = texts.text(from.fallback_key_env);
    made.fallback_http = texts.text(from.fallback_http);
    made.host_budget_bytes = bytes_of(from.host_budget_mb);
}

struct SamplingValues {
    int64_t max_tokens = 256;
    int64_t top_k = 40;
    double temperature = 0.8;
    double top_p = 0.95;
    double min_p = 0.05;
    double repeat_penalty = 1;
    int64_t seed = -1;
    std::vector<std::string> stop;
    std::string json_schema;
    double frequency_penalty = 0;
    double presence_penalty = 0;
    double typical_p = 1;
    double xtc_probability = 0;
    double xtc_threshold = 0.1;
    std::vector<std::string> choices;
    std::string regex;
    std::string lark;
    double dry_multiplier = 0;
    double dry_base = 1.75;
    int64_t dry_allowed_length = 2;
    int64_t dry_penalty_last_n = -1;
    std::vector<std::string> dry_sequence_breakers;
};

inline const Property SAMPLING_PROPERTIES[] = {
    {"max_tokens", Kind::integer, offsetof(SamplingValues, max_tokens), 1, "1,1048576,1"},
    {"top_k", Kind::integer, offsetof(SamplingValues, top_k), 1, "0,1048576,1"},
    {"temperature", Kind::number, offsetof(SamplingValues, temperature), 1, "0,5,0.001"},
    {"top_p", Kind::number, offsetof(SamplingValues, top_p), 1, "0,1,0.001"},
    {"min_p", Kind::number, offsetof(SamplingValues, min_p), 1, "0,1,0.001"},
    {"repeat_penalty", Kind::number, offsetof(SamplingValues, repeat_penalty), 1, "0.5,2,0.001"},
    {"seed", Kind::integer, offsetof(SamplingValues, seed), 1, "-1,4294967295,1"},
    {"stop", Kind::texts, offsetof(SamplingValues, stop), 0, ""},
    {"json_schema", Kind::text, offsetof(SamplingValues, json_schema), 0, ""},
    {"frequency_penalty", Kind::number, offsetof(SamplingValues, frequency_penalty), 1, "-2,2,0.001"},
    {"presence_penalty", Kind::number, offsetof(SamplingValues, presence_penalty), 1, "-2,2,0.001"},
    {"typical_p", Kind::number, offsetof(SamplingValues, typical_p), 1, "0,1,0.001"},
    {"xtc_probability", Kind::number, offsetof(SamplingValues, xtc_probability), 1, "0,1,0.001"},
    {"xtc_threshold", Kind::number, offsetof(SamplingValues, xtc_threshold), 1, "0,0.5,0.001"},
    {"choices", Kind::texts, offsetof(SamplingValues, choices), 0, ""},
    {"regex", Kind::text, offsetof(SamplingValues, regex), 0, ""},
    {"lark", Kind::text, offsetof(SamplingValues, lark), 0, ""},
    {"dry_multiplier", Kind::number, offsetof(SamplingValues, dry_multiplier), 1, "0,100,0.001"},
    {"dry_base", Kind::number, offsetof(SamplingValues, dry_base), 1, "1,10,0.001"},
    {"dry_allowed_length", Kind::integer, offsetof(SamplingValues, dry_allowed_length), 1, "1,1024,1"},
    {"dry_penalty_last_n", Kind::integer, offsetof(SamplingValues, dry_penalty_last_n), 1, "-1,1048576,1"},
    {"dry_sequence_breakers", Kind::texts, offsetof(SamplingValues, dry_sequence_breakers), 0, ""},
};

inline void fill(fs_sampling &made, const SamplingValues &from, Texts &texts) {
    made.max_tokens = saturated<decltype(made.max_tokens)>(from.max_tokens);
    made.top_k = saturated<decltype(made.top_k)>(from.top_k);
    made.temperature = decltype(made.temperature)(from.temperature);
    made.top_p = decltype(made.top_p)(from.top_p);
    made.min_p = decltype(made.min_p)(from.min_p);
    made.repeat_penalty = decltype(made.repeat_penalty)(from.repeat_penalty);
    made.seed = from.seed < 0 ? -1 : saturated<decltype(made.seed)>(from.seed);
    made.n_stop = decltype(made.n_stop)(from.stop.size());
    made.stop = texts.list(from.stop);
    made.json_schema = texts.text(from.json_schema);
    made.frequency_penalty = decltype(made.frequency_penalty)(from.frequency_penalty);
    made.presence_penalty = decltype(made.presence_penalty)(from.presence_penalty);
    made.typical_p = decltype(made.typical_p)(from.typical_p);
    made.xtc_probability = decltype(made.xtc_probability)(from.xtc_probability);
    made.xtc_threshold = decltype(made.xtc_threshold)(from.xtc_threshold);
    made.n_choices = decltype(made.n_choices)(from.choices.size());
    made.choices = texts.list(from.choices);
    made.regex = texts.text(from.regex);
    made.lark = texts.text(from.lark);
    made.dry_multiplier = decltype(made.dry_multiplier)(from.dry_multiplier);
    made.dry_base = decltype(made.dry_base)(from.dry_base);
    made.dry_allowed_length = saturated<decltype(made.dry_allowed_length)>(from.dry_allowed_length);
    made.dry_penalty_last_n = saturated<decltype(made.dry_penalty_last_n)>(from.dry_penalty_last_n);
    made.n_dry_sequence_breakers = decltype(made.n_dry_sequence_breakers)(from.dry_sequence_breakers.size());
    made.dry_sequence_breakers = texts.list(from.dry_sequence_breakers);
}

inline constexpr const char *EngineState[] = {"loading", "ready", "restarting", "off", "hibernated"};
inline constexpr const char *NoticeKind[] = {"wants", "gives_back", "late", "pressure", "other_process", "state", "http", "host_pressure"};
inline constexpr const char *LoadingStage[] = {"read", "profile", "fill"};
inline constexpr const char *LeaseState[] = {"active", "parked", "hibernated"};
inline constexpr const char *SchedulingMode[] = {"prioritize_graphics", "balance", "prioritize_compute"};
// end of options
// clang-format on

#endif
