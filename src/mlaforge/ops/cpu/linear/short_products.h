// Rows of 16-bit integers times 8-bit weights (linear_int8.h), with AVX2: a mask and a shift widen the bytes, and pairs are
// multiplied.
#pragma once
#include "linear/byte_weights.h"
#include "linear/product.h"
#include "linear/sink.h"
#include "simd/configuration.h"

// Steps of weights whose sums fit 32 bits: 512 inputs * 128 * 32639. Intermediate sums may wrap around.
constexpr int64_t SPAN = 8;
constexpr int SHORT_ROWS = 4;  // rows of x per pass over a block: as many accumulators as there are registers
constexpr int64_t SHORT_PANEL = 1 << 18;  // bytes of x that stay in the cache during a pass over the weights

// Rows of x in the kernel's order: of every four inputs the first and third, then the second and fourth.
class ShortRows {
 public:
  ShortRows(const at::Tensor& x_NK, int64_t steps)
      : length_(steps * STEP), spans_((steps + SPAN - 1) / SPAN), scales_(scratch_.get<float>(x_NK.size(0))),
        initial_sums_(scratch_.get<int32_t>(x_NK.size(0) * spans_)),
        data_(scratch_.get<int16_t>(x_NK.size(0) * length_)) {
    const at::Tensor x = x_NK.contiguous();
    const bf16* from = x.const_data_ptr<bf16>();
    const int64_t K = x.size(1);
    at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) put(n, from + n * K, K);
    });
  }

  const int16_t* row(int64_t n) const { return data_ + n * length_; }
  float scale(int64_t n) const { return scales_[n]; }
  // Initial value of a span's sums, which removes the weights' offset of 128.
  int32_t initial_sum(int64_t n, int64_t span) const { return initial_sums_[n * spans_ + span]; }

 private:
  // Quantizes a row. A NaN makes the scale, and so the whole result, NaN.
  void put(int64_t n, const bf16* x, int64_t K) {
    auto load16 = [&](int64_t k) { return widen(x + k, std::min<int64_t>(16, K - k)); };
    const float largest = largest_magnitude(K, load16), scale = largest < 1e-30f ? 1e-30f : largest / 32639.0f;
    const bool has_nan = !std::isfinite(largest);
    scales_[n] = has_nan ? std::numeric_limits<float>::quiet_NaN() : scale;
    const Floats inverse = splat(1.0f / scale);
    int16_t* to = data_ + n * length_;
    for (int64_t span = 0; span < spans_; ++span) {
      int32_t sum = 0;
      for (int64_t k = span * SPAN * STEP; k < std::min((span + 1) * SPAN * STEP, length_); k += 16) {
        alignas(32) int16_t rounded[16] = {};
        if (!has_nan && k < K) store(rounded, load16(k) * inverse);
        for (int64_t i = 0; i < 16; i += 4) {
          for (int64_t at : {0, 2, 1, 3}) *to++ = rounded[i + at], sum += rounded[i + at];
        }
      }
      initial_sums_[n * spans_ + span] = -128 * sum;
    }
  }

  const int64_t length_, spans_;
  Scratch scratch_;
  float* const scales_;
  int32_t* const initial_sums_;
  int16_t* const data_;
};

// Multiplies N rows of x, from row n on, by a block of 16 outputs.
template <int N, class Weights>
__attribute__((noinline)) void short_block(const Weights& weights, const ShortRows& x, int64_t n, int64_t steps,
                                           Floats* y) {
  const __m256i lower = _mm256_set1_epi16(0xff);
  alignas(64) uint8_t scratch[TILE_BYTES];
  const int16_t* rows[N];
  for (int r = 0; r < N; ++r) rows[r] = x.row(n + r), y[r] = splat(0.0f);
  for (int64_t span = 0; span * SPAN < steps; ++span) {
    __m256i sums[N][2];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) sums[r][0] = sums[r][1] = _mm256_set1_epi32(x.initial_sum(n + r, span));
    for (int64_t s = span * SPAN; s < std::min(steps, (span + 1) * SPAN); ++s) {
      weights.prefetch(s);
      const uint8_t* w = weights.step(s, scratch);
      for (int64_t j = 0; j < STEP / 4; ++j) {
        __m256i even[2], odd[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i bytes = _mm256_load_si256((const __m256i*)(w + j * 64) + half);
          even[half] = _mm256_and_si256(bytes, lower);
          odd[half] = _mm256_srli_epi16(bytes, 8);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) {
          int32_t pair[2];
          std::memcpy(pair, rows[r] + s * STEP + j * 4, 8);
          const __m256i first = _mm256_set1_epi32(pair[0]), second = _mm256_set1_epi32(pair[1]);
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even[half], first), _mm256_madd_epi16(odd[half], second));
            sums[r][half] = _mm256_add_epi32(sums[r][half], sum);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) y[r] = y[r] + floats(Ints{sums[r][0], sums[r][1]});
  }
}

template <class Weights>
at::Tensor integer_product(const Weights& weights, int64_t steps, int64_t blocks, const at::Tensor& x_NK,
                         const at::Tensor& scales, const Sink& sink, const Configuration& tuned) {
  const int64_t N = x_NK.size(0), bytes = tuned.panel ? tuned.panel : SHORT_PANEL;
  const int64_t panel = std::max<int64_t>(1, bytes / (2 * SHORT_ROWS * steps * STEP)) * SHORT_ROWS;
  const float* scale = scales.const_data_ptr<float>();
  const ShortRows x(x_NK, steps);
  at::parallel_for(0, blocks, blocks_per_thread(tuned), [&](int64_t begin, int64_t end) {
    Scratch scratch;
    auto* buffer = scratch.get<uint8_t>(steps * TILE_BYTES);
    for (int64_t panel_begin = 0; panel_begin < N; panel_begin += panel)
      for (int64_t b = begin; b < end; ++b) {
        auto multiply_rows = [&](const auto& w) {
          run_in_batches<SHORT_ROWS>(std::min(panel, N - panel_begin), [&](int64_t at, auto count) {
            Floats y[SHORT_ROWS];
            short_block<count>(w, x, panel_begin + at, steps, y);
            for (int64_t r = 0; r < count; ++r)
              sink.put(panel_begin + at + r, b * 16, y[r] * splat(x.scale(panel_begin + at + r)) * load(scale + b * 16));
          });
        };
        const Weights w = weights.from(b * steps);
        if (N <= SHORT_ROWS) multiply_rows(w);
        else multiply_rows(w.unpacked(steps, buffer));
      }
  });
  return sink.out();
}
