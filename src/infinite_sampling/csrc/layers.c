/* The small layers between the matrix products, one row at a time: norms, gates, rotary embeddings.
 *
 * Every function rounds to bfloat16 where transformers' own layers do, and each row is computed alone.
 * Widths are multiples of 16; strides are in elements.
 */
#include "kernels.h"

/* Rows below which a second thread costs more than it saves. */
#define SERIAL_ROWS 8

INLINE void norm_row(const void *x, const void *weight, void *out, int64_t row, int64_t width, float epsilon,
                     int64_t of_one, int64_t bf16, int64_t out_bf16) {
    floats squares = splat(0);
    for (int64_t d = 0; d < width; d += LANES) {
        floats v = load(x, row * width + d, bf16);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / width + epsilon);
    for (int64_t d = 0; d < width; d += LANES) {
        floats v = load(x, row * width + d, bf16) * scale, w = load(weight, d, bf16);
        v = of_one ? v * (1.0f + w) : rounded(v, bf16) * w;
        store(out, row * width + d, v, out_bf16);
    }
}

/* out = x / sqrt(mean(x^2) + epsilon), times weight (of_one: times 1 + weight, rounded once), for contiguous rows;
 * x and weight have one dtype, out its own. */
void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width, float epsilon, int64_t of_one,
              int64_t bf16, int64_t out_bf16) {
#pragma omp parallel for if (rows > SERIAL_ROWS)
    for (int64_t row = 0; row < rows; row++) norm_row(x, weight, out, row, width, epsilon, of_one, bf16, out_bf16);
}

/* x += added (bfloat16), then out (bfloat16) = the norm of x; without a weight only the sum. */
void add_rms_norm(void *x, const void *added, const void *weight, void *out, int64_t rows, int64_t width, float epsilon,
                  int64_t bf16) {
#pragma omp parallel for if (rows > SERIAL_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t d = row * width; d < (row + 1) * width; d += LANES)
            store(x, d, load(x, d, bf16) + load(added, d, 1), bf16);
        if (weight) norm_row(x, weight, out, row, width, epsilon, 0, bf16, 1);
    }
}

/* out (rows, width), contiguous = silu(gate) * up. */
void silu_multiply(const void *gate, int64_t gate_stride, const void *up, int64_t up_stride, void *out, int64_t rows,
                   int64_t width, int64_t bf16) {
#pragma omp parallel for if (rows > SERIAL_ROWS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < width; d += LANES) {
            floats g = load(gate, row * gate_stride + d, bf16), u = load(up, row * up_stride + d, bf16);
            floats e = exp_negative(choose(g < 0.0f, g, -g));
            floats silu = choose(g < 0.0f, g * e, g) / (1.0f + e);
            store(out, row * width + d, rounded(silu, bf16) * u, bf16);
        }
}

/* out (rows, heads, width), contiguous = x * cos + rotate_half(x) * sin; cos and sin are (rows, width), of their own
 * dtype. Products are rounded to it, as by one operation each. */
void rotate(const void *x, int64_t row_stride, int64_t head_stride, const void *cos, const void *sin, void *out,
            int64_t rows, int64_t heads, int64_t width, int64_t bf16, int64_t angles_bf16) {
    int64_t half = width / 2;
#pragma omp parallel for if (rows > SERIAL_ROWS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t d = 0; d < half; d += LANES) {
                int64_t from = row * row_stride + head * head_stride + d, to = (row * heads + head) * width + d;
                int64_t angle = row * width + d;
                floats a = load(x, from, bf16), b = load(x, from + half, bf16);
                floats c = load(cos, angle, angles_bf16), s = load(sin, angle, angles_bf16);
                store(out, to, rounded(a * c, angles_bf16) - rounded(b * s, angles_bf16), bf16);
                c = load(cos, angle + half, angles_bf16), s = load(sin, angle + half, angles_bf16);
                store(out, to + half, rounded(b * c, angles_bf16) + rounded(a * s, angles_bf16), bf16);
            }
}
