// The end of latent attention, in both layouts.
#pragma once
#include "linear.h"

// What all heads of a token bring from attention over latents [H, R] -> values [H, V]: times W_uv, plus its bias, times
// what a learned sink leaves.
//
// Limit: 2 H R V FLOPs a query token, over weights that stay in a core's cache.
struct AbsorbedV {
  const bf16* w_uv;
  int64_t step;  // numbers from one key head's weights to the next's
  const float *b_v, *sinks;
  int64_t G, J, R, V;

  void operator()(const float* latent, const float* lse, bf16* out) const {
    float lifted[ROWS * 256];
    for (int64_t g = 0; g < G; ++g)
      for (int64_t j = 0; j < J; j += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, J - j), h = g * J + j;
        product(w_uv + g * step, latent + h * R, count, R, R, V, lifted, V);
        for (int64_t r = 0; r < count; ++r) {
          const float share = sinks ? 1.0f / (1.0f + std::exp(sinks[h + r] - lse[h + r])) : 1.0f;
          for (int64_t v = 0; v < V; ++v) out[(h + r) * V + v] = bf16((lifted[r * V + v] + b_v[g * V + v]) * share);
        }
      }
  }
};
