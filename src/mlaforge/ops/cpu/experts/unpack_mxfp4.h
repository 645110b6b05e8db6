// MXFP4 to fp32 (format: ops/mxfp4.py), for products of many rows: there it is faster to unpack a weight once and use the
// BLAS library than to decode within the product.
//
// Limit: writing four bytes per weight.
#pragma once
#include "simd/vectors.h"

// 2^(exponent - 127). The smallest is subnormal in fp32; the largest becomes infinity.
inline float mxfp4_power(uint8_t exponent) {
  const uint32_t bits = exponent ? uint32_t(exponent) << 23 : 1u << 22;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// blocks u8 [..., G, 16], scales u8 [..., G] -> fp32 [..., 32 G]. Exact: values are multiplied by powers of two.
at::Tensor unpack_mxfp4(const at::Tensor& blocks, const at::Tensor& scales) {
  const at::Tensor codes = blocks.contiguous(), exponents = scales.contiguous();
  TORCH_CHECK(codes.numel() == 16 * exponents.numel(), "MXFP4 needs 16 bytes of codes per scale");
  auto sizes = exponents.sizes().vec();
  sizes.back() *= 32;
  at::Tensor out = at::empty(sizes, codes.options().dtype(at::kFloat));
  const uint8_t *from = codes.const_data_ptr<uint8_t>(), *powers = exponents.const_data_ptr<uint8_t>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, exponents.numel(), 1024, [&](int64_t begin, int64_t end) {
    const __m128i low = _mm_set1_epi8(15);
    const __m256 sizes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    for (int64_t g = begin; g < end; ++g) {
      const __m128i packed = _mm_loadu_si128((const __m128i*)(from + g * 16));
      const __m128i even = _mm_and_si128(packed, low), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
      const __m128i nibbles[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
      const __m256 power = _mm256_set1_ps(mxfp4_power(powers[g]));
      for (int i = 0; i < 4; ++i) {
        const __m256i code = _mm256_cvtepu8_epi32(i % 2 ? _mm_srli_si128(nibbles[i / 2], 8) : nibbles[i / 2]);
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
        const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, code), _mm256_castsi256_ps(sign));
        _mm256_storeu_ps(to + g * 32 + i * 8, _mm256_mul_ps(value, power));
      }
    }
  });
  return out;
}
