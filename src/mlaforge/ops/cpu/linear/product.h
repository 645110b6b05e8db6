// Rows times packed weights with vectors: the inner kernel of linear layers and of attention scores.
//
// Legend: N rows, K input width, M output width.
#pragma once
#include <utility>

#include "simd/vectors.h"

// Rows per pass over the weights: as many accumulators as there are registers. An accumulator has 16 outputs of a row and
// sums over the inputs in order, so it does not depend on the other rows and outputs.
#ifdef __AVX512F__
constexpr int ROWS = 12;
#else
constexpr int ROWS = 5;  // a sixth would spill accumulators
#endif

// Blocks of 16 outputs per pass: dependent additions are slower than memory, and eight independent accumulators hide their
// latency.
constexpr int blocks_per_pass(int rows) {
#ifdef __AVX512F__
  return rows == 1 ? 8 : rows <= 6 ? 4 : 2;
#else
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}
constexpr int MAX_BLOCKS = blocks_per_pass(1);

// Weights are packed [M / 16, K / 2, 16, 2]: 16 pairs are two inputs of 16 outputs, so a block is read sequentially, and no
// sum crosses lanes. They are widened here, because processors multiply pairs of bf16 at half the rate of fp32. FAR: weights
// come from memory and are prefetched, `ahead` elements before they are read, because the hardware prefetcher stops at page
// boundaries; into L2, because eight streams at page-sized distances would evict each other from an 8-way L1.
template <int N, int B, bool FAR>
__attribute__((noinline)) void multiply(const bf16* w, const float* x, int64_t stride, int64_t K, float* out,
                                        int64_t out_stride, int64_t ahead) {
  Floats sums[B][N];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) sums[b][n] = splat(0.0f);
  const int64_t step = K * 16;
  for (int64_t k = 0; k < K; k += 2, w += LANES, x += 2) {
    Pairs pair[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      pair[b] = pairs(w + b * step);
      if constexpr (FAR) _mm_prefetch((const char*)(w + b * step + ahead), _MM_HINT_T1);
    }
    auto add = [&](auto half, int64_t offset) {
      Floats weight[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) weight[b] = half(pair[b]);
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) {
        const Floats input = splat(x[n * stride + offset]);
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
    for (int b = 0; b < B; ++b) store(out + n * out_stride + b * 16, sums[b][n]);
}

// As above, on pairs: 16-bit integers, whose sums are exact within 32 bits, or bf16.
template <int N, int B, bool FAR, typename T>
__attribute__((noinline)) void multiply(const T* w, const T* x, int64_t stride, int64_t K, float* out, int64_t out_stride,
                                        int64_t ahead) {
  using Sum = std::conditional_t<std::is_same_v<T, bf16>, Floats, Ints>;
  Sum sums[B][N];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) sums[b][n] = Sum{};
  const int64_t step = K * 16, last = K - ahead / 16;
  for (int64_t k = 0; k < K; k += 2, w += LANES, x += 2) {
    Pairs pair[B];
    // After a block's end follow the blocks of the same pass, then those of the next pass.
    const T* next = w + ahead + (k < last ? 0 : (B - 1) * step);
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      pair[b] = pairs((const bf16*)w + b * step);
      if constexpr (FAR) _mm_prefetch((const char*)(next + b * step), _MM_HINT_T1);
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
    for (int b = 0; b < B; ++b) store(out + n * out_stride + b * 16, floats(sums[b][n]));
}

// Calls f(first, size as a compile-time constant) for batches of `count` items, of at most MAX each and of even sizes.
template <int MAX, typename F>
void run_in_batches(int64_t count, F&& f) {
  const int64_t parts = (count + MAX - 1) / MAX;
  for (int64_t part = 0, at = 0; part < parts; ++part) {
    const int64_t size = (count - at + parts - part - 1) / (parts - part);
    [&]<size_t... I>(std::index_sequence<I...>) {
      (void)((size == I + 1 && (f(at, std::integral_constant<int, I + 1>()), true)) || ...);
    }(std::make_index_sequence<MAX>());
    at += size;
  }
}

// x [N, K], rows `stride` apart, times `blocks` blocks of weights: out [N, 16 blocks], rows `out_stride` apart. K is even.
template <bool FAR, typename W, typename X>
void product(const W* w, int64_t blocks, const X* x, int64_t N, int64_t stride, int64_t K, float* out, int64_t out_stride,
             int64_t ahead = 0) {
  run_in_batches<ROWS>(N, [&](int64_t n, auto count) {
    constexpr int R = count, B = blocks_per_pass(R);
    const X* rows = x + n * stride;
    float* out_rows = out + n * out_stride;
    int64_t b = 0;
    auto run_blocks = [&](auto width) {
      for (; b + width <= blocks; b += width)
        multiply<R, width, FAR>(w + b * 16 * K, rows, stride, K, out_rows + b * 16, out_stride, ahead);
    };
    run_blocks(std::integral_constant<int, B>());
    if constexpr (B > 4) run_blocks(std::integral_constant<int, 4>());
    if constexpr (B > 2) run_blocks(std::integral_constant<int, 2>());
    if constexpr (B > 1) run_blocks(std::integral_constant<int, 1>());
  });
}

// A few rows of x times packed weights that are in the cache: y [rows, M], rows `y_stride` apart.
inline void product(const bf16* w, const float* x, int64_t rows, int64_t stride, int64_t K, int64_t M, float* y,
                    int64_t y_stride) {
  const int64_t whole = M / 16, rest = M % 16;
  product<false>(w, whole, x, rows, stride, K, y, y_stride);
  float part[ROWS * 16];
  for (int64_t n = 0; rest && n < rows; n += ROWS) {
    const int64_t count = std::min<int64_t>(ROWS, rows - n);
    product<false>(w + whole * 16 * K, 1, x + n * stride, count, stride, K, part, 16);
    for (int64_t r = 0; r < count; ++r) std::copy_n(part + r * 16, rest, y + (n + r) * y_stride + whole * 16);
  }
}
