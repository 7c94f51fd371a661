// The C entries of llamapipe's native module.
//
// They are declared in ../cdef, in the headers that cffi reads: so C++ and Python see the same declarations, and a name or
// a number is written once. Everything that may throw in llama.cpp is called through one of them.
#pragma once

#include "ggml-backend.h"
#include "ggml-rpc.h"
#include "ggml.h"
#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "../cdef/30_sampling.h"
#include "../cdef/40_native.h"
#ifdef LP_TESTING
#include "../cdef/50_testing.h"
#endif

#ifdef __cplusplus
}
#endif
