// A small test harness. TEST(name) { CHECK(...); } defines a test. Each program has one TEST_MAIN(), which runs all
// tests, or those that the arguments name.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct TestCase {
    const char *name;
    void (*run)();
};

inline std::vector<TestCase> &test_cases() {
    static std::vector<TestCase> cases;
    return cases;
}

struct TestRegistration {
    TestRegistration(const char *name, void (*run)()) { test_cases().push_back({name, run}); }
};

// The name of the test that runs.
inline const char *&running_test() {
    static const char *name = "";
    return name;
}

#define TEST(name)                                                                                                     \
    static void test_##name();                                                                                         \
    static const TestRegistration registration_##name(#name, test_##name);                                             \
    static void test_##name()

// A test inside "#ifdef __linux__". CMake registers it on Linux alone.
#define LINUX_TEST(name) TEST(name)

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition);                         \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

#define TEST_MAIN()                                                                                                    \
    int main(int argc, char **argv) {                                                                                  \
        int n_run = 0;                                                                                                 \
        for (const TestCase &test : test_cases()) {                                                                    \
            bool wanted = argc == 1;                                                                                   \
            for (int i = 1; i < argc; i++) {                                                                           \
                wanted = wanted || std::strcmp(argv[i], test.name) == 0;                                               \
            }                                                                                                          \
            if (wanted) {                                                                                              \
                std::fprintf(stderr, "%s\n", test.name);                                                               \
                running_test() = test.name;                                                                            \
                test.run();                                                                                            \
                n_run++;                                                                                               \
            }                                                                                                          \
        }                                                                                                              \
        std::fprintf(stderr, "%d passed\n", n_run);                                                                    \
        return n_run > 0 ? 0 : 1;                                                                                      \
    }
