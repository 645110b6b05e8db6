// Products of coded latents with W_uk: latents are integers of at most 11 bits and weights are rounded to 8, so AMX tiles and
// VNNI multiply bytes, at twice the rate of tiles of bf16 and four times that of fp32.
//
// A latent becomes unsigned bytes. The first coordinates have the most bits: those of the first `wide_steps` steps of 64
// become two bytes, the lower 7 bits and the others. Of every 64 coordinates, four bytes that are multiplied together are 2 i,
// 2 i + 1, 2 i + 32 and 2 i + 33, so that no shuffle is needed; weights are packed in this order, [M / 16, K / 4, 16, 4] with
// K inputs, zero-padded to whole steps (ops/latent_attention.py). Sums are exact.
#pragma once
#include "attention/block_rows.h"
#include "linear/product.h"
#ifdef __AMX_INT8__
#include "simd/tiles.h"
#endif

// int8 weights with a factor and an offset per output, which undoes that bytes are unsigned.
struct CodeWeights {
  at::Tensor weights, scales, offsets;
  int64_t wide_steps;
};

#ifdef __AVX512VNNI__
class CodeProduct {
 public:
  explicit CodeProduct(const CodeWeights& of)
      : weights_(of.weights.const_data_ptr<int8_t>()), scales_(of.scales.const_data_ptr<float>()),
        offsets_(of.offsets.const_data_ptr<int32_t>()), steps_(of.weights.size(1) / 16), wide_(of.wide_steps) {
    TORCH_CHECK(of.weights.size(1) % 16 == 0 && wide_ <= steps_, "weights of codes have ", of.weights.size(1), " groups of 4");
  }

  int64_t bytes_per_latent() const { return (steps_ + wide_) * STEP; }

  // Converts a UNIT of latents x, `stride` elements apart. Values of padding do not matter, but are read.
  void to_bytes(const bf16* x, int64_t stride, uint8_t* bytes) const {
    for (int64_t r = 0; r < UNIT; ++r, x += stride, bytes += bytes_per_latent())
      for (int64_t s = 0; s < steps_; ++s) {
        // Adding 1.5 * 2^23 moves an integer to the low bits of a float.
        const Floats shift = splat(12582912.0f + (s < wide_ ? 1088.0f : 128.0f));
        const Pairs first = pairs(x + s * STEP), second = pairs(x + s * STEP + 32);
        const __m512i codes[4] = {integers(even(first) + shift), integers(odd(first) + shift), integers(even(second) + shift),
                                  integers(odd(second) + shift)};
        if (s < wide_) {
          _mm512_storeu_si512(bytes + s * STEP, join(codes, 0, 127));
          _mm512_storeu_si512(bytes + (steps_ + s) * STEP, join(codes, 7, 31));
        } else {
          _mm512_storeu_si512(bytes + s * STEP, join(codes, 0, 255));
        }
      }
  }

  // y [UNIT, 16 blocks], rows `y_stride` apart: a UNIT of latents times the weights of blocks [first, first + blocks).
  void operator()(const uint8_t* bytes, int64_t first, int64_t blocks, float* y, int64_t y_stride) const {
    alignas(64) int32_t low[UNIT * 32], high[UNIT * 32];
    for (int64_t b = 0; b < blocks; b += 2) {
      const int64_t second = std::min(b + 1, blocks - 1);
      const int8_t *w0 = block(first + b), *w1 = block(first + second);
      multiply(w0, w1, bytes, steps_, low);
      if (wide_) multiply(w0, w1, bytes + steps_ * STEP, wide_, high);
      for (int64_t i = b; i <= second; ++i) {
        const int64_t m = (first + i) * 16;
        const __m512i offset = _mm512_loadu_si512(offsets_ + m);
        const Floats scale = load(scales_ + m);
        for (int64_t r = 0; r < UNIT; ++r) {
          const int64_t at = r * 32 + (i - b) * 16;
          __m512i sum = _mm512_add_epi32(_mm512_load_si512(low + at), offset);
          if (wide_) sum = _mm512_add_epi32(sum, _mm512_slli_epi32(_mm512_load_si512(high + at), 7));
          store(y + r * y_stride + i * 16, Floats{_mm512_cvtepi32_ps(sum)} * scale);
        }
      }
    }
  }

 private:
  static constexpr int64_t STEP = 64;  // bytes of a latent per step

  static __m512i integers(Floats x) { return _mm512_castps_si512(x.reg); }
  // Joins the bits from `shift` on of four integers to 32 bits.
  static __m512i join(const __m512i* x, int shift, int mask) {
    const __m512i bits = _mm512_set1_epi32(mask);
    auto part = [&](int i) { return _mm512_slli_epi32(_mm512_and_si512(_mm512_srli_epi32(x[i], shift), bits), 8 * i); };
    return _mm512_or_si512(_mm512_or_si512(part(0), part(1)), _mm512_or_si512(part(2), part(3)));
  }

  const int8_t* block(int64_t b) const { return weights_ + b * steps_ * STEP * 16; }

  // Sums [UNIT, 32] of `steps` steps for two blocks of outputs.
  void multiply(const int8_t* w0, const int8_t* w1, const uint8_t* bytes, int64_t steps, int32_t* sums) const {
    const int64_t stride = bytes_per_latent();
#ifdef __AMX_INT8__
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
      _tile_loadd(6, w0 + s * 16 * STEP, STEP);
      _tile_loadd(4, bytes + s * STEP, stride);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, w1 + s * 16 * STEP, STEP);
      _tile_dpbusd(1, 4, 7);
      _tile_loadd(5, bytes + 16 * stride + s * STEP, stride);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
#else
    run_in_batches<ROWS>(UNIT, [&](int64_t r, auto count) {
      constexpr int N = count;
      __m512i sum[2][N];
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) sum[0][n] = sum[1][n] = _mm512_setzero_si512();
      const uint8_t* x = bytes + r * stride;
      for (int64_t i = 0; i < steps * 16; ++i, x += 4) {
        const __m512i first = _mm512_loadu_si512(w0 + i * STEP), second = _mm512_loadu_si512(w1 + i * STEP);
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
          int32_t four;
          std::memcpy(&four, x + n * stride, 4);
          const __m512i input = _mm512_set1_epi32(four);
          sum[0][n] = _mm512_dpbusd_epi32(sum[0][n], input, first);
          sum[1][n] = _mm512_dpbusd_epi32(sum[1][n], input, second);
        }
      }
#pragma GCC unroll 12
      for (int n = 0; n < N; ++n) {
        _mm512_store_si512(sums + (r + n) * 32, sum[0][n]);
        _mm512_store_si512(sums + (r + n) * 32 + 16, sum[1][n]);
      }
    });
#endif
  }

  const int8_t* weights_;
  const float* scales_;
  const int32_t* offsets_;
  const int64_t steps_, wide_;
};
#endif
