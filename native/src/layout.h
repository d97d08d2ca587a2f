// Pure arithmetic of the shard device: how weights are cut into pieces, packed into slabs, and staged in the ring.
// No ggml, no allocation: numbers in, numbers out, so that the tests can try every corner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsd {

constexpr size_t kAlign = 256; // every inner device accepts offsets of this alignment

inline size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// Kernels for a few tokens compute quantised rows in blocks (of 8 in ggml-cuda) and read all of the last one, also where
// the matrix ends within it; others only take whole blocks (of 32).
constexpr int64_t kRowBlock = 32;

// How many rows a matrix is cut into that is larger than `piece_bytes`.
inline int64_t rows_of_piece(size_t piece_bytes, size_t row_bytes) {
    return std::max<int64_t>(1, (int64_t)(piece_bytes / row_bytes) / kRowBlock) * kRowBlock;
}

// A run of rows of one weight tensor; the unit of residency and of copying.
struct Piece {
    int tensor = -1;    // index into the device's weights
    uint32_t shard = 0; // ladder index
    int64_t row0 = 0, rows = 0;
    size_t host_offset = 0; // from the tensor's first byte
    size_t bytes = 0;       // as in the file
    size_t padded = 0;      // as the inner device wants it, aligned
    int slab = -1;
    size_t slab_offset = 0;
};

// Packs pieces, given in ladder order, into slabs. A slab holds at least one piece, so a large piece has a slab of its own.
// Returns the size of each slab; a resident set is a prefix of slabs and therefore a prefix of the ladder.
inline std::vector<size_t> pack_slabs(std::vector<Piece> &pieces, size_t slab_bytes) {
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

// What a budget holds beside the fixed part: the ring and a prefix of the slabs.
struct Residency {
    bool fits = false; // false: the budget is below the floor
    size_t ring = 0;
    size_t slabs = 0;
};

inline Residency residency(size_t budget, size_t fixed, size_t min_ring, size_t wanted_ring,
                           const std::vector<size_t> &slabs) {
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
        return r; // all resident: nothing to stage
    }
    if (room < min_ring) {
        return r;
    }
    r.fits = true;
    r.ring = std::min(std::max(wanted_ring, min_ring), room);
    size_t held = 0;
    while (r.slabs < slabs.size() && held + slabs[r.slabs] <= room - r.ring) {
        held += slabs[r.slabs++];
    }
    return r;
}

// Where each streamed step of one pass lies in the ring, and which earlier step must have been computed before its bytes
// may be overwritten. Offsets are the same in every pass, so addresses that an inner device has captured stay valid.
struct RingSlot {
    size_t offset = 0;
    size_t bytes = 0;
    // Distance back in the endless sequence of steps to the last one whose bytes overlap; at most the number of slots
    // (then it is this step's own previous pass).
    size_t reuse_distance = 0;
};

// Steps that do not fit the capacity make the result empty.
inline std::vector<RingSlot> lay_ring(const std::vector<size_t> &step_bytes, size_t capacity) {
    std::vector<RingSlot> slots;
    size_t at = 0;
    for (size_t bytes : step_bytes) {
        if (bytes > capacity) {
            return {};
        }
        if (at + bytes > capacity) {
            at = 0;
        }
        slots.push_back({at, bytes, 0});
        at += bytes;
    }
    const size_t n = slots.size();
    for (size_t i = 0; i < n; i++) {
        size_t d = 1;
        for (; d < n; d++) {
            const RingSlot &a = slots[i];
            const RingSlot &b = slots[(i + n - d) % n];
            if (a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes) {
                break;
            }
        }
        slots[i].reuse_distance = d;
    }
    return slots;
}

} // namespace fsd
