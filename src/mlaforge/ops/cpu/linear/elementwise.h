// Elementwise ops: norms, gates.
#pragma once
#include "simd/vectors.h"

// RMS norm per row: x / rms(x) * weight.
at::Tensor rms_norm(const at::Tensor& x_NC, const at::Tensor& weight_C, double eps) {
  const at::Tensor x = x_NC.contiguous();
  const int64_t N = x.size(0), C = x.size(1);
  at::Tensor out = at::empty_like(x);
  const bf16 *xs = x.const_data_ptr<bf16>(), *ws = weight_C.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Floats squares = splat(0.0f);
      for (int64_t c = 0; c < C; c += 16) {
        const Floats v = widen(xs + n * C + c, std::min<int64_t>(16, C - c));
        squares = fma(v, v, squares);
      }
      const Floats scale = splat(1.0f / std::sqrt(reduce_add(squares) / C + float(eps)));
      for (int64_t c = 0; c < C; c += 16) {
        const int64_t count = std::min<int64_t>(16, C - c);
        narrow(ys + n * C + c, widen(xs + n * C + c, count) * scale * widen(ws + c, count), count);
      }
    }
  });
  return out;
}

// 1 / (1 + e^-x), computed from e^-|x| to avoid overflow.
inline Floats logistic(Floats x) {
  const Floats zero = splat(0.0f), one = splat(1.0f), e = exponential(zero - abs(x));
  return select(greater(x, zero), one, e) / (one + e);
}

// silu(gate) * up, for rows [gate, up].
at::Tensor silu_mul(const at::Tensor& gate_up) {
  const at::Tensor x = gate_up.contiguous();
  const int64_t N = x.size(0), I = x.size(1) / 2;
  at::Tensor out = at::empty({N, I}, x.options());
  const bf16* xs = x.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i < I; i += 16) {
        const int64_t count = std::min<int64_t>(16, I - i);
        const Floats gate = widen(xs + 2 * n * I + i, count), up = widen(xs + (2 * n + 1) * I + i, count);
        narrow(ys + n * I + i, gate * logistic(gate) * up, count);
      }
  });
  return out;
}
