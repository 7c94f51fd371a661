// Errors of llama.cpp, in whatever form they come, as codes and exceptions.
//
// An exception that leaves a C entry would abort the process: guard() turns it into a code and a message. A failed assertion
// throws, and a null pointer or a division by zero in code for a file that does not fit is left by a long jump, where nothing
// goes on with what was begun: while a model is loaded, a context is created, a graph is built.
#pragma once

#include "native.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace lp {

// ---- the catch-all around every C entry: llama.cpp may throw, and an exception that leaves a C frame aborts the process
void set_error(const char *text) noexcept;

// Runs `body`; any exception becomes `failed` and a message for lp_last_error().
template <typename Failed, typename Body> std::invoke_result_t<Body> guard(Failed failed, Body &&body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception &e) {
        set_error(e.what());
    } catch (...) {
        set_error("unknown C++ exception");
    }
    return failed;
}

// ---- failed assertions of llama.cpp and ggml as exceptions
void watch_assertions() noexcept;

// While one lives, a failed assertion on this thread throws instead of ending the process. Only where what was begun is not
// used afterwards: loading a model, creating a context. Not while a graph is computed: its other threads would wait for ever.
class AssertionsThrow {
public:
    AssertionsThrow() noexcept;
    ~AssertionsThrow();
    AssertionsThrow(const AssertionsThrow &)            = delete;
    AssertionsThrow &operator=(const AssertionsThrow &) = delete;
};

// The same while a graph is built and computed, but for what a backend finds: its other threads would wait for ever.
class DecodeAssertionsThrow {
public:
    DecodeAssertionsThrow() noexcept;
    ~DecodeAssertionsThrow();
    bool happened() const noexcept;  // since it was made: what computes the graph is left half changed
    DecodeAssertionsThrow(const DecodeAssertionsThrow &)            = delete;
    DecodeAssertionsThrow &operator=(const DecodeAssertionsThrow &) = delete;
};

// Calls work(data); the name of the fault that ended it, or null. What it had allocated and locked stays so.
const char *run_until_fault(void (*work)(void *data), void *data) noexcept;

// Runs `body` and returns its result, `failed` if it threw (see lp_last_error). Throws if it read from a null pointer or
// divided by zero: a file that passed all checks did not fit what its architecture's code takes for granted.
template <typename Failed, typename Body> std::invoke_result_t<Body> without_faults(Failed failed, Body &&body) {
    using Result = std::invoke_result_t<Body>;
    struct Work {
        Result failed, result;
        Body  &body;
    } work         = { failed, failed, body };
    const auto run = [](void *data) {
        Work &mine  = *static_cast<Work *>(data);
        mine.result = guard(mine.failed, mine.body);
    };
    if (const char *fault = run_until_fault(run, &work)) {
        throw std::runtime_error(std::string("llama.cpp ") + fault +
                                 ": the file does not fit its architecture, convert the model again; "
                                 "the memory that was taken meanwhile is lost");
    }
    return work.result;
}

}  // namespace lp
