#include "session.h"

#include <algorithm>
#include <cmath>

#include "seam.h"
#include "words.h"

namespace frameshard_core {
namespace {

constexpr int kLostAfterBeats = 5, kGreetingBeats = 10;
constexpr int kStoppedBeats = 40; // while the connection is open, because a debugger may have stopped the sidecar

/* Returns at most the first `size` bytes of a text. The result ends at a whole character. */
std::string cut(const std::string &text, size_t size) {
    if (text.size() <= size) {
        return text;
    }
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) {
        --size;
    }
    return text.substr(0, size);
}

/* Returns the number of a word in a list, counted from 1; 0 for a word that only a newer sidecar knows. */
template <size_t N> uint32_t place_of(const std::string &word, const char *const (&words)[N]) {
    const char *const *found = std::find(words, words + N, word);
    return found == words + N ? 0 : uint32_t(found - words) + 1;
}

int64_t or_unknown(const json &bytes) { return bytes.is_null() ? -1 : bytes.get<int64_t>(); }

/* True if the program receives the answers to this request as events. */
bool asked_by_program(const json &request) {
    const std::string &name = request["t"].get_ref<const std::string &>();
    return name != "submit" && name != "cancel" && name != "priority_set" && name != "model_info" &&
           name != "shutdown" && name != "bye";
}

/* Converts little-endian 16-bit floats. */
std::vector<float> floats(const std::vector<uint8_t> &halves) {
    std::vector<float> converted;
    converted.reserve(halves.size() / 2);
    for (size_t i = 0; i + 1 < halves.size(); i += 2) {
        int bits = halves[i] | halves[i + 1] << 8;
        int exponent = bits >> 10 & 31;
        int fraction = exponent == 0 ? bits & 1023 : (bits & 1023) | 1024;
        float size = std::ldexp(float(fraction), std::max(exponent, 1) - 25);
        converted.push_back((bits & 0x8000) != 0 ? -size : size);
    }
    return converted;
}

json message(const char *role, const std::string &content) { return {{"role", role}, {"content", content}}; }

/* A message with all its fields, as saves have it. */
json step(const char *role, const std::string &content, const std::string &call_id, json calls = json::array()) {
    return {{"role", role}, {"content", content}, {"tool_call_id", call_id}, {"tool_calls", std::move(calls)}};
}

/* Removes the calls of the last answer if they got no results. The text beside them stays. */
void forget_calls(std::deque<Exchange> *exchanges) {
    if (exchanges->empty() || !exchanges->back().waiting()) {
        return;
    }
    Exchange &last = exchanges->back();
    last.answer = last.steps.back()["content"];
    last.steps.erase(last.steps.size() - 1);
    if (last.answer.empty()) {
        exchanges->pop_back();
    }
}

/* Undoes forget_calls. `calls` is the exchange that had them, or null. */
void restore_calls(std::deque<Exchange> *exchanges, const Exchange *calls) {
    if (calls == nullptr) {
        return;
    }
    if (!calls->steps.back()["content"].get_ref<const std::string &>().empty()) {
        exchanges->pop_back();
    }
    exchanges->push_back(*calls);
}

/* At least so many tokens of the job's prompt and answer do not fit; 0: not known. */
int64_t excess_of(const json &job, const Error &overflow) {
    auto n_prompt = overflow.detail.find("n_prompt"), n_ctx = overflow.detail.find("n_ctx");
    if (n_prompt == overflow.detail.end() || n_ctx == overflow.detail.end() || !n_prompt->is_number_integer() ||
        !n_ctx->is_number_integer()) {
        return 0;
    }
    double excess = n_prompt->get<double>() - n_ctx->get<double>();
    if (excess <= 0) { // there is no room for the answer
        excess += job.value("sampling", json::object()).value("max_tokens", 256.0);
    }
    return int64_t(std::min(std::max(excess, 0.0), 1e15));
}

} // namespace

Error error_of(const json &info) {
    auto code = fs_status(std::min<int64_t>(info["code"].get<int64_t>(), INT32_MAX));
    bool known = code == FS_INTERNAL || std::string(fs_status_name(code)) != "internal";
    return {known && code != FS_OK ? code : FS_INTERNAL, info["message"].get<std::string>(), info["detail"]};
}

bool Session::has_feature(const std::string &name) const {
    return std::find(features_.begin(), features_.end(), name) != features_.end();
}

// ---- requests -------------------------------------------------------------------------------------------------------

uint64_t Session::request(json fields) {
    uint64_t id = ++ids_;
    fields["id"] = id;
    send_request((unanswered_[id] = {std::move(fields)}).fields);
    return id;
}

/* Sends a request if the session is open. Otherwise the request waits, and welcomed() sends it. */
void Session::send_request(const json &fields) {
    if (state_ == State::Open) {
        json message = fields;
        message["epoch"] = epoch_;
        send(message);
    }
}

uint64_t Session::submit(json fields) {
    uint64_t number = ++handles_;
    jobs_[number].fields = std::move(fields);
    open(number);
    return number;
}

uint64_t Session::ask(std::string text, const std::string &conversation, const std::string *system, json fields) {
    uint64_t number = ++handles_;
    Job &job = jobs_[number];
    job.fields = std::move(fields);
    job.turn = true;
    job.question = std::move(text);
    job.conversation = conversation;
    if (system != nullptr) {
        job.system = std::make_unique<std::string>(*system);
    }
    if (conversation.empty()) {
        open(number);
    } else {
        conversations_[conversation].waiting.push_back({number, nullptr});
        advance(conversation);
    }
    return number;
}

uint64_t Session::answer_calls(const std::map<std::string, std::string> &results, const std::string &conversation,
                               json fields) {
    Conversation &said = conversations_[conversation];
    if (said.speaking != 0 || !said.waiting.empty()) {
        refuse(FS_BAD_ARGUMENT, "an answer of this conversation is still open");
    }
    if (said.exchanges.empty() || !said.exchanges.back().waiting()) {
        refuse(FS_BAD_ARGUMENT, "the last answer of this conversation has no calls of tools");
    }
    Exchange &last = said.exchanges.back();
    json steps = last.steps;
    for (const json &call : last.steps.back()["tool_calls"]) {
        auto result = results.find(call["id"].get<std::string>());
        if (result == results.end() || results.size() != last.steps.back()["tool_calls"].size()) {
            refuse(FS_BAD_ARGUMENT, "give one result for each call, and no other");
        }
        steps.push_back(step("tool", result->second, result->first));
    }
    uint64_t number = ++handles_;
    Job &job = jobs_[number];
    job.fields = std::move(fields);
    job.turn = true;
    job.question = last.question;
    job.steps = std::move(steps);
    job.conversation = conversation;
    job.unanswered.push_back(std::move(last));
    said.exchanges.pop_back();
    said.waiting.push_back({number, nullptr});
    advance(conversation);
    return number;
}

/* Adds the exchange of a job, with what the program has taken of its answer. If that is nothing, restores what was there
 * before: calls that wait for results. */
void Session::add_spoken(const Job &job, std::deque<Exchange> *exchanges) const {
    std::string answer = cut(job.answer.substr(0, job.taken), kMaxString);
    if (!job.calls.empty()) {
        Exchange exchange{job.question, "", job.steps};
        exchange.steps.push_back(step("assistant", answer, "", job.calls));
        exchanges->push_back(std::move(exchange));
    } else if (!answer.empty()) {
        exchanges->push_back({job.question, std::move(answer), job.steps});
    } else {
        restore_calls(exchanges, job.calls_before.get());
        exchanges->insert(exchanges->end(), job.unanswered.begin(), job.unanswered.end());
    }
}

Save Session::saved(const std::string &conversation) const {
    Save save;
    auto found = conversations_.find(conversation);
    if (found != conversations_.end()) {
        save.system = found->second.system;
        save.exchanges = found->second.exchanges;
        if (found->second.speaking != 0) {
            add_spoken(jobs_.at(found->second.speaking), &save.exchanges);
        }
    }
    if (!model_.is_null()) {
        save.model = model_["fingerprint"];
        save.chat_template = model_["template_fingerprint"];
    }
    save.writer = name_;
    return save;
}

void Session::forget(const std::string &conversation) {
    conversations_[conversation].waiting.push_back({});
    advance(conversation);
}

void Session::load(const std::string &conversation, Save save) {
    conversations_[conversation].waiting.push_back({0, std::make_unique<Save>(std::move(save))});
    advance(conversation);
}

/* Submits the next job of a conversation, unless one of its jobs is running. */
void Session::advance(const std::string &conversation) {
    Conversation &said = conversations_[conversation];
    while (said.speaking == 0 && !said.waiting.empty()) {
        Waiting next = std::move(said.waiting.front());
        said.waiting.pop_front();
        if (next.job == 0) {
            said.exchanges.clear();
            if (next.save) {
                said.system = std::move(next.save->system);
                said.exchanges = std::move(next.save->exchanges);
            }
        } else if (state_ != State::Lost) { // lose() has ended all jobs
            Job &job = jobs_.at(next.job);
            job.system_before = said.system;
            if (job.system) {
                said.system = *job.system;
            }
            if (job.steps.empty()) {
                if (!said.exchanges.empty() && said.exchanges.back().waiting()) {
                    job.calls_before = std::make_unique<Exchange>(said.exchanges.back());
                }
                forget_calls(&said.exchanges);
            }
            said.speaking = next.job;
            open(next.job);
        }
    }
}

/* Submits a job, or ends it if it does not fit into a frame. A job of fs_ask gets the history of its conversation. */
void Session::open(uint64_t number) {
    Job &job = jobs_.at(number);
    if (job.turn) {
        static const Conversation none;
        const Conversation &said = job.conversation.empty() ? none : conversations_[job.conversation];
        const std::string &system = job.conversation.empty() && job.system ? *job.system : said.system;
        json told = json::array();
        if (!system.empty()) {
            told.push_back(message("system", system));
        }
        // Adds as much history as fits into a frame. If it does not fit into the context, job_event() shortens it.
        job.fields.erase("messages"); // of the job that did not fit
        size_t others = encode(job.fields).size() + system.size() + Exchange{job.question, "", job.steps}.bytes();
        size_t first = std::max(first_that_fits(said.exchanges, others, 1 + job.steps.size()), job.forgotten);
        job.dropped = first;
        for (; first < said.exchanges.size(); ++first) {
            said.exchanges[first].add_to(&told);
        }
        told.push_back(message("user", job.question));
        told.insert(told.end(), job.steps.begin(), job.steps.end());
        job.fields["messages"] = std::move(told);
        if (!job.conversation.empty()) {
            job.fields["conversation"] = job.conversation;
        }
    }
    json fields = job.fields;
    fields["t"] = "submit";
    fields["job"] = ++wires_;
    if (!fits_frame(fields)) {
        end_job(number, FS_EVENT_FAILED,
                {FS_BAD_ARGUMENT, "the prompt and its options have more bytes or elements than a frame may have"});
        return;
    }
    job.wire = wires_;
    job.expected = job.granted = 0;
    job.accepted = job.asked_again = job.ended = false;
    by_wire_[job.wire] = number;
    request(std::move(fields));
}

bool Session::cancel(uint64_t number) {
    auto found = jobs_.find(number);
    if (found == jobs_.end()) {
        return false;
    }
    Job &job = found->second;
    if (job.ended) {
        return true; // the program has not polled its last event yet
    }
    if (job.wire != 0) {
        job.cancelled = true;
        request({{"t", "cancel"}, {"job", job.wire}});
        return true;
    }
    std::deque<Waiting> &waiting = conversations_[job.conversation].waiting;
    waiting.erase(std::find_if(waiting.begin(), waiting.end(), [&](const Waiting &one) { return one.job == number; }));
    end_job(number, FS_EVENT_CANCELLED, {});
    return true;
}

bool Session::set_priority(uint64_t number, uint32_t priority) {
    auto found = jobs_.find(number);
    if (found == jobs_.end()) {
        return false;
    }
    Job &job = found->second;
    job.fields["priority"] = priority; // for a job that waits for its conversation, or is submitted again
    if (job.wire != 0 && !job.ended) {
        request({{"t", "priority_set"}, {"job", job.wire}, {"priority", priority}});
    }
    return true;
}

// ---- transport ------------------------------------------------------------------------------------------------------

void Session::greet(uint64_t epoch) {
    epoch_ = epoch;
    state_ = State::Greeting;
    hello();
}

void Session::hello() {
    hello_ = ++ids_;
    json fields = {{"t", "hello"},    {"id", hello_},    {"protocol", kProtocol},
                   {"client", name_}, {"epoch", epoch_}, {"notices", true}};
    if (kFeatures[0] != nullptr) {
        fields["features"] = json::array();
        for (const char *const *name = kFeatures; *name != nullptr; ++name) {
            fields["features"].push_back(*name);
        }
    }
    if (session_ != 0) {
        fields["session"] = session_;
    }
    send(fields);
}

void Session::beat() {
    if (state_ == State::Starting || state_ == State::Lost) {
        return;
    }
    int connected = outgoing_.empty() ? kStoppedBeats : kLostAfterBeats;
    if (++silent_beats_ > (state_ == State::Greeting ? kGreetingBeats : connected)) {
        lose({FS_CONNECTION_LOST, "the sidecar does not answer"});
    } else if (!outgoing_.empty()) {
        // The socket accepts no frames now, so a ping would only wait behind them.
    } else if (state_ == State::Open) {
        send({{"t", "ping"}, {"id", ++ids_}, {"epoch", epoch_}});
    } else {
        hello();
    }
}

void Session::receive(const char *data, size_t size) {
    if (state_ == State::Lost) {
        return;
    }
    json message;
    std::string why;
    if (!decode_answer(data, size, &message, &why)) {
        lose({FS_CONNECTION_LOST, "the server does not speak this protocol: " + why});
        return;
    }
    silent_beats_ = 0;
    const std::string &name = message["t"].get_ref<const std::string &>();
    if (name == "welcome") {
        welcomed(message);
    } else if (name == "error") {
        refused(message);
    } else if (!message.contains("epoch") || message["epoch"].get<uint64_t>() != epoch_) {
        return; // from another launch, or unknown to this version
    } else if (message.contains("job")) {
        job_event(message);
    } else if (name == "pong") {
        compare(message);
    } else if (name == "engine") {
        Event &event = put(FS_EVENT_ENGINE);
        event.fields.engine_state = place_of(message["state"], kEngineState);
        event.fields.restarts = message["restarts"];
        if (!message["error"].is_null()) {
            put_error(event, error_of(message["error"]));
        }
    } else if (name == "notice") {
        Event &event = put(FS_EVENT_NOTICE);
        event.fields.notice = place_of(message["kind"], kNoticeKind);
        event.fields.budget_bytes = message["vram_budget_bytes"];
        event.fields.host_budget_bytes = message["host_budget_bytes"];
        event.fields.seconds = message["seconds"];
        event.text = message["detail"];
    } else if (name == "loading") {
        loading(message);
    } else {
        answered_by(message);
    }
}

void Session::loading(const json &message) {
    Event &event = put(FS_EVENT_LOADING);
    event.fields.stage = place_of(message["stage"], kLoadingStage);
    event.fields.done = message["done"];
    event.fields.total = message["total"];
}

void Session::welcomed(const json &message) {
    if (message["protocol"].get<int64_t>() < kProtocol) {
        lose({FS_VERSION_MISMATCH, "the sidecar speaks protocol " + std::to_string(message["protocol"].get<int64_t>()) +
                                       ", this library " + std::to_string(kProtocol)});
    } else if (state_ == State::Resuming && !message["resumed"].get<bool>()) {
        lose({FS_CONNECTION_LOST, "the sidecar has forgotten this session"});
    } else if (state_ == State::Resuming || state_ == State::Greeting) {
        bool first = state_ == State::Greeting;
        state_ = State::Open;
        session_ = message["session"];
        features_ = message["features"];
        for (const auto &waiting : unanswered_) {
            send_request(waiting.second.fields);
        }
        for (auto &item : jobs_) {
            if (!first && item.second.wire != 0) {
                grant(item.second, item.second.granted); // repeats the newest credit, which may be lost
            }
        }
        if (first) {
            if (message["model"].is_null()) {
                request({{"t", "model_info"}});
            } else {
                ready(message["model"]);
            }
        }
    }
}

void Session::ready(const json &model) {
    model_ = model;
    Event &event = put(FS_EVENT_READY);
    event.text = model["name"];
    event.detail = to_text(model);
    event.fields.floor_bytes = model["floor_bytes"];
    event.fields.full_bytes = model["full_bytes"];
}

void Session::refused(const json &message) {
    Error error = error_of(message["error"]);
    uint64_t id = message["id"].is_null() ? 0 : message["id"].get<uint64_t>();
    uint64_t epoch = message["epoch"];
    if (state_ == State::Greeting || state_ == State::Resuming) {
        // Requests sent before the new hello are refused too; only the answer to hello counts.
        if (id == hello_) {
            lose(std::move(error));
        }
    } else if (error.status == FS_CONNECTION_LOST && epoch == epoch_) {
        state_ = State::Resuming;
        outgoing_.clear();
        hello();
    } else if (epoch != epoch_) {
        lose(std::move(error));
    } else if (auto found = unanswered_.find(id); found != unanswered_.end()) {
        json request = std::move(found->second.fields);
        unanswered_.erase(found);
        const std::string &name = request["t"].get_ref<const std::string &>();
        if (name == "submit") {
            if (auto job = by_wire_.find(request["job"].get<uint64_t>()); job != by_wire_.end()) {
                uint64_t number = job->second;
                by_wire_.erase(job);
                end_job(number, FS_EVENT_FAILED, error);
            }
        } else if (name == "model_info") {
            lose(std::move(error));
        } else if (asked_by_program(request)) {
            Event &event = put(FS_EVENT_REFUSED);
            event.fields.request = id;
            put_error(event, error);
        } // a cancel or a priority is refused only if the job has ended; then its last event follows
    }
}

void Session::answered_by(const json &message) {
    uint64_t id = message["id"];
    auto found = unanswered_.find(id);
    if (found == unanswered_.end()) {
        return; // a second answer, after the session was resumed
    }
    const std::string &name = message["t"].get_ref<const std::string &>();
    if (name == "lease" || name == "released") {
        std::string &heard = found->second.last_heard;
        if (heard == name || heard == "released") {
            return; // a repeated answer, after the session was resumed
        }
        heard = name;
        Event &event = put(name == "lease" ? FS_EVENT_LEASE : FS_EVENT_BUDGET_RELEASED);
        event.fields.request = id;
        event.fields.budget_bytes = message["vram_budget_bytes"];
        event.fields.seconds = message["seconds"];
        event.fields.host_budget_bytes = message["host_budget_bytes"];
        if (name == "lease") {
            event.fields.decision = place_of(message["decision"], kDecision);
            event.fields.version = message["version"];
        } else {
            event.fields.used_bytes = message["used_bytes"];
            event.fields.host_used_bytes = message["host_used_bytes"];
        }
        return; // the request stays open until `observed` comes
    }
    json request = std::move(found->second.fields);
    unanswered_.erase(found);
    if (name == "observed") {
        Event &event = put(FS_EVENT_BUDGET_OBSERVED);
        event.fields.request = id;
        event.fields.observed_bytes = or_unknown(message["observed_bytes"]);
        event.fields.host_observed_bytes = or_unknown(message["host_observed_bytes"]);
        event.fields.seconds = message["seconds"];
    } else if (name == "budget") {
        Event &event = put(FS_EVENT_BUDGET);
        event.fields.request = id;
        event.fields.budget_bytes = message["vram_budget_bytes"];
        event.fields.floor_bytes = message["floor_bytes"];
        event.fields.full_bytes = message["full_bytes"];
        event.fields.lease_state = place_of(message["state"], kLeaseState);
        event.fields.version = message["version"];
        event.fields.wanted_bytes = message["wanted_bytes"];
        event.fields.used_bytes = message["used_bytes"];
        event.fields.host_budget_bytes = message["host_budget_bytes"];
        event.fields.host_floor_bytes = message["host_floor_bytes"];
        event.fields.host_used_bytes = message["host_used_bytes"];
    } else if (name == "caps_and_requirements") {
        Event &event = put(FS_EVENT_CAPS);
        event.fields.request = id;
        event.text = message["device"];
        event.fields.total_bytes = or_unknown(message["total_bytes"]);
        event.fields.free_bytes = or_unknown(message["free_bytes"]);
        event.fields.host_total_bytes = or_unknown(message["host_total_bytes"]);
        event.fields.host_free_bytes = or_unknown(message["host_free_bytes"]);
        event.fields.host_floor_bytes = message["host_floor_bytes"];
        event.fields.floor_bytes = message["floor_bytes"];
        event.fields.full_bytes = message["full_bytes"];
        json fields = message;
        for (const char *frame : {"t", "id", "epoch"}) {
            fields.erase(frame);
        }
        event.detail = to_text(fields);
    } else if (name == "plan") {
        for (const json &row : message["rows"]) {
            Event &event = put(FS_EVENT_PLAN);
            event.fields.request = id;
            event.fields.budget_bytes = row["vram_budget_bytes"];
            event.fields.fits = row["fits"].get<bool>() ? 1 : 0;
            event.fields.ttft_s = row["ttft_s"].is_null() ? 0 : row["ttft_s"].get<double>();
            event.fields.tokens_per_second =
                row["tokens_per_second"].is_null() ? 0 : row["tokens_per_second"].get<double>();
            event.fields.resident_bytes = row["resident_bytes"];
            event.fields.streamed_bytes = row["streamed_bytes"];
            event.fields.cpu_bytes = row["cpu_bytes"];
        }
    } else if (name == "kv") {
        Event &event = put(FS_EVENT_KV);
        event.fields.request = id;
        event.fields.n_tokens = message["n_tokens"];
        event.fields.file_bytes = message["file_bytes"];
        event.text = message["detail"];
    } else if (name == "token_count") {
        Event &event = put(FS_EVENT_TOKEN_COUNT);
        event.fields.request = id;
        event.fields.n_tokens = message["n_tokens"];
        event.fields.n_left = message["n_left"];
    } else if (name == "embeddings") {
        Event &event = put(FS_EVENT_EMBEDDINGS);
        event.fields.request = id;
        event.fields.n_dim = message["n_dim"];
        event.fields.n_tokens = message["n_tokens"];
        event.rows = floats(message["rows"].get_binary());
        event.fields.n_rows = event.rows.size() / event.fields.n_dim;
    } else if (name == "frame_block") {
        Event &event = put(FS_EVENT_FRAME_BLOCK);
        event.fields.request = id;
        event.text = message["path"];
    } else if (name == "adapters") {
        Event &event = put(FS_EVENT_ADAPTERS);
        event.fields.request = id;
        event.fields.floor_bytes = message["floor_bytes"];
        event.detail = to_text({{"adapters", message["adapters"]}});
    } else if (name == "stats") {
        Event &event = put(FS_EVENT_STATS);
        event.fields.request = id;
        event.fields.restarts = message["broker"]["engine_restarts"];
        event.fields.engine_state = place_of(message["broker"]["engine"], kEngineState);
        event.detail = to_text({{"broker", message["broker"]}, {"engine", message["engine"]}});
    } else if (name == "model_info") {
        ready(message["model"]);
    } else if (request["t"] == "submit") {
        if (auto job = by_wire_.find(request["job"].get<uint64_t>()); job != by_wire_.end()) {
            jobs_.at(job->second).accepted = true;
        }
    } else if (request["t"] == "shutdown") {
        lose({FS_OK, "the sidecar was shut down"});
    }
}

void Session::job_event(const json &message) {
    auto found = by_wire_.find(message["job"].get<uint64_t>());
    if (found == by_wire_.end()) {
        return;
    }
    uint64_t number = found->second, seq = message["seq"];
    Job &job = jobs_.at(number);
    if (seq < job.expected) {
        return;
    }
    if (seq > job.expected) {
        ask_again(job);
        return;
    }
    ++job.expected;
    job.asked_again = false;
    std::string name = message["t"];
    Error error;
    if (name == "failed") {
        error = error_of(message["error"]);
        if (error.status == FS_CONTEXT_OVERFLOW && job.turn && !job.begun) {
            if (job.cancelled) { // this attempt failed before the sidecar got the request; there is no other
                name = "cancelled";
            } else if (shorten(job, error)) {
                grant(job, seq + 1);
                by_wire_.erase(job.wire);
                open(number);
                return;
            }
        }
    }
    if (name.empty()) {
        pass_over(job, seq); // this version does not know the event
        return;
    }
    if (name == "started" && job.started) {
        pass_over(job, seq); // a question submitted again with less history starts twice; the program gets one event
        return;
    }
    job.begun = job.begun || name == "delta" || name == "thought" || name == "tool_call";
    Event &event = put(name == "started"     ? FS_EVENT_STARTED
                       : name == "delta"     ? FS_EVENT_TEXT
                       : name == "tool_call" ? FS_EVENT_TOOL_CALL
                       : name == "progress"  ? FS_EVENT_PROGRESS
                       : name == "thought"   ? FS_EVENT_THOUGHT
                       : name == "paused"    ? FS_EVENT_PAUSED
                       : name == "resumed"   ? FS_EVENT_RESUMED
                       : name == "done"      ? FS_EVENT_DONE
                       : name == "failed"    ? FS_EVENT_FAILED
                                             : FS_EVENT_CANCELLED);
    event.fields.job = number;
    event.fields.timeline = message["timeline"];
    event.wire = job.wire;
    event.seq = seq;
    if (name == "started") {
        job.started = true;
        event.fields.n_dropped = job.dropped;
        event.fields.n_prompt = message["n_prompt"];
        event.fields.seed = message["seed"];
        event.fields.remote = message["remote"].get<bool>() ? 1 : 0;
    } else if (name == "progress") {
        event.fields.phase = place_of(message["phase"], kPhase);
        event.fields.done = message["done"];
        event.fields.total = message["total"];
    } else if (name == "thought") {
        event.text = message["text"];
        event.fields.tokens = message["tokens"];
    } else if (name == "delta") {
        event.text = message["text"];
        event.fields.tokens = message["tokens"];
        event.fields.sentence_end = message["sentence_end"].get<bool>() ? 1 : 0;
        if (job.turn) {
            job.answer += event.text;
        }
    } else if (name == "tool_call") {
        event.call_id = message["call_id"];
        event.name = message["name"];
        event.text = message["arguments"];
    } else if (name != "paused" && name != "resumed") {
        job.ended = true;
        if (name == "done") {
            event.fields.reason = place_of(message["reason"], kReason);
            event.fields.n_prompt = message["n_prompt"];
            event.fields.n_generated = message["n_generated"];
            event.fields.n_reused = message["n_reused"];
            event.fields.n_left = message["n_left"];
            event.fields.remote = message["remote"].get<bool>() ? 1 : 0;
            event.fields.n_dropped = job.dropped;
            event.fields.n_thought = message["n_thought"];
            event.fields.prefill_s = message["prefill_s"];
            event.fields.decode_s = message["decode_s"];
        } else if (name == "failed") {
            put_error(event, error);
        }
    }
}

/* Gives credit for an event that the program does not receive, together with the credit for the event before it. */
void Session::pass_over(Job &job, uint64_t seq) {
    for (auto event = events_.rbegin(); event != events_.rend(); ++event) {
        if (event->wire == job.wire) {
            event->seq = seq;
            return;
        }
    }
    credit(job, seq + 1);
}

/* Gives the sidecar credit for the events before `next`, once they are half of the window. */
void Session::credit(Job &job, uint64_t next) {
    uint64_t window = job.fields.value("window", uint64_t(32));
    if (next - job.granted >= std::max<uint64_t>(1, window / 2)) {
        grant(job, next);
    }
}

/* Leaves the oldest exchange in the job's prompt out of it; more, as far as the error needs this for certain: a token
 * has a byte or more. Returns false if none is in it. */
bool Session::shorten(Job &job, const Error &overflow) {
    if (job.conversation.empty() || job.dropped == conversations_[job.conversation].exchanges.size()) {
        return false;
    }
    const std::deque<Exchange> &exchanges = conversations_[job.conversation].exchanges;
    int64_t excess = excess_of(job.fields, overflow);
    job.forgotten = job.dropped;
    do {
        excess -= int64_t(exchanges[job.forgotten].bytes());
        ++job.forgotten;
    } while (excess > 0 && job.forgotten < exchanges.size());
    return true;
}

void Session::compare(const json &message) {
    std::map<uint64_t, uint64_t> sent;
    for (const json &pair : message["jobs"]) {
        sent[pair[0]] = pair[1];
    }
    std::vector<uint64_t> forgotten;
    for (auto &item : jobs_) {
        Job &job = item.second;
        if (job.wire == 0 || job.ended) {
            continue;
        }
        auto found = sent.find(job.wire);
        if (found == sent.end()) {
            if (job.accepted) {
                forgotten.push_back(item.first);
            }
        } else if (found->second > job.expected) {
            job.asked_again = false; // the events that were sent again are lost, too
            ask_again(job);
        }
    }
    for (uint64_t number : forgotten) {
        by_wire_.erase(jobs_.at(number).wire);
        end_job(number, FS_EVENT_FAILED, {FS_CONNECTION_LOST, "the sidecar has forgotten this job"});
    }
    for (const auto &[wire, count] : sent) {
        if (by_wire_.count(wire) == 0) {
            // The sidecar keeps this job because it did not receive the credit for the last event.
            send({{"t", "credit"}, {"epoch", epoch_}, {"job", wire}, {"next", count}});
        }
    }
}

void Session::ask_again(Job &job) {
    // Ask once for each gap. Events after the gap that arrive later must not repeat the request.
    if (!job.asked_again) {
        job.asked_again = true;
        grant(job, job.granted, true);
    }
}

void Session::grant(Job &job, uint64_t next, bool resend) {
    job.granted = next;
    if (state_ == State::Open) {
        send({{"t", "credit"}, {"epoch", epoch_}, {"job", job.wire}, {"next", next}, {"resend", resend}});
    }
}

void Session::lose(Error error) {
    if (state_ == State::Lost) {
        return;
    }
    state_ = State::Lost;
    error_ = std::move(error);
    outgoing_.clear();
    Error why = error_;
    if (why.status == FS_OK) {
        why.status = FS_CONNECTION_LOST;
    }
    std::vector<uint64_t> open;
    for (const auto &item : jobs_) {
        if (!item.second.ended) {
            open.push_back(item.first);
        }
    }
    for (uint64_t number : open) {
        end_job(number, FS_EVENT_FAILED, why);
    }
    for (const auto &[id, request] : unanswered_) {
        if (asked_by_program(request.fields)) {
            Event &event = put(FS_EVENT_REFUSED);
            event.fields.request = id;
            put_error(event, why);
        }
    }
    unanswered_.clear();
    put_error(put(FS_EVENT_CLOSED), error_);
}

// ---- the program's side ---------------------------------------------------------------------------------------------

Event &Session::put(uint32_t type) {
    Event &event = events_.emplace_back();
    event.fields.type = type;
    return event;
}

void Session::put_error(Event &event, const Error &error) {
    event.fields.status = error.status;
    event.text = error.message;
    event.detail = to_text(error.detail);
    if (auto floor = error.detail.find("floor_bytes"); floor != error.detail.end() && floor->is_number_integer()) {
        event.fields.floor_bytes = uint64_t(std::max<int64_t>(0, floor->get<int64_t>()));
    }
    if (auto floor = error.detail.find("host_floor_bytes"); floor != error.detail.end() && floor->is_number_integer()) {
        event.fields.host_floor_bytes = uint64_t(std::max<int64_t>(0, floor->get<int64_t>()));
    }
}

/* Ends a job with an event that did not come from the sidecar. */
void Session::end_job(uint64_t number, uint32_t type, const Error &error) {
    Job &job = jobs_.at(number);
    job.ended = true;
    Event &event = put(type);
    event.fields.job = number;
    event.fields.timeline = job.fields.value("timeline", uint64_t(0));
    if (type == FS_EVENT_FAILED) {
        put_error(event, error);
    }
}

Event Session::take() {
    Event event = std::move(events_.front());
    events_.pop_front();
    auto found = jobs_.find(event.fields.job);
    if (found == jobs_.end()) {
        return event;
    }
    Job &job = found->second;
    bool last = is_end(event.fields.type);
    if (event.fields.type == FS_EVENT_TEXT) {
        job.taken += event.text.size();
    } else if (event.fields.type == FS_EVENT_TOOL_CALL) {
        job.calls.push_back({{"id", event.call_id}, {"name", event.name}, {"arguments", event.text}});
    }
    if (event.wire != 0 && event.wire == job.wire) {
        if (last) {
            grant(job, event.seq + 1);
        } else {
            credit(job, event.seq + 1);
        }
    }
    if (last) {
        by_wire_.erase(job.wire);
        Job ended = std::move(job);
        jobs_.erase(found);
        auto said = conversations_.find(ended.conversation);
        if (said != conversations_.end() && said->second.speaking == event.fields.job) {
            said->second.speaking = 0;
            std::deque<Exchange> &kept = said->second.exchanges;
            // A question without an answer leaves the exchanges as they were, and one that has failed changes nothing.
            if (ended.taken > 0 || !ended.calls.empty()) {
                kept.erase(kept.begin(), kept.begin() + std::ptrdiff_t(ended.forgotten));
            } else if (event.fields.type == FS_EVENT_FAILED) {
                said->second.system = std::move(ended.system_before);
            }
            add_spoken(ended, &kept);
            advance(ended.conversation);
        }
    }
    return event;
}

} // namespace frameshard_core
