/* Attention of decode rows over paged keys and values, for CPUs.
 *
 * In: the query, key and value of one layer, one token a row, and tables that say where each row's
 * keys stand. Out: the attention output; the new keys and values are stored first. Each pair of row
 * and KV head is one task, computed from that row's own data in an order that depends on nothing but
 * its prompt's length and its own: a row's bits do not depend on its batch mates, on where its pages
 * lie, or on the number of threads.
 */
#include "kernels.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

INLINE floats softcapped(floats score, float cap) {
    floats x = score / cap;
    floats positive = choose(x < 0.0f, -x, x);
    floats e = exp_negative(-2.0f * positive);
    floats t = (1.0f - e) / (1.0f + e);
    return choose(x < 0.0f, -t, t) * cap;
}

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE floats sums(floats *a) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        a[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        a[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return __builtin_shufflevector(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a[0], a[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

/* 16 rows of `dim` numbers from element `first` of data, those past `count` zero: in place, or copied to `block`. */
INLINE const void *block_of(float *block, const void *data, int64_t first, int64_t count, int64_t dim, int bf16) {
    int64_t bytes = bf16 ? 2 : 4;
    const char *from = (const char *)data + first * bytes;
    if (count == LANES) return from;
    memset((char *)block + count * dim * bytes, 0, (LANES - count) * dim * bytes);
    return memcpy(block, from, count * dim * bytes);
}

/* A run of keys that stand together: `count` of them from element `first_key`, seen from number `seen` on. */
typedef struct {
    int64_t first_key, first_value, count, seen;
} Run;

typedef struct {
    float *block, *scores, *out;
} Scratch;

/* Lane j is the product of one query with key j of a block. */
INLINE floats products(const void *query, const void *keys, int64_t dim, int bf16) {
    floats sum[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) sum[j] = splat(0);
#ifdef __AVX512BF16__
    if (bf16 && dim % 32 == 0) {
        for (int64_t d = 0; d < dim; d += 32) {
            __m512bh q = (__m512bh)_mm512_loadu_si512((const uint16_t *)query + d);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                sum[j] = (floats)_mm512_dpbf16_ps(
                    (__m512)sum[j], q, (__m512bh)_mm512_loadu_si512((const uint16_t *)keys + j * dim + d));
        }
        return sums(sum);
    }
#endif
    for (int64_t d = 0; d < dim; d += LANES) {
        floats q = load(query, d, bf16);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sum[j] += q * load(keys, j * dim + d, bf16);
    }
    return sums(sum);
}

/* Scores (blocks of 16 keys, groups, 16) of one run into scores; returns the number of blocks. */
INLINE int64_t score_run(const Layer *layer, const void *query, float *block, float *scores, Run run, int64_t groups,
                         int64_t dim, int bf16) {
    int64_t blocks = 0;
    ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t start = run.seen / LANES * LANES; start < run.count; start += LANES, blocks++) {
        int64_t count = run.count - start < LANES ? run.count - start : LANES;
        const void *keys = block_of(block, layer->keys, run.first_key + start * dim, count, dim, bf16);
        ints hidden = (lane >= (int32_t)count) | (lane + (int32_t)(start) < (int32_t)run.seen);
        for (int64_t g = 0; g < groups; g++) {
            floats score = products((const char *)query + g * dim * (bf16 ? 2 : 4), keys, dim, bf16) * layer->scale;
            if (layer->softcap != 0) score = softcapped(score, layer->softcap);
            *(floats *)(scores + (blocks * groups + g) * LANES) = choose(hidden, splat(-INFINITY), score);
        }
    }
    return blocks;
}

/* Add weights (groups, 16) times 64 columns of 16 values to out, for `heads` query heads. */
INLINE void add_columns(float *out, const float *weights, const void *values, int64_t dim, int64_t d, int heads,
                        int bf16) {
    floats sum[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sum[h][c] = *(floats *)(out + h * dim + d + c * LANES);
    for (int j = 0; j < LANES; j++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            floats value = load(values, j * dim + d + c * LANES, bf16);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h][c] += weights[h * LANES + j] * value;
        }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) *(floats *)(out + h * dim + d + c * LANES) = sum[h][c];
}

/* Add weights times values of one run to out; the weights stand as the scores did. */
INLINE int64_t add_run(const Layer *layer, float *out, float *block, const float *weights, Run run, int64_t groups,
                       int64_t dim, int bf16) {
    int64_t blocks = 0;
    for (int64_t start = run.seen / LANES * LANES; start < run.count; start += LANES, blocks++) {
        int64_t count = run.count - start < LANES ? run.count - start : LANES, d = 0;
        const void *values = block_of(block, layer->values, run.first_value + start * dim, count, dim, bf16);
        const float *weight = weights + blocks * groups * LANES;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            for (int64_t g = 0; g < groups; g += 4) {
                float *to = out + g * dim;
                const float *from = weight + g * LANES;
                switch (groups - g) {
                    case 1: add_columns(to, from, values, dim, d, 1, bf16); break;
                    case 2: add_columns(to, from, values, dim, d, 2, bf16); break;
                    case 3: add_columns(to, from, values, dim, d, 3, bf16); break;
                    default: add_columns(to, from, values, dim, d, 4, bf16);
                }
            }
        for (; d < dim; d += LANES)
            for (int64_t g = 0; g < groups; g++) {
                floats sum = *(floats *)(out + g * dim + d);
                for (int j = 0; j < LANES; j++) sum += weight[g * LANES + j] * load(values, j * dim + d, bf16);
                *(floats *)(out + g * dim + d) = sum;
            }
    }
    return blocks;
}

/* Run number `i` of a row: its prompt, then its pages. A count of 0 is the end. */
INLINE Run run_of(const Rows *rows, const Layer *layer, int64_t row, int64_t head, int64_t i) {
    int64_t prompt = rows->prompt_tokens_R[row], local = rows->local_R[row];
    int64_t before = layer->window ? prompt + local + 1 - layer->window : 0; /* keys out of sight */
    int64_t page, index, length, count, start;
    if (i == 0) {
        page = rows->prompt_page_R[row], length = count = prompt, start = 0;
    } else {
        length = rows->page_tokens, start = (i - 1) * length;
        if (start > local) return (Run){0, 0, 0, 0};
        page = rows->page_RJ[row * rows->max_pages + i - 1];
        count = local + 1 - start < length ? local + 1 - start : length;
        start += prompt;
    }
    index = page * layer->kv_heads * rows->page_tokens + head * length;
    before = before > start ? before - start : 0;
    return (Run){index * layer->key_dim, index * layer->value_dim, count, before < count ? before : count};
}

INLINE void attend_row(const Rows *rows, const Layer *layer, const void *query, void *out, int64_t row, int64_t head,
                       const Scratch *scratch, int64_t groups, int64_t key_dim, int64_t value_dim, int bf16) {
    int64_t first = (row * layer->kv_heads + head) * groups, blocks = 0;
    int64_t num_runs = 2 + rows->local_R[row] / rows->page_tokens;
    query = (const char *)query + first * key_dim * (bf16 ? 2 : 4);
    for (int64_t i = 0; i < num_runs; i++)
        blocks += score_run(layer, query, scratch->block, scratch->scores + blocks * groups * LANES,
                            run_of(rows, layer, row, head, i), groups, key_dim, bf16);
    memset(scratch->out, 0, groups * value_dim * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
        floats largest = splat(-INFINITY), total = splat(0);
        for (int64_t b = 0; b < blocks; b++) {
            floats score = *(floats *)(scratch->scores + (b * groups + g) * LANES);
            largest = choose(score > largest, score, largest);
        }
        float top = largest[0];
        for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
        for (int64_t b = 0; b < blocks; b++) {
            floats *score = (floats *)(scratch->scores + (b * groups + g) * LANES);
            *score = exp_negative(*score - top);
            total += *score;
        }
        floats inverse = splat(1.0f / sum_of(total));
        for (int64_t b = 0; b < blocks; b++) *(floats *)(scratch->scores + (b * groups + g) * LANES) *= inverse;
    }
    blocks = 0;
    for (int64_t i = 0; i < num_runs; i++)
        blocks += add_run(layer, scratch->out, scratch->block, scratch->scores + blocks * groups * LANES,
                          run_of(rows, layer, row, head, i), groups, value_dim, bf16);
    for (int64_t d = 0; d < groups * value_dim; d += LANES)
        store(out, first * value_dim + d, *(floats *)(scratch->out + d), bf16);
}

#define SPECIALISED(name, dim, bf16)                                                                              \
    static __attribute__((noinline)) void name(const Rows *rows, const Layer *layer, const void *query, void *out, \
                                               int64_t row, int64_t head, const Scratch *scratch) {               \
        attend_row(rows, layer, query, out, row, head, scratch, layer->groups, (dim) ? (dim) : layer->key_dim,     \
                   (dim) ? (dim) : layer->value_dim, bf16);                                                       \
    }
SPECIALISED(attend_64_bfloat16, 64, 1)
SPECIALISED(attend_64_float32, 64, 0)
SPECIALISED(attend_128_bfloat16, 128, 1)
SPECIALISED(attend_128_float32, 128, 0)
SPECIALISED(attend_any_bfloat16, 0, 1)
SPECIALISED(attend_any_float32, 0, 0)

typedef void (*Attend)(const Rows *, const Layer *, const void *, void *, int64_t, int64_t, const Scratch *);

static Attend attend_for(const Layer *layer) {
    int64_t dim = layer->key_dim == layer->value_dim ? layer->key_dim : 0;
    if (layer->is_bfloat16) return dim == 64 ? attend_64_bfloat16 : dim == 128 ? attend_128_bfloat16 : attend_any_bfloat16;
    return dim == 64 ? attend_64_float32 : dim == 128 ? attend_128_float32 : attend_any_float32;
}

static void write_row(const Rows *rows, void *pool, const void *new, int64_t kv_heads, int64_t dim, int64_t row,
                      int64_t row_stride, int64_t head_stride, int64_t bytes) {
    int64_t local = rows->local_R[row], offset = local % rows->page_tokens;
    int64_t page = rows->page_RJ[row * rows->max_pages + local / rows->page_tokens];
    for (int64_t head = 0; head < kv_heads; head++)
        memcpy((char *)pool + ((page * kv_heads + head) * rows->page_tokens + offset) * dim * bytes,
               (const char *)new + (row * row_stride + head * head_stride) * bytes, dim * bytes);
}

/* Store key and value (rows, kv_heads, dim) of every row, then attend query (rows, kv_heads * groups, key_dim),
 * contiguous, to each row's keys, into out (rows, kv_heads * groups, value_dim). Dims are multiples of 16; strides
 * are in elements. Returns 0, or 1 where memory ran out. */
int decode_attention(const Rows *rows, const Layer *layer, const void *query, const void *key, int64_t key_row_stride,
                     int64_t key_head_stride, const void *value, int64_t value_row_stride, int64_t value_head_stride,
                     void *out) {
    int64_t bytes = layer->is_bfloat16 ? 2 : 4, most_blocks = 0, failed = 0;
    int64_t dim = layer->key_dim > layer->value_dim ? layer->key_dim : layer->value_dim;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        write_row(rows, layer->keys, key, layer->kv_heads, layer->key_dim, row, key_row_stride, key_head_stride, bytes);
        write_row(rows, layer->values, value, layer->kv_heads, layer->value_dim, row, value_row_stride,
                  value_head_stride, bytes);
        int64_t pages = 1 + rows->local_R[row] / rows->page_tokens;
        int64_t blocks = rows->prompt_tokens_R[row] / LANES + 1 + pages * ((rows->page_tokens + LANES - 1) / LANES);
        most_blocks = blocks > most_blocks ? blocks : most_blocks;
    }
    Attend attend = attend_for(layer);
    int64_t groups = layer->groups, num_tasks = rows->num_rows * layer->kv_heads;
    size_t floats_needed = groups * dim + LANES * dim + most_blocks * groups * LANES;
#pragma omp parallel if (num_tasks > 4)
    {
        float *memory = aligned_alloc(64, (floats_needed * sizeof(float) + 63) / 64 * 64);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        Scratch scratch = {memory, memory + LANES * dim, memory + LANES * (dim + most_blocks * groups)};
#pragma omp for schedule(dynamic, 2)
        for (int64_t task = 0; task < num_tasks; task++)
            if (memory) attend(rows, layer, query, out, task % rows->num_rows, task / rows->num_rows, &scratch);
        free(memory);
    }
    return (int)failed;
}
