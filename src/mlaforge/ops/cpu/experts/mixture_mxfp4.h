// Mixture of experts with MXFP4 weights, in one call: gate and up, the clamped SwiGLU, down, the weighted sum. Each active
// expert's weights are read once for all its tokens.
//
// Limit: few tokens, reading 6 I C codes of 4.25 bits per active expert; from two or three tokens per expert on, arithmetic.
//
// Legend: N tokens, K experts per token, P = N K (token, expert) pairs, C hidden size, I intermediate size, E experts.
#pragma once
#include <atomic>

#include "linear/elementwise.h"
#include "experts/mxfp4.h"
#include "linear/product.h"
#include "simd/configuration.h"

constexpr int MX_ROWS = 4, MX_OUTPUTS = 4;  // register block: as many accumulators as there are registers
constexpr int64_t MX_TASK = 256;  // outputs of an expert per task; a multiple of MX_OUTPUTS

// (token, expert) pairs grouped by expert, in token order within an expert.
struct Pairing {
  std::vector<int64_t> order, starts, active;

  Pairing(const int64_t* topk_ids, int64_t pairs, int64_t experts) : order(pairs), starts(experts + 1) {
    for (int64_t p = 0; p < pairs; ++p) {
      TORCH_CHECK(topk_ids[p] >= 0 && topk_ids[p] < experts, "expert ", topk_ids[p], " of ", experts);
      ++starts[topk_ids[p] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (starts[e + 1]) active.push_back(e);
      starts[e + 1] += starts[e];
    }
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t p = 0; p < pairs; ++p) order[next[topk_ids[p]]++] = p;
  }
};

// `outputs` of an expert are a task.
// Calls put(pair, expert, output, y) for the product of each active expert's weight [M, in] with the rows of its pairs,
// row_of(pair). Experts have different numbers of tokens, so threads take tasks dynamically. Outputs of one register block
// are far apart in a task: memory delivers half as much again to a few sequential streams as to interleaved neighbours.
template <typename RowOf, typename Put>
void mixture_product(const uint8_t* codes, const uint8_t* exponents, int64_t M, int64_t in, const Pairing& pairing,
                     const Int16Rows& rows, int64_t outputs, RowOf&& row_of, Put&& put) {
  const int64_t tasks_per_expert = (M + outputs - 1) / outputs, tasks = tasks_per_expert * int64_t(pairing.active.size());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t e = pairing.active[task / tasks_per_expert], begin = task % tasks_per_expert * outputs;
      const int64_t output_stride = (std::min(M, begin + outputs) - begin) / MX_OUTPUTS;
      const int64_t* pairs = pairing.order.data() + pairing.starts[e];
      const int64_t count = pairing.starts[e + 1] - pairing.starts[e];
      for (int64_t m = begin; m < begin + output_stride; ++m) {
        const Mxfp4 weights = Mxfp4{codes, exponents, in}.from(e * M + m);
        run_in_batches<MX_ROWS>(count, [&](int64_t first, auto batch) {
          constexpr int R = batch;
          const int16_t* x[R];
          for (int r = 0; r < R; ++r) x[r] = rows.row(row_of(pairs[first + r]));
          float y[R * MX_OUTPUTS];
          mxfp4_product<R, MX_OUTPUTS>(weights, output_stride, x, y);
          for (int r = 0; r < R; ++r) {
            const int64_t pair = pairs[first + r];
            const float scale = rows.scale(row_of(pair));
            for (int b = 0; b < MX_OUTPUTS; ++b) put(pair, e, m + b * output_stride, y[r * MX_OUTPUTS + b] * scale);
          }
        });
      }
    }
  });
}

// A bias in fp32 or bf16.
class Bias {
 public:
  explicit Bias(const at::Tensor& bias) {
    if (bias.scalar_type() == at::kFloat) fp32_ = bias.const_data_ptr<float>();
    else bf16_ = bias.const_data_ptr<bf16>();
  }
  float operator[](int64_t i) const { return fp32_ ? fp32_[i] : float(bf16_[i]); }

 private:
  const float* fp32_ = nullptr;
  const bf16* bf16_ = nullptr;
};

template <typename T>
at::Tensor mixture_typed(const at::Tensor& x_NC, const at::Tensor& topk_ids_NK, const at::Tensor& topk_weights_NK,
                      const at::Tensor& up_blocks, const at::Tensor& up_scales, const at::Tensor& up_bias,
                      const at::Tensor& down_blocks, const at::Tensor& down_scales, const at::Tensor& down_bias,
                      float alpha, float limit) {
  const int64_t N = x_NC.size(0), C = x_NC.size(1), K = topk_ids_NK.size(1), P = N * K;
  const int64_t E = up_blocks.size(0), I = up_blocks.size(1) / 2;
  const Configuration tuned = Configurations::find(Kernel::EXPERTS, I, C, N, E, K);
  const int64_t task = tuned.task ? (tuned.task + MX_OUTPUTS - 1) / MX_OUTPUTS * MX_OUTPUTS : MX_TASK;
  const T* xs = x_NC.const_data_ptr<T>();
  auto load16 = [](const T* from) {
    if constexpr (std::is_same_v<T, bf16>) return widen(from, 16);
    else return load(from);
  };
  const Pairing pairing(topk_ids_NK.const_data_ptr<int64_t>(), P, E);
  const float* weights = topk_weights_NK.const_data_ptr<float>();
  const Bias b_up(up_bias), b_down(down_bias);
  Int16Rows rows(N, C), gated(P, I);
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) rows.put(n, [&](int64_t k) { return load16(xs + n * C + k); });
  });
  Scratch scratch;
  float *hidden = scratch.get<float>(P * 2 * I), *outs = scratch.get<float>(P * C);
  // Gate and up outputs alternate in the weight; they are separated here.
  mixture_product(
      up_blocks.const_data_ptr<uint8_t>(), up_scales.const_data_ptr<uint8_t>(), 2 * I, C, pairing, rows, task,
      [&](int64_t p) { return p / K; },
      [&](int64_t p, int64_t e, int64_t m, float y) { hidden[(2 * p + m % 2) * I + m / 2] = y + b_up[e * 2 * I + m]; });
  const Floats upper = splat(limit), lower = splat(-limit), one = splat(1.0f), slope = splat(alpha);
  at::parallel_for(0, P, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float *gates = hidden + 2 * p * I, *ups = gates + I;
      for (int64_t i = 0; i < I; i += 16) {
        Floats gate = load(gates + i), up = load(ups + i);
        gate = select(greater(gate, upper), upper, gate);
        up = select(greater(up, upper), upper, select(greater(lower, up), lower, up));
        store(gates + i, (up + one) * gate * logistic(gate * slope));
      }
      gated.put(p, [&](int64_t k) { return load(gates + k); });
    }
  });
  mixture_product(
      down_blocks.const_data_ptr<uint8_t>(), down_scales.const_data_ptr<uint8_t>(), C, I, pairing, gated, task,
      [](int64_t p) { return p; },
      [&](int64_t p, int64_t e, int64_t m, float y) { outs[p * C + m] = (y + b_down[e * C + m]) * weights[p]; });
  at::Tensor out = at::empty({N, C}, x_NC.options());
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, N, 4, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t c = 0; c < C; c += 16) {
        Floats y = splat(0.0f);
        for (int64_t k = 0; k < K; ++k) y = y + load(outs + (n * K + k) * C + c);
        if constexpr (std::is_same_v<T, bf16>) narrow(to + n * C + c, y, 16);
        else store(to + n * C + c, y);
      }
  });
  return out;
}

// x [N, C] in bf16 or fp32 through its experts topk_ids [N, K] with topk_weights [N, K]: returns [N, C] in x's dtype.
// Weights as in the checkpoint: blocks u8 [E, out, in / 32, 16], scales u8 [E, out, in / 32]; biases [E, out] in bf16 or
// fp32.
at::Tensor mixture_mxfp4(const at::Tensor& x_NC, const at::Tensor& topk_ids_NK, const at::Tensor& topk_weights_NK,
                         const at::Tensor& up_blocks, const at::Tensor& up_scales, const at::Tensor& up_bias,
                         const at::Tensor& down_blocks, const at::Tensor& down_scales, const at::Tensor& down_bias,
                         double alpha, double limit) {
  const at::Tensor x = x_NC.contiguous(), topk_ids = topk_ids_NK.contiguous();
  const at::Tensor weights = topk_weights_NK.to(at::kFloat).contiguous();
  TORCH_CHECK(x.size(1) == up_blocks.size(2) * 32 && down_blocks.size(1) == x.size(1) &&
                  up_blocks.size(1) == down_blocks.size(2) * 64 && weights.sizes() == topk_ids.sizes(),
              "shapes of hidden states, experts and routing weights do not match");
  auto mixture = x.scalar_type() == at::kBFloat16 ? mixture_typed<bf16> : mixture_typed<float>;
  return mixture(x, topk_ids, weights, up_blocks, up_scales, up_bias, down_blocks, down_scales, down_bias, float(alpha),
            float(limit));
}
