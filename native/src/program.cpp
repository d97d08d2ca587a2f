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

} // namespace fsd
