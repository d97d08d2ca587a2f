#include "seam.h"

#include <iomanip>
#include <sstream>

#include "codec.h"

namespace frameshard_core {
namespace {

struct StatusName {
    fs_status status;
    const char *name;
    bool retriable;
};
const StatusName kStatuses[] = {
    // generated: statuses
    {FS_OK, "ok", false},
    {FS_INTERNAL, "internal", false},
    {FS_BAD_ARGUMENT, "bad_argument", false},
    {FS_BAD_MESSAGE, "bad_message", false},
    {FS_UNKNOWN_JOB, "unknown_job", false},
    {FS_CONTEXT_OVERFLOW, "context_overflow", false},
    {FS_UNSUPPORTED, "unsupported", false},
    {FS_BAD_SAVE, "bad_save", false},
    {FS_MODEL_NOT_FOUND, "model_not_found", false},
    {FS_BAD_MODEL, "bad_model", false},
    {FS_UNKNOWN_DEVICE, "unknown_device", false},
    {FS_BUDGET_BELOW_FLOOR, "budget_below_floor", false},
    {FS_VERSION_MISMATCH, "version_mismatch", false},
    {FS_OUT_OF_MEMORY, "out_of_memory", true},
    {FS_STALE_LEASE, "stale_lease", false},
    {FS_ENDPOINT_IN_USE, "endpoint_in_use", false},
    {FS_CONNECTION_LOST, "connection_lost", true},
    {FS_ENGINE_DIED, "engine_died", true},
    {FS_OVERLOADED, "overloaded", true},
    {FS_DEADLINE_MISSED, "deadline_missed", true},
    {FS_CANCELLED, "cancelled", false},
    {FS_DOWNLOAD_FAILED, "download_failed", true},
    // end of statuses
};

const StatusName *find_status(fs_status status) {
    for (const StatusName &known : kStatuses) {
        if (known.status == status) {
            return &known;
        }
    }
    return &kStatuses[1];
}

thread_local std::string last_error;

} // namespace

[[noreturn]] void refuse(fs_status status, std::string message) { throw Refused{status, std::move(message)}; }

void remember(const std::string &message) { last_error = message; }

std::string text_of(const char *what, const char *text, int64_t length, size_t least, size_t most) {
    if (text == nullptr && length <= 0 && least == 0) {
        return "";
    }
    if (text == nullptr || length < FS_NUL_TERMINATED) {
        refuse(FS_BAD_ARGUMENT, std::string(what) + " is missing");
    }
    std::string copy(text, length == FS_NUL_TERMINATED ? std::strlen(text) : size_t(length));
    if (copy.size() < least || copy.size() > most) {
        refuse(FS_BAD_ARGUMENT, std::string(what) + " must have " + std::to_string(least) + " to " +
                                    std::to_string(most) + " bytes, not " + std::to_string(copy.size()));
    }
    if (!is_utf8(copy.data(), copy.size())) {
        refuse(FS_BAD_ARGUMENT, std::string(what) + " is not UTF-8");
    }
    return copy;
}

std::string text_of(const char *what, const char *text, size_t least, size_t most) {
    return text_of(what, text, FS_NUL_TERMINATED, least, most);
}

void check_range(const char *what, double value, double least, double most) {
    if (!(least <= value && value <= most)) { // true for NaN, too
        std::ostringstream sentence;
        sentence << std::setprecision(16); // six digits would round the limits
        sentence << what << " must be from " << least << " to " << most;
        refuse(FS_BAD_ARGUMENT, sentence.str());
    }
}

json texts_of(const char *what, const char *const *texts, uint64_t count, uint32_t limit, size_t least, size_t most) {
    check_range((std::string("n_") + what).c_str(), double(count), 0, limit);
    json found = json::array();
    for (uint64_t i = 0; i < count; ++i) {
        found.push_back(text_of(what, texts == nullptr ? nullptr : texts[i], least, most));
    }
    return found;
}

json records_of(const char *what, const fs_logit_bias *biases, uint64_t count, uint32_t limit) {
    check_range((std::string("n_") + what).c_str(), double(count), 0, biases == nullptr ? 0 : limit);
    json found = json::array();
    for (uint64_t i = 0; i < count; ++i) {
        const fs_logit_bias &given = biases[i];
        check_range("bias", given.bias, -100, 100);
        json &made = found.emplace_back(json{{"bias", given.bias}});
        if (given.text != nullptr) {
            made["text"] = text_of("text", given.text, 1, 256);
        } else {
            check_range("token", double(given.token), 0, INT32_MAX);
            made["token"] = given.token;
        }
    }
    return found;
}

std::string word_of(const char *what, const char *word, std::initializer_list<const char *> words) {
    std::string known;
    for (const char *other : words) {
        if (std::strcmp(word, other) == 0) {
            return word;
        }
        known += (known.empty() ? "" : ", ") + std::string(other);
    }
    refuse(FS_BAD_ARGUMENT, std::string(what) + " must be one of " + known);
}

} // namespace frameshard_core

const char *fs_status_name(fs_status status) { return frameshard_core::find_status(status)->name; }

int32_t fs_status_retriable(fs_status status) { return frameshard_core::find_status(status)->retriable ? 1 : 0; }

const char *fs_last_error(uint32_t *length) {
    if (length != nullptr) {
        *length = uint32_t(frameshard_core::last_error.size());
    }
    return frameshard_core::last_error.c_str();
}
