// Multi-head latent attention in the layout `latent`.
#pragma once
#include <set>

#include "attention/decode.h"
#include "linear/elementwise.h"
#include "attention/decompressed_keys.h"
#include "attention/absorbed_v.h"

// Prompt rows that are decompressed at a time, unless one sequence has more.
constexpr int64_t MAX_PROMPT_ROWS = 4096;

// One layer in the layout `latent` (modeling/latent_attention_mla.py, absorbed values), from the fused input projection to
// the input of o_proj. Takes rows [q (H D), c (R)] and writes c to its slot. The keys of all visible cached rows are
// decompressed, normed and rotated when they are read (latent_rows.h). Heads attend over c, and the result is multiplied by
// W_uv. Returns [N, H V].
//
// Limit: 2 R bytes and 2 R G D FLOPs per cached token, once for all query tokens of a sequence and all sequences of a step
// that share it (R rounded up to tiles of 32), and 2 H (D + R) FLOPs per query token that sees it. For a selection
// (positions_SK) only keys that are not cached are decompressed (decompressed_keys.h).
at::Tensor latent(const at::Tensor& qkv_NX, const at::Tensor& cos_LP, const at::Tensor& sin_LP, const at::Tensor& w_uk,
                  const at::Tensor& w_uv, const at::Tensor& b_k, const at::Tensor& b_v_GV,
                  const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, double eps,
                  const std::optional<at::Tensor>& sinks_H, const at::Tensor& rows_LR,
                  const std::optional<at::Tensor>& unquantized_LR, at::IntArrayRef format, const at::Tensor& slots_N,
                  const at::Tensor& table_SB, const at::Tensor& seq_lens_S, const at::Tensor& first_S,
                  const at::Tensor& query_start_S1, int64_t block_size, int64_t window, double scale,
                  const std::optional<at::Tensor>& tree_Tn, const std::optional<at::Tensor>& positions_SK,
                  const std::optional<at::Tensor>& keys_EK, const std::optional<at::Tensor>& keys_metadata) {
  const Rows rows(rows_LR, unquantized_LR, format);
  const at::Tensor qkv = qkv_NX.contiguous();
  const int64_t N = qkv.size(0), X = qkv.size(1), R = rows.width, D = 2 * cos_LP.size(1), GD = b_k.size(0);
  const int64_t G = GD / D, H = (X - R) / D, J = H / G, V = b_v_GV.size(1);
  const Angles angles{cos_LP.const_data_ptr<float>(), sin_LP.const_data_ptr<float>(), cos_LP.size(0), D / 2,
                      positions_SK ? positions_SK->const_data_ptr<int32_t>() : nullptr};
  TORCH_CHECK(cos_LP.is_contiguous() && sin_LP.is_contiguous(), "angles are not contiguous");
  TORCH_CHECK(!positions_SK || positions_SK->is_contiguous(), "positions are not contiguous");
  const LatentKeys keys(w_uk, b_k, k_norm, eps, angles, R);
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; ++n) rows.write_row(slots[n], qkv.const_data_ptr<bf16>() + n * X + H * D);
  std::optional<DecompressedKeys> decompressed_keys;
  if (keys_EK) {
    decompressed_keys.emplace(*keys_EK, *keys_metadata, keys_metadata->numel() - 2 * keys_EK->size(0) - 2);
    decompressed_keys->invalidate(slots, N);
  }

  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor q_rows = qkv.narrow(1, 0, H * D).reshape({N * H, D});
  if (q_norm) q_rows = rms_norm(q_rows, *q_norm, eps);
  const bf16* queries = q_rows.const_data_ptr<bf16>();
  std::vector<float> rotated_q(N * H * D);
  std::vector<int64_t> position_of(N);
  for (int64_t s = 0; s < view.sequences(); ++s)
    for (int64_t m = 0; m < view.queries(s); ++m) position_of[view.query(s) + m] = view.position(s, m);
  at::parallel_for(0, N, 8, [&](int64_t from, int64_t to) {
    for (int64_t i = from * H; i < to * H; ++i) angles.rotate(position_of[i / H], queries + i * D, rotated_q.data() + i * D);
  });

  bool no_prompts = true;
  for (int64_t s = 0; s < view.sequences(); ++s) no_prompts &= !is_prompt(view, s, H);
  if (decompressed_keys && !(positions_SK && no_prompts && decompressed_keys->decompress_missing(view, keys, rows)))
    decompressed_keys.reset();

  at::Tensor out = at::empty({N, H * V}, qkv.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  const AbsorbedV absorbed_v{w_uv.const_data_ptr<bf16>(), w_uv.stride(0), b_v_GV.const_data_ptr<float>(),
                  sinks_H ? sinks_H->const_data_ptr<float>() : nullptr, G, J, R, V};
  for (int64_t s = 0, end; s < view.sequences(); s = end) {
    std::set<int32_t> prompt_blocks;  // distinct blocks of the prompts
    for (end = s; end < view.sequences(); ++end) {
      std::vector<int32_t> new_blocks;
      if (is_prompt(view, end, H))
        for (int32_t block : view.blocks(end))
          if (!prompt_blocks.contains(block)) new_blocks.push_back(block);
      if (end > s && int64_t(prompt_blocks.size() + new_blocks.size()) * block_size > MAX_PROMPT_ROWS) break;
      prompt_blocks.insert(new_blocks.begin(), new_blocks.end());
    }
    const int64_t base = view.query(s);
    const View part{table_SB.narrow(0, s, end - s), seq_lens_S.narrow(0, s, end - s), first_S.narrow(0, s, end - s),
                    query_start_S1.narrow(0, s, end - s + 1) - base, block_size, window, tree_Tn};
    const Layout row{D, 0, keys.latent_offset()};
    Attention attention{rotated_q.data() + base * H * D, H, G, D, R, row, Rows(nullptr, keys.width()), part, float(scale)};
    const LatentCache cache{keys, rows};
    const PromptRows prompts(cache, attention);
    attention.source = [&]() -> std::unique_ptr<RowSource> {
      if (decompressed_keys) return std::make_unique<DecompressedKeyRows>(cache, *decompressed_keys);
      return std::make_unique<LatentRows>(cache);
    };
    attend(attention,
           [&](int64_t n, const float* latents, const float* lse) { absorbed_v(latents, lse, outs + (base + n) * H * V); });
  }
  return out;
}
