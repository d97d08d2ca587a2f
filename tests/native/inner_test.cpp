// Tests of the inner device: its quirks, and copies between host memory and its buffers.
#include "check.h"
#include "emulated.h"
#include "inner.h"
#include "mapped_file.h"
#include "pacing.h"
#include "system.h"

#include <algorithm>
#include <numeric>
#ifdef __linux__
#include <sys/mman.h>
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

#ifdef __linux__
// The processes are counted as what the system counts less what is known to be held.
LINUX_TEST(memory_for_reads_is_there_before_it_is_read_into) {
    Pacing pacing;
    Inner inner(pacing);
    ggml_backend_dev_t device = fs_emulated_device({});
    CHECK(inner.open(device, 16 << 20));
    const size_t n_pages = 1000;
    const std::shared_ptr<char> memory = inner.pages(n_pages * MappedFile::kUnit);
    std::vector<unsigned char> there(n_pages);
    CHECK(mincore(memory.get(), n_pages * MappedFile::kUnit, there.data()) == 0);
    CHECK(std::all_of(there.begin(), there.end(), [](unsigned char page) { return page & 1; }));
    inner.close_streams();
    fs_emulated_free(device);
}
#endif

TEST(memory_that_cannot_be_pinned_is_copied_once) {
    fs_emulated_config config;
    config.faults.unpinned = 1;
    Pacing pacing;
    Inner inner(pacing);
    ggml_backend_dev_t device = fs_emulated_device(config);
    CHECK(inner.open(device, 16 << 20));
    std::vector<char> sent(140'000'001), got(sent.size()); // more than two windows
    std::iota(sent.begin(), sent.end(), 0);
    const std::vector<char> original = sent;
    CHECK(inner.attach(sent.data(), sent.size()) == HostPath::copied);
    std::fill(sent.begin(), sent.end(), 9); // nothing is read from it any more
    InnerBuffer buffer(ggml_backend_buft_alloc_buffer(inner.buffer_type(), sent.size() + 300));
    char *base = (char *)ggml_backend_buffer_get_base(buffer.get());
    const size_t from = 77, bytes = sent.size() - 78;
    inner.upload(inner.copy, buffer.get(), base + 300, sent.data() + from, bytes);
    ggml_backend_synchronize(inner.copy);
    ggml_tensor raw = raw_tensor(buffer.get(), base + 300, bytes);
    ggml_backend_tensor_get(&raw, got.data(), 0, bytes);
    CHECK(memcmp(got.data(), original.data() + from, bytes) == 0);
    CHECK(inner.host_paths.staged_bytes == 0);
    inner.detach(sent.data());
    inner.upload(inner.copy, buffer.get(), base, sent.data(), 1000);
    ggml_backend_synchronize(inner.copy);
    raw = raw_tensor(buffer.get(), base, 1000);
    ggml_backend_tensor_get(&raw, got.data(), 0, 1000);
    CHECK(got[0] == 9 && got[999] == 9);
    inner.close_streams();
    buffer.reset();
    fs_emulated_free(device);
}

TEST(memory_without_room_for_a_pinned_copy_is_staged) {
    fs_emulated_config config;
    config.faults.unpinned = 2;
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

// Kernels that read pinned memory alone must not read what the device gives instead.
TEST(rows_in_staging_memory_that_is_not_pinned_are_copied) {
    fs_emulated_config config;
    config.faults.unpinned = 2;
    Pacing pacing;
    Inner inner(pacing);
    ggml_backend_dev_t device = fs_emulated_device(config);
    CHECK(inner.open(device, 16 << 20));
    inner.quirks.host_reads = HostReads::pinned;
    constexpr int64_t kColumns = 64, kRows = 8;
    constexpr size_t kRow = kColumns * sizeof(float);
    InnerBuffer buffer(ggml_backend_buft_alloc_buffer(inner.buffer_type(), kRows * kRow));
    ggml_tensor to = raw_tensor(buffer.get(), ggml_backend_buffer_get_base(buffer.get()), kRows * kRow);
    to.type = GGML_TYPE_F32;
    to.ne[0] = kColumns;
    to.ne[1] = kRows;
    to.nb[0] = sizeof(float);
    to.nb[1] = kRow;
    const std::vector<int64_t> places = {1, 2, 6};
    HostRows rows;
    for (const bool pinned : {false, true}) { // the device refuses the first allocation
        ggml_backend_buffer_clear(buffer.get(), 0);
        char *staged = inner.staging(pinned ? 1 << 20 : 4096), *at = staged + places.size() * kRow;
        const float value = pinned ? 2 : 1;
        std::fill_n((float *)staged, places.size() * kColumns, value);
        memcpy(at, places.data(), places.size() * sizeof(int64_t));
        const uint64_t before = fs_emulated_get_stats(device).h2d_bytes;
        CHECK(inner.put_rows(rows, to, staged, (const int64_t *)at, (int64_t)places.size()) == GGML_STATUS_SUCCESS);
        inner.synchronize();
        CHECK(!fs_emulated_get_stats(device).lost);
        CHECK((fs_emulated_get_stats(device).h2d_bytes == before) == pinned);
        std::vector<float> got(kRows * kColumns);
        ggml_tensor raw = raw_tensor(buffer.get(), to.data, kRows * kRow);
        ggml_backend_tensor_get(&raw, got.data(), 0, kRows * kRow);
        for (int64_t row = 0; row < kRows; row++) {
            const bool written = std::count(places.begin(), places.end(), row) > 0;
            CHECK(got[(size_t)(row * kColumns)] == (written ? value : 0));
        }
    }
    inner.close_streams();
    buffer.reset();
    fs_emulated_free(device);
}

} // namespace

TEST_MAIN()
