// Vectors of sixteen float32 lanes in the compilers' vector extension (g++ and clang, any CPU), and the number formats of the model.
//
// The order of every sum is written out (lane i takes elements i, i + 16, ...; lanes are added pairwise), never left to the compiler,
// so that a row's bits depend on nothing but the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "call.hpp"

constexpr int64_t LANES = 16;
using F = float __attribute__((vector_size(64)));
using U = uint32_t __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using H = uint16_t __attribute__((vector_size(32)));
using B = uint8_t __attribute__((vector_size(16)));

struct Bf16 {
    uint16_t bits;
};

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Bytes to words and back in two steps: compilers take a step of four apart into single lanes.
#if defined(__AVX512F__)
inline U words(B b) { return (U)_mm512_cvtepu8_epi32((__m128i)b); }
#else
inline U words(B b) { return __builtin_convertvector(__builtin_convertvector(b, H), U); }
#endif
inline B bytes(U u) { return __builtin_convertvector(__builtin_convertvector(u, H), B); }

inline F splat(float x) { return x - F{}; }

inline F fma(F a, F b, F c) {  // one rounding where the CPU has it; never the compiler's choice (-ffp-contract=off)
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    float x[16], y[16], z[16];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    for (int h = 0; h < 16; h += 8)
        _mm256_storeu_ps(z + h, _mm256_fmadd_ps(_mm256_loadu_ps(x + h), _mm256_loadu_ps(y + h), _mm256_loadu_ps(z + h)));
    return load<F>(z);
#else
    return a * b + c;
#endif
}

inline F widen(const float* p) { return load<F>(p); }
inline F widen(const Bf16* p) { return (F)(__builtin_convertvector(load<H>(p), U) << 16); }

// The first `n` elements at p, zeros behind them.
template <class T>
inline F get(const T* p, int64_t n) {
    if (n >= LANES) return widen(p);
    T part[LANES] = {};
    std::memcpy(part, p, n * sizeof(T));
    return widen(part);
}

// Rounded to the type, nearest even, kept in float32.
inline F rounded(F x, const float*) { return x; }
inline F rounded(F x, const Bf16*) {
    U u = (U)x;
    U nearest = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    return (F)(x == x ? nearest : ((u | 0x400000u) & 0xffff0000u));
}

inline void put_all(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline void put_all(Bf16* p, F x) {
    H h = __builtin_convertvector((U)rounded(x, p) >> 16, H);
    std::memcpy(p, &h, sizeof h);
}

template <class T>
inline void put(T* p, F x, int64_t n) {
    if (n >= LANES) return put_all(p, x);
    T part[LANES];
    put_all(part, x);
    std::memcpy(p, part, n * sizeof(T));
}

using F8 = float __attribute__((vector_size(32)));
using F4 = float __attribute__((vector_size(16)));

inline F8 low(F v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline F8 high(F v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
inline F4 low(F8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
inline F4 high(F8 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }

inline float total(F v) {  // lanes 8 apart first, then 4, 2, 1
    const F8 eight = low(v) + high(v);
    const F4 four = low(eight) + high(eight);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline F magnitude(F x) { return (F)((U)x & 0x7fffffffu); }

// The largest magnitude; a NaN if there is one, as the bits of a NaN are above those of any number.
inline float largest(F v) {
    using I8 = int32_t __attribute__((vector_size(32)));
    using I4 = int32_t __attribute__((vector_size(16)));
    const F m = magnitude(v);
    const I8 a = (I8)low(m), b = (I8)high(m), eight = a > b ? a : b;
    const I4 c = (I4)low((F8)eight), d = (I4)high((F8)eight), four = c > d ? c : d;
    const int32_t bits = std::max(std::max(four[0], four[2]), std::max(four[1], four[3]));
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float largest(F a, F b) {
    const I x = (I)magnitude(a), y = (I)magnitude(b);
    return largest((F)(x > y ? x : y));
}

inline F with_sign(F x, F sign) { return (F)((U)x | ((U)sign & 0x80000000u)); }

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// e^x with a relative error of about 2^-23 for x <= 88; 0 below -103.
inline F exponential(F x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    F clamped = x < -104.0f ? splat(-104.0f) : x;  // a NaN stays one
    F n = (clamped * 1.44269504f + magic) - magic;
    F r = fma(n, splat(-0.693145752f), clamped);  // ln 2 in two parts, the first with short mantissa
    r = fma(n, splat(-1.42860677e-6f), r);
    F p = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    I e = __builtin_convertvector(n, I), first = e / 2;  // two factors: 2^e alone may be subnormal
    F scaled = p * (F)((first + 127) << 23) * (F)((e - first + 127) << 23);
    return x < -103.0f ? F{} : scaled;
}

// One element.
inline float one(const float* p) { return *p; }
inline float one(const Bf16* p) { return float_of(uint32_t(p->bits) << 16); }
inline void put_one(float* p, float x) { *p = x; }
inline void put_one(Bf16* p, float x) {
    uint32_t u = bits_of(x);
    p->bits = x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u | 0x400000u) >> 16;
}

// ---------------------------------------------------------------- FP8 (e4m3) with a power-of-two scale for 32 values

constexpr int64_t BLOCK = 32;

// Smallest power of two s with amax / s <= 448; amax at least 1e-4.
inline float fp8_scale(float amax) {
    amax = amax > 1e-4f ? amax : 1e-4f;
    return float_of((bits_of(amax * (1.0f / 448.0f)) + 0x7fffffu) & 0x7f800000u);
}

inline float reciprocal_of_power(float scale) { return float_of((254u << 23) - bits_of(scale)); }

// Nearest e4m3 value of |x| <= 448, ties to even, sign of zero kept.
inline F on_e4m3(F x) {
    U u = (U)x;
    F normal = (F)((u + 0x7ffffu + ((u >> 20) & 1)) & 0xfff00000u);
    F subnormal = with_sign(magnitude((magnitude(x) + 24576.0f) - 24576.0f), x);  // 1.5 * 2^14: multiples of 2^-9 remain
    return magnitude(x) < 0.015625f ? subnormal : normal;
}

inline B e4m3_bytes(F x) {  // of values that lie on the grid
    U u = (U)x;
    U normal = (u & 0x7fffffffu) >> 20;
    U subnormal = __builtin_convertvector(magnitude(x) * 512.0f, U);
    U code = magnitude(x) < 0.015625f ? subnormal : normal - (120u << 3);
    return bytes(code | (u >> 24 & 0x80u));
}

inline F e4m3_values(const uint8_t* p) {
    U b = words(load<B>(p));
    U code = b & 0x7fu;
    F normal = (F)((code << 20) + (120u << 23));
    F subnormal = (F)((code << 20) + (121u << 23)) - 0.015625f;
    F value = code < 8 ? subnormal : normal;
    return with_sign((F)(code == 0x7fu ? (U)value | 0x7fc00000u : (U)value), (F)(b << 24));
}

inline float e4m3_value(uint8_t b) {
    float magnitude = (b & 0x7f) < 8 ? (b & 7) * 0x1p-9f : float_of(((b & 0x7fu) << 20) + (120u << 23));
    return b & 0x80 ? -magnitude : magnitude;
}

inline float e8m0_value(uint8_t b) { return b ? float_of(uint32_t(b) << 23) : 0x1p-127f; }

// Two vectors put on the FP8 grid of their common scale, which is returned.
inline float fake_fp8(F& a, F& b) {
    float scale = fp8_scale(largest(a, b));
    float inverse = reciprocal_of_power(scale);
    a = on_e4m3(a * inverse) * scale;
    b = on_e4m3(b * inverse) * scale;
    return scale;
}

// ---------------------------------------------------------------- FP4 (e2m1), two in a byte

// Values of the codes in the low four bits of each lane.
inline F e2m1_values(U codes) {
    const F table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
#if defined(__AVX512F__)
    return (F)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
    return __builtin_shuffle(table, (I)(codes & 15u));
#endif
}

// Sixteen values in eight bytes, low nibble first.
inline F e2m1_values(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return e2m1_values((U)_mm512_or_si512(byte, _mm512_slli_epi64(byte, 28)));
#else
    using B8 = uint8_t __attribute__((vector_size(8)));
    using H8 = uint16_t __attribute__((vector_size(16)));
    const H8 byte = __builtin_convertvector(load<B8>(p), H8);
    return e2m1_values(words((B)((byte | (byte << 4)) & 0x0f0f)));
#endif
}
