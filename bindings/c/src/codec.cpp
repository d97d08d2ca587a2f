#include "codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <msgpack.hpp>

namespace frameshard_core {
namespace {

constexpr uint32_t kMaxArray = 1024, kMaxMap = 64, kMaxElements = 16384;
constexpr size_t kMaxDepth = 8;

/* Builds the value while msgpack-c walks the bytes, and stops it at the first thing that the protocol forbids. */
class Builder : public msgpack::null_visitor {
  public:
    explicit Builder(json *root) : root_(root) {}

    const char *why = "cut off";

    bool visit_nil() { return put(nullptr); }
    bool visit_boolean(bool value) { return put(value); }
    bool visit_positive_integer(uint64_t value) {
        return value <= uint64_t(kMaxInteger) ? put(int64_t(value)) : refuse("an integer beyond 2^53");
    }
    bool visit_negative_integer(int64_t value) {
        return -kMaxInteger <= value && value <= kMaxInteger ? put(value) : refuse("an integer beyond 2^53");
    }
    bool visit_float32(float value) { return visit_float64(value); }
    bool visit_float64(double value) {
        return std::isfinite(value) ? put(value) : refuse("a number that is not finite");
    }
    bool visit_str(const char *text, uint32_t size) {
        if (size > kMaxString) {
            return refuse("a string of more than 65536 bytes");
        }
        if (!is_utf8(text, size)) {
            return refuse("a string that is not UTF-8");
        }
        if (key_) {
            name_.assign(text, size);
            return stack_.back()->contains(name_) ? refuse("a key occurs twice") : true;
        }
        return put(std::string(text, size));
    }
    bool visit_bin(const char *data, uint32_t size) {
        return put(json::binary({data, data + size})); // no longer than the frame, which is the limit
    }
    bool visit_ext(const char *, uint32_t) { return refuse("an extension type"); }
    bool start_array(uint32_t size) { return size <= kMaxArray ? open(json::array(), size) : refuse("a long array"); }
    bool end_array() { return close(); }
    bool start_map(uint32_t size) { return size <= kMaxMap ? open(json::object(), size) : refuse("a large map"); }
    bool start_map_key() {
        key_ = true;
        return true;
    }
    bool end_map_key() {
        key_ = false;
        return true;
    }
    bool end_map() { return close(); }
    void parse_error(size_t, size_t) { why = "not msgpack"; }
    void insufficient_bytes(size_t, size_t) {}

  private:
    bool refuse(const char *reason) {
        why = reason;
        return false;
    }

    bool put(json value) {
        place(std::move(value));
        return !failed_;
    }

    json *place(json value) {
        if (key_) {
            failed_ = true;
            why = "a key that is not a string";
            return root_;
        }
        if (stack_.empty()) {
            *root_ = std::move(value);
            return root_;
        }
        json &parent = *stack_.back();
        if (parent.is_array()) {
            parent.push_back(std::move(value));
            return &parent.back();
        }
        json &slot = parent[name_];
        slot = std::move(value);
        return &slot;
    }

    bool open(json value, uint32_t size) {
        elements_ += size;
        if (elements_ > kMaxElements) {
            return refuse("too many elements");
        }
        if (stack_.size() == kMaxDepth) {
            return refuse("nested too deep");
        }
        json *placed = place(std::move(value));
        stack_.push_back(placed);
        return !failed_;
    }

    bool close() {
        stack_.pop_back();
        return true;
    }

    json *root_;
    std::vector<json *> stack_; // a container grows only while it is the last, so the pointers stay good
    std::string name_;
    uint32_t elements_ = 0;
    bool key_ = false;
    bool failed_ = false;
};

/* ---- the tables ------------------------------------------------------------------------------------------------ */

enum class Type {
    Id,
    IdOrNil,
    Uint,
    UintOrNil,
    Text,
    Bool,
    Number,
    NumberOrNil,
    Map,
    MapOrNil,
    Epithet,
    Record,
    RecordOrNil,
    Records,
    Jobs
};

struct Field {
    const char *name;
    Type type;
    int64_t least = 0, most = 0; // of a text's bytes or a number
    const char *words = nullptr; // of an epithet, with a space around each
    const std::vector<Field> *record = nullptr;
    bool optional = false; // "" or nil when it is left out
};
using Table = std::vector<Field>;

constexpr int64_t kSeconds = 1000000000;
const char kEngine[] = " loading ready restarting hibernated off ";

const Table kError = {{"code", Type::Uint},
                      {"name", Type::Text, 0, 64},
                      {"message", Type::Text, 0, 65536},
                      {"retriable", Type::Bool},
                      {"detail", Type::Map}};
const Table kModel = {{"name", Type::Text, 0, 4096},
                      {"arch", Type::Text, 0, 256},
                      {"device", Type::Text, 0, 256},
                      {"n_ctx", Type::Uint},
                      {"n_parallel", Type::Uint},
                      {"n_vocab", Type::Uint},
                      {"n_layer", Type::Uint},
                      {"chat", Type::Bool},
                      {"floor_bytes", Type::Uint},
                      {"full_bytes", Type::Uint},
                      {"plan", Type::Map},
                      {"vision", Type::Text, 0, 256, nullptr, nullptr, true}};
const Table kLimits = {{"message_bytes", Type::Uint},
                       {"string_bytes", Type::Uint},
                       {"jobs", Type::Uint},
                       {"window", Type::Uint},
                       {"silent_s", Type::Number, 0, kSeconds}};
const Table kBroker = {{"pid", Type::Uint},
                       {"engine_pid", Type::UintOrNil},
                       {"engine", Type::Epithet, 0, 0, kEngine},
                       {"engine_restarts", Type::Uint},
                       {"sessions", Type::Uint},
                       {"jobs_queued", Type::Uint},
                       {"jobs_running", Type::Uint},
                       {"uptime_s", Type::Number, 0, kSeconds}};
const Table kPlanRow = {{"vram_budget_bytes", Type::Uint},
                        {"fits", Type::Bool},
                        {"ttft_s", Type::NumberOrNil, 0, kSeconds},
                        {"tokens_per_second", Type::NumberOrNil, 0, kSeconds},
                        {"resident_bytes", Type::Uint},
                        {"streamed_bytes", Type::Uint},
                        {"cpu_bytes", Type::Uint}};

Table with(std::initializer_list<Field> head, std::initializer_list<Field> rest) {
    Table table(head);
    table.insert(table.end(), rest);
    return table;
}
Table answer(std::initializer_list<Field> rest) { return with({{"id", Type::Id}, {"epoch", Type::Id}}, rest); }
Table event(std::initializer_list<Field> rest) {
    return with({{"job", Type::Id}, {"seq", Type::Uint}, {"epoch", Type::Id}, {"timeline", Type::Uint}}, rest);
}

struct Message {
    const char *name;
    Table table;
};
const std::vector<Message> &messages() {
    static const std::vector<Message> all = {
        {"welcome", answer({{"protocol", Type::Uint},
                            {"session", Type::Id},
                            {"resumed", Type::Bool},
                            {"server", Type::Text, 0, 64},
                            {"limits", Type::Record, 0, 0, nullptr, &kLimits},
                            {"engine", Type::Epithet, 0, 0, kEngine},
                            {"model", Type::RecordOrNil, 0, 0, nullptr, &kModel}})},
        {"model_info", answer({{"model", Type::Record, 0, 0, nullptr, &kModel}})},
        {"ok", answer({})},
        {"error", {{"id", Type::IdOrNil}, {"epoch", Type::Id}, {"error", Type::Record, 0, 0, nullptr, &kError}}},
        {"released",
         answer(
             {{"vram_budget_bytes", Type::Uint}, {"used_bytes", Type::Uint}, {"seconds", Type::Number, 0, kSeconds}})},
        {"observed", answer({{"observed_bytes", Type::UintOrNil}, {"seconds", Type::Number, 0, kSeconds}})},
        {"lease", answer({{"decision", Type::Epithet, 0, 0, " granted partial "},
                          {"vram_budget_bytes", Type::Uint},
                          {"seconds", Type::Number, 0, kSeconds},
                          {"version", Type::Uint}})},
        {"budget", answer({{"vram_budget_bytes", Type::Uint},
                           {"floor_bytes", Type::Uint},
                           {"full_bytes", Type::Uint},
                           {"state", Type::Epithet, 0, 0, " active parked hibernated "},
                           {"version", Type::Uint},
                           {"wanted_bytes", Type::Uint},
                           {"used_bytes", Type::Uint}})},
        {"notice",
         {{"epoch", Type::Id},
          {"kind", Type::Epithet, 0, 0, " wants gives_back late pressure other_process state "},
          {"vram_budget_bytes", Type::Uint},
          {"seconds", Type::Number, 0, kSeconds},
          {"detail", Type::Text, 0, 200, nullptr, nullptr, true}}},
        {"caps_and_requirements", answer({{"device", Type::Text, 0, 256},
                                          {"total_bytes", Type::UintOrNil},
                                          {"free_bytes", Type::UintOrNil},
                                          {"floor_bytes", Type::Uint},
                                          {"full_bytes", Type::Uint},
                                          {"context", Type::Uint},
                                          {"mode", Type::Epithet, 0, 0, " planned stream_only "}})},
        {"plan", answer({{"rows", Type::Records, 0, 32, nullptr, &kPlanRow}})},
        {"frame_block", answer({{"path", Type::Text, 1, 4096}})},
        {"stats", answer({{"broker", Type::Record, 0, 0, nullptr, &kBroker}, {"engine", Type::MapOrNil}})},
        {"pong", answer({{"jobs", Type::Jobs}})},
        {"engine",
         {{"epoch", Type::Id},
          {"state", Type::Epithet, 0, 0, kEngine},
          {"restarts", Type::Uint},
          {"error", Type::RecordOrNil, 0, 0, nullptr, &kError, true}}},
        {"started", event({{"n_prompt", Type::Uint}})},
        {"progress",
         event({{"phase", Type::Epithet, 0, 0, " encode prefill "}, {"done", Type::Uint}, {"total", Type::Uint}})},
        {"delta", event({{"text", Type::Text, 1, 65536}, {"tokens", Type::Id}})},
        {"done", event({{"reason", Type::Epithet, 0, 0, " stop length "},
                        {"n_prompt", Type::Uint},
                        {"n_generated", Type::Uint},
                        {"prefill_s", Type::Number, 0, kSeconds},
                        {"decode_s", Type::Number, 0, kSeconds}})},
        {"failed", event({{"error", Type::Record, 0, 0, nullptr, &kError}})},
        {"cancelled", event({})},
    };
    return all;
}

bool is_uint(const json &value, int64_t least = 0) {
    return value.is_number_integer() && value.get<int64_t>() >= least;
}

bool fits(const Field &field, const json &value);

bool fits(const Table &table, json *fields, size_t more, std::string *why) {
    size_t known = more;
    for (const Field &field : table) {
        auto found = fields->find(field.name);
        if (found == fields->end()) {
            if (!field.optional) {
                *why = std::string(field.name) + " is missing";
                return false;
            }
            (*fields)[field.name] = field.type == Type::Text ? json("") : json();
        } else if (!fits(field, *found)) {
            *why = std::string(field.name) + " is of the wrong type or out of range";
            return false;
        }
        ++known;
    }
    if (fields->size() != known) {
        *why = "an unknown field";
        return false;
    }
    return true;
}

bool fits(const Field &field, const json &value) {
    std::string why;
    switch (field.type) {
    case Type::IdOrNil:
        return value.is_null() || is_uint(value, 1);
    case Type::Id:
        return is_uint(value, 1);
    case Type::UintOrNil:
        return value.is_null() || is_uint(value);
    case Type::Uint:
        return is_uint(value);
    case Type::Text: {
        if (!value.is_string()) {
            return false;
        }
        int64_t size = int64_t(value.get_ref<const std::string &>().size());
        return field.least <= size && size <= field.most;
    }
    case Type::Bool:
        return value.is_boolean();
    case Type::NumberOrNil:
        if (value.is_null()) {
            return true;
        }
        [[fallthrough]];
    case Type::Number:
        return value.is_number() && value.get<double>() >= double(field.least) &&
               value.get<double>() <= double(field.most);
    case Type::MapOrNil:
        return value.is_null() || value.is_object();
    case Type::Map:
        return value.is_object();
    case Type::Epithet: {
        if (!value.is_string()) {
            return false;
        }
        const std::string &word = value.get_ref<const std::string &>();
        return word.find(' ') == std::string::npos && !word.empty() &&
               std::strstr(field.words, (" " + word + " ").c_str()) != nullptr;
    }
    case Type::RecordOrNil:
        if (value.is_null()) {
            return true;
        }
        [[fallthrough]];
    case Type::Record: {
        json copy = value; // records have no optional fields, so nothing is filled in
        return value.is_object() && fits(*field.record, &copy, 0, &why);
    }
    case Type::Records:
        if (!value.is_array() || int64_t(value.size()) > field.most) {
            return false;
        }
        return std::all_of(value.begin(), value.end(),
                           [&](json row) { return row.is_object() && fits(*field.record, &row, 0, &why); });
    case Type::Jobs:
        if (!value.is_array()) {
            return false;
        }
        for (const json &pair : value) {
            if (!pair.is_array() || pair.size() != 2 || !is_uint(pair[0], 1) || !is_uint(pair[1])) {
                return false;
            }
        }
        return true;
    }
    return false;
}

template <class Packer> void write(Packer &packer, const json &value) {
    switch (value.type()) {
    case json::value_t::object:
        packer.pack_map(uint32_t(value.size()));
        for (const auto &item : value.items()) {
            packer.pack(item.key());
            write(packer, item.value());
        }
        break;
    case json::value_t::array:
        packer.pack_array(uint32_t(value.size()));
        for (const json &item : value) {
            write(packer, item);
        }
        break;
    case json::value_t::string:
        packer.pack(value.get_ref<const std::string &>());
        break;
    case json::value_t::boolean:
        packer.pack(value.get<bool>());
        break;
    case json::value_t::number_integer:
    case json::value_t::number_unsigned:
        packer.pack(value.get<int64_t>());
        break;
    case json::value_t::number_float:
        packer.pack(value.get<double>());
        break;
    case json::value_t::binary:
        packer.pack_bin(uint32_t(value.get_binary().size()));
        packer.pack_bin_body(reinterpret_cast<const char *>(value.get_binary().data()), value.get_binary().size());
        break;
    default:
        packer.pack_nil();
    }
}

/* msgpack::packer wants a stream with write(). */
struct Sink {
    std::string bytes;
    void write(const char *data, size_t size) { bytes.append(data, size); }
};

} // namespace

bool decode_frame(const char *data, size_t size, json *message, std::string *why) {
    if (size > kMaxFrame) {
        *why = "more than 1048576 bytes";
        return false;
    }
    *message = nullptr;
    Builder builder(message);
    size_t end = 0;
    bool whole = false;
    try {
        whole = msgpack::parse(data, size, end, builder);
    } catch (const std::exception &) { // sizes that msgpack-c itself cannot take
    }
    if (!whole) {
        *why = builder.why;
        return false;
    }
    if (end != size) {
        *why = "bytes after the map";
        return false;
    }
    if (!message->is_object()) {
        *why = "not a map";
        return false;
    }
    return true;
}

bool decode_answer(const char *data, size_t size, json *message, std::string *why) {
    if (!decode_frame(data, size, message, why)) {
        return false;
    }
    auto name = message->find("t");
    if (name == message->end() || !name->is_string()) {
        *why = "no t";
        return false;
    }
    for (const Message &known : messages()) {
        if (*name == known.name) {
            return fits(known.table, message, 1, why);
        }
    }
    *why = "an unknown t";
    return false;
}

std::string encode(const json &message) {
    Sink sink;
    msgpack::packer<Sink> packer(sink);
    write(packer, message);
    return std::move(sink.bytes);
}

bool is_utf8(const char *text, size_t size) {
    const unsigned char *at = reinterpret_cast<const unsigned char *>(text), *end = at + size;
    while (at < end) {
        unsigned first = *at++;
        if (first < 0x80) {
            continue;
        }
        int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        if (first < 0xc2 || first > 0xf4 || end - at < more) {
            return false;
        }
        // The second byte alone tells overlong forms, surrogates and what lies beyond U+10FFFF.
        unsigned least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
        unsigned most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
        if (*at < least || *at > most) {
            return false;
        }
        for (int i = 1; i < more; ++i) {
            if ((at[i] & 0xc0) != 0x80) {
                return false;
            }
        }
        at += more;
    }
    return true;
}

std::string to_text(const json &value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

} // namespace frameshard_core
