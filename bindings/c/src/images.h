/* Images on their way to the sidecar: bindings/PROTOCOL.md, "Images". */
#ifndef FRAMESHARD_IMAGES_H
#define FRAMESHARD_IMAGES_H

#include <vector>

#include "codec.h"
#include "frameshard.h"

namespace frameshard_core {

/* The images of a job, and the shared memory in which they wait for the sidecar. */
class Images {
  public:
    Images() = default;
    ~Images();
    Images(Images &&other) noexcept : files_(std::move(other.files_)) { other.files_.clear(); }
    Images &operator=(Images &&) = delete;

    /* Copies an image; what the protocol calls Image, or it is refused. */
    json add(const fs_image &image);

    bool empty() const { return files_.empty(); }

  private:
    std::vector<int> files_;
};

} // namespace frameshard_core

#endif
