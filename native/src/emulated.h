// The emulated inner device: a ggml device of type GPU that needs no GPU. ggml-cpu computes on buffers that count as VRAM,
// behind a copy link of a given bandwidth, with asynchronous streams and events. Everything but absolute speed can be tested
// on it, also that copies overlap with compute.
//
// It is as strict as a GPU: a graph that touches memory outside its buffers fails, and after a failed compute the device is
// lost, like a CUDA context after a sticky error. Like CUDA, it expects that tensors and host memory of an asynchronous call
// stay valid until the stream has run (the ggml_cgraph itself is copied), and that quantised tensors whose rows are not a
// multiple of 512 have room for padding (their alloc size).
#pragma once

#include "ggml-backend.h"

#include <cstdint>

// Numbers count from 1 over the life of the device; 0: never.
struct fs_emulated_faults {
    uint64_t alloc = 0;         // this allocation is refused
    uint64_t compute_fail = 0;  // this compute returns GGML_STATUS_FAILED, and the device is lost
    uint64_t compute_stuck = 0; // this compute waits for stuck_ms before it runs
    uint32_t stuck_ms = 60000;
    uint64_t disk_fail = 0, disk_stall = 0; // this read of weights from disk and 7 more fail; it takes stuck_ms longer
    uint64_t disk_fails = 0;                // each of the 8 fails so many times; 0: always
    uint64_t pages = 0;                     // this allocation of host memory for such reads and 7 more are refused
    uint32_t free_ms = 0;                   // every free takes this long
    uint32_t other_mb = 0;                  // from compute other_from on another process holds so many MiB of VRAM
    uint64_t other_from = 0;
    uint32_t other_ms = 0; // it leaves so many ms after a look at the memory has found it; 0: it stays
    // 1: host memory cannot be pinned where it lies, only memory of the host buffer type is pinned; 2: and the first
    // allocation of that is refused
    uint32_t unpinned = 0;
    uint32_t unit_kb = 0; // VRAM is allocated in multiples of so many KiB, as GPUs' drivers do; 0: of a byte
};

struct fs_emulated_config {
    double link_gbps = 0.0; // 1e9 bytes/s in each direction; 0: as fast as memcpy
    uint64_t vram_bytes = 8ull << 30;
    uint32_t n_threads = 1; // of each stream's compute
    fs_emulated_faults faults;
};

struct fs_emulated_stats {
    uint64_t vram_bytes, used_bytes, peak_bytes;
    uint64_t allocations; // calls, refused ones included
    uint64_t computes;    // enqueued
    uint64_t events;      // recorded
    uint64_t h2d_bytes, d2h_bytes;
    double h2d_busy_s, d2h_busy_s; // time the link was busy: bytes over bandwidth; if unlimited, time in memcpy
    bool lost;                     // a compute has failed: every later compute and allocation fails
};

// Reads "alloc=7,compute_fail=12,compute_stuck=12,stuck_ms=500,free_ms=20,other_mb=512,other_from=40,other_ms=500,
// unpinned=1,unit_kb=2048,disk_fail=3,disk_fails=1,disk_stall=3,pages=2" (any subset, any order) into faults. False, with faults
// unchanged, when the script is not of that form. Null or empty: no faults.
bool fs_emulated_read_faults(const char *script, fs_emulated_faults &faults);

// The same, from the environment variable FRAMESHARD_FAULTS.
bool fs_emulated_config_from_env(fs_emulated_config &config);

// A new device; null when ggml has no CPU device. It is not in ggml's registry.
ggml_backend_dev_t fs_emulated_device(const fs_emulated_config &config);

// Frees a device. Its backends, buffers and events must be freed before.
void fs_emulated_free(ggml_backend_dev_t device);

size_t fs_emulated_vram_unit(ggml_backend_dev_t device);            // bytes in multiples of which it allocates VRAM
bool fs_emulated_refuses_pages(ggml_backend_dev_t device);          // of one more allocation; any thread
fs_emulated_stats fs_emulated_get_stats(ggml_backend_dev_t device); // any thread
void fs_emulated_reset_peak(ggml_backend_dev_t device);             // any thread
