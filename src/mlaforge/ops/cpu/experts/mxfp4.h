// Products of 16-bit integer rows with MXFP4 weights as a checkpoint stores them; weights are not unpacked in memory.
//
// A weight is a 4-bit code times a power of two that 32 inputs of an output share (ops/mxfp4.py; the smallest power, 2^-127,
// counts as 0 here). Doubled codes are small integers, and x is a 16-bit integer times its row's scale. So 32 inputs of an
// output are 16 bytes, two lookups, and four integer sums of eight products, which are exact in fp32; each is then
// multiplied by its power of two. fp32 sums run over the inputs in order, so a row's result does not depend on the other
// rows.
//
// Limits. Few rows: reading 4.25 bits per weight. Many: nine instructions per row and register of codes, and thirteen for
// all rows together.
//
// Legend: K inputs, a multiple of 32, M outputs, G = K / 32 groups.
#pragma once
#include "simd/registers.h"
#include "simd/scratch.h"
#include "simd/vectors.h"

// One register of: codes of some groups (16 bytes each, even inputs in the low nibbles), 16- or 32-bit integers, or sums,
// four per group.
#ifdef __AVX512F__
using Sums = __m512;

// The first and the last eight bytes of each 16, times 256.
inline Register widen_low(Register x) { return _mm512_unpacklo_epi8(_mm512_setzero_si512(), x); }
inline Register widen_high(Register x) { return _mm512_unpackhi_epi8(_mm512_setzero_si512(), x); }
inline Register dot(Register a, Register b) { return _mm512_dpwssd_epi32(_mm512_setzero_si512(), a, b); }
inline Register dot(Register a, Register b, Register c) { return _mm512_dpwssd_epi32(c, a, b); }
inline Sums fma_int32(Register x, Sums scale, Sums to) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), scale, to); }
// Codes, and below exponents, of `count` of up to four groups, padded with zeros.
inline Register load_codes(const uint8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi32(__mmask16(lanes_between(0, 4 * count)), from);
}
inline __m128i load_exponents(const uint8_t* from) {
  int32_t bits;
  std::memcpy(&bits, from, 4);
  return _mm_cvtsi32_si128(bits);
}
inline __m128i load_exponents(const uint8_t* from, int64_t count) {
  return _mm_maskz_loadu_epi8(__mmask16(lanes_between(0, count)), from);
}
// Each group's power of two, four times, from its biased exponent.
inline Sums powers(__m128i exponents) {
  const __m128i repeated = _mm_shuffle_epi8(exponents, _mm_set_epi32(0x03030303, 0x02020202, 0x01010101, 0));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(repeated), 23));
}
inline Sums zero_sums() { return _mm512_setzero_ps(); }
inline float total(Sums x) { return _mm512_reduce_add_ps(x); }
#else
using Sums = __m256;

inline Register widen_low(Register x) { return _mm256_unpacklo_epi8(_mm256_setzero_si256(), x); }
inline Register widen_high(Register x) { return _mm256_unpackhi_epi8(_mm256_setzero_si256(), x); }
inline Register dot(Register a, Register b) { return _mm256_madd_epi16(a, b); }
inline Register dot(Register a, Register b, Register c) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }
inline Sums fma_int32(Register x, Sums scale, Sums to) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), scale, to); }
// One of two groups.
inline Register load_codes(const uint8_t* from, int64_t) {
  return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
inline __m128i load_exponents(const uint8_t* from) {
  int16_t bits;
  std::memcpy(&bits, from, 2);
  return _mm_cvtsi32_si128(bits);
}
inline __m128i load_exponents(const uint8_t* from, int64_t) { return _mm_cvtsi32_si128(*from); }
inline Sums powers(__m128i exponents) {
  const __m128i repeated = _mm_shuffle_epi8(exponents, _mm_set_epi32(0, 0, 0x01010101, 0));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(repeated), 23));
}
inline Sums zero_sums() { return _mm256_setzero_ps(); }
inline float total(Sums x) { return reduce_add(Floats{x, _mm256_setzero_ps()}); }
#endif

inline Register lookup_codes(__m128i table, Register codes) {
  return shuffle_bytes(broadcast_lanes(table), and_(codes, broadcast(0x0f0f0f0f)));
}

constexpr int64_t MX_REGISTER = sizeof(Register), MX_GROUPS = MX_REGISTER / 16, MX_INPUTS = 32 * MX_GROUPS;

// E2M1 values, doubled.
inline __m128i mxfp4_values() { return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }

// Rows of x in the kernel's order: per register of codes, four registers of integers: of each group's even inputs the first
// and the last eight, then of its odd inputs.
class Int16Rows {
 public:
  Int16Rows(int64_t rows, int64_t K)
      : K_(K), length_((K + MX_INPUTS - 1) / MX_INPUTS * MX_INPUTS),
        scales_(scratch_.get<float>(rows)), data_(scratch_.get<int16_t>(rows * length_)) {}

  const int16_t* row(int64_t n) const { return data_ + n * length_; }
  // Factor of a sum: codes are doubled, and products are times 256.
  float scale(int64_t n) const { return scales_[n]; }

  // Quantizes a row. A NaN makes the scale, and so all results, NaN.
  template <typename Load>
  void put(int64_t n, Load&& load16) {
    const float largest = largest_magnitude(K_, load16), scale = std::max(largest, 1e-30f) / 32767.0f;
    const bool has_nan = std::isnan(largest);
    scales_[n] = scale / 512.0f;
    const Floats inverse = splat(has_nan ? 0.0f : 1.0f / scale), zero = splat(0.0f);
    int16_t* to = data_ + n * length_;
    for (int64_t k = 0; k < length_; k += 32) {
      alignas(64) float rounded[32];
      for (int64_t i = 0; i < 32; i += 16)
        store(rounded + i, has_nan || k >= K_ ? zero : round_nearest(load16(k + i) * inverse));
      int16_t* group = to + k / MX_INPUTS * MX_INPUTS + k % MX_INPUTS / 4;
      for (int64_t odd = 0; odd < 2; ++odd)
        for (int64_t i = 0; i < 16; ++i) group[(2 * odd + i / 8) * MX_INPUTS / 4 + i % 8] = int16_t(rounded[2 * i + odd]);
    }
  }

 private:
  const int64_t K_, length_;
  Scratch scratch_;
  float* const scales_;
  int16_t* const data_;
};

// A weight's outputs: codes [M, K / 2] and exponents [M, G].
struct Mxfp4 {
  const uint8_t *codes, *exponents;
  int64_t K;

  int64_t groups() const { return K / 32; }
  Mxfp4 from(int64_t output) const { return {codes + output * K / 2, exponents + output * groups(), K}; }
};

// B outputs, `output_stride` apart, for R rows: y [R, B].
template <int R, int B>
__attribute__((noinline)) void mxfp4_product(const Mxfp4& weights, int64_t output_stride, const int16_t* const* x, float* y) {
  Sums sums[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = zero_sums();
  const __m128i table = mxfp4_values();
  const int64_t groups = weights.groups(), bytes = output_stride * weights.K / 2;
  // Groups [g, g + count): a whole register, or the remainder.
  auto step = [&](int64_t g, auto count) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const uint8_t* codes = weights.codes + b * bytes + g * 16;
      const uint8_t* exponents = weights.exponents + b * output_stride * groups + g;
      const bool whole = count == MX_GROUPS;
      const Register packed = whole ? load_register(codes) : load_codes(codes, count);
      const Sums scale = powers(whole ? load_exponents(exponents) : load_exponents(exponents, count));
      const Register even = lookup_codes(table, packed), odd = lookup_codes(table, srli<4>(packed));
      const Register a = widen_low(even), c = widen_high(even), d = widen_low(odd), e = widen_high(odd);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Register* at = (const Register*)(x[r] + g * 32);
        sums[r][b] = fma_int32(dot(e, at[3], dot(d, at[2], dot(c, at[1], dot(a, at[0])))), scale, sums[r][b]);
      }
    }
  };
  const int64_t whole = groups / MX_GROUPS * MX_GROUPS;
  for (int64_t g = 0; g < whole; g += MX_GROUPS) step(g, std::integral_constant<int64_t, MX_GROUPS>());
  if (whole < groups) step(whole, groups - whole);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) y[r * B + b] = total(sums[r][b]);
}
