// Attention of one task's columns over one chunk of the cache with vectors.
//
// Scores are a product of queries with packed weights (product.h), the weights being keys of 16 tokens, turned so that
// tokens stand in lanes; values are weighted where they lie. Legend: as paged_attention.h.
#pragma once
#include "paged_attention.h"
#include "product.h"

// Keys of 16 tokens, numbers [0, D) from `offset` on, packed: out [D / 2, 16, 2], D filled up to eights with zeros.
inline void pack_keys(const bf16* const* keys, int64_t offset, int64_t D, bf16* out) {
  auto columns = [&](auto at, bf16* to) {
    Pairs row[4];
    for (int t = 0; t < 4; ++t) row[t] = four(at(t), at(t + 4), at(t + 8), at(t + 12));
    const Pairs low01 = low32(row[0], row[1]), high01 = high32(row[0], row[1]);
    const Pairs low23 = low32(row[2], row[3]), high23 = high32(row[2], row[3]);
    store(to, low64(low01, low23)), store(to + LANES, high64(low01, low23));
    store(to + 2 * LANES, low64(high01, high23)), store(to + 3 * LANES, high64(high01, high23));
  };
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) columns([&](int t) { return keys[t] + offset + d; }, out + d * 16);
  if (d == D) return;
  alignas(16) uint16_t rest[16][8] = {};
  for (int t = 0; t < 16; ++t) std::memcpy(rest[t], keys[t] + offset + d, (D - d) * 2);
  columns([&](int t) { return (const bf16*)rest[t]; }, out + d * 16);
}

// Weights [N, CHUNK] of `count` tokens times 32 C of their values, from `offset` on: [32 C] to each of N places. Of the
// last ones there may be fewer, `numbers`.
template <int N, int C>
__attribute__((noinline)) void weigh(const float* weights, const bf16* const* values, int64_t count, int64_t offset,
                                     int64_t numbers, float* const* out, int64_t v) {
  Floats evens[C][N], odds[C][N];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) evens[c][n] = odds[c][n] = all(0.0f);
  const bool whole = numbers >= C * LANES;
  for (int64_t t = 0; t < count; ++t) {
    const bf16* from = values[t] + offset;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const Pairs value = whole ? pairs(from + c * LANES) : pairs(from, numbers);
      const Floats lower = even(value), upper = odd(value);
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) {
        const Floats weight = all(weights[n * CHUNK + t]);
        evens[c][n] = fma(weight, lower, evens[c][n]);
        odds[c][n] = fma(weight, upper, odds[c][n]);
      }
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      float some[LANES], *to = out[n] + v + c * LANES;
      store_interleaved(whole ? to : some, evens[c][n], odds[c][n]);
      if (!whole) std::copy_n(some, numbers, to);
    }
}

class VectorKernel {
 public:
  explicit VectorKernel(const Attention& of) : of_(of), view_(of.view), reader_(of, CHUNK), width_((of.D + 7) / 8 * 8), own_(Scratch::own(width_)) {}

  // Columns are put in order of their key heads; scores come scaled.
  void pack(const Task& task) {
    const int64_t J = of_.J(), heads = task.set.heads, groups = heads / J;
    each_ = task.count / groups;
    least_ = most_ = view_.position(task.sequence, task.token(0));
    for (int64_t i = 0; i < task.count; ++i) {
      // Where all heads are computed together, the task has whole tokens.
      const int64_t c = groups == 1 ? i : i % each_ / J * heads + i / each_ * J + i % J, m = task.token(c);
      column_[i] = c, stand_[i] = view_.position(task.sequence, m);
      least_ = std::min(least_, stand_[i]), most_ = std::max(most_, stand_[i]);
      const float* from = of_.q + ((view_.query(task.sequence) + m) * of_.H + task.head(c)) * of_.D;
      float* to = own_.queries.data() + i * width_;
      for (int64_t d = 0; d < of_.D; ++d) to[d] = from[d] * of_.scale;
      std::fill(to + of_.D, to + width_, 0.0f);
    }
  }

  void attend(const Stop& now, const Stop& next, float* out, float* most, float* sums) {
    const Task& task = *now.task;
    // Counted from the chunk's first position, wherever the cache begins: lanes are the same for all.
    const int64_t s = task.sequence, base = now.chunk * CHUNK, V = of_.V, groups = task.set.heads / of_.J();
    const int64_t low = std::max({base, view_.first(s), view_.since(least_)}) - base;
    const int64_t high = std::min(base + CHUNK, most_ + 1) - base;
    if (low >= high) {
      std::fill_n(most, task.count, -INF);
      return;
    }
    const int64_t from = low / 16 * 16, to = (high + 15) / 16 * 16;
    float* scores = own_.scores.data();
    const bf16** row = reader_.row;
    reader_.enter(now, next);
    for (int64_t t = from; t < to; t += 16 * SPAN) {
      const int64_t blocks = std::min(SPAN, (to - t) / 16), begin = std::max(t, low), end = std::min(t + 16 * SPAN, high);
      reader_.keys(begin, end);
      // What is not seen of the first and the last sixteen.
      std::fill(row + t, row + begin, row[begin]);
      std::fill(row + end, row + t + 16 * blocks, row[begin]);
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t b = 0; b < blocks; ++b)
          pack_keys(row + t + b * 16, task.set.k + g * of_.row.k_head, of_.D, own_.keys.data() + b * 16 * width_);
        product<false>(own_.keys.data(), blocks, own_.queries.data() + g * each_ * width_, each_, width_, width_,
                       scores + g * each_ * CHUNK + t, CHUNK);
      }
    }
    for (int64_t i = 0; i < task.count; ++i)
      std::tie(most[column_[i]], sums[column_[i]]) = soften(i, base, from, to, scores + i * CHUNK);

    for (int64_t g = 0; g < groups; ++g)
      for (int64_t v = 0; v < V; v += 2 * LANES) {
        const int64_t value = of_.row.v_offset + task.set.v + g * of_.row.v_head + v, numbers = std::min(2 * LANES, V - v);
        reader_.values(low, high, g * of_.row.v_head + v, numbers);
        in_parts<WEIGHED>(each_, [&](int64_t i, auto count) {
          constexpr int N = count, C = 2 * N <= WEIGHED ? 2 : 1;
          float* places[N];
          for (int n = 0; n < N; ++n) places[n] = out + column_[g * each_ + i + n] * V + v;
          const float* weights = scores + (g * each_ + i) * CHUNK + low;
          int64_t n = 0;
          for (; n + C * LANES <= numbers; n += C * LANES)
            weigh<N, C>(weights, row + low, high - low, value + n, numbers - n, places, n);
          for (; n < numbers; n += LANES) weigh<N, 1>(weights, row + low, high - low, value + n, numbers - n, places, n);
        });
      }
  }

 private:
  static constexpr int64_t SPAN = 4;  // times 16 tokens whose keys are packed at a time
#ifdef __AVX512F__
  static constexpr int WEIGHED = 12;  // columns whose sums of values the registers hold
#else
  static constexpr int WEIGHED = 3;
#endif

  // Kept from call to call.
  struct Scratch {
    std::vector<float> queries, scores = std::vector<float>(COLUMNS * CHUNK);
    std::vector<bf16> keys;

    static Scratch& own(int64_t width) {
      static thread_local Scratch scratch;
      scratch.queries.resize(std::max<size_t>(scratch.queries.size(), COLUMNS * width));
      scratch.keys.resize(std::max<size_t>(scratch.keys.size(), SPAN * 16 * width));
      return scratch;
    }
  };

  // Which of the sixteen tokens from `position` on column i sees.
  Bits seen(int64_t i, int64_t position) const {
    return between(view_.since(stand_[i]) - position, stand_[i] + 1 - position);
  }

  // Scores [from, to) of a chunk become weights, not yet divided by their sum; the largest score and the sum.
  std::pair<float, float> soften(int64_t i, int64_t base, int64_t from, int64_t to, float* score) const {
    const Floats none = all(-INF), zero = all(0.0f);
    Floats largest = none, total = zero;
    for (int64_t t = from; t < to; t += 16) {
      const Floats own = select(seen(i, base + t), load(score + t), none);
      store(score + t, own);
      largest = max(largest, own);
    }
    const float top = greatest(largest);
    const Floats shift = all(top == -INF ? 0.0f : top);
    for (int64_t t = from; t < to; t += 16) {
      const Floats own = load(score + t), weight = select(above(own, none), exponential(own - shift), zero);
      store(score + t, weight);
      total = total + weight;
    }
    return {top, sum(total)};
  }

  const Attention& of_;
  const View& view_;
  Reader reader_;
  const int64_t width_;
  Scratch& own_;
  int64_t each_ = 0, least_ = 0, most_ = 0;  // columns of each key head; positions of the first and the last column
  int64_t column_[COLUMNS], stand_[COLUMNS];
};
