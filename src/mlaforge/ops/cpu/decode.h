// Attention over the paged cache as an operation: by tiles where the processor has them, else by vectors.
#pragma once
#include "attended.h"
#ifdef __AMX_TILE__
#include "tiled_attention.h"
#endif

template <typename Finish>
void attend(const Attention& attention, Finish finish) {
#ifdef __AMX_TILE__
  // Whatever its blocks are: rows have one result in all of them.
  if (attention.codes()) return PagedAttention<TileKernel<Int8Tiles>>(attention).run(finish);
  if (attention.D % 2 == 0) return PagedAttention<TileKernel<Bf16Tiles>>(attention).run(finish);
#elif defined(__AVX512BF16__)
  if (pairs_are_fast() && !attention.codes()) return PagedAttention<VectorKernel<bf16, bf16>>(attention).run(finish);
#endif
  if (attention.codes()) return PagedAttention<VectorKernel<int8_t, int16_t>>(attention).run(finish);
  PagedAttention<VectorKernel<bf16, float>>(attention).run(finish);
}

template <typename Finish>
void attend(const float* q, int64_t H, int64_t G, int64_t D, int64_t V, const Layout& row, const Rows& rows, const View& view,
            float scale, Finish finish) {
  attend(Attention{q, H, G, D, V, row, rows, view, scale}, finish);
}

// Where the attention of the last query tokens of sequences `wanted` falls, as attended.h has it, from what attention kept.
inline at::Tensor attended_by(const Shares& shares, const View& view, at::IntArrayRef wanted, const float* lse_NH) {
  int64_t longest = 0;
  for (const int64_t s : wanted) longest = std::max(longest, view.length(s));
  const int64_t W = wanted.size(), H = shares.H, chunks = shares.chunks;
  at::Tensor mass = at::zeros({W, longest}, at::kFloat);
  float* masses = mass.mutable_data_ptr<float>();
  at::parallel_for(0, W * chunks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t w = i / chunks, chunk = i % chunks, s = wanted[w], base = chunk * CHUNK;
      const int64_t count = std::min(CHUNK, view.length(s) - base);
      for (int64_t h = 0; h < H && count > 0; ++h) {
        const int64_t place = (w * H + h) * chunks + chunk;
        const Floats share = all(std::exp(shares.tops[place] - lse_NH[(view.query(s + 1) - 1) * H + h]));
        const float* weight = shares.weights + place * CHUNK;
        float* to = masses + w * longest + base;
        for (int64_t t = 0; t < count; t += 16) store(to + t, fma(load(weight + t), share, load(to + t, count - t)), count - t);
      }
    }
  });
  return mass;
}

// `value_offset`: where in a row the values begin, behind the keys of all heads or, as a part of them, at 0. `wanted`:
// sequences without a window of which is told where the attention of their last query token falls.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> decode_and_watch(
    const at::Tensor& q_NHD, const at::Tensor& rows_LW, const std::optional<at::Tensor>& whole_LW, at::IntArrayRef format,
    int64_t kv_heads, int64_t value_dim, int64_t value_offset, const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
    const at::Tensor& first_S, const at::Tensor& query_start_S1, int64_t block_size, int64_t window, double scale,
    const std::optional<at::Tensor>& tree_Tn, at::IntArrayRef wanted) {
  const at::Tensor q = q_NHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, V = value_dim;
  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor out = at::empty({N, H, V}, q_NHD.options()), lse = at::empty({N, H}, q.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  float* lses = lse.mutable_data_ptr<float>();
  Attention attention{q.const_data_ptr<float>(), H, G, D, V, {D, V, value_offset}, {rows_LW, whole_LW, format}, view, float(scale)};
#ifndef __AMX_TILE__
  std::optional<Shares> shares;
  if (!wanted.empty()) attention.shares = &shares.emplace(view, H, wanted);
#endif
  attend(attention, [&](int64_t n, const float* attended, const float* own) {
    for (int64_t i = 0; i < H * V; ++i) outs[n * H * V + i] = bf16(attended[i]);
    std::copy_n(own, H, lses + n * H);
  });
  if (wanted.empty()) return {out, lse, at::empty({0, 0}, q.options())};
#ifdef __AMX_TILE__
  // Tiles keep none: the keys are read once more.
  std::vector<int64_t> last;
  for (const int64_t s : wanted) last.push_back(view.query(s + 1) - 1);
  const at::Tensor last_W = at::tensor(at::IntArrayRef(last)), wanted_W = at::tensor(wanted);
  return {out, lse, attended(q.index_select(0, last_W), rows_LW, whole_LW, format, G, table_SB.index_select(0, wanted_W),
                             seq_lens_S.index_select(0, wanted_W), block_size, scale)};
#else
  return {out, lse, attended_by(*shares, view, wanted, lses)};
#endif
}

std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& q_NHD, const at::Tensor& rows_LW,
                                          const std::optional<at::Tensor>& whole_LW, at::IntArrayRef format,
                                          int64_t kv_heads, int64_t value_dim, int64_t value_offset,
                                          const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                          const at::Tensor& first_S, const at::Tensor& query_start_S1,
                                          int64_t block_size, int64_t window, double scale,
                                          const std::optional<at::Tensor>& tree_Tn) {
  const auto [out, lse, none] = decode_and_watch(q_NHD, rows_LW, whole_LW, format, kv_heads, value_dim, value_offset, table_SB,
                                                 seq_lens_S, first_S, query_start_S1, block_size, window, scale, tree_Tn, {});
  return {out, lse};
}
