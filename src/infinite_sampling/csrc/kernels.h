/* What the kernels share: their tables (mirrored in native.py) and the functions that one calls of another. */
#include "vectors.h"

/* The tables of one forward; the same for all its layers. */
typedef struct {
    int64_t num_rows;
    int64_t max_pages;
    int64_t page_tokens;
    const int64_t *page_RJ;          /* (num_rows, max_pages) pages of the row's own tokens */
    const int64_t *local_R;          /* index of the row's token among its own, from 0 */
    const int64_t *prompt_page_R;    /* first page of the row's prompt */
    const int64_t *prompt_tokens_R;
} Rows;

/* One layer's attention: its pool, its shapes, its rule of scores. */
typedef struct {
    void *keys;                      /* (pages, kv_heads, page_tokens, key_dim) */
    void *values;                    /* (pages, kv_heads, page_tokens, value_dim) */
    int64_t kv_heads, groups, key_dim, value_dim;
    int64_t is_bfloat16;             /* of every tensor; else float32 */
    int64_t window;                  /* tokens seen back, the own included; 0 sees all */
    float scale;
    float softcap;                   /* 0: none */
} Layer;

int decode_attention(const Rows *rows, const Layer *layer, const void *query, const void *key, int64_t key_row_stride,
                     int64_t key_head_stride, const void *value, int64_t value_row_stride, int64_t value_head_stride,
                     void *out);
void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width, float epsilon, int64_t of_one,
              int64_t bf16, int64_t out_bf16);
void add_rms_norm(void *x, const void *added, const void *weight, void *out, int64_t rows, int64_t width, float epsilon,
                  int64_t bf16);
void silu_multiply(const void *gate, int64_t gate_stride, const void *up, int64_t up_stride, void *out, int64_t rows,
                   int64_t width, int64_t bf16);
void rotate(const void *x, int64_t row_stride, int64_t head_stride, const void *cos, const void *sin, void *out,
            int64_t rows, int64_t heads, int64_t width, int64_t bf16, int64_t angles_bf16);
int multiply_packed(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed, int64_t outputs,
                    const uint16_t *bias, void *out, int64_t out_bf16);
