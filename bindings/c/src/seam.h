/* Helpers of the C functions. They turn exceptions into statuses, and check and copy the caller's arguments. */
#ifndef FRAMESHARD_SEAM_H
#define FRAMESHARD_SEAM_H

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <new>
#include <string>

#include "codec.h"
#include "frameshard.h"

namespace frameshard_core {

/* Thrown to refuse a call. `guarded` returns its status and remembers its message. */
struct Refused {
    fs_status status;
    std::string message;
};

[[noreturn]] void refuse(fs_status status, std::string message);

/* Stores the sentence that fs_last_error returns on this thread. May throw std::bad_alloc. */
void remember(const std::string &message);

/* Runs the body of a C function. Returns FS_OK, or the status of the exception that it threw. */
template <class Body> fs_status guarded(Body body) noexcept {
    try {
        try {
            body();
            return FS_OK;
        } catch (const Refused &refused) {
            remember(refused.message);
            return refused.status;
        } catch (const std::bad_alloc &) {
            remember("out of memory");
            return FS_OUT_OF_MEMORY;
        } catch (const std::exception &error) {
            remember(error.what());
            return FS_INTERNAL;
        }
    } catch (...) {
        return FS_OUT_OF_MEMORY; // there was no memory for the sentence
    }
}

/* Returns a copy of the caller's text. Throws Refused unless it is UTF-8 of `least` to `most` bytes. */
std::string text_of(const char *what, const char *text, int64_t length, size_t least, size_t most);
std::string text_of(const char *what, const char *text, size_t least, size_t most);

/* Returns an array of such texts. Throws Refused if there are more than `limit`. */
json texts_of(const char *what, const char *const *texts, uint64_t count, uint32_t limit, size_t least, size_t most);

/* Returns an array of records. Throws Refused if there are more than `limit`, or if one has a wrong value. */
json records_of(const char *what, const fs_logit_bias *biases, uint64_t count, uint32_t limit);

/* Returns `word`. Throws Refused unless it is one of `words`. */
std::string word_of(const char *what, const char *word, std::initializer_list<const char *> words);

/* Throws Refused unless `value` is in `least` to `most`. NaN is refused. */
void check_range(const char *what, double value, double least, double most);

/* Returns the word with this number, counted from 1. Throws Refused if there is none. */
template <size_t N> std::string word_of(const char *what, uint64_t number, const char *const (&words)[N]) {
    check_range(what, double(number), 1, N);
    return words[number - 1];
}

/* Returns a copy of the caller's struct. Members that an older program's struct does not have get their defaults. */
template <class T> T known_part(const T *given, T defaults, const char *init) {
    if (given->struct_size < sizeof(uint32_t) || given->struct_size > 4096) {
        refuse(FS_BAD_ARGUMENT, std::string("struct_size is wrong: use ") + init);
    }
    std::memcpy(&defaults, given, std::min<size_t>(given->struct_size, sizeof(T)));
    return defaults;
}

/* Copies `value` to the caller's struct, which has `size` bytes and may be shorter. */
template <class T> void fill(T *target, uint32_t size, const T &value) {
    std::memcpy(target, &value, std::min<size_t>(size, sizeof(T)));
}

} // namespace frameshard_core

#endif
