// Multi-head latent attention in the layout latent.
#pragma once
#include <set>

#include "decode.h"
#include "elementwise.h"
#include "kept_keys.h"
#include "absorbed_v.h"

// Rows of prompts that are made at a time, unless one sequence has more.
constexpr int64_t DECOMPRESSED = 4096;

// One layer in the layout `latent` (modeling/latent_attention_mla.py, absorbed values), from its projections of the input
// to what o_proj reads: rows [q (H D), c (R)] in; c is written to its slot; the keys of every cached row that is seen are
// decompressed, normed and turned where they are read (latent_rows.h); heads attend with them over c, and what they bring
// goes through W_uv. Returns [N, H V].
//
// Limit: 2 R bytes and 2 R G D FLOPs a cached token, once for all query tokens of a sequence and all sequences of a step
// that share it, R being whole tiles of 32 there, and 2 H (D + R) FLOPs for every query token that sees it. Of a selection
// (positions_SK) those keys are made that no step before had made (kept_keys.h).
at::Tensor latent(const at::Tensor& qkv_NX, const at::Tensor& cos_LP, const at::Tensor& sin_LP, const at::Tensor& w_uk,
                  const at::Tensor& w_uv, const at::Tensor& b_k, const at::Tensor& b_v_GV,
                  const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, double eps,
                  const std::optional<at::Tensor>& sinks_H, const at::Tensor& rows_LR,
                  const std::optional<at::Tensor>& whole_LR, at::IntArrayRef format, const at::Tensor& slots_N,
                  const at::Tensor& table_SB, const at::Tensor& seq_lens_S, const at::Tensor& first_S,
                  const at::Tensor& query_start_S1, int64_t block_size, int64_t window, double scale,
                  const std::optional<at::Tensor>& tree_Tn, const std::optional<at::Tensor>& positions_SK,
                  const std::optional<at::Tensor>& kept_EK, const std::optional<at::Tensor>& places) {
  const Rows rows(rows_LR, whole_LR, format);
  const at::Tensor both = qkv_NX.contiguous();
  const int64_t N = both.size(0), X = both.size(1), R = rows.width, D = 2 * cos_LP.size(1), GD = b_k.size(0);
  const int64_t G = GD / D, H = (X - R) / D, J = H / G, V = b_v_GV.size(1);
  const Angles angles{cos_LP.const_data_ptr<float>(), sin_LP.const_data_ptr<float>(), cos_LP.size(0), D / 2,
                      positions_SK ? positions_SK->const_data_ptr<int32_t>() : nullptr};
  TORCH_CHECK(cos_LP.is_contiguous() && sin_LP.is_contiguous(), "angles have gaps between them");
  TORCH_CHECK(!positions_SK || positions_SK->is_contiguous(), "positions have gaps between them");
  const LatentKeys keys(w_uk, b_k, k_norm, eps, angles, R);
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; ++n) rows.put(slots[n], both.const_data_ptr<bf16>() + n * X + H * D);
  std::optional<KeptKeys> kept;
  if (kept_EK) kept.emplace(*kept_EK, *places, places->numel() - 2 * kept_EK->size(0) - 2), kept->forget(slots, N);

  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor own = both.narrow(1, 0, H * D).reshape({N * H, D});
  if (q_norm) own = rms_norm(own, *q_norm, eps);
  const bf16* queries = own.const_data_ptr<bf16>();
  std::vector<float> q(N * H * D);
  std::vector<int64_t> position_of(N);
  for (int64_t s = 0; s < view.sequences(); ++s)
    for (int64_t m = 0; m < view.queries(s); ++m) position_of[view.query(s) + m] = view.position(s, m);
  at::parallel_for(0, N, 8, [&](int64_t from, int64_t to) {
    for (int64_t i = from * H; i < to * H; ++i) angles.turn(position_of[i / H], queries + i * D, q.data() + i * D);
  });

  bool few = true;
  for (int64_t s = 0; s < view.sequences(); ++s) few &= !is_prompt(view, s, H);
  if (kept && !(positions_SK && few && kept->make(view, keys, rows))) kept.reset();

  at::Tensor out = at::empty({N, H * V}, both.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  const AbsorbedV lift{w_uv.const_data_ptr<bf16>(), w_uv.stride(0), b_v_GV.const_data_ptr<float>(),
                  sinks_H ? sinks_H->const_data_ptr<float>() : nullptr, G, J, R, V};
  for (int64_t s = 0, end; s < view.sequences(); s = end) {
    std::set<int32_t> made;  // blocks of prompts
    for (end = s; end < view.sequences(); ++end) {
      std::vector<int32_t> fresh;
      if (is_prompt(view, end, H))
        for (int32_t block : view.blocks(end))
          if (!made.contains(block)) fresh.push_back(block);
      if (end > s && int64_t(made.size() + fresh.size()) * block_size > DECOMPRESSED) break;
      made.insert(fresh.begin(), fresh.end());
    }
    const int64_t base = view.query(s);
    const View part{table_SB.narrow(0, s, end - s), seq_lens_S.narrow(0, s, end - s), first_S.narrow(0, s, end - s),
                    query_start_S1.narrow(0, s, end - s + 1) - base, block_size, window, tree_Tn};
    const Layout row{D, 0, keys.c()};
    Attention attention{q.data() + base * H * D, H, G, D, R, row, Rows(nullptr, keys.width()), part, float(scale)};
    const LatentCache cache{keys, rows};
    const PromptRows prompts(cache, attention);
    attention.source = [&]() -> std::unique_ptr<Source> {
      if (kept) return std::make_unique<KeptRows>(cache, *kept);
      return std::make_unique<LatentRows>(cache);
    };
    attend(attention,
           [&](int64_t n, const float* latents, const float* lse) { lift(latents, lse, outs + (base + n) * H * V); });
  }
  return out;
}
