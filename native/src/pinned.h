// Pinned host memory. The device copies to it and from it at the link's full rate, and while it computes.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <memory>

namespace fsd {

struct BufferDeleter {
    void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); }
};
using InnerBuffer = std::unique_ptr<ggml_backend_buffer, BufferDeleter>;

// Zeroed memory of the device, which must have a host buffer type; null if there is no more of it. Both: [any thread].
InnerBuffer allocate_pinned(ggml_backend_dev_t device, size_t bytes);

// Zeroed memory that is not pinned, and that goes back to the system when it is freed, which malloc's may not.
InnerBuffer allocate_pages(size_t bytes);

} // namespace fsd
