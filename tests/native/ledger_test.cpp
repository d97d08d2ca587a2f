// Tests of the ledger: which uses give VRAM back, in which order, and how much VRAM a child ledger may borrow.
#include "check.h"
#include "emulated.h"
#include "ledger.h"
#include "pacing.h"

#include <string>

namespace {

using namespace fsd;

const Inner &emulated() {
    static Pacing pacing;
    static Inner inner(pacing);
    if (!inner.dev) {
        CHECK(inner.open(fs_emulated_device({}), 1 << 20));
    }
    return inner;
}

// A ledger on the emulated device. take() allocates 1000 bytes each of weights, ring and KV. `given` records which of
// them (w, r, k) were given back.
struct Holder {
    std::string given;
    size_t surplus = 1;
    InnerBuffer weights, ring, kv;
    Ledger ledger;

    bool give(const char *name, Use use, InnerBuffer &buffer) {
        if (!buffer) {
            return false;
        }
        given += name;
        ledger.release(use, buffer);
        return true;
    }

    explicit Holder(uint64_t budget)
        : ledger(emulated(), {
                                 {Ledger::kWeights, [this] { return give("w", Use::arena, weights); }},
                                 {Ledger::kRing, [this] { return give("r", Use::ring, ring); }},
                                 {Ledger::kKv, [this] { return give("k", Use::kv, kv); }},
                             }) {
        ledger.set_budget(budget);
    }

    void take() {
        weights = ledger.allocate(Use::arena, 1000);
        ring = ledger.allocate(Use::ring, 1000);
        kv = ledger.allocate(Use::kv, 1000);
        CHECK(weights && ring && kv && ledger.used() == 3000 && given.empty());
    }
};

TEST(memory_is_given_back_in_the_order_of_the_list) {
    Holder h(3000);
    h.take();
    CHECK(h.ledger.make_room(0) && h.given.empty());
    CHECK(h.ledger.make_room(500) && h.given == "w" && h.ledger.used() == 2000);
    CHECK(h.ledger.make_room(1500) && h.given == "wk"); // the ring is given back only for images
    CHECK(!h.ledger.make_room(2500) && h.ledger.used() == 1000);
    CHECK(h.ledger.make_room(2500, Ledger::kForImages) && h.given == "wkr");
    CHECK(!h.ledger.allocate(Use::buffers, 3001) && h.ledger.figures().peak == 3000);
}

TEST(kv_does_not_displace_kv) {
    Holder h(3000);
    h.take();
    CHECK(!h.ledger.allocate(Use::kv, 1500, Ledger::kForKv) && h.given == "w");
    CHECK(h.ledger.used(Use::kv) == 1000 && h.ledger.fixed() == 1000);
}

TEST(overhead_counts) {
    Holder h(3000);
    h.take();
    h.ledger.set_overhead(200);
    CHECK(h.ledger.used() == 3200 && h.ledger.fixed() == 1200 && h.ledger.make_room(0) && h.given == "w");
    h.ledger.reset_peak();
    CHECK(h.ledger.figures().peak == 2200 && h.ledger.figures().overhead == 200);
}

TEST(a_child_takes_from_the_budget_and_gives_all_of_it_back) {
    Holder h(3000);
    h.take();
    Ledger child(emulated(), {});
    CHECK(!child.borrow(h.ledger, 3001, 4000) && h.ledger.used() == 0);
    h.given.clear();
    h.take();
    // It needs 1500 bytes, for which two buffers are given back. It gets all 2000 bytes that these free.
    CHECK(child.borrow(h.ledger, 1500, 9000) && h.given == "wr");
    CHECK(child.budget() == 2000 && h.ledger.used() == 3000 && h.ledger.used(Use::image) == 2000);
    InnerBuffer b = child.allocate(Use::buffers, 2000);
    CHECK(b && h.ledger.used() == 3000 && !child.allocate(Use::buffers, 1));
    child.release(Use::buffers, b);
    child.give_back();
    CHECK(child.budget() == 0 && h.ledger.used() == 1000);
}

} // namespace

TEST_MAIN()
