// Where a product goes.
#pragma once
#include "vectors.h"

// What is added to a product [N, M] on its way out, and where it goes.
struct Sink {
  const bf16 *bias, *plus;
  bf16* out;
  int64_t M;

  // Outputs m to m + 15 of row n.
  void put(int64_t n, int64_t m, Floats y) const {
    const int64_t count = std::min<int64_t>(16, M - m);
    if (bias) y = y + widened(bias + m, count);
    if (plus) y = y + widened(plus + n * M + m, count);
    narrow(out + n * M + m, y, count);
  }
};
