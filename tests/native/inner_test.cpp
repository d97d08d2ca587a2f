// Tests of the inner device: its quirks, and copies between host memory and its buffers.
#include "check.h"
#include "emulated.h"
#include "inner.h"
#include "pacing.h"

#include <numeric>

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

} // namespace

TEST_MAIN()
