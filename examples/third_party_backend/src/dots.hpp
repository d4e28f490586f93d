// Dot products of float32 rows with the rows of a float32 matrix as torch lays it out.
#pragma once

#include "simd.hpp"

struct Matrix {
    const float* data;
    int64_t size;  // of a row, a multiple of 32
};

// Products of matrix rows n .. n + N - 1 with R rows: y[r * y_stride + n + i]. Which N and R a sum is computed with changes no addition.
template <int N, int R>
inline void dot(const Matrix& matrix, int64_t n, const float* const* rows, float* y, int64_t y_stride) {
    F even[N][R] = {}, odd[N][R] = {};
    for (int64_t k = 0; k < matrix.size; k += 2 * LANES) {
        F a[N], b[N];
        for (int i = 0; i < N; i++) {
            const float* p = matrix.data + (n + i) * matrix.size + k;
            a[i] = widen(p), b[i] = widen(p + LANES);
        }
        for (int r = 0; r < R; r++) {
            const F x = widen(rows[r] + k), z = widen(rows[r] + k + LANES);
            for (int i = 0; i < N; i++) even[i][r] = fma(a[i], x, even[i][r]), odd[i][r] = fma(b[i], z, odd[i][r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) y[r * y_stride + n + i] = total(even[i][r] + odd[i][r]);
}

template <int N>
inline void dot_rows(const Matrix& matrix, int64_t n, const float* const* rows, int64_t count, float* y, int64_t y_stride) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) dot<N, 4>(matrix, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 3) dot<N, 3>(matrix, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 2) dot<N, 2>(matrix, n, rows + r, y + r * y_stride, y_stride);
    if (count - r == 1) dot<N, 1>(matrix, n, rows + r, y + r * y_stride, y_stride);
}

// y[r * y_stride + n] = row r . matrix row n, for `count` rows and all `outputs` matrix rows.
inline void dots(const Matrix& matrix, int64_t outputs, const float* const* rows, int64_t count, float* y, int64_t y_stride) {
    int64_t n = 0;
    for (; n + 2 <= outputs; n += 2) dot_rows<2>(matrix, n, rows, count, y, y_stride);
    if (n < outputs) dot_rows<1>(matrix, n, rows, count, y, y_stride);
}
