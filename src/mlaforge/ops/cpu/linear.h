// Rows times a weight matrix.
//
// Legend: N rows, K input width, M output width.
#pragma once
#include "tiles.h"
#include "vectors.h"

constexpr int64_t TILE = 8;  // rows of x that share one pass over a block of weights

// A block of 16 outputs for N rows of x. Weights are packed [M / 16, K / 2, 16, 2]: one vector holds two inputs of 16
// outputs, so a block is one stretch of memory read in order, and no sum runs across lanes. With few rows several sums
// run side by side, because one that waits for itself is slower than memory.
template <int N>
void block(const bf16* w, const float* x, int64_t stride, int64_t K, float* out) {
  // The processor multiplies bf16 pairs at half the rate of fp32, so weights are widened: a shift and a mask.
  constexpr int U = N <= 2 ? 4 : N <= 4 ? 2 : 1;
  __m512 acc[U][N];
  for (int u = 0; u < U; ++u)
    for (int n = 0; n < N; ++n) acc[u][n] = _mm512_setzero_ps();
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const int64_t pairs = K / 2;
  auto pair = [&](int64_t k, __m512* sum) {
    const __m512i row = _mm512_loadu_si512(w + k * LANES);
    // The processor's own prefetcher stops at the end of a page.
    _mm_prefetch((const char*)(w + (k + 32) * LANES), _MM_HINT_T0);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(row, high));
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[n * stride + 2 * k]), sum[n]);
      sum[n] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[n * stride + 2 * k + 1]), sum[n]);
    }
  };
  int64_t k = 0;
  for (; k + U <= pairs; k += U)
    for (int u = 0; u < U; ++u) pair(k + u, acc[u]);
  for (; k < pairs; ++k) pair(k, acc[0]);
  for (int n = 0; n < N; ++n) {
    for (int u = 1; u < U; ++u) acc[0][n] = _mm512_add_ps(acc[0][n], acc[u][n]);
    _mm512_storeu_ps(out + n * 16, acc[0][n]);
  }
}

using Block = void (*)(const bf16*, const float*, int64_t, int64_t, float*);
constexpr Block BLOCKS[TILE] = {block<1>, block<2>, block<3>, block<4>, block<5>, block<6>, block<7>, block<8>};

// Up to 32 rows of x times two blocks of weights with tiles, into y [32, 32]. `x_end` and `w_end` stand in for what is
// left of K after the last 32 numbers, filled up with zeros: [32, 32] of x, [16, 32] of each block.
template <bool TWO>
WITH_TILES void tile_product(const bf16* w0, const bf16* w1, const bf16* x, int64_t K, const bf16* x_end,
                             const bf16* w_end, float* y) {
  memory_is_read();
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  int64_t k = 0;
  for (; k + 32 <= K; k += 32) {
    _tile_loadd(6, w0 + k * 16, 64);
    _tile_loadd(7, w1 + k * 16, 64);
    _tile_loadd(4, x + k, K * 2);
    if (TWO) {
      _tile_loadd(5, x + 16 * K + k, K * 2);
    } else {
      // Few rows: reading the weights is all that counts, and the prefetcher stops at the end of a page.
      for (int64_t line = 0; line < 16; ++line) {
        _mm_prefetch((const char*)(w0 + (k + 128) * 16 + line * 32), _MM_HINT_T0);
        _mm_prefetch((const char*)(w1 + (k + 128) * 16 + line * 32), _MM_HINT_T0);
      }
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) _tile_dpbf16ps(2, 5, 6);
    if (TWO) _tile_dpbf16ps(3, 5, 7);
  }
  if (k < K) {
    _tile_loadd(6, w_end, 64);
    _tile_loadd(7, w_end + 16 * 32, 64);
    _tile_loadd(4, x_end, 64);
    if (TWO) _tile_loadd(5, x_end + 16 * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) _tile_dpbf16ps(2, 5, 6);
    if (TWO) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, 128);
  _tile_stored(1, y + 16, 128);
  if (TWO) _tile_stored(2, y + 16 * 32, 128);
  if (TWO) _tile_stored(3, y + 16 * 32 + 16, 128);
}

// What is added to a product on its way out, and where it goes.
struct Sink {
  const bf16 *bias, *plus;
  bf16* out;
  int64_t M;

  // Outputs m to m + 15 of row n.
  void put(int64_t n, int64_t m, __m512 y) const {
    const __mmask16 mask = tail16(M - m);
    if (bias) y = _mm512_add_ps(y, widened(bias + m, mask));
    if (plus) y = _mm512_add_ps(y, widened(plus + n * M + m, mask));
    _mm256_mask_storeu_epi16(out + n * M + m, mask, narrowed(y));
  }
};

// With tiles: 512 products a cycle and core, so that only long stretches of rows are limited by arithmetic.
void linear_by_tiles(const bf16* x, const bf16* w, int64_t N, int64_t K, int64_t blocks, const Sink& sink) {
  const int64_t rest = K % 32;
  at::parallel_for(0, (blocks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float y[32 * 32];
    alignas(64) bf16 x_end[32 * 32], w_end[2 * 16 * 32];
    std::fill_n(x_end, 32 * 32, bf16(0.0f));
    std::fill_n(w_end, 2 * 16 * 32, bf16(0.0f));
    int64_t shaped = -1;
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t b = 2 * pair;
      const bf16 *w0 = w + b * 16 * K, *w1 = b + 1 < blocks ? w0 + 16 * K : w0;
      if (rest) {
        std::copy_n(w0 + (K - rest) * 16, rest * 16, w_end);
        std::copy_n(w1 + (K - rest) * 16, rest * 16, w_end + 16 * 32);
      }
      for (int64_t n = 0; n < N; n += 32) {
        const int64_t rows = std::min<int64_t>(32, N - n), first = std::min<int64_t>(16, rows);
        if (rows != shaped) shape_tiles(first, rows - first), shaped = rows;
        for (int64_t r = 0; rest && r < rows; ++r) std::copy_n(x + (n + r) * K + K - rest, rest, x_end + r * 32);
        (rows > 16 ? tile_product<true> : tile_product<false>)(w0, w1, x + n * K, K, x_end, w_end, y);
        for (int64_t r = 0; r < rows; ++r) {
          sink.put(n + r, b * 16, _mm512_load_ps(y + r * 32));
          if (b + 1 < blocks) sink.put(n + r, b * 16 + 16, _mm512_load_ps(y + r * 32 + 16));
        }
      }
    }
    release_tiles();
  });
}

// With vectors: weights are widened in registers, so that the product of many rows is limited by fp32 arithmetic.
void linear_by_vectors(const float* x, const bf16* w, int64_t N, int64_t K, int64_t blocks, const Sink& sink) {
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    float y[TILE * 16];
    for (int64_t b = begin; b < end; ++b)
      for (int64_t n = 0; n < N; n += TILE) {
        const int64_t rows = std::min(TILE, N - n);
        BLOCKS[rows - 1](w + b * 16 * K, x + n * K, K, K, y);
        for (int64_t r = 0; r < rows; ++r) sink.put(n + r, b * 16, _mm512_loadu_ps(y + r * 16));
      }
  });
}

// x [N, K] times weights packed [M / 16, K / 2, 16, 2], a bias and what is added: y [N, M] in bf16.
at::Tensor linear(const at::Tensor& x_NK, const at::Tensor& w_packed, int64_t M,
                  const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& plus_NM) {
  const int64_t N = x_NK.size(0), K = x_NK.size(1), blocks = w_packed.size(0);
  const at::Tensor plus = plus_NM ? plus_NM->contiguous() : at::Tensor();
  at::Tensor out = at::empty({N, M}, x_NK.options());
  const bf16* w = w_packed.const_data_ptr<bf16>();
  const Sink sink{bias_M ? bias_M->const_data_ptr<bf16>() : nullptr, plus_NM ? plus.const_data_ptr<bf16>() : nullptr,
                  out.mutable_data_ptr<bf16>(), M};
  if (tiles()) {
    const at::Tensor x = x_NK.contiguous();
    linear_by_tiles(x.const_data_ptr<bf16>(), w, N, K, blocks, sink);
  } else {
    const at::Tensor x = x_NK.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
    linear_by_vectors(x.const_data_ptr<float>(), w, N, K, blocks, sink);
  }
  return out;
}

// A few rows of x times packed weights, 16 outputs at a time: y [rows, M], `to` numbers from one row to the next.
void product(const bf16* w, const float* x, int64_t rows, int64_t stride, int64_t K, int64_t M, float* y, int64_t to) {
  float part[TILE * 16];
  for (int64_t n = 0; n < rows; n += TILE) {
    const int64_t count = std::min(TILE, rows - n);
    for (int64_t m = 0; m < M; m += 16) {
      BLOCKS[count - 1](w + m * K, x + n * stride, stride, K, part);
      for (int64_t r = 0; r < count; ++r)
        _mm512_mask_storeu_ps(y + (n + r) * to + m, tail16(M - m), _mm512_loadu_ps(part + r * 16));
    }
  }
}

