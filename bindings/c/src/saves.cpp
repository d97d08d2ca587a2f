#include "saves.h"

#include <algorithm>
#include <cstring>

#include "codec.h"
#include "seam.h"

namespace frameshard_core {
namespace {

constexpr char kMagic[] = {'F', 'S', 'S', 'V'};
constexpr uint32_t kFormat = 2;          // of a save with steps; one without has format 1
constexpr size_t kHead = 8, kStart = 12; // the checksum stands between
constexpr size_t kMaxFingerprint = 64, kMaxWriter = 64;
constexpr size_t kMaxMessages = 1020, kMaxPromptMessages = 1023; // of a history; of a prompt beside its system message
constexpr size_t kMaxTextBytes = kMaxFrame - 2 * kMaxString;
constexpr size_t kRecordBytes = 64; // of a frame, for names and lengths around the texts of an exchange, step or call
constexpr size_t kMaxId = 64, kMaxCalls = 16;

/* The CRC-32 of zlib and PNG. */
uint32_t crc32(uint32_t crc, const char *data, size_t size) {
    crc = ~crc;
    for (size_t i = 0; i < size; ++i) {
        crc ^= static_cast<unsigned char>(data[i]);
        for (int bit = 0; bit < 8; ++bit) {
            crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
        }
    }
    return ~crc;
}

void put(std::string *bytes, uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) {
        bytes->push_back(char(value >> shift & 0xff));
    }
}

uint32_t number(const char *bytes) {
    uint32_t value = 0;
    for (int i = 3; i >= 0; --i) {
        value = value << 8 | static_cast<unsigned char>(bytes[i]);
    }
    return value;
}

[[noreturn]] void refuse_save(const std::string &why) { refuse(FS_BAD_SAVE, why); }

bool has_text(const json &fields, const char *name, size_t least, size_t most) {
    auto found = fields.find(name);
    return found != fields.end() && is_text(*found, least, most);
}

std::string text(const json &fields, const char *name, size_t most) {
    if (!has_text(fields, name, 0, most)) {
        refuse_save(std::string("the save is damaged: ") + name + " is missing or has a wrong value");
    }
    return fields[name];
}

std::deque<Exchange> exchanges_of(const json &fields) {
    std::deque<Exchange> exchanges;
    auto found = fields.find("exchanges");
    bool right = found != fields.end() && found->is_array();
    for (size_t i = 0; right && i < found->size(); ++i) {
        const json &pair = (*found)[i];
        right = pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string();
        if (right) {
            exchanges.push_back({pair[0], pair[1], json::array()});
        }
    }
    if (!right) {
        refuse_save("the save is damaged: exchanges are missing or have a wrong value");
    }
    return exchanges;
}

bool is_call(const json &call) {
    return call.is_object() && call.size() == 3 && has_text(call, "id", 1, kMaxId) &&
           has_text(call, "name", 1, kMaxId) && has_text(call, "arguments", 0, kMaxString);
}

bool is_step(const json &step, size_t n_exchanges) {
    if (!step.is_object() || step.size() != 5 || !has_text(step, "content", 0, kMaxString) ||
        !has_text(step, "tool_call_id", 0, kMaxId) || !has_text(step, "role", 1, kMaxId)) {
        return false;
    }
    const std::string &role = step["role"].get_ref<const std::string &>();
    auto calls = step.find("tool_calls"), exchange = step.find("exchange");
    return (role == "system" || role == "user" || role == "assistant" || role == "tool") && calls != step.end() &&
           calls->is_array() && calls->size() <= kMaxCalls && std::all_of(calls->begin(), calls->end(), is_call) &&
           exchange != step.end() && exchange->is_number_integer() && exchange->get<int64_t>() >= 0 &&
           exchange->get<uint64_t>() < n_exchanges;
}

/* Adds the steps of a save to its exchanges. */
void add_steps(const json &fields, std::deque<Exchange> *exchanges) {
    auto steps = fields.find("steps");
    if (steps == fields.end() || !steps->is_array() || steps->empty()) {
        refuse_save("the save is damaged: steps are missing or have a wrong value");
    }
    for (json step : *steps) {
        if (!is_step(step, exchanges->size())) {
            refuse_save("the save is damaged: a step has a wrong value");
        }
        Exchange &exchange = (*exchanges)[step["exchange"].get<size_t>()];
        step.erase("exchange");
        exchange.steps.push_back(std::move(step));
    }
}

} // namespace

void Exchange::add_to(json *messages) const {
    messages->push_back({{"role", "user"}, {"content", question}});
    messages->insert(messages->end(), steps.begin(), steps.end());
    if (!answer.empty() || steps.empty()) {
        messages->push_back({{"role", "assistant"}, {"content", answer}});
    }
}

size_t Exchange::bytes() const {
    size_t sum = question.size() + answer.size() + kRecordBytes;
    for (const json &step : steps) {
        sum += step["content"].get_ref<const std::string &>().size() + kRecordBytes;
        sum += step["tool_call_id"].get_ref<const std::string &>().size();
        for (const json &call : step["tool_calls"]) {
            sum += kRecordBytes;
            for (const char *name : {"id", "name", "arguments"}) {
                sum += call[name].get_ref<const std::string &>().size();
            }
        }
    }
    return sum;
}

std::string write_save(const Save &save) {
    json exchanges = json::array(), steps = json::array();
    for (const Exchange &exchange : save.exchanges) {
        for (json step : exchange.steps) {
            step["exchange"] = exchanges.size();
            steps.push_back(std::move(step));
        }
        exchanges.push_back(json::array({exchange.question, exchange.answer}));
    }
    json fields = {{"exchanges", std::move(exchanges)}, // encode() writes keys in alphabetical order
                   {"model", save.model},
                   {"system", save.system},
                   {"template", save.chat_template},
                   {"writer", save.writer}};
    uint32_t format = steps.empty() ? 1 : kFormat;
    if (!steps.empty()) {
        fields["steps"] = std::move(steps);
    }
    std::string body = encode(fields);
    std::string bytes(kMagic, sizeof kMagic);
    put(&bytes, format);
    put(&bytes, crc32(crc32(0, bytes.data(), kHead), body.data(), body.size()));
    return bytes + body;
}

Save read_save(const void *data, size_t size) {
    const char *bytes = static_cast<const char *>(data);
    if (size > kMaxFrame) {
        refuse_save("the save has " + std::to_string(size) + " bytes, and at most " + std::to_string(kMaxFrame) +
                    " are possible");
    }
    if (bytes == nullptr || size < kStart || std::memcmp(bytes, kMagic, sizeof kMagic) != 0) {
        refuse_save("these bytes are no saved conversation");
    }
    if (number(bytes + kHead) != crc32(crc32(0, bytes, kHead), bytes + kStart, size - kStart)) {
        refuse_save("the save is damaged: its checksum is wrong");
    }
    uint32_t format = number(bytes + sizeof kMagic);
    if (format < 1 || format > kFormat) {
        refuse_save("the save has format " + std::to_string(format) + ", this version reads formats 1 to " +
                    std::to_string(kFormat) + ": update frameshard");
    }
    json fields;
    std::string why;
    if (!decode_frame(bytes + kStart, size - kStart, &fields, &why)) {
        refuse_save("the save is damaged: " + why);
    }
    Save save{exchanges_of(fields), text(fields, "model", kMaxFingerprint), text(fields, "system", kMaxString),
              text(fields, "template", kMaxFingerprint), text(fields, "writer", kMaxWriter)};
    if (format > 1) {
        add_steps(fields, &save.exchanges);
    }
    if (fields.size() != (format > 1 ? 6 : 5)) {
        refuse_save("the save is damaged: it has a field that its format has not");
    }
    return save;
}

size_t first_that_fits(const std::deque<Exchange> &exchanges, size_t other_bytes, size_t other_messages) {
    size_t first = exchanges.size(), bytes = other_bytes, messages = 0;
    while (first > 0) {
        const Exchange &exchange = exchanges[first - 1];
        bytes += exchange.bytes();
        messages += 2 + exchange.steps.size();
        if (bytes > kMaxTextBytes || messages > kMaxMessages || messages + other_messages > kMaxPromptMessages) {
            break;
        }
        --first;
    }
    return first;
}

} // namespace frameshard_core
