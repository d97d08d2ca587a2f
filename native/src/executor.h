// The executor: runs the segments of a compiled graph and keeps the ring filled ahead of use.
//
// The CPU does not wait for the copy stream, except before a paced segment, when the program changes, and on devices whose
// streams share one queue (ring.h). It runs at most kRunAhead segments ahead of the compute stream, so that abort, budget and
// pacing take effect within that many segments.
#pragma once

#include "device.h"

namespace fsd {

// Runs a graph. It returns when the last segment is queued, or while Device::async is set when the graph has started;
// ggml's synchronize waits for its results. For one thread.
ggml_status run_graph(Device &d, const ggml_cgraph *graph);

} // namespace fsd
