// Attention over window keys and selected entries, read where they are stored, in every storage format.
#include <vector>

#include "entries.hpp"
#include "rows.hpp"
#include "shuffles.hpp"
#include "threads.hpp"

namespace {

// The arguments of one call; every field has eight bytes, in this order, on the Python side too.
struct Attention {
    int64_t bf16, rows, heads, dim, threads;
    const void* query;
    int64_t query_stride;
    void* out;
    const float* sink;
    double scale;
    const float* table;
    const int64_t* positions;
    int64_t rd;
    // window keys: a ring of `ring_length` entries for each of `slots` slots, then the rows of this step
    const int32_t* window_index;
    int64_t columns;
    const uint8_t* ring;
    int64_t ring_format, slots, ring_length, slot_stride, entry_stride, ring_scales_at;
    const void* current;
    int64_t current_stride;
    // selected entries; selected_index is null if there are none
    const int32_t* selected_index;
    int64_t topk;
    const uint8_t* pages;
    int64_t page_format, page_stride, data_stride, scales_at, scale_stride, entries_per_page;
    const int32_t* block_table;
    int64_t block_table_stride;
    const int32_t* sequence;
};

// Where the keys of row t lie, in column order, columns without a key left out.
struct Key {
    const uint8_t *data, *scales;
    int64_t format;
};

void list_keys(const Attention& a, int64_t t, std::vector<Key>& keys) {
    keys.clear();
    const int64_t history = a.slots * a.ring_length, width = a.bf16 ? 2 : 4;
    for (int64_t c = 0; c < a.columns; c++) {
        const int64_t index = a.window_index[t * a.columns + c];
        if (index < 0) continue;
        if (index >= history) {
            const uint8_t* row = static_cast<const uint8_t*>(a.current) + (index - history) * a.current_stride * width;
            keys.push_back({row, nullptr, a.bf16 ? BF16 : F32});
            continue;
        }
        const uint8_t* entry = a.ring + index / a.ring_length * a.slot_stride + index % a.ring_length * a.entry_stride;
        keys.push_back({entry, entry + a.ring_scales_at, a.ring_format});
    }
    for (int64_t c = 0; a.selected_index && c < a.topk; c++) {
        const int64_t entry = a.selected_index[t * a.topk + c];
        if (entry < 0) continue;
        const uint8_t* page = a.pages + a.block_table[a.sequence[t] * a.block_table_stride + entry / a.entries_per_page] * a.page_stride;
        const int64_t place = entry % a.entries_per_page;
        keys.push_back({page + place * a.data_stride, page + a.scales_at + place * a.scale_stride, a.page_format});
    }
}

constexpr int64_t HEADS = 4, KEYS = 4;  // computed together: sixteen sums stay in registers
constexpr int64_t TILE = 32;            // keys that all heads see before the next: they stay in the cache

// scores[h * stride + k] = (q_h . key_k) * scale for HEADS heads; `count` is a multiple of KEYS.
void score(const float* q, const float* keys, int64_t count, int64_t dim, float scale, float* scores, int64_t stride) {
    for (int64_t k = 0; k < count; k += KEYS) {
        F sums[HEADS][KEYS] = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            F key[KEYS];
            for (int j = 0; j < KEYS; j++) key[j] = widen(keys + (k + j) * dim + i);
            for (int h = 0; h < HEADS; h++) {
                const F x = widen(q + h * dim + i);
                for (int j = 0; j < KEYS; j++) sums[h][j] = fma(x, key[j], sums[h][j]);
            }
        }
        float dots[HEADS * KEYS];
        put_all(dots, totals(&sums[0][0]) * scale);
        for (int h = 0; h < HEADS; h++) std::memcpy(scores + h * stride + k, dots + h * KEYS, sizeof(float) * KEYS);
    }
}

// Scores to probabilities exp(s - max), rounded if bf16, zeros from `valid` on; `count` is a multiple of 16. Returns their sum (before
// rounding) plus the sink's part.
float soften(float* scores, int64_t valid, int64_t count, float sink, bool bf16) {
    float top = -INFINITY;
    for (int64_t k = 0; k < valid; k++) top = scores[k] > top ? scores[k] : top;
    std::fill(scores + valid, scores + count, -INFINITY);
    F sums = {};
    for (int64_t k = 0; k < count; k += LANES) {
        const F p = exponential(widen(scores + k) - top);
        sums += p;
        put_all(scores + k, bf16 ? rounded(p, static_cast<const Bf16*>(nullptr)) : p);
    }
    return total(sums) + std::exp(sink - top);
}

// out[h * dim + i] += sum_k p[h * stride + k] * key_k[i] for HEADS heads and V vectors of values from `first` on.
template <int V>
void mix(const float* p, int64_t stride, const float* keys, int64_t count, int64_t dim, int64_t first, float* out) {
    F sums[HEADS][V];
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < V; v++) sums[h][v] = widen(out + h * dim + first + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        F key[V];
        for (int v = 0; v < V; v++) key[v] = widen(keys + k * dim + first + v * LANES);
        for (int h = 0; h < HEADS; h++) {
            const F weight = splat(p[h * stride + k]);
            for (int v = 0; v < V; v++) sums[h][v] = fma(weight, key[v], sums[h][v]);
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < V; v++) put_all(out + h * dim + first + v * LANES, sums[h][v]);
}

// `heads` heads of row t, from `first` on, over its decoded keys.
template <class T>
void attend(const Attention& a, int64_t t, int64_t first, int64_t heads, const float* keys, int64_t valid, int64_t count) {
    const int64_t dim = a.dim, stride = (count + LANES - 1) / LANES * LANES, padded = (heads + HEADS - 1) / HEADS * HEADS;
    const float* angles = a.table + a.positions[t] * a.rd;
    thread_local std::vector<float> q, scores, values, sums;
    thread_local std::vector<T> turned;
    q.resize(padded * dim), scores.resize(padded * stride), turned.resize(dim), sums.resize(heads);
    std::fill(q.begin() + heads * dim, q.end(), 0.0f);
    for (int64_t h = 0; h < heads; h++) {
        const T* from = static_cast<const T*>(a.query) + t * a.query_stride + (first + h) * dim;
        std::copy(from, from + dim - a.rd, turned.data());
        rotate_row(from, angles, dim, a.rd, false, turned.data());
        for (int64_t i = 0; i < dim; i += LANES) put_all(q.data() + h * dim + i, widen(turned.data() + i));
    }
    for (int64_t k = 0; k < count; k += TILE)
        for (int64_t h = 0; h < heads; h += HEADS)
            score(q.data() + h * dim, keys + k * dim, std::min(TILE, count - k), dim, float(a.scale), scores.data() + h * stride + k,
                  stride);
    for (int64_t h = 0; h < heads; h++) sums[h] = soften(scores.data() + h * stride, valid, stride, a.sink[first + h], a.bf16);
    values.assign(padded * dim, 0.0f);
    for (int64_t k = 0; k < count; k += TILE)
        for (int64_t h = 0; h < heads; h += HEADS) {
            const float *p = scores.data() + h * stride + k, *from = keys + k * dim;
            const int64_t here = std::min(TILE, count - k);
            float* to = values.data() + h * dim;
            int64_t i = 0;
            for (; i + 4 * LANES <= dim; i += 4 * LANES) mix<4>(p, stride, from, here, dim, i, to);
            for (; i < dim; i += LANES) mix<1>(p, stride, from, here, dim, i, to);
        }
    for (int64_t h = 0; h < heads; h++) {
        T* to = static_cast<T*>(a.out) + (t * a.heads + first + h) * dim;
        for (int64_t j = 0; j < dim; j += LANES) put_all(to + j, widen(values.data() + h * dim + j) / sums[h]);
        rotate_row(to, angles, dim, a.rd, true, to);
    }
}

// One row. With several threads, they share the decoding and then the heads.
template <class T>
void attend_row(const Attention& a, int64_t t, int64_t threads) {
    thread_local std::vector<Key> keys;
    thread_local std::vector<float> decoded;
    list_keys(a, t, keys);
    const int64_t valid = keys.size(), count = (valid + KEYS - 1) / KEYS * KEYS, dim = a.dim;
    T* out = static_cast<T*>(a.out) + t * a.heads * dim;
    if (!valid) return (void)std::memset(out, 0, a.heads * dim * sizeof(T));
    decoded.resize(count * dim);
    const Key* list = keys.data();
    float* to = decoded.data();  // the calling thread's, whichever thread writes there
    std::fill(to + valid * dim, to + count * dim, 0.0f);
    for_each(valid, threads, [&](int64_t k) {
        for (int64_t i = 0; i < dim; i += LANES) put_all(to + k * dim + i, decode(list[k].format, list[k].data, list[k].scales, i));
    });
    const int64_t share = ((a.heads + threads - 1) / threads + HEADS - 1) / HEADS * HEADS;  // heads of a thread
    for_each((a.heads + share - 1) / share, threads, [&](int64_t i) {
        attend<T>(a, t, i * share, std::min(share, a.heads - i * share), to, valid, count);
    });
}

template <class T>
void attend_rows(const Attention& a) {
    if (a.rows < a.threads) {
        for (int64_t t = 0; t < a.rows; t++) attend_row<T>(a, t, a.threads);
        return;
    }
    for_each(a.rows, a.threads, [&](int64_t t) { attend_row<T>(a, t, 1); });
}

}  // namespace

EXPORT void simd_attention(const Attention* a) {
    if (a->bf16)
        attend_rows<Bf16>(*a);
    else
        attend_rows<float>(*a);
}
