// Attention of one task's columns over one chunk of the cache, with vectors.
//
// Scores are the product of queries with packed keys (product.h) of 16 tokens, transposed so that tokens are lanes. Values
// are weighted in place. bf16 rows are widened to fp32, or, if the processor is fast at it, multiplied as pairs of bf16 with
// queries and weights rounded to bf16, as in tiles. int8 rows are multiplied in integers, with 16-bit queries and weights:
// sums over a key's codes or a chunk's tokens are exact, and a token's scales are multiplied into its scores and its
// weights. Legend: as in paged_attention.h.
#pragma once
#include "attention/paged_attention.h"
#include "linear/product.h"

// Packs keys of 16 tokens, elements [offset, offset + D): out [D / 2, 16, 2], D zero-padded to a multiple of 8.
template <typename T, typename Packed>
void pack_keys(const T* const* keys, int64_t offset, int64_t D, Packed* out) {
  auto transpose = [&](auto at, Packed* packed16) {
    bf16* to = (bf16*)packed16;
    Pairs row[4];
    for (int t = 0; t < 4; ++t) row[t] = gather_four(at(t), at(t + 4), at(t + 8), at(t + 12));
    const Pairs low01 = low32(row[0], row[1]), high01 = high32(row[0], row[1]);
    const Pairs low23 = low32(row[2], row[3]), high23 = high32(row[2], row[3]);
    store(to, low64(low01, low23)), store(to + LANES, high64(low01, low23));
    store(to + 2 * LANES, low64(high01, high23)), store(to + 3 * LANES, high64(high01, high23));
  };
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) transpose([&](int t) { return keys[t] + offset + d; }, out + d * 16);
  if (d == D) return;
  alignas(16) T tail[16][8] = {};
  for (int t = 0; t < 16; ++t) std::memcpy((void*)tail[t], keys[t] + offset + d, (D - d) * sizeof(T));
  transpose([&](int t) { return tail[t]; }, out + d * 16);
}

// Weights [N, CHUNK] of `count` tokens times up to 32 C elements of their values, `width`, from `offset` on: writes them to
// N outputs.
template <int N, int C>
__attribute__((noinline)) void weighted_sum(const float* weights, const bf16* const* values, int64_t count, int64_t offset,
                                            int64_t width, float* const* out, int64_t v) {
  Floats evens[C][N], odds[C][N];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) evens[c][n] = odds[c][n] = splat(0.0f);
  const bool full = width >= C * LANES;
  auto sum = [&](auto load) {
    for (int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        auto add = [&](auto half, Floats* sums) {
          const float* weight = reloaded(weights + t);
          const Floats value = half(load(reloaded(values[t] + offset + c * LANES)));
#pragma GCC unroll 12
          for (int n = 0; n < N; ++n) sums[n] = fma(splat(weight[n * CHUNK]), value, sums[n]);
        };
        add([](Pairs p) { return even(p); }, evens[c]), add([](Pairs p) { return odd(p); }, odds[c]);
      }
    }
  };
  full ? sum([](const bf16* from) { return pairs(from); }) : sum([&](const bf16* from) { return pairs(from, width); });
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      float buffer[LANES], *to = out[n] + v + c * LANES;
      store_interleaved(full ? to : buffer, evens[c][n], odds[c][n]);
      if (!full) std::copy_n(buffer, width, to);
    }
}

// Interleaves 32 values of two tokens, in two parts; and stores their sums in the original order.
inline std::pair<Pairs, Pairs> interleave(const int8_t* a, const int8_t* b, int64_t width) {
  return {interleave(bytes(a, width), bytes(b, width)), interleave(bytes(a + 16, width - 16), bytes(b + 16, width - 16))};
}
inline void store_in_order(float* to, Ints first, Ints second, const float* scale) {
  store(to, floats(first) * splat(*scale)), store(to + 16, floats(second) * splat(*scale));
}
#ifdef __AVX512BF16__
inline std::pair<Pairs, Pairs> interleave(const bf16* a, const bf16* b, int64_t width) {
  const Pairs first = pairs(a, width), second = pairs(b, width);
  return {even_fours(first, second), odd_fours(first, second)};
}
inline void store_in_order(float* to, Floats first, Floats second, const float*) { store_fours(to, first, second); }
#endif

// As above on pairs of an even number of tokens: int8 codes with integer weights in units of `scale`, or bf16.
template <int N, int C, typename W, typename T>
__attribute__((noinline)) void weighted_sum(const W* weights, const T* const* values, int64_t count, int64_t offset,
                                            int64_t width, float* const* out, int64_t v, const float* scale) {
  using Sum = std::conditional_t<std::is_same_v<T, bf16>, Floats, Ints>;
  Sum first[C][N], second[C][N];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) first[c][n] = second[c][n] = Sum{};
  const bool full = width >= C * LANES;
  for (int64_t t = 0; t < count; t += 2) {
    const T *a = values[t] + offset, *b = values[t + 1] + offset;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c, a += LANES, b += LANES) {
      const auto [low, high] = full ? interleave(a, b, LANES) : interleave(a, b, width);
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
      float buffer[LANES], *to = out[n] + v + c * LANES;
      store_in_order(full ? to : buffer, first[c][n], second[c][n], scale + n);
      if (!full) std::copy_n(buffer, width, to);
    }
}

// T: element type of the rows; Operand: of queries and weights. int8 codes are multiplied as pairs with int16_t; bf16 with
// bf16 or, widened, with float.
template <typename T, typename Operand>
class VectorKernel {
 public:
  explicit VectorKernel(const Attention& attention)
      : attention_(attention), view_(attention.view), reader_(attention, CHUNK, false), width_((attention.D + 7) / 8 * 8),
        scales_offset_(CODES ? attention.rows.codes()->scales_offset : 0),
        queries_(scratch_.get<Operand>(COLUMNS * width_)), keys_(scratch_.get<Packed>(SPAN * 16 * width_)),
        scores_(scratch_.get<float>(COLUMNS * CHUNK)),
        weights_(PAIRS ? scratch_.get<Operand>(COLUMNS * CHUNK) : nullptr),
        scales_(CODES ? scratch_.get<float>(2 * attention.G * CHUNK) : nullptr) {}

  static bool fuses_heads(const Attention&) { return true; }

  // Packs the queries, columns grouped by KV head. Stores the factors of their scores.
  void pack(const Task& task) {
    const int64_t J = attention_.J(), heads = task.set.heads, groups = heads / J;
    columns_per_head_ = task.count / groups;
    first_position_ = last_position_ = view_.position(task.sequence, task.token(0));
    for (int64_t i = 0; i < task.count; ++i) {
      // If all heads are computed together, the task has whole tokens.
      const int64_t c = groups == 1 ? i : i % columns_per_head_ / J * heads + i / columns_per_head_ * J + i % J;
      const int64_t m = task.token(c);
      column_[i] = c, head_[i] = task.head(c) / J, position_[i] = view_.position(task.sequence, m);
      const bool last = m + 1 == view_.queries(task.sequence);
      probe_weights_[i] = attention_.probe && last ? attention_.probe->for_head(task.sequence, task.head(c)) : nullptr;
      first_position_ = std::min(first_position_, position_[i]), last_position_ = std::max(last_position_, position_[i]);
      const float* from = attention_.q + ((view_.query(task.sequence) + m) * attention_.H + task.head(c)) * attention_.D;
      Operand* to = queries_ + i * width_;
      if constexpr (CODES) {
        const Int16Quantizer quantizer(from, attention_.D);
        scale_[i] = attention_.scale * quantizer.scale;
        for (int64_t d = 0; d < width_; d += 16) store(to + d, quantizer.quantized(load(from + d, attention_.D - d)));
      } else {
        scale_[i] = attention_.scale;
        for (int64_t d = 0; d < attention_.D; ++d) to[d] = PAIRS ? from[d] : from[d] * attention_.scale;
        std::fill(to + attention_.D, to + width_, 0.0f);
      }
    }
  }

  void attend(const TaskChunk& current, const TaskChunk& next, float* out, float* maxima, float* sums) {
    const Task& task = *current.task;
    // Relative to the chunk's first position, even if the cache begins later: lanes are the same for all views.
    const int64_t s = task.sequence, base = current.chunk * CHUNK, V = attention_.V, groups = task.set.heads / attention_.J();
    const int64_t low = std::max({base, view_.first(s), view_.window_begin(first_position_)}) - base;
    const int64_t high = std::min(base + CHUNK, last_position_ + 1) - base;
    if (low >= high) {
      std::fill_n(maxima, task.count, -INF);
      return;
    }
    const int64_t from = low / 16 * 16, to = (high + 15) / 16 * 16, first_even = low / 2 * 2;
    float* scores = scores_;
    const T** row = reader_.row;
    reader_.begin_chunk(current, next);
    for (int64_t t = from; t < to; t += 16 * SPAN) {
      const int64_t blocks = std::min(SPAN, (to - t) / 16), begin = std::max(t, low), end = std::min(t + 16 * SPAN, high);
      reader_.keys(begin, end);
      // Rows that are not visible in the first and the last 16.
      std::fill(row + t, row + begin, row[begin]);
      std::fill(row + end, row + t + 16 * blocks, row[begin]);
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t b = 0; b < blocks; ++b, reader_.prefetch_step(), reader_.prefetch_step())
          pack_keys(row + t + b * 16, task.set.k + g * attention_.row.k_head, attention_.D,
                    keys_ + b * 16 * width_);
        product<false>(keys_, blocks, queries_ + g * columns_per_head_ * width_, columns_per_head_, width_, width_,
                       scores + g * columns_per_head_ * CHUNK + t, CHUNK);
      }
    }
    if constexpr (CODES) load_scales(from, to);
    for (int64_t i = 0; i < task.count; ++i)
      std::tie(maxima[column_[i]], sums[column_[i]]) = softmax_chunk(i, base, from, to, scores + i * CHUNK);

    for (int64_t g = 0; g < groups; ++g)
      for (int64_t v = 0; v < V; v += 2 * LANES) {
        const int64_t value = attention_.row.v_offset + task.set.v + g * attention_.row.v_head + v;
        const int64_t width = std::min(2 * LANES, V - v);
        reader_.values(low, high, g * attention_.row.v_head + v, width);
        // A token without a partner is paired with itself: another row might be NaN.
        if (low % 2) row[low - 1] = row[low];
        if (high % 2) row[high] = row[high - 1];
        run_in_batches<SUM_COLUMNS>(columns_per_head_, [&](int64_t i, auto count) {
          constexpr int N = count, C = 2 * N <= SUM_COLUMNS ? 2 : 1;
          float* places[N];
          for (int n = 0; n < N; ++n) places[n] = out + column_[g * columns_per_head_ + i + n] * V + v;
          auto sum_lines = [&](auto lines, int64_t n) {
            const int64_t first = g * columns_per_head_ + i;
            if constexpr (PAIRS)
              weighted_sum<N, lines>(weights_ + first * CHUNK + first_even, row + first_even,
                                     (high - first_even + 1) / 2 * 2, value + n, width - n, places, n,
                                     weight_scale_ + first);
            else weighted_sum<N, lines>(scores + first * CHUNK + low, row + low, high - low, value + n, width - n, places, n);
          };
          int64_t n = 0;
          for (; n + C * LANES <= width; n += C * LANES) sum_lines(std::integral_constant<int, C>(), n);
          for (; n < width; n += LANES) sum_lines(std::integral_constant<int, 1>(), n);
        });
      }
  }

 private:
  static constexpr int64_t SPAN = 4;  // times 16 tokens whose keys are packed at a time
#ifdef __AVX512F__
  static constexpr int SUM_COLUMNS = 12;  // columns per pass over the values: as many accumulators as there are registers
#else
  static constexpr int SUM_COLUMNS = 3;
#endif

  static constexpr bool CODES = std::is_same_v<T, int8_t>, PAIRS = !std::is_same_v<Operand, float>;
  using Packed = std::conditional_t<CODES, int16_t, bf16>;

  // Scales of tokens [from, to) of a chunk: [keys and values, KV heads, CHUNK].
  void load_scales(int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
      const bf16* scale = (const bf16*)(reader_.row[t] + scales_offset_);
      for (int64_t i = 0; i < 2 * attention_.G; ++i) scales_[i * CHUNK + t] = scale[i];
    }
  }

  // Which of the 16 tokens from `position` on column i sees.
  Bits visible(int64_t i, int64_t position) const {
    return lanes_between(view_.window_begin(position_[i]) - position, position_[i] + 1 - position);
  }

  // Turns scores [from, to) of a chunk into unnormalized weights. Returns the largest score and the sum. For pairs, weights
  // are rounded after the sum: to bf16, or, for codes, multiplied by the scales of their values and rounded to integers, in
  // units of `weight_scale_`, the largest being 32767.
  std::pair<float, float> softmax_chunk(int64_t i, int64_t base, int64_t from, int64_t to, float* score) {
    const Floats minus_inf = splat(-INF), zero = splat(0.0f);
    Floats largest = minus_inf, total = zero;
    const float *key_scales = nullptr, *value_scales = nullptr;
    if constexpr (CODES)
      key_scales = scales_ + head_[i] * CHUNK, value_scales = key_scales + attention_.G * CHUNK;
    for (int64_t t = from; t < to; t += 16) {
      Floats logits = load(score + t);
      if constexpr (CODES) logits = logits * load(key_scales + t);
      if constexpr (PAIRS) logits = logits * splat(scale_[i]);
      logits = select(visible(i, base + t), logits, minus_inf);
      store(score + t, logits);
      largest = max(largest, logits);
    }
    const float peak = reduce_max(largest);
    const Floats shift = splat(peak == -INF ? 0.0f : peak);
    Floats largest_weight = zero, weight_sum = zero;
    float* probe_weights = probe_weights_[i] ? probe_weights_[i] + base : nullptr;
    if (probe_weights) attention_.probe->max_of(probe_weights) = peak;
    for (int64_t t = from; t < to; t += 16) {
      const Floats logits = load(score + t);
      const Bits bits = greater(logits, minus_inf);
      reader_.prefetch_step();
      Floats weight = select(bits, exponential(logits - shift), zero);
      total = total + weight;
      if (probe_weights) store(probe_weights + t, weight);
      if constexpr (CODES) {
        weight = select(bits, weight * load(value_scales + t), zero);
        largest_weight = max(largest_weight, weight), weight_sum = weight_sum + weight;
      }
      if constexpr (PAIRS && !CODES) narrow(weights_ + i * CHUNK + t, weight, 16);
      else store(score + t, weight);
    }
    if constexpr (CODES) {
      // NaN must propagate, which the maximum alone does not do.
      const float weight_max = reduce_max(largest_weight) + 0.0f * reduce_add(weight_sum);
      const Floats factor = splat(std::min(32767.0f / weight_max, 1e38f));
      weight_scale_[i] = weight_max / 32767.0f;
      for (int64_t t = from; t < to; t += 16) store(weights_ + i * CHUNK + t, load(score + t) * factor);
    }
    return {peak, reduce_add(total)};
  }

  const Attention& attention_;
  const View& view_;
  RowReader<T> reader_;
  const int64_t width_, scales_offset_;
  Scratch scratch_;
  Operand* const queries_;
  Packed* const keys_;
  float* const scores_;
  Operand* const weights_;  // of pairs
  float* const scales_;  // of codes: keys and values, KV heads, CHUNK
  // columns per KV head; first and last position of the columns
  int64_t columns_per_head_ = 0, first_position_ = 0, last_position_ = 0;
  int64_t column_[COLUMNS], position_[COLUMNS], head_[COLUMNS];
  float* probe_weights_[COLUMNS];  // per column, where its weights are recorded, or null
  float scale_[COLUMNS], weight_scale_[COLUMNS];  // factors of the scores and, for codes, of the weights
};
