/* MXFP4 and int8: the library's functions, as those of nf4.c. */
#include "kernels.h"
#include "parallel.h"

typedef struct {
    const kernel_set *set;
    const void *x;
    int dtype;
    int64_t n;
    uint8_t *codes, *scales;
} quantize_mx_job;

static int quantize_mx_tail(const quantize_mx_job *job, int64_t b) {
    const int64_t first = b * MX_BLOCK;
    uint32_t largest = 0;
    for (int64_t i = first; i < job->n; i++) {
        const uint32_t bits = float_to_bits(load_value(job->x, job->dtype, i)) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= FP32_INF) return 1;
    job->scales[b] = mx_exponent(largest);
    const float inverse = mx_inverse(job->scales[b]);
    for (int64_t i = first; i < job->n; i += 2) {
        const int32_t low = mx_code(load_value(job->x, job->dtype, i) * inverse);
        const int32_t high = i + 1 < job->n ? mx_code(load_value(job->x, job->dtype, i + 1) * inverse) : 0;
        job->codes[i / 2] = (uint8_t)(low | high << 4);
    }
    return 0;
}

static int quantize_mx_range(void *data, int64_t begin, int64_t end) {
    const quantize_mx_job *job = data;
    const int64_t whole = job->n / MX_BLOCK, stop = end < whole ? end : whole;
    if (begin < stop && job->set->quantize_mx(job->x, job->dtype, begin, stop, job->codes, job->scales)) return 1;
    return end > whole ? quantize_mx_tail(job, whole) : 0;
}

/* 0, or 1 when a value is NaN or infinite (codes and scales are then unfinished). */
int lamella_quantize_mx(int isa, const void *x, int dtype, int64_t n, uint8_t *codes, uint8_t *scales, int threads) {
    quantize_mx_job job = {*kernel_sets[isa], x, dtype, n, codes, scales};
    return run_parallel(quantize_mx_range, &job, (n + MX_BLOCK - 1) / MX_BLOCK, grain_blocks(MX_BLOCK), threads);
}

typedef struct {
    const kernel_set *set;
    const uint8_t *codes, *scales;
    void *out;
    int dtype;
    int64_t n;
    int stream;
} dequantize_mx_job;

static int dequantize_mx_range(void *data, int64_t begin, int64_t end) {
    static const float values[16] = {MX_VALUES};
    const dequantize_mx_job *job = data;
    const int64_t whole = job->n / MX_BLOCK, stop = end < whole ? end : whole;
    if (begin < stop)
        job->set->dequantize_mx(job->codes, job->scales + begin, job->out, job->dtype, begin, stop, job->stream);
    for (int64_t i = whole * MX_BLOCK; end > whole && i < job->n; i++) {
        const int code = i & 1 ? job->codes[i / 2] >> 4 : job->codes[i / 2] & 15;
        store_value(job->out, job->dtype, i, values[code] * mx_scale(job->scales[whole]));
    }
    return 0;
}

void lamella_dequantize_mx(int isa, const uint8_t *codes, const uint8_t *scales, void *out, int dtype, int64_t n, int stream,
                           int threads) {
    dequantize_mx_job job = {*kernel_sets[isa], codes, scales, out, dtype, n, stream && (uintptr_t)out % 64 == 0};
    run_parallel(dequantize_mx_range, &job, (n + MX_BLOCK - 1) / MX_BLOCK, grain_blocks(MX_BLOCK), threads);
}

typedef struct {
    const kernel_set *set;
    const void *x;
    void *out;
    int dtype;
    int64_t n, block;
    int8_t *codes;
    float *scales;
    int stream;
} int8_job;

static int quantize_int8_range(void *data, int64_t begin, int64_t end) {
    const int8_job *job = data;
    return job->set->quantize_int8(job->x, job->dtype, job->n, job->block, begin, end, job->codes, job->scales);
}

/* As lamella_quantize_mx; blocks of any length. */
int lamella_quantize_int8(int isa, const void *x, int dtype, int64_t n, int64_t block, int8_t *codes, float *scales,
                          int threads) {
    int8_job job = {*kernel_sets[isa], x, NULL, dtype, n, block, codes, scales, 0};
    return run_parallel(quantize_int8_range, &job, (n + block - 1) / block, grain_blocks(block), threads);
}

static int dequantize_int8_range(void *data, int64_t begin, int64_t end) {
    const int8_job *job = data;
    job->set->dequantize_int8(job->codes, job->scales, job->out, job->dtype, job->n, job->block, begin, end, job->stream);
    return 0;
}

void lamella_dequantize_int8(int isa, int8_t *codes, float *scales, void *out, int dtype, int64_t n, int64_t block,
                             int stream, int threads) {
    int8_job job = {*kernel_sets[isa], NULL, out, dtype, n, block, codes, scales, stream && (uintptr_t)out % 64 == 0};
    run_parallel(dequantize_int8_range, &job, (n + block - 1) / block, grain_blocks(block), threads);
}
