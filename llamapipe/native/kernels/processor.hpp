// What this processor has. __builtin_cpu_supports would do, but with zig's run-time library it says that there is nothing.
#pragma once

#if defined(__x86_64__)
#include <array>
#include <cstdint>

namespace lp::kernels {

// avx2: with FMA and F16C. avx512: F, DQ, BW and VL, with avx2. amx_bf16: with avx512_vnni and conversions to bfloat16. Also
// whether the system saves the registers.
struct Processor {
    bool avx2 = false, avx512 = false, avx512_vnni = false, avx_vnni = false, amx_bf16 = false;
};

// The registers A, B, C and D; zeros if the processor does not have the leaf. Not <cpuid.h>: Windows' headers have other
// functions of the same names.
inline std::array<uint32_t, 4> cpuid(uint32_t leaf, uint32_t part = 0) {
    const auto ask = [](uint32_t a, uint32_t c) {
        std::array<uint32_t, 4> r = {};
        __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(a), "c"(c));
        return r;
    };
    return leaf <= ask(0, 0)[0] ? ask(leaf, part) : std::array<uint32_t, 4>{};
}

inline const Processor &processor() {
    static const Processor found = [] {
        Processor      mine;
        const uint32_t basic = cpuid(1)[2], fma = 1u << 12, xsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
        if ((~basic & (fma | xsave | avx | f16c)) != 0) {
            return mine;
        }
        uint32_t saved = 0, high = 0;
        __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        const auto     extended = cpuid(7);
        const uint32_t avx512   = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
        mine.avx2               = (saved & 0x06) == 0x06 && (extended[1] & 1u << 5);
        mine.avx512             = mine.avx2 && (saved & 0xe6) == 0xe6 && (~extended[1] & avx512) == 0;
        mine.avx512_vnni        = mine.avx512 && (extended[2] & 1u << 11);
        const uint32_t more     = extended[0] >= 1 ? cpuid(7, 1)[0] : 0;
        mine.avx_vnni           = mine.avx2 && (more & 1u << 4);
        const uint32_t tiles = 3u << 17, amx = 1u << 22 | 1u << 24;  // their configuration and data; BF16, TILE
        mine.amx_bf16 = mine.avx512_vnni && (more & 1u << 5) && (saved & tiles) == tiles && (~extended[3] & amx) == 0;
        return mine;
    }();
    return found;
}

}  // namespace lp::kernels
#elif defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace lp::kernels {

// dotprod: products of bytes.
struct Processor {
    bool dotprod = false;
};

inline const Processor &processor() {
    static const Processor found = [] {
        Processor mine;
#if defined(__APPLE__)
        int    has   = 0;
        size_t size  = sizeof has;
        mine.dotprod = sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#elif defined(__linux__)
        mine.dotprod = (getauxval(AT_HWCAP) & 1u << 20) != 0;  // HWCAP_ASIMDDP
#endif
        return mine;
    }();
    return found;
}

}  // namespace lp::kernels
#endif
