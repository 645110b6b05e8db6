// Rows times a weight matrix, with AMX tiles.
//
// Legend: N rows, K input width, M output width.
#pragma once
#include "linear/sink.h"
#include "simd/tiles.h"

// Multiplies up to 32 rows of x, `stride` elements apart, by two blocks of weights, into y [32, 32], whose rows are
// `y_stride` apart. `x_end` and `w_end` are the remainder of K after the last 32 elements, zero-padded: [32, 32] of x, [16,
// 32] of each block. TWO: more than 16 rows.
template <bool TWO>
void tile_product(const bf16* w0, const bf16* w1, const bf16* x, int64_t stride, int64_t K, const bf16* x_end,
                  const bf16* w_end, float* y, int64_t y_stride) {
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  int64_t k = 0;
  for (; k + 32 <= K; k += 32) {
    _tile_loadd(6, w0 + k * 16, 64);
    _tile_loadd(7, w1 + k * 16, 64);
    _tile_loadd(4, x + k, stride * 2);
    if (TWO) {
      _tile_loadd(5, x + 16 * stride + k, stride * 2);
    } else {
      // Few rows are limited by reading the weights, and the hardware prefetcher stops at page boundaries.
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
  _tile_stored(0, y, y_stride * 4);
  _tile_stored(1, y + 16, y_stride * 4);
  if (TWO) _tile_stored(2, y + 16 * y_stride, y_stride * 4);
  if (TWO) _tile_stored(3, y + 16 * y_stride + 16, y_stride * 4);
}

// 512 products per cycle and core: only many rows are limited by arithmetic.
inline void linear_by_tiles(const bf16* x, const bf16* w, int64_t N, int64_t K, int64_t blocks, const Sink& sink,
                            int64_t least_blocks) {
  const int64_t rest = K % 32;
  at::parallel_for(0, (blocks + 1) / 2, (least_blocks + 1) / 2, [&](int64_t begin, int64_t end) {
    alignas(64) float y[32 * 32];
    alignas(64) bf16 x_end[32 * 32], w_end[2 * 16 * 32];
    std::fill_n(x_end, 32 * 32, bf16(0.0f));
    std::fill_n(w_end, 2 * 16 * 32, bf16(0.0f));
    int64_t configured_rows = -1;
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t b = 2 * pair;
      const bf16 *w0 = w + b * 16 * K, *w1 = b + 1 < blocks ? w0 + 16 * K : w0;
      if (rest) {
        std::copy_n(w0 + (K - rest) * 16, rest * 16, w_end);
        std::copy_n(w1 + (K - rest) * 16, rest * 16, w_end + 16 * 32);
      }
      for (int64_t n = 0; n < N; n += 32) {
        const int64_t rows = std::min<int64_t>(32, N - n), first = std::min<int64_t>(16, rows);
        if (rows != configured_rows) configure_tiles(first, rows - first), configured_rows = rows;
        for (int64_t r = 0; rest && r < rows; ++r) std::copy_n(x + (n + r) * K + K - rest, rest, x_end + r * 32);
        (rows > 16 ? tile_product<true> : tile_product<false>)(w0, w1, x + n * K, K, K, x_end, w_end, y, 32);
        for (int64_t r = 0; r < rows; ++r) {
          sink.put(n + r, b * 16, load(y + r * 32));
          if (b + 1 < blocks) sink.put(n + r, b * 16 + 16, load(y + r * 32 + 16));
        }
      }
    }
    release_tiles();
  });
}
