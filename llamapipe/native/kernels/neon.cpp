// NEON with products of bytes (dotprod), of 64-bit ARM: four vectors have the 16 rows of a panel.
//
// sdot multiplies signed bytes. Weights are below 128, so those without signs need no change, and no offset is added to others.
#if defined(__aarch64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "target.hpp"

LP_TARGET("arch=armv8.2-a+dotprod")

#include "vnni.hpp"

namespace lp::kernels {
namespace {

struct Vector {
    using Int                            = int32x4_t;
    using Float                          = float32x4_t;
    static constexpr int  kBytes         = 16;
    static constexpr int  kMostPlaces    = 0;
    static constexpr bool kSignedProduct = true;

    static uint8x16_t           u8(Int v) { return vreinterpretq_u8_s32(v); }
    static uint16x8_t           u16(Int v) { return vreinterpretq_u16_s32(v); }
    static int8x16_t            s8(Int v) { return vreinterpretq_s8_s32(v); }
    static int16x8_t            s16(Int v) { return vreinterpretq_s16_s32(v); }
    static Int                  of(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
    static Int                  of(uint16x8_t v) { return vreinterpretq_s32_u16(v); }
    static Int                  of(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
    static Int                  of(int8x16_t v) { return vreinterpretq_s32_s8(v); }
    static Int                  of(int16x8_t v) { return vreinterpretq_s32_s16(v); }
    static Int                  load(const void *address) { return of(vld1q_u8(static_cast<const uint8_t *>(address))); }
    static void                 store(void *address, Int v) { vst1q_u8(static_cast<uint8_t *>(address), u8(v)); }
    static Int                  bytes(int value) { return of(vdupq_n_s8(static_cast<int8_t>(value))); }
    static Int                  set(int32_t value) { return vdupq_n_s32(value); }
    static Int                  bit_and(Int a, Int b) { return vandq_s32(a, b); }
    static Int                  bit_or(Int a, Int b) { return vorrq_s32(a, b); }
    static Int                  bit_xor(Int a, Int b) { return veorq_s32(a, b); }
    template <int n> static Int left(Int v) { return of(vshlq_n_u16(u16(v), n)); }
    template <int n> static Int right(Int v) {
        if constexpr (n == 0)
            return v;
        else
            return of(vshrq_n_u16(u16(v), n));
    }
    template <int n> static Int left_32(Int v) { return vshlq_n_s32(v, n); }
    template <int n> static Int arithmetic_right(Int v) { return vshrq_n_s32(v, n); }
    static Int                  left_16(Int v, int n) { return of(vshlq_u16(u16(v), vdupq_n_s16(static_cast<int16_t>(n)))); }
    static Int                  right_16(Int v, int n) { return left_16(v, -n); }
    static Int                  look_up(const int8_t *table, Int codes) { return of(vqtbl1q_s8(vld1q_s8(table), u8(codes))); }
    static Int                  add_bytes(Int a, Int b) { return of(vaddq_u8(u8(a), u8(b))); }
    static Int                  subtract_to_zero(Int a, Int b) { return of(vqsubq_u8(u8(a), u8(b))); }
    static Int                  average(Int a, Int b) { return of(vrhaddq_u8(u8(a), u8(b))); }
    static void put_halves(const uint16_t *v, float factor, float *out) { store_floats(out, product(halves(v), floats(factor))); }
    static void widen_words(Int v, Int (&out)[2]) {
        out[0] = of(vmovl_u16(vget_low_u16(u16(v))));
        out[1] = of(vmovl_high_u16(u16(v)));
    }
    static Int subtract_where(const uint8_t *bits, Int from, Int v) {
        const uint8x16_t all = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
        const uint8x16_t in  = vtstq_u8(all, vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)));
        return of(vbslq_u8(in, vsubq_u8(u8(from), u8(v)), u8(v)));
    }
    static void fours(const uint32_t *table, const uint16_t *i, Int (&out)[2]) {
        for (int k = 0; k < 2; k++, i += 4) {
            const uint32_t of_four[4] = { table[i[0]], table[i[1]], table[i[2]], table[i[3]] };
            out[k]                    = of(vld1q_u32(of_four));
        }
    }
    static void eights(const uint64_t *table, const uint16_t *i, Int (&first)[2], Int (&second)[2]) {
        for (int k = 0; k < 2; k++, i += 4) {
            const auto two = [&](int at) {
                return vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(table[i[at]]), vcreate_u64(table[i[at + 1]])));
            };
            first[k]  = of(vuzp1q_u32(two(0), two(2)));
            second[k] = of(vuzp2q_u32(two(0), two(2)));
        }
    }
    template <int place> static Int sdot(Int sum, Int weights, Int activations) {
        return vdotq_laneq_s32(sum, s8(weights), s8(activations), place);
    }
    static Int dpwssd(Int sum, Int a, Int b) {
        const int32x4_t low = vmull_s16(vget_low_s16(s16(a)), vget_low_s16(s16(b))), high = vmull_high_s16(s16(a), s16(b));
        return vaddq_s32(sum, vpaddq_s32(low, high));
    }
    static Int add(Int a, Int b) { return vaddq_s32(a, b); }
    static Int subtract(Int a, Int b) { return vsubq_s32(a, b); }
    static Int multiply(Int a, Int b) { return vmulq_s32(a, b); }
    static Int widen_unsigned(const uint8_t *v) { return of(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(v))))); }
    static Int widen_signed(const int8_t *v) { return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(v))))); }
    static uint8x8_t four_bytes(const void *v) {
        uint32_t word;
        memcpy(&word, v, 4);
        return vcreate_u8(word);
    }
    static Int   load_pairs_unsigned(const uint8_t *v) { return of(vmovl_u8(vld1_u8(v))); }
    static Int   load_pairs_signed(const int8_t *v) { return of(vmovl_s8(vld1_s8(v))); }
    static Int   greater(Int a, Int b) { return vmaxq_s32(a, b); }
    static Float as_floats(Int v) { return vreinterpretq_f32_s32(v); }
    static Float to_floats(Int v) { return vcvtq_f32_s32(v); }
    static Float floats(float value) { return vdupq_n_f32(value); }
    static Float product(Float a, Float b) { return vmulq_f32(a, b); }
    static Float multiply_add(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    static Float load_floats(const float *v) { return vld1q_f32(v); }
    static void  store_floats(float *v, Float values) { vst1q_f32(v, values); }
    static Float halves(const uint16_t *v) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(v))); }
};

// Sixteen of the 32 registers hold sums.
struct Tiles {
    static constexpr const char *kName = "neon-dotprod";
    static constexpr Tile        kTile = { 4, 1 }, kSuperTile = kTile, kLowTile = kTile;
    static constexpr Tile        kDirectTile     = { 2, 1 };
    static constexpr int         kMostDirectRows = 2;
};

using Neon = Vnni<Vector, Tiles>;

}  // namespace

extern const Kernel *const kNeonDotprod = kKernels<Neon>;

}  // namespace lp::kernels
LP_TARGET_END
#endif
