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

// The last rd of n values rotated in interleaved pairs by the angles of one table row (rd/2 cosines, rd/2 sines), rounded.
template <class T>
inline void rotate_row(T* x, const float* angles, int64_t n, int64_t rd, bool inverse) {
    for (int64_t i = 0; i < rd / 2; i++) {
        T* p = x + n - rd + 2 * i;
        float a = one(p), b = one(p + 1), cosine = angles[i], sine = inverse ? -angles[rd / 2 + i] : angles[rd / 2 + i];
        put_one(p, a * cosine - b * sine);
        put_one(p + 1, a * sine + b * cosine);
    }
}
