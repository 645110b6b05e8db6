// Rows times weights of 4 bits: those of 8 bits, of which a group of 32 inputs takes 16 that are evenly spaced.
//
// A weight of 8 bits (linear_int8.h) is zero + (code * step >> 4), with a step and a zero for each group and output; a
// block is unpacked into bytes and multiplied as those are. Whole numbers from end to end, and the same kernels.
//
// Limits: as for 8 bits, with 4.5 bits a weight to read, and unpacking: six instructions for 64 weights, about 4
// cycles.
//
// Packed [M / 16, K / 64, 576]: for 64 inputs of 16 outputs twice 16 pairs of (step, zero), of the first and of the
// last 32 inputs, then eight vectors of codes. A vector holds two lines of linear_int8.h's layout: of 16 bits, the
// lowest four are the second byte of the second line, then the second of the first, the first of the second, the first
// of the first.
#pragma once
#include "linear_int8.h"

#ifdef __AVX512VNNI__
constexpr int64_t STEP_BYTES = 576;

inline void unpack_step(const uint8_t* from, uint8_t* to) {
  const __m512i lowest = _mm512_set1_epi16(0x000f), second = _mm512_set1_epi16(0x00f0),
                third = _mm512_set1_epi16(0x0f00), highest = _mm512_set1_epi16(int16_t(0xf000)),
                upper = _mm512_set1_epi16(int16_t(0xff00));
  const __m512i step_of = _mm512_set1_epi32(0x80008000), zero_of = _mm512_set1_epi32(0x01010101);
  const __m512i lanes = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  for (int group = 0; group < 2; ++group) {
    const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(from + group * 32)));
    const __m512i step = _mm512_shuffle_epi8(pairs, _mm512_add_epi8(lanes, step_of));
    const __m512i zero = _mm512_shuffle_epi8(pairs, _mm512_add_epi8(lanes, zero_of));
    const __m512i large = _mm512_slli_epi16(step, 4);
    for (int v = 0; v < 4; ++v) {
      const uint8_t* place = from + 64 + (group * 4 + v) * 64;
      const __m512i codes = _mm512_loadu_si512(place);
      // The upper and the lower half of a product are a code's place, so nothing is shifted.
      const __m512i a = _mm512_mulhi_epu16(_mm512_and_si512(codes, highest), step);
      const __m512i b = _mm512_mullo_epi16(_mm512_and_si512(codes, second), step);
      const __m512i c = _mm512_mulhi_epu16(_mm512_and_si512(codes, third), large);
      const __m512i d = _mm512_mullo_epi16(_mm512_and_si512(codes, lowest), large);
      uint8_t* line = to + (group * 4 + v) * 128;
      // (b & upper) | a
      _mm512_storeu_si512(line, _mm512_add_epi8(_mm512_ternarylogic_epi32(b, upper, a, 0xea), zero));
      _mm512_storeu_si512(line + 64, _mm512_add_epi8(_mm512_ternarylogic_epi32(d, upper, c, 0xea), zero));
    }
  }
}

struct Nibbles {
  const uint8_t* packed;

  Nibbles from(int64_t step) const { return {packed + step * STEP_BYTES}; }
  const uint8_t* step(int64_t s, uint8_t* scratch) const {
    unpack_step(packed + s * STEP_BYTES, scratch);
    return scratch;
  }
  void prefetch(int64_t s) const {
    for (int64_t line = 0; line < STEP_BYTES; line += 64)
      _mm_prefetch((const char*)packed + s * STEP_BYTES + 2048 + line, _MM_HINT_T0);
  }
  Bytes unpacked(int64_t steps, uint8_t* to) const {
    for (int64_t s = 0; s < steps; ++s) prefetch(s), step(s, to + s * TILE_BYTES);
    return {to};
  }
};

// x [N, K] in bf16 times weights packed in codes, else as linear_int8.
at::Tensor linear_int4(const at::Tensor& x_NK, const at::Tensor& packed, const at::Tensor& scales, int64_t M,
                       const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& plus_NM, bool wide) {
  const int64_t blocks = packed.size(0), steps = packed.size(1);
  const Nibbles weights{packed.const_data_ptr<uint8_t>()};
  return whole_product(weights, steps, blocks, x_NK, scales, Sink(x_NK, M, bias_M, plus_NM, wide));
}
#endif
