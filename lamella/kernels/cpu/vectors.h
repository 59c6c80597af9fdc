/* Registers of 16 values, bf16 or fp32 in memory. For AVX-512 sources alone. */
#ifndef LAMELLA_VECTORS_H
#define LAMELLA_VECTORS_H

#include <immintrin.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __mmask16 lanes(int64_t left) { return left >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << left) - 1); }

INLINE const void *at(const void *x, int dtype, int64_t i) { return (const char *)x + i * (dtype == FP32 ? 4 : 2); }
INLINE void *at_out(void *x, int dtype, int64_t i) { return (char *)x + i * (dtype == FP32 ? 4 : 2); }

INLINE __m512 load(const void *x, int dtype, int64_t i, __mmask16 m) {
    if (dtype == FP32) return _mm512_maskz_loadu_ps(m, (const float *)x + i);
    const __m256i half = _mm256_maskz_loadu_epi16(m, (const uint16_t *)x + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE void store(void *x, int dtype, int64_t i, __mmask16 m, __m512 v) {
    if (dtype == FP32)
        _mm512_mask_storeu_ps((float *)x + i, m, v);
    else
        _mm256_mask_storeu_epi16((uint16_t *)x + i, m, (__m256i)_mm512_cvtneps_pbh(v));
}

/* e^v to 2 ulp: v = n ln2 + r, a polynomial in r (Cephes expf), scaled by 2^n. NaN stays. Below -80 as at -80: what is
   multiplied with it stays clear of subnormals, which take hundreds of cycles each. */
INLINE __m512 exp16(__m512 v) {
    v = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-80.0f), v));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

#endif
