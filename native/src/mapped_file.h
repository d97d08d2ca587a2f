// A model file that llama.cpp has mapped. Parts of the mapping can be held in memory of this process, at the same addresses,
// and given back. Other threads may read the mapping meanwhile: its bytes are those of the file at all times. Reads go past
// the system's cache of files where the file system allows that.
//
// Only Linux can replace pages without a moment in which nothing is there. Elsewhere no file is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fsd {

class MappedFile {
  public:
    // The file that is mapped at an address, and the whole of its mapping around it. Null: there is none, it is not mapped
    // to be read only, its file system is in memory (tmpfs, ramfs), or the system cannot do what is needed.
    static std::unique_ptr<MappedFile> find(const char *p);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    // The program that mapped the file may have unmapped parts of it since. To be called before pages are held; the range that
    // is given is still mapped. If its pages are other memory by now, only they are left.
    void narrow(char *from, size_t bytes);
    char *begin() const { return begin_; }
    char *end() const { return end_; }
    bool contains(const char *p) const { return p >= begin_ && p < end_; }
    uint64_t offset_of(const char *p) const { return offset_ + (uint64_t)(p - begin_); }
    // A read of whole pages starts and ends on multiples of this, in the file and in memory.
    static constexpr size_t kUnit = 4096;

    // [any thread] Reads bytes of the file. `offset`, `bytes` and `to` are multiples of kUnit; what lies behind the end of the
    // file is not written. False with a reason: an error of the disk, or the file is no longer what it was.
    bool read(uint64_t offset, char *to, size_t bytes, std::string &why) const;
    // [any thread] Whether the file's size or time of modification is another than when it was found.
    bool changed(std::string &why) const;

    // [any thread] Whole pages of the mapping become `copy`, memory from reserve_addresses() with the same bytes, which
    // belongs to the mapping from then on. False: the system refuses, and nothing has changed.
    static bool hold(char *page, char *copy, size_t bytes);
    // [any thread] Whole pages become the file's again. What is not held takes no memory until it is read.
    bool give_back(char *page, size_t bytes) const;
    // [any thread] Frees what reading whole pages of the file through the mapping has left in memory. The pages must not be
    // held.
    void forget(char *page, size_t bytes) const;

  private:
    MappedFile() = default;

    char *begin_ = nullptr, *end_ = nullptr;
    uint64_t offset_ = 0; // of begin_ in the file
    int file_ = -1;       // for the mapping
    int direct_ = -1;     // for reads past the system's cache; -1: the file system does not allow it
    uint64_t size_ = 0, inode_ = 0;
    int64_t changed_ns_ = 0;
};

// A part of a mapped file.
struct FileRange {
    const MappedFile *file = nullptr;
    const char *from = nullptr; // in the mapping
    size_t bytes = 0;

    // The pages around it. The first and the last may also be a neighbour's.
    char *span() const { return down(from); }
    char *span_end() const { return up(from + bytes); }
    size_t span_bytes() const { return (size_t)(span_end() - span()); }

    static char *down(const char *p) { return (char *)((uintptr_t)p / MappedFile::kUnit * MappedFile::kUnit); }
    static char *up(const char *p) { return down(p + MappedFile::kUnit - 1); }
};

} // namespace fsd
