// What a step's query tokens see of the paged cache.
//
// A node of a tree of drafted tokens sees the text before the tree, then the tokens on its path, each at its own position,
// as if there were no other branches.
#pragma once
#include <span>

#include "simd/vectors.h"

constexpr int64_t CHUNK = 256;  // cached tokens per chunk

// A step's view of the cache (ops/cache_view.py).
class View {
 public:
  int64_t block_size, window;

  // first_S: positions of the sequences' first rows; none if all are 0. query_start_S1: none if no query tokens are read.
  View(const at::Tensor& table_SB, const at::Tensor& seq_lens_S, const std::optional<at::Tensor>& first_S,
       const std::optional<at::Tensor>& query_start_S1, int64_t block_size, int64_t window,
       const std::optional<at::Tensor>& tree_Tn)
      : block_size(block_size), window(window), lengths_S_(seq_lens_S), lengths_(numbers(seq_lens_S)),
        firsts_(numbers(first_S)), starts_(numbers(query_start_S1)), tree_(numbers(tree_Tn)),
        sequences_(seq_lens_S.size(0)), nodes_(tree_Tn ? tree_Tn->size(1) : 0) {
    set_table(table_SB);
  }

  // All tokens of sequences, without query tokens.
  static View text(const at::Tensor& table_SB, const at::Tensor& seq_lens_S, int64_t block_size) {
    return {table_SB, seq_lens_S, std::nullopt, std::nullopt, block_size, 0, std::nullopt};
  }
  // The same, of these sequences of a view.
  View text(at::IntArrayRef sequences) const {
    const int64_t count = sequences.size();
    const at::Tensor table = at::empty({count, columns_}, at::kInt), lengths = at::empty({count}, at::kInt);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(blocks_ + sequences[i] * columns_, columns_, table.mutable_data_ptr<int32_t>() + i * columns_);
      lengths.mutable_data_ptr<int32_t>()[i] = lengths_[sequences[i]];
    }
    return text(table, lengths, block_size);
  }
  // Sequences [begin, end), whose query tokens are counted from 0.
  View part(int64_t begin, int64_t end) const {
    View view = *this;
    view.blocks_ += begin * columns_, view.lengths_ += begin, view.sequences_ = end - begin;
    if (firsts_) view.firsts_ += begin;
    view.first_query_ = starts_[begin], view.starts_ += begin;
    return view;
  }
  // Replaces the table by a copy, and returns its memory.
  int32_t* copy_table() {
    const at::Tensor copy = at::empty({sequences_, columns_}, at::kInt);
    std::copy_n(blocks_, copy.numel(), copy.mutable_data_ptr<int32_t>());
    set_table(copy);
    return copy.mutable_data_ptr<int32_t>();
  }

  int64_t sequences() const { return sequences_; }
  int64_t columns() const { return columns_; }  // of the table
  int64_t length(int64_t s) const { return lengths_[s]; }
  int64_t first(int64_t s) const { return firsts_ ? firsts_[s] : 0; }
  int64_t rows(int64_t s) const { return length(s) - first(s); }
  int64_t query(int64_t s) const { return starts_[s] - first_query_; }
  int64_t queries(int64_t s) const { return query(s + 1) - query(s); }
  bool is_tree() const { return tree_; }
  int64_t nodes() const { return nodes_; }
  // Distance from query token m of a sequence back to each node of the tree; -1 for nodes that it does not see.
  const int32_t* distances(int64_t s, int64_t m) const {
    return tree_ + (starts_[s] + m) * nodes_;
  }
  // Positions below it are rows of the table; in a tree, positions from it on are nodes of the query token's path.
  int64_t tree_begin(int64_t s) const { return tree_ ? length(s) - nodes_ : std::numeric_limits<int32_t>::max(); }

  // A sequence's blocks.
  std::span<const int32_t> blocks(int64_t s) const {
    return {blocks_ + s * columns_, size_t((rows(s) + block_size - 1) / block_size)};
  }

  // Slots of `count` consecutive rows of the table, from `row` on.
  void slots(int64_t s, int64_t row, int64_t count, int32_t* slot) const {
    const int32_t* blocks = blocks_ + s * columns_;
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
    if (!tree_) return length(s) - queries(s) + m;
    return tree_begin(s) + *std::max_element(distances(s, m), distances(s, m) + nodes());
  }

  // The first position that a token at `position` sees.
  int64_t window_begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }

  // Chunks, at fixed positions, that query tokens [m, n) of a sequence see.
  std::pair<int64_t, int64_t> chunks(int64_t s, int64_t m, int64_t n) const {
    int64_t lowest = position(s, m), highest = position(s, n - 1);
    for (int64_t i = m; tree_ && i < n; ++i)
      lowest = std::min(lowest, position(s, i)), highest = std::max(highest, position(s, i));
    return {std::max(first(s), window_begin(lowest)) / CHUNK, highest / CHUNK + 1};
  }

 private:
  static const int32_t* numbers(const std::optional<at::Tensor>& x) { return x ? x->const_data_ptr<int32_t>() : nullptr; }
  void set_table(const at::Tensor& table_SB) {
    table_SB_ = table_SB, blocks_ = numbers(table_SB), columns_ = table_SB.size(1);
  }

  at::Tensor table_SB_, lengths_S_;  // own the memory that is read
  const int32_t *blocks_ = nullptr, *lengths_, *firsts_, *starts_, *tree_;
  int64_t sequences_, columns_ = 0, nodes_, first_query_ = 0;
};
