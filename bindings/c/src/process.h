/* The sidecar's process, for the host that starts it. */
#ifndef FRAMESHARD_PROCESS_H
#define FRAMESHARD_PROCESS_H

#include <string>

#ifndef _WIN32
#include <sys/types.h>
#endif

namespace frameshard_core {

/* Runs the sidecar as a program that Python is given with -c, with kSafePath in its environment: no module is taken from
 * the working directory. The variable is unknown to Python 3.10, which imports nothing before the program takes the
 * directory from the path; later ones do, but know the variable. */
constexpr char kProgram[] = "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
                            "runpy.run_module('frameshard.broker', run_name='__main__', alter_sys=True)";
constexpr char kSafePath[] = "PYTHONSAFEPATH=1";

class Process {
  public:
    Process() = default;
    ~Process();
    Process(const Process &) = delete;
    Process &operator=(const Process &) = delete;

    /* Starts the module frameshard.broker with `python`, with `line` waiting on its standard input, which ends with this object.
     * False with the reason in *why, a whole sentence. */
    bool start(const std::string &python, const std::string &log_file, const std::string &line, std::string *why);

    /* Appends what the process has written to its standard output; false when nothing more will come. Never waits. */
    bool read(std::string *text);
    /* Waits until read() may have something, `milliseconds` at most. */
    void wait_readable(int milliseconds);
    /* Closes the outputs: nothing is read after this. */
    void stop_reading();

    /* Whether it has ended, and how, in words. Never waits. */
    bool ended(std::string *how);
    /* The end of what Python wrote to standard error before the sidecar ran; "" where that went elsewhere. */
    const std::string &words() const { return words_; }

    /* Closes its standard input, which ends it; waits `timeout_s` at most, then kills it. */
    void end(double timeout_s);

  private:
#ifdef _WIN32
    void *process_ = nullptr, *job_ = nullptr; // HANDLEs; nullptr: none
    void *input_ = nullptr, *output_ = nullptr;
#else
    int spawn(const std::string &python, int input, int output, int errors);
    void copy_words();

    pid_t pid_ = 0; // 0: none, or reaped
    int input_ = -1, output_ = -1;
    int errors_ = -1, log_ = -1; // until the sidecar writes to the log by itself
#endif
    std::string how_, words_;
};

} // namespace frameshard_core

#endif
