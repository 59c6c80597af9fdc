/* Kernels of the quantised formats: what the compile units share.

   NF4: 16 quantiles of a normal distribution (QLoRA, appendix E), one fp32 scale (absmax) per block,
   two codes a byte, high nibble first. Every path gives the same bits:

     quantise    code = number of midpoints m with y > m, where y = x * (1 / absmax) in whole blocks and
                 x / absmax in a partial last block (bitsandbytes does it so), all in fp32;
     dequantise  table[code] * absmax in fp32, rounded to nearest even.

   MXFP4 (OCP Microscaling Formats v1.0): e2m1 codes, two a byte, low nibble first, one e8m0 scale per 32:

     quantise    scale = 2^(floor(log2(absmax)) - 2), at least 2^-127; code = x / scale to the nearest, ties to the even code,
                 beyond 6 saturated;
     dequantise  value[code] * scale.

   int8: one fp32 scale per block of any length, scale = absmax / 127, code = x / scale to the nearest, ties to even;
   code * scale.

   A unit for an instruction set gives one `kernel_set`; units never call each other. */
#ifndef LAMELLA_KERNELS_H
#define LAMELLA_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FP32 = 0, BF16 = 1, FP16 = 2 };
enum { ABSMAX_BLOCK = 256, BLOCK_MAX = 4096, MX_BLOCK = 32 };

typedef struct {
    /* Blocks [b0, b1) of a tensor of n elements, the partial last block excepted. Returns 0, or 1 when a value
       is NaN or infinite. */
    int (*quantize)(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes, float *absmax);
    /* scales[0] belongs to block b0. stream: write past the caches (out is 64-byte aligned). */
    void (*dequantize)(const uint8_t *codes, const float *scales, void *out, int dtype, int64_t block, int64_t b0,
                       int64_t b1, int stream);
    /* scales[i] = code[q[i]] * scale + offset: double-quantised scales of one second-level block. */
    void (*scales)(const uint8_t *q, const float *code, float scale, float offset, int64_t count, float *scales);
    void (*keep_row)(uint64_t key, int64_t columns, uint32_t threshold, uint8_t *out);
    /* As above; blocks of 32. */
    int (*quantize_mx)(const void *x, int dtype, int64_t b0, int64_t b1, uint8_t *codes, uint8_t *scales);
    void (*dequantize_mx)(const uint8_t *codes, const uint8_t *scales, void *out, int dtype, int64_t b0, int64_t b1,
                          int stream);
    /* Blocks [b0, b1) of n elements, the last one short where n is no multiple of the block. */
    int (*quantize_int8)(const void *x, int dtype, int64_t n, int64_t block, int64_t b0, int64_t b1, int8_t *codes,
                         float *scales);
    void (*dequantize_int8)(const int8_t *codes, const float *scales, void *out, int dtype, int64_t n, int64_t block,
                            int64_t b0, int64_t b1, int stream);
} kernel_set;

/* NULL where the unit was compiled for a machine without the instructions. */
extern const kernel_set *const kernels_avx512, *const kernels_avx2, *const kernels_portable;
/* By the number that Python calls a set by. */
extern const kernel_set *const *const kernel_sets[];

enum { LEAST_VALUES = 1 << 16 }; /* least work worth a thread */
static inline int64_t grain_blocks(int64_t block) { return (LEAST_VALUES + block - 1) / block; }

#define NF4_VALUES                                                                                                  \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,                \
        -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,             \
        0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, \
        1.0f

/* Midpoints of neighbours, exactly as (a + b) / 2 gives them in fp32. */
#define NF4_MIDPOINTS                                                                                                \
    (-1.0f + -0.6961928009986877f) / 2, (-0.6961928009986877f + -0.5250730514526367f) / 2,                           \
        (-0.5250730514526367f + -0.39491748809814453f) / 2, (-0.39491748809814453f + -0.28444138169288635f) / 2,     \
        (-0.28444138169288635f + -0.18477343022823334f) / 2, (-0.18477343022823334f + -0.09105003625154495f) / 2,    \
        (-0.09105003625154495f + 0.0f) / 2, (0.0f + 0.07958029955625534f) / 2,                                       \
        (0.07958029955625534f + 0.16093020141124725f) / 2, (0.16093020141124725f + 0.24611230194568634f) / 2,        \
        (0.24611230194568634f + 0.33791524171829224f) / 2, (0.33791524171829224f + 0.44070982933044434f) / 2,        \
        (0.44070982933044434f + 0.5626170039176941f) / 2, (0.5626170039176941f + 0.7229568362236023f) / 2,           \
        (0.7229568362236023f + 1.0f) / 2

#define MX_VALUES                                                                                                   \
    0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f

/* Smallest divisor: keeps 1 / absmax finite for blocks of zeros and subnormals. */
#define ABSMAX_FLOOR 1e-38f
/* Bits of |x| from here on are infinity or NaN. */
#define FP32_INF 0x7f800000
#define BF16_INF 0x7f80
#define FP16_INF 0x7c00

static inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* Both assume no NaN: scales are finite, and overflow gives infinity as rounding does. */
static inline uint16_t float_to_bf16(float f) {
    uint32_t bits = float_to_bits(f);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline uint16_t float_to_fp16(float f) {
    uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | FP16_INF); /* 65536 and up */
    if (magnitude < 0x38800000) {                                    /* subnormal or zero: 0.5f has ulp 2^-24 */
        float shifted = bits_to_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

static inline float fp16_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= FP16_INF) return bits_to_float(sign | FP32_INF | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) { /* subnormal: magnitude * 2^-24 */
        float f = (float)magnitude * 0x1p-24f;
        return bits_to_float(sign | float_to_bits(f));
    }
    return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
}

static inline float load_value(const void *x, int dtype, int64_t i) {
    if (dtype == FP32) return ((const float *)x)[i];
    uint16_t half = ((const uint16_t *)x)[i];
    return dtype == BF16 ? bits_to_float((uint32_t)half << 16) : fp16_to_float(half);
}

static inline void store_value(void *out, int dtype, int64_t i, float value) {
    if (dtype == FP32)
        ((float *)out)[i] = value;
    else
        ((uint16_t *)out)[i] = dtype == BF16 ? float_to_bf16(value) : float_to_fp16(value);
}

/* 2^(e - 127); e = 255 (NaN in e8m0) is refused where stores are made and gives infinity here. */
static inline float mx_scale(uint8_t e) { return bits_to_float(e ? (uint32_t)e << 23 : 0x400000); }

/* e8m0 exponent for a block whose largest |x| has these bits. */
static inline uint8_t mx_exponent(uint32_t largest) { return (uint8_t)(largest >> 23 > 2 ? (largest >> 23) - 2 : 0); }

/* 1 / scale; exponents reach 252. */
static inline float mx_inverse(uint8_t e) { return bits_to_float((uint32_t)(254 - e) << 23); }

/* Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; bit 3 is the sign. */
static inline int32_t mx_code(float y) {
    const uint32_t bits = float_to_bits(y);
    const float m = bits_to_float(bits & 0x7fffffff);
    const int32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return code | (int32_t)(bits >> 31) << 3;
}

enum { LOADED = 256 }; /* values converted to fp32 at a time, a multiple of MX_BLOCK */

/* Quantisers in plain C, vectorised by the compiler for each unit; `LOAD` (x, dtype, first, count, float *to) is the unit's. */
#define QUANTIZE_MX(LOAD)                                                                                            \
    static int quantize_mx(const void *x, int dtype, int64_t b0, int64_t b1, uint8_t *codes, uint8_t *scales) {       \
        float values[MX_BLOCK];                                                                                      \
        int32_t code[MX_BLOCK];                                                                                      \
        for (int64_t b = b0; b < b1; b++) {                                                                          \
            LOAD(x, dtype, b * MX_BLOCK, MX_BLOCK, values);                                                          \
            int32_t largest = 0;                                                                                     \
            for (int i = 0; i < MX_BLOCK; i++) {                                                                     \
                const int32_t bits = (int32_t)(float_to_bits(values[i]) & 0x7fffffff);                               \
                largest = bits > largest ? bits : largest;                                                           \
            }                                                                                                        \
            if (largest >= FP32_INF) return 1;                                                                       \
            scales[b] = mx_exponent((uint32_t)largest);                                                              \
            const float inverse = mx_inverse(scales[b]);                                                             \
            for (int i = 0; i < MX_BLOCK; i++) code[i] = mx_code(values[i] * inverse);                               \
            uint8_t *to = codes + b * (MX_BLOCK / 2);                                                                \
            for (int i = 0; i < MX_BLOCK / 2; i++) to[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);            \
        }                                                                                                            \
        return 0;                                                                                                    \
    }

#define ROUND_SHIFT 12582912.0f /* 1.5 * 2^23: adding and taking it away rounds to an integer, ties to even */

#define QUANTIZE_INT8(LOAD)                                                                                          \
    static int quantize_int8(const void *x, int dtype, int64_t n, int64_t block, int64_t b0, int64_t b1, int8_t *codes, \
                             float *scales) {                                                                        \
        float values[LOADED];                                                                                        \
        for (int64_t b = b0; b < b1; b++) {                                                                          \
            const int64_t first = b * block, last = first + block < n ? first + block : n;                           \
            int32_t largest = 0;                                                                                     \
            for (int64_t at = first; at < last; at += LOADED) {                                                      \
                const int count = last - at < LOADED ? (int)(last - at) : LOADED;                                    \
                LOAD(x, dtype, at, count, values);                                                                   \
                for (int i = 0; i < count; i++) {                                                                    \
                    const int32_t bits = (int32_t)(float_to_bits(values[i]) & 0x7fffffff);                           \
                    largest = bits > largest ? bits : largest;                                                       \
                }                                                                                                    \
            }                                                                                                        \
            if (largest >= FP32_INF) return 1;                                                                       \
            const float scale = bits_to_float((uint32_t)largest) / 127.0f;                                           \
            scales[b] = scale;                                                                                       \
            if (scale == 0.0f) {                                                                                     \
                memset(codes + first, 0, (size_t)(last - first));                                                    \
                continue;                                                                                            \
            }                                                                                                        \
            for (int64_t at = first; at < last; at += LOADED) {                                                      \
                const int count = last - at < LOADED ? (int)(last - at) : LOADED;                                    \
                LOAD(x, dtype, at, count, values);                                                                   \
                for (int i = 0; i < count; i++) {                                                                    \
                    float y = values[i] / scale;                                                                     \
                    y = y > 127.0f ? 127.0f : y; /* a subnormal scale is rounded itself */                           \
                    y = y < -127.0f ? -127.0f : y;                                                                   \
                    codes[at + i] = (int8_t)(int32_t)((y + ROUND_SHIFT) - ROUND_SHIFT);                              \
                }                                                                                                    \
            }                                                                                                        \
        }                                                                                                            \
        return 0;                                                                                                    \
    }

static inline float divisor(float absmax) { return absmax < ABSMAX_FLOOR ? ABSMAX_FLOOR : absmax; }

static inline void scales_plain(const uint8_t *q, const float *code, float scale, float offset, int64_t count,
                                float *scales) {
    for (int64_t i = 0; i < count; i++) scales[i] = code[q[i]] * scale + offset;
}

/* Counter-based dropout: splitmix64 spreads the row's key, then two 32-bit rounds mix in the column. */
static inline uint64_t spread_key(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline void keep_row_plain(uint64_t key, int64_t columns, uint32_t threshold, uint8_t *out) {
    const uint64_t spread = spread_key(key);
    const uint32_t low = (uint32_t)spread, high = (uint32_t)(spread >> 32);
    for (int64_t c = 0; c < columns; c++) {
        uint32_t h = (uint32_t)c + low;
        h = (h ^ (h >> 16)) * 0x7feb352du;
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h = (h ^ (h >> 16) ^ high) * 0x7feb352du;
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h ^= h >> 16;
        out[c] = h >= threshold;
    }
}

#endif
