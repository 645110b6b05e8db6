// Attention tiles for int8 rows, in integers (tiled_attention.h).
//
// Codes are multiplied in place, with 16-bit queries and weights split into two planes of bytes, high and low. Sums over a
// key's codes or a chunk's tokens are exact. A token's scales are multiplied into its scores and its weights.
#pragma once
#include "attention/paged_attention.h"
#include "simd/tiles.h"

// Scores [32, 16] of 32 tokens, whose keys begin at `keys[0]` and `keys[16]`: codes times queries, both planes.
inline void score_codes(const int8_t* const* keys, int64_t offset, int64_t bytes, const uint8_t* queries, int64_t step,
                        int64_t steps, int32_t* high, int32_t* low) {
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int8_t *a = keys[0] + offset, *b = keys[16] + offset;
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(6, queries + k * 2048, 64);
    _tile_loadd(4, a + k * step, bytes);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, b + k * step, bytes);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(7, queries + k * 2048 + 1024, 64);
    _tile_dpbsud(2, 4, 7);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, high, 64);
  _tile_stored(1, high + 256, 64);
  _tile_stored(2, low, 64);
  _tile_stored(3, low + 256, 64);
}

// Weights [16 columns, 64 tokens] of all spans, both planes, times the codes of two tiles of values.
inline void weighted_sum_codes(const uint8_t* weights, const int8_t* values, int64_t spans, int32_t* high, int32_t* low) {
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < spans; ++i) {
    _tile_loadd(4, weights + i * 2048, 64);
    _tile_loadd(6, values + i * 4096, 64);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, values + i * 4096 + 1024, 64);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(5, weights + i * 2048 + 1024, 64);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, high, 64);
  _tile_stored(1, high + 256, 64);
  _tile_stored(2, low, 64);
  _tile_stored(3, low + 256, 64);
}

class Int8Tiles {
 public:
  using Row = int8_t;
  static constexpr int64_t SPAN = 64;  // tokens per tile of weights

  explicit Int8Tiles(const Attention& attention)
      : attention_(attention), scales_offset_(attention.rows.codes()->scales_offset),
        queries_(scratch_.get<uint8_t>(GROUPS * (attention.G * attention.D / 4) * 2048)),
        weights_(scratch_.get<uint8_t>(COLUMNS * CHUNK * 2)), values_(scratch_.get<int8_t>(CHUNK * 64)),
        maxima_(scratch_.get<float>(COLUMNS)), part_(scratch_.get<int32_t>(2 * 16 * 64)) {}

  // Sums are exact.
  static bool fuses_heads(const Attention&) { return true; }

  // Queries of a task's columns as tiles: [column group, step, plane, 16 groups of four elements, 16 columns, 4]. The step
  // is the largest multiple of 4 up to 64 that divides the keys.
  void begin_task(const Task& task) {
    for (step_ = 64; task.set.D % step_;) step_ -= 4;
    steps_ = task.set.D / step_;
    std::memset(queries_, 0, (task.count + 15) / 16 * steps_ * 2048);
  }

  // Writes a column's query over KV head g, from element `offset` on. Returns the factor of its scores.
  float write_query(int64_t c, const float* q, int64_t offset, int64_t g) {
    const int64_t rows = step_ / 4;
    int64_t row = offset % step_ / 4;
    uint8_t* to = queries_ + (c / 16 * steps_ + offset / step_) * 2048 + row * 64 + c % 16 * 4;
    const Int16Quantizer quantizer(q, attention_.D);
    for (int64_t d = 0; d < attention_.D; d += 16) {
      uint32_t high[4], low[4];
      const __m512i codes = _mm512_cvtps_epi32(quantizer.quantized(load(q + d, attention_.D - d)).reg);
      _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(codes, 8)));
      _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(codes));
      for (int64_t i = 0; i < std::min<int64_t>(4, (attention_.D - d) / 4); ++i) {
        std::memcpy(to, high + i, 4), std::memcpy(to + 1024, low + i, 4);
        to += 64;
        if (++row == rows) row = 0, to += 2048 - rows * 64;
      }
    }
    head_[c] = uint16_t(g);
    return quantizer.scale;
  }

  void configure() const { configure_attention_tiles(step_); }

  // Scores [64, 16] of 64 tokens for each group of columns; groups are CHUNK * 16 apart.
  void score(const HeadSet& set, const int8_t* const* row, int64_t groups, float* scores, RowReader<int8_t>& reader) const {
    alignas(64) int32_t high[512], low[512];
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* queries = queries_ + g * steps_ * 2048;
      const Scales scales = this->scales(g, false);
      for (int64_t t = 0; t < 64; t += 32) {
        score_codes(row + t, set.k, attention_.rows.stride(), queries, step_, steps_, high, low);
        float* out = scores + g * CHUNK * 16 + t * 16;
        for (int64_t i = 0; i < 32; ++i) {
          if (i % 4 == 0) reader.prefetch_step();
          _mm512_store_ps(out + i * 16, _mm512_mul_ps(join_planes(high + i * 16, low + i * 16), scales(row[t + i])));
        }
      }
    }
  }

  // Stores the weights of tokens [from, high) and a group of columns, weight(t), times their values' scales, as integers up
  // to 32767 [span, plane, 16 columns, 64 tokens]. Returns the sums of the weights alone. Overwrites `scores`.
  template <typename Weight>
  __m512 weights(int64_t g, int64_t from, int64_t high, RowReader<int8_t>& reader, float* scores, Weight weight) {
    const int64_t end = (high + SPAN - 1) / SPAN * SPAN;
    const Scales scales = this->scales(g, true);
    const __m512 zero = _mm512_setzero_ps();
    __m512 sums[2] = {zero, zero};
    // Non-negative floats compare like their bits, and NaN is the largest.
    __m512i maxima[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t t = from; t < end; t += 2) {
      if (t % 4 == 0) reader.prefetch_step();
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        const __m512 weight_t = weight(t + i);
        sums[i] = _mm512_add_ps(sums[i], weight_t);
        // Rows that are not visible may have any scale.
        const __mmask16 visible = _mm512_cmp_ps_mask(weight_t, zero, _CMP_GT_OQ);
        const __m512 scaled = _mm512_maskz_mul_ps(visible, weight_t, scales(reader.row[t + i]));
        maxima[i] = _mm512_max_epu32(maxima[i], _mm512_castps_si512(scaled));
        _mm512_store_ps(scores + (t + i) * 16, scaled);
      }
    }
    const __m512 peak = _mm512_castsi512_ps(_mm512_max_epu32(maxima[0], maxima[1])), max_code = _mm512_set1_ps(32767.0f);
    _mm512_store_ps(maxima_ + g * 16, _mm512_div_ps(peak, max_code));
    const __m512 factor = _mm512_min_ps(_mm512_div_ps(max_code, peak), _mm512_set1_ps(1e38f));
    uint8_t* to = weights_ + g * CHUNK * 32;
    for (int64_t t = from; t < end; t += SPAN) {
      __m512i lower[16], upper[16];
      for (int64_t i = 0; i < 16; ++i) {
        reader.prefetch_step();
        auto code = [&](int64_t n) {
          return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores + (t + 4 * i + n) * 16), factor));
        };
        const __m512i even = _mm512_or_si512(code(0), _mm512_slli_epi32(code(2), 16));
        const __m512i odd = _mm512_or_si512(code(1), _mm512_slli_epi32(code(3), 16));
        const __m512i bytes = _mm512_set1_epi16(255);
        // bytes ? a : b
        lower[i] = _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi32(odd, 8), 0xca);
        upper[i] = _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi32(even, 8), odd, 0xca);
      }
      transpose16(upper);
      transpose16(lower);
      uint8_t* tiles = to + t / SPAN * 2048;
      for (int64_t i = 0; i < 16; ++i)
        _mm512_store_si512(tiles + i * 64, upper[i]), _mm512_store_si512(tiles + 1024 + i * 64, lower[i]);
    }
    return _mm512_add_ps(sums[0], sums[1]);
  }

  // Gathers the codes of a span's values as tiles [16 groups of four tokens, 16 elements, 4]: up to 64 elements from
  // `offset` of a row on. Tokens that do not exist have weight 0.
  void gather(RowReader<int8_t>& reader, int64_t span, int64_t /* begin */, int64_t /* until */, int64_t offset,
              int64_t width) {
    const __mmask64 mask = width >= 64 ? ~__mmask64(0) : (__mmask64(1) << width) - 1;
    int8_t* to = values_ + span * 4096;
    for (int64_t t = span * SPAN; t < span * SPAN + SPAN; t += 4, to += 64) {
      if (t % 8 == 0) reader.prefetch_step();
      auto value = [&](int64_t n) { return _mm512_maskz_loadu_epi8(mask, reader.row[t + n] + offset); };
      const __m512i a = value(0), b = value(1), c = value(2), d = value(3);
      const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
      const __m512i ab2 = _mm512_unpackhi_epi8(a, b), cd2 = _mm512_unpackhi_epi8(c, d);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(ab, cd));
      _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(ab, cd));
      _mm512_store_si512(to + 2048, _mm512_unpacklo_epi16(ab2, cd2));
      _mm512_store_si512(to + 3072, _mm512_unpackhi_epi16(ab2, cd2));
    }
  }

  // Weights of a group of columns times the gathered values of spans [first, end).
  void weighted_sum(int64_t g, int64_t first, int64_t end) {
    if (step_ != 64) configure_attention_tiles(64);
    const uint8_t* weights = weights_ + g * CHUNK * 32 + first * 2048;
    int32_t* part = part_;
    for (int64_t half = 0; half < 2; ++half)
      weighted_sum_codes(weights, values_ + first * 4096 + half * 2048, end - first, part + half * 512,
                  part + 1024 + half * 512);
  }

  // Reads 64 elements of a column.
  void read_column(int64_t c, float* to) const {
    const int32_t* column = part_ + c % 16 * 16;
    const __m512 scale = _mm512_set1_ps(maxima_[c]);
    __m512 x[4], y[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_mul_ps(join_planes(column + i * 256, column + 1024 + i * 256), scale);
    // A tile has every fourth group of four elements.
    for (int i = 0; i < 4; i += 2)
      y[i] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0x88), y[i + 1] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0xdd);
    for (int i = 0; i < 2; ++i) {
      _mm512_storeu_ps(to + i * 16, _mm512_shuffle_f32x4(y[i], y[i + 2], 0x88));
      _mm512_storeu_ps(to + 32 + i * 16, _mm512_shuffle_f32x4(y[i], y[i + 2], 0xdd));
    }
  }

 private:
  // Combines a sum's two planes.
  static __m512 join_planes(const int32_t* high, const int32_t* low) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low)));
  }

  // A token's scales for the columns of a group.
  struct Scales {
    int64_t offset;
    __mmask32 mask;
    __m512i indices;

    __m512 operator()(const int8_t* row) const {
      const __m512i scales = _mm512_maskz_loadu_epi16(mask, row + offset);
      return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, indices, scales));
    }
  };

  // Scales of the keys, or of the values.
  Scales scales(int64_t g, bool values) const {
    const __m512i key_head = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(head_ + g * 16)));
    const __m512i indices = _mm512_add_epi32(key_head, _mm512_set1_epi32(int32_t(values * attention_.G)));
    return {scales_offset_, __mmask32((uint64_t(1) << 2 * attention_.G) - 1), _mm512_slli_epi32(indices, 16)};
  }

  const Attention& attention_;
  const int64_t scales_offset_;
  Scratch scratch_;
  uint8_t *const queries_, *const weights_;
  int8_t* const values_;
  float* const maxima_;
  int32_t* const part_;
  int64_t step_ = 64, steps_ = 0;  // bytes of keys per tile, and tiles per key
  uint16_t head_[COLUMNS] = {};
};
