// Products with tiles: pieces of panels give what all panels at once give. How many numbers of each type are equal; fails if one
// is not. Weights, activations, scratch and results end at pages that cannot be read. Built and run by test_levels.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "guarded.hpp"
#include "kernels.hpp"
#include "tile_products.hpp"

namespace lp::kernels {

extern const Kernel *const kAvx512Vnni;

// How many numbers are equal; -1 if one is not.
static int check(const Kernel &kernel, const TileKernel &tiles, int64_t n_columns, int64_t n_rows, std::mt19937 &random) {
    constexpr int64_t      n_panels = 5, n_results = 16 * n_panels - 3;
    const auto             panel = static_cast<int64_t>(kernel.panel_bytes(n_columns));
    const Guarded<uint8_t> weights(panel * n_panels);
    for (uint8_t &byte : weights) byte = static_cast<uint8_t>(random());
    const Guarded<float>    activations(n_columns);
    const Guarded<uint16_t> rows(static_cast<int64_t>(tile_rows_bytes(n_columns, n_rows) / sizeof(uint16_t)));
    for (int64_t j = 0; j < n_rows; j++) {
        for (float &x : activations) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500;
        put_row(activations + 0, n_columns, 0, n_columns, rows + 0, j);
    }
    const Guarded<char> scratch(static_cast<int64_t>(tile_scratch_bytes));
    const auto          multiply = [&](int64_t first, int64_t n, const Guarded<float> &y) {
        float *to[kTileRows];
        for (int64_t j = 0; j < n_rows; j++) to[j] = y + n_results * j + 16 * first;
        tiles.multiply(weights + panel * first, n, std::min(16 * n, n_results - 16 * first), n_columns, rows + 0, n_rows, to,
                       scratch + 0);
    };
    const Guarded<float> whole(n_results * n_rows), parts(n_results * n_rows);
    multiply(0, n_panels, whole);
    for (int64_t p = 0; p < n_panels; p++) multiply(p, 1, parts);
    int n_numbers = 0;
    for (int64_t i = 0; i < whole.size(); i++) {
        n_numbers += std::isfinite(whole[i]);
        if (std::isnan(whole[i]) ? !std::isnan(parts[i]) : memcmp(whole + i, parts + i, sizeof(float)) != 0) return -1;
    }
    return n_numbers;
}

}  // namespace lp::kernels

int main() {
    using namespace lp::kernels;
    std::mt19937 random(1);
    for (const Kernel *kernel = kAvx512Vnni; kernel->multiply; kernel++) {
        const TileKernel *tiles = find_tiles(kernel->type);
        if (!tiles) return 1;
        const int even = check(*kernel, *tiles, 1024, 33, random),
                  odd  = check(*kernel, *tiles, 3 * kernel->block_columns, 16, random);
        if (even < 0 || odd < 0) return 1;
        printf("type %d: %d numbers are equal\n", static_cast<int>(kernel->type), even + odd);
    }
    return 0;
}
