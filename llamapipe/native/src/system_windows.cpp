// Windows.
#include "system.hpp"

#include "faults.hpp"
#include "native.h"

#include <climits>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <io.h>
#include <process.h>
#include <stdexcept>
#include <string>
#include <windows.h>

namespace lp::system {

namespace {

std::wstring wide(const char *text) {
    const int n = MultiByteToWideChar(CP_UTF8, 0, text, -1, nullptr, 0);
    if (n <= 0) {
        throw std::runtime_error("the path is not UTF-8");
    }
    std::wstring found(static_cast<size_t>(n), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, text, -1, found.data(), n);
    found.resize(static_cast<size_t>(n) - 1);
    return found;
}

HMODULE module_of(const void *address) {
    HMODULE   found = nullptr;
    const int flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    return GetModuleHandleExW(flags, static_cast<LPCWSTR>(address), &found) ? found : nullptr;
}

}  // namespace

void *open_library(const char *path) {
    const HMODULE library = LoadLibraryExW(wide(path).c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    if (library == nullptr) {
        throw std::runtime_error("the library cannot be loaded: error " + std::to_string(GetLastError()) + " of Windows");
    }
    return library;
}

void *find_function(void *library, const char *name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(library), name));
}

void *library_of(const void *address) { return module_of(address); }

bool is_in_library(const void *address, const char *part) {
    char          path[4 * MAX_PATH];
    const HMODULE library = module_of(address);
    return library && GetModuleFileNameA(library, path, sizeof path) > 0 && strstr(path, part) != nullptr;
}

bool is_allocator(const void *address) {
    const HMODULE library = module_of(address);
    return library &&
           (library == GetModuleHandleW(L"ntdll.dll") || library == module_of(reinterpret_cast<const void *>(&malloc)));
}

int call_stack(void **addresses, int n) { return RtlCaptureStackBackTrace(0, n, addresses, nullptr); }

// Windows reserves in steps of 64 KiB, of which every smaller alignment follows; a larger one is of no use here, where files
// are not mapped.
void *reserve(size_t size, size_t) { return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void release(void *data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }

// Memory that is reserved cannot become a mapping, so the file is read: each process has a copy.
bool put_file(void *data, size_t size, int fd, int64_t offset) {
    const HANDLE file = reinterpret_cast<HANDLE>(_get_osfhandle(fd));
    if (file == INVALID_HANDLE_VALUE) {
        return false;
    }
    for (size_t done = 0; done < size;) {
        OVERLAPPED     where = {};
        const uint64_t place = offset + done;
        where.Offset         = static_cast<DWORD>(place);
        where.OffsetHigh     = static_cast<DWORD>(place >> 32);
        DWORD       n        = 0;
        const DWORD most     = static_cast<DWORD>(size - done < (1u << 30) ? size - done : (1u << 30));
        if (!ReadFile(file, static_cast<char *>(data) + done, most, &n, &where) || n == 0) {
            return false;  // what was read is written over by who packs
        }
        done += n;
    }
    return true;
}

// Windows takes pages of files from a process when it wants memory.
void let_go(const void *, size_t) {}

namespace {
struct Job {
    void (*work)(void *);
    void *data;
};
unsigned __stdcall run(void *job) {
    const Job &mine = *static_cast<Job *>(job);
    mine.work(mine.data);
    return 0;
}
}  // namespace

bool run_with_stack(size_t bytes, void (*work)(void *data), void *data) {
    Job          job  = { work, data };
    const auto   size = static_cast<unsigned>(bytes < UINT_MAX ? bytes : UINT_MAX);
    const HANDLE thread =
            reinterpret_cast<HANDLE>(_beginthreadex(nullptr, size, run, &job, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr));
    if (thread == nullptr) {
        return false;
    }
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
    return true;
}

// Python's event loops wait for no pipes here, so there are none (LoopWaker in wakers.py).
void wake_reader(int) {}

}  // namespace lp::system

// ---- faults: Windows asks the handlers of exceptions before it looks for frames that handle them
namespace {

struct Exit {
    jmp_buf buffer;
    Exit   *outer;
    DWORD   code = 0;
};

thread_local Exit *t_exit = nullptr;
// The system maps nothing below this address. Faults elsewhere mean that memory was overwritten: those end the process.
constexpr ULONG_PTR kNullPageEnd = 65536;

// The thread continues here, on its own stack, after the handler has returned.
void leave() { longjmp(t_exit->buffer, 1); }

LONG CALLBACK on_exception(EXCEPTION_POINTERS *exception) {
    const EXCEPTION_RECORD &record = *exception->ExceptionRecord;
    const bool is_null = record.ExceptionCode == EXCEPTION_ACCESS_VIOLATION && record.ExceptionInformation[1] < kNullPageEnd;
    if (t_exit == nullptr || (!is_null && record.ExceptionCode != EXCEPTION_INT_DIVIDE_BY_ZERO) ||
        lp::system::is_allocator(record.ExceptionAddress)) {
        return EXCEPTION_CONTINUE_SEARCH;
    }
    t_exit->code                  = record.ExceptionCode;
    exception->ContextRecord->Rip = reinterpret_cast<DWORD64>(leave);
    exception->ContextRecord->Rsp = (exception->ContextRecord->Rsp - 256) / 16 * 16 - 8;  // as after a call
    return EXCEPTION_CONTINUE_EXECUTION;
}

}  // namespace

namespace lp {

const char *run_until_fault(void (*work)(void *data), void *data) noexcept {
    static void *const installed = AddVectoredExceptionHandler(1, on_exception);
    (void)installed;
    Exit here;
    here.outer = t_exit;
    // Without a frame: longjmp restores the registers, and unwinds nothing.
    if (_setjmp(here.buffer, nullptr) == 0) {
        t_exit = &here;
        work(data);
    }
    t_exit = here.outer;
    return here.code == 0 ? nullptr : here.code == EXCEPTION_INT_DIVIDE_BY_ZERO ? "divided by zero" : "read from a null pointer";
}

}  // namespace lp

// Windows lets nobody shorten a file that is mapped.
int lp_mapping_guard_begin(const char *const *, int) { return 0; }

int lp_mapping_guard_end(void) { return 0; }
