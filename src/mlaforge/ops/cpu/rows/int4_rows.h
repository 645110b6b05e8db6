// 4-bit rows, 32 tokens per unit (ops/row_formats/int4.py): a scale and a minimum per key channel, and per token and head of
// the values.
#pragma once
#include "simd/scratch.h"
#include "simd/vectors.h"

struct Int4Rows {
  static constexpr int64_t ID = 2, TOKENS = 32;

  const int64_t heads, head_dim, width;

  // sizes: KV heads, head_dim.
  explicit Int4Rows(at::IntArrayRef sizes) : heads(checked(sizes)[0]), head_dim(sizes[1]), width(2 * channels()) {}

  int64_t channels() const { return heads * head_dim; }
  int64_t unit_bytes() const { return TOKENS * width / 2 + 4 * channels() + 4 * TOKENS * heads; }

  // Quantizes 32 contiguous rows into a unit.
  void write(const bf16* rows, uint8_t* bytes) const {
    const int64_t C = channels(), W = width, D = head_dim;
    const Unit unit = at(bytes);
    Scratch scratch;
    float *minima = scratch.filled(C, INF), *maxima = scratch.filled(C, -INF);
    for (int64_t t = 0; t < TOKENS; ++t)
      for (int64_t c = 0; c < C; ++c) extend_range(minima[c], maxima[c], rows[t * W + c]);
    for (int64_t c = 0; c < C; ++c) unit.set_range(unit.key_scales, unit.key_minima, c, minima[c], maxima[c]);
    for (int64_t t = 0; t < TOKENS; ++t)
      for (int64_t c = 0; c < C; ++c)
        unit.quantize(unit.keys, t * C + c, rows[t * W + c], unit.key_scales[c], unit.key_minima[c]);
    for (int64_t i = 0; i < TOKENS * heads; ++i) {
      const bf16* value = rows + i / heads * W + C + i % heads * D;
      float minimum = INF, maximum = -INF;
      for (int64_t d = 0; d < D; ++d) extend_range(minimum, maximum, value[d]);
      unit.set_range(unit.value_scales, unit.value_minima, i, minimum, maximum);
      for (int64_t d = 0; d < D; ++d)
        unit.quantize(unit.values, i * D + d, value[d], unit.value_scales[i], unit.value_minima[i]);
    }
  }

  void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows, int64_t stride) const {
    // Consecutive tokens of one unit are decoded together.
    for (int64_t t = 0, end; t < count; t = end) {
      for (end = t + 1; end < count && slots[end] == slots[end - 1] + 1 && slots[end] % TOKENS;) ++end;
      const int64_t token = slots[t] % TOKENS;
      read_unit(units.at(slots[t] / TOKENS), token, token + end - t, first, last, rows + t * stride, stride);
    }
  }

  // Prefetches elements [first, last) of a row, and its share of the unit's scales.
  void prefetch(Units units, int64_t slot, int64_t first, int64_t last) const {
    const uint8_t* bytes = units.at(slot / TOKENS);
    const int64_t t = slot % TOKENS, C = channels(), codes = TOKENS * C;
    const int64_t scale_bytes = (4 * C + 4 * TOKENS * heads) / TOKENS;
    if (first < C) {
      prefetch_bytes(bytes + (t * C + first) / 2, (std::min(last, C) - first) / 2);
      prefetch_bytes(bytes + codes + t * scale_bytes, scale_bytes);
    }
    if (last > C) prefetch_bytes(bytes + ((TOKENS + t - 1) * C + std::max(first, C)) / 2, (last - std::max(first, C)) / 2);
  }

 private:
  static at::IntArrayRef checked(at::IntArrayRef sizes) {
    TORCH_CHECK(sizes.size() == 2 && sizes[1] % 2 == 0, "int4 rows of sizes ", sizes, " are not supported");
    return sizes;
  }

  // Decodes elements [first, last) of tokens [from, to) of a unit to their columns of rows, `stride` elements apart.
  void read_unit(const uint8_t* bytes, int64_t from, int64_t to, int64_t first, int64_t last, bf16* rows,
                 int64_t stride) const {
    const int64_t C = channels();
    const Unit unit = at((uint8_t*)bytes);
    // Full loads may read past the codes and scales: other parts of the unit follow them.
    for (int64_t c = first; c < std::min(last, C); c += LANES) {
      const int64_t count = std::min(LANES, std::min(last, C) - c);
      const Pairs scales = pairs(unit.key_scales + c), minima = pairs(unit.key_minima + c);
      const Floats even_scale = even(scales), odd_scale = odd(scales), even_min = even(minima), odd_min = odd(minima);
      for (int64_t t = from; t < to; ++t) {
        Floats evens, odds;
        unpack_nibbles(unit.keys + (t * C + c) / 2, evens, odds);
        const Pairs decoded = narrow_interleaved(fma(evens, even_scale, even_min), fma(odds, odd_scale, odd_min));
        store(rows + (t - from) * stride + c, decoded, count);
      }
    }
    for (int64_t c = std::max(first, C) - C, end; c < last - C; c = end) {
      const int64_t head = c / head_dim;
      end = std::min((head + 1) * head_dim, last - C);
      for (int64_t t = from; t < to; ++t) {
        const int64_t row = t * heads + head;
        // A value is one of 16, so it is looked up.
        const NibbleLookup lookup(fma(lane_indices(), broadcast(unit.value_scales + row), broadcast(unit.value_minima + row)));
        for (int64_t d = c; d < end; d += LANES)
          store(rows + (t - from) * stride + C + d, lookup.of(unit.values + (t * C + d) / 2), std::min(LANES, end - d));
      }
    }
  }

  struct Unit {
    uint8_t *keys, *values;
    bf16 *key_scales, *key_minima, *value_scales, *value_minima;

    static void set_range(bf16* scales, bf16* minima, int64_t i, float minimum, float maximum) {
      scales[i] = round_up_bf16((maximum - minimum) / 15.0f);
      minima[i] = bf16(minimum);
    }

    static void quantize(uint8_t* codes, int64_t i, float x, float scale, float minimum) {
      const bool valid = scale > 0 && scale < INF;
      const uint8_t code = valid ? uint8_t(std::nearbyint((x - minimum) / scale)) : 0;
      codes[i / 2] = i % 2 ? codes[i / 2] | code << 4 : code;
    }
  };

  Unit at(uint8_t* bytes) const {
    const int64_t codes = TOKENS * channels() / 2;
    bf16 *keys = (bf16*)(bytes + 2 * codes), *values = keys + 2 * channels();
    return {bytes, bytes + codes, keys, keys + channels(), values, values + TOKENS * heads};
  }

  // NaN propagates to both bounds.
  static void extend_range(float& minimum, float& maximum, float x) {
    minimum = x < minimum || x != x ? x : minimum;
    maximum = x > maximum || x != x ? x : maximum;
  }
};
