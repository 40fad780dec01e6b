/* Two loops of the sampler: the random words of Philox 4x32-10 (as philox.py), and the weights of a softmax.
 *
 * Rows are computed alone, so their bits depend on nothing else.
 */
#include "vectors.h"

/* word (rows, count) = word v mod 4 of Philox at counter (v div 4, position, member, prompt) under key; v is
 * (rows, count), or (1, count) with a stride of 0. Every input is below 2**32, v below 2**34. */
void philox_words(const int64_t *v, int64_t v_stride, const int64_t *positions, const int64_t *members,
                  const int64_t *prompts, uint64_t key, int64_t *word, int64_t rows, int64_t count) {
#pragma omp parallel for if (rows * count > 1024)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < count; i++) {
            int64_t address = v[row * v_stride + i];
            uint32_t a = (uint32_t)(address >> 2), b = (uint32_t)positions[row];
            uint32_t c = (uint32_t)members[row], d = (uint32_t)prompts[row];
            uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
            for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
                uint64_t left = (uint64_t)a * 0xD2511F53u, right = (uint64_t)c * 0xCD9E8D57u;
                a = (uint32_t)(right >> 32) ^ b ^ low;
                b = (uint32_t)right;
                c = (uint32_t)(left >> 32) ^ d ^ high;
                d = (uint32_t)left;
            }
            uint32_t words[4] = {a, b, c, d};
            word[row * count + i] = words[address & 3];
        }
}

/* weights = exp((x - top) / temperature) for rows of `width` numbers, a multiple of 16; x and weights contiguous. */
void softmax_weights(const float *x, const float *top, float temperature, float *weights, int64_t rows, int64_t width) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * width; i < (row + 1) * width; i += LANES) {
            floats below = *(const floats *)(x + i) - top[row];
            if (temperature != 1.0f) below /= temperature;
            *(floats *)(weights + i) = choose(below != below, below, exp_negative(below)); /* NaN stays NaN */
        }
}
