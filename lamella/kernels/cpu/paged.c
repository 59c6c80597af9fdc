/* Attention of one new token per row to keys and values that lie in blocks.

   A task is a row and a kv head: its query heads share the pass over the keys, and the pass over the values. Scores are
   fp32 in the thread's scratch, summed in a fixed order, so the bits depend neither on threads nor on the other rows. */
#include "kernels.h"
#include "parallel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512BF16__)
#include <math.h>
#include "vectors.h"

typedef struct {
    const void *q, *keys, *values; /* [B, H, D] with strides, [slots, K, D], [slots, K, V] */
    void *out;                     /* [B, H, V] */
    const int32_t *table;          /* [B, width] */
    const int64_t *low, *position; /* [B]: first and last key seen */
    const float *sinks;            /* [H] or NULL */
    int64_t q_row, q_head, width, block, heads, kv_heads, size, value_size, longest;
    float scale, softcap; /* softcap 0: none */
    int dtype;
} paged_job;

/* scores[g][j] = scale q[g] . k[low + j] */
INLINE void score(const paged_job *job, int64_t row, int64_t kv, int64_t group, float *scores, int dtype) {
    const int64_t low = job->low[row], last = job->position[row], size = job->size;
    const int32_t *blocks = job->table + row * job->width;
    const char *q = (const char *)at(job->q, dtype, row * job->q_row + kv * group * job->q_head);
    for (int64_t p = low; p <= last; p++) {
        const int64_t slot = (int64_t)blocks[p / job->block] * job->block + p % job->block;
        const char *k = (const char *)at(job->keys, dtype, (slot * job->kv_heads + kv) * size);
        for (int64_t g = 0; g < group; g++) {
            const char *qg = (const char *)at(q, dtype, g * job->q_head);
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < size; i += 16) {
                const __mmask16 m = lanes(size - i);
                sum = _mm512_fmadd_ps(load(qg, dtype, i, m), load(k, dtype, i, m), sum);
            }
            float s = _mm512_reduce_add_ps(sum) * job->scale;
            if (job->softcap > 0) s = tanhf(s / job->softcap) * job->softcap;
            scores[g * job->longest + p - low] = s;
        }
    }
}

INLINE void weigh(const paged_job *job, int64_t row, int64_t kv, int64_t group, float *scores) {
    const int64_t n = job->position[row] - job->low[row] + 1;
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * job->longest, sink = job->sinks ? job->sinks[kv * group + g] : -INFINITY, most = sink;
        __m512 top = _mm512_set1_ps(most), sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < n; j += 16)
            top = _mm512_mask_max_ps(top, lanes(n - j), top, load(s, FP32, j, lanes(n - j)));
        most = _mm512_reduce_max_ps(top);
        top = _mm512_set1_ps(most);
        for (int64_t j = 0; j < n; j += 16) {
            const __m512 e = exp16(_mm512_sub_ps(load(s, FP32, j, lanes(n - j)), top));
            sum = _mm512_mask_add_ps(sum, lanes(n - j), sum, e);
            store(s, FP32, j, lanes(n - j), e);
        }
        const float total = _mm512_reduce_add_ps(sum) + (job->sinks ? expf(sink - most) : 0);
        const __m512 over = _mm512_set1_ps(1 / total);
        for (int64_t j = 0; j < n; j += 16)
            store(s, FP32, j, lanes(n - j), _mm512_mul_ps(load(s, FP32, j, lanes(n - j)), over));
    }
}

INLINE void gather(const paged_job *job, int64_t row, int64_t kv, int64_t group, const float *scores, int dtype) {
    const int64_t low = job->low[row], last = job->position[row], size = job->value_size;
    const int32_t *blocks = job->table + row * job->width;
    char *out = (char *)at_out(job->out, dtype, (row * job->heads + kv * group) * size);
    for (int64_t i = 0; i < size; i += 64) { /* four registers of one head's output at a time */
        const int parts = (int)((size - i + 15) / 16 < 4 ? (size - i + 15) / 16 : 4);
        __mmask16 m[4];
        for (int c = 0; c < 4; c++) m[c] = c < parts ? lanes(size - i - 16 * c) : 0;
        for (int64_t g = 0; g < group; g++) {
            const float *s = scores + g * job->longest;
            __m512 sum[4];
            for (int c = 0; c < 4; c++) sum[c] = _mm512_setzero_ps();
            for (int64_t p = low; p <= last; p++) {
                const int64_t slot = (int64_t)blocks[p / job->block] * job->block + p % job->block;
                const char *v = (const char *)at(job->values, dtype, (slot * job->kv_heads + kv) * size + i);
                const __m512 w = _mm512_set1_ps(s[p - low]);
                for (int c = 0; c < 4; c++)
                    if (m[c]) sum[c] = _mm512_fmadd_ps(w, load(v, dtype, 16 * c, m[c]), sum[c]);
            }
            for (int c = 0; c < 4; c++)
                if (m[c]) store(out, dtype, g * size + i + 16 * c, m[c], sum[c]);
        }
    }
}

static int work(void *given, int64_t begin, int64_t end, void *scratch) {
    const paged_job *job = given;
    const int64_t group = job->heads / job->kv_heads;
    float *scores = scratch;
    for (int64_t task = begin; task < end; task++) {
        const int64_t row = task / job->kv_heads, kv = task % job->kv_heads;
        if (job->dtype == FP32) {
            score(job, row, kv, group, scores, FP32);
            weigh(job, row, kv, group, scores);
            gather(job, row, kv, group, scores, FP32);
        } else {
            score(job, row, kv, group, scores, BF16);
            weigh(job, row, kv, group, scores);
            gather(job, row, kv, group, scores, BF16);
        }
    }
    return 0;
}

int lamella_paged_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

/* `scratch` holds `threads` times group x longest floats. */
int lamella_paged_attend(const paged_job *job, int64_t rows, int threads, void *scratch) {
    const int64_t bytes = job->heads / job->kv_heads * job->longest * (int64_t)sizeof(float);
    return run_parallel_scratch(work, (void *)job, rows * job->kv_heads, 1, threads, scratch, bytes);
}

#else

int lamella_paged_supported(void) { return 0; }
int lamella_paged_attend(const void *job, int64_t rows, int threads, void *scratch) {
    (void)job, (void)rows, (void)threads, (void)scratch;
    return 1;
}

#endif
