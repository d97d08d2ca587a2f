/* The host's side of the frame block: bindings/PROTOCOL.md, "Frame block". */
#include "frameshard.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>

#ifdef _WIN32
#include <filesystem>

#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "codec.h"
#include "seam.h"

using frameshard_core::check_range;
using frameshard_core::guarded;
using frameshard_core::refuse;

namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint32_t kMagic = 0x42465346, kVersion = 1, kIdle = 1;

/* The shared page. The host writes the first half, the sidecar the second. */
struct Page {
    uint32_t magic, version;
    std::atomic<uint32_t> sequence;
    std::atomic<uint32_t> flags;
    std::atomic<uint64_t> frame, frame_start_ns, target_frame_ns, frame_time_ns, gpu_busy_ns, budget_generation,
        vram_budget_bytes;
    unsigned char unused[2048 - 72];
    std::atomic<uint64_t> applied_generation, refused_generation, budget_bytes, used_bytes, floor_bytes;
};
static_assert(offsetof(Page, frame) == 16 && offsetof(Page, vram_budget_bytes) == 64 &&
                  offsetof(Page, applied_generation) == 2048 && std::atomic<uint64_t>::is_always_lock_free,
              "the page is laid out as the protocol has it");

uint64_t clock_ns() {
#if defined(__APPLE__)
    return clock_gettime_nsec_np(CLOCK_MONOTONIC_RAW);
#else
    using namespace std::chrono; // CLOCK_MONOTONIC
    return uint64_t(duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
#endif
}

uint64_t nanoseconds_of(double seconds) { return uint64_t(seconds * 1e9); }

const char kTooShort[] = "too short"; // a write to a mapping beyond the end of the file would crash the host

/* Maps the page at `path`. Returns nullptr with the reason in *why on failure. */
#ifdef _WIN32
void *map_page(const std::string &path, std::string *why) {
    HANDLE file =
        CreateFileW(std::filesystem::u8path(path).c_str(), GENERIC_READ | GENERIC_WRITE,
                    FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr, OPEN_EXISTING, 0, nullptr);
    LARGE_INTEGER size{};
    HANDLE mapping = nullptr;
    void *mapped = nullptr;
    if (file == INVALID_HANDLE_VALUE || !GetFileSizeEx(file, &size)) {
        *why = "error " + std::to_string(GetLastError());
    } else if (size.QuadPart < int64_t(kPageBytes)) {
        *why = kTooShort;
    } else if ((mapping = CreateFileMappingW(file, nullptr, PAGE_READWRITE, 0, 0, nullptr)) == nullptr ||
               (mapped = MapViewOfFile(mapping, FILE_MAP_WRITE, 0, 0, kPageBytes)) == nullptr) {
        *why = "error " + std::to_string(GetLastError());
    }
    if (mapping != nullptr) {
        CloseHandle(mapping);
    }
    if (file != INVALID_HANDLE_VALUE) {
        CloseHandle(file);
    }
    return mapped;
}

void unmap_page(void *page) { UnmapViewOfFile(page); }
#else
void *map_page(const std::string &path, std::string *why) {
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void *mapped = nullptr;
    if (fd >= 0 && lseek(fd, 0, SEEK_END) < off_t(kPageBytes)) {
        *why = kTooShort;
    } else if (fd < 0 ||
               (mapped = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED) {
        *why = std::strerror(errno);
        mapped = nullptr;
    }
    if (fd >= 0) {
        close(fd);
    }
    return mapped;
}

void unmap_page(void *page) { munmap(page, kPageBytes); }
#endif

} // namespace

struct fs_frame_block {
    Page *page = nullptr;
    uint64_t start_ns = 0; // start of the current frame; 0 before the first one and while idle
    uint64_t gpu_busy_ns = 0;

    ~fs_frame_block() {
        if (page != nullptr) {
            unmap_page(page);
        }
    }

    /* Makes `sequence` odd, stores fields, and makes it even again. So a reader notices a write in progress. */
    template <class Store> void write(Store store) {
        uint32_t odd = page->sequence.load(std::memory_order_relaxed) | 1;
        page->sequence.store(odd, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        store();
        page->sequence.store(odd + 1, std::memory_order_release);
    }
};

namespace {

fs_frame_block &open_block(fs_frame_block *block) {
    if (block == nullptr) {
        refuse(FS_BAD_ARGUMENT, "block is NULL");
    }
    return *block;
}

constexpr auto kRelaxed = std::memory_order_relaxed;

} // namespace

fs_status fs_frame_block_open(const char *path, double target_frame_s, fs_frame_block **block) {
    return guarded([&] {
        if (block == nullptr) {
            refuse(FS_BAD_ARGUMENT, "block is NULL");
        }
        *block = nullptr;
        std::string place = frameshard_core::text_of("path", path, 1, 4096);
        check_range("target_frame_s", target_frame_s, 0.0001, 10);
        auto made = std::make_unique<fs_frame_block>();
        std::string why;
        void *mapped = map_page(place, &why);
        if (mapped == nullptr) {
            refuse(FS_BAD_ARGUMENT, "no frame block at " + place + ": " + why);
        }
        made->page = static_cast<Page *>(mapped);
        if (made->page->magic != kMagic || made->page->version != kVersion) {
            refuse(FS_BAD_ARGUMENT, place + " is no frame block of version " + std::to_string(kVersion));
        }
        made->gpu_busy_ns = made->page->gpu_busy_ns.load(kRelaxed);
        made->write([&] { made->page->target_frame_ns.store(nanoseconds_of(target_frame_s), kRelaxed); });
        *block = made.release();
    });
}

void fs_frame_block_close(fs_frame_block *block) { delete block; }

fs_status fs_frame_begin(fs_frame_block *block) {
    return guarded([&] {
        fs_frame_block &open = open_block(block);
        Page &page = *open.page;
        uint64_t now = clock_ns();
        open.write([&] {
            page.flags.store(0, kRelaxed);
            page.frame.store(page.frame.load(kRelaxed) + 1, kRelaxed);
            if (open.start_ns != 0) {
                page.frame_time_ns.store(now - open.start_ns, kRelaxed);
            }
            page.frame_start_ns.store(now, kRelaxed);
            page.gpu_busy_ns.store(open.gpu_busy_ns, kRelaxed);
        });
        open.start_ns = now;
    });
}

fs_status fs_frame_end(fs_frame_block *block, double gpu_busy_s) {
    return guarded([&] {
        fs_frame_block &open = open_block(block);
        check_range("gpu_busy_s", gpu_busy_s, 0, 10);
        open.gpu_busy_ns = nanoseconds_of(gpu_busy_s);
    });
}

fs_status fs_frame_idle(fs_frame_block *block) {
    return guarded([&] {
        fs_frame_block &open = open_block(block);
        open.write([&] { open.page->flags.store(kIdle, kRelaxed); });
        open.start_ns = 0;
    });
}

fs_status fs_frame_set_budget(fs_frame_block *block, uint64_t vram_budget_bytes, uint64_t *generation) {
    return guarded([&] {
        fs_frame_block &open = open_block(block);
        check_range("vram_budget_bytes", double(vram_budget_bytes), 0, double(frameshard_core::kMaxInteger));
        uint64_t next = open.page->budget_generation.load(kRelaxed) + 1;
        open.write([&] {
            open.page->vram_budget_bytes.store(vram_budget_bytes, kRelaxed);
            open.page->budget_generation.store(next, kRelaxed);
        });
        if (generation != nullptr) {
            *generation = next;
        }
    });
}

fs_status fs_frame_get_answer(const fs_frame_block *block, fs_frame_answer *answer) {
    return guarded([&] {
        if (block == nullptr || answer == nullptr || answer->struct_size < sizeof(uint32_t)) {
            refuse(FS_BAD_ARGUMENT, "block or answer is NULL, or answer->struct_size is not set");
        }
        const Page &page = *block->page;
        fs_frame_answer found{};
        found.struct_size = answer->struct_size;
        found.applied_generation = page.applied_generation.load(std::memory_order_acquire);
        found.refused_generation = page.refused_generation.load(std::memory_order_acquire);
        found.budget_bytes = page.budget_bytes.load(kRelaxed);
        found.used_bytes = page.used_bytes.load(kRelaxed);
        found.floor_bytes = page.floor_bytes.load(kRelaxed);
        frameshard_core::fill(answer, answer->struct_size, found);
    });
}
