// Attention of one task's columns over one chunk of the cache by tiles.
//
// Sixteen columns are a tile's columns. Sixteen cached rows are read where they lie as a tile's rows, so that keys are not
// copied: scores are [tokens, columns]. Legend: as paged_attention.h.
#pragma once
#include "paged_attention.h"
#include "tiles.h"

constexpr int64_t GROUPS = COLUMNS / 16;
constexpr int64_t SPANS = CHUNK / 32;  // stretches of 32 tokens in a chunk

// 2^f for f from -1/2 to 1/2, highest power first.
constexpr float POWER[5] = {9.570099669e-3f, 5.591786583e-2f, 2.402474493e-1f, 6.931218141e-1f, 9.999992614e-1f};

// Rows of 16 numbers of 32 bits: columns become rows.
inline void transpose16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Tiles 0 to 3 are results, four at a time because one that waits for itself would be late; 4 and 5 what is multiplied,
// 6 and 7 what it is multiplied with. After the last 32 of a key's numbers `numbers` are left: rows of 4 and 5 are as
// narrow then, and 6 as low.
inline void shape_attention(int64_t numbers) {
  Shape shape;
  shape.bytes[4] = shape.bytes[5] = uint16_t(2 * numbers);
  shape.rows[6] = uint8_t(numbers / 2);
  memory_is_read();
  _tile_loadconfig(&shape);
}

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

class TileKernel {
 public:
  explicit TileKernel(const Attention& of)
      : of_(of), view_(of.view), reader_(of, 64), own_(Scratch::own(((of.G - 1) * of.row.k_head + of.D + 31) / 32)) {}
  TileKernel(const TileKernel&) = delete;
  ~TileKernel() { release_tiles(); }

  // Queries of a task's columns as tiles: [column group, step, 16 pairs of numbers, 16 columns, 2].
  void pack(const Task& task) {
    const int64_t steps = (task.set.D + 31) / 32, J = of_.J(), D = of_.D;
    bf16* to = Scratch::line(own_.queries);
    std::memset((void*)to, 0, (task.count + 15) / 16 * steps * 1024);
    for (int64_t c = 0; c < task.count; ++c) {
      const int64_t h = task.head(c), offset = h / J * of_.row.k_head - task.set.k, m = task.token(c);
      stand_[c] = int32_t(view_.position(task.sequence, m));
      most_ = c ? std::max(most_, stand_[c]) : stand_[c];
      value_[c] = h / J * of_.row.v_head - task.set.v;
      const float* from = of_.q + ((view_.query(task.sequence) + m) * of_.H + h) * D;
      bf16* own = to + c / 16 * steps * 512 + c % 16 * 2;
      // Pairs of numbers, one below the other: a step's 16 pairs stand as those of the next one do.
      for (int64_t d = 0; d < D; d += 16) {
        const int64_t count = std::min<int64_t>(16, D - d);
        bf16 some[16];
        narrow(some, load(from + d, count), count);
        for (int64_t i = 0; i < count / 2; ++i) std::memcpy((void*)(own + ((offset + d) / 2 + i) * 32), some + 2 * i, 4);
      }
    }
  }

  void attend(const Stop& now, const Stop& next, float* out, float* most, float* sums) {
    const Task& task = *now.task;
    const HeadSet& set = task.set;
    // Counted from the chunk's first position, wherever the cache begins: a sum's steps are the same for all.
    const int64_t s = task.sequence, base = now.chunk * CHUNK, low = std::max(base, view_.first(s)) - base;
    const int64_t high = std::min<int64_t>(base + CHUNK, most_ + 1) - base, from = low / 64 * 64;
    const int64_t groups = (task.count + 15) / 16, bytes = of_.rows.width * 2;
    const int64_t whole = set.D / 32, rest = set.D % 32, steps = whole + (rest > 0);
    float* scores = Scratch::line(own_.scores);
    const bf16* queries = Scratch::line(own_.queries);
    // The rest of the last sixteen is of the same block.
    const int64_t until = (high + 15) / 16 * 16;
    const bf16** row = reader_.row;
    reader_.enter(now, next);
    shape_attention(32);
    for (int64_t t = from; t < high; t += 64) {
      const int64_t begin = std::max(t, low), end = std::min(t + 64, until);
      reader_.keys(begin, end);
      // Other rows stand where none is seen, so that four tiles can always be read.
      for (int64_t i = t; i < t + 64; ++i)
        if (i < begin || i >= end) row[i] = row[begin + i % 16];
      for (int64_t g = 0; g < groups; ++g)
        score_tiles(row + t, set.k, bytes, queries + g * steps * 512, whole, scores + (g * CHUNK + t) * 16, false);
      if (!rest) continue;
      shape_attention(rest);
      for (int64_t g = 0; g < groups; ++g)
        score_tiles(row + t, set.k + whole * 32, bytes, queries + (g * steps + whole) * 512, 1,
                    scores + (g * CHUNK + t) * 16, true);
      shape_attention(32);
    }
    for (int64_t g = 0; g < groups; ++g) soften(task, g, base, from, high, most, sums);
    weigh(task, from, low, high, out);
  }

 private:
  // Scores of a column group -> weights, not yet divided by their sum: [span, 16 columns, 32 tokens].
  void soften(const Task& task, int64_t g, int64_t base, int64_t from, int64_t high, float* largest, float* sums) {
    const int64_t s = task.sequence, columns = std::min<int64_t>(16, task.count - g * 16);
    float* scores = Scratch::line(own_.scores) + g * CHUNK * 16;
    const auto [first, last] = std::minmax_element(stand_ + g * 16, stand_ + g * 16 + columns);
    const __m512 none = _mm512_set1_ps(-INF);
    // Mostly every column sees all of a chunk.
    const bool all_seen =
        base + high <= *first + 1 && base + from >= std::max(view_.since(*last), view_.first(s));
    if (!all_seen) hide(g, columns, base, from, high, scores);
    __m512 tops[4] = {none, none, none, none};
    for (int64_t t = from; t < high; ++t) tops[t % 4] = _mm512_max_ps(tops[t % 4], _mm512_load_ps(scores + t * 16));
    const __m512 most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    const __m512 top = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(most, none, _CMP_GT_OQ), most);
    const __m512 sum = all_seen ? weights<true>(g, from, high, scores, top) : weights<false>(g, from, high, scores, top);
    store(largest + g * 16, {_mm512_mul_ps(most, _mm512_set1_ps(of_.scale))}, columns);
    store(sums + g * 16, {sum}, columns);
  }

  // Scores that a column does not see become -inf.
  void hide(int64_t g, int64_t columns, int64_t base, int64_t from, int64_t high, float* scores) const {
    const __m512i last = _mm512_maskz_loadu_epi32(__mmask16(between(0, columns)), stand_ + g * 16);
    const __m512i low = _mm512_sub_epi32(last, _mm512_set1_epi32(int32_t(view_.window)));
    for (int64_t t = from; t < high; ++t) {
      const __m512i at = _mm512_set1_epi32(int32_t(base + t));
      __mmask16 seen = _mm512_cmple_epi32_mask(at, last);
      if (view_.window > 0) seen &= _mm512_cmpgt_epi32_mask(at, low);
      _mm512_store_ps(scores + t * 16, _mm512_mask_mov_ps(_mm512_set1_ps(-INF), seen, _mm512_load_ps(scores + t * 16)));
    }
  }

  // e^((score - top) scale) as a power of two, to 4e-6, which is far below what bf16 keeps of it; their sums.
  template <bool ALL_SEEN>
  __m512 weights(int64_t g, int64_t from, int64_t high, const float* scores, __m512 top) {
    const __m512 factor = _mm512_set1_ps(of_.scale * 1.44269504088896341f), none = _mm512_set1_ps(-INF);
    const __m512 shift = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(top, factor));
    // Added to a number, its last bits are the nearest whole number.
    const __m512 whole = _mm512_set1_ps(12582912.0f), least = _mm512_set1_ps(-126.0f);
    auto weight = [&](int64_t t) {
      if (t >= high) return _mm512_setzero_ps();
      const __m512 score = _mm512_load_ps(scores + t * 16);
      const __m512 x = _mm512_max_ps(_mm512_fmadd_ps(score, factor, shift), least), i = _mm512_add_ps(x, whole);
      const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(i, whole));
      __m512 y = _mm512_set1_ps(POWER[0]);
      for (int n = 1; n < 5; ++n) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(POWER[n]));
      y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(i), 23)));
      return ALL_SEEN ? y : _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, none, _CMP_GT_OQ), y);
    };
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    bf16* to = Scratch::line(own_.weights) + g * SPANS * 512;
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int64_t span = from / 32; span * 32 < high; ++span) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 even = weight(span * 32 + 2 * i), odd = weight(span * 32 + 2 * i + 1);
        evens = _mm512_add_ps(evens, even);
        odds = _mm512_add_ps(odds, odd);
        pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
      }
      transpose16(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + span * 512 + i * 32, pairs[i]);
    }
    return _mm512_add_ps(evens, odds);
  }

  // The weighted sum of values, 32 numbers of all columns at a time.
  void weigh(const Task& task, int64_t from, int64_t low, int64_t high, float* out) {
    const HeadSet& set = task.set;
    const int64_t first_span = from / 32, end = (high + 31) / 32, V = of_.V, offset = of_.row.v_offset + set.v;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    bf16* values = Scratch::line(own_.values);
    const bf16* weights = Scratch::line(own_.weights);
    float* part = Scratch::line(own_.part);
    for (int64_t v = 0; v < set.V; v += 64) {
      for (int64_t span = from / 32; span < end; ++span) {
        const int64_t begin = std::max(span * 32, low), until = std::min(span * 32 + 32, high);
        reader_.values(begin, until, v, 64);
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t at = offset + v + half * 32, numbers = std::max<int64_t>(0, set.V - v - half * 32);
          // What lies beside the tokens may be anything, and nothing times that need not be nothing.
          auto value = [&](int64_t t) { return t >= begin && t < until ? pairs(reader_.row[t] + at, numbers).all : zero; };
          bf16* to = values + span * 2048 + half * 1024;
          for (int64_t t = span * 32; t < span * 32 + 32; t += 2, to += 32) {
            const __m512i even = value(t), odd = value(t + 1);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
          }
        }
      }
      for (int64_t g = 0; g * 16 < task.count; ++g) {
        weigh_tiles(weights + (g * SPANS + first_span) * 512, values + first_span * 2048, end - first_span, part);
        for (int64_t c = 0; c < std::min<int64_t>(16, task.count - g * 16); ++c) {
          const int64_t own = value_[g * 16 + c];
          // Of all key heads' values a head takes its own.
          if (v + 64 <= own || v >= own + V) continue;
          const int64_t skip = std::max<int64_t>(0, own - v);
          const int64_t numbers = std::min<int64_t>(64 - skip, own + V - v - skip);
          float some[64], *to = out + (g * 16 + c) * V + v + skip - own, *ordered = numbers == 64 ? to : some;
          for (int64_t half = 0; half < 2; ++half) {
            const __m512 a = _mm512_load_ps(part + c * 64 + half * 32), b = _mm512_load_ps(part + c * 64 + half * 32 + 16);
            _mm512_storeu_ps(ordered + half * 32, _mm512_permutex2var_ps(a, first, b));
            _mm512_storeu_ps(ordered + half * 32 + 16, _mm512_permutex2var_ps(a, second, b));
          }
          if (numbers < 64) std::copy_n(some + skip, numbers, to);
        }
      }
    }
  }

  // Kept from call to call.
  struct Scratch {
    std::vector<bf16> queries, weights = std::vector<bf16>(GROUPS * SPANS * 512 + 32), values = std::vector<bf16>(SPANS * 2048 + 32);
    std::vector<float> scores = std::vector<float>(GROUPS * CHUNK * 16 + 16), part = std::vector<float>(16 * 64 + 16);

    static Scratch& own(int64_t steps) {
      static thread_local Scratch scratch;
      scratch.queries.resize(std::max<size_t>(scratch.queries.size(), GROUPS * steps * 512 + 32));
      return scratch;
    }
    // Tiles are read a line of 64 bytes at a time.
    template <typename T> static T* line(std::vector<T>& of) { return (T*)(((uintptr_t)of.data() + 63) & ~uintptr_t(63)); }
  };

  const Attention& of_;
  const View& view_;
  Reader reader_;
  Scratch& own_;
  // Of a task's columns: positions, the last of them, and where their values begin in those of the set.
  int32_t stand_[COLUMNS], most_ = 0;
  int64_t value_[COLUMNS];
};
