// Runs scenarios in child processes, because a process can have only one shard device. The parent never calls ggml:
// ggml starts threads, and a forked child could inherit a lock that a thread of the parent holds.
#pragma once

#include "check.h"

#include <functional>

#if defined(_WIN32)

#include "system.h"

#include <process.h>

#include <string>

// Windows has no fork. The child is this program again, which runs the same test up to the same call of run_apart. The way
// there is in FRAMESHARD_APART: at each level of nesting, what the calls before it returned, then a bar. So "1,0,|0,|" is the
// second call inside the third call of the test.
inline int run_apart(const std::function<int()> &scenario) {
    static const std::string way = std::getenv("FRAMESHARD_APART") ? std::getenv("FRAMESHARD_APART") : "";
    static size_t at = 0;         // of `way`: what is before it was passed
    static const char *test = ""; // whose calls `earlier` has
    static std::string earlier;   // what calls at the end of the way have returned
    if (at < way.size() && way[at] != '|') {
        const int status = std::atoi(way.c_str() + at);
        at = way.find(',', at) + 1;
        return status;
    }
    if (at < way.size()) {
        at++;
        std::exit(scenario());
    }
    if (test != running_test()) {
        test = running_test();
        earlier.clear();
    }
    std::fflush(nullptr);
    CHECK(fsd::set_environment("FRAMESHARD_APART", (way + earlier + "|").c_str()));
    const int status = (int)_spawnl(_P_WAIT, _pgmptr, _pgmptr, test, (const char *)nullptr);
    CHECK(fsd::set_environment("FRAMESHARD_APART", way.c_str()));
    if ((unsigned)status >= 0xC0000000u) {
        std::fprintf(stderr, "ended by exception %08x\n", (unsigned)status);
    }
    CHECK((unsigned)status < 256);
    earlier += std::to_string(status) + ",";
    return status;
}

#else

#include <sys/wait.h>
#include <unistd.h>

inline int run_apart(const std::function<int()> &scenario) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::exit(scenario());
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "ended by signal %d\n", WTERMSIG(status));
    }
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

#endif

#define SCENARIO(name)                                                                                                 \
    static void scenario_##name();                                                                                     \
    TEST(name) {                                                                                                       \
        CHECK(run_apart([] {                                                                                           \
                  scenario_##name();                                                                                   \
                  return 0;                                                                                            \
              }) == 0);                                                                                                \
    }                                                                                                                  \
    static void scenario_##name()

// A scenario inside "#if defined(__linux__)". CMake registers it on Linux alone.
#define LINUX_SCENARIO(name) SCENARIO(name)
