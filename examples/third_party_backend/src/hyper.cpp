// Hyper-connections: one pass over the streams for everything a sub-layer needs.
#include <vector>

#include "dots.hpp"
#include "rows.hpp"

namespace {

constexpr int64_t TILE = 8;  // rows that share one reading of the coefficient matrix

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Rows, columns: `iterations` of each, the first one a softmax. c [m, m] in place.
void sinkhorn(float* c, int64_t m, int64_t iterations, float eps) {
    for (int64_t j = 0; j < m; j++) {
        float* row = c + j * m;
        float top = *std::max_element(row, row + m), sum = 0;
        for (int64_t k = 0; k < m; k++) sum += row[k] = std::exp(row[k] - top);
        for (int64_t k = 0; k < m; k++) row[k] = row[k] / sum + eps;
    }
    for (int64_t i = 0; i < iterations; i++) {
        for (int64_t j = 0; i && j < m; j++) {
            float sum = 0;
            for (int64_t k = 0; k < m; k++) sum += c[j * m + k];
            for (int64_t k = 0; k < m; k++) c[j * m + k] /= sum + eps;
        }
        for (int64_t k = 0; k < m; k++) {
            float sum = 0;
            for (int64_t j = 0; j < m; j++) sum += c[j * m + k];
            for (int64_t j = 0; j < m; j++) c[j * m + k] /= sum + eps;
        }
    }
}

template <class T>
void collapse_row(const T* streams, const float* pre, int64_t m, int64_t dim, T* y) {
    for (int64_t i = 0; i < dim; i += LANES) {
        F sum = {};
        for (int64_t j = 0; j < m; j++) sum += pre[j] * get(streams + j * dim + i, dim - i);
        put(y + i, sum, dim - i);
    }
}

struct Coefficients {
    const float *fn, *base, *scale;
    float norm_eps, hc_eps;
    int64_t iterations, m, dim;
};

// pre [m], post [m], comb [m, m] of each of up to TILE rows.
template <class T>
void mix_rows(const Coefficients& c, const T* streams, int64_t stride, int64_t count, float* pre, float* post, float* comb) {
    const int64_t m = c.m, size = m * c.dim, outputs = m * (m + 2);
    thread_local std::vector<float> flat, mixes;
    flat.resize(TILE * size);
    mixes.resize(TILE * outputs);
    const float* rows[TILE];
    float rstd[TILE];
    for (int64_t t = 0; t < count; t++) {
        float* row = flat.data() + t * size;
        F squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            F v = widen(streams + t * stride + i);
            put_all(row + i, v);
            squares = fma(v, v, squares);
        }
        rows[t] = row;
        rstd[t] = 1.0f / std::sqrt(total(squares) / size + c.norm_eps);
    }
    dots(Matrix{c.fn, size}, outputs, rows, count, mixes.data(), outputs);
    for (int64_t t = 0; t < count; t++) {
        const float* mix = mixes.data() + t * outputs;
        for (int64_t j = 0; j < m; j++) {
            pre[t * m + j] = sigmoid(mix[j] * rstd[t] * c.scale[0] + c.base[j]) + c.hc_eps;
            post[t * m + j] = 2 * sigmoid(mix[m + j] * rstd[t] * c.scale[1] + c.base[m + j]);
        }
        for (int64_t j = 0; j < m * m; j++) comb[t * m * m + j] = mix[2 * m + j] * rstd[t] * c.scale[2] + c.base[2 * m + j];
        sinkhorn(comb + t * m * m, m, c.iterations, c.hc_eps);
    }
}

template <class T>
void pre_rows(const Coefficients& c, const T* streams, int64_t stride, const float* old_pre, const Bf16* norm_weight, int64_t rows, T* x,
              float* quantized, float* pre, float* post, float* comb, int64_t threads) {
    const int64_t m = c.m, dim = c.dim;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < rows; first += TILE) {
        const int64_t count = std::min(TILE, rows - first);
        mix_rows(c, streams + first * stride, stride, count, pre + first * m, post + first * m, comb + first * m * m);
        for (int64_t t = first; t < first + count; t++) {
            collapse_row(streams + t * stride, old_pre + t * m, m, dim, x + t * dim);
            rms_norm_row(x + t * dim, norm_weight, c.norm_eps, dim, x + t * dim);
            if (quantized) fake_fp8_row(x + t * dim, dim, quantized + t * dim);
        }
    }
}

// New stream k = post[k] * y + sum_j comb[j, k] * stream j. The result may be the streams themselves: a chunk is read before it is written.
template <class T>
void post_rows(const T* streams, int64_t stride, const T* y, int64_t y_stride, const float* post, const float* comb, int64_t rows, int64_t m,
               int64_t dim, T* out, int64_t out_stride, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) {
        const float *p = post + t * m, *c = comb + t * m * m;
        for (int64_t i = 0; i < dim; i += LANES) {
            F old[8], value = get(y + t * y_stride + i, dim - i);
            for (int64_t j = 0; j < m; j++) old[j] = get(streams + t * stride + j * dim + i, dim - i);
            for (int64_t k = 0; k < m; k++) {
                F sum = p[k] * value;
                for (int64_t j = 0; j < m; j++) sum += c[j * m + k] * old[j];
                put(out + t * out_stride + k * dim + i, sum, dim - i);
            }
        }
    }
}

}  // namespace

// `quantized` is null where quantisation is the identity.
EXPORT void simd_hc_pre(const void* streams, int64_t bf16, int64_t stride, const float* old_pre, const float* fn, const float* base,
                        const float* scale, const Bf16* norm_weight, double norm_eps, double hc_eps, int64_t iterations, int64_t rows,
                        int64_t m, int64_t dim, void* x, float* quantized, float* pre, float* post, float* comb, int64_t threads) {
    const Coefficients c{fn, base, scale, float(norm_eps), float(hc_eps), iterations, m, dim};
    if (bf16)
        pre_rows(c, static_cast<const Bf16*>(streams), stride, old_pre, norm_weight, rows, static_cast<Bf16*>(x), quantized, pre, post, comb,
                 threads);
    else
        pre_rows(c, static_cast<const float*>(streams), stride, old_pre, norm_weight, rows, static_cast<float*>(x), quantized, pre, post, comb,
                 threads);
}

// At most 8 streams.
EXPORT void simd_hc_post(const void* streams, int64_t bf16, int64_t stride, const void* y, int64_t y_stride, const float* post,
                         const float* comb, int64_t rows, int64_t m, int64_t dim, void* out, int64_t out_stride, int64_t threads) {
    if (bf16)
        post_rows(static_cast<const Bf16*>(streams), stride, static_cast<const Bf16*>(y), y_stride, post, comb, rows, m, dim,
                  static_cast<Bf16*>(out), out_stride, threads);
    else
        post_rows(static_cast<const float*>(streams), stride, static_cast<const float*>(y), y_stride, post, comb, rows, m, dim,
                  static_cast<float*>(out), out_stride, threads);
}

EXPORT void simd_hc_collapse(const void* streams, int64_t bf16, int64_t stride, const float* pre, int64_t rows, int64_t m, int64_t dim,
                             void* y, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; t++) {
        if (bf16)
            collapse_row(static_cast<const Bf16*>(streams) + t * stride, pre + t * m, m, dim, static_cast<Bf16*>(y) + t * dim);
        else
            collapse_row(static_cast<const float*>(streams) + t * stride, pre + t * m, m, dim, static_cast<float*>(y) + t * dim);
    }
}
