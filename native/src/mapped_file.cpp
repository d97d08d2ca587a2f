#include "mapped_file.h"

#include "system.h"

#if defined(__linux__)
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#endif

namespace fsd {

#if defined(__linux__)

static int64_t nanoseconds(const timespec &t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

namespace {

// A line of /proc/self/maps.
struct Mapping {
    unsigned long long begin = 0, end = 0, offset = 0, inode = 0;
    unsigned major = 0, minor = 0;
    char mode[8] = "";
    std::string path;

    bool read(const char *line) {
        int at = 0;
        if (sscanf(line, "%llx-%llx %7s %llx %x:%x %llu %n", &begin, &end, mode, &offset, &major, &minor, &inode, &at) <
            7) {
            return false;
        }
        path = line + at;
        return true;
    }
    bool is_read_only_file() const { return strncmp(mode, "r--", 3) == 0 && inode != 0 && !path.empty(); }
};

} // namespace

// Calls `is_last` with each mapping of this process, by address, until it returns true.
static void each_mapping(const std::function<bool(const Mapping &)> &is_last) {
    Mapping m;
    each_line("/proc/self/maps", [&](const char *line) { return m.read(line) && is_last(m); });
}

// Whether the pages of a file are all there is of it, so that none can be dropped.
static bool is_in_memory(int fd) {
    struct statfs fs = {};
    return fstatfs(fd, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

std::unique_ptr<MappedFile> MappedFile::find(const char *p) {
    Mapping m;
    each_mapping([&](const Mapping &each) {
        const bool found = (uintptr_t)p >= each.begin && (uintptr_t)p < each.end;
        m = found ? each : m;
        return found;
    });
    if (!m.is_read_only_file() || (size_t)sysconf(_SC_PAGESIZE) > kUnit) {
        return nullptr;
    }
    std::unique_ptr<MappedFile> f(new MappedFile);
    f->begin_ = (char *)(uintptr_t)m.begin;
    f->end_ = (char *)(uintptr_t)m.end;
    f->offset_ = m.offset;
    f->file_ = ::open(m.path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat st = {};
    if (f->file_ < 0 || fstat(f->file_, &st) != 0 || (unsigned long long)st.st_ino != m.inode) {
        return nullptr; // another file has its name now
    }
    if (is_in_memory(f->file_)) {
        return nullptr;
    }
    f->inode_ = (uint64_t)st.st_ino;
    f->size_ = (uint64_t)st.st_size;
    f->changed_ns_ = nanoseconds(st.st_mtim);
    f->direct_ = ::open(("/proc/self/fd/" + std::to_string(f->file_)).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    return f;
}

void MappedFile::narrow(char *from, size_t bytes) {
    const uintptr_t page = kUnit;
    uintptr_t begin = (uintptr_t)from / page * page, end = ((uintptr_t)from + bytes + page - 1) / page * page;
    uintptr_t run = 0, run_end = 0; // neighbouring mappings of the file
    each_mapping([&](const Mapping &m) {
        if (m.inode == inode_ && m.is_read_only_file()) {
            run = m.begin == run_end ? run : m.begin;
            run_end = m.end;
            if (run <= begin && end <= run_end) {
                begin = std::max(run, (uintptr_t)begin_);
                end = std::min<uintptr_t>(run_end, (uintptr_t)end_);
            }
        }
        return false;
    });
    offset_ += (uint64_t)(begin - (uintptr_t)begin_);
    begin_ = (char *)begin;
    end_ = (char *)end;
}

MappedFile::~MappedFile() {
    for (int fd : {file_, direct_}) {
        if (fd >= 0) {
            ::close(fd);
        }
    }
}

bool MappedFile::read(uint64_t offset, char *to, size_t bytes, std::string &why) const {
    bytes = (size_t)std::min<uint64_t>(bytes, size_ - std::min(offset, size_));
    int fd = direct_ >= 0 ? direct_ : file_;
    for (size_t done = 0; done < bytes;) {
        // A direct read is of whole units; at the end of the file it returns what is there.
        const size_t left = (bytes - done + kUnit - 1) / kUnit * kUnit;
        const ssize_t n = pread(fd, to + done, fd == direct_ ? left : bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && fd == direct_ && fd != file_ && (errno == EINVAL || errno == EFAULT || errno == EOPNOTSUPP)) {
            fd = file_; // not this file system, or not to this memory
            continue;
        }
        if (n < 0) {
            why = std::string("the model file cannot be read: ") + strerror(errno);
            return false;
        }
        if (n == 0) {
            why = "the model file is shorter than it was";
            return false;
        }
        done += (size_t)n;
        if (fd == direct_ && done % kUnit != 0 && done < bytes) {
            done = done / kUnit * kUnit;
            fd = file_; // an odd number of bytes: the rest as files are read, which may be any number at a time
        }
    }
    if (fd == file_) {
        posix_fadvise(file_, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
    }
    return !changed(why);
}

bool MappedFile::changed(std::string &why) const {
    struct stat st = {};
    if (fstat(file_, &st) == 0 && (uint64_t)st.st_size == size_ && nanoseconds(st.st_mtim) == changed_ns_) {
        return false;
    }
    why = "the model file was changed while it was in use";
    return true;
}

// Who reads the pages meanwhile finds the old memory or the new one.
static bool replace(char *page, void *memory, size_t bytes) {
    return mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, page) != MAP_FAILED;
}

bool MappedFile::hold(char *page, char *copy, size_t bytes) { return replace(page, copy, bytes); }

bool MappedFile::give_back(char *page, size_t bytes) const {
    void *file = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file_, (off_t)offset_of(page));
    if (file == MAP_FAILED) {
        return false;
    }
    madvise(file, bytes, MADV_RANDOM); // a read of a few bytes should not bring their neighbours
    if (!replace(page, file, bytes)) {
        munmap(file, bytes);
        return false;
    }
    return true;
}

void MappedFile::forget(char *page, size_t bytes) const {
    madvise(page, bytes, MADV_DONTNEED);
    posix_fadvise(file_, (off_t)offset_of(page), (off_t)bytes, POSIX_FADV_DONTNEED);
}

#else

std::unique_ptr<MappedFile> MappedFile::find(const char *) { return nullptr; }
MappedFile::~MappedFile() = default;
void MappedFile::narrow(char *, size_t) {}
bool MappedFile::read(uint64_t, char *, size_t, std::string &) const { return false; }
bool MappedFile::changed(std::string &) const { return false; }
bool MappedFile::hold(char *, char *, size_t) { return false; }
bool MappedFile::give_back(char *, size_t) const { return false; }
void MappedFile::forget(char *, size_t) const {}

#endif

} // namespace fsd
