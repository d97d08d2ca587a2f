// Runs scenarios in child processes, because a process can have only one shard device. The parent never calls ggml:
// ggml starts threads, and a forked child could inherit a lock that a thread of the parent holds.
#pragma once

#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

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

#define SCENARIO(name)                                                                                                 \
    static void scenario_##name();                                                                                     \
    TEST(name) {                                                                                                       \
        CHECK(run_apart([] {                                                                                           \
                  scenario_##name();                                                                                   \
                  return 0;                                                                                            \
              }) == 0);                                                                                                \
    }                                                                                                                  \
    static void scenario_##name()
