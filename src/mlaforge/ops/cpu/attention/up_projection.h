// Products of cached latents with W_uk and W_uv.
//
// Legend: R elements of a latent, K = R rounded up to whole tiles with zeros, G KV heads, D key dimensions without a rotary
// part, V value dimensions, W = V rounded up to blocks of 16 outputs.
#pragma once
#include "attention/absorbed_v.h"
#include "attention/block_rows.h"
#include "linear/product.h"
#include "simd/scratch.h"
#ifdef __AMX_TILE__
#include "linear/tiled_linear.h"
#endif

constexpr int64_t LINE = 32;  // bf16 elements per cache line

inline int64_t round_to_lines(int64_t numbers) { return (numbers + LINE - 1) / LINE * LINE; }
// Distance of rows of at least so many elements: an odd number of cache lines, so that rows do not compete for the same
// cache sets.
inline int64_t odd_lines(int64_t numbers) { return ((numbers + LINE - 1) / LINE | 1) * LINE; }

// A token's result depends on its own latent alone. Keys of coded latents are products of bytes (code_product.h).
//
// Limit: 2 K G (D + V) FLOPs per token. The weights (2 K G (D + V) bytes) stay in a core's cache.
class UpProjection {
 public:
  UpProjection(const LatentWeights& weights, int64_t R)
      : R(R), K(2 * weights.w_up.size(1)), G(weights.b_v_GV.size(0)), D(weights.b_k.numel() / G), V(weights.b_v_GV.size(1)),
        W((V + 15) / 16 * 16), weights_(weights.w_up.const_data_ptr<bf16>()) {
#ifdef __AVX512VNNI__
    if (weights.codes) codes_.emplace(*weights.codes);
#endif
    TORCH_CHECK(K % LINE == 0 && K >= R, "w_up has ", K, " inputs, not ", R, " rounded up to a multiple of ", LINE);
    TORCH_CHECK(weights.w_up.size(0) == key_blocks() + G * W / 16, "w_up has ", weights.w_up.size(0), " blocks of outputs");
  }

  const int64_t R, K, G, D, V, W;

  // Multiplies `count` latents x, a multiple of UNIT, `stride` apart, by W_uk: finish(t, y, y_stride, g, heads) for latents
  // [t, t + UNIT) and KV heads [g, g + heads), side by side in y.
  template <typename Finish>
  void keys(const bf16* x, int64_t stride, int64_t count, Finish finish) const {
#ifdef __AVX512VNNI__
    if (codes_) return keys_of_codes(x, stride, count, finish);
#endif
    // With tiles head by head, so that a head's weights stay in the cache for all rows. Heads that do not fill blocks of 16
    // outputs run together.
    const int64_t heads = TILES && D % 16 == 0 ? 1 : G;
    for (int64_t g = 0; g < G; g += heads)
      multiply(x, stride, count, g * D / 16, (heads * D + 15) / 16,
               [&](int64_t t, const float* y, int64_t y_stride) { finish(t, y, y_stride, g, heads); });
  }

  // Multiplies them by W_uv, without a bias: a KV head's values every W elements of rows `to`, `to_stride` apart.
  void values(const bf16* x, int64_t stride, int64_t count, bf16* to, int64_t to_stride) const {
    const int64_t heads = TILES ? 1 : G;
    for (int64_t g = 0; g < G; g += heads)
      multiply(x, stride, count, key_blocks() + g * W / 16, heads * W / 16,
               [&](int64_t t, const float* y, int64_t y_stride) {
                 for (int64_t r = 0; r < UNIT; ++r)
                   for (int64_t v = 0; v < heads * W; v += 16)
                     narrow(to + (t + r) * to_stride + g * W + v, load(y + r * y_stride + v), 16);
               });
  }

 private:
#ifdef __AMX_TILE__
  static constexpr bool TILES = true;
#else
  static constexpr bool TILES = false;
#endif

  int64_t key_blocks() const { return (G * D + 15) / 16; }

  // Multiplies by the weights of blocks [first, first + blocks): finish(t, y, y_stride) for every UNIT of rows.
  template <typename Finish>
  void multiply(const bf16* x, int64_t stride, int64_t count, int64_t first, int64_t blocks, Finish finish) const {
    Scratch scratch;
#ifdef __AMX_TILE__
    const bf16* w = weights_ + first * 16 * K;
    const int64_t y_stride = (blocks + 1) / 2 * 32;
    auto* y = scratch.get<float>(UNIT * y_stride);
    configure_tiles(16, 16);
    for (int64_t t = 0; t < count; t += UNIT) {
      for (int64_t b = 0; b < blocks; b += 2)
        tile_product<true>(w + b * 16 * K, w + std::min(b + 1, blocks - 1) * 16 * K, x + t * stride, stride, K, nullptr,
                           nullptr, y + b * 16, y_stride);
      finish(t, y, y_stride);
    }
#else
    const int64_t y_stride = blocks * 16;
    auto* y = scratch.get<float>(UNIT * y_stride);
    for (int64_t t = 0; t < count; t += UNIT) {
      product_of_unit(x + t * stride, stride, first, blocks, y);
      finish(t, y, y_stride);
    }
#endif
  }

#ifdef __AVX512VNNI__
  template <typename Finish>
  void keys_of_codes(const bf16* x, int64_t stride, int64_t count, Finish finish) const {
    const int64_t heads = D % 16 == 0 ? 1 : G, blocks = (heads * D + 15) / 16, row_bytes = codes_->bytes_per_latent();
    Scratch scratch;
    auto* bytes = scratch.get<uint8_t>(count * row_bytes);
    auto* y = scratch.get<float>(UNIT * blocks * 16);
#ifdef __AMX_TILE__
    configure_tiles(16, 16);
#endif
    for (int64_t t = 0; t < count; t += UNIT) codes_->to_bytes(x + t * stride, stride, bytes + t * row_bytes);
    // Head by head, so that a head's weights stay in the cache for all rows.
    for (int64_t g = 0; g < G; g += heads)
      for (int64_t t = 0; t < count; t += UNIT) {
        (*codes_)(bytes + t * row_bytes, g * D / 16, blocks, y, blocks * 16);
        finish(t, y, blocks * 16, g, heads);
      }
  }
#endif

  // Multiplies a unit by the weights of some blocks, without tiles: y [UNIT, 16 blocks].
  void product_of_unit(const bf16* x, int64_t stride, int64_t first, int64_t blocks, float* y) const {
    const bf16* w = weights_ + first * 16 * K;
#ifdef __AVX512BF16__
    if (pairs_are_fast()) return product<false>(w, blocks, x, UNIT, stride, K, y, blocks * 16);
#endif
    Scratch scratch;
    auto* floats = scratch.get<float>(UNIT * K);
    for (int64_t r = 0; r < UNIT; ++r)
      for (int64_t k = 0; k < K; k += 16) store(floats + r * K + k, widen(x + r * stride + k, 16));
    product<false>(w, blocks, floats, UNIT, K, K, y, blocks * 16);
  }

  const bf16* weights_;
#ifdef __AVX512VNNI__
  std::optional<CodeProduct> codes_;
#endif
};
