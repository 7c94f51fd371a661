// Errors of llama.cpp as codes and exceptions: assertions, null pointers, divisions by zero.
#include "faults.hpp"

#include "ggml.h"

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <new>
#include <stdexcept>
#include <string>

namespace lp {

bool SignalWatch::begin() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (n_begun_ == 0) {
        struct sigaction action{};
        action.sa_sigaction = handler_;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        // The old handler must be known before the new one can run.
        if (sigaction(number_, nullptr, &previous_) != 0 || sigaction(number_, &action, nullptr) != 0) {
            return false;
        }
    }
    n_begun_++;
    return true;
}
void SignalWatch::end() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    struct sigaction                  now{};
    // A handler that was installed meanwhile stays.
    if (--n_begun_ == 0 && sigaction(number_, nullptr, &now) == 0 && now.sa_sigaction == handler_) {
        sigaction(number_, &previous_, nullptr);
    }
}
void SignalWatch::forward(siginfo_t * info, void * context) const noexcept {
    if ((previous_.sa_flags & SA_SIGINFO) != 0 && previous_.sa_sigaction != nullptr) {
        previous_.sa_sigaction(number_, info, context);
    } else if (previous_.sa_handler != SIG_DFL && previous_.sa_handler != SIG_IGN) {
        previous_.sa_handler(number_);
    } else {
        signal(number_, SIG_DFL);  // the instruction runs again and ends the process, as without this handler
    }
}
}  // namespace lp

namespace {

thread_local int t_n_throwing = 0, t_n_decoding = 0, t_n_failed = 0;

std::runtime_error failed_check(const char * message) {
    const char * file = strrchr(message, '/');
    return std::runtime_error(std::string("a check of llama.cpp failed, ") + (file ? file + 1 : message));
}

// Whether a function of a backend's library called, which may compute with several threads.
bool is_in_backend() {
    void *    frames[64];
    const int n = backtrace(frames, 64);
    for (int i = 0; i < n; i++) {
        Dl_info info;
        // The backends are called libggml-cpu, libggml-cuda…; ggml-base has a prefix of ours.
        if (dladdr(frames[i], &info) != 0 && info.dli_fname != nullptr && strstr(info.dli_fname, "libggml-")) {
            return true;
        }
    }
    return false;
}

// ggml ends the process when this returns. Its C functions can be unwound on all of our platforms.
void on_failed_assertion(const char * message) {
    if (t_n_throwing > 0) {
        throw failed_check(message);
    }
    if (t_n_decoding > 0) {
        // ggml.c builds graphs. It says so where malloc failed, and "fatal error" also for a type that does not exist.
        if (strstr(message, "/ggml.c:") && (strstr(message, "fatal error") || strstr(message, "mem_buffer != NULL"))) {
            t_n_failed++;
            throw std::bad_alloc();
        }
        if (!is_in_backend()) {
            t_n_failed++;
            throw failed_check(message);
        }
    }
    fprintf(stderr, "%s\n", message);
    if (strstr(message, "Remote RPC server crashed")) {  // on ggml-rpc's own thread, which nothing can leave
        fputs("llamapipe: an RPC worker ended or closed its connection; ggml-rpc ends this process then. Check the worker,\n"
              "and run the program under a supervisor: docs/guides/rpc.md\n",
              stderr);
    }
}

}  // namespace

namespace lp {

void watch_assertions() noexcept {
    void * frame;
    (void) backtrace(&frame, 1);  // the first call loads a library
    ggml_set_abort_callback(on_failed_assertion);
}

AssertionsThrow::AssertionsThrow() noexcept { t_n_throwing++; }

AssertionsThrow::~AssertionsThrow() { t_n_throwing--; }

DecodeAssertionsThrow::DecodeAssertionsThrow() noexcept {
    t_n_decoding++;
    t_n_failed = 0;
}

bool DecodeAssertionsThrow::happened() const noexcept { return t_n_failed > 0; }

DecodeAssertionsThrow::~DecodeAssertionsThrow() { t_n_decoding--; }

}  // namespace lp

namespace {

struct Exit {
    sigjmp_buf buffer;
    Exit *     outer;
};

void on_fault(int number, siginfo_t * info, void * context);

lp::SignalWatch     g_null_pointers(SIGSEGV, on_fault), g_divisions(SIGFPE, on_fault);
thread_local Exit * t_exit = nullptr;
// The system maps nothing below this address. Faults elsewhere mean that memory was overwritten: those end the process.
constexpr uintptr_t null_page_end = 65536;

void on_fault(int number, siginfo_t * info, void * context) {
    const bool is_null     = number == SIGSEGV && (uintptr_t) info->si_addr < null_page_end && info->si_code == SEGV_MAPERR;
    const bool is_division = number == SIGFPE && info->si_code == FPE_INTDIV;
    if (t_exit != nullptr && (is_null || is_division)) {
        siglongjmp(t_exit->buffer, number);
    }
    (number == SIGSEGV ? g_null_pointers : g_divisions).forward(info, context);
}

}  // namespace

namespace lp {

const char * run_until_fault(void (*work)(void * data), void * data) noexcept {
    const bool watches_pointers = g_null_pointers.begin(), watches_divisions = g_divisions.begin();
    Exit       here;
    here.outer       = t_exit;
    const int number = sigsetjmp(here.buffer, 0);  // the handlers block no signal
    if (number == 0) {
        t_exit = &here;
        work(data);
    }
    t_exit = here.outer;
    if (watches_divisions) {
        g_divisions.end();
    }
    if (watches_pointers) {
        g_null_pointers.end();
    }
    return number == 0 ? nullptr : number == SIGFPE ? "divided by zero" : "read from a null pointer";
}

}  // namespace lp
