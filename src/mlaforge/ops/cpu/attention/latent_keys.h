// Keys of the layout `latent` from cached rows: decompressed, normed, and rotated by their tokens' positions.
//
// Legend: R elements of a cached row, K = R rounded up to whole tiles with zeros, G KV heads, D key dimensions.
#pragma once
#include "attention/absorbed_v.h"
#include "linear/product.h"
#include "rows/int8_rows.h"
#include "simd/scratch.h"
#ifdef __AMX_TILE__
#include "linear/tiled_linear.h"
#endif

// bf16 elements per cache line, and tokens whose keys are computed together.
constexpr int64_t LINE = 32, UNIT = 32;

inline int64_t round_to_lines(int64_t numbers) { return (numbers + LINE - 1) / LINE * LINE; }

// Rotation table: cos and sin [positions, D / 2]. For a selection, `text_positions` maps the view's positions to positions
// in the text.
struct Angles {
  const float *cos, *sin;
  int64_t positions, pairs;
  const int32_t* text_positions;

  Angles(const at::Tensor& cos_LP, const at::Tensor& sin_LP, const std::optional<at::Tensor>& positions_SK)
      : cos(cos_LP.const_data_ptr<float>()), sin(sin_LP.const_data_ptr<float>()), positions(cos_LP.size(0)),
        pairs(cos_LP.size(1)), text_positions(positions_SK ? positions_SK->const_data_ptr<int32_t>() : nullptr) {
    TORCH_CHECK(cos_LP.is_contiguous() && sin_LP.is_contiguous(), "angles are not contiguous");
    TORCH_CHECK(!positions_SK || positions_SK->is_contiguous(), "positions are not contiguous");
  }

  // Offset of a position's angles. Positions beyond the table belong to rows that are not visible.
  int64_t at(int64_t position) const {
    return std::min<int64_t>(text_positions ? text_positions[position] : position, positions - 1) * pairs;
  }

  // Rotates a head's elements, pairs (p, p + D / 2), by the angles of `position`.
  void rotate(int64_t position, const bf16* x, float* y) const {
    const float *c = cos + at(position), *s = sin + at(position);
    for (int64_t p = 0; p < pairs; ++p) {
      const float a = x[p], b = x[p + pairs];
      y[p] = a * c[p] - b * s[p];
      y[p + pairs] = b * c[p] + a * s[p];
    }
  }
};

// Computes rows [keys, c] from rows that contain c. A token's keys depend only on its own row and position. Where keys are
// cached (decompressed_keys.h), in int8, all are rounded to that format, so that they do not depend on the cache.
//
// Limit: 2 K G D FLOPs per token. The weights (2 K G D bytes) stay in a core's cache.
class LatentKeys {
 public:
  LatentKeys(const LatentWeights& weights, const Angles& angles, int64_t R, bool rounds)
      : R(R), K(2 * weights.w_uk.size(1)), GD(weights.b_k.numel()), D(2 * angles.pairs),
        format(std::vector<int64_t>(GD / D, D)), w_uk_(weights.w_uk.const_data_ptr<bf16>()), bias_(to_float(weights.b_k)),
        norm_(weights.k_norm ? to_float(*weights.k_norm) : std::vector<float>()), eps_(float(weights.eps)), angles_(angles),
        rounds_(rounds) {
    TORCH_CHECK(K % LINE == 0 && K >= R, "w_uk has ", K, " inputs, not ", R, " rounded up to a multiple of ", LINE);
  }

  const int64_t R, K, GD, D;
  const Int8Rows format;  // of cached keys: a scale per KV head

  // Elements between consecutive rows, whose cached part begins at `latent_offset()`. An odd number of cache lines, so that
  // rows do not compete for the same cache sets.
  int64_t latent_offset() const { return round_to_lines(GD); }
  int64_t width() const { return ((latent_offset() + K) / LINE | 1) * LINE; }

  // Loads the cached rows at `count` slots into the latent parts of `rows`.
  void load_latents(const Rows& cached, const int32_t* slots, int64_t count, bf16* rows) const {
    cached.read(slots, count, R, rows + latent_offset(), width());
    for (int64_t t = 0; t < count; ++t) std::fill_n(rows + t * width() + latent_offset() + R, K - R, bf16(0.0f));
  }

  // Computes the keys of `count` rows, a multiple of UNIT, whose tokens have these `positions`.
  void decompress(bf16* rows, const int32_t* positions, int64_t count) const {
    decompress_exactly(rows, positions, count);
    if (!rounds_) return;
    Scratch scratch;
    auto* stored = scratch.get<uint8_t>(format.unit_bytes());
    const int32_t slot = 0;
    for (bf16* row = rows; row < rows + count * width(); row += width())
      format.write(row, stored), format.read(stored, &slot, 1, 0, GD, row, width());
  }

  // As above, before keys are rounded to `format`.
  void decompress_exactly(bf16* rows, const int32_t* positions, int64_t count) const {
    const int64_t G = GD / D;
#ifdef __AMX_TILE__
    // Head by head, so that a head's weights stay in the cache for all rows. Heads that do not fill blocks of 16 outputs run
    // together.
    const int64_t heads = D % 16 == 0 ? 1 : G, blocks = (heads * D + 15) / 16, y_stride = (blocks + 1) / 2 * 32;
    Scratch scratch;
    auto* y = scratch.get<float>(UNIT * y_stride);
    configure_tiles(16, 16);
    for (int64_t g = 0; g < G; g += heads)
      for (int64_t t = 0; t < count; t += UNIT) {
        const bf16* w = w_uk_ + g * D * K;
        for (int64_t b = 0; b < blocks; b += 2)
          tile_product<true>(w + b * 16 * K, w + std::min(b + 1, blocks - 1) * 16 * K,
                             rows + t * width() + latent_offset(), width(), K, nullptr, nullptr, y + b * 16, y_stride);
        finish(y, y_stride, g, heads, positions + t, rows + t * width());
      }
#else
    const int64_t blocks = (GD + 15) / 16, y_stride = blocks * 16;
    Scratch scratch;
    float *y = scratch.get<float>(UNIT * y_stride), *floats = scratch.get<float>(UNIT * K);
    for (int64_t t = 0; t < count; t += UNIT) {
      const bf16* x = rows + t * width() + latent_offset();
      if (!bf16_product(x, blocks, y, y_stride)) {
        for (int64_t r = 0; r < UNIT; ++r)
          for (int64_t k = 0; k < K; k += 16) store(floats + r * K + k, widen(x + r * width() + k, 16));
        product<false>(w_uk_, blocks, floats, UNIT, K, K, y, y_stride);
      }
      finish(y, y_stride, 0, G, positions + t, rows + t * width());
    }
#endif
  }

 private:
  // Multiplies a unit in bf16 if the processor is fast at it. Returns whether it did.
  bool bf16_product(const bf16* x, int64_t blocks, float* y, int64_t y_stride) const {
#ifdef __AVX512BF16__
    if (pairs_are_fast()) {
      product<false>(w_uk_, blocks, x, UNIT, width(), K, y, y_stride);
      return true;
    }
#endif
    return false;
  }

  static std::vector<float> to_float(const at::Tensor& x) {
    const bf16* from = x.const_data_ptr<bf16>();
    return {from, from + x.numel()};
  }

  // Turns the products y of a unit into the keys of KV heads [g, g + heads).
  void finish(const float* y, int64_t y_stride, int64_t g, int64_t heads, const int32_t* positions, bf16* rows) const {
    angles_.pairs % 16 ? finish<false>(y, y_stride, g, heads, positions, rows)
                       : finish<true>(y, y_stride, g, heads, positions, rows);
  }

  // WHOLE: D / 2 is a multiple of 16.
  template <bool WHOLE>
  void finish(const float* y, int64_t y_stride, int64_t g, int64_t heads, const int32_t* positions, bf16* rows) const {
    auto lanes = [](int64_t remaining) { return WHOLE ? int64_t(16) : std::min<int64_t>(16, remaining); };
    // Local copies: the compiler must assume that writes alias members.
    const int64_t D = this->D, P = D / 2, row_stride = width();
    const float *weight = norm_.empty() ? nullptr : norm_.data(), *head_bias = bias_.data() + g * D, eps = eps_;
    for (int64_t t = 0; t < UNIT; ++t) {
      const int64_t at = angles_.at(positions[t]);
      const float *cos = angles_.cos + at, *sin = angles_.sin + at;
      for (int64_t h = 0; h < heads; ++h) {
        const float *head_product = y + t * y_stride + h * D, *bias = head_bias + h * D;
        bf16* key = rows + t * row_stride + (g + h) * D;
        auto biased = [&](int64_t d, int64_t count) { return load(head_product + d, count) + load(bias + d, count); };
        Floats scale = splat(1.0f);
        if (weight) {
          Floats squares = splat(0.0f);
          for (int64_t d = 0; d < D; d += 16) {
            const Floats v = biased(d, lanes(D - d));
            squares = fma(v, v, squares);
          }
          scale = splat(1.0f / std::sqrt(reduce_add(squares) / D + eps));
        }
        auto normed = [&](int64_t d, int64_t count) {
          const Floats v = biased(d, count);
          return weight ? v * scale * load(weight + d, count) : v;
        };
        for (int64_t p = 0; p < P; p += 16) {
          const int64_t count = lanes(P - p);
          const Floats a = normed(p, count), b = normed(p + P, count), c = load(cos + p, count), s = load(sin + p, count);
          narrow(key + p, a * c - b * s, count);
          narrow(key + p + P, fma(b, c, a * s), count);
        }
      }
    }
  }

  const bf16* w_uk_;
  const std::vector<float> bias_, norm_;
  const float eps_;
  const Angles angles_;
  const bool rounds_;
};
