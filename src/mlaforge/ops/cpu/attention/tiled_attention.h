// Attention of one task's columns over one chunk of the cache, with AMX tiles.
//
// A tile has 16 columns. `Tiles` defines how rows, queries and weights become tiles: tiled_bf16.h, tiled_int8.h. Legend: as
// in paged_attention.h.
#pragma once
#include "attention/tiled_bf16.h"
#include "attention/tiled_int8.h"

// Minimax polynomial of 2^f on [-1/2, 1/2], highest power first.
constexpr float POWER[5] = {9.570099669e-3f, 5.591786583e-2f, 2.402474493e-1f, 6.931218141e-1f, 9.999992614e-1f};

template <typename Tiles>
class TileKernel {
 public:
  explicit TileKernel(const Attention& attention)
      : attention_(attention), view_(attention.view), reader_(attention, 64, true), tiles_(attention),
        scores_(scratch_.get<float>(COLUMNS * CHUNK)) {}
  TileKernel(const TileKernel&) = delete;
  ~TileKernel() { release_tiles(); }

  static bool fuses_heads(const Attention& attention) { return Tiles::fuses_heads(attention); }

  void pack(const Task& task) {
    const int64_t J = attention_.J();
    tiles_.begin_task(task);
    for (int64_t c = 0; c < task.count; ++c) {
      const int64_t h = task.head(c), m = task.token(c);
      position_[c] = int32_t(view_.position(task.sequence, m));
      last_position_ = c ? std::max(last_position_, position_[c]) : position_[c];
      value_offset_[c] = h / J * attention_.row.v_head - task.set.v;
      const float* q = attention_.q + ((view_.query(task.sequence) + m) * attention_.H + h) * attention_.D;
      scale_[c] = attention_.scale * tiles_.write_query(c, q, h / J * attention_.row.k_head - task.set.k, h / J);
    }
  }

  void attend(const TaskChunk& current, const TaskChunk& next, float* out, float* maxima, float* sums) {
    const Task& task = *current.task;
    // Relative to the chunk's first position, even if the cache begins later: the steps of a sum are the same for all views.
    const int64_t s = task.sequence, base = current.chunk * CHUNK, low = std::max(base, view_.first(s)) - base;
    const int64_t high = std::min<int64_t>(base + CHUNK, last_position_ + 1) - base, from = low / 64 * 64;
    const int64_t groups = (task.count + 15) / 16;
    float* scores = scores_;
    // The rest of the last tile may have any content.
    const int64_t tile_end = (high + 15) / 16 * 16;
    auto** row = reader_.row;
    reader_.begin_chunk(current, next);
    tiles_.configure();
    for (int64_t t = from; t < high; t += 64) {
      const int64_t begin = std::max(t, low), end = std::min(t + 64, tile_end), first = begin / 16 * 16;
      reader_.keys(begin, end);
      // Rows outside the visible tiles repeat a visible tile, so that four tiles can always be loaded.
      for (int64_t i = t; i < t + 64; ++i)
        if (i < first || i >= end) row[i] = row[first + i % 16];
      tiles_.score(task.set, row + t, groups, scores + t * 16, reader_);
    }
    for (int64_t g = 0; g < groups; ++g) softmax_chunk(task, g, base, from, high, maxima, sums);
    weighted_sum(task, from, low, high, out);
  }

 private:
  // Turns the scores of a column group into unnormalized weights.
  void softmax_chunk(const Task& task, int64_t g, int64_t base, int64_t from, int64_t high, float* largest, float* sums) {
    const int64_t s = task.sequence, columns = std::min<int64_t>(16, task.count - g * 16);
    float* scores = scores_ + g * CHUNK * 16;
    const auto [first, last] = std::minmax_element(position_ + g * 16, position_ + g * 16 + columns);
    const __m512 minus_inf = _mm512_set1_ps(-INF), scale = load(scale_ + g * 16, columns).reg;
    // Usually every column sees the whole chunk.
    const bool all_visible =
        base + high <= *first + 1 && base + from >= std::max(view_.window_begin(*last), view_.first(s));
    if (!all_visible) hide(g, columns, base, from, high, scores);
    __m512 partial_max[4] = {minus_inf, minus_inf, minus_inf, minus_inf};
    for (int64_t t = from; t < high; t += 4)
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i)
        if (t + i < high) partial_max[i] = _mm512_max_ps(partial_max[i], _mm512_load_ps(scores + (t + i) * 16));
    const __m512 column_max =
        _mm512_max_ps(_mm512_max_ps(partial_max[0], partial_max[1]), _mm512_max_ps(partial_max[2], partial_max[3]));
    const __m512 peak = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(column_max, minus_inf, _CMP_GT_OQ), column_max);
    const __m512 sum = all_visible ? weights<true>(g, from, high, scores, peak, scale)
                                : weights<false>(g, from, high, scores, peak, scale);
    // The mask avoids 0 * infinity = NaN.
    const __mmask16 any_visible = _mm512_cmp_ps_mask(column_max, minus_inf, _CMP_GT_OQ);
    store(largest + g * 16, {_mm512_mask_mul_ps(column_max, any_visible, column_max, scale)}, columns);
    store(sums + g * 16, {sum}, columns);
  }

  // Sets scores that a column does not see to -inf.
  void hide(int64_t g, int64_t columns, int64_t base, int64_t from, int64_t high, float* scores) const {
    const __m512i last = _mm512_maskz_loadu_epi32(__mmask16(lanes_between(0, columns)), position_ + g * 16);
    const __m512i low = _mm512_sub_epi32(last, _mm512_set1_epi32(int32_t(view_.window)));
    for (int64_t t = from; t < high; ++t) {
      const __m512i at = _mm512_set1_epi32(int32_t(base + t));
      __mmask16 visible = _mm512_cmple_epi32_mask(at, last);
      if (view_.window > 0) visible &= _mm512_cmpgt_epi32_mask(at, low);
      _mm512_store_ps(scores + t * 16, _mm512_mask_mov_ps(_mm512_set1_ps(-INF), visible, _mm512_load_ps(scores + t * 16)));
    }
  }

  // e^((score - peak) * scale) as a power of two, to 4e-6, far below the precision of the stored weights. Returns the sums.
  template <bool ALL_VISIBLE>
  __m512 weights(int64_t g, int64_t from, int64_t high, float* scores, __m512 peak, __m512 scale) {
    const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(1.44269504088896341f)), minus_inf = _mm512_set1_ps(-INF);
    const __m512 shift = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(peak, factor));
    // Adding `magic` rounds to the nearest integer, in the low bits.
    const __m512 magic = _mm512_set1_ps(12582912.0f), min_exponent = _mm512_set1_ps(-126.0f);
    return tiles_.weights(g, from, high, reader_, scores, [&](int64_t t) {
      if (t >= high) return _mm512_setzero_ps();
      const __m512 score = _mm512_load_ps(scores + t * 16);
      const __m512 x = _mm512_max_ps(_mm512_fmadd_ps(score, factor, shift), min_exponent), i = _mm512_add_ps(x, magic);
      const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(i, magic));
      __m512 y = _mm512_set1_ps(POWER[0]);
      for (int n = 1; n < 5; ++n) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(POWER[n]));
      y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(i), 23)));
      return ALL_VISIBLE ? y : _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, minus_inf, _CMP_GT_OQ), y);
    });
  }

  // The weighted sum of values, 64 elements of all columns at a time.
  void weighted_sum(const Task& task, int64_t from, int64_t low, int64_t high, float* out) {
    constexpr int64_t SPAN = Tiles::SPAN;
    const HeadSet& set = task.set;
    const int64_t first = from / SPAN, end = (high + SPAN - 1) / SPAN, V = attention_.V;
    const int64_t offset = attention_.row.v_offset + set.v;
    for (int64_t v = 0; v < set.V; v += 64) {
      for (int64_t span = first; span < end; ++span) {
        const int64_t begin = std::max(span * SPAN, low), until = std::min(span * SPAN + SPAN, high);
        reader_.values(begin, until, v, 64);
        tiles_.gather(reader_, span, begin, until, offset + v, set.V - v);
      }
      for (int64_t g = 0; g * 16 < task.count; ++g) {
        tiles_.weighted_sum(g, first, end);
        for (int64_t c = g * 16; c < std::min<int64_t>(g * 16 + 16, task.count); ++c) {
          const int64_t head_offset = value_offset_[c];
          // A head takes its part of all KV heads' values.
          if (v + 64 <= head_offset || v >= head_offset + V) continue;
          const int64_t skip = std::max<int64_t>(0, head_offset - v);
          const int64_t width = std::min<int64_t>(64 - skip, head_offset + V - v - skip);
          float buffer[64], *to = out + c * V + v + skip - head_offset;
          tiles_.read_column(c, width == 64 ? to : buffer);
          if (width < 64) std::copy_n(buffer + skip, width, to);
        }
      }
    }
  }

  const Attention& attention_;
  const View& view_;
  RowReader<typename Tiles::Row> reader_;
  Tiles tiles_;
  Scratch scratch_;
  float* const scores_;
  // Of a task's columns: positions and the last of them, the factors of their scores, and their heads' first value in the
  // set.
  int32_t position_[COLUMNS], last_position_ = 0;
  float scale_[COLUMNS];
  int64_t value_offset_[COLUMNS];
};
