/* Vectors of 16 floats in the language of GCC (12 or later) and Clang: no library, no intrinsics.
 *
 * Numbers in memory are float32 or bfloat16; all arithmetic is in float32.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

INLINE floats load(const void *data, int64_t i, int bf16) {
    if (!bf16) return *(const floats *)((const float *)data + i);
    return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)data + i), words) << 16);
}

INLINE void store(void *data, int64_t i, floats x, int bf16) {
    if (!bf16) {
        *(floats *)((float *)data + i) = x;
        return;
    }
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    words is_nan = (words)(x != x);
    rounded = (rounded & ~is_nan) | (0x7fc0 & is_nan);
    *(halves *)((uint16_t *)data + i) = __builtin_convertvector(rounded, halves);
}

INLINE floats splat(float x) { return (floats){0} + x; }

INLINE floats choose(ints mask, floats yes, floats no) {
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

/* The numbers as they would be read back after a store. */
INLINE floats rounded(floats x, int bf16) {
    if (!bf16) return x;
    uint16_t stored[LANES];
    store(stored, 0, x, 1);
    return load(stored, 0, 1);
}

/* exp for x <= 0, to about one unit in the last place; 0 below -87. Coefficients: Taylor's, on |r| <= ln(2) / 2. */
INLINE floats exp_negative(floats x) {
    ints is_tiny = x < -87.0f;
    floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded to an integer */
    floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ints exponent = __builtin_convertvector(n, ints) << 23;
    floats y = (floats)((ints)p + (exponent & ~is_tiny));
    return choose(is_tiny, splat(0), y);
}

INLINE float sum_of(floats x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
