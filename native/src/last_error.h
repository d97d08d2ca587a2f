// What fsd_last_error() returns.
#pragma once

#include <string>

namespace fsd {

// Of the calling thread.
inline std::string &last_error() {
    static thread_local std::string text;
    return text;
}

} // namespace fsd
