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

// Where a row's KV heads are: the keys of all heads, then, from element `value_offset` on, their values. 0 if values are a part
// of the keys.
struct KvHeads {
  int64_t count, value_dim, value_offset;
};

// Attention of a step's queries over `rows`. `probed`: sequences, without a window, whose attention mass is returned. Returns
// the output, its lse, and the mass [probed sequences, longest].
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> decode_with_mass(const at::Tensor& q_NHD, const KvHeads& heads,
                                                                       const Rows& rows, const View& view, double scale,
                                                                       at::IntArrayRef probed) {
  const at::Tensor q = q_NHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = q.size(0), H = q.size(1), D = q.size(2), G = heads.count, V = heads.value_dim;
  at::Tensor out = at::empty({N, H, V}, q_NHD.options()), lse = at::empty({N, H}, q.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  float* lses = lse.mutable_data_ptr<float>();
  Attention attention{q.const_data_ptr<float>(), H, G, D, V, {D, V, heads.value_offset}, rows, view, float(scale)};
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
  const at::Tensor last_P = at::tensor(at::IntArrayRef(last));
  return {out, lse, attention_mass(q.index_select(0, last_P), G, rows, view.text(probed), scale)};
#else
  return {out, lse, mass_from_weights(*probe, view, probed, lses)};
#endif
}

inline std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& q_NHD, const KvHeads& heads, const Rows& rows,
                                                 const View& view, double scale) {
  const auto [out, lse, none] = decode_with_mass(q_NHD, heads, rows, view, scale, {});
  return {out, lse};
}
