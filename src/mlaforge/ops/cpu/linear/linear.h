// Rows times a weight matrix.
//
// Legend: N rows, K input width, M output width.
#pragma once
#include "linear/elementwise.h"
#include "linear/product.h"
#include "linear/sink.h"
#include "simd/configuration.h"
#ifdef __AMX_TILE__
#include "linear/tiled_linear.h"
#endif

constexpr int64_t PANEL = 1 << 19;  // bytes of x that stay in a core's cache during a pass over the weights
// Elements of weights to prefetch ahead: of products of pairs, and of those of fp32.
constexpr int64_t AHEAD = 64 * LANES, AHEAD_FLOAT = 32 * LANES;

// With vectors. Limit: few rows, reading the weights (2 K M bytes); many rows, arithmetic (2 N K M FLOPs). x is fp32 or
// bf16.
template <typename X>
void linear_by_vectors(const X* x, const bf16* w, int64_t N, int64_t K, int64_t blocks, const Sink& sink,
                       const Configuration& tuned) {
  const int64_t bytes = tuned.panel ? tuned.panel : PANEL;
  const int64_t panel = std::max<int64_t>(1, bytes / (int64_t(sizeof(X)) * K * ROWS)) * ROWS;
  const int64_t ahead = tuned.ahead ? tuned.ahead / 2 : std::is_same_v<X, bf16> ? AHEAD : AHEAD_FLOAT;
  at::parallel_for(0, blocks, blocks_per_thread(tuned), [&](int64_t begin, int64_t end) {
    float y[ROWS * MAX_BLOCKS * 16];
    for (int64_t first = 0; first < N; first += panel)
      for (int64_t b = begin; b < end; b += MAX_BLOCKS) {
        const int64_t width = std::min<int64_t>(MAX_BLOCKS, end - b);
        run_in_batches<ROWS>(std::min(panel, N - first), [&](int64_t at, int rows) {
          // The first rows bring the weights into the cache.
          const int64_t n = first + at;
          auto multiply_rows = at ? product<false, bf16, X> : product<true, bf16, X>;
          multiply_rows(w + b * 16 * K, width, x + n * K, rows, K, K, y, MAX_BLOCKS * 16, ahead);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < width; ++i) sink.put(n + r, (b + i) * 16, load(y + (r * MAX_BLOCKS + i) * 16));
        });
      }
  });
}

// x [N, K] times weights packed [M / 16, K / 2, 16, 2], plus a bias and a residual: y [N, M] in bf16, or in fp32 if
// `fp32_out`. With `norm_K`, x is normed first (rms_norm): a call takes as long as a small product.
at::Tensor linear(const at::Tensor& input_NK, const at::Tensor& w_packed, int64_t M,
                  const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& residual_NM, bool fp32_out,
                  const std::optional<at::Tensor>& norm_K, double eps) {
  const at::Tensor x_NK = norm_K ? rms_norm(input_NK, *norm_K, eps) : input_NK;
  const int64_t N = x_NK.size(0), K = x_NK.size(1), blocks = w_packed.size(0);
  const bf16* w = w_packed.const_data_ptr<bf16>();
  const Sink sink(x_NK, M, bias_M, residual_NM, fp32_out);
  const Configuration tuned = Configurations::find(Kernel::LINEAR, M, K, N);
#ifdef __AMX_TILE__
  const at::Tensor x = x_NK.contiguous();
  linear_by_tiles(x.const_data_ptr<bf16>(), w, N, K, blocks, sink, blocks_per_thread(tuned));
#else
#ifdef __AVX512BF16__
  if (pairs_are_fast()) {
    const at::Tensor x = x_NK.contiguous();
    linear_by_vectors(x.const_data_ptr<bf16>(), w, N, K, blocks, sink, tuned);
    return sink.out();
  }
#endif
  const at::Tensor x = x_NK.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  linear_by_vectors(x.const_data_ptr<float>(), w, N, K, blocks, sink, tuned);
#endif
  return sink.out();
}

// A gated MLP plus a residual: down(silu(gate) * up) for rows [gate, up] of the product of x, normed or not, and `gate_up`.
at::Tensor gated_mlp(const at::Tensor& x_NC, const at::Tensor& gate_up, const std::optional<at::Tensor>& gate_up_bias,
                     const at::Tensor& down, const std::optional<at::Tensor>& down_bias, const at::Tensor& residual_NC,
                     int64_t intermediate, const std::optional<at::Tensor>& norm_C, double eps) {
  const at::Tensor rows = linear(x_NC, gate_up, 2 * intermediate, gate_up_bias, std::nullopt, false, norm_C, eps);
  return linear(silu_mul(rows), down, residual_NC.size(1), down_bias, residual_NC, false, std::nullopt, 0);
}
