// Mixture of experts: routing, and the experts' SwiGLU on weights in the checkpoint's formats.
#include <numeric>

#include "products.hpp"
#include "rows.hpp"
#include "threads.hpp"

namespace {

struct Experts {
    const Weight* table;  // w1, w2, w3 of each
    int64_t inner() const { return table->outputs; }
};

// What one call works with.
struct Scratch {
    std::vector<float> gate, up, down, sum;
    std::vector<const float*> rows;
    std::vector<int64_t> first, order, next;
};

void product(const Weight& w, const std::vector<const float*>& rows, float* y, int64_t threads) {
    multiply(w, rows.data(), rows.size(), Result{y, w.outputs, w.outputs, false}, threads);
}

F rounded_if(bool bf16, F x) { return bf16 ? rounded(x, static_cast<const Bf16*>(nullptr)) : x; }

// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, rounded and quantised; into `gate`.
void activate(float* gate, const float* up, int64_t n, float limit, float weight, bool bf16) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        F part[2];
        for (int h = 0; h < 2; h++) {
            F g = rounded_if(bf16, widen(gate + i + h * LANES)), u = rounded_if(bf16, widen(up + i + h * LANES));
            g = g > limit ? splat(limit) : g;  // comparisons that leave a NaN a NaN
            u = u > limit ? splat(limit) : u;
            u = u < -limit ? splat(-limit) : u;
            F e = exponential(g < -88.0f ? splat(88.0f) : -g);
            part[h] = rounded_if(bf16, g / (1.0f + e) * u * weight);
        }
        if (bf16) fake_fp8(part[0], part[1]);
        put_all(gate + i, part[0]), put_all(gate + i + LANES, part[1]);
    }
}

// Adds to each row's sum what expert number `e` makes of it.
void run_expert(const Experts& experts, int64_t e, const float* x, int64_t dim, const int64_t* places, int64_t count, int64_t top_k,
                const float* weights, float limit, bool bf16, Scratch& s, int64_t threads) {
    const Weight* w = experts.table + 3 * e;
    const int64_t inner = experts.inner();
    s.gate.resize(count * inner), s.up.resize(count * inner), s.down.resize(count * dim), s.rows.resize(count);
    for (int64_t r = 0; r < count; r++) s.rows[r] = x + places[r] / top_k * dim;
    product(w[0], s.rows, s.gate.data(), threads);
    product(w[2], s.rows, s.up.data(), threads);
    for (int64_t r = 0; r < count; r++) {
        float* gate = s.gate.data() + r * inner;
        activate(gate, s.up.data() + r * inner, inner, limit, weights ? weights[places[r]] : 1.0f, bf16);
        s.rows[r] = gate;
    }
    product(w[1], s.rows, s.down.data(), threads);
    for (int64_t r = 0; r < count; r++) {
        float *sum = s.sum.data() + places[r] / top_k * dim, *down = s.down.data() + r * dim;
        for (int64_t i = 0; i < dim; i += LANES) put_all(sum + i, widen(sum + i) + rounded_if(bf16, widen(down + i)));
    }
}

// Places t * top_k + j of each expert's rows, expert by expert, rows rising: s.order[s.first[e] .. s.first[e + 1]].
void sort_by_expert(const int32_t* ids, int64_t places, int64_t experts, Scratch& s) {
    s.first.assign(experts + 1, 0);
    for (int64_t p = 0; p < places; p++)
        if (ids[p] >= 0) s.first[ids[p] + 1]++;
    std::partial_sum(s.first.begin(), s.first.end(), s.first.begin());
    s.order.resize(s.first[experts]);
    s.next.assign(s.first.begin(), s.first.end() - 1);
    for (int64_t p = 0; p < places; p++)
        if (ids[p] >= 0) s.order[s.next[ids[p]]++] = p;
}

}  // namespace

// x float32 [rows, dim] -> y bf16 or float32 [rows, dim]. `table` has w1, w2, w3 of each expert, `shared` of one; it may be null.
OP(simd_moe, const float* x, const int32_t* ids, const float* weights, int64_t rows, int64_t top_k, int64_t dim, const Weight* table,
   int64_t count, const Weight* shared, double limit, int64_t bf16, void* y, int64_t threads) {
    constexpr int64_t CHUNK = 256;  // rows of one expert at a time: bounds the scratch memory
    thread_local Scratch s;
    s.sum.assign(rows * dim, 0.0f);
    sort_by_expert(ids, rows * top_k, count, s);
    auto run = [&](const Experts& experts, int64_t e, const int64_t* places, int64_t n, int64_t k, const float* w) {
        for (int64_t r = 0; r < n; r += CHUNK)
            run_expert(experts, e, x, dim, places + r, std::min(CHUNK, n - r), k, w, float(limit), bf16, s, threads);
    };
    for (int64_t e = 0; e < count; e++) run({table}, e, s.order.data() + s.first[e], s.first[e + 1] - s.first[e], top_k, weights);
    if (shared) {
        s.order.resize(rows);
        std::iota(s.order.begin(), s.order.end(), 0);
        run({shared}, 0, s.order.data(), rows, 1, nullptr);
    }
    for (int64_t i = 0; i < rows * dim; i += LANES) {
        if (bf16)
            put_all(static_cast<Bf16*>(y) + i, widen(s.sum.data() + i));
        else
            put_all(static_cast<float*>(y) + i, widen(s.sum.data() + i));
    }
}

// x bf16 or float32 [rows, dim]. ids [rows, top_k] of the best sqrt(softplus(x . weight)) + bias, ties to the lower expert, and their
// weights.
OP(simd_moe_gate, const void* x, int64_t x_bf16, int64_t x_stride, int64_t rows, const Weight* weight, const float* bias,
   int64_t bias_stride, int64_t top_k, double scale, int32_t* ids, float* weights, int64_t threads) {
    thread_local Rows in;
    thread_local std::vector<float> scores, biased;
    thread_local std::vector<char> chosen;
    const int64_t experts = weight->outputs;
    in.set(x, x_bf16, x_stride, rows, weight->inputs);
    scores.resize(rows * experts), biased.resize(rows * experts), chosen.assign(rows * experts, 0);
    float *const all = scores.data(), *const keys = biased.data();
    char* const marks = chosen.data();
    multiply(*weight, in.at.data(), rows, Result{all, experts, experts, false}, threads);
    for_each(rows, threads, [&](int64_t t) {
        float *score = all + t * experts, *key = keys + t * experts;
        char* taken = marks + t * experts;
        for (int64_t e = 0; e < experts; e++) {
            const float l = score[e];
            score[e] = std::sqrt(std::max(l, 0.0f) + std::log1p(std::exp(-std::fabs(l))));
            key[e] = score[e] + bias[t * bias_stride + e];
        }
        float sum = 1e-20f;
        for (int64_t k = 0; k < top_k; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || key[e] > key[best])) best = e;  // the first of equals
            taken[best] = 1;
            ids[t * top_k + k] = best;
            sum += score[best];
        }
        for (int64_t k = 0; k < top_k; k++) weights[t * top_k + k] = score[ids[t * top_k + k]] / sum * float(scale);
    });
}
