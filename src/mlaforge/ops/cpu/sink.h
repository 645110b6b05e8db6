// Where a product goes.
#pragma once
#include "vectors.h"

// What is added to a product [N, M] on its way out, and where it goes: to bf16, or as it is, to fp32.
class Sink {
 public:
  Sink(const at::Tensor& x_NK, int64_t M, const std::optional<at::Tensor>& bias_M,
       const std::optional<at::Tensor>& residual_NM, bool wide)
      : M_(M), out_(at::empty({x_NK.size(0), M}, x_NK.options().dtype(wide ? at::kFloat : at::kBFloat16))) {
    if (bias_M) bias_ = bias_M->const_data_ptr<bf16>();
    if (residual_NM) plus_held_ = residual_NM->contiguous(), plus_ = plus_held_.const_data_ptr<bf16>();
    if (wide) wide_ = out_.mutable_data_ptr<float>();
    else narrow_ = out_.mutable_data_ptr<bf16>();
  }

  int64_t outputs() const { return M_; }
  const at::Tensor& out() const { return out_; }

  // Outputs m to m + 15 of row n.
  void put(int64_t n, int64_t m, Floats y) const {
    const int64_t count = std::min<int64_t>(16, M_ - m);
    if (bias_) y = y + widened(bias_ + m, count);
    if (plus_) y = y + widened(plus_ + n * M_ + m, count);
    if (wide_) store(wide_ + n * M_ + m, y, count);
    else narrow(narrow_ + n * M_ + m, y, count);
  }

 private:
  const int64_t M_;
  at::Tensor out_, plus_held_;
  const bf16 *bias_ = nullptr, *plus_ = nullptr;
  bf16* narrow_ = nullptr;
  float* wide_ = nullptr;
};
