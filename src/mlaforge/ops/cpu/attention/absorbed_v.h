// Value up-projection: the last step of latent attention in both layouts.
#pragma once
#include "linear/linear.h"

// Weights of a latent layer (modeling/latent_attention_mla.py); projections are packed as for `linear`, W_uv by KV head.
struct LatentWeights {
  at::Tensor w_uk, w_uv, b_k, b_v_GV;
  std::optional<at::Tensor> sinks_H, q_norm = std::nullopt, k_norm = std::nullopt;  // norms: only in the layout `latent`
  double eps = 0;
};

// Maps a token's attention output over latents [H, R] to values [H, V]: multiplies by W_uv, adds its bias and applies the
// learned sink, out * sigmoid(lse - sink).
//
// Limit: 2 H R V FLOPs per query token. The weights stay in a core's cache.
struct AbsorbedV {
  const bf16* w_uv;
  int64_t w_stride;  // elements between the weights of consecutive KV heads
  const float *b_v, *sinks;
  int64_t G, J, R, V;

  AbsorbedV(const LatentWeights& weights, int64_t G, int64_t J, int64_t R)
      : w_uv(weights.w_uv.const_data_ptr<bf16>()), w_stride(weights.w_uv.stride(0)),
        b_v(weights.b_v_GV.const_data_ptr<float>()),
        sinks(weights.sinks_H ? weights.sinks_H->const_data_ptr<float>() : nullptr), G(G), J(J), R(R),
        V(weights.b_v_GV.size(1)) {}

  void operator()(const float* latent, const float* lse, bf16* out) const {
    float values[ROWS * 256];
    for (int64_t g = 0; g < G; ++g)
      for (int64_t j = 0; j < J; j += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, J - j), h = g * J + j;
        product(w_uv + g * w_stride, latent + h * R, count, R, R, V, values, V);
        for (int64_t r = 0; r < count; ++r) {
          const float sink_factor = sinks ? 1.0f / (1.0f + std::exp(sinks[h + r] - lse[h + r])) : 1.0f;
          for (int64_t v = 0; v < V; ++v) out[(h + r) * V + v] = bf16((values[r * V + v] + b_v[g * V + v]) * sink_factor);
        }
      }
  }
};
