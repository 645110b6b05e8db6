// Rows whose codes kernels may multiply without decoding them. A format offers them by a member `codes()`.
#pragma once
#include "simd/vectors.h"

// The units of a packed cache: unit number i begins `stride` bytes after unit number i - 1.
struct Units {
  const uint8_t* first;
  int64_t stride;

  const uint8_t* at(int64_t i) const { return first + i * stride; }
};

// A row is int8 codes in the order of its elements, then, from byte `scales_offset` on, one bf16 scale per group.
struct RowCodes {
  std::vector<int64_t> group_sizes;  // elements of each group
  int64_t scales_offset;
};

// Symmetric quantization to 16 bits: x = scale * quantized(x), after rounding; the largest magnitude becomes 32767.
struct Int16Quantizer {
  float scale, factor;

  Int16Quantizer(const float* x, int64_t count) {
    Floats largest = splat(0.0f);
    for (int64_t i = 0; i < count; i += 16) largest = max(largest, abs(load(x + i, count - i)));
    scale = reduce_max(largest) / 32767.0f, factor = std::min(32767.0f / reduce_max(largest), 1e38f);
  }

  Floats quantized(Floats x) const { return x * splat(factor); }
};
