// The products for vpdpbusd and sdot with vectors written in plain C++, against those of AVX2, or on ARM of NEON: how many
// numbers of each type are equal; fails if one is not. Weights, activations and results end at pages that cannot be read. Built
// and run by test_levels.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "guarded.hpp"
#include "vnni.hpp"

namespace lp::kernels {

#ifdef __aarch64__
extern const Kernel *const kNeonDotprod;
const Kernel *const       &kExpected = kNeonDotprod;
using Half                           = __fp16;
#else
extern const Kernel *const kAvx2;
const Kernel *const       &kExpected = kAvx2;
using Half                           = _Float16;
#endif

namespace {

template <int bytes> struct Plain {
    struct Int {
        uint8_t of[bytes];
    };
    struct Float {
        float of[bytes / 4];
    };
    static constexpr int  kBytes = bytes, kLanes = bytes / 4;
    static constexpr int  kMostPlaces = bytes == 64 ? 512 : 0, kFlip = 0;
    static constexpr bool kSignedProduct = bytes == 16;

    template <typename T, typename F> static Int each(F f) {
        T out[bytes / sizeof(T)];
        for (int i = 0; i < static_cast<int>(bytes / sizeof(T)); i++) out[i] = static_cast<T>(f(i));
        Int v;
        memcpy(&v, out, bytes);
        return v;
    }
    template <typename T> static T at(const Int &v, int i) {
        T value;
        memcpy(&value, v.of + i * sizeof(T), sizeof(T));
        return value;
    }
    template <typename F> static Float each_float(F f) {
        Float v;
        for (int i = 0; i < kLanes; i++) v.of[i] = f(i);
        return v;
    }

    static Int load(const void *address) {
        Int v;
        memcpy(&v, address, bytes);
        return v;
    }
    static void store(void *address, Int v) { memcpy(address, &v, bytes); }
    static Int  bytes_of(int value) {
        return each<uint8_t>([&](int) { return value; });
    }
    static Int set(int32_t value) {
        return each<int32_t>([&](int) { return value; });
    }
    static Int bit_and(Int a, Int b) {
        return each<uint8_t>([&](int i) { return a.of[i] & b.of[i]; });
    }
    static Int bit_or(Int a, Int b) {
        return each<uint8_t>([&](int i) { return a.of[i] | b.of[i]; });
    }
    static Int bit_xor(Int a, Int b) {
        return each<uint8_t>([&](int i) { return a.of[i] ^ b.of[i]; });
    }
    template <int n> static Int left(Int v) {
        return each<uint16_t>([&](int i) { return at<uint16_t>(v, i) << n; });
    }
    template <int n> static Int right(Int v) {
        return each<uint16_t>([&](int i) { return at<uint16_t>(v, i) >> n; });
    }
    template <int n> static Int left_32(Int v) {
        return each<uint32_t>([&](int i) { return at<uint32_t>(v, i) << n; });
    }
    template <int n> static Int arithmetic_right(Int v) {
        return each<int32_t>([&](int i) { return at<int32_t>(v, i) >> n; });
    }
    static Int look_up(const int8_t *table, Int codes) {
        return each<int8_t>([&](int i) { return table[codes.of[i]]; });
    }
    static Int add_bytes(Int a, Int b) {
        return each<uint8_t>([&](int i) { return a.of[i] + b.of[i]; });
    }
    static Int subtract_to_zero(Int a, Int b) {
        return each<uint8_t>([&](int i) { return a.of[i] < b.of[i] ? 0 : a.of[i] - b.of[i]; });
    }
    static Int average(Int a, Int b) {
        return each<uint8_t>([&](int i) { return (a.of[i] + b.of[i] + 1) / 2; });
    }
    static void put_halves(const uint16_t *v, float factor, float *out) { store_floats(out, product(halves(v), floats(factor))); }
    static Int  left_16(Int v, int n) {
        return each<uint16_t>([&](int i) { return at<uint16_t>(v, i) << n; });
    }
    static Int right_16(Int v, int n) {
        return each<uint16_t>([&](int i) { return at<uint16_t>(v, i) >> n; });
    }
    static void widen_words(Int v, Int (&out)[2]) {
        for (int k = 0; k < 2; k++) out[k] = each<uint32_t>([&](int i) { return at<uint16_t>(v, kLanes * k + i); });
    }
    static Int subtract_where(const uint8_t *bits, Int from, Int v) {
        return each<uint8_t>([&](int i) { return bits[i / 8] >> i % 8 & 1 ? from.of[i] - v.of[i] : v.of[i]; });
    }
    template <int n> static Int look_up_16(const uint16_t (&table)[n], Int index) {
        return each<uint16_t>([&](int i) { return table[at<uint16_t>(index, i)]; });
    }
    static void fours(const uint32_t *table, const uint16_t *index, Int (&out)[2]) {
        for (int k = 0; k < 2; k++) out[k] = each<uint32_t>([&](int i) { return table[index[kLanes * k + i]]; });
    }
    static void eights(const uint64_t *table, const uint16_t *index, Int (&first)[2], Int (&second)[2]) {
        for (int k = 0; k < 2; k++) {
            const auto entry = [&](int i) { return table[index[kLanes * k + i]]; };
            first[k]         = each<uint32_t>([&](int i) { return static_cast<uint32_t>(entry(i)); });
            second[k]        = each<uint32_t>([&](int i) { return static_cast<uint32_t>(entry(i) >> 32); });
        }
    }
    static Int dpbusd(Int sum, Int w, Int a) {
        return each<int32_t>([&](int i) {
            int32_t s = at<int32_t>(sum, i);
            for (int k = 4 * i; k < 4 * i + 4; k++) s += w.of[k] * static_cast<int8_t>(a.of[k]);
            return s;
        });
    }
    template <int place> static Int sdot(Int sum, Int w, Int a) {
        return each<int32_t>([&](int i) {
            int32_t s = at<int32_t>(sum, i);
            for (int k = 0; k < 4; k++) s += static_cast<int8_t>(w.of[4 * i + k]) * static_cast<int8_t>(a.of[4 * place + k]);
            return s;
        });
    }
    static Int dpwssd(Int sum, Int a, Int b) {
        return each<int32_t>([&](int i) {
            return at<int32_t>(sum, i) + at<int16_t>(a, 2 * i) * at<int16_t>(b, 2 * i) +
                   at<int16_t>(a, 2 * i + 1) * at<int16_t>(b, 2 * i + 1);
        });
    }
    static Int add(Int a, Int b) {
        return each<int32_t>([&](int i) { return at<int32_t>(a, i) + at<int32_t>(b, i); });
    }
    static Int subtract(Int a, Int b) {
        return each<int32_t>([&](int i) { return at<int32_t>(a, i) - at<int32_t>(b, i); });
    }
    static Int multiply(Int a, Int b) {
        return each<int32_t>([&](int i) { return at<int32_t>(a, i) * at<int32_t>(b, i); });
    }
    static Int widen_unsigned(const uint8_t *v) {
        return each<int32_t>([&](int i) { return v[i]; });
    }
    static Int widen_signed(const int8_t *v) {
        return each<int32_t>([&](int i) { return v[i]; });
    }
    static Int load_pairs_unsigned(const uint8_t *v) {
        return each<int16_t>([&](int i) { return v[i]; });
    }
    static Int load_pairs_signed(const int8_t *v) {
        return each<int16_t>([&](int i) { return v[i]; });
    }
    static Int greater(Int a, Int b) {
        return each<int32_t>([&](int i) { return std::max(at<int32_t>(a, i), at<int32_t>(b, i)); });
    }
    static Float as_floats(Int v) {
        Float out;
        memcpy(out.of, v.of, bytes);
        return out;
    }
    static Float to_floats(Int v) {
        return each_float([&](int i) { return static_cast<float>(at<int32_t>(v, i)); });
    }
    static Float floats(float value) {
        return each_float([&](int) { return value; });
    }
    static Float product(Float a, Float b) {
        return each_float([&](int i) { return a.of[i] * b.of[i]; });
    }
    static Float multiply_add(Float a, Float b, Float c) {
        return each_float([&](int i) { return std::fmaf(a.of[i], b.of[i], c.of[i]); });
    }
    static Float load_floats(const float *v) {
        return each_float([&](int i) { return v[i]; });
    }
    static void  store_floats(float *v, Float values) { memcpy(v, values.of, sizeof values.of); }
    static Float halves(const uint16_t *v) {
        return each_float([&](int i) {
            Half half;
            memcpy(&half, v + i, 2);
            return static_cast<float>(half);
        });
    }
};

template <int n> struct Vectors : Plain<n> {
    static typename Plain<n>::Int bytes(int value) { return Plain<n>::bytes_of(value); }
};

struct ManyPanels {
    static constexpr const char *kName = "64 bytes";
    static constexpr Tile        kTile = { 4, 4 }, kSuperTile = { 8, 2 }, kLowTile = { 4, 2 };
    static constexpr Tile        kDirectTile     = { 4, 4 };
    static constexpr int         kMostDirectRows = 8;
};
struct OnePanel {
    static constexpr const char *kName = "32 bytes";
    static constexpr Tile        kTile = { 4, 1 }, kSuperTile = kTile, kLowTile = kTile;
    static constexpr Tile        kDirectTile     = { 2, 1 };
    static constexpr int         kMostDirectRows = 2;
};
struct OneShort : OnePanel {
    static constexpr const char *kName = "16 bytes";
};
using Wide   = Vnni<Vectors<64>, ManyPanels>;
using Narrow = Vnni<Vectors<32>, OnePanel>;
using Short  = Vnni<Vectors<16>, OneShort>;

const Kernel *const kWide = kKernels<Wide>, *const kNarrow = kKernels<Narrow>, *const kShort = kKernels<Short>;

// Bit for bit, but for what a number that is none looks like.
bool is_same(float a, float b) { return std::isnan(a) ? std::isnan(b) : memcmp(&a, &b, sizeof a) == 0; }

}  // namespace
}  // namespace lp::kernels

// All rows, and few: those are what they are among others. How many numbers are equal; -1 if one is not.
int check(int i, int64_t n_columns, std::mt19937 &random) {
    using namespace lp::kernels;
    constexpr int       n_panels = 7, n_rows = 11, n_levels = 4;
    const Kernel       &expected          = kExpected[i];
    const Kernel *const kernels[n_levels] = { &expected, &kWide[i], &kNarrow[i], &kShort[i] };
    // Any bytes are weights. Some of their scales are not numbers; the results are compared where they are.
    const Guarded<uint8_t> weights(expected.panel_bytes(n_columns) * n_panels);
    for (uint8_t &byte : weights) byte = static_cast<uint8_t>(random());
    const auto           row = static_cast<int64_t>(expected.row_bytes(n_columns));
    const Guarded<char>  quantized(row * n_rows);
    const Guarded<float> activations(n_columns);
    const void          *rows[n_rows];
    for (int j = 0; j < n_rows; j++) {
        for (float &x : activations) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500;
        rows[j] = quantized + row * j;
        expected.quantize(activations + 0, n_columns, 0, n_columns, quantized + row * j);
    }
    constexpr int64_t n_results = 16 * n_panels;
    // The last rows, so that the last one ends where rows and results do.
    const auto multiply = [&](const Kernel &kernel, int n, const Guarded<float> &y) {
        float *to[n_rows];
        for (int j = 0; j < n; j++) to[j] = y + n_results * j;
        kernel.multiply(weights + 0, n_panels, n_columns, rows + n_rows - n, n, to);
    };
    const Guarded<float> y(n_results * n_rows);
    multiply(expected, n_rows, y);
    int n_numbers = 0;
    for (int k = 0; k < n_levels; k++) {
        for (int n = 1; n <= n_rows; n++) {
            const Guarded<float> some(n_results * n);
            multiply(*kernels[k], n, some);
            for (int64_t at = 0; at < some.size(); at++) {
                const float of_all = y[n_results * (n_rows - n) + at];
                n_numbers += std::isfinite(of_all);
                if (!is_same(some[at], of_all)) {
                    printf("type %d, %s, %d columns, %d rows: y[%d] is %g, expected %g\n", static_cast<int>(expected.type),
                           kernels[k]->level, static_cast<int>(n_columns), n, static_cast<int>(at), some[at], of_all);
                    return -1;
                }
            }
        }
    }
    return n_numbers;
}

int main() {
    using namespace lp::kernels;
    std::mt19937 random(1);
    for (int i = 0; kExpected[i].multiply; i++) {
        // An even number of blocks, and an odd one.
        const int even = check(i, 512, random), odd = check(i, 3 * kExpected[i].block_columns, random);
        if (even < 0 || odd < 0) return 1;
        printf("type %d: %d numbers are equal\n", static_cast<int>(kExpected[i].type), even + odd);
    }
    return 0;
}
