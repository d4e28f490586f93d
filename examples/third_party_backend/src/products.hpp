// Products of float32 rows with weights that stay in the checkpoint's formats and are decoded in registers.
//
// A weight [outputs, inputs] is packed once: tiles of 16 outputs, a lane each, in blocks of 32 inputs. A sum runs over the inputs of a
// block in order, is multiplied by the block's scale, and is added to the sums of the blocks before. How many rows and tiles are
// computed side by side changes no addition, so a row's bits depend on nothing but the row.
#pragma once

#include <vector>

#include "simd.hpp"
#include "threads.hpp"

enum Format : int64_t { F32 = 0, BF16 = 1, FP8 = 2, FP4 = 3 };

struct Weight {  // as _library.Weight lays it out
    int64_t format, outputs, inputs;
    const uint8_t *data, *scale;  // [tiles, blocks, bytes of a block]; [tiles, blocks, 16] e8m0 or null
    int64_t tiles() const { return (outputs + LANES - 1) / LANES; }
    int64_t blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
};

constexpr int64_t GROUP = 8;  // inputs decoded at a time

// ---------------------------------------------------------------- formats: `decode` unpacks eight inputs of sixteen outputs

struct PackedF32 {
    static constexpr int64_t BYTES = BLOCK * LANES * 4;  // of a block
    static void decode(const uint8_t* p, F* w) {
        for (int i = 0; i < GROUP; i++) w[i] = widen(reinterpret_cast<const float*>(p) + i * LANES);
    }
};

struct PackedBf16 {
    static constexpr int64_t BYTES = BLOCK * LANES * 2;
    static void decode(const uint8_t* p, F* w) {
        for (int i = 0; i < GROUP; i++) w[i] = widen(reinterpret_cast<const Bf16*>(p) + i * LANES);
    }
};

// Four inputs in 64 bytes. Outputs 0-7 and 8-15 of input i lie at fp8_place(i) and 16 bytes later: the order in which vectors unpack.
inline int64_t fp8_place(int64_t input) { return input % 4 / 2 * 8 + input % 2 * 32 + input / 4 * 64; }

struct PackedFp8 {
    static constexpr int64_t BYTES = BLOCK * LANES;
#if defined(__AVX512BW__)
    // Shifted into the bits of a float16, whose exponents are biased by 8 more, e4m3 is exact, subnormals too. NaNs are not packed.
    static constexpr float FACTOR = 256.0f;
    static void decode(const uint8_t* p, F* w) {
        const __m512i keep = _mm512_set1_epi16(int16_t(0xbf80));
        for (int half = 0; half < 2; half++) {
            const __m512i v = _mm512_loadu_si512(p + 64 * half);
            const __m512i low = _mm512_unpacklo_epi8(_mm512_setzero_si512(), v), high = _mm512_unpackhi_epi8(_mm512_setzero_si512(), v);
            const __m512i a = _mm512_and_si512(_mm512_srai_epi16(low, 1), keep), b = _mm512_and_si512(_mm512_srai_epi16(high, 1), keep);
            w[4 * half] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(a));
            w[4 * half + 1] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1));
            w[4 * half + 2] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(b));
            w[4 * half + 3] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1));
        }
    }
#else
    static constexpr float FACTOR = 1.0f;
    static void decode(const uint8_t* p, F* w) {
        for (int i = 0; i < GROUP; i++) {
            uint8_t row[LANES];
            std::memcpy(row, p + fp8_place(i), 8), std::memcpy(row + 8, p + fp8_place(i) + 16, 8);
            w[i] = e4m3_values(row);
        }
    }
#endif
};

struct PackedFp4 {  // eight inputs of an output in 32 bits, the first lowest
    static constexpr int64_t BYTES = BLOCK * LANES / 2;
    static constexpr float FACTOR = 1.0f;
    static void decode(const uint8_t* p, F* w) {
        const U codes = load<U>(p);
        for (int i = 0; i < GROUP; i++) w[i] = e2m1_values(codes >> (4 * i));
    }
};

inline F scales_of(const uint8_t* p) {  // of sixteen outputs in one block
    const U bits = words(load<B>(p)) << 23;
    return (F)(bits > 0x400000u ? bits : U{} + 0x400000u);  // byte 0 is the subnormal 2^-127
}

// ---------------------------------------------------------------- products

struct Result {
    void* data;
    int64_t stride, outputs;  // stride in elements
    bool bf16;
    void put_tile(int64_t row, int64_t tile, F value) const {
        const int64_t place = row * stride + tile * LANES, left = outputs - tile * LANES;
        if (bf16)
            put(static_cast<Bf16*>(data) + place, value, left);
        else
            put(static_cast<float*>(data) + place, value, left);
    }
};

// Tiles as they are packed.
template <class P>
struct Packed {
    const Weight& weight;
    void group(int64_t tile, int64_t block, int64_t g, F* w) const {
        P::decode(weight.data + (tile * weight.blocks() + block) * P::BYTES + g * (P::BYTES / 4), w);
    }
    F add(int64_t tile, int64_t block, F part, F sum) const {
        if constexpr (P::BYTES > BLOCK * LANES)
            return sum + part;
        else
            return fma(part, scales_of(weight.scale + (tile * weight.blocks() + block) * LANES) * P::FACTOR, sum);
    }
};

// Tiles from number `first` on, decoded into memory.
template <class P>
struct Unpacked {
    Packed<P> packed;
    const float* data;
    int64_t first;
    void group(int64_t tile, int64_t block, int64_t g, F* w) const {
        const float* p = data + ((tile - first) * packed.weight.blocks() + block) * BLOCK * LANES + g * GROUP * LANES;
        for (int i = 0; i < GROUP; i++) w[i] = widen(p + i * LANES);
    }
    F add(int64_t tile, int64_t block, F part, F sum) const { return packed.add(tile, block, part, sum); }
};

// Tiles tile .. tile + T - 1 times rows row .. row + R - 1.
template <int T, int R, class W>
inline void multiply_tiles(const W& w, int64_t blocks, int64_t tile, const float* const* rows, int64_t row, const Result& y) {
    F sum[T][R] = {};
    for (int64_t block = 0; block < blocks; block++) {
        F part[T][R] = {};
        for (int64_t g = 0; g < BLOCK / GROUP; g++) {
            F v[T][GROUP];
            for (int t = 0; t < T; t++) w.group(tile + t, block, g, v[t]);
            for (int i = 0; i < GROUP; i++)
                for (int r = 0; r < R; r++) {
                    const F x = splat(rows[row + r][block * BLOCK + g * GROUP + i]);
                    for (int t = 0; t < T; t++) part[t][r] = fma(v[t][i], x, part[t][r]);
                }
        }
        for (int t = 0; t < T; t++)
            for (int r = 0; r < R; r++) sum[t][r] = w.add(tile + t, block, part[t][r], sum[t][r]);
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) y.put_tile(row + r, tile + t, sum[t][r]);
}

template <int T, class W>
inline void multiply_rows(const W& w, int64_t blocks, int64_t tile, const float* const* rows, int64_t count, const Result& y) {
    int64_t r = 0;
    if constexpr (T <= 2)
        for (; r + 8 <= count; r += 8) multiply_tiles<T, 8>(w, blocks, tile, rows, r, y);
    for (; r + 4 <= count; r += 4) multiply_tiles<T, 4>(w, blocks, tile, rows, r, y);
    for (; r + 2 <= count; r += 2) multiply_tiles<T, 2>(w, blocks, tile, rows, r, y);
    for (; r < count; r++) multiply_tiles<T, 1>(w, blocks, tile, rows, r, y);
}

template <class P>
void multiply_as(const Weight& weight, int64_t first, int64_t last, const float* const* rows, int64_t count, const Result& y,
                 int64_t threads) {
    constexpr int64_t FEW = 4, UNPACK_FROM = 16;  // rows up to which four tiles go side by side; from which unpacking pays
    const int64_t blocks = weight.blocks(), side = count <= FEW ? 4 : 2;
    const Packed<P> packed{weight};
    for_each((last - first + side - 1) / side, threads, [&](int64_t group) {
        const int64_t tile = first + group * side, here = std::min(side, last - tile);
        if (count >= UNPACK_FROM) {
            thread_local std::vector<float> memory;
            memory.resize(here * blocks * BLOCK * LANES);
            for (int64_t g = 0; g < here * blocks * (BLOCK / GROUP); g++) {
                F w[GROUP];
                P::decode(weight.data + tile * blocks * P::BYTES + g * (P::BYTES / 4), w);
                for (int i = 0; i < GROUP; i++) put_all(memory.data() + (g * GROUP + i) * LANES, w[i]);
            }
            const Unpacked<P> unpacked{packed, memory.data(), tile};
            if (here == 2) multiply_rows<2>(unpacked, blocks, tile, rows, count, y);
            if (here == 1) multiply_rows<1>(unpacked, blocks, tile, rows, count, y);
            return;
        }
        int64_t t = tile;
        if (here == 4) multiply_rows<4>(packed, blocks, t, rows, count, y), t += 4;
        if (tile + here - t >= 2) multiply_rows<2>(packed, blocks, t, rows, count, y), t += 2;
        if (tile + here - t == 1) multiply_rows<1>(packed, blocks, t, rows, count, y);
    });
}

// Outputs 16 * first .. 16 * last - 1 (or to the end) of each row, put where `y` says. Rows have inputs up to whole blocks, zeros behind.
inline void multiply(const Weight& weight, int64_t first, int64_t last, const float* const* rows, int64_t count, const Result& y,
                     int64_t threads) {
    if (weight.format == F32) multiply_as<PackedF32>(weight, first, last, rows, count, y, threads);
    if (weight.format == BF16) multiply_as<PackedBf16>(weight, first, last, rows, count, y, threads);
    if (weight.format == FP8) multiply_as<PackedFp8>(weight, first, last, rows, count, y, threads);
    if (weight.format == FP4) multiply_as<PackedFp4>(weight, first, last, rows, count, y, threads);
}

inline void multiply(const Weight& weight, const float* const* rows, int64_t count, const Result& y, int64_t threads) {
    multiply(weight, 0, weight.tiles(), rows, count, y, threads);
}

// Rows as `multiply` takes them: where they lie if they fit, else copies in `memory`.
struct Rows {
    std::vector<const float*> at;
    std::vector<float> memory;
    void set(const void* x, bool bf16, int64_t stride, int64_t count, int64_t inputs) {
        at.resize(count);
        const int64_t width = (inputs + BLOCK - 1) / BLOCK * BLOCK;
        const bool copy = bf16 || width != inputs;
        if (copy) memory.resize(count * width);
        for (int64_t r = 0; r < count; r++) {
            if (!copy) {
                at[r] = static_cast<const float*>(x) + r * stride;
                continue;
            }
            float* row = memory.data() + r * width;
            at[r] = row;
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t left = std::max<int64_t>(inputs - i, 0);
                put_all(row + i, bf16 ? get(static_cast<const Bf16*>(x) + r * stride + i, left)
                                      : get(static_cast<const float*>(x) + r * stride + i, left));
            }
        }
    }
};
