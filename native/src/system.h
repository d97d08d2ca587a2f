// What differs between operating systems. No other file of the library asks which one it runs on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fsd {

// Zeroed host memory; pages that are never touched take no RAM. Null when the system refuses.
char *reserve_addresses(size_t size);
void release_addresses(char *p, size_t size);
// Gives the pages of a range back to the system; they may read as zeros from then on.
void forget_pages(char *p, size_t size);
size_t page_bytes();
// Backs a range with large pages where the system has them.
void prefer_large_pages(void *p, size_t size);

// Whether `bytes` are at most three quarters of the memory that this process may still take. False where the system does not
// say how much that is.
bool has_room(size_t bytes);

// Whether a file is mapped at any of these addresses; on Windows, at the first one. False where the system does not say.
bool has_mapped_file(const char *p, size_t size);

// Replaces the pages of a file that is mapped to be read by copies that belong to this process, at the same addresses, while
// other threads may read them. False, and what is not replaced stays mapped, if the range is no such mapping, if there is no
// room for the copies, or if the system cannot do it. `p` is on a page.
bool own_pages(char *p, size_t size);

// Linux alone: calls `is_last` with each line of one of the kernel's text files until it returns true; with none if the file
// cannot be read. Reads with the C library, because a GPU's module may bring a C++ library of its own.
void each_line(const char *path, const std::function<bool(const char *line)> &is_last);

// Maps a file of exactly `size` bytes that cannot shrink while it is mapped, to read and write. The path is UTF-8. Null with
// the reason in `why`.
void *map_shared(const char *path, size_t size, std::string &why);

// A function of a library that this process has loaded; null if there is none.
void *loaded_symbol(const char *library, const char *name);

// A function of the library that has this other one; null if there is none.
void *symbol_beside(const void *function, const char *name);

uint64_t clock_ns(); // the clock of the frame block's times

// An atomic load of a field of shared memory that is no std::atomic.
template <typename T> T load_acquire(const T &field) {
#if defined(_MSC_VER) && !defined(__clang__)
    const T value = *(const volatile T *)&field;
    std::atomic_thread_fence(std::memory_order_acquire);
    return value;
#else
    return __atomic_load_n(&field, __ATOMIC_ACQUIRE);
#endif
}

// Never return early, and are exact to well below a millisecond.
void sleep_until(std::chrono::steady_clock::time_point end);
void sleep_for(std::chrono::nanoseconds duration);
// Lets the calling thread's waits and sleeps end as exactly as the system can.
void wake_exactly();

// Sets a variable of this process's environment, or removes it where the value is null or empty.
bool set_environment(const char *name, const char *value);

} // namespace fsd
