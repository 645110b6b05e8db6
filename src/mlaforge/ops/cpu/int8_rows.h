// Rows of 8 bits a number (ops/row_format.py, Int8): a token's codes, then a scale in bf16 for each part of its row.
#pragma once
#include "vectors.h"

// Numbers in parts of 32767 of the largest, to which they are rounded: each is `scale` times what `of` becomes then.
struct Whole {
  float scale, factor;

  Whole(const float* x, int64_t count) {
    Floats most = all(0.0f);
    for (int64_t i = 0; i < count; i += 16) most = max(most, abs(load(x + i, count - i)));
    scale = greatest(most) / 32767.0f, factor = std::min(32767.0f / greatest(most), 1e38f);
  }

  Floats of(Floats x) const { return x * all(factor); }
};

struct Int8Rows {
  std::vector<int64_t> parts;  // numbers of each
  int64_t width = 0;

  Int8Rows() = default;
  explicit Int8Rows(at::IntArrayRef parts) : parts(parts.vec()) {
    for (int64_t numbers : parts) width += numbers;
  }

  int64_t scales() const { return width + width % 2; }  // where they begin
  int64_t bytes() const { return scales() + 2 * int64_t(parts.size()); }

  void write(const bf16* row, uint8_t* bytes) const {
    auto* codes = (int8_t*)bytes;
    if (width % 2) codes[width] = 0;
    bf16* scale = (bf16*)(bytes + scales());
    for (int64_t numbers : parts) {
      // Magnitudes as whole numbers: what is no number is the largest.
      uint16_t most = 0;
      for (int64_t i = 0; i < numbers; ++i) most = std::max<uint16_t>(most, row[i].x & 0x7fff);
      *scale = rounded_up(float(bf16(most, bf16::from_bits())) / 127.0f);
      const float step = *scale++;
      const bool good = step > 0 && step < INF;
      // No code is beyond 127, because no scale was rounded down.
      for (int64_t i = 0; i < numbers; ++i) codes[i] = good ? int8_t(std::nearbyint(float(row[i]) / step)) : int8_t(0);
      row += numbers, codes += numbers;
    }
  }

  // Numbers [first, last) of the rows at `slots`, each in its own place of rows [count, width].
  void read(const uint8_t* packed, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows) const {
    const int64_t step = bytes(), width = this->width;
    for (int64_t part = 0, begin = 0; begin < last; begin += parts[part++]) {
      const int64_t from = std::max(begin, first), end = std::min(begin + parts[part], last), scale = scales() + 2 * part;
      if (from >= end) continue;
      for (int64_t t = 0; t < count; ++t) {
        const uint8_t* bytes = packed + slots[t] * step;
        const auto* codes = (const int8_t*)bytes;
        const Floats each = broadcast((const bf16*)(bytes + scale));
        bf16* row = rows + t * width;
        int64_t i = from;
        for (; i + LANES <= end; i += LANES) narrow(row + i, widened(codes + i) * each, widened(codes + i + 16) * each);
        for (; i < end; i += 16) narrow(row + i, widened(codes + i, end - i) * each, std::min<int64_t>(16, end - i));
      }
    }
  }
};
