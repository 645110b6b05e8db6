// Rows of 4 bits a number, 32 tokens at a time (ops/row_format.py, Int4): keys have a scale and a minimum for each channel,
// values for each token and head.
#pragma once
#include "vectors.h"

struct Int4Rows {
  static constexpr int64_t TOKENS = 32;  // packed together

  int64_t heads = 0, head_dim = 0;

  int64_t channels() const { return heads * head_dim; }
  int64_t width() const { return 2 * channels(); }
  int64_t bytes() const { return TOKENS * width() / 2 + 4 * channels() + 4 * TOKENS * heads; }

  // Of 32 rows, one after another.
  void write(const bf16* rows, uint8_t* bytes) const {
    const int64_t C = channels(), W = width(), D = head_dim;
    const Unit unit = at(bytes);
    std::vector<float> ranges(2 * C, INF);
    float *least = ranges.data(), *most = least + C;
    std::fill_n(most, C, -INF);
    for (int64_t t = 0; t < TOKENS; ++t)
      for (int64_t c = 0; c < C; ++c) widen(least[c], most[c], rows[t * W + c]);
    for (int64_t c = 0; c < C; ++c) unit.set(unit.key_scales, unit.key_minima, c, least[c], most[c]);
    for (int64_t t = 0; t < TOKENS; ++t)
      for (int64_t c = 0; c < C; ++c) unit.put(unit.keys, t * C + c, rows[t * W + c], unit.key_scales[c], unit.key_minima[c]);
    for (int64_t i = 0; i < TOKENS * heads; ++i) {
      const bf16* value = rows + i / heads * W + C + i % heads * D;
      float low = INF, high = -INF;
      for (int64_t d = 0; d < D; ++d) widen(low, high, value[d]);
      unit.set(unit.value_scales, unit.value_minima, i, low, high);
      for (int64_t d = 0; d < D; ++d) unit.put(unit.values, i * D + d, value[d], unit.value_scales[i], unit.value_minima[i]);
    }
  }

  // Numbers [first, last) of the rows of tokens [from, to), each in its own place of rows [to - from, width].
  void read(const uint8_t* bytes, int64_t from, int64_t to, int64_t first, int64_t last, bf16* rows) const {
    const int64_t C = channels(), W = width();
    const Unit unit = at((uint8_t*)bytes);
    // Behind what is read of codes and scales lie others.
    for (int64_t c = first; c < std::min(last, C); c += LANES) {
      const int64_t numbers = std::min(LANES, std::min(last, C) - c);
      const Pairs scales = pairs(unit.key_scales + c), minima = pairs(unit.key_minima + c);
      const Floats even_scale = even(scales), odd_scale = odd(scales), even_least = even(minima), odd_least = odd(minima);
      for (int64_t t = from; t < to; ++t) {
        Floats evens, odds;
        halves(unit.keys + (t * C + c) / 2, evens, odds);
        store(rows + (t - from) * W + c, rounded(fma(evens, even_scale, even_least), fma(odds, odd_scale, odd_least)), numbers);
      }
    }
    for (int64_t c = std::max(first, C) - C, end; c < last - C; c = end) {
      const int64_t head = c / head_dim;
      end = std::min((head + 1) * head_dim, last - C);
      for (int64_t t = from; t < to; ++t) {
        const int64_t i = t * heads + head;
        // A number is one of sixteen.
        const Levels levels(fma(counted(), broadcast(unit.value_scales + i), broadcast(unit.value_minima + i)));
        for (int64_t d = c; d < end; d += LANES)
          store(rows + (t - from) * W + C + d, levels.of(unit.values + (t * C + d) / 2), std::min(LANES, end - d));
      }
    }
  }

  // Has a core's cache read numbers [first, last) of a token's row, and its share of the scales.
  void fetch(const uint8_t* bytes, int64_t t, int64_t first, int64_t last) const {
    const int64_t C = channels(), codes = TOKENS * C, share = (4 * C + 4 * TOKENS * heads) / TOKENS;
    if (first < C) prefetch_bytes(bytes + (t * C + first) / 2, (std::min(last, C) - first) / 2), prefetch_bytes(bytes + codes + t * share, share);
    if (last > C) prefetch_bytes(bytes + ((TOKENS + t - 1) * C + std::max(first, C)) / 2, (last - std::max(first, C)) / 2);
  }

 private:
  struct Unit {
    uint8_t *keys, *values;
    bf16 *key_scales, *key_minima, *value_scales, *value_minima;

    static void set(bf16* scales, bf16* minima, int64_t i, float least, float most) {
      scales[i] = rounded_up((most - least) / 15.0f);
      minima[i] = bf16(least);
    }

    static void put(uint8_t* codes, int64_t i, float x, float scale, float least) {
      const bool good = scale > 0 && scale < INF;
      const uint8_t code = good ? uint8_t(std::nearbyint((x - least) / scale)) : 0;
      codes[i / 2] = i % 2 ? codes[i / 2] | code << 4 : code;
    }
  };

  Unit at(uint8_t* bytes) const {
    const int64_t codes = TOKENS * channels() / 2;
    bf16 *keys = (bf16*)(bytes + 2 * codes), *values = keys + 2 * channels();
    return {bytes, bytes + codes, keys, keys + channels(), values, values + TOKENS * heads};
  }

  // What is no number stays in both.
  static void widen(float& least, float& most, float x) {
    least = x < least || x != x ? x : least;
    most = x > most || x != x ? x : most;
  }
};
