/* Tests a session of the C client: with a newer sidecar, which sends fields, messages and words that this version does
 * not know, and with conversations that grow beyond a frame and beyond the context. The test makes the frames itself,
 * without a socket. */
#include <cstdio>

#include "session.h"

using frameshard_core::Event;
using frameshard_core::Exchange;
using frameshard_core::json;
using frameshard_core::Save;
using frameshard_core::Session;

namespace {

int failed = 0;

void check(const char *what, bool right) {
    std::printf("%s: %s\n", what, right ? "ok" : "FAILED");
    failed += right ? 0 : 1;
}

void hear(Session &session, const json &message) {
    std::string frame = frameshard_core::encode(message);
    session.receive(frame.data(), frame.size());
}

/* Returns the messages that the session sends, as maps. */
std::vector<json> sent(Session &session) {
    std::vector<json> frames;
    while (const std::string *frame = session.next_frame()) {
        json message;
        std::string why;
        check("sends frames that keep the rules",
              frameshard_core::decode_frame(frame->data(), frame->size(), &message, &why));
        frames.push_back(std::move(message));
        session.sent();
    }
    return frames;
}

std::vector<Event> taken(Session &session) {
    std::vector<Event> events;
    while (session.has_event()) {
        events.push_back(session.take());
    }
    return events;
}

/* Returns the last credit in these frames; -1 if there is none. */
int64_t credit(const std::vector<json> &frames) {
    int64_t next = -1;
    for (const json &frame : frames) {
        if (frame["t"] == "credit") {
            next = frame["next"].get<int64_t>();
        }
    }
    return next;
}

json model() {
    return {{"name", "m"},      {"arch", "a"},  {"device", "d"},   {"n_ctx", 256},      {"n_parallel", 1},
            {"n_vocab", 9},     {"n_layer", 2}, {"chat", true},    {"floor_bytes", 1},  {"full_bytes", 2},
            {"plan", json({})}, {"voice", "v"}, {"vision", "eye"}, {"wings", {1, 2, 3}}};
}

json welcome() {
    return {{"t", "welcome"},
            {"id", 1},
            {"epoch", 5},
            {"protocol", frameshard_core::kProtocol + 1},
            {"session", 3},
            {"resumed", false},
            {"server", "newer"},
            {"limits",
             {{"message_bytes", 1 << 20},
              {"string_bytes", 1 << 16},
              {"jobs", 64},
              {"window", 256},
              {"silent_s", 10},
              {"songs", 1}}},
            {"engine", "dreaming"},
            {"model", model()},
            {"features", {"songs", "dances"}},
            {"colour", {{"red", 1}}}};
}

json of_job(const char *name, int64_t seq, json more = json::object()) {
    json message = {{"t", name}, {"job", 1}, {"seq", seq}, {"epoch", 5}, {"timeline", 0}, {"colour", "red"}};
    message.update(more);
    return message;
}

/* Opens a session that is ready, and forgets what it sent for that. */
void begin(Session &session) {
    session.greet(5);
    hear(session, welcome());
    taken(session);
    sent(session);
}

/* A conversation of `n` short exchanges. */
Save short_exchanges(size_t n) {
    Save save;
    save.system = "Be kind.";
    for (size_t i = 0; i < n; ++i) {
        save.exchanges.push_back({"question " + std::to_string(i), "answer", json::array()});
    }
    return save;
}

/* A message of an assistant with `n` calls of tools, as saves have it. */
json with_calls(size_t n) {
    json calls = json::array();
    for (size_t i = 0; i < n; ++i) {
        calls.push_back({{"id", "call" + std::to_string(i)}, {"name", "price"}, {"arguments", "{}"}});
    }
    return {{"role", "assistant"}, {"content", ""}, {"tool_call_id", ""}, {"tool_calls", calls}};
}

/* Prompts of more elements than a frame may have. A sidecar cannot read such a frame, so it cannot say which job it
 * refuses. */
void more_than_a_frame() {
    Session session("growth");
    begin(session);
    Save save = short_exchanges(510);
    save.exchanges.push_back({"What is ale?", "", json::array({with_calls(2)})});
    session.load("mira", std::move(save));
    session.answer_calls({{"call0", "2 gold"}, {"call1", "3 gold"}}, "mira", {{"kind", "chat"}});
    std::vector<json> frames = sent(session);
    const json &told = frames.at(0)["messages"];
    check("a prompt with results has as much history as fits", told.size() == 1023 && told[0]["role"] == "system" &&
                                                                   told[1]["content"] == "question 1" &&
                                                                   told.back()["content"] == "3 gold");

    json messages = json::array({{{"role", "user"}, {"content", "x"}}}), calls = with_calls(16);
    messages.insert(messages.end(), 250, calls);
    check("a request of too many elements is none", !frameshard_core::fits_frame({{"messages", messages}}));
    uint64_t job = session.submit({{"kind", "chat"}, {"messages", messages}});
    std::vector<Event> events = taken(session);
    check("a job of too many elements fails at once",
          sent(session).empty() && events.size() == 1 && events[0].fields.type == FS_EVENT_FAILED &&
              events[0].fields.job == job && events[0].fields.status == FS_BAD_ARGUMENT);
    messages.erase(messages.begin() + 200, messages.end());
    session.submit({{"kind", "chat"}, {"messages", messages}});
    check("one of as many as fit is sent", sent(session).size() == 1);
    messages = json::array();
    messages.insert(messages.end(), 1025, json{{"role", "user"}, {"content", "x"}});
    check("a long array is no request", !frameshard_core::fits_frame({{"messages", messages}}));
    messages.erase(messages.begin());
    check("one of 1024 elements is", frameshard_core::fits_frame({{"messages", messages}}));
}

json error_of(int code) {
    return {{"code", code}, {"name", "e"}, {"message", "no"}, {"retriable", false}, {"detail", json::object()}};
}

/* Asks in a conversation of `n` exchanges, with window 1. Returns the number of the job. */
uint64_t ask_after(Session &session, size_t n) {
    begin(session);
    session.load("mira", short_exchanges(n));
    uint64_t job = session.ask("How are you?", "mira", nullptr, {{"kind", "chat"}, {"window", 1}});
    sent(session);
    return job;
}

json of_wire(int64_t wire, const char *name, int64_t seq, json more = json::object()) {
    json message = of_job(name, seq, std::move(more));
    message["job"] = wire;
    return message;
}

json overflow(int64_t wire, int64_t seq) {
    return of_wire(wire, "failed", seq, {{"error", error_of(FS_CONTEXT_OVERFLOW)}});
}

/* The question of a job that was submitted again has so many messages before it; -1: no job was submitted. */
int64_t history_of(const std::vector<json> &frames) {
    int64_t n = -1;
    for (const json &frame : frames) {
        n = frame["t"] == "submit" ? int64_t(frame["messages"].size()) - 1 : n;
    }
    return n;
}

bool has_calls(const Save &save) { return save.exchanges.size() == 2 && save.exchanges[1].waiting(); }

/* Asks after an answer with calls of tools that wait for results. */
uint64_t ask_after_calls(Session &session, const char *beside) {
    begin(session);
    Save save = short_exchanges(1);
    json answer = with_calls(1);
    answer["content"] = beside;
    save.exchanges.push_back({"How much?", "", json::array({answer})});
    session.load("mira", std::move(save));
    std::string system = "Be short.";
    return session.ask("How are you?", "mira", &system, {{"kind", "chat"}, {"window", 1}});
}

/* A question without an answer, after an answer with calls of tools. */
void leave_the_conversation() {
    json done = {{"reason", "stop"}, {"n_prompt", 8}, {"n_generated", 0}, {"prefill_s", 0}, {"decode_s", 1}};
    for (const char *beside : {"", "Let me see."}) {
        Session session("growth");
        ask_after_calls(session, beside);
        check("a save has the calls before there is an answer", has_calls(session.saved("mira")));
        for (int64_t wire = 1; session.saved("mira").system != "Be kind." && wire < 9; ++wire) {
            hear(session, overflow(wire, 0));
            taken(session);
        }
        Save left = session.saved("mira");
        check("a question that fails leaves system text and calls", left.system == "Be kind." && has_calls(left));

        for (const char *end : {"cancelled", "done"}) {
            Session other("growth");
            uint64_t job = ask_after_calls(other, beside);
            other.cancel(job);
            hear(other, of_wire(1, end, 0, done));
            taken(other);
            left = other.saved("mira");
            check("one that is cancelled, or gets an empty answer, leaves the calls",
                  left.system == "Be short." && has_calls(left));
        }

        Session refused("growth");
        ask_after_calls(refused, beside);
        int64_t id = sent(refused).at(0)["id"].get<int64_t>();
        hear(refused, {{"t", "error"}, {"id", id}, {"epoch", 5}, {"error", error_of(FS_OVERLOADED)}});
        taken(refused);
        left = refused.saved("mira");
        check("one that is refused leaves both", left.system == "Be kind." && has_calls(left));

        Session lost("growth");
        ask_after_calls(lost, beside);
        lost.lose({FS_CONNECTION_LOST, "gone"});
        taken(lost);
        left = lost.saved("mira");
        check("so does one whose sidecar ends", left.system == "Be kind." && has_calls(left));
    }
}

/* A question that does not fit into the context with all of its history. */
void more_than_the_context() {
    Session session("growth");
    uint64_t job = ask_after(session, 3);
    hear(session, of_wire(1, "started", 0, {{"n_prompt", 9}}));
    check("says that it started", taken(session).size() == 1 && credit(sent(session)) == 1);
    hear(session, overflow(1, 1));
    check("is submitted again with less history", history_of(sent(session)) == 5 && !session.has_event());
    hear(session, of_wire(2, "started", 0, {{"n_prompt", 8}}));
    check("does not wait for the program at a second start", credit(sent(session)) == 1 && !session.has_event());
    hear(session, of_wire(2, "delta", 1, {{"text", "Well."}, {"tokens", 1}}));
    taken(session);
    hear(session,
         of_wire(2, "done", 2,
                 {{"reason", "stop"}, {"n_prompt", 8}, {"n_generated", 1}, {"prefill_s", 0}, {"decode_s", 1}}));
    std::vector<Event> events = taken(session);
    check("tells how much was dropped", events.size() == 1 && events[0].fields.n_dropped == 1);
    std::deque<Exchange> kept = session.saved("mira").exchanges;
    check("and the conversation has lost that",
          kept.size() == 3 && kept[0].question == "question 1" && kept[2].answer == "Well.");

    Session late("growth");
    job = ask_after(late, 3);
    check("is cancelled", late.cancel(job));
    hear(late, overflow(1, 0));
    events = taken(late);
    check("is not submitted again when it was cancelled", history_of(sent(late)) == -1 && events.size() == 1 &&
                                                              events[0].fields.type == FS_EVENT_CANCELLED &&
                                                              events[0].fields.job == job);
    check("ends once", !late.cancel(job) && late.saved("mira").exchanges.size() == 3);

    Session alone("growth");
    alone.cancel(ask_after(alone, 0));
    hear(alone, overflow(1, 0));
    events = taken(alone);
    check("likewise without a history", events.size() == 1 && events[0].fields.type == FS_EVENT_CANCELLED);

    Session longer("growth");
    ask_after(longer, 2);
    for (int64_t wire = 1; wire <= 3; ++wire) {
        hear(longer, overflow(wire, 0));
    }
    events = taken(longer);
    check("fails when it does not fit alone",
          history_of(sent(longer)) == 1 && events.size() == 1 && events[0].fields.status == FS_CONTEXT_OVERFLOW);
    check("and leaves the conversation as it was", longer.saved("mira").exchanges.size() == 2);
    leave_the_conversation();

    // Each exchange has 80 bytes, so at most as many tokens. An answer has 256.
    for (auto [n_prompt, n_left] : {std::pair<int64_t, int64_t>(1000, 13), {500, 16}}) {
        Session far("growth");
        ask_after(far, 20);
        json message = overflow(1, 0);
        message["error"]["detail"] = {{"n_prompt", n_prompt}, {"n_ctx", 512}};
        hear(far, message);
        check("leaves out at once what certainly does not fit", history_of(sent(far)) == 1 + 2 * n_left);
    }

    for (const char *first : {"delta", "thought", "tool_call"}) {
        Session other("growth"); // a server may send a part before it fails
        ask_after(other, 2);
        json part = std::string(first) == "tool_call" ? json{{"call_id", "c"}, {"name", "price"}, {"arguments", "{}"}}
                                                      : json{{"text", "We"}, {"tokens", 1}};
        hear(other, of_wire(1, first, 0, part));
        hear(other, overflow(1, 1));
        events = taken(other);
        check("is not submitted again once it has begun",
              history_of(sent(other)) == -1 && events.size() == 2 && events[1].fields.type == FS_EVENT_FAILED);
    }
}

} // namespace

int main() {
    more_than_a_frame();
    more_than_the_context();

    Session session("growth");
    session.greet(5);
    sent(session);
    hear(session, welcome());
    check("features of the sidecar can be asked for", session.has_feature("songs") && !session.has_feature("opera"));
    std::vector<Event> events = taken(session);
    check("a newer protocol is taken",
          !session.lost() && events.size() == 1 && events[0].fields.type == FS_EVENT_READY);
    json detail = json::parse(events.at(0).detail);
    check("unknown fields of a record are not kept", !detail.contains("voice") && !detail.contains("wings"));
    check("known fields are", detail["vision"] == "eye" && detail["n_ctx"] == 256);

    // A job with mostly unknown events. Its window is 4, so the session gives credit after two events.
    session.submit({{"kind", "completion"}, {"prompt", "x"}, {"window", 4}});
    sent(session);
    hear(session, {{"t", "ok"}, {"id", 2}, {"epoch", 5}, {"eta_s", 1.5}});
    hear(session, of_job("started", 0, {{"n_prompt", 1}, {"n_cached", 1}}));
    hear(session, of_job("hum", 1));
    hear(session, of_job("hum", 2));
    hear(session, of_job("hum", 3));
    check("no resend is asked for what is not known", credit(sent(session)) == -1);
    events = taken(session);
    check("what is not known makes no event", events.size() == 1 && events[0].fields.type == FS_EVENT_STARTED);
    check("and is credited with the event before it", credit(sent(session)) == 4);
    hear(session, of_job("hum", 4));
    hear(session, of_job("hum", 5));
    check("or at once when no event waits", credit(sent(session)) == 6);
    hear(session, of_job("delta", 6, {{"text", "la"}, {"tokens", 1}, {"logprobs", {0.5, 0.25}}}));
    hear(session,
         of_job("done", 7,
                {{"reason", "applause"}, {"n_prompt", 1}, {"n_generated", 1}, {"prefill_s", 0}, {"decode_s", 1}}));
    events = taken(session);
    check("the text comes", events.size() == 2 && events[0].text == "la");
    check("an unknown reason is 0", events.at(1).fields.type == FS_EVENT_DONE && events[1].fields.reason == 0);
    check("the end is credited", credit(sent(session)) == 8);

    // Unknown messages to every session, and unknown answers.
    hear(session, {{"t", "weather"}, {"epoch", 5}, {"rain", true}});
    hear(session, {{"t", "weather"}, {"id", 9}, {"epoch", 5}, {"job", "none"}});
    hear(session, {{"t", "weather"}});
    check("unknown messages are ignored", !session.lost() && !session.has_event());
    hear(session, {{"t", "engine"}, {"epoch", 5}, {"state", "dreaming"}, {"restarts", 0}, {"dream", "sheep"}});
    hear(
        session,
        {{"t", "notice"}, {"epoch", 5}, {"kind", "sings"}, {"vram_budget_bytes", 1}, {"seconds", 0}, {"detail", "la"}});
    events = taken(session);
    check("unknown states and kinds are 0",
          events.size() == 2 && events[0].fields.engine_state == 0 && events[1].fields.notice == 0);
    uint64_t request = session.request({{"t", "budget_set"}, {"vram_budget_bytes", 8}});
    hear(session, {{"t", "lease"},
                   {"id", request},
                   {"epoch", 5},
                   {"decision", "bartered"},
                   {"vram_budget_bytes", 8},
                   {"seconds", 0},
                   {"version", 0},
                   {"price", 1}});
    hear(session, {{"t", "released"},
                   {"id", request},
                   {"epoch", 5},
                   {"vram_budget_bytes", 8},
                   {"used_bytes", 4},
                   {"seconds", 0},
                   {"price", 1}});
    hear(session,
         {{"t", "observed"}, {"id", request}, {"epoch", 5}, {"observed_bytes", nullptr}, {"seconds", 0}, {"price", 1}});
    events = taken(session);
    check("a lease with unknown fields is heard",
          events.size() == 3 && events[0].fields.decision == 0 && events[1].fields.used_bytes == 4);
    request = session.request({{"t", "plan"}, {"budgets", {1}}});
    json row = {{"vram_budget_bytes", 1}, {"fits", false},       {"ttft_s", nullptr}, {"tokens_per_second", nullptr},
                {"resident_bytes", 0},    {"streamed_bytes", 0}, {"cpu_bytes", 0},    {"disk_bytes", 7}};
    hear(session, {{"t", "plan"}, {"id", request}, {"epoch", 5}, {"rows", {row}}});
    check("a plan with unknown fields is heard", taken(session).size() == 1);
    request = session.request({{"t", "stats"}});
    json broker = {{"pid", 1},      {"engine_pid", nullptr}, {"engine", "dreaming"}, {"engine_restarts", 0},
                   {"sessions", 1}, {"jobs_queued", 0},      {"jobs_running", 0},    {"uptime_s", 1},
                   {"mood", "good"}};
    hear(session, {{"t", "stats"}, {"id", request}, {"epoch", 5}, {"broker", broker}, {"engine", nullptr}});
    events = taken(session);
    check("unknown fields of stats are not kept",
          events.size() == 1 && !json::parse(events[0].detail)["broker"].contains("mood"));
    request = session.request({{"t", "stats"}});
    hear(session, {{"t", "error"},
                   {"id", request},
                   {"epoch", 5},
                   {"error",
                    {{"code", 99},
                     {"name", "stage_fright"},
                     {"message", "no"},
                     {"retriable", true},
                     {"detail", {{"seats", 3}}},
                     {"cause", "x"}}}});
    events = taken(session);
    check("an unknown error is internal",
          events.size() == 1 && events[0].fields.type == FS_EVENT_REFUSED && events[0].fields.status == FS_INTERNAL);
    check("and keeps its details", events.at(0).detail == "{\"seats\":3}");

    // A known field that has a wrong type or is missing must still be refused.
    hear(session, {{"t", "ok"}, {"id", "1"}, {"epoch", 5}});
    check("a wrong type ends the session", session.lost());
    Session older("growth");
    older.greet(5);
    json without = welcome();
    without["protocol"] = frameshard_core::kProtocol - 1;
    without.erase("features");
    hear(older, without);
    check("an older protocol is refused", older.lost() && older.error().status == FS_VERSION_MISMATCH);
    Session plain("growth");
    plain.greet(5);
    without["protocol"] = frameshard_core::kProtocol;
    hear(plain, without);
    check("features may be left out", !plain.lost() && !plain.has_feature("songs"));
    return failed != 0;
}
