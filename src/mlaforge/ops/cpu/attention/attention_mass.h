// Attention mass of query tokens: per cached token, the softmax weights summed over all heads. Reads the keys once, and no
// values. Legend: P query tokens, one per sequence; H query heads, G KV heads, J = H / G, D key dimensions.
#pragma once
#include "attention/vector_attention.h"

constexpr int64_t MASS_TOKENS = 512;  // cached tokens per task

// Returns [P, longest sequence], 0 beyond a sequence's last token. A row begins with the keys of all heads.
inline at::Tensor attention_mass(const at::Tensor& q_PHD, int64_t kv_heads, const Rows& rows, const View& view, double scale) {
  const at::Tensor q = q_PHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous).mul(scale);
  const int64_t P = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, J = H / G, width = (D + 7) / 8 * 8;
  const float* queries = q.const_data_ptr<float>();
  std::vector<std::pair<int64_t, int64_t>> tasks;
  std::vector<int64_t> first_task(1, 0);  // of each query token
  int64_t longest = 0;
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t t = 0; t < view.length(p); t += MASS_TOKENS) tasks.push_back({p, t});
    first_task.push_back(tasks.size()), longest = std::max(longest, view.length(p));
  }
  at::Tensor mass = at::zeros({P, longest}, q.options());
  float* to_mass = mass.mutable_data_ptr<float>();
  // Per task and head: unnormalized softmax weights, their largest logit, and their sum.
  Scratch scratch;
  const int64_t columns = int64_t(tasks.size()) * H;
  auto* weights = scratch.get<float>(columns * MASS_TOKENS);
  float *maxima = scratch.get<float>(columns), *sums = scratch.get<float>(columns);
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    auto* q_heads = scratch.filled(H * width, 0.0f);
    bf16 *packed = scratch.get<bf16>(MASS_TOKENS * width), *decoded = scratch.get<bf16>(rows.scratch_elements(MASS_TOKENS));
    auto* slots = scratch.get<int32_t>(MASS_TOKENS);
    auto** row = scratch.get<const bf16*>(MASS_TOKENS);
    for (int64_t task = begin; task < end; ++task) {
      const auto [p, t] = tasks[task];
      const int64_t count = std::min(MASS_TOKENS, view.length(p) - t), blocks = (count + 15) / 16;
      for (int64_t h = 0; h < H; ++h) std::copy_n(queries + (p * H + h) * D, D, q_heads + h * width);
      view.slots(p, t, count, slots);
      rows.prefetch(slots, count, {0, G * D});
      rows.stage(slots, count, {ColumnRange{0, G * D}}, decoded, row);
      std::fill(row + count, row + blocks * 16, row[0]);
      for (int64_t g = 0; g < G; ++g) {
        for (int64_t b = 0; b < blocks; ++b) pack_keys(row + b * 16, g * D, D, packed + b * 16 * width);
        product<false>(packed, blocks, q_heads + g * J * width, J, width, width, weights + (task * H + g * J) * MASS_TOKENS,
                       MASS_TOKENS);
      }
      for (int64_t h = 0; h < H; ++h) {
        float* weight = weights + (task * H + h) * MASS_TOKENS;
        Floats largest = splat(-INF), total = splat(0.0f);
        for (int64_t i = 0; i < count; i += 16)
          largest = max(largest, select(lanes_between(0, count - i), load(weight + i), largest));
        const float peak = reduce_max(largest);
        for (int64_t i = 0; i < count; i += 16) {
          const Floats weight16 = select(lanes_between(0, count - i), exponential(load(weight + i) - splat(peak)), splat(0.0f));
          total = total + weight16;
          store(weight + i, weight16);
        }
        maxima[task * H + h] = peak, sums[task * H + h] = reduce_add(total);
      }
    }
  });
  at::parallel_for(0, tasks.size(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const auto [p, t] = tasks[task];
      const int64_t count = std::min(MASS_TOKENS, view.length(p) - t);
      for (int64_t h = 0; h < H; ++h) {
        float peak = -INF, total = 0;
        for (int64_t i = first_task[p]; i < first_task[p + 1]; ++i) peak = std::max(peak, maxima[i * H + h]);
        for (int64_t i = first_task[p]; i < first_task[p + 1]; ++i)
          total += sums[i * H + h] * std::exp(maxima[i * H + h] - peak);
        const Floats factor = splat(std::exp(maxima[task * H + h] - peak) / total);
        const float* weight = weights + (task * H + h) * MASS_TOKENS;
        float* to = to_mass + p * longest + t;
        for (int64_t i = 0; i < count; i += 16)
          store(to + i, fma(load(weight + i), factor, load(to + i, count - i)), count - i);
      }
    }
  });
  return mass;
}
