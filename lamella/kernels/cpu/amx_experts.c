/* Gated experts (down(silu(gate x) * up x)), forward and backward, straight from NF4, with LoRA on both sides.

   One expert is one piece of work. Its rows are gathered into tiles once; then a strip of the weights at a time is undone
   into a panel that stays in the cache and is multiplied with all rows, while the next strip is undone into another
   (undoing.h). Nothing of the size of the weights or of the gathered rows exists in between. Going forward weights are the left operand, so their rows lie along k as they
   are stored; going back they are the right one and pairs of rows are interleaved while they are undone. */
#include "experts.h"
#include "kernels.h"
#include "parallel.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AMX_BF16__)
#include "undoing.h"

#include <stdlib.h>

enum { PANEL = 64, WIDE = 4, PART = 12, CHUNK = 128, CHUNK_MAX = 512, CHUNK_BYTES = 1 << 19 };
/* Of a right strip: blocks of 64 columns, and k-tiles. A row of it is 128 bytes of codes, read in one go. */

static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A thread's scratch. Counts of tiles: kh, ki along hidden and inner; r along a rank padded to 16; kr padded to 32. */
typedef struct {
    int64_t chunk, kh, ki, r1, r2, kr1, kr2;
    float *gate_scale, *up_scale, *down_scale, *dweight, *grad_a1, *grad_b1, *grad_a2, *grad_b2, *c;
    bf16 *rows, *act, *dgate, *dup, *panels[2], *xa1, *xa2, *a1, *b1, *a2, *b2, *a1_right, *a2_right, *u1, *u2, *left, *right;
} scratch;

static size_t lay_out(const experts_job *job, int backward, scratch *s, char *base) {
    size_t at = 0;
#define TAKE(field, count)                                      \
    do {                                                        \
        s->field = (void *)(base + at);                         \
        at += ((size_t)(count) * sizeof(*s->field) + 63) & ~63u; \
    } while (0)
    const int64_t h = job->hidden, i = job->inner;
    s->chunk = least(CHUNK_MAX, CHUNK_BYTES / (h * 2) / 32 * 32);
    if (s->chunk < CHUNK) s->chunk = least(CHUNK, 2 * CHUNK_BYTES / (h * 2) / 32 * 32);
    if (s->chunk < 32) s->chunk = 32;
    s->kh = h / DEPTH;
    s->ki = i / DEPTH;
    s->r1 = up_to(job->rank1, 16);
    s->r2 = up_to(job->rank2, 16);
    s->kr1 = up_to(job->rank1, 32);
    s->kr2 = up_to(job->rank2, 32);
    const int64_t tiles = s->chunk / ROWS, blocks = h * i / PANEL;
    TAKE(gate_scale, blocks);
    TAKE(up_scale, blocks);
    TAKE(down_scale, blocks);
    TAKE(rows, tiles * s->kh * TILE);
    TAKE(act, tiles * s->ki * TILE);
    const int64_t longest = s->kh > s->ki ? s->kh : s->ki, right = s->kh > 2 * s->ki ? s->kh : 2 * s->ki;
    int64_t panel = 2 * longest;
    if (backward && 4 * WIDE * least(right, PART) > panel) panel = 4 * WIDE * least(right, PART);
    TAKE(panels[0], panel * TILE);
    TAKE(panels[1], panel * TILE);
    TAKE(c, (backward ? up_to(tiles, 2) * 2 * WIDE : 4) * 4 * TILE_C);
    TAKE(xa1, tiles * s->kr1 * TILE);
    TAKE(xa2, tiles * s->kr2 * TILE);
    TAKE(a1, (s->r1 + 1) * s->kh * TILE);
    TAKE(b1, (2 * i / ROWS) * s->kr1 * TILE + s->r1 * 2 * s->ki * TILE);
    TAKE(a2, (s->r2 + 1) * s->ki * TILE);
    TAKE(b2, (h / ROWS) * s->kr2 * TILE + s->r2 * s->kh * TILE);
    if (backward) {
        TAKE(dgate, tiles * s->ki * TILE);
        TAKE(dup, tiles * s->ki * TILE);
        TAKE(dweight, s->chunk * 16);
        TAKE(a1_right, (h / 16) * s->kr1 * TILE);
        TAKE(a2_right, (i / 16) * s->kr2 * TILE);
        TAKE(u1, tiles * s->kr1 * TILE);
        TAKE(u2, tiles * s->kr2 * TILE);
        TAKE(left, (s->r1 > s->r2 ? s->r1 : s->r2) * (s->chunk / DEPTH) * TILE * 4);
        TAKE(right, 2 * (s->chunk / DEPTH) * TILE);
        const int64_t p1 = up_to(s->r1, 2) * 4 * TILE_C, p2 = up_to(s->r2, 2) * 4 * TILE_C;
        TAKE(grad_a1, p1 * (h / 32));
        TAKE(grad_b1, p1 * (2 * i / 32));
        TAKE(grad_a2, p2 * (i / 32));
        TAKE(grad_b2, p2 * (h / 32));
    }
#undef TAKE
    return at;
}

/* Kept by the thread from call to call: fresh pages would cost more than the arithmetic. */
static int get_scratch(const experts_job *job, int backward, scratch *s) {
    static __thread char *memory = NULL;
    static __thread size_t size = 0;
    const size_t needed = lay_out(job, backward, s, NULL);
    if (needed > size) {
        free(memory);
        size = 0;
        memory = aligned_alloc(4096, (needed + 4095) & ~(size_t)4095);
        if (!memory) return 1;
        size = needed;
    }
    lay_out(job, backward, s, memory);
    return 0;
}

/* ---- weights ---------------------------------------------------------------------------------------------------- */

static void load_scales(const experts_job *job, const expert_matrix *m, float *out) {
    const int64_t blocks = job->hidden * job->inner / PANEL, first = m->first_block;
    if (m->absmax >= 0) {
        memcpy(out, job->base + m->absmax + first * 4, (size_t)blocks * 4);
        return;
    }
    const float *code = (const float *)(job->base + m->absmax_code), *absmax2 = (const float *)(job->base + m->absmax2);
    const float offset = *(const float *)(job->base + m->offset);
    const uint8_t *q = job->base + m->absmax_q;
    for (int64_t b = first, stop; b < first + blocks; b = stop) {
        stop = least((b / ABSMAX_BLOCK + 1) * ABSMAX_BLOCK, first + blocks);
        kernels_avx512->scales(q + b, code, absmax2[b / ABSMAX_BLOCK], offset, stop - b, out + (b - first));
    }
}

/* ---- small matrices of LoRA ------------------------------------------------------------------------------------- */

/* A [rank, columns] as left tiles [rank / 16][columns / 32], columns in quad order. */
static void pack_a_left(const bf16 *a, int64_t rank, int64_t columns, bf16 *out) {
    const int64_t depth = columns / DEPTH;
    memset(out, 0, (size_t)(up_to(rank, 16) * depth * TILE) * sizeof(bf16));
    for (int64_t r = 0; r < rank; r++)
        for (int64_t b = 0; b < columns / PANEL; b++) {
            __m512i first, second;
            to_quads(a + r * columns + b * PANEL, &first, &second);
            bf16 *to = out + ((r >> 4) * depth + 2 * b) * TILE + (r & 15) * DEPTH;
            _mm512_storeu_si512(to, first);
            _mm512_storeu_si512(to + TILE, second);
        }
}

/* A [rank, columns] as right tiles [columns / 16][rank / 32], columns in quad order. */
static void pack_a_right(const bf16 *a, int64_t rank, int64_t columns, bf16 *out) {
    static const bf16 zeros[PANEL];
    const int64_t depth = up_to(rank, 32);
    for (int64_t b = 0; b < columns / PANEL; b++) {
        bf16 *base = out + b * 4 * depth * TILE;
        bf16 *const tiles[4] = {base, base + depth * TILE, base + 2 * depth * TILE, base + 3 * depth * TILE};
        for (int64_t p = 0; p < depth * 16; p++) {
            const bf16 *even = 2 * p < rank ? a + 2 * p * columns + b * PANEL : zeros;
            const bf16 *odd = 2 * p + 1 < rank ? a + (2 * p + 1) * columns + b * PANEL : zeros;
            pair_block(even, odd, tiles, (p >> 4) * TILE + (p & 15) * 32);
        }
    }
}

/* B [rows, rank] as left tiles [rows / 16][rank / 32]; rows dealt out in quad order or not. */
static void pack_b_left(const bf16 *b, int64_t rows, int64_t rank, int by_quads, bf16 *out) {
    const int64_t depth = up_to(rank, 32);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t in_panel = row & (PANEL - 1);
        const int64_t tile = by_quads ? (row / PANEL) * 4 + (in_panel & 3) : row >> 4;
        const int64_t line = by_quads ? in_panel >> 2 : row & 15;
        for (int64_t k = 0; k < depth; k++) {
            const int64_t count = least(32, rank - k * 32);
            const __mmask32 mask = count == 32 ? 0xffffffffu : (1u << count) - 1;
            _mm512_storeu_si512(out + (tile * depth + k) * TILE + line * DEPTH,
                                _mm512_maskz_loadu_epi16(mask, b + row * rank + k * 32));
        }
    }
}

/* B [rows, rank] as right tiles [rank / 16][depth tiles, written from tile `from`], k along the rows. */
static void pack_b_right(const bf16 *b, int64_t rows, int64_t rank, int by_quads, bf16 *out, int64_t depth, int64_t from) {
    for (int64_t r = 0; r < up_to(rank, 16); r++) {
        const int64_t count = least(16, rank - r * 16);
        const __mmask16 mask = (__mmask16)((1u << count) - 1);
        for (int64_t t = 0; t < rows / DEPTH; t++)
            for (int64_t p = 0; p < 16; p++) {
                int64_t even, odd;
                pair_of(by_quads, t, p, &even, &odd);
                const __m256i low = _mm256_maskz_loadu_epi16(mask, b + even * rank + r * 16);
                const __m256i high = _mm256_maskz_loadu_epi16(mask, b + odd * rank + r * 16);
                const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
                _mm512_storeu_si512(out + (r * depth + from + t) * TILE + p * 32,
                                    _mm512_permutexvar_epi16(pair_words(), both));
            }
    }
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Gathered rows as right tiles [rows / 16][hidden / 32], k in quad order. */
static void gather_right(const experts_job *job, const int32_t *token, int64_t rows, bf16 *out) {
    const int64_t depth = job->hidden / DEPTH;
    for (int64_t t = 0; t < rows; t += ROWS)
        for (int64_t b = 0; b < job->hidden / PANEL; b++) {
            __m512i first[ROWS], second[ROWS];
            for (int64_t i = 0; i < ROWS; i++)
                if (t + i < rows)
                    to_quads(job->x + token[t + i] * job->hidden + b * PANEL, &first[i], &second[i]);
                else
                    first[i] = second[i] = _mm512_setzero_si512();
            transpose16(first);
            transpose16(second);
            bf16 *to = out + ((t / ROWS) * depth + 2 * b) * TILE;
            for (int64_t i = 0; i < ROWS; i++) {
                _mm512_storeu_si512(to + i * 32, first[i]);
                _mm512_storeu_si512(to + TILE + i * 32, second[i]);
            }
        }
}

/* Gathered rows as left tiles [rows / 16][hidden / 32]. */
static void gather_left(const bf16 *from, int64_t hidden, const int32_t *token, int64_t rows, bf16 *out) {
    const int64_t depth = hidden / DEPTH;
    for (int64_t t = 0; t < up_to(rows, ROWS) * ROWS; t++)
        for (int64_t k = 0; k < depth; k++)
            _mm512_storeu_si512(out + ((t / ROWS) * depth + k) * TILE + (t & 15) * DEPTH,
                                t < rows ? load_words(from + token[t] * hidden + k * DEPTH) : _mm512_setzero_si512());
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* xa^T = A x^T * scale for all rows: right tiles for the product with B, and kept for backward. */
static void lora_down(const experts_job *job, const scratch *s, const bf16 *a, const bf16 *x, int64_t depth, int64_t rank,
                      float scale, int64_t rows, bf16 *out, bf16 *saved, int64_t saved_stride) {
    const int64_t kr = up_to(rank, 32), tiles = up_to(rows, ROWS);
    const __m512 factor = _mm512_set1_ps(scale);
    memset(out, 0, (size_t)(tiles * kr * TILE) * sizeof(bf16));
    for (int64_t r = 0; r < up_to(rank, 16); r++)
        for (int64_t t = 0; t < tiles; t += 2) {
            const int columns = (int)least(2, tiles - t);
            const tile_run run = {{a + r * depth * TILE}, {x + t * depth * TILE, x + (t + 1) * depth * TILE}, depth, 0};
            multiply((int)job->amx, s->c, &run, 1, 1, columns, 0);
            for (int j = 0; j < columns; j++) {
                float *c = s->c + j * TILE_C;
                bf16 *to = out + ((t + j) * kr + r / 2) * TILE + 8 * (r & 1) * 32;
                const int64_t valid = least(16, rows - (t + j) * ROWS);
                for (int p = 0; p < 8; p++) {
                    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(c + 32 * p), factor);
                    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(c + 32 * p + 16), factor);
                    _mm512_storeu_si512(to + p * 32, pair_rows(low, high));
                    for (int64_t odd = 0; saved && odd < 2; odd++)
                        if (16 * r + 2 * p + odd < rank)
                            _mm256_mask_storeu_epi16(saved + (16 * r + 2 * p + odd) * saved_stride + (t + j) * ROWS,
                                                     (__mmask16)((1u << valid) - 1),
                                                     (__m256i)_mm512_cvtneps_pbh(odd ? high : low));
                }
            }
        }
}

/* silu(gate) * up of one pair of C tiles into the right tile of the down product; gate and up are kept where asked. */
static void activate(const float *gate, const float *up, bf16 *act, bf16 *gate_out, bf16 *up_out, int64_t stride,
                     int64_t rows) {
    __m512i gates[8], ups[8];
    for (int p = 0; p < 8; p++) {
        const __m512 g0 = _mm512_loadu_ps(gate + 32 * p), g1 = _mm512_loadu_ps(gate + 32 * p + 16);
        const __m512 u0 = _mm512_loadu_ps(up + 32 * p), u1 = _mm512_loadu_ps(up + 32 * p + 16);
        gates[p] = pair_rows(g0, g1);
        ups[p] = pair_rows(u0, u1);
        const __m512 a0 = _mm512_mul_ps(_mm512_mul_ps(g0, sigmoid_ps(g0)), u0);
        const __m512 a1 = _mm512_mul_ps(_mm512_mul_ps(g1, sigmoid_ps(g1)), u1);
        _mm512_storeu_si512(act + p * 32, pair_rows(a0, a1));
    }
    if (gate_out) {
        store_columns(gates, gate_out, stride, rows);
        store_columns(ups, up_out, stride, rows);
    }
}

/* Strip n of the forward pass: 16 rows of gate and of up, in quad order; then 32 rows of down. */
static undoing forward_strip(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t n,
                             int64_t products) {
    const int64_t first = n - job->inner / ROWS;
    if (first < 0) {
        const int64_t row = n / 4 * PANEL + n % 4;
        return undo_left(job->base + m[0].codes, s->gate_scale, row, job->base + m[1].codes, s->up_scale, row, 4,
                         job->hidden, s->panels[n & 1], products);
    }
    const uint8_t *codes = job->base + m[2].codes;
    const int64_t row = first * 2 * ROWS;
    if (row >= job->hidden) return (undoing){.steps = 0};
    return undo_left(codes, s->down_scale, row, codes, s->down_scale, row + ROWS, 1, job->inner, s->panels[n & 1], products);
}

static void forward_chunk(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t first, int64_t rows,
                          int64_t of_expert, int64_t in_expert) {
    const int64_t tiles = up_to(rows, ROWS), pairs = tiles / 2, h = job->hidden, inner = job->inner;
    const int64_t inner_strips = inner / ROWS, strips = inner_strips + h / (2 * ROWS);
    const int amx = (int)job->amx;
    gather_right(job, job->token + first, rows, s->rows);
    if (job->rank1)
        lora_down(job, s, s->a1, s->rows, s->kh, job->rank1, (float)job->scale1, rows, s->xa1,
                  job->xa1 ? job->xa1 + (first - in_expert) * job->rank1 + in_expert : NULL, of_expert);
    undoing next = forward_strip(job, s, m, 0, 0);
    undo_rest(&next, LEFT);
    for (int64_t n = 0; n < inner_strips; n++) {
        const bf16 *gate = s->panels[n & 1], *up = gate + s->kh * TILE;
        const int64_t b = n / 4, q = n % 4;
        next = forward_strip(job, s, m, n + 1, pairs * s->kh);
        for (int64_t t = 0; t < tiles; t += 2) {
            const int columns = (int)least(2, tiles - t);
            const tile_run runs[2] = {
                {{gate, up}, {s->rows + t * s->kh * TILE, s->rows + (t + 1) * s->kh * TILE}, s->kh, 0},
                {{s->b1 + n * s->kr1 * TILE, s->b1 + (inner_strips + n) * s->kr1 * TILE},
                 {s->xa1 + t * s->kr1 * TILE, s->xa1 + (t + 1) * s->kr1 * TILE}, s->kr1, 0}};
            multiply_beside(amx, s->c, runs, job->rank1 ? 2 : 1, 2, columns, 0, &next, LEFT);
            for (int j = 0; j < columns; j++) {
                bf16 *act = s->act + ((t + j) * s->ki + 2 * b + q / 2) * TILE + (q & 1 ? 0 : 8 * 32);
                const int64_t at = (first + (t + j) * ROWS) * inner + b * PANEL + q * 16;
                activate(s->c + j * TILE_C, s->c + (2 + j) * TILE_C, act, job->gate ? job->gate + at : NULL,
                         job->up ? job->up + at : NULL, inner, least(ROWS, rows - (t + j) * ROWS));
            }
        }
        undo_rest(&next, LEFT);
    }
    if (job->rank2)
        lora_down(job, s, s->a2, s->act, s->ki, job->rank2, (float)job->scale2, rows, s->xa2,
                  job->xa2 ? job->xa2 + (first - in_expert) * job->rank2 + in_expert : NULL, of_expert);
    for (int64_t n = inner_strips; n < strips; n++) {
        const bf16 *down = s->panels[n & 1], *lora = s->b2 + 2 * (n - inner_strips) * s->kr2 * TILE;
        const int64_t column = 2 * (n - inner_strips) * ROWS;
        next = forward_strip(job, s, m, n + 1, pairs * s->ki);
        for (int64_t t = 0; t < tiles; t += 2) {
            const int columns = (int)least(2, tiles - t);
            const tile_run runs[2] = {
                {{down, down + s->ki * TILE}, {s->act + t * s->ki * TILE, s->act + (t + 1) * s->ki * TILE}, s->ki, 0},
                {{lora, lora + s->kr2 * TILE},
                 {s->xa2 + t * s->kr2 * TILE, s->xa2 + (t + 1) * s->kr2 * TILE}, s->kr2, 0}};
            multiply_beside(amx, s->c, runs, job->rank2 ? 2 : 1, 2, columns, 0, &next, LEFT);
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < columns; j++)
                    store_transposed(s->c + (2 * i + j) * TILE_C, NULL,
                                     job->y + (first + (t + j) * ROWS) * h + column + i * ROWS, h,
                                     least(ROWS, rows - (t + j) * ROWS));
        }
        undo_rest(&next, LEFT);
    }
}

static int forward_range(void *data, int64_t begin, int64_t end) {
    const experts_job *job = data;
    scratch s;
    if (get_scratch(job, 0, &s)) return 1;
    tiles_begin((int)job->amx);
    for (int64_t e = begin; e < end; e++) {
        const int64_t first = job->offsets[e], rows = job->offsets[e + 1] - first;
        if (!rows) continue;
        const expert_matrix *m = job->matrices + 3 * e;
        load_scales(job, m, s.gate_scale);
        load_scales(job, m + 1, s.up_scale);
        load_scales(job, m + 2, s.down_scale);
        if (job->rank1) {
            pack_a_left(job->a1 + e * job->rank1 * job->hidden, job->rank1, job->hidden, s.a1);
            pack_b_left(job->b1 + e * 2 * job->inner * job->rank1, 2 * job->inner, job->rank1, 1, s.b1);
        }
        if (job->rank2) {
            pack_a_left(job->a2 + e * job->rank2 * job->inner, job->rank2, job->inner, s.a2);
            pack_b_left(job->b2 + e * job->hidden * job->rank2, job->hidden, job->rank2, 0, s.b2);
        }
        for (int64_t at = 0; at < rows; at += s.chunk)
            forward_chunk(job, &s, m, first + at, least(s.chunk, rows - at), rows, at);
    }
    tiles_end((int)job->amx);
    return 0;
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

/* u = scale * d B, [rows, rank], as left tiles; and its transpose, rows times `weight`, as left tiles [rank / 16][rows / 32].
   `right`: B as right tiles over all of k; `d` may come in two runs (gate and up). */
static void lora_up_back(const experts_job *job, const scratch *s, const bf16 *const *d, int count, int64_t depth,
                         const bf16 *right, int64_t rank, float scale, const float *weight, int64_t rows, bf16 *u,
                         bf16 *transposed) {
    const int64_t kr = up_to(rank, 32), tiles = up_to(rows, ROWS), kt = up_to(rows, DEPTH);
    memset(u, 0, (size_t)(tiles * kr * TILE) * sizeof(bf16));
    memset(transposed, 0, (size_t)(up_to(rank, 16) * kt * TILE) * sizeof(bf16));
    for (int64_t r = 0; r < up_to(rank, 16); r++)
        for (int64_t t = 0; t < tiles; t++) {
            tile_run runs[2];
            for (int i = 0; i < count; i++)
                runs[i] = (tile_run){{d[i] + t * depth * TILE}, {right + (r * count + i) * depth * TILE}, depth, 0};
            multiply((int)job->amx, s->c, runs, count, 1, 1, 0);
            float factors[ROWS];
            for (int i = 0; i < ROWS; i++) {
                const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(s->c + 16 * i), _mm512_set1_ps(scale));
                _mm512_storeu_ps(s->c + 16 * i, v);
                store_bf16(u + (t * kr + r / 2) * TILE + i * DEPTH + 16 * (r & 1), v);
                factors[i] = weight && t * ROWS + i < rows ? weight[t * ROWS + i] : 1.0f;
            }
            store_transposed(s->c, factors, transposed + (r * kt + t / 2) * TILE + 16 * (t & 1), DEPTH, 16);
        }
}

/* Kept xa [rank, rows] as left tiles [rank / 16][rows / 32], columns times `weight` (NULL: 1). */
static void load_xa(const bf16 *saved, int64_t stride, int64_t rank, int64_t rows, const float *weight, bf16 *out) {
    const int64_t kt = up_to(rows, DEPTH);
    memset(out, 0, (size_t)(up_to(rank, 16) * kt * TILE) * sizeof(bf16));
    for (int64_t r = 0; r < rank; r++)
        for (int64_t t = 0; t < rows; t += 16) {
            const __mmask16 mask = (__mmask16)((1u << least(16, rows - t)) - 1);
            __m512 v = widen(_mm256_maskz_loadu_epi16(mask, saved + r * stride + t));
            if (weight) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + t));
            store_bf16(out + ((r >> 4) * kt + t / 32) * TILE + (r & 15) * DEPTH + (t & 31), v);
        }
}

/* Adds left [rank, rows] times right [rows, 32 columns] to its accumulator; right rows are x[token] or left tiles. */
static void add_gradient(const experts_job *job, const scratch *s, const bf16 *left, int64_t ranks, const bf16 *x,
                         const int32_t *token, int64_t width, int64_t column, int64_t rows, float *c, int keep) {
    const int64_t kt = up_to(rows, DEPTH), depth = width / DEPTH;
    for (int64_t t = 0; t < kt; t++)
        for (int64_t p = 0; p < 16; p++) {
            __m512i pair[2];
            for (int64_t i = 0; i < 2; i++) {
                const int64_t row = t * DEPTH + 2 * p + i;
                if (row >= rows)
                    pair[i] = _mm512_setzero_si512();
                else if (token)
                    pair[i] = load_words(x + token[row] * width + column);
                else
                    pair[i] = load_words(x + ((row / ROWS) * depth + column / DEPTH) * TILE + (row & 15) * DEPTH);
            }
            pair_columns(pair[0], pair[1], s->right + t * TILE + p * 32, s->right + (kt + t) * TILE + p * 32);
        }
    for (int64_t r = 0; r < ranks; r += 2) {
        const tile_run run = {{left + r * kt * TILE, left + (r + 1) * kt * TILE}, {s->right, s->right + kt * TILE}, kt, 0};
        multiply((int)job->amx, c + (r / 2) * 4 * TILE_C, &run, 1, (int)least(2, ranks - r), 2, keep);
    }
}

/* Row r of tile column j in an accumulator block. */
static inline const float *gradient_row(const float *c, int64_t r, int j) {
    return c + ((r >> 5) * 4 + 2 * ((r >> 4) & 1) + j) * TILE_C + (r & 15) * 16;
}

static void store_b_gradient(const float *c, int64_t rank, bf16 *out, int64_t stride) {
    bf16 columns[16 * 16];
    for (int j = 0; j < 2; j++)
        for (int64_t r = 0; r < rank; r += 16) {
            store_transposed(gradient_row(c, r, j), NULL, columns, 16, 16);
            for (int64_t t = 0; t < 16; t++) {
                const __mmask16 mask = (__mmask16)((1u << least(16, rank - r)) - 1);
                _mm256_mask_storeu_epi16(out + (stride == 1 ? 16 * j + t : j + 4 * t) * rank + r, mask,
                                         _mm256_loadu_si256((const __m256i *)(columns + 16 * t)));
            }
        }
}

/* d gate, d up and the activations of rows [t, t + 1] tiles and 32 columns from the gradient of the activation. */
static void activate_back(const experts_job *job, const scratch *s, const float *c, int64_t t, int j, int64_t block,
                          int64_t half, int64_t first, int64_t rows) {
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t row = t * ROWS + i, to = (t * s->ki + 2 * block + half) * TILE + i * DEPTH;
        if (row >= rows) {
            _mm512_storeu_si512(s->dgate + to, _mm512_setzero_si512());
            _mm512_storeu_si512(s->dup + to, _mm512_setzero_si512());
            _mm512_storeu_si512(s->act + to, _mm512_setzero_si512());
            continue;
        }
        const int64_t at = (first + row) * job->inner + block * PANEL + half * 32;
        const __m512 weight = _mm512_set1_ps(job->weight[first + row]), one = _mm512_set1_ps(1.0f);
        __m512 dgate[2], dup[2], act[2], dweight = _mm512_loadu_ps(s->dweight + row * 16);
        for (int v = 0; v < 2; v++) {
            const __m512 gate = load_bf16(job->gate + at + 16 * v), up = load_bf16(job->up + at + 16 * v);
            const __m512 plain = _mm512_loadu_ps(c + (2 * j + v) * TILE_C + i * 16), d = _mm512_mul_ps(plain, weight);
            const __m512 sig = sigmoid_ps(gate), silu = _mm512_mul_ps(gate, sig);
            act[v] = _mm512_mul_ps(silu, up);
            dweight = _mm512_fmadd_ps(plain, act[v], dweight);
            dup[v] = _mm512_mul_ps(d, silu);
            const __m512 slope = _mm512_mul_ps(sig, _mm512_fmadd_ps(gate, _mm512_sub_ps(one, sig), one));
            dgate[v] = _mm512_mul_ps(_mm512_mul_ps(d, up), slope);
        }
        _mm512_storeu_ps(s->dweight + row * 16, dweight);
        _mm512_storeu_si512(s->dgate + to, (__m512i)_mm512_cvtne2ps_pbh(dgate[1], dgate[0]));
        _mm512_storeu_si512(s->dup + to, (__m512i)_mm512_cvtne2ps_pbh(dup[1], dup[0]));
        _mm512_storeu_si512(s->act + to, (__m512i)_mm512_cvtne2ps_pbh(act[1], act[0]));
    }
}

/* A right strip of the backward pass: columns of down; or columns of gate on top of those of up, rows in quad order. */
typedef struct {
    int64_t block, wide;  /* its blocks of 64 columns */
    int64_t first, depth; /* its k-tiles */
    int last;             /* of its columns */
} right_strip;

static int64_t parts_of(int64_t depth) { return up_to(depth, PART); }

static int64_t strips_of(int64_t depth, int64_t columns) { return up_to(columns / PANEL, WIDE) * parts_of(depth); }

static right_strip strip_at(int64_t n, int64_t depth, int64_t columns) {
    const int64_t parts = parts_of(depth), block = n / parts * WIDE, part = n % parts, first = depth * part / parts;
    return (right_strip){block, least(WIDE, columns / PANEL - block), first, depth * (part + 1) / parts - first,
                         part + 1 == parts};
}

/* Strip n, those of down first, into its panel. */
static undoing backward_strip(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t n, int64_t rows,
                              int64_t beside) {
    const int64_t downs = strips_of(s->kh, job->inner), pairs = up_to(rows, ROWS) / 2;
    bf16 *panel = s->panels[n & 1];
    if (n < downs) {
        const right_strip p = strip_at(n, s->kh, job->inner);
        return undo_right(job->base + m[2].codes, s->down_scale, NULL, NULL, job->hidden, job->inner, p.block, p.wide, p.first,
                          p.depth, 0, panel, pairs * beside);
    }
    if (!job->dx || n - downs >= strips_of(2 * s->ki, job->hidden)) return (undoing){.steps = 0};
    const right_strip p = strip_at(n - downs, 2 * s->ki, job->hidden);
    return undo_right(job->base + m[0].codes, s->gate_scale, job->base + m[1].codes, s->up_scale, job->inner, job->hidden,
                      p.block, p.wide, p.first, p.depth, 1, panel, pairs * beside);
}

/* Leaves the first strip of `outer_back` undone. */
static void inner_back(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t first, int64_t rows) {
    const int64_t tiles = up_to(rows, ROWS), strips = strips_of(s->kh, job->inner);
    memset(s->dweight, 0, (size_t)rows * 16 * sizeof(float));
    undoing next = backward_strip(job, s, m, 0, rows, 0);
    undo_rest(&next, RIGHT);
    for (int64_t n = 0; n < strips; n++) {
        const right_strip p = strip_at(n, s->kh, job->inner);
        const int64_t step = 4 * p.wide * TILE;
        next = backward_strip(job, s, m, n + 1, rows, 2 * p.wide * p.depth);
        for (int64_t t = 0; t < tiles; t += 2) {
            const int pair = (int)least(2, tiles - t);
            for (int64_t half = 0; half < 2 * p.wide; half++) {
                const bf16 *right = s->panels[n & 1] + 2 * half * TILE, *left = s->rows + (t * s->kh + p.first) * TILE;
                const bf16 *lora = s->a2_right + (p.block * 4 + 2 * half) * s->kr2 * TILE;
                const tile_run runs[2] = {
                    {{left, left + s->kh * TILE}, {right, right + TILE}, p.depth, step},
                    {{s->u2 + t * s->kr2 * TILE, s->u2 + (t + 1) * s->kr2 * TILE}, {lora, lora + s->kr2 * TILE}, s->kr2, 0}};
                float *c = s->c + (t / 2 * 2 * WIDE + half) * 4 * TILE_C;
                multiply_beside((int)job->amx, c, runs, job->rank2 && p.last ? 2 : 1, pair, 2, p.first > 0, &next, RIGHT);
                for (int j = 0; p.last && j < pair; j++)
                    activate_back(job, s, c, t + j, j, p.block + half / 2, half % 2, first, rows);
            }
        }
        undo_rest(&next, RIGHT);
    }
    for (int64_t i = 0; i < rows; i++)
        job->dweight[first + i] = _mm512_reduce_add_ps(_mm512_loadu_ps(s->dweight + 16 * i));
}

static void outer_back(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t first, int64_t rows) {
    const int64_t tiles = up_to(rows, ROWS), h = job->hidden, ki = s->ki;
    const int64_t before = strips_of(s->kh, job->inner), strips = strips_of(2 * ki, h);
    for (int64_t n = 0; n < strips; n++) {
        const right_strip p = strip_at(n, 2 * ki, h);
        const int64_t step = 4 * p.wide * TILE;
        const int64_t of_gate = least(p.depth, p.first < ki ? ki - p.first : 0), of_up = p.depth - of_gate;
        const int64_t first_up = p.first > ki ? p.first - ki : 0;
        const bf16 *panel = s->panels[(before + n) & 1];
        undoing next = backward_strip(job, s, m, before + n + 1, rows, 2 * p.wide * p.depth);
        for (int64_t t = 0; t < tiles; t += 2) {
            const int pair = (int)least(2, tiles - t);
            const bf16 *gate = s->dgate + (t * ki + p.first) * TILE, *up = s->dup + (t * ki + first_up) * TILE;
            float *c = s->c + t / 2 * 2 * WIDE * 4 * TILE_C;
            for (int64_t half = 0; half < 2 * p.wide; half++) {
                const bf16 *right = panel + 2 * half * TILE, *right_up = right + of_gate * step;
                const bf16 *lora = s->a1_right + (p.block * 4 + 2 * half) * s->kr1 * TILE;
                tile_run runs[3];
                int count = 0;
                if (of_gate)
                    runs[count++] = (tile_run){{gate, gate + ki * TILE}, {right, right + TILE}, of_gate, step};
                if (of_up)
                    runs[count++] = (tile_run){{up, up + ki * TILE}, {right_up, right_up + TILE}, of_up, step};
                if (job->rank1 && p.last)
                    runs[count++] = (tile_run){{s->u1 + t * s->kr1 * TILE, s->u1 + (t + 1) * s->kr1 * TILE},
                                               {lora, lora + s->kr1 * TILE}, s->kr1, 0};
                multiply_beside((int)job->amx, c + half * 4 * TILE_C, runs, count, pair, 2, p.first > 0, &next, RIGHT);
            }
            for (int64_t b = 0; p.last && b < p.wide; b++)
                for (int j = 0; j < pair; j++)
                    for (int64_t i = 0; i < least(ROWS, rows - (t + j) * ROWS); i++) {
                        const float *from = c + b * 8 * TILE_C + 2 * j * TILE_C + i * 16;
                        store_natural(job->dx + (first + (t + j) * ROWS + i) * h + (p.block + b) * PANEL,
                                      _mm512_loadu_ps(from), _mm512_loadu_ps(from + TILE_C),
                                      _mm512_loadu_ps(from + 4 * TILE_C), _mm512_loadu_ps(from + 5 * TILE_C));
                    }
        }
        undo_rest(&next, RIGHT);
    }
}

static void backward_chunk(const experts_job *job, const scratch *s, const expert_matrix *m, int64_t first, int64_t rows,
                           int64_t of_expert, int64_t in_expert) {
    const int64_t h = job->hidden, inner = job->inner;
    const int64_t left = (s->r1 > s->r2 ? s->r1 : s->r2) * (s->chunk / DEPTH) * TILE;
    const int keep = in_expert > 0;
    const float *weight = job->weight + first;
    bf16 *u1_left = s->left, *u2_left = s->left + left, *xa1_left = s->left + 2 * left, *xa2_left = s->left + 3 * left;
    gather_left(job->dout, h, job->token + first, rows, s->rows);
    if (job->rank2) {
        const bf16 *d[1] = {s->rows};
        lora_up_back(job, s, d, 1, s->kh, s->b2, job->rank2, (float)job->scale2, weight, rows, s->u2, u2_left);
        load_xa(job->xa2 + (first - in_expert) * job->rank2 + in_expert, of_expert, job->rank2, rows, weight, xa2_left);
        for (int64_t n = 0; n < h / 32; n++)
            add_gradient(job, s, xa2_left, s->r2, s->rows, NULL, h, 32 * n, rows,
                         s->grad_b2 + n * up_to(s->r2, 2) * 4 * TILE_C, keep);
    }
    inner_back(job, s, m, first, rows);
    if (job->rank2)
        for (int64_t n = 0; n < inner / 32; n++)
            add_gradient(job, s, u2_left, s->r2, s->act, NULL, inner, 32 * n, rows,
                         s->grad_a2 + n * up_to(s->r2, 2) * 4 * TILE_C, keep);
    if (job->rank1) {
        const bf16 *d[2] = {s->dgate, s->dup};
        lora_up_back(job, s, d, 2, s->ki, s->b1, job->rank1, (float)job->scale1, NULL, rows, s->u1, u1_left);
        load_xa(job->xa1 + (first - in_expert) * job->rank1 + in_expert, of_expert, job->rank1, rows, NULL, xa1_left);
        for (int64_t n = 0; n < h / 32; n++)
            add_gradient(job, s, u1_left, s->r1, job->x, job->token + first, h, 32 * n, rows,
                         s->grad_a1 + n * up_to(s->r1, 2) * 4 * TILE_C, keep);
        for (int64_t n = 0; n < 2 * inner / 32; n++)
            add_gradient(job, s, xa1_left, s->r1, n < inner / 32 ? s->dgate : s->dup, NULL, inner, 32 * (n % (inner / 32)),
                         rows, s->grad_b1 + n * up_to(s->r1, 2) * 4 * TILE_C, keep);
    }
    if (job->dx) outer_back(job, s, m, first, rows);
}

static void store_gradients(const experts_job *job, const scratch *s, int64_t e) {
    const int64_t h = job->hidden, inner = job->inner, r1 = job->rank1, r2 = job->rank2;
    const int64_t step1 = up_to(s->r1, 2) * 4 * TILE_C, step2 = up_to(s->r2, 2) * 4 * TILE_C;
    if (r1) {
        for (int64_t n = 0; n < h / 32; n++)
            for (int64_t r = 0; r < r1; r++)
                for (int j = 0; j < 2; j++)
                    store_bf16(job->da1 + (e * r1 + r) * h + 32 * n + 16 * j,
                               _mm512_loadu_ps(gradient_row(s->grad_a1 + n * step1, r, j)));
        for (int64_t n = 0; n < 2 * inner / 32; n++) /* columns in quad order: two of the four rows of each quad */
            store_b_gradient(s->grad_b1 + n * step1, r1, job->db1 + (e * 2 * inner + n / 2 * PANEL + 2 * (n & 1)) * r1, 4);
    }
    if (r2) {
        for (int64_t n = 0; n < h / 32; n++)
            store_b_gradient(s->grad_b2 + n * step2, r2, job->db2 + (e * h + 32 * n) * r2, 1);
        for (int64_t b = 0; b < inner / PANEL; b++)
            for (int64_t r = 0; r < r2; r++) {
                const float *first = s->grad_a2 + 2 * b * step2, *second = first + step2;
                store_natural(job->da2 + (e * r2 + r) * inner + b * PANEL, _mm512_loadu_ps(gradient_row(first, r, 0)),
                              _mm512_loadu_ps(gradient_row(first, r, 1)), _mm512_loadu_ps(gradient_row(second, r, 0)),
                              _mm512_loadu_ps(gradient_row(second, r, 1)));
            }
    }
}

static void clear_gradients(const experts_job *job, int64_t e) {
    const size_t h = (size_t)job->hidden, inner = (size_t)job->inner, r1 = (size_t)job->rank1, r2 = (size_t)job->rank2;
    if (r1) {
        memset(job->da1 + (size_t)e * r1 * h, 0, r1 * h * sizeof(bf16));
        memset(job->db1 + (size_t)e * r1 * 2 * inner, 0, r1 * 2 * inner * sizeof(bf16));
    }
    if (r2) {
        memset(job->da2 + (size_t)e * r2 * inner, 0, r2 * inner * sizeof(bf16));
        memset(job->db2 + (size_t)e * r2 * h, 0, r2 * h * sizeof(bf16));
    }
}

static int backward_range(void *data, int64_t begin, int64_t end) {
    const experts_job *job = data;
    scratch s;
    if (get_scratch(job, 1, &s)) return 1;
    tiles_begin((int)job->amx);
    for (int64_t e = begin; e < end; e++) {
        const int64_t first = job->offsets[e], rows = job->offsets[e + 1] - first;
        if (!rows) {
            clear_gradients(job, e);
            continue;
        }
        const expert_matrix *m = job->matrices + 3 * e;
        load_scales(job, m, s.gate_scale);
        load_scales(job, m + 1, s.up_scale);
        load_scales(job, m + 2, s.down_scale);
        if (job->rank1) {
            const bf16 *b1 = job->b1 + e * 2 * job->inner * job->rank1;
            pack_a_right(job->a1 + e * job->rank1 * job->hidden, job->rank1, job->hidden, s.a1_right);
            pack_b_right(b1, job->inner, job->rank1, 1, s.b1, 2 * s.ki, 0);
            pack_b_right(b1 + job->inner * job->rank1, job->inner, job->rank1, 1, s.b1, 2 * s.ki, s.ki);
        }
        if (job->rank2) {
            pack_a_right(job->a2 + e * job->rank2 * job->inner, job->rank2, job->inner, s.a2_right);
            pack_b_right(job->b2 + e * job->hidden * job->rank2, job->hidden, job->rank2, 0, s.b2, s.kh, 0);
        }
        for (int64_t at = 0; at < rows; at += s.chunk)
            backward_chunk(job, &s, m, first + at, least(s.chunk, rows - at), rows, at);
        store_gradients(job, &s, e);
    }
    tiles_end((int)job->amx);
    return 0;
}

/* ---- sums over a token's experts ---------------------------------------------------------------------------------- */

typedef struct {
    const bf16 *y;
    const int32_t *slot;
    const float *weight; /* [tokens, per_token], or NULL for 1 */
    bf16 *out;
    int64_t hidden, per_token;
} combine_job;

static int combine_range(void *data, int64_t begin, int64_t end) {
    const combine_job *job = data;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < job->hidden; h += 32) {
            __m512 low = _mm512_setzero_ps(), high = low;
            for (int64_t k = 0; k < job->per_token; k++) {
                const int64_t slot = job->slot[t * job->per_token + k];
                if (slot < 0) continue; /* another rank's expert */
                const bf16 *y = job->y + slot * job->hidden + h;
                const __m512 weight = _mm512_set1_ps(job->weight ? job->weight[t * job->per_token + k] : 1.0f);
                low = _mm512_fmadd_ps(load_bf16(y), weight, low);
                high = _mm512_fmadd_ps(load_bf16(y + 16), weight, high);
            }
            _mm512_storeu_si512(job->out + t * job->hidden + h, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    return 0;
}

int lamella_experts_built(void) { return 1; }

int64_t lamella_experts_scratch(const experts_job *job, int backward) {
    scratch s;
    return (int64_t)lay_out(job, backward, &s, NULL);
}

int lamella_experts_forward(const experts_job *job) {
    return run_parallel(forward_range, (void *)job, job->experts, 1, (int)job->threads);
}

int lamella_experts_backward(const experts_job *job) {
    return run_parallel(backward_range, (void *)job, job->experts, 1, (int)job->threads);
}

int lamella_experts_combine(const bf16 *y, const int32_t *slot, const float *weight, bf16 *out, int64_t tokens,
                            int64_t hidden, int64_t per_token, int threads) {
    combine_job job = {y, slot, weight, out, hidden, per_token};
    return run_parallel(combine_range, &job, tokens, 32, threads);
}

#else
int lamella_experts_built(void) { return 0; }
int64_t lamella_experts_scratch(const experts_job *job, int backward) { return job == NULL || backward; }
int lamella_experts_forward(const experts_job *job) { return job == NULL; }
int lamella_experts_backward(const experts_job *job) { return job == NULL; }
int lamella_experts_combine(const bf16 *y, const int32_t *slot, const float *weight, bf16 *out, int64_t tokens,
                            int64_t hidden, int64_t per_token, int threads) {
    return y == NULL || slot == NULL || weight == NULL || out == NULL || tokens + hidden + per_token + threads < 0;
}
#endif
