// The version and the commit of the ggml that a GPU module was built from, as ggml_version() and ggml_commit() give them.
#include "ggml-version.h"

#if defined(_WIN32)
__declspec(dllexport)
#else
__attribute__((visibility("default")))
#endif
const char *frameshard_built_from(void) {
    return GGML_VERSION " " GGML_COMMIT;
}
