// Rows of the paged cache. A row is `width` elements of bf16 by definition. The first blocks may be packed in a format
// (row_format.h); the others are unquantized, in separate memory.
//
// Kernels read rows as bf16: they stage a stretch of rows and get an address per row, in the cache for unquantized rows, and
// in scratch, with the requested columns decoded, for packed ones.
#pragma once
#include <array>

#include "rows/row_format.h"
#include "row_formats.h"

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
  Rows(bf16* unquantized, int64_t width) : width(width), unquantized_(unquantized), unquantized_stride_(width) {}

  // From the arguments of the ops: plain rows (format 0), or rows packed in `format` (its descriptor) with `unquantized`,
  // the rows of the other blocks. Rows are as far apart as the tensors' strides say: vLLM's cache has those of all layers
  // side by side.
  Rows(const at::Tensor& rows, const std::optional<at::Tensor>& unquantized, at::IntArrayRef format) {
    TORCH_CHECK(rows.stride(1) == 1 && (!unquantized || unquantized->stride(1) == 1), "elements of a row are not contiguous");
    if (format[0] == 0) {
      width = rows.size(1), unquantized_ = rows.mutable_data_ptr<bf16>(), unquantized_stride_ = rows.stride(0);
      return;
    }
    format_ = RowFormats::find(format), width = format_->width;
    packed_ = rows.mutable_data_ptr<uint8_t>(), stride_ = rows.stride(0), slots_ = rows.size(0) * format_->tokens;
    TORCH_CHECK(rows.size(1) == format_->unit_bytes, format_->tokens, " rows in format ", format, " have ",
                format_->unit_bytes, " bytes, these have ", rows.size(1));
    TORCH_CHECK(!unquantized || unquantized->size(1) == width, "unquantized rows are not ", width, " wide");
    if (unquantized) unquantized_ = unquantized->mutable_data_ptr<bf16>(), unquantized_stride_ = unquantized->stride(0);
  }

  bool packed() const { return packed_; }
  int64_t unit_tokens() const { return format_->tokens; }
  int64_t unit_bytes() const { return format_->unit_bytes; }
  int64_t stride() const { return stride_; }  // bytes from one packed unit to the next
  // Elements from one row to the next, as kernels read them: staged in scratch if packed, else in place.
  int64_t element_stride() const { return packed_ ? width : unquantized_stride_; }

  // Writes a token's row.
  void write_row(int64_t slot, const bf16* row) const {
    if (slot >= slots_) {
      std::copy_n(row, width, unquantized(slot));
    } else {
      TORCH_INTERNAL_ASSERT(format_->tokens == 1, "a row alone is not packed");
      format_->write(row, packed_ + slot * stride_);
    }
  }

  // Packs the unquantized rows of a unit, from slot `from` on, into the unit at slot `to`.
  void pack_unit(int64_t from, int64_t to) const {
    TORCH_INTERNAL_ASSERT(packed_ && from >= slots_ && to < slots_, "rows are packed from whole blocks");
    TORCH_INTERNAL_ASSERT(unquantized_stride_ == width, "a unit is packed from consecutive rows");
    format_->write(unquantized(from), packed_ + to / format_->tokens * stride_);
  }

  // Layout of the codes if all rows have codes that are multiplied in place.
  const RowCodes* codes() const { return format_ && format_->codes && !unquantized_ ? &*format_->codes : nullptr; }

  // Elements of scratch that staging `count` rows needs.
  int64_t scratch_elements(int64_t count) const { return packed_ ? count * width : 0; }

  // Sets `row` to the rows at `count` slots. The `ranges` of packed ones are decoded to scratch [count, width].
  void stage(const int32_t* slots, int64_t count, const ColumnRanges& ranges, bf16* scratch, const bf16** row) const {
    for (int64_t t = 0, end; t < count; t = end) {
      end = t + 1;
      if (slots[t] >= slots_) {
        row[t] = unquantized(slots[t]);
        continue;
      }
      while (end < count && slots[end] < slots_) ++end;
      for (int64_t i = t; i < end; ++i) row[i] = scratch + i * width;
      for (const ColumnRange& range : ranges)
        if (range.count) format_->read(units(), slots + t, end - t, range.first, range.end(), scratch + t * width, width);
    }
  }

  // Copies the first `elements` of the rows at `count` slots to rows that are `stride` elements apart.
  void read(const int32_t* slots, int64_t count, int64_t elements, bf16* rows, int64_t stride) const {
    for (int64_t t = 0, end; t < count; t = end) {
      for (end = t; end < count && slots[end] < slots_;) ++end;
      if (end > t) format_->read(units(), slots + t, end - t, 0, elements, rows + t * stride, stride);
      for (; end < count && slots[end] >= slots_; ++end)
        std::memcpy((void*)(rows + end * stride), unquantized(slots[end]), 2 * elements);
    }
  }

  // Sets `row` to the rows at `count` slots in place, as codes.
  void stage(const int32_t* slots, int64_t count, const ColumnRanges&, int8_t*, const int8_t** row) const {
    for (int64_t t = 0; t < count; ++t) row[t] = (const int8_t*)units().at(slots[t]);
  }

  // Prefetches codes `range` of a row.
  void prefetch_codes(int64_t slot, ColumnRange range) const {
    prefetch_bytes(units().at(slot) + range.first, range.count);
  }

  // Prefetches elements `range` of the rows at `count` slots.
  void prefetch(const int32_t* slots, int64_t count, ColumnRange range) const {
    for (int64_t t = 0, end; t < count; t = end) {
      for (end = t; end < count && slots[end] < slots_;) ++end;
      if (end > t) format_->prefetch(units(), slots + t, end - t, range.first, range.end());
      for (; end < count && slots[end] >= slots_; ++end)
        prefetch_bytes(unquantized(slots[end]) + range.first, 2 * range.count);
    }
  }

 private:
  Units units() const { return {packed_, stride_}; }
  bf16* unquantized(int64_t slot) const { return unquantized_ + (slot - slots_) * unquantized_stride_; }

  std::shared_ptr<const RowFormat> format_;  // null for unquantized rows only
  uint8_t* packed_ = nullptr;
  int64_t stride_ = 0;  // bytes from one packed unit to the next
  int64_t slots_ = 0;  // packed slots
  bf16* unquantized_ = nullptr;  // rows of the other slots
  int64_t unquantized_stride_ = 0;  // elements from one of them to the next
};

// Packs full unquantized blocks `from` into packed blocks `to`.
inline void pack_blocks(const Rows& rows, const at::Tensor& from_K, const at::Tensor& to_K, int64_t block_size) {
  TORCH_CHECK(rows.packed(), "plain rows are not packed");
  const int64_t tokens = rows.unit_tokens(), units = block_size / tokens;
  const int64_t *from = from_K.const_data_ptr<int64_t>(), *to = to_K.const_data_ptr<int64_t>();
  at::parallel_for(0, from_K.size(0) * units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / units, offset = i % units * tokens;
      rows.pack_unit(from[block] * block_size + offset, to[block] * block_size + offset);
    }
  });
}
