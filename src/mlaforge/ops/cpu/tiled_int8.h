// Attention by tiles over rows of int8, in whole numbers: what tiled_attention.h asks of them.
//
// Codes are multiplied where they lie, with queries and weights of 16 bits in two planes of bytes, high and low. A sum over
// a key's codes or a chunk's tokens is exact; a token's scales are multiplied to its scores and to its weights.
#pragma once
#include "paged_attention.h"
#include "tiles.h"

// Scores [32, 16] of 32 tokens, whose keys begin at `keys[0]` and `keys[16]`: codes times queries, both planes.
inline void score_codes(const int8_t* const* keys, int64_t offset, int64_t bytes, const uint8_t* queries, int64_t step,
                        int64_t steps, int32_t* high, int32_t* low) {
  memory_is_read();
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
inline void weigh_codes(const uint8_t* weights, const int8_t* values, int64_t spans, int32_t* high, int32_t* low) {
  memory_is_read();
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
  static constexpr int64_t SPAN = 64;  // tokens of a tile of weights

  explicit Int8Tiles(const Attention& of) : of_(of), own_(Scratch::own(of.G * of.D)) {}

  // Sums are exact.
  static bool together(const Attention&) { return true; }

  // Queries of a task's columns are tiles: [column group, step, plane, 16 fours of numbers, 16 columns, 4]. A step is as
  // long as keys have no rest.
  void begin(const Task& task) {
    for (step_ = 64; task.set.D % step_;) step_ -= 4;
    steps_ = task.set.D / step_;
    std::memset(align64(own_.queries.data()), 0, (task.count + 15) / 16 * steps_ * 2048);
  }

  // A column's query, of which `offset` numbers are left out, over key head g. Its scores are to be multiplied by what is
  // returned.
  float put(int64_t c, const float* q, int64_t offset, int64_t g) {
    const int64_t rows = step_ / 4;
    int64_t row = offset % step_ / 4;
    uint8_t* to = align64(own_.queries.data()) + (c / 16 * steps_ + offset / step_) * 2048 + row * 64 + c % 16 * 4;
    const Whole whole(q, of_.D);
    for (int64_t d = 0; d < of_.D; d += 16) {
      uint32_t high[4], low[4];
      const __m512i codes = _mm512_cvtps_epi32(whole.of(load(q + d, of_.D - d)).all);
      _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(codes, 8)));
      _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(codes));
      for (int64_t i = 0; i < std::min<int64_t>(4, (of_.D - d) / 4); ++i) {
        std::memcpy(to, high + i, 4), std::memcpy(to + 1024, low + i, 4);
        to += 64;
        if (++row == rows) row = 0, to += 2048 - rows * 64;
      }
    }
    head_[c] = uint16_t(g);
    return whole.scale;
  }

  void shape() const { shape_attention(step_); }

  // Scores [64, 16] of 64 tokens and each group of columns, CHUNK * 16 from one to the next.
  void score(const HeadSet& set, const int8_t* const* row, int64_t groups, float* scores, Reader<int8_t>& reader) const {
    alignas(64) int32_t high[512], low[512];
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* queries = align64(own_.queries.data()) + g * steps_ * 2048;
      const Scales scales = this->scales(g, false);
      for (int64_t t = 0; t < 64; t += 32) {
        score_codes(row + t, set.k, of_.rows.bytes(), queries, step_, steps_, high, low);
        float* to = scores + g * CHUNK * 16 + t * 16;
        for (int64_t i = 0; i < 32; ++i) {
          if (i % 4 == 0) reader.further();
          _mm512_store_ps(to + i * 16, _mm512_mul_ps(joined(high + i * 16, low + i * 16), scales(row[t + i])));
        }
      }
    }
  }

  // Weights of tokens [from, high) and a group of columns, `weight(t)`, times the scales of their values, in parts of
  // 32767 of the largest -> [span, plane, 16 columns, 64 tokens]. Returns their sums. `scores` are no longer needed.
  template <typename Weight>
  __m512 weights(int64_t g, int64_t from, int64_t high, Reader<int8_t>& reader, float* scores, Weight weight) {
    const int64_t end = (high + SPAN - 1) / SPAN * SPAN;
    const Scales scales = this->scales(g, true);
    const __m512 zero = _mm512_setzero_ps();
    __m512 sums[2] = {zero, zero};
    // Numbers no less than 0 have the order of their bits, and what is none is more than all.
    __m512i tops[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t t = from; t < end; t += 2) {
      if (t % 4 == 0) reader.further();
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        const __m512 own = weight(t + i);
        sums[i] = _mm512_add_ps(sums[i], own);
        // What is not seen may have any scale.
        const __m512 scaled = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(own, zero, _CMP_GT_OQ), own, scales(reader.row[t + i]));
        tops[i] = _mm512_max_epu32(tops[i], _mm512_castps_si512(scaled));
        _mm512_store_ps(scores + (t + i) * 16, scaled);
      }
    }
    const __m512 top = _mm512_castsi512_ps(_mm512_max_epu32(tops[0], tops[1])), parts = _mm512_set1_ps(32767.0f);
    _mm512_store_ps(align64(own_.tops.data()) + g * 16, _mm512_div_ps(top, parts));
    const __m512 factor = _mm512_min_ps(_mm512_div_ps(parts, top), _mm512_set1_ps(1e38f));
    uint8_t* to = align64(own_.weights.data()) + g * CHUNK * 32;
    for (int64_t t = from; t < end; t += SPAN) {
      __m512i lower[16], upper[16];
      for (int64_t i = 0; i < 16; ++i) {
        reader.further();
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

  // Codes of a span's values as tiles [16 fours of tokens, 16 numbers, 4]: 64 numbers, or fewer, from `offset` of a row
  // on. Where no token is there is no weight.
  void gather(Reader<int8_t>& reader, int64_t span, int64_t /* begin */, int64_t /* until */, int64_t offset, int64_t numbers) {
    const __mmask64 some = numbers >= 64 ? ~__mmask64(0) : (__mmask64(1) << numbers) - 1;
    int8_t* to = align64(own_.values.data()) + span * 4096;
    for (int64_t t = span * SPAN; t < span * SPAN + SPAN; t += 4, to += 64) {
      if (t % 8 == 0) reader.further();
      auto value = [&](int64_t n) { return _mm512_maskz_loadu_epi8(some, reader.row[t + n] + offset); };
      const __m512i a = value(0), b = value(1), c = value(2), d = value(3);
      const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
      const __m512i ab2 = _mm512_unpackhi_epi8(a, b), cd2 = _mm512_unpackhi_epi8(c, d);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(ab, cd));
      _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(ab, cd));
      _mm512_store_si512(to + 2048, _mm512_unpacklo_epi16(ab2, cd2));
      _mm512_store_si512(to + 3072, _mm512_unpackhi_epi16(ab2, cd2));
    }
  }

  // Weights of a group of columns times these values, of spans [first, end).
  void weigh(int64_t g, int64_t first, int64_t end) {
    if (step_ != 64) shape_attention(64);
    const uint8_t* weights = align64(own_.weights.data()) + g * CHUNK * 32 + first * 2048;
    int32_t* part = align64(own_.part.data());
    for (int64_t half = 0; half < 2; ++half)
      weigh_codes(weights, align64(own_.values.data()) + first * 4096 + half * 2048, end - first, part + half * 512,
                  part + 1024 + half * 512);
  }

  // Of a column, 64 numbers.
  void get(int64_t c, float* to) const {
    const int32_t* own = align64(own_.part.data()) + c % 16 * 16;
    const __m512 scale = _mm512_set1_ps(align64(own_.tops.data())[c]);
    __m512 x[4], y[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_mul_ps(joined(own + i * 256, own + 1024 + i * 256), scale);
    // A tile has every fourth four.
    for (int i = 0; i < 4; i += 2)
      y[i] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0x88), y[i + 1] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0xdd);
    for (int i = 0; i < 2; ++i) {
      _mm512_storeu_ps(to + i * 16, _mm512_shuffle_f32x4(y[i], y[i + 2], 0x88));
      _mm512_storeu_ps(to + 32 + i * 16, _mm512_shuffle_f32x4(y[i], y[i + 2], 0xdd));
    }
  }

 private:
  // A sum's two planes.
  static __m512 joined(const int32_t* high, const int32_t* low) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low)));
  }

  // A token's scales for the columns of a group.
  struct Scales {
    int64_t at;
    __mmask32 all;
    __m512i which;

    __m512 operator()(const int8_t* row) const {
      const __m512i scales = _mm512_maskz_loadu_epi16(all, row + at);
      return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, which, scales));
    }
  };

  // Those of keys, or of values.
  Scales scales(int64_t g, bool values) const {
    const __m512i head = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(head_ + g * 16)));
    const __m512i which = _mm512_add_epi32(head, _mm512_set1_epi32(int32_t(values * of_.G)));
    return {of_.rows.scales(), __mmask32((uint64_t(1) << 2 * of_.G) - 1), _mm512_slli_epi32(which, 16)};
  }

  // Kept from call to call.
  struct Scratch {
    std::vector<uint8_t> queries, weights = std::vector<uint8_t>(COLUMNS * CHUNK * 2 + 64);
    std::vector<int8_t> values = std::vector<int8_t>(CHUNK * 64 + 64);
    std::vector<float> tops = std::vector<float>(COLUMNS + 16);
    std::vector<int32_t> part = std::vector<int32_t>(2 * 16 * 64 + 16);

    static Scratch& own(int64_t numbers) {
      static thread_local Scratch scratch;
      scratch.queries.resize(std::max<size_t>(scratch.queries.size(), GROUPS * (numbers / 4) * 2048 + 64));
      return scratch;
    }
  };

  const Attention& of_;
  Scratch& own_;
  int64_t step_ = 64, steps_ = 0;  // bytes of keys that a tile has, and how many such
  uint16_t head_[COLUMNS] = {};
};
