// ggml's registry of the shard device: FRAMESHARD0 for language models, FRAMESHARD_VISION for vision towers.
#pragma once

#include "ggml-backend.h"

namespace fsd {

ggml_backend_reg_t registry();
ggml_backend_dev_t plugin_device();
ggml_backend_dev_t vision_device();

// Whether the ggml that runs is the one that this library was built against.
bool same_ggml();

} // namespace fsd
