// A mapped model file. The memory after it is not readable, so that reads beyond the end crash.
#pragma once

#include "check.h"

#include <cstddef>

#if defined(_WIN32)
#if !defined(NOMINMAX)
#define NOMINMAX // libstdc++ sets it
#endif
#include <windows.h>
#else
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#endif

class HostFile {
  public:
    explicit HostFile(size_t bytes) : data(nullptr), size(bytes) {
#if defined(_WIN32)
        const size_t page = 4096;
        mapped = (bytes + page - 1) / page * page + page;
        map = (char *)VirtualAlloc(nullptr, mapped, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
        CHECK(map != nullptr);
        DWORD before;
        CHECK(VirtualProtect(map + mapped - page, page, PAGE_NOACCESS, &before));
#else
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        mapped = (bytes + page - 1) / page * page + page;
        map = (char *)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(map != MAP_FAILED);
        CHECK(mprotect(map + mapped - page, page, PROT_NONE) == 0);
#endif
        data = map + (mapped - page - bytes) / 32 * 32;
    }
    ~HostFile() { unmap(); }
    HostFile(const HostFile &) = delete;
    HostFile &operator=(const HostFile &) = delete;

    void unmap() {
        if (map) {
#if defined(_WIN32)
            VirtualFree(map, 0, MEM_RELEASE);
#else
            munmap(map, mapped);
            if (!path.empty()) {
                unlink(path.c_str());
            }
#endif
        }
        map = nullptr;
    }

#if !defined(_WIN32)
    // From now on the memory is the mapping of a file with the same bytes, to be read only.
    void move_to_disk() {
        const char *directory = getenv("TMPDIR");
        path = std::string(directory ? directory : "/var/tmp") + "/frameshard-test-XXXXXX";
        const int fd = mkstemp(path.data());
        const size_t all = mapped - (size_t)sysconf(_SC_PAGESIZE);
        CHECK(fd >= 0 && write(fd, map, all) == (ssize_t)all);
        CHECK(mmap(map, all, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == map);
        close(fd);
    }
    void cut_on_disk(size_t bytes) { CHECK(truncate(path.c_str(), (off_t)bytes) == 0); }
#endif

    char *data;
    size_t size;

  private:
#if !defined(_WIN32)
    std::string path; // of the file, once it is on disk
#endif
    char *map = nullptr;
    size_t mapped = 0;
};
