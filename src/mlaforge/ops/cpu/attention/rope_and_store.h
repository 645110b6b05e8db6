// Rotation of the queries and keys of a step, and its rows' way to the cache.
#pragma once
#include "rows/rows.h"

// Rotates the queries and keys of rows [q, k, v] in place (rotary pairs are neighbours) and writes [k, v] to its slot.
inline void rope_and_store(at::Tensor& qkv_NW, const at::Tensor& rotation_N1P, const Rows& rows, const at::Tensor& slots_N,
                           int64_t heads, int64_t head_dim) {
  const int64_t N = qkv_NW.size(0), W = qkv_NW.size(1), P = head_dim / 2;
  bf16* xs = qkv_NW.mutable_data_ptr<bf16>();
  const auto* rotations = rotation_N1P.const_data_ptr<c10::complex<float>>();
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      bf16* x = xs + n * W;
      const auto* rotation = rotations + n * P;
      for (int64_t h = 0; h < heads; ++h, x += head_dim)
        for (int64_t p = 0; p < P; ++p) {
          const float a = x[2 * p], b = x[2 * p + 1], cos = rotation[p].real(), sin = rotation[p].imag();
          x[2 * p] = a * cos - b * sin;
          x[2 * p + 1] = b * cos + a * sin;
        }
      rows.write_row(slots[n], xs + (n + 1) * W - rows.width);
    }
  });
}

