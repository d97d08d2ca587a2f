/* Frames and messages, without I/O: the rules of bindings/PROTOCOL.md for frames, types and answers. A frame that breaks
 * a rule is refused before anything is built from it, so memory is bounded. */
#ifndef FRAMESHARD_CODEC_H
#define FRAMESHARD_CODEC_H

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace frameshard_core {

using json = nlohmann::json;

constexpr uint32_t kProtocol = 1;              // the least that the broker must speak
constexpr const char *kFeatures[] = {nullptr}; // what of PROTOCOL.md, "Features", this library knows
constexpr int64_t kMaxInteger = (int64_t(1) << 53) - 1;
constexpr size_t kMaxFrame = 1 << 20;
constexpr size_t kMaxString = 1 << 16;

/* The map in a frame; false with the reason in *why. */
bool decode_frame(const char *data, size_t size, json *message, std::string *why);

/* Like decode_frame, for a message of the broker: its fields are checked against the table of the message, and fields
 * that were left out get their defaults. A newer broker may send more than this version knows: unknown fields are removed
 * at every level; of a message with an unknown `t`, `job`, `seq` and `epoch` are kept, if it has all three, and `t` is
 * "". Unknown words (such as a new lease state) are kept as they are. */
bool decode_answer(const char *data, size_t size, json *message, std::string *why);

/* The frame of a message that keeps the rules. */
std::string encode(const json &message);

/* Whether `text` is UTF-8, without surrogates and overlong forms. */
bool is_utf8(const char *text, size_t size);

/* JSON text of a value from a message. */
std::string to_text(const json &value);

} // namespace frameshard_core

#endif
