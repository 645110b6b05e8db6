// Rows [keys, c] that attention over latents reads in the layout `latent`, computed from the cached rows: per chunk, in the
// reading thread's scratch, if few query tokens see them; otherwise once, before the tasks that read them (block_rows.h).
//
// A row is identified by its slot and position, so rows that several sequences of a step share are computed once.
#pragma once
#include "attention/latent_keys.h"
#include "attention/prompt_attention.h"

// The cached rows, and how keys are computed from them.
struct LatentCache {
  const LatentKeys& keys;
  const Rows& cached;

  // Computes rows [keys, c] of the tokens at `count` slots, a multiple of UNIT.
  void compute(const int32_t* slots, const int32_t* positions, int64_t count, bf16* rows) const {
    load_latents(slots, count, rows);
    keys.decompress(rows, positions, count);
  }
  // Loads c alone.
  void load_latents(const int32_t* slots, int64_t count, bf16* rows) const {
    CachedLatents{keys.up, cached}.load(slots, count, rows + keys.latent_offset(), keys.width());
  }
};

// Computes a chunk's rows, except those that are still staged from the previous sequence.
class LatentRows : public RowSource {
 public:
  explicit LatentRows(const LatentCache& of) : of_(of), rows_(scratch_.get<bf16>(CHUNK * of.keys.width())) {
    std::fill_n(staged_tags_, CHUNK, -1);
  }

  void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) override {
    const int64_t first = position % CHUNK, end = first + count, width = of_.keys.width();
    // Rows of a unit outside the sequence have tag -1.
    int64_t tags[CHUNK];
    std::fill_n(tags, CHUNK, -1);
    for (int64_t t = 0; t < count; ++t) tags[first + t] = int64_t(slots[t]) << 32 | (position + t);
    auto is_staged = [&](int64_t t) {
      return std::equal(tags + std::max(t, first), tags + std::min(t + UNIT, end), staged_tags_ + std::max(t, first));
    };
    for (int64_t t = first / UNIT * UNIT, until; t < end; t = std::max(until, t + UNIT)) {
      for (until = t; until < end && !is_staged(until);) until += UNIT;
      if (until == t) continue;
      const int64_t begin = std::max(t, first);
      int32_t positions[CHUNK] = {};
      std::iota(positions + begin, positions + std::min(until, end), int32_t(position + begin - first));
      of_.load_latents(slots + begin - first, std::min(until, end) - begin, rows_ + begin * width);
      of_.keys.decompress(rows_ + t * width, positions + t, until - t);
      std::copy(tags + t, tags + until, staged_tags_ + t);
    }
    for (int64_t t = 0; t < count; ++t) row[t] = rows_ + (first + t) * width;
  }

  void prefetch(int32_t slot) override { of_.cached.prefetch(&slot, 1, {0, of_.keys.up.R}); }

 private:
  const LatentCache& of_;
  Scratch scratch_;
  bf16* const rows_;
  int64_t staged_tags_[CHUNK];  // of each row of the chunk: slot and position
};
