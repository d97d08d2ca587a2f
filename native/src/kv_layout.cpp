#include "kv_layout.h"

#include <map>
#include <tuple>

namespace fsd {

KvBytes kv_bytes(const std::vector<KvUse> &tensors, size_t unit_bytes) {
    struct Block {
        size_t whole = 0, used = 0;
    };
    std::map<std::tuple<uint32_t, int64_t, int64_t>, Block> blocks; // by layer, cells and streams
    for (const KvUse &t : tensors) {
        Block &b = blocks[{t.layer, t.shape.cells, t.shape.streams}];
        b.whole += kv_tensor_bytes(t.shape, t.shape.cells, t.shape.streams);
        b.used += kv_tensor_bytes(t.shape, cells_to_hold(t.used, t.shape.cells), t.shape.streams);
    }
    KvBytes sum;
    for (const auto &[key, b] : blocks) {
        const uint64_t whole = round_up(b.whole, unit_bytes);
        sum.need.least = std::max(sum.need.least, whole);
        sum.need.whole += whole;
        sum.used += round_up(b.used, unit_bytes);
    }
    return sum;
}

} // namespace fsd
