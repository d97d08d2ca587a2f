// Written by `make generate` from bindings/manifest.json; do not edit.

#include "options.h"

#include "seam.h"

namespace frameshard_core {

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
    return fields;
}

} // namespace frameshard_core

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
    frameshard_core::fill(options, struct_size, defaults);
}
