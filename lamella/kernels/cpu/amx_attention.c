/* See attention.h for the algorithm and the layouts. One source for three ways to compute products. */
#include "attention.h"
#include "features.h"
#include "parallel.h"

#include <stddef.h>

#if defined(__linux__) && defined(__x86_64__) && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512BF16__) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { TILE = 1024, PAIR = 2 * TILE, CELL = 1024 }; /* bytes, bytes, floats */
enum { KEY_BLOCK = 4 };                             /* chunks of keys between two updates of the accumulators */
static const float LOG2E = 1.44269504088896340736f;
static const float LOWEST = -1e30f; /* finite, so that no difference of maxima is NaN */

/* ---- Products ---- */

typedef struct {
    const char *left, *right;
    ptrdiff_t left_step, right_step;
    int steps;
    uint32_t visible; /* bit k: step k counts */
} product;

/* 8 rows of a cell at a time: 16 accumulators. */
INLINE void multiply_vectors(float *cell, product p, int accumulate, const int dot) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int i = 0; i < 2; i++) {
        for (int r = 0; r < 16; r += 8) {
            float *c = cell + i * 512 + r * 16;
            __m512 sum[8][2];
            for (int n = 0; n < 8; n++) {
                sum[n][0] = accumulate ? _mm512_load_ps(c + n * 16) : _mm512_setzero_ps();
                sum[n][1] = accumulate ? _mm512_load_ps(c + 256 + n * 16) : _mm512_setzero_ps();
            }
            for (int k = 0; k < p.steps; k++) {
                if (!(p.visible >> k & 1)) continue;
                const char *left = p.left + k * p.left_step + i * TILE + r * 64, *right = p.right + k * p.right_step;
                for (int x = 0; x < 16; x++) {
                    const __m512i b0 = _mm512_load_si512(right + x * 64), b1 = _mm512_load_si512(right + TILE + x * 64);
                    if (dot) {
                        for (int n = 0; n < 8; n++) {
                            const __m512i a = _mm512_set1_epi32(*(const int *)(left + n * 64 + x * 4));
                            sum[n][0] = _mm512_dpbf16_ps(sum[n][0], (__m512bh)a, (__m512bh)b0);
                            sum[n][1] = _mm512_dpbf16_ps(sum[n][1], (__m512bh)a, (__m512bh)b1);
                        }
                        continue;
                    }
                    const __m512 b0_even = _mm512_castsi512_ps(_mm512_slli_epi32(b0, 16));
                    const __m512 b1_even = _mm512_castsi512_ps(_mm512_slli_epi32(b1, 16));
                    const __m512 b0_odd = _mm512_castsi512_ps(_mm512_and_si512(b0, high));
                    const __m512 b1_odd = _mm512_castsi512_ps(_mm512_and_si512(b1, high));
                    for (int n = 0; n < 8; n++) {
                        const __m512i a = _mm512_set1_epi32(*(const int *)(left + n * 64 + x * 4));
                        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
                        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(a, high));
                        sum[n][0] = _mm512_fmadd_ps(odd, b0_odd, _mm512_fmadd_ps(even, b0_even, sum[n][0]));
                        sum[n][1] = _mm512_fmadd_ps(odd, b1_odd, _mm512_fmadd_ps(even, b1_even, sum[n][1]));
                    }
                }
            }
            for (int n = 0; n < 8; n++) {
                _mm512_store_ps(c + n * 16, sum[n][0]);
                _mm512_store_ps(c + 256 + n * 16, sum[n][1]);
            }
        }
    }
}

INLINE void multiply_tiles(float *cell, product p, int accumulate) {
    if (accumulate) {
        _tile_loadd(0, cell, 64);
        _tile_loadd(1, cell + 256, 64);
        _tile_loadd(2, cell + 512, 64);
        _tile_loadd(3, cell + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < p.steps; k++) {
        if (!(p.visible >> k & 1)) continue;
        const char *left = p.left + k * p.left_step, *right = p.right + k * p.right_step;
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_loadd(5, left + TILE, 64);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, cell, 64);
    _tile_stored(1, cell + 256, 64);
    _tile_stored(2, cell + 512, 64);
    _tile_stored(3, cell + 768, 64);
}

/* cell (+)= left right over the visible steps. */
INLINE void multiply(float *cell, product p, int accumulate, const int isa) {
    if (isa == ATTEND_AMX)
        multiply_tiles(cell, p, accumulate);
    else
        multiply_vectors(cell, p, accumulate, isa == ATTEND_DOT);
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
} tile_config;

/* Subnormals are taken as 0, as the bf16 instructions do; some of the others are very slow on them. Returns what
   end_work puts back. */
INLINE unsigned begin_work(const int isa) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    if (isa == ATTEND_AMX) {
        tile_config config = {.palette = 1};
        for (int t = 0; t < 8; t++) {
            config.bytes_a_row[t] = 64;
            config.rows[t] = 16;
        }
        _tile_loadconfig(&config);
    }
    return before;
}

INLINE void end_work(unsigned before, const int isa) {
    if (isa == ATTEND_AMX) _tile_release();
    _mm_setcsr(before);
}

/* ---- Vectors ---- */

/* 2^x to 3e-6; 0 for -inf: reduce gives 0 there, and scalef takes floor(x). */
INLINE __m512 exp2_ps(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.0135341391f), _mm512_set1_ps(0.0520115159f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.241442724f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.69300384f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(y, x);
}

/* Rounded to nearest even, in the low half of each lane. A NaN must stay one. */
INLINE __m512i round_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

/* 32 bf16: those of `low`, then those of `high`. */
INLINE __m512i to_bf16(__m512 low, __m512 high, const int isa) {
    if (isa != ATTEND_FMA) return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(round_bf16(low))),
                              _mm512_cvtepi32_epi16(round_bf16(high)), 1);
}

static const uint16_t pair_low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
static const uint16_t pair_high[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

/* Two rows of 32 -> row `r` of the two tiles of a right operand. */
INLINE void store_pair(char *tiles, int r, __m512i even, __m512i odd) {
    _mm512_store_si512(tiles + r * 64, _mm512_permutex2var_epi16(even, _mm512_loadu_si512(pair_low), odd));
    _mm512_store_si512(tiles + TILE + r * 64, _mm512_permutex2var_epi16(even, _mm512_loadu_si512(pair_high), odd));
}

INLINE void transpose16(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
    }
}

/* ---- Packing ---- */

INLINE const uint16_t *at(strided x, int64_t head, int64_t token) {
    return (const uint16_t *)x.data + head * x.head + token * x.token;
}

INLINE __m512i load_row(const uint16_t *x, int64_t stride, int row, int count) {
    return row < count ? _mm512_loadu_si512(x + row * stride) : _mm512_setzero_si512();
}

/* 32 tokens x size -> left operand [size / 32] pairs: rows are tokens. */
INLINE void pack_left(char *to, const uint16_t *x, int64_t stride, int count, int64_t size) {
    for (int r = 0; r < CHUNK; r++)
        for (int64_t d = 0; d < size; d += 32)
            _mm512_store_si512(to + d / 32 * PAIR + r * 64, load_row(x + d, stride, r, count));
}

/* -> right operand [size / 32] pairs: columns are tokens, pairs run along the size. */
INLINE void pack_right_columns(char *to, const uint16_t *x, int64_t stride, int count, int64_t size) {
    for (int64_t d = 0; d < size; d += 32) {
        for (int half = 0; half < 2; half++) {
            __m512i rows[16];
            for (int r = 0; r < 16; r++) rows[r] = load_row(x + d, stride, half * 16 + r, count);
            transpose16(rows);
            for (int r = 0; r < 16; r++) _mm512_store_si512(to + d / 32 * PAIR + half * TILE + r * 64, rows[r]);
        }
    }
}

/* -> right operand [size / 32] pairs `step` apart: rows are tokens, in pairs. */
INLINE void pack_right_rows(char *to, ptrdiff_t step, const uint16_t *x, int64_t stride, int count, int64_t size) {
    for (int64_t d = 0; d < size; d += 32)
        for (int r = 0; r < CHUNK; r += 2)
            store_pair(to + d / 32 * step, r / 2, load_row(x + d, stride, r, count),
                       load_row(x + d, stride, r + 1, count));
}

/* -> left operand [size / 32] pairs: rows run along the size, columns are tokens. */
INLINE void pack_left_columns(char *to, const uint16_t *x, int64_t stride, int count, int64_t size) {
    for (int64_t d = 0; d < size; d += 32) {
        char *pair = to + d / 32 * PAIR;
        pack_right_rows(pair, PAIR, x + d, stride, count, 32);
        for (int half = 0; half < 2; half++) {
            __m512i rows[16];
            for (int r = 0; r < 16; r++) rows[r] = _mm512_load_si512(pair + half * TILE + r * 64);
            transpose16(rows);
            for (int r = 0; r < 16; r++) _mm512_store_si512(pair + half * TILE + r * 64, rows[r]);
        }
    }
}

typedef struct {
    const attention *a;
    strided x;
    int64_t size;
} pack_job;

/* Items are chunks of kv heads: [chunk][kv head][size / 32] pairs. */
static int pack_transposed(void *data, int64_t begin, int64_t end) {
    const pack_job *job = data;
    const attention *a = job->a;
    for (int64_t item = begin; item < end; item++) {
        const chunk_info *chunk = &a->chunks[item / a->kv_heads];
        pack_left_columns(a->packed + item * job->size * 64, at(job->x, item % a->kv_heads, chunk->first), job->x.token,
                          chunk->count, job->size);
    }
    return 0;
}

/* ---- Who sees whom ---- */

enum { HIDDEN, PARTIAL, FULL };

INLINE int visibility(const attention *a, const chunk_info *key, const chunk_info *query) {
    const int64_t last_query = query->first + query->count - 1;
    if (key->first > last_query || key->until_max <= query->first) return HIDDEN;
    if (a->window && query->position_min - key->position_max >= a->window) return HIDDEN;
    if (key->first + CHUNK - 1 > query->first || key->until_min <= last_query) return PARTIAL;
    return a->window && query->position_max - key->position_min >= a->window ? PARTIAL : FULL;
}

/* Lanes of `query` + 0 .. 15 that see the key; lanes past the sequence may say anything. */
typedef struct {
    __m512i index, position;
    int64_t window;
} lanes;

INLINE lanes query_lanes(const attention *a, int64_t first, int64_t end) {
    lanes q = {.window = a->window};
    q.index = _mm512_add_epi32(_mm512_set1_epi32((int)first),
                               _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 real = _mm512_cmplt_epi32_mask(q.index, _mm512_set1_epi32((int)end));
    q.position = _mm512_maskz_loadu_epi32(real, a->position + first);
    return q;
}

INLINE __mmask16 seeing(const attention *a, lanes q, int64_t key) {
    const __mmask16 causal = _mm512_cmpge_epi32_mask(q.index, _mm512_set1_epi32((int)key));
    __mmask16 seen = _mm512_mask_cmplt_epi32_mask(causal, q.index, _mm512_set1_epi32(a->visible_until[key]));
    if (q.window)
        seen = _mm512_mask_cmplt_epi32_mask(seen, q.position, _mm512_set1_epi32((int)(a->position[key] + q.window)));
    return seen;
}

/* ---- Forward ---- */

typedef struct {
    char queries[FORWARD_BLOCK][HEAD_MAX / 32 * PAIR]; /* Q', right operand */
    char keys[HEAD_MAX / 32 * PAIR];                   /* left operand */
    char weights[KEY_BLOCK][FORWARD_BLOCK][PAIR];      /* P', right operand */
    float scores[KEY_BLOCK][FORWARD_BLOCK][CELL];
    float out[HEAD_MAX / 32][FORWARD_BLOCK][CELL]; /* O' */
    float largest[FORWARD_BLOCK][32], sum[FORWARD_BLOCK][32];
} forward_scratch;

/* Scores of 32 keys and 32 queries, -inf where the key is not seen. */
INLINE void hide(const attention *a, float *cell, const chunk_info *key, const chunk_info *query) {
    const __m512 minus_inf = _mm512_set1_ps(-INFINITY);
    for (int half = 0; half < 2; half++) {
        const lanes q = query_lanes(a, query->first + half * 16, query->first + query->count);
        for (int r = 0; r < CHUNK; r++) {
            const __mmask16 seen = r < key->count ? seeing(a, q, key->first + r) : 0;
            _mm512_mask_store_ps(cell + r / 16 * 512 + half * 256 + r % 16 * 16, (__mmask16)~seen, minus_inf);
        }
    }
}

/* Softmax of a key block for 16 queries: P' from the scores; O' is rescaled to the new maximum. */
INLINE void weigh(const attention *a, forward_scratch *s, int column, int half, uint32_t visible, const int isa) {
    const __m512i pairs = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                            0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    const __m512 scale = _mm512_set1_ps(a->scale * LOG2E);
    const __m512 before = _mm512_load_ps(s->largest[column] + half * 16);
    __m512 largest = before, other = before;
    for (int c = 0; c < KEY_BLOCK; c++) {
        if (!(visible >> c & 1)) continue;
        const float *cell = s->scores[c][column] + half * 256;
        for (int r = 0; r < 16; r++) {
            largest = _mm512_max_ps(largest, _mm512_load_ps(cell + r * 16));
            other = _mm512_max_ps(other, _mm512_load_ps(cell + 512 + r * 16));
        }
    }
    largest = _mm512_max_ps(largest, other);
    const __m512 shift = _mm512_mul_ps(largest, scale);
    __m512 sum = _mm512_load_ps(s->sum[column] + half * 16), odd_sum = _mm512_setzero_ps();
    if (_mm512_cmpneq_ps_mask(largest, before)) {
        const __m512 fade = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(before, largest), scale));
        sum = _mm512_mul_ps(sum, fade);
        for (int64_t d = 0; d < a->value_size / 32; d++) {
            float *out = s->out[d][column] + half * 256;
            for (int r = 0; r < 16; r++) {
                _mm512_store_ps(out + r * 16, _mm512_mul_ps(_mm512_load_ps(out + r * 16), fade));
                _mm512_store_ps(out + 512 + r * 16, _mm512_mul_ps(_mm512_load_ps(out + 512 + r * 16), fade));
            }
        }
        _mm512_store_ps(s->largest[column] + half * 16, largest);
    }
    for (int c = 0; c < KEY_BLOCK; c++) {
        if (!(visible >> c & 1)) continue;
        char *weights = s->weights[c][column] + half * TILE;
        for (int i = 0; i < 2; i++) {
            const float *cell = s->scores[c][column] + i * 512 + half * 256;
            for (int r = 0; r < 16; r += 2) {
                const __m512 even = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(cell + r * 16), scale, shift));
                const __m512 odd = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(cell + r * 16 + 16), scale, shift));
                sum = _mm512_add_ps(sum, even);
                odd_sum = _mm512_add_ps(odd_sum, odd);
                _mm512_store_si512(weights + (i * 8 + r / 2) * 64,
                                   _mm512_permutexvar_epi16(pairs, to_bf16(even, odd, isa)));
            }
        }
    }
    _mm512_store_ps(s->sum[column] + half * 16, _mm512_add_ps(sum, odd_sum));
}

/* 16 columns of a cell [32 rows][2 x 16 columns] -> rows of bf16, times a factor for each column. */
INLINE void store_columns(const float *cell, int half, __m512 factor, uint16_t *to, int64_t stride, int count,
                          const int isa) {
    for (int i = 0; i < 2; i++) {
        __m512i rows[16];
        for (int r = 0; r < 16; r++)
            rows[r] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(cell + i * 512 + half * 256 + r * 16), factor));
        transpose16(rows);
        for (int r = 0; r < 16 && half * 16 + r < count; r++) {
            const __m512 row = _mm512_castsi512_ps(rows[r]);
            _mm256_storeu_si256((__m256i *)(to + (half * 16 + r) * stride + i * 16),
                                _mm512_castsi512_si256(to_bf16(row, row, isa)));
        }
    }
}

INLINE void finish_forward(const attention *a, forward_scratch *s, int column, const chunk_info *query, int64_t head,
                           const int isa) {
    for (int half = 0; half < 2; half++) {
        const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(s->sum[column] + half * 16));
        for (int64_t d = 0; d < a->value_size / 32; d++)
            store_columns(s->out[d][column], half, factor, (uint16_t *)at(a->out, head, query->first) + d * 32,
                          a->out.token, query->count, isa);
    }
    float *lse = a->lse + head * a->tokens + query->first;
    for (int r = 0; r < query->count; r++) lse[r] = s->largest[column][r] * a->scale + logf(s->sum[column][r]);
}

INLINE void forward_block(const attention *a, forward_scratch *s, const block_info *block, int64_t head, const int isa) {
    const sequence_info sequence = a->sequences[block->sequence];
    const chunk_info *query = a->chunks + block->chunk;
    const int64_t kv_head = head / (a->heads / a->kv_heads), d_steps = a->size / 32, v_steps = a->value_size / 32;
    const int end = sequence.chunk + sequence.chunks;
    const int columns = end - block->chunk < FORWARD_BLOCK ? end - block->chunk : FORWARD_BLOCK;
    for (int c = 0; c < columns; c++) {
        pack_right_columns(s->queries[c], at(a->q, head, query[c].first), a->q.token, query[c].count, a->size);
        for (int i = 0; i < 32; i++) {
            s->largest[c][i] = LOWEST;
            s->sum[c][i] = 0;
        }
    }
    for (int64_t d = 0; d < v_steps; d++) memset(s->out[d], 0, sizeof s->out[d]);
    for (int first = sequence.chunk; first < block->chunk + columns; first += KEY_BLOCK) {
        const chunk_info *key = a->chunks + first;
        uint32_t visible[FORWARD_BLOCK] = {0};
        for (int k = 0; k < KEY_BLOCK && first + k < block->chunk + columns; k++) {
            int packed = 0;
            for (int c = 0; c < columns; c++) {
                const int seen = visibility(a, key + k, query + c);
                if (seen == HIDDEN) continue;
                if (!packed) pack_left(s->keys, at(a->k, kv_head, key[k].first), a->k.token, key[k].count, a->size);
                packed = 1;
                visible[c] |= 1u << k;
                multiply(s->scores[k][c], (product){s->keys, s->queries[c], PAIR, PAIR, (int)d_steps, ~0u}, 0, isa);
                if (seen == PARTIAL) hide(a, s->scores[k][c], key + k, query + c);
            }
        }
        const char *values = a->packed + (first * a->kv_heads + kv_head) * v_steps * PAIR;
        for (int c = 0; c < columns; c++) {
            if (!visible[c]) continue;
            for (int half = 0; half < 2; half++) weigh(a, s, c, half, visible[c], isa);
            for (int64_t d = 0; d < v_steps; d++)
                multiply(s->out[d][c],
                         (product){values + d * PAIR, s->weights[0][c], a->kv_heads * v_steps * PAIR,
                                   FORWARD_BLOCK * PAIR, KEY_BLOCK, visible[c]},
                         1, isa);
        }
    }
    for (int c = 0; c < columns; c++) finish_forward(a, s, c, query + c, head, isa);
}

INLINE int forward_items(const attention *a, int64_t begin, int64_t end, void *scratch, const int isa) {
    const unsigned before = begin_work(isa);
    for (int64_t item = begin; item < end; item++)
        forward_block(a, scratch, a->blocks + item / a->heads, item % a->heads, isa);
    end_work(before, isa);
    return 0;
}

/* ---- Backward ---- */

typedef struct {
    char queries[BACKWARD_BLOCK][HEAD_MAX / 32 * PAIR];    /* Q', right operand */
    char grads[BACKWARD_BLOCK][HEAD_MAX / 32 * PAIR];      /* dO', right operand */
    char query_rows[HEAD_MAX / 32][BACKWARD_BLOCK][PAIR];  /* Q, right operand */
    char grad_rows[HEAD_MAX / 32][BACKWARD_BLOCK][PAIR];   /* dO, right operand */
    char keys[HEAD_MAX / 32 * PAIR], values[HEAD_MAX / 32 * PAIR]; /* left operands */
    char weights[KEY_BLOCK][BACKWARD_BLOCK][PAIR];         /* P', left operand */
    char slopes[KEY_BLOCK][BACKWARD_BLOCK][PAIR];          /* dS', left operand */
    char slope_pairs[KEY_BLOCK][BACKWARD_BLOCK][PAIR];     /* dS', right operand */
    float scores[CELL], weight_grads[CELL];
    float grad_q[HEAD_MAX / 32][BACKWARD_BLOCK][CELL];     /* dQ' */
    float lse2[BACKWARD_BLOCK][32], delta[BACKWARD_BLOCK][32];
} backward_scratch;

/* Sums over a kv head's queries, one [size / 32] and one [value_size / 32] row of cells for each chunk of keys. */
typedef struct {
    float *cells;
    int64_t d_steps, v_steps;
} key_sums;

INLINE float *key_cell(key_sums sums, int64_t chunk, int64_t d) {
    return sums.cells + (chunk * (sums.d_steps + sums.v_steps) + d) * CELL;
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE float row_dot(const uint16_t *x, const uint16_t *y, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; d += 16)
        sum = _mm512_fmadd_ps(widen(_mm256_loadu_si256((const __m256i *)(x + d))),
                              widen(_mm256_loadu_si256((const __m256i *)(y + d))), sum);
    return _mm512_reduce_add_ps(sum);
}

INLINE void pack_queries(const attention *a, backward_scratch *s, int c, const chunk_info *query, int64_t head) {
    const uint16_t *q = at(a->q, head, query->first), *grad = at(a->grad_out, head, query->first);
    const uint16_t *out = at(a->out, head, query->first);
    pack_right_columns(s->queries[c], q, a->q.token, query->count, a->size);
    pack_right_columns(s->grads[c], grad, a->grad_out.token, query->count, a->value_size);
    if (a->grad_k.data) pack_right_rows(s->query_rows[0][c], sizeof s->query_rows[0], q, a->q.token, query->count, a->size);
    if (a->grad_v.data)
        pack_right_rows(s->grad_rows[0][c], sizeof s->grad_rows[0], grad, a->grad_out.token, query->count, a->value_size);
    for (int r = 0; r < 32; r++) {
        const int real = r < query->count; /* P of a query that is not there must be 0 */
        s->lse2[c][r] = real ? a->lse[head * a->tokens + query->first + r] * LOG2E : INFINITY;
        s->delta[c][r] = real ? row_dot(grad + r * a->grad_out.token, out + r * a->out.token, a->value_size) : 0;
    }
}

/* P' and dS' of one cell. */
INLINE void slope_cell(const attention *a, backward_scratch *s, int k, int c, const chunk_info *key,
                       const chunk_info *query, int partial, const int isa) {
    const __m512 scale = _mm512_set1_ps(a->scale * LOG2E);
    __m512 lse2[2], delta[2];
    lanes q[2];
    for (int half = 0; half < 2; half++) {
        lse2[half] = _mm512_load_ps(s->lse2[c] + half * 16);
        delta[half] = _mm512_load_ps(s->delta[c] + half * 16);
        q[half] = query_lanes(a, query->first + half * 16, query->first + query->count);
    }
    for (int r = 0; r < CHUNK; r += 2) {
        __m512i slopes[2];
        for (int odd = 0; odd < 2; odd++) {
            const int row = r + odd;
            __m512 p[2], ds[2];
            for (int half = 0; half < 2; half++) {
                const int64_t i = row / 16 * 512 + half * 256 + row % 16 * 16;
                p[half] = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(s->scores + i), scale, lse2[half]));
                ds[half] = _mm512_mul_ps(p[half], _mm512_sub_ps(_mm512_load_ps(s->weight_grads + i), delta[half]));
                if (partial) {
                    const __mmask16 seen = row < key->count ? seeing(a, q[half], key->first + row) : 0;
                    p[half] = _mm512_maskz_mov_ps(seen, p[half]);
                    ds[half] = _mm512_maskz_mov_ps(seen, ds[half]);
                }
            }
            slopes[odd] = to_bf16(ds[0], ds[1], isa);
            _mm512_store_si512(s->weights[k][c] + row * 64, to_bf16(p[0], p[1], isa));
            _mm512_store_si512(s->slopes[k][c] + row * 64, slopes[odd]);
        }
        store_pair(s->slope_pairs[k][c], r / 2, slopes[0], slopes[1]);
    }
}

/* One block of queries with one block of keys; chunks of keys count from the sequence's first. */
INLINE void backward_keys(const attention *a, backward_scratch *s, key_sums sums, sequence_info sequence, int first,
                          const chunk_info *query, int columns, int64_t kv_head, const int isa) {
    const int d_steps = (int)sums.d_steps, v_steps = (int)sums.v_steps;
    const int chunks = sequence.chunks - first < KEY_BLOCK ? sequence.chunks - first : KEY_BLOCK;
    const chunk_info *key = a->chunks + sequence.chunk + first;
    uint32_t seen_by[KEY_BLOCK] = {0}, sees[BACKWARD_BLOCK] = {0};
    for (int k = 0; k < chunks; k++) {
        for (int c = 0; c < columns; c++) {
            const int seen = visibility(a, key + k, query + c);
            if (seen == HIDDEN) continue;
            if (!seen_by[k]) {
                pack_left(s->keys, at(a->k, kv_head, key[k].first), a->k.token, key[k].count, a->size);
                pack_left(s->values, at(a->v, kv_head, key[k].first), a->v.token, key[k].count, a->value_size);
            }
            seen_by[k] |= 1u << c;
            sees[c] |= 1u << k;
            multiply(s->scores, (product){s->keys, s->queries[c], PAIR, PAIR, d_steps, ~0u}, 0, isa);
            multiply(s->weight_grads, (product){s->values, s->grads[c], PAIR, PAIR, v_steps, ~0u}, 0, isa);
            slope_cell(a, s, k, c, key + k, query + c, seen == PARTIAL, isa);
        }
        if (!seen_by[k]) continue;
        for (int d = 0; a->grad_k.data && d < d_steps; d++)
            multiply(key_cell(sums, first + k, d),
                     (product){s->slopes[k][0], s->query_rows[d][0], PAIR, PAIR, columns, seen_by[k]}, 1, isa);
        for (int d = 0; a->grad_v.data && d < v_steps; d++)
            multiply(key_cell(sums, first + k, d_steps + d),
                     (product){s->weights[k][0], s->grad_rows[d][0], PAIR, PAIR, columns, seen_by[k]}, 1, isa);
    }
    if (!a->grad_q.data) return;
    const char *keys = a->packed + ((sequence.chunk + first) * a->kv_heads + kv_head) * d_steps * PAIR;
    for (int c = 0; c < columns; c++)
        for (int d = 0; sees[c] && d < d_steps; d++)
            multiply(s->grad_q[d][c],
                     (product){keys + d * PAIR, s->slope_pairs[0][c], a->kv_heads * d_steps * PAIR,
                               BACKWARD_BLOCK * PAIR, chunks, sees[c]},
                     1, isa);
}

INLINE void backward_queries(const attention *a, backward_scratch *s, key_sums sums, sequence_info sequence, int first,
                             int64_t head, const int isa) {
    const int64_t kv_head = head / (a->heads / a->kv_heads), d_steps = sums.d_steps;
    const int columns = sequence.chunks - first < BACKWARD_BLOCK ? sequence.chunks - first : BACKWARD_BLOCK;
    const chunk_info *query = a->chunks + sequence.chunk + first;
    for (int c = 0; c < columns; c++) pack_queries(a, s, c, query + c, head);
    for (int64_t d = 0; d < d_steps; d++) memset(s->grad_q[d], 0, sizeof s->grad_q[d]);
    for (int key = 0; key < first + columns; key += KEY_BLOCK)
        backward_keys(a, s, sums, sequence, key, query, columns, kv_head, isa);
    if (!a->grad_q.data) return;
    for (int c = 0; c < columns; c++) {
        uint16_t *to = (uint16_t *)at(a->grad_q, head, query[c].first);
        for (int half = 0; half < 2; half++)
            for (int64_t d = 0; d < d_steps; d++)
                store_columns(s->grad_q[d][c], half, _mm512_set1_ps(a->scale), to + d * 32, a->grad_q.token,
                              query[c].count, isa);
    }
}

/* Sum of the parts' cells -> rows of bf16. */
INLINE void store_keys(const float *cell, int64_t parts, int64_t part_step, float scale, uint16_t *to, int64_t stride,
                       int count, const int isa) {
    for (int r = 0; r < count; r++) {
        __m512 sum[2];
        for (int half = 0; half < 2; half++) {
            const float *from = cell + r / 16 * 512 + half * 256 + r % 16 * 16;
            sum[half] = _mm512_load_ps(from);
            for (int64_t p = 1; p < parts; p++) sum[half] = _mm512_add_ps(sum[half], _mm512_load_ps(from + p * part_step));
            sum[half] = _mm512_mul_ps(sum[half], _mm512_set1_ps(scale));
        }
        _mm512_storeu_si512(to + r * stride, to_bf16(sum[0], sum[1], isa));
    }
}

INLINE void finish_keys(const attention *a, key_sums sums, int64_t chunk, const chunk_info *key, int64_t kv_head,
                        int64_t parts, int64_t part_step, const int isa) {
    for (int64_t d = 0; a->grad_k.data && d < sums.d_steps; d++)
        store_keys(key_cell(sums, chunk, d), parts, part_step, a->scale,
                   (uint16_t *)at(a->grad_k, kv_head, key->first) + d * 32, a->grad_k.token, key->count, isa);
    for (int64_t d = 0; a->grad_v.data && d < sums.v_steps; d++)
        store_keys(key_cell(sums, chunk, sums.d_steps + d), parts, part_step, 1.0f,
                   (uint16_t *)at(a->grad_v, kv_head, key->first) + d * 32, a->grad_v.token, key->count, isa);
}

INLINE int64_t chunk_floats(const attention *a) { return (a->size + a->value_size) / 32 * CELL; }

INLINE int64_t sequence_parts(const attention *a, sequence_info sequence) {
    return sequence.chunks > a->undivided ? a->parts : 1;
}

/* Part `part` of a kv head's queries: every parts-th block of queries, so that the parts are alike. */
INLINE void backward_part(const attention *a, backward_scratch *s, sequence_info sequence, int64_t kv_head, int64_t part,
                          const int isa) {
    const int64_t group = a->heads / a->kv_heads, floats = chunk_floats(a), parts = sequence_parts(a, sequence);
    const int64_t blocks = (sequence.chunks + BACKWARD_BLOCK - 1) / BACKWARD_BLOCK;
    if (part >= parts) return;
    key_sums sums = {(float *)(s + 1), a->size / 32, a->value_size / 32};
    if (parts > 1) sums.cells = a->partial + ((part * a->kv_heads + kv_head) * a->chunk_count + sequence.chunk) * floats;
    memset(sums.cells, 0, (size_t)(sequence.chunks * floats) * sizeof(float));
    for (int64_t i = part; i < group * blocks; i += parts)
        backward_queries(a, s, sums, sequence, (int)(i % blocks) * BACKWARD_BLOCK, kv_head * group + i / blocks, isa);
    for (int64_t c = 0; parts == 1 && c < sequence.chunks; c++)
        finish_keys(a, sums, c, a->chunks + sequence.chunk + c, kv_head, 1, 0, isa);
}

INLINE int backward_items(const attention *a, int64_t begin, int64_t end, void *scratch, const int isa) {
    const unsigned before = begin_work(isa);
    for (int64_t item = begin; item < end; item++) {
        const int64_t part = item % a->parts, rest = item / a->parts;
        backward_part(a, scratch, a->sequences[rest / a->kv_heads], rest % a->kv_heads, part, isa);
    }
    end_work(before, isa);
    return 0;
}

/* Items are kv heads of sequences. */
INLINE int sum_items(const attention *a, int64_t begin, int64_t end, const int isa) {
    const int64_t floats = chunk_floats(a), head_floats = a->chunk_count * floats;
    for (int64_t item = begin; item < end; item++) {
        const sequence_info sequence = a->sequences[item / a->kv_heads];
        const int64_t kv_head = item % a->kv_heads, parts = sequence_parts(a, sequence);
        const key_sums sums = {a->partial + kv_head * head_floats, a->size / 32, a->value_size / 32};
        for (int64_t c = sequence.chunk; parts > 1 && c < sequence.chunk + sequence.chunks; c++)
            finish_keys(a, sums, c, a->chunks + c, kv_head, parts, a->kv_heads * head_floats, isa);
    }
    return 0;
}

/* ---- Entry ---- */

#define WORKERS(NAME, ISA)                                                                    \
    static int forward_##NAME(void *job, int64_t begin, int64_t end, void *scratch) {         \
        return forward_items(job, begin, end, scratch, ISA);                                  \
    }                                                                                         \
    static int backward_##NAME(void *job, int64_t begin, int64_t end, void *scratch) {        \
        return backward_items(job, begin, end, scratch, ISA);                                 \
    }                                                                                         \
    static int sum_##NAME(void *job, int64_t begin, int64_t end) { return sum_items(job, begin, end, ISA); }
WORKERS(fma, ATTEND_FMA)
WORKERS(dot, ATTEND_DOT)
WORKERS(amx, ATTEND_AMX)

static const scratch_worker forward_workers[] = {forward_fma, forward_dot, forward_amx};
static const scratch_worker backward_workers[] = {backward_fma, backward_dot, backward_amx};
static const range_worker sum_workers[] = {sum_fma, sum_dot, sum_amx};

int lamella_attention_supported(int isa) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 0;
    if (isa == ATTEND_FMA) return 1;
    if (isa == ATTEND_DOT) return lamella_has_avx512_bf16();
    return isa == ATTEND_AMX && lamella_has_amx_bf16();
}

int64_t lamella_attention_scratch(const attention *a, int backward) {
    if (!backward) return sizeof(forward_scratch);
    return (int64_t)sizeof(backward_scratch) + a->undivided * chunk_floats(a) * (int64_t)sizeof(float);
}

int lamella_attention_forward(const attention *a) {
    pack_job pack = {a, a->v, a->value_size};
    run_parallel(pack_transposed, &pack, a->chunk_count * a->kv_heads, 16, a->threads);
    return run_parallel_scratch(forward_workers[a->isa], (void *)a, a->block_count * a->heads, 1, a->threads, a->scratch,
                                lamella_attention_scratch(a, 0));
}

int lamella_attention_backward(const attention *a) {
    if (a->grad_q.data) {
        pack_job pack = {a, a->k, a->size};
        run_parallel(pack_transposed, &pack, a->chunk_count * a->kv_heads, 16, a->threads);
    }
    const int64_t items = a->sequence_count * a->kv_heads * a->parts;
    const int status = run_parallel_scratch(backward_workers[a->isa], (void *)a, items, 1, a->threads, a->scratch,
                                            lamella_attention_scratch(a, 1));
    if (!status && a->parts > 1 && (a->grad_k.data || a->grad_v.data))
        run_parallel(sum_workers[a->isa], (void *)a, a->sequence_count * a->kv_heads, 1, a->threads);
    return status;
}

#else

int lamella_attention_supported(int isa) {
    (void)isa;
    return 0;
}

int64_t lamella_attention_scratch(const attention *a, int backward) {
    (void)a;
    (void)backward;
    return 0;
}

int lamella_attention_forward(const attention *a) {
    (void)a;
    return -1;
}

int lamella_attention_backward(const attention *a) {
    (void)a;
    return -1;
}

#endif
