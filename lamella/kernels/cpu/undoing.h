/* NF4 weights undone beside products of tiles. A product keeps its own unit busy for 16 cycles and takes one slot of the
   rest of the core, which in the meantime undoes the strip that is multiplied next. Included only by units compiled with
   AVX-512 BF16 and AMX. */
#ifndef LAMELLA_UNDOING_H
#define LAMELLA_UNDOING_H

#include "tiles.h"

/* A strip under way.
   Left: 16 rows from each of two places, as two runs of left tiles; a step is a block of 64 values.
   Right: blocks of 64 columns of some k-tiles of one matrix or two, one on top of the other, as right tiles: those of a
   k-tile follow one another, 4 a block; a step is a pair of rows. */
typedef struct {
    int64_t steps, pace;                                   /* steps to do, and how many beside a product */
    const uint8_t *codes, *second_codes;                   /* left: of the next block; right: of the matrix's first row */
    const float *scales, *second_scales;                   /* its scale; scales of the first row */
    bf16 *out, *second_out;                                /* first tile: of the place, and of the second; right: of the k-tile */
    int64_t at, count;                                     /* left: block of the row, right: pair of rows */
    int64_t row, skip_codes, skip_scales, skip_out, ahead; /* left */
    int64_t row_codes, row_scales, by_quads, wide;         /* right */
} undoing;

enum { UNDO_BLOCK = 64, UNDO_AHEAD = 64, UNDO_LEAD = 1024 };

static inline int64_t undo_pace(int64_t steps, int64_t products) {
    return products > 0 ? (steps + products - 1) / products : 0;
}

/* 16 rows, `step` apart, from each of two places of matrices with so many columns. */
static inline undoing undo_left(const uint8_t *codes, const float *scales, int64_t first, const uint8_t *second_codes,
                                const float *second_scales, int64_t second, int64_t step, int64_t columns, bf16 *out,
                                int64_t products) {
    const int64_t bytes = columns / 2, blocks = columns / UNDO_BLOCK, depth = columns / DEPTH;
    int64_t lead = 1;
    while (lead * bytes < UNDO_LEAD && lead < 4) lead++;
    return (undoing){
        .steps = 2 * ROWS * blocks, .pace = undo_pace(2 * ROWS * blocks, products),
        .codes = codes + first * bytes, .second_codes = second_codes + second * bytes,
        .scales = scales + first * blocks, .second_scales = second_scales + second * blocks,
        .out = out, .second_out = out + depth * TILE, .count = blocks,
        .skip_codes = (step - 1) * bytes, .skip_scales = (step - 1) * blocks, .skip_out = DEPTH - depth * TILE,
        .ahead = lead * step * bytes,
    };
}

static inline void undo_left_step(undoing *u) {
    if (u->at % 2 == 0) _mm_prefetch((const char *)u->codes + u->ahead, _MM_HINT_T0);
    undo_block(u->codes, *u->scales, u->out, u->out + TILE);
    u->codes += UNDO_BLOCK / 2;
    u->scales++;
    u->out += 2 * TILE;
    if (++u->at < u->count) return;
    u->at = 0;
    u->codes += u->skip_codes;
    u->scales += u->skip_scales;
    u->out += u->skip_out;
    if (++u->row < ROWS) return;
    u->row = 0;
    u->codes = u->second_codes;
    u->scales = u->second_scales;
    u->out = u->second_out;
}

/* Columns 64 block .. of k-tiles first .. of a matrix of so many rows and columns (of two when `second_codes` is not NULL),
   in quad order; rows follow one another along k, or are in quad order too. wide: blocks of columns. */
static inline undoing undo_right(const uint8_t *codes, const float *scales, const uint8_t *second_codes,
                                 const float *second_scales, int64_t rows, int64_t columns, int64_t block, int64_t wide,
                                 int64_t first, int64_t depth, int by_quads, bf16 *out, int64_t products) {
    undoing u = {
        .steps = 16 * depth, .pace = undo_pace(16 * depth, products),
        .codes = codes + block * UNDO_BLOCK / 2, .scales = scales + block,
        .out = out, .at = 16 * first, .count = rows / 2,
        .row_codes = columns / 2, .row_scales = columns / UNDO_BLOCK, .by_quads = by_quads, .wide = wide,
    };
    if (second_codes) {
        u.second_codes = second_codes + block * UNDO_BLOCK / 2;
        u.second_scales = second_scales + block;
    }
    if (u.at >= u.count) {
        u.at -= u.count;
        u.codes = u.second_codes;
        u.scales = u.second_scales;
    }
    return u;
}

/* The pair of rows that lies at pair p of k-tile t: rows that follow one another, or in quad order. */
static inline void pair_of(int64_t by_quads, int64_t tile, int64_t pair, int64_t *even, int64_t *odd) {
    if (by_quads) {
        const int64_t q = 2 * (tile & 1) + (pair >> 3), w = 2 * (pair & 7);
        *even = (tile >> 1) * UNDO_BLOCK + 4 * w + q;
        *odd = *even + 4;
    } else {
        *even = tile * DEPTH + 2 * pair;
        *odd = *even + 1;
    }
}

static inline void undo_right_step(undoing *u) {
    const int64_t pair = u->at & 15;
    int64_t even, odd;
    pair_of(u->by_quads, u->at >> 4, pair, &even, &odd);
    const uint8_t *a = u->codes + even * u->row_codes, *b = u->codes + odd * u->row_codes;
    /* a line or two of a row, a stride apart: no hardware prefetcher follows (reading past the end is none) */
    for (int64_t j = 0; j < u->wide; j += 2) {
        _mm_prefetch((const char *)a + UNDO_AHEAD * u->row_codes + j * UNDO_BLOCK / 2, _MM_HINT_T0);
        _mm_prefetch((const char *)b + UNDO_AHEAD * u->row_codes + j * UNDO_BLOCK / 2, _MM_HINT_T0);
    }
    const float *even_scale = u->scales + even * u->row_scales, *odd_scale = u->scales + odd * u->row_scales;
    bf16 *const tiles[4] = {u->out, u->out + TILE, u->out + 2 * TILE, u->out + 3 * TILE};
    for (int64_t j = 0; j < u->wide; j++)
        undo_pair(a + j * UNDO_BLOCK / 2, b + j * UNDO_BLOCK / 2, even_scale[j], odd_scale[j], tiles,
                  4 * j * TILE + pair * DEPTH);
    if (pair == 15) u->out += 4 * u->wide * TILE;
    if (++u->at < u->count) return;
    u->at = 0;
    u->codes = u->second_codes;
    u->scales = u->second_scales;
}

enum { LEFT = 0, RIGHT = 1 };

static inline __attribute__((always_inline)) void undo_steps(undoing *u, int64_t steps, const int side) {
    if (steps > u->steps) steps = u->steps;
    u->steps -= steps;
    while (steps-- > 0)
        if (side == RIGHT)
            undo_right_step(u);
        else
            undo_left_step(u);
}

/* What is left of it. */
static inline __attribute__((always_inline)) void undo_rest(undoing *given, const int side) {
    undoing u = *given; /* in registers: every store of values could be one to *given */
    undo_steps(&u, u.steps, side);
    *given = u;
}

/* As `multiply`; beside each of its products some steps of a strip. */
static inline __attribute__((always_inline)) void multiply_beside(int amx, float *c, const tile_run *runs, int count,
                                                                  int rows, int columns, int keep, undoing *given,
                                                                  const int side) {
    if (!amx || rows < 2 || columns < 2 || !given->steps) {
        multiply(amx, c, runs, count, rows, columns, keep);
        return;
    }
    undoing u = *given;
    begin_sums(c, 2, 2, keep);
    for (int i = 0; i < count; i++) {
        const bf16 *a0 = runs[i].a[0], *a1 = runs[i].a[1], *b0 = runs[i].b[0], *b1 = runs[i].b[1];
        const int64_t step = b_step(&runs[i]);
        for (int64_t k = 0; k < runs[i].depth; k++) {
            _tile_loadd(4, a0 + k * TILE, 64);
            _tile_loadd(6, b0 + k * step, 64);
            _tile_loadd(7, b1 + k * step, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, a1 + k * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            undo_steps(&u, u.pace, side);
        }
    }
    end_sums22(c);
    *given = u;
}

#endif
