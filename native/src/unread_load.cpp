#include "unread_load.h"

#include "ggml-backend-impl.h"

#include <cstring>

namespace fsd {

using Procedures = void *(*)(ggml_backend_reg_t, const char *);

static Procedures known = nullptr; // the registry's own, while a load is expected

static bool several_nodes() { return true; }

static void *procedure(ggml_backend_reg_t registry, const char *name) {
    return strcmp(name, "ggml_backend_cpu_is_numa") == 0 ? (void *)several_nodes : known(registry, name);
}

void expect_unread_load(bool expected) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu || expected == (known != nullptr)) {
        return;
    }
    Procedures &asked = ggml_backend_dev_backend_reg(cpu)->iface.get_proc_address;
    if (expected) {
        known = asked;
        asked = procedure;
    } else {
        asked = known;
        known = nullptr;
    }
}

} // namespace fsd
