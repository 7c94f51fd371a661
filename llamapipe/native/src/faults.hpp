// Faults inside llama.cpp as exceptions, where nothing goes on with what was begun: loading a model, creating a context.
#pragma once

#include "guard.hpp"

#include <stdexcept>
#include <string>

namespace lp {

// Calls work(data); the name of the fault that ended it, or null. What it had allocated and locked stays so.
const char * run_until_fault(void (*work)(void * data), void * data) noexcept;

// Runs `body` and returns its result, `failed` if it threw (see lp_last_error). Throws if it read from a null pointer or
// divided by zero: a file that passed all checks did not fit what its architecture's code takes for granted.
template <typename Result, typename Body> Result without_faults(Result failed, Body && body) {
    struct Work {
        Result failed, result;
        Body & body;
    } work = { failed, failed, body };
    const auto run = [](void * data) {
        Work & mine = *(Work *) data;
        mine.result = guard(mine.failed, mine.body);
    };
    if (const char * fault = run_until_fault(run, &work)) {
        throw std::runtime_error(std::string("llama.cpp ") + fault + ": the file does not fit its architecture, convert the model again; "
                                 "the memory that was taken meanwhile is lost");
    }
    return work.result;
}

}  // namespace lp
