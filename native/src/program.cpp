#include "program.h"

#include <algorithm>

namespace fsd {

Program *ProgramCache::find(const ProgramKey &key) {
    clock_++;
    for (auto &p : programs_) {
        if (key.uid != 0 && p->key == key) {
            p->used_at = clock_;
            return p.get();
        }
    }
    return nullptr;
}

void ProgramCache::make_room(uint64_t generation) {
    while (programs_.size() >= kMaxPrograms) {
        programs_.erase(std::min_element(programs_.begin(), programs_.end(), [&](const auto &a, const auto &b) {
            return std::make_pair(a->key.generation == generation, a->used_at) <
                   std::make_pair(b->key.generation == generation, b->used_at);
        }));
    }
}

Program *ProgramCache::add(std::unique_ptr<Program> program) {
    program->used_at = clock_;
    programs_.push_back(std::move(program));
    return programs_.back().get();
}

ggml_tensor *GraphKeys::key(bool one_token, size_t index) {
    auto &keys = keys_[one_token];
    while (keys.size() <= index) {
        keys.push_back(std::make_unique<ggml_tensor>());
        *keys.back() = {};
        std::fill_n(keys.back()->ne, GGML_MAX_DIMS, 1);
    }
    return keys[index].get();
}

} // namespace fsd
