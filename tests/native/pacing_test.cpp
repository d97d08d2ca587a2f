// Tests when the pacer starts steps. A simulated host draws frames of 16 ms and uses the GPU for a part of each. Steps
// in that part share the GPU with the host.
#include "check.h"
#include "host_block.h"
#include "inner.h"
#include "requests.h"
#include "system.h"

#include <string>
#include <thread>

namespace {

using namespace fsd;

constexpr uint64_t kTurns = 10;
constexpr uint64_t kUs = 1000, kMs = 1000 * kUs, kPeriod = 16 * kMs;

struct Outcome {
    uint64_t steps = 0, beside = 0, late = 0, overran = 0;
};

// Simulates three seconds of frames and counts the last two. Each step starts as soon as the pacer allows. While the
// host uses the GPU, a step gets a tenth of it, and the host's work takes longer by the time of the step.
Outcome play(Mode mode, uint64_t busy, uint64_t step, bool hint = true, uint64_t late_by = 0) {
    FramePacer pacer;
    pacer.set_mode(mode);
    Outcome o;
    uint64_t now = kMs, ready = now, frame_time = 0;
    const uint64_t period = kPeriod + late_by;
    for (uint64_t n = 1; n * period < 3000 * kMs; n++) {
        Frame f;
        f.number = n;
        f.start = std::max(now, n * period);
        f.target = kPeriod;
        f.time = frame_time;
        f.gpu_busy = hint ? busy : 0;
        now = f.start;
        uint64_t drawn = f.start + busy, end = f.start + period;
        const bool counts = f.start > 1000 * kMs;
        while (now < end) {
            pacer.see(f, now);
            const uint64_t at = pacer.start_at(now, ready);
            if (at > now) {
                now = std::min(at, end);
                continue;
            }
            const bool beside = now < drawn;
            uint64_t took = step;
            if (beside) {
                drawn += step;
                const uint64_t alone = (drawn - now) / kTurns; // part of the step that is done when the host is
                took = alone >= step ? step * kTurns : drawn - now + step - alone;
            }
            pacer.ran(now, now + took);
            now += took;
            ready = now;
            if (counts) {
                o.steps++;
                o.beside += beside;
                o.overran += !beside && now > end;
            }
        }
        frame_time = std::max(period, drawn - f.start);
        o.late += counts && frame_time > kPeriod + kPeriod / 20;
    }
    return o;
}

TEST(graphics_first_uses_the_gaps_alone) {
    const Outcome o = play(Mode::graphics, 12 * kMs, 300 * kUs);
    CHECK(o.beside == 0);
    CHECK(o.overran == 0);
    CHECK(o.late == 0);
    CHECK(o.steps > 124 * 10); // 10 steps of 300 us in most of the 4 ms gaps
}

TEST(balance_does_about_as_much_as_graphics_first) {
    for (uint64_t step : {50 * kUs, 300 * kUs, 1500 * kUs}) {
        const Outcome graphics = play(Mode::graphics, 12 * kMs, step);
        const Outcome balance = play(Mode::balance, 12 * kMs, step);
        CHECK(balance.steps * 10 >= graphics.steps * 9); // a step beside the host shortens the gap by as much
        CHECK(balance.beside > 0);
    }
}

TEST(a_step_longer_than_the_gap_still_runs) {
    for (Mode mode : {Mode::graphics, Mode::balance}) {
        CHECK(play(mode, 12 * kMs, 6 * kMs).steps >= 100);
    }
}

// Each sleep ends a little late, so that a step which almost fills the gap comes too late for every gap.
TEST(a_step_runs_within_five_frames_however_well_it_fits) {
    for (uint64_t late_wake : {0 * kUs, 60 * kUs, 150 * kUs}) {
        for (uint64_t gap : {8 * kMs, 4 * kMs, kMs, 100 * kUs, 50 * kUs, 10 * kUs}) {
            for (uint64_t spare : {0 * kUs, 20 * kUs, 50 * kUs, 100 * kUs}) {
                FramePacer pacer;
                pacer.set_mode(Mode::graphics);
                uint64_t now = kPeriod, ready = now;
                for (uint64_t n = 1; n < 600; n++) {
                    Frame f;
                    f.number = n;
                    f.start = std::max(now, n * kPeriod);
                    f.target = f.time = kPeriod;
                    f.gpu_busy = kPeriod - gap;
                    for (now = f.start; now < (n + 1) * kPeriod;) {
                        pacer.see(f, now);
                        const uint64_t at = pacer.start_at(now, ready);
                        if (at > now) {
                            now = std::min(now + std::min(at - now, kMs / 2) + late_wake, (n + 1) * kPeriod);
                            CHECK(now - ready <= 5 * kPeriod);
                            continue;
                        }
                        const uint64_t took = gap > spare ? gap - spare : gap;
                        pacer.ran(now, now + took);
                        ready = now += took;
                    }
                }
            }
        }
    }
}

TEST(a_host_without_a_moment_to_spare_lets_some_through) {
    CHECK(play(Mode::graphics, 16 * kMs, 100 * kUs).steps >= 100);
    CHECK(play(Mode::graphics, 12 * kMs, 100 * kUs, false).steps >= 100); // the host does not report its GPU time
}

TEST(a_host_that_is_late_by_itself_does_not_stop_us) {
    const Outcome o = play(Mode::balance, 40 * kMs, 300 * kUs, true, 30 * kMs);
    CHECK(o.late == 44);
    CHECK(o.steps > 80); // more than one step per frame
}

Frame first_frame() {
    Frame f;
    f.number = 1;
    f.start = kMs;
    f.target = kPeriod;
    f.gpu_busy = 12 * kMs;
    return f;
}

// Shows the pacer the first frame. Returns the time at which its gap begins.
uint64_t see_a_gap(FramePacer &pacer) {
    const Frame f = first_frame();
    const uint64_t gap = f.start + f.gpu_busy;
    pacer.set_mode(Mode::graphics);
    pacer.see(f, gap);
    return gap;
}

TEST(a_step_that_was_held_up_does_not_keep_others_from_the_gaps) {
    FramePacer pacer;
    const uint64_t gap = see_a_gap(pacer);
    for (uint64_t took : {kMs, kMs, 50 * kMs}) {
        pacer.ran(gap, gap + took);
    }
    CHECK(pacer.start_at(gap, gap) <= gap);
    for (int i = 0; i < 8; i++) {
        pacer.ran(gap, gap + 8 * kMs); // several long steps in a row are no outliers
    }
    CHECK(pacer.start_at(gap, gap) > gap);
}

TEST(a_first_step_that_was_held_up_is_forgotten_in_half_a_second) {
    FramePacer pacer;
    const uint64_t gap = see_a_gap(pacer);
    pacer.ran(gap, gap + 60 * kMs);
    for (int i = 0; i < 30; i++) { // one step per frame
        pacer.ran(gap, gap + kMs);
    }
    CHECK(pacer.start_at(gap, gap) <= gap);
}

TEST(compute_first_does_not_wait) {
    FramePacer pacer;
    pacer.set_mode(Mode::compute);
    Frame f = first_frame();
    pacer.see(f, 2 * kMs);
    CHECK(pacer.start_at(2 * kMs, 2 * kMs) <= 2 * kMs);
    CHECK(!pacer.figures().pacing);
    CHECK(pacer.figures().gpu_busy_s > 0.0119);
}

TEST(an_idle_or_silent_host_is_not_waited_for) {
    FramePacer pacer;
    pacer.set_mode(Mode::graphics);
    Frame f = first_frame();
    pacer.see(f, 2 * kMs);
    CHECK(pacer.start_at(2 * kMs, 2 * kMs) > 2 * kMs);
    CHECK(pacer.start_at(1000 * kMs, 2 * kMs) <= 1000 * kMs);
    f.flags = 1;
    pacer.see(f, 2 * kMs);
    CHECK(pacer.start_at(2 * kMs, 2 * kMs) <= 2 * kMs);
    CHECK(pacer.figures().gpu_busy_s == 0.0);
}

#ifdef __linux__

// As the thread that polls the frame block and the one that runs graphs do.
LINUX_TEST(two_threads_bring_the_latest_budget_of_the_frame_block_into_force) {
    HostBlock host;
    Pacing pacing;
    std::string why;
    CHECK(pacing.open(host.path().c_str(), why));
    Inner inner(pacing);
    Ledger ledger(inner, {});
    BudgetRequests requests(pacing);
    requests.serve(ledger, [&](uint64_t bytes) { ledger.set_budget(bytes); });
    std::mutex graph_mutex;
    const auto poll = [&] {
        requests.read_frame_block();
        if (std::unique_lock<std::mutex> lock(graph_mutex, std::try_to_lock); lock.owns_lock()) {
            requests.apply();
        }
        requests.answer_frame_block();
    };
    const auto budget_of = [](uint64_t generation) { return 1000 + generation; };
    uint64_t generation = 0;
    for (int round = 0; round < 200; round++) {
        std::atomic<bool> done{false}, runs{false};
        std::thread other([&] {
            while (!done.load()) {
                poll();
                runs.store(true);
            }
        });
        while (!runs.load()) {
            std::this_thread::yield();
        }
        for (int i = 0; i < 10000; i++) {
            generation++;
            host.ask(generation, budget_of(generation));
            poll();
            if (host.block->applied_generation.load() == generation) {
                CHECK(host.block->budget_bytes.load() == budget_of(generation));
            }
        }
        done.store(true);
        other.join();
        poll();
        CHECK(host.block->applied_generation.load() == generation);
        CHECK(host.block->budget_bytes.load() == budget_of(generation) && ledger.budget() == budget_of(generation));
    }
}

LINUX_TEST(a_frame_of_another_clock_is_not_waited_for) {
    for (Mode mode : {Mode::graphics, Mode::balance}) {
        HostBlock host;
        Pacing pacing;
        std::string why;
        CHECK(pacing.open(host.path().c_str(), why));
        pacing.set_mode(mode);
        host.draw(clock_ns() + 3600 * 1000 * kMs, kPeriod, 8 * kMs);
        bool timed = false;
        // The first step may come at once in any case; later ones would wait for a gap that is an hour away.
        for (int i = 0; i < 3; i++) {
            int naps = 0;
            CHECK(pacing.before_step(clock_ns(), [&] { return ++naps > 20; }, timed));
            CHECK(!timed && !pacing.figures().pacing);
            pacing.after_step(clock_ns(), clock_ns() + kMs);
        }
    }
}

LINUX_TEST(a_wait_that_is_cut_short_is_no_start_and_counts) {
    HostBlock host;
    Pacing pacing;
    std::string why;
    CHECK(pacing.open(host.path().c_str(), why));
    pacing.set_mode(Mode::graphics);
    host.draw(clock_ns(), 1000 * kMs, 900 * kMs);
    bool timed = false;
    int naps = 0;
    CHECK(!pacing.before_step(clock_ns(), [&] { return ++naps > 4; }, timed));
    CHECK(!timed && pacing.figures().waited_s >= 4 * 0.0005);
}

LINUX_TEST(the_figures_in_the_frame_block_are_those_of_now) {
    HostBlock host;
    Pacing pacing;
    std::string why;
    CHECK(pacing.open(host.path().c_str(), why));
    Inner inner(pacing);
    Ledger ledger(inner, {});
    BudgetRequests requests(pacing);
    requests.serve(ledger, [&](uint64_t bytes) { ledger.set_budget(bytes); });
    const auto set = [&](uint64_t bytes, uint64_t known) {
        requests.ask(bytes, known);
        requests.apply();
        return requests.answer_frame_block();
    };
    CHECK(set(5000, UINT64_MAX) == 0 && host.block->budget_bytes.load() == 5000);
    CHECK(host.block->applied_generation.load() == 0);
    CHECK(set(kNoLimit, UINT64_MAX) == 0 && host.block->budget_bytes.load() == 0); // no limit
    // A budget of the frame block stays in force if the sidecar sets one of its own that it asked for before.
    host.ask(7, 3000);
    CHECK(set(9000, 6) == 7 && host.block->budget_bytes.load() == 3000);
    CHECK(host.block->applied_generation.load() == 7);
    CHECK(set(9000, 7) == 7 && host.block->budget_bytes.load() == 9000);
    host.ask(8, 3000);
    CHECK(set(4000, UINT64_MAX) == 7 && requests.requested() == 4000); // the host's last word: a message
}

#endif

} // namespace

TEST_MAIN()
