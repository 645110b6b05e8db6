// Rows of the paged cache. A row is `width` bf16 numbers by definition. The first blocks may keep theirs packed, as
// ops/row_format.py says; the others, the *whole* blocks, keep them as they are, in memory of their own.
//
// Kernels read rows as bf16: they ask for a stretch to be staged and are given a place for every row, which is the cache
// itself for whole rows and scratch, into which the wanted parts were decoded, for packed ones.
#pragma once
#include <array>

#include "vectors.h"

// Numbers [first, first + numbers) of a row.
struct Part { int64_t first, numbers; };
using Parts = std::array<Part, 2>;

struct Rows {
  int64_t width;
  bf16* whole;  // the row of the first slot that is not packed

  // Rows that all are whole.
  Rows(bf16* whole, int64_t width) : width(width), whole(whole) {}

  // As operations are given them: rows as they are, or packed in `format`, `whole` then being those of the other blocks.
  Rows(const at::Tensor& rows, const std::optional<at::Tensor>& whole, at::IntArrayRef format)
      : Rows(rows.mutable_data_ptr<bf16>(), rows.size(1)) {
    TORCH_CHECK(format[0] == 0 && !whole, "rows in format ", format[0], " are not known");
  }

  // Writes a token's row.
  void put(int64_t slot, const bf16* row) const { std::copy_n(row, width, whole + slot * width); }

  // Numbers of scratch that staging `count` rows needs.
  int64_t scratch(int64_t count) const { return 0; }

  // Places of the rows of `count` slots from `slot` on, which lie in one block. Of packed ones the `parts` are decoded to
  // scratch [count, width].
  void stage(int64_t slot, int64_t count, const Parts& parts, bf16* scratch, const bf16** row) const {
    for (int64_t t = 0; t < count; ++t) row[t] = whole + (slot + t) * width;
  }
};
