// Dot products of float32 rows with weight rows that stay in the checkpoint's format and are decoded in registers.
#pragma once

#include <vector>

#include "simd.hpp"

// Each format decodes 32 consecutive values, number `block` of row `n`, into two vectors.

struct F32Weight {
    const float* data;
    int64_t size;
    void decode(int64_t n, int64_t block, F& a, F& b) const {
        const float* p = data + n * size + block * BLOCK;
        a = widen(p), b = widen(p + LANES);
    }
};

struct Bf16Weight {
    const Bf16* data;
    int64_t size;
    void decode(int64_t n, int64_t block, F& a, F& b) const {
        const Bf16* p = data + n * size + block * BLOCK;
        a = widen(p), b = widen(p + LANES);
    }
};

struct Fp8Weight {  // e4m3, a scale for 32 x 32 values
    const uint8_t *data, *scale;
    int64_t size;
    void decode(int64_t n, int64_t block, F& a, F& b) const {
        const uint8_t* p = data + n * size + block * BLOCK;
        float s = e8m0_value(scale[n / BLOCK * (size / BLOCK) + block]);
        a = e4m3_values(p) * s, b = e4m3_values(p + LANES) * s;
    }
};

struct Fp4Weight {  // e2m1, a scale for each row and 32 values
    const uint8_t *data, *scale;
    int64_t size;
    void decode(int64_t n, int64_t block, F& a, F& b) const {
        const uint8_t* p = data + (n * size + block * BLOCK) / 2;
        float s = e8m0_value(scale[n * (size / BLOCK) + block]);
        a = e2m1_values(p) * s, b = e2m1_values(p + LANES / 2) * s;
    }
};

// Dot products of weight rows n .. n + N - 1 with R rows: y[r * y_stride + n + i]. Which N and R a sum is computed with changes no addition.
template <int N, int R, class W>
inline void dot(const W& weight, int64_t n, const float* const* rows, float* y, int64_t y_stride) {
    F even[N][R] = {}, odd[N][R] = {};
    for (int64_t block = 0; block < weight.size / BLOCK; block++) {
        F a[N], b[N];
        for (int i = 0; i < N; i++) weight.decode(n + i, block, a[i], b[i]);
        for (int r = 0; r < R; r++) {
            const F x = widen(rows[r] + block * BLOCK), z = widen(rows[r] + block * BLOCK + LANES);
            for (int i = 0; i < N; i++) even[i][r] = fma(a[i], x, even[i][r]), odd[i][r] = fma(b[i], z, odd[i][r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) y[r * y_stride + n + i] = total(even[i][r] + odd[i][r]);
}

template <int N, class W>
inline void dot_rows(const W& weight, int64_t n, const float* const* rows, int64_t count, float* y, int64_t y_stride) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) dot<N, 4>(weight, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 3) dot<N, 3>(weight, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 2) dot<N, 2>(weight, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 1) dot<N, 1>(weight, n, rows + r, y + r * y_stride, y_stride);
}

// y[r * y_stride + n] = row r . weight row n, for `count` rows and all `outputs` weight rows.
template <class W>
void multiply(const W& weight, int64_t outputs, const float* const* rows, int64_t count, float* y, int64_t y_stride, int64_t threads) {
    constexpr int64_t PAIR = 2, DECODE_FROM = 12;  // rows from which decoding a weight row once into memory pays
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < outputs / PAIR; n++) {
        if (count < DECODE_FROM) {
            dot_rows<PAIR>(weight, n * PAIR, rows, count, y, y_stride);
            continue;
        }
        thread_local std::vector<float> decoded;
        decoded.resize(PAIR * weight.size);
        for (int64_t i = 0; i < PAIR; i++)
            for (int64_t block = 0; block < weight.size / BLOCK; block++) {
                F a, b;
                weight.decode(n * PAIR + i, block, a, b);
                float* p = decoded.data() + i * weight.size + block * BLOCK;
                put_all(p, a), put_all(p + LANES, b);
            }
        dot_rows<PAIR>(F32Weight{decoded.data(), weight.size}, 0, rows, count, y + n * PAIR, y_stride);
    }
    if (outputs % PAIR) dot_rows<1>(weight, outputs - 1, rows, count, y, y_stride);
}
