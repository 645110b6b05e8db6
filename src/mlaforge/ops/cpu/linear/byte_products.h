// Rows of 16-bit integers times 8-bit weights (linear_int8.h), with VNNI or AMX tiles.
//
// Each element of x is split into a signed low and a signed high byte, so a row of x is two rows of bytes and a product is
// 256 * high + low. x is packed [2 N / 16, K / 64, 16, 64], as tiles: row 2n has the low bytes of row n, row 2n + 1 the high
// bytes.
#pragma once
#include "linear/byte_weights.h"
#include "linear/sink.h"
#include "simd/configuration.h"
#ifdef __AMX_INT8__
#include "simd/tiles.h"
#endif

constexpr int64_t BYTE_PANEL = 1 << 18;  // bytes of x that stay in the cache during a pass over the weights
constexpr int64_t MAX_ROWS = 8;  // rows of x per pass over a block of weights: 16 rows of bytes

struct ByteRow {
  float scale;
  int32_t low, high;  // 128 * the sums of the row's bytes: the offset of unsigned weights
};

inline __mmask16 first16(int64_t count) { return count >= 16 ? __mmask16(~0) : __mmask16((1u << count) - 1); }

inline __m512 floats(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

// Quantizes row n of x to bytes. A NaN makes the scale, and so the whole result, NaN.
inline ByteRow to_bytes(const bf16* x, int64_t K, int64_t steps, int64_t n, int8_t* bytes) {
  // Magnitudes of bf16 are ordered like their bits, and NaN is the largest.
  __m512i largest_bits = _mm512_setzero_si512();
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = K - k >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - k)) - 1;
    const __m512i magnitudes = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + k), _mm512_set1_epi16(0x7fff));
    largest_bits = _mm512_max_epu16(largest_bits, magnitudes);
  }
  const __m512i lower = _mm512_and_si512(largest_bits, _mm512_set1_epi32(0xffff)), upper = _mm512_srli_epi32(largest_bits, 16);
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(lower, upper)) << 16;
  float largest;
  std::memcpy(&largest, &bits, 4);
  // 127 * 256 + 127 is the largest value whose high byte fits. A row of zeros can have any scale.
  const float scale = largest < 1e-30f ? 1e-30f : largest / 32639.0f;
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  __m512i sum = _mm512_setzero_si512(), high_sum = _mm512_setzero_si512();
  int8_t* to = bytes + 2 * n / 16 * steps * TILE_BYTES + 2 * n % 16 * STEP;
  auto put_sixteen = [&](int64_t k, __m512 part) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(part, inverse));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
    int8_t* place = to + k / STEP * TILE_BYTES + k % STEP;
    _mm_storeu_si128((__m128i*)place, _mm512_cvtepi32_epi8(rounded));
    _mm_storeu_si128((__m128i*)(place + STEP), _mm512_cvtepi32_epi8(high));
    sum = _mm512_add_epi32(sum, rounded);
    high_sum = _mm512_add_epi32(high_sum, high);
  };
  int64_t k = 0;
  for (; k + 16 <= K; k += 16) put_sixteen(k, floats(x + k, 0xffff));
  if (k < K) put_sixteen(k, floats(x + k, first16(K - k))), k += 16;
  for (; k < steps * STEP; k += 16) put_sixteen(k, _mm512_setzero_ps());
  const int32_t high = _mm512_reduce_add_epi32(high_sum);
  return {scale, 128 * (_mm512_reduce_add_epi32(sum) - 256 * high), 128 * high};
}

// Post-op of a byte product: subtracts the weights' offset, scales, and passes the result to `sink`.
struct ByteSink {
  const ByteRow* rows;
  const float* scales;
  const Sink& sink;

  // Outputs m to m + 15 of row n.
  void put(int64_t n, int64_t m, __m512i low, __m512i high) const {
    const ByteRow& row = rows[n];
    low = _mm512_sub_epi32(low, _mm512_set1_epi32(row.low));
    high = _mm512_sub_epi32(high, _mm512_set1_epi32(row.high));
    const __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    sink.put(n, m, {_mm512_mul_ps(_mm512_mul_ps(y, _mm512_set1_ps(row.scale)), _mm512_loadu_ps(scales + m))});
  }
};

#ifdef __AMX_INT8__
// Multiplies up to 16 rows of x by two blocks of weights with tiles, into y [32, 32]. TWO: more than 8 rows.
template <bool TWO, class Weights>
void byte_tiles(const Weights& w0, const Weights& w1, const int8_t* x, int64_t steps, int32_t* y) {
  alignas(64) uint8_t scratch[2 * TILE_BYTES];
  const int8_t* second = x + steps * TILE_BYTES;
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = s * TILE_BYTES;
    if (!TWO) w0.prefetch(s), w1.prefetch(s);
    const uint8_t *left = w0.step(s, scratch), *right = w1.step(s, scratch + TILE_BYTES);
    compiler_barrier();
    _tile_loadd(6, left, 64);
    _tile_loadd(4, x + at, 64);
    _tile_loadd(7, right, 64);
    if (TWO) _tile_loadd(5, second + at, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (TWO) _tile_dpbsud(2, 5, 6);
    if (TWO) _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, y, 128);
  _tile_stored(1, y + 16, 128);
  if (TWO) _tile_stored(2, y + 16 * 32, 128);
  if (TWO) _tile_stored(3, y + 16 * 32 + 16, 128);
}

template <class Weights>
void integer_product_blocks(const Weights& weights, const int8_t* x, int64_t N, int64_t steps, int64_t blocks,
                    const ByteSink& sink, const Configuration& tuned) {
  const int64_t panel = std::max<int64_t>(1, (tuned.panel ? tuned.panel : BYTE_PANEL) / (2 * steps * TILE_BYTES)) * 16;
  at::parallel_for(0, (blocks + 1) / 2, (blocks_per_thread(tuned) + 1) / 2, [&](int64_t begin, int64_t end) {
    alignas(64) int32_t y[32 * 32];
    Scratch scratch;
    auto* buffer = scratch.get<uint8_t>(2 * steps * TILE_BYTES);
    int64_t configured_rows = -1;
    for (int64_t panel_begin = 0; panel_begin < N; panel_begin += panel)
      for (int64_t b = 2 * begin; b < std::min(2 * end, blocks); b += 2) {
        const int64_t has_second = b + 1 < blocks;
        auto multiply_rows = [&](const auto& w0, const auto& w1) {
          using WeightReader = std::decay_t<decltype(w0)>;
          for (int64_t n = panel_begin; n < std::min(N, panel_begin + panel); n += 16) {
            const int64_t rows = std::min<int64_t>(16, N - n), first = std::min<int64_t>(8, rows);
            if (rows != configured_rows) configure_tiles(2 * first, 2 * (rows - first)), configured_rows = rows;
            const auto multiply = rows > 8 ? byte_tiles<true, WeightReader> : byte_tiles<false, WeightReader>;
            multiply(w0, w1, x + n / 8 * steps * TILE_BYTES, steps, y);
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t i = 0; i <= has_second; ++i) {
                const int32_t* from = y + 2 * r * 32 + i * 16;
                sink.put(n + r, (b + i) * 16, _mm512_load_si512(from), _mm512_load_si512(from + 32));
              }
          }
        };
        const Weights w0 = weights.from(b * steps), w1 = weights.from((b + has_second) * steps);
        if (N <= 16) multiply_rows(w0, w1);
        else multiply_rows(w0.unpacked(steps, buffer), w1.unpacked(steps, buffer + steps * TILE_BYTES));
      }
    release_tiles();
  });
}

#else
// Multiplies N rows of x by a block of 16 outputs. Few rows use several accumulators, to hide latency.
template <int N, class Weights>
void byte_block(const Weights& weights, const int8_t* x, int64_t steps, __m512i* y) {
  constexpr int R = 2 * N, U = N == 1 ? 4 : N <= 3 ? 2 : 1;
  __m512i acc[U][R];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) acc[u][r] = _mm512_setzero_si512();
  alignas(64) uint8_t scratch[TILE_BYTES];
  for (int64_t s = 0; s < steps; ++s, x += TILE_BYTES) {
    weights.prefetch(s);
    const uint8_t* w = weights.step(s, scratch);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const __m512i line = _mm512_load_si512(w + j * 64);
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * STEP + j * 4, 4);
        acc[j % U][r] = _mm512_dpbusd_epi32(acc[j % U][r], line, _mm512_set1_epi32(four));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int u = 1; u < U; ++u) acc[0][r] = _mm512_add_epi32(acc[0][r], acc[u][r]);
    y[r] = acc[0][r];
  }
}

template <class Weights>
using ByteBlock = void (*)(const Weights&, const int8_t*, int64_t, __m512i*);
template <class Weights>
constexpr ByteBlock<Weights> BYTE_BLOCKS[MAX_ROWS] = {
    byte_block<1, Weights>, byte_block<2, Weights>, byte_block<3, Weights>, byte_block<4, Weights>,
    byte_block<5, Weights>, byte_block<6, Weights>, byte_block<7, Weights>, byte_block<8, Weights>};

template <class Weights>
void integer_product_blocks(const Weights& weights, const int8_t* x, int64_t N, int64_t steps, int64_t blocks,
                      const ByteSink& sink, const Configuration& tuned) {
  at::parallel_for(0, blocks, blocks_per_thread(tuned), [&](int64_t begin, int64_t end) {
    __m512i y[2 * MAX_ROWS];
    Scratch scratch;
    auto* buffer = scratch.get<uint8_t>(steps * TILE_BYTES);
    for (int64_t b = begin; b < end; ++b) {
      auto multiply_rows = [&](const auto& w) {
        for (int64_t n = 0; n < N; n += MAX_ROWS) {
          const int64_t rows = std::min(MAX_ROWS, N - n);
          BYTE_BLOCKS<std::decay_t<decltype(w)>>[rows - 1](w, x + n / 8 * steps * TILE_BYTES, steps, y);
          for (int64_t r = 0; r < rows; ++r) sink.put(n + r, b * 16, y[2 * r], y[2 * r + 1]);
        }
      };
      const Weights w = weights.from(b * steps);
      if (N <= MAX_ROWS) multiply_rows(w);
      else multiply_rows(w.unpacked(steps, buffer));
    }
  });
}

#endif

template <class Weights>
at::Tensor integer_product(const Weights& weights, int64_t steps, int64_t blocks, const at::Tensor& x_NK,
                         const at::Tensor& scales, const Sink& sink, const Configuration& tuned) {
  const int64_t N = x_NK.size(0), K = x_NK.size(1);
  const at::Tensor x = x_NK.contiguous();
  Scratch scratch;
  auto* rows = scratch.get<ByteRow>(N);
  auto* to = scratch.get<int8_t>((N + 7) / 8 * steps * TILE_BYTES);
  const bf16* from = x.const_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) rows[n] = to_bytes(from + n * K, K, steps, n, to);
  });
  integer_product_blocks(weights, to, N, steps, blocks, ByteSink{rows, scales.const_data_ptr<float>(), sink}, tuned);
  return sink.out();
}
