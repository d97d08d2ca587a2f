/* The conformance runner of the C++ header. tests/conformance/README.md describes its commands and answers. */
#include <frameshard.hpp>

#include <chrono>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

using frameshard::Client;
using frameshard::Event;
using nlohmann::json;

namespace {

const std::vector<std::string> kStates = {"", "active", "parked", "hibernated"};
const std::vector<std::string> kModes = {"", "prioritize_graphics", "balance", "prioritize_compute"};
const std::vector<std::string> kReasons = {"", "stop", "length", "tool_calls"};
const std::vector<std::string> kEngines = {"", "loading", "ready", "restarting", "off", "hibernated"};
const std::vector<std::string> kDecisions = {"", "granted", "partial"};
const std::vector<std::string> kStages = {"unknown", "read", "profile", "fill"};
const std::vector<std::string> kNotices = {"",      "wants", "gives_back",   "late", "pressure", "other_process",
                                           "state", "http",  "host_pressure"};

/* Returns the index of a word; -1, which the library refuses, for an unknown word. */
int32_t place(const std::vector<std::string> &words, const std::string &word) {
    for (size_t i = 1; i < words.size(); ++i) {
        if (words[i] == word) {
            return int32_t(i);
        }
    }
    return -1;
}

const char *text(const json &object, const char *name) {
    auto found = object.find(name);
    return found == object.end() ? nullptr : found->get_ref<const std::string &>().c_str();
}

const char *chars(const json &value) { return value.get_ref<const std::string &>().c_str(); }

std::vector<const char *> texts(const json &object, const char *name) {
    std::vector<const char *> found;
    if (auto list = object.find(name); list != object.end()) {
        for (const json &word : *list) {
            found.push_back(chars(word));
        }
    }
    return found;
}

std::vector<fs_tool> tools_of(const json &given) {
    std::vector<fs_tool> tools;
    if (given.contains("tools")) {
        for (const json &tool : given["tools"]) {
            tools.push_back({text(tool, "name"), text(tool, "description"), text(tool, "schema")});
        }
    }
    return tools;
}

/* A job's options, with the objects that they point to. */
struct Options {
    explicit Options(const json &command) {
        json given = command.value("options", json::object());
        kept = given;
        options.conversation = text(kept, "conversation");
        options.system = text(kept, "system");
        options.timeline = kept.value("timeline", options.timeline);
        options.window = kept.value("window", options.window);
        options.sentences = kept.value("sentences", false);
        options.warm_up = kept.value("warm_up", false);
        options.local_only = kept.value("local_only", false);
        options.priority = kept.value("priority", options.priority);
        if (kept.contains("adapters")) {
            for (const auto &[name, scale] : kept["adapters"].items()) {
                adapters.push_back({name.c_str(), scale});
            }
        }
        options.adapters = adapters.data();
        options.n_adapters = adapters.size();
        options.deadline_ms = kept.value("deadline_ms", options.deadline_ms);
        options.thinking = text(kept, "thinking");
        options.thinking_tokens = kept.value("thinking_tokens", options.thinking_tokens);
        options.template_keywords = text(kept, "template_keywords");
        tools = tools_of(kept);
        options.tools = tools.data();
        options.n_tools = tools.size();
        options.tool_choice = text(kept, "tool_choice");
        auto wanted = kept.find("sampling");
        if (wanted == kept.end()) {
            return;
        }
        sampling.max_tokens = wanted->value("max_tokens", sampling.max_tokens);
        sampling.top_k = wanted->value("top_k", sampling.top_k);
        sampling.temperature = wanted->value("temperature", sampling.temperature);
        sampling.top_p = wanted->value("top_p", sampling.top_p);
        sampling.min_p = wanted->value("min_p", sampling.min_p);
        sampling.repeat_penalty = wanted->value("repeat_penalty", sampling.repeat_penalty);
        sampling.seed = wanted->value("seed", sampling.seed);
        sampling.frequency_penalty = wanted->value("frequency_penalty", sampling.frequency_penalty);
        sampling.presence_penalty = wanted->value("presence_penalty", sampling.presence_penalty);
        sampling.typical_p = wanted->value("typical_p", sampling.typical_p);
        sampling.xtc_probability = wanted->value("xtc_probability", sampling.xtc_probability);
        sampling.xtc_threshold = wanted->value("xtc_threshold", sampling.xtc_threshold);
        sampling.dry_multiplier = wanted->value("dry_multiplier", sampling.dry_multiplier);
        sampling.dry_base = wanted->value("dry_base", sampling.dry_base);
        stop = texts(*wanted, "stop");
        sampling.n_stop = uint32_t(stop.size());
        sampling.stop = stop.data();
        sampling.json_schema = text(*wanted, "json_schema");
        choices = texts(*wanted, "choices");
        sampling.n_choices = choices.size();
        sampling.choices = choices.data();
        sampling.regex = text(*wanted, "regex");
        sampling.lark = text(*wanted, "lark");
        if (wanted->contains("logit_bias")) {
            for (const json &bias : (*wanted)["logit_bias"]) {
                biases.push_back({text(bias, "text"), bias.value("token", int64_t(0)), bias["bias"]});
            }
        }
        sampling.n_logit_bias = biases.size();
        sampling.logit_bias = biases.data();
        options.sampling = &sampling;
    }

    json kept;
    std::vector<fs_adapter> adapters;
    std::vector<fs_tool> tools;
    std::vector<const char *> stop, choices;
    std::vector<fs_logit_bias> biases;
    frameshard::Sampling sampling;
    frameshard::JobOptions options;
};

json known(int64_t bytes) { return bytes < 0 ? json() : json(bytes); }

/* The dot products of the first row with each row. */
json cosines(const Event &event) {
    json found = json::array();
    for (const float *row = event.rows; row != event.rows + event.n_rows * event.n_dim; row += event.n_dim) {
        found.push_back(std::inner_product(row, row + event.n_dim, event.rows, 0.0));
    }
    return found;
}

json told(const frameshard::Message &message) {
    json said = json::array({message.role, message.content});
    if (message.tool_call_id != nullptr) {
        said.push_back(message.tool_call_id);
    } else if (!message.tool_calls.empty()) {
        json calls = json::array();
        for (const fs_tool_call &call : message.tool_calls) {
            calls.push_back(json::array({call.call_id, call.name, call.arguments}));
        }
        said.push_back(std::move(calls));
    }
    return said;
}

json told(const Event &event) {
    uint64_t job = event.job, request = event.request, timeline = event.timeline;
    json of_job = {{"job", job}, {"timeline", timeline}};
    json of_request = {{"request", request}};
    json detail = event.detail().empty() ? json::object() : json::parse(event.detail());
    json why = {{"status", fs_status_name(event.status)}, {"detail", detail}};
    json said;
    switch (event.type) {
    case FS_EVENT_READY:
        return {{"type", "ready"},
                {"detail", detail},
                {"floor_bytes", event.floor_bytes},
                {"full_bytes", event.full_bytes}};
    case FS_EVENT_STARTED:
        said = {{"type", "started"}, {"n_prompt", event.n_prompt}, {"seed", event.seed}, {"remote", event.remote != 0}};
        said.update(of_job);
        break;
    case FS_EVENT_TEXT:
        said = {{"type", "text"},
                {"text", event.text()},
                {"tokens", event.tokens},
                {"sentence_end", event.sentence_end != 0}};
        said.update(of_job);
        break;
    case FS_EVENT_THOUGHT:
        said = {{"type", "thought"}, {"text", event.text()}, {"tokens", event.tokens}};
        said.update(of_job);
        break;
    case FS_EVENT_TOOL_CALL:
        said = {{"type", "tool_call"}, {"call_id", event.call_id}, {"name", event.name}, {"arguments", event.text()}};
        said.update(of_job);
        break;
    case FS_EVENT_PAUSED:
    case FS_EVENT_RESUMED:
        said = {{"type", event.type == FS_EVENT_PAUSED ? "paused" : "resumed"}};
        said.update(of_job);
        break;
    case FS_EVENT_DONE:
        said = {{"type", "done"},
                {"reason", kReasons.at(event.reason)},
                {"n_prompt", event.n_prompt},
                {"n_generated", event.n_generated},
                {"n_reused", event.n_reused},
                {"n_left", event.n_left},
                {"remote", event.remote != 0},
                {"n_dropped", event.n_dropped},
                {"n_thought", event.n_thought},
                {"prefill_s", event.prefill_s},
                {"decode_s", event.decode_s}};
        said.update(of_job);
        break;
    case FS_EVENT_FAILED:
        said = {{"type", "failed"}};
        said.update(of_job);
        said.update(why);
        break;
    case FS_EVENT_CANCELLED:
        said = {{"type", "cancelled"}};
        said.update(of_job);
        break;
    case FS_EVENT_LEASE:
        said = {{"type", "lease"},
                {"decision", kDecisions.at(event.decision)},
                {"budget_bytes", event.budget_bytes},
                {"seconds", event.seconds},
                {"version", event.version},
                {"host_budget_bytes", event.host_budget_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_BUDGET_RELEASED:
        said = {{"type", "budget_released"},
                {"budget_bytes", event.budget_bytes},
                {"used_bytes", event.used_bytes},
                {"seconds", event.seconds},
                {"host_budget_bytes", event.host_budget_bytes},
                {"host_used_bytes", event.host_used_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_BUDGET_OBSERVED:
        said = {{"type", "budget_observed"},
                {"observed_bytes", known(event.observed_bytes)},
                {"host_observed_bytes", known(event.host_observed_bytes)},
                {"seconds", event.seconds}};
        said.update(of_request);
        break;
    case FS_EVENT_BUDGET:
        said = {{"type", "budget"},
                {"state", kStates.at(event.lease_state)},
                {"version", event.version},
                {"budget_bytes", event.budget_bytes},
                {"floor_bytes", event.floor_bytes},
                {"full_bytes", event.full_bytes},
                {"used_bytes", event.used_bytes},
                {"wanted_bytes", event.wanted_bytes},
                {"host_budget_bytes", event.host_budget_bytes},
                {"host_floor_bytes", event.host_floor_bytes},
                {"host_used_bytes", event.host_used_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_ADAPTERS:
        said = {{"type", "adapters"}, {"detail", detail}, {"floor_bytes", event.floor_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_STATS:
        said = {{"type", "stats"}, {"detail", detail}};
        said.update(of_request);
        break;
    case FS_EVENT_CAPS:
        said = {{"type", "caps"},
                {"device", event.text()},
                {"total_bytes", known(event.total_bytes)},
                {"free_bytes", known(event.free_bytes)},
                {"floor_bytes", event.floor_bytes},
                {"full_bytes", event.full_bytes},
                {"host_total_bytes", known(event.host_total_bytes)},
                {"host_free_bytes", known(event.host_free_bytes)},
                {"host_floor_bytes", event.host_floor_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_PLAN:
        said = {{"type", "plan"},
                {"budget_bytes", event.budget_bytes},
                {"fits", event.fits != 0},
                {"ttft_s", event.ttft_s},
                {"tokens_per_second", event.tokens_per_second},
                {"resident_bytes", event.resident_bytes},
                {"streamed_bytes", event.streamed_bytes},
                {"cpu_bytes", event.cpu_bytes}};
        said.update(of_request);
        break;
    case FS_EVENT_KV:
        said = {{"type", "kv"}, {"n_tokens", event.n_tokens}, {"file_bytes", event.file_bytes}, {"text", event.text()}};
        said.update(of_request);
        break;
    case FS_EVENT_TOKEN_COUNT:
        said = {{"type", "token_count"}, {"n_tokens", event.n_tokens}, {"n_left", event.n_left}};
        said.update(of_request);
        break;
    case FS_EVENT_EMBEDDINGS:
        said = {
            {"type", "embeddings"}, {"n_dim", event.n_dim}, {"n_tokens", event.n_tokens}, {"cosines", cosines(event)}};
        said.update(of_request);
        break;
    case FS_EVENT_FRAME_BLOCK:
        said = {{"type", "frame_block"}, {"path", event.text()}};
        said.update(of_request);
        break;
    case FS_EVENT_REFUSED:
        said = {{"type", "refused"}};
        said.update(of_request);
        said.update(why);
        break;
    case FS_EVENT_ENGINE:
        return {{"type", "engine"}, {"state", kEngines.at(event.engine_state)}, {"restarts", event.restarts}};
    case FS_EVENT_NOTICE:
        return {{"type", "notice"},
                {"kind", event.notice == 0 ? "unknown" : kNotices.at(event.notice)},
                {"budget_bytes", event.budget_bytes},
                {"seconds", event.seconds},
                {"text", event.text()},
                {"host_budget_bytes", event.host_budget_bytes}};
    case FS_EVENT_LOADING:
        return {{"type", "loading"}, {"stage", kStages.at(event.stage)}, {"done", event.done}, {"total", event.total}};
    case FS_EVENT_CLOSED:
        said = {{"type", "closed"}};
        said.update(why);
        break;
    default:
        said = {{"type", "unknown"}};
    }
    return said;
}

class Runner {
  public:
    json obey(const json &command) {
        std::string what = command["do"];
        if (what == "launch") {
            json options = command["options"];
            std::string python = options.value("python", "python3"), model = options.value("model", "none");
            options.erase("python");
            std::string extra = options.dump();
            frameshard::LaunchOptions launch;
            launch.model = model.c_str();
            launch.python = python.c_str();
            launch.extra_json = extra.c_str();
            launch.client_name = "C++ runner";
            client_ = Client::launch(launch);
        } else if (what == "connect") {
            client_ = Client::connect(command["file"], "C++ runner");
        } else if (what == "close") {
            if (client_) {
                client_->close(10);
            }
            client_.reset();
        } else if (what == "draw") {
            frameshard::FrameBlock block(command["path"], command["target_frame_s"]);
            for (int frames = command["frames"]; frames > 0; --frames) {
                block.begin();
                block.end(command["gpu_busy_s"]);
            }
        } else if (!client_) {
            throw frameshard::Error(FS_CONNECTION_LOST, "there is no client");
        } else if (what == "ask") {
            return {{"job", client_->ask(text(command, "text"), Options(command).options)}};
        } else if (what == "tool_results") {
            std::map<std::string, std::string> results;
            for (const json &pair : command["results"]) {
                results.emplace(pair[0], pair[1]);
            }
            return {{"job", client_->tool_results(results, Options(command).options)}};
        } else if (what == "chat") {
            return {{"job", client_->chat(messages_of(command), Options(command).options)}};
        } else if (what == "complete") {
            return {{"job", client_->complete(text(command, "prompt"), Options(command).options)}};
        } else if (what == "cancel") {
            client_->cancel(command["job"]);
        } else if (what == "set_priority") {
            client_->set_priority(command["job"], command["priority"]);
        } else if (what == "forget") {
            client_->forget(command["conversation"]);
        } else if (what == "history") {
            json messages = json::array();
            for (const frameshard::Message &message : client_->history(command["conversation"])) {
                messages.push_back(told(message));
            }
            return {{"messages", messages}};
        } else if (what == "get_http") {
            fs_model model = client_->model();
            return {{"data", json::array({model.http_url, model.http_key})}};
        } else if (what == "save") {
            std::string hex;
            for (unsigned char byte : client_->save(command["conversation"])) {
                hex += "0123456789abcdef"[byte >> 4];
                hex += "0123456789abcdef"[byte & 15];
            }
            return {{"data", hex}};
        } else if (what == "load") {
            std::string hex = command["data"], data;
            for (size_t at = 0; at < hex.size(); at += 2) {
                data += char(std::stoi(hex.substr(at, 2), nullptr, 16));
            }
            fs_load_result result = client_->load(data, command["conversation"]);
            return {{"same_model", result.same_model != 0}, {"same_template", result.same_template != 0}};
        } else if (what == "save_kv") {
            return {{"request", client_->save_kv(command["conversation"], command["path"])}};
        } else if (what == "load_kv") {
            return {{"request", client_->load_kv(command["path"], command["conversation"])}};
        } else if (what == "set_lease") {
            const json &given = command["lease"];
            frameshard::Lease lease;
            lease.vram_budget_bytes = given.value("vram_budget_bytes", lease.vram_budget_bytes);
            lease.floor_bytes = given.value("floor_bytes", lease.floor_bytes);
            lease.version = given.value("version", lease.version);
            lease.host_budget_bytes = given.value("host_budget_bytes", lease.host_budget_bytes);
            lease.timeout_s = given.value("timeout_s", lease.timeout_s);
            lease.state = place(kStates, given.value("state", "active"));
            lease.reason = text(given, "reason");
            return {{"request", client_->set_lease(lease)}};
        } else if (what == "get_budget") {
            return {{"request", client_->get_budget()}};
        } else if (what == "load_adapter") {
            return {{"request", client_->load_adapter(text(command, "name"), text(command, "path"))}};
        } else if (what == "unload_adapter") {
            return {{"request", client_->unload_adapter(text(command, "name"))}};
        } else if (what == "get_stats") {
            return {{"request", client_->get_stats()}};
        } else if (what == "get_caps") {
            return {{"request", client_->get_caps()}};
        } else if (what == "get_plan") {
            return {{"request", client_->get_plan(command["vram_budget_bytes"], command["prompt_tokens"])}};
        } else if (what == "count_tokens" && command.contains("prompt")) {
            return {{"request", client_->count_tokens(text_of(command["prompt"]))}};
        } else if (what == "count_tokens") {
            return {{"request", client_->count_tokens(messages_of(command), tools_of(command))}};
        } else if (what == "embed") {
            std::vector<std::string_view> texts;
            for (const json &text : command["texts"]) {
                texts.push_back(text_of(text));
            }
            return {{"request", client_->embed(texts)}};
        } else if (what == "set_pacing") {
            int32_t mode = place(kModes, command["scheduling_mode"]);
            return {{"request", client_->set_pacing(mode, command["target_tokens_per_second"])}};
        } else if (what == "get_frame_block") {
            return {{"request", client_->get_frame_block()}};
        } else if (what == "shutdown") {
            client_->shutdown();
        } else if (what == "poll") {
            return {{"events", poll(command["limit"], command["timeout_s"])}};
        } else {
            throw frameshard::Error(FS_UNSUPPORTED, "no such command");
        }
        return json::object();
    }

  private:
    static std::string_view text_of(const json &value) { return value.get_ref<const std::string &>(); }

    static std::vector<frameshard::Message> messages_of(const json &command) {
        std::vector<frameshard::Message> messages;
        for (const json &said : command["messages"]) {
            messages.push_back({chars(said[0]), text_of(said[1])});
            if (said.size() > 2 && said[2].is_string()) {
                messages.back().tool_call_id = chars(said[2]);
            } else if (said.size() > 2) {
                for (const json &call : said[2]) {
                    messages.back().tool_calls.push_back({chars(call[0]), chars(call[1]), chars(call[2])});
                }
            }
        }
        return messages;
    }

    json poll(int32_t limit, double timeout_s) {
        using clock = std::chrono::steady_clock;
        auto deadline = clock::now() + std::chrono::duration<double>(timeout_s);
        json events = json::array();
        while (client_->poll([&](const Event &event) { events.push_back(told(event)); }, limit) == 0 &&
               clock::now() < deadline) {
            client_->wait(std::chrono::duration<double>(deadline - clock::now()).count());
        }
        return events;
    }

    std::optional<Client> client_;
};

} // namespace

int main() {
    Runner runner;
    std::string line;
    while (std::getline(std::cin, line)) {
        json answer;
        try {
            answer = runner.obey(json::parse(line));
            answer["ok"] = true;
        } catch (const frameshard::Error &error) {
            answer = {{"ok", false}, {"error", error.name()}};
        }
        std::cout << answer.dump() << std::endl;
    }
}
