// Rows [keys, c] that attention over latents reads in the layout `latent`, computed from the cached rows: per chunk, in the
// reading thread's scratch, if few query tokens see them; otherwise once, before the tasks that read them (block_rows.h).
//
// A row is identified by its slot and position, so rows that several sequences of a step share are computed once.
#pragma once
#include "attention/decompressed_keys.h"

// The cached rows, and how keys are computed from them.
struct LatentCache {
  const LatentKeys& keys;
  const Rows& cached;

  const DecompressedKeys* rounded;  // if set, the keys are rounded, and read from this cache

  // Computes rows [keys, c] of the tokens at `count` slots, a multiple of UNIT.
  void compute(const int32_t* slots, const int32_t* positions, int64_t count, bf16* rows) const {
    load_latents(slots, count, rows);
    if (rounded) load_rounded(slots, positions, count, rows);
    else keys.decompress(rows, positions, count);
  }
  // Loads c alone.
  void load_latents(const int32_t* slots, int64_t count, bf16* rows) const {
    CachedLatents{keys.up, cached}.load(slots, count, rows + keys.latent_offset(), keys.width());
  }
  // Loads the rounded keys of rows with a loaded c.
  void load_rounded(const int32_t* slots, const int32_t* positions, int64_t count, bf16* rows) const {
    int64_t missing[UNIT], count_missing = 0;
    for (int64_t t = 0; t < count; ++t) {
      if (rounded->has(slots[t])) rounded->read(slots[t], rows + t * keys.width());
      else missing[count_missing++] = t;
      if (count_missing == UNIT || (count_missing && t + 1 == count))
        compute_rounded(positions, missing, std::exchange(count_missing, 0), rows);
    }
  }

 private:
  // Computes and rounds the keys of at most UNIT rows.
  void compute_rounded(const int32_t* positions, const int64_t* missing, int64_t count, bf16* rows) const {
    const int64_t width = keys.width(), stride = odd_lines(keys.up.K);
    Scratch scratch;
    bf16 *latents = scratch.get<bf16>(UNIT * stride), *unit_keys = scratch.get<bf16>(UNIT * keys.GD);
    int32_t unit_positions[UNIT] = {};
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(rows + missing[i] * width + keys.latent_offset(), keys.up.K, latents + i * stride);
      unit_positions[i] = positions[missing[i]];
    }
    keys.decompress(latents, stride, unit_positions, UNIT, unit_keys, keys.GD);
    for (int64_t i = 0; i < count; ++i) rounded->round(unit_keys + i * keys.GD, rows + missing[i] * width);
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

// Rows of a chunk, with rounded keys.
class RoundedKeyRows : public RowSource {
 public:
  explicit RoundedKeyRows(const LatentCache& of) : of_(of), rows_(scratch_.get<bf16>(CHUNK * of.keys.width())) {}

  void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) override {
    const int64_t width = of_.keys.width();
    bf16* rows = rows_ + position % CHUNK * width;
    int32_t positions[CHUNK];
    std::iota(positions, positions + count, int32_t(position));
    for (int64_t t = 0, end; t < count; t = end) {
      end = std::min(count, t + STRETCH);
      for (int64_t i = end; i < std::min(count, end + STRETCH); ++i) prefetch(slots[i]);
      of_.load_latents(slots + t, end - t, rows + t * width);
    }
    of_.load_rounded(slots, positions, count, rows);
    for (int64_t t = 0; t < count; ++t) row[t] = rows + t * width;
  }

  void prefetch(int32_t slot) override {
    of_.rounded->prefetch(slot);
    of_.cached.prefetch(&slot, 1, {0, of_.keys.up.R});
  }

 private:
  const LatentCache& of_;
  Scratch scratch_;
  bf16* const rows_;
};
