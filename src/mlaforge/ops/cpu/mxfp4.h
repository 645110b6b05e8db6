// Weights in MXFP4 as a checkpoint's file has them, times rows of whole numbers: nothing is unpacked in memory.
//
// A weight is a code of four bits times a power of two that 32 inputs of an output share (ops/mxfp4.py; the smallest,
// 2^-127, counts as 0 here). Codes are small whole numbers when they are doubled; x is a whole number of 16 bits times its
// row's scale. So 32 inputs of an output are 16 bytes, two lookups, and four whole sums of eight products, which fp32 holds
// exactly; each is then multiplied by its power of two. Sums of fp32 run over the inputs in their order, so that a row's
// result is the same whatever is computed beside it.
//
// Limits. Few rows: reading 4.25 bits a weight. Many: nine instructions for each row and register of codes, and thirteen
// for all rows together.
//
// Legend: K inputs, a multiple of 32, M outputs, G = K / 32 groups.
#pragma once
#include "registers.h"
#include "vectors.h"

// One register: codes of some groups, sixteen bytes each, whose even inputs are the lower halves; whole numbers of 16 and
// of 32 bits; and sums, four for each group.
#ifdef __AVX512F__
using Sums = __m512;

// The first and the last eight bytes of each sixteen, times 256.
inline Register first_wide(Register x) { return _mm512_unpacklo_epi8(_mm512_setzero_si512(), x); }
inline Register last_wide(Register x) { return _mm512_unpackhi_epi8(_mm512_setzero_si512(), x); }
inline Register dot(Register a, Register b) { return _mm512_dpwssd_epi32(_mm512_setzero_si512(), a, b); }
inline Register dot(Register a, Register b, Register c) { return _mm512_dpwssd_epi32(c, a, b); }
inline Sums added(Register x, Sums scale, Sums to) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), scale, to); }
// Codes of up to four groups, of which there are `count`; zeros behind them. So the exponents of these.
inline Register codes_of(const uint8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi32(__mmask16(between(0, 4 * count)), from);
}
inline __m128i exponents_of(const uint8_t* from) {
  int32_t some;
  std::memcpy(&some, from, 4);
  return _mm_cvtsi32_si128(some);
}
inline __m128i exponents_of(const uint8_t* from, int64_t count) {
  return _mm_maskz_loadu_epi8(__mmask16(between(0, count)), from);
}
// Powers of two for four numbers each, from exponents with their bias.
inline Sums powers(__m128i exponents) {
  const __m128i each = _mm_shuffle_epi8(exponents, _mm_set_epi32(0x03030303, 0x02020202, 0x01010101, 0));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(each), 23));
}
inline Sums no_sums() { return _mm512_setzero_ps(); }
inline float total(Sums x) { return _mm512_reduce_add_ps(x); }
#else
using Sums = __m256;

inline Register first_wide(Register x) { return _mm256_unpacklo_epi8(_mm256_setzero_si256(), x); }
inline Register last_wide(Register x) { return _mm256_unpackhi_epi8(_mm256_setzero_si256(), x); }
inline Register dot(Register a, Register b) { return _mm256_madd_epi16(a, b); }
inline Register dot(Register a, Register b, Register c) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }
inline Sums added(Register x, Sums scale, Sums to) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), scale, to); }
// Of up to two groups, of which there is one.
inline Register codes_of(const uint8_t* from, int64_t) { return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)from)); }
inline __m128i exponents_of(const uint8_t* from) {
  int16_t some;
  std::memcpy(&some, from, 2);
  return _mm_cvtsi32_si128(some);
}
inline __m128i exponents_of(const uint8_t* from, int64_t) { return _mm_cvtsi32_si128(*from); }
inline Sums powers(__m128i exponents) {
  const __m128i each = _mm_shuffle_epi8(exponents, _mm_set_epi32(0, 0, 0x01010101, 0));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(each), 23));
}
inline Sums no_sums() { return _mm256_setzero_ps(); }
inline float total(Sums x) { return sum(Floats{x, _mm256_setzero_ps()}); }
#endif

inline Register looked_up(__m128i table, Register codes) {
  return shuffled(in_each_lane(table), and_(codes, broadcast(0x0f0f0f0f)));
}

constexpr int64_t MX_REGISTER = sizeof(Register), MX_GROUPS = MX_REGISTER / 16, MX_INPUTS = 32 * MX_GROUPS;

// Doubled codes.
inline __m128i mxfp4_values() { return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }

// Rows of x as they are multiplied: for each register of codes four of whole numbers, of the even inputs' first and last
// eight of each group, and of the odd ones'.
class WholeRows {
 public:
  WholeRows(int64_t rows, int64_t K)
      : K_(K), length_((K + MX_INPUTS - 1) / MX_INPUTS * MX_INPUTS),
        numbers_(at::empty({rows * length_ + 32}, at::kShort)), scales_(rows), data_(align64(numbers_.mutable_data_ptr<int16_t>())) {}

  const int16_t* row(int64_t n) const { return data_ + n * length_; }
  // What a sum is multiplied by: codes are doubled, and times 256.
  float scale(int64_t n) const { return scales_[n]; }

  // A number that is none makes the scale, and so all results, none.
  template <typename Load>
  void put(int64_t n, Load&& load16) {
    const float largest = largest_size(K_, load16), scale = std::max(largest, 1e-30f) / 32767.0f;
    const bool none = std::isnan(largest);
    scales_[n] = scale / 512.0f;
    const Floats inverse = all(none ? 0.0f : 1.0f / scale), zero = all(0.0f);
    int16_t* to = data_ + n * length_;
    for (int64_t k = 0; k < length_; k += 32) {
      alignas(64) float whole[32];
      for (int64_t i = 0; i < 32; i += 16) store(whole + i, none || k >= K_ ? zero : nearest(load16(k + i) * inverse));
      int16_t* group = to + k / MX_INPUTS * MX_INPUTS + k % MX_INPUTS / 4;
      for (int64_t odd = 0; odd < 2; ++odd)
        for (int64_t i = 0; i < 16; ++i) group[(2 * odd + i / 8) * MX_INPUTS / 4 + i % 8] = int16_t(whole[2 * i + odd]);
    }
  }

 private:
  const int64_t K_, length_;
  at::Tensor numbers_;
  std::vector<float> scales_;
  int16_t* data_;
};

// Outputs of one weight: codes [M, K / 2] and exponents [M, G].
struct Mxfp4 {
  const uint8_t *codes, *exponents;
  int64_t K;

  int64_t groups() const { return K / 32; }
  Mxfp4 from(int64_t output) const { return {codes + output * K / 2, exponents + output * groups(), K}; }
};

// B outputs, each `apart` from the one before, for R rows: y [R, B].
template <int R, int B>
__attribute__((noinline)) void mxfp4_product(const Mxfp4& weights, int64_t apart, const int16_t* const* x, float* y) {
  Sums sums[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = no_sums();
  const __m128i table = mxfp4_values();
  const int64_t groups = weights.groups(), bytes = apart * weights.K / 2;
  // Groups g to g + count, a whole register's or those that are left.
  auto step = [&](int64_t g, auto count) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const uint8_t *codes = weights.codes + b * bytes + g * 16, *exponents = weights.exponents + b * apart * groups + g;
      const bool whole = count == MX_GROUPS;
      const Register own = whole ? loaded(codes) : codes_of(codes, count);
      const Sums scale = powers(whole ? exponents_of(exponents) : exponents_of(exponents, count));
      const Register even = looked_up(table, own), odd = looked_up(table, srli<4>(own));
      const Register a = first_wide(even), c = last_wide(even), d = first_wide(odd), e = last_wide(odd);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Register* at = (const Register*)(x[r] + g * 32);
        sums[r][b] = added(dot(e, at[3], dot(d, at[2], dot(c, at[1], dot(a, at[0])))), scale, sums[r][b]);
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
