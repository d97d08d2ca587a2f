/* Run at configure time: the linked ggml's version and commit, as a CMake list. */
#include "ggml.h"

#include <stdio.h>

int main(void) {
    printf("%s;%s", ggml_version(), ggml_commit());
    return 0;
}
