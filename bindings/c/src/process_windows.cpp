/* Process for Windows. A job object ends the sidecar and its engine when the host ends, even if the host crashes. */
#include "process.h"

#include <algorithm>
#include <cstdint>
#include <cwchar>
#include <vector>

#include <windows.h>

namespace frameshard_core {
namespace {

constexpr DWORD kPipeBytes = 1 << 17; // must hold the whole line, which is written before the child can read it
constexpr UINT kKilled = 137;

std::wstring wide(const std::string &text) {
    int size = MultiByteToWideChar(CP_UTF8, 0, text.data(), int(text.size()), nullptr, 0);
    std::wstring result(size_t(size), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, text.data(), int(text.size()), &result[0], size);
    return result;
}

std::string last_error() {
    wchar_t *text = nullptr;
    DWORD code = GetLastError();
    DWORD size =
        FormatMessageW(FORMAT_MESSAGE_ALLOCATE_BUFFER | FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS,
                       nullptr, code, 0, reinterpret_cast<wchar_t *>(&text), 0, nullptr);
    while (size > 0 && (text[size - 1] == L'\n' || text[size - 1] == L'\r')) {
        --size;
    }
    std::string result = "error " + std::to_string(code);
    int bytes = WideCharToMultiByte(CP_UTF8, 0, text, int(size), nullptr, 0, nullptr, nullptr);
    if (bytes > 0) {
        result.assign(size_t(bytes), '\0');
        WideCharToMultiByte(CP_UTF8, 0, text, int(size), &result[0], bytes, nullptr, nullptr);
    }
    LocalFree(text);
    return result;
}

void close_handle(void **handle) {
    if (*handle != nullptr) {
        CloseHandle(*handle);
        *handle = nullptr;
    }
}

/* A handle for the child. The host closes its own copy after the start. */
class Inherited {
  public:
    Inherited() = default;
    ~Inherited() { close_handle(&handle); }
    Inherited(const Inherited &) = delete;
    Inherited &operator=(const Inherited &) = delete;

    void *handle = nullptr;
};

bool make_pipe(void **ours, void **theirs, bool we_write) {
    SECURITY_ATTRIBUTES inherit = {sizeof inherit, nullptr, TRUE};
    HANDLE read_end = nullptr, write_end = nullptr;
    if (!CreatePipe(&read_end, &write_end, &inherit, kPipeBytes)) {
        return false;
    }
    *ours = we_write ? write_end : read_end;
    *theirs = we_write ? read_end : write_end;
    return SetHandleInformation(*ours, HANDLE_FLAG_INHERIT, 0) != 0;
}

/* Returns the host's environment block with kSafePath added. */
std::vector<wchar_t> safe_environment() {
    std::wstring first = wide(kSafePath);
    std::vector<wchar_t> block(first.begin(), first.end());
    block.push_back(0);
    wchar_t *own = GetEnvironmentStringsW();
    for (const wchar_t *entry = own; entry != nullptr && *entry != 0; entry += wcslen(entry) + 1) {
        block.insert(block.end(), entry, entry + wcslen(entry) + 1);
    }
    block.push_back(0);
    if (own != nullptr) {
        FreeEnvironmentStringsW(own);
    }
    return block;
}

/* Opens the sidecar's log: `file` if it is not empty, else the host's standard error, else the null device. Returns
 * nullptr if that fails. */
void *open_log(const std::string &file) {
    SECURITY_ATTRIBUTES inherit = {sizeof inherit, nullptr, TRUE};
    HANDLE log = INVALID_HANDLE_VALUE;
    if (!file.empty()) {
        log = CreateFileW(wide(file).c_str(), FILE_APPEND_DATA, FILE_SHARE_READ | FILE_SHARE_WRITE, &inherit,
                          OPEN_ALWAYS, FILE_ATTRIBUTE_NORMAL, nullptr);
    } else {
        HANDLE process = GetCurrentProcess(), errors = GetStdHandle(STD_ERROR_HANDLE);
        if (errors == nullptr || errors == INVALID_HANDLE_VALUE ||
            !DuplicateHandle(process, errors, process, &log, 0, TRUE, DUPLICATE_SAME_ACCESS)) {
            log = CreateFileW(L"NUL", GENERIC_WRITE, FILE_SHARE_READ | FILE_SHARE_WRITE, &inherit, OPEN_EXISTING, 0,
                              nullptr);
        }
    }
    return log == INVALID_HANDLE_VALUE ? nullptr : log;
}

} // namespace

Process::~Process() { end(0); }

bool Process::start(const std::string &python, const std::string &log_file, const std::string &line, std::string *why) {
    Inherited in, out, log;
    auto fail = [&](const std::string &what) {
        *why = what + ": " + last_error();
        close_handle(&input_);
        close_handle(&output_);
        close_handle(&job_);
        close_handle(&process_);
        return false;
    };
    const std::string no_start = "cannot start " + python;
    DWORD written = 0;
    if (!make_pipe(&input_, &in.handle, true) || !make_pipe(&output_, &out.handle, false) ||
        !WriteFile(input_, line.data(), DWORD(line.size()), &written, nullptr) || written != line.size()) {
        return fail(no_start);
    }
    log.handle = open_log(log_file);
    if (log.handle == nullptr) {
        return fail("cannot open " + (log_file.empty() ? std::string("a log") : log_file));
    }
    job_ = CreateJobObjectW(nullptr, nullptr);
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits{};
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
    if (job_ == nullptr || !SetInformationJobObject(job_, JobObjectExtendedLimitInformation, &limits, sizeof limits)) {
        return fail(no_start);
    }

    // The child inherits only these three handles. Others of the host would stay open as long as the sidecar runs.
    HANDLE handles[] = {in.handle, out.handle, log.handle};
    SIZE_T size = 0;
    InitializeProcThreadAttributeList(nullptr, 1, 0, &size);
    std::vector<char> room(size);
    auto *attributes = reinterpret_cast<LPPROC_THREAD_ATTRIBUTE_LIST>(room.data());
    if (!InitializeProcThreadAttributeList(attributes, 1, 0, &size)) {
        return fail(no_start);
    }
    STARTUPINFOEXW startup{};
    startup.StartupInfo.cb = sizeof startup;
    startup.StartupInfo.dwFlags = STARTF_USESTDHANDLES;
    startup.StartupInfo.hStdInput = in.handle;
    startup.StartupInfo.hStdOutput = out.handle;
    startup.StartupInfo.hStdError = log.handle;
    startup.lpAttributeList = attributes;
    // Quoting is safe: a Windows path cannot contain a double quote, and kProgram has none.
    std::wstring command = L"\"" + wide(python) + L"\" -c \"" + wide(kProgram) + L"\"";
    std::vector<wchar_t> environment = safe_environment();
    PROCESS_INFORMATION started{};
    // Without a console, Ctrl-C in the host's console does not reach the child. It starts suspended, so that it cannot
    // start processes before it is in the job object.
    bool made =
        UpdateProcThreadAttribute(attributes, 0, PROC_THREAD_ATTRIBUTE_HANDLE_LIST, handles, sizeof handles, nullptr,
                                  nullptr) &&
        CreateProcessW(nullptr, &command[0], nullptr, nullptr, TRUE,
                       CREATE_NO_WINDOW | CREATE_SUSPENDED | CREATE_UNICODE_ENVIRONMENT | EXTENDED_STARTUPINFO_PRESENT,
                       environment.data(), nullptr, &startup.StartupInfo, &started);
    if (!made) {
        bool failed = fail(no_start);
        DeleteProcThreadAttributeList(attributes);
        return failed;
    }
    DeleteProcThreadAttributeList(attributes);
    process_ = started.hProcess;
    if (!AssignProcessToJobObject(job_, process_)) {
        TerminateProcess(process_, kKilled);
        CloseHandle(started.hThread);
        return fail(no_start);
    }
    ResumeThread(started.hThread);
    CloseHandle(started.hThread);
    return true;
}

bool Process::read(std::string *text) {
    char buffer[4096];
    DWORD there = 0, size = 0;
    while (output_ != nullptr) {
        if (!PeekNamedPipe(output_, nullptr, 0, nullptr, &there, nullptr) ||
            (there > 0 && !ReadFile(output_, buffer, std::min<DWORD>(there, sizeof buffer), &size, nullptr))) {
            close_handle(&output_);
        } else if (there == 0) {
            return true;
        } else {
            text->append(buffer, size);
        }
    }
    return false;
}

void Process::wait_readable(int milliseconds) {
    // Windows cannot wait for data in a pipe. So this looks every few milliseconds, and waits for the process
    // meanwhile.
    constexpr int step = 5;
    for (int left = milliseconds; left > 0; left -= step) {
        DWORD there = 0;
        if (output_ != nullptr && (!PeekNamedPipe(output_, nullptr, 0, nullptr, &there, nullptr) || there > 0)) {
            return;
        }
        if (process_ == nullptr || WaitForSingleObject(process_, step) == WAIT_OBJECT_0) {
            Sleep(step);
        }
    }
}

void Process::stop_reading() { close_handle(&output_); }

bool Process::ended(std::string *how) {
    if (process_ != nullptr && WaitForSingleObject(process_, 0) == WAIT_OBJECT_0) {
        DWORD status = 0;
        GetExitCodeProcess(process_, &status);
        how_ = "with status " + std::to_string(status);
        close_handle(&process_);
    }
    *how = how_;
    return process_ == nullptr;
}

void Process::end(double timeout_s) {
    close_handle(&input_);
    close_handle(&output_);
    if (process_ != nullptr) {
        if (WaitForSingleObject(process_, DWORD(timeout_s * 1000)) != WAIT_OBJECT_0) {
            TerminateJobObject(job_, kKilled);
            WaitForSingleObject(process_, INFINITE);
        }
        close_handle(&process_);
    }
    close_handle(&job_); // kills all processes that are left in the job object
}

} // namespace frameshard_core
