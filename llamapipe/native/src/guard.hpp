// The catch-all around every C entry: llama.cpp may throw, and an exception that leaves a C frame aborts the process.
#pragma once

#include "native.h"

#include <exception>
#include <type_traits>
#include <utility>

namespace lp {

void set_error(const char * text) noexcept;

// Runs `body`; any exception becomes `failed` and a message for lp_last_error().
template <typename Failed, typename Body> std::invoke_result_t<Body> guard(Failed failed, Body && body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception & e) {
        set_error(e.what());
    } catch (...) {
        set_error("unknown C++ exception");
    }
    return failed;
}

}  // namespace lp
