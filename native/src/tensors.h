// Small helpers on ggml tensors.
#pragma once

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"

namespace fsd {

// The tensor that owns the memory of a view; the tensor itself if it is not a view.
inline const ggml_tensor *root_of(const ggml_tensor *t) { return t->view_src ? t->view_src : t; }

// Whether computing a node does nothing.
inline bool is_noop(const ggml_tensor *t) {
    return ggml_op_is_empty(t->op) || ggml_is_empty(t) || (t->flags & GGML_TENSOR_FLAG_COMPUTE) == 0;
}

// A tensor of `bytes` raw bytes at an address of an inner buffer, for ggml's copy functions.
inline ggml_tensor raw_tensor(ggml_backend_buffer_t buffer, void *data, size_t bytes) {
    ggml_tensor t = {};
    t.type = GGML_TYPE_I8;
    t.ne[0] = (int64_t)bytes;
    t.ne[1] = t.ne[2] = t.ne[3] = 1;
    t.nb[0] = 1;
    t.nb[1] = t.nb[2] = t.nb[3] = bytes;
    t.buffer = buffer;
    t.data = data;
    return t;
}

} // namespace fsd
