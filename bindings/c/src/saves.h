/* A saved conversation as bytes: PROTOCOL.md, "Saves". Mirrors sdk/frameshard/wire/saves.py. */
#ifndef FRAMESHARD_SAVES_H
#define FRAMESHARD_SAVES_H

#include <deque>
#include <string>

#include "codec.h"

namespace frameshard_core {

struct Exchange {
    std::string question, answer;
    json steps = json::array(); // ChatMessages between them: calls of tools, and their results
    /* True if it ends with calls that have no results yet. */
    bool waiting() const { return !steps.empty() && !steps.back()["tool_calls"].empty(); }
    /* Adds its messages to an array of ChatMessages. */
    void add_to(json *messages) const;
    /* Bytes of a frame that its texts take, at most. */
    size_t bytes() const;
};

/* The content of a save. */
struct Save {
    std::deque<Exchange> exchanges; // oldest first
    std::string model;              // its fingerprint
    std::string system;             // "": none
    std::string chat_template;      // its fingerprint
    std::string writer;             // name of the client that wrote the save
};

std::string write_save(const Save &save);

/* Throws Refused with FS_BAD_SAVE if the bytes are no save, are damaged or too large, or have a newer format. */
Save read_save(const void *data, size_t size);

/* Returns the index of the first of the newest exchanges that fit into one frame beside `other_bytes` of texts and
 * options, and beside a system message and `other_messages`. */
size_t first_that_fits(const std::deque<Exchange> &exchanges, size_t other_bytes, size_t other_messages);

} // namespace frameshard_core

#endif
