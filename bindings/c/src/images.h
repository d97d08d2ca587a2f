/* Images for the sidecar: bindings/PROTOCOL.md, "Images". */
#ifndef FRAMESHARD_IMAGES_H
#define FRAMESHARD_IMAGES_H

#include <vector>

#include "codec.h"
#include "frameshard.h"

namespace frameshard_core {

/* The images of a job. Owns their shared memory. */
class Images {
  public:
    Images() = default;
    ~Images();
    Images(Images &&other) noexcept : files_(std::move(other.files_)) { other.files_.clear(); }
    Images &operator=(Images &&) = delete;

    /* Copies an image and returns the protocol's Image. Throws Refused if its format, size or dimensions are wrong. */
    json add(const fs_image &image);

    bool empty() const { return files_.empty(); }

  private:
    std::vector<int> files_;
};

} // namespace frameshard_core

#endif
