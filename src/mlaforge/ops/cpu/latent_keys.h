// Keys of the layout latent, made from cached rows: decompressed, normed, and turned by where their tokens stand.
//
// Legend: R numbers of a cached row, K of them filled up with zeros to whole tiles, G key heads, D key dimensions.
#pragma once
#include "product.h"
#ifdef __AMX_TILE__
#include "tiled_linear.h"
#endif

// Numbers in lines of a cache, and tokens whose keys are made together.
constexpr int64_t LINE = 32, UNIT = 32;

inline int64_t in_lines(int64_t numbers) { return (numbers + LINE - 1) / LINE * LINE; }

// The angles of every position: cos and sin [positions, D / 2]. Of a selection, `places` says where what it counts as
// positions stands in the text.
struct Angles {
  const float *cos, *sin;
  int64_t positions, pairs;
  const int32_t* places = nullptr;

  // Where the angles of a position begin. Beyond a sequence's last row nothing is seen.
  int64_t at(int64_t position) const {
    return std::min<int64_t>(places ? places[position] : position, positions - 1) * pairs;
  }

  // Numbers of a head, pair p being numbers p and p + D / 2, as they are turned at `position`.
  void turn(int64_t position, const bf16* x, float* y) const {
    const float *c = cos + at(position), *s = sin + at(position);
    for (int64_t p = 0; p < pairs; ++p) {
      const float a = x[p], b = x[p + pairs];
      y[p] = a * c[p] - b * s[p];
      y[p + pairs] = b * c[p] + a * s[p];
    }
  }
};

// Makes rows [keys, c] of rows whose c is there. What a token gets depends on its own row and position alone.
//
// Limit: 2 K G D FLOPs a token; the weights (2 K G D bytes) stay in a core's cache.
class LatentKeys {
 public:
  LatentKeys(const at::Tensor& w_uk, const at::Tensor& b_k, const std::optional<at::Tensor>& k_norm, double eps,
             const Angles& angles, int64_t R)
      : R(R), K(2 * w_uk.size(1)), GD(b_k.numel()), D(2 * angles.pairs), w_uk_(w_uk.const_data_ptr<bf16>()),
        bias_(wide(b_k)), norm_(k_norm ? wide(*k_norm) : std::vector<float>()), eps_(float(eps)), angles_(angles) {
    TORCH_CHECK(K % LINE == 0 && K >= R, "w_uk has ", K, " inputs, not ", R, " filled up to a multiple of ", LINE);
  }

  const int64_t R, K, GD, D;

  // Numbers from one row to the next, of which those from `c()` on are cached ones: an odd number of lines, so that rows
  // do not share the few places that a cache has for lines of one distance.
  int64_t c() const { return in_lines(GD); }
  int64_t width() const { return ((c() + K) / LINE | 1) * LINE; }

  // Puts a cached row where it belongs.
  void put(const bf16* cached, bf16* row) const {
    bf16* to = row + c();
    int64_t r = 0;
    for (; r + LINE <= R; r += LINE) store(to + r, pairs(cached + r));
    if (r < R) store(to + r, pairs(cached + r, R - r));
  }

  // Keys of `count` rows, whole units of them, whose tokens stand at `positions`.
  void make(bf16* rows, const int32_t* positions, int64_t count) const {
    const int64_t G = GD / D;
#ifdef __AMX_TILE__
    // A head's weights stay next to the core while the rows pass; heads that are no whole blocks of outputs go together.
    const int64_t heads = D % 16 == 0 ? 1 : G, blocks = (heads * D + 15) / 16, to = (blocks + 1) / 2 * 32;
    Scratch& own = Scratch::own(UNIT * to, 0);
    float* y = align64(own.y.data());
    shape_tiles(16, 16);
    for (int64_t g = 0; g < G; g += heads)
      for (int64_t t = 0; t < count; t += UNIT) {
        const bf16* w = w_uk_ + g * D * K;
        for (int64_t b = 0; b < blocks; b += 2)
          tile_product<true>(w + b * 16 * K, w + std::min(b + 1, blocks - 1) * 16 * K, rows + t * width() + c(), width(),
                             K, nullptr, nullptr, y + b * 16, to);
        finish(y, to, g, heads, positions + t, rows + t * width());
      }
#else
    const int64_t blocks = (GD + 15) / 16, to = blocks * 16;
    Scratch& own = Scratch::own(UNIT * to, UNIT * K);
    for (int64_t t = 0; t < count; t += UNIT) {
      const bf16* x = rows + t * width() + c();
      if (!multiplied_as_they_are(x, blocks, own.y.data(), to)) {
        for (int64_t r = 0; r < UNIT; ++r)
          for (int64_t k = 0; k < K; k += 16) store(own.x.data() + r * K + k, widened(x + r * width() + k, 16));
        product<false>(w_uk_, blocks, own.x.data(), UNIT, K, K, own.y.data(), to);
      }
      finish(own.y.data(), to, 0, G, positions + t, rows + t * width());
    }
#endif
  }

 private:
  // A unit's product in bf16, where the processor is fast at it.
  bool multiplied_as_they_are(const bf16* x, int64_t blocks, float* y, int64_t to) const {
#ifdef __AVX512BF16__
    if (pairs_are_fast()) {
      product<false>(w_uk_, blocks, x, UNIT, width(), K, y, to);
      return true;
    }
#endif
    return false;
  }

  // Kept from call to call.
  struct Scratch {
    std::vector<float> y, x;

    static Scratch& own(int64_t y, int64_t x) {
      static thread_local Scratch scratch;
      scratch.y.resize(std::max<size_t>(scratch.y.size(), y + 16));
      scratch.x.resize(std::max<size_t>(scratch.x.size(), x));
      return scratch;
    }
  };

  static std::vector<float> wide(const at::Tensor& x) {
    const bf16* from = x.const_data_ptr<bf16>();
    return {from, from + x.numel()};
  }

  // Products y of a unit, those of key heads g to before g + heads -> keys.
  void finish(const float* y, int64_t to, int64_t g, int64_t heads, const int32_t* positions, bf16* rows) const {
    angles_.pairs % 16 ? finish<false>(y, to, g, heads, positions, rows) : finish<true>(y, to, g, heads, positions, rows);
  }

  // WHOLE: both halves of a key are whole sixteens.
  template <bool WHOLE>
  void finish(const float* y, int64_t to, int64_t g, int64_t heads, const int32_t* positions, bf16* rows) const {
    auto some = [](int64_t left) { return WHOLE ? int64_t(16) : std::min<int64_t>(16, left); };
    // Of no member, because what is written might be one.
    const int64_t D = this->D, P = D / 2, step = width();
    const float *weight = norm_.empty() ? nullptr : norm_.data(), *from = bias_.data() + g * D, eps = eps_;
    for (int64_t t = 0; t < UNIT; ++t) {
      const int64_t at = angles_.at(positions[t]);
      const float *cos = angles_.cos + at, *sin = angles_.sin + at;
      for (int64_t h = 0; h < heads; ++h) {
        const float *own = y + t * to + h * D, *bias = from + h * D;
        bf16* key = rows + t * step + (g + h) * D;
        auto biased = [&](int64_t d, int64_t count) { return load(own + d, count) + load(bias + d, count); };
        Floats scale = all(1.0f);
        if (weight) {
          Floats squares = all(0.0f);
          for (int64_t d = 0; d < D; d += 16) {
            const Floats v = biased(d, some(D - d));
            squares = fma(v, v, squares);
          }
          scale = all(1.0f / std::sqrt(sum(squares) / D + eps));
        }
        auto number = [&](int64_t d, int64_t count) {
          const Floats v = biased(d, count);
          return weight ? v * scale * load(weight + d, count) : v;
        };
        for (int64_t p = 0; p < P; p += 16) {
          const int64_t count = some(P - p);
          const Floats a = number(p, count), b = number(p + P, count), c = load(cos + p, count), s = load(sin + p, count);
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
};
