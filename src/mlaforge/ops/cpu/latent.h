// Multi-head latent attention in the layout latent.
#pragma once
#include "decode.h"
#include "elementwise.h"
#include "lift.h"
#include "linear.h"

// Cached rows that are decompressed at a time, unless one sequence has more.
constexpr int64_t DECOMPRESSED = 4096;

// The angles of every position: cos and sin [positions, D / 2].
struct Angles {
  const float *cos, *sin;
  int64_t positions, pairs;

  // Numbers of a head, pair p being numbers p and p + D / 2, as they are turned at `position`.
  template <typename From, typename To>
  void turn(int64_t position, const From* x, To* y) const {
    // Beyond a sequence's last row nothing is seen.
    const int64_t at = std::min(position, positions - 1) * pairs;
    const float *c = cos + at, *s = sin + at;
    for (int64_t p = 0; p < pairs; ++p) {
      const float a = x[p], b = x[p + pairs];
      y[p] = a * c[p] - b * s[p];
      y[p + pairs] = b * c[p] + a * s[p];
    }
  }
};

// One layer in the layout `latent` (modeling/latent_attention_mla.py, absorbed values), from its projections of the input
// to what o_proj reads: rows [q (H D), c (R)] in; c is written to its slot; the keys of every cached row that is seen are
// decompressed, normed and turned; heads attend with them over c, and what they bring goes through W_uv. A sequence's
// last `nodes` rows stand at their depths where they are a tree. Returns [N, H V].
//
// Limit: 2 R G D FLOPs a cached token to decompress it, for all query tokens of a sequence.
at::Tensor latent(const at::Tensor& both_NX, const at::Tensor& cos_LP, const at::Tensor& sin_LP, const at::Tensor& w_uk,
                  const at::Tensor& w_uv, const at::Tensor& b_k, const at::Tensor& b_v_GV,
                  const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, double eps,
                  const std::optional<at::Tensor>& sinks_H, const at::Tensor& rows_LR,
                  const std::optional<at::Tensor>& whole_LR, at::IntArrayRef format, const at::Tensor& slots_N,
                  const at::Tensor& table_SB, const at::Tensor& seq_lens_S, const at::Tensor& first_S,
                  const at::Tensor& query_start_S1, int64_t block_size, int64_t window, double scale,
                  const std::optional<at::Tensor>& tree_Tn) {
  const Rows rows(rows_LR, whole_LR, format);
  const at::Tensor both = both_NX.contiguous();
  const int64_t N = both.size(0), X = both.size(1), R = rows.width, D = 2 * cos_LP.size(1), GD = b_k.size(0);
  const int64_t G = GD / D, H = (X - R) / D, J = H / G, V = b_v_GV.size(1), W = GD + R;
  const Angles angles{cos_LP.const_data_ptr<float>(), sin_LP.const_data_ptr<float>(), cos_LP.size(0), D / 2};
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; ++n) rows.put(slots[n], both.const_data_ptr<bf16>() + n * X + H * D);

  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor own = both.narrow(1, 0, H * D).reshape({N * H, D});
  if (q_norm) own = rms_norm(own, *q_norm, eps);
  const bf16* queries = own.const_data_ptr<bf16>();
  std::vector<float> q(N * H * D);
  std::vector<int64_t> position_of(N);
  // A sequence's last rows are its query tokens, or all of a tree.
  std::vector<int64_t> depths;
  if (tree_Tn)
    for (int64_t m = 0, n = tree_Tn->size(1); m < n; ++m) {
      const int32_t* back = tree_Tn->const_data_ptr<int32_t>() + m * n;
      depths.push_back(*std::max_element(back, back + n));
    }
  auto depth = [&](int64_t m) { return tree_Tn ? depths[m] : m; };
  auto before = [&](int64_t s) { return seq_lens_S.const_data_ptr<int32_t>()[s] - view.queries(s); };
  for (int64_t s = 0; s < view.sequences(); ++s)
    for (int64_t m = 0; m < view.queries(s); ++m) position_of[view.query(s) + m] = before(s) + depth(m);
  at::parallel_for(0, N, 8, [&](int64_t from, int64_t to) {
    for (int64_t i = from * H; i < to * H; ++i) angles.turn(position_of[i / H], queries + i * D, q.data() + i * D);
  });

  at::Tensor out = at::empty({N, H * V}, both.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  const Lift lift{w_uv.const_data_ptr<bf16>(), w_uv.stride(0), b_v_GV.const_data_ptr<float>(),
                  sinks_H ? sinks_H->const_data_ptr<float>() : nullptr, G, J, R, V};
  const int32_t* tables = table_SB.const_data_ptr<int32_t>();
  for (int64_t s = 0, end; s < view.sequences(); s = end) {
    // Blocks of these sequences, one after another.
    std::vector<int64_t> blocks, begins, starts{0};
    int64_t most = 0;
    for (end = s; end < view.sequences(); ++end) {
      const int64_t count = (view.rows(end) + block_size - 1) / block_size, first = first_S.const_data_ptr<int32_t>()[end];
      if (end > s && (int64_t(blocks.size()) + count) * block_size > DECOMPRESSED) break;
      for (int64_t b = 0; b < count; ++b) {
        blocks.push_back(tables[end * table_SB.size(1) + b]);
        begins.push_back(first + b * block_size);
      }
      starts.push_back(blocks.size());
      most = std::max(most, count);
    }
    const int64_t P = blocks.size() * block_size;
    at::Tensor c = at::empty({P, R}, both.options()), numbered = at::zeros({end - s, most}, table_SB.options());
    bf16* cs = c.mutable_data_ptr<bf16>();
    at::parallel_for(0, blocks.size(), 8, [&](int64_t from, int64_t to) {
      const bf16* row[STRETCH];
      int32_t slots[STRETCH];
      for (int64_t b = from; b < to; ++b)
        for (int64_t t = 0; t < block_size; t += STRETCH) {
          const int64_t count = std::min(STRETCH, block_size - t);
          bf16* own = cs + (b * block_size + t) * R;
          std::iota(slots, slots + count, int32_t(blocks[b] * block_size + t));
          rows.stage(slots, count, {Part{0, R}}, own, row);
          // Whole rows lie in the cache one after another.
          if (row[0] != own) std::copy_n(row[0], count * R, own);
        }
    });
    at::Tensor keys = linear(c, w_uk, GD, b_k, std::nullopt, false);
    if (k_norm) keys = rms_norm(keys.view({P * G, D}), *k_norm, eps);
    const bf16* ks = keys.const_data_ptr<bf16>();
    at::Tensor decompressed = at::empty({P, W}, both.options());
    bf16* to_rows = decompressed.mutable_data_ptr<bf16>();
    at::parallel_for(0, blocks.size(), 4, [&](int64_t from, int64_t to) {
      for (int64_t p = from * block_size; p < to * block_size; ++p) {
        int64_t position = begins[p / block_size] + p % block_size;
        if (const int64_t m = position - before(s); tree_Tn && m >= 0 && m < view.queries(s)) position = before(s) + depth(m);
        for (int64_t g = 0; g < G; ++g) angles.turn(position, ks + p * GD + g * D, to_rows + p * W + g * D);
        std::copy_n(cs + p * R, R, to_rows + p * W + GD);
      }
    });
    int32_t* numbers = numbered.mutable_data_ptr<int32_t>();
    for (int64_t i = 0; i < end - s; ++i)
      for (int64_t b = starts[i]; b < starts[i + 1]; ++b) numbers[i * most + b - starts[i]] = int32_t(b);
    const int64_t base = view.query(s);
    const View part{numbered, seq_lens_S.narrow(0, s, end - s), first_S.narrow(0, s, end - s),
                    query_start_S1.narrow(0, s, end - s + 1) - base, block_size, window, tree_Tn};
    attend(q.data() + base * H * D, H, G, D, R, {D, 0, GD}, {to_rows, W}, part, float(scale),
           [&](int64_t n, const float* latents, const float* lse) { lift(latents, lse, outs + (base + n) * H * V); });
  }
  return out;
}
