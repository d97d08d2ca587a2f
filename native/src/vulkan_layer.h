// A Vulkan layer below ggml-vulkan, for dedicated memory and for waits that wake at once (vulkan_layer.cpp). Here are the parts
// of Vulkan's interface that it uses, with the names and layouts of vulkan_core.h and vk_layer.h but without their prefixes, so
// that the library builds where Vulkan's headers are missing.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define FSD_VULKAN_CALL __stdcall
#else
#define FSD_VULKAN_CALL
#endif

namespace fsd::vulkan {

using Result = int32_t;
using Handle = void *;         // of an instance, a physical device or a device
using ObjectHandle = uint64_t; // of a buffer or memory
using Structure = int32_t;
using Function = void(FSD_VULKAN_CALL *)();

constexpr Result kInitializationFailed = -3;
constexpr Structure kInstanceLoaderInfo = 47, kDeviceLoaderInfo = 48;
constexpr Structure kImportHostPointer = 1000178000, kDedicatedAllocation = 1000127001;

struct AnyInfo {
    Structure type;
    const void *next;
};

struct DedicatedAllocation {
    Structure type;
    const void *next;
    ObjectHandle image, buffer;
};

struct AllocateInfo {
    Structure type;
    const void *next;
    uint64_t bytes;
    uint32_t memory_type;
};

struct MemoryRequirements {
    uint64_t bytes, alignment;
    uint32_t memory_types;
};

struct WaitInfo {
    Structure type;
    const void *next;
    uint32_t flags, n_semaphores;
    const ObjectHandle *semaphores;
    const uint64_t *values;
};

using GetProcAddr = Function(FSD_VULKAN_CALL *)(Handle, const char *);
using CreateInstance = Result(FSD_VULKAN_CALL *)(const AnyInfo *, const void *allocator, Handle *);
using CreateDevice = Result(FSD_VULKAN_CALL *)(Handle physical, const AnyInfo *, const void *allocator, Handle *);
using Destroy = void(FSD_VULKAN_CALL *)(Handle, const void *allocator);
using CreateBuffer = Result(FSD_VULKAN_CALL *)(Handle, const AnyInfo *, const void *allocator, ObjectHandle *);
using GetRequirements = void(FSD_VULKAN_CALL *)(Handle, ObjectHandle buffer, MemoryRequirements *);
using AllocateMemory = Result(FSD_VULKAN_CALL *)(Handle, const AllocateInfo *, const void *allocator, ObjectHandle *);
using WaitSemaphores = Result(FSD_VULKAN_CALL *)(Handle, const WaitInfo *, uint64_t timeout_ns);
using GetCounter = Result(FSD_VULKAN_CALL *)(Handle, ObjectHandle semaphore, uint64_t *value);

// The next layers, in a chain that the loader passes to both functions named Create.
struct Link {
    Link *next;
    GetProcAddr instance_proc;
    GetProcAddr second_proc; // of physical devices for an instance, of devices for a device
};

struct LoaderInfo {
    Structure type;
    const void *next;
    int32_t function; // 0: `links` is valid
    Link *links;
};

struct LayerInterface {
    int32_t type;
    void *next;
    uint32_t version;
    GetProcAddr instance_proc, device_proc, physical_device_proc;
};

// Smaller buffers share memory with others, as the driver likes.
constexpr uint64_t kLeastDedicated = 2 << 20;
// A thread asks for so long before it sleeps until a semaphore is signalled.
constexpr uint64_t kAskNs = 1'000'000;

} // namespace fsd::vulkan

extern "C" fsd::vulkan::Result FSD_VULKAN_CALL
vkNegotiateLoaderLayerInterfaceVersion(fsd::vulkan::LayerInterface *interface);
