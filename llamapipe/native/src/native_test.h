// The C entries that only tests and benchmarks call.
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "../cdef/50_testing.h"

#ifdef __cplusplus
}
#endif
