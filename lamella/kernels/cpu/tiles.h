/* Tiles of bf16: what the matrix kernels share. Included only by units compiled with AVX-512 BF16 and AMX.

   Three kinds of 1 KB tiles:
     A  16 rows x 32 k, row-major;
     B  16 pairs of k x 16 columns, the two values of a pair side by side ("VNNI");
     C  16 x 16 fp32.
   C += A B over runs of tiles that lie one after the other along k. The order of k within a run is free as long as
   both sides agree, and the order of columns as long as whoever reads C knows it. NF4 is undone in "quad order", which
   costs no shuffle: of each block of 64 values, those at 4w+1, 4w, 4w+3, 4w+2 for w = 0..15 follow one another. */
#ifndef LAMELLA_TILES_H
#define LAMELLA_TILES_H

#include "kernels.h"

#include <immintrin.h>

typedef uint16_t bf16;
enum { TILE = 512, TILE_C = 256 }; /* values of an A or B tile, of a C tile */
enum { ROWS = 16, DEPTH = 32 };    /* rows of a tile; its k */

/* One run of k: two A and two B tiles at most, `depth` tiles each; those of B `step` values apart (0: they follow one
   another). */
typedef struct {
    const bf16 *a[2], *b[2];
    int64_t depth, step;
} tile_run;

static inline int64_t b_step(const tile_run *run) { return run->step ? run->step : TILE; }

static inline void tiles_begin(int amx) {
    if (!amx) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes_per_row[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
}

static inline void tiles_end(int amx) {
    if (amx) _tile_release();
}

/* Sums of up to 2 x 2 C tiles begin with what is there, or at zero. */
static inline void begin_sums(const float *c, int rows, int columns, int keep) {
    if (!keep) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, c, 64);
    if (columns > 1) _tile_loadd(1, c + TILE_C, 64);
    if (rows > 1) _tile_loadd(2, c + 2 * TILE_C, 64);
    if (rows > 1 && columns > 1) _tile_loadd(3, c + 3 * TILE_C, 64);
}

static inline void end_sums22(float *c) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + TILE_C, 64);
    _tile_stored(2, c + 2 * TILE_C, 64);
    _tile_stored(3, c + 3 * TILE_C, 64);
}

static inline void multiply_amx22(float *c, const tile_run *runs, int count) {
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
        }
    }
    end_sums22(c);
}

static inline void multiply_amx12(float *c, const tile_run *runs, int count) {
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < runs[i].depth; k++) {
            _tile_loadd(4, runs[i].a[0] + k * TILE, 64);
            _tile_loadd(6, runs[i].b[0] + k * b_step(&runs[i]), 64);
            _tile_loadd(7, runs[i].b[1] + k * b_step(&runs[i]), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + TILE_C, 64);
}

static inline void multiply_amx21(float *c, const tile_run *runs, int count) {
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < runs[i].depth; k++) {
            _tile_loadd(4, runs[i].a[0] + k * TILE, 64);
            _tile_loadd(5, runs[i].a[1] + k * TILE, 64);
            _tile_loadd(6, runs[i].b[0] + k * b_step(&runs[i]), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
        }
    _tile_stored(0, c, 64);
    _tile_stored(2, c + 2 * TILE_C, 64);
}

static inline void multiply_amx11(float *c, const tile_run *runs, int count) {
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < runs[i].depth; k++) {
            _tile_loadd(4, runs[i].a[0] + k * TILE, 64);
            _tile_loadd(6, runs[i].b[0] + k * b_step(&runs[i]), 64);
            _tile_dpbf16ps(0, 4, 6);
        }
    _tile_stored(0, c, 64);
}

/* One C tile with the dot-product instruction of AVX-512 BF16. */
static inline void multiply_dot(float *c, const tile_run *runs, int count, int i, int j) {
    __m512 sum[ROWS];
    for (int m = 0; m < ROWS; m++) sum[m] = _mm512_loadu_ps(c + m * 16);
    for (int run = 0; run < count; run++)
        for (int64_t k = 0; k < runs[run].depth; k++) {
            const bf16 *a = runs[run].a[i] + k * TILE, *b = runs[run].b[j] + k * b_step(&runs[run]);
            for (int pair = 0; pair < 16; pair++) {
                const __m512bh right = (__m512bh)_mm512_loadu_si512(b + pair * 32);
                for (int m = 0; m < ROWS; m++) {
                    int32_t left;
                    memcpy(&left, a + m * DEPTH + pair * 2, 4);
                    sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)_mm512_set1_epi32(left), right);
                }
            }
        }
    for (int m = 0; m < ROWS; m++) _mm512_storeu_ps(c + m * 16, sum[m]);
}

/* c[2 i + j] = (keep ? c : 0) + sum over runs of a[i] b[j], for i < rows, j < columns (1 or 2 each). */
static inline void multiply(int amx, float *c, const tile_run *runs, int count, int rows, int columns, int keep) {
    if (amx) {
        begin_sums(c, rows, columns, keep);
        if (rows > 1 && columns > 1)
            multiply_amx22(c, runs, count);
        else if (rows > 1)
            multiply_amx21(c, runs, count);
        else if (columns > 1)
            multiply_amx12(c, runs, count);
        else
            multiply_amx11(c, runs, count);
        return;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float *tile = c + (2 * i + j) * TILE_C;
            if (!keep) memset(tile, 0, TILE_C * sizeof(float));
            multiply_dot(tile, runs, count, i, j);
        }
}

/* ---- small pieces --------------------------------------------------------------------------------------------- */

static inline __m512i pair_words(void) { /* word 2t from lane t of the lower half, 2t + 1 from the upper half */
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                            3, 18, 2, 17, 1, 16, 0);
}

/* Two fp32 rows rounded and interleaved: dword t = (low[t], high[t]). */
static inline __m512i pair_rows(__m512 low, __m512 high) {
    return _mm512_permutexvar_epi16(pair_words(), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

static inline __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline __m512 load_bf16(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }

static inline void store_bf16(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

static inline __m512i load_words(const bf16 *x) { return _mm512_loadu_si512(x); }

/* exp(x) for |x| < 87, within 2 ulp. */
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* 1 / (1 + exp(-x)) */
static inline __m512 sigmoid_ps(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 d = _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    const __m512 y = _mm512_rcp14_ps(d);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(d, y, _mm512_set1_ps(2.0f)));
}

/* In place: 16 rows of 16 dwords. */
static inline void transpose16(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Eight vectors, dword t of vector j holding two values of column t: row t of 16 values goes to out + t * stride. */
static inline void store_columns(const __m512i *pairs, bf16 *out, int64_t stride, int64_t rows) {
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    __m512i low[4], high[4];
    for (int half = 0; half < 2; half++) {
        const __m512i *p = pairs + 4 * half;
        __m512i *to = half ? high : low;
        const __m512i a = _mm512_unpacklo_epi32(p[0], p[1]), b = _mm512_unpackhi_epi32(p[0], p[1]);
        const __m512i c = _mm512_unpacklo_epi32(p[2], p[3]), d = _mm512_unpackhi_epi32(p[2], p[3]);
        to[0] = _mm512_unpacklo_epi64(a, c);
        to[1] = _mm512_unpackhi_epi64(a, c);
        to[2] = _mm512_unpacklo_epi64(b, d);
        to[3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int q = 0; q < 4; q++) {
        const __m512i x = _mm512_permutex2var_epi64(low[q], first, high[q]);
        const __m512i y = _mm512_permutex2var_epi64(low[q], second, high[q]);
        if (q < rows) _mm256_storeu_si256((__m256i *)(out + q * stride), _mm512_castsi512_si256(x));
        if (q + 4 < rows) _mm256_storeu_si256((__m256i *)(out + (q + 4) * stride), _mm512_extracti64x4_epi64(x, 1));
        if (q + 8 < rows) _mm256_storeu_si256((__m256i *)(out + (q + 8) * stride), _mm512_castsi512_si256(y));
        if (q + 12 < rows) _mm256_storeu_si256((__m256i *)(out + (q + 12) * stride), _mm512_extracti64x4_epi64(y, 1));
    }
}

/* A C tile, each row times scale[row] (NULL: 1), rounded and stored transposed: column t goes to out + t * stride. */
static inline void store_transposed(const float *c, const float *scale, bf16 *out, int64_t stride, int64_t columns) {
    __m512i pairs[8];
    for (int j = 0; j < 8; j++) {
        __m512 low = _mm512_loadu_ps(c + 32 * j), high = _mm512_loadu_ps(c + 32 * j + 16);
        if (scale) {
            low = _mm512_mul_ps(low, _mm512_set1_ps(scale[2 * j]));
            high = _mm512_mul_ps(high, _mm512_set1_ps(scale[2 * j + 1]));
        }
        pairs[j] = pair_rows(low, high);
    }
    store_columns(pairs, out, stride, columns);
}

/* ---- quad order ------------------------------------------------------------------------------------------------ */

static inline __m512i quad_first(void) { /* positions of 4w + 1, then 4w, in 64 values */
    return _mm512_set_epi16(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0, 61, 57, 53, 49, 45, 41, 37, 33,
                            29, 25, 21, 17, 13, 9, 5, 1);
}

static inline __m512i quad_second(void) { /* 4w + 3, then 4w + 2 */
    return _mm512_add_epi16(quad_first(), _mm512_set1_epi16(2));
}

/* 64 values in natural order -> two vectors in quad order. */
static inline void to_quads(const bf16 *x, __m512i *first, __m512i *second) {
    const __m512i low = load_words(x), high = load_words(x + 32);
    *first = _mm512_permutex2var_epi16(low, quad_first(), high);
    *second = _mm512_permutex2var_epi16(low, quad_second(), high);
}

/* Four vectors, vector q holding the values at 4w + q: 64 values in natural order, rounded. */
static inline void store_natural(bf16 *out, __m512 v0, __m512 v1, __m512 v2, __m512 v3) {
    const __m512i a = (__m512i)_mm512_cvtne2ps_pbh(v1, v0), b = (__m512i)_mm512_cvtne2ps_pbh(v3, v2);
    const __m512i index = _mm512_set_epi16(55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4, 51, 35, 19, 3, 50,
                                           34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, index, b));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(index, _mm512_set1_epi16(8)), b));
}

static const float tiles_nf4[16] = {NF4_VALUES};

/* A block of 64 codes, in quad order. Subnormal results become zero, as they do in every bf16 multiplication here. */
static inline void undo_block(const uint8_t *codes, float scale, bf16 *first, bf16 *second) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(tiles_nf4), _mm512_set1_ps(scale));
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled);
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codes));
    const __m512i index = _mm512_srlv_epi16(words, shift);
    _mm512_storeu_si512(first, _mm512_permutexvar_epi16(index, table));
    _mm512_storeu_si512(second, _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 8), table));
}

/* The same block of two rows: dword w of vector q = (even row, odd row) at 4w + q, to out[q] + nothing in between. */
static inline void undo_pair(const uint8_t *even, const uint8_t *odd, float even_scale, float odd_scale, bf16 *const *out,
                             int64_t at) {
    const __m512 values = _mm512_loadu_ps(tiles_nf4);
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(odd_scale)),
                                                       _mm512_mul_ps(values, _mm512_set1_ps(even_scale)));
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)even));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)odd));
    const __m512i words = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi32(16 << 16);
#define LAMELLA_PICK(w) _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(w, nibble, upper, 0xea), table)
    _mm512_storeu_si512(out[1] + at, LAMELLA_PICK(words));
    _mm512_storeu_si512(out[0] + at, LAMELLA_PICK(_mm512_srli_epi16(words, 4)));
    _mm512_storeu_si512(out[3] + at, LAMELLA_PICK(_mm512_srli_epi16(words, 8)));
    _mm512_storeu_si512(out[2] + at, LAMELLA_PICK(_mm512_srli_epi16(words, 12)));
#undef LAMELLA_PICK
}

/* Rows a and b of 64 values in natural order, as undo_pair lays them out. */
static inline void pair_block(const bf16 *a, const bf16 *b, bf16 *const *out, int64_t at) {
    __m512i a10, a32, b10, b32;
    to_quads(a, &a10, &a32);
    to_quads(b, &b10, &b32);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out[1] + at, _mm512_permutex2var_epi16(a10, low, b10));
    _mm512_storeu_si512(out[0] + at, _mm512_permutex2var_epi16(a10, high, b10));
    _mm512_storeu_si512(out[3] + at, _mm512_permutex2var_epi16(a32, low, b32));
    _mm512_storeu_si512(out[2] + at, _mm512_permutex2var_epi16(a32, high, b32));
}

/* 32 columns of rows a and b interleaved: two vectors of 16 dwords (a, b), columns 0..15 and 16..31. */
static inline void pair_columns(__m512i a, __m512i b, bf16 *first, bf16 *second) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    _mm512_storeu_si512(first, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(second, _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b));
}

#endif
