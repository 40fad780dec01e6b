/* A whole decoder layer of the Llama kind, multiplied in bfloat16, one token a row, by the other kernels.
 *
 *     hidden += out(attention(rotated(qkv(norm(hidden)))));  hidden += down(silu(gate) * up), of norm(hidden)
 *
 * The same functions in the same order as when each is called for itself, so the same bits.
 */
#include "kernels.h"

/* A layer's weights (mirrored in native.py): packed products with their biases or NULL, and norms. */
typedef struct {
    const uint16_t *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const void *first_norm, *second_norm;
    int64_t width, inner;            /* of the residual stream, and between gate and down */
    int64_t stream_bf16;             /* dtype of the residual stream, the norms and the angles; else float32 */
    float first_epsilon, second_epsilon;
} Weights;

/* Numbers of scratch that one row needs. */
int64_t decoder_scratch(const Layer *layer, const Weights *weights) {
    int64_t heads = layer->kv_heads * layer->groups;
    int64_t attention = (2 * heads + 2 * layer->kv_heads) * layer->key_dim + (heads + layer->kv_heads) * layer->value_dim;
    return 2 * weights->width + attention + 3 * weights->inner;
}

/* hidden (padded, width) becomes the layer's output; the first rows->num_rows are real, the others attend to nothing.
 * cos and sin are (padded, key_dim). Returns 0, or 1 where memory ran out. */
int decoder_layer(const Rows *rows, const Layer *layer, const Weights *weights, const void *cos, const void *sin,
                  void *hidden, int64_t padded, uint16_t *scratch) {
    int64_t kv_heads = layer->kv_heads, heads = kv_heads * layer->groups, dim = layer->key_dim;
    int64_t width = weights->width, inner = weights->inner, bf16 = weights->stream_bf16;
    int64_t num_qkv = (heads + kv_heads) * dim + kv_heads * layer->value_dim, num_out = heads * layer->value_dim;
    uint16_t *normed = scratch, *added = normed + padded * width, *qkv = added + padded * width;
    uint16_t *query = qkv + padded * num_qkv, *key = query + padded * heads * dim;
    uint16_t *attended = key + padded * kv_heads * dim, *gate_up = attended + padded * num_out;
    uint16_t *gated = gate_up + padded * 2 * inner;

    rms_norm(hidden, weights->first_norm, normed, padded, width, weights->first_epsilon, 0, bf16, 1);
    int failed = multiply_packed(normed, padded, width, weights->qkv, num_qkv, weights->qkv_bias, qkv, 1);
    rotate(qkv, num_qkv, dim, cos, sin, query, padded, heads, dim, 1, bf16);
    rotate(qkv + heads * dim, num_qkv, dim, cos, sin, key, padded, kv_heads, dim, 1, bf16);
    failed |= decode_attention(rows, layer, query, key, kv_heads * dim, dim, qkv + (heads + kv_heads) * dim, num_qkv,
                               layer->value_dim, attended);
    memset(attended + rows->num_rows * num_out, 0, (padded - rows->num_rows) * num_out * sizeof *attended);
    failed |= multiply_packed(attended, padded, num_out, weights->out, width, weights->out_bias, added, 1);
    add_rms_norm(hidden, added, weights->second_norm, normed, padded, width, weights->second_epsilon, bf16);
    failed |= multiply_packed(normed, padded, width, weights->gate_up, 2 * inner, weights->gate_up_bias, gate_up, 1);
    silu_multiply(gate_up, 2 * inner, gate_up + inner, 2 * inner, gated, padded, inner, 1);
    failed |= multiply_packed(gated, padded, inner, weights->down, width, weights->down_bias, added, 1);
    add_rms_norm(hidden, added, NULL, NULL, padded, width, 0, bf16);
    return failed;
}
