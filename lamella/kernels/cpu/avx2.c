/* AVX2 + F16C. 16-bit outputs: the scaled table is split into low and high bytes, each looked up with pshufb.
   fp32 outputs: two 8-entry permutes and a blend. Codes: a binary search over the midpoints. */
#include "kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

static const float table[16] = {NF4_VALUES};
static const float midpoints[15] = {NF4_MIDPOINTS};
static const float mx_values[16] = {MX_VALUES};

static inline __m256 load8(const void *x, int dtype, int64_t i) {
    if (dtype == FP32) return _mm256_loadu_ps((const float *)x + i);
    const __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
    if (dtype == FP16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline uint32_t largest_bits(const void *x, int dtype, int64_t first, int64_t block) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < block; i += 8)
        largest = _mm256_max_epi32(
            largest, _mm256_and_si256(_mm256_castps_si256(load8(x, dtype, first + i)), magnitude));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

typedef struct {
    __m256 top, second_low, second_high, third, fourth;
} search_tree;

static inline search_tree make_tree(void) {
    const float *m = midpoints;
    const search_tree tree = {
        _mm256_set1_ps(m[7]), _mm256_set1_ps(m[3]), _mm256_set1_ps(m[11]),
        _mm256_setr_ps(m[1], m[5], m[9], m[13], 0, 0, 0, 0),
        _mm256_setr_ps(m[0], m[2], m[4], m[6], m[8], m[10], m[12], m[14]),
    };
    return tree;
}

/* 8 codes: each comparison (-1 where true) appends one bit. */
static inline __m256i codes8(__m256 y, const search_tree *tree) {
    const __m256 above = _mm256_cmp_ps(y, tree->top, _CMP_GT_OQ);
    __m256i code = _mm256_srli_epi32(_mm256_castps_si256(above), 31);
    __m256 pivot = _mm256_blendv_ps(tree->second_low, tree->second_high, above);
    code = _mm256_sub_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(_mm256_cmp_ps(y, pivot, _CMP_GT_OQ)));
    pivot = _mm256_permutevar8x32_ps(tree->third, code);
    code = _mm256_sub_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(_mm256_cmp_ps(y, pivot, _CMP_GT_OQ)));
    pivot = _mm256_permutevar8x32_ps(tree->fourth, code);
    return _mm256_sub_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(_mm256_cmp_ps(y, pivot, _CMP_GT_OQ)));
}

static inline int quantize_typed(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes,
                                 float *absmax) {
    const search_tree tree = make_tree();
    const __m256i nibbles = _mm256_set1_epi16(0x0110); /* high nibble * 16 + low nibble */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t b = b0; b < b1; b++) {
        const int64_t first = b * block;
        const uint32_t largest = largest_bits(x, dtype, first, block);
        if (largest >= FP32_INF) return 1;
        absmax[b] = bits_to_float(largest);
        const __m256 inverse = _mm256_set1_ps(1.0f / divisor(absmax[b]));
        for (int64_t i = first; i < first + block; i += 32) {
            __m256i c[4];
            for (int k = 0; k < 4; k++) c[k] = codes8(_mm256_mul_ps(load8(x, dtype, i + 8 * k), inverse), &tree);
            /* packs interleave the 128-bit lanes; `order` undoes it on groups of four codes */
            const __m256i bytes =
                _mm256_packus_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_permutevar8x32_epi32(bytes, order), nibbles);
            const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
            _mm_storeu_si128((__m128i *)(codes + i / 2), packed);
        }
    }
    return 0;
}

static int quantize(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes, float *absmax) {
    if (dtype == FP32) return quantize_typed(x, FP32, block, b0, b1, codes, absmax);
    if (dtype == BF16) return quantize_typed(x, BF16, block, b0, b1, codes, absmax);
    return quantize_typed(x, FP16, block, b0, b1, codes, absmax);
}

static inline void store256(void *to, __m256i v, int stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)to, v);
    else
        _mm256_storeu_si256((__m256i *)to, v);
}

static inline __m256i round_bf16(__m256 v) { /* 8 dwords, value in the low half */
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
}

#define INLINE static inline __attribute__((always_inline))

/* NF4, or MXFP4 with its scales: then the low nibble comes first. */
INLINE void dequantize16(const uint8_t *codes, const float *scales, const uint8_t *mx_scales, uint16_t *out, int dtype,
                         int64_t block, int64_t b0, int64_t b1, int stream) {
    const float *values = mx_scales ? mx_values : table;
    const __m256 low8 = _mm256_loadu_ps(values), high8 = _mm256_loadu_ps(values + 8);
    const __m256i nibble = _mm256_set1_epi8(15), low_byte = _mm256_set1_epi16(0xff);
    for (int64_t b = b0; b < b1; b++) {
        const __m256 scale = _mm256_set1_ps(mx_scales ? mx_scale(mx_scales[b - b0]) : scales[b - b0]);
        const __m256 low = _mm256_mul_ps(low8, scale), high = _mm256_mul_ps(high8, scale);
        __m256i words;
        if (dtype == BF16)
            words = _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16(low), round_bf16(high)), 0xd8);
        else
            words = _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                                     _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
        /* split the 16 words into a table of low bytes and one of high bytes, both in each lane */
        const __m256i split = _mm256_permute4x64_epi64(
            _mm256_packus_epi16(_mm256_and_si256(words, low_byte), _mm256_srli_epi16(words, 8)), 0xd8);
        const __m256i table_low = _mm256_permute2x128_si256(split, split, 0x00);
        const __m256i table_high = _mm256_permute2x128_si256(split, split, 0x11);
        for (int64_t i = b * block; i < (b + 1) * block; i += 32) {
            const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + i / 2)));
            const __m256i both = mx_scales ? _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4))
                                           : _mm256_or_si256(_mm256_srli_epi16(wide, 4), _mm256_slli_epi16(wide, 8));
            const __m256i index = _mm256_and_si256(both, nibble);
            const __m256i bytes_low = _mm256_shuffle_epi8(table_low, index);
            const __m256i bytes_high = _mm256_shuffle_epi8(table_high, index);
            const __m256i a = _mm256_unpacklo_epi8(bytes_low, bytes_high); /* values 0-7, 16-23 */
            const __m256i c = _mm256_unpackhi_epi8(bytes_low, bytes_high); /* values 8-15, 24-31 */
            store256(out + i, _mm256_permute2x128_si256(a, c, 0x20), stream);
            store256(out + i + 16, _mm256_permute2x128_si256(a, c, 0x31), stream);
        }
    }
}

INLINE void dequantize32(const uint8_t *codes, const float *scales, const uint8_t *mx_scales, float *out, int64_t block,
                         int64_t b0, int64_t b1, int stream) {
    const float *values = mx_scales ? mx_values : table;
    const __m256 low8 = _mm256_loadu_ps(values), high8 = _mm256_loadu_ps(values + 8);
    const __m256i shift = _mm256_set1_epi64x(mx_scales ? 4ll << 32 : 4); /* dwords: 4, 0, 4, 0, ... or 0, 4, ... */
    /* one byte into the low byte of two neighbouring dwords */
    const __m256i twice = _mm256_setr_epi8(0, -1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1,
                                           2, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1);
    for (int64_t b = b0; b < b1; b++) {
        const __m256 scale = _mm256_set1_ps(mx_scales ? mx_scale(mx_scales[b - b0]) : scales[b - b0]);
        const __m256 low = _mm256_mul_ps(low8, scale), high = _mm256_mul_ps(high8, scale);
        for (int64_t i = b * block; i < (b + 1) * block; i += 8) {
            int32_t four;
            memcpy(&four, codes + i / 2, 4);
            const __m256i index = _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi32(four), twice), shift);
            const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* bit 3 into the sign */
            const __m256 v = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                              _mm256_permutevar8x32_ps(high, index), upper);
            store256(out + i, _mm256_castps_si256(v), stream);
        }
    }
}

static void dequantize(const uint8_t *codes, const float *scales, void *out, int dtype, int64_t block, int64_t b0,
                       int64_t b1, int stream) {
    if (dtype == FP32)
        dequantize32(codes, scales, NULL, out, block, b0, b1, stream);
    else
        dequantize16(codes, scales, NULL, out, dtype, block, b0, b1, stream);
    if (stream) _mm_sfence();
}

INLINE void load(const void *x, int dtype, int64_t first, int count, float *to) {
    int i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(x, dtype, first + i));
    for (; i < count; i++) to[i] = load_value(x, dtype, first + i);
}

QUANTIZE_MX(load)
QUANTIZE_INT8(load)

static void dequantize_mx(const uint8_t *codes, const uint8_t *scales, void *out, int dtype, int64_t b0, int64_t b1,
                          int stream) {
    if (dtype == FP32)
        dequantize32(codes, NULL, scales, out, MX_BLOCK, b0, b1, stream);
    else
        dequantize16(codes, NULL, scales, out, dtype, MX_BLOCK, b0, b1, stream);
    if (stream) _mm_sfence();
}

static void dequantize_int8(const int8_t *codes, const float *scales, void *out, int dtype, int64_t n, int64_t block,
                            int64_t b0, int64_t b1, int stream) {
    (void)stream;
    for (int64_t b = b0; b < b1; b++) {
        const float scale = scales[b];
        const __m256 factor = _mm256_set1_ps(scale);
        const int64_t last = (b + 1) * block < n ? (b + 1) * block : n;
        int64_t i = b * block;
        for (; i + 8 <= last; i += 8) {
            const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
            const __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), factor);
            if (dtype == FP32) {
                _mm256_storeu_ps((float *)out + i, v);
            } else if (dtype == BF16) {
                const __m256i words = round_bf16(v);
                const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
                _mm_storeu_si128((__m128i *)((uint16_t *)out + i), packed);
            } else {
                _mm_storeu_si128((__m128i *)((uint16_t *)out + i), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
            }
        }
        for (; i < last; i++) store_value(out, dtype, i, (float)codes[i] * scale);
    }
}

static const kernel_set set = {quantize,    dequantize,    scales_plain,  keep_row_plain,
                               quantize_mx, dequantize_mx, quantize_int8, dequantize_int8};
const kernel_set *const kernels_avx2 = &set;
#else
const kernel_set *const kernels_avx2 = NULL;
#endif
