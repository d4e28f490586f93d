// Hyper-connections: one pass over the streams for everything a sub-layer needs.
#include <vector>

#include "rows.hpp"
#include "shuffles.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t TILE = 8;  // rows that share one reading of the coefficient matrix

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

// The lanes of a 4 x 4 matrix, one or two places on within their rows, or within their columns.
inline F next_in_row(F c) { return __builtin_shufflevector(c, c, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
inline F second_in_row(F c) { return __builtin_shufflevector(c, c, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
inline F next_in_column(F c) { return __builtin_shufflevector(c, c, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
inline F second_in_column(F c) { return __builtin_shufflevector(c, c, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }

inline F row_sums(F c) {
    const F pairs = c + next_in_row(c);
    return pairs + second_in_row(pairs);
}

inline F column_sums(F c) {
    const F pairs = c + next_in_column(c);
    return pairs + second_in_column(pairs);
}

// The same for m = 4, the released model's: a lane for each coefficient.
void sinkhorn_of_four(float* place, int64_t iterations, float eps) {
    F c = widen(place), top = next_in_row(c) > c ? next_in_row(c) : c;
    top = second_in_row(top) > top ? second_in_row(top) : top;
    c = exponential(c - top);
    c = c / row_sums(c) + eps;
    for (int64_t i = 0; i < iterations; i++) {
        if (i) c /= row_sums(c) + eps;
        c /= column_sums(c) + eps;
    }
    put_all(place, c);
}

// y[r * y_stride + i] = row r . weight row i for R rows and N weight rows, `size` a multiple of 16. Which R and N a sum is computed with
// changes no addition.
template <int R, int N>
inline void dot(const float* weight, int64_t size, const float* rows, float* y, int64_t y_stride) {
    static_assert(R * N <= LANES);
    F sums[LANES] = {};
    for (int64_t k = 0; k < size; k += LANES) {
        F x[R];
        for (int r = 0; r < R; r++) x[r] = widen(rows + r * size + k);
        for (int i = 0; i < N; i++) {
            const F w = widen(weight + i * size + k);
            for (int r = 0; r < R; r++) sums[r * N + i] = fma(w, x[r], sums[r * N + i]);
        }
    }
    float dots[LANES];
    put_all(dots, totals(sums));
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) y[r * y_stride + i] = dots[r * N + i];
}

// y[r * outputs + n] = row r . weight row n.
void multiply(const float* weight, int64_t outputs, int64_t size, const float* rows, int64_t count, float* y) {
    int64_t n = 0;
    for (; n + 8 <= outputs; n += 8) {
        const float* w = weight + n * size;
        int64_t r = 0;
        for (; r + 4 <= count; r += 4)
            for (int64_t i = 0; i < 8; i += 4) dot<4, 4>(w + i * size, size, rows + r * size, y + r * outputs + n + i, outputs);
        for (; r < count; r++) dot<1, 8>(w, size, rows + r * size, y + r * outputs + n, outputs);
    }
    for (; n < outputs; n++)
        for (int64_t r = 0; r < count; r++) dot<1, 1>(weight + n * size, size, rows + r * size, y + r * outputs + n, outputs);
}

// y[i] = offset + factor / (1 + exp(-(mix[i] * scale + base[i]))), n values.
void gates(const float* mix, float scale, const float* base, float factor, float offset, int64_t n, float* y) {
    for (int64_t i = 0; i < n; i += LANES) {
        const F x = get(mix + i, n - i) * scale + get(base + i, n - i);
        put(y + i, factor / (1.0f + exponential(x < -88.0f ? splat(88.0f) : -x)) + offset, n - i);
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

template <class T>
void mean_row(const T* streams, int64_t m, int64_t dim, T* y) {
    for (int64_t i = 0; i < dim; i += LANES) {
        F sum = {};
        for (int64_t j = 0; j < m; j++) sum += get(streams + j * dim + i, dim - i);
        put(y + i, sum / float(m), dim - i);
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
    for (int64_t t = 0; t < count; t++) {
        float* row = flat.data() + t * size;
        for (int64_t i = 0; i < size; i += LANES) put_all(row + i, widen(streams + t * stride + i));
    }
    multiply(c.fn, outputs, size, flat.data(), count, mixes.data());
    for (int64_t t = 0; t < count; t++) {
        const float *mix = mixes.data() + t * outputs, *row = flat.data() + t * size;
        F squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const F v = widen(row + i);
            squares = fma(v, v, squares);
        }
        const float rstd = 1.0f / std::sqrt(total(squares) / size + c.norm_eps);
        gates(mix, rstd * c.scale[0], c.base, 1.0f, c.hc_eps, m, pre + t * m);
        gates(mix + m, rstd * c.scale[1], c.base + m, 2.0f, 0.0f, m, post + t * m);
        float* matrix = comb + t * m * m;
        for (int64_t j = 0; j < m * m; j++) matrix[j] = mix[2 * m + j] * (rstd * c.scale[2]) + c.base[2 * m + j];
        if (m == 4)
            sinkhorn_of_four(matrix, c.iterations, c.hc_eps);
        else
            sinkhorn(matrix, m, c.iterations, c.hc_eps);
    }
}

template <class T>
void pre_rows(const Coefficients& c, const T* streams, int64_t stride, const float* old_pre, const Bf16* norm_weight, int64_t rows, T* x,
              float* quantized, float* pre, float* post, float* comb, int64_t threads) {
    const int64_t m = c.m, dim = c.dim;
    for_each((rows + TILE - 1) / TILE, threads, [&](int64_t tile) {
        const int64_t first = tile * TILE, count = std::min(TILE, rows - first);
        mix_rows(c, streams + first * stride, stride, count, pre + first * m, post + first * m, comb + first * m * m);
        for (int64_t t = first; t < first + count; t++) {
            collapse_row(streams + t * stride, old_pre + t * m, m, dim, x + t * dim);
            rms_norm_row(x + t * dim, norm_weight, c.norm_eps, dim, x + t * dim);
            if (quantized) fake_fp8_row(x + t * dim, dim, quantized + t * dim);
        }
    });
}

// New stream k = post[k] * y + sum_j comb[j, k] * stream j. The result may be the streams themselves: a chunk is read before it is written.
template <class T>
void post_rows(const T* streams, int64_t stride, const T* y, int64_t y_stride, const float* post, const float* comb, int64_t rows,
               int64_t m, int64_t dim, T* out, int64_t out_stride, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
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
    });
}

}  // namespace

// `quantized` is null where quantisation is the identity. m * dim is a multiple of 16.
OP(simd_hc_pre, const void* streams, int64_t bf16, int64_t stride, const float* old_pre, const float* fn, const float* base,
   const float* scale, const Bf16* norm_weight, double norm_eps, double hc_eps, int64_t iterations, int64_t rows, int64_t m, int64_t dim,
   void* x, float* quantized, float* pre, float* post, float* comb, int64_t threads) {
    const Coefficients c{fn, base, scale, float(norm_eps), float(hc_eps), iterations, m, dim};
    if (bf16)
        pre_rows(c, static_cast<const Bf16*>(streams), stride, old_pre, norm_weight, rows, static_cast<Bf16*>(x), quantized, pre, post,
                 comb, threads);
    else
        pre_rows(c, static_cast<const float*>(streams), stride, old_pre, norm_weight, rows, static_cast<float*>(x), quantized, pre, post,
                 comb, threads);
}

// At most 8 streams.
OP(simd_hc_post, const void* streams, int64_t bf16, int64_t stride, const void* y, int64_t y_stride, const float* post, const float* comb,
   int64_t rows, int64_t m, int64_t dim, void* out, int64_t out_stride, int64_t threads) {
    if (bf16)
        post_rows(static_cast<const Bf16*>(streams), stride, static_cast<const Bf16*>(y), y_stride, post, comb, rows, m, dim,
                  static_cast<Bf16*>(out), out_stride, threads);
    else
        post_rows(static_cast<const float*>(streams), stride, static_cast<const float*>(y), y_stride, post, comb, rows, m, dim,
                  static_cast<float*>(out), out_stride, threads);
}

OP(simd_hc_collapse, const void* streams, int64_t bf16, int64_t stride, const float* pre, int64_t rows, int64_t m, int64_t dim, void* y,
   int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        if (bf16)
            collapse_row(static_cast<const Bf16*>(streams) + t * stride, pre + t * m, m, dim, static_cast<Bf16*>(y) + t * dim);
        else
            collapse_row(static_cast<const float*>(streams) + t * stride, pre + t * m, m, dim, static_cast<float*>(y) + t * dim);
    });
}

OP(simd_stream_mean, const void* streams, int64_t bf16, int64_t stride, int64_t rows, int64_t m, int64_t dim, void* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        if (bf16)
            mean_row(static_cast<const Bf16*>(streams) + t * stride, m, dim, static_cast<Bf16*>(y) + t * dim);
        else
            mean_row(static_cast<const float*>(streams) + t * stride, m, dim, static_cast<float*>(y) + t * dim);
    });
}
