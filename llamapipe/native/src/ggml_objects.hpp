// Owners of ggml's objects, for what computes without a model.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <memory>
#include <stdexcept>

namespace lp::ggml_objects {

template <auto release> struct Free {
    template <typename T> void operator()(T * t) const { release(t); }
};
using Context = std::unique_ptr<ggml_context, Free<ggml_free>>;
using Backend = std::unique_ptr<ggml_backend, Free<ggml_backend_free>>;
using Buffer  = std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer_free>>;
using Memory  = std::unique_ptr<ggml_gallocr, Free<ggml_gallocr_free>>;

// What was made. Throws std::runtime_error where it is null.
template <typename T> T made(T thing, const char * what) {
    if (!thing) {
        throw std::runtime_error(what);
    }
    return thing;
}

}  // namespace lp::ggml_objects
