// Code for instruction sets that not every processor has: what is defined between LP_TARGET("avx2,fma") and LP_TARGET_END
// is compiled for them, its lambdas, too. Standard headers come before: their inline functions are for every processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LP_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define LP_TARGET(names) LP_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define LP_TARGET_END LP_PRAGMA(clang attribute pop)
#else
#define LP_TARGET(names) LP_PRAGMA(GCC push_options) LP_PRAGMA(GCC target(names))
#define LP_TARGET_END LP_PRAGMA(GCC pop_options)
#endif
