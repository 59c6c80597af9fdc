/* NF4 kernels: what the compile units share.

   NF4: 16 quantiles of a normal distribution (QLoRA, appendix E), one fp32 scale (absmax) per block,
   two codes a byte, high nibble first. Every path gives the same bits:

     quantise    code = number of midpoints m with y > m, where y = x * (1 / absmax) in whole blocks and
                 x / absmax in a partial last block (bitsandbytes does it so), all in fp32;
     dequantise  table[code] * absmax in fp32, rounded to nearest even.

   A unit for an instruction set gives one `kernel_set`; units never call each other. */
#ifndef LAMELLA_KERNELS_H
#define LAMELLA_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FP32 = 0, BF16 = 1, FP16 = 2 };
enum { ABSMAX_BLOCK = 256, BLOCK_MAX = 4096 };

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
} kernel_set;

/* NULL where the unit was compiled for a machine without the instructions. */
extern const kernel_set *const kernels_avx512, *const kernels_avx2, *const kernels_portable;

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
