/* Plain C: any machine. The compiler vectorises the inner loops for its baseline. */
#include "kernels.h"

enum { STEP = 32 }; /* divides every block size */

static const float table[16] = {NF4_VALUES};
static const float midpoints[15] = {NF4_MIDPOINTS};
static const float mx_values[16] = {MX_VALUES};

static int quantize(const void *x, int dtype, int64_t block, int64_t b0, int64_t b1, uint8_t *codes, float *absmax) {
    float values[BLOCK_MAX];
    for (int64_t b = b0; b < b1; b++) {
        const int64_t first = b * block;
        int32_t largest = 0;
        for (int64_t i = 0; i < block; i++) values[i] = load_value(x, dtype, first + i);
        for (int64_t i = 0; i < block; i++) {
            const int32_t bits = (int32_t)(float_to_bits(values[i]) & 0x7fffffff);
            largest = bits > largest ? bits : largest;
        }
        if (largest >= FP32_INF) return 1;
        absmax[b] = bits_to_float((uint32_t)largest);
        const float inverse = 1.0f / divisor(absmax[b]);
        for (int64_t i = 0; i < block; i += STEP) {
            int32_t code[STEP] = {0};
            for (int k = 0; k < 15; k++)
                for (int j = 0; j < STEP; j++) code[j] += values[i + j] * inverse > midpoints[k];
            for (int j = 0; j < STEP; j += 2) codes[(first + i + j) / 2] = (uint8_t)(code[j] << 4 | code[j + 1]);
        }
    }
    return 0;
}

static void dequantize(const uint8_t *codes, const float *scales, void *out, int dtype, int64_t block, int64_t b0,
                       int64_t b1, int stream) {
    (void)stream;
    for (int64_t b = b0; b < b1; b++) {
        const uint8_t *in = codes + b * block / 2;
        const float scale = scales[b - b0];
        if (dtype == FP32) {
            float scaled[16], *to = (float *)out + b * block;
            for (int k = 0; k < 16; k++) scaled[k] = table[k] * scale;
            for (int64_t i = 0; i < block / 2; i++) {
                to[2 * i] = scaled[in[i] >> 4];
                to[2 * i + 1] = scaled[in[i] & 15];
            }
        } else {
            uint16_t scaled[16], *to = (uint16_t *)out + b * block;
            for (int k = 0; k < 16; k++)
                scaled[k] = dtype == BF16 ? float_to_bf16(table[k] * scale) : float_to_fp16(table[k] * scale);
            for (int64_t i = 0; i < block / 2; i++) {
                to[2 * i] = scaled[in[i] >> 4];
                to[2 * i + 1] = scaled[in[i] & 15];
            }
        }
    }
}

static inline void load(const void *x, int dtype, int64_t first, int count, float *to) {
    for (int i = 0; i < count; i++) to[i] = load_value(x, dtype, first + i);
}

QUANTIZE_MX(load)
QUANTIZE_INT8(load)

static void dequantize_mx(const uint8_t *codes, const uint8_t *scales, void *out, int dtype, int64_t b0, int64_t b1,
                          int stream) {
    (void)stream;
    for (int64_t b = b0; b < b1; b++) {
        const uint8_t *in = codes + b * (MX_BLOCK / 2);
        const float scale = mx_scale(scales[b - b0]);
        if (dtype == FP32) {
            float scaled[16], *to = (float *)out + b * MX_BLOCK;
            for (int k = 0; k < 16; k++) scaled[k] = mx_values[k] * scale;
            for (int i = 0; i < MX_BLOCK / 2; i++) {
                to[2 * i] = scaled[in[i] & 15];
                to[2 * i + 1] = scaled[in[i] >> 4];
            }
        } else {
            uint16_t scaled[16], *to = (uint16_t *)out + b * MX_BLOCK;
            for (int k = 0; k < 16; k++)
                scaled[k] = dtype == BF16 ? float_to_bf16(mx_values[k] * scale) : float_to_fp16(mx_values[k] * scale);
            for (int i = 0; i < MX_BLOCK / 2; i++) {
                to[2 * i] = scaled[in[i] & 15];
                to[2 * i + 1] = scaled[in[i] >> 4];
            }
        }
    }
}

static void dequantize_int8(const int8_t *codes, const float *scales, void *out, int dtype, int64_t n, int64_t block,
                            int64_t b0, int64_t b1, int stream) {
    (void)stream;
    for (int64_t b = b0; b < b1; b++) {
        const int64_t first = b * block, last = first + block < n ? first + block : n;
        const float scale = scales[b];
        if (dtype == FP32)
            for (int64_t i = first; i < last; i++) ((float *)out)[i] = (float)codes[i] * scale;
        else if (dtype == BF16)
            for (int64_t i = first; i < last; i++) ((uint16_t *)out)[i] = float_to_bf16((float)codes[i] * scale);
        else
            for (int64_t i = first; i < last; i++) ((uint16_t *)out)[i] = float_to_fp16((float)codes[i] * scale);
    }
}

static const kernel_set set = {quantize,       dequantize,    scales_plain,  keep_row_plain,
                               quantize_mx,    dequantize_mx, quantize_int8, dequantize_int8};
const kernel_set *const kernels_portable = &set;
