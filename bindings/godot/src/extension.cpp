/* The entry point that frameshard.gdextension names. */
#include <cstdio>

#include "npc.h"

namespace {

void initialize(void *, GDExtensionInitializationLevel level) {
    if (level == GDEXTENSION_INITIALIZATION_SCENE) {
        Sidecar::add();
        Npc::add();
    }
}

void deinitialize(void *, GDExtensionInitializationLevel level) {
    if (level == GDEXTENSION_INITIALIZATION_SCENE) {
        Npc::remove();
        Sidecar::remove();
    }
}

} // namespace

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

EXPORT GDExtensionBool frameshard_godot_init(GDExtensionInterfaceGetProcAddress get, GDExtensionClassLibraryPtr library,
                                             GDExtensionInitialization *made) {
    if (!engine::load(get, library)) {
        std::fputs("frameshard needs Godot 4.3 or newer\n", stderr);
        return 0;
    }
    made->minimum_initialization_level = GDEXTENSION_INITIALIZATION_SCENE;
    made->userdata = nullptr;
    made->initialize = initialize;
    made->deinitialize = deinitialize;
    return 1;
}
