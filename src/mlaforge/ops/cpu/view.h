// What a step's query tokens see of the paged cache.
//
// A node of a tree of drafted tokens is a text's newest token: it sees the text before the tree and then its path, each
// token of it at its own position, as if no other branch were there.
#pragma once
#include <span>

#include "vectors.h"

constexpr int64_t CHUNK = 256;  // cached tokens of a chunk

// What the query tokens of a step see of the cache, as ops/cache_view.py describes it.
struct View {
  at::Tensor table_SB, seq_lens_S, first_S, query_start_S1;
  int64_t block_size, window;
  std::optional<at::Tensor> tree_Tn;

  int64_t sequences() const { return seq_lens_S.size(0); }
  int64_t length(int64_t s) const { return seq_lens_S.const_data_ptr<int32_t>()[s]; }
  int64_t first(int64_t s) const { return first_S.const_data_ptr<int32_t>()[s]; }
  int64_t rows(int64_t s) const { return length(s) - first(s); }
  int64_t query(int64_t s) const { return query_start_S1.const_data_ptr<int32_t>()[s]; }
  int64_t queries(int64_t s) const { return query(s + 1) - query(s); }
  int64_t nodes() const { return tree_Tn ? tree_Tn->size(1) : 0; }
  // How far before query token m each node of the tree stands, -1 where it is not seen.
  const int32_t* back(int64_t m) const { return tree_Tn->const_data_ptr<int32_t>() + m * nodes(); }
  // Before it a position is a row of the table; from it on, in a tree, a node of the query token's path.
  int64_t tail(int64_t s) const { return tree_Tn ? length(s) - nodes() : std::numeric_limits<int32_t>::max(); }

  // A sequence's blocks.
  std::span<const int32_t> blocks(int64_t s) const {
    return {table_SB.const_data_ptr<int32_t>() + s * table_SB.size(1), size_t((rows(s) + block_size - 1) / block_size)};
  }

  // Slots of `count` rows of the table, that of `row` and those after it.
  void slots(int64_t s, int64_t row, int64_t count, int32_t* slot) const {
    const int32_t* blocks = table_SB.const_data_ptr<int32_t>() + s * table_SB.size(1);
    const int64_t at = row - first(s);
    for (int64_t t = 0, b = at / block_size, offset = at % block_size; t < count; ++t) {
      slot[t] = int32_t(blocks[b] * block_size + offset);
      if (++offset == block_size) ++b, offset = 0;
    }
  }

  // Slots of the `count` tokens from `position` on that query token m sees. Behind its own, on a path, is its own again.
  void seen(int64_t s, int64_t m, int64_t position, int64_t count, int32_t* slot) const {
    const int64_t text = std::clamp<int64_t>(tail(s) - position, 0, count);
    slots(s, position, text, slot);
    for (int64_t t = text; t < count; ++t) {
      const int64_t distance = std::max<int64_t>(0, this->position(s, m) - (position + t));
      slots(s, tail(s) + std::find(back(m), back(m) + nodes(), distance) - back(m), 1, slot + t);
    }
  }

  // Where query token m of a sequence stands.
  int64_t position(int64_t s, int64_t m) const {
    return tree_Tn ? tail(s) + *std::max_element(back(m), back(m) + nodes()) : length(s) - queries(s) + m;
  }

  // The first position that a token at `position` sees.
  int64_t since(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }

  // Chunks that query tokens m to before n of a sequence see, at fixed positions.
  std::pair<int64_t, int64_t> chunks(int64_t s, int64_t m, int64_t n) const {
    int64_t least = position(s, m), most = position(s, n - 1);
    for (int64_t i = m; tree_Tn && i < n; ++i) least = std::min(least, position(s, i)), most = std::max(most, position(s, i));
    return {std::max(first(s), since(least)) / CHUNK, most / CHUNK + 1};
  }
};
