// What is done number by number: norms, gates, rotations.
#pragma once
#include "vectors.h"

// x / rms(x) * weight, row by row.
at::Tensor rms_norm(const at::Tensor& x_NC, const at::Tensor& weight_C, double eps) {
  const at::Tensor x = x_NC.contiguous();
  const int64_t N = x.size(0), C = x.size(1);
  at::Tensor out = at::empty_like(x);
  const bf16 *xs = x.const_data_ptr<bf16>(), *ws = weight_C.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t c = 0; c < C; c += 16) {
        const __m512 v = widened(xs + n * C + c, tail16(C - c));
        sum = _mm512_fmadd_ps(v, v, sum);
      }
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / C + float(eps)));
      for (int64_t c = 0; c < C; c += 16) {
        const __mmask16 mask = tail16(C - c);
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(widened(xs + n * C + c, mask), scale), widened(ws + c, mask));
        _mm256_mask_storeu_epi16(ys + n * C + c, mask, (__m256i)_mm512_cvtneps_pbh(y));
      }
    }
  });
  return out;
}

// silu(gate) * up of rows [gate, up].
at::Tensor silu_mul(const at::Tensor& gate_up) {
  const at::Tensor x = gate_up.contiguous();
  const int64_t N = x.size(0), I = x.size(1) / 2;
  at::Tensor out = at::empty({N, I}, x.options());
  const bf16* xs = x.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i < I; i += 16) {
        const __mmask16 mask = tail16(I - i);
        const __m512 gate = widened(xs + 2 * n * I + i, mask), up = widened(xs + (2 * n + 1) * I + i, mask);
        // 1 / (1 + e^-g), with e^-|g| so that nothing overflows.
        const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
        const __mmask16 positive = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_GE_OQ);
        const __m512 share = _mm512_div_ps(_mm512_mask_blend_ps(positive, e, one), _mm512_add_ps(one, e));
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(gate, share), up);
        _mm256_mask_storeu_epi16(ys + n * I + i, mask, (__m256i)_mm512_cvtneps_pbh(y));
      }
  });
  return out;
}

// Turns queries and keys of rows [q, k, v] in place, rotary pairs being neighbours, and writes [k, v] to its slot.
void turn_and_store(at::Tensor& qkv_NW, const at::Tensor& turn_N1P, at::Tensor& rows_LW, const at::Tensor& slots_N,
                    int64_t heads, int64_t head_dim) {
  const int64_t N = qkv_NW.size(0), W = qkv_NW.size(1), width = rows_LW.size(1), P = head_dim / 2;
  bf16 *xs = qkv_NW.mutable_data_ptr<bf16>(), *rows = rows_LW.mutable_data_ptr<bf16>();
  const auto* turns = turn_N1P.const_data_ptr<c10::complex<float>>();
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      bf16* x = xs + n * W;
      const auto* turn = turns + n * P;
      for (int64_t h = 0; h < heads; ++h, x += head_dim)
        for (int64_t p = 0; p < P; ++p) {
          const float a = x[2 * p], b = x[2 * p + 1], cos = turn[p].real(), sin = turn[p].imag();
          x[2 * p] = a * cos - b * sin;
          x[2 * p + 1] = b * cos + a * sin;
        }
      std::copy_n(xs + (n + 1) * W - width, width, rows + slots[n] * width);
    }
  });
}

