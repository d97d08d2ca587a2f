// Why a layer: it changes two things that ggml-vulkan does not ask the driver for. The engine asks Vulkan's loader for the
// layer, in its own process only (sdk/frameshard/ggml.py).
//
// Dedicated memory: slabs are given back at once when the host takes VRAM, and NVIDIA's driver frees and allocates memory 3 to
// 13 times as fast if the memory is dedicated to one buffer. It took 14 to 24 ms for 1 GiB otherwise (H100, driver 580.159).
// Each of ggml-vulkan's buffers has memory of its own, so nothing else changes.
//
// Waits that wake at once: a thread that sleeps until the driver wakes it loses tens of microseconds, and in each layer with
// experts the CPU waits for the router. So the first millisecond of a wait is spent asking.
#include "vulkan_layer.h"

#include "frameshard_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace fsd::vulkan {

namespace {

struct DeviceCalls {
    GetProcAddr proc = nullptr;
    CreateBuffer create_buffer = nullptr;
    GetRequirements requirements = nullptr;
    AllocateMemory allocate = nullptr;
    Destroy destroy = nullptr;
    WaitSemaphores wait = nullptr;
    GetCounter counter = nullptr;
};

// The next layer's functions, for the handles of one kind. The first word of a handle points to its loader's table.
template <typename T> class Calls {
  public:
    void set(Handle handle, const T &value) {
        std::lock_guard<std::mutex> lock(mutex_);
        values_[key(handle)] = value;
    }
    T of(Handle handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = values_.find(key(handle));
        return found == values_.end() ? T() : found->second;
    }
    void forget(Handle handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        values_.erase(key(handle));
    }

  private:
    static void *key(Handle handle) { return *(void **)handle; }

    std::mutex mutex_;
    std::map<void *, T> values_;
};

// Never destroyed: a driver may end after the statics of this library.
Calls<GetProcAddr> &instances() {
    static auto *all = new Calls<GetProcAddr>;
    return *all;
}

Calls<DeviceCalls> &devices() {
    static auto *all = new Calls<DeviceCalls>;
    return *all;
}

// The latest buffer of the calling thread, until memory was allocated for it.
thread_local struct {
    Handle device;
    ObjectHandle buffer;
} latest = {};

// The link to the next layer; the chain moves on to the one behind it. Null: the loader has not passed any.
const Link *next_link(const AnyInfo *info, Structure type) {
    for (const AnyInfo *at = (const AnyInfo *)info->next; at; at = (const AnyInfo *)at->next) {
        auto *loader = (LoaderInfo *)at;
        if (at->type == type && loader->function == 0 && loader->links) {
            const Link *link = loader->links;
            loader->links = link->next;
            return link;
        }
    }
    return nullptr;
}

template <typename F> F find(GetProcAddr proc, Handle handle, const char *name) { return (F)proc(handle, name); }

Result FSD_VULKAN_CALL create_instance(const AnyInfo *info, const void *allocator, Handle *instance) {
    const Link *link = next_link(info, kInstanceLoaderInfo);
    const auto create = link ? find<CreateInstance>(link->instance_proc, nullptr, "vkCreateInstance") : nullptr;
    if (!create) {
        return kInitializationFailed;
    }
    const GetProcAddr proc = link->instance_proc;
    const Result result = create(info, allocator, instance);
    if (result == 0) {
        instances().set(*instance, proc);
    }
    return result;
}

void FSD_VULKAN_CALL destroy_instance(Handle instance, const void *allocator) {
    if (!instance) {
        return;
    }
    const auto destroy = find<Destroy>(instances().of(instance), instance, "vkDestroyInstance");
    instances().forget(instance);
    destroy(instance, allocator);
}

Result FSD_VULKAN_CALL create_device(Handle physical, const AnyInfo *info, const void *allocator, Handle *device) {
    const Link *link = next_link(info, kDeviceLoaderInfo);
    const auto create = link ? find<CreateDevice>(link->instance_proc, nullptr, "vkCreateDevice") : nullptr;
    if (!create) {
        return kInitializationFailed;
    }
    const GetProcAddr proc = link->second_proc;
    const Result result = create(physical, info, allocator, device);
    if (result == 0) {
        devices().set(*device, {proc, find<CreateBuffer>(proc, *device, "vkCreateBuffer"),
                                find<GetRequirements>(proc, *device, "vkGetBufferMemoryRequirements"),
                                find<AllocateMemory>(proc, *device, "vkAllocateMemory"),
                                find<Destroy>(proc, *device, "vkDestroyDevice"),
                                find<WaitSemaphores>(proc, *device, "vkWaitSemaphores"),
                                find<GetCounter>(proc, *device, "vkGetSemaphoreCounterValue")});
    }
    return result;
}

void FSD_VULKAN_CALL destroy_device(Handle device, const void *allocator) {
    if (!device) {
        return;
    }
    const Destroy destroy = devices().of(device).destroy;
    devices().forget(device);
    destroy(device, allocator);
}

Result FSD_VULKAN_CALL create_buffer(Handle device, const AnyInfo *info, const void *allocator, ObjectHandle *buffer) {
    const Result result = devices().of(device).create_buffer(device, info, allocator, buffer);
    latest = {device, result == 0 ? *buffer : 0};
    return result;
}

// Whether memory is for the latest buffer alone, and may be dedicated to it.
bool is_for_latest(const DeviceCalls &next, Handle device, const AllocateInfo &info) {
    if (latest.buffer == 0 || latest.device != device || info.bytes < kLeastDedicated) {
        return false;
    }
    for (const AnyInfo *at = (const AnyInfo *)info.next; at; at = (const AnyInfo *)at->next) {
        if (at->type == kImportHostPointer || at->type == kDedicatedAllocation) {
            return false;
        }
    }
    MemoryRequirements needed = {};
    next.requirements(device, latest.buffer, &needed);
    return needed.bytes == info.bytes;
}

Result FSD_VULKAN_CALL allocate_memory(Handle device, const AllocateInfo *info, const void *allocator,
                                       ObjectHandle *memory) {
    const DeviceCalls next = devices().of(device);
    const bool dedicated = is_for_latest(next, device, *info);
    const DedicatedAllocation to = {kDedicatedAllocation, info->next, 0, latest.buffer};
    AllocateInfo wanted = *info;
    wanted.next = dedicated ? &to : info->next;
    const Result result = next.allocate(device, &wanted, allocator, memory);
    if (result == 0) {
        latest = {};
    }
    return result;
}

// Asks for a while before it sleeps. What fails is left to the next layer to report.
Result FSD_VULKAN_CALL wait_semaphores(Handle device, const WaitInfo *info, uint64_t timeout_ns) {
    const DeviceCalls next = devices().of(device);
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::min(kAskNs, timeout_ns));
    uint64_t reached = 0;
    while (info->n_semaphores == 1 && next.counter(device, info->semaphores[0], &reached) == 0) {
        if (reached >= info->values[0]) {
            return 0;
        }
        if (std::chrono::steady_clock::now() >= end) {
            break;
        }
        std::this_thread::yield();
    }
    return next.wait(device, info, timeout_ns);
}

struct Replaced {
    const char *name;
    Function function;
    bool of_devices;
};

// Ours for a name; null: the layer has none.
Function ours(const char *name, bool of_devices);

Function FSD_VULKAN_CALL device_proc(Handle device, const char *name) {
    const Function function = ours(name, true);
    return function ? function : devices().of(device).proc(device, name);
}

Function FSD_VULKAN_CALL instance_proc(Handle instance, const char *name) {
    const Function function = ours(name, false);
    if (function || !instance) {
        return function;
    }
    return instances().of(instance)(instance, name);
}

Function ours(const char *name, bool of_devices) {
    static const Replaced replaced[] = {
        {"vkGetInstanceProcAddr", (Function)instance_proc, false},
        {"vkCreateInstance", (Function)create_instance, false},
        {"vkDestroyInstance", (Function)destroy_instance, false},
        {"vkCreateDevice", (Function)create_device, false},
        {"vkGetDeviceProcAddr", (Function)device_proc, true},
        {"vkDestroyDevice", (Function)destroy_device, true},
        {"vkCreateBuffer", (Function)create_buffer, true},
        {"vkAllocateMemory", (Function)allocate_memory, true},
        {"vkWaitSemaphores", (Function)wait_semaphores, true},
    };
    for (const Replaced &each : replaced) {
        if (strcmp(each.name, name) == 0 && (each.of_devices || !of_devices)) {
            return each.function;
        }
    }
    return nullptr;
}

} // namespace

} // namespace fsd::vulkan

extern "C" FSD_API fsd::vulkan::Result FSD_VULKAN_CALL
vkNegotiateLoaderLayerInterfaceVersion(fsd::vulkan::LayerInterface *asked) {
    constexpr uint32_t kVersion = 2;
    if (!asked || asked->version < kVersion) {
        return fsd::vulkan::kInitializationFailed;
    }
    asked->version = kVersion;
    asked->instance_proc = fsd::vulkan::instance_proc;
    asked->device_proc = fsd::vulkan::device_proc;
    asked->physical_device_proc = nullptr;
    return 0;
}
