// The vision tower: a second ggml device, FRAMESHARD_VISION, over the same inner device and under the same budget. It holds
// VRAM only while one of its graphs runs.
#pragma once

#include "device.h"

namespace fsd {

ggml_backend_buffer_type_t tower_buffer_type();

// Runs a graph of the vision tower.
ggml_status encode_image(ggml_cgraph *graph);

// [any thread] The running encode ends at its next step with GGML_STATUS_ABORTED and gives back all that it holds.
void interrupt_tower();

bool is_tower_buffer(ggml_backend_buffer_t buffer);

// [any thread] Adds what the tower has done to the counters of `stats`.
void add_tower_counters(fsd_stats &stats);

} // namespace fsd
