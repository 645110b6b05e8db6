// Keys of the layout `latent` from cached latents: decompressed, normed, and rotated by their tokens' positions.
#pragma once
#include "attention/up_projection.h"

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

// Keys of cached latents c. A token's keys depend only on its own row and position.
class LatentKeys {
 public:
  LatentKeys(const LatentWeights& weights, const Angles& angles, int64_t R)
      : up(weights, R), GD(up.G * up.D), bias_(to_float(weights.b_k)),
        norm_(weights.k_norm ? to_float(*weights.k_norm) : std::vector<float>()), eps_(float(weights.eps)), angles_(angles) {}

  const UpProjection up;
  const int64_t GD;

  // Elements between consecutive rows [keys, c], whose latent begins at `latent_offset()`.
  int64_t latent_offset() const { return round_to_lines(GD); }
  int64_t width() const { return odd_lines(latent_offset() + up.K); }

  // Computes the keys of `count` latents x, a multiple of UNIT, `stride` apart, whose tokens have these `positions`, into
  // rows `key_stride` apart.
  void decompress(const bf16* x, int64_t stride, const int32_t* positions, int64_t count, bf16* keys,
                  int64_t key_stride) const {
    up.keys(x, stride, count, [&](int64_t t, const float* y, int64_t y_stride, int64_t g, int64_t heads) {
      bf16* unit = keys + t * key_stride;
      angles_.pairs % 16 ? finish<false>(y, y_stride, g, heads, positions + t, unit, key_stride)
                         : finish<true>(y, y_stride, g, heads, positions + t, unit, key_stride);
    });
  }
  // The same in rows [keys, c].
  void decompress(bf16* rows, const int32_t* positions, int64_t count) const {
    decompress(rows + latent_offset(), width(), positions, count, rows, width());
  }

 private:
  static std::vector<float> to_float(const at::Tensor& x) {
    const bf16* from = x.const_data_ptr<bf16>();
    return {from, from + x.numel()};
  }

  // Turns the products y of a unit into the keys of KV heads [g, g + heads). WHOLE: D / 2 is a multiple of 16.
  template <bool WHOLE>
  void finish(const float* y, int64_t y_stride, int64_t g, int64_t heads, const int32_t* positions, bf16* rows,
              int64_t row_stride) const {
    auto lanes = [](int64_t remaining) { return WHOLE ? int64_t(16) : std::min<int64_t>(16, remaining); };
    // Local copies: the compiler must assume that writes alias members.
    const int64_t D = up.D, P = D / 2;
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

  const std::vector<float> bias_, norm_;
  const float eps_;
  const Angles angles_;
};
