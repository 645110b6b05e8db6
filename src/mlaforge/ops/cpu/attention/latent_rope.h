// Multi-head latent attention in the layout `latent_rope`.
#pragma once
#include "attention/absorbed_v.h"
#include "attention/decode.h"
#include "linear/linear.h"

// One layer in the layout `latent_rope` (modeling/latent_attention_mla.py), from the fused input projection to the input of
// o_proj. Takes rows [q (H (D + E)), c (R), rotary key (E)], rotates the rotary parts and writes [c, rotary key] to its slot.
// Sequences with a nonzero `prompts` are parts of prompts (prompt_attention.h). For others, queries are multiplied by W_uk,
// all heads attend over the same cached rows, and the result is multiplied by W_uv. Returns [N, H V].
//
// Limit: 2 (R + E) bytes and 2 H (2 R + E) FLOPs per cached token.
inline at::Tensor latent_rope(const at::Tensor& qkv_NX, const at::Tensor& rotation_N1P, const at::Tensor& rope_index_P,
                              const LatentWeights& weights, const Rows& rows, const at::Tensor& slots_N, const View& view,
                              at::IntArrayRef prompts, double scale) {
  const at::Tensor qkv = qkv_NX.contiguous();
  const int64_t N = qkv.size(0), X = qkv.size(1), W = rows.width, E = 2 * rope_index_P.size(0), R = W - E;
  const int64_t G = weights.b_k.size(0), D = weights.b_k.size(1), V = weights.b_v_GV.size(1), K = D + E, H = (X - W) / K;
  const int64_t J = H / G, angles = rotation_N1P.size(2), w_uk_stride = weights.w_uk->stride(0);
  const bf16 *xs = qkv.const_data_ptr<bf16>(), *uk = weights.w_uk->const_data_ptr<bf16>();
  const auto* rotations = rotation_N1P.const_data_ptr<c10::complex<float>>();
  const int64_t *pairs = rope_index_P.const_data_ptr<int64_t>(), *slots = slots_N.const_data_ptr<int64_t>();
  const float* b_k = weights.b_k.const_data_ptr<float>();
  const UpProjection up(weights, R);
  const AbsorbedV absorbed_v(weights, J, R);
  const float* sinks = absorbed_v.outputs.sinks;
  const std::vector<StepPart> parts =
      step_parts(view, [&](int64_t s) { return prompts[s] ? Reading::PROMPT : Reading::ALL; },
                 [&](int64_t s) { return prompts[s] != 0; });

  Scratch scratch;
  // Queries of a part are contiguous, [tokens, H, K] of prompts and [tokens, H, W] of others.
  const int64_t q_stride = H * std::max(K, W);
  float *q = scratch.get<float>(N * q_stride), *shift = scratch.filled(sinks ? N * H : 0, 0.0f);
  const StepPart** part_of = scratch.get<const StepPart*>(N);
  for (const StepPart& part : parts) std::fill(part_of + view.query(part.begin), part_of + view.query(part.end), &part);
  at::parallel_for(0, N, 1, [&](int64_t from, int64_t to) {
    Scratch scratch;
    auto* projected_q = scratch.get<float>(H * K);
    auto* row = scratch.get<bf16>(W);
    for (int64_t n = from; n < to; ++n) {
      const bf16* x = xs + n * X;
      const auto* rotation = rotations + n * angles;
      const bool prompt = part_of[n]->reading == Reading::PROMPT;
      const int64_t base = view.query(part_of[n]->begin), width = prompt ? K : W;
      float* token_q = q + base * q_stride + (n - base) * H * width;
      for (int64_t i = 0; i < H * K; ++i) projected_q[i] = x[i];
      for (int64_t h = 0; h < H; ++h) {
        float *rotary = projected_q + h * K + D, *to_rotary = token_q + (h + 1) * width - E;
        for (int64_t p = 0; p < E / 2; ++p) {
          const float a = rotary[p], b = rotary[p + E / 2], cos = rotation[pairs[p]].real(), sin = rotation[pairs[p]].imag();
          to_rotary[p] = a * cos - b * sin;
          to_rotary[p + E / 2] = b * cos + a * sin;
        }
        if (prompt) std::copy_n(projected_q + h * K, D, token_q + h * K);
      }
      for (int64_t g = 0; !prompt && g < G; ++g)
        product(uk + g * w_uk_stride, projected_q + g * J * K, J, K, D, R, token_q + g * J * W, W);
      for (int64_t h = 0; sinks && !prompt && h < H; ++h)
        for (int64_t d = 0; d < D; ++d) shift[n * H + h] += projected_q[h * K + d] * b_k[h / J * D + d] * float(scale);
      std::copy_n(x + H * K, W, row);
      for (int64_t p = 0; p < E / 2; ++p) {
        const float a = row[R + p], b = row[R + p + E / 2], cos = rotation[pairs[p]].real(), sin = rotation[pairs[p]].imag();
        row[R + p] = a * cos - b * sin;
        row[R + p + E / 2] = b * cos + a * sin;
      }
      rows.write_row(slots[n], row);
    }
  });

  // Keys [G, D + E] of cached rows, whose rotary part is rotated already.
  const auto keys = [&](const bf16* latents, int64_t stride, const int32_t*, int64_t count, bf16* to, int64_t width) {
    up.keys(latents, stride, count, [&](int64_t t, const float* y, int64_t y_stride, int64_t g, int64_t heads) {
      for (int64_t r = 0; r < UNIT; ++r)
        for (int64_t h = g; h < g + heads; ++h) {
          const float* head = y + r * y_stride + (h - g) * D;
          bf16* key = to + (t + r) * width + h * K;
          for (int64_t d = 0; d < D; ++d) key[d] = bf16(head[d] + b_k[h * D + d]);
          std::copy_n(latents + (t + r) * stride + up.K, E, key + D);
        }
    });
  };
  at::Tensor out = at::empty({N, H * V}, qkv.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  for (const StepPart& part : parts) {
    const int64_t base = view.query(part.begin);
    const View part_view = view.part(part.begin, part.end);
    const float* part_q = q + base * q_stride;
    if (part.reading == Reading::PROMPT)
      attend_prompts(part_q, H, K, {up, rows}, part_view, float(scale), keys,
                     [&](int64_t n, const float* values, const float* lse) {
                       for (int64_t h = 0; h < H; ++h) absorbed_v.outputs(h, values + h * V, lse, outs + (base + n) * H * V);
                     });
    else
      attend(part_q, H, 1, W, R, {0, 0, 0}, rows, part_view, float(scale), [&](int64_t n, const float* latents, float* lse) {
        for (int64_t h = 0; sinks && h < H; ++h) lse[h] += shift[(base + n) * H + h];
        absorbed_v(latents, lse, outs + (base + n) * H * V);
      });
  }
  return out;
}
