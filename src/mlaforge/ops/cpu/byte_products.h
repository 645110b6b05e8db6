// Rows of two bytes a number times bytes of weights (linear_int8.h), with VNNI, or with tiles where the processor has them.
//
// A number of x is taken apart into a low and a high byte, both signed: a row of x is two rows of bytes, and a product is
// 256 high + low. x is packed [2 N / 16, K / 64, 16, 64], in tiles: row 2n holds the low bytes of row n and row 2n + 1 the
// high ones.
#pragma once
#include "byte_weights.h"
#include "sink.h"
#ifdef __AMX_INT8__
#include "tiles.h"
#endif

constexpr int64_t BYTE_PANEL = 1 << 18;  // bytes of x that stay near while weights pass by
constexpr int64_t MOST_ROWS = 8;  // rows of x that share one pass over a block of weights: 16 rows of bytes

struct ByteRow {
  float scale;
  int32_t low, high;  // 128 times the sums of its bytes: what weights that are 128 too large add
};

inline __mmask16 first16(int64_t count) { return count >= 16 ? __mmask16(~0) : __mmask16((1u << count) - 1); }

inline __m512 floats(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

// Row n of x in bytes. A number that is none makes the scale, and so the whole result, none.
inline ByteRow to_bytes(const bf16* x, int64_t K, int64_t steps, int64_t n, int8_t* bytes) {
  // Without their signs, bf16 numbers are in the order of their bits, and what is none comes last.
  __m512i most = _mm512_setzero_si512();
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = K - k >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - k)) - 1;
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + k), _mm512_set1_epi16(0x7fff)));
  }
  const __m512i lower = _mm512_and_si512(most, _mm512_set1_epi32(0xffff)), upper = _mm512_srli_epi32(most, 16);
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(lower, upper)) << 16;
  float largest;
  std::memcpy(&largest, &bits, 4);
  // The largest number whose high byte is one: 127 * 256 + 127. A row of zeros takes any scale.
  const float scale = largest < 1e-30f ? 1e-30f : largest / 32639.0f;
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  __m512i sum = _mm512_setzero_si512(), high_sum = _mm512_setzero_si512();
  int8_t* to = bytes + 2 * n / 16 * steps * TILE_BYTES + 2 * n % 16 * STEP;
  auto put = [&](int64_t k, __m512 part) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part, inverse));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    int8_t* place = to + k / STEP * TILE_BYTES + k % STEP;
    _mm_storeu_si128((__m128i*)place, _mm512_cvtepi32_epi8(whole));
    _mm_storeu_si128((__m128i*)(place + STEP), _mm512_cvtepi32_epi8(high));
    sum = _mm512_add_epi32(sum, whole);
    high_sum = _mm512_add_epi32(high_sum, high);
  };
  int64_t k = 0;
  for (; k + 16 <= K; k += 16) put(k, floats(x + k, 0xffff));
  if (k < K) put(k, floats(x + k, first16(K - k))), k += 16;
  for (; k < steps * STEP; k += 16) put(k, _mm512_setzero_ps());
  const int32_t high = _mm512_reduce_add_epi32(high_sum);
  return {scale, 128 * (_mm512_reduce_add_epi32(sum) - 256 * high), 128 * high};
}

// What a product of bytes becomes on its way out, and where it goes.
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
// Up to 16 rows of x times two blocks of weights with tiles, into y [32, 32]. TWO: more than 8 rows.
template <bool TWO, class Weights>
void byte_tiles(const Weights& w0, const Weights& w1, const int8_t* x, int64_t steps, int32_t* y) {
  alignas(64) uint8_t scratch[2 * TILE_BYTES];
  const int8_t* second = x + steps * TILE_BYTES;
  memory_is_read();
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = s * TILE_BYTES;
    if (!TWO) w0.prefetch(s), w1.prefetch(s);
    const uint8_t *left = w0.step(s, scratch), *right = w1.step(s, scratch + TILE_BYTES);
    memory_is_read();
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
void whole_product_of_blocks(const Weights& weights, const int8_t* x, int64_t N, int64_t steps, int64_t blocks,
                    const ByteSink& sink) {
  const int64_t panel = std::max<int64_t>(1, BYTE_PANEL / (2 * steps * TILE_BYTES)) * 16;
  at::parallel_for(0, (blocks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    alignas(64) int32_t y[32 * 32];
    const Room room(2 * steps * TILE_BYTES);
    int64_t shaped = -1;
    for (int64_t top = 0; top < N; top += panel)
      for (int64_t b = 2 * begin; b < std::min(2 * end, blocks); b += 2) {
        const int64_t both = b + 1 < blocks;
        auto rows_by = [&](const auto& w0, const auto& w1) {
          using Reader = std::decay_t<decltype(w0)>;
          for (int64_t n = top; n < std::min(N, top + panel); n += 16) {
            const int64_t rows = std::min<int64_t>(16, N - n), first = std::min<int64_t>(8, rows);
            if (rows != shaped) shape_tiles(2 * first, 2 * (rows - first)), shaped = rows;
            (rows > 8 ? byte_tiles<true, Reader> : byte_tiles<false, Reader>)(w0, w1, x + n / 8 * steps * TILE_BYTES,
                                                                              steps, y);
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t i = 0; i <= both; ++i) {
                const int32_t* from = y + 2 * r * 32 + i * 16;
                sink.put(n + r, (b + i) * 16, _mm512_load_si512(from), _mm512_load_si512(from + 32));
              }
          }
        };
        const Weights w0 = weights.from(b * steps), w1 = weights.from((b + both) * steps);
        if (N <= 16) rows_by(w0, w1);
        else rows_by(w0.unpacked(steps, room.data), w1.unpacked(steps, room.data + steps * TILE_BYTES));
      }
    release_tiles();
  });
}

#else
// A block of 16 outputs for N rows of x. With few rows several sums run side by side.
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
constexpr ByteBlock<Weights> BYTE_BLOCKS[MOST_ROWS] = {
    byte_block<1, Weights>, byte_block<2, Weights>, byte_block<3, Weights>, byte_block<4, Weights>,
    byte_block<5, Weights>, byte_block<6, Weights>, byte_block<7, Weights>, byte_block<8, Weights>};

template <class Weights>
void whole_product_of_blocks(const Weights& weights, const int8_t* x, int64_t N, int64_t steps, int64_t blocks,
                      const ByteSink& sink) {
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    __m512i y[2 * MOST_ROWS];
    const Room room(steps * TILE_BYTES);
    for (int64_t b = begin; b < end; ++b) {
      auto rows_by = [&](const auto& w) {
        for (int64_t n = 0; n < N; n += MOST_ROWS) {
          const int64_t rows = std::min(MOST_ROWS, N - n);
          BYTE_BLOCKS<std::decay_t<decltype(w)>>[rows - 1](w, x + n / 8 * steps * TILE_BYTES, steps, y);
          for (int64_t r = 0; r < rows; ++r) sink.put(n + r, b * 16, y[2 * r], y[2 * r + 1]);
        }
      };
      const Weights w = weights.from(b * steps);
      if (N <= MOST_ROWS) rows_by(w);
      else rows_by(w.unpacked(steps, room.data));
    }
  });
}

#endif

template <class Weights>
at::Tensor whole_product(const Weights& weights, int64_t steps, int64_t blocks, const at::Tensor& x_NK,
                         const at::Tensor& scales, const Sink& sink) {
  const int64_t N = x_NK.size(0), K = x_NK.size(1);
  const at::Tensor x = x_NK.contiguous();
  const at::Tensor bytes = at::empty({(N + 7) / 8 * steps * TILE_BYTES}, x_NK.options().dtype(at::kChar));
  std::vector<ByteRow> rows(N);
  int8_t* to = bytes.mutable_data_ptr<int8_t>();
  const bf16* from = x.const_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) rows[n] = to_bytes(from + n * K, K, steps, n, to);
  });
  whole_product_of_blocks(weights, to, N, steps, blocks, ByteSink{rows.data(), scales.const_data_ptr<float>(), sink});
  return sink.out();
}
