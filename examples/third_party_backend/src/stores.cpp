// Everything that is kept: entries of the caches, and the rows of open groups.
#include <vector>

#include "entries.hpp"
#include "rows.hpp"
#include "threads.hpp"

namespace {

// Where entry number `slot` of a pool lies: groups (ring slots or pages) of `length` entries.
struct Pool {
    uint8_t* base;
    int64_t format, length, group_stride, data_stride, scales_at, scale_stride;
    uint8_t* data(int64_t slot) const { return base + slot / length * group_stride + slot % length * data_stride; }
    uint8_t* scales(int64_t slot) const { return base + slot / length * group_stride + scales_at + slot % length * scale_stride; }
};

// What is done to a row before it is stored. Null pointers: not done.
struct Steps {
    const Bf16* weight;  // of the norm
    float eps;
    const float* table;  // of the rotation
    const int64_t* positions;
    int64_t rd;
    bool index_grid;  // of FP4 index keys, for formats that would keep more
};

template <class T>
void store_row(const T* x, int64_t t, int64_t n, const Steps& s, const Pool& pool, int64_t slot) {
    thread_local std::vector<T> changed;
    if (s.weight || s.table) {
        changed.resize(n);
        T* row = changed.data();
        if (s.weight)
            rms_norm_row(x, s.weight, s.eps, n, row);
        else
            std::copy(x, x + n, row);
        if (s.table) rotate_row(row, s.table + s.positions[t] * s.rd, n, s.rd, false, row);
        x = row;
    }
    uint8_t *data = pool.data(slot), *scales = pool.scales(slot);
    for (int64_t i = 0; i < n; i += BLOCK) {
        F a = widen(x + i), b = widen(x + i + LANES);
        if (s.index_grid) fake_fp4_index(a, b);
        encode(pool.format, a, b, i, data, scales);
    }
}

template <class T>
void store_rows(const T* x, int64_t stride, int64_t rows, int64_t n, const Steps& s, const Pool& pool, const int32_t* slots,
                int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        if (slots[t] >= 0) store_row(x + t * stride, t, n, s, pool, slots[t]);
    });
}

// Softmax over the members' gates and the sum of their latents, for sixteen channels. A member is `n` latents and `n` gates.
F pool_channels(const float* const* members, int64_t count, int64_t n, int64_t i) {
    F top = widen(members[0] + n + i), sum = {}, weight = {};
    for (int64_t r = 1; r < count; r++) {
        const F gate = widen(members[r] + n + i);
        top = gate > top ? gate : top;
    }
    for (int64_t r = 0; r < count; r++) {
        const F p = exponential(widen(members[r] + n + i) - top);
        weight += p, sum = fma(p, widen(members[r] + i), sum);
    }
    return sum / weight;
}

template <class T>
void compress_rows(const float* rows, int64_t stride, int64_t count, int64_t n, const float* ring, int64_t length, int64_t slot_stride,
                   int64_t row_stride, int64_t held, const int32_t* members, int64_t ratio, const Bf16* weight, float eps, T* y,
                   int64_t threads) {
    for_each(count, threads, [&](int64_t t) {
        const int32_t* mine = members + t * ratio;
        T* row = y + t * n;
        if (mine[0] < 0) {
            std::memset(row, 0, n * sizeof(T));
            return;
        }
        thread_local std::vector<const float*> from;
        from.resize(ratio);
        for (int64_t r = 0; r < ratio; r++)
            from[r] = mine[r] >= held ? rows + (mine[r] - held) * stride
                                      : ring + mine[r] / length * slot_stride + mine[r] % length * row_stride;
        for (int64_t i = 0; i < n; i += LANES) put_all(row + i, pool_channels(from.data(), ratio, n, i));
        rms_norm_row(row, weight, eps, n, row);
    });
}

}  // namespace

// x [rows, n] bf16 or float32, n a multiple of 32, into a pool at flat slots[t]; negative: nowhere. See `Steps` and `Pool`.
OP(simd_store, const void* x, int64_t bf16, int64_t stride, int64_t rows, int64_t n, const Bf16* weight, double eps, const float* table,
   const int64_t* positions, int64_t rd, int64_t index_grid, uint8_t* base, int64_t format, int64_t length, int64_t group_stride,
   int64_t data_stride, int64_t scales_at, int64_t scale_stride, const int32_t* slots, int64_t threads) {
    const Steps steps{weight, float(eps), table, positions, rd, index_grid != 0};
    const Pool pool{base, format, length, group_stride, data_stride, scales_at, scale_stride};
    if (bf16)
        store_rows(static_cast<const Bf16*>(x), stride, rows, n, steps, pool, slots, threads);
    else
        store_rows(static_cast<const float*>(x), stride, rows, n, steps, pool, slots, threads);
}

// rows [count, 2n] float32 -> y [count, n]. members [count, ratio] below slots * length lie in the ring, the others are rows of this step.
// Afterwards row t is kept at flat ring row keep[t] >= 0. n is a multiple of 16.
OP(simd_compress, const float* rows, int64_t stride, int64_t count, int64_t n, float* ring, int64_t slots, int64_t length,
   int64_t slot_stride, int64_t row_stride, const int32_t* members, int64_t ratio, const int32_t* keep, const Bf16* weight, double eps,
   int64_t bf16, void* y, int64_t threads) {
    if (bf16)
        compress_rows(rows, stride, count, n, ring, length, slot_stride, row_stride, slots * length, members, ratio, weight, float(eps),
                      static_cast<Bf16*>(y), threads);
    else
        compress_rows(rows, stride, count, n, ring, length, slot_stride, row_stride, slots * length, members, ratio, weight, float(eps),
                      static_cast<float*>(y), threads);
    for (int64_t t = 0; t < count; t++)
        if (keep[t] >= 0)
            std::memcpy(ring + keep[t] / length * slot_stride + keep[t] % length * row_stride, rows + t * stride, 2 * n * sizeof(float));
}
