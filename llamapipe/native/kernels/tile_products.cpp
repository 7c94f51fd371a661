// AMX with bfloat16. A tile has 16 rows of 64 bytes: of activations 16 rows by 32 columns, of weights 32 columns by 16 rows, of
// which adjacent columns are pairs, and of sums 16 rows of activations by 16 rows of weights.
#include "tile_products.hpp"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "processor.hpp"
#include "target.hpp"

// GCC 12 warns about its intrinsics, which begin with undefined vectors.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
LP_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")

#include "unpack.hpp"
#include "vector64.hpp"

namespace lp::kernels {
namespace {

constexpr int64_t kPartColumns = 512;  // of two panels at a time: 32 KiB of weights
constexpr int     kTileNumbers = 512, kTileSums = 256;
constexpr size_t  kWeightsBytes = 2 * kPartColumns * kPanelRows * sizeof(uint16_t);

struct TileConfig {
    uint8_t  palette = 0, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t  rows[16]      = {};
};
static_assert(sizeof(TileConfig) == 64);

// While one lives, this thread has eight whole tiles. ggml's kernels configure tiles once a thread, so theirs come back. The
// instructions as text: with GCC up to 12 the intrinsics lose stores to the configuration (native_build/amx_tileconfig.h).
class TileScope {
public:
    TileScope() {
        __asm__ volatile("sttilecfg %0" : "=m"(outer_));
        TileConfig mine;
        mine.palette = 1;
        std::fill_n(mine.row_bytes, 8, uint16_t{ 64 });
        std::fill_n(mine.rows, 8, uint8_t{ 16 });
        load(mine);
    }
    ~TileScope() { load(outer_); }
    TileScope(const TileScope &)            = delete;
    TileScope &operator=(const TileScope &) = delete;

private:
    // A configuration without a palette releases the tiles.
    static void load(const TileConfig &config) { __asm__ volatile("ldtilecfg %0" : : "m"(config)); }

    TileConfig outer_;
};

// ---- weights

// How the bytes of n groups of lines become weights: byte * scale - less, for the 16 rows.
struct Scaling {
    __m512 scale, less;
};

__m512 widened(__m512i v) { return _mm512_cvtepi32_ps(v); }
__m512 bytes_as_floats(const uint8_t *v) { return widened(Vector64::widen_unsigned(v)); }
__m512 bytes_as_floats(const int8_t *v) { return widened(Vector64::widen_signed(v)); }

// The numbers of sub-block s, which are in pairs.
__m512 one_of_pairs(const int8_t (*v)[16][2], int s) {
    const __m512i both = Vector64::load_pairs_signed(v[s / 2][0]);
    return widened(_mm512_srai_epi32(s % 2 ? both : _mm512_slli_epi32(both, 16), 16));
}
__m512 one_of_pairs(const uint8_t (*v)[16][2], int s) {
    const __m512i both = Vector64::load_pairs_unsigned(v[s / 2][0]);
    return widened(_mm512_srli_epi32(s % 2 ? both : _mm512_slli_epi32(both, 16), 16));
}

struct Unsigned : Vector64 {
    static constexpr int kFlip = -128;
};

template <typename Panel> Scaling without_minimum(__m512 scale) {
    return { scale, _mm512_mul_ps(scale, _mm512_set1_ps(kOffset<Unsigned, Panel>)) };
}

// Of group b of a panel's lines, after what unpacking has made of the panel.
template <typename Panel> Scaling scaling(const Panel *panel, const Direct *, int) {
    const __m512 d = [&] {
        if constexpr (std::is_same_v<Panel, PanelMXFP4>) {
            // Half of 2^(e - 127), which is a denormal for e below 2.
            const __m512i e = Vector64::widen_unsigned(panel->e), one = _mm512_set1_epi32(1);
            return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23),
                                                        _mm512_slli_epi32(_mm512_add_epi32(e, one), 21)));
        } else {
            return Vector64::halves(panel->d);
        }
    }();
    if constexpr (kNumbers<Panel>.has_mins)
        return { d, _mm512_sub_ps(_mm512_setzero_ps(), Vector64::halves(panel->m)) };
    else
        return without_minimum<Panel>(d);
}
template <typename Panel> Scaling with_minima(const Panel *panel, int b) {
    return { _mm512_mul_ps(Vector64::halves(panel->d), bytes_as_floats(panel->scales[b])),
             _mm512_mul_ps(Vector64::halves(panel->dmin), one_of_pairs(panel->mins, b)) };
}
Scaling scaling(const PanelQ4_K *panel, const Direct *, int b) { return with_minima(panel, b); }
Scaling scaling(const PanelQ5_K *panel, const Direct *, int b) { return with_minima(panel, b); }
Scaling scaling(const PanelQ6_K *panel, const Direct *, int s) {
    return without_minimum<PanelQ6_K>(_mm512_mul_ps(Vector64::halves(panel->d), one_of_pairs(panel->scales, s)));
}
Scaling scaling(const PanelIQ4_XS *panel, const Direct *, int b) {
    return without_minimum<PanelIQ4_XS>(_mm512_mul_ps(Vector64::halves(panel->d), bytes_as_floats(panel->scales[b])));
}
Scaling scaling(const PanelNVFP4 *, const LinesNVFP4 *w, int b) {
    return without_minimum<PanelNVFP4>(Vector64::load_floats(w->d[b / 2][b % 2]));
}
template <typename Panel> Scaling scaling(const Panel *, const Expanded *w, int s) {
    constexpr Numbers numbers = kNumbers<Panel>;
    const __m512      d       = Vector64::load_floats(w->d);
    const __m512      scale   = numbers.lines == 64 ? d : _mm512_mul_ps(d, one_of_pairs(w->scales, s));
    const __m512      whole   = _mm512_mul_ps(scale, _mm512_set1_ps(numbers.factor));
    if constexpr (numbers.has_mins) {
        const __m512 dmin = numbers.factor == 1 ? Vector64::load_floats(w->dmin) : d;
        return { whole, _mm512_mul_ps(dmin, one_of_pairs(w->mins, s)) };
    } else {
        return { whole, _mm512_mul_ps(scale, _mm512_set1_ps(numbers.offset)) };
    }
}

// A line, four columns of 16 rows, becomes two rows of a tile.
inline void put_line(__m512i line, const Scaling &by, __m512i pairs, uint16_t *to) {
    const __m512i byte   = _mm512_set1_epi32(255);
    const auto    weight = [&](__m512i v) { return _mm512_fmsub_ps(widened(v), by.scale, by.less); };
    const __m512  a = weight(_mm512_and_si512(line, byte)), b = weight(_mm512_and_si512(_mm512_srli_epi32(line, 8), byte)),
                  c = weight(_mm512_and_si512(_mm512_srli_epi32(line, 16), byte)), d = weight(_mm512_srli_epi32(line, 24));
    const auto    put = [&](__m512 low, __m512 high, uint16_t *at) {
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        __m512i        bits;
        memcpy(&bits, &both, sizeof bits);
        _mm512_store_si512(at, _mm512_permutexvar_epi16(pairs, bits));
    };
    put(a, b, to);
    put(c, d, to + 32);
}

// What the lines of a panel are read from: the panel, or what must be made of it first.
template <typename Weights> using Source = std::conditional_t<std::is_same_v<Weights, Lines>, Direct, Weights>;

// The columns [first, first + n) of a panel, multiples of its columns, as tiles.
template <typename Panel, typename W>
void put_weights(const Panel *panel, int64_t first, int64_t n, uint16_t *to) {
    alignas(64) constexpr uint16_t order[32] = { 0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31 };
    const __m512i                  pairs     = _mm512_load_si512(order);
    constexpr int                  columns = PanelType<Panel>::kColumns, lines = std::min(kNumbers<Panel>.lines, 16),
                                   n_groups = columns / 4 / lines;
    panel += first / columns;
    for (const Panel *const end = panel + n / columns; panel != end; panel++) {
        W w;
        if constexpr (!std::is_same_v<W, Direct>) unpack<Unsigned>(panel, 1, w);
        for (int b = 0; b < n_groups; b++) {
            const Scaling by = scaling(panel, &w, b);
            each<lines>([&](auto g) { put_line(line<Unsigned, lines, g>(panel, &w, b, 0), by, pairs, to + 64 * g); });
            to += 64 * lines;
        }
    }
}

// ---- products

// sums += the products of two rows of tiles of activations, of which the second may be missing, with two panels of n tiles.
template <bool is_whole> void add_products(const uint16_t *a, int64_t to_second, const uint16_t *w, int64_t n, float *sums) {
    const uint16_t *second = w + n * kTileNumbers;
    __asm__ volatile("" ::: "memory");  // GCC's loads of tiles do not say that they read memory
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTileSums, 64);
    if constexpr (is_whole) {
        _tile_loadd(2, sums + 2 * kTileSums, 64);
        _tile_loadd(3, sums + 3 * kTileSums, 64);
    }
    for (int64_t i = 0; i < n; i++) {
        _tile_loadd(4, a + i * kTileNumbers, 64);
        _tile_loadd(6, w + i * kTileNumbers, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + i * kTileNumbers, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (is_whole) {
            _tile_loadd(5, a + to_second + i * kTileNumbers, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    if constexpr (is_whole) {
        _tile_stored(2, sums + 2 * kTileSums, 64);
        _tile_stored(3, sums + 3 * kTileSums, 64);
    }
}

// Panels two by two; an odd last one is its own neighbour.
template <typename Panel, typename Weights>
void multiply(const void *panels, int64_t n_panels, int64_t n_results, int64_t n_columns, const uint16_t *rows, int64_t n_rows,
              float *const *y, void *scratch) {
    const TileScope scope;
    const auto     *all      = static_cast<const Panel *>(panels);
    auto           *w        = static_cast<uint16_t *>(scratch);
    auto           *sums     = reinterpret_cast<float *>(static_cast<char *>(scratch) + kWeightsBytes);
    const int64_t   n_blocks = n_columns / PanelType<Panel>::kColumns, row_of_tiles = n_columns * 16;
    const int64_t   n_pairs = (n_rows + 31) / 32;
    memset(sums, 0, (n_panels + 1) / 2 * n_pairs * 4 * kTileSums * sizeof(float));
    for (int64_t first = 0; first < n_columns; first += kPartColumns) {
        const int64_t n = std::min(kPartColumns, n_columns - first), n_tiles = n / 32;
        for (int64_t p = 0; p < n_panels; p += 2) {
            put_weights<Panel, Source<Weights>>(all + n_blocks * p, first, n, w);
            put_weights<Panel, Source<Weights>>(all + n_blocks * std::min(p + 1, n_panels - 1), first, n,
                                                w + n_tiles * kTileNumbers);
            const Panel  *next    = all + n_blocks * std::min(p + 2, n_panels - 1) + first / PanelType<Panel>::kColumns;
            const int64_t n_bytes = n / PanelType<Panel>::kColumns * sizeof(Panel);
            for (int64_t j = 0; j < n_pairs; j++) {
                // The next two panels are read while these are multiplied.
                for (int64_t i = n_bytes * j / n_pairs; i < n_bytes * (j + 1) / n_pairs; i += 64) {
                    __builtin_prefetch(reinterpret_cast<const char *>(next) + i, 0, 2);
                    __builtin_prefetch(reinterpret_cast<const char *>(next + n_blocks) + i, 0, 2);
                }
                const uint16_t *a  = rows + 2 * j * row_of_tiles + first * 16;
                float          *to = sums + (p / 2 * n_pairs + j) * 4 * kTileSums;
                if (n_rows - 32 * j > 16)
                    add_products<true>(a, row_of_tiles, w, n_tiles, to);
                else
                    add_products<false>(a, 0, w, n_tiles, to);
            }
        }
    }
    for (int64_t j = 0; j < n_rows; j++) {
        for (int64_t p = 0; p < n_panels; p++) {
            const float *from = sums + ((p / 2 * n_pairs + j / 32) * 4 + j / 16 % 2 * 2 + p % 2) * kTileSums + j % 16 * 16;
            const auto   mask = static_cast<__mmask16>(n_results - 16 * p >= 16 ? 0xffff : (1 << (n_results - 16 * p)) - 1);
            _mm512_mask_storeu_ps(y[j] + 16 * p, mask, _mm512_load_ps(from));
        }
    }
}

void put_part(const float *row, int64_t n_columns, int64_t first, int64_t last, uint16_t *rows, int64_t i) {
    uint16_t *to = rows + i / 16 * 16 * n_columns + i % 16 * 32;
    for (int64_t k = first; k < last; k += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + k + 16), _mm512_loadu_ps(row + k));
        memcpy(to + k * 16, &both, sizeof both);
    }
}

#define KERNEL(name, block, n, weights, numbers) { GGML_TYPE_##name, multiply<Panel##name, weights> },
constexpr TileKernel kTileKernels[] = { PANELS(KERNEL) };
#undef KERNEL

}  // namespace
}  // namespace lp::kernels
LP_TARGET_END

namespace lp::kernels {

const size_t tile_scratch_bytes = kWeightsBytes + kTileRows * kTilePanels * kPanelRows * sizeof(float);

void put_row(const float *row, int64_t n_columns, int64_t first, int64_t last, void *rows, int64_t i) {
    put_part(row, n_columns, first, last, static_cast<uint16_t *>(rows), i);
}

// The system gives a process the memory for tiles only if it asks.
static bool have_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return processor().amx_bf16 && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

const TileKernel *find_tiles(ggml_type type) {
    static const bool are_there = have_tiles();
    for (const TileKernel &kernel : kTileKernels)
        if (are_there && kernel.type == type) return &kernel;
    return nullptr;
}

}  // namespace lp::kernels
#else
namespace lp::kernels {

const size_t tile_scratch_bytes = 0;

void put_row(const float *, int64_t, int64_t, int64_t, void *, int64_t) {}

const TileKernel *find_tiles(ggml_type) { return nullptr; }

}  // namespace lp::kernels
#endif
