// One cached vector in each storage format: its values, and apart from them the scales of its groups.
#pragma once

#include "simd.hpp"

enum Format : int64_t { FP8 = 0, FP4 = 1, FP4_INDEX = 2, BF16 = 3, F32 = 4 };  // as in deepinfer_simd/tensors.py

// Sixteen values from number i on, i a multiple of 16.
inline F decode(int64_t format, const uint8_t* data, const uint8_t* scales, int64_t i) {
    switch (format) {
        case FP8: return e4m3_values(data + i) * e8m0_value(scales[i / BLOCK]);
        case FP4: return e2m1_values(data + i / 2) * e4m3_value(scales[i / LANES]);
        case FP4_INDEX: return e2m1_values(data + i / 2) * e8m0_value(scales[i / BLOCK]);
        case BF16: return widen(reinterpret_cast<const Bf16*>(data) + i);
        default: return widen(reinterpret_cast<const float*>(data) + i);
    }
}

// Nearest e2m1 value of x, ties to the even code, sign of zero kept; at most 6 in magnitude.
inline F on_e2m1(F x) {
    const F m = magnitude(x);
    const U u = (U)m;
    const F one_bit = (F)((u + 0x1fffffu + ((u >> 22) & 1)) & 0xffc00000u);
    const F halves = (m + 6291456.0f) - 6291456.0f;  // 1.5 * 2^22: multiples of 1/2 remain
    const F nearest = m < 1.0f ? halves : one_bit;
    return with_sign(nearest > 6.0f ? splat(6.0f) : nearest, x);
}

// Codes of sixteen values that lie on the grid, two in a byte, low nibble first.
inline void put_e2m1(uint8_t* p, F x) {
    const F m = magnitude(x);
    const U code = m < 1.0f ? __builtin_convertvector(m + m, U) : ((U)m >> 22) - 252u;
    const B b = bytes(code | ((U)x >> 28 & 8u));
    for (int half = 0; half < 2; half++) {  // eight codes in the bytes of a word: its odd bytes move next to the even ones
        uint64_t word;
        std::memcpy(&word, reinterpret_cast<const uint8_t*>(&b) + 8 * half, sizeof word);
        word = (word | word >> 4) & 0x00ff00ff00ff00ffu;
        word = (word | word >> 8) & 0x0000ffff0000ffffu;
        const uint32_t packed = uint32_t(word | word >> 16);
        std::memcpy(p + 4 * half, &packed, sizeof packed);
    }
}

inline float at_least(float x, float floor) { return x < floor ? floor : x; }

// Scale of sixteen values of compressed entries, on the e4m3 grid.
inline float fp4_scale(float amax) {
    const float scale = at_least(amax, 6 * 0x1p-9f) / 6.0f;
    return on_e4m3(splat(scale > 448.0f ? 448.0f : scale))[0];
}

// Scale of 32 values of index keys and queries, a power of two.
inline float fp4_index_scale(float amax) {
    return float_of((bits_of(at_least(amax, 6 * 0x1p-126f) * (1.0f / 6.0f)) + 0x7fffffu) & 0x7f800000u);
}

// Two vectors put on the grid of index keys and queries.
inline void fake_fp4_index(F& a, F& b) {
    const float scale = fp4_index_scale(largest(a, b)), inverse = reciprocal_of_power(scale);
    a = on_e2m1(a * inverse) * scale;
    b = on_e2m1(b * inverse) * scale;
}

// Stores 32 values, number i and up.
inline void encode(int64_t format, F a, F b, int64_t i, uint8_t* data, uint8_t* scales) {
    if (format == FP8) {
        const float scale = fp8_scale(largest(a, b)), inverse = reciprocal_of_power(scale);
        const B first = e4m3_bytes(on_e4m3(a * inverse)), second = e4m3_bytes(on_e4m3(b * inverse));
        std::memcpy(data + i, &first, sizeof first), std::memcpy(data + i + LANES, &second, sizeof second);
        scales[i / BLOCK] = bits_of(scale) >> 23;
    } else if (format == FP4) {
        const float first = fp4_scale(largest(a)), second = fp4_scale(largest(b));
        put_e2m1(data + i / 2, on_e2m1(a / first)), put_e2m1(data + (i + LANES) / 2, on_e2m1(b / second));
        scales[i / LANES] = e4m3_bytes(splat(first))[0], scales[i / LANES + 1] = e4m3_bytes(splat(second))[0];
    } else if (format == FP4_INDEX) {
        const float scale = fp4_index_scale(largest(a, b)), inverse = reciprocal_of_power(scale);
        put_e2m1(data + i / 2, on_e2m1(a * inverse)), put_e2m1(data + (i + LANES) / 2, on_e2m1(b * inverse));
        scales[i / BLOCK] = bits_of(scale) >> 23;
    } else if (format == BF16) {
        put_all(reinterpret_cast<Bf16*>(data) + i, a), put_all(reinterpret_cast<Bf16*>(data) + i + LANES, b);
    } else {
        put_all(reinterpret_cast<float*>(data) + i, a), put_all(reinterpret_cast<float*>(data) + i + LANES, b);
    }
}
