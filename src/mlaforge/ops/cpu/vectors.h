// What the kernels share: bf16 numbers widened, the ends of rows masked, e^x.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using bf16 = at::BFloat16;
constexpr int64_t LANES = 32;  // bf16 numbers of a vector
constexpr float INF = std::numeric_limits<float>::infinity();

inline __m512 widened(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __mmask32 tail32(int64_t left) { return left >= LANES ? ~__mmask32(0) : (__mmask32(1) << left) - 1; }
inline __mmask16 tail16(int64_t left) { return left >= 16 ? ~__mmask16(0) : __mmask16((1u << left) - 1); }

// e^x for x <= 0 to 2e-7: x = (i + f) ln 2, a polynomial in f on [-1/2, 1/2], the exponent by scaling.
inline __m512 exponential(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(1.44269504088896341f));
  const __m512 i = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, i);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, i);
}

