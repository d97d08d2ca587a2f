#include "layout.h"

namespace fsd {

static constexpr size_t MiB = 1024 * 1024;

size_t device_bytes(ggml_type type, int64_t row, size_t bytes) {
    const int64_t rest = row % kRowRun;
    return ggml_is_quantized(type) && rest != 0 ? bytes + ggml_row_size(type, kRowRun - rest) : bytes;
}

// What `rows` rows (of each matrix, if there are several) with `bytes` in all take on the inner device.
static size_t padded_bytes(const WeightShape &w, int64_t rows, size_t bytes) {
    const int64_t lacks = ggml_is_quantized(w.type) ? (kRowBlock - rows % kRowBlock) % kRowBlock : 0;
    return align_up(device_bytes(w.type, w.ne[0], bytes) + (size_t)lacks * w.row_bytes());
}

static LayoutSizes choose_sizes(const std::vector<WeightShape> &weights, LayoutSizes sizes) {
    size_t total = 0, largest_matrix = 0; // of a layer
    for (const WeightShape &w : weights) {
        total += w.bytes();
        if (w.name.compare(0, 4, "blk.") == 0 && w.is_matrix()) {
            largest_matrix = std::max(largest_matrix, w.bytes());
        }
    }
    if (sizes.step_bytes == 0) {
        sizes.step_bytes = std::min(std::max(2 * MiB, total / 64), 32 * MiB);
    }
    if (sizes.piece_bytes == 0) {
        sizes.piece_bytes = std::max({4 * MiB, largest_matrix, sizes.step_bytes});
    }
    if (sizes.slab_bytes == 0) {
        sizes.slab_bytes = std::min(std::max({MiB, 4 * sizes.unit_bytes, total / 64}), 64 * MiB);
    }
    return sizes;
}

// The pieces of one weight: rows of it where it is a matrix larger than piece_bytes, else all of it.
static void cut(const WeightShape &w, int tensor, size_t piece_bytes, std::vector<Piece> &pieces) {
    const size_t row = w.row_bytes();
    const int64_t each = w.is_matrix() && w.bytes() > piece_bytes ? rows_of_piece(piece_bytes, row) : w.ne[1];
    for (int64_t r = 0; r < w.ne[1]; r += each) {
        Piece p;
        p.tensor = tensor;
        p.shard = w.shard;
        p.row0 = r;
        p.rows = std::min(each, w.ne[1] - r);
        p.host_offset = (size_t)r * row;
        p.bytes = p.rows == w.ne[1] ? w.bytes() : (size_t)p.rows * row;
        p.padded = padded_bytes(w, p.rows, p.bytes);
        pieces.push_back(p);
    }
}

std::vector<size_t> pack_slabs(std::vector<Piece> &pieces, size_t slab_bytes) {
    std::vector<size_t> slabs;
    for (Piece &p : pieces) {
        if (slabs.empty() || slabs.back() + p.padded > slab_bytes) {
            slabs.push_back(0);
        }
        p.slab = (int)slabs.size() - 1;
        p.slab_offset = slabs.back();
        slabs.back() += p.padded;
    }
    return slabs;
}

Layout lay_out(const std::vector<WeightShape> &weights, LayoutSizes sizes, uint32_t n_shards) {
    Layout l;
    l.sizes = sizes = choose_sizes(weights, sizes);
    l.shard_bytes.assign(n_shards, 0);
    l.shard_last_slab.assign(n_shards, -1);
    int64_t largest_split_rows = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        const WeightShape &w = weights[i];
        WeightPlace place;
        place.core = w.bytes() <= kCoreBytes;
        if (place.core) {
            place.core_offset = l.core_bytes;
            l.core_bytes += padded_bytes(w, w.ne[1], w.bytes());
        } else {
            place.first_piece = (int)l.pieces.size();
            cut(w, (int)i, sizes.piece_bytes, l.pieces);
            place.n_pieces = (int)l.pieces.size() - place.first_piece;
            l.shard_bytes[w.shard] += w.bytes();
        }
        if (place.n_pieces > 1) {
            largest_split_rows = std::max(largest_split_rows, l.pieces[place.first_piece].rows);
        }
        l.weights.push_back(place);
    }
    l.slab_sizes = pack_slabs(l.pieces, sizes.slab_bytes);
    for (size_t &s : l.slab_sizes) {
        s = l.granular(s);
        l.slabs_total += s;
    }
    size_t largest_piece = 0, largest_shard = 0;
    std::vector<size_t> padded_of(n_shards, 0);
    for (const Piece &p : l.pieces) {
        padded_of[p.shard] += p.padded;
        largest_piece = std::max(largest_piece, p.padded);
        largest_shard = std::max(largest_shard, padded_of[p.shard]);
        l.shard_last_slab[p.shard] = std::max(l.shard_last_slab[p.shard], p.slab);
    }
    l.min_ring = l.granular(std::max(largest_piece, std::min(sizes.step_bytes, largest_shard)));
    if (largest_split_rows > 0) {
        l.scratch_bytes = align_up(std::max(kScratchBytes, (size_t)largest_split_rows * sizeof(float)));
    }
    return l;
}

uint64_t fixed_bytes(const Layout &layout, uint64_t overhead, const std::vector<size_t> &buffers) {
    uint64_t sum = overhead + layout.granular(layout.core_bytes) + layout.granular(layout.scratch_bytes);
    for (size_t b : buffers) {
        sum += layout.granular(b);
    }
    return sum;
}

Residency residency(uint64_t budget, uint64_t fixed, size_t min_ring, size_t wanted_ring,
                    const std::vector<size_t> &slabs, size_t unit_bytes) {
    Residency r;
    if (budget < fixed) {
        return r;
    }
    const size_t room = budget - fixed;
    size_t total = 0;
    for (size_t s : slabs) {
        total += s;
    }
    if (total <= room) {
        r.fits = true;
        r.slabs = slabs.size();
        return r;
    }
    if (room < min_ring) {
        return r;
    }
    r.fits = true;
    r.ring = std::min(std::max(wanted_ring, min_ring), room) / unit_bytes * unit_bytes;
    size_t held = 0;
    while (r.slabs < slabs.size() && held + slabs[r.slabs] <= room - r.ring) {
        held += slabs[r.slabs++];
    }
    return r;
}

} // namespace fsd
