#include "system.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#if defined(_WIN32)
#if !defined(NOMINMAX)
#define NOMINMAX // libstdc++ sets it
#endif
#include <windows.h>
#else
#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/prctl.h>
#include <vector>
#endif

namespace fsd {

uint64_t clock_ns() {
#if defined(__APPLE__)
    return clock_gettime_nsec_np(CLOCK_MONOTONIC_RAW);
#else
    return (uint64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
#endif
}

void sleep_for(std::chrono::nanoseconds duration) { sleep_until(std::chrono::steady_clock::now() + duration); }

#if defined(_WIN32)

char *reserve_addresses(size_t size) {
    return (char *)VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void release_addresses(char *p, size_t) { VirtualFree(p, 0, MEM_RELEASE); }

void forget_pages(char *p, size_t size) { VirtualAlloc(p, size, MEM_RESET, PAGE_READWRITE); }

void prefer_large_pages(void *, size_t) {} // they need a privilege that players do not have

size_t page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

bool has_room(size_t bytes) {
    MEMORYSTATUSEX memory = {};
    memory.dwLength = sizeof(memory);
    return GlobalMemoryStatusEx(&memory) && bytes <= std::min(memory.ullAvailPhys, memory.ullAvailPageFile) / 4 * 3;
}

bool has_mapped_file(const char *p, size_t) {
    MEMORY_BASIC_INFORMATION info = {};
    return VirtualQuery(p, &info, sizeof(info)) > 0 && info.Type == MEM_MAPPED;
}

bool own_pages(char *, size_t) { return false; } // a view cannot be replaced without a moment in which nothing is there

// Windows itself refuses to shrink a file while it is mapped.
void *map_shared(const char *path, size_t size, std::string &why) {
    auto failed = [&](const char *what) {
        why = std::string("cannot ") + what + ": error " + std::to_string(GetLastError());
        return nullptr;
    };
    wchar_t wide[MAX_PATH];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MAX_PATH)) {
        return failed("read the path of the frame block");
    }
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const HANDLE file = CreateFileW(wide, GENERIC_READ | GENERIC_WRITE, share, nullptr, OPEN_EXISTING, 0, nullptr);
    if (file == INVALID_HANDLE_VALUE) {
        return failed("open the frame block");
    }
    LARGE_INTEGER length = {};
    if (!GetFileSizeEx(file, &length) || length.QuadPart != (LONGLONG)size) {
        CloseHandle(file);
        why = "the frame block is not a file of " + std::to_string(size) + " bytes";
        return nullptr;
    }
    const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READWRITE, 0, (DWORD)size, nullptr);
    void *p = mapping ? MapViewOfFile(mapping, FILE_MAP_ALL_ACCESS, 0, 0, size) : nullptr;
    if (!p) {
        failed("map the frame block");
    }
    if (mapping) {
        CloseHandle(mapping);
    }
    CloseHandle(file);
    return p;
}

void *loaded_symbol(const char *library, const char *name) {
    const HMODULE module = GetModuleHandleA(library);
    return module ? (void *)GetProcAddress(module, name) : nullptr;
}

void *symbol_beside(const void *function, const char *name) {
    HMODULE module = nullptr;
    const DWORD how = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    const bool found = GetModuleHandleExA(how, (LPCSTR)function, &module);
    return found ? (void *)GetProcAddress(module, name) : nullptr;
}

// The sleeps of MinGW's C++ library end up to a millisecond early, and those of Microsoft's last until the next tick of the
// system's clock, up to 15.6 ms.
void sleep_until(std::chrono::steady_clock::time_point end) {
    struct Timer {
        Timer() {
#if defined(CREATE_WAITABLE_TIMER_HIGH_RESOLUTION)
            const DWORD exact = CREATE_WAITABLE_TIMER_HIGH_RESOLUTION;
#else
            const DWORD exact = 2; // older headers lack the name
#endif
            handle = CreateWaitableTimerExW(nullptr, nullptr, exact, TIMER_ALL_ACCESS);
            if (!handle) { // before Windows 10 1803
                handle = CreateWaitableTimerExW(nullptr, nullptr, 0, TIMER_ALL_ACCESS);
            }
        }
        ~Timer() { CloseHandle(handle); }
        HANDLE handle;
    };
    thread_local Timer timer;
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(end - std::chrono::steady_clock::now());
        if (left.count() <= 0) {
            return;
        }
        LARGE_INTEGER due;
        due.QuadPart = -(LONGLONG)((left.count() + 99) / 100); // relative, in 100 ns
        if (SetWaitableTimer(timer.handle, &due, 0, nullptr, nullptr, FALSE)) {
            WaitForSingleObject(timer.handle, INFINITE);
        } else {
            Sleep(1);
        }
    }
}

void wake_exactly() {}

// Seen by libraries with the same C runtime. One with a runtime of its own took its copy of the environment when it was
// loaded, or asks Windows.
bool set_environment(const char *name, const char *value) { return _putenv_s(name, value ? value : "") == 0; }

#else

char *reserve_addresses(size_t size) {
#if defined(MAP_NORESERVE)
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#endif
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return p == MAP_FAILED ? nullptr : (char *)p;
}

void release_addresses(char *p, size_t size) { munmap(p, size); }

void forget_pages(char *p, size_t size) { madvise(p, size, MADV_DONTNEED); }

size_t page_bytes() { return (size_t)sysconf(_SC_PAGESIZE); }

void *loaded_symbol(const char *library, const char *name) {
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD); // never closed, so that the function stays
    return handle ? dlsym(handle, name) : nullptr;
}

void *symbol_beside(const void *function, const char *name) {
    Dl_info library;
    return dladdr(function, &library) ? loaded_symbol(library.dli_fname, name) : nullptr;
}

void prefer_large_pages(void *p, size_t size) {
#if defined(MADV_HUGEPAGE)
    madvise(p, size, MADV_HUGEPAGE);
#else
    (void)p, (void)size;
#endif
}

#if defined(__linux__)

void each_line(const char *path, const std::function<bool(const char *line)> &is_last) {
    FILE *file = fopen(path, "re");
    if (!file) {
        return;
    }
    char *line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = '\0';
        if (is_last(line)) {
            break;
        }
    }
    free(line);
    fclose(file);
}

// Finds a line with a number in one of the kernel's files. False if there is none.
static bool read_number(const std::string &path, const char *format, unsigned long long &number) {
    bool found = false;
    each_line(path.c_str(), [&](const char *line) { return found = sscanf(line, format, &number) == 1; });
    return found;
}

// Memory that this process may still take: of the system, and of the control groups that it is in.
static size_t available_bytes() {
    unsigned long long kib = 0;
    read_number("/proc/meminfo", "MemAvailable: %llu", kib);
    size_t left = (size_t)kib * 1024;
    std::string group;
    each_line("/proc/self/cgroup", [&](const char *line) {
        const bool unified = strncmp(line, "0::/", 4) == 0;
        group = unified ? line + 3 : "";
        return unified;
    });
    for (bool root = false; !root; group.resize(group.empty() ? 0 : group.rfind('/'))) {
        root = group.empty();
        const std::string directory = "/sys/fs/cgroup" + group + "/";
        unsigned long long most = 0, anonymous = 0;
        if (read_number(directory + "memory.max", "%llu", most)) { // "max" is no number
            read_number(directory + "memory.stat", "anon %llu", anonymous);
            left = std::min(left, (size_t)(most - std::min(most, anonymous))); // cached files are given back
        }
    }
    return left;
}

bool has_room(size_t bytes) { return bytes <= available_bytes() / 4 * 3; }

// How many bytes of a range are mapped from files: of all, or of those that are not to be written.
static size_t file_bytes(const char *p, size_t size, bool read_only) {
    const unsigned long long from = (uintptr_t)p, to = from + size;
    size_t bytes = 0;
    each_line("/proc/self/maps", [&](const char *line) {
        unsigned long long begin = 0, end = 0, inode = 0;
        char mode[8] = "";
        if (sscanf(line, "%llx-%llx %7s %*s %*s %llu", &begin, &end, mode, &inode) == 4 && inode != 0 &&
            (!read_only || strncmp(mode, "r--", 3) == 0) && begin < to && from < end) {
            bytes += (size_t)(std::min(end, to) - std::max(begin, from));
        }
        return begin >= to;
    });
    return bytes;
}

bool has_mapped_file(const char *p, size_t size) { return file_bytes(p, size, false) > 0; }

static bool replace_pages(char *p, size_t size) {
    char *copy = reserve_addresses(size);
    if (!copy) {
        return false;
    }
    prefer_large_pages(copy, size); // most of the time goes to page faults
    memcpy(copy, p, size);
    if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, p) == MAP_FAILED) {
        release_addresses(copy, size);
        return false;
    }
    return true;
}

bool own_pages(char *p, size_t size) {
    constexpr size_t step = (size_t)64 << 20;
    size = (size + page_bytes() - 1) / page_bytes() * page_bytes();
    if (file_bytes(p, size, true) < size || !has_room(size)) {
        return false;
    }
    std::atomic<size_t> next{0};
    std::atomic<bool> ok{true};
    std::vector<std::thread> threads(std::min(4u, std::max(1u, std::thread::hardware_concurrency())));
    for (std::thread &thread : threads) {
        thread = std::thread([&] {
            for (size_t at; ok && (at = next.fetch_add(step)) < size;) {
                ok = replace_pages(p + at, std::min(step, size - at)) && ok;
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    return ok;
}

#else

bool has_room(size_t) { return false; }

bool has_mapped_file(const char *, size_t) { return false; }

bool own_pages(char *, size_t) { return false; }

#endif

void *map_shared(const char *path, size_t size, std::string &why) {
    const int fd = ::open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        why = std::string("cannot open the frame block: ") + strerror(errno);
        return nullptr;
    }
    struct stat st = {};
    bool whole = fstat(fd, &st) == 0 && st.st_size == (off_t)size;
#if defined(F_GET_SEALS)
    // If the file shrank, reading the mapping would end this process.
    const int seals = fcntl(fd, F_GET_SEALS);
    whole = whole && (seals < 0 || (seals & F_SEAL_SHRINK));
#endif
    void *p = whole ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    ::close(fd);
    if (p == MAP_FAILED) {
        why = "the frame block is not a sealed file of " + std::to_string(size) + " bytes";
        return nullptr;
    }
    return p;
}

void sleep_until(std::chrono::steady_clock::time_point end) { std::this_thread::sleep_until(end); }

void wake_exactly() {
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1000ul); // nanoseconds; the default is 50 us
#endif
}

bool set_environment(const char *name, const char *value) {
    return (value && *value ? setenv(name, value, 1) : unsetenv(name)) == 0;
}

#endif

} // namespace fsd
