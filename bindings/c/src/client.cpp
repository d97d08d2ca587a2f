/* The functions of frameshard.h. A client has a Session, a ZeroMQ socket and, if it was launched, a process.
 *
 * The library has no thread of its own. ZeroMQ's thread receives messages up to the high-water mark, and the sidecar
 * sends only events that it has credit for. All that a thread of its own could add are pings while the game does not
 * poll. A launched sidecar does not need these, because it watches the host's pipe. The thread would need a lock, would
 * have to pass on each event, and would keep running when a game engine reloads its scripts. */
#include "frameshard.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <map>
#include <sstream>

#include <zmq.h>

#include "codec.h"
#include "images.h"
#include "options.h"
#include "process.h"
#include "seam.h"
#include "session.h"
#include "words.h"

using frameshard_core::check_range;
using frameshard_core::Error;
using frameshard_core::Event;
using frameshard_core::Exchange;
using frameshard_core::fields_of;
using frameshard_core::fill;
using frameshard_core::first_that_fits;
using frameshard_core::guarded;
using frameshard_core::Images;
using frameshard_core::json;
using frameshard_core::kBeatSeconds;
using frameshard_core::kMaxString;
using frameshard_core::known_part;
using frameshard_core::kSchedulingMode;
using frameshard_core::refuse;
using frameshard_core::Save;
using frameshard_core::Session;
using frameshard_core::text_of;
using frameshard_core::word_of;

namespace {

constexpr size_t kMaxLine = 1 << 16;
constexpr size_t kMaxConnectFile = 1 << 16; // bytes
constexpr double kLookAtProcessSeconds = 0.05;
constexpr double kGoodbyeSeconds = 1.0;
constexpr double kLongestWaitSeconds = 3600.0;
constexpr double kEndSeconds = 3.0; // time for a process to end after its output has ended
constexpr size_t kMaxName = 512;    // bytes of a conversation's name
constexpr int kHighWater = 256, kHandshakeMs = 1000;
constexpr int kGoodbyeLingerMs = 100; // for a sidecar that does not read; any other one takes the message at once

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/* What the last fs_history or fs_history_with_tools gave the program. */
struct History {
    json told = json::array();                    // ChatMessages; the others point into them
    std::vector<std::vector<fs_tool_call>> calls; // of each message
    std::vector<fs_chat_message> messages;
    std::vector<fs_message> plain; // `messages` without calls
};

} // namespace

struct fs_client {
    explicit fs_client(std::string name) : session(std::move(name)) {}
    ~fs_client() {
        if (socket != nullptr) {
            zmq_close(socket);
        }
        if (context != nullptr) {
            while (zmq_ctx_term(context) != 0 && zmq_errno() == EINTR) { // a signal of the host has interrupted it
            }
        }
    }

    void connect(const json &info);
    void load(double time);
    void fail_to_start(double time);
    void work(double time);
    bool receive();
    void wait(int milliseconds);
    void flush();
    void lose(fs_status status, std::string message) { session.lose({status, std::move(message), json::object()}); }

    Session session;
    frameshard_core::Process process;
    bool launched = false, loading = false;
    std::string python;      // the Python that was started
    std::string line;        // the ready line, as far as it was read
    double output_ended = 0; // time at which the output ended without a ready line; 0: it has not
    std::string connect_file;
    uint64_t pid = 0;
    std::string model_name, model_arch, model_device, model_plan, model_vision, model_fingerprint, model_template;
    std::string http_url, http_key, model_embedder, model_passed_over;
    void *context = nullptr, *socket = nullptr;
    double next_beat = 0, next_look = 0;
    std::deque<Event> handed; // events of the last poll; the program may still read their texts
    std::string save;         // of the last fs_save; the program may still read it
    History history;
    std::map<uint64_t, frameshard_core::Images> images; // by job, until its last event is polled
};

namespace {

void need(int result) {
    if (result != 0) {
        refuse(FS_INTERNAL, std::string("ZeroMQ: ") + zmq_strerror(zmq_errno()));
    }
}

void set(void *socket, int option, int value) { need(zmq_setsockopt(socket, option, &value, sizeof value)); }

/* Returns the output of a process as valid UTF-8, without space at both ends. */
std::string valid_text(const std::string &bytes) {
    size_t begin = bytes.find_first_not_of(" \t\r\n"), end = bytes.find_last_not_of(" \t\r\n");
    std::string text = begin == std::string::npos ? "" : bytes.substr(begin, end + 1 - begin);
    if (!frameshard_core::is_utf8(text.data(), text.size())) {
        std::replace_if(
            text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0x80) != 0; }, '?');
    }
    return text;
}

/* True if the text is exactly one ipc path or one port of the loopback interface. ZeroMQ itself would also accept a
 * list of addresses. */
bool is_endpoint(const std::string &text) {
    const std::string ipc = "ipc:///", tcp = "tcp://127.0.0.1:";
    if (text.compare(0, ipc.size(), ipc) == 0) {
        auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
        return text.size() > ipc.size() && text.back() != '/' && std::none_of(text.begin(), text.end(), is_control);
    }
    if (text.compare(0, tcp.size(), tcp) != 0) {
        return false;
    }
    std::string port = text.substr(tcp.size());
    return !port.empty() && port.size() <= 5 && port[0] != '0' &&
           port.find_first_not_of("0123456789") == std::string::npos && std::stoi(port) <= 65535;
}

/* Returns what is in a connect file. Throws Refused if there is none at `path`. */
json connect_info(const std::string &path) {
    std::error_code error;
    std::filesystem::file_status found = std::filesystem::status(std::filesystem::u8path(path), error);
    if (std::filesystem::exists(found) && !std::filesystem::is_regular_file(found)) { // opening a pipe would wait
        refuse(FS_BAD_ARGUMENT, path + " is no connect file: it is no regular file");
    }
    std::ifstream file(std::filesystem::u8path(path), std::ios::binary);
    if (!file) {
        refuse(FS_CONNECTION_LOST, "no sidecar has left its connect file at " + path);
    }
    std::string text(kMaxConnectFile + 1, '\0'); // of a larger file, such as a model, no more is read
    file.read(&text[0], std::streamsize(text.size()));
    text.resize(size_t(file.gcount()));
    json info = text.size() > kMaxConnectFile ? json() : json::parse(text, nullptr, false);
    if (!info.is_object()) {
        refuse(FS_BAD_ARGUMENT, path + " is no connect file");
    }
    return info;
}

/* Throws Refused unless `info` is a ConnectInfo, from a ready line or a connect file. */
void check_info(const json &info) {
    bool right = info.is_object();
    for (const char *name : {"protocol", "epoch", "pid"}) {
        right = right && info.contains(name) && info[name].is_number_integer() && info[name].get<int64_t>() > 0;
    }
    for (const char *name : {"endpoint", "server_key", "client_key", "client_secret"}) {
        right = right && info.contains(name) && info[name].is_string();
    }
    for (const char *name : {"http_url", "http_key"}) {
        right = right && (!info.contains(name) || info[name].is_string());
    }
    if (!right) {
        refuse(FS_BAD_ARGUMENT, "not what a sidecar leaves in its connect file");
    }
    if (!is_endpoint(info["endpoint"].get_ref<const std::string &>())) {
        refuse(FS_BAD_ARGUMENT, "endpoint must be ipc:///PATH or tcp://127.0.0.1:PORT, with a port from 1 to 65535");
    }
    if (info["protocol"].get<int64_t>() < frameshard_core::kProtocol) {
        refuse(FS_VERSION_MISMATCH, "the sidecar speaks protocol " + info["protocol"].dump() + ", this library " +
                                        std::to_string(frameshard_core::kProtocol));
    }
}

fs_client &open_client(fs_client *client) {
    if (client == nullptr) {
        refuse(FS_BAD_ARGUMENT, "client is NULL");
    }
    if (client->session.lost()) {
        const Error &error = client->session.error();
        refuse(error.status == FS_OK ? FS_CONNECTION_LOST : error.status, error.message);
    }
    return *client;
}

/* Throws Refused unless `items`, the caller's array, has `least` to `most` items. */
void check_array(const std::string &what, const void *items, uint64_t count, double least, double most) {
    check_range(("n_" + what).c_str(), double(count), least, most);
    if (items == nullptr && count != 0) {
        refuse(FS_BAD_ARGUMENT, what + " is NULL");
    }
}

json tools_of(const fs_tool *tools, uint64_t n_tools) {
    check_array("tools", tools, n_tools, 0, 64);
    json told = json::array();
    for (uint64_t i = 0; i < n_tools; ++i) {
        json tool = {{"name", text_of("name", tools[i].name, 1, 64)}};
        if (tools[i].description != nullptr) {
            tool["description"] = text_of("description", tools[i].description, 0, kMaxString);
        }
        if (tools[i].schema != nullptr) {
            tool["schema"] = text_of("schema", tools[i].schema, 0, kMaxString);
        }
        told.push_back(std::move(tool));
    }
    return told;
}

/* What the options of a job say. */
struct JobRequest {
    json fields;                  // of `submit`, without messages and prompt
    std::string conversation;     // "": none
    const char *system = nullptr; // the caller's text
    Images images;
};

JobRequest job_request(const char *kind, const fs_job_options *given) {
    fs_job_options options;
    fs_job_options_init(&options, sizeof options);
    if (given != nullptr) {
        options = known_part(given, options, "fs_job_options_init");
    }
    check_range("window", options.window, 1, 256);
    check_range("priority", options.priority, 0, 2);
    check_range("deadline_ms", double(options.deadline_ms), 0, 3600000);
    check_range("timeline", double(options.timeline), 0, double(frameshard_core::kMaxInteger));
    check_range("sentences", double(options.sentences), 0, 1);
    check_range("warm_up", double(options.warm_up), 0, 1);
    check_range("local_only", double(options.local_only), 0, 1);
    JobRequest request;
    if (options.conversation != nullptr) {
        request.conversation = text_of("conversation", options.conversation, 1, kMaxName);
    }
    request.system = options.system;
    json &fields = request.fields;
    fields = {{"kind", kind}, {"sampling", json::object()}, {"timeline", options.timeline}, {"window", options.window}};
    if (options.sentences != 0) {
        fields["sentences"] = true;
    }
    if (options.warm_up != 0) {
        fields["warm_up"] = true;
    }
    if (options.priority != 1) { // older sidecars do not know it
        fields["priority"] = options.priority;
    }
    if (options.deadline_ms != 0) {
        fields["deadline_ms"] = options.deadline_ms;
    }
    std::string thinking =
        options.thinking == nullptr ? "off" : word_of("thinking", options.thinking, {"off", "hidden", "shown"});
    if (thinking != "off") {
        fields["thinking"] = thinking;
    }
    check_range("thinking_tokens", double(options.thinking_tokens), 0, 1 << 20);
    if (options.thinking_tokens != 0) {
        fields["thinking_tokens"] = options.thinking_tokens;
    }
    if (options.template_keywords != nullptr && *options.template_keywords != '\0') {
        fields["template_keywords"] = text_of("template_keywords", options.template_keywords, 0, 8192);
    }
    if (options.local_only != 0) {
        fields["local_only"] = true;
    }
    check_array("adapters", options.adapters, options.n_adapters, 0, 2);
    for (uint64_t i = 0; i < options.n_adapters; ++i) {
        const fs_adapter &adapter = options.adapters[i];
        check_range("scale", adapter.scale, -4, 4);
        fields["adapters"].push_back({{"name", text_of("name", adapter.name, 1, 64)}, {"scale", adapter.scale}});
    }
    if (options.sampling != nullptr) {
        fs_sampling sampling;
        fs_sampling_init(&sampling, sizeof sampling);
        fields["sampling"] = fields_of(known_part(options.sampling, sampling, "fs_sampling_init"));
    }
    if (options.n_tools != 0) {
        fields["tools"] = tools_of(options.tools, options.n_tools);
    }
    if (options.tool_choice != nullptr) {
        fields["tool_choice"] = text_of("tool_choice", options.tool_choice, 1, 64);
    }
    check_array("images", options.images, options.n_images, 0, 8);
    if (options.n_images > 0) {
        fields["images"] = json::array();
    }
    for (uint32_t i = 0; i < options.n_images; ++i) {
        fields["images"].push_back(request.images.add(options.images[i]));
    }
    return request;
}

void need_model(const fs_client &client) {
    if (client.session.model().is_null()) {
        refuse(FS_CONNECTION_LOST, "the model is not loaded yet");
    }
}

fs_chat_message with_tools(const fs_chat_message &message) { return message; }

fs_chat_message with_tools(const fs_message &message) {
    return {message.role, message.content, message.content_length, 0, nullptr, nullptr};
}

json message_of(const fs_chat_message &given) {
    std::string role = text_of("role", given.role, 1, 16);
    json told = {{"role", word_of("role", role.c_str(), {"system", "user", "assistant", "tool"})},
                 {"content", text_of("content", given.content, given.content_length, 0, kMaxString)}};
    check_array("tool_calls", given.tool_calls, given.n_tool_calls, 0, 16);
    for (uint32_t i = 0; i < given.n_tool_calls; ++i) {
        const fs_tool_call &call = given.tool_calls[i];
        told["tool_calls"].push_back({{"id", text_of("call_id", call.call_id, 1, 64)},
                                      {"name", text_of("name", call.name, 1, 64)},
                                      {"arguments", text_of("arguments", call.arguments, 0, kMaxString)}});
    }
    if (role == "tool" && given.tool_call_id == nullptr) {
        refuse(FS_BAD_ARGUMENT, "the role tool needs tool_call_id: call fs_chat_with_tools with it");
    }
    if (given.tool_call_id != nullptr) {
        told["tool_call_id"] = text_of("tool_call_id", given.tool_call_id, 1, 64);
    }
    return told;
}

template <class Message> json messages_of(const Message *messages, uint32_t n_messages) {
    check_array("messages", messages, n_messages, 1, 1024);
    json told = json::array();
    for (uint32_t i = 0; i < n_messages; ++i) {
        told.push_back(message_of(with_tools(messages[i])));
    }
    return told;
}

/* Returns the history of a conversation as the program gets it. */
History history_of(const Save &save) {
    History history;
    if (!save.system.empty()) {
        history.told.push_back({{"role", "system"}, {"content", save.system}});
    }
    for (const Exchange &exchange : save.exchanges) {
        exchange.add_to(&history.told);
    }
    auto chars = [](const json &text) { return text.get_ref<const std::string &>().c_str(); };
    for (const json &told : history.told) {
        std::vector<fs_tool_call> &calls = history.calls.emplace_back();
        if (told.contains("tool_calls")) {
            for (const json &call : told["tool_calls"]) {
                calls.push_back({chars(call["id"]), chars(call["name"]), chars(call["arguments"])});
            }
        }
        const char *role = chars(told["role"]), *content = chars(told["content"]);
        const char *call_id = told["role"] == "tool" ? chars(told["tool_call_id"]) : nullptr;
        int32_t length = int32_t(told["content"].get_ref<const std::string &>().size());
        history.messages.push_back(
            {role, content, length, uint32_t(calls.size()), calls.empty() ? nullptr : calls.data(), call_id});
        history.plain.push_back({role, content, length, 0});
    }
    return history;
}

void give(uint64_t *place, uint64_t value) {
    if (place != nullptr) {
        *place = value;
    }
}

void check_bytes(const char *what, uint64_t bytes) {
    check_range(what, double(bytes), 0, double(frameshard_core::kMaxInteger));
}

/* The sidecar has another working directory. */
std::string absolute(const char *path) {
    return std::filesystem::absolute(std::filesystem::u8path(text_of("path", path, 1, 4096))).u8string();
}

void ask_for(fs_client &client, json fields, uint64_t *request) {
    if (!frameshard_core::fits_frame(fields)) {
        refuse(FS_BAD_ARGUMENT, "the request has more bytes or elements than a frame may have");
    }
    give(request, client.session.request(std::move(fields)));
    client.flush();
}

/* Keeps the images of a job that the session has taken, and sends it. */
void begin(fs_client &client, uint64_t job, Images &&images, uint64_t *place) {
    if (!images.empty()) {
        client.images.emplace(job, std::move(images));
    }
    give(place, job);
    client.flush();
}

/* Submits a job whose fields have the whole prompt. */
void submit(fs_client &client, JobRequest request, uint64_t *job) {
    if (!request.conversation.empty()) {
        request.fields["conversation"] = request.conversation;
    }
    begin(client, client.session.submit(std::move(request.fields)), std::move(request.images), job);
}

template <class Message>
void chat(fs_client *client, const Message *messages, uint32_t n_messages, const fs_job_options *options,
          uint64_t *job) {
    fs_client &open = open_client(client);
    JobRequest request = job_request("chat", options);
    request.fields["messages"] = messages_of(messages, n_messages);
    submit(open, std::move(request), job);
}

} // namespace

// ---- the socket and the process -------------------------------------------------------------------------------------

void fs_client::connect(const json &info) {
    check_info(info);
    pid = info["pid"];
    http_url = info.value("http_url", ""); // older sidecars have none
    http_key = info.value("http_key", "");
    context = zmq_ctx_new();
    socket = context == nullptr ? nullptr : zmq_socket(context, ZMQ_DEALER);
    if (socket == nullptr) {
        need(-1);
    }
    set(socket, ZMQ_LINGER, 0);
    set(socket, ZMQ_IMMEDIATE, 1);
    set(socket, ZMQ_SNDHWM, kHighWater);
    set(socket, ZMQ_RCVHWM, kHighWater);
    set(socket, ZMQ_HANDSHAKE_IVL, kHandshakeMs);
    int64_t most = frameshard_core::kMaxFrame;
    need(zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof most));
    const std::pair<int, const char *> keys[] = {{ZMQ_CURVE_SERVERKEY, "server_key"},
                                                 {ZMQ_CURVE_PUBLICKEY, "client_key"},
                                                 {ZMQ_CURVE_SECRETKEY, "client_secret"}};
    for (const auto &[option, name] : keys) {
        const std::string &key = info[name].get_ref<const std::string &>();
        if (key.size() != 40 || zmq_setsockopt(socket, option, key.c_str(), key.size() + 1) != 0) {
            refuse(FS_BAD_ARGUMENT, std::string(name) + " is no CURVE key");
        }
    }
    const std::string &endpoint = info["endpoint"].get_ref<const std::string &>();
    if (zmq_connect(socket, endpoint.c_str()) != 0) {
        refuse(FS_BAD_ARGUMENT, "cannot connect to " + endpoint + ": " + zmq_strerror(zmq_errno()));
    }
    session.greet(info["epoch"]);
    next_beat = now() + kBeatSeconds;
    flush();
}

/* Whether a line of the process's output is a `loading` message that can be taken. */
static bool is_loading(const json &said) {
    if (!said.is_object() || !said.contains("loading") || !said["loading"].is_object()) {
        return false;
    }
    const json &fields = said["loading"];
    return fields.value("stage", json()).is_string() && fields.value("done", json()).is_number_unsigned() &&
           fields.value("total", json()).is_number_unsigned();
}

/* Reads the process's output. When the ready line is complete, connects or ends the session. */
void fs_client::load(double time) {
    bool more = process.read(&line);
    size_t end = line.find('\n');
    json said;
    while (end != std::string::npos &&
           is_loading(said = json::parse(line.begin(), line.begin() + std::ptrdiff_t(end), nullptr, false))) {
        session.loading(said["loading"]);
        line.erase(0, end + 1);
        end = line.find('\n');
    }
    if (end == std::string::npos) {
        if (line.size() > kMaxLine) {
            loading = false;
            lose(FS_INTERNAL, python + " is no sidecar: what it writes is not understood");
        } else if (!more) {
            fail_to_start(time);
        }
        return;
    }
    loading = false;
    process.stop_reading();
    if (said.is_object() && said.contains("ready")) {
        fs_status status = guarded([&] { connect(said["ready"]); });
        if (status != FS_OK) {
            lose(status, fs_last_error(nullptr));
        }
    } else if (said.is_object() && said.contains("error") && said["error"].is_object() &&
               said["error"].value("code", json()).is_number_integer() &&
               said["error"].value("message", json()).is_string() &&
               said["error"].value("detail", json()).is_object()) {
        session.lose(frameshard_core::error_of(said["error"]));
    } else {
        lose(FS_INTERNAL, python + " is no sidecar: what it writes is not understood");
    }
    line.clear();
}

/* The output has ended without a ready line. Ends the session with the exit status and the output of Python. */
void fs_client::fail_to_start(double time) {
    std::string how;
    output_ended = output_ended > 0 ? output_ended : time;
    bool ended = process.ended(&how);
    if (!ended && time < output_ended + kEndSeconds) {
        return; // wait: the exit status may come a moment later
    }
    loading = false;
    std::string words = valid_text(process.words());
    std::string said = words.empty() ? "without a word" : "and its last words are: " + words;
    session.lose({FS_ENGINE_DIED,
                  "the sidecar ended before it was ready: " + python + " ended " +
                      (ended ? how : std::string("not even after it had closed its output")) + ", " + said +
                      (words.find("No module named") == std::string::npos
                           ? ""
                           : ". Launch it with a Python in which frameshard is installed"),
                  {{"python", python}, {"status", how}}});
}

/* Does the work that is due at `time`: checks whether the process lives, and sends a beat. */
void fs_client::work(double time) {
    if (launched && time >= next_look) {
        next_look = time + kLookAtProcessSeconds;
        std::string how;
        if (loading) {
            load(time);
        } else if (process.ended(&how)) {
            while (receive()) { // take what it sent before it ended
            }
            lose(FS_CONNECTION_LOST, "the sidecar has ended " + how);
        }
    }
    if (time >= next_beat && socket != nullptr) {
        next_beat = time + kBeatSeconds; // counted from now, so that a pause of the host is not the sidecar's silence
        session.beat();
        flush();
    }
}

/* Takes one message from ZeroMQ's queue. Returns false if there is none. */
bool fs_client::receive() {
    if (socket == nullptr || session.lost()) {
        return false;
    }
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    bool there = zmq_msg_recv(&frame, socket, ZMQ_DONTWAIT) >= 0;
    if (there) {
        bool single = zmq_msg_more(&frame) == 0;
        if (single) {
            session.receive(static_cast<const char *>(zmq_msg_data(&frame)), zmq_msg_size(&frame));
        } else {
            lose(FS_CONNECTION_LOST, "the server does not speak this protocol: a message of several parts");
        }
    }
    zmq_msg_close(&frame);
    return there;
}

/* Waits at most `milliseconds` until there may be something to receive. */
void fs_client::wait(int milliseconds) {
    if (loading) {
        process.wait_readable(milliseconds);
        next_look = 0;
        return;
    }
    zmq_pollitem_t item = {socket, 0, ZMQ_POLLIN, 0};
    zmq_poll(&item, session.lost() ? 0 : 1, milliseconds);
}

void fs_client::flush() {
    while (const std::string *frame = session.next_frame()) {
        if (zmq_send(socket, frame->data(), frame->size(), ZMQ_DONTWAIT) < 0) {
            break; // not connected, or the queue is full; the next poll tries again
        }
        session.sent();
    }
}

// ---- version --------------------------------------------------------------------------------------------------------

uint32_t fs_abi_version(void) { return FS_ABI_VERSION; }

uint32_t fs_protocol_version(void) { return frameshard_core::kProtocol; }

const char *fs_version(void) { return FS_VERSION; }

// ---- defaults -------------------------------------------------------------------------------------------------------

void fs_job_options_init(fs_job_options *options, uint32_t struct_size) {
    fs_job_options defaults{};
    defaults.struct_size = struct_size;
    defaults.window = 32;
    defaults.priority = 1;
    fill(options, struct_size, defaults);
}

// ---- a client -------------------------------------------------------------------------------------------------------

fs_status fs_launch(const fs_launch_options *given, fs_client **client) {
    return guarded([&] {
        if (client == nullptr || given == nullptr) {
            refuse(FS_BAD_ARGUMENT, "options or client is NULL");
        }
        *client = nullptr;
        fs_launch_options options;
        fs_launch_options_init(&options, sizeof options);
        options = known_part(given, options, "fs_launch_options_init");
        constexpr size_t path = 4096;
        json config = fields_of(options);
        if (options.extra_json != nullptr) {
            json extra = json::parse(options.extra_json, nullptr, false);
            if (!extra.is_object()) {
                refuse(FS_BAD_ARGUMENT, "extra_json is no JSON object");
            }
            config.update(extra);
        }
        std::string line = config.dump() + "\n";
        if (line.size() >= kMaxLine) {
            refuse(FS_BAD_ARGUMENT, "the options are longer than 65536 bytes");
        }
        auto made = std::make_unique<fs_client>(
            options.client_name == nullptr ? "c" : text_of("client_name", options.client_name, 0, 64));
        made->launched = made->loading = true;
        if (options.connect_file != nullptr) {
            made->connect_file = options.connect_file;
        }
        made->python = options.python == nullptr ? "python3" : text_of("python", options.python, 1, path);
        std::string log = options.log_file == nullptr ? "" : text_of("log_file", options.log_file, 1, path);
        std::string why;
        if (!made->process.start(made->python, log, line, &why)) {
            refuse(FS_INTERNAL, why);
        }
        *client = made.release();
    });
}

fs_status fs_connect(const char *connect_file, const char *client_name, fs_client **client) {
    return guarded([&] {
        if (client == nullptr) {
            refuse(FS_BAD_ARGUMENT, "client is NULL");
        }
        *client = nullptr;
        std::string path = text_of("connect_file", connect_file, 1, 4096);
        auto made =
            std::make_unique<fs_client>(client_name == nullptr ? "c" : text_of("client_name", client_name, 0, 64));
        made->connect_file = path;
        made->connect(connect_info(path));
        *client = made.release();
    });
}

void fs_close(fs_client *client, double timeout_s) {
    if (client == nullptr) {
        return;
    }
    double deadline = now() + (timeout_s > 0 ? std::min(timeout_s, 3600.0) : 0);
    guarded([&] {
        bool open = client->socket != nullptr && !client->session.lost() && !client->session.model().is_null();
        if (open && !client->launched && !(timeout_s > 0)) {
            client->session.request({{"t", "bye"}}); // its answer is not waited for
            client->flush();
            set(client->socket, ZMQ_LINGER, kGoodbyeLingerMs);
        } else if (open && timeout_s > 0) {
            uint64_t goodbye = client->session.request({{"t", client->launched ? "shutdown" : "bye"}});
            double enough = std::min(deadline, now() + kGoodbyeSeconds);
            while (!client->session.lost() && !client->session.answered(goodbye) && now() < enough) {
                client->flush();
                if (!client->receive()) {
                    zmq_pollitem_t item = {client->socket, 0, ZMQ_POLLIN, 0};
                    zmq_poll(&item, 1, 10);
                }
            }
        }
    });
    if (client->launched) {
        client->process.end(std::max(0.0, deadline - now()));
    }
    delete client;
}

int32_t fs_state(const fs_client *client) {
    return client == nullptr                   ? 0
           : client->session.lost()            ? FS_STATE_CLOSED
           : client->session.model().is_null() ? FS_STATE_LOADING
                                               : FS_STATE_READY;
}

int32_t fs_has_feature(const fs_client *client, const char *feature) {
    return client != nullptr && feature != nullptr && client->session.has_feature(feature) ? 1 : 0;
}

fs_status fs_get_model(const fs_client *client, fs_model *model) {
    return guarded([&] {
        if (client == nullptr || model == nullptr || model->struct_size < sizeof(uint32_t)) {
            refuse(FS_BAD_ARGUMENT, "client or model is NULL, or model->struct_size is not set");
        }
        need_model(*client);
        const json &info = client->session.model();
        auto &texts = const_cast<fs_client &>(*client); // written once, because the caller keeps pointers to them
        if (texts.model_plan.empty()) {
            texts.model_name = info["name"];
            texts.model_arch = info["arch"];
            texts.model_device = info["device"];
            texts.model_vision = info.value("vision", "");
            texts.model_fingerprint = info["fingerprint"];
            texts.model_template = info["template_fingerprint"];
            texts.model_embedder = info["embedder"];
            texts.model_passed_over = info["passed_over"];
            texts.model_plan = frameshard_core::to_text(info["plan"]);
        }
        fs_model found{};
        found.struct_size = model->struct_size;
        found.n_ctx = info["n_ctx"];
        found.n_parallel = info["n_parallel"];
        found.n_vocab = info["n_vocab"];
        found.n_layer = info["n_layer"];
        found.chat = info["chat"].get<bool>() ? 1 : 0;
        found.floor_bytes = info["floor_bytes"];
        found.full_bytes = info["full_bytes"];
        found.name = texts.model_name.c_str();
        found.arch = texts.model_arch.c_str();
        found.device = texts.model_device.c_str();
        found.plan_json = texts.model_plan.c_str();
        found.pid = client->pid;
        found.connect_file = client->connect_file.c_str();
        found.vision = client->model_vision.c_str();
        found.fingerprint = client->model_fingerprint.c_str();
        found.template_fingerprint = client->model_template.c_str();
        found.http_url = client->http_url.c_str();
        found.http_key = client->http_key.c_str();
        found.embedder = client->model_embedder.c_str();
        found.thinks = info["thinks"].get<bool>() ? 1 : 0;
        found.passed_over = client->model_passed_over.c_str();
        found.sees = info["sees"].get<bool>() ? 1 : 0;
        found.hears = info["hears"].get<bool>() ? 1 : 0;
        fill(model, model->struct_size, found);
    });
}

// ---- jobs -----------------------------------------------------------------------------------------------------------

fs_status fs_ask(fs_client *client, const char *text, int32_t text_length, const fs_job_options *options,
                 uint64_t *job) {
    return guarded([&] {
        fs_client &open = open_client(client);
        JobRequest request = job_request("chat", options);
        std::string question = text_of("text", text, text_length, 0, kMaxString);
        std::string persona = request.system == nullptr ? "" : text_of("system", request.system, 0, kMaxString);
        uint64_t number = open.session.ask(std::move(question), request.conversation,
                                           request.system == nullptr ? nullptr : &persona, std::move(request.fields));
        begin(open, number, std::move(request.images), job);
    });
}

fs_status fs_tool_results(fs_client *client, const fs_tool_result *results, uint32_t n_results,
                          const fs_job_options *options, uint64_t *job) {
    return guarded([&] {
        fs_client &open = open_client(client);
        JobRequest request = job_request("chat", options);
        if (request.conversation.empty()) {
            refuse(FS_BAD_ARGUMENT, "results need the conversation of their calls");
        }
        check_array("results", results, n_results, 1, 16);
        std::map<std::string, std::string> told;
        for (uint32_t i = 0; i < n_results; ++i) {
            told[text_of("call_id", results[i].call_id, 1, 64)] =
                text_of("content", results[i].content, results[i].content_length, 0, kMaxString);
        }
        uint64_t number = open.session.answer_calls(told, request.conversation, std::move(request.fields));
        begin(open, number, std::move(request.images), job);
    });
}

fs_status fs_chat(fs_client *client, const fs_message *messages, uint32_t n_messages, const fs_job_options *options,
                  uint64_t *job) {
    return guarded([&] { chat(client, messages, n_messages, options, job); });
}

fs_status fs_chat_with_tools(fs_client *client, const fs_chat_message *messages, uint32_t n_messages,
                             const fs_job_options *options, uint64_t *job) {
    return guarded([&] { chat(client, messages, n_messages, options, job); });
}

fs_status fs_complete(fs_client *client, const char *prompt, int32_t prompt_length, const fs_job_options *options,
                      uint64_t *job) {
    return guarded([&] {
        fs_client &open = open_client(client);
        JobRequest request = job_request("completion", options);
        request.fields["prompt"] = text_of("prompt", prompt, prompt_length, 1, kMaxString);
        submit(open, std::move(request), job);
    });
}

fs_status fs_cancel(fs_client *client, uint64_t job) {
    return guarded([&] {
        fs_client &open = open_client(client);
        if (!open.session.cancel(job)) {
            refuse(FS_UNKNOWN_JOB, "no such job: it never existed or its last event has been polled");
        }
        open.flush();
    });
}

fs_status fs_set_priority(fs_client *client, uint64_t job, uint32_t priority) {
    return guarded([&] {
        fs_client &open = open_client(client);
        check_range("priority", priority, 0, 2);
        if (!open.session.set_priority(job, priority)) {
            refuse(FS_UNKNOWN_JOB, "no such job: it never existed or its last event has been polled");
        }
        open.flush();
    });
}

// ---- conversations --------------------------------------------------------------------------------------------------

template <class Message>
static fs_status read_history(fs_client *client, const char *conversation, std::vector<Message> History::*kind,
                              const Message **messages, uint32_t *n_messages) {
    return guarded([&] {
        if (client == nullptr || messages == nullptr || n_messages == nullptr) {
            refuse(FS_BAD_ARGUMENT, "client, messages or n_messages is NULL");
        }
        client->history = history_of(client->session.saved(text_of("conversation", conversation, 1, kMaxName)));
        *messages = (client->history.*kind).data();
        *n_messages = uint32_t((client->history.*kind).size());
    });
}

fs_status fs_history(fs_client *client, const char *conversation, const fs_message **messages, uint32_t *n_messages) {
    return read_history(client, conversation, &History::plain, messages, n_messages);
}

fs_status fs_history_with_tools(fs_client *client, const char *conversation, const fs_chat_message **messages,
                                uint32_t *n_messages) {
    return read_history(client, conversation, &History::messages, messages, n_messages);
}

fs_status fs_forget(fs_client *client, const char *conversation) {
    return guarded([&] { open_client(client).session.forget(text_of("conversation", conversation, 1, kMaxName)); });
}

fs_status fs_save(fs_client *client, const char *conversation, const void **data, uint64_t *size) {
    return guarded([&] {
        if (client == nullptr || data == nullptr || size == nullptr) {
            refuse(FS_BAD_ARGUMENT, "client, data or size is NULL");
        }
        need_model(*client);
        Save save = client->session.saved(text_of("conversation", conversation, 1, kMaxName));
        auto first = save.exchanges.begin() + std::ptrdiff_t(first_that_fits(save.exchanges, save.system.size(), 0));
        save.exchanges.erase(save.exchanges.begin(), first);
        client->save = frameshard_core::write_save(save);
        *data = client->save.data();
        *size = client->save.size();
    });
}

fs_status fs_load(fs_client *client, const void *data, uint64_t size, const char *conversation,
                  fs_load_result *result) {
    return guarded([&] {
        fs_client &open = open_client(client);
        need_model(open);
        if (result != nullptr && result->struct_size < sizeof(uint32_t)) {
            refuse(FS_BAD_ARGUMENT, "result->struct_size is not set");
        }
        std::string name = text_of("conversation", conversation, 1, kMaxName);
        Save save = frameshard_core::read_save(data, size_t(std::min<uint64_t>(size, SIZE_MAX)));
        Save now = open.session.saved(name);
        fs_load_result found{};
        found.same_model = save.model == now.model && !now.model.empty();
        found.same_template = save.chat_template == now.chat_template && !now.chat_template.empty();
        open.session.load(name, std::move(save));
        if (result != nullptr) {
            found.struct_size = result->struct_size;
            fill(result, result->struct_size, found);
        }
    });
}

fs_status fs_save_kv(fs_client *client, const char *conversation, const char *path, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        std::string name = text_of("conversation", conversation, 1, kMaxName);
        ask_for(open, {{"t", "kv_save"}, {"conversation", std::move(name)}, {"path", absolute(path)}}, request);
    });
}

fs_status fs_load_kv(fs_client *client, const char *path, const char *conversation, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        std::string name = text_of("conversation", conversation, 1, kMaxName);
        ask_for(open, {{"t", "kv_load"}, {"conversation", std::move(name)}, {"path", absolute(path)}}, request);
    });
}

// ---- VRAM and figures -----------------------------------------------------------------------------------------------

fs_status fs_set_lease(fs_client *client, const fs_lease *given, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        fs_lease lease;
        fs_lease_init(&lease, sizeof lease);
        if (given != nullptr) {
            lease = known_part(given, lease, "fs_lease_init");
        }
        json fields = fields_of(lease);
        fields["t"] = "budget_set";
        ask_for(open, std::move(fields), request);
    });
}

fs_status fs_set_budget(fs_client *client, uint64_t vram_budget_bytes, double timeout_s, uint64_t *request) {
    fs_lease lease;
    fs_lease_init(&lease, sizeof lease);
    lease.vram_budget_bytes = vram_budget_bytes;
    lease.timeout_s = timeout_s;
    return fs_set_lease(client, &lease, request);
}

fs_status fs_get_budget(fs_client *client, uint64_t *request) {
    return guarded([&] { ask_for(open_client(client), {{"t", "budget_get"}}, request); });
}

fs_status fs_load_adapter(fs_client *client, const char *name, const char *path, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        ask_for(open, {{"t", "adapter_load"}, {"name", text_of("name", name, 1, 64)}, {"path", absolute(path)}},
                request);
    });
}

fs_status fs_unload_adapter(fs_client *client, const char *name, uint64_t *request) {
    return guarded([&] {
        ask_for(open_client(client), {{"t", "adapter_unload"}, {"name", text_of("name", name, 1, 64)}}, request);
    });
}

fs_status fs_get_stats(fs_client *client, uint64_t *request) {
    return guarded([&] { ask_for(open_client(client), {{"t", "stats"}}, request); });
}

fs_status fs_get_caps(fs_client *client, uint64_t *request) {
    return guarded([&] { ask_for(open_client(client), {{"t", "caps_and_requirements"}}, request); });
}

fs_status fs_get_plan(fs_client *client, uint64_t vram_budget_bytes, uint32_t prompt_tokens, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        check_bytes("vram_budget_bytes", vram_budget_bytes);
        check_range("prompt_tokens", prompt_tokens, 1, 1 << 20);
        ask_for(open, {{"t", "plan"}, {"budgets", json::array({vram_budget_bytes})}, {"prompt_tokens", prompt_tokens}},
                request);
    });
}

fs_status fs_count_tokens(fs_client *client, const char *prompt, int32_t prompt_length, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        ask_for(open, {{"t", "count_tokens"}, {"prompt", text_of("prompt", prompt, prompt_length, 1, kMaxString)}},
                request);
    });
}

fs_status fs_count_chat_tokens(fs_client *client, const fs_message *messages, uint32_t n_messages, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        ask_for(open, {{"t", "count_tokens"}, {"messages", messages_of(messages, n_messages)}}, request);
    });
}

fs_status fs_count_chat_tokens_with_tools(fs_client *client, const fs_chat_message *messages, uint32_t n_messages,
                                          const fs_tool *tools, uint32_t n_tools, uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        json fields = {{"t", "count_tokens"}, {"messages", messages_of(messages, n_messages)}};
        if (n_tools != 0) {
            fields["tools"] = tools_of(tools, n_tools);
        }
        ask_for(open, std::move(fields), request);
    });
}

fs_status fs_embed(fs_client *client, const char *const *texts, const int32_t *lengths, uint32_t n_texts,
                   uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        check_array("texts", texts, n_texts, 1, 64);
        json told = json::array();
        for (uint32_t i = 0; i < n_texts; ++i) {
            int32_t length = lengths == nullptr ? FS_NUL_TERMINATED : lengths[i];
            told.push_back(text_of("texts", texts[i], length, 1, kMaxString));
        }
        ask_for(open, {{"t", "embed"}, {"texts", std::move(told)}}, request);
    });
}

fs_status fs_set_pacing(fs_client *client, int32_t scheduling_mode, double target_tokens_per_second,
                        uint64_t *request) {
    return guarded([&] {
        fs_client &open = open_client(client);
        if (target_tokens_per_second != 0) { // 0: no limit
            check_range("target_tokens_per_second", target_tokens_per_second, 0.1, 10000);
        }
        ask_for(open,
                {{"t", "pacing"},
                 {"scheduling_mode", word_of("scheduling_mode", uint64_t(scheduling_mode), kSchedulingMode)},
                 {"target_tokens_per_second", target_tokens_per_second}},
                request);
    });
}

fs_status fs_get_frame_block(fs_client *client, uint64_t *request) {
    return guarded([&] { ask_for(open_client(client), {{"t", "frame_block"}}, request); });
}

fs_status fs_shutdown(fs_client *client) {
    return guarded([&] {
        fs_client &open = open_client(client);
        open.session.request({{"t", "shutdown"}});
        open.flush();
    });
}

// ---- events ---------------------------------------------------------------------------------------------------------

int32_t fs_poll(fs_client *client, fs_event *events, uint32_t event_size, int32_t capacity) {
    int32_t count = 0;
    fs_status status = guarded([&] {
        if (client == nullptr || (events == nullptr && capacity > 0) || capacity < 0 ||
            event_size < offsetof(fs_event, text)) {
            refuse(FS_BAD_ARGUMENT, "fs_poll needs a client and room for events of sizeof(fs_event)");
        }
        client->handed.clear();
        client->work(now());
        while (count < capacity && (client->session.has_event() || client->receive())) {
            if (!client->session.has_event()) {
                continue; // the message made no event
            }
            Event &event = client->handed.emplace_back(client->session.take());
            event.fields.text = event.text.c_str();
            event.fields.text_length = uint32_t(event.text.size());
            event.fields.detail = event.detail.c_str();
            event.fields.detail_length = uint32_t(event.detail.size());
            event.fields.rows = event.rows.data();
            event.fields.call_id = event.call_id.c_str();
            event.fields.name = event.name.c_str();
            char *place = reinterpret_cast<char *>(events) + size_t(count) * event_size;
            fill(reinterpret_cast<fs_event *>(place), event_size, event.fields);
            if (frameshard_core::is_end(event.fields.type)) {
                client->images.erase(event.fields.job);
            }
            ++count;
        }
        if (client->session.next_frame() != nullptr) {
            client->flush();
        }
    });
    return status == FS_OK || count > 0 ? count : -status;
}

int32_t fs_wait(fs_client *client, double timeout_s) {
    int32_t there = 0;
    guarded([&] {
        if (client == nullptr) {
            refuse(FS_BAD_ARGUMENT, "client is NULL");
        }
        frameshard_core::Session &session = client->session;
        double time = now(), deadline = time + std::min(timeout_s, kLongestWaitSeconds);
        while (!session.has_event()) {
            client->work(time);
            while (!session.has_event() && client->receive()) {
            }
            if (session.next_frame() != nullptr && !session.lost()) {
                client->flush();
            }
            if (session.has_event() || !(time < deadline)) { // true for a deadline of NaN, too
                break;
            }
            // Waits no longer than until the next check of the process.
            client->wait(int(std::ceil(1000 * std::min(deadline - time, kLookAtProcessSeconds))));
            if (session.lost()) {
                break;
            }
            time = now();
        }
        there = session.has_event() ? 1 : 0;
    });
    return there;
}
