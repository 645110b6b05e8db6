// Value up-projection: the last step of latent attention in both layouts.
#pragma once
#include "attention/code_product.h"
#include "linear/linear.h"
#include "simd/scratch.h"

// Weights of a latent layer (modeling/latent_attention_mla.py), packed as for `linear`. w_up: W_uk of all KV heads, whose
// outputs are padded to blocks, then W_uv, padded per KV head; inputs padded to 32. codes: W_uk of coded latents in 8 bits;
// only in the layout `latent`, and so are the norms. w_uk: only in the layout `latent_rope`, by KV head, with inputs and
// outputs exchanged.
struct LatentWeights {
  at::Tensor w_up, b_k, b_v_GV;
  std::optional<at::Tensor> sinks_H, w_uk = std::nullopt, q_norm = std::nullopt, k_norm = std::nullopt;
  double eps = 0;
  std::optional<CodeWeights> codes = std::nullopt;
};

// Turns a token's attention output over values, [H, V], into the input of o_proj: adds the values' bias and applies the
// learned sink, out * sigmoid(lse - sink).
struct HeadOutputs {
  const float *b_v, *sinks;
  int64_t J, V;

  HeadOutputs(const LatentWeights& weights, int64_t J)
      : b_v(weights.b_v_GV.const_data_ptr<float>()),
        sinks(weights.sinks_H ? weights.sinks_H->const_data_ptr<float>() : nullptr), J(J), V(weights.b_v_GV.size(1)) {}

  // Writes head h.
  void operator()(int64_t h, const float* values, const float* lse, bf16* out) const {
    const float sink_factor = sinks ? 1.0f / (1.0f + std::exp(sinks[h] - lse[h])) : 1.0f;
    for (int64_t v = 0; v < V; ++v) out[h * V + v] = bf16((values[v] + b_v[h / J * V + v]) * sink_factor);
  }
};

// Maps a token's attention output over latents [H, R] to the input of o_proj [H, V]: multiplies by W_uv first.
//
// Limit: 2 H R V FLOPs per query token. The weights stay in a core's cache.
struct AbsorbedV {
  const HeadOutputs outputs;
  const bf16* w_uv;
  int64_t G, R, K, W;  // K: inputs of the packed weights; W: outputs of a KV head, whole blocks

  AbsorbedV(const LatentWeights& weights, int64_t J, int64_t R)
      : outputs(weights, J), G(weights.b_v_GV.size(0)), R(R), K(2 * weights.w_up.size(1)), W((outputs.V + 15) / 16 * 16) {
    w_uv = weights.w_up.const_data_ptr<bf16>() + (weights.w_up.size(0) * 16 - G * W) * K;
  }

  void operator()(const float* latent, const float* lse, bf16* out) const {
    const int64_t J = outputs.J;
    Scratch scratch;
    float *x = scratch.get<float>(ROWS * K), *values = scratch.get<float>(ROWS * W);
    for (int64_t g = 0; g < G; ++g)
      for (int64_t j = 0; j < J; j += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, J - j), h = g * J + j;
        for (int64_t r = 0; r < count; ++r) std::fill(std::copy_n(latent + (h + r) * R, R, x + r * K), x + (r + 1) * K, 0.0f);
        product<false>(w_uv + g * W * K, W / 16, x, count, K, K, values, W);
        for (int64_t r = 0; r < count; ++r) outputs(h + r, values + r * W, lse, out);
      }
  }
};
