// Attention of one task's columns over one chunk of the cache with vectors.
//
// Scores are a product of queries with packed weights (product.h), the weights being keys of 16 tokens, turned so that
// tokens stand in lanes; values are weighted where they lie. Rows of bf16 are widened to fp32, or, where processors are fast
// at it, multiplied as pairs of bf16 with queries and weights that are rounded to it, as tiles do. Rows of int8 are multiplied
// in whole numbers, with queries and weights of 16 bits: sums over a key's codes or a chunk's tokens are exact, and a token's
// scales are multiplied to its scores and to its weights. Legend: as paged_attention.h.
#pragma once
#include "paged_attention.h"
#include "product.h"

// Keys of 16 tokens, numbers [0, D) from `offset` on, packed: out [D / 2, 16, 2], D filled up to eights with zeros.
template <typename T, typename Packed>
void pack_keys(const T* const* keys, int64_t offset, int64_t D, Packed* out) {
  auto columns = [&](auto at, Packed* own) {
    bf16* to = (bf16*)own;
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
  alignas(16) T rest[16][8] = {};
  for (int t = 0; t < 16; ++t) std::memcpy((void*)rest[t], keys[t] + offset + d, (D - d) * sizeof(T));
  columns([&](int t) { return rest[t]; }, out + d * 16);
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

// Of two tokens 32 values side by side, in two parts, and their sums back in order.
inline std::pair<Pairs, Pairs> beside(const int8_t* a, const int8_t* b, int64_t numbers) {
  return {beside(bytes(a, numbers), bytes(b, numbers)), beside(bytes(a + 16, numbers - 16), bytes(b + 16, numbers - 16))};
}
inline void store_in_order(float* to, Ints first, Ints second, const float* scale) {
  store(to, floats(first) * all(*scale)), store(to + 16, floats(second) * all(*scale));
}
#ifdef __AVX512BF16__
inline std::pair<Pairs, Pairs> beside(const bf16* a, const bf16* b, int64_t numbers) {
  const Pairs one = pairs(a, numbers), other = pairs(b, numbers);
  return {even_fours(one, other), odd_fours(one, other)};
}
inline void store_in_order(float* to, Floats first, Floats second, const float*) { store_fours(to, first, second); }
#endif

// As above by pairs of an even number of tokens: of codes in whole numbers, weights being parts of `scale`, or of bf16.
template <int N, int C, typename W, typename T>
__attribute__((noinline)) void weigh(const W* weights, const T* const* values, int64_t count, int64_t offset, int64_t numbers,
                                     float* const* out, int64_t v, const float* scale) {
  using Sum = std::conditional_t<std::is_same_v<T, bf16>, Floats, Ints>;
  Sum first[C][N], second[C][N];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) first[c][n] = second[c][n] = Sum{};
  const bool whole = numbers >= C * LANES;
  for (int64_t t = 0; t < count; t += 2) {
    const T *a = values[t] + offset, *b = values[t + 1] + offset;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c, a += LANES, b += LANES) {
      const auto [low, high] = whole ? beside(a, b, LANES) : beside(a, b, numbers);
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) {
        const Pairs weight = broadcast((const int16_t*)weights + n * CHUNK + t);
        first[c][n] = dot(low, weight, first[c][n]);
        second[c][n] = dot(high, weight, second[c][n]);
      }
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      float some[LANES], *to = out[n] + v + c * LANES;
      store_in_order(whole ? to : some, first[c][n], second[c][n], scale + n);
      if (!whole) std::copy_n(some, numbers, to);
    }
}

// T is what rows are of, and Number what queries and weights are: codes of int8 are multiplied as pairs with int16_t, bf16
// with bf16 or, widened, with float.
template <typename T, typename Number>
class VectorKernel {
 public:
  explicit VectorKernel(const Attention& of)
      : of_(of), view_(of.view), reader_(of, CHUNK, false), width_((of.D + 7) / 8 * 8), own_(Scratch::own(width_, of.G)) {}

  static bool together(const Attention&) { return true; }

  // Columns are put in order of their key heads; scores come scaled.
  void pack(const Task& task) {
    const int64_t J = of_.J(), heads = task.set.heads, groups = heads / J;
    each_ = task.count / groups;
    least_ = most_ = view_.position(task.sequence, task.token(0));
    for (int64_t i = 0; i < task.count; ++i) {
      // Where all heads are computed together, the task has whole tokens.
      const int64_t c = groups == 1 ? i : i % each_ / J * heads + i / each_ * J + i % J, m = task.token(c);
      column_[i] = c, head_[i] = task.head(c) / J, stand_[i] = view_.position(task.sequence, m);
      const bool last = m + 1 == view_.queries(task.sequence);
      shares_[i] = of_.shares && last ? of_.shares->of(task.sequence, task.head(c)) : nullptr;
      least_ = std::min(least_, stand_[i]), most_ = std::max(most_, stand_[i]);
      const float* from = of_.q + ((view_.query(task.sequence) + m) * of_.H + task.head(c)) * of_.D;
      Number* to = own_.queries.data() + i * width_;
      if constexpr (CODES) {
        const Whole whole(from, of_.D);
        scale_[i] = of_.scale * whole.scale;
        for (int64_t d = 0; d < width_; d += 16) store(to + d, whole.of(load(from + d, of_.D - d)));
      } else {
        scale_[i] = of_.scale;
        for (int64_t d = 0; d < of_.D; ++d) to[d] = PAIRS ? from[d] : from[d] * of_.scale;
        std::fill(to + of_.D, to + width_, 0.0f);
      }
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
    const int64_t from = low / 16 * 16, to = (high + 15) / 16 * 16, even = low / 2 * 2;
    float* scores = own_.scores.data();
    const T** row = reader_.row;
    reader_.enter(now, next);
    for (int64_t t = from; t < to; t += 16 * SPAN) {
      const int64_t blocks = std::min(SPAN, (to - t) / 16), begin = std::max(t, low), end = std::min(t + 16 * SPAN, high);
      reader_.keys(begin, end);
      // What is not seen of the first and the last sixteen.
      std::fill(row + t, row + begin, row[begin]);
      std::fill(row + end, row + t + 16 * blocks, row[begin]);
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t b = 0; b < blocks; ++b, reader_.further(), reader_.further())
          pack_keys(row + t + b * 16, task.set.k + g * of_.row.k_head, of_.D, own_.keys.data() + b * 16 * width_);
        product<false>(own_.keys.data(), blocks, own_.queries.data() + g * each_ * width_, each_, width_, width_,
                       scores + g * each_ * CHUNK + t, CHUNK);
      }
    }
    if constexpr (CODES) take_scales(from, to);
    for (int64_t i = 0; i < task.count; ++i)
      std::tie(most[column_[i]], sums[column_[i]]) = softmax_chunk(i, base, from, to, scores + i * CHUNK);

    for (int64_t g = 0; g < groups; ++g)
      for (int64_t v = 0; v < V; v += 2 * LANES) {
        const int64_t value = of_.row.v_offset + task.set.v + g * of_.row.v_head + v, numbers = std::min(2 * LANES, V - v);
        reader_.values(low, high, g * of_.row.v_head + v, numbers);
        // A token without its partner stands in for it: any other row might hold what is no number.
        if (low % 2) row[low - 1] = row[low];
        if (high % 2) row[high] = row[high - 1];
        in_parts<WEIGHED>(each_, [&](int64_t i, auto count) {
          constexpr int N = count, C = 2 * N <= WEIGHED ? 2 : 1;
          float* places[N];
          for (int n = 0; n < N; ++n) places[n] = out + column_[g * each_ + i + n] * V + v;
          auto some = [&](auto lines, int64_t n) {
            const int64_t first = g * each_ + i;
            if constexpr (PAIRS)
              weigh<N, lines>(own_.weights.data() + first * CHUNK + even, row + even, (high - even + 1) / 2 * 2, value + n,
                              numbers - n, places, n, part_ + first);
            else weigh<N, lines>(scores + first * CHUNK + low, row + low, high - low, value + n, numbers - n, places, n);
          };
          int64_t n = 0;
          for (; n + C * LANES <= numbers; n += C * LANES) some(std::integral_constant<int, C>(), n);
          for (; n < numbers; n += LANES) some(std::integral_constant<int, 1>(), n);
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

  static constexpr bool CODES = std::is_same_v<T, int8_t>, PAIRS = !std::is_same_v<Number, float>;
  using Packed = std::conditional_t<CODES, int16_t, bf16>;

  // Kept from call to call.
  struct Scratch {
    std::vector<Number> queries;
    std::vector<Packed> keys;
    std::vector<float> scores = std::vector<float>(COLUMNS * CHUNK), scales;
    std::vector<Number> weights = std::vector<Number>(PAIRS ? COLUMNS * CHUNK : 0);

    static Scratch& own(int64_t width, int64_t heads) {
      static thread_local Scratch scratch;
      scratch.queries.resize(std::max<size_t>(scratch.queries.size(), COLUMNS * width + 16));
      scratch.keys.resize(std::max<size_t>(scratch.keys.size(), SPAN * 16 * width));
      scratch.scales.resize(std::max<size_t>(scratch.scales.size(), CODES * 2 * heads * CHUNK));
      return scratch;
    }
  };

  // Scales of tokens [from, to) of a chunk: [keys and values, key heads, CHUNK].
  void take_scales(int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
      const bf16* scale = (const bf16*)(reader_.row[t] + of_.rows.scales());
      for (int64_t i = 0; i < 2 * of_.G; ++i) own_.scales[i * CHUNK + t] = scale[i];
    }
  }

  // Which of the sixteen tokens from `position` on column i sees.
  Bits seen(int64_t i, int64_t position) const {
    return between(view_.since(stand_[i]) - position, stand_[i] + 1 - position);
  }

  // Scores [from, to) of a chunk become weights, not yet divided by their sum; the largest score and the sum. Pairs have
  // theirs rounded after that: to bf16, or of codes, after the scales of their values, to whole numbers, the largest 32767
  // times `part_`.
  std::pair<float, float> softmax_chunk(int64_t i, int64_t base, int64_t from, int64_t to, float* score) {
    const Floats none = all(-INF), zero = all(0.0f);
    Floats largest = none, total = zero;
    const float *key = nullptr, *value = nullptr;
    if constexpr (CODES) key = own_.scales.data() + head_[i] * CHUNK, value = key + of_.G * CHUNK;
    for (int64_t t = from; t < to; t += 16) {
      Floats own = load(score + t);
      if constexpr (CODES) own = own * load(key + t);
      if constexpr (PAIRS) own = own * all(scale_[i]);
      own = select(seen(i, base + t), own, none);
      store(score + t, own);
      largest = max(largest, own);
    }
    const float top = greatest(largest);
    const Floats shift = all(top == -INF ? 0.0f : top);
    Floats heaviest = zero, sums = zero;
    float* shares = shares_[i] ? shares_[i] + base : nullptr;
    if (shares) of_.shares->top(shares) = top;
    for (int64_t t = from; t < to; t += 16) {
      const Floats own = load(score + t);
      const Bits bits = above(own, none);
      reader_.further();
      Floats weight = select(bits, exponential(own - shift), zero);
      total = total + weight;
      if (shares) store(shares + t, weight);
      if constexpr (CODES) {
        weight = select(bits, weight * load(value + t), zero);
        heaviest = max(heaviest, weight), sums = sums + weight;
      }
      if constexpr (PAIRS && !CODES) narrow(own_.weights.data() + i * CHUNK + t, weight, 16);
      else store(score + t, weight);
    }
    if constexpr (CODES) {
      // What is no number shows in the sum.
      const float most = greatest(heaviest) + 0.0f * sum(sums);
      const Floats factor = all(std::min(32767.0f / most, 1e38f));
      part_[i] = most / 32767.0f;
      for (int64_t t = from; t < to; t += 16) store(own_.weights.data() + i * CHUNK + t, load(score + t) * factor);
    }
    return {top, sum(total)};
  }

  const Attention& of_;
  const View& view_;
  Reader<T> reader_;
  const int64_t width_;
  Scratch& own_;
  int64_t each_ = 0, least_ = 0, most_ = 0;  // columns of each key head; positions of the first and the last column
  int64_t column_[COLUMNS], stand_[COLUMNS], head_[COLUMNS];
  float* shares_[COLUMNS];  // where a column's weights are kept, if anywhere
  float scale_[COLUMNS], part_[COLUMNS];  // what scores and, of codes, weights are multiplied by
};
