#include "images.h"

#include "seam.h"

#if defined(__linux__)
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace frameshard_core {
namespace {

constexpr uint64_t kMaxImage = 64 << 20, kMaxPixels = 1 << 24;

#if defined(__linux__)
/* Returns a sealed memory file with the bytes; -1 with errno on failure. */
int sealed(const void *data, uint64_t size) {
    int file = memfd_create("frameshard-image", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const char *at = static_cast<const char *>(data);
    while (file >= 0 && size > 0) {
        ssize_t written = write(file, at, size);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            close(file);
            return -1;
        }
        at += written;
        size -= uint64_t(written);
    }
    if (file >= 0 && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
        close(file);
        return -1;
    }
    return file;
}
#else
constexpr uint64_t kMaxInMessage = 900000;
#endif

} // namespace

Images::~Images() {
#if defined(__linux__)
    for (int file : files_) {
        close(file);
    }
#endif
}

json Images::add(const fs_image &image) {
    if (image.data == nullptr || image.size < 1 || image.size > kMaxImage) {
        refuse(FS_BAD_ARGUMENT, "an image must have 1 to 67108864 bytes");
    }
    check_range("format", image.format, FS_IMAGE_ENCODED, FS_IMAGE_RGBA);
    const char *const formats[] = {"encoded", "rgb", "rgba"};
    json fields = {{"format", formats[image.format - 1]}};
    if (image.format != FS_IMAGE_ENCODED) {
        uint64_t row = uint64_t(image.width) * (image.format == FS_IMAGE_RGB ? 3 : 4);
        uint64_t stride = image.stride == 0 ? row : image.stride;
        if (image.width < 1 || image.height < 1 || uint64_t(image.width) * image.height > kMaxPixels || stride < row ||
            stride > image.size || stride * (image.height - 1) + row > image.size) {
            refuse(FS_BAD_ARGUMENT, "an image's width, height and stride do not fit its size, or it has more than "
                                    "16777216 pixels");
        }
        fields.update({{"width", image.width}, {"height", image.height}, {"stride", image.stride}});
    }
#if defined(__linux__)
    int file = sealed(image.data, image.size);
    if (file < 0) {
        refuse(FS_OUT_OF_MEMORY, std::string("no shared memory for an image: ") + std::strerror(errno));
    }
    files_.push_back(file);
    fields["path"] = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    fields["size"] = image.size;
#else
    if (image.size > kMaxInMessage) {
        refuse(FS_BAD_ARGUMENT, "an image must have at most 900000 bytes on this system: encode it");
    }
    const uint8_t *bytes = static_cast<const uint8_t *>(image.data);
    fields["data"] = json::binary({bytes, bytes + image.size});
#endif
    return fields;
}

} // namespace frameshard_core
