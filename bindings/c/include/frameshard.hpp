/* frameshard.h for C++17: the same functions and structs, as classes with destructors and exceptions.
 *
 *     frameshard::LaunchOptions options;
 *     options.model = "innkeeper.gguf";
 *     auto sidecar = frameshard::Client::launch(options);
 *     sidecar.ask("Any rooms left?");
 *     ... each frame:
 *     sidecar.poll([&](const frameshard::Event &event) {
 *         if (event.type == FS_EVENT_TEXT) subtitles += event.text();
 *     });
 *
 * The rules of frameshard.h about waiting, threads, texts and units apply here too. The option structs are those of
 * frameshard.h with their defaults set. The caller owns the texts that they point to; each call copies them. A function
 * throws Error where its C function returns a status other than FS_OK. Otherwise it throws only std::bad_alloc. After
 * close() calls throw FS_CONNECTION_LOST; poll() handles nothing. */
#ifndef FRAMESHARD_HPP
#define FRAMESHARD_HPP

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frameshard.h"

namespace frameshard {

/* Thrown by a call that failed. The call has changed nothing. */
class Error : public std::runtime_error {
  public:
    Error(fs_status status, const std::string &message) : std::runtime_error(message), status_(status) {}
    fs_status status() const noexcept { return status_; }
    const char *name() const noexcept { return fs_status_name(status_); }
    bool retriable() const noexcept { return fs_status_retriable(status_) != 0; }

  private:
    fs_status status_;
};

inline void check(fs_status status) {
    if (status != FS_OK) {
        throw Error(status, fs_last_error(nullptr));
    }
}

struct LaunchOptions : fs_launch_options {
    LaunchOptions() noexcept { fs_launch_options_init(this, sizeof(fs_launch_options)); }
};

struct Sampling : fs_sampling {
    Sampling() noexcept { fs_sampling_init(this, sizeof(fs_sampling)); }
};

struct JobOptions : fs_job_options {
    JobOptions() noexcept { fs_job_options_init(this, sizeof(fs_job_options)); }
};

struct Lease : fs_lease {
    Lease() noexcept { fs_lease_init(this, sizeof(fs_lease)); }
};

/* One message of a chat; `role` is "system", "user", "assistant", or "tool" for the result of a call. */
struct Message {
    const char *role;
    std::string_view content;
    std::vector<fs_tool_call> tool_calls{}; // of an "assistant" message
    const char *tool_call_id = nullptr;     // of a "tool" message: the call_id of its call
};

/* One event, valid until the next poll of its client. text() and detail() hide the C members of these names. */
struct Event : fs_event {
    std::string_view text() const noexcept { return {fs_event::text, text_length}; }
    std::string_view detail() const noexcept { return {fs_event::detail, detail_length}; }
};
static_assert(sizeof(Event) == sizeof(fs_event), "fs_poll fills Events in place");

/* A session with one sidecar. Only one thread at a time may use it. */
class Client {
  public:
    static constexpr double kCloseSeconds = 3;

    static Client launch(const LaunchOptions &options) {
        Client client;
        check(fs_launch(&options, &client.made()));
        return client;
    }
    static Client connect(const std::string &connect_file, const std::string &client_name = "c++") {
        Client client;
        check(fs_connect(connect_file.c_str(), client_name.c_str(), &client.made()));
        return client;
    }

    Client(Client &&other) noexcept : client_(std::exchange(other.client_, nullptr)) {}
    Client &operator=(Client &&other) noexcept {
        std::swap(client_, other.client_);
        return *this;
    }
    ~Client() { close(); }

    /* Ends the session as fs_close does; the destructor calls it. */
    void close(double timeout_s = kCloseSeconds) noexcept { fs_close(std::exchange(client_, nullptr), timeout_s); }

    int32_t state() const noexcept { return fs_state(client_); }
    bool has_feature(const std::string &feature) const noexcept {
        return fs_has_feature(client_, feature.c_str()) != 0;
    }
    fs_model model() const {
        fs_model model{};
        model.struct_size = sizeof model;
        check(fs_get_model(open(), &model));
        return model;
    }

    /* Each of these starts a job and returns its number. */
    uint64_t ask(std::string_view text, const JobOptions &options = {}) {
        uint64_t job = 0;
        check(fs_ask(open(), text.data(), length(text), &options, &job));
        return job;
    }
    /* `results` has the result of each call, by event.call_id. */
    uint64_t tool_results(const std::map<std::string, std::string> &results, const JobOptions &options) {
        std::vector<fs_tool_result> told;
        told.reserve(results.size());
        for (const auto &[call_id, content] : results) {
            told.push_back({call_id.c_str(), content.data(), length(content), 0});
        }
        uint64_t job = 0;
        check(fs_tool_results(open(), told.data(), uint32_t(told.size()), &options, &job));
        return job;
    }
    uint64_t chat(const std::vector<Message> &messages, const JobOptions &options = {}) {
        std::vector<fs_chat_message> told = told_of(messages);
        uint64_t job = 0;
        check(fs_chat_with_tools(open(), told.data(), uint32_t(told.size()), &options, &job));
        return job;
    }
    uint64_t complete(std::string_view prompt, const JobOptions &options = {}) {
        uint64_t job = 0;
        check(fs_complete(open(), prompt.data(), length(prompt), &options, &job));
        return job;
    }
    void cancel(uint64_t job) { check(fs_cancel(open(), job)); }
    void set_priority(uint64_t job, uint32_t priority) { check(fs_set_priority(open(), job, priority)); }

    /* Valid until the next history() or close(). */
    std::vector<Message> history(const std::string &conversation) {
        const fs_chat_message *told = nullptr;
        uint32_t count = 0;
        check(fs_history_with_tools(open(), conversation.c_str(), &told, &count));
        std::vector<Message> messages;
        messages.reserve(count);
        for (const fs_chat_message *each = told; each != told + count; ++each) {
            messages.push_back({each->role,
                                {each->content, size_t(each->content_length)},
                                {each->tool_calls, each->tool_calls + each->n_tool_calls},
                                each->tool_call_id});
        }
        return messages;
    }
    void forget(const std::string &conversation) { check(fs_forget(open(), conversation.c_str())); }
    std::string save(const std::string &conversation) {
        const void *data = nullptr;
        uint64_t size = 0;
        check(fs_save(open(), conversation.c_str(), &data, &size));
        return std::string(static_cast<const char *>(data), size_t(size));
    }
    fs_load_result load(std::string_view data, const std::string &conversation) {
        fs_load_result result{};
        result.struct_size = sizeof result;
        check(fs_load(open(), data.data(), data.size(), conversation.c_str(), &result));
        return result;
    }

    /* Each of these returns the number of the request; its events have the same number. */
    uint64_t save_kv(const std::string &conversation, const std::string &path) {
        return requested(
            [&](uint64_t *number) { return fs_save_kv(open(), conversation.c_str(), path.c_str(), number); });
    }
    uint64_t load_kv(const std::string &path, const std::string &conversation) {
        return requested(
            [&](uint64_t *number) { return fs_load_kv(open(), path.c_str(), conversation.c_str(), number); });
    }
    uint64_t set_lease(const Lease &lease) {
        return requested([&](uint64_t *number) { return fs_set_lease(open(), &lease, number); });
    }
    uint64_t set_budget(uint64_t vram_budget_bytes, double timeout_s = 5) {
        return requested([&](uint64_t *number) { return fs_set_budget(open(), vram_budget_bytes, timeout_s, number); });
    }
    uint64_t get_budget() {
        return requested([&](uint64_t *number) { return fs_get_budget(open(), number); });
    }
    uint64_t load_adapter(const char *name, const char *path) {
        return requested([&](uint64_t *number) { return fs_load_adapter(open(), name, path, number); });
    }
    uint64_t unload_adapter(const char *name) {
        return requested([&](uint64_t *number) { return fs_unload_adapter(open(), name, number); });
    }
    uint64_t get_stats() {
        return requested([&](uint64_t *number) { return fs_get_stats(open(), number); });
    }
    uint64_t get_caps() {
        return requested([&](uint64_t *number) { return fs_get_caps(open(), number); });
    }
    uint64_t get_plan(uint64_t vram_budget_bytes, uint32_t prompt_tokens) {
        return requested(
            [&](uint64_t *number) { return fs_get_plan(open(), vram_budget_bytes, prompt_tokens, number); });
    }
    uint64_t embed(const std::vector<std::string_view> &texts) {
        std::vector<const char *> starts;
        std::vector<int32_t> lengths;
        for (std::string_view text : texts) {
            starts.push_back(text.data());
            lengths.push_back(length(text));
        }
        return requested([&](uint64_t *number) {
            return fs_embed(open(), starts.data(), lengths.data(), uint32_t(texts.size()), number);
        });
    }
    uint64_t count_tokens(std::string_view prompt) {
        return requested(
            [&](uint64_t *number) { return fs_count_tokens(open(), prompt.data(), length(prompt), number); });
    }
    uint64_t count_tokens(const std::vector<Message> &messages, const std::vector<fs_tool> &tools = {}) {
        std::vector<fs_chat_message> told = told_of(messages);
        return requested([&](uint64_t *number) {
            return fs_count_chat_tokens_with_tools(open(), told.data(), uint32_t(told.size()), tools.data(),
                                                   uint32_t(tools.size()), number);
        });
    }
    uint64_t set_pacing(int32_t scheduling_mode, double target_tokens_per_second = 0) {
        return requested(
            [&](uint64_t *number) { return fs_set_pacing(open(), scheduling_mode, target_tokens_per_second, number); });
    }
    uint64_t get_frame_block() {
        return requested([&](uint64_t *number) { return fs_get_frame_block(open(), number); });
    }
    void shutdown() { check(fs_shutdown(open())); }

    /* Calls `handle` with at most `limit` events, oldest first. Returns their number. If `handle` throws, the remaining
     * events come with the next poll. `handle` may call close(); no events follow then. */
    template <class Handle> int32_t poll(Handle &&handle, int32_t limit = 64) {
        int32_t count = 0;
        Event event;
        while (client_ != nullptr && count < limit) { // `handle` may close
            int32_t found = fs_poll(client_, &event, sizeof(fs_event), 1);
            if (found < 0) {
                throw Error(-found, fs_last_error(nullptr));
            }
            if (found == 0) {
                break;
            }
            ++count;
            handle(static_cast<const Event &>(event));
        }
        return count;
    }
    /* See fs_wait. */
    bool wait(double timeout_s) { return fs_wait(client_, timeout_s) != 0; }

    /* The client for functions of frameshard.h that this class does not wrap. This object still owns it. */
    fs_client *get() const noexcept { return client_; }

  private:
    Client() = default;
    fs_client *&made() { return client_; }
    fs_client *open() const {
        if (client_ == nullptr) {
            throw Error(FS_CONNECTION_LOST, "the sidecar is closed");
        }
        return client_;
    }
    static int32_t length(std::string_view text) {
        if (text.size() > INT32_MAX) {
            throw Error(FS_BAD_ARGUMENT, "a text is longer than 2 GiB");
        }
        return int32_t(text.size());
    }
    static std::vector<fs_chat_message> told_of(const std::vector<Message> &messages) {
        std::vector<fs_chat_message> told;
        told.reserve(messages.size());
        for (const Message &message : messages) {
            told.push_back({message.role, message.content.data(), length(message.content),
                            uint32_t(message.tool_calls.size()), message.tool_calls.data(), message.tool_call_id});
        }
        return told;
    }
    template <class Ask> static uint64_t requested(Ask ask) {
        uint64_t number = 0;
        check(ask(&number));
        return number;
    }

    fs_client *client_ = nullptr;
};

/* The frame block: shared memory in which the host tells the sidecar when each frame begins. Only one thread at a time
 * may use it. */
class FrameBlock {
  public:
    FrameBlock(const std::string &path, double target_frame_s) {
        fs_frame_block *block = nullptr;
        check(fs_frame_block_open(path.c_str(), target_frame_s, &block));
        block_.reset(block);
    }

    void begin() { check(fs_frame_begin(block_.get())); }
    void end(double gpu_busy_s) { check(fs_frame_end(block_.get(), gpu_busy_s)); }
    void idle() { check(fs_frame_idle(block_.get())); }
    /* Returns the generation by which answer() refers to this budget. */
    uint64_t set_budget(uint64_t vram_budget_bytes) {
        uint64_t generation = 0;
        check(fs_frame_set_budget(block_.get(), vram_budget_bytes, &generation));
        return generation;
    }
    fs_frame_answer answer() const {
        fs_frame_answer answer{};
        answer.struct_size = sizeof answer;
        check(fs_frame_get_answer(block_.get(), &answer));
        return answer;
    }

  private:
    struct Close {
        void operator()(fs_frame_block *block) const noexcept { fs_frame_block_close(block); }
    };
    std::unique_ptr<fs_frame_block, Close> block_;
};

} // namespace frameshard

#endif
