// Attention over the paged cache by tiles, for any number of query tokens: decoding, verification and prompts alike.
//
// A column is a query token and a head of one sequence; sixteen of them are a tile's columns. Sixteen cached rows are read
// where they lie as a tile's rows, so that keys are not copied: scores are [tokens, columns]. What a column gets depends on
// itself alone: the cache is cut into chunks at fixed positions, each chunk's result is a column's own, and chunks are
// merged in order. So a query token has the same result to the bit alone, among others, in a prompt or decoded.
//
// Legend: as paged_attention.h.
#pragma once
#include <atomic>

#include "paged_attention.h"
#include "tiles.h"

constexpr int64_t COLUMNS = 64;          // columns that one task takes through the cache
constexpr int64_t GROUPS = COLUMNS / 16;
constexpr int64_t SPANS = CHUNK / 32;    // stretches of 32 tokens in a chunk

// Heads that are multiplied with the same part of a row: keys [k, k + D), values [v, v + V) of it.
struct HeadSet { int64_t first, heads, k, D, v, V; };

struct TileTask { int64_t sequence, set, first, count, chunk, place; };

// What a task needs: a thread's own, kept from call to call.
struct Scratch {
  std::vector<bf16> queries, weights = std::vector<bf16>(GROUPS * SPANS * 512 + 32), values = std::vector<bf16>(SPANS * 2048 + 32);
  std::vector<float> scores = std::vector<float>(GROUPS * CHUNK * 16 + 16), part = std::vector<float>(16 * 64 + 16);
  float most[COLUMNS], sums[COLUMNS];
  const bf16* row[CHUNK];  // of every token of the chunk, and of what a tile reads beyond it

  static Scratch& own(int64_t steps) {
    static thread_local Scratch scratch;
    if (int64_t(scratch.queries.size()) < GROUPS * steps * 512 + 32) scratch.queries.resize(GROUPS * steps * 512 + 32);
    return scratch;
  }
  // Tiles are read a line of 64 bytes at a time.
  template <typename T> static T* line(std::vector<T>& of) { return (T*)(((uintptr_t)of.data() + 63) & ~uintptr_t(63)); }
};

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
WITH_TILES inline void shape_attention(int64_t numbers) {
  Shape shape;
  shape.bytes[4] = shape.bytes[5] = uint16_t(2 * numbers);
  shape.rows[6] = uint8_t(numbers / 2);
  memory_is_read();
  _tile_loadconfig(&shape);
}

// Scores [16, 16] of four times 16 tokens, whose keys begin at `keys[0]`, `keys[16]`, ...: 32 * steps numbers of them times
// queries, added to what is there already where there is `more`.
WITH_TILES inline void score_tiles(const bf16* const* keys, int64_t offset, int64_t bytes, const bf16* queries,
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
WITH_TILES inline void weigh_tiles(const bf16* weights, const bf16* values, int64_t spans, float* out) {
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

// A running result of attention over what came before, and that of one more chunk.
inline void merge_chunk(float* total, float& top, float& sum, const float* part, float most, float own, int64_t V) {
  if (most == -INF) return;
  const float next = std::max(top, most), kept = std::exp(top - next), share = std::exp(most - next);
  const __m512 a = _mm512_set1_ps(kept), b = _mm512_set1_ps(share);
  for (int64_t v = 0; v < V; v += 16) {
    const __mmask16 mask = tail16(V - v);
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, total + v), a);
    _mm512_mask_storeu_ps(total + v, mask, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, part + v), b, scaled));
  }
  sum = sum * kept + own * share;
  top = next;
}

// One step's attention by tiles. Queries are [N, H, D] in fp32.
class TiledAttention {
 public:
  TiledAttention(const float* q, int64_t H, int64_t G, int64_t D, int64_t V, const Rows& row, const View& view, float scale)
      : q_(q), H_(H), G_(G), D_(D), V_(V), row_(row), view_(view), scale_(scale),
        tree_(view.tree_Tn ? view.tree_Tn->const_data_ptr<int32_t>() : nullptr) {}

  // `finish(n, out [H, V], lse [H])` for every query token, from several threads at once.
  template <typename Finish>
  void run(Finish finish) {
    const int64_t S = view_.sequences(), N = view_.query(S), J = H_ / G_;
    // Few columns: all key heads at once, with zeros where a query has nothing to do with a key; they fill a tile.
    // Many: each key head for itself.
    sets_.push_back({0, H_, 0, (G_ - 1) * row_.k_head + D_, 0, (G_ - 1) * row_.v_head + V_});
    for (int64_t g = 0; g < G_ && G_ > 1; ++g) sets_.push_back({g * J, J, g * row_.k_head, D_, g * row_.v_head, V_});
    int64_t places = 0, steps = 0;
    for (const HeadSet& set : sets_) steps = std::max(steps, (set.D + 31) / 32);
    for (int64_t s = 0; s < S; ++s) {
      const int64_t T = view_.queries(s), columns = T * H_;
      if (columns <= COLUMNS) {
        // Every chunk is a task; the results are merged afterwards.
        const auto [from, to] = chunks(s, 0, T);
        for (int64_t chunk = from; chunk < to; ++chunk, places += columns)
          tasks_.push_back({s, 0, 0, columns, chunk, places});
      } else {
        const int64_t low = G_ > 1 ? 1 : 0, high = G_ > 1 ? G_ + 1 : 1;
        for (int64_t set = low; set < high; ++set)
          for (int64_t first = 0, all = T * sets_[set].heads; first < all; first += COLUMNS)
            tasks_.push_back({s, set, first, std::min(COLUMNS, all - first), -1, 0});
      }
    }
    partial_.resize(places * V_), most_.resize(places), sums_.resize(places);
    out_.resize(N * H_ * V_), lse_.resize(N * H_);
    // The last columns see most: longest tasks first.
    std::atomic<int64_t> next{int64_t(tasks_.size()) - 1};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      Scratch& scratch = Scratch::own(steps);
      for (int64_t i = next--; i >= 0; i = next--) work(tasks_[i], scratch);
      release_tiles();
    });
    merge_places();
    at::parallel_for(0, N, 4, [&](int64_t from, int64_t to) {
      for (int64_t n = from; n < to; ++n) finish(n, out_.data() + n * H_ * V_, lse_.data() + n * H_);
    });
  }

 private:
  int64_t length(int64_t s) const { return view_.seq_lens_S.const_data_ptr<int32_t>()[s]; }
  int64_t first(int64_t s) const { return view_.first_S.const_data_ptr<int32_t>()[s]; }

  // Where query token m of a sequence stands.
  int64_t position(int64_t s, int64_t m) const {
    if (!tree_) return length(s) - view_.queries(s) + m;
    const int32_t* back = tree_ + m * view_.nodes();
    return length(s) - view_.nodes() + *std::max_element(back, back + view_.nodes());
  }

  // Chunks that query tokens [m, n) of a sequence see, at fixed positions.
  std::pair<int64_t, int64_t> chunks(int64_t s, int64_t m, int64_t n) const {
    const int64_t last = tree_ ? length(s) : position(s, n - 1) + 1;
    const int64_t low = tree_ ? length(s) - view_.nodes() : position(s, m);
    const int64_t begin = std::max(first(s), view_.window > 0 ? std::max<int64_t>(0, low + 1 - view_.window) : 0);
    return {begin / CHUNK, (last + CHUNK - 1) / CHUNK};
  }

  // Where the tokens of a chunk lie. Beyond its end stand the rest of the last sixteen, which are of the same block, and
  // then the first ones again, so that four tiles can always be read.
  void locate(int64_t s, int64_t begin, int64_t count, const bf16** row) const {
    const int32_t* blocks = view_.table_SB.const_data_ptr<int32_t>() + s * view_.table_SB.size(1);
    const int64_t size = view_.block_size, start = begin - first(s);
    for (int64_t t = 0, b = start / size, slot = start % size; t < (count + 15) / 16 * 16; ++t) {
      row[t] = row_.keys + (blocks[b] * size + slot) * row_.width;
      if (++slot == size) ++b, slot = 0;
    }
    for (int64_t t = (count + 15) / 16 * 16; t < CHUNK; ++t) row[t] = row[t % 16];
  }

  void work(const TileTask& task, Scratch& scratch) {
    const HeadSet& set = sets_[task.set];
    pack(task, set, scratch);
    if (task.chunk >= 0) {
      float* parts = partial_.data() + task.place * V_;
      attend(task, set, task.chunk, scratch, [&](int64_t c, const float* own, int64_t v, int64_t count) {
        std::copy_n(own, count, parts + c * V_ + v);
      });
      std::copy_n(scratch.most, task.count, most_.data() + task.place);
      std::copy_n(scratch.sums, task.count, sums_.data() + task.place);
      return;
    }
    const int64_t s = task.sequence, m = task.first / set.heads, n = (task.first + task.count - 1) / set.heads + 1;
    std::vector<float> total(task.count * V_), top(task.count, -INF), sum(task.count), part(task.count * V_);
    const auto [from, to] = chunks(s, m, n);
    for (int64_t chunk = from; chunk < to; ++chunk) {
      attend(task, set, chunk, scratch, [&](int64_t c, const float* own, int64_t v, int64_t count) {
        std::copy_n(own, count, part.data() + c * V_ + v);
      });
      for (int64_t c = 0; c < task.count; ++c)
        merge_chunk(total.data() + c * V_, top[c], sum[c], part.data() + c * V_, scratch.most[c], scratch.sums[c], V_);
    }
    for (int64_t c = 0; c < task.count; ++c) {
      const int64_t column = task.first + c, h = set.first + column % set.heads;
      give((view_.query(s) + column / set.heads) * H_ + h, total.data() + c * V_, top[c], sum[c]);
    }
  }

  void give(int64_t place, const float* total, float top, float sum) {
    lse_[place] = sum > 0 ? top + std::log(sum) : -INF;
    for (int64_t v = 0; v < V_; ++v) out_[place * V_ + v] = sum > 0 ? total[v] / sum : 0.0f;
  }

  // Results of chunks that were tasks of their own, in order.
  void merge_places() {
    std::vector<float> total(V_);
    for (size_t i = 0; i < tasks_.size();) {
      if (tasks_[i].chunk < 0) {
        ++i;
        continue;
      }
      size_t end = i;
      while (end < tasks_.size() && tasks_[end].sequence == tasks_[i].sequence) ++end;
      for (int64_t c = 0; c < tasks_[i].count; ++c) {
        float top = -INF, sum = 0;
        std::fill(total.begin(), total.end(), 0.0f);
        for (size_t t = i; t < end; ++t) {
          const int64_t place = tasks_[t].place + c;
          merge_chunk(total.data(), top, sum, partial_.data() + place * V_, most_[place], sums_[place], V_);
        }
        give(view_.query(tasks_[i].sequence) * H_ + c, total.data(), top, sum);
      }
      i = end;
    }
  }

  // Queries of a task's columns as tiles: [column group, step, 16 pairs of numbers, 16 columns, 2].
  void pack(const TileTask& task, const HeadSet& set, Scratch& scratch) {
    const int64_t steps = (set.D + 31) / 32, J = H_ / G_;
    bf16* to = Scratch::line(scratch.queries);
    std::memset((void*)to, 0, (task.count + 15) / 16 * steps * 1024);
    for (int64_t c = 0; c < task.count; ++c) {
      const int64_t column = task.first + c, h = set.first + column % set.heads;
      const float* from = q_ + ((view_.query(task.sequence) + column / set.heads) * H_ + h) * D_;
      const int64_t offset = h / J * row_.k_head - set.k;
      bf16* own = to + c / 16 * steps * 512 + c % 16 * 2;
      // Pairs of numbers, one below the other: a step's 16 pairs stand as those of the next one do.
      for (int64_t d = 0; d < D_; d += 16) {
        const __mmask16 mask = tail16(D_ - d);
        alignas(32) uint32_t pairs[8];
        _mm256_store_si256((__m256i*)pairs, narrowed(_mm512_maskz_loadu_ps(mask, from + d)));
        for (int64_t i = 0; i < std::min<int64_t>(8, (D_ - d) / 2); ++i)
          std::memcpy(own + ((offset + d) / 2 + i) * 32, pairs + i, 4);
      }
    }
  }

  // One chunk: `put(column, numbers, v, count)` for every column; scratch.most and sums get the softmax's.
  template <typename Put>
  void attend(const TileTask& task, const HeadSet& set, int64_t chunk, Scratch& scratch, Put put) {
    const int64_t s = task.sequence, begin = std::max(chunk * CHUNK, first(s));
    const int64_t count = std::min((chunk + 1) * CHUNK, length(s)) - begin, groups = (task.count + 15) / 16;
    const int64_t whole = set.D / 32, rest = set.D % 32, steps = whole + (rest > 0), bytes = row_.width * 2;
    float* scores = Scratch::line(scratch.scores);
    const bf16* queries = Scratch::line(scratch.queries);
    locate(s, begin, count, scratch.row);
    shape_attention(32);
    for (int64_t t = 0; t < count; t += 64) {
      for (int64_t ahead = t + 64; ahead < std::min(t + 128, count); ++ahead)
        for (int64_t w = 0; w < row_.width; w += 32) _mm_prefetch((const char*)(scratch.row[ahead] + w), _MM_HINT_T0);
      for (int64_t g = 0; g < groups; ++g)
        score_tiles(scratch.row + t, set.k, bytes, queries + g * steps * 512, whole, scores + (g * CHUNK + t) * 16, false);
    }
    if (rest) {
      shape_attention(rest);
      for (int64_t t = 0; t < count; t += 64)
        for (int64_t g = 0; g < groups; ++g)
          score_tiles(scratch.row + t, set.k + whole * 32, bytes, queries + (g * steps + whole) * 512, 1,
                      scores + (g * CHUNK + t) * 16, true);
      shape_attention(32);
    }
    for (int64_t g = 0; g < groups; ++g) soften(task, set, g, begin, count, scratch);
    weigh(task, set, count, scratch, put);
  }

  // Scores of a column group -> weights, not yet divided by their sum: [span, 16 columns, 32 tokens].
  void soften(const TileTask& task, const HeadSet& set, int64_t g, int64_t begin, int64_t count, Scratch& scratch) {
    const int64_t s = task.sequence, nodes = view_.nodes(), tail = tree_ ? length(s) - nodes : INT64_MAX;
    float* scores = Scratch::line(scratch.scores) + g * CHUNK * 16;
    alignas(64) int32_t stand[16], since[16], query[16];
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t column = task.first + g * 16 + c;
      const bool real = g * 16 + c < task.count;
      query[c] = real ? int32_t(column / set.heads) : -1;
      // A token of a tree sees what stands before the tree up to its own place, and of the tree what `tree_` says.
      stand[c] = real ? int32_t(position(s, query[c])) : -1;
      since[c] = view_.window > 0 ? stand[c] - int32_t(view_.window) : -1;
    }
    const __m512i last = _mm512_load_si512(stand), low = _mm512_load_si512(since);
    const __m512 scale = _mm512_set1_ps(scale_), none = _mm512_set1_ps(-INF);
    __m512 most = none;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t p = begin + t;
      const __m512i at = _mm512_set1_epi32(int32_t(p));
      __mmask16 seen = _mm512_cmple_epi32_mask(at, last) & _mm512_cmpgt_epi32_mask(at, low);
      if (p >= tail) {
        seen = 0;
        for (int64_t c = 0; c < 16; ++c) {
          const int32_t back = query[c] < 0 ? -1 : tree_[query[c] * nodes + p - tail];
          if (back >= 0 && (view_.window <= 0 || back < view_.window)) seen |= __mmask16(1u << c);
        }
      }
      const __m512 score = _mm512_mask_mul_ps(none, seen, _mm512_load_ps(scores + t * 16), scale);
      _mm512_store_ps(scores + t * 16, score);
      most = _mm512_max_ps(most, score);
    }
    const __mmask16 any = _mm512_cmp_ps_mask(most, none, _CMP_GT_OQ);
    const __m512 top = _mm512_maskz_mov_ps(any, most);
    __m512 sum = _mm512_setzero_ps();
    auto weight = [&](int64_t t) {
      if (t >= count) return _mm512_setzero_ps();
      const __m512 score = _mm512_load_ps(scores + t * 16);
      const __mmask16 seen = _mm512_cmp_ps_mask(score, none, _CMP_GT_OQ);
      return _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(score, top)));
    };
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    bf16* to = Scratch::line(scratch.weights) + g * SPANS * 512;
    for (int64_t span = 0; span * 32 < count; ++span) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 even = weight(span * 32 + 2 * i), odd = weight(span * 32 + 2 * i + 1);
        sum = _mm512_add_ps(_mm512_add_ps(sum, even), odd);
        pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
      }
      transpose16(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + span * 512 + i * 32, pairs[i]);
    }
    _mm512_storeu_ps(scratch.most + g * 16, most);
    _mm512_storeu_ps(scratch.sums + g * 16, sum);
  }

  // The weighted sum of values, 32 numbers of all columns at a time.
  template <typename Put>
  void weigh(const TileTask& task, const HeadSet& set, int64_t count, Scratch& scratch, Put put) {
    const int64_t spans = (count + 31) / 32, J = H_ / G_, offset = row_.v_offset + set.v;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    bf16* values = Scratch::line(scratch.values);
    const bf16* weights = Scratch::line(scratch.weights);
    float* part = Scratch::line(scratch.part);
    for (int64_t v = 0; v < set.V; v += 64) {
      for (int64_t half = 0; half < 2; ++half) {
        const __mmask32 mask = tail32(std::max<int64_t>(0, set.V - v - half * 32));
        for (int64_t t = 0; t < spans * 32; t += 2) {
          // What lies beyond the last token may be anything, and nothing times that need not be nothing.
          const int64_t at = offset + v + half * 32;
          const __m512i even = t < count ? _mm512_maskz_loadu_epi16(mask, scratch.row[t] + at) : zero;
          const __m512i odd = t + 1 < count ? _mm512_maskz_loadu_epi16(mask, scratch.row[t + 1] + at) : zero;
          bf16* to = values + t / 32 * 2048 + half * 1024 + t % 32 / 2 * 32;
          _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
          _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
        }
      }
      for (int64_t g = 0; g * 16 < task.count; ++g) {
        weigh_tiles(weights + g * SPANS * 512, values, spans, part);
        for (int64_t c = 0; c < std::min<int64_t>(16, task.count - g * 16); ++c) {
          const int64_t h = set.first + (task.first + g * 16 + c) % set.heads, own = h / J * row_.v_head - set.v;
          // Of all key heads' values a head takes its own.
          if (v + 64 <= own || v >= own + V_) continue;
          alignas(64) float ordered[64];
          for (int64_t half = 0; half < 2; ++half) {
            const __m512 a = _mm512_load_ps(part + c * 64 + half * 32), b = _mm512_load_ps(part + c * 64 + half * 32 + 16);
            _mm512_store_ps(ordered + half * 32, _mm512_permutex2var_ps(a, first, b));
            _mm512_store_ps(ordered + half * 32 + 16, _mm512_permutex2var_ps(a, second, b));
          }
          const int64_t skip = std::max<int64_t>(0, own - v);
          put(g * 16 + c, ordered + skip, v + skip - own, std::min<int64_t>(64 - skip, own + V_ - v - skip));
        }
      }
    }
  }

  const float* q_;
  const int64_t H_, G_, D_, V_;
  const Rows& row_;
  const View& view_;
  const float scale_;
  const int32_t* tree_;
  std::vector<HeadSet> sets_;
  std::vector<TileTask> tasks_;
  std::vector<float> partial_, most_, sums_, out_, lse_;
};
