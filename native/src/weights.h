// The weights of one model: where they are in host memory, their shards, and how they are cut.
#pragma once

#include "host_paths.h"
#include "layout.h"
#include "tensors.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace fsd {

struct Weight {
    std::string name;
    ggml_tensor shape; // a copy of the model's tensor, for type, ne and nb
    const char *host = nullptr;
    size_t bytes = 0;
    uint32_t shard = 0;
    WeightPlace place; // in the layout
};

struct LadderPlace {
    uint32_t shard = 0;
    size_t position = 0; // in the whole ladder
};

struct Weights {
    void add(const ggml_tensor *t); // tied embeddings are two tensors on the same bytes, and one weight
    void clear();
    // The weight that a tensor is, or is a view of; null if it is none.
    const Weight *of(const ggml_tensor *t) const;
    // Orders the weights by the ladder, those that it does not name last, and cuts them. False with a reason when the
    // device wants more memory for a tensor than the layout has for it.
    bool lay_out(ggml_backend_buffer_type_t buft, std::string &why);

    // Experts are the weights of more than one matrix.
    bool has_experts() const {
        return std::any_of(all.begin(), all.end(), [](const Weight &w) { return w.shape.ne[2] > 1; });
    }

    std::vector<Weight> all;
    std::map<std::string, LadderPlace> ladder; // by tensor name, as fsd_set_shards gave it
    uint32_t n_named_shards = 0;               // of the ladder
    uint32_t n_shards = 0;                     // with the shard of what the ladder does not name
    HostPath path = HostPath::direct;          // how they are copied to the device; of several files the slowest
    LayoutSizes sizes;                         // asked for
    Layout layout;

  private:
    std::unordered_map<const void *, int> index_; // by host address
};

} // namespace fsd
