/* A base for game engine plugins, on top of frameshard.h. It uses no engine types, exceptions or threads. It calls back
 * the code that asked a question, passes whole sentences on for speech, and limits the number of events per frame.
 * (Programs with exceptions can use frameshard.hpp instead.)
 *
 *     frameshard::Game game;
 *     if (game.launch(options) != FS_OK) report(fs_last_error(nullptr));
 *     frameshard::Listener mira;
 *     mira.on_sentence = [&](std::string_view sentence) { speech.say(sentence); };
 *     game.ask("Any rooms left?", job_options, std::move(mira));
 *     ... each frame:
 *     game.pump(64);
 *
 * Call everything from one thread. Callbacks run inside pump() and close() only. A callback may call any function here,
 * including close(); a pump() in a callback handles nothing. A text given to a callback is valid until the callback
 * returns or calls close(). The destructor of Game calls close(), so objects that callbacks use must outlive the Game.
 * C++17; compiles with exceptions and RTTI disabled. */
#ifndef FRAMESHARD_GAME_HPP
#define FRAMESHARD_GAME_HPP

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frameshard.h"

namespace frameshard {

/* A call of a tool, in an answer. */
struct ToolCall {
    std::string call_id;
    std::string name;      // of the tool
    std::string arguments; // JSON that matches the tool's schema
};

/* How an answer ended. */
struct Ending {
    fs_status status = FS_OK; // FS_CANCELLED, or the error
    std::string text;         // the answer; incomplete unless status is FS_OK
    std::string message;      // a sentence about the error
    uint32_t reason = 0;      // FS_REASON_... if status is FS_OK
    uint32_t n_prompt = 0;    // tokens
    uint32_t n_generated = 0; // tokens
    uint64_t n_reused = 0;    // prompt tokens that were already in the KV cache
    uint64_t n_left = 0;      // tokens that still fit into the context
    uint64_t n_dropped = 0;   // oldest questions of the conversation that are not in the prompt; the context is full
    uint64_t n_thought = 0;   // of n_generated, tokens that the model thought
    double prefill_s = 0, decode_s = 0;
    bool remote = false; // the server of the launch option `fallback` has ended the answer
    /* Give the results of these to tool_results, if there are any. */
    std::vector<ToolCall> tool_calls;
};

/* Callbacks for one answer. Each may be empty. on_end is the last call. on_sentence gets whole sentences, as the sidecar
 * finds them, without white space around them. A sentence that was cut off is not passed on. */
struct Listener {
    std::function<void(const fs_event &)> on_progress; // FS_EVENT_PROGRESS, with images or a long prompt
    std::function<void(bool)> on_paused; // true: a job of higher priority has its place. false: it continues
    std::function<void(std::string_view)> on_thought;   // with `thinking` "shown"; a thought is in no text or sentence
    std::function<void(const ToolCall &)> on_tool_call; // the call is whole; its result is due after on_end
    std::function<void(std::string_view)> on_text;
    std::function<void(std::string_view)> on_sentence;
    std::function<void(const Ending &)> on_end;
};

/* Result of a lease that was proposed. */
struct BudgetResult {
    fs_status status = FS_OK; // FS_BUDGET_BELOW_FLOOR: nothing changed
    std::string message;
    uint64_t budget_bytes = 0, used_bytes = 0, floor_bytes = 0;
    double seconds = 0;                                                        // time that the release took
    uint64_t host_budget_bytes = 0, host_used_bytes = 0, host_floor_bytes = 0; // of host memory
};

/* One sidecar with its callbacks. */
class Game {
  public:
    Game() = default;
    ~Game() {
        close(0);
        fs_close(client_, 0); // of a session that a callback has launched meanwhile: it ends without callbacks
    }
    Game(const Game &) = delete;
    Game &operator=(const Game &) = delete;

    std::function<void(const fs_model &)> on_ready;
    /* Called when the sidecar has ended or could not start. The client is already closed. */
    std::function<void(fs_status, std::string_view message)> on_closed;
    /* Called with FS_EVENT_NOTICE, FS_EVENT_ENGINE, FS_EVENT_LOADING, FS_EVENT_BUDGET_OBSERVED, answers to requests made
     * with client(), and FS_EVENT_REFUSED if the frame block cannot be used. */
    std::function<void(const fs_event &)> on_event;

    /* launch() and connect() close the open session first. If a callback of that close launches another session, that
     * one is closed, too; if a callback of this second close launches a third, the third one stays. They return at once;
     * on_ready or on_closed follows. If they fail, fs_last_error returns the reason. */
    fs_status launch(const fs_launch_options &options) {
        return open([&](fs_client **made) { return fs_launch(&options, made); });
    }
    fs_status connect(const char *connect_file, const char *client_name) {
        return open([&](fs_client **made) { return fs_connect(connect_file, client_name, made); });
    }

    /* Ends the session as fs_close does. Inside this call, unfinished answers, leases and requests of count_tokens() and
     * embed() end with FS_CANCELLED. Requests made with client() get no answer. */
    void close(double timeout_s) { replace(nullptr, timeout_s); }

    /* NULL when closed. */
    fs_client *client() const { return client_; }
    bool is_ready() const { return ready_; }

    /* Calls fs_ask. If it returns FS_OK, `listener` receives the answer. `job` may be NULL. */
    fs_status ask(std::string_view text, const fs_job_options &options, Listener listener, uint64_t *job = nullptr) {
        return begin(options, std::move(listener), job, [&](const fs_job_options &asked, uint64_t *number) {
            return fs_ask(client_, text.data(), int32_t(text.size()), &asked, number);
        });
    }

    /* Calls fs_tool_results with the result of each call, by its call_id. If it returns FS_OK, `listener` receives the
     * answer that follows. `job` may be NULL. on_end of the answer with the calls may call this. */
    fs_status tool_results(const std::map<std::string, std::string> &results, const fs_job_options &options,
                           Listener listener, uint64_t *job = nullptr) {
        std::vector<fs_tool_result> told;
        for (const auto &[call_id, content] : results) {
            told.push_back({call_id.c_str(), content.data(), int32_t(content.size()), 0});
        }
        return begin(options, std::move(listener), job, [&](const fs_job_options &asked, uint64_t *number) {
            return fs_tool_results(client_, told.data(), uint32_t(told.size()), &asked, number);
        });
    }

    /* Ends an answer early. Its on_end follows with FS_CANCELLED, unless the answer has ended otherwise before. */
    fs_status cancel(uint64_t job) { return fs_cancel(client_, job); }

    /* Changes the priority of an answer, 0 to 2. */
    fs_status set_priority(uint64_t job, uint32_t priority) { return fs_set_priority(client_, job, priority); }

    /* Calls fs_set_lease. If it returns FS_OK, `done` is called once, with the release or the refusal. Before that,
     * `decided` is called with FS_EVENT_LEASE, unless the lease is refused at once. Both may be empty. */
    fs_status set_lease(const fs_lease &lease, std::function<void(const BudgetResult &)> done,
                        std::function<void(const fs_event &)> decided = {}) {
        uint64_t request = 0;
        fs_status status = fs_set_lease(client_, &lease, &request);
        if (status == FS_OK) {
            leases_.emplace(request, Lease{std::move(decided), std::move(done)});
        }
        return status;
    }

    /* set_lease with this budget and deadline, and defaults for the rest. */
    fs_status set_budget(uint64_t bytes, double timeout_s, std::function<void(const BudgetResult &)> done) {
        fs_lease lease;
        fs_lease_init(&lease, sizeof lease);
        lease.vram_budget_bytes = bytes;
        lease.timeout_s = timeout_s;
        return set_lease(lease, std::move(done));
    }

    /* Calls fs_count_tokens. If it returns FS_OK, `counted`, which may be empty, is called once, with
     * FS_EVENT_TOKEN_COUNT or FS_EVENT_REFUSED. */
    fs_status count_tokens(std::string_view prompt, std::function<void(const fs_event &)> counted) {
        return request(std::move(counted), [&](uint64_t *number) {
            return fs_count_tokens(client_, prompt.data(), int32_t(prompt.size()), number);
        });
    }

    /* Likewise with fs_count_chat_tokens_with_tools. */
    fs_status count_tokens(const std::vector<fs_chat_message> &messages, const std::vector<fs_tool> &tools,
                           std::function<void(const fs_event &)> counted) {
        return request(std::move(counted), [&](uint64_t *number) {
            return fs_count_chat_tokens_with_tools(client_, messages.data(), uint32_t(messages.size()), tools.data(),
                                                   uint32_t(tools.size()), number);
        });
    }

    /* Calls fs_embed. If it returns FS_OK, `embedded`, which may be empty, is called once, with FS_EVENT_EMBEDDINGS or
     * FS_EVENT_REFUSED. */
    fs_status embed(const std::vector<std::string> &texts, std::function<void(const fs_event &)> embedded) {
        std::vector<const char *> starts;
        std::vector<int32_t> lengths;
        for (const std::string &text : texts) {
            starts.push_back(text.data());
            lengths.push_back(int32_t(text.size()));
        }
        return request(std::move(embedded), [&](uint64_t *number) {
            return fs_embed(client_, starts.data(), lengths.data(), uint32_t(texts.size()), number);
        });
    }

    /* From on_ready on, each pump() tells the sidecar that a frame begins, so that it leaves GPU time to frames.
     * `target_frame_s` is the time that a frame should take, 0.0001 to 10; 0 turns this off. Has no effect with a sidecar
     * that has no frame block. on_event is called with FS_EVENT_REFUSED if the time is out of range. */
    void keep_out_of_frames(double target_frame_s) {
        target_frame_s_ = target_frame_s;
        fs_frame_block_close(std::exchange(frames_, nullptr));
        if (ready_ && target_frame_s != 0) {
            fs_get_frame_block(client_, &frame_request_);
        }
    }

    /* Call it once a frame. Handles at most `most` events and returns their number. In a callback it does nothing and
     * returns 0, because a further poll would free the text of the event that is being handled. */
    int32_t pump(int32_t most) {
        if (pumping_) {
            return 0;
        }
        Mark pumping(pumping_);
        if (frames_ != nullptr) {
            fs_frame_begin(frames_);
        }
        int32_t count = 0;
        fs_event events[16];
        while (client_ != nullptr && count < most) {
            uint64_t closed = closed_;
            int32_t wanted = std::min<int32_t>(most - count, int32_t(std::size(events)));
            int32_t got = fs_poll(client_, events, sizeof events[0], wanted);
            for (int32_t i = 0; i < got && closed_ == closed; ++i) { // a close() in a callback frees the texts
                ++count;
                hand_out(events[i]);
            }
            if (got < wanted || closed_ != closed) {
                break;
            }
        }
        return count;
    }

  private:
    static constexpr const char *kClosed = "the session was closed";

    /* Sets a flag until the end of a scope. */
    struct Mark {
        explicit Mark(bool &flag_) : flag(flag_) { flag = true; }
        ~Mark() { flag = false; }
        bool &flag;
    };

    struct Answer {
        Listener listener;
        std::string sentence; // as far as it came
        Ending ending;
    };

    struct Lease {
        std::function<void(const fs_event &)> decided;
        std::function<void(const BudgetResult &)> done;
    };

    template <class Open> fs_status open(Open open) {
        close(0);
        fs_client *made = nullptr;
        fs_status status = open(&made);
        replace(made, 0); // a callback of close() may have launched another one
        return status;
    }

    /* Makes `client`, which may be NULL, the session, and closes the old one. Callbacks called meanwhile see the new one. */
    void replace(fs_client *client, double timeout_s) {
        fs_client *old = std::exchange(client_, client);
        if (old == nullptr) {
            return;
        }
        fs_frame_block_close(std::exchange(frames_, nullptr));
        ++closed_;
        ready_ = false;
        frame_request_ = 0;
        auto answers = std::exchange(answers_, {});
        auto leases = std::exchange(leases_, {});
        auto askers = std::exchange(askers_, {});
        for (auto &item : answers) {
            item.second->ending.status = FS_CANCELLED;
            item.second->ending.message = kClosed;
            end(*item.second);
        }
        for (auto &item : leases) {
            BudgetResult result;
            result.status = FS_CANCELLED;
            result.message = kClosed;
            if (item.second.done) {
                item.second.done(result);
            }
        }
        for (auto &item : askers) {
            if (item.second) {
                item.second(refusal(item.first, FS_CANCELLED, kClosed));
            }
        }
        fs_close(old, timeout_s);
    }

    static fs_event refusal(uint64_t request, fs_status status, const char *reason) {
        fs_event event{};
        event.type = FS_EVENT_REFUSED;
        event.request = request;
        event.status = status;
        event.text = reason;
        event.text_length = uint32_t(std::string_view(reason).size());
        event.detail = event.call_id = event.name = "";
        return event;
    }

    template <class Submit>
    fs_status begin(const fs_job_options &options, Listener listener, uint64_t *job, Submit submit) {
        uint64_t number = 0;
        fs_job_options asked = options;
        asked.sentences = listener.on_sentence ? 1 : options.sentences;
        fs_status status = submit(asked, &number);
        if (status == FS_OK) {
            auto answer = std::make_shared<Answer>();
            answer->listener = std::move(listener);
            answers_.emplace(number, std::move(answer));
        }
        if (job != nullptr) {
            *job = number;
        }
        return status;
    }

    template <class Ask> fs_status request(std::function<void(const fs_event &)> answered, Ask ask) {
        uint64_t number = 0;
        fs_status status = ask(&number);
        if (status == FS_OK) {
            askers_.emplace(number, std::move(answered));
        }
        return status;
    }

    static std::string_view trimmed(std::string_view text) {
        constexpr const char *space = " \t\r\n";
        size_t begin = std::min(text.find_first_not_of(space), text.size());
        text.remove_prefix(begin);
        return text.substr(0, text.find_last_not_of(space) + 1);
    }

    static void end(Answer &answer) {
        if (answer.listener.on_end) {
            answer.listener.on_end(answer.ending);
        }
    }

    void hand_out(const fs_event &event) {
        auto found = answers_.find(event.job);
        if (event.job != 0 && found != answers_.end()) {
            hear(event, found->second);
        } else if (auto asked = leases_.find(event.request);
                   asked != leases_.end() && (event.type == FS_EVENT_LEASE || event.type == FS_EVENT_BUDGET_RELEASED ||
                                              event.type == FS_EVENT_REFUSED)) {
            hear(event, asked);
        } else if (auto asker = askers_.find(event.request); event.request != 0 && asker != askers_.end()) {
            auto answered = std::move(asker->second); // a close() in the callback erases `asker`
            askers_.erase(asker);
            if (answered) {
                answered(event);
            }
        } else if (frame_request_ != 0 && event.request == frame_request_) {
            frame_request_ = 0;
            if (event.type == FS_EVENT_FRAME_BLOCK && target_frame_s_ != 0) {
                open_frames(event);
            }
        } else if (event.type == FS_EVENT_READY) {
            ready_ = true;
            keep_out_of_frames(target_frame_s_);
            fs_model model{};
            model.struct_size = sizeof model;
            if (on_ready && fs_get_model(client_, &model) == FS_OK) {
                on_ready(model);
            }
        } else if (event.type == FS_EVENT_CLOSED) {
            fs_status status = event.status;
            std::string message(event.text, event.text_length);
            close(0);
            if (on_closed) {
                on_closed(status, message);
            }
        } else if (on_event) {
            on_event(event);
        }
    }

    void open_frames(const fs_event &event) {
        fs_status status = fs_frame_block_open(event.text, target_frame_s_, &frames_);
        if (status != FS_OK && on_event) {
            const std::string reason = fs_last_error(nullptr); // a call in the callback overwrites it
            on_event(refusal(event.request, status, reason.c_str()));
        }
    }

    void hear(const fs_event &event, std::map<uint64_t, Lease>::iterator asked) {
        if (event.type == FS_EVENT_LEASE) {
            auto decided = std::move(asked->second.decided); // a close() in the callback erases `asked`
            if (decided) {
                decided(event);
            }
            return;
        }
        auto done = std::move(asked->second.done);
        leases_.erase(asked);
        BudgetResult result;
        result.status = event.status;
        result.message.assign(event.text, event.text_length);
        result.budget_bytes = event.budget_bytes;
        result.used_bytes = event.used_bytes;
        result.floor_bytes = event.floor_bytes;
        result.seconds = event.seconds;
        result.host_budget_bytes = event.host_budget_bytes;
        result.host_used_bytes = event.host_used_bytes;
        result.host_floor_bytes = event.host_floor_bytes;
        if (done) {
            done(result);
        }
    }

    /* Takes `answer` by value, because a close() in a callback erases it from answers_. */
    void hear(const fs_event &event, std::shared_ptr<Answer> answer) {
        std::string_view text(event.text, event.text_length);
        switch (event.type) {
        case FS_EVENT_PROGRESS:
            if (answer->listener.on_progress) {
                answer->listener.on_progress(event);
            }
            return;
        case FS_EVENT_PAUSED:
        case FS_EVENT_RESUMED:
            if (answer->listener.on_paused) {
                answer->listener.on_paused(event.type == FS_EVENT_PAUSED);
            }
            return;
        case FS_EVENT_THOUGHT:
            if (answer->listener.on_thought) {
                answer->listener.on_thought(text);
            }
            return;
        case FS_EVENT_TOOL_CALL:
            answer->ending.tool_calls.push_back({event.call_id, event.name, std::string(text)});
            if (answer->listener.on_tool_call) {
                answer->listener.on_tool_call(answer->ending.tool_calls.back());
            }
            return;
        case FS_EVENT_TEXT: {
            answer->ending.text.append(text);
            answer->sentence.append(text);
            uint64_t closed = closed_;
            if (answer->listener.on_text) {
                answer->listener.on_text(text);
            }
            if (event.sentence_end != 0 && closed_ == closed) { // else on_text has closed
                std::string sentence = std::exchange(answer->sentence, {});
                if (answer->listener.on_sentence) {
                    answer->listener.on_sentence(trimmed(sentence));
                }
            }
            break;
        }
        case FS_EVENT_DONE:
            answer->ending.reason = event.reason;
            answer->ending.n_prompt = event.n_prompt;
            answer->ending.n_generated = event.n_generated;
            answer->ending.n_reused = event.n_reused;
            answer->ending.n_left = event.n_left;
            answer->ending.n_dropped = event.n_dropped;
            answer->ending.n_thought = event.n_thought;
            answer->ending.prefill_s = event.prefill_s;
            answer->ending.decode_s = event.decode_s;
            answer->ending.remote = event.remote != 0;
            break;
        case FS_EVENT_FAILED:
            answer->ending.status = event.status;
            answer->ending.message = text;
            break;
        case FS_EVENT_CANCELLED:
            answer->ending.status = FS_CANCELLED;
            answer->ending.message = "the answer was cancelled";
            break;
        default:
            return;
        }
        if (event.type != FS_EVENT_TEXT) {
            answers_.erase(event.job);
            end(*answer);
        }
    }

    fs_client *client_ = nullptr;
    fs_frame_block *frames_ = nullptr;
    bool ready_ = false;
    bool pumping_ = false;
    uint64_t closed_ = 0; // number of close() calls, to notice one inside a callback
    double target_frame_s_ = 0;
    uint64_t frame_request_ = 0;
    std::map<uint64_t, std::shared_ptr<Answer>> answers_;
    std::map<uint64_t, Lease> leases_;                                 // by request
    std::map<uint64_t, std::function<void(const fs_event &)>> askers_; // by request
};

} // namespace frameshard

#endif
