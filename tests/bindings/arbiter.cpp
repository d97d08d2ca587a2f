/* Repeats the runs of the arbiter in Python: arbiter FILE. Each call has to give the same decision. */
#include <cmath>
#include <cstdio>
#include <fstream>

#include "codec.h"
#include "frameshard.h"

using frameshard_core::json;

namespace {

/* Repeats one run. Returns the number of the first call that differs; -1 if none does. */
int repeat(const json &run) {
    fs_arbiter *arbiter = nullptr;
    if (fs_arbiter_open(run["budget"], run["step"], run["dwell_s"], run["may_park"].get<bool>(), &arbiter) != FS_OK) {
        return 0;
    }
    int at = 0, wrong = -1;
    for (const json &call : run["calls"]) {
        fs_status status = FS_INTERNAL;
        bool same = true;
        if (call[0] == "decide") {
            const json &given = call[2];
            fs_vram_needs needs{sizeof needs, 0, given[0], given[1], given[2], given[3], given[4], given[5]};
            fs_vram_decision decision{};
            decision.struct_size = sizeof decision;
            status = fs_arbiter_decide(arbiter, call[1], &needs, &decision);
            same = decision.pool_limit_bytes == call[3] && decision.state == call[4] &&
                   decision.vram_budget_bytes == call[5];
        } else if (call[0] == "released") {
            status = fs_arbiter_released(arbiter, call[1]);
        } else if (call[0] == "refused") {
            status = fs_arbiter_refused(arbiter, call[1]);
        } else if (call[0] == "holds") {
            status = fs_arbiter_holds(arbiter, call[1]);
        }
        if (status != FS_OK || !same) {
            wrong = at;
            break;
        }
        ++at;
    }
    fs_arbiter_close(arbiter);
    return wrong;
}

/* Wrong arguments are refused, and nothing is made of them. */
bool refuses() {
    fs_arbiter *arbiter = nullptr;
    fs_vram_needs needs{};
    fs_vram_decision decision{};
    bool good = fs_arbiter_open(0, 1, 1, 0, &arbiter) == FS_BAD_ARGUMENT && arbiter == nullptr;
    good = good && fs_arbiter_open(1, 0, 1, 0, &arbiter) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_open(1, 1, -1, 0, &arbiter) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_open(1, 1, 1, 0, nullptr) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_open(1, 1, 1, 0, &arbiter) == FS_OK;
    good = good && fs_arbiter_released(arbiter, 1) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_decide(arbiter, 0, &needs, &decision) == FS_BAD_ARGUMENT; // no struct_size
    needs.struct_size = sizeof needs;
    decision.struct_size = sizeof decision;
    needs.grant_bytes = UINT64_MAX;
    good = good && fs_arbiter_decide(arbiter, 0, &needs, &decision) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_decide(nullptr, 0, &needs, &decision) == FS_BAD_ARGUMENT;
    fs_arbiter_close(arbiter);
    good = good && fs_arbiter_open(8, 1, 0, 0, &arbiter) == FS_OK;
    needs.grant_bytes = 10;
    needs.sidecar_useful_bytes = 4;
    good = good && fs_arbiter_decide(arbiter, std::nan(""), &needs, &decision) == FS_BAD_ARGUMENT;
    good = good && fs_arbiter_decide(arbiter, 0, &needs, &decision) == FS_OK && decision.vram_budget_bytes == 4;
    good = good && fs_arbiter_refused(arbiter, std::nan("")) == FS_BAD_ARGUMENT; // and the step is still under way
    good = good && fs_arbiter_refused(arbiter, 0) == FS_OK;
    fs_arbiter_close(arbiter);
    fs_arbiter_close(nullptr);
    return good;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: arbiter FILE\n");
        return 2;
    }
    json runs = json::parse(std::ifstream(argv[1]));
    int number = 0, failures = 0, calls = 0;
    for (const json &run : runs) {
        int wrong = repeat(run);
        if (wrong >= 0) {
            std::printf("run %d differs at call %d\n", number, wrong);
            ++failures;
        }
        ++number;
        calls += int(run["calls"].size());
    }
    if (!refuses()) {
        std::printf("a wrong argument was taken\n");
        ++failures;
    }
    std::printf("%d runs with %d calls, %d failures\n", number, calls, failures);
    return failures || calls == 0;
}
