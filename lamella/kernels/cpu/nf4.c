/* The library's functions, called through ctypes. Tensors are contiguous; sizes are checked by the caller. */
#include "kernels.h"
#include "parallel.h"

enum { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };
enum { NESTED_CHUNK = 1024 };    /* scales undone at a time, on the stack */

const kernel_set *const *const kernel_sets[] = {&kernels_portable, &kernels_avx2, &kernels_avx512};

int lamella_supported(int isa) {
    if (isa < ISA_PORTABLE || isa > ISA_AVX512 || !*kernel_sets[isa]) return 0;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (isa == ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == ISA_AVX512) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
#endif
    return 1;
}

typedef struct {
    const kernel_set *set;
    const void *x;
    int dtype;
    int64_t n, block;
    uint8_t *codes;
    float *absmax;
} quantize_job;

/* Nearest code: the midpoints below y, counted. */
static uint8_t nf4_code(float y) {
    static const float midpoints[15] = {NF4_MIDPOINTS};
    uint8_t code = 0;
    for (int k = 0; k < 15; k++) code += y > midpoints[k];
    return code;
}

static int quantize_tail(const quantize_job *job, int64_t b) {
    const int64_t first = b * job->block;
    uint32_t largest = 0;
    for (int64_t i = first; i < job->n; i++) {
        const uint32_t bits = float_to_bits(load_value(job->x, job->dtype, i)) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= FP32_INF) return 1;
    const float scale = divisor(bits_to_float(largest));
    job->absmax[b] = scale;
    for (int64_t i = first; i < job->n; i += 2) {
        const uint8_t high = nf4_code(load_value(job->x, job->dtype, i) / scale);
        const uint8_t low = i + 1 < job->n ? nf4_code(load_value(job->x, job->dtype, i + 1) / scale) : nf4_code(0);
        job->codes[i / 2] = (uint8_t)(high << 4 | low);
    }
    return 0;
}

static int quantize_range(void *data, int64_t begin, int64_t end) {
    const quantize_job *job = data;
    const int64_t whole = job->n / job->block, stop = end < whole ? end : whole;
    if (begin < stop && job->set->quantize(job->x, job->dtype, job->block, begin, stop, job->codes, job->absmax))
        return 1;
    return end > whole ? quantize_tail(job, whole) : 0;
}

/* 0, or 1 when a value is NaN or infinite (codes and absmax are then unfinished). */
int lamella_quantize(int isa, const void *x, int dtype, int64_t n, int64_t block, uint8_t *codes, float *absmax,
                     int threads) {
    quantize_job job = {*kernel_sets[isa], x, dtype, n, block, codes, absmax};
    return run_parallel(quantize_range, &job, (n + block - 1) / block, grain_blocks(block), threads);
}

typedef struct {
    const kernel_set *set;
    const uint8_t *codes;
    const float *absmax; /* NULL: scales are double quantised, below */
    const uint8_t *absmax_q;
    const float *absmax_code, *absmax2;
    float offset;
    void *out;
    int dtype;
    int64_t n, block;
    int stream;
} dequantize_job;

static void nested_scales(const dequantize_job *job, int64_t begin, int64_t end, float *scales) {
    for (int64_t b = begin, stop; b < end; b = stop) {
        stop = (b / ABSMAX_BLOCK + 1) * ABSMAX_BLOCK;
        stop = stop < end ? stop : end;
        job->set->scales(job->absmax_q + b, job->absmax_code, job->absmax2[b / ABSMAX_BLOCK], job->offset, stop - b,
                         scales + (b - begin));
    }
}

static void dequantize_tail(const dequantize_job *job, int64_t b, float scale) {
    static const float table[16] = {NF4_VALUES};
    for (int64_t i = b * job->block; i < job->n; i++) {
        const float value = table[i & 1 ? job->codes[i / 2] & 15 : job->codes[i / 2] >> 4] * scale;
        store_value(job->out, job->dtype, i, value);
    }
}

static int dequantize_range(void *data, int64_t begin, int64_t end) {
    const dequantize_job *job = data;
    const int64_t whole = job->n / job->block;
    float nested[NESTED_CHUNK];
    while (begin < end) {
        int64_t stop = end;
        const float *scales = job->absmax ? job->absmax + begin : nested;
        if (!job->absmax) {
            if (stop > begin + NESTED_CHUNK) stop = begin + NESTED_CHUNK;
            nested_scales(job, begin, stop, nested);
        }
        const int64_t stop_whole = stop < whole ? stop : whole;
        if (begin < stop_whole)
            job->set->dequantize(job->codes, scales, job->out, job->dtype, job->block, begin, stop_whole, job->stream);
        if (stop > whole) dequantize_tail(job, whole, scales[whole - begin]);
        begin = stop;
    }
    return 0;
}

/* `absmax` plain, or NULL with its double-quantised parts. */
void lamella_dequantize(int isa, const uint8_t *codes, const float *absmax, const uint8_t *absmax_q,
                        const float *absmax_code, const float *absmax2, float offset, void *out, int dtype, int64_t n,
                        int64_t block, int stream, int threads) {
    dequantize_job job = {*kernel_sets[isa], codes, absmax, absmax_q, absmax_code, absmax2, offset, out, dtype, n, block,
                          stream && (uintptr_t)out % 64 == 0};
    run_parallel(dequantize_range, &job, (n + block - 1) / block, grain_blocks(block), threads);
}

/* Tensors of one buffer, one after the other. A job is eight numbers: byte offsets of codes, absmax (-1: double
   quantised), absmax_q, absmax_code, absmax2 and offset, the first value's place in `out`, and how many values. */
void lamella_dequantize_many(int isa, const uint8_t *base, const int64_t *jobs, int64_t count, void *out, int dtype,
                             int64_t block, int64_t stream_bytes, int threads) {
    const int64_t size = dtype ? 2 : 4;
    for (const int64_t *job = jobs; job < jobs + 8 * count; job += 8) {
        const int plain = job[1] >= 0;
        lamella_dequantize(isa, base + job[0], plain ? (const float *)(base + job[1]) : NULL,
                           plain ? NULL : base + job[2], plain ? NULL : (const float *)(base + job[3]),
                           plain ? NULL : (const float *)(base + job[4]),
                           plain ? 0.0f : *(const float *)(base + job[5]), (uint8_t *)out + size * job[6], dtype, job[7],
                           block, size * job[7] >= stream_bytes, threads);
    }
}

typedef struct {
    const float *absmax;
    float offset;
    const uint8_t *lut;
    int64_t n;
    uint8_t *q;
    float *absmax2;
} absmax_job;

/* bitsandbytes' 8-bit rule: the scaled value picks one of 65,536 bins, each with its nearest code; a block of
   zeros gets code 0. */
static int absmax_range(void *data, int64_t begin, int64_t end) {
    const absmax_job *job = data;
    for (int64_t b = begin; b < end; b++) {
        const int64_t first = b * ABSMAX_BLOCK, left = job->n - first;
        const int count = left < ABSMAX_BLOCK ? (int)left : ABSMAX_BLOCK;
        float centred[ABSMAX_BLOCK];
        int32_t largest = 0, bin[ABSMAX_BLOCK];
        for (int i = 0; i < count; i++) centred[i] = job->absmax[first + i] - job->offset;
        for (int i = 0; i < count; i++) {
            const int32_t bits = (int32_t)(float_to_bits(centred[i]) & 0x7fffffff);
            largest = bits > largest ? bits : largest;
        }
        if (largest >= FP32_INF) return 1;
        job->absmax2[b] = bits_to_float((uint32_t)largest);
        if (!largest) {
            memset(job->q + first, 0, (size_t)count);
            continue;
        }
        const float inverse = 1.0f / job->absmax2[b];
        for (int i = 0; i < count; i++) {
            float y = centred[i] * inverse;
            y = y < -1.0f ? -1.0f : y;
            y = y > 1.0f ? 1.0f : y;
            bin[i] = (int32_t)((y + 1.0f) * 0.5f * 65535.0f + 0.5f);
        }
        for (int i = 0; i < count; i++) job->q[first + i] = job->lut[bin[i]];
    }
    return 0;
}

/* Second level of double quantisation. lut: nearest code of each of the 65,536 bins of [-1, 1]. */
int lamella_quantize_absmax(const float *absmax, float offset, const uint8_t *lut, int64_t n, uint8_t *q,
                            float *absmax2, int threads) {
    absmax_job job = {absmax, offset, lut, n, q, absmax2};
    return run_parallel(absmax_range, &job, (n + ABSMAX_BLOCK - 1) / ABSMAX_BLOCK, grain_blocks(ABSMAX_BLOCK),
                        threads);
}

typedef struct {
    dequantize_job scales;
    float *out;
} nested_job;

static int nested_range(void *data, int64_t begin, int64_t end) {
    const nested_job *job = data;
    nested_scales(&job->scales, begin, end, job->out + begin);
    return 0;
}

void lamella_dequantize_absmax(int isa, const uint8_t *q, const float *code, const float *absmax2, float offset, int64_t n,
                               float *out, int threads) {
    nested_job job = {{.set = *kernel_sets[isa], .absmax_q = q, .absmax_code = code, .absmax2 = absmax2, .offset = offset}, out};
    run_parallel(nested_range, &job, n, LEAST_VALUES, threads);
}

typedef struct {
    const kernel_set *set;
    const int64_t *keys;
    int64_t columns;
    uint32_t threshold;
    uint8_t *out;
} keep_job;

static int keep_range(void *data, int64_t begin, int64_t end) {
    const keep_job *job = data;
    for (int64_t row = begin; row < end; row++)
        job->set->keep_row((uint64_t)job->keys[row], job->columns, job->threshold, job->out + row * job->columns);
    return 0;
}

/* out[row][column] = 1 where hash(key, column) >= threshold, else 0. */
void lamella_keep_mask(int isa, const int64_t *keys, int64_t rows, int64_t columns, uint32_t threshold, uint8_t *out,
                       int threads) {
    keep_job job = {*kernel_sets[isa], keys, columns, threshold, out};
    run_parallel(keep_range, &job, rows, (LEAST_VALUES + columns - 1) / columns, threads);
}
