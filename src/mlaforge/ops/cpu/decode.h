// Attention over the paged cache as an operation: by tiles where the processor has them, else by vectors.
#pragma once
#include "vector_attention.h"
#ifdef __AMX_TILE__
#include "tiled_attention.h"
#endif

template <typename Finish>
void attend(const Attention& attention, Finish finish) {
#ifdef __AMX_TILE__
  // Sixteen rows of a tile lie one after another in a block.
  if (attention.view.block_size % 16 == 0 && attention.codes())
    return PagedAttention<TileKernel<Int8Tiles>>(attention).run(finish);
  if (attention.view.block_size % 16 == 0 && attention.D % 2 == 0)
    return PagedAttention<TileKernel<Bf16Tiles>>(attention).run(finish);
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

// `value_offset`: where in a row the values begin, behind the keys of all heads or, as a part of them, at 0.
std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& q_NHD, const at::Tensor& rows_LW,
                                          const std::optional<at::Tensor>& whole_LW, at::IntArrayRef format,
                                          int64_t kv_heads, int64_t value_dim, int64_t value_offset,
                                          const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                          const at::Tensor& first_S, const at::Tensor& query_start_S1,
                                          int64_t block_size, int64_t window, double scale,
                                          const std::optional<at::Tensor>& tree_Tn) {
  const at::Tensor q = q_NHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = q.size(0), H = q.size(1), D = q.size(2), G = kv_heads, V = value_dim;
  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor out = at::empty({N, H, V}, q_NHD.options()), lse = at::empty({N, H}, q.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  float* lses = lse.mutable_data_ptr<float>();
  attend(q.const_data_ptr<float>(), H, G, D, V, {D, V, value_offset}, {rows_LW, whole_LW, format}, view, float(scale),
         [&](int64_t n, const float* attended, const float* own) {
           for (int64_t i = 0; i < H * V; ++i) outs[n * H * V + i] = bf16(attended[i]);
           std::copy_n(own, H, lses + n * H);
         });
  return {out, lse};
}

