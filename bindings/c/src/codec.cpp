#include "codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <msgpack.hpp>

namespace frameshard_core {
namespace {

constexpr size_t kNumbers = 2, kNumbersBytes = 64; // entries and bytes of `id` and `epoch`, at most
constexpr uint32_t kMaxArray = 1024, kMaxMap = 64, kMaxElements = 16384;
constexpr size_t kMaxDepth = 8;

/* Builds the value while msgpack-c parses the bytes. Stops the parser at the first violation of the protocol. */
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
        return put(json::binary({data, data + size})); // needs no check: the size of the frame limits it
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
    std::vector<json *> stack_; // only the last container grows, so the pointers to the others stay valid
    std::string name_;
    uint32_t elements_ = 0;
    bool key_ = false;
    bool failed_ = false;
};

/* ---- the tables ------------------------------------------------------------------------------------------------ */

enum class Type { Int, Number, Text, Word, Bool, Bin, Map, Record, Records, Texts, Counts };

struct Field;
using Table = std::vector<Field>;

/* Describes one field of an answer or record. */
struct Field {
    const char *name;
    Type type;
    double least = 0, most = 0;     // Int, Number: bounds. Text: bounds of its bytes. Arrays: `most` is elements
    const Table *record = nullptr;  // Record, Records: the fields of the record
    bool nullable = false;          // nil is allowed
    const char *fallback = nullptr; // the default as JSON; nullptr: the field is required
};

struct Message {
    const char *name;
    Table table;
};

constexpr double kMost = double(kMaxInteger);
constexpr size_t kMaxWord = 256; // bytes

// generated: answers
// clang-format off
const Table kAdapterInfo = {
    {"name", Type::Text, 1, 64},
    {"size_bytes", Type::Int, 0, kMost},
};
const Table kErrorInfo = {
    {"code", Type::Int, 0, kMost},
    {"name", Type::Text, 0, 64},
    {"message", Type::Text, 0, 65536},
    {"retriable", Type::Bool},
    {"detail", Type::Map},
};
const Table kModelInfo = {
    {"name", Type::Text, 0, 4096},
    {"arch", Type::Text, 0, 256},
    {"device", Type::Text, 0, 256},
    {"n_ctx", Type::Int, 0, kMost},
    {"n_parallel", Type::Int, 0, kMost},
    {"n_vocab", Type::Int, 0, kMost},
    {"n_layer", Type::Int, 0, kMost},
    {"chat", Type::Bool},
    {"floor_bytes", Type::Int, 0, kMost},
    {"full_bytes", Type::Int, 0, kMost},
    {"plan", Type::Map},
    {"vision", Type::Text, 0, 256, nullptr, false, "\"\""},
    {"fingerprint", Type::Text, 0, 64, nullptr, false, "\"\""},
    {"template_fingerprint", Type::Text, 0, 64, nullptr, false, "\"\""},
    {"embedder", Type::Text, 0, 4096, nullptr, false, "\"\""},
    {"thinks", Type::Bool, 0, 0, nullptr, false, "false"},
    {"passed_over", Type::Text, 0, 4096, nullptr, false, "\"\""},
    {"sees", Type::Bool, 0, 0, nullptr, false, "false"},
    {"hears", Type::Bool, 0, 0, nullptr, false, "false"},
};
const Table kServerLimits = {
    {"message_bytes", Type::Int, 0, kMost},
    {"string_bytes", Type::Int, 0, kMost},
    {"jobs", Type::Int, 0, kMost},
    {"window", Type::Int, 0, kMost},
    {"silent_s", Type::Number, 0, 1000000000},
};
const Table kPlanRow = {
    {"vram_budget_bytes", Type::Int, 0, kMost},
    {"fits", Type::Bool},
    {"ttft_s", Type::Number, 0, 1000000000, nullptr, true},
    {"tokens_per_second", Type::Number, 0, 1000000000, nullptr, true},
    {"resident_bytes", Type::Int, 0, kMost},
    {"streamed_bytes", Type::Int, 0, kMost},
    {"cpu_bytes", Type::Int, 0, kMost},
};
const Table kBrokerStats = {
    {"pid", Type::Int, 0, kMost},
    {"engine_pid", Type::Int, 0, kMost, nullptr, true},
    {"engine", Type::Word},
    {"engine_restarts", Type::Int, 0, kMost},
    {"sessions", Type::Int, 0, kMost},
    {"jobs_queued", Type::Int, 0, kMost},
    {"jobs_running", Type::Int, 0, kMost},
    {"uptime_s", Type::Number, 0, 1000000000},
    {"jobs_remote", Type::Int, 0, kMost, nullptr, false, "0"},
};

const std::vector<Message> &messages() {
    static const std::vector<Message> all = {
        {"welcome", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"protocol", Type::Int, 0, kMost},
            {"session", Type::Int, 1, kMost},
            {"resumed", Type::Bool},
            {"server", Type::Text, 0, 64},
            {"limits", Type::Record, 0, 0, &kServerLimits},
            {"engine", Type::Word},
            {"model", Type::Record, 0, 0, &kModelInfo, true},
            {"features", Type::Texts, 0, 64, nullptr, false, "[]"},
        }},
        {"model_info", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"model", Type::Record, 0, 0, &kModelInfo},
        }},
        {"ok", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
        }},
        {"error", {
            {"id", Type::Int, 1, kMost, nullptr, true},
            {"epoch", Type::Int, 1, kMost},
            {"error", Type::Record, 0, 0, &kErrorInfo},
        }},
        {"lease", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"decision", Type::Word},
            {"vram_budget_bytes", Type::Int, 0, kMost},
            {"seconds", Type::Number, 0, 1000000000},
            {"version", Type::Int, 0, kMost},
            {"host_budget_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"released", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"vram_budget_bytes", Type::Int, 0, kMost},
            {"used_bytes", Type::Int, 0, kMost},
            {"seconds", Type::Number, 0, 1000000000},
            {"host_budget_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
            {"host_used_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"observed", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"observed_bytes", Type::Int, 0, kMost, nullptr, true},
            {"seconds", Type::Number, 0, 1000000000},
            {"host_observed_bytes", Type::Int, 0, kMost, nullptr, true, "null"},
        }},
        {"budget", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"vram_budget_bytes", Type::Int, 0, kMost},
            {"floor_bytes", Type::Int, 0, kMost},
            {"full_bytes", Type::Int, 0, kMost},
            {"state", Type::Word},
            {"version", Type::Int, 0, kMost},
            {"wanted_bytes", Type::Int, 0, kMost},
            {"used_bytes", Type::Int, 0, kMost},
            {"host_budget_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
            {"host_floor_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
            {"host_used_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"caps_and_requirements", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"device", Type::Text, 0, 256},
            {"total_bytes", Type::Int, 0, kMost, nullptr, true},
            {"free_bytes", Type::Int, 0, kMost, nullptr, true},
            {"floor_bytes", Type::Int, 0, kMost},
            {"full_bytes", Type::Int, 0, kMost},
            {"context", Type::Int, 0, kMost},
            {"mode", Type::Word},
            {"host_total_bytes", Type::Int, 0, kMost, nullptr, true, "null"},
            {"host_free_bytes", Type::Int, 0, kMost, nullptr, true, "null"},
            {"host_floor_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"plan", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"rows", Type::Records, 0, 32, &kPlanRow},
        }},
        {"token_count", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"n_tokens", Type::Int, 0, kMost},
            {"n_left", Type::Int, 0, kMost},
        }},
        {"embeddings", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"n_dim", Type::Int, 1, kMost},
            {"rows", Type::Bin},
            {"n_tokens", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"adapters", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"adapters", Type::Records, 0, 16, &kAdapterInfo},
            {"floor_bytes", Type::Int, 0, kMost},
        }},
        {"kv", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"n_tokens", Type::Int, 0, kMost},
            {"file_bytes", Type::Int, 0, kMost},
            {"detail", Type::Text, 0, 400},
        }},
        {"frame_block", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"path", Type::Text, 1, 4096},
        }},
        {"stats", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"broker", Type::Record, 0, 0, &kBrokerStats},
            {"engine", Type::Map, 0, 0, nullptr, true},
        }},
        {"pong", {
            {"id", Type::Int, 1, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"jobs", Type::Counts, 0, 1024},
        }},
        {"started", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"n_prompt", Type::Int, 0, kMost},
            {"seed", Type::Int, 0, kMost, nullptr, false, "0"},
            {"remote", Type::Bool, 0, 0, nullptr, false, "false"},
        }},
        {"progress", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"phase", Type::Word},
            {"done", Type::Int, 0, kMost},
            {"total", Type::Int, 0, kMost},
        }},
        {"delta", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"text", Type::Text, 1, 65536},
            {"tokens", Type::Int, 0, kMost},
            {"sentence_end", Type::Bool, 0, 0, nullptr, false, "false"},
        }},
        {"thought", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"text", Type::Text, 1, 65536},
            {"tokens", Type::Int, 0, kMost},
        }},
        {"tool_call", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"call_id", Type::Text, 1, 64},
            {"name", Type::Text, 1, 64},
            {"arguments", Type::Text, 0, 65536},
        }},
        {"paused", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
        }},
        {"resumed", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
        }},
        {"done", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"reason", Type::Word},
            {"n_prompt", Type::Int, 0, kMost},
            {"n_generated", Type::Int, 0, kMost},
            {"prefill_s", Type::Number, 0, 1000000000},
            {"decode_s", Type::Number, 0, 1000000000},
            {"n_reused", Type::Int, 0, kMost, nullptr, false, "0"},
            {"n_left", Type::Int, 0, kMost, nullptr, false, "0"},
            {"n_thought", Type::Int, 0, kMost, nullptr, false, "0"},
            {"remote", Type::Bool, 0, 0, nullptr, false, "false"},
        }},
        {"failed", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
            {"error", Type::Record, 0, 0, &kErrorInfo},
        }},
        {"cancelled", {
            {"job", Type::Int, 1, kMost},
            {"seq", Type::Int, 0, kMost},
            {"epoch", Type::Int, 1, kMost},
            {"timeline", Type::Int, 0, kMost},
        }},
        {"engine", {
            {"epoch", Type::Int, 1, kMost},
            {"state", Type::Word},
            {"restarts", Type::Int, 0, kMost},
            {"error", Type::Record, 0, 0, &kErrorInfo, true, "null"},
        }},
        {"notice", {
            {"epoch", Type::Int, 1, kMost},
            {"kind", Type::Word},
            {"vram_budget_bytes", Type::Int, 0, kMost},
            {"seconds", Type::Number, 0, 1000000000},
            {"detail", Type::Text, 0, 200},
            {"host_budget_bytes", Type::Int, 0, kMost, nullptr, false, "0"},
        }},
        {"loading", {
            {"epoch", Type::Int, 1, kMost},
            {"stage", Type::Word},
            {"done", Type::Int, 0, kMost},
            {"total", Type::Int, 0, kMost},
        }},
    };
    return all;
}
// clang-format on
// end of answers

/* Fields that are kept of a message with an unknown name. They suffice to give credit for it if it is a job's event. */
const Table kUnknown = {{"job", Type::Int, 1, kMost}, {"seq", Type::Int, 0, kMost}, {"epoch", Type::Int, 1, kMost}};

bool is_integer(const json &value, double least, double most) {
    return value.is_number_integer() && double(value.get<int64_t>()) >= least && double(value.get<int64_t>()) <= most;
}

bool is_count(const json &pair) {
    return pair.is_array() && pair.size() == 2 && is_integer(pair[0], 1, kMost) && is_integer(pair[1], 0, kMost);
}

bool fits(const Field &field, json *value);

/* Returns true if `fields` match the table, else false with the reason in *why. Removes fields that are not in the
 * table, and adds missing fields that have a fallback. */
bool fits(const Table &table, json *fields, std::string *why) {
    json known = json::object();
    for (const Field &field : table) {
        auto found = fields->find(field.name);
        if (found != fields->end()) {
            if (!fits(field, &*found)) {
                *why = std::string(field.name) + " is of the wrong type or out of range";
                return false;
            }
            known[field.name] = std::move(*found);
        } else if (field.fallback != nullptr) {
            known[field.name] = json::parse(field.fallback);
        } else {
            *why = std::string(field.name) + " is missing";
            return false;
        }
    }
    *fields = std::move(known);
    return true;
}

bool fits(const Field &field, json *value) {
    std::string why;
    if (field.nullable && value->is_null()) {
        return true;
    }
    auto all = [&](auto is_right) {
        return value->is_array() && double(value->size()) <= field.most &&
               std::all_of(value->begin(), value->end(), is_right);
    };
    switch (field.type) {
    case Type::Int:
        return is_integer(*value, field.least, field.most);
    case Type::Number:
        return value->is_number() && value->get<double>() >= field.least && value->get<double>() <= field.most;
    case Type::Text:
        return is_text(*value, field.least, field.most);
    case Type::Word: // any word, because a newer sidecar may send one that this version does not know
        return is_text(*value, 1, kMaxWord);
    case Type::Bool:
        return value->is_boolean();
    case Type::Bin:
        return value->is_binary();
    case Type::Map:
        return value->is_object();
    case Type::Record:
        return value->is_object() && fits(*field.record, value, &why);
    case Type::Records:
        return all([&](json &row) { return row.is_object() && fits(*field.record, &row, &why); });
    case Type::Texts:
        return all([](const json &item) { return is_text(item, 0, kMaxString); });
    case Type::Counts:
        return all(is_count);
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

/* Adds the elements and entries in `value` to *elements. Returns false if they are more than a frame, an array or a map
 * may have. */
bool count_elements(const json &value, size_t *elements) {
    if (!value.is_structured()) {
        return true;
    }
    *elements += value.size();
    return value.size() <= (value.is_array() ? kMaxArray : kMaxMap) && *elements <= kMaxElements &&
           std::all_of(value.begin(), value.end(), [&](const json &item) { return count_elements(item, elements); });
}

/* The output stream for msgpack::packer, which needs write(). */
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
    } catch (const std::exception &) { // msgpack-c throws on sizes that it cannot handle
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
    auto found = message->find("t");
    if (found == message->end() || !found->is_string()) {
        *why = "no t";
        return false;
    }
    std::string name = *found;
    for (const Message &known : messages()) {
        if (name == known.name) {
            bool right = fits(known.table, message, why);
            (*message)["t"] = std::move(name);
            return right;
        }
    }
    if (!fits(kUnknown, message, why)) {
        *message = json::object();
    }
    (*message)["t"] = "";
    return true;
}

std::string encode(const json &message) {
    Sink sink;
    msgpack::packer<Sink> packer(sink);
    write(packer, message);
    return std::move(sink.bytes);
}

bool fits_frame(const json &fields) {
    size_t elements = kNumbers;
    return count_elements(fields, &elements) && encode(fields).size() <= kMaxFrame - kNumbersBytes;
}

bool is_text(const json &value, double least, double most) {
    if (!value.is_string()) {
        return false;
    }
    double size = double(value.get_ref<const std::string &>().size());
    return least <= size && size <= most;
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
        // The second byte alone shows overlong forms, surrogates and code points above U+10FFFF.
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
