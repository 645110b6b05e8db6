// Post-ops of a product.
#pragma once
#include "simd/vectors.h"

// Adds a bias and a residual to a product [N, M] and stores it, in bf16 or fp32.
class Sink {
 public:
  Sink(const at::Tensor& x_NK, int64_t M, const std::optional<at::Tensor>& bias_M,
       const std::optional<at::Tensor>& residual_NM, bool fp32_out)
      : M_(M), out_(at::empty({x_NK.size(0), M}, x_NK.options().dtype(fp32_out ? at::kFloat : at::kBFloat16))) {
    if (bias_M) bias_ = bias_M->const_data_ptr<bf16>();
    if (residual_NM) residual_tensor_ = residual_NM->contiguous(), residual_ = residual_tensor_.const_data_ptr<bf16>();
    if (fp32_out) fp32_out_ = out_.mutable_data_ptr<float>();
    else bf16_out_ = out_.mutable_data_ptr<bf16>();
  }

  int64_t outputs() const { return M_; }
  const at::Tensor& out() const { return out_; }

  // Outputs m to m + 15 of row n.
  void put(int64_t n, int64_t m, Floats y) const {
    const int64_t count = std::min<int64_t>(16, M_ - m);
    if (bias_) y = y + widen(bias_ + m, count);
    if (residual_) y = y + widen(residual_ + n * M_ + m, count);
    if (fp32_out_) store(fp32_out_ + n * M_ + m, y, count);
    else narrow(bf16_out_ + n * M_ + m, y, count);
  }

 private:
  const int64_t M_;
  at::Tensor out_, residual_tensor_;
  const bf16 *bias_ = nullptr, *residual_ = nullptr;
  bf16* bf16_out_ = nullptr;
  float* fp32_out_ = nullptr;
};
