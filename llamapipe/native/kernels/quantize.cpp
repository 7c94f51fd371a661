// Activations to 8 bits, as ggml does it, with the sums that the products need. AVX2, which every level for x86 has, and NEON. A
// value that is not a number makes its whole block so: a model that is broken is not to look well.
#include <cmath>
#include <cstring>

#include "panels.hpp"
#include "target.hpp"

namespace lp::kernels {

size_t row_bytes_k(int64_t n_columns) { return sizeof(RowBlockK) * (n_columns / QK_K); }
size_t row_bytes_32(int64_t n_columns) { return sizeof(RowBlock32) * (n_columns / 32); }

}  // namespace lp::kernels

#if defined(__x86_64__)
LP_TARGET("avx2,fma,f16c")
#include "loads.hpp"

namespace lp::kernels {

// As ggml's quantize_row_q8_K: the value of greatest magnitude becomes -127.
void quantize_k(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    RowBlockK   *out  = static_cast<RowBlockK *>(quantized) + first / QK_K;
    for (int64_t i = first; i < last; i += QK_K, out++) {
        const float *x   = row + i;
        __m256       top = _mm256_setzero_ps(), is_nan = _mm256_setzero_ps();
        for (int k = 0; k < QK_K; k += 8) {
            const __m256 v = _mm256_loadu_ps(x + k);
            top            = _mm256_max_ps(_mm256_andnot_ps(sign, v), top);
            is_nan         = _mm256_or_ps(is_nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        }
        __m128 top4          = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        top4                 = _mm_max_ps(top4, _mm_movehl_ps(top4, top4));
        const float greatest = _mm_cvtss_f32(_mm_max_ss(top4, _mm_movehdup_ps(top4)));
        if (greatest == 0) {
            memset(out, 0, sizeof *out);
            if (_mm256_movemask_ps(is_nan)) out->d = NAN;
            continue;
        }
        // The first value of that magnitude gives the sign.
        float value = greatest;
        for (int k = 0; k < QK_K; k += 8) {
            const __m256 v = _mm256_loadu_ps(x + k);
            const int same = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, v), _mm256_set1_ps(greatest), _CMP_EQ_OQ));
            if (same) {
                value = x[k + __builtin_ctz(static_cast<unsigned>(same))];
                break;
            }
        }
        const float   inverse = -127.f / value;
        const __m256  factor  = _mm256_set1_ps(inverse);
        const __m256i order   = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (int k = 0; k < QK_K; k += 32) {
            __m256i v[4];
            for (int n = 0; n < 4; n++) v[n] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8 * n), factor));
            const __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
            const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            store256(out->q + k, bytes);
            // Sums of 16 bytes: vpmaddubsw with ones, vpmaddwd with ones, then across four lanes.
            const __m256i fours  = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
            const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
            const __m256i whole  = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
            const int     a = _mm256_extract_epi32(whole, 0), b = _mm256_extract_epi32(whole, 4);
            out->sums16[k / 16]     = static_cast<int16_t>(a);
            out->sums16[k / 16 + 1] = static_cast<int16_t>(b);
            out->sums32[k / 32]     = static_cast<int16_t>(a + b);
        }
        out->d = _mm256_movemask_ps(is_nan) ? NAN : 1 / inverse;
    }
}

// As ggml's quantize_row_q8_0 and quantize_row_q8_1 for x86.
void quantize_32(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    const __m256  sign  = _mm256_set1_ps(-0.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    RowBlock32   *out   = static_cast<RowBlock32 *>(quantized) + first / 32;
    for (int64_t i = first; i < last; i += 32, out++) {
        __m256 v[4], top = _mm256_setzero_ps(), is_nan = _mm256_setzero_ps();
        for (int n = 0; n < 4; n++) {
            v[n]   = _mm256_loadu_ps(row + i + 8 * n);
            is_nan = _mm256_or_ps(is_nan, _mm256_cmp_ps(v[n], v[n], _CMP_UNORD_Q));
            top    = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[n]));
        }
        __m128 top4           = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        top4                  = _mm_max_ps(top4, _mm_movehl_ps(top4, top4));
        const float  greatest = _mm_cvtss_f32(_mm_max_ss(top4, _mm_movehdup_ps(top4)));
        const __m256 factor   = _mm256_set1_ps(greatest != 0 ? 127.f / greatest : 0);
        __m256i      q[4];
        for (int n = 0; n < 4; n++) q[n] = _mm256_cvtps_epi32(_mm256_mul_ps(v[n], factor));
        const __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        store256(out->q, bytes);
        const __m256i pairs  = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        const __m256i fours  = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
        const __m256i sums   = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
        out->sums16[0]       = static_cast<int16_t>(_mm256_extract_epi32(sums, 0));
        out->sums16[1]       = static_cast<int16_t>(_mm256_extract_epi32(sums, 4));
        const float d        = _mm256_movemask_ps(is_nan) ? NAN : greatest / 127.f;
        out->d               = _cvtsh_ss(_cvtss_sh(d, 0));
        out->d_sum           = _cvtsh_ss(_cvtss_sh(d * static_cast<float>(out->sum()), 0));
    }
}

}  // namespace lp::kernels
LP_TARGET_END
#elif defined(__aarch64__)
namespace lp::kernels {
namespace {

// Whether one of n values, a multiple of four, is not a number, and the greatest magnitude of the others.
bool has_nan(const float *x, int n, float &greatest) {
    float32x4_t top     = vdupq_n_f32(0);
    uint32x4_t  numbers = vdupq_n_u32(UINT32_MAX);
    for (int k = 0; k < n; k += 4) {
        const float32x4_t v = vld1q_f32(x + k);
        top                 = vmaxnmq_f32(top, vabsq_f32(v));
        numbers             = vandq_u32(numbers, vceqq_f32(v, v));
    }
    greatest = vmaxnmvq_f32(top);
    return vminvq_u32(numbers) == 0;
}

// Sixteen values times a factor, rounded to the nearest integer, ties to the even one; returns their sum.
int16_t put_bytes(const float *x, float factor, int8_t *out) {
    int16x4_t v[4];
    for (int n = 0; n < 4; n++) v[n] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * n), factor)));
    const int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(v[0], v[1])), vqmovn_s16(vcombine_s16(v[2], v[3])));
    vst1q_s8(out, bytes);
    return vaddlvq_s8(bytes);
}

float as_half(float value) { return static_cast<float>(static_cast<__fp16>(value)); }

}  // namespace

// As ggml's quantize_row_q8_K: the value of greatest magnitude becomes -127.
void quantize_k(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    RowBlockK *out = static_cast<RowBlockK *>(quantized) + first / QK_K;
    for (int64_t i = first; i < last; i += QK_K, out++) {
        const float *x        = row + i;
        float        greatest = 0;
        const bool   is_nan   = has_nan(x, QK_K, greatest);
        if (greatest == 0) {
            memset(out, 0, sizeof *out);
            if (is_nan) out->d = NAN;
            continue;
        }
        int k = 0;
        while (fabsf(x[k]) != greatest) k++;  // the first value of that magnitude gives the sign
        const float inverse = -127.f / x[k];
        for (int s = 0; s < 16; s++) out->sums16[s] = put_bytes(x + 16 * s, inverse, out->q + 16 * s);
        for (int s = 0; s < 8; s++) out->sums32[s] = static_cast<int16_t>(out->sums16[2 * s] + out->sums16[2 * s + 1]);
        out->d = is_nan ? NAN : 1 / inverse;
    }
}

// As ggml's quantize_row_q8_0 and quantize_row_q8_1 for ARM, which multiplies by 1 / d.
void quantize_32(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    RowBlock32 *out = static_cast<RowBlock32 *>(quantized) + first / 32;
    for (int64_t i = first; i < last; i += 32, out++) {
        float       greatest = 0;
        const bool  is_nan   = has_nan(row + i, 32, greatest);
        const float d = greatest / 127.f, factor = d != 0 ? 1.f / d : 0;
        for (int s = 0; s < 2; s++) out->sums16[s] = put_bytes(row + i + 16 * s, factor, out->q + 16 * s);
        out->d     = as_half(is_nan ? NAN : d);
        out->d_sum = as_half((is_nan ? NAN : d) * static_cast<float>(out->sum()));
    }
}

}  // namespace lp::kernels
#endif
