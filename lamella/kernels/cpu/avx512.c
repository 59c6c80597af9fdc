/* AVX-512 F + BW.
   Dequantise: the block's 16 scaled and rounded values sit in one register; vpermw looks up 32 at once (vpermps
   16 for fp32 output). A code byte is copied into two neighbouring lanes, the first shifted down by a nibble; the
   table stands twice in the register, so the bits above the nibble do not matter.
   Quantise: [-1, 1] is cut into 32 buckets of 1/15.5, each holding at most one midpoint; so a code is the bucket's
   base plus one comparison. */
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

enum { WRITE_AHEAD = 1024 }; /* bytes; owning lines early hides their latency */

static const float table[16] = {NF4_VALUES};
static const float midpoints[15] = {NF4_MIDPOINTS};
static const float mx_values[16] = {MX_VALUES};

static inline __m512 load16(const void *x, int dtype, int64_t i) {
    if (dtype == FP32) return _mm512_loadu_ps((const float *)x + i);
    const __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + i));
    if (dtype == FP16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* 16-bit inputs are compared as integers: |x| orders as its bits do. */
static inline float block_absmax(const void *x, int dtype, int64_t first, int64_t block, int *finite) {
    __m512i largest = _mm512_setzero_si512();
    if (dtype == FP32) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        for (int64_t i = first; i < first + block; i += 16)
            largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512((const float *)x + i), magnitude));
        const int32_t bits = _mm512_reduce_max_epi32(largest);
        *finite = bits < FP32_INF;
        return bits_to_float((uint32_t)bits);
    }
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t i = first; i < first + block; i += 32)
        largest = _mm512_max_epi16(largest, _mm512_and_si512(_mm512_loadu_si512((const uint16_t *)x + i), magnitude));
    const __m256i m = _mm256_max_epi16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    const __m128i m8 = _mm_max_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    /* minpos finds the smallest unsigned word: flip to find the largest */
    const __m128i flipped = _mm_minpos_epu16(_mm_xor_si128(m8, _mm_set1_epi16(0x7fff)));
    const uint16_t bits = (uint16_t)(_mm_cvtsi128_si32(flipped) ^ 0x7fff);
    *finite = bits < (dtype == BF16 ? BF16_INF : FP16_INF);
    return dtype == BF16 ? bits_to_float((uint32_t)bits << 16) : fp16_to_float(bits);
}

typedef struct {
    __m512 pivot_low, pivot_high;
    __m512i base_low, base_high;
} buckets;

/* Bucket k (-16 .. 15) holds y in [k, k + 1] / 15.5; lane k & 31. No midpoint lies near a border. */
static buckets make_buckets(void) {
    float pivot[32];
    int32_t base[32];
    for (int k = -16; k < 16; k++) {
        int below = 0;
        while (below < 15 && midpoints[below] < (float)k / 15.5f) below++;
        base[k & 31] = below;
        pivot[k & 31] = below < 15 ? midpoints[below] : 2.0f; /* past this bucket, unless it holds it */
    }
    const buckets made = {_mm512_loadu_ps(pivot), _mm512_loadu_ps(pivot + 16), _mm512_loadu_si512(base),
                          _mm512_loadu_si512(base + 16)};
    return made;
}

static inline int quantize_typed(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes,
                                 float *absmax) {
    const buckets bucket = make_buckets();
    const __m512 per_unit = _mm512_set1_ps(15.5f), half = _mm512_set1_ps(-0.5f);
    const __m512i one = _mm512_set1_epi32(1);
    for (int64_t b = b0; b < b1; b++) {
        const int64_t first = b * block;
        int finite;
        absmax[b] = block_absmax(x, dtype, first, block, &finite);
        if (!finite) return 1;
        const __m512 inverse = _mm512_set1_ps(1.0f / divisor(absmax[b]));
        for (int64_t i = first; i < first + block; i += 16) {
            const __m512 y = _mm512_mul_ps(load16(x, dtype, i), inverse);
            const __m512i k = _mm512_cvtps_epi32(_mm512_fmadd_ps(y, per_unit, half));
            const __m512 pivot = _mm512_permutex2var_ps(bucket.pivot_low, k, bucket.pivot_high);
            __m512i code = _mm512_permutex2var_epi32(bucket.base_low, k, bucket.base_high);
            code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(y, pivot, _CMP_GT_OQ), code, one);
            const __m512i pair = _mm512_or_si512(_mm512_slli_epi64(code, 4), _mm512_srli_epi64(code, 32));
            _mm_storel_epi64((__m128i *)(codes + i / 2), _mm512_cvtepi64_epi8(pair));
        }
    }
    return 0;
}

static int quantize(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes, float *absmax) {
    if (dtype == FP32) return quantize_typed(x, FP32, block, b0, b1, codes, absmax);
    if (dtype == BF16) return quantize_typed(x, BF16, block, b0, b1, codes, absmax);
    return quantize_typed(x, FP16, block, b0, b1, codes, absmax);
}

static inline void store512(void *to, __m512i v, int stream) {
    if (stream)
        _mm512_stream_si512((__m512i *)to, v);
    else
        _mm512_storeu_si512(to, v);
}

#define INLINE static inline __attribute__((always_inline))

/* NF4, or MXFP4 with its scales: then the low nibble comes first. */
INLINE void dequantize16(const uint8_t *codes, const float *scales, const uint8_t *mx_scales, uint16_t *out, int dtype,
                         int64_t block, int64_t b0, int64_t b1, int stream) {
    const __m512 values = _mm512_loadu_ps(mx_scales ? mx_values : table);
    const __m512i one = _mm512_set1_epi32(1), bias = _mm512_set1_epi32(0x7fff);
    const __m512i shift = _mm512_set1_epi32(mx_scales ? 4 << 16 : 4); /* words: 4, 0, 4, 0, ... or 0, 4, ... */
    const __m512i twice = _mm512_set_epi8(-1, 15, -1, 15, -1, 14, -1, 14, -1, 13, -1, 13, -1, 12, -1, 12,
                                          -1, 11, -1, 11, -1, 10, -1, 10, -1, 9, -1, 9, -1, 8, -1, 8,
                                          -1, 7, -1, 7, -1, 6, -1, 6, -1, 5, -1, 5, -1, 4, -1, 4,
                                          -1, 3, -1, 3, -1, 2, -1, 2, -1, 1, -1, 1, -1, 0, -1, 0);
    const __m512i high_words = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const uint8_t *in = codes + b0 * block / 2;
    uint16_t *to = out + b0 * block;
    for (int64_t b = b0; b < b1; b++) {
        const float scale = mx_scales ? mx_scale(mx_scales[b - b0]) : scales[b - b0];
        const __m512 scaled = _mm512_mul_ps(values, _mm512_set1_ps(scale));
        __m512i lookup;
        if (dtype == BF16) {
            /* not vcvtneps2bf16: it turns subnormals into zero */
            const __m512i bits = _mm512_castps_si512(scaled);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
            const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, bias), odd);
            lookup = _mm512_permutexvar_epi16(high_words, rounded);
        } else {
            lookup = _mm512_broadcast_i64x4(_mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
        }
        for (const uint16_t *stop = to + block; to < stop; to += 32, in += 16) {
            if (!stream) __builtin_prefetch((const char *)to + WRITE_AHEAD, 1, 2);
            const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)in));
            const __m512i index = _mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, twice), shift);
            store512(to, _mm512_permutexvar_epi16(index, lookup), stream);
        }
    }
}

INLINE void dequantize32(const uint8_t *codes, const float *scales, const uint8_t *mx_scales, float *out, int64_t block,
                         int64_t b0, int64_t b1, int stream) {
    const __m512 values = _mm512_loadu_ps(mx_scales ? mx_values : table);
    const __m512i shift = _mm512_set1_epi64(mx_scales ? 4ll << 32 : 4); /* dwords: 4, 0, 4, 0, ... or 0, 4, ... */
    for (int64_t b = b0; b < b1; b++) {
        const float scale = mx_scales ? mx_scale(mx_scales[b - b0]) : scales[b - b0];
        const __m512 scaled = _mm512_mul_ps(values, _mm512_set1_ps(scale));
        for (int64_t i = b * block; i < (b + 1) * block; i += 16) {
            const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
            const __m512i index =
                _mm512_srlv_epi32(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 32)), shift);
            store512(out + i, _mm512_castps_si512(_mm512_permutexvar_ps(index, scaled)), stream);
        }
    }
}

static void dequantize(const uint8_t *codes, const float *scales, void *out, int dtype, int64_t block, int64_t b0,
                       int64_t b1, int stream) {
    if (dtype == FP32 && stream)
        dequantize32(codes, scales, NULL, out, block, b0, b1, 1);
    else if (dtype == FP32)
        dequantize32(codes, scales, NULL, out, block, b0, b1, 0);
    else if (dtype == BF16 && stream)
        dequantize16(codes, scales, NULL, out, BF16, block, b0, b1, 1);
    else if (dtype == BF16)
        dequantize16(codes, scales, NULL, out, BF16, block, b0, b1, 0);
    else
        dequantize16(codes, scales, NULL, out, FP16, block, b0, b1, stream);
    if (stream) _mm_sfence();
}

static void gather_scales(const uint8_t *q, const float *code, float scale, float offset, int64_t count,
                          float *scales) {
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(offset);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(q + i)));
        const __m512 value = _mm512_mul_ps(_mm512_i32gather_ps(index, code, 4), factor);
        _mm512_storeu_ps(scales + i, _mm512_add_ps(value, shift));
    }
    scales_plain(q + i, code, scale, offset, count - i, scales + i);
}

INLINE void load(const void *x, int dtype, int64_t first, int count, float *to) {
    int i = 0;
    for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, load16(x, dtype, first + i));
    for (; i < count; i++) to[i] = load_value(x, dtype, first + i);
}

QUANTIZE_MX(load)
QUANTIZE_INT8(load)

static void dequantize_mx(const uint8_t *codes, const uint8_t *scales, void *out, int dtype, int64_t b0, int64_t b1,
                          int stream) {
    if (dtype == FP32 && stream)
        dequantize32(codes, NULL, scales, out, MX_BLOCK, b0, b1, 1);
    else if (dtype == FP32)
        dequantize32(codes, NULL, scales, out, MX_BLOCK, b0, b1, 0);
    else if (dtype == BF16 && stream)
        dequantize16(codes, NULL, scales, out, BF16, MX_BLOCK, b0, b1, 1);
    else if (dtype == BF16)
        dequantize16(codes, NULL, scales, out, BF16, MX_BLOCK, b0, b1, 0);
    else
        dequantize16(codes, NULL, scales, out, FP16, MX_BLOCK, b0, b1, stream);
    if (stream) _mm_sfence();
}

/* 16 scaled values; blocks of any length, so nothing is aligned unless `stream` says so. */
INLINE void store_scaled(void *out, int dtype, int64_t i, __m512 v, int stream) {
    if (dtype == FP32) {
        store512((float *)out + i, _mm512_castps_si512(v), stream);
        return;
    }
    __m256i half;
    if (dtype == BF16) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    } else {
        half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    }
    if (stream)
        _mm256_stream_si256((__m256i *)((uint16_t *)out + i), half);
    else
        _mm256_storeu_si256((__m256i *)((uint16_t *)out + i), half);
}

INLINE void dequantize8(const int8_t *codes, const float *scales, void *out, int dtype, int64_t n, int64_t block,
                        int64_t b0, int64_t b1, int stream) {
    for (int64_t b = b0; b < b1; b++) {
        const float scale = scales[b];
        const __m512 factor = _mm512_set1_ps(scale);
        const int64_t last = (b + 1) * block < n ? (b + 1) * block : n;
        int64_t i = b * block;
        for (; i + 16 <= last; i += 16) {
            if (!stream) __builtin_prefetch((const char *)out + (dtype == FP32 ? 4 : 2) * i + WRITE_AHEAD, 1, 2);
            const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
            store_scaled(out, dtype, i, _mm512_mul_ps(_mm512_cvtepi32_ps(wide), factor), stream);
        }
        for (; i < last; i++) store_value(out, dtype, i, (float)codes[i] * scale);
    }
}

static void dequantize_int8(const int8_t *codes, const float *scales, void *out, int dtype, int64_t n, int64_t block,
                            int64_t b0, int64_t b1, int stream) {
    stream = stream && block % 32 == 0;
    if (dtype == FP32)
        dequantize8(codes, scales, out, FP32, n, block, b0, b1, stream);
    else if (dtype == BF16 && stream)
        dequantize8(codes, scales, out, BF16, n, block, b0, b1, 1);
    else if (dtype == BF16)
        dequantize8(codes, scales, out, BF16, n, block, b0, b1, 0);
    else
        dequantize8(codes, scales, out, FP16, n, block, b0, b1, stream);
    if (stream) _mm_sfence();
}

static const kernel_set set = {quantize,    dequantize,    gather_scales, keep_row_plain,
                               quantize_mx, dequantize_mx, quantize_int8, dequantize_int8};
const kernel_set *const kernels_avx512 = &set;
#else
const kernel_set *const kernels_avx512 = NULL;
#endif
