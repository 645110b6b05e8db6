// Rows times packed weights with vectors: what linear layers, and attention's scores, are made of.
//
// Legend: N rows, K input width, M output width.
#pragma once
#include <utility>

#include "vectors.h"

// Rows that share one pass over weights: as many as registers hold sums of. Sixteen outputs of a row are one sum, taken
// over the inputs in their order, so that it does not depend on the rows and outputs that are computed with it.
#ifdef __AVX512F__
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif

// Blocks of 16 outputs that are computed side by side: a sum that waits for itself is slower than memory, and eight
// are ready in time.
constexpr int blocks_beside(int rows) {
#ifdef __AVX512F__
  return rows == 1 ? 8 : rows <= 6 ? 4 : 2;
#else
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}
constexpr int MOST_BLOCKS = blocks_beside(1);

// Weights are packed [M / 16, K / 2, 16, 2]: sixteen pairs are two inputs of 16 outputs, so a block is one stretch of
// memory read in order, and no sum runs across lanes. They are widened here, because processors multiply pairs of bf16
// at half the rate of fp32. FAR: weights come from memory, whose own prefetcher stops at the end of a page. They are
// fetched to the second cache: eight streams whole pages apart would evict each other from a first one of eight ways.
template <int N, int B, bool FAR>
__attribute__((noinline)) void multiply(const bf16* w, const float* x, int64_t stride, int64_t K, float* out, int64_t to) {
  Floats sums[B][N];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) sums[b][n] = all(0.0f);
  const int64_t step = K * 16;
  for (int64_t k = 0; k < K; k += 2, w += LANES, x += 2) {
    Pairs pair[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      pair[b] = pairs(w + b * step);
      if constexpr (FAR) _mm_prefetch((const char*)(w + b * step + 32 * LANES), _MM_HINT_T1);
    }
    auto add = [&](auto half, int64_t offset) {
      Floats weight[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) weight[b] = half(pair[b]);
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) {
        const Floats input = all(x[n * stride + offset]);
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) sums[b][n] = fma(weight[b], input, sums[b][n]);
      }
    };
    add([](Pairs p) { return even(p); }, 0);
    add([](Pairs p) { return odd(p); }, 1);
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) store(out + n * to + b * 16, sums[b][n]);
}

constexpr int64_t AHEAD = 64;  // registers of a block that are asked for before they are multiplied

// As above, pairs being multiplied as they are: of whole numbers, whose sums are exact while they fit 32 bits, or of bf16.
template <int N, int B, bool FAR, typename T>
__attribute__((noinline)) void multiply(const T* w, const T* x, int64_t stride, int64_t K, float* out, int64_t to) {
  using Sum = std::conditional_t<std::is_same_v<T, bf16>, Floats, Ints>;
  Sum sums[B][N];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) sums[b][n] = Sum{};
  const int64_t step = K * 16, last = K - 2 * AHEAD;
  for (int64_t k = 0; k < K; k += 2, w += LANES, x += 2) {
    Pairs pair[B];
    // Behind a block's end lie those that are read beside it, and then the ones that are next.
    const T* ahead = w + AHEAD * LANES + (k < last ? 0 : (B - 1) * step);
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      pair[b] = pairs((const bf16*)w + b * step);
      if constexpr (FAR) _mm_prefetch((const char*)(ahead + b * step), _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      const Pairs input = broadcast((const int16_t*)x + n * stride);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sums[b][n] = dot(pair[b], input, sums[b][n]);
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) store(out + n * to + b * 16, floats(sums[b][n]));
}

// Calls f(first, how many as a type) for `count` things, at most MOST at a time and as evenly as it goes.
template <int MOST, typename F>
void in_parts(int64_t count, F&& f) {
  const int64_t parts = (count + MOST - 1) / MOST;
  for (int64_t part = 0, at = 0; part < parts; ++part) {
    const int64_t own = (count - at + parts - part - 1) / (parts - part);
    [&]<size_t... I>(std::index_sequence<I...>) {
      (void)((own == I + 1 && (f(at, std::integral_constant<int, I + 1>()), true)) || ...);
    }(std::make_index_sequence<MOST>());
    at += own;
  }
}

// x [N, K], rows `stride` apart, times `blocks` of weights: out [N, 16 blocks], rows `to` apart. K is even.
template <bool FAR, typename W, typename X>
void product(const W* w, int64_t blocks, const X* x, int64_t N, int64_t stride, int64_t K, float* out, int64_t to) {
  in_parts<ROWS>(N, [&](int64_t n, auto count) {
    constexpr int R = count, B = blocks_beside(R);
    const X* rows = x + n * stride;
    float* own = out + n * to;
    int64_t b = 0;
    auto some = [&](auto width) {
      for (; b + width <= blocks; b += width) multiply<R, width, FAR>(w + b * 16 * K, rows, stride, K, own + b * 16, to);
    };
    some(std::integral_constant<int, B>());
    if constexpr (B > 4) some(std::integral_constant<int, 4>());
    if constexpr (B > 2) some(std::integral_constant<int, 2>());
    if constexpr (B > 1) some(std::integral_constant<int, 1>());
  });
}

// A few rows of x times packed weights that lie in a cache: y [rows, M], `to` numbers from one row to the next.
inline void product(const bf16* w, const float* x, int64_t rows, int64_t stride, int64_t K, int64_t M, float* y, int64_t to) {
  const int64_t whole = M / 16, rest = M % 16;
  product<false>(w, whole, x, rows, stride, K, y, to);
  float part[ROWS * 16];
  for (int64_t n = 0; rest && n < rows; n += ROWS) {
    const int64_t count = std::min<int64_t>(ROWS, rows - n);
    product<false>(w + whole * 16 * K, 1, x + n * stride, count, stride, K, part, 16);
    for (int64_t r = 0; r < count; ++r) std::copy_n(part + r * 16, rest, y + (n + r) * to + whole * 16);
  }
}
