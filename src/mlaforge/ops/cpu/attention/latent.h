// Multi-head latent attention in the layout `latent`.
#pragma once
#include "attention/absorbed_v.h"
#include "attention/decode.h"
#include "attention/latent_rows.h"
#include "linear/elementwise.h"

// One layer in the layout `latent` (modeling/latent_attention_mla.py), from the fused input projection to the input of
// o_proj. Takes rows [q (H D), c (R)] and writes c to its slot. `readings` has a Reading per sequence: parts of prompts are
// computed as in prompt_attention.h. For others, the keys of all visible cached rows are decompressed, normed and rotated
// when they are read (latent_rows.h), heads attend over c, and the result is multiplied by W_uv. Returns [N, H V].
//
// Limit: 2 R bytes and 2 R G D FLOPs per cached token, once for all query tokens of a sequence and all sequences of a step
// that share it (R rounded up to tiles of 32), and 2 H (D + R) FLOPs per query token that sees it. Tokens that read
// selections use rounded keys, of which only those that are not cached are decompressed (decompressed_keys.h), also while
// the text is short enough to be read as a whole.
inline at::Tensor latent(const at::Tensor& qkv_NX, const Angles& angles, const LatentWeights& weights, const Rows& rows,
                         const at::Tensor& slots_N, const View& view, at::IntArrayRef readings, double scale,
                         std::optional<DecompressedKeys> decompressed_keys) {
  const at::Tensor qkv = qkv_NX.contiguous();
  const int64_t N = qkv.size(0), X = qkv.size(1), R = rows.width, D = 2 * angles.pairs;
  const int64_t G = weights.b_k.size(0) / D, H = (X - R) / D, J = H / G, V = weights.b_v_GV.size(1);
  const LatentKeys keys(weights, angles, R);
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; ++n) rows.write_row(slots[n], qkv.const_data_ptr<bf16>() + n * X + H * D);
  if (decompressed_keys) decompressed_keys->invalidate(slots, N);

  at::Tensor q_rows = qkv.narrow(1, 0, H * D).reshape({N * H, D});
  if (weights.q_norm) q_rows = rms_norm(q_rows, *weights.q_norm, weights.eps);
  const bf16* queries = q_rows.const_data_ptr<bf16>();
  Scratch scratch;
  auto* rotated_q = scratch.get<float>(N * H * D);
  auto* position_of = scratch.get<int64_t>(N);
  for (int64_t s = 0; s < view.sequences(); ++s)
    for (int64_t m = 0; m < view.queries(s); ++m) position_of[view.query(s) + m] = view.position(s, m);
  at::parallel_for(0, N, 8, [&](int64_t from, int64_t to) {
    for (int64_t i = from * H; i < to * H; ++i) angles.rotate(position_of[i / H], queries + i * D, rotated_q + i * D);
  });

  // Sequences whose rows are computed in advance: those with many query tokens, and all if a step has so few chunks that
  // threads would be idle.
  int64_t chunks = 0;
  for (int64_t s = 0; s < view.sequences(); ++s) chunks += view.chunks(s, 0, view.queries(s)).second;
  const bool few_chunks = chunks < at::get_num_threads() && !view.is_tree() && !angles.text_positions;
  const auto reading = [&](int64_t s) {
    const auto named = Reading(readings[s]);
    return named == Reading::SELECTION && !decompressed_keys ? Reading::ALL : named;
  };
  const auto in_advance = [&](int64_t s) { return reading(s) == Reading::PROMPT || few_chunks || is_prompt(view, s, H); };

  at::Tensor out = at::empty({N, H * V}, qkv.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  const AbsorbedV absorbed_v(weights, J, R);
  for (const StepPart& part : step_parts(view, reading, in_advance)) {
    const View part_view = view.part(part.begin, part.end);
    const float* part_q = rotated_q + view.query(part.begin) * H * D;
    bf16* part_outs = outs + view.query(part.begin) * H * V;
    if (part.reading == Reading::PROMPT) {
      attend_prompts(
          part_q, H, D, {keys.up, rows}, part_view, float(scale),
          [&](auto... arguments) { keys.decompress(arguments...); },
          [&](int64_t n, const float* values, const float* lse) {
            for (int64_t h = 0; h < H; ++h) absorbed_v.outputs(h, values + h * V, lse, part_outs + n * H * V);
          });
      continue;
    }
    const bool rounded = part.reading == Reading::SELECTION;
    if (rounded) decompressed_keys->decompress_missing(part_view, keys, rows);
    const LatentCache cache{keys, rows, rounded ? &*decompressed_keys : nullptr};
    Attention attention{part_q, H, G, D, R, {D, 0, keys.latent_offset()}, Rows(nullptr, keys.width()), part_view, float(scale)};
    Scratch part_scratch;
    const auto is_computed = [&](int64_t s) { return few_chunks || is_prompt(part_view, s, H); };
    const BlockRows computed(part_scratch, part_view, keys.width(), is_computed,
                             [&](const int32_t* slots, const int32_t* positions, int64_t count, bf16* to) {
                               cache.compute(slots, positions, count, to);
                             });
    if (few_chunks) {
      attention.rows = *computed.rows, attention.view = computed.view;
    } else {
      attention.decoded = computed.rows, attention.decoded_view = computed.view;
      attention.source = [&]() -> std::unique_ptr<RowSource> {
        if (rounded) return std::make_unique<RoundedKeyRows>(cache);
        return std::make_unique<LatentRows>(cache);
      };
    }
    attend(attention,
           [&](int64_t n, const float* latents, const float* lse) { absorbed_v(latents, lse, part_outs + n * H * V); });
  }
  return out;
}
