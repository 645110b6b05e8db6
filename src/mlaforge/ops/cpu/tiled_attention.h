// Attention of one task's columns over one chunk of the cache by tiles.
//
// Sixteen columns are a tile's columns. How rows, queries and weights become tiles is what NUMBERS knows: tiled_bf16.h and
// tiled_int8.h. Legend: as paged_attention.h.
#pragma once
#include "tiled_bf16.h"
#include "tiled_int8.h"

// 2^f for f from -1/2 to 1/2, highest power first.
constexpr float POWER[5] = {9.570099669e-3f, 5.591786583e-2f, 2.402474493e-1f, 6.931218141e-1f, 9.999992614e-1f};

template <typename NUMBERS>
class TileKernel {
 public:
  explicit TileKernel(const Attention& of) : of_(of), view_(of.view), reader_(of, 64, true), numbers_(of) {}
  TileKernel(const TileKernel&) = delete;
  ~TileKernel() { release_tiles(); }

  static bool together(const Attention& of) { return NUMBERS::together(of); }

  void pack(const Task& task) {
    const int64_t J = of_.J();
    numbers_.begin(task);
    for (int64_t c = 0; c < task.count; ++c) {
      const int64_t h = task.head(c), m = task.token(c);
      stand_[c] = int32_t(view_.position(task.sequence, m));
      most_ = c ? std::max(most_, stand_[c]) : stand_[c];
      value_[c] = h / J * of_.row.v_head - task.set.v;
      const float* q = of_.q + ((view_.query(task.sequence) + m) * of_.H + h) * of_.D;
      scale_[c] = of_.scale * numbers_.put(c, q, h / J * of_.row.k_head - task.set.k, h / J);
    }
  }

  void attend(const Stop& now, const Stop& next, float* out, float* most, float* sums) {
    const Task& task = *now.task;
    // Counted from the chunk's first position, wherever the cache begins: a sum's steps are the same for all.
    const int64_t s = task.sequence, base = now.chunk * CHUNK, low = std::max(base, view_.first(s)) - base;
    const int64_t high = std::min<int64_t>(base + CHUNK, most_ + 1) - base, from = low / 64 * 64;
    const int64_t groups = (task.count + 15) / 16;
    float* scores = align64(scores_.data());
    // The rest of the last sixteen may be anything.
    const int64_t until = (high + 15) / 16 * 16;
    auto** row = reader_.row;
    reader_.enter(now, next);
    numbers_.shape();
    for (int64_t t = from; t < high; t += 64) {
      const int64_t begin = std::max(t, low), end = std::min(t + 64, until), first = begin / 16 * 16;
      reader_.keys(begin, end);
      // Another sixteen stands where none is seen, so that four tiles can always be read.
      for (int64_t i = t; i < t + 64; ++i)
        if (i < first || i >= end) row[i] = row[first + i % 16];
      numbers_.score(task.set, row + t, groups, scores + t * 16, reader_);
    }
    for (int64_t g = 0; g < groups; ++g) softmax_chunk(task, g, base, from, high, most, sums);
    weigh(task, from, low, high, out);
  }

 private:
  // Scores of a column group -> weights, not yet divided by their sum.
  void softmax_chunk(const Task& task, int64_t g, int64_t base, int64_t from, int64_t high, float* largest, float* sums) {
    const int64_t s = task.sequence, columns = std::min<int64_t>(16, task.count - g * 16);
    float* scores = align64(scores_.data()) + g * CHUNK * 16;
    const auto [first, last] = std::minmax_element(stand_ + g * 16, stand_ + g * 16 + columns);
    const __m512 none = _mm512_set1_ps(-INF), scale = load(scale_ + g * 16, columns).all;
    // Mostly every column sees all of a chunk.
    const bool all_seen =
        base + high <= *first + 1 && base + from >= std::max(view_.since(*last), view_.first(s));
    if (!all_seen) hide(g, columns, base, from, high, scores);
    __m512 tops[4] = {none, none, none, none};
    for (int64_t t = from; t < high; t += 4)
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i)
        if (t + i < high) tops[i] = _mm512_max_ps(tops[i], _mm512_load_ps(scores + (t + i) * 16));
    const __m512 most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    const __m512 top = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(most, none, _CMP_GT_OQ), most);
    const __m512 sum = all_seen ? weights<true>(g, from, high, scores, top, scale)
                                : weights<false>(g, from, high, scores, top, scale);
    // Nothing times infinity is none.
    store(largest + g * 16, {_mm512_mask_mul_ps(most, _mm512_cmp_ps_mask(most, none, _CMP_GT_OQ), most, scale)}, columns);
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

  // e^((score - top) scale) as a power of two, to 4e-6, which is far below what is kept of it; their sums.
  template <bool ALL_SEEN>
  __m512 weights(int64_t g, int64_t from, int64_t high, float* scores, __m512 top, __m512 scale) {
    const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(1.44269504088896341f)), none = _mm512_set1_ps(-INF);
    const __m512 shift = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(top, factor));
    // Added to a number, its last bits are the nearest whole number.
    const __m512 whole = _mm512_set1_ps(12582912.0f), least = _mm512_set1_ps(-126.0f);
    return numbers_.weights(g, from, high, reader_, scores, [&](int64_t t) {
      if (t >= high) return _mm512_setzero_ps();
      const __m512 score = _mm512_load_ps(scores + t * 16);
      const __m512 x = _mm512_max_ps(_mm512_fmadd_ps(score, factor, shift), least), i = _mm512_add_ps(x, whole);
      const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(i, whole));
      __m512 y = _mm512_set1_ps(POWER[0]);
      for (int n = 1; n < 5; ++n) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(POWER[n]));
      y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(i), 23)));
      return ALL_SEEN ? y : _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, none, _CMP_GT_OQ), y);
    });
  }

  // The weighted sum of values, 64 numbers of all columns at a time.
  void weigh(const Task& task, int64_t from, int64_t low, int64_t high, float* out) {
    constexpr int64_t SPAN = NUMBERS::SPAN;
    const HeadSet& set = task.set;
    const int64_t first = from / SPAN, end = (high + SPAN - 1) / SPAN, V = of_.V, offset = of_.row.v_offset + set.v;
    for (int64_t v = 0; v < set.V; v += 64) {
      for (int64_t span = first; span < end; ++span) {
        const int64_t begin = std::max(span * SPAN, low), until = std::min(span * SPAN + SPAN, high);
        reader_.values(begin, until, v, 64);
        numbers_.gather(reader_, span, begin, until, offset + v, set.V - v);
      }
      for (int64_t g = 0; g * 16 < task.count; ++g) {
        numbers_.weigh(g, first, end);
        for (int64_t c = g * 16; c < std::min<int64_t>(g * 16 + 16, task.count); ++c) {
          const int64_t own = value_[c];
          // Of all key heads' values a head takes its own.
          if (v + 64 <= own || v >= own + V) continue;
          const int64_t skip = std::max<int64_t>(0, own - v);
          const int64_t numbers = std::min<int64_t>(64 - skip, own + V - v - skip);
          float some[64], *to = out + c * V + v + skip - own;
          numbers_.get(c, numbers == 64 ? to : some);
          if (numbers < 64) std::copy_n(some + skip, numbers, to);
        }
      }
    }
  }

  // Kept from call to call.
  inline static thread_local std::vector<float> scores_ = std::vector<float>(COLUMNS * CHUNK + 16);

  const Attention& of_;
  const View& view_;
  Reader<typename NUMBERS::Row> reader_;
  NUMBERS numbers_;
  // Of a task's columns: positions, the last of them, what their scores are multiplied by, and where their values begin in
  // those of the set.
  int32_t stand_[COLUMNS], most_ = 0;
  float scale_[COLUMNS];
  int64_t value_[COLUMNS];
};
