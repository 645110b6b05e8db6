// Rows of whole numbers of 16 bits times bytes of weights (linear_int8.h), with AVX2: bytes are widened by a mask and a
// shift, and pairs are multiplied.
#pragma once
#include "byte_weights.h"
#include "product.h"
#include "sink.h"

// Steps of weights whose sums fit 32 bits: 512 inputs times 128 times 32639. On the way they may wrap around.
constexpr int64_t SPAN = 8;
constexpr int SHORT_ROWS = 4;            // rows of x that share one pass over a block: as many as registers hold sums of
constexpr int64_t SHORT_PANEL = 1 << 18;  // bytes of x that stay near while weights pass by

// Rows of x as they are multiplied: of each four inputs the first and the third, then the second and the fourth.
class ShortRows {
 public:
  ShortRows(const at::Tensor& x_NK, int64_t steps)
      : length_(steps * STEP), spans_((steps + SPAN - 1) / SPAN), scales_(x_NK.size(0)),
        begins_(x_NK.size(0) * spans_), numbers_(at::empty({x_NK.size(0) * length_}, at::kShort)),
        data_(numbers_.mutable_data_ptr<int16_t>()) {
    const at::Tensor x = x_NK.contiguous();
    const bf16* from = x.const_data_ptr<bf16>();
    const int64_t K = x.size(1);
    at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) put(n, from + n * K, K);
    });
  }

  const int16_t* row(int64_t n) const { return data_ + n * length_; }
  float scale(int64_t n) const { return scales_[n]; }
  // What a span's sums begin with: weights are 128 too large.
  int32_t begin(int64_t n, int64_t span) const { return begins_[n * spans_ + span]; }

 private:
  // A number that is none makes the scale, and so the whole result, none.
  void put(int64_t n, const bf16* x, int64_t K) {
    auto load16 = [&](int64_t k) { return widened(x + k, std::min<int64_t>(16, K - k)); };
    const float largest = largest_size(K, load16), scale = largest < 1e-30f ? 1e-30f : largest / 32639.0f;
    const bool none = !std::isfinite(largest);
    scales_[n] = none ? std::numeric_limits<float>::quiet_NaN() : scale;
    const Floats inverse = all(1.0f / scale);
    int16_t* to = data_ + n * length_;
    for (int64_t span = 0; span < spans_; ++span) {
      int32_t sum = 0;
      for (int64_t k = span * SPAN * STEP; k < std::min((span + 1) * SPAN * STEP, length_); k += 16) {
        alignas(32) int16_t whole[16] = {};
        if (!none && k < K) store(whole, load16(k) * inverse);
        for (int64_t i = 0; i < 16; i += 4) {
          for (int64_t at : {0, 2, 1, 3}) *to++ = whole[i + at], sum += whole[i + at];
        }
      }
      begins_[n * spans_ + span] = -128 * sum;
    }
  }

  const int64_t length_, spans_;
  std::vector<float> scales_;
  std::vector<int32_t> begins_;
  at::Tensor numbers_;
  int16_t* data_;
};

// A block of 16 outputs for N rows of x, from row n on.
template <int N, class Weights>
__attribute__((noinline)) void short_block(const Weights& weights, const ShortRows& x, int64_t n, int64_t steps,
                                           Floats* y) {
  const __m256i lower = _mm256_set1_epi16(0xff);
  alignas(64) uint8_t scratch[TILE_BYTES];
  const int16_t* rows[N];
  for (int r = 0; r < N; ++r) rows[r] = x.row(n + r), y[r] = all(0.0f);
  for (int64_t span = 0; span * SPAN < steps; ++span) {
    __m256i sums[N][2];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) sums[r][0] = sums[r][1] = _mm256_set1_epi32(x.begin(n + r, span));
    for (int64_t s = span * SPAN; s < std::min(steps, (span + 1) * SPAN); ++s) {
      weights.prefetch(s);
      const uint8_t* w = weights.step(s, scratch);
      for (int64_t j = 0; j < STEP / 4; ++j) {
        __m256i even[2], odd[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i both = _mm256_load_si256((const __m256i*)(w + j * 64) + half);
          even[half] = _mm256_and_si256(both, lower);
          odd[half] = _mm256_srli_epi16(both, 8);
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
at::Tensor whole_product(const Weights& weights, int64_t steps, int64_t blocks, const at::Tensor& x_NK,
                         const at::Tensor& scales, const Sink& sink) {
  const int64_t N = x_NK.size(0), panel = std::max<int64_t>(1, SHORT_PANEL / (2 * SHORT_ROWS * steps * STEP)) * SHORT_ROWS;
  const float* scale = scales.const_data_ptr<float>();
  const ShortRows x(x_NK, steps);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const Room room(steps * TILE_BYTES);
    for (int64_t top = 0; top < N; top += panel)
      for (int64_t b = begin; b < end; ++b) {
        auto rows_by = [&](const auto& w) {
          in_parts<SHORT_ROWS>(std::min(panel, N - top), [&](int64_t at, auto count) {
            Floats y[SHORT_ROWS];
            short_block<count>(w, x, top + at, steps, y);
            for (int64_t r = 0; r < count; ++r)
              sink.put(top + at + r, b * 16, y[r] * all(x.scale(top + at + r)) * load(scale + b * 16));
          });
        };
        const Weights w = weights.from(b * steps);
        if (N <= SHORT_ROWS) rows_by(w);
        else rows_by(w.unpacked(steps, room.data));
      }
  });
  return sink.out();
}
