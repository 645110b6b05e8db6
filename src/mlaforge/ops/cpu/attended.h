// Where the attention of some query tokens falls: over each cached token, the sum of all heads' shares. What is read is the
// keys alone, once. Legend: W query tokens, one a sequence; H query heads, G key heads, J = H / G, D key dimensions.
#pragma once
#include "vector_attention.h"

constexpr int64_t ATTENDED = 512;  // cached tokens of a task

// [W, the longest sequence's tokens], 0 behind a sequence's last. Keys stand at the beginning of a row, head by head.
at::Tensor attended(const at::Tensor& q_WHD, const at::Tensor& rows_LW, const std::optional<at::Tensor>& whole_LW,
                    at::IntArrayRef format, int64_t kv_heads, const at::Tensor& table_WB, const at::Tensor& lengths_W,
                    int64_t block_size, double scale) {
  const at::Tensor q = q_WHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous).mul(scale);
  const int64_t W = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, J = H / G, width = (D + 7) / 8 * 8;
  const Rows rows(rows_LW, whole_LW, format);
  const View view{table_WB, lengths_W, at::zeros_like(lengths_W), at::empty(0), block_size, 0, std::nullopt};
  const float* queries = q.const_data_ptr<float>();
  std::vector<std::pair<int64_t, int64_t>> tasks;
  std::vector<int64_t> first(1, 0);  // of each query token's tasks
  int64_t longest = 0;
  for (int64_t w = 0; w < W; ++w) {
    for (int64_t t = 0; t < view.length(w); t += ATTENDED) tasks.push_back({w, t});
    first.push_back(tasks.size()), longest = std::max(longest, view.length(w));
  }
  at::Tensor mass = at::zeros({W, longest}, q.options());
  float* masses = mass.mutable_data_ptr<float>();
  // For each task and head weights, which count from the largest logit, that, and their sum. Kept from layer to layer:
  // fresh memory would be given page by page.
  static thread_local std::vector<float> kept;
  kept.resize(std::max<size_t>(kept.size(), tasks.size() * H * (ATTENDED + 2)));
  float *weights = kept.data(), *most = weights + tasks.size() * H * ATTENDED, *sums = most + tasks.size() * H;
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> own(H * width);
    std::vector<bf16> packed(ATTENDED * width), scratch(rows.scratch(ATTENDED) + 64);
    std::vector<int32_t> slots(ATTENDED);
    std::vector<const bf16*> row(ATTENDED);
    for (int64_t task = begin; task < end; ++task) {
      const auto [w, t] = tasks[task];
      const int64_t count = std::min(ATTENDED, view.length(w) - t), blocks = (count + 15) / 16;
      for (int64_t h = 0; h < H; ++h) std::copy_n(queries + (w * H + h) * D, D, own.data() + h * width);
      view.slots(w, t, count, slots.data());
      rows.fetch(slots.data(), count, {0, G * D});
      rows.stage(slots.data(), count, {Part{0, G * D}}, align64(scratch.data()), row.data());
      std::fill(row.begin() + count, row.begin() + blocks * 16, row[0]);
      for (int64_t g = 0; g < G; ++g) {
        for (int64_t b = 0; b < blocks; ++b) pack_keys(row.data() + b * 16, g * D, D, packed.data() + b * 16 * width);
        product<false>(packed.data(), blocks, own.data() + g * J * width, J, width, width,
                       weights + (task * H + g * J) * ATTENDED, ATTENDED);
      }
      for (int64_t h = 0; h < H; ++h) {
        float* weight = weights + (task * H + h) * ATTENDED;
        Floats largest = all(-INF), total = all(0.0f);
        for (int64_t i = 0; i < count; i += 16) largest = max(largest, select(between(0, count - i), load(weight + i), largest));
        const float peak = greatest(largest);
        for (int64_t i = 0; i < count; i += 16) {
          const Floats share = select(between(0, count - i), exponential(load(weight + i) - all(peak)), all(0.0f));
          total = total + share;
          store(weight + i, share);
        }
        most[task * H + h] = peak, sums[task * H + h] = sum(total);
      }
    }
  });
  at::parallel_for(0, tasks.size(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const auto [w, t] = tasks[task];
      const int64_t count = std::min(ATTENDED, view.length(w) - t);
      for (int64_t h = 0; h < H; ++h) {
        float peak = -INF, total = 0;
        for (int64_t i = first[w]; i < first[w + 1]; ++i) peak = std::max(peak, most[i * H + h]);
        for (int64_t i = first[w]; i < first[w + 1]; ++i) total += sums[i * H + h] * std::exp(most[i * H + h] - peak);
        const Floats share = all(std::exp(most[task * H + h] - peak) / total);
        const float* weight = weights + (task * H + h) * ATTENDED;
        float* to = masses + w * longest + t;
        for (int64_t i = 0; i < count; i += 16)
          store(to + i, fma(load(weight + i), share, load(to + i, count - i)), count - i);
      }
    }
  });
  return mass;
}
