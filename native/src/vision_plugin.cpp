// The vision tower's device as ggml sees it: its backend and device. Its buffers are in tower.cpp.
#include "device.h"
#include "plugin.h"
#include "tower.h"

namespace fsd {

static const char *backend_name(ggml_backend_t) { return "FRAMESHARD_VISION"; }

static void backend_free(ggml_backend_t backend) { delete backend; }

static ggml_status backend_compute(ggml_backend_t, ggml_cgraph *graph) { return encode_image(graph); }

static ggml_backend_t dev_init(ggml_backend_dev_t dev, const char *) {
    if (!device().configured.load()) {
        GGML_LOG_ERROR("frameshard: call fsd_configure before the vision model is loaded\n");
        return nullptr;
    }
    static ggml_guid guid = {0x66, 0x72, 0x61, 0x6d, 0x65, 0x73, 0x68, 0x61,
                             0x72, 0x64, 0x2d, 0x76, 0x69, 0x73, 0x30, 0x31};
    ggml_backend_i iface = {};
    iface.get_name = backend_name;
    iface.free = backend_free;
    iface.graph_compute = backend_compute;
    return new ggml_backend{&guid, iface, dev, nullptr};
}

static const char *dev_name(ggml_backend_dev_t) { return "FRAMESHARD_VISION"; }

static const char *dev_description(ggml_backend_dev_t) { return "frameshard, for the vision tower"; }

static void dev_memory(ggml_backend_dev_t, size_t *free, size_t *total) {
    ggml_backend_dev_memory(plugin_device(), free, total);
}

static enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

static void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props *props) {
    *props = {};
    props->name = dev_name(dev);
    props->description = dev_description(dev);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    dev_memory(dev, &props->memory_free, &props->memory_total);
}

static ggml_backend_buffer_type_t dev_buffer_type(ggml_backend_dev_t) { return tower_buffer_type(); }

static bool dev_supports_op(ggml_backend_dev_t, const ggml_tensor *op) {
    return ggml_backend_dev_supports_op(plugin_device(), op);
}

static bool dev_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == tower_buffer_type();
}

ggml_backend_dev_t vision_device() {
    static ggml_backend_device dev = [] {
        ggml_backend_device x = {};
        x.iface.get_name = dev_name;
        x.iface.get_description = dev_description;
        x.iface.get_memory = dev_memory;
        x.iface.get_type = dev_type;
        x.iface.get_props = dev_props;
        x.iface.init_backend = dev_init;
        x.iface.get_buffer_type = dev_buffer_type;
        x.iface.supports_op = dev_supports_op;
        x.iface.supports_buft = dev_supports_buft;
        x.reg = registry();
        return x;
    }();
    return &dev;
}

} // namespace fsd
