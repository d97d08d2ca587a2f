/* Between the C functions and the C++ code: turns exceptions into statuses with a sentence, and checks and copies the
 * caller's arguments. */
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

/* Thrown where a call is refused; becomes the call's status. */
struct Refused {
    fs_status status;
    std::string message;
};

[[noreturn]] void refuse(fs_status status, std::string message);

/* Keeps the sentence for fs_last_error. May throw std::bad_alloc. */
void remember(const std::string &message);

/* Runs a call's body; no exception gets out. */
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
        return FS_OUT_OF_MEMORY; // there is no memory for the sentence either
    }
}

/* A copy of the caller's text. Refuses what is not UTF-8 of `least` to `most` bytes. */
std::string text_of(const char *what, const char *text, int64_t length, size_t least, size_t most);
std::string text_of(const char *what, const char *text, size_t least, size_t most);

/* An array of such texts, at most `limit`. */
json texts_of(const char *what, const char *const *texts, uint64_t count, uint32_t limit, size_t least, size_t most);

/* A word that is one of `words`; or it is refused. */
std::string word_of(const char *what, const char *word, std::initializer_list<const char *> words);

void check_range(const char *what, double value, double least, double most);

/* The word with this number, from 1; or it is refused. */
template <size_t N> std::string word_of(const char *what, uint64_t number, const char *const (&words)[N]) {
    check_range(what, double(number), 1, N);
    return words[number - 1];
}

/* The caller's struct as this library knows it: members that an older program does not have get their defaults. */
template <class T> T known_part(const T *given, T defaults, const char *init) {
    if (given->struct_size < sizeof(uint32_t) || given->struct_size > 4096) {
        refuse(FS_BAD_ARGUMENT, std::string("struct_size is wrong: use ") + init);
    }
    std::memcpy(&defaults, given, std::min<size_t>(given->struct_size, sizeof(T)));
    return defaults;
}

/* Fills as much of the caller's struct as it has. */
template <class T> void fill(T *target, uint32_t size, const T &value) {
    std::memcpy(target, &value, std::min<size_t>(size, sizeof(T)));
}

} // namespace frameshard_core

#endif
