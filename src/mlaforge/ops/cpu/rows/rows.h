// Rows of the paged cache. A row is `width` elements of bf16 by definition. The first blocks may be packed in a format of
// ops/row_formats/; the others are unquantized, in separate memory.
//
// Kernels read rows as bf16: they stage a stretch of rows and get an address per row, in the cache for unquantized rows, and
// in scratch, with the requested columns decoded, for packed ones.
#pragma once
#include <array>

#include "rows/coded_rows.h"
#include "rows/int4_rows.h"
#include "rows/int8_rows.h"

// Elements [first, first + count) of a row.
struct ColumnRange {
  int64_t first, count;

  int64_t end() const { return first + count; }
};
using ColumnRanges = std::array<ColumnRange, 2>;

class Rows {
 public:
  int64_t width;

  // Unquantized rows only.
  Rows(bf16* unquantized, int64_t width) : width(width), unquantized_(unquantized) {}

  // From the arguments of the ops: plain rows, or rows packed in `format` (its descriptor) with `unquantized`, the rows of
  // the other blocks.
  Rows(const at::Tensor& rows, const std::optional<at::Tensor>& unquantized, at::IntArrayRef format)
      : format_(Format(format[0])) {
    TORCH_CHECK(rows.is_contiguous() && (!unquantized || unquantized->is_contiguous()), "rows are not contiguous");
    if (format_ == BF16) {
      width = rows.size(1), unquantized_ = rows.mutable_data_ptr<bf16>();
      return;
    }
    packed_ = rows.mutable_data_ptr<uint8_t>(), bytes_ = rows.size(1);
    if (format_ == INT8) {
      int8_ = Int8Rows(format.slice(1)), width = int8_.width, slots_ = rows.size(0);
      TORCH_CHECK(bytes_ == int8_.row_bytes(), "a row of int8 has ", int8_.row_bytes(), " bytes, this one ", bytes_);
    } else if (format_ == CODED) {
      coded_ = CodedRows(format.slice(1)), width = coded_.width, slots_ = rows.size(0);
      TORCH_CHECK(bytes_ == coded_.row_bytes(), "a coded row has ", coded_.row_bytes(), " bytes, this one ", bytes_);
    } else {
      TORCH_CHECK(format_ == INT4 && format.size() == 3 && format[2] % 2 == 0, "rows in format ", format, " are not supported");
      int4_ = {format[1], format[2]}, width = int4_.width(), slots_ = rows.size(0) * Int4Rows::TOKENS;
      TORCH_CHECK(bytes_ == int4_.unit_bytes(), "32 rows of int4 have ", int4_.unit_bytes(), " bytes, these ", bytes_);
    }
    TORCH_CHECK(!unquantized || unquantized->size(1) == width, "unquantized rows are not ", width, " wide");
    if (unquantized) unquantized_ = unquantized->mutable_data_ptr<bf16>();
  }

  // Writes a token's row.
  void write_row(int64_t slot, const bf16* row) const {
    if (slot >= slots_) {
      std::copy_n(row, width, unquantized_ + (slot - slots_) * width);
    } else {
      TORCH_INTERNAL_ASSERT(format_ != INT4, "a row alone is not packed");
      if (format_ == INT8) int8_.write(row, packed_ + slot * bytes_);
      else coded_.write(row, packed_ + slot * bytes_);
    }
  }

  // Quantizes the 32 unquantized rows from slot `from` on into the unit at slot `to`.
  void quantize_unit(int64_t from, int64_t to) const {
    TORCH_INTERNAL_ASSERT(format_ == INT4 && from >= slots_ && to < slots_, "rows are packed from whole blocks");
    int4_.write(unquantized_ + (from - slots_) * width, unit(to));
  }

  bool packed() const { return packed_; }

  // Whether all rows are int8 with `count` groups of D elements.
  bool is_int8_by_head(int64_t D, int64_t count) const {
    return format_ == INT8 && !unquantized_ && int8_.group_sizes == std::vector<int64_t>(count, D);
  }

  // Bytes of a unit, and the offset of the scales in an int8 row.
  int64_t unit_bytes() const { return bytes_; }
  int64_t scales_offset() const { return int8_.scales_offset(); }

  // Elements of scratch that staging `count` rows needs.
  int64_t scratch_elements(int64_t count) const { return packed_ ? count * width : 0; }

  // Sets `row` to the rows at `count` slots. The `ranges` of packed ones are decoded to scratch [count, width].
  void stage(const int32_t* slots, int64_t count, const ColumnRanges& ranges, bf16* scratch, const bf16** row) const {
    for (int64_t t = 0, end; t < count; t = end) {
      end = t + 1;
      if (slots[t] >= slots_) {
        row[t] = unquantized_ + (slots[t] - slots_) * width;
        continue;
      }
      // Consecutive rows of one unit are decoded together.
      while (end < count && slots[end] < slots_ && (format_ != INT4 || unit(slots[end]) == unit(slots[t]))) ++end;
      bf16* to = scratch + t * width;
      for (int64_t i = t; i < end; ++i) row[i] = scratch + i * width;
      for (const ColumnRange& range : ranges) {
        if (format_ == INT8) int8_.read(packed_, slots + t, end - t, range.first, range.end(), to);
        else if (format_ == CODED) coded_.read(packed_, slots + t, end - t, range.first, range.end(), to);
        else int4_.read(unit(slots[t]), token_in_unit(slots[t]), token_in_unit(slots[t]) + end - t, range.first,
                        range.end(), to);
      }
    }
  }

  // Sets `row` to packed int8 rows in place.
  void stage(const int32_t* slots, int64_t count, const ColumnRanges&, int8_t*, const int8_t** row) const {
    for (int64_t t = 0; t < count; ++t) row[t] = (const int8_t*)packed_ + slots[t] * bytes_;
  }

  // Prefetches elements `range` of the rows at `count` slots.
  void prefetch(const int32_t* slots, int64_t count, ColumnRange range) const {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = slots[t];
      if (slot >= slots_) prefetch_bytes(unquantized_ + (slot - slots_) * width + range.first, 2 * range.count);
      else if (format_ == INT8) prefetch_bytes(packed_ + slot * bytes_ + range.first, range.count);
      else if (format_ == CODED) prefetch_bytes(packed_ + slot * bytes_, bytes_);
      else int4_.prefetch(unit(slot), token_in_unit(slot), range.first, range.end());
    }
  }

 private:
  // The unit of an int4 slot, and the token's index in it.
  uint8_t* unit(int64_t slot) const { return packed_ + slot / Int4Rows::TOKENS * bytes_; }
  static int64_t token_in_unit(int64_t slot) { return slot % Int4Rows::TOKENS; }

  enum Format : int64_t { BF16, INT8, INT4, CODED };

  Format format_ = BF16;
  Int8Rows int8_;
  Int4Rows int4_;
  CodedRows coded_;
  uint8_t* packed_ = nullptr;
  int64_t slots_ = 0, bytes_ = 0;  // packed slots; bytes of a unit
  bf16* unquantized_ = nullptr;  // rows of the other slots
};

// Quantizes full unquantized blocks `from` into packed blocks `to`.
void pack_blocks(const at::Tensor& rows_UB, const at::Tensor& unquantized_LW, at::IntArrayRef format, const at::Tensor& from_K,
                 const at::Tensor& to_K, int64_t block_size) {
  const Rows rows(rows_UB, unquantized_LW, format);
  const int64_t units = block_size / Int4Rows::TOKENS;
  const int64_t *from = from_K.const_data_ptr<int64_t>(), *to = to_K.const_data_ptr<int64_t>();
  at::parallel_for(0, from_K.size(0) * units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / units, offset = i % units * Int4Rows::TOKENS;
      rows.quantize_unit(from[block] * block_size + offset, to[block] * block_size + offset);
    }
  });
}
