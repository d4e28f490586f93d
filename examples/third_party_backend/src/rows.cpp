// Norms, activation quantisation and window keys: ops that look at one row at a time.
#include "rows.hpp"
#include "threads.hpp"

namespace {

template <class T, class X>
void norm_rows(const X* x, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, T* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) { rms_norm_row(x + t * stride, weight, eps, n, y + t * n); });
}

template <class T>
void key_rows(const T* x, int64_t stride, const Bf16* weight, double eps, const float* table, const int64_t* positions, int64_t rd,
              int64_t rows, int64_t n, bool quantise, T* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        T* key = y + t * n;
        rms_norm_row(x + t * stride, weight, eps, n, key);
        rotate_row(key, table + positions[t] * rd, n, rd, false, key);
        if (quantise) fake_fp8_row(key, n, key);
    });
}

}  // namespace

// x [rows, n] bf16 or float32 -> y [rows, n] bf16 or float32.
OP(simd_rms_norm, const void* x, int64_t x_bf16, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, void* y,
   int64_t y_bf16, int64_t threads) {
    const Bf16* xb = static_cast<const Bf16*>(x);
    const float* xf = static_cast<const float*>(x);
    if (x_bf16 && y_bf16) norm_rows(xb, stride, weight, eps, rows, n, static_cast<Bf16*>(y), threads);
    if (x_bf16 && !y_bf16) norm_rows(xb, stride, weight, eps, rows, n, static_cast<float*>(y), threads);
    if (!x_bf16 && y_bf16) norm_rows(xf, stride, weight, eps, rows, n, static_cast<Bf16*>(y), threads);
    if (!x_bf16 && !y_bf16) norm_rows(xf, stride, weight, eps, rows, n, static_cast<float*>(y), threads);
}

// The FP8 values, as float32 y [rows, n], of bf16 x [rows, n]; with `weight`, of its norm.
OP(simd_quantize, const Bf16* x, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, float* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        float* row = y + t * n;
        if (!weight) {
            fake_fp8_row(x + t * stride, n, row);
            return;
        }
        rms_norm_row(x + t * stride, weight, eps, n, row);
        for (int64_t i = 0; i < n; i += LANES) put_all(row + i, rounded(widen(row + i), x));
        fake_fp8_row(row, n, row);
    });
}

// kv [rows, n] -> keys y [rows, n]: bf16 on the FP8 grid, or float32 without rounding.
OP(simd_window_key, const void* kv, int64_t bf16, int64_t stride, const Bf16* weight, double eps, const float* table,
   const int64_t* positions, int64_t rd, int64_t rows, int64_t n, void* y, int64_t threads) {
    if (bf16)
        key_rows(static_cast<const Bf16*>(kv), stride, weight, eps, table, positions, rd, rows, n, true, static_cast<Bf16*>(y), threads);
    else
        key_rows(static_cast<const float*>(kv), stride, weight, eps, table, positions, rd, rows, n, false, static_cast<float*>(y), threads);
}

// Rows ids[t] of table [V, n], as bf16 or float32.
OP(simd_embed, const int64_t* ids, int64_t rows, const Bf16* table, int64_t n, int64_t bf16, void* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        const Bf16* from = table + ids[t] * n;
        if (bf16) {
            std::memcpy(static_cast<Bf16*>(y) + t * n, from, n * sizeof(Bf16));
            return;
        }
        float* to = static_cast<float*>(y) + t * n;
        for (int64_t i = 0; i < n; i += LANES) put(to + i, get(from + i, n - i), n - i);
    });
}
