// 8-bit rows (ops/row_formats/int8.py): a token's codes, then one bf16 scale per group of its row.
#pragma once
#include "rows/row_codes.h"
#include "simd/vectors.h"

struct Int8Rows {
  static constexpr int64_t ID = 1, TOKENS = 1;

  std::vector<int64_t> group_sizes;  // elements of each group
  int64_t width = 0;

  Int8Rows() = default;
  // sizes: elements of each group.
  explicit Int8Rows(at::IntArrayRef sizes) : group_sizes(sizes.vec()) {
    for (int64_t size : sizes) width += size;
  }

  int64_t scales_offset() const { return width + width % 2; }  // first byte of the scales
  int64_t unit_bytes() const { return scales_offset() + 2 * int64_t(group_sizes.size()); }
  RowCodes codes() const { return {group_sizes, scales_offset()}; }

  void write(const bf16* row, uint8_t* to) const {
    auto* codes = (int8_t*)to;
    if (width % 2) codes[width] = 0;
    bf16* scale = (bf16*)(to + scales_offset());
    for (int64_t size : group_sizes) {
      // Magnitudes compare like their bits, so NaN is the largest.
      uint16_t largest = 0;
      for (int64_t i = 0; i < size; ++i) largest = std::max<uint16_t>(largest, row[i].x & 0x7fff);
      *scale = round_up_bf16(float(bf16(largest, bf16::from_bits())) / 127.0f);
      const float step = *scale++;
      const bool valid = step > 0 && step < INF;
      // No code exceeds 127, because scales are rounded up.
      for (int64_t i = 0; i < size; i += 16)
        store(codes + i, valid ? widen(row + i, size - i) / splat(step) : splat(0.0f), size - i);
      row += size, codes += size;
    }
  }

  void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows, int64_t stride) const {
    for (int64_t group = 0, group_begin = 0; group_begin < last; group_begin += group_sizes[group++]) {
      const int64_t from = std::max(group_begin, first), end = std::min(group_begin + group_sizes[group], last);
      const int64_t scale_offset = scales_offset() + 2 * group;
      if (from >= end) continue;
      for (int64_t t = 0; t < count; ++t) {
        const uint8_t* packed_row = units.at(slots[t]);
        const auto* codes = (const int8_t*)packed_row;
        const Floats scale16 = broadcast((const bf16*)(packed_row + scale_offset));
        bf16* row = rows + t * stride;
        int64_t i = from;
        for (; i + LANES <= end; i += LANES) narrow(row + i, widen(codes + i) * scale16, widen(codes + i + 16) * scale16);
        for (; i < end; i += 16) narrow(row + i, widen(codes + i, end - i) * scale16, std::min<int64_t>(16, end - i));
      }
    }
  }

  // Prefetches elements [first, last) of a row, without its scales.
  void prefetch(Units units, int64_t slot, int64_t first, int64_t last) const {
    prefetch_bytes(units.at(slot) + first, last - first);
  }
};
