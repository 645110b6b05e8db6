// MXFP4 to fp32 (ops/mxfp4.py has the format), for products of many rows: there a weight is unpacked once and multiplied
// by the library, which is faster than any product that decodes as it goes.
//
// Limit: writing four bytes a weight.
#pragma once
#include "vectors.h"

// 2^(exponent - 127). The least is below fp32's normal numbers, the greatest becomes infinity.
inline float mxfp4_power(uint8_t exponent) {
  const uint32_t bits = exponent ? uint32_t(exponent) << 23 : 1u << 22;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// blocks uint8 [..., G, 16], scales uint8 [..., G] -> fp32 [..., 32 G]; products by a power of two, so nothing is rounded.
at::Tensor unpack_mxfp4(const at::Tensor& blocks, const at::Tensor& scales) {
  const at::Tensor codes = blocks.contiguous(), exponents = scales.contiguous();
  TORCH_CHECK(codes.numel() == 16 * exponents.numel(), "16 bytes of codes to each scale");
  auto sizes = exponents.sizes().vec();
  sizes.back() *= 32;
  at::Tensor out = at::empty(sizes, codes.options().dtype(at::kFloat));
  const uint8_t *from = codes.const_data_ptr<uint8_t>(), *powers = exponents.const_data_ptr<uint8_t>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, exponents.numel(), 1024, [&](int64_t begin, int64_t end) {
    const __m128i low = _mm_set1_epi8(15);
    const __m256 sizes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    for (int64_t g = begin; g < end; ++g) {
      const __m128i own = _mm_loadu_si128((const __m128i*)(from + g * 16));
      const __m128i even = _mm_and_si128(own, low), odd = _mm_and_si128(_mm_srli_epi16(own, 4), low);
      const __m128i halves[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
      const __m256 power = _mm256_set1_ps(mxfp4_power(powers[g]));
      for (int i = 0; i < 4; ++i) {
        const __m256i code = _mm256_cvtepu8_epi32(i % 2 ? _mm_srli_si128(halves[i / 2], 8) : halves[i / 2]);
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
        const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, code), _mm256_castsi256_ps(sign));
        _mm256_storeu_ps(to + g * 32 + i * 8, _mm256_mul_ps(value, power));
      }
    }
  });
  return out;
}
