// Rows times weights of 8 bits, in whole numbers.
//
// A weight is (w - 128) times its output's scale, w of 0 to 255; x is a whole number of 16 bits times its row's scale: with
// 8 bits alone the outliers of a row drown the rest. Sums of whole numbers are exact: a row's result is the same whatever
// is computed beside it.
//
// Limits. Few rows: reading K bytes an output once. Many: x is two rows of bytes, twice the products of bf16, at twice the
// rate with tiles (as fast as bf16 at the most) and at four times fp32's rate with VNNI (twice as fast); with AVX2 it is
// one row of 16 bits, at twice fp32's rate.
//
// Legend: N rows, K input width, filled up to a multiple of 64 with zeros, M output width. Weights are packed [M / 16,
// K / 4, 16, 4], outputs filled up too: 64 bytes are four inputs of 16 outputs, 1024 are one tile, and a block of 16
// outputs is one stretch of memory.
#pragma once
#ifdef __AVX512VNNI__
#include "byte_products.h"
#else
#include "short_products.h"
#endif

// x [N, K] in bf16 times weights packed in bytes, scales [M] filled up to 16, a bias and what is added: y [N, M] in bf16,
// or in fp32 where `wide`.
at::Tensor linear_int8(const at::Tensor& x_NK, const at::Tensor& packed, const at::Tensor& scales, int64_t M,
                       const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& residual_NM, bool wide) {
  const int64_t blocks = packed.size(0), steps = packed.size(1) / 16;
  const Bytes weights{packed.const_data_ptr<uint8_t>()};
  return whole_product(weights, steps, blocks, x_NK, scales, Sink(x_NK, M, bias_M, residual_NM, wide));
}
