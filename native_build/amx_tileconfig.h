// Included before every source when the compiler's own _tile_loadconfig loses stores to the configuration it loads.
//
// GCC up to 12 declares that ldtilecfg reads a pointer's width of memory; it reads 64 bytes. The optimizer then drops
// the stores to the rest, and the processor faults on the invalid configuration. Same instruction, whole operand.
#pragma once
#if defined(__AMX_TILE__)
#include <immintrin.h>

struct llamapipe_tile_config {
    char bytes[64];
};

static inline __attribute__((always_inline)) void llamapipe_tile_loadconfig(const void * config) {
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const struct llamapipe_tile_config *) config));
}

#define _tile_loadconfig(config) llamapipe_tile_loadconfig(config)
#endif
