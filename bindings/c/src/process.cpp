/* Process over POSIX; process_windows.cpp is the other one. */
#include "process.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

namespace frameshard_core {
namespace {

constexpr long kLookAgainNs = 1000000;

void close_fd(int *fd) {
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* A pipe that no other child inherits: the sidecar would outlive the host if one did. */
bool open_pipe(int fds[2]) {
#if defined(__linux__)
    return pipe2(fds, O_CLOEXEC) == 0;
#else
    if (pipe(fds) != 0) {
        return false;
    }
    fcntl(fds[0], F_SETFD, FD_CLOEXEC);
    fcntl(fds[1], F_SETFD, FD_CLOEXEC);
    return true;
#endif
}

} // namespace

Process::~Process() { end(0); }

bool Process::start(const std::string &python, const std::string &log_file, const std::string &line, std::string *why) {
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    if (!open_pipe(in) || !open_pipe(out)) {
        *why = std::strerror(errno);
        close_fd(&in[0]);
        close_fd(&in[1]);
        return false;
    }
    // The line is written before there is a reader that could die and leave the host with a SIGPIPE; a pipe holds it.
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    bool written = write(in[1], line.data(), line.size()) == ssize_t(line.size());

    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, in[0], 0);
    posix_spawn_file_actions_adddup2(&files, out[1], 1);
    if (!log_file.empty()) {
        posix_spawn_file_actions_addopen(&files, 2, log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    }
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
    // A session of its own: a Ctrl-C in the terminal is the host's to answer.
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

    std::string words[] = {python, "-m", "frameshard.broker"};
    char *argv[] = {&words[0][0], &words[1][0], &words[2][0], nullptr};
    int failed = written ? posix_spawnp(&pid_, argv[0], &files, &attributes, argv, environ) : E2BIG;
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    close_fd(&in[0]);
    close_fd(&out[1]);
    input_ = in[1];
    output_ = out[0];
    if (failed != 0) {
        pid_ = 0;
        close_fd(&input_);
        close_fd(&output_);
        *why = std::strerror(failed);
        return false;
    }
    fcntl(output_, F_SETFL, O_NONBLOCK);
    return true;
}

bool Process::read(std::string *text) {
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
    return false;
}

bool Process::wait_readable(int milliseconds) {
    pollfd item = {output_, POLLIN, 0};
    return output_ < 0 || poll(&item, 1, milliseconds) > 0;
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
            how_ = "and the host has collected it"; // a host that waits for all children, or ignores SIGCHLD
            pid_ = 0;
        }
    }
    *how = how_;
    return pid_ == 0;
}

void Process::end(double timeout_s) {
    close_fd(&input_);
    close_fd(&output_);
    std::string how;
    for (int64_t left = int64_t(timeout_s * 1e9); left > 0 && !ended(&how); left -= kLookAgainNs) {
        timespec pause = {0, kLookAgainNs};
        nanosleep(&pause, nullptr);
    }
    if (!ended(&how)) {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        pid_ = 0;
    }
}

} // namespace frameshard_core
