#include "program.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsd {

// Calls `use` with the nodes of a graph and with what they read that is no node, until it returns false. Returns whether it
// never did.
template <typename F> static bool each_tensor(const ggml_cgraph *graph, F use) {
    const auto is_leaf = [](const ggml_tensor *t) { return t && t->op == GGML_OP_NONE; };
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (!use(node)) {
            return false;
        }
        for (const ggml_tensor *src : node->src) {
            if (is_leaf(src) && !use(src)) {
                return false;
            }
        }
    }
    return true;
}

void GraphImage::take(const ggml_cgraph *graph) {
    at_.clear();
    tensors_.clear();
    if (graph->uid == 0) {
        return;
    }
    at_.reserve(2 * (size_t)graph->n_nodes);
    tensors_.reserve(2 * (size_t)graph->n_nodes);
    each_tensor(graph, [this](const ggml_tensor *t) {
        at_.push_back(t);
        tensors_.push_back(*t);
        return true;
    });
}

bool GraphImage::is_of(const ggml_cgraph *graph) const {
    size_t i = 0;
    const bool same = each_tensor(graph, [&](const ggml_tensor *t) {
        const bool known = i < at_.size() && at_[i] == t && memcmp(&tensors_[i], t, sizeof *t) == 0;
        i++;
        return known;
    });
    return same && i == at_.size();
}

Program *ProgramCache::find(const ProgramKey &key, const ggml_cgraph *graph) {
    clock_++;
    if (key.uid == 0) {
        return nullptr;
    }
    const auto find = [&](auto is_it) {
        return std::find_if(programs_.begin(), programs_.end(),
                            [&](const auto &p) { return p->key.same_but_for_id(key) && is_it(*p); });
    };
    auto found = find([&](const Program &p) { return p.key.uid == key.uid; });
    if (found == programs_.end()) {
        found = find([&](const Program &p) { return p.memory.image.is_of(graph); });
    }
    if (found == programs_.end()) {
        return nullptr;
    }
    (*found)->key.uid = key.uid;
    (*found)->used_at = clock_;
    return found->get();
}

ProgramMemory ProgramCache::make_room(uint64_t generation) {
    const auto worth = [&](const Program &p) {
        const bool may_be_found = p.key.uid != 0 && p.key.generation == generation;
        return std::make_pair(may_be_found, p.used_at);
    };
    if (programs_.size() < kMaxPrograms) {
        return {};
    }
    const auto least = std::min_element(programs_.begin(), programs_.end(),
                                        [&](const auto &a, const auto &b) { return worth(*a) < worth(*b); });
    ProgramMemory memory = std::move((*least)->memory);
    programs_.erase(least);
    return memory;
}

Program *ProgramCache::add(std::unique_ptr<Program> program) {
    program->used_at = clock_;
    programs_.push_back(std::move(program));
    return programs_.back().get();
}

} // namespace fsd
