// Tests of the Vulkan layer, between this program as Vulkan's loader and this program as the next layer.
#include "check.h"
#include "vulkan_layer.h"

#include <string>

using namespace fsd::vulkan;

namespace {

// What the next layer saw.
struct {
    std::vector<std::string> calls;
    const DedicatedAllocation *dedicated = nullptr;
    DedicatedAllocation copy = {};
    const void *rest = nullptr; // of the chain, behind what the layer added
    Result refuse = 0;
    int asked = 0, waited = 0;                 // how often for a semaphore
    int signalled_after = 0;                   // so many questions
    Result counter_fails = 0, wait_result = 0; // what both return
} seen;

int table; // handles point to it, as to their loader's table
int *const handle = &table;
const int *handles[] = {handle, handle};
constexpr uint64_t kBytes = 64 << 20;

Result FSD_VULKAN_CALL create_instance(const AnyInfo *, const void *, Handle *instance) {
    seen.calls.push_back("create instance");
    *instance = (Handle)&handles[0];
    return 0;
}

Result FSD_VULKAN_CALL create_device(Handle, const AnyInfo *, const void *, Handle *device) {
    seen.calls.push_back("create device");
    *device = (Handle)&handles[1];
    return 0;
}

void FSD_VULKAN_CALL destroy(Handle, const void *) { seen.calls.push_back("destroy"); }

Result FSD_VULKAN_CALL create_buffer(Handle, const AnyInfo *, const void *, ObjectHandle *buffer) {
    *buffer = 7;
    return 0;
}

void FSD_VULKAN_CALL requirements(Handle, ObjectHandle buffer, MemoryRequirements *needed) {
    CHECK(buffer == 7);
    *needed = {kBytes, 256, 1};
}

Result FSD_VULKAN_CALL allocate(Handle, const AllocateInfo *info, const void *, ObjectHandle *memory) {
    const auto *first = (const AnyInfo *)info->next;
    seen.dedicated = nullptr;
    seen.rest = first;
    if (first && first->type == kDedicatedAllocation) {
        seen.copy = *(const DedicatedAllocation *)first;
        seen.dedicated = &seen.copy;
        seen.rest = first->next;
    }
    *memory = 9;
    return seen.refuse;
}

Result FSD_VULKAN_CALL counter(Handle, ObjectHandle semaphore, uint64_t *value) {
    CHECK(semaphore == 11 || semaphore == 12);
    *value = ++seen.asked > seen.signalled_after ? 5 : 4;
    return seen.counter_fails;
}

Result FSD_VULKAN_CALL wait(Handle, const WaitInfo *, uint64_t) {
    seen.waited++;
    return seen.wait_result;
}

void FSD_VULKAN_CALL other() {}

Function FSD_VULKAN_CALL proc(Handle, const char *name) {
    const std::string n = name;
    return n == "vkCreateInstance"                ? (Function)create_instance
           : n == "vkCreateDevice"                ? (Function)create_device
           : n.rfind("vkDestroy", 0) == 0         ? (Function)destroy
           : n == "vkCreateBuffer"                ? (Function)create_buffer
           : n == "vkGetBufferMemoryRequirements" ? (Function)requirements
           : n == "vkAllocateMemory"              ? (Function)allocate
           : n == "vkWaitSemaphores"              ? (Function)wait
           : n == "vkGetSemaphoreCounterValue"    ? (Function)counter
                                                  : other;
}

// A device that was made through the layer.
struct Through {
    Through() {
        interface.version = 2;
        CHECK(vkNegotiateLoaderLayerInterfaceVersion(&interface) == 0 && interface.version == 2);
        Link last = {nullptr, proc, proc}, first = {&last, proc, proc};
        LoaderInfo loader = {kInstanceLoaderInfo, nullptr, 0, &first};
        const AnyInfo info = {1, &loader};
        const auto create = (CreateInstance)interface.instance_proc(nullptr, "vkCreateInstance");
        CHECK(create(&info, nullptr, &instance) == 0 && loader.links == &last);
        LoaderInfo device_loader = {kDeviceLoaderInfo, nullptr, 0, &first};
        const AnyInfo device_info = {3, &device_loader};
        const auto create_device = (CreateDevice)interface.instance_proc(instance, "vkCreateDevice");
        CHECK(create_device((Handle)&handles[0], &device_info, nullptr, &device) == 0);
        CHECK(device_loader.links == &last);
    }

    template <typename F> F of_device(const char *name) { return (F)interface.device_proc(device, name); }

    void make_buffer() {
        ObjectHandle buffer = 0;
        CHECK(of_device<CreateBuffer>("vkCreateBuffer")(device, nullptr, nullptr, &buffer) == 0 && buffer == 7);
    }
    Result allocate_memory(uint64_t bytes, const void *chain) {
        const AllocateInfo info = {5, chain, bytes, 1};
        ObjectHandle memory = 0;
        return of_device<AllocateMemory>("vkAllocateMemory")(device, &info, nullptr, &memory);
    }

    Result wait_for(std::vector<ObjectHandle> semaphores, uint64_t value, uint64_t timeout_ns = UINT64_MAX) {
        const std::vector<uint64_t> values(semaphores.size(), value);
        const WaitInfo info = {1000207004, nullptr, 0, (uint32_t)semaphores.size(), semaphores.data(), values.data()};
        seen.asked = seen.waited = 0;
        return of_device<WaitSemaphores>("vkWaitSemaphores")(device, &info, timeout_ns);
    }

    LayerInterface interface = {};
    Handle instance = nullptr, device = nullptr;
};

} // namespace

TEST(memory_for_the_latest_buffer_is_dedicated_to_it) {
    Through vulkan;
    const AnyInfo flags = {1000060000, nullptr};
    vulkan.make_buffer();
    CHECK(vulkan.allocate_memory(kBytes, &flags) == 0);
    CHECK(seen.dedicated && seen.dedicated->buffer == 7 && seen.dedicated->image == 0);
    CHECK(seen.rest == &flags);
    CHECK(vulkan.allocate_memory(kBytes, &flags) == 0); // there is no buffer for it
    CHECK(!seen.dedicated && seen.rest == &flags);
}

// ggml tries another type of memory then.
TEST(after_a_refusal_the_next_attempt_is_dedicated_too) {
    Through vulkan;
    vulkan.make_buffer();
    seen.refuse = -2;
    CHECK(vulkan.allocate_memory(kBytes, nullptr) == -2 && seen.dedicated);
    seen.refuse = 0;
    CHECK(vulkan.allocate_memory(kBytes, nullptr) == 0 && seen.dedicated);
}

TEST(other_memory_is_not_dedicated) {
    Through vulkan;
    const AnyInfo import = {kImportHostPointer, nullptr}, flags = {1000060000, &import};
    vulkan.make_buffer();
    CHECK(vulkan.allocate_memory(kBytes, &flags) == 0 && !seen.dedicated && seen.rest == &flags);
    vulkan.make_buffer();
    CHECK(vulkan.allocate_memory(2 * kBytes, nullptr) == 0 && !seen.dedicated); // for several buffers
    vulkan.make_buffer();
    CHECK(vulkan.allocate_memory(kLeastDedicated - 1, nullptr) == 0 && !seen.dedicated);
    const DedicatedAllocation asked = {kDedicatedAllocation, nullptr, 0, 5};
    vulkan.make_buffer();
    CHECK(vulkan.allocate_memory(kBytes, &asked) == 0 && seen.dedicated && seen.dedicated->buffer == 5);
}

TEST(a_semaphore_that_is_signalled_soon_is_waited_for_without_sleep) {
    Through vulkan;
    seen.signalled_after = 3;
    seen.waited = 1;
    for (int i = 0; i < 100 && seen.waited > 0; i++) { // again if this thread had no core for a millisecond
        CHECK(vulkan.wait_for({11}, 5) == 0);
    }
    CHECK(seen.asked == 4 && seen.waited == 0);
    seen.signalled_after = 0;
    CHECK(vulkan.wait_for({11}, 4) == 0 && seen.asked == 1 && seen.waited == 0);
}

TEST(other_waits_are_those_of_the_next_layer) {
    Through vulkan;
    constexpr Result kTimeout = 2, kDeviceLost = -4;
    seen.signalled_after = 1 << 30;
    seen.wait_result = kTimeout;
    CHECK(vulkan.wait_for({11}, 5) == kTimeout && seen.waited == 1);                       // not signalled soon
    CHECK(vulkan.wait_for({11}, 5, 0) == kTimeout && seen.asked == 1 && seen.waited == 1); // the caller waits for less
    CHECK(vulkan.wait_for({11, 12}, 5) == kTimeout && seen.asked == 0 && seen.waited == 1);
    seen.counter_fails = seen.wait_result = kDeviceLost;
    CHECK(vulkan.wait_for({11}, 5) == kDeviceLost && seen.asked == 1 && seen.waited == 1);
    seen.counter_fails = seen.wait_result = 0;
}

TEST(other_functions_are_those_of_the_next_layer) {
    Through vulkan;
    CHECK(vulkan.interface.device_proc(vulkan.device, "vkQueueSubmit") == other);
    CHECK(vulkan.interface.instance_proc(vulkan.instance, "vkEnumeratePhysicalDevices") == other);
    CHECK(vulkan.interface.instance_proc(nullptr, "vkEnumerateInstanceVersion") == nullptr);
    seen.calls.clear();
    vulkan.of_device<Destroy>("vkDestroyDevice")(vulkan.device, nullptr);
    ((Destroy)vulkan.interface.instance_proc(vulkan.instance, "vkDestroyInstance"))(vulkan.instance, nullptr);
    CHECK(seen.calls == std::vector<std::string>({"destroy", "destroy"}));
}

TEST(a_loader_that_passes_no_chain_is_refused) {
    LayerInterface interface = {};
    interface.version = 1;
    CHECK(vkNegotiateLoaderLayerInterfaceVersion(&interface) == kInitializationFailed);
    interface.version = 3;
    CHECK(vkNegotiateLoaderLayerInterfaceVersion(&interface) == 0);
    const AnyInfo info = {1, nullptr};
    Handle instance = nullptr;
    const auto create = (CreateInstance)interface.instance_proc(nullptr, "vkCreateInstance");
    CHECK(create(&info, nullptr, &instance) == kInitializationFailed);
}

TEST_MAIN()
