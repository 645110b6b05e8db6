// What attention reads in the layout latent: rows [keys, c], made from the rows of the cache. Where few query tokens see
// them, in the scratch of the thread that reads them, chunk by chunk; else once, before many tasks read them.
//
// A row is known by its slot and where its token stands, so that what several sequences of a step share is made once for
// all of them.
#pragma once
#include <unordered_map>

#include "latent_keys.h"
#include "paged_attention.h"

// The cache that rows are made from.
struct LatentCache {
  const LatentKeys& keys;
  const Rows& cached;

  // Rows of the tokens at `count` slots, those from `position` on, but for their keys; where they stand.
  void bring(int64_t position, const int32_t* slots, int64_t count, bf16* rows, int32_t* positions) const {
    static thread_local std::vector<bf16> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), cached.scratch(STRETCH)));
    const bf16* row[STRETCH];
    for (int64_t t = 0; t < count; t += STRETCH) {
      const int64_t some = std::min(STRETCH, count - t);
      cached.stage(slots + t, some, {Part{0, keys.R}, Part{}}, scratch.data(), row);
      for (int64_t i = t; i < t + some; ++i) {
        keys.put(row[i - t], rows + i * keys.width());
        positions[i] = int32_t(position + i);
      }
    }
  }
};

// Makes the rows of prompts beforehand, each block once, and has `attention` read them. They are
// there as long as it is.
class PromptRows {
 public:
  PromptRows(const LatentCache& of, Attention& attention) {
    const View& view = attention.view;
    const int64_t size = view.block_size, width = of.keys.width();
    at::Tensor table = view.table_SB.clone();
    std::unordered_map<int32_t, int32_t> places;
    std::vector<std::pair<int64_t, int64_t>> blocks;  // sequence and first position
    for (int64_t s = 0; s < view.sequences(); ++s) {
      int32_t* own = table.mutable_data_ptr<int32_t>() + s * table.size(1);
      for (int64_t p = view.first(s); attention.prompt(s) && p < view.length(s); p += size, ++own) {
        const auto [place, fresh] = places.try_emplace(*own, int32_t(blocks.size()));
        if (fresh) blocks.push_back({s, p});
        *own = place->second;
      }
    }
    if (blocks.empty()) return;
    // A thread takes blocks that are whole units together.
    const int64_t together = std::lcm(size, UNIT) / size * std::max<int64_t>(1, CHUNK / std::lcm(size, UNIT));
    const int64_t count = blocks.size(), stretches = (count + together - 1) / together, tokens = together * size;
    held_ = at::empty({stretches * tokens * width + LINE}, table.options().dtype(at::kBFloat16));
    bf16* rows = align64(held_.mutable_data_ptr<bf16>());
    at::parallel_for(0, stretches, 1, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> positions(tokens), slots(size);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t b = i * together; b < std::min(count, (i + 1) * together); ++b) {
          const auto [s, position] = blocks[b];
          const int64_t at = (b - i * together) * size;
          view.slots(s, position, size, slots.data());
          of.bring(position, slots.data(), size, rows + b * size * width, positions.data() + at);
        }
        of.keys.make(rows + i * tokens * width, positions.data(), tokens);
      }
    });
    attention.decoded.emplace(rows, width);
    attention.decoded_view = view;
    attention.decoded_view->table_SB = table;
  }

 private:
  at::Tensor held_;
};

// Makes a chunk's rows, but for those that the last sequence that asked had too.
class LatentRows : public Source {
 public:
  explicit LatentRows(const LatentCache& of) : of_(of) {
    static thread_local std::vector<bf16> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), CHUNK * of.keys.width() + LINE));
    rows_ = align64(scratch.data());
    std::fill_n(held_, CHUNK, -1);
  }

  void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) override {
    const int64_t first = position % CHUNK, end = first + count, width = of_.keys.width();
    // Of units that the sequence has only a part of, the rest is of no token.
    int64_t wanted[CHUNK];
    std::fill_n(wanted, CHUNK, -1);
    for (int64_t t = 0; t < count; ++t) wanted[first + t] = int64_t(slots[t]) << 32 | (position + t);
    auto there = [&](int64_t t) {
      return std::equal(wanted + std::max(t, first), wanted + std::min(t + UNIT, end), held_ + std::max(t, first));
    };
    for (int64_t t = first / UNIT * UNIT, until; t < end; t = std::max(until, t + UNIT)) {
      for (until = t; until < end && !there(until);) until += UNIT;
      if (until == t) continue;
      const int64_t begin = std::max(t, first);
      int32_t positions[CHUNK] = {};
      of_.bring(position + begin - first, slots + begin - first, std::min(until, end) - begin, rows_ + begin * width,
                positions + begin);
      of_.keys.make(rows_ + t * width, positions + t, until - t);
      std::copy(wanted + t, wanted + until, held_ + t);
    }
    for (int64_t t = 0; t < count; ++t) row[t] = rows_ + (first + t) * width;
  }

 private:
  const LatentCache& of_;
  bf16* rows_;
  int64_t held_[CHUNK];  // what each row of the chunk was made from: slot and position
};
