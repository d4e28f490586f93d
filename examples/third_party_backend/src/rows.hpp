// What several ops do to one row.
#pragma once

#include "simd.hpp"

// rounded(x * rsqrt(mean(x^2) + eps) * weight), n elements; y may be x.
template <class T, class X>
inline void rms_norm_row(const X* x, const Bf16* weight, float eps, int64_t n, T* y) {
    F squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        F v = get(x + i, n - i);
        squares = fma(v, v, squares);
    }
    float scale = 1.0f / std::sqrt(total(squares) / n + eps);
    for (int64_t i = 0; i < n; i += LANES) put(y + i, get(x + i, n - i) * scale * get(weight + i, n - i), n - i);
}

// The FP8 activation values of x, n a multiple of 32.
template <class T, class Y>
inline void fake_fp8_row(const T* x, int64_t n, Y* y) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        F a = widen(x + i), b = widen(x + i + LANES);
        fake_fp8(a, b);
        put_all(y + i, a), put_all(y + i + LANES, b);
    }
}

// Up to eight values, each in two lanes.
inline F pairwise(const float* p, int64_t n) {
    float part[8] = {};
    if (n < 8) std::memcpy(part, p, n * sizeof(float));
    const F8 v = load<F8>(n < 8 ? part : p);
    return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}

// The last rd of n values rotated in interleaved pairs by the angles of one table row (rd/2 cosines, rd/2 sines), rounded; y may be x.
template <class T, class X>
inline void rotate_row(const X* x, const float* angles, int64_t n, int64_t rd, bool inverse, T* y) {
    const F sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    for (int64_t i = 0; i < rd; i += LANES) {
        const int64_t place = n - rd + i, left = rd - i;
        const F v = get(x + place, left), cosine = pairwise(angles + i / 2, left / 2), sine = pairwise(angles + (rd + i) / 2, left / 2);
        const F swapped = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
        put(y + place, v * cosine + swapped * sine * (inverse ? -sign : sign), left);
    }
}
