// Attention of prompt tokens over latents: all KV heads' keys and values of the cached tokens are decompressed, once for a
// step. A prompt has many query tokens per cached token, which pays for it; generated tokens have few, and attend over the
// latents themselves. The form depends on what a token is, not on the length of its chunk, so a token's result does not
// depend on how the prompt is split into steps.
//
// Legend: E elements of a cached row after its latent (a rotary key), otherwise as in up_projection.h.
#pragma once
#include <set>

#include "attention/decode.h"
#include "attention/up_projection.h"

// Rows that are decompressed at a time, unless one sequence has more.
constexpr int64_t MAX_BLOCK_ROWS = 4096;

// How a sequence's rows are read, as numbered by CacheView.readings: all by generated tokens, by prompt tokens, or by
// generated tokens of which each has a selection.
enum class Reading { ALL, PROMPT, SELECTION };

// Consecutive sequences of a step that are computed together.
struct StepPart {
  int64_t begin, end;
  Reading reading;
};

// Splits a step into parts of the same `reading(s)` and with at most MAX_BLOCK_ROWS distinct rows of sequences for which
// `in_advance(s)` is true.
template <typename ReadingOf, typename InAdvance>
std::vector<StepPart> step_parts(const View& view, ReadingOf reading, InAdvance in_advance) {
  std::vector<StepPart> parts;
  for (int64_t s = 0, end; s < view.sequences(); s = end) {
    std::set<int32_t> blocks;
    for (end = s; end < view.sequences() && reading(end) == reading(s); ++end) {
      std::vector<int32_t> added;
      if (in_advance(end))
        for (int32_t block : view.blocks(end))
          if (!blocks.contains(block)) added.push_back(block);
      if (end > s && int64_t(blocks.size() + added.size()) * view.block_size > MAX_BLOCK_ROWS) break;
      blocks.insert(added.begin(), added.end());
    }
    parts.push_back({s, end, reading(s)});
  }
  return parts;
}

// Cached rows as the up-projection takes them: [latent, zeros up to K, the other E elements].
struct CachedLatents {
  const UpProjection& up;
  const Rows& cached;

  int64_t width() const { return odd_lines(up.K + cached.width - up.R); }

  // Loads the rows at `count` slots to `to`, whose rows are `stride` apart.
  void load(const int32_t* slots, int64_t count, bf16* to, int64_t stride) const {
    const int64_t others = cached.width - up.R;
    for (int64_t t = 0, end; t < count; t = end) {
      end = std::min(count, t + STRETCH);
      cached.prefetch(slots + end, std::min(STRETCH, count - end), {0, cached.width});
      cached.read(slots + t, end - t, cached.width, to + t * stride, stride);
      for (bf16* row = to + t * stride; row < to + end * stride; row += stride) {
        std::memmove((void*)(row + up.K), row + up.R, 2 * others);
        std::fill(row + up.R, row + up.K, bf16(0.0f));
      }
    }
  }
};

// Attends over decompressed rows. q: [N, H, key_dim] of the view's query tokens. `keys(latents, stride, positions, count,
// rows, width)` computes the keys of rows from CachedLatents; `finish(n, values [H, V], lse [H])` takes a token's result,
// without the values' bias.
template <typename Keys, typename Finish>
void attend_prompts(const float* q, int64_t H, int64_t key_dim, const CachedLatents& latents, const View& view, float scale,
                    Keys keys, Finish finish) {
  const UpProjection& up = latents.up;
  const Layout row{key_dim, up.W, round_to_lines(up.G * key_dim)};
  const int64_t width = odd_lines(row.v_offset + up.G * up.W), stride = latents.width();
  Scratch scratch;
  const BlockRows computed(scratch, view, width, [](int64_t) { return true; },
                           [&](const int32_t* slots, const int32_t* positions, int64_t count, bf16* rows) {
                             Scratch scratch;
                             auto* loaded = scratch.get<bf16>(count * stride);
                             latents.load(slots, count, loaded, stride);
                             keys(loaded, stride, positions, count, rows, width);
                             up.values(loaded, stride, count, rows + row.v_offset, width);
                           });
  attend(q, H, up.G, key_dim, up.V, row, *computed.rows, computed.view, scale, finish);
}
