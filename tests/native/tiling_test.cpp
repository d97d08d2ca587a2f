// Tests how attention masks are cut into tiles.
#include "check.h"
#include "tiling.h"

#include <cmath>
#include <limits>
#include <random>

using namespace fsd;

namespace {

struct Mask {
    Mask(int64_t n_rows, int64_t n_keys) : rows(n_rows), keys(n_keys), values(n_rows * n_keys, -INFINITY) {}
    void see(int64_t row, int64_t key) { values[row * keys + key] = 0.0f; }
    std::vector<QueryTile> tiles(int threads = 2) const { return tiles_of_mask(values.data(), rows, keys, threads); }

    int64_t rows, keys;
    std::vector<float> values;
};

// Checks that the tiles cover all rows in order, and that each tile contains every key that its rows see.
void check_tiles(const Mask &m) {
    const std::vector<QueryTile> tiles = m.tiles();
    CHECK(!tiles.empty());
    int64_t row = 0;
    for (const QueryTile &t : tiles) {
        CHECK(t.row0 == row && t.row1 > t.row0);
        CHECK(0 <= t.key0 && t.key0 < t.key1 && t.key1 <= m.keys);
        for (; row < t.row1; row++) {
            for (int64_t key = 0; key < m.keys; key++) {
                CHECK(!std::isfinite(m.values[row * m.keys + key]) || (t.key0 <= key && key < t.key1));
            }
        }
    }
    CHECK(row == m.rows);
}

} // namespace

TEST(windows_of_any_size_are_in_their_tiles) {
    std::mt19937 random(1);
    for (int64_t n : {1, 511, 512, 513, 1500, 2049}) {
        Mask m(n, n);
        for (int64_t from = 0; from < n;) {
            const int64_t to = std::min<int64_t>(n, from + 1 + random() % 90);
            for (int64_t row = from; row < to; row++) {
                for (int64_t key = from; key < to; key++) {
                    m.see(row, key);
                }
            }
            from = to;
        }
        check_tiles(m);
        int64_t left = 0;
        for (const QueryTile &t : m.tiles()) {
            left += (t.row1 - t.row0) * (t.key1 - t.key0);
        }
        CHECK(n < 1500 || left < n * n * 4 / 5);
    }
}

TEST(single_keys_anywhere_are_in_their_tiles) {
    std::mt19937 random(2);
    for (int round = 0; round < 20; round++) {
        Mask m(1 + random() % 1300, 1 + random() % 1300);
        for (int64_t row = 0; row < m.rows; row++) {
            for (int i = 0; i < 1 + (int)(random() % 3); i++) {
                m.see(row, random() % m.keys);
            }
        }
        check_tiles(m);
    }
}

TEST(a_row_that_sees_nothing_is_not_for_tiles) {
    Mask m(1024, 700);
    for (int64_t row = 0; row < m.rows; row++) {
        m.see(row, row % 700);
    }
    check_tiles(m);
    m.values[600 * m.keys + 600] = -INFINITY;
    CHECK(m.tiles().empty());
    m.values[600 * m.keys + 600] = std::numeric_limits<float>::lowest(); // in F16 this becomes minus infinity, too
    CHECK(m.tiles(1).empty());
}

TEST_MAIN()
