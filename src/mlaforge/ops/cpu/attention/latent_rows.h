// Rows [keys, c] that attention reads in the layout `latent`, computed from the cached rows: per chunk, in the reading
// thread's scratch, if few query tokens see them; otherwise once, before the tasks that read them.
//
// A row is identified by its slot and position, so rows that several sequences of a step share are computed once.
#pragma once
#include <unordered_map>

#include "attention/latent_keys.h"
#include "attention/paged_attention.h"

// The cached rows, and how keys are computed from them.
struct LatentCache {
  const LatentKeys& keys;
  const Rows& cached;

  // Loads the latents of the tokens at `count` slots, from `position` on, into rows without keys; sets their positions.
  void load_latents(int64_t position, const int32_t* slots, int64_t count, bf16* rows, int32_t* positions) const {
    for (int64_t t = 0, end; t < count; t = end) {
      end = std::min(count, t + STRETCH);
      cached.prefetch(slots + end, std::min(STRETCH, count - end), {0, keys.R});
      keys.load_latents(cached, slots + t, end - t, rows + t * keys.width());
    }
    std::iota(positions, positions + count, int32_t(position));
  }
};

// Computes the rows of prompts in advance, each block once, and redirects `attention` to them. Owns their memory.
class PromptRows {
 public:
  PromptRows(const LatentCache& of, Attention& attention) {
    const View& view = attention.view;
    const int64_t size = view.block_size, width = of.keys.width();
    at::Tensor table = view.table_SB.clone();
    std::unordered_map<int32_t, int32_t> entries;
    std::vector<std::pair<int64_t, int64_t>> blocks;  // sequence and first position
    for (int64_t s = 0; s < view.sequences(); ++s) {
      int32_t* table_row = table.mutable_data_ptr<int32_t>() + s * table.size(1);
      for (int64_t p = view.first(s); attention.prompt(s) && p < view.length(s); p += size, ++table_row) {
        const auto [entry, inserted] = entries.try_emplace(*table_row, int32_t(blocks.size()));
        if (inserted) blocks.push_back({s, p});
        *table_row = entry->second;
      }
    }
    if (blocks.empty()) return;
    // A task's blocks form whole units.
    const int64_t blocks_per_task = std::lcm(size, UNIT) / size * std::max<int64_t>(1, CHUNK / std::lcm(size, UNIT));
    const int64_t count = blocks.size(), tasks = (count + blocks_per_task - 1) / blocks_per_task;
    const int64_t tokens = blocks_per_task * size;
    auto* rows = scratch_.get<bf16>(tasks * tokens * width);
    at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      int32_t *positions = scratch.filled<int32_t>(tokens, 0), *slots = scratch.get<int32_t>(size);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t b = i * blocks_per_task; b < std::min(count, (i + 1) * blocks_per_task); ++b) {
          const auto [s, position] = blocks[b];
          const int64_t at = (b - i * blocks_per_task) * size;
          view.slots(s, position, size, slots);
          of.load_latents(position, slots, size, rows + b * size * width, positions + at);
        }
        of.keys.decompress(rows + i * tokens * width, positions, tokens);
      }
    });
    attention.decoded.emplace(rows, width);
    attention.decoded_view = view;
    attention.decoded_view->table_SB = table;
  }

 private:
  Scratch scratch_;
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
      of_.load_latents(position + begin - first, slots + begin - first, std::min(until, end) - begin, rows_ + begin * width,
                positions + begin);
      of_.keys.decompress(rows_ + t * width, positions + t, until - t);
      std::copy(tags + t, tags + until, staged_tags_ + t);
    }
    for (int64_t t = 0; t < count; ++t) row[t] = rows_ + (first + t) * width;
  }

  void prefetch(int32_t slot) override { of_.cached.prefetch(&slot, 1, {0, of_.keys.R}); }

 private:
  const LatentCache& of_;
  Scratch scratch_;
  bf16* const rows_;
  int64_t staged_tags_[CHUNK];  // of each row of the chunk: slot and position
};
