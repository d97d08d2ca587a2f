// Tests of the ways from host memory to a Vulkan device. Mesa's software Vulkan will do; ggml takes it only if
// GGML_VK_VISIBLE_DEVICES names it.
#include "check.h"
#include "inner.h"
#include "pacing.h"
#include "system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <random>

using namespace fsd;

namespace {

constexpr size_t kFileBytes = 9'999'999;

// A mapped model file, as llama.cpp maps it: shared and read-only.
struct MappedFile {
    MappedFile() {
        std::mt19937 random(3);
        std::vector<uint32_t> words(kFileBytes / 4 + 1);
        for (uint32_t &w : words) {
            w = random();
        }
        FILE *file = tmpfile();
        CHECK(file && fwrite(words.data(), 1, kFileBytes, file) == kFileBytes && fflush(file) == 0);
        data = (char *)mmap(nullptr, kFileBytes, PROT_READ, MAP_SHARED, fileno(file), 0);
        CHECK(data != MAP_FAILED);
        fclose(file);
    }
    ~MappedFile() { munmap(data, kFileBytes); }
    MappedFile(const MappedFile &) = delete;

    char *data;
};

struct Vulkan {
    Vulkan() : inner(pacing) {
        // Imports have several windows.
        CHECK(set_environment("GGML_VK_SUBALLOCATION_BLOCK_SIZE", "4194304"));
        ggml_backend_dev_t device = ggml_backend_dev_by_name("Vulkan0");
        if (!device && ggml_backend_load(VULKAN_MODULE)) {
            device = ggml_backend_dev_by_name("Vulkan0");
        }
        if (!device) {
            fprintf(stderr, "no Vulkan device: GGML_VK_VISIBLE_DEVICES=0 takes Mesa's software Vulkan\n");
        }
        CHECK(device && inner.open(device, 3'000'000));
        CHECK(ggml_backend_buft_get_max_size(inner.buffer_type()) == 4'194'304);
        buffer.reset(ggml_backend_buft_alloc_buffer(inner.buffer_type(), kRoom));
        CHECK(buffer);
    }
    ~Vulkan() { inner.close_streams(); }
    Vulkan(const Vulkan &) = delete;

    // Whether bytes of the file arrive where they should, and nowhere else.
    void check_upload(ggml_backend_t stream, const MappedFile &file, size_t from, size_t bytes) {
        char *base = (char *)ggml_backend_buffer_get_base(buffer.get());
        ggml_tensor all = raw_tensor(buffer.get(), base, kRoom);
        ggml_backend_tensor_memset(&all, 77, 0, kRoom);
        inner.upload(stream, buffer.get(), base + 256, file.data + from, bytes);
        if (stream) {
            ggml_backend_synchronize(stream);
        }
        std::vector<char> got(bytes + 512);
        const ggml_tensor raw = raw_tensor(buffer.get(), base, got.size());
        ggml_backend_tensor_get(&raw, got.data(), 0, got.size());
        CHECK(memcmp(got.data() + 256, file.data + from, bytes) == 0);
        CHECK(std::count(got.begin(), got.begin() + 256, 77) == 256 &&
              std::count(got.end() - 256, got.end(), 77) == 256);
    }

    void check_uploads(const MappedFile &file) {
        for (ggml_backend_t stream : {inner.copy, inner.compute, (ggml_backend_t) nullptr}) {
            check_upload(stream, file, 0, kFileBytes);
            check_upload(stream, file, 4'194'303, 2); // on the border of two windows
            check_upload(stream, file, kFileBytes - 1, 1);
            for (size_t from : {32, 4'000'001, 8'388'607}) {
                check_upload(stream, file, from, 1'234'567);
            }
        }
    }

    static constexpr size_t kRoom = 12 << 20;
    Pacing pacing;
    Inner inner;
    InnerBuffer buffer;
};

TEST(a_mapped_file_is_imported_as_memory) {
    MappedFile file;
    Vulkan v;
    CHECK(has_mapped_file(file.data, kFileBytes));
    CHECK(v.inner.attach(file.data + 32, kFileBytes - 32) == HostPath::imported);
    CHECK(!has_mapped_file(file.data, kFileBytes));
    v.inner.detach(file.data + 32);
    CHECK(v.inner.attach(file.data, kFileBytes) == HostPath::imported);
    v.check_uploads(file);
    const uint64_t each = kFileBytes + 2 + 1 + 3 * 1'234'567;
    CHECK(v.inner.host_paths.imported_bytes == 3 * each && v.inner.host_paths.staged_bytes == 0);
    v.inner.detach(file.data);
    v.check_upload(v.inner.copy, file, 5, 100'000); // by the backend's own way
    CHECK(v.inner.host_paths.imported_bytes == 3 * each);
}

TEST(a_file_that_is_not_imported_is_staged) {
    MappedFile file;
    Vulkan v;
    CHECK(v.inner.attach(file.data, kFileBytes, false) == HostPath::staged);
    v.check_uploads(file);
    CHECK(v.inner.host_paths.staged_bytes > 2 * kFileBytes && v.inner.host_paths.imported_bytes == 0);
    v.inner.close_streams();
    CHECK(v.inner.open_streams());
    v.check_uploads(file);
    v.inner.detach(file.data);
}

} // namespace

TEST_MAIN()
