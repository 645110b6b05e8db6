// What a step's query tokens see of the paged cache.
//
// A node of a tree of drafted tokens sees the text before the tree, then the tokens on its path, each at its own position,
// as if there were no other branches.
#pragma once
#include <span>

#include "simd/vectors.h"

constexpr int64_t CHUNK = 256;  // cached tokens per chunk

// A step's view of the cache (ops/cache_view.py).
struct View {
  at::Tensor table_SB, seq_lens_S, first_S, query_start_S1;
  int64_t block_size, window;
  std::optional<at::Tensor> tree_Tn;

  // All tokens of sequences, without query tokens.
  static View text(const at::Tensor& table_SB, const at::Tensor& seq_lens_S, int64_t block_size) {
    return {table_SB, seq_lens_S, at::zeros_like(seq_lens_S), at::empty(0), block_size, 0, std::nullopt};
  }
  // Sequences [begin, end), whose query tokens are counted from 0.
  View part(int64_t begin, int64_t end) const {
    auto narrowed = [&](const at::Tensor& x, int64_t more) { return x.narrow(0, begin, end - begin + more); };
    return {narrowed(table_SB, 0), narrowed(seq_lens_S, 0), narrowed(first_S, 0),
            narrowed(query_start_S1, 1) - query(begin), block_size, window, tree_Tn};
  }

  int64_t sequences() const { return seq_lens_S.size(0); }
  int64_t length(int64_t s) const { return seq_lens_S.const_data_ptr<int32_t>()[s]; }
  int64_t first(int64_t s) const { return first_S.const_data_ptr<int32_t>()[s]; }
  int64_t rows(int64_t s) const { return length(s) - first(s); }
  int64_t query(int64_t s) const { return query_start_S1.const_data_ptr<int32_t>()[s]; }
  int64_t queries(int64_t s) const { return query(s + 1) - query(s); }
  int64_t nodes() const { return tree_Tn ? tree_Tn->size(1) : 0; }
  // Distance from query token m of a sequence back to each node of the tree; -1 for nodes that it does not see.
  const int32_t* distances(int64_t s, int64_t m) const {
    return tree_Tn->const_data_ptr<int32_t>() + (query(s) + m) * nodes();
  }
  // Positions below it are rows of the table; in a tree, positions from it on are nodes of the query token's path.
  int64_t tree_begin(int64_t s) const { return tree_Tn ? length(s) - nodes() : std::numeric_limits<int32_t>::max(); }

  // A sequence's blocks.
  std::span<const int32_t> blocks(int64_t s) const {
    return {table_SB.const_data_ptr<int32_t>() + s * table_SB.size(1), size_t((rows(s) + block_size - 1) / block_size)};
  }

  // Slots of `count` consecutive rows of the table, from `row` on.
  void slots(int64_t s, int64_t row, int64_t count, int32_t* slot) const {
    const int32_t* blocks = table_SB.const_data_ptr<int32_t>() + s * table_SB.size(1);
    const int64_t at = row - first(s);
    for (int64_t t = 0, b = at / block_size, offset = at % block_size; t < count; ++t) {
      slot[t] = int32_t(blocks[b] * block_size + offset);
      if (++offset == block_size) ++b, offset = 0;
    }
  }

  // Slots of the `count` tokens from `position` on that query token m sees. Positions beyond its own, on a path, repeat it.
  void visible_slots(int64_t s, int64_t m, int64_t position, int64_t count, int32_t* slot) const {
    const int64_t text = std::clamp<int64_t>(tree_begin(s) - position, 0, count);
    slots(s, position, text, slot);
    for (int64_t t = text; t < count; ++t) {
      const int64_t distance = std::max<int64_t>(0, this->position(s, m) - (position + t));
      const int32_t* path = distances(s, m);
      slots(s, tree_begin(s) + std::find(path, path + nodes(), distance) - path, 1, slot + t);
    }
  }

  // Position of query token m of a sequence.
  int64_t position(int64_t s, int64_t m) const {
    if (!tree_Tn) return length(s) - queries(s) + m;
    return tree_begin(s) + *std::max_element(distances(s, m), distances(s, m) + nodes());
  }

  // The first position that a token at `position` sees.
  int64_t window_begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }

  // Chunks, at fixed positions, that query tokens [m, n) of a sequence see.
  std::pair<int64_t, int64_t> chunks(int64_t s, int64_t m, int64_t n) const {
    int64_t lowest = position(s, m), highest = position(s, n - 1);
    for (int64_t i = m; tree_Tn && i < n; ++i)
      lowest = std::min(lowest, position(s, i)), highest = std::max(highest, position(s, i));
    return {std::max(first(s), window_begin(lowest)) / CHUNK, highest / CHUNK + 1};
  }
};
