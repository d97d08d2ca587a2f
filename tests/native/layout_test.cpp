// Checks properties of layout.h, kv_layout.h, ring.h, hot_slots.h and expert_cache.h with random cases from fixed seeds.
#include "check.h"
#include "expert_cache.h"
#include "kv_layout.h"
#include "ring.h"

#include <random>
#include <set>

namespace {

using namespace fsd;

struct Random {
    std::mt19937_64 engine;

    explicit Random(uint64_t seed) : engine(seed) {}
    size_t below(size_t n) { return engine() % n; }
    size_t between(size_t low, size_t high) { return low + below(high - low + 1); }
    // Sizes range over orders of magnitude, so that pieces are much smaller and much larger than a slab.
    size_t size() { return align_up(size_t{1} << between(0, 20) | below(4096)); }
};

std::vector<Piece> random_pieces(Random &random) {
    std::vector<Piece> pieces(random.below(200));
    uint32_t shard = 0;
    for (size_t i = 0; i < pieces.size(); i++) {
        shard += random.below(4) == 0;
        pieces[i].tensor = (int)i;
        pieces[i].shard = shard;
        pieces[i].padded = random.size();
    }
    return pieces;
}

std::vector<size_t> random_sizes(Random &random, size_t most) {
    std::vector<size_t> sizes(random.below(most + 1));
    for (size_t &s : sizes) {
        s = random.size();
    }
    return sizes;
}

size_t sum(const std::vector<size_t> &sizes) {
    size_t total = 0;
    for (size_t s : sizes) {
        total += s;
    }
    return total;
}

TEST(align_up_is_the_next_multiple) {
    CHECK(align_up(0) == 0 && align_up(1) == kAlign && align_up(kAlign) == kAlign &&
          align_up(kAlign + 1) == 2 * kAlign);
}

TEST(pieces_of_a_matrix_have_whole_blocks_of_rows) {
    for (uint64_t seed = 0; seed < 2000; seed++) {
        Random random(seed);
        const size_t row = 1 + random.below(1 << 20), piece = random.size();
        const int64_t rows = rows_of_piece(piece, row);
        CHECK(rows > 0 && rows % kRowBlock == 0);
        CHECK(rows == kRowBlock || (size_t)rows * row <= piece);
        CHECK((size_t)(rows + kRowBlock) * row > piece);
    }
}

TEST(slabs_hold_every_piece_once_in_ladder_order) {
    for (uint64_t seed = 0; seed < 2000; seed++) {
        Random random(seed);
        std::vector<Piece> pieces = random_pieces(random);
        const size_t slab_bytes = random.size();
        const std::vector<size_t> slabs = pack_slabs(pieces, slab_bytes);
        std::vector<size_t> filled(slabs.size(), 0), count(slabs.size(), 0);
        int last = 0;
        for (const Piece &p : pieces) {
            CHECK(p.slab >= last && p.slab <= last + 1 && p.slab < (int)slabs.size());
            last = p.slab;
            // Each piece begins where the one before it ends: no overlaps, no gaps.
            CHECK(p.slab_offset == filled[p.slab] && p.slab_offset % kAlign == 0);
            filled[p.slab] += p.padded;
            count[p.slab]++;
        }
        CHECK(filled == slabs);
        for (size_t i = 0; i < slabs.size(); i++) {
            CHECK(count[i] > 0);
            CHECK(slabs[i] <= slab_bytes || count[i] == 1);
            if (i > 0) { // the first piece of this slab did not fit into the slab before
                size_t first = 0;
                while (pieces[first].slab != (int)i) {
                    first++;
                }
                CHECK(slabs[i - 1] + pieces[first].padded > slab_bytes);
            }
        }
    }
}

std::vector<WeightShape> random_weights(Random &random) {
    constexpr ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0};
    std::vector<WeightShape> weights(random.below(60));
    uint32_t shard = 0;
    for (WeightShape &w : weights) {
        shard += random.below(3) == 0;
        w.name = (random.below(4) ? "blk." : "output.") + std::to_string(&w - weights.data());
        w.shard = shard;
        w.type = types[random.below(5)];
        w.ne[0] = (int64_t)(ggml_blck_size(w.type) * random.between(1, 20));
        w.ne[1] = (int64_t)random.between(1, 3000);
        w.ne[2] = random.below(5) ? 1 : (int64_t)random.between(2, 8);
    }
    return weights;
}

TEST(a_layout_holds_every_weight_once) {
    for (uint64_t seed = 0; seed < 500; seed++) {
        Random random(seed);
        const std::vector<WeightShape> weights = random_weights(random);
        LayoutSizes sizes;
        if (seed % 2) {
            sizes = {random.size() + kAlign, random.size() + kAlign, random.size() + kAlign, kAlign};
        }
        const uint32_t n_shards = weights.empty() ? 1 : weights.back().shard + 1;
        const Layout l = lay_out(weights, sizes, n_shards);
        CHECK(l.weights.size() == weights.size() && l.shard_bytes.size() == n_shards);
        size_t core = 0, next = 0;
        bool split = false;
        std::vector<size_t> in_shard(n_shards, 0);
        for (size_t i = 0; i < weights.size(); i++) {
            const WeightShape &w = weights[i];
            const WeightPlace &at = l.weights[i];
            CHECK(at.core == (w.bytes() <= kCoreBytes));
            if (at.core) {
                CHECK(at.core_offset >= core && at.n_pieces == 0); // after the weight before it
                core = at.core_offset + align_up(w.bytes());
                continue;
            }
            CHECK((size_t)at.first_piece == next && at.n_pieces > 0);
            next += (size_t)at.n_pieces;
            size_t bytes = 0;
            int64_t rows = 0;
            for (int k = at.first_piece; k < at.first_piece + at.n_pieces; k++) {
                const Piece &p = l.pieces[k];
                CHECK(p.tensor == (int)i && p.shard == w.shard && p.row0 == rows && p.host_offset == bytes);
                CHECK(p.padded >= p.bytes && p.padded <= l.min_ring);
                CHECK(p.slab <= l.shard_last_slab[p.shard]);
                rows += p.rows;
                bytes += p.bytes;
            }
            CHECK(rows == w.ne[1] && bytes == w.bytes());
            CHECK(at.n_pieces == 1 || (w.is_matrix() && w.bytes() > l.sizes.piece_bytes));
            split = split || at.n_pieces > 1;
            in_shard[w.shard] += w.bytes();
        }
        CHECK(next == l.pieces.size() && in_shard == l.shard_bytes);
        CHECK(core <= l.core_bytes && sum(l.slab_sizes) == l.slabs_total && split == (l.scratch_bytes > 0));
        CHECK(l.least_weights() <= l.weights_beside_kv() && l.weights_beside_kv() <= l.slabs_total);
    }
}

TEST(small_weights_are_the_core) {
    std::vector<WeightShape> weights(2);
    weights[0] = {"a", 0, GGML_TYPE_F32, {(int64_t)kCoreBytes / 4, 1, 1, 1}};
    weights[1] = {"b", 0, GGML_TYPE_F32, {(int64_t)kCoreBytes / 4 + 1, 1, 1, 1}};
    const Layout l = lay_out(weights, {}, 1);
    CHECK(l.weights[0].core && !l.weights[1].core);
    CHECK(l.core_bytes == kCoreBytes && l.slabs_total == align_up(kCoreBytes + 4));
}

// The piece has so many rows that their results for one token do not fit into the usual scratch.
TEST(scratch_holds_a_token_of_the_largest_row_piece) {
    const WeightShape w = {"output.weight", 0, GGML_TYPE_F16, {32, 1 << 21, 1, 1}};
    LayoutSizes sizes;
    sizes.piece_bytes = (size_t)64 * 700000;
    const Layout l = lay_out({w}, sizes, 1);
    CHECK(l.pieces.size() == 3 && l.scratch_bytes == align_up((size_t)l.pieces[0].rows * sizeof(float)));
    CHECK(l.scratch_bytes > kScratchBytes);
}

TEST(kv_is_counted_by_layer) {
    const KvShape half = {GGML_TYPE_F16, 128, 1024, 3}, state = {GGML_TYPE_F32, 1000, 3, 1};
    const KvBytes kv = kv_bytes({{0, half, 1}, {0, half, 1}, {1, half, 700}, {2, state, 1}}, 1);
    const size_t row = 128 * 2;
    CHECK(kv.need.least == 2 * 1024 * 3 * row);
    CHECK(kv.need.whole == 3 * 1024 * 3 * row + align_up(3 * 4000));
    CHECK(kv.used == (2 * 256 + 768) * 3 * row + align_up(3 * 4000));
    CHECK(kv_bytes({{0, half, 1}}, 2 << 20).need.whole == 2 << 20);
    const KvShape padded = {GGML_TYPE_Q8_0, 192, 1024, 3};
    CHECK(kv_tensor_bytes(padded, 1, 1) > ggml_row_size(padded.type, padded.row) && kv_tensor_bytes(padded, 0, 0) == 0);
    CHECK(cells_to_hold(0, 1024) == 0 && cells_to_hold(1, 100) == 100 && cells_to_hold(4096, 9000) == 4096);
    CHECK(cells_to_hold(8193, 1 << 20) == 9216);
}

TEST(residency_stays_within_the_budget_and_grows_with_it) {
    for (uint64_t seed = 0; seed < 2000; seed++) {
        Random random(seed);
        const std::vector<size_t> slabs = random_sizes(random, 40);
        const size_t total = sum(slabs), fixed = random.size();
        const size_t min_ring = random.size(), wanted_ring = random.size();
        const size_t unit = seed % 2 ? 1 : kAlign;
        Residency last;
        size_t budget = 0;
        for (int i = 0; i < 60; i++) {
            const Residency r = residency(budget, fixed, min_ring, wanted_ring, slabs, unit);
            size_t held = 0;
            for (size_t s = 0; s < r.slabs; s++) {
                held += slabs[s];
            }
            CHECK(r.slabs <= slabs.size());
            if (r.fits) {
                CHECK(fixed + r.ring + held <= budget);
                CHECK((r.ring == 0) == (r.slabs == slabs.size()));
                CHECK(r.ring == 0 || r.ring >= min_ring);
                CHECK(r.ring % unit == 0);
                CHECK(r.ring <= std::max(min_ring, wanted_ring));
            } else {
                CHECK(r.ring == 0 && r.slabs == 0);
            }
            CHECK(!last.fits || r.fits);
            CHECK(last.slabs <= r.slabs); // resident sets are prefixes, so a larger one includes a smaller one
            last = r;
            budget += random.below(2 * (fixed + total + min_ring) / 60 + 2);
        }
    }
}

TEST(the_floor_is_sharp) {
    for (uint64_t seed = 0; seed < 2000; seed++) {
        Random random(seed);
        std::vector<size_t> slabs = random_sizes(random, 40);
        slabs.push_back(random.size());
        const size_t total = sum(slabs), fixed = random.size(), wanted_ring = random.size();
        const size_t min_ring = random.between(1, total);
        CHECK(residency(fixed + min_ring, fixed, min_ring, wanted_ring, slabs, 1).fits);
        CHECK(!residency(fixed + min_ring - 1, fixed, min_ring, wanted_ring, slabs, 1).fits);
        CHECK(!residency(fixed - 1, fixed, 0, 0, slabs, 1).fits);
        const Residency full = residency(fixed + total, fixed, min_ring, wanted_ring, slabs, 1);
        CHECK(full.fits && full.ring == 0 && full.slabs == slabs.size());
        const Residency less = residency(fixed + total - 1, fixed, min_ring, wanted_ring, slabs, 1);
        CHECK(less.slabs < slabs.size());
    }
    CHECK(residency(256, 256, 512, 512, {}, 1).fits); // without streamed steps, the floor is the fixed part
}

TEST(a_step_larger_than_the_ring_has_no_layout) {
    CHECK(lay_ring({256, 1024, 256}, 1023).empty());
    CHECK(lay_ring({256, 1024, 256}, 1024).size() == 3);
    CHECK(lay_ring({}, 1024).empty());
}

// Runs the ring for six passes. Copies run ahead as far as the rule allows, and uses follow in order. When a step is
// used, the ring must still have every byte of its copy.
void run_ring(const std::vector<size_t> &steps, size_t capacity, Random &random) {
    const std::vector<RingSlot> slots = lay_ring(steps, capacity);
    const size_t n = steps.size();
    CHECK(slots.size() == n);
    for (size_t i = 0; i < n; i++) {
        CHECK(slots[i].bytes == steps[i] && slots[i].offset + slots[i].bytes <= capacity);
        CHECK(slots[i].reuse_distance >= 1 && slots[i].reuse_distance <= n);
    }
    std::vector<uint64_t> owner(capacity / kAlign, UINT64_MAX); // the last copy to each unit of kAlign bytes
    uint64_t next_copy = 0, next_use = 0;
    const uint64_t end = 6 * n;
    while (next_use < end) {
        const size_t c = next_copy % n;
        const size_t back = slots[c].reuse_distance;
        const bool may_copy = next_copy < next_use + n && (next_copy < back || next_copy - back < next_use);
        const bool may_use = next_use < next_copy;
        CHECK(may_copy || may_use); // neither may go on: a deadlock
        if (may_copy && (!may_use || random.below(3) > 0)) {
            for (size_t u = 0; u < slots[c].bytes / kAlign; u++) {
                owner[slots[c].offset / kAlign + u] = next_copy;
            }
            next_copy++;
        } else {
            const RingSlot &s = slots[next_use % n];
            for (size_t u = 0; u < s.bytes / kAlign; u++) {
                CHECK(owner[s.offset / kAlign + u] == next_use);
            }
            next_use++;
        }
    }
}

TEST(no_byte_of_the_ring_is_overwritten_before_its_use) {
    for (uint64_t seed = 0; seed < 1000; seed++) {
        Random random(seed);
        std::vector<size_t> steps(random.between(1, 30));
        size_t largest = 0;
        for (size_t &s : steps) {
            s = kAlign * random.between(1, seed % 2 ? 4 : 60);
            largest = std::max(largest, s);
        }
        // Ring sizes: for the largest step alone, for some steps, and for a whole pass.
        run_ring(steps, largest, random);
        run_ring(steps, largest + kAlign * random.below(120), random);
        run_ring(steps, sum(steps), random);
    }
}

TEST(a_ring_of_three_steps_lets_two_copies_run_ahead) {
    for (const RingSlot &s : lay_ring(std::vector<size_t>(12, 1024), 3072)) {
        CHECK(s.reuse_distance == 3);
    }
}

ExpertArena arena_of(size_t n_slots) {
    ExpertArena arena;
    arena.end = 1 << 20;
    arena.stride = 1024;
    arena.parts = {0, 256};
    arena.n_slots = n_slots;
    return arena;
}

TEST(an_expert_in_use_keeps_its_slot) {
    ExpertCache cache;
    cache.adopt(arena_of(4));
    cache.begin_use();
    std::set<int> slots;
    for (int expert = 0; expert < 4; expert++) {
        CHECK(cache.find(7, expert) == -1);
        slots.insert(cache.take(7, expert, true));
    }
    CHECK(slots.size() == 4);
    CHECK(cache.take(7, 4, true) == -1); // all slots are in use
    cache.begin_use();
    const int slot = cache.find(7, 2);
    CHECK(slot >= 0);
    CHECK(cache.find(8, 2) == -1); // same expert, other layer
    CHECK(cache.take(8, 2, true) != slot);
    CHECK(cache.find(8, 2) >= 0);
    cache.clear();
    cache.adopt(arena_of(4));
    CHECK(cache.find(7, 2) == -1);
}

TEST(experts_that_are_asked_for_often_stay) {
    ExpertCache cache;
    cache.adopt(arena_of(32));
    std::mt19937_64 random(5);
    size_t hits = 0, asked = 0;
    for (int use = 0; use < 20000; use++) {
        cache.begin_use();
        // 24 of 256 experts get a little more than half of the uses.
        const int expert = random() % 2 ? (int)(random() % 24) : (int)(random() % 256);
        cache.count(1, expert);
        if (cache.find(1, expert) >= 0) {
            hits += use > 2000;
        } else {
            cache.take(1, expert, false);
        }
        asked += use > 2000;
    }
    CHECK(hits * 100 > asked * 48); // random slots would give 12 %
}

// Each token needs the same 256 experts in the same order. A cache that keeps the most recent ones would never hit.
TEST(a_cache_half_as_large_as_what_is_needed_hits_nearly_half) {
    ExpertCache cache;
    cache.adopt(arena_of(128));
    size_t hits = 0;
    for (int token = 0; token < 100; token++) {
        for (uint32_t layer = 0; layer < 32; layer++) {
            cache.begin_use();
            for (int expert = 0; expert < 8; expert++) {
                cache.count(layer, expert);
                if (cache.find(layer, expert) < 0) {
                    cache.take(layer, expert, true);
                } else {
                    hits += token >= 50;
                }
            }
        }
    }
    CHECK(hits >= 50 * 96 * 9 / 10); // 96 of the 128 slots hold experts that stay
}

TEST(a_slot_that_is_released_or_dropped_is_free_in_the_same_use) {
    fsd::HotSlots slots([](uint64_t key) { return (double)key; }, 2, 2);
    slots.resize(4);
    slots.begin_use();
    for (uint64_t key = 4; key >= 1; key--) {
        CHECK(slots.take(key, true) >= 0);
    }
    CHECK(slots.n_kept() == 2 && slots.take(9, true) == -1);
    slots.release(slots.where(3));
    CHECK(slots.take(9, true) >= 0 && slots.where(3) == -1);
    const int dropped = slots.where(4);
    slots.drop(dropped);
    CHECK(slots.where(4) == -1 && slots.n_empty() == 1);
    CHECK(slots.take(1, false) == -1 || slots.where(1) >= 0);
    slots.resize(8); // slots for what passes may be for what stays from now on
    CHECK(slots.where(9) >= 0 && slots.size() == 8 && slots.n_empty() > 0);
    slots.resize(0);
    CHECK(slots.where(9) == -1 && slots.take(9, true) == -1);
}

TEST(experts_outlast_a_graph_that_needs_room) {
    ExpertCache cache;
    cache.adopt(arena_of(64));
    cache.begin_use();
    for (int expert = 0; expert < 32; expert++) {
        cache.take(3, expert, true);
    }
    cache.adopt(arena_of(16));
    std::set<int> slots;
    for (int expert = 0; expert < 32; expert++) {
        const int slot = cache.where(3, expert);
        CHECK(slot < 16);
        slots.insert(slot);
    }
    CHECK(slots.size() == 17); // 16 slots, and -1 for experts without one
    cache.adopt(arena_of(64));
    CHECK(cache.where(3, *slots.rbegin()) >= 0);
    ExpertArena other = arena_of(64);
    other.stride = 2048;
    cache.adopt(other);
    for (int expert = 0; expert < 32; expert++) {
        CHECK(cache.where(3, expert) == -1);
    }
}

TEST(each_expert_of_a_layer_has_a_slot_number_of_its_own) {
    ExpertCache cache;
    cache.adopt(arena_of(16));
    const auto check = [&cache](uint32_t layer) {
        const std::vector<int32_t> numbers = cache.numbers(layer, 12);
        CHECK(std::set<int32_t>(numbers.begin(), numbers.end()).size() == 12);
        for (int expert = 0; expert < 12; expert++) {
            const int slot = cache.where(layer, expert);
            CHECK(numbers[expert] >= 0 && numbers[expert] < 16);
            CHECK(slot < 0 || numbers[expert] == (int32_t)cache.arena().number(slot));
        }
    };
    std::mt19937 random(2);
    for (int i = 0; i < 100; i++) {
        cache.begin_use();
        const uint32_t layer = random() % 3;
        cache.take(layer, (int)(random() % 4), true);
        for (uint32_t l = 0; l < 3; l++) {
            check(l);
            cache.set_table(l, true);
        }
        // Who takes a slot changes the numbers of its own layer and of that which has lost the slot; no other's.
        const std::vector<int32_t> before[] = {cache.numbers(0, 12), cache.numbers(1, 12), cache.numbers(2, 12)};
        const int expert = 4 + (int)(random() % 8);
        if (cache.where(layer, expert) < 0) {
            CHECK(cache.take(layer, expert, true) >= 0 && !cache.has_table(layer));
        }
        for (uint32_t l = 0; l < 3; l++) {
            CHECK(!cache.has_table(l) || cache.numbers(l, 12) == before[l]);
        }
        CHECK(cache.has_table((layer + 1) % 3) || cache.has_table((layer + 2) % 3));
    }
    cache.adopt(arena_of(14));
    CHECK(!cache.has_table(0) && !cache.has_table(1) && !cache.has_table(2));
}

TEST(a_share_of_missing_experts_is_copied) {
    ExpertCache cache; // without slots, because empty slots would be filled first
    size_t copied = 0;
    for (int i = 0; i < 10; i++) {
        copied += cache.n_to_copy(3, 0.25);
    }
    CHECK(copied == 7); // 10 * 3 * 0.25 = 7.5: fractions are carried over from call to call
    CHECK(cache.n_to_copy(3, 0) == 0 && cache.n_to_copy(3, 1) == 3);
}

TEST(slots_are_counted_from_the_end) {
    ExpertArena arena = arena_of(10);
    CHECK(arena.at(0) == arena.end - 1024);
    CHECK(arena.at(9) == arena.begin());
    for (size_t slot = 0; slot < 10; slot++) {
        CHECK(arena.begin() + arena.number(slot) * arena.stride == arena.at(slot));
    }
}

TEST(choices_long_ago_count_less) {
    ExpertCache cache;
    for (int i = 0; i < 60000; i++) {
        cache.count(0, 1);
    }
    for (int i = 0; i < 60000; i++) {
        cache.count(0, 2);
    }
    CHECK(cache.heat(0, 2) > cache.heat(0, 1));
    ExpertCache next;
    next.set_uses(0, cache.uses(0));
    CHECK(next.heat(0, 1) == cache.heat(0, 1));
}

} // namespace

TEST_MAIN()
