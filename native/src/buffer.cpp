#include "buffer.h"

#include <algorithm>

namespace fsd {

KvTensor *cached(const ggml_tensor *t) {
    const ggml_tensor *root = root_of(t);
    Buffer *b = buffer_of(root);
    return b && b->kv ? b->kv->at((size_t)((const char *)root->data - b->base)) : nullptr;
}

std::vector<GraphMemory *> graph_memories(const ggml_cgraph *graph) {
    std::vector<GraphMemory *> found;
    const auto add = [&](const ggml_tensor *t) {
        const Buffer *b = t ? buffer_of(root_of(t)) : nullptr;
        if (b && b->graph && std::find(found.begin(), found.end(), b->graph.get()) == found.end()) {
            found.push_back(b->graph.get());
        }
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        add(graph->nodes[i]);
        std::for_each_n(graph->nodes[i]->src, GGML_MAX_SRC, add);
    }
    return found;
}

} // namespace fsd
