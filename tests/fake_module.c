// A GPU module without a GPU, for tests. NAME is its backend's name. What else is defined says what is wrong with it.
#include "ggml-backend-impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(BUILT_FROM) // else the ggml that runs
const char *frameshard_built_from(void) { return BUILT_FROM; }
#elif !defined(NO_EXPORTS)
const char *frameshard_built_from(void) {
    static char text[128];
    snprintf(text, sizeof(text), "%s %s", ggml_version(), ggml_commit());
    return text;
}
#endif

static const char *backend_name(ggml_backend_t backend) {
    (void)backend;
    return NAME;
}
static void backend_free(ggml_backend_t backend) { (void)backend; }
static const char *device_name(ggml_backend_dev_t device) {
    (void)device;
    return NAME "0";
}
static const char *device_description(ggml_backend_dev_t device) {
    (void)device;
    return "a GPU for tests";
}
static void device_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    (void)device;
    *free = (size_t)8 << 20;
    *total = (size_t)16 << 20;
}
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device) {
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}
static ggml_backend_t device_init(ggml_backend_dev_t device, const char *params) {
    static struct ggml_backend backend = {.iface = {.get_name = backend_name, .free = backend_free}};
    (void)params;
    backend.device = device;
#ifdef DOES_NOT_OPEN
    return NULL;
#else
    return &backend;
#endif
}

static const char *reg_name(ggml_backend_reg_t reg) {
    (void)reg;
    return NAME;
}
static size_t reg_count(ggml_backend_reg_t reg) {
    (void)reg;
#ifdef NO_DEVICE
    return 0;
#else
    return 1;
#endif
}
static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    static struct ggml_backend_device device = {.iface = {.get_name = device_name,
                                                          .get_description = device_description,
                                                          .get_memory = device_memory,
                                                          .get_type = device_type,
                                                          .init_backend = device_init}};
    (void)index;
    device.reg = reg;
    return &device;
}

#ifndef NO_EXPORTS
ggml_backend_reg_t ggml_backend_init(void) {
    static struct ggml_backend_reg reg = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {.get_name = reg_name, .get_device_count = reg_count, .get_device = reg_device}};
    puts("a driver's line");
    fputs("the driver's own words\n", stderr);
#if defined(ASKED) // a file that is made when the driver is asked
    fclose(fopen(ASKED, "w"));
#endif
#if defined(RETURNS_NULL)
    return NULL;
#elif defined(ABORTS)
    abort();
#elif defined(EXITS)
    _exit(0);
#elif defined(HANGS)
    sleep(1000);
#endif
    return &reg;
}
#endif
