// Failed assertions of llama.cpp and ggml as exceptions, where that is safe. They also stand for a failed malloc or a
// thread that could not be started.
#include "assertions.hpp"

#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace {

thread_local int t_n_throwing = 0, t_n_allocating = 0, t_n_failed = 0;

// ggml ends the process when this returns. Its C functions can be unwound on all of our platforms.
void on_failed_assertion(const char * message) {
    if (t_n_throwing > 0) {
        const char * file = strrchr(message, '/');
        throw std::runtime_error(std::string("a check of llama.cpp failed, ") + (file ? file + 1 : message));
    }
    // ggml.c builds graphs. It says so where malloc failed, and "fatal error" also for a type that does not exist.
    if (t_n_allocating > 0 && strstr(message, "/ggml.c:")
        && (strstr(message, "fatal error") || strstr(message, "mem_buffer != NULL"))) {
        t_n_failed++;
        throw std::bad_alloc();
    }
    fprintf(stderr, "%s\n", message);
}

}  // namespace

namespace lp {

void watch_assertions() noexcept { ggml_set_abort_callback(on_failed_assertion); }

AssertionsThrow::AssertionsThrow() noexcept { t_n_throwing++; }

AssertionsThrow::~AssertionsThrow() { t_n_throwing--; }

FailedAllocationsThrow::FailedAllocationsThrow() noexcept {
    t_n_allocating++;
    t_n_failed = 0;
}

bool FailedAllocationsThrow::happened() const noexcept { return t_n_failed > 0; }

FailedAllocationsThrow::~FailedAllocationsThrow() { t_n_allocating--; }

}  // namespace lp
