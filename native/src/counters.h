// The counters that fsd_get_stats returns. [any thread]
#pragma once

#include "frameshard_device.h"

#include <mutex>

namespace fsd {

class Counters {
  public:
    template <typename F> void update(F f) {
        std::lock_guard<std::mutex> lock(mutex_);
        f(values_);
    }
    fsd_stats read() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return values_;
    }

  private:
    mutable std::mutex mutex_;
    fsd_stats values_ = {};
};

} // namespace fsd
