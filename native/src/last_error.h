// What fsd_last_error() returns.
#pragma once

#include "frameshard_device.h"

#include <string>
#include <utility>

namespace fsd {

// Of the calling thread.
inline std::string &last_error() {
    static thread_local std::string text;
    return text;
}

// For functions of frameshard_device.h: notes why they return `status`.
inline fsd_status fail(fsd_status status, std::string message) {
    last_error() = std::move(message);
    return status;
}

} // namespace fsd
