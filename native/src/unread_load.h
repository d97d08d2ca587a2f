// A load of a model whose file is mapped but not read.
//
// llama.cpp has the system read all of a file that it maps, unless ggml's registry of the CPU says that the machine has several
// NUMA nodes: then the file is only mapped, and pages come one by one where they are touched. While such a load is expected the
// registry says so.
#pragma once

namespace fsd {

// The next files that are mapped are not read, or are read again as always. The caller loads no model meanwhile.
void expect_unread_load(bool expected);

} // namespace fsd
