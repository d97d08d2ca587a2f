/* Encodes and decodes messages, without I/O, by the rules of bindings/PROTOCOL.md for frames, types and answers.
 * Decoding stops at the first byte that breaks a rule, so a bad frame cannot make it use much memory. */
#ifndef FRAMESHARD_CODEC_H
#define FRAMESHARD_CODEC_H

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace frameshard_core {

using json = nlohmann::json;

constexpr uint32_t kProtocol = 1;              // the lowest protocol version that the broker must have
constexpr const char *kFeatures[] = {nullptr}; // features of PROTOCOL.md that this library knows; ends with nullptr
constexpr int64_t kMaxInteger = (int64_t(1) << 53) - 1;
constexpr size_t kMaxFrame = 1 << 20;
constexpr size_t kMaxString = 1 << 16;

/* Sets *message to the map in a frame. Returns false with the reason in *why if the frame breaks a rule. */
bool decode_frame(const char *data, size_t size, json *message, std::string *why);

/* Like decode_frame, for a message from the broker. Checks the fields against the message's table and gives missing
 * fields their defaults. A newer broker may send what this version does not know. Unknown fields are removed, also in
 * nested records. Unknown words, such as a new lease state, are kept. A message with an unknown name gets the name ""
 * and keeps only `job`, `seq` and `epoch`, if it has all three. */
bool decode_answer(const char *data, size_t size, json *message, std::string *why);

/* Encodes a message. The message must keep the protocol's rules. */
std::string encode(const json &message);

/* True if a request with these fields fits into a frame, beside `id` and `epoch`: its bytes, and its elements. */
bool fits_frame(const json &fields);

/* True if `value` is a text of `least` to `most` bytes. */
bool is_text(const json &value, double least, double most);

/* True if `text` is valid UTF-8; surrogates and overlong forms are not. */
bool is_utf8(const char *text, size_t size);

/* Returns a value of a message as JSON text. */
std::string to_text(const json &value);

} // namespace frameshard_core

#endif
