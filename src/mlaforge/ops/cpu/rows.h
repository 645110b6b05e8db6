// Rows of the paged cache. A row is `width` bf16 numbers by definition. The first blocks may keep theirs packed, as
// ops/row_format.py says; the others, the *whole* blocks, keep them as they are, in memory of their own.
//
// Kernels read rows as bf16: they ask for a stretch to be staged and are given a place for every row, which is the cache
// itself for whole rows and scratch, into which the wanted parts were decoded, for packed ones.
#pragma once
#include <array>

#include "coded_rows.h"
#include "int4_rows.h"
#include "int8_rows.h"

// Numbers [first, first + numbers) of a row.
struct Part {
  int64_t first, numbers;

  int64_t last() const { return first + numbers; }
};
using Parts = std::array<Part, 2>;

class Rows {
 public:
  int64_t width;

  // Rows that all are whole.
  Rows(bf16* whole, int64_t width) : width(width), whole_(whole) {}

  // As operations are given them: rows as they are, or packed in `format` (its id and sizes), `whole` then being those of
  // the other blocks.
  Rows(const at::Tensor& rows, const std::optional<at::Tensor>& whole, at::IntArrayRef format) : format_(Format(format[0])) {
    TORCH_CHECK(rows.is_contiguous() && (!whole || whole->is_contiguous()), "rows have gaps between them");
    if (format_ == BF16) {
      width = rows.size(1), whole_ = rows.mutable_data_ptr<bf16>();
      return;
    }
    packed_ = rows.mutable_data_ptr<uint8_t>(), bytes_ = rows.size(1);
    if (format_ == INT8) {
      int8_ = Int8Rows(format.slice(1)), width = int8_.width, slots_ = rows.size(0);
      TORCH_CHECK(bytes_ == int8_.bytes(), "a row of int8 has ", int8_.bytes(), " bytes, this one ", bytes_);
    } else if (format_ == CODED) {
      coded_ = CodedRows(format.slice(1)), width = coded_.width, slots_ = rows.size(0);
      TORCH_CHECK(bytes_ == coded_.bytes(), "a coded row has ", coded_.bytes(), " bytes, this one ", bytes_);
    } else {
      TORCH_CHECK(format_ == INT4 && format.size() == 3 && format[2] % 2 == 0, "rows in format ", format, " are not known");
      int4_ = {format[1], format[2]}, width = int4_.width(), slots_ = rows.size(0) * Int4Rows::TOKENS;
      TORCH_CHECK(bytes_ == int4_.bytes(), "32 rows of int4 have ", int4_.bytes(), " bytes, these ", bytes_);
    }
    TORCH_CHECK(!whole || whole->size(1) == width, "whole rows are not ", width, " wide");
    if (whole) whole_ = whole->mutable_data_ptr<bf16>();
  }

  // Writes a token's row.
  void put(int64_t slot, const bf16* row) const {
    if (slot >= slots_) {
      std::copy_n(row, width, whole_ + (slot - slots_) * width);
    } else {
      TORCH_INTERNAL_ASSERT(format_ != INT4, "a row alone is not packed");
      if (format_ == INT8) int8_.write(row, packed_ + slot * bytes_);
      else coded_.write(row, packed_ + slot * bytes_);
    }
  }

  // Packs the 32 rows from a whole slot on.
  void pack(int64_t from, int64_t to) const {
    TORCH_INTERNAL_ASSERT(format_ == INT4 && from >= slots_ && to < slots_, "rows are packed from whole blocks");
    int4_.write(whole_ + (from - slots_) * width, unit(to));
  }

  bool packed() const { return packed_; }

  // Whether all rows are int8 with scales for `count` parts of D numbers.
  bool coded_by(int64_t D, int64_t count) const {
    return format_ == INT8 && !whole_ && int8_.parts == std::vector<int64_t>(count, D);
  }

  // Bytes of what is packed together, and where in a row of int8 its scales begin.
  int64_t bytes() const { return bytes_; }
  int64_t scales() const { return int8_.scales(); }

  // Numbers of scratch that staging `count` rows needs.
  int64_t scratch(int64_t count) const { return packed_ ? count * width : 0; }

  // Places of the rows at `count` slots. Of packed ones the `parts` are decoded, to their places in scratch [count, width].
  void stage(const int32_t* slots, int64_t count, const Parts& parts, bf16* scratch, const bf16** row) const {
    for (int64_t t = 0, end; t < count; t = end) {
      end = t + 1;
      if (slots[t] >= slots_) {
        row[t] = whole_ + (slots[t] - slots_) * width;
        continue;
      }
      // Those that are packed together, one after another.
      while (end < count && slots[end] < slots_ && (format_ != INT4 || unit(slots[end]) == unit(slots[t]))) ++end;
      bf16* to = scratch + t * width;
      for (int64_t i = t; i < end; ++i) row[i] = scratch + i * width;
      for (const Part& part : parts) {
        if (format_ == INT8) int8_.read(packed_, slots + t, end - t, part.first, part.last(), to);
        else if (format_ == CODED) coded_.read(packed_, slots + t, end - t, part.first, part.last(), to);
        else int4_.read(unit(slots[t]), inside(slots[t]), inside(slots[t]) + end - t, part.first, part.last(), to);
      }
    }
  }

  // Places of rows of int8 as they lie.
  void stage(const int32_t* slots, int64_t count, const Parts&, int8_t*, const int8_t** row) const {
    for (int64_t t = 0; t < count; ++t) row[t] = (const int8_t*)packed_ + slots[t] * bytes_;
  }

  // Has a core's cache read the numbers `part` of the rows at `count` slots.
  void fetch(const int32_t* slots, int64_t count, Part part) const {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = slots[t];
      if (slot >= slots_) prefetch_bytes(whole_ + (slot - slots_) * width + part.first, 2 * part.numbers);
      else if (format_ == INT8) prefetch_bytes(packed_ + slot * bytes_ + part.first, part.numbers);
      else if (format_ == CODED) prefetch_bytes(packed_ + slot * bytes_, bytes_);
      else int4_.fetch(unit(slot), inside(slot), part.first, part.last());
    }
  }

 private:
  // Where a slot of int4 lies, and which token of those that are packed together it is.
  uint8_t* unit(int64_t slot) const { return packed_ + slot / Int4Rows::TOKENS * bytes_; }
  static int64_t inside(int64_t slot) { return slot % Int4Rows::TOKENS; }

  enum Format : int64_t { BF16, INT8, INT4, CODED };

  Format format_ = BF16;
  Int8Rows int8_;
  Int4Rows int4_;
  CodedRows coded_;
  uint8_t* packed_ = nullptr;
  int64_t slots_ = 0, bytes_ = 0;  // slots that are packed; bytes of what is packed together
  bf16* whole_ = nullptr;          // the rows of the other slots
};

// Packs complete whole blocks `from` as packed blocks `to`.
void pack_blocks(const at::Tensor& rows_UB, const at::Tensor& whole_LW, at::IntArrayRef format, const at::Tensor& from_K,
                 const at::Tensor& to_K, int64_t block_size) {
  const Rows rows(rows_UB, whole_LW, format);
  const int64_t units = block_size / Int4Rows::TOKENS;
  const int64_t *from = from_K.const_data_ptr<int64_t>(), *to = to_K.const_data_ptr<int64_t>();
  at::parallel_for(0, from_K.size(0) * units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / units, offset = i % units * Int4Rows::TOKENS;
      rows.pack(from[block] * block_size + offset, to[block] * block_size + offset);
    }
  });
}
