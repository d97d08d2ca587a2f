// Backups of KV blocks. Memory that held a block while VRAM had no room for it is kept when the block returns: pinning takes
// the driver a second for some GiB. Graphs write new cells at the end, and these are copied to the backup beside the next
// graphs. The block then moves to host memory again by copying only what was written since, which takes milliseconds however
// long the context is.
#pragma once

#include "kv_cache.h"

#include <atomic>

namespace fsd {

// All methods but bytes() need the caller to hold the graph mutex.
class KvBackup {
  public:
    explicit KvBackup(Inner &inner) : inner_(inner) {}

    // Queues copies of what was written since the last call, where that is much. They run after all that was queued on the
    // compute stream.
    void update(const std::vector<KvBlock *> &blocks);
    // Cells of a stream are written, or may be.
    static void written(KvGroup &group, size_t stream, Cells cells);

    // Memory for a block's cells in host memory: its backup, in which all but the unsaved cells are up to date. All copies
    // must have run.
    InnerBuffer take(KvBlock &b);
    // Memory that held the block's cells in host memory becomes its backup. All cells are up to date but those that the
    // running graph has yet to write.
    void keep(KvBlock &b, InnerBuffer memory);
    // A block has no backup from now on. All copies must have run. free_dropped() frees the memory, which takes long.
    void drop(KvBlock &b);
    void free_dropped();

    uint64_t bytes() const { return bytes_.load(); } // [any thread] of backups, and of what was dropped

  private:
    void save(KvBlock &b);

    Inner &inner_;
    std::vector<InnerBuffer> dropped_;
    std::atomic<uint64_t> bytes_{0};
};

} // namespace fsd
