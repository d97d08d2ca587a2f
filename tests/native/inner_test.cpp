// Tests of the inner device: its quirks, and copies between host memory and its buffers.
#include "check.h"
#include "emulated.h"
#include "inner.h"
#include "pacing.h"
#include "system.h"

#include <atomic>
#include <numeric>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

using namespace fsd;

namespace {

TEST(quirks_go_by_the_name_of_the_device) {
    CHECK(quirks_of("CUDA0").host_reads == HostReads::pinned);
    CHECK(quirks_of("Vulkan1").host_reads == HostReads::never);
    CHECK(quirks_of("emulated").emulated && quirks_of("emulated").vram_unit_bytes == 1);
    CHECK(!quirks_of("Metal").emulated && quirks_of("Metal").vram_unit_bytes == 2 << 20);
}

TEST(uploads_of_any_size_arrive) {
    Pacing pacing;
    Inner inner(pacing);
    ggml_backend_dev_t device = fs_emulated_device({});
    CHECK(inner.open(device, 1000));
    CHECK(inner.quirks.emulated);
    InnerBuffer buffer(ggml_backend_buft_alloc_buffer(inner.buffer_type(), 1 << 20));
    char *base = (char *)ggml_backend_buffer_get_base(buffer.get());
    std::vector<char> sent(100001), got(sent.size() + 1);
    std::iota(sent.begin(), sent.end(), 0);
    for (ggml_backend_t stream : {inner.compute, inner.copy, (ggml_backend_t) nullptr}) {
        for (size_t bytes : {size_t{0}, size_t{1}, size_t{999}, size_t{1000}, size_t{1001}, sent.size()}) {
            ggml_backend_buffer_clear(buffer.get(), 77);
            inner.upload(stream, buffer.get(), base + 300, sent.data(), bytes);
            inner.upload_zeros(stream, buffer.get(), base + 300 + bytes / 2, bytes / 4);
            if (stream) {
                ggml_backend_synchronize(stream);
            }
            ggml_tensor raw = raw_tensor(buffer.get(), base + 300, bytes + 1);
            ggml_backend_tensor_get(&raw, got.data(), 0, bytes + 1);
            for (size_t i = 0; i < bytes; i++) {
                CHECK(got[i] == (i >= bytes / 2 && i < bytes / 2 + bytes / 4 ? 0 : sent[i]));
            }
            CHECK(got[bytes] == 77);
        }
    }
    buffer.reset();
    inner.close_streams();
    fs_emulated_free(device);
}

TEST(memory_that_cannot_be_pinned_is_staged) {
    fs_emulated_config config;
    config.faults.unpinned = 1;
    config.link_gbps = 0.5; // slower than the CPU fills the slots, so that every slot is waited for
    Pacing pacing;
    Inner inner(pacing);
    ggml_backend_dev_t device = fs_emulated_device(config);
    CHECK(inner.open(device, 16 << 20));
    std::vector<char> sent(40'000'001), got(sent.size());
    std::iota(sent.begin(), sent.end(), 0);
    CHECK(inner.attach(sent.data(), sent.size()) == HostPath::staged);
    InnerBuffer buffer(ggml_backend_buft_alloc_buffer(inner.buffer_type(), sent.size() + 300));
    char *base = (char *)ggml_backend_buffer_get_base(buffer.get());
    for (ggml_backend_t stream : {inner.copy, inner.compute}) {
        const uint64_t before = inner.host_paths.staged_bytes;
        const size_t from = 77, bytes = sent.size() - 78;
        ggml_backend_buffer_clear(buffer.get(), 0);
        inner.upload(stream, buffer.get(), base + 300, sent.data() + from, bytes);
        std::fill_n(sent.begin(), 16 << 20, 9); // what the slots hold of it was read already
        CHECK(inner.host_paths.staged_bytes == before + bytes);
        ggml_backend_synchronize(stream);
        ggml_tensor raw = raw_tensor(buffer.get(), base + 300, bytes);
        ggml_backend_tensor_get(&raw, got.data(), 0, bytes);
        std::iota(sent.begin(), sent.end(), 0);
        CHECK(memcmp(got.data(), sent.data() + from, bytes) == 0);
    }
    const uint64_t staged = inner.host_paths.staged_bytes;
    const std::vector<char> other(1000, 5);
    inner.upload(inner.copy, buffer.get(), base, other.data(), other.size());
    inner.upload_zeros(inner.copy, buffer.get(), base + 500, 500);
    ggml_backend_synchronize(inner.copy);
    ggml_tensor raw = raw_tensor(buffer.get(), base, 1000);
    ggml_backend_tensor_get(&raw, got.data(), 0, 1000);
    CHECK(got[499] == 5 && got[500] == 0 && got[999] == 0);
    inner.detach(sent.data());
    inner.upload(inner.copy, buffer.get(), base, sent.data(), 1000);
    CHECK(inner.host_paths.staged_bytes == staged);
    inner.close_streams();
    buffer.reset();
    fs_emulated_free(device);
}

#if defined(__linux__)
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
#endif

} // namespace

TEST_MAIN()
