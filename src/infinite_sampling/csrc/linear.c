/* Products of a few rows with a large matrix in bfloat16, on the tile unit (AMX) or the vectors of a CPU.
 *
 * A decode step reads every weight once, so the order in memory is the order of reading: blocks of 32
 * outputs, in each of them for every 32 inputs two tiles of 16 x 16 pairs. Memory is asked for weights a
 * few kilobytes ahead, evenly between the sums: a core alone does not keep enough reads on their way.
 * A row's sums run over the inputs in order whatever the number of rows, so its bits do not depend on its
 * batch mates.
 */
#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#if HAS_TILES || defined(__AVX512BF16__)
#include <immintrin.h>
#define HAS_PRODUCTS 1
#else
#define HAS_PRODUCTS 0
#endif

#define COLUMNS 32                   /* outputs of a block */
#define DEPTH 32                     /* inputs of a tile */
#define TILE 512                     /* numbers in a tile */
#define ROWS 32                      /* rows of one pass over a block */
#define TILES_AHEAD 16               /* tiles to ask memory for before they are needed */

int has_tiles(void) { return HAS_TILES; }

int has_products(void) { return HAS_PRODUCTS; }


/* weight (outputs, inputs) -> packed, of the same size; outputs and inputs are multiples of 32. */
void pack_weight(const uint16_t *weight, uint16_t *packed, int64_t outputs, int64_t inputs) {
#pragma omp parallel for
    for (int64_t block = 0; block < outputs / COLUMNS; block++)
        for (int64_t half = 0; half < 2; half++)
            for (int64_t column = 0; column < 16; column++) {
                const uint16_t *from = weight + (block * COLUMNS + half * 16 + column) * inputs;
                uint16_t *to = packed + block * COLUMNS * inputs + half * TILE + column * 2;
                for (int64_t i = 0; i < inputs; i += 2) {
                    uint16_t *pair = to + i / DEPTH * 2 * TILE + i % DEPTH / 2 * 32;
                    pair[0] = from[i];
                    pair[1] = from[i + 1];
                }
            }
}

#if HAS_TILES
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

/* Tiles 0-3: sums (two of rows by two of columns); 4, 5: rows; 6, 7: columns. */
static const Tiles TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* sums (32, COLUMNS) of `two` or one times 16 rows. */
INLINE void multiply_tiles(const uint16_t *x, int64_t inputs, const uint16_t *packed, float *sums, int two) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < inputs; i += DEPTH, packed += 2 * TILE) {
#pragma GCC unroll 32
        for (int line = 0; line < 32; line++) __builtin_prefetch(packed + TILES_AHEAD * TILE + line * 32, 0, 3);
        _tile_loadd(4, x + i, inputs * 2);
        _tile_loadd(6, packed, 64);
        _tile_loadd(7, packed + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 16 * inputs + i, inputs * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + 16, COLUMNS * 4);
    if (two) {
        _tile_stored(2, sums + 16 * COLUMNS, COLUMNS * 4);
        _tile_stored(3, sums + 16 * COLUMNS + 16, COLUMNS * 4);
    }
}
#elif HAS_PRODUCTS
#define CHUNK 128                    /* inputs whose weights stay in the first cache while all rows meet them */

/* Add the products of `rows` rows with `depth` inputs of a block to sums (rows, COLUMNS). Each pair of inputs asks
 * memory for the line `stride` bytes after the last. */
INLINE void add_rows(const uint16_t *x, int64_t inputs, const uint16_t *packed, float *sums, int64_t depth, int rows,
                     const char *ahead, int64_t stride) {
    __m512 sum[8][2];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) sum[row][half] = _mm512_loadu_ps(sums + row * COLUMNS + half * LANES);
    for (int64_t i = 0; i < depth; i += DEPTH, packed += 2 * TILE, x += DEPTH)
#pragma GCC unroll 4
        for (int64_t pair = 0; pair < DEPTH / 2; pair++, ahead += stride) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(packed + pair * 32);
            __m512bh right = (__m512bh)_mm512_loadu_si512(packed + TILE + pair * 32);
            __builtin_prefetch(ahead, 0, 3);
            if (stride > 64) __builtin_prefetch(ahead + 64, 0, 3);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                int32_t numbers;
                memcpy(&numbers, x + row * inputs + pair * 2, sizeof numbers);
                __m512bh both = (__m512bh)_mm512_set1_epi32(numbers);
                sum[row][0] = _mm512_dpbf16_ps(sum[row][0], both, left);
                sum[row][1] = _mm512_dpbf16_ps(sum[row][1], both, right);
            }
        }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + row * COLUMNS + half * LANES, sum[row][half]);
}

/* sums (rows, COLUMNS) of up to ROWS rows. */
INLINE void multiply_vectors(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed, float *sums) {
    int64_t groups = rows / 8 + rows % 8 / 4 + rows % 4;
    int64_t stride = groups < 2 ? 128 : groups < 4 ? 64 : 32;
    memset(sums, 0, rows * COLUMNS * sizeof(float));
    for (int64_t i = 0; i < inputs; i += CHUNK, x += CHUNK, packed += CHUNK * COLUMNS) {
        int64_t depth = inputs - i < CHUNK ? inputs - i : CHUNK, row = 0;
        const char *ahead = (const char *)(packed + TILES_AHEAD * TILE);
        for (; row + 8 <= rows; row += 8, ahead += depth / 2 * stride)
            add_rows(x + row * inputs, inputs, packed, sums + row * COLUMNS, depth, 8, ahead, stride);
        for (; row + 4 <= rows; row += 4, ahead += depth / 2 * stride)
            add_rows(x + row * inputs, inputs, packed, sums + row * COLUMNS, depth, 4, ahead, stride);
        for (; row < rows; row++, ahead += depth / 2 * stride)
            add_rows(x + row * inputs, inputs, packed, sums + row * COLUMNS, depth, 1, ahead, stride);
    }
}
#endif

/* out (rows, outputs) = x (rows, inputs) @ weight.T + bias, all contiguous; bias (outputs) or NULL, in bfloat16;
 * out in float32 or bfloat16. Returns 0, or 1 where memory ran out. */
int multiply_packed(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed, int64_t outputs,
                    const uint16_t *bias, void *out, int64_t out_bf16) {
#if HAS_PRODUCTS
    uint16_t *padded = NULL;
    if (HAS_TILES && rows % 16) {
        size_t bytes = (rows + 15) / 16 * 16 * inputs * 2;
        padded = aligned_alloc(64, bytes);
        if (!padded) return 1;
        memcpy(padded, x, rows * inputs * 2);
        memset(padded + rows * inputs, 0, bytes - rows * inputs * 2);
        x = padded;
    }
#pragma omp parallel
    {
        float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
#if HAS_TILES
        _tile_loadconfig(&TILES);
#endif
#pragma omp for schedule(static)
        for (int64_t block = 0; block < outputs / COLUMNS; block++)
            for (int64_t first = 0; first < rows; first += ROWS) {
                const uint16_t *weight = packed + block * COLUMNS * inputs;
                int64_t count = rows - first < ROWS ? rows - first : ROWS;
#if HAS_TILES
                if (count > 16)
                    multiply_tiles(x + first * inputs, inputs, weight, sums, 1);
                else
                    multiply_tiles(x + first * inputs, inputs, weight, sums, 0);
#else
                multiply_vectors(x + first * inputs, count, inputs, weight, sums);
#endif
                for (int64_t row = 0; row < count; row++)
                    for (int64_t half = 0; half < COLUMNS; half += LANES) {
                        floats y = *(floats *)(sums + row * COLUMNS + half);
                        if (bias) y += load(bias, block * COLUMNS + half, 1);
                        store(out, (first + row) * outputs + block * COLUMNS + half, y, out_bf16);
                    }
            }
#if HAS_TILES
        _tile_release();
#endif
    }
    free(padded);
    return 0;
#else
    (void)x, (void)rows, (void)inputs, (void)packed, (void)outputs, (void)bias, (void)out, (void)out_bf16;
    return 1;
#endif
}
