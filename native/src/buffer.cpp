#include "buffer.h"

namespace fsd {

KvTensor *cached(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    Buffer *b = buffer_of(root);
    return b && b->kv ? b->kv->at((size_t)((const char *)root->data - b->base)) : nullptr;
}

} // namespace fsd
