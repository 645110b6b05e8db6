// Rows times 8-bit weights, in integers.
//
// A weight is (w - 128) times its output's scale, w from 0 to 255. x is a 16-bit integer times its row's scale: 8 bits would
// lose the rest of a row to its outliers. Integer sums are exact, so a row's result does not depend on the other rows.
//
// Limits. Few rows: reading K bytes per output once. Many: x is two rows of bytes, so twice the products of bf16, at twice
// the rate with tiles (at most as fast as bf16) and at four times fp32's rate with VNNI (twice as fast). With AVX2 x is one
// row of 16 bits, at twice fp32's rate.
//
// Legend: N rows, K input width, rounded up to a multiple of 64 with zeros, M output width. Weights are packed [M / 16, K /
// 4, 16, 4], with outputs rounded up too: 64 bytes are four inputs of 16 outputs, 1024 bytes are one tile, and a block of 16
// outputs is contiguous.
#pragma once
#ifdef __AVX512VNNI__
#include "linear/byte_products.h"
#else
#include "linear/short_products.h"
#endif

// x [N, K] in bf16 times weights packed as bytes with scales [M, rounded up to 16], plus a bias and a residual: y [N, M] in
// bf16, or in fp32 if `fp32_out`.
at::Tensor linear_int8(const at::Tensor& x_NK, const at::Tensor& packed, const at::Tensor& scales, int64_t M,
                       const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& residual_NM, bool fp32_out) {
  const int64_t blocks = packed.size(0), steps = packed.size(1) / 16;
  const Configuration tuned = Configurations::find(Kernel::LINEAR_INT8, M, x_NK.size(1), x_NK.size(0));
  Int8Weights weights{packed.const_data_ptr<uint8_t>()};
  if (tuned.ahead) weights.ahead = tuned.ahead;
  return integer_product(weights, steps, blocks, x_NK, scales, Sink(x_NK, M, bias_M, residual_NM, fp32_out), tuned);
}
