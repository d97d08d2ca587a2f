// The host's side of a frame block.
#pragma once

#ifdef __linux__

#include "check.h"
#include "pacing.h"

#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

struct HostBlock {
    HostBlock() : fd(memfd_create("frames", MFD_ALLOW_SEALING)) {
        CHECK(fd >= 0 && ftruncate(fd, sizeof(fsd::FrameBlock)) == 0);
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
        block = (fsd::FrameBlock *)mmap(nullptr, sizeof(fsd::FrameBlock), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(block != MAP_FAILED);
        block->magic = 0x42465346;
        block->version = 1;
    }
    ~HostBlock() {
        munmap(block, sizeof(fsd::FrameBlock));
        close(fd);
    }
    HostBlock(const HostBlock &) = delete;
    HostBlock &operator=(const HostBlock &) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd); }
    void ask(uint64_t generation, uint64_t budget) {
        block->sequence.fetch_add(1);
        __atomic_store_n(&block->vram_budget_bytes, budget, __ATOMIC_RELEASE);
        __atomic_store_n(&block->budget_generation, generation, __ATOMIC_RELEASE);
        block->sequence.fetch_add(1);
    }
    // Begins the next frame.
    void draw(uint64_t start_ns, uint64_t target_ns, uint64_t gpu_busy_ns) {
        block->sequence.fetch_add(1);
        __atomic_store_n(&block->frame_start_ns, start_ns, __ATOMIC_RELEASE);
        __atomic_store_n(&block->target_frame_ns, target_ns, __ATOMIC_RELEASE);
        __atomic_store_n(&block->gpu_busy_ns, gpu_busy_ns, __ATOMIC_RELEASE);
        __atomic_store_n(&block->frame, block->frame + 1, __ATOMIC_RELEASE);
        block->sequence.fetch_add(1);
    }

    const int fd;
    fsd::FrameBlock *block = nullptr;
};

#endif
