#include "kv_backup.h"

#include <algorithm>
#include <utility>

namespace fsd {

// So many unsaved cells are copied: fewer take a shrink less than a millisecond, and a token should not pay for a copy.
static constexpr int64_t kWorthSaving = kCellPage;

static int64_t count_unsaved(const KvBlock &b) {
    int64_t cells = 0;
    for (const Cells &c : b.unsaved) {
        cells += c.count();
    }
    return cells;
}

void KvBackup::update(const std::vector<KvBlock *> &blocks) {
    bool held = false;
    for (KvBlock *b : blocks) {
        if (b->backup && count_unsaved(*b) >= kWorthSaving) {
            if (!std::exchange(held, true)) {
                inner_.hold_copies();
            }
            save(*b);
        }
    }
}

void KvBackup::save(KvBlock &b) {
    char *const to = (char *)ggml_backend_buffer_get_base(b.backup.get());
    for (size_t s = 0; s < b.unsaved.size(); s++) {
        const Cells cells = std::exchange(b.unsaved[s], {});
        for (const KvTensor *t : b.tensors) {
            const size_t bytes = t->row * (size_t)cells.count();
            const ggml_tensor raw = raw_tensor(b.storage.get(), t->place(b.base, (int64_t)s, cells.first), bytes);
            if (bytes > 0) {
                ggml_backend_tensor_get_async(inner_.copy, &raw, t->place(to, (int64_t)s, cells.first), 0, bytes);
            }
        }
    }
}

void KvBackup::written(KvGroup &group, size_t stream, Cells cells) {
    for (KvBlock *b : group.blocks) {
        if (stream < b->unsaved.size()) {
            b->unsaved[stream].add({cells.first, std::min(cells.end, b->cells)});
        }
    }
}

InnerBuffer KvBackup::take(KvBlock &b) {
    bytes_ -= b.bytes;
    return std::move(b.backup);
}

void KvBackup::keep(KvBlock &b, InnerBuffer memory) {
    b.backup = std::move(memory);
    bytes_ += b.bytes;
    b.unsaved.assign((size_t)b.streams, {});
    for (size_t s = 0; s < b.unsaved.size(); s++) {
        written(*b.group, s, b.group->writing[s]);
    }
}

void KvBackup::drop(KvBlock &b) {
    if (b.backup) {
        dropped_.push_back(std::move(b.backup));
    }
    b.unsaved.clear();
}

void KvBackup::free_dropped() {
    for (InnerBuffer &buffer : dropped_) {
        bytes_ -= ggml_backend_buffer_get_size(buffer.get());
    }
    dropped_.clear();
}

} // namespace fsd
