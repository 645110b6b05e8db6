// Attention tiles for bf16 rows (tiled_attention.h).
//
// Sixteen cached rows are a tile's rows in place, so keys are not copied: scores are [tokens, columns].
#pragma once
#include "attention/paged_attention.h"
#include "simd/tiles.h"

// Tiles 0 to 3 are results: four independent accumulators hide the latency.

// Scores [16, 16] of four times 16 tokens, whose keys begin at `keys[0]`, `keys[16]`, ...: 32 * steps elements times
// queries, added to the existing scores if `accumulate`.
inline void score_tiles(const bf16* const* keys, int64_t offset, int64_t bytes, const bf16* queries,
                        int64_t steps, float* scores, bool accumulate) {
  compiler_barrier();
  if (accumulate) {
    _tile_loadd(0, scores, 64);
    _tile_loadd(1, scores + 256, 64);
    _tile_loadd(2, scores + 512, 64);
    _tile_loadd(3, scores + 768, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const bf16 *a = keys[0] + offset, *b = keys[16] + offset, *c = keys[32] + offset, *d = keys[48] + offset;
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(6, queries + k * 512, 64);
    _tile_loadd(4, a + k * 32, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, b + k * 32, bytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, c + k * 32, bytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, d + k * 32, bytes);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
  _tile_stored(2, scores + 512, 64);
  _tile_stored(3, scores + 768, 64);
}

// Weights [16 columns, 32 tokens] of all spans times values, pairs of tokens interleaved: 64 elements of each column; of
// every 32, the even groups of four come first.
inline void weighted_sum_tiles(const bf16* weights, const bf16* values, int64_t spans, float* out) {
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < spans; ++i) {
    _tile_loadd(5, weights + i * 512, 64);
    _tile_loadd(6, values + i * 2048, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values + i * 2048 + 512, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, values + i * 2048 + 1024, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, values + i * 2048 + 1536, 64);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 256);
  _tile_stored(1, out + 16, 256);
  _tile_stored(2, out + 32, 256);
  _tile_stored(3, out + 48, 256);
}

class Bf16Tiles {
 public:
  using Row = bf16;
  static constexpr int64_t SPAN = 32;  // tokens per tile of weights

  explicit Bf16Tiles(const Attention& attention)
      : attention_(attention),
        queries_(scratch_.get<bf16>(GROUPS * (((attention.G - 1) * attention.row.k_head + attention.D + 31) / 32) * 512)),
        weights_(scratch_.get<bf16>(GROUPS * SPANS * 512)), values_(scratch_.get<bf16>(SPANS * 2048)),
        part_(scratch_.get<float>(16 * 64)) {}

  // A tile product sums its 32 elements before it adds them to the accumulator, so each head's keys must fall into tiles as
  // they would in a separate task.
  static bool fuses_heads(const Attention& attention) {
    for (int64_t g = 0; g < attention.G; ++g) {
      const int64_t offset = g * attention.row.k_head % 32;
      if (offset && offset + attention.D > 32) return false;
    }
    return true;
  }

  // Queries of a task's columns as tiles: [column group, step, 16 pairs of elements, 16 columns, 2].
  void begin_task(const Task& task) {
    steps_ = (task.set.D + 31) / 32;
    std::memset((void*)queries_, 0, (task.count + 15) / 16 * steps_ * 1024);
  }

  // Writes a column's query from element `offset` on. Returns the factor of its scores.
  float write_query(int64_t c, const float* q, int64_t offset, int64_t) {
    bf16* query_tiles = queries_ + c / 16 * steps_ * 512 + c % 16 * 2;
    // Pairs of elements are 32 apart, from one step to the next too.
    for (int64_t d = 0; d < attention_.D; d += 16) {
      const int64_t count = std::min<int64_t>(16, attention_.D - d);
      bf16 buffer[16];
      narrow(buffer, load(q + d, count), count);
      for (int64_t i = 0; i < count / 2; ++i)
        std::memcpy((void*)(query_tiles + ((offset + d) / 2 + i) * 32), buffer + 2 * i, 4);
    }
    return 1.0f;
  }

  void configure() const { configure_attention_tiles(64); }

  // Scores [64, 16] of 64 tokens for each group of columns; groups are CHUNK * 16 apart.
  void score(const HeadSet& set, const bf16* const* row, int64_t groups, float* scores, RowReader<bf16>&) const {
    const int64_t whole = set.D / 32, rest = set.D % 32, bytes = attention_.rows.element_stride() * 2;
    const bf16* queries = queries_;
    for (int64_t g = 0; g < groups; ++g)
      score_tiles(row, set.k, bytes, queries + g * steps_ * 512, whole, scores + g * CHUNK * 16, false);
    if (!rest) return;
    configure_attention_tiles(2 * rest);
    for (int64_t g = 0; g < groups; ++g)
      score_tiles(row, set.k + whole * 32, bytes, queries + (g * steps_ + whole) * 512, 1, scores + g * CHUNK * 16, true);
    configure_attention_tiles(64);
  }

  // Stores the weights of tokens [from, high) and a group of columns, weight(t), as [span, 16 columns, 32 tokens]. Returns
  // their sums.
  template <typename Weight>
  __m512 weights(int64_t g, int64_t from, int64_t high, RowReader<bf16>& reader, float*, Weight weight) {
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    bf16* to = weights_ + g * SPANS * 512;
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int64_t span = from / SPAN; span * SPAN < high; ++span) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 even = weight(span * SPAN + 2 * i), odd = weight(span * SPAN + 2 * i + 1);
        evens = _mm512_add_ps(evens, even);
        odds = _mm512_add_ps(odds, odd);
        pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        reader.prefetch_step();
      }
      transpose16(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + span * 512 + i * 32, pairs[i]);
    }
    return _mm512_add_ps(evens, odds);
  }

  // Gathers the values of a span's tokens, of which [begin, until) exist: up to 64 elements, `width`, from `offset` of a row
  // on.
  void gather(RowReader<bf16>& reader, int64_t span, int64_t begin, int64_t until, int64_t offset, int64_t width) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = offset + half * 32, count = std::max<int64_t>(0, width - half * 32);
      // Memory outside the tokens may be NaN, which a zero weight does not cancel.
      auto value = [&](int64_t t) { return t >= begin && t < until ? pairs(reader.row[t] + at, count).reg : zero; };
      bf16* to = values_ + span * 2048 + half * 1024;
      for (int64_t t = span * SPAN; t < span * SPAN + SPAN; t += 2, to += 32) {
        const __m512i even = value(t), odd = value(t + 1);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
        if (half == 0) reader.prefetch_step();
      }
    }
  }

  // Weights of a group of columns times the gathered values of spans [first, end).
  void weighted_sum(int64_t g, int64_t first, int64_t end) {
    const bf16* weights = weights_ + (g * SPANS + first) * 512;
    weighted_sum_tiles(weights, values_ + first * 2048, end - first, part_);
  }

  // Reads 64 elements of a column.
  void read_column(int64_t c, float* to) const {
    const float* column = part_ + c % 16 * 64;
    for (int64_t half = 0; half < 64; half += 32) store_fours(to + half, load(column + half), load(column + half + 16));
  }

 private:
  static constexpr int64_t SPANS = CHUNK / SPAN;

  const Attention& attention_;
  Scratch scratch_;
  bf16 *const queries_, *const weights_, *const values_;
  float* const part_;
  int64_t steps_ = 0;
};
