/* Process for POSIX systems. process_windows.cpp has the one for Windows. */
#include "process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __APPLE__
#include <crt_externs.h>
#define environ (*_NSGetEnviron()) // a shared library has no `environ` there
#else
extern char **environ;
#endif

namespace frameshard_core {
namespace {

constexpr long kLookAgainNs = 1000000;
constexpr int kLogFd = 3; // descriptor of the log in the child
constexpr size_t kMaxWords = 1000;

void close_fd(int *fd) {
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* Replaces *fd by a descriptor that children do not inherit, with a number above kLogFd. Without this, the descriptors
 * could collide with 0 to 3 of the child, because a host may have closed its standard descriptors. */
bool move_up(int *fd) {
    int moved = *fd < 0 ? -1 : fcntl(*fd, F_DUPFD_CLOEXEC, kLogFd + 1);
    close_fd(fd);
    *fd = moved;
    return moved >= 0;
}

bool open_pipe(int fds[2]) {
#if defined(__linux__)
    bool open = pipe2(fds, O_CLOEXEC) == 0;
#else
    bool open = pipe(fds) == 0;
#endif
    // No other child may inherit the pipe: it would keep the sidecar's input open after the host has ended.
    return open && move_up(&fds[0]) && move_up(&fds[1]);
}

/* Opens the sidecar's log: `file` if it is not empty, else the host's standard error, else /dev/null. Returns -1 with
 * errno if that fails. */
int open_log(const std::string &file) {
    int log = file.empty() ? fcntl(2, F_DUPFD_CLOEXEC, kLogFd + 1)
                           : open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 && file.empty()) {
        log = open("/dev/null", O_WRONLY | O_CLOEXEC);
    }
    move_up(&log);
    return log;
}

/* Writes to the log only if that does not block. If nobody reads the log, this must not block the host, nor end it by
 * SIGPIPE. */
void write_log(int log, const char *text, size_t size) {
    pollfd item = {log, POLLOUT, 0};
    sigset_t broken, before;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken, &before);
    if (poll(&item, 1, 0) > 0 && write(log, text, size) < 0 && errno == EPIPE) {
        sigset_t pending;
        int number = 0;
        if (sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1) {
            sigwait(&broken, &number);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace

Process::~Process() { end(0); }

bool Process::start(const std::string &python, const std::string &log_file, const std::string &line, std::string *why) {
    int in[2] = {-1, -1}, out[2] = {-1, -1}, errors[2] = {-1, -1};
    bool opened = open_pipe(in) && open_pipe(out) && open_pipe(errors);
    int failed = opened ? 0 : errno;
    *why = "cannot make a pipe";
    if (opened) {
        log_ = open_log(log_file);
        failed = log_ < 0 ? errno : 0;
        *why = "cannot open " + (log_file.empty() ? std::string("a log") : log_file);
    }
    if (failed == 0) {
        // The line is written before the child exists, because a child that ends at once would cause a SIGPIPE. The
        // pipe's buffer holds the whole line.
        fcntl(in[1], F_SETFL, O_NONBLOCK);
        failed = write(in[1], line.data(), line.size()) == ssize_t(line.size())
                     ? spawn(python, in[0], out[1], errors[1])
                     : E2BIG;
        *why = "cannot start " + python;
    }
    close_fd(&in[0]);
    close_fd(&out[1]);
    close_fd(&errors[1]);
    input_ = in[1];
    output_ = out[0];
    errors_ = errors[0];
    if (failed != 0) {
        *why += std::string(": ") + std::strerror(failed);
        if (opened && failed == ENOENT && log_ >= 0) {
            *why += ". Install Python 3.10 or newer with frameshard, or say where it is";
        }
        close_fd(&input_);
        stop_reading();
        return false;
    }
    fcntl(output_, F_SETFL, O_NONBLOCK);
    fcntl(errors_, F_SETFL, O_NONBLOCK);
    return true;
}

/* Starts the process. Returns 0, or the error of posix_spawn. */
int Process::spawn(const std::string &python, int input, int output, int errors) {
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, input, 0);
    posix_spawn_file_actions_adddup2(&files, output, 1);
    posix_spawn_file_actions_adddup2(&files, errors, 2);
    posix_spawn_file_actions_adddup2(&files, log_, kLogFd);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD}) {
        sigaddset(&defaults, number);
    }
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    // The child gets its own session, so that Ctrl-C in a terminal reaches only the host.
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

    std::string words[] = {python, "-c", kProgram, "--log-fd", std::to_string(kLogFd)};
    char *argv[] = {&words[0][0], &words[1][0], &words[2][0], &words[3][0], &words[4][0], nullptr};
    std::string safe_path = kSafePath;
    std::vector<char *> environment = {&safe_path[0]};
    for (char **entry = environ; *entry != nullptr; ++entry) {
        if (std::strncmp(*entry, "PYTHONSAFEPATH=", 15) != 0) {
            environment.push_back(*entry);
        }
    }
    environment.push_back(nullptr);
    int failed = posix_spawnp(&pid_, argv[0], &files, &attributes, argv, environment.data());
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (failed != 0) {
        pid_ = 0;
    }
    return failed;
}

bool Process::read(std::string *text) {
    copy_words();
    char buffer[4096];
    while (output_ >= 0) {
        ssize_t size = ::read(output_, buffer, sizeof buffer);
        if (size > 0) {
            text->append(buffer, size_t(size));
        } else if (size < 0 && errno == EINTR) {
            continue;
        } else if (size < 0 && errno == EAGAIN) {
            return true;
        } else {
            close_fd(&output_);
        }
    }
    copy_words(); // Python may have written more before its output ended
    return false;
}

/* Copies Python's standard error to the log, until the sidecar opens the log itself. */
void Process::copy_words() {
    char buffer[4096];
    while (errors_ >= 0) {
        ssize_t size = ::read(errors_, buffer, sizeof buffer);
        if (size > 0) {
            words_.append(buffer, size_t(size));
            words_.erase(0, words_.size() - std::min(words_.size(), kMaxWords));
            write_log(log_, buffer, size_t(size));
        } else if (size < 0 && errno == EINTR) {
            continue;
        } else if (size < 0 && errno == EAGAIN) {
            return;
        } else {
            close_fd(&errors_);
        }
    }
}

void Process::stop_reading() {
    close_fd(&output_);
    close_fd(&errors_);
    close_fd(&log_);
}

void Process::wait_readable(int milliseconds) {
    pollfd items[] = {{output_, POLLIN, 0}, {errors_, POLLIN, 0}}; // poll() ignores negative descriptors
    poll(items, 2, milliseconds);
}

bool Process::ended(std::string *how) {
    int status = 0;
    if (pid_ != 0) {
        pid_t found = waitpid(pid_, &status, WNOHANG);
        if (found == pid_) {
            how_ = WIFSIGNALED(status) ? "by signal " + std::to_string(WTERMSIG(status))
                                       : "with status " + std::to_string(WEXITSTATUS(status));
            pid_ = 0;
        } else if (found < 0 && errno == ECHILD && kill(pid_, 0) != 0 && errno == ESRCH) {
            how_ = "and the host has collected it"; // the host waits for all children, or ignores SIGCHLD
            pid_ = 0;
        }
    }
    *how = how_;
    return pid_ == 0;
}

void Process::end(double timeout_s) {
    close_fd(&input_);
    stop_reading();
    std::string how;
    for (int64_t left = int64_t(timeout_s * 1e9); left > 0 && !ended(&how); left -= kLookAgainNs) {
        timespec pause = {0, kLookAgainNs};
        while (nanosleep(&pause, &pause) != 0 && errno == EINTR) { // the host's signals do not shorten the time
        }
    }
    if (!ended(&how)) {
        kill(pid_, SIGKILL);
        while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
        }
        pid_ = 0;
    }
}

} // namespace frameshard_core
