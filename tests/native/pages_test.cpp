// Tests of the memory that takes the place of a mapped file. Only Linux can do that.
#include "check.h"
#include "emulated.h"
#include "held_weights.h"
#include "inner.h"
#include "mapped_file.h"
#include "pacing.h"
#include "system.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

using namespace fsd;

// The system's call, or one of a file system that returns an odd number of bytes at most, or of a disk with errors.
static std::atomic<size_t> most_read_bytes{0}, n_reads{0};
static std::atomic<int> n_to_fail{0};
extern "C" ssize_t pread(int fd, void *to, size_t bytes, off_t offset) {
    const size_t most = most_read_bytes;
    n_reads++;
    if (n_to_fail > 0) {
        n_to_fail--;
        errno = EIO;
        return -1;
    }
    return syscall(SYS_pread64, fd, to, most > 0 ? std::min(bytes, most) : bytes, offset);
}

namespace {

TEST(a_mapped_file_becomes_memory_at_the_same_addresses) {
    const size_t size = 150'000'001; // several steps, and a part of a page
    std::vector<uint32_t> words(size / 4 + 1);
    std::iota(words.begin(), words.end(), 0);
    FILE *file = tmpfile();
    CHECK(file && fwrite(words.data(), 1, size, file) == size && fflush(file) == 0);
    char *map = (char *)mmap(nullptr, size, PROT_READ, MAP_SHARED, fileno(file), 0);
    CHECK(map != MAP_FAILED);
    std::atomic<bool> over{false};
    std::atomic<int> rounds{0};
    std::thread reader([&] {
        do {
            for (size_t at = 0; at < size; at += 4000) {
                CHECK(map[at] == ((char *)words.data())[at]);
            }
            rounds++;
        } while (!over);
    });
    while (rounds == 0) {
        std::this_thread::yield();
    }
    CHECK(own_pages(map, size));
    over = true;
    reader.join();
    CHECK(memcmp(map, words.data(), size) == 0);
    CHECK(mprotect(map, size, PROT_READ | PROT_WRITE) == 0);
    memset(map, 1, size);
    std::vector<char> kept(size);
    rewind(file);
    CHECK(fread(kept.data(), 1, size, file) == size && memcmp(kept.data(), words.data(), size) == 0);
    munmap(map, size);
    fclose(file);
}

TEST(only_mapped_files_become_memory) {
    const size_t size = 3 * page_bytes();
    char *memory = reserve_addresses(size);
    memset(memory, 5, size);
    CHECK(!own_pages(memory, size));
    CHECK(mprotect(memory, size, PROT_READ) == 0 && !own_pages(memory, size));
    FILE *file = tmpfile();
    CHECK(file && ftruncate(fileno(file), (off_t)size) == 0);
    const int read_write = PROT_READ | PROT_WRITE;
    CHECK(mmap(memory, size, read_write, MAP_SHARED | MAP_FIXED, fileno(file), 0) == memory);
    CHECK(!own_pages(memory, size));
    CHECK(mmap(memory, page_bytes(), PROT_READ, MAP_SHARED | MAP_FIXED, fileno(file), 0) == memory);
    CHECK(!own_pages(memory, size)); // only a part of it
    release_addresses(memory, size);
    fclose(file);
}

// A file of numbers, mapped as llama.cpp maps models.
struct WeightFile {
    explicit WeightFile(size_t n) : size(n), words(n / 4 + 1) {
        std::iota(words.begin(), words.end(), 0);
        CHECK(fd >= 0 && write(fd, words.data(), size) == (ssize_t)size);
        map = (char *)mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(map != MAP_FAILED);
    }
    ~WeightFile() {
        munmap(map, size);
        close(fd);
        unlink(path);
    }
    WeightFile(const WeightFile &) = delete;

    bool is_whole(const char *from, size_t bytes) const {
        return memcmp(from, (const char *)words.data() + (from - map), bytes) == 0;
    }

    const size_t size;
    std::vector<uint32_t> words;
    char path[40] = "/var/tmp/frameshard-pages-XXXXXX"; // /tmp may be in memory
    const int fd = mkstemp(path);
    char *map = nullptr;
};

TEST(weights_that_are_held_need_nothing_of_their_file) {
    const size_t unit = MappedFile::kUnit;
    WeightFile weights(32 * unit);
    const std::unique_ptr<MappedFile> file = MappedFile::find(weights.map);
    CHECK(file);
    // Neighbours share pages; the last three are in one.
    std::vector<FileRange> ranges;
    size_t at = 100;
    for (size_t bytes : {3 * unit, 3 * unit, 3 * unit, 3 * unit, 2 * unit, size_t{200}, size_t{200}, size_t{200}}) {
        ranges.push_back({file.get(), weights.map + at, bytes});
        at += bytes;
    }
    DiskCounts counts;
    Disk disk({}, counts);
    HeldWeights held;
    held.start(disk, ranges);
    const auto hold = [&](const std::vector<int> &which) {
        held.want(which, 64 * unit);
        while (!std::all_of(which.begin(), which.end(), [&](int i) { return held.has(i); })) {
            std::this_thread::yield();
        }
    };
    hold({0, 1, 2, 3, 4, 5, 6, 7});
    hold({1, 3, 5, 7});
    CHECK(held.bytes() == (4 + 4 + 1 + 1) * unit);
    held.forget_others({file.get()});
    CHECK(ftruncate(weights.fd, 0) == 0); // from here on a read of the file's pages ends the process
    for (int i : {1, 3, 5, 7}) {
        CHECK(weights.is_whole(ranges[i].from, ranges[i].bytes));
    }
    hold({7});
    CHECK(weights.is_whole(ranges[7].from, ranges[7].bytes) && held.bytes() == unit);
    hold({});
    CHECK(held.bytes() == 0);
    held.stop();
}

TEST(weights_that_could_not_be_held_are_held_later) {
    const size_t unit = MappedFile::kUnit;
    WeightFile weights(8 * unit);
    const std::unique_ptr<MappedFile> file = MappedFile::find(weights.map);
    CHECK(file);
    DiskCounts counts;
    Disk disk({}, counts);
    HeldWeights held;
    held.start(disk, {{file.get(), weights.map, 4 * unit}});
    const auto want = [&](int n_errors, auto end) {
        n_to_fail = n_errors;
        held.want({0}, 64 * unit);
        while (!end()) {
            std::this_thread::yield();
        }
        CHECK(n_to_fail == 0);
    };
    const auto is_held = [&] { return held.has(0); };
    want(1, is_held); // the read is made again
    CHECK(weights.is_whole(weights.map, 4 * unit) && !held.lacks());
    held.want({}, 64 * unit);
    want(2, [&] { return held.lacks(); }); // in vain
    CHECK(!held.has(0) && held.bytes() == 0);
    want(0, is_held);
    CHECK(weights.is_whole(weights.map, 4 * unit) && !held.lacks());
    held.stop();
}

// The emulated device as one that imports host memory, and notes whether a file was mapped where it was asked to.
struct Importing {
    Importing() : inner(pacing) {
        fs_emulated_config config;
        config.faults.unpinned = 1;
        device = fs_emulated_device(config);
        device->iface.buffer_from_host_ptr = import;
        CHECK(inner.open(device, 1 << 20));
        inner.quirks.imports_memory = true;
        asked = asked_for_file = false;
    }
    ~Importing() {
        inner.close_streams();
        fs_emulated_free(device);
    }
    Importing(const Importing &) = delete;

    static ggml_backend_buffer_t import(ggml_backend_dev_t, void *p, size_t size, size_t) {
        asked = true;
        asked_for_file = asked_for_file || has_mapped_file((char *)p, size);
        return refuses ? nullptr : ggml_backend_cpu_buffer_from_ptr(p, size);
    }
    bool arrives(const char *from, size_t bytes) {
        InnerBuffer buffer(ggml_backend_buft_alloc_buffer(inner.buffer_type(), bytes));
        inner.upload(nullptr, buffer.get(), ggml_backend_buffer_get_base(buffer.get()), from, bytes);
        const ggml_tensor raw = raw_tensor(buffer.get(), ggml_backend_buffer_get_base(buffer.get()), bytes);
        std::vector<char> got(bytes);
        ggml_backend_tensor_get(&raw, got.data(), 0, bytes);
        return memcmp(got.data(), from, bytes) == 0;
    }

    static inline bool asked, asked_for_file, refuses = false;
    Pacing pacing;
    Inner inner;
    ggml_backend_dev_t device;
};

TEST(no_driver_is_asked_for_a_mapped_file) {
    const size_t size = 5'000'001, from = 4128; // the weights begin behind the file's first page
    std::vector<uint32_t> words(size / 4 + 1);
    std::iota(words.begin(), words.end(), 0);
    FILE *file = tmpfile();
    CHECK(file && fwrite(words.data(), 1, size, file) == size && fflush(file) == 0);
    char *map = (char *)mmap(nullptr, size, PROT_READ, MAP_SHARED, fileno(file), 0);
    CHECK(map != MAP_FAILED && has_mapped_file(map, size) && !has_mapped_file((char *)words.data(), size));
    Importing::refuses = true;
    {
        Importing none;
        CHECK(none.inner.attach(map + from, size - from) == HostPath::copied);
        CHECK(none.asked && !none.asked_for_file && has_mapped_file(map, size)); // asked for a sample of memory
        none.inner.detach(map + from);
    }
    Importing::refuses = false;
    Importing driver;
    CHECK(driver.inner.attach(map + from, size - from) == HostPath::imported);
    CHECK(!driver.asked_for_file);
    CHECK(driver.arrives(map + from, size - from) && driver.inner.host_paths.imported_bytes == size - from);
    driver.inner.detach(map + from);
    char *memory = reserve_addresses(size); // of the process: imported as it is
    memcpy(memory, words.data(), size);
    CHECK(driver.inner.attach(memory, size) == HostPath::imported);
    driver.inner.detach(memory);
    release_addresses(memory, size);
    munmap(map, size);
    fclose(file);
}

TEST(a_file_may_be_read_in_odd_parts) {
    constexpr size_t unit = MappedFile::kUnit, size = 20 * unit + 1234;
    WeightFile weights(size);
    const std::unique_ptr<MappedFile> file = MappedFile::find(weights.map);
    CHECK(file);
    char *copy = reserve_addresses(21 * unit);
    std::atomic<bool> over{false};
    std::thread watcher([&] {
        while (!over) {
            CHECK(n_reads < 10000); // it would go on for ever
            std::this_thread::yield();
        }
    });
    std::string why;
    for (size_t most : {unit - 1, unit + 1, size_t{700}}) {
        most_read_bytes = most;
        memset(copy, 0, 21 * unit);
        CHECK(file->read(0, copy, 21 * unit, why) && memcmp(copy, weights.words.data(), size) == 0);
    }
    most_read_bytes = 0;
    over = true;
    watcher.join();
    release_addresses(copy, 21 * unit);
}

// While pages are held and given back again and again, whoever reads the mapping finds the file's bytes.
TEST(held_pages_have_the_bytes_of_the_file) {
    constexpr size_t unit = MappedFile::kUnit, size = 200 * unit + 1234;
    WeightFile weights(size);
    char *map = weights.map;
    std::unique_ptr<MappedFile> file = MappedFile::find(map + 5 * unit);
    CHECK(file && file->begin() == map && (size_t)(file->end() - map) == 201 * unit && file->offset_of(map + 7) == 7);
    CHECK(!MappedFile::find((const char *)weights.words.data()));
    file->narrow(map + 3, 2 * unit);
    CHECK(file->begin() == map && (size_t)(file->end() - map) == 201 * unit);
    std::atomic<bool> over{false};
    std::thread reader([&] {
        while (!over) {
            CHECK(weights.is_whole(map, size));
        }
    });
    std::string why;
    for (int round = 0; round < 50; round++) {
        for (size_t at = 0; at < 200; at += 40) {
            const size_t n = at == 160 ? 41 : 40; // the last page is not whole in the file
            char *copy = reserve_addresses(n * unit);
            CHECK(copy && file->read(at * unit, copy, n * unit, why));
            CHECK(MappedFile::hold(map + at * unit, copy, n * unit));
        }
        for (size_t at = 0; at < 200; at += 40) {
            CHECK(file->give_back(map + at * unit, (at == 160 ? 41 : 40) * unit));
            file->forget(map + at * unit, 40 * unit);
        }
    }
    over = true;
    reader.join();
    CHECK(ftruncate(weights.fd, (off_t)unit) == 0);
    std::vector<char> rest(3 * unit);
    char *aligned = (char *)(((uintptr_t)rest.data() + unit - 1) / unit * unit);
    CHECK(!file->read(unit, aligned, unit, why) && why.find("shorter") != std::string::npos);
    CHECK(!file->read(0, aligned, unit, why) && why.find("changed") != std::string::npos);
}

} // namespace

TEST_MAIN()
