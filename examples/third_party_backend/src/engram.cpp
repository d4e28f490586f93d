// Engram: hashed rows, their values, and the gate.
#include "entries.hpp"
#include "threads.hpp"

namespace {

template <class T>
void gate_row(const T* streams, const T* kv, const Bf16* q_weight, const Bf16* k_weight, float eps, int64_t m, int64_t dim, T* out) {
    const T* value = kv + m * dim;
    for (int64_t j = 0; j < m; j++) {
        const T *h = streams + j * dim, *k = kv + j * dim;
        F hh = {}, kk = {}, hk = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t n = dim - i;
            const F a = get(h + i, n), b = get(k + i, n), w = get(q_weight + j * dim + i, n) * get(k_weight + j * dim + i, n);
            hh = fma(a, a, hh), kk = fma(b, b, kk), hk = fma(a * b, w, hk);
        }
        const float norms = 1.0f / std::sqrt(total(hh) / dim + eps) * (1.0f / std::sqrt(total(kk) / dim + eps));
        const float d = total(hk) * norms * (1.0f / std::sqrt(float(dim)));
        const float root = std::copysign(std::sqrt(std::max(std::fabs(d), 1e-6f)), d);
        const float gate = 1.0f / (1.0f + std::exp(-root));
        for (int64_t i = 0; i < dim; i += LANES) put(out + j * dim + i, get(h + i, dim - i) + gate * get(value + i, dim - i), dim - i);
    }
}

template <class T>
void gate_rows(const T* streams, int64_t stride, const T* kv, int64_t kv_stride, const Bf16* q_weight, const Bf16* k_weight, float eps,
               const uint8_t* mask, int64_t rows, int64_t m, int64_t dim, T* out, int64_t out_stride, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        if (!mask || mask[t])
            gate_row(streams + t * stride, kv + t * kv_stride, q_weight, k_weight, eps, m, dim, out + t * out_stride);
        else
            std::memmove(out + t * out_stride, streams + t * stride, m * dim * sizeof(T));
    });
}

}  // namespace

// `out` may be the streams; `mask` may be null.
OP(simd_engram_gate, const void* streams, int64_t bf16, int64_t stride, const void* kv, int64_t kv_stride, const Bf16* q_weight,
   const Bf16* k_weight, double eps, const uint8_t* mask, int64_t rows, int64_t m, int64_t dim, void* out, int64_t out_stride,
   int64_t threads) {
    if (bf16)
        gate_rows(static_cast<const Bf16*>(streams), stride, static_cast<const Bf16*>(kv), kv_stride, q_weight, k_weight, float(eps), mask,
                  rows, m, dim, static_cast<Bf16*>(out), out_stride, threads);
    else
        gate_rows(static_cast<const float*>(streams), stride, static_cast<const float*>(kv), kv_stride, q_weight, k_weight, float(eps),
                  mask, rows, m, dim, static_cast<float*>(out), out_stride, threads);
}

// ngrams [rows, size] -> y [rows, columns]; `columns` / (size - 1) heads for each n-gram size from 2 on.
OP(simd_engram_hash, const int64_t* ngrams, int64_t rows, int64_t size, const int64_t* multipliers, const int64_t* primes,
   const int64_t* offsets, int64_t columns, int64_t* y) {
    const int64_t heads = columns / (size - 1);
    for (int64_t t = 0; t < rows; t++, ngrams += size, y += columns) {
        if (ngrams[0] < 0) {
            std::fill(y, y + columns, -1);
            continue;
        }
        uint64_t hash = uint64_t(ngrams[0]) * uint64_t(multipliers[0]);
        for (int64_t c = 0; c < columns; c++) {
            const int64_t i = c / heads + 1;
            if (c % heads == 0) hash ^= uint64_t(ngrams[i]) * uint64_t(multipliers[i]);
            const int64_t rest = int64_t(hash) % primes[c];
            y[c] = rest + (rest < 0 ? primes[c] : 0) + offsets[c];
        }
    }
}

// Values of rows[i] of an e4m3 table [., n] with a scale for 32, n a multiple of 32, one after the other; zeros for a negative row.
OP(simd_engram_gather, const uint8_t* table, const uint8_t* scales, int64_t n, const int64_t* rows, int64_t count, float* y,
   int64_t threads) {
    for_each(count, threads, [&](int64_t t) {
        if (rows[t] < 0) {
            std::memset(y + t * n, 0, n * sizeof(float));
            return;
        }
        for (int64_t i = 0; i < n; i += LANES) put_all(y + t * n + i, decode(FP8, table + rows[t] * n, scales + rows[t] * (n / BLOCK), i));
    });
}
