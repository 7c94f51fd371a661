// Failed assertions of llama.cpp as exceptions. Null pointers and divisions by zero: signals.cpp, system_windows.cpp.
#include "faults.hpp"

#include "ggml.h"
#include "system.hpp"

#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace {

thread_local int t_n_throwing = 0, t_n_decoding = 0, t_n_failed = 0;

// The backends are called libggml-cpu, libggml-cuda…, on Windows ggml-cpu…; ggml-base has a prefix of ours.
#ifdef _WIN32
constexpr const char *kBackendPrefix = "\\ggml-";
#else
constexpr const char *kBackendPrefix = "libggml-";
#endif

std::runtime_error failed_check(const char *message) {
    const char *file = strrchr(message, '/');
    return std::runtime_error(std::string("a check of llama.cpp failed, ") + (file ? file + 1 : message));
}

// Whether a function of a backend's library called, which may compute with several threads.
bool is_in_backend() {
    void     *frames[64];
    const int n = lp::system::call_stack(frames, 64);
    for (int i = 0; i < n; i++) {
        if (lp::system::is_in_library(frames[i], kBackendPrefix)) {
            return true;
        }
    }
    return false;
}

// ggml ends the process when this returns. Its C functions can be unwound on all of our platforms.
void on_failed_assertion(const char *message) {
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

void watch_assertions() noexcept { ggml_set_abort_callback(on_failed_assertion); }

AssertionsThrow::AssertionsThrow() noexcept { t_n_throwing++; }

AssertionsThrow::~AssertionsThrow() { t_n_throwing--; }

DecodeAssertionsThrow::DecodeAssertionsThrow() noexcept {
    t_n_decoding++;
    t_n_failed = 0;
}

bool DecodeAssertionsThrow::happened() const noexcept { return t_n_failed > 0; }

DecodeAssertionsThrow::~DecodeAssertionsThrow() { t_n_decoding--; }

}  // namespace lp
