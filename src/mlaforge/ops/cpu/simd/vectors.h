// Vectors of 16 elements: one register of AVX-512, or two of AVX2. Kernels are written once on top of these. A sum never
// depends on which other elements are computed with it.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using bf16 = at::BFloat16;
constexpr int64_t LANES = 32;  // bf16 elements of 16 pairs
constexpr float INF = std::numeric_limits<float>::infinity();

// Prefetches into L2. Written in assembly because GCC removes calls of functions that only prefetch.
inline void prefetch_bytes(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) asm volatile("prefetcht1 %0" : : "m"(((const char*)from)[at]));
}

// Rounds a non-negative x up to bf16. NaN stays NaN.
inline bf16 round_up_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? bf16(x) : bf16(uint16_t((bits + 0xffff) >> 16), bf16::from_bits());
}

using Bits = uint32_t;  // one bit per element, the first one lowest

// Elements [low, high).
inline Bits lanes_between(int64_t low, int64_t high) {
  auto below = [](int64_t n) { return n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1; };
  return below(high) & ~below(low);
}

#ifdef __AVX512F__

struct Floats { __m512 reg; };

// Only AVX2 has too few registers.
template <typename T>
const T* reloaded(const T* from) { return from; }

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const float* from, int64_t count) {
  return {_mm512_maskz_loadu_ps(__mmask16(lanes_between(0, count)), from)};
}
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x.reg); }
inline void store(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, __mmask16(lanes_between(0, count)), x.reg); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.reg, b.reg)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.reg, b.reg)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.reg, b.reg)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.reg, b.reg)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.reg, b.reg, c.reg)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.reg, b.reg)}; }
inline Floats abs(Floats x) { return {_mm512_abs_ps(x.reg)}; }
inline Bits greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.reg, b.reg, _CMP_GT_OQ); }
inline Floats select(Bits bits, Floats a, Floats b) { return {_mm512_mask_blend_ps(__mmask16(bits), b.reg, a.reg)}; }
inline float reduce_add(Floats x) { return _mm512_reduce_add_ps(x.reg); }
inline float reduce_max(Floats x) { return _mm512_reduce_max_ps(x.reg); }

inline Floats round_nearest(Floats x) { return {_mm512_roundscale_ps(x.reg, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^i.
inline Floats scale_by_power(Floats x, Floats i) { return {_mm512_scalef_ps(x.reg, i.reg)}; }
constexpr float MIN_EXPONENT = -104.0f;

inline Floats widen(const bf16* from, int64_t count) {
  const __m256i half = _mm256_maskz_loadu_epi16(__mmask16(lanes_between(0, count)), from);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

inline void narrow(bf16* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, __mmask16(lanes_between(0, count)), (__m256i)_mm512_cvtneps_pbh(x.reg));
}

inline void narrow(bf16* to, Floats x, Floats y) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(y.reg, x.reg)); }

inline Floats lane_indices() { return {_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}; }

inline Floats widen(const int8_t* from) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)))};
}
inline Floats widen(const int8_t* from, int64_t count) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(__mmask16(lanes_between(0, count)), from)))};
}

// Low and high nibbles of 16 bytes.
inline void unpack_nibbles(const uint8_t* from, Floats& lower, Floats& upper) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
  lower = {_mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)))};
  upper = {_mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4))};
}

// bf16 is the upper half of fp32. Reads two bytes before x.
inline Floats broadcast(const bf16* x) {
  int32_t bits;
  std::memcpy(&bits, x - 1, 4);
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_set1_epi32(bits), _mm512_set1_epi32(0xffff0000)))};
}

// Sixteen pairs of bf16 elements.
struct Pairs { __m512i reg; };

inline Pairs pairs(const bf16* from) { return {_mm512_loadu_si512(from)}; }
inline Pairs pairs(const bf16* from, int64_t count) {
  return {_mm512_maskz_loadu_epi16(count >= LANES ? ~__mmask32(0) : (__mmask32(1) << count) - 1, from)};
}
// Four pairs from each of four addresses.
inline Pairs gather_four(const bf16* a, const bf16* b, const bf16* c, const bf16* d) {
  auto at = [](const bf16* from) { return _mm_loadu_si128((const __m128i*)from); };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(at(a)), at(b), 1);
  return {_mm512_inserti32x4(_mm512_inserti32x4(two, at(c), 2), at(d), 3)};
}
inline void store(bf16* to, Pairs x) { _mm512_storeu_si512(to, x.reg); }
// bf16 is the upper half of fp32: a shift or a mask widens it.
inline Floats even(Pairs x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.reg, 16))}; }
inline Floats odd(Pairs x) { return {_mm512_castsi512_ps(_mm512_and_si512(x.reg, _mm512_set1_epi32(0xffff0000)))}; }
inline Pairs low32(Pairs a, Pairs b) { return {_mm512_unpacklo_epi32(a.reg, b.reg)}; }
inline Pairs high32(Pairs a, Pairs b) { return {_mm512_unpackhi_epi32(a.reg, b.reg)}; }
inline Pairs low64(Pairs a, Pairs b) { return {_mm512_unpacklo_epi64(a.reg, b.reg)}; }
inline Pairs high64(Pairs a, Pairs b) { return {_mm512_unpackhi_epi64(a.reg, b.reg)}; }
// Interleaves a and b: even and odd groups of four elements.
inline Pairs even_fours(Pairs a, Pairs b) { return {_mm512_unpacklo_epi16(a.reg, b.reg)}; }
inline Pairs odd_fours(Pairs a, Pairs b) { return {_mm512_unpackhi_epi16(a.reg, b.reg)}; }

// Sixteen 32-bit integers.
struct Ints { __m512i reg; };

inline Ints zero_ints() { return {_mm512_setzero_si512()}; }
inline Ints dot(Pairs a, Pairs b, Ints c) { return {_mm512_dpwssd_epi32(c.reg, a.reg, b.reg)}; }
inline Floats dot(Pairs a, Pairs b, Floats c) { return {_mm512_dpbf16_ps(c.reg, (__m512bh)a.reg, (__m512bh)b.reg)}; }
inline Floats floats(Ints x) { return {_mm512_cvtepi32_ps(x.reg)}; }
inline Floats floats(Floats x) { return x; }
// Whether pairs of bf16 are multiplied at the instruction rate of fp32, so twice the products (AMD since Zen 4). Intel's
// processors multiply pairs without tiles at a third to a half of that rate.
inline bool pairs_are_fast() {
  static const bool amd = __builtin_cpu_is("amd");
  return amd;
}
// Rounds to the nearest integers.
inline void store(int16_t* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.reg)));
}
inline void store(int8_t* to, Floats x, int64_t count) {
  _mm_mask_storeu_epi8(to, __mmask16(lanes_between(0, count)), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.reg)));
}
inline Pairs broadcast(const int16_t* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return {_mm512_set1_epi32(bits)};
}
// Eight bytes from each of four addresses, widened.
inline Pairs gather_four(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d) {
  auto at = [](const int8_t* from) { return _mm_loadu_si64(from); };
  const __m128i low = _mm_unpacklo_epi64(at(a), at(b)), high = _mm_unpacklo_epi64(at(c), at(d));
  return {_mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1))};
}
// Interleaves and widens 16 bytes of each.
inline Pairs interleave(__m128i a, __m128i b) {
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(a, b));
  return {_mm512_cvtepi8_epi16(_mm256_inserti128_si256(low, _mm_unpackhi_epi8(a, b), 1))};
}

inline void store(bf16* to, Pairs x, int64_t count) {
  _mm512_mask_storeu_epi16(to, count >= LANES ? ~__mmask32(0) : (__mmask32(1) << count) - 1, x.reg);
}

// Rounds to bf16 and interleaves.
inline Pairs narrow_interleaved(Floats evens, Floats odds) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odds.reg, evens.reg))};
}

// Table of 16 bf16 values that the nibbles of 16 bytes index.
struct NibbleLookup {
  __m512i reg;

  explicit NibbleLookup(Floats x) : reg(_mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(x.reg))) {}
  Pairs of(const uint8_t* from) const {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m512i spread = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return {_mm512_permutexvar_epi16(_mm512_and_si512(spread, _mm512_set1_epi32(0x000f000f)), reg)};
  }
};

// Stores 32 elements given as even and odd ones.
inline void store_interleaved(float* to, Floats evens, Floats odds) {
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(evens.reg, first, odds.reg));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(evens.reg, second, odds.reg));
}

// Stores 32 elements given as even and odd groups of four.
inline void store_fours(float* to, Floats evens, Floats odds) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(evens.reg, first, odds.reg));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(evens.reg, second, odds.reg));
}

#else

struct Floats { __m256 low, high; };

// Returns an address from which the compiler loads again what it would keep in registers: accumulators need all of them.
template <typename T>
const T* reloaded(const T* from) {
  asm volatile("" : "+r"(from));
  return from;
}

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(const float* from, int64_t count) {
  if (count >= 16) return load(from);
  alignas(32) float buffer[16] = {};
  std::memcpy(buffer, from, count * sizeof(float));
  return load(buffer);
}
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }
inline void store(float* to, Floats x, int64_t count) {
  if (count >= 16) return store(to, x);
  alignas(32) float buffer[16];
  store(buffer, x);
  std::memcpy(to, buffer, count * sizeof(float));
}
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Bits greater(Floats a, Floats b) {
  return Bits(_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ))) |
         Bits(_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))) << 8;
}
inline Floats select(Bits bits, Floats a, Floats b) {
  const __m256i one = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  auto mask = [&](Bits of) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(of)), one), one));
  };
  return {_mm256_blendv_ps(b.low, a.low, mask(bits)), _mm256_blendv_ps(b.high, a.high, mask(bits >> 8))};
}
inline float reduce_add(Floats x) {
  const __m256 lanes = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float reduce_max(Floats x) {
  const __m256 lanes = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline Floats round_nearest(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}
// x * 2^i, where 2^i is a normal number.
inline Floats scale_by_power(Floats x, Floats i) {
  auto power = [](__m256 i) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(i), _mm256_set1_epi32(127)), 23));
  };
  return x * Floats{power(i.low), power(i.high)};
}
constexpr float MIN_EXPONENT = -87.3f;

struct Pairs { __m256i low, high; };

inline Pairs pairs(const bf16* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + 16))};
}
inline Pairs pairs(const bf16* from, int64_t count) {
  if (count >= LANES) return pairs(from);
  alignas(32) uint16_t buffer[LANES] = {};
  std::memcpy(buffer, from, count * 2);
  return pairs((const bf16*)buffer);
}
// Four pairs from each of four addresses.
inline Pairs gather_four(const bf16* a, const bf16* b, const bf16* c, const bf16* d) {
  auto at = [](const bf16* from) { return _mm_loadu_si128((const __m128i*)from); };
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(at(a)), at(b), 1),
          _mm256_inserti128_si256(_mm256_castsi128_si256(at(c)), at(d), 1)};
}
inline void store(bf16* to, Pairs x) {
  _mm256_storeu_si256((__m256i*)to, x.low), _mm256_storeu_si256((__m256i*)(to + 16), x.high);
}
// bf16 is the upper half of fp32: a shift or a mask widens it.
inline Floats even(Pairs x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.high, 16))};
}
inline Floats odd(Pairs x) {
  const __m256i upper = _mm256_set1_epi32(0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.low, upper)), _mm256_castsi256_ps(_mm256_and_si256(x.high, upper))};
}
inline Pairs low32(Pairs a, Pairs b) { return {_mm256_unpacklo_epi32(a.low, b.low), _mm256_unpacklo_epi32(a.high, b.high)}; }
inline Pairs high32(Pairs a, Pairs b) { return {_mm256_unpackhi_epi32(a.low, b.low), _mm256_unpackhi_epi32(a.high, b.high)}; }
inline Pairs low64(Pairs a, Pairs b) { return {_mm256_unpacklo_epi64(a.low, b.low), _mm256_unpacklo_epi64(a.high, b.high)}; }
inline Pairs high64(Pairs a, Pairs b) { return {_mm256_unpackhi_epi64(a.low, b.low), _mm256_unpackhi_epi64(a.high, b.high)}; }

inline Floats widen(const bf16* from, int64_t count) {
  alignas(32) uint16_t buffer[16] = {};
  if (count < 16) std::memcpy(buffer, from, count * 2), from = (const bf16*)buffer;
  auto half = [](const bf16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
  };
  return {half(from), half(from + 8)};
}

inline Floats lane_indices() { return {_mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_ps(15, 14, 13, 12, 11, 10, 9, 8)}; }

inline Floats broadcast(const bf16* x) { return splat(*x); }

inline Floats widen(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  auto half = [](__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); };
  return {half(bytes), half(_mm_srli_si128(bytes, 8))};
}
inline Floats widen(const int8_t* from, int64_t count) {
  int8_t buffer[16] = {};
  std::memcpy(buffer, from, std::min<int64_t>(16, count));
  return widen(buffer);
}

// Low and high nibbles of 16 bytes.
inline void unpack_nibbles(const uint8_t* from, Floats& lower, Floats& upper) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  const __m256i low = _mm256_cvtepu8_epi32(bytes), high = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
  const __m256i half = _mm256_set1_epi32(15);
  lower = {_mm256_cvtepi32_ps(_mm256_and_si256(low, half)), _mm256_cvtepi32_ps(_mm256_and_si256(high, half))};
  upper = {_mm256_cvtepi32_ps(_mm256_srli_epi32(low, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(high, 4))};
}

// Sixteen 32-bit integers.
struct Ints { __m256i low, high; };

inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints dot(Pairs a, Pairs b, Ints c) {
  return {_mm256_add_epi32(c.low, _mm256_madd_epi16(a.low, b.low)), _mm256_add_epi32(c.high, _mm256_madd_epi16(a.high, b.high))};
}
inline Floats floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
// Rounds to the nearest integers.
inline void store(int16_t* to, Floats x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(int8_t* to, Floats x, int64_t count) {
  alignas(32) int16_t words[16];
  store(words, x);
  const __m128i bytes = _mm_packs_epi16(_mm_load_si128((const __m128i*)words), _mm_load_si128((const __m128i*)words + 1));
  if (count >= 16) return _mm_storeu_si128((__m128i*)to, bytes);
  std::memcpy(to, &bytes, count);
}
inline Pairs broadcast(const int16_t* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
// Eight bytes from each of four addresses, widened.
inline Pairs gather_four(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d) {
  auto two = [](const int8_t* x, const int8_t* y) {
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi64(_mm_loadu_si64(x), _mm_loadu_si64(y)));
  };
  return {two(a, b), two(c, d)};
}
// Interleaves and widens 16 bytes of each.
inline Pairs interleave(__m128i a, __m128i b) {
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}

// Rounds to bf16 in the upper half: nearest, ties to even; NaN stays NaN.
inline __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}

inline void narrow(bf16* to, Floats x, int64_t count) {
  auto upper = [](__m256 x) { return _mm256_srli_epi32(bf16_bits(x), 16); };
  const __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper(x.low), upper(x.high)), 0xd8);
  if (count >= 16) return _mm256_storeu_si256((__m256i*)to, all);
  alignas(32) uint16_t buffer[16];
  _mm256_store_si256((__m256i*)buffer, all);
  std::memcpy((void*)to, buffer, count * 2);
}

inline void narrow(bf16* to, Floats x, Floats y) { narrow(to, x, 16), narrow(to + 16, y, 16); }

inline void store(bf16* to, Pairs x, int64_t count) {
  if (count >= LANES) return store(to, x);
  alignas(32) uint16_t buffer[LANES];
  store((bf16*)buffer, x);
  std::memcpy((void*)to, buffer, count * 2);
}

// Rounds to bf16 and interleaves.
inline Pairs narrow_interleaved(Floats evens, Floats odds) {
  auto interleaved = [](__m256 even, __m256 odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(bf16_bits(even), 16), bf16_bits(odd), 0xaa);
  };
  return {interleaved(evens.low, odds.low), interleaved(evens.high, odds.high)};
}

// Table of 16 bf16 values that the nibbles of 16 bytes index.
struct NibbleLookup {
  __m256i lower, upper;  // their bytes, in both halves

  explicit NibbleLookup(Floats x) {
    alignas(16) uint16_t bits[16];
    narrow((bf16*)bits, x, 16);
    const __m128i low = _mm_load_si128((const __m128i*)bits), high = _mm_load_si128((const __m128i*)bits + 1);
    const __m128i byte = _mm_set1_epi16(0xff);
    lower = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(low, byte), _mm_and_si128(high, byte)));
    upper = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(low, 8), _mm_srli_epi16(high, 8)));
  }
  Pairs of(const uint8_t* from) const {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)from), half = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, half), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), half);
    const __m256i nibbles = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)),
        _mm_unpackhi_epi8(low, high), 1);
    const __m256i indices = _mm256_permute4x64_epi64(nibbles, 0xd8);
    const __m256i a = _mm256_shuffle_epi8(lower, indices), b = _mm256_shuffle_epi8(upper, indices);
    return {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
  }
};

// Stores 32 elements given as even and odd ones.
inline void store_interleaved(float* to, Floats evens, Floats odds) {
  auto put = [](float* to, __m256 even, __m256 odd) {
    const __m256 first = _mm256_unpacklo_ps(even, odd), second = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(first, second, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(first, second, 0x31));
  };
  put(to, evens.low, odds.low);
  put(to + 16, evens.high, odds.high);
}

#endif

// Loads up to 16 bytes, zero-padded.
inline __m128i bytes(const int8_t* from, int64_t count = 16) {
  if (count >= 16) return _mm_loadu_si128((const __m128i*)from);
  int8_t buffer[16] = {};
  std::memcpy(buffer, from, std::max<int64_t>(0, count));
  return _mm_loadu_si128((const __m128i*)buffer);
}

// e^x for x <= 0, to 2e-7: x = (i + f) ln 2, a polynomial in f on [-1/2, 1/2], and scaling by 2^i.
inline Floats exponential(Floats x) {
  const Floats t = max(x, splat(MIN_EXPONENT)) * splat(1.44269504088896341f), i = round_nearest(t), f = t - i;
  Floats y = splat(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) y = fma(y, f, splat(c));
  return scale_by_power(y, i);
}

inline float exponential(float x) {
  float y[16];
  store(y, exponential(splat(x)));
  return y[0];
}

// Largest magnitude of K elements, which load16 loads 16 at a time; NaN if one of them is NaN.
template <typename Load>
float largest_magnitude(int64_t K, Load&& load16) {
  Floats largest = splat(0.0f);
  bool has_nan = false;
  for (int64_t k = 0; k < K; k += 16) {
    const Floats magnitude = abs(load16(k));
    has_nan |= greater(magnitude, splat(-1.0f)) != 0xffff;
    largest = max(largest, magnitude);
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : reduce_max(largest);
}
