// The gate of an Engram value.
#include "simd.hpp"

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
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) {
        if (!mask || mask[t])
            gate_row(streams + t * stride, kv + t * kv_stride, q_weight, k_weight, eps, m, dim, out + t * out_stride);
        else
            std::memmove(out + t * out_stride, streams + t * stride, m * dim * sizeof(T));
    }
}

}  // namespace

// `out` may be the streams; `mask` may be null.
EXPORT void simd_engram_gate(const void* streams, int64_t bf16, int64_t stride, const void* kv, int64_t kv_stride, const Bf16* q_weight,
                             const Bf16* k_weight, double eps, const uint8_t* mask, int64_t rows, int64_t m, int64_t dim, void* out,
                             int64_t out_stride, int64_t threads) {
    if (bf16)
        gate_rows(static_cast<const Bf16*>(streams), stride, static_cast<const Bf16*>(kv), kv_stride, q_weight, k_weight, float(eps), mask,
                  rows, m, dim, static_cast<Bf16*>(out), out_stride, threads);
    else
        gate_rows(static_cast<const float*>(streams), stride, static_cast<const float*>(kv), kv_stride, q_weight, k_weight, float(eps), mask,
                  rows, m, dim, static_cast<float*>(out), out_stride, threads);
}
