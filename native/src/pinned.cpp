#include "pinned.h"

#include "system.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace fsd {

// CUDA's driver takes 70 ms for 110 MiB of its own memory on an H100 machine, in which no thread can begin a kernel. Several
// threads make the system give large pages in 12 ms, and the driver pins these in 4 ms. ggml pins memory only to be read.
static constexpr size_t kLeastOfPages = (size_t)4 << 20; // smaller ones are from the driver
static constexpr unsigned kTouching = 4;                 // threads
static constexpr unsigned kPortable = 1;                 // CU_MEMHOSTREGISTER_PORTABLE: for all contexts

#if defined(_WIN32)
static constexpr const char *kCudaDriver = "nvcuda.dll";
#else
static constexpr const char *kCudaDriver = "libcuda.so.1";
#endif

// CUDA's driver, which ggml has loaded.
class CudaDriver {
  public:
    // The pages are unpinned in the same context, which may be in another thread.
    bool pin(void *p, size_t bytes) {
        void *context = nullptr;
        if (!complete() || current_(&context) != 0 || !context || register_(p, bytes, kPortable) != 0) {
            return false;
        }
        context_.store(context);
        return true;
    }
    void unpin(void *p) {
        void *popped = nullptr;
        if (push_(context_.load()) == 0) {
            unregister_(p);
            pop_(&popped);
        }
    }

  private:
    template <typename F> static F call(const char *name) { return (F)loaded_symbol(kCudaDriver, name); }
    bool complete() const { return register_ && unregister_ && current_ && push_ && pop_; }

    int (*register_)(void *, size_t, unsigned) = call<decltype(register_)>("cuMemHostRegister_v2");
    int (*unregister_)(void *) = call<decltype(unregister_)>("cuMemHostUnregister");
    int (*current_)(void **) = call<decltype(current_)>("cuCtxGetCurrent");
    int (*push_)(void *) = call<decltype(push_)>("cuCtxPushCurrent_v2");
    int (*pop_)(void **) = call<decltype(pop_)>("cuCtxPopCurrent_v2");
    std::atomic<void *> context_{nullptr}; // there is one: the process has one device
};

static CudaDriver &cuda() {
    static CudaDriver driver;
    return driver;
}

static void touch(char *p, size_t bytes) {
    const size_t each = (bytes + kTouching - 1) / kTouching;
    std::vector<std::thread> threads;
    for (size_t at = 0; at < bytes; at += each) {
        threads.emplace_back([p, at, n = std::min(each, bytes - at)] { memset(p + at, 0, n); });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

InnerBuffer allocate_pages(size_t bytes) {
    char *pages = reserve_addresses(bytes);
    if (!pages) {
        return nullptr;
    }
    InnerBuffer memory(ggml_backend_cpu_buffer_from_ptr(pages, bytes));
    memory->iface.free_buffer = [](ggml_backend_buffer_t b) { release_addresses((char *)b->context, b->size); };
    return memory;
}

InnerBuffer allocate_of_host_type(ggml_backend_dev_t device, size_t bytes) {
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(device);
    InnerBuffer memory(host ? ggml_backend_buft_alloc_buffer(host, bytes) : nullptr);
    // With no more of it ggml gives other memory, which kernels cannot read.
    return memory && ggml_backend_buffer_get_type(memory.get()) == host ? std::move(memory) : nullptr;
}

static InnerBuffer pinned_pages(ggml_backend_dev_t device, size_t bytes) {
    InnerBuffer memory = allocate_pages(bytes);
    if (!memory) {
        return nullptr;
    }
    char *pages = (char *)memory->context;
    prefer_large_pages(pages, bytes);
    touch(pages, bytes);
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device, &free, &total); // makes the device's context that of this thread
    if (!cuda().pin(pages, bytes)) {
        return nullptr;
    }
    memory->iface.free_buffer = [](ggml_backend_buffer_t b) {
        cuda().unpin(b->context);
        release_addresses((char *)b->context, b->size);
    };
    return memory;
}

InnerBuffer allocate_pinned(ggml_backend_dev_t device, size_t bytes) {
    const bool cuda_device = strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "CUDA") == 0;
    if (InnerBuffer memory = cuda_device && bytes >= kLeastOfPages ? pinned_pages(device, bytes) : nullptr) {
        return memory;
    }
    InnerBuffer memory = allocate_of_host_type(device, bytes);
    if (memory) {
        ggml_backend_buffer_clear(memory.get(), 0);
    }
    return memory;
}

} // namespace fsd
