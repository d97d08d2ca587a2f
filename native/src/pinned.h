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

// Memory of the device's host buffer type; null if it has none, or no more of it. All three: [any thread].
InnerBuffer allocate_of_host_type(ggml_backend_dev_t device, size_t bytes);

// The same, zeroed, and quicker to get where there is much of it.
InnerBuffer allocate_pinned(ggml_backend_dev_t device, size_t bytes);

// Zeroed memory that is not pinned, and that goes back to the system when it is freed, which malloc's may not.
InnerBuffer allocate_pages(size_t bytes);

} // namespace fsd
