// Attention over the paged cache as an op, with AMX tiles if the processor has them, else with vectors.
#pragma once
#include "attention/attention_mass.h"
#ifdef __AMX_TILE__
#include "attention/tiled_attention.h"
#endif

template <typename Finish>
void attend(const Attention& attention, Finish finish) {
#ifdef __AMX_TILE__
  // For every block size: a row's result must not depend on it.
  if (attention.reads_codes()) return PagedAttention<TileKernel<Int8Tiles>>(attention).run(finish);
  if (attention.D % 2 == 0) return PagedAttention<TileKernel<Bf16Tiles>>(attention).run(finish);
#elif defined(__AVX512BF16__)
  if (pairs_are_fast() && !attention.reads_codes()) return PagedAttention<VectorKernel<bf16, bf16>>(attention).run(finish);
#endif
  if (attention.reads_codes()) return PagedAttention<VectorKernel<int8_t, int16_t>>(attention).run(finish);
  PagedAttention<VectorKernel<bf16, float>>(attention).run(finish);
}

template <typename Finish>
void attend(const float* q, int64_t H, int64_t G, int64_t D, int64_t V, const Layout& row, const Rows& rows, const View& view,
            float scale, Finish finish) {
  attend(Attention{q, H, G, D, V, row, rows, view, scale}, finish);
}

// The attention mass of the last query tokens of `sequences` (attention_mass.h), from weights that attention recorded.
inline at::Tensor mass_from_weights(const ProbeWeights& probe, const View& view, at::IntArrayRef sequences,
                                    const float* lse_NH) {
  int64_t longest = 0;
  for (const int64_t s : sequences) longest = std::max(longest, view.length(s));
  const int64_t W = sequences.size(), H = probe.H, chunks = probe.chunks;
  at::Tensor mass = at::zeros({W, longest}, at::kFloat);
  float* to_mass = mass.mutable_data_ptr<float>();
  at::parallel_for(0, W * chunks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t w = i / chunks, chunk = i % chunks, s = sequences[w], base = chunk * CHUNK;
      const int64_t count = std::min(CHUNK, view.length(s) - base);
      for (int64_t h = 0; h < H && count > 0; ++h) {
        const int64_t i_chunk = (w * H + h) * chunks + chunk;
        const Floats factor = splat(std::exp(probe.chunk_max[i_chunk] - lse_NH[(view.query(s + 1) - 1) * H + h]));
        const float* weight = probe.weights + i_chunk * CHUNK;
        float* to = to_mass + w * longest + base;
        for (int64_t t = 0; t < count; t += 16)
          store(to + t, fma(load(weight + t), factor, load(to + t, count - t)), count - t);
      }
    }
  });
  return mass;
}

// `value_offset`: first element of the values in a row: after the keys of all heads, or 0 if values are a part of the keys.
// `probed`: sequences, without a window, whose attention mass is returned.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> decode_with_mass(
    const at::Tensor& q_NHD, const at::Tensor& rows_LW, const std::optional<at::Tensor>& unquantized_LW, at::IntArrayRef format,
    int64_t kv_heads, int64_t value_dim, int64_t value_offset, const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
    const at::Tensor& first_S, const at::Tensor& query_start_S1, int64_t block_size, int64_t window, double scale,
    const std::optional<at::Tensor>& tree_Tn, at::IntArrayRef probed) {
  const at::Tensor q = q_NHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, V = value_dim;
  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor out = at::empty({N, H, V}, q_NHD.options()), lse = at::empty({N, H}, q.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  float* lses = lse.mutable_data_ptr<float>();
  Attention attention{q.const_data_ptr<float>(), H, G, D, V, {D, V, value_offset}, {rows_LW, unquantized_LW, format},
                      view, float(scale)};
#ifndef __AMX_TILE__
  std::optional<ProbeWeights> probe;
  if (!probed.empty()) attention.probe = &probe.emplace(view, H, probed);
#endif
  attend(attention, [&](int64_t n, const float* values, const float* head_lse) {
    for (int64_t i = 0; i < H * V; ++i) outs[n * H * V + i] = bf16(values[i]);
    std::copy_n(head_lse, H, lses + n * H);
  });
  if (probed.empty()) return {out, lse, at::empty({0, 0}, q.options())};
#ifdef __AMX_TILE__
  // Tile kernels record no weights, so the keys are read a second time.
  std::vector<int64_t> last;
  for (const int64_t s : probed) last.push_back(view.query(s + 1) - 1);
  const at::Tensor last_P = at::tensor(at::IntArrayRef(last)), probed_P = at::tensor(probed);
  return {out, lse, attention_mass(q.index_select(0, last_P), rows_LW, unquantized_LW, format, G,
                                   table_SB.index_select(0, probed_P), seq_lens_S.index_select(0, probed_P), block_size,
                                   scale)};
#else
  return {out, lse, mass_from_weights(*probe, view, probed, lses)};
#endif
}

std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& q_NHD, const at::Tensor& rows_LW,
                                          const std::optional<at::Tensor>& unquantized_LW, at::IntArrayRef format,
                                          int64_t kv_heads, int64_t value_dim, int64_t value_offset,
                                          const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                          const at::Tensor& first_S, const at::Tensor& query_start_S1,
                                          int64_t block_size, int64_t window, double scale,
                                          const std::optional<at::Tensor>& tree_Tn) {
  const auto [out, lse, none] = decode_with_mass(q_NHD, rows_LW, unquantized_LW, format, kv_heads, value_dim, value_offset,
                                                 table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, scale,
                                                 tree_Tn, {});
  return {out, lse};
}
