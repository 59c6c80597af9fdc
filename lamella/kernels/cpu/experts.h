/* Gated experts on NF4 weights: what the caller hands over. Mirrored by `lamella/kernels/experts.py`. */
#ifndef LAMELLA_EXPERTS_H
#define LAMELLA_EXPERTS_H

#include <stdint.h>

typedef uint16_t bf16;

/* Where a matrix lies, as byte offsets from `base`; absmax is -1 when its scales are double quantised. */
typedef struct {
    int64_t codes, absmax, absmax_q, absmax_code, absmax2, offset;
    int64_t first_block; /* number of the matrix's first block among those its scale parts start with */
} expert_matrix;

/* S rows: (token, expert) pairs sorted by expert. Saved gate and up keep their columns in quad order (tiles.h). LoRA pairs
   are NULL where there is none; xa of expert e lies at its first row times rank, [rank, rows of e], scale included. */
typedef struct {
    int64_t amx, threads;
    int64_t tokens, hidden, inner, experts, rank1, rank2;
    const uint8_t *base;
    const expert_matrix *matrices; /* [experts][3]: gate, up [inner, hidden], down [hidden, inner] */
    const bf16 *x;                 /* [tokens, hidden] */
    const int32_t *offsets;        /* [experts + 1] */
    const int32_t *token;          /* [S] */
    const bf16 *a1, *b1, *a2, *b2; /* [E, r1, hidden], [E, 2 inner, r1], [E, r2, inner], [E, hidden, r2] */
    double scale1, scale2;
    bf16 *gate, *up, *xa1, *xa2; /* written going forward (NULL: not kept), read going back */
    bf16 *y;                     /* [S, hidden] */
    const bf16 *dout;            /* [tokens, hidden] */
    const float *weight;         /* [S], routing weight of each row */
    bf16 *dx;                    /* [S, hidden], or NULL */
    float *dweight;              /* [S] */
    bf16 *da1, *db1, *da2, *db2;
} experts_job;

#endif
