// Norms, activation quantisation and window keys: ops that look at one row at a time.
#include "rows.hpp"

namespace {

template <class T, class X>
void norm_rows(const X* x, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, T* y, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) rms_norm_row(x + t * stride, weight, eps, n, y + t * n);
}

template <class T>
void key_rows(const T* x, int64_t stride, const Bf16* weight, double eps, const float* table, const int64_t* positions, int64_t rd,
              int64_t rows, int64_t n, bool quantise, T* y, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) {
        T* key = y + t * n;
        rms_norm_row(x + t * stride, weight, eps, n, key);
        rotate_row(key, table + positions[t] * rd, n, rd, false);
        if (quantise) fake_fp8_row(key, n, key);
    }
}

}  // namespace

// x [rows, n] bf16 or float32 -> y [rows, n] bf16 or float32.
EXPORT void simd_rms_norm(const void* x, int64_t x_bf16, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, void* y,
                          int64_t y_bf16, int64_t threads) {
    const Bf16* xb = static_cast<const Bf16*>(x);
    const float* xf = static_cast<const float*>(x);
    if (x_bf16 && y_bf16) norm_rows(xb, stride, weight, eps, rows, n, static_cast<Bf16*>(y), threads);
    if (x_bf16 && !y_bf16) norm_rows(xb, stride, weight, eps, rows, n, static_cast<float*>(y), threads);
    if (!x_bf16 && y_bf16) norm_rows(xf, stride, weight, eps, rows, n, static_cast<Bf16*>(y), threads);
    if (!x_bf16 && !y_bf16) norm_rows(xf, stride, weight, eps, rows, n, static_cast<float*>(y), threads);
}

// The FP8 values, as float32 y [rows, n], of bf16 x [rows, n]; with `weight`, of its norm.
EXPORT void simd_quantize(const Bf16* x, int64_t stride, const Bf16* weight, double eps, int64_t rows, int64_t n, float* y,
                          int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) {
        float* row = y + t * n;
        if (!weight) {
            fake_fp8_row(x + t * stride, n, row);
            continue;
        }
        rms_norm_row(x + t * stride, weight, eps, n, row);
        for (int64_t i = 0; i < n; i += LANES) put_all(row + i, rounded(widen(row + i), x));
        fake_fp8_row(row, n, row);
    }
}

// kv [rows, n] -> keys y [rows, n]: bf16 on the FP8 grid, or float32 without rounding.
EXPORT void simd_window_key(const void* kv, int64_t bf16, int64_t stride, const Bf16* weight, double eps, const float* table,
                            const int64_t* positions, int64_t rd, int64_t rows, int64_t n, void* y, int64_t threads) {
    if (bf16)
        key_rows(static_cast<const Bf16*>(kv), stride, weight, eps, table, positions, rd, rows, n, true, static_cast<Bf16*>(y), threads);
    else
        key_rows(static_cast<const float*>(kv), stride, weight, eps, table, positions, rd, rows, n, false, static_cast<float*>(y), threads);
}

// bf16 keys [rows, n] into an FP8 ring (e4m3 values, then exponent bytes, of each entry) at flat rows slots[t]; negative: nowhere.
EXPORT void simd_store_window(const Bf16* keys, int64_t stride, const int32_t* slots, int64_t rows, int64_t n, uint8_t* ring,
                              int64_t ring_length, int64_t slot_stride, int64_t entry_stride) {
    for (int64_t t = 0; t < rows; t++) {
        if (slots[t] < 0) continue;
        uint8_t* entry = ring + slots[t] / ring_length * slot_stride + slots[t] % ring_length * entry_stride;
        for (int64_t i = 0; i < n; i += BLOCK) {
            F a = widen(keys + t * stride + i), b = widen(keys + t * stride + i + LANES);
            float scale = fp8_scale(largest(maximum(magnitude(a), magnitude(b)))), inverse = reciprocal_of_power(scale);
            B first = e4m3_bytes(on_e4m3(a * inverse)), second = e4m3_bytes(on_e4m3(b * inverse));
            std::memcpy(entry + i, &first, sizeof first);
            std::memcpy(entry + i + LANES, &second, sizeof second);
            entry[n + i / BLOCK] = bits_of(scale) >> 23;
        }
    }
}
