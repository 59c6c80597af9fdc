/* LoRA of several adapters on a few rows: y = scale (x A^T) B^T, each row with the pair of its own adapter.

   A task is a row. What a row gets is summed in fp32 in a fixed order, so its bits depend neither on threads nor on the
   other rows. B is [O, r] with r or O contiguous; with O contiguous (a transposed B) a row of B is added sixteen outputs at
   a time. */
#include "kernels.h"
#include "parallel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512BF16__)
#include "vectors.h"

enum { RANK_MAX = 1024 };

typedef struct {
    const void *a, *b; /* [r, I] contiguous; element (o, k) of B at o * b_out + k * b_rank. a NULL: zeros */
    int64_t rank, b_out, b_rank;
    float scale;
} lora_run;

typedef struct {
    const void *x;
    void *y;
    const lora_run *runs;
    const int32_t *run_of; /* [rows] */
    int64_t x_row, y_row, inputs, outputs;
    int dtype;
} lora_job;

INLINE void low(const char *x, const char *a, int64_t inputs, int64_t rank, float scale, float *xa, int dtype) {
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) {
        __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        for (int64_t i = 0; i < inputs; i += 16) {
            const __mmask16 m = lanes(inputs - i);
            const __m512 v = load(x, dtype, i, m);
            s0 = _mm512_fmadd_ps(v, load(a, dtype, k * inputs + i, m), s0);
            s1 = _mm512_fmadd_ps(v, load(a, dtype, (k + 1) * inputs + i, m), s1);
            s2 = _mm512_fmadd_ps(v, load(a, dtype, (k + 2) * inputs + i, m), s2);
            s3 = _mm512_fmadd_ps(v, load(a, dtype, (k + 3) * inputs + i, m), s3);
        }
        xa[k] = _mm512_reduce_add_ps(s0) * scale;
        xa[k + 1] = _mm512_reduce_add_ps(s1) * scale;
        xa[k + 2] = _mm512_reduce_add_ps(s2) * scale;
        xa[k + 3] = _mm512_reduce_add_ps(s3) * scale;
    }
    for (; k < rank; k++) {
        __m512 s = _mm512_setzero_ps();
        for (int64_t i = 0; i < inputs; i += 16) {
            const __mmask16 m = lanes(inputs - i);
            s = _mm512_fmadd_ps(load(x, dtype, i, m), load(a, dtype, k * inputs + i, m), s);
        }
        xa[k] = _mm512_reduce_add_ps(s) * scale;
    }
}

INLINE void high(const lora_run *run, const float *xa, char *y, int64_t outputs, int dtype) {
    const char *b = run->b;
    if (run->b_out == 1) {
        int64_t o = 0;
        for (; o + 64 <= outputs; o += 64) {
            __m512 s[4];
            for (int c = 0; c < 4; c++) s[c] = _mm512_setzero_ps();
            for (int64_t k = 0; k < run->rank; k++) {
                const __m512 w = _mm512_set1_ps(xa[k]);
                for (int c = 0; c < 4; c++)
                    s[c] = _mm512_fmadd_ps(w, load(b, dtype, k * run->b_rank + o + 16 * c, 0xffff), s[c]);
            }
            for (int c = 0; c < 4; c++) store(y, dtype, o + 16 * c, 0xffff, s[c]);
        }
        for (; o < outputs; o += 16) {
            const __mmask16 m = lanes(outputs - o);
            __m512 s = _mm512_setzero_ps();
            for (int64_t k = 0; k < run->rank; k++)
                s = _mm512_fmadd_ps(_mm512_set1_ps(xa[k]), load(b, dtype, k * run->b_rank + o, m), s);
            store(y, dtype, o, m, s);
        }
        return;
    }
    for (int64_t o = 0; o < outputs; o += 16) {
        float found[16];
        const int64_t n = outputs - o < 16 ? outputs - o : 16;
        for (int64_t j = 0; j < n; j++) {
            __m512 s = _mm512_setzero_ps();
            for (int64_t k = 0; k < run->rank; k += 16) {
                const __mmask16 m = lanes(run->rank - k);
                s = _mm512_fmadd_ps(load(xa, FP32, k, m), load(b, dtype, (o + j) * run->b_out + k, m), s);
            }
            found[j] = _mm512_reduce_add_ps(s);
        }
        store(y, dtype, o, lanes(n), load(found, FP32, 0, lanes(n)));
    }
}

INLINE void row(const lora_job *job, int64_t n, int dtype) {
    const lora_run *run = job->runs + job->run_of[n];
    char *y = at_out(job->y, dtype, n * job->y_row);
    if (!run->a) {
        for (int64_t o = 0; o < job->outputs; o += 16) store(y, dtype, o, lanes(job->outputs - o), _mm512_setzero_ps());
        return;
    }
    float xa[RANK_MAX];
    low(at(job->x, dtype, n * job->x_row), run->a, job->inputs, run->rank, run->scale, xa, dtype);
    high(run, xa, y, job->outputs, dtype);
}

static int work(void *given, int64_t begin, int64_t end) {
    const lora_job *job = given;
    for (int64_t n = begin; n < end; n++) {
        if (job->dtype == FP32)
            row(job, n, FP32);
        else
            row(job, n, BF16);
    }
    return 0;
}

int lamella_lora_rows_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

int lamella_lora_rows(const lora_job *job, int64_t rows, int threads) {
    for (int64_t n = 0; n < rows; n++)
        if (job->runs[job->run_of[n]].rank > RANK_MAX) return 1;
    return run_parallel(work, (void *)job, rows, 8, threads);
}

#else

int lamella_lora_rows_supported(void) { return 0; }
int lamella_lora_rows(const void *job, int64_t rows, int threads) {
    (void)job, (void)rows, (void)threads;
    return 1;
}

#endif
