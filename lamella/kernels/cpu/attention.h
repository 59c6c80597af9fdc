/* Causal attention over packed sequences, forward and backward, for bf16 on x86-64 with AVX-512.

   Block by block with an online softmax (FlashAttention-2, arXiv 2307.08691); nothing of size T x T is kept.
   Scores are computed transposed, S' = K Q', so that a vector's lanes are queries: every softmax reduction is then
   an element-wise operation between vectors, and S' rounded to bf16 is an operand of the next products as it lies:

     forward    S' = K Q'    O' += V' P'                                      (O' is transposed when it is done)
     backward   S' = K Q'    T' = V dO'    dV += P' dO    dK += dS' Q    dQ' += K' dS'

   with P' = exp(scale S' - lse), dS' = P' (T' - delta), delta = rowsum(dO O).

   Work is cut into 32 x 32 cells of (keys, queries); cells that nobody sees are skipped. Everything a sequence's
   result depends on is the sequence itself, in a fixed order: neither the number of threads nor what else is packed
   changes a bit.

   All operands are stored as the tiles that the matrix instructions load: 16 rows of 64 bytes, in pairs (32 rows, or
   32 columns as two tiles), 2,048 bytes a pair. A tile of the left operand holds 16 rows of 32 bf16; one of the
   right operand holds 16 pairs of rows, interleaved, of 16 columns. An accumulator cell is 2 x 2 tiles of fp32. */
#ifndef LAMELLA_ATTENTION_H
#define LAMELLA_ATTENTION_H

#include <stdint.h>

enum { HEAD_MAX = 256, CHUNK = 32 };
/* How products are computed: fp32 multiply-add, bf16 dot products (AVX512-BF16), or AMX tiles. */
enum { ATTEND_FMA = 0, ATTEND_DOT = 1, ATTEND_AMX = 2 };

/* A tensor of [heads, tokens, size] with contiguous sizes; strides in elements. NULL where not wanted. */
typedef struct {
    void *data;
    int64_t head, token;
} strided;

/* 32 tokens of a sequence, or what is left of it. Tokens are numbered through the batch. */
typedef struct {
    int32_t first, count;
    int32_t until_min, until_max;       /* of visible_until */
    int32_t position_min, position_max; /* of position */
} chunk_info;

typedef struct {
    int32_t chunk, chunks; /* the sequence's first chunk, and how many it has */
} sequence_info;

typedef struct {
    int32_t sequence, chunk; /* a block of queries begins at this chunk of the batch */
} block_info;

/* Mirrored in lamella/kernels/attention.py. */
typedef struct {
    strided q, k, v, out;              /* bf16 [heads, T, size], [kv_heads, T, size], [kv_heads, T, value_size], ... */
    strided grad_out, grad_q, grad_k, grad_v;
    float *lse;                        /* [heads, T]: natural log of the sum of exp(scale * score) */
    const int32_t *visible_until, *position; /* [T] */
    const chunk_info *chunks;
    const sequence_info *sequences;    /* longest first */
    const block_info *blocks;          /* of FORWARD_BLOCK queries; the most work first */
    char *packed;                      /* chunks x kv_heads x size (backward) or value_size (forward) x 64 bytes */
    char *scratch;                     /* threads x lamella_attention_scratch() */
    float *partial;                    /* parts x kv_heads x chunks x (size + value_size) x 32, when parts > 1 */
    int64_t tokens, chunk_count, sequence_count, block_count;
    int64_t heads, kv_heads, size, value_size, window; /* window: 0 for none */
    /* Backward cuts the queries of a kv head into `parts` where a sequence has more than `undivided` chunks: there may
       be few kv heads and many threads. Part of the result's definition, so never chosen by the threads. */
    int64_t parts, undivided;
    float scale;
    int32_t isa, threads;
} attention;

enum { FORWARD_BLOCK = 2, BACKWARD_BLOCK = 4 }; /* chunks of queries computed together */

int lamella_attention_supported(int isa);
/* Bytes of scratch a thread needs, for the forward or backward pass. */
int64_t lamella_attention_scratch(const attention *a, int backward);
int lamella_attention_forward(const attention *a);
int lamella_attention_backward(const attention *a);

#endif
