// Attention by tiles over rows of bf16: what tiled_attention.h asks of them.
//
// Sixteen cached rows are read where they lie as a tile's rows, so that keys are not copied: scores are [tokens, columns].
#pragma once
#include "paged_attention.h"
#include "tiles.h"

// Tiles 0 to 3 are results, four at a time because one that waits for itself would be late.

// Scores [16, 16] of four times 16 tokens, whose keys begin at `keys[0]`, `keys[16]`, ...: 32 * steps numbers of them times
// queries, added to what is there already where there is `more`.
inline void score_tiles(const bf16* const* keys, int64_t offset, int64_t bytes, const bf16* queries,
                        int64_t steps, float* scores, bool more) {
  memory_is_read();
  if (more) {
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

// Weights [16 columns, 32 tokens] of all spans times values, pairs of tokens side by side: 64 numbers of each column, of
// each 32 the even fours first.
inline void weigh_tiles(const bf16* weights, const bf16* values, int64_t spans, float* out) {
  memory_is_read();
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
  static constexpr int64_t SPAN = 32;  // tokens of a tile of weights

  explicit Bf16Tiles(const Attention& of) : of_(of), own_(Scratch::own(((of.G - 1) * of.row.k_head + of.D + 31) / 32)) {}

  // A product of tiles sums its 32 numbers first and adds that to what is there: a head's keys must fall into tiles as they
  // do where they begin one.
  static bool together(const Attention& of) {
    for (int64_t g = 0; g < of.G; ++g) {
      const int64_t offset = g * of.row.k_head % 32;
      if (offset && offset + of.D > 32) return false;
    }
    return true;
  }

  // Queries of a task's columns are tiles: [column group, step, 16 pairs of numbers, 16 columns, 2].
  void begin(const Task& task) {
    steps_ = (task.set.D + 31) / 32;
    std::memset((void*)align64(own_.queries.data()), 0, (task.count + 15) / 16 * steps_ * 1024);
  }

  // A column's query, of which `offset` numbers are left out. Its scores are to be multiplied by what is returned.
  float put(int64_t c, const float* q, int64_t offset, int64_t) {
    bf16* own = align64(own_.queries.data()) + c / 16 * steps_ * 512 + c % 16 * 2;
    // Pairs of numbers, one below the other: a step's 16 pairs stand as those of the next one do.
    for (int64_t d = 0; d < of_.D; d += 16) {
      const int64_t count = std::min<int64_t>(16, of_.D - d);
      bf16 some[16];
      narrow(some, load(q + d, count), count);
      for (int64_t i = 0; i < count / 2; ++i) std::memcpy((void*)(own + ((offset + d) / 2 + i) * 32), some + 2 * i, 4);
    }
    return 1.0f;
  }

  void shape() const { shape_attention(64); }

  // Scores [64, 16] of 64 tokens and each group of columns, CHUNK * 16 from one to the next.
  void score(const HeadSet& set, const bf16* const* row, int64_t groups, float* scores, Reader<bf16>&) const {
    const int64_t whole = set.D / 32, rest = set.D % 32, bytes = of_.rows.width * 2;
    const bf16* queries = align64(own_.queries.data());
    for (int64_t g = 0; g < groups; ++g)
      score_tiles(row, set.k, bytes, queries + g * steps_ * 512, whole, scores + g * CHUNK * 16, false);
    if (!rest) return;
    shape_attention(2 * rest);
    for (int64_t g = 0; g < groups; ++g)
      score_tiles(row, set.k + whole * 32, bytes, queries + (g * steps_ + whole) * 512, 1, scores + g * CHUNK * 16, true);
    shape_attention(64);
  }

  // Weights of tokens [from, high) and a group of columns, `weight(t)` -> [span, 16 columns, 32 tokens]. Returns their sums.
  template <typename Weight>
  __m512 weights(int64_t g, int64_t from, int64_t high, Reader<bf16>&, float*, Weight weight) {
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    bf16* to = align64(own_.weights.data()) + g * SPANS * 512;
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int64_t span = from / SPAN; span * SPAN < high; ++span) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 even = weight(span * SPAN + 2 * i), odd = weight(span * SPAN + 2 * i + 1);
        evens = _mm512_add_ps(evens, even);
        odds = _mm512_add_ps(odds, odd);
        pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
      }
      transpose16(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + span * 512 + i * 32, pairs[i]);
    }
    return _mm512_add_ps(evens, odds);
  }

  // Values of a span's tokens, of which [begin, until) are there: 64 numbers of them, or fewer, from `offset` of a row on.
  void gather(const Reader<bf16>& reader, int64_t span, int64_t begin, int64_t until, int64_t offset, int64_t numbers) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = offset + half * 32, count = std::max<int64_t>(0, numbers - half * 32);
      // What lies beside the tokens may be anything, and nothing times that need not be nothing.
      auto value = [&](int64_t t) { return t >= begin && t < until ? pairs(reader.row[t] + at, count).all : zero; };
      bf16* to = align64(own_.values.data()) + span * 2048 + half * 1024;
      for (int64_t t = span * SPAN; t < span * SPAN + SPAN; t += 2, to += 32) {
        const __m512i even = value(t), odd = value(t + 1);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  // Weights of a group of columns times these values, of spans [first, end).
  void weigh(int64_t g, int64_t first, int64_t end) {
    const bf16* weights = align64(own_.weights.data()) + (g * SPANS + first) * 512;
    weigh_tiles(weights, align64(own_.values.data()) + first * 2048, end - first, align64(own_.part.data()));
  }

  // Of a column, 64 numbers.
  void get(int64_t c, float* to) const {
    const float* own = align64(own_.part.data()) + c % 16 * 64;
    for (int64_t half = 0; half < 64; half += 32) store_fours(to + half, load(own + half), load(own + half + 16));
  }

 private:
  static constexpr int64_t SPANS = CHUNK / SPAN;

  // Kept from call to call.
  struct Scratch {
    std::vector<bf16> queries, weights = std::vector<bf16>(GROUPS * SPANS * 512 + 32);
    std::vector<bf16> values = std::vector<bf16>(SPANS * 2048 + 32);
    std::vector<float> part = std::vector<float>(16 * 64 + 16);

    static Scratch& own(int64_t steps) {
      static thread_local Scratch scratch;
      scratch.queries.resize(std::max<size_t>(scratch.queries.size(), GROUPS * steps * 512 + 32));
      return scratch;
    }
  };

  const Attention& of_;
  Scratch& own_;
  int64_t steps_ = 0;
};
