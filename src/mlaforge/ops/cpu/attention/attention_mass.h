// Attention mass of query tokens: per cached token, the softmax weights summed over all heads. Reads the keys once, and no
// values. Legend: P query tokens, one per sequence; H query heads, G KV heads, J = H / G, D key dimensions.
#pragma once
#include "attention/vector_attention.h"

constexpr int64_t MASS_TOKENS = 512;  // cached tokens per task

// Returns [P, longest sequence], 0 beyond a sequence's last token. A row begins with the keys of all heads.
at::Tensor attention_mass(const at::Tensor& q_PHD, const at::Tensor& rows_LW, const std::optional<at::Tensor>& unquantized_LW,
                    at::IntArrayRef format, int64_t kv_heads, const at::Tensor& table_PB, const at::Tensor& lengths_P,
                    int64_t block_size, double scale) {
  const at::Tensor q = q_PHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous).mul(scale);
  const int64_t P = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, J = H / G, width = (D + 7) / 8 * 8;
  const Rows rows(rows_LW, unquantized_LW, format);
  const View view{table_PB, lengths_P, at::zeros_like(lengths_P), at::empty(0), block_size, 0, std::nullopt};
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
  // Per task and head: unnormalized softmax weights, their largest logit, and their sum. Reused across layers, because the
  // OS would commit fresh memory page by page.
  static thread_local std::vector<float> workspace;
  workspace.resize(std::max<size_t>(workspace.size(), tasks.size() * H * (MASS_TOKENS + 2)));
  float *weights = workspace.data(), *maxima = weights + tasks.size() * H * MASS_TOKENS, *sums = maxima + tasks.size() * H;
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> q_heads(H * width);
    std::vector<bf16> packed(MASS_TOKENS * width), scratch(rows.scratch_elements(MASS_TOKENS) + 64);
    std::vector<int32_t> slots(MASS_TOKENS);
    std::vector<const bf16*> row(MASS_TOKENS);
    for (int64_t task = begin; task < end; ++task) {
      const auto [p, t] = tasks[task];
      const int64_t count = std::min(MASS_TOKENS, view.length(p) - t), blocks = (count + 15) / 16;
      for (int64_t h = 0; h < H; ++h) std::copy_n(queries + (p * H + h) * D, D, q_heads.data() + h * width);
      view.slots(p, t, count, slots.data());
      rows.prefetch(slots.data(), count, {0, G * D});
      rows.stage(slots.data(), count, {ColumnRange{0, G * D}}, align64(scratch.data()), row.data());
      std::fill(row.begin() + count, row.begin() + blocks * 16, row[0]);
      for (int64_t g = 0; g < G; ++g) {
        for (int64_t b = 0; b < blocks; ++b) pack_keys(row.data() + b * 16, g * D, D, packed.data() + b * 16 * width);
        product<false>(packed.data(), blocks, q_heads.data() + g * J * width, J, width, width,
                       weights + (task * H + g * J) * MASS_TOKENS, MASS_TOKENS);
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
