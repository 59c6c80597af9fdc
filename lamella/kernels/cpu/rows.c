/* The row-wise parts of a decoder layer, AVX-512 with bf16 conversions: RMS norm, per-head norm with rotary
   positions, gated activation, cross-entropy; forward and backward. Values are bf16 or fp32 in memory and fp32 in
   registers; every row is one thread's, summed in a fixed order, so the bits do not depend on the number of threads.

   Backward passes take what forward took, not its result: less is kept. Outputs may lie on their inputs. */
#include "kernels.h"
#include "parallel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512BF16__)
#include <math.h>
#include "vectors.h"

enum { GRAIN_VALUES = 1 << 15 }; /* least work worth a thread */
enum { HEAD_MAX = 1024 };        /* largest head, on the stack */
enum { LOGITS_BLOCK = 4096 };    /* logits whose maximum is taken at a time */
enum { SILU = 0, GELU_TANH = 1, GELU = 2 };

int lamella_rows_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

/* ---- RMS norm: y = x * rstd * (w + offset), rstd = 1 / sqrt(mean(x^2) + eps) ------------------------------------ */

typedef struct {
    const void *x, *w, *dy;
    void *out;
    float *rstd;
    float eps, offset;
    int64_t width;
    int dtype, w_dtype;
} norm_job;

INLINE float row_rstd(const void *x, int dtype, int64_t width, float eps) {
    __m512 s0 = _mm512_setzero_ps(), s1 = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 32) {
        const __m512 a = load(x, dtype, i, lanes(width - i));
        const __m512 b = load(x, dtype, i + 16, width > i + 16 ? lanes(width - i - 16) : 0);
        s0 = _mm512_fmadd_ps(a, a, s0);
        s1 = _mm512_fmadd_ps(b, b, s1);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / (float)width + eps);
}

INLINE void norm_row(const norm_job *job, int64_t row, int dtype, int w_dtype) {
    const int64_t width = job->width;
    const void *x = at(job->x, dtype, row * width);
    void *y = at_out(job->out, dtype, row * width);
    const float scale = row_rstd(x, dtype, width, job->eps);
    job->rstd[row] = scale;
    const __m512 rstd = _mm512_set1_ps(scale), offset = _mm512_set1_ps(job->offset);
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 m = lanes(width - i);
        const __m512 w = _mm512_add_ps(load(job->w, w_dtype, i, m), offset);
        store(y, dtype, i, m, _mm512_mul_ps(_mm512_mul_ps(load(x, dtype, i, m), rstd), w));
    }
}

/* dx = rstd * (g - xhat * mean(g * xhat)), g = dy * (w + offset), xhat = x * rstd */
INLINE void norm_row_backward(const norm_job *job, int64_t row, int dtype, int w_dtype) {
    const int64_t width = job->width;
    const void *x = at(job->x, dtype, row * width), *dy = at(job->dy, dtype, row * width);
    void *dx = at_out(job->out, dtype, row * width);
    const float scale = job->rstd[row];
    const __m512 offset = _mm512_set1_ps(job->offset), rstd = _mm512_set1_ps(scale);
    __m512 dot = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 m = lanes(width - i);
        const __m512 w = _mm512_add_ps(load(job->w, w_dtype, i, m), offset);
        dot = _mm512_fmadd_ps(_mm512_mul_ps(load(dy, dtype, i, m), w), load(x, dtype, i, m), dot);
    }
    const __m512 pull = _mm512_set1_ps(_mm512_reduce_add_ps(dot) * scale * scale / (float)width);
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 m = lanes(width - i);
        const __m512 w = _mm512_add_ps(load(job->w, w_dtype, i, m), offset);
        const __m512 g = _mm512_mul_ps(load(dy, dtype, i, m), w);
        store(dx, dtype, i, m, _mm512_mul_ps(rstd, _mm512_fnmadd_ps(load(x, dtype, i, m), pull, g)));
    }
}

#define EACH_DTYPE(call, dtype, w_dtype)                       \
    do {                                                       \
        if ((dtype) == BF16 && (w_dtype) == BF16) {            \
            call(BF16, BF16);                                  \
        } else if ((dtype) == BF16) {                          \
            call(BF16, FP32);                                  \
        } else if ((w_dtype) == BF16) {                        \
            call(FP32, BF16);                                  \
        } else {                                               \
            call(FP32, FP32);                                  \
        }                                                      \
    } while (0)

static int norm_range(void *data, int64_t begin, int64_t end) {
    const norm_job *job = data;
#define CALL(d, w) \
    for (int64_t row = begin; row < end; row++) norm_row(job, row, d, w)
    EACH_DTYPE(CALL, job->dtype, job->w_dtype);
#undef CALL
    return 0;
}

static int norm_backward_range(void *data, int64_t begin, int64_t end) {
    const norm_job *job = data;
#define CALL(d, w) \
    for (int64_t row = begin; row < end; row++) norm_row_backward(job, row, d, w)
    EACH_DTYPE(CALL, job->dtype, job->w_dtype);
#undef CALL
    return 0;
}

static int64_t grain_rows(int64_t width) { return (GRAIN_VALUES + width - 1) / width; }

void lamella_rms_norm(const void *x, const void *w, float eps, float offset, void *y, float *rstd, int64_t rows,
                      int64_t width, int dtype, int w_dtype, int threads) {
    norm_job job = {x, w, NULL, y, rstd, eps, offset, width, dtype, w_dtype};
    run_parallel(norm_range, &job, rows, grain_rows(width), threads);
}

void lamella_rms_norm_backward(const void *dy, const void *x, const void *w, float offset, const float *rstd, void *dx,
                               int64_t rows, int64_t width, int dtype, int w_dtype, int threads) {
    norm_job job = {x, w, dy, dx, (float *)rstd, 0.0f, offset, width, dtype, w_dtype};
    run_parallel(norm_backward_range, &job, rows, grain_rows(width), threads);
}

/* ---- heads: norm over the head (or none), then rotation of its first `rotary` values in halves ------------------ */

typedef struct {
    void *data;
    int64_t token, head; /* strides in values; a head's values are contiguous */
} heads_view;

typedef struct {
    heads_view x, dy, out;
    const void *w; /* NULL: no norm */
    float eps, offset;
    const void *cos, *sin; /* [tokens, rotary] */
    int64_t heads, size, rotary;
    int dtype, w_dtype, table_dtype;
} rotate_job;

INLINE void *head_of(heads_view v, int dtype, int64_t t, int64_t h) {
    return at_out(v.data, dtype, t * v.token + h * v.head);
}

/* Values i .. i + 15 of a head, normed where there is a norm. */
INLINE __m512 normed(const rotate_job *job, const void *x, int dtype, int wd, int64_t i, __mmask16 m, int norm,
                     __m512 rstd) {
    const __m512 v = load(x, dtype, i, m);
    if (!norm) return v;
    const __m512 w = _mm512_add_ps(load(job->w, wd, i, m), _mm512_set1_ps(job->offset));
    return _mm512_mul_ps(_mm512_mul_ps(v, rstd), w);
}

INLINE void rotate_head(const rotate_job *job, int64_t t, int64_t h, int dtype, int wd, int td, int norm) {
    const int64_t size = job->size, rotary = job->rotary, half = rotary / 2;
    const void *x = head_of(job->x, dtype, t, h);
    void *y = head_of(job->out, dtype, t, h);
    const __m512 rstd = _mm512_set1_ps(norm ? row_rstd(x, dtype, size, job->eps) : 1.0f);
    const void *cos = at(job->cos, td, t * rotary), *sin = at(job->sin, td, t * rotary);
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 m = lanes(half - i);
        const __m512 a = normed(job, x, dtype, wd, i, m, norm, rstd), b = normed(job, x, dtype, wd, half + i, m, norm, rstd);
        const __m512 low = _mm512_mul_ps(b, load(sin, td, i, m)), high = _mm512_mul_ps(a, load(sin, td, half + i, m));
        store(y, dtype, i, m, _mm512_fmsub_ps(a, load(cos, td, i, m), low));
        store(y, dtype, half + i, m, _mm512_fmadd_ps(b, load(cos, td, half + i, m), high));
    }
    for (int64_t i = rotary; i < size; i += 16) {
        const __mmask16 m = lanes(size - i);
        store(y, dtype, i, m, normed(job, x, dtype, wd, i, m, norm, rstd));
    }
}

/* Without a norm: straight to dx. With one: g = (rotated back dy) * w to the stack, then as in a row's norm. */
INLINE void rotate_head_backward(const rotate_job *job, int64_t t, int64_t h, int dtype, int wd, int td, int norm) {
    const int64_t size = job->size, rotary = job->rotary, half = rotary / 2;
    const void *dy = head_of(job->dy, dtype, t, h);
    void *dx = head_of(job->out, dtype, t, h);
    float grad[HEAD_MAX];
    void *to = norm ? (void *)grad : dx;
    const int to_dtype = norm ? FP32 : dtype;
    const void *cos = at(job->cos, td, t * rotary), *sin = at(job->sin, td, t * rotary);
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 m = lanes(half - i);
        const __m512 a = load(dy, dtype, i, m), b = load(dy, dtype, half + i, m);
        const __m512 low = _mm512_mul_ps(b, load(sin, td, half + i, m)), high = _mm512_mul_ps(a, load(sin, td, i, m));
        store(to, to_dtype, i, m, _mm512_fmadd_ps(a, load(cos, td, i, m), low));
        store(to, to_dtype, half + i, m, _mm512_fmsub_ps(b, load(cos, td, half + i, m), high));
    }
    for (int64_t i = rotary; i < size; i += 16) {
        const __mmask16 m = lanes(size - i);
        store(to, to_dtype, i, m, load(dy, dtype, i, m));
    }
    if (!norm) return;
    const void *x = head_of(job->x, dtype, t, h);
    const float scale = row_rstd(x, dtype, size, job->eps);
    __m512 dot = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = lanes(size - i);
        const __m512 w = _mm512_add_ps(load(job->w, wd, i, m), _mm512_set1_ps(job->offset));
        const __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, grad + i), w);
        dot = _mm512_fmadd_ps(g, load(x, dtype, i, m), dot);
        _mm512_mask_storeu_ps(grad + i, m, g);
    }
    const __m512 pull = _mm512_set1_ps(_mm512_reduce_add_ps(dot) * scale * scale / (float)size);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = lanes(size - i);
        const __m512 g = _mm512_maskz_loadu_ps(m, grad + i);
        store(dx, dtype, i, m,
              _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_fnmadd_ps(load(x, dtype, i, m), pull, g)));
    }
}

static int rotate_range(void *data, int64_t begin, int64_t end) {
    const rotate_job *job = data;
    const int alike = job->dtype == BF16 && job->w_dtype == BF16 && job->table_dtype == BF16;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < job->heads; h++) {
            if (alike && job->w)
                rotate_head(job, t, h, BF16, BF16, BF16, 1);
            else if (alike)
                rotate_head(job, t, h, BF16, BF16, BF16, 0);
            else
                rotate_head(job, t, h, job->dtype, job->w_dtype, job->table_dtype, job->w != NULL);
        }
    return 0;
}

static int rotate_backward_range(void *data, int64_t begin, int64_t end) {
    const rotate_job *job = data;
    const int alike = job->dtype == BF16 && job->w_dtype == BF16 && job->table_dtype == BF16;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < job->heads; h++) {
            if (alike && job->w)
                rotate_head_backward(job, t, h, BF16, BF16, BF16, 1);
            else if (alike)
                rotate_head_backward(job, t, h, BF16, BF16, BF16, 0);
            else
                rotate_head_backward(job, t, h, job->dtype, job->w_dtype, job->table_dtype, job->w != NULL);
        }
    return 0;
}

int lamella_head_max(void) { return HEAD_MAX; }

void lamella_rotate(void *x, int64_t x_token, int64_t x_head, const void *w, float eps, float offset, const void *cos,
                    const void *sin, int64_t rotary, void *y, int64_t y_token, int64_t y_head, int64_t tokens,
                    int64_t heads, int64_t size, int dtype, int w_dtype, int table_dtype, int threads) {
    rotate_job job = {{x, x_token, x_head}, {NULL, 0, 0}, {y, y_token, y_head}, w, eps, offset, cos, sin, heads, size,
                      rotary, dtype, w_dtype, table_dtype};
    run_parallel(rotate_range, &job, tokens, grain_rows(heads * size), threads);
}

void lamella_rotate_backward(void *dy, int64_t dy_token, int64_t dy_head, void *x, int64_t x_token, int64_t x_head,
                             const void *w, float eps, float offset, const void *cos, const void *sin, int64_t rotary,
                             void *dx, int64_t dx_token, int64_t dx_head, int64_t tokens, int64_t heads, int64_t size,
                             int dtype, int w_dtype, int table_dtype, int threads) {
    rotate_job job = {{x, x_token, x_head}, {dy, dy_token, dy_head}, {dx, dx_token, dx_head}, w, eps, offset, cos, sin,
                      heads, size, rotary, dtype, w_dtype, table_dtype};
    run_parallel(rotate_backward_range, &job, tokens, grain_rows(heads * size), threads);
}

/* ---- gated activation: h = act(gate) * up ------------------------------------------------------------------------ */

typedef struct {
    const void *gate, *up, *dh;
    void *h, *dgate, *dup;
    int64_t gate_row, up_row, width; /* dgate and dup have the strides of gate and up; dh and h are contiguous */
    int dtype, kind;
} gated_job;

typedef struct {
    __m512 value, slope;
} activation;

INLINE __m512 sigmoid16(__m512 v) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), v))));
}

/* act(g) and act'(g). gelu: Abramowitz and Stegun 7.1.26, |error of erf| <= 1.5e-7. */
INLINE activation activate(__m512 g, int kind) {
    const __m512 one = _mm512_set1_ps(1.0f);
    if (kind == SILU) {
        const __m512 s = sigmoid16(g), value = _mm512_mul_ps(g, s);
        return (activation){value, _mm512_fmadd_ps(value, _mm512_sub_ps(one, s), s)};
    }
    const __m512 square = _mm512_mul_ps(g, g);
    if (kind == GELU_TANH) { /* g * (1 + tanh(u)) / 2 = g * sigmoid(2u) */
        const __m512 root = _mm512_set1_ps(1.5957691216057308f), cubic = _mm512_set1_ps(0.044715f);
        const __m512 inner = _mm512_fmadd_ps(cubic, square, one);
        const __m512 s = sigmoid16(_mm512_mul_ps(_mm512_mul_ps(root, g), inner)), value = _mm512_mul_ps(g, s);
        const __m512 rise = _mm512_mul_ps(root, _mm512_fmadd_ps(_mm512_set1_ps(3 * 0.044715f), square, one));
        return (activation){value, _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_sub_ps(one, s)), rise, s)};
    }
    const __m512 bell = exp16(_mm512_mul_ps(square, _mm512_set1_ps(-0.5f)));
    const __m512 z = _mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(0.70710678f));
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(p, t), bell), _mm512_set1_ps(0.5f));
    const __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 phi = _mm512_mask_mov_ps(_mm512_sub_ps(one, tail), negative, tail);
    const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(g, bell), _mm512_set1_ps(0.3989422804f), phi);
    return (activation){_mm512_mul_ps(g, phi), slope};
}

INLINE void gated_row(const gated_job *job, int64_t row, int dtype, int kind) {
    const void *gate = at(job->gate, dtype, row * job->gate_row), *up = at(job->up, dtype, row * job->up_row);
    void *h = at_out(job->h, dtype, row * job->width);
    for (int64_t i = 0; i < job->width; i += 16) {
        const __mmask16 m = lanes(job->width - i);
        store(h, dtype, i, m, _mm512_mul_ps(activate(load(gate, dtype, i, m), kind).value, load(up, dtype, i, m)));
    }
}

INLINE void gated_row_backward(const gated_job *job, int64_t row, int dtype, int kind) {
    const void *gate = at(job->gate, dtype, row * job->gate_row), *up = at(job->up, dtype, row * job->up_row);
    const void *dh = at(job->dh, dtype, row * job->width);
    void *dgate = at_out(job->dgate, dtype, row * job->gate_row), *dup = at_out(job->dup, dtype, row * job->up_row);
    void *h = job->h ? at_out(job->h, dtype, row * job->width) : NULL;
    for (int64_t i = 0; i < job->width; i += 16) {
        const __mmask16 m = lanes(job->width - i);
        const activation a = activate(load(gate, dtype, i, m), kind);
        const __m512 u = load(up, dtype, i, m), d = load(dh, dtype, i, m);
        if (h) store(h, dtype, i, m, _mm512_mul_ps(a.value, u));
        store(dgate, dtype, i, m, _mm512_mul_ps(_mm512_mul_ps(d, u), a.slope));
        store(dup, dtype, i, m, _mm512_mul_ps(d, a.value));
    }
}

#define EACH_KIND(row_function)                                                                 \
    for (int64_t row = begin; row < end; row++) {                                               \
        if (job->dtype == BF16 && job->kind == SILU) row_function(job, row, BF16, SILU);        \
        else if (job->dtype == BF16 && job->kind == GELU_TANH) row_function(job, row, BF16, GELU_TANH); \
        else if (job->dtype == BF16) row_function(job, row, BF16, GELU);                        \
        else if (job->kind == SILU) row_function(job, row, FP32, SILU);                         \
        else if (job->kind == GELU_TANH) row_function(job, row, FP32, GELU_TANH);               \
        else row_function(job, row, FP32, GELU);                                                \
    }

static int gated_range(void *data, int64_t begin, int64_t end) {
    const gated_job *job = data;
    EACH_KIND(gated_row)
    return 0;
}

static int gated_backward_range(void *data, int64_t begin, int64_t end) {
    const gated_job *job = data;
    EACH_KIND(gated_row_backward)
    return 0;
}

void lamella_gated(const void *gate, int64_t gate_row, const void *up, int64_t up_row, void *h, int64_t rows,
                   int64_t width, int kind, int dtype, int threads) {
    gated_job job = {gate, up, NULL, h, NULL, NULL, gate_row, up_row, width, dtype, kind};
    run_parallel(gated_range, &job, rows, grain_rows(width), threads);
}

/* h: NULL, or where the product goes again. */
void lamella_gated_backward(const void *dh, const void *gate, int64_t gate_row, const void *up, int64_t up_row,
                            void *dgate, void *dup, void *h, int64_t rows, int64_t width, int kind, int dtype,
                            int threads) {
    gated_job job = {gate, up, dh, h, dgate, dup, gate_row, up_row, width, dtype, kind};
    run_parallel(gated_backward_range, &job, rows, grain_rows(width), threads);
}

/* ---- cross-entropy: loss of a row, and its gradient in the place of the logits ----------------------------------- */

typedef struct {
    void *logits;
    const int64_t *targets;
    float scale;
    double *loss;
    int64_t vocabulary;
    int dtype;
} entropy_job;

INLINE void entropy_row(const entropy_job *job, int64_t row, int dtype) {
    const int64_t n = job->vocabulary, target = job->targets[row];
    void *x = at_out(job->logits, dtype, row * n);
    const float wanted = load_value(x, dtype, target);
    float largest = -INFINITY;
    double sum = 0; /* of exp(x - largest) over the blocks seen */
    for (int64_t first = 0; first < n; first += LOGITS_BLOCK) {
        const int64_t stop = first + LOGITS_BLOCK < n ? first + LOGITS_BLOCK : n;
        __m512 top = _mm512_set1_ps(-INFINITY);
        for (int64_t i = first; i < stop; i += 16) {
            const __mmask16 m = lanes(stop - i);
            top = _mm512_mask_max_ps(top, m, top, load(x, dtype, i, m));
        }
        const float block = _mm512_reduce_max_ps(top);
        if (block > largest) {
            sum *= exp((double)largest - (double)block);
            largest = block;
        }
        const __m512 shift = _mm512_set1_ps(largest == -INFINITY ? 0.0f : largest);
        __m512 s = _mm512_setzero_ps();
        for (int64_t i = first; i < stop; i += 16) {
            const __mmask16 m = lanes(stop - i);
            s = _mm512_mask_add_ps(s, m, s, exp16(_mm512_sub_ps(load(x, dtype, i, m), shift)));
        }
        sum += (double)_mm512_reduce_add_ps(s);
    }
    job->loss[row] = (double)largest + log(sum) - (double)wanted;
    const __m512 shift = _mm512_set1_ps(largest), factor = _mm512_set1_ps((float)((double)job->scale / sum));
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = lanes(n - i);
        store(x, dtype, i, m, _mm512_mul_ps(exp16(_mm512_sub_ps(load(x, dtype, i, m), shift)), factor));
    }
    /* -scale * (1 - p), with p in full precision */
    const double p = exp((double)wanted - (double)largest) / sum;
    const float at_target = (float)((double)job->scale * (p - 1.0));
    if (dtype == FP32)
        ((float *)x)[target] = at_target;
    else
        ((uint16_t *)x)[target] = float_to_bf16(at_target);
}

static int entropy_range(void *data, int64_t begin, int64_t end) {
    const entropy_job *job = data;
    for (int64_t row = begin; row < end; row++) {
        if (job->dtype == BF16)
            entropy_row(job, row, BF16);
        else
            entropy_row(job, row, FP32);
    }
    return 0;
}

/* Targets lie in [0, vocabulary): checked by the caller. */
void lamella_cross_entropy(void *logits, const int64_t *targets, float scale, double *loss, int64_t rows,
                           int64_t vocabulary, int dtype, int threads) {
    entropy_job job = {logits, targets, scale, loss, vocabulary, dtype};
    run_parallel(entropy_range, &job, rows, grain_rows(vocabulary), threads);
}

/* Largest |x| as a float: NaN where a value is NaN, for its bits are the largest. */
typedef struct {
    const void *x;
    int dtype;
    int64_t n, part; /* values per item */
    float *largest;  /* per item */
} peak_job;

static int peak_range(void *data, int64_t begin, int64_t end) {
    const peak_job *job = data;
    for (int64_t p = begin; p < end; p++) {
        const int64_t first = p * job->part, stop = first + job->part < job->n ? first + job->part : job->n;
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        __m512i top = _mm512_setzero_si512();
        for (int64_t i = first; i < stop; i += 16) {
            const __m512 v = load(job->x, job->dtype, i, lanes(stop - i));
            top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(v), magnitude));
        }
        job->largest[p] = bits_to_float((uint32_t)_mm512_reduce_max_epi32(top));
    }
    return 0;
}

float lamella_peak(const void *x, int64_t n, int dtype, int threads) {
    enum { PARTS = 64 };
    float largest[PARTS] = {0};
    const int64_t part = (n + PARTS - 1) / PARTS;
    if (!n) return 0.0f;
    peak_job job = {x, dtype, n, part, largest};
    const int64_t parts = (n + part - 1) / part;
    run_parallel(peak_range, &job, parts, grain_rows(part), threads);
    uint32_t top = 0;
    for (int64_t p = 0; p < parts; p++) {
        const uint32_t bits = float_to_bits(largest[p]);
        top = bits > top ? bits : top;
    }
    return bits_to_float(top);
}

#else

int lamella_rows_supported(void) { return 0; }

#endif
