/* The client's side of one session, without I/O and without a clock: it takes frames and beats, and gives frames and
 * events. It implements bindings/PROTOCOL.md, "A client in ten steps", and above that the conversations of fs_ask. */
#ifndef FRAMESHARD_SESSION_H
#define FRAMESHARD_SESSION_H

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "codec.h"
#include "frameshard.h"

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
    uint64_t wire = 0; // the protocol's number of the job; 0: the event was made here
    uint64_t seq = 0;
};

class Session {
  public:
    explicit Session(std::string client_name) : name_(std::move(client_name)) {}

    /* Sends hello; to be called once when the connection is made. */
    void greet(uint64_t epoch);

    const std::string *next_frame() const { return outgoing_.empty() ? nullptr : &outgoing_.front(); }
    void sent() { outgoing_.pop_front(); }
    void receive(const char *data, size_t size);
    /* To be called every kBeatSeconds while the program polls: sends a ping, and loses the session after long silence. */
    void beat();
    /* Ends the session once: each open job fails and each open request is refused with `error`; FS_EVENT_CLOSED follows. */
    void lose(Error error);

    bool has_event() const { return !events_.empty(); }
    /* The next event for the program. Gives the sidecar credit for it. */
    Event take();

    bool lost() const { return state_ == State::Lost; }
    const Error &error() const { return error_; }
    /* Whether the request has its last answer. */
    bool answered(uint64_t request) const { return unanswered_.count(request) == 0; }
    const json &model() const { return model_; } // null before FS_EVENT_READY
    /* Whether the sidecar has announced this feature in its welcome. */
    bool has_feature(const std::string &name) const;

    /* `fields` are those of submit without job, epoch and id. */
    uint64_t submit(json fields);
    uint64_t ask(std::string text, const std::string &conversation, const std::string *system, json fields);
    bool cancel(uint64_t job);
    void forget(const std::string &conversation);
    uint64_t request(json fields);

  private:
    enum class State { Starting, Greeting, Open, Resuming, Lost };

    struct Exchange {
        std::string question, answer;
    };
    struct Conversation {
        std::string system;
        std::deque<Exchange> exchanges;
        std::deque<uint64_t> waiting; // jobs in their order; 0: clear the history
        uint64_t speaking = 0;
    };
    struct Job {
        json fields;
        std::string question, answer;
        std::string conversation;
        std::unique_ptr<std::string> system;
        uint64_t wire = 0; // number of the job in the protocol; 0: it waits for its conversation
        uint64_t expected = 0, granted = 0;
        bool turn = false; // of fs_ask
        bool accepted = false, asked_again = false, started = false, ended = false;
    };

    struct Request {
        json fields;              // without epoch
        std::string last_heard{}; // of budget_set: `lease` or `released`, the answers that are not the last
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
    bool shorten(Job &job);
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
    json features_ = json::array(); // of the sidecar
    std::deque<std::string> outgoing_;
    std::map<uint64_t, Request> unanswered_; // by id
    std::map<uint64_t, Job> jobs_;           // by the program's number
    std::map<uint64_t, uint64_t> by_wire_;   // to the program's number
    std::map<std::string, Conversation> conversations_;
    std::deque<Event> events_;
};

/* Whether this type of event is the last of a job. */
inline bool is_end(uint32_t type) {
    return type == FS_EVENT_DONE || type == FS_EVENT_FAILED || type == FS_EVENT_CANCELLED;
}

/* The error of an ErrorInfo; an unknown code becomes FS_INTERNAL. */
Error error_of(const json &info);

} // namespace frameshard_core

#endif
