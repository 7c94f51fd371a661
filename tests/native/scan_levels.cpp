// Prints what scans find in rows of many kinds, sums to the last bit. Built for one level at a time and run by test_scans.py.
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

namespace {

// Normal logits; `kind` says what else is in the row.
std::vector<float> row_of(int n, float spread, int kind, std::mt19937 &random) {
    std::vector<float> row(n);
    for (float &logit : row) {
        float sum = 0;  // of twelve numbers: the standard library's distributions differ
        for (int i = 0; i < 12; i++) {
            sum += static_cast<float>(random() >> 8) * 0x1p-24f;
        }
        logit = (sum - 6.0f) * spread;
        if (kind == 1) {
            logit = std::round(logit);  // ties
        }
    }
    for (size_t i = 0; kind >= 2 && i < row.size(); i += 7) {
        row[i] = kind == 2 ? NAN : i % 2 ? INFINITY : -INFINITY;
    }
    return row;
}

void print(const char *name, const std::vector<llama_token_data> &found) {
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    for (const llama_token_data &token : found) {
        hash = (hash ^ static_cast<uint32_t>(token.id)) * 1099511628211u;
    }
    std::printf(" %s %zu %llx", name, found.size(), static_cast<unsigned long long>(hash));
}

}  // namespace

int main() {
    std::mt19937                  random(1);
    std::vector<llama_token_data> out;
    for (const int n : { 1, 7, 16, 31, 64, 255, 256, 257, 1000, 4096, 5000, 40000 }) {
        for (const float spread : { 0.01f, 1.0f, 4.0f, 40.0f }) {
            for (int kind = 0; kind < 4; kind++) {
                const std::vector<float> row = row_of(n, spread, kind, random);
                std::printf("order %d %g %d: %d", n, static_cast<double>(spread), kind, lp::argmax(row.data(), n));
                for (const int k : { 1, 40, 3000 }) {
                    lp::top_k(row.data(), n, std::min(k, n), out);
                    print("top_k", out);
                }
                lp::at_least(row.data(), n, 0.05f, out);
                print("at_least", out);
                std::printf("\nsums %a", lp::log_sum_exp(row.data(), n));
                for (const float temperature : { 0.1f, 0.8f, 5.0f }) {
                    for (int i = 0; i < 16; i++) {
                        std::printf(" %d", lp::draw(row.data(), n, temperature, (i + 0.5) / 16));
                    }
                }
                for (const float p : { 0.1f, 0.9f, 0.999f }) {
                    lp::nucleus(row.data(), n, p, out);
                    print("nucleus", out);
                }
                std::printf("\n");
            }
        }
    }
}
