#include "saves.h"

#include <cstring>

#include "codec.h"
#include "seam.h"

namespace frameshard_core {
namespace {

constexpr char kMagic[] = {'F', 'S', 'S', 'V'};
constexpr uint32_t kFormat = 1;
constexpr size_t kHead = 8, kStart = 12; // the checksum stands between
constexpr size_t kMaxFingerprint = 64, kMaxWriter = 64;
constexpr size_t kMaxExchanges = 510;
constexpr size_t kMaxTextBytes = kMaxFrame - 2 * kMaxString;
constexpr size_t kExchangeBytes = 64; // of a frame, for names and lengths around the texts of one exchange

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

std::string text(const json &fields, const char *name, size_t most) {
    auto found = fields.find(name);
    if (found == fields.end() || !found->is_string() || found->get_ref<const std::string &>().size() > most) {
        refuse_save(std::string("the save is damaged: ") + name + " is missing or has a wrong value");
    }
    return *found;
}

std::deque<Exchange> exchanges_of(const json &fields) {
    std::deque<Exchange> exchanges;
    auto found = fields.find("exchanges");
    bool right = found != fields.end() && found->is_array();
    for (size_t i = 0; right && i < found->size(); ++i) {
        const json &pair = (*found)[i];
        right = pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string();
        if (right) {
            exchanges.push_back({pair[0], pair[1]});
        }
    }
    if (!right) {
        refuse_save("the save is damaged: exchanges are missing or have a wrong value");
    }
    return exchanges;
}

} // namespace

std::string write_save(const Save &save) {
    json exchanges = json::array();
    for (const Exchange &exchange : save.exchanges) {
        exchanges.push_back(json::array({exchange.question, exchange.answer}));
    }
    std::string body = encode({{"exchanges", std::move(exchanges)}, // encode() writes keys in alphabetical order
                               {"model", save.model},
                               {"system", save.system},
                               {"template", save.chat_template},
                               {"writer", save.writer}});
    std::string bytes(kMagic, sizeof kMagic);
    put(&bytes, kFormat);
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
    if (number(bytes + sizeof kMagic) != kFormat) {
        refuse_save("the save has format " + std::to_string(number(bytes + sizeof kMagic)) +
                    ", this version reads format " + std::to_string(kFormat) + ": update frameshard");
    }
    json fields;
    std::string why;
    if (!decode_frame(bytes + kStart, size - kStart, &fields, &why)) {
        refuse_save("the save is damaged: " + why);
    }
    Save save{exchanges_of(fields), text(fields, "model", kMaxFingerprint), text(fields, "system", kMaxString),
              text(fields, "template", kMaxFingerprint), text(fields, "writer", kMaxWriter)};
    if (fields.size() != 5) {
        refuse_save("the save is damaged: it has a field that format 1 has not");
    }
    return save;
}

size_t first_that_fits(const std::deque<Exchange> &exchanges, size_t other_bytes) {
    size_t first = exchanges.size(), bytes = other_bytes;
    while (first > 0 && exchanges.size() - first < kMaxExchanges) {
        const Exchange &exchange = exchanges[first - 1];
        bytes += exchange.question.size() + exchange.answer.size() + kExchangeBytes;
        if (bytes > kMaxTextBytes) {
            break;
        }
        --first;
    }
    return first;
}

} // namespace frameshard_core
