// Packing of weights, linears, and the grouped output projection.
#include "products.hpp"
#include "rows.hpp"
#include "threads.hpp"

namespace {

// Bytes of a block of one tile; 16 outputs x 32 inputs.
int64_t block_bytes(int64_t format) {
    const int64_t bytes[] = {PackedF32::BYTES, PackedBf16::BYTES, PackedFp8::BYTES, PackedFp4::BYTES};
    return bytes[format];
}

// The first `count` of 32 values at `row` put into their block as output number `lane` of the tile. FP4 rows have whole blocks.
void place(int64_t format, const uint8_t* row, int64_t count, uint8_t* block, int64_t lane) {
    if (format == FP4)
        for (int64_t g = 0; g < BLOCK / GROUP; g++) std::memcpy(block + (g * LANES + lane) * 4, row + g * 4, 4);
    else if (format == FP8)
        for (int64_t i = 0; i < count; i++)
            block[i / GROUP * GROUP * LANES + fp8_place(i % GROUP) + lane / 8 * 16 + lane % 8] = row[i];
    else if (format == BF16)
        for (int64_t i = 0; i < count; i++) std::memcpy(block + (i * LANES + lane) * 2, row + i * 2, 2);
    else
        for (int64_t i = 0; i < count; i++) std::memcpy(block + (i * LANES + lane) * 4, row + i * 4, 4);
}

}  // namespace

// values [outputs, row_bytes]; scales e8m0 [outputs / scale_rows, blocks] or null. `data` is zeroed; both results as in `Weight`.
OP(simd_pack, int64_t format, int64_t outputs, int64_t inputs, const uint8_t* values, int64_t row_bytes, const uint8_t* scales,
   int64_t scale_rows, uint8_t* data, uint8_t* scale, int64_t threads) {
    const Weight w{format, outputs, inputs, nullptr, nullptr};
    const int64_t blocks = w.blocks(), bytes = block_bytes(format), row_block = bytes / LANES;
    for_each(w.tiles(), threads, [&](int64_t tile) {
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = tile * blocks + b, count = std::min(BLOCK, inputs - b * BLOCK);
            for (int64_t n = tile * LANES; n < std::min(outputs, (tile + 1) * LANES); n++) {
                place(format, values + n * row_bytes + b * row_block, count, data + at * bytes, n % LANES);
                if (scales) scale[at * LANES + n % LANES] = scales[n / scale_rows * blocks + b];
            }
        }
    });
}

// y[t] = x[t] . weight.T. x bf16 or float32 [rows, inputs], y likewise [rows, outputs].
OP(simd_linear, const void* x, int64_t x_bf16, int64_t x_stride, int64_t rows, const Weight* weight, void* y, int64_t y_bf16,
   int64_t threads) {
    thread_local Rows in;
    in.set(x, x_bf16, x_stride, rows, weight->inputs);
    multiply(*weight, in.at.data(), rows, Result{y, weight->outputs, weight->outputs, y_bf16 != 0}, threads);
}

// x bf16 or float32 [rows, groups * inputs of wo_a] -> y [rows, outputs of wo_b]. Group g meets rows g * o .. of wo_a.
OP(simd_attention_output, const void* x, int64_t bf16, int64_t x_stride, int64_t rows, int64_t groups, const Weight* wo_a,
   const Weight* wo_b, void* y, int64_t threads) {
    thread_local Rows in;
    thread_local std::vector<float> part, z;
    thread_local std::vector<const float*> at;
    const int64_t o = wo_a->outputs / groups, width = wo_b->blocks() * BLOCK, span = (o / LANES + 2) * LANES;
    part.resize(rows * span), z.assign(rows * width, 0.0f), at.resize(rows);
    for (int64_t g = 0; g < groups; g++) {
        const char* group = static_cast<const char*>(x) + g * wo_a->inputs * (bf16 ? 2 : 4);
        in.set(group, bf16, x_stride, rows, wo_a->inputs);
        const int64_t first = g * o / LANES, last = ((g + 1) * o + LANES - 1) / LANES;
        const Result result{part.data() - first * LANES, span, wo_a->outputs, false};
        multiply(*wo_a, first, last, in.at.data(), rows, result, threads);
        for (int64_t r = 0; r < rows; r++) std::memcpy(z.data() + r * width + g * o, part.data() + r * span + g * o - first * LANES, o * 4);
    }
    for (int64_t r = 0; r < rows; r++) {
        at[r] = z.data() + r * width;
        if (!bf16) continue;
        float* row = z.data() + r * width;
        for (int64_t i = 0; i < width; i += LANES) put_all(row + i, rounded(widen(row + i), static_cast<const Bf16*>(nullptr)));
        fake_fp8_row(row, width, row);
    }
    multiply(*wo_b, at.data(), rows, Result{y, wo_b->outputs, wo_b->outputs, bf16 != 0}, threads);
}
