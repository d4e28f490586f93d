// The indexer: queries on their grid, scores of all visible entries, the best of them.
//
// Keys are decoded sixteen at a time and transposed, so that a lane is an entry and no sum runs across lanes. Every score is made by the
// same additions in the same order (dims, then heads), whichever rows and entries it is computed with.
#include <functional>
#include <vector>

#include "entries.hpp"
#include "rows.hpp"
#include "shuffles.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t TILE = 64;         // entries decoded at a time: 32 kB with 128 dims
constexpr int64_t CHUNK = 64;        // rows of one sequence that share them
constexpr int64_t SCORES = 1 << 22;  // kept at a time for one chunk

struct Select {
    const float *query, *head_weights;
    int64_t rows, heads, dim;
    const uint8_t* pages;
    int64_t format, page_stride, data_stride, scales_at, scale_stride, per_page;
    const int32_t* block_table;
    int64_t table_stride, width;  // entries that a row of the table holds
    const int32_t *sequence, *visible;
    int64_t topk;
    const int32_t* candidates;  // null: all entries
    int64_t candidate_count, candidate_size;
    int32_t* index;
    int32_t* blocks;  // null: not asked for
    int64_t block_count, block_size, threads;
    int64_t seen(int64_t t) const { return std::min<int64_t>(std::max(visible[t], 0), width); }
};

// The entries of sequence s to score: `ids`, or all if that is null.
struct Entries {
    const Select& c;
    int64_t s;
    const int32_t* ids;

    // Entries number first .. first + count - 1, at most TILE: tile[i * TILE + e] is value i of entry e.
    void decode_tile(int64_t first, int64_t count, float* tile) const {
        for (int64_t e = 0; e < count; e += LANES) {
            const uint8_t *data[LANES], *scales[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                const int64_t place = first + std::min(e + j, count - 1), id = ids ? ids[place] : place;
                const uint8_t* page = c.pages + c.block_table[s * c.table_stride + id / c.per_page] * c.page_stride;
                data[j] = page + id % c.per_page * c.data_stride;
                scales[j] = page + c.scales_at + id % c.per_page * c.scale_stride;
            }
            for (int64_t i = 0; i < c.dim; i += LANES) {
                F v[LANES];
                for (int64_t j = 0; j < LANES; j++) v[j] = decode(c.format, data[j], scales[j], i);
                transpose(v);
                for (int64_t j = 0; j < LANES; j++) put_all(tile + (i + j) * TILE + e, v[j]);
            }
        }
    }
};

// Adds the part of H heads to the scores of 16 * K entries.
template <int H, int K>
inline void add_heads(const float* q, const float* weights, int64_t dim, const float* tile, F* scores) {
    F dots[H][K] = {};
    for (int64_t i = 0; i < dim; i++) {
        F key[K];
        for (int k = 0; k < K; k++) key[k] = widen(tile + i * TILE + k * LANES);
        for (int h = 0; h < H; h++) {
            const F x = splat(q[h * dim + i]);
            for (int k = 0; k < K; k++) dots[h][k] = fma(x, key[k], dots[h][k]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int k = 0; k < K; k++) scores[k] = fma(splat(weights[h]), dots[h][k] < 0.0f ? F{} : dots[h][k], scores[k]);
}

// to[e] = score of row t and entry e of the tile.
template <int K>
void score_tile(const Select& c, int64_t t, const float* tile, float* to, int64_t count) {
    const float *q = c.query + t * c.heads * c.dim, *weights = c.head_weights + t * c.heads;
    F scores[K] = {};
    int64_t h = 0;
    for (; h + 4 <= c.heads; h += 4) add_heads<4, K>(q + h * c.dim, weights + h, c.dim, tile, scores);
    for (; h < c.heads; h++) add_heads<1, K>(q + h * c.dim, weights + h, c.dim, tile, scores);
    for (int k = 0; k < K; k++) put(to + k * LANES, scores[k] + 0.0f, count - k * LANES);  // -0 becomes 0: they are equal
}

// scores[(t - first) * stride + e] of entries e < counts(t) of rows first .. first + rows - 1.
template <class Count>
void score(const Entries& entries, int64_t first, int64_t rows, const Count& counts, float* scores, int64_t stride, int64_t threads) {
    int64_t longest = 0;
    for (int64_t t = first; t < first + rows; t++) longest = std::max(longest, counts(t));
    for_each((longest + TILE - 1) / TILE, threads, [&](int64_t part) {
        const int64_t e = part * TILE;
        thread_local std::vector<float> memory;
        memory.resize(entries.c.dim * TILE);
        float* tile = memory.data();
        entries.decode_tile(e, std::min(TILE, longest - e), tile);
        for (int64_t t = first; t < first + rows; t++) {
            const int64_t count = std::min(TILE, counts(t) - e);
            float* to = scores + (t - first) * stride + e;
            if (count > 48)
                score_tile<4>(entries.c, t, tile, to, count);
            else if (count > 32)
                score_tile<3>(entries.c, t, tile, to, count);
            else if (count > 16)
                score_tile<2>(entries.c, t, tile, to, count);
            else if (count > 0)
                score_tile<1>(entries.c, t, tile, to, count);
        }
    });
}

// Integers in the order of the floats.
constexpr uint32_t TOP = 0xffffffffu;
uint32_t rank_of(float x) {
    const uint32_t u = bits_of(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The places of the `k` highest ranks, the first of equals, ascending in out[k], padded with -1. `ids`: what to write for a place.
void choose(const std::vector<uint32_t>& ranks, int64_t k, const int32_t* ids, int32_t* out) {
    thread_local std::vector<uint32_t> sorted;
    const int64_t n = ranks.size();
    int64_t used = 0, equals = n;
    uint32_t threshold = 0;
    if (n > k && k > 0) {
        sorted = ranks;
        std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<>());
        threshold = sorted[k - 1];
        equals = k - std::count_if(sorted.begin(), sorted.begin() + k, [=](uint32_t rank) { return rank > threshold; });
    }
    for (int64_t i = 0; i < n && used < k; i++) {
        if (ranks[i] < threshold || (ranks[i] == threshold && --equals < 0)) continue;
        out[used++] = ids ? ids[i] : i;
    }
    std::fill(out + used, out + k, -1);
}

// Visible entries of the row's candidate blocks, ascending.
void list_candidates(const Select& c, int64_t t, std::vector<int32_t>& ids) {
    thread_local std::vector<int32_t> blocks;
    const int64_t seen = c.seen(t), last = (seen + c.candidate_size - 1) / c.candidate_size;
    blocks.clear(), ids.clear();
    for (int64_t i = 0; i < c.candidate_count; i++) {
        const int32_t block = c.candidates[t * c.candidate_count + i];
        if (block >= 0 && block < last) blocks.push_back(block);
    }
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    for (const int64_t block : blocks)
        for (int64_t e = block * c.candidate_size; e < std::min((block + 1) * c.candidate_size, seen); e++) ids.push_back(e);
}

// Blocks by their best visible score, the last visible one always.
void choose_blocks(const Select& c, int64_t t, const float* scores) {
    thread_local std::vector<uint32_t> ranks;
    const int64_t seen = c.seen(t);
    ranks.clear();
    for (int64_t e = 0; e < seen; e += c.block_size) {
        uint32_t best = 0;
        for (int64_t i = e; i < std::min(e + c.block_size, seen); i++) best = std::max(best, rank_of(scores[i]));
        ranks.push_back(best);
    }
    if (seen) ranks.back() = TOP;
    choose(ranks, c.block_count, nullptr, c.blocks + t * c.block_count);
}

// The row's selection from the scores of all entries of its sequence; or from candidates alone, whose scores are made here.
void choose_row(const Select& c, int64_t t, const float* scores) {
    thread_local std::vector<uint32_t> ranks;
    thread_local std::vector<int32_t> ids;
    thread_local std::vector<float> own;
    if (c.candidates) list_candidates(c, t, ids);
    const int64_t n = c.candidates ? ids.size() : c.seen(t);
    const bool listed = c.candidates && scores;
    if (!scores) {
        own.resize(n);
        score(Entries{c, c.sequence[t], ids.data()}, t, 1, [=](int64_t) { return n; }, own.data(), n, 1);
        scores = own.data();
    }
    ranks.resize(n);
    for (int64_t i = 0; i < n; i++) ranks[i] = rank_of(scores[listed ? ids[i] : i]);
    choose(ranks, c.topk, c.candidates ? ids.data() : nullptr, c.index + t * c.topk);
}

// Rows first .. first + rows - 1, of one sequence. Rows with few candidates score these only, each row its own.
void select_chunk(const Select& c, int64_t first, int64_t rows, int64_t threads) {
    thread_local std::vector<float> memory;
    int64_t longest = 0;
    for (int64_t t = first; t < first + rows; t++) longest = std::max(longest, c.seen(t));
    const bool few = c.candidates && !c.blocks && 2 * c.candidate_count * c.candidate_size <= longest;
    float* scores = nullptr;
    if (!few) {
        memory.resize(std::max<int64_t>(rows * longest, 1));
        scores = memory.data();
        score(Entries{c, c.sequence[first], nullptr}, first, rows, [&](int64_t t) { return c.seen(t); }, scores, longest, threads);
    }
    for_each(rows, threads, [&](int64_t row) {
        const int64_t t = first + row;
        const float* mine = few ? nullptr : scores + (t - first) * longest;
        if (c.blocks) choose_blocks(c, t, mine);
        choose_row(c, t, mine);
    });
}

template <class T>
void query_rows(const T* x, int64_t stride, int64_t rows, int64_t heads, int64_t n, const float* table, const int64_t* positions,
                int64_t rd, bool quantise, float* y, int64_t threads) {
    for_each(rows, threads, [&](int64_t t) {
        thread_local std::vector<T> turned;
        turned.resize(n);
        for (int64_t h = 0; h < heads; h++) {
            const T* from = x + t * stride + h * n;
            float* to = y + (t * heads + h) * n;
            std::copy(from, from + n - rd, turned.data());
            rotate_row(from, table + positions[t] * rd, n, rd, false, turned.data());
            for (int64_t i = 0; i < n; i += BLOCK) {
                F a = widen(turned.data() + i), b = widen(turned.data() + i + LANES);
                if (quantise) fake_fp4_index(a, b);
                put_all(to + i, a), put_all(to + i + LANES, b);
            }
        }
    });
}

}  // namespace

// Rotated queries x [rows, heads, n] as float32 y, on their grid if bf16. n is a multiple of 32.
OP(simd_index_query, const void* x, int64_t bf16, int64_t stride, int64_t rows, int64_t heads, int64_t n, const float* table,
   const int64_t* positions, int64_t rd, float* y, int64_t threads) {
    if (bf16)
        query_rows(static_cast<const Bf16*>(x), stride, rows, heads, n, table, positions, rd, true, y, threads);
    else
        query_rows(static_cast<const float*>(x), stride, rows, heads, n, table, positions, rd, false, y, threads);
}

// The arguments are the fields of `Select`, in their order.
EXPORT void simd_select(const Select* call) {
    const Select& c = *call;
    std::vector<int64_t> chunks;  // first rows, and the end
    int64_t longest = 1;
    for (int64_t t = 0; t < c.rows; t++) longest = std::max(longest, c.seen(t));
    const int64_t most = std::min(CHUNK, std::max<int64_t>(SCORES / longest, 1));
    for (int64_t t = 0; t < c.rows; t++)
        if (!t || c.sequence[t] != c.sequence[t - 1] || t - chunks.back() == most) chunks.push_back(t);
    const int64_t count = chunks.size();
    chunks.push_back(c.rows);
    if (count < c.threads || c.threads == 1) {
        for (int64_t i = 0; i < count; i++) select_chunk(c, chunks[i], chunks[i + 1] - chunks[i], c.threads);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(c.threads)
    for (int64_t i = 0; i < count; i++) select_chunk(c, chunks[i], chunks[i + 1] - chunks[i], 1);
}
