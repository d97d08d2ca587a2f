/* The client's side of one session, without I/O and without a clock. The caller passes received frames and beats in,
 * and takes frames to send and events out. Implements bindings/PROTOCOL.md, "A client in ten steps", and on top of it
 * the conversations of fs_ask. */
#ifndef FRAMESHARD_SESSION_H
#define FRAMESHARD_SESSION_H

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "codec.h"
#include "frameshard.h"
#include "saves.h"

namespace frameshard_core {

constexpr double kBeatSeconds = 0.5;

struct Error {
    fs_status status = FS_OK;
    std::string message;
    json detail = json::object();
};

/* An event for the program, with the texts that it points to. */
struct Event {
    fs_event fields{};
    std::string text, detail;
    std::string call_id, name; // of FS_EVENT_TOOL_CALL
    std::vector<float> rows;   // of FS_EVENT_EMBEDDINGS
    uint64_t wire = 0;         // the protocol's number of the job; 0: the event did not come from the sidecar
    uint64_t seq = 0;
};

class Session {
  public:
    explicit Session(std::string client_name) : name_(std::move(client_name)) {}

    /* Sends hello. Call it once, when the connection is made. */
    void greet(uint64_t epoch);

    const std::string *next_frame() const { return outgoing_.empty() ? nullptr : &outgoing_.front(); }
    void sent() { outgoing_.pop_front(); }
    void receive(const char *data, size_t size);
    /* Call it every kBeatSeconds while the program polls. Sends a ping, and ends the session if the sidecar has not
     * answered for too long. */
    void beat();
    /* Ends the session: each open job fails and each open request is refused with `error`, then FS_EVENT_CLOSED
     * follows. Further calls do nothing. */
    void lose(Error error);
    /* Takes a `loading` message: from the sidecar's output while it is launched, later from the socket. */
    void loading(const json &message);

    bool has_event() const { return !events_.empty(); }
    /* Removes and returns the next event for the program, and gives the sidecar credit for it. */
    Event take();

    bool lost() const { return state_ == State::Lost; }
    const Error &error() const { return error_; }
    /* True if the last answer to the request has come. */
    bool answered(uint64_t request) const { return unanswered_.count(request) == 0; }
    const json &model() const { return model_; } // null before FS_EVENT_READY
    /* True if the sidecar has named this feature in its welcome. */
    bool has_feature(const std::string &name) const;

    /* `fields` are those of `submit` without job, epoch and id. Returns the program's number of the job. */
    uint64_t submit(json fields);
    uint64_t ask(std::string text, const std::string &conversation, const std::string *system, json fields);
    /* `results`: the results of the calls that wait in the conversation, by call id. Throws Refused if they do not
     * fit. */
    uint64_t answer_calls(const std::map<std::string, std::string> &results, const std::string &conversation,
                          json fields);
    /* Both return false if there is no such job. */
    bool cancel(uint64_t job);
    bool set_priority(uint64_t job, uint32_t priority);
    /* What was said in a conversation, with the part of an open answer that was taken. */
    Save saved(const std::string &conversation) const;
    /* Both take effect when the questions asked before are answered. */
    void forget(const std::string &conversation);
    void load(const std::string &conversation, Save save);
    uint64_t request(json fields);

  private:
    enum class State { Starting, Greeting, Open, Resuming, Lost };

    struct Waiting {
        uint64_t job = 0;           // 0: no job, but a new history
        std::unique_ptr<Save> save; // null: an empty one
    };
    struct Conversation {
        std::string system;
        std::deque<Exchange> exchanges;
        std::deque<Waiting> waiting; // in their order
        uint64_t speaking = 0;
    };
    struct Job {
        json fields;
        std::string question, answer;
        json steps = json::array();      // between them
        json calls = json::array();      // of the answer, as far as the program has taken them
        std::deque<Exchange> unanswered; // the exchange whose calls get results; stays if there is no answer
        std::string conversation;
        std::unique_ptr<std::string> system;
        uint64_t wire = 0; // number of the job in the protocol; 0: it waits for its conversation
        uint64_t expected = 0, granted = 0;
        size_t taken = 0;     // bytes of the answer that the program has taken
        bool turn = false;    // made by fs_ask
        size_t dropped = 0;   // oldest exchanges that the prompt lacks
        size_t forgotten = 0; // of them, those that the context has no room for; the conversation loses them
        bool begun = false;   // something of the answer has come
        // Of the conversation before the question. The system text is restored if the question fails without an answer,
        // the exchange whose calls wait for results if it has no answer.
        std::string system_before;
        std::unique_ptr<Exchange> calls_before;
        bool accepted = false, asked_again = false, started = false, cancelled = false, ended = false;
    };

    struct Request {
        json fields;              // without epoch
        std::string last_heard{}; // the newest answer to budget_set so far: "", `lease` or `released`
    };

    void hello();
    void send(const json &message) { outgoing_.push_back(encode(message)); }
    void send_request(const json &message);
    void grant(Job &job, uint64_t next, bool resend = false);
    void ask_again(Job &job);
    void open(uint64_t number);
    void advance(const std::string &conversation);
    void welcomed(const json &message);
    void refused(const json &message);
    void answered_by(const json &message);
    void job_event(const json &message);
    void pass_over(Job &job, uint64_t seq);
    void credit(Job &job, uint64_t next);
    void compare(const json &message);
    bool shorten(Job &job, const Error &overflow);
    void add_spoken(const Job &job, std::deque<Exchange> *exchanges) const;
    void ready(const json &model);
    Event &put(uint32_t type);
    void put_error(Event &event, const Error &error);
    void end_job(uint64_t number, uint32_t type, const Error &error);

    std::string name_;
    State state_ = State::Starting;
    Error error_;
    uint64_t epoch_ = 0, session_ = 0, hello_ = 0;
    uint64_t ids_ = 0, handles_ = 0, wires_ = 0;
    int silent_beats_ = 0;
    json model_;
    json features_ = json::array(); // features of the sidecar
    std::deque<std::string> outgoing_;
    std::map<uint64_t, Request> unanswered_; // by id
    std::map<uint64_t, Job> jobs_;           // by the program's number of the job
    std::map<uint64_t, uint64_t> by_wire_;   // from the protocol's number of a job to the program's
    std::map<std::string, Conversation> conversations_;
    std::deque<Event> events_;
};

/* True if an event of this type is the last one of its job. */
inline bool is_end(uint32_t type) {
    return type == FS_EVENT_DONE || type == FS_EVENT_FAILED || type == FS_EVENT_CANCELLED;
}

/* Converts the protocol's ErrorInfo. An unknown code becomes FS_INTERNAL. */
Error error_of(const json &info);

} // namespace frameshard_core

#endif
