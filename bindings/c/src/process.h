/* Starts and ends the sidecar's process. */
#ifndef FRAMESHARD_PROCESS_H
#define FRAMESHARD_PROCESS_H

#include <string>

#ifndef _WIN32
#include <sys/types.h>
#endif

namespace frameshard_core {

/* Python runs this program with -c, and with kSafePath in its environment. Together they keep Python from importing
 * modules from the working directory. Python 3.10 does not know the variable, but imports nothing before the program
 * removes the directory from sys.path. Later versions import modules earlier, but know the variable. */
constexpr char kProgram[] = "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
                            "runpy.run_module('frameshard.broker', run_name='__main__', alter_sys=True)";
constexpr char kSafePath[] = "PYTHONSAFEPATH=1";

class Process {
  public:
    Process() = default;
    ~Process();
    Process(const Process &) = delete;
    Process &operator=(const Process &) = delete;

    /* Starts the module frameshard.broker with `python` and writes `line` to its standard input. The input stays open
     * as long as this object lives. Returns false with a sentence in *why if the process cannot be started. */
    bool start(const std::string &python, const std::string &log_file, const std::string &line, std::string *why);

    /* Appends new standard output of the process to *text. Returns false when the output has ended. Never waits. */
    bool read(std::string *text);
    /* Waits at most `milliseconds` until read() may have new output. */
    void wait_readable(int milliseconds);
    /* Closes the pipes of the output. read() returns false after this. */
    void stop_reading();

    /* Returns true if the process has ended, with *how such as "with status 1". Never waits. */
    bool ended(std::string *how);
    /* The last standard error output of Python from before the sidecar opened its log. Always "" on Windows. */
    const std::string &words() const { return words_; }

    /* Ends the process by closing its standard input. Waits at most `timeout_s`, then kills it. */
    void end(double timeout_s);

  private:
#ifdef _WIN32
    void *process_ = nullptr, *job_ = nullptr; // HANDLEs; nullptr if not open
    void *input_ = nullptr, *output_ = nullptr;
#else
    int spawn(const std::string &python, int input, int output, int errors);
    void copy_words();

    pid_t pid_ = 0; // 0: not started, or its exit status was collected
    int input_ = -1, output_ = -1;
    int errors_ = -1, log_ = -1; // open until the sidecar writes to the log itself
#endif
    std::string how_, words_;
};

} // namespace frameshard_core

#endif
