/* Frames and messages, without I/O: what bindings/PROTOCOL.md says under "Frames", "Types" and the tables of answers.
 * A frame that breaks a rule is refused before anything is built from it, so the size of what is built is bounded. */
#ifndef FRAMESHARD_CODEC_H
#define FRAMESHARD_CODEC_H

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace frameshard_core {

using json = nlohmann::json;

constexpr uint32_t kProtocol = 1;
constexpr int64_t kMaxInteger = (int64_t(1) << 53) - 1;
constexpr size_t kMaxFrame = 1 << 20;
constexpr size_t kMaxString = 1 << 16;

/* The map in a frame; false with the reason in *why. */
bool decode_frame(const char *data, size_t size, json *message, std::string *why);

/* Like decode_frame, and the message is one of the broker's, with all fields as its table says; fields that were left
 * out have their defaults. */
bool decode_answer(const char *data, size_t size, json *message, std::string *why);

/* The frame of a message that keeps the rules. */
std::string encode(const json &message);

/* Whether `text` is UTF-8, surrogates and overlong forms excluded. */
bool is_utf8(const char *text, size_t size);

/* JSON text of a map that came in a message. */
std::string to_text(const json &value);

} // namespace frameshard_core

#endif
