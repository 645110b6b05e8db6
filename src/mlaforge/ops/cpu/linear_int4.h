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
#include "registers.h"

constexpr int64_t STEP_BYTES = 576;

// A part of an unpacked line after the other: as much as a register holds.
inline void unpack_step(const uint8_t* from, uint8_t* to) {
  constexpr int PART = sizeof(Register);
  const Register lowest = broadcast(0x000f000f), second = broadcast(0x00f000f0), third = broadcast(0x0f000f00),
                 highest = broadcast(0xf000f000), upper = broadcast(0xff00ff00);
  const Register lanes = in_each_lane(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  const Register step_of = sum_of_bytes(lanes, broadcast(0x80008000)), zero_of = sum_of_bytes(lanes, broadcast(0x01010101));
  for (int group = 0; group < 2; ++group)
    for (int part = 0; part < 64; part += PART) {
      const Register pairs = widened((const uint16_t*)(from + group * 32 + part / 2));
      const Register step = shuffled(pairs, step_of), zero = shuffled(pairs, zero_of), large = slli<4>(step);
      for (int v = 4 * group; v < 4 * group + 4; ++v) {
        const Register codes = loaded(from + 64 + v * 64 + part);
        // The upper and the lower half of a product are a code's place, so nothing is shifted.
        const Register a = upper_product(and_(codes, highest), step), b = lower_product(and_(codes, second), step);
        const Register c = upper_product(and_(codes, third), large), d = lower_product(and_(codes, lowest), large);
        uint8_t* line = to + v * 128 + part;
        stored(line, sum_of_bytes(or_(and_(b, upper), a), zero));
        stored(line + 64, sum_of_bytes(or_(and_(d, upper), c), zero));
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
                       const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& residual_NM, bool wide) {
  const int64_t blocks = packed.size(0), steps = packed.size(1);
  const Nibbles weights{packed.const_data_ptr<uint8_t>()};
  return whole_product(weights, steps, blocks, x_NK, scales, Sink(x_NK, M, bias_M, residual_NM, wide));
}
