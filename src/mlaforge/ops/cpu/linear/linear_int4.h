// Rows times 4-bit weights, unpacked to 8 bits in blocks.
//
// An 8-bit weight (linear_int8.h) is zero + (code * step >> 4), with a step and a zero per output and group of 32 inputs. A
// block is unpacked to bytes, which the kernels for 8 bits multiply: integers throughout.
//
// Limits: as for 8 bits, but reading 4.5 bits per weight, plus unpacking: six instructions per 64 weights, about 4 cycles.
//
// Packed [M / 16, K / 64, 576]: for 64 inputs of 16 outputs, twice 16 pairs (step, zero), of the first and of the last 32
// inputs, then eight vectors of codes. A vector contains two lines of linear_int8.h's layout. From the lowest nibble of 16
// bits up: the second byte of the second line, the second of the first, the first of the second, the first of the first.
#pragma once
#include "linear/linear_int8.h"
#include "simd/registers.h"

constexpr int64_t STEP_BYTES = 576;

// Unpacks a step one register at a time.
inline void unpack_step(const uint8_t* from, uint8_t* to) {
  constexpr int PART = sizeof(Register);
  const Register lowest = broadcast(0x000f000f), second = broadcast(0x00f000f0), third = broadcast(0x0f000f00),
                 highest = broadcast(0xf000f000), upper = broadcast(0xff00ff00);
  const Register lanes = broadcast_lanes(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  const Register step_of = add_bytes(lanes, broadcast(0x80008000)), zero_of = add_bytes(lanes, broadcast(0x01010101));
  for (int group = 0; group < 2; ++group)
    for (int part = 0; part < 64; part += PART) {
      const Register pairs = widen((const uint16_t*)(from + group * 32 + part / 2));
      const Register step = shuffle_bytes(pairs, step_of), zero = shuffle_bytes(pairs, zero_of), step_times_16 = slli<4>(step);
      for (int v = 4 * group; v < 4 * group + 4; ++v) {
        const Register codes = load_register(from + 64 + v * 64 + part);
        // The high or low half of a product already has the code in place, so no shift is needed.
        const Register a = upper_product(and_(codes, highest), step), b = lower_product(and_(codes, second), step);
        const Register c = upper_product(and_(codes, third), step_times_16);
        const Register d = lower_product(and_(codes, lowest), step_times_16);
        uint8_t* line = to + v * 128 + part;
        store_register(line, add_bytes(or_(and_(b, upper), a), zero));
        store_register(line + 64, add_bytes(or_(and_(d, upper), c), zero));
      }
    }
}

struct Int4Weights {
  const uint8_t* packed;
  int64_t ahead = BYTES_AHEAD;

  Int4Weights from(int64_t step) const { return {packed + step * STEP_BYTES, ahead}; }
  const uint8_t* step(int64_t s, uint8_t* scratch) const {
    unpack_step(packed + s * STEP_BYTES, scratch);
    return scratch;
  }
  void prefetch(int64_t s) const {
    for (int64_t line = 0; line < STEP_BYTES; line += 64)
      _mm_prefetch((const char*)packed + s * STEP_BYTES + ahead + line, _MM_HINT_T0);
  }
  Int8Weights unpacked(int64_t steps, uint8_t* to) const {
    for (int64_t s = 0; s < steps; ++s) prefetch(s), step(s, to + s * TILE_BYTES);
    return {to};
  }
};

// x [N, K] in bf16 times weights packed as 4-bit codes; otherwise as linear_int8.
at::Tensor linear_int4(const at::Tensor& x_NK, const at::Tensor& packed, const at::Tensor& scales, int64_t M,
                       const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& residual_NM, bool fp32_out) {
  const int64_t blocks = packed.size(0), steps = packed.size(1);
  const Configuration tuned = Configurations::find(Kernel::LINEAR_INT4, M, x_NK.size(1), x_NK.size(0));
  Int4Weights weights{packed.const_data_ptr<uint8_t>()};
  if (tuned.ahead) weights.ahead = tuned.ahead;
  return integer_product(weights, steps, blocks, x_NK, scales, Sink(x_NK, M, bias_M, residual_NM, fp32_out), tuned);
}
