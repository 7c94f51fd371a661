// Products of floats at each level of this processor, against the chain of additions that defines a result, in plain C++:
// how many numbers of each level are equal; fails if one is not. Built and run by test_levels.py.
#include "float_products.hpp"
#include "target.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace lp::kernels {

extern const FloatLevel kFloatsAvx2, kFloatsAvx512;

namespace {

LP_TARGET("fma")  // else each addition would be a call

float plain(const float *w, const float *x, int n) {
    const int whole     = n / 8 * 8;
    float     totals[8] = {};
    for (int begin = 0; begin < whole; begin += 256) {
        float     sums[8] = {};
        const int end     = begin + 256 < whole ? begin + 256 : whole;
        for (int c = begin; c < end; c++) sums[c % 8] = std::fmaf(w[c], x[c], sums[c % 8]);
        for (int i = 0; i < 8; i++) totals[i] += sums[i];
    }
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) totals[i] += totals[i + half];
    float result = totals[0];
    for (int c = whole; c < n; c++) result = std::fmaf(w[c], x[c], result);
    return result;
}

LP_TARGET_END

// A random finite number of a type, as it is stored, and its value.
float draw(ggml_type type, std::mt19937 &random, char *stored) {
    float value;
    if (type == GGML_TYPE_F32) {
        value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 700;
        memcpy(stored, &value, 4);
    } else if (type == GGML_TYPE_F16) {
        const uint16_t bits = static_cast<uint16_t>(random() & 0xbfff);  // all below 2, denormal ones included
        _Float16       half;
        memcpy(&half, &bits, 2);
        memcpy(stored, &bits, 2);
        value = static_cast<float>(half);
    } else {
        const uint32_t bits = static_cast<uint32_t>(random() & 0xbfff) << 16;
        memcpy(stored, reinterpret_cast<const char *>(&bits) + 2, 2);
        memcpy(&value, &bits, 4);
    }
    return value;
}

bool check(const FloatLevel &level, ggml_type type, int n_columns, int n_weights, int n_rows, std::mt19937 &random, long &n) {
    const size_t bytes = type == GGML_TYPE_F32 ? 4 : 2;
    // Memory without room behind its last number, so that reading further is seen by a sanitizer.
    std::vector<char>  weights(static_cast<size_t>(n_weights) * n_columns * bytes);
    std::vector<float> w(static_cast<size_t>(n_weights) * n_columns), x(static_cast<size_t>(n_rows) * n_columns),
            y(static_cast<size_t>(n_rows) * n_weights, NAN);
    for (size_t i = 0; i < w.size(); i++) w[i] = draw(type, random, weights.data() + i * bytes);
    for (float &v : x) v = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500;
    std::vector<int32_t> numbers(n_rows);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random);
    const FloatMatrix m = { weights.data(),
                            reinterpret_cast<const char *>(x.data()),
                            reinterpret_cast<char *>(y.data()),
                            n_columns * bytes,
                            n_columns * sizeof(float),
                            n_weights * sizeof(float),
                            n_columns,
                            random() % 2 ? numbers.data() : nullptr };
    const int first = static_cast<int>(random() % n_weights), last = first + 1 + static_cast<int>(random() % (n_weights - first));
    std::vector<float> scratch(random() % 4 * 8 * static_cast<size_t>(n_columns));  // for up to three tiles of AVX-512
    level.multiply(type, m, first, last, n_rows, { scratch.data(), static_cast<int64_t>(scratch.size()) });
    for (int row = 0; row < n_rows; row++)
        for (int i = 0; i < n_weights; i++) {
            const float found    = y[static_cast<size_t>(row) * n_weights + i];
            const float expected = plain(w.data() + static_cast<size_t>(i) * n_columns,
                                         x.data() + static_cast<size_t>(row) * n_columns, n_columns);
            const bool  is_equal = first <= i && i < last ? !memcmp(&found, &expected, 4) : std::isnan(found);
            if (!is_equal) {
                printf("%s: type %d, %d columns, weights %d to %d, %d rows: y[%d][%d] is %a, expected %a\n", level.name,
                       static_cast<int>(type), n_columns, first, last, n_rows, row, i, found, expected);
                return false;
            }
            n += first <= i && i < last;
        }
    return true;
}

}  // namespace
}  // namespace lp::kernels

int main() {
    using namespace lp::kernels;
    std::vector<const FloatLevel *> levels = { &kFloatsAvx2 };
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        levels.push_back(&kFloatsAvx512);
    for (const FloatLevel *level : levels) {
        std::mt19937 random(1);
        long         n = 0;
        for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 })
            for (const int n_columns : { 1, 7, 8, 16, 67, 256, 264, 520, 1001 })
                for (const int n_weights : { 1, 3, 8, 16, 29 })
                    for (int n_rows = 1; n_rows <= 30; n_rows += n_rows == 14 ? 9 : 1)
                        if (!check(*level, type, n_columns, n_weights, n_rows, random, n)) return 1;
        printf("%s: %ld numbers are equal\n", level->name, n);
    }
    return 0;
}
