// Decoding on a CPU with AVX-512 BF16: few rows times a weight matrix, and attention of a few query tokens per sequence
// over the paged cache. Both are limited by reading memory once; torch's own paths read slower and cost 30 us a call.
// Compiled on first use by ops/native.py, which holds the reference beside it. Threads are torch's own.
//
// Legend: N rows, K input width, M output width; S sequences, H query heads, G key heads, J = H / G, D key and V value
// dimensions, L slots, W numbers of a cached row.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using bf16 = at::BFloat16;
constexpr int64_t LANES = 32;       // bf16 numbers of a vector
constexpr int64_t TILE = 8;         // rows of x that share one pass over a block of weights
constexpr int64_t CHUNK = 256;      // cached tokens of one task
constexpr int64_t AHEAD = 16;       // cached tokens that are fetched before they are needed
constexpr float INF = std::numeric_limits<float>::infinity();

inline __m512 widened(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __mmask32 tail32(int64_t left) { return left >= LANES ? ~__mmask32(0) : (__mmask32(1) << left) - 1; }
inline __mmask16 tail16(int64_t left) { return left >= 16 ? ~__mmask16(0) : __mmask16((1u << left) - 1); }

// A block of 16 outputs for N rows of x. Weights are packed [M / 16, K / 2, 16, 2]: one vector holds two inputs of 16
// outputs, so a block is one stretch of memory read in order, and no sum runs across lanes. With few rows several sums
// run side by side, because one that waits for itself is slower than memory.
template <int N>
void block(const bf16* w, const float* x, int64_t stride, int64_t K, float* out) {
  // The processor multiplies bf16 pairs at half the rate of fp32, so weights are widened: a shift and a mask.
  constexpr int U = N <= 2 ? 4 : N <= 4 ? 2 : 1;
  __m512 acc[U][N];
  for (int u = 0; u < U; ++u)
    for (int n = 0; n < N; ++n) acc[u][n] = _mm512_setzero_ps();
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const int64_t pairs = K / 2;
  auto pair = [&](int64_t k, __m512* sum) {
    const __m512i row = _mm512_loadu_si512(w + k * LANES);
    // The processor's own prefetcher stops at the end of a page.
    _mm_prefetch((const char*)(w + (k + 32) * LANES), _MM_HINT_T0);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(row, high));
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[n * stride + 2 * k]), sum[n]);
      sum[n] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[n * stride + 2 * k + 1]), sum[n]);
    }
  };
  int64_t k = 0;
  for (; k + U <= pairs; k += U)
    for (int u = 0; u < U; ++u) pair(k + u, acc[u]);
  for (; k < pairs; ++k) pair(k, acc[0]);
  for (int n = 0; n < N; ++n) {
    for (int u = 1; u < U; ++u) acc[0][n] = _mm512_add_ps(acc[0][n], acc[u][n]);
    _mm512_storeu_ps(out + n * 16, acc[0][n]);
  }
}

using Block = void (*)(const bf16*, const float*, int64_t, int64_t, float*);
constexpr Block BLOCKS[TILE] = {block<1>, block<2>, block<3>, block<4>, block<5>, block<6>, block<7>, block<8>};

at::Tensor linear(const at::Tensor& x_NK, const at::Tensor& w_packed, int64_t M,
                  const std::optional<at::Tensor>& bias_M, const std::optional<at::Tensor>& plus_NM) {
  const at::Tensor x = x_NK.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = x.size(0), K = x.size(1);
  const at::Tensor plus = plus_NM ? plus_NM->contiguous() : at::Tensor();
  at::Tensor out = at::empty({N, M}, x_NK.options());
  const float* xs = x.const_data_ptr<float>();
  const bf16* ws = w_packed.const_data_ptr<bf16>();
  const bf16* bias = bias_M ? bias_M->const_data_ptr<bf16>() : nullptr;
  const bf16* more = plus_NM ? plus.const_data_ptr<bf16>() : nullptr;
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, w_packed.size(0), 1, [&](int64_t begin, int64_t end) {
    float found[TILE * 16];
    for (int64_t b = begin; b < end; ++b)
      for (int64_t n = 0; n < N; n += TILE) {
        const int64_t rows = std::min(TILE, N - n);
        const int64_t m = b * 16;
        const __mmask16 mask = tail16(M - m);
        BLOCKS[rows - 1](ws + b * 16 * K, xs + n * K, K, K, found);
        for (int64_t r = 0; r < rows; ++r) {
          __m512 y = _mm512_loadu_ps(found + r * 16);
          if (bias) y = _mm512_add_ps(y, widened(bias + m, mask));
          if (more) y = _mm512_add_ps(y, widened(more + (n + r) * M + m, mask));
          _mm256_mask_storeu_epi16(ys + (n + r) * M + m, mask, (__m256i)_mm512_cvtneps_pbh(y));
        }
      }
  });
  return out;
}

// e^x for x <= 0 to 2e-7: x = (i + f) ln 2, a polynomial in f on [-1/2, 1/2], the exponent by scaling.
inline __m512 exponential(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(1.44269504088896341f));
  const __m512 i = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, i);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, i);
}

// x / rms(x) * weight, row by row.
at::Tensor rms_norm(const at::Tensor& x_NC, const at::Tensor& weight_C, double eps) {
  const at::Tensor x = x_NC.contiguous();
  const int64_t N = x.size(0), C = x.size(1);
  at::Tensor out = at::empty_like(x);
  const bf16 *xs = x.const_data_ptr<bf16>(), *ws = weight_C.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t c = 0; c < C; c += 16) {
        const __m512 v = widened(xs + n * C + c, tail16(C - c));
        sum = _mm512_fmadd_ps(v, v, sum);
      }
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / C + float(eps)));
      for (int64_t c = 0; c < C; c += 16) {
        const __mmask16 mask = tail16(C - c);
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(widened(xs + n * C + c, mask), scale), widened(ws + c, mask));
        _mm256_mask_storeu_epi16(ys + n * C + c, mask, (__m256i)_mm512_cvtneps_pbh(y));
      }
    }
  });
  return out;
}

// silu(gate) * up of rows [gate, up].
at::Tensor silu_mul(const at::Tensor& gate_up) {
  const at::Tensor x = gate_up.contiguous();
  const int64_t N = x.size(0), I = x.size(1) / 2;
  at::Tensor out = at::empty({N, I}, x.options());
  const bf16* xs = x.const_data_ptr<bf16>();
  bf16* ys = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N, 16, [&](int64_t begin, int64_t end) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i < I; i += 16) {
        const __mmask16 mask = tail16(I - i);
        const __m512 gate = widened(xs + 2 * n * I + i, mask), up = widened(xs + (2 * n + 1) * I + i, mask);
        // 1 / (1 + e^-g), with e^-|g| so that nothing overflows.
        const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
        const __mmask16 positive = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_GE_OQ);
        const __m512 share = _mm512_div_ps(_mm512_mask_blend_ps(positive, e, one), _mm512_add_ps(one, e));
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(gate, share), up);
        _mm256_mask_storeu_epi16(ys + n * I + i, mask, (__m256i)_mm512_cvtneps_pbh(y));
      }
  });
  return out;
}

// Turns queries and keys of rows [q, k, v] in place, rotary pairs being neighbours, and writes [k, v] to its slot.
void turn_and_store(at::Tensor& qkv_NW, const at::Tensor& turn_N1P, at::Tensor& rows_LW, const at::Tensor& slots_N,
                    int64_t heads, int64_t head_dim) {
  const int64_t N = qkv_NW.size(0), W = qkv_NW.size(1), width = rows_LW.size(1), P = head_dim / 2;
  bf16 *xs = qkv_NW.mutable_data_ptr<bf16>(), *rows = rows_LW.mutable_data_ptr<bf16>();
  const auto* turns = turn_N1P.const_data_ptr<c10::complex<float>>();
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      bf16* x = xs + n * W;
      const auto* turn = turns + n * P;
      for (int64_t h = 0; h < heads; ++h, x += head_dim)
        for (int64_t p = 0; p < P; ++p) {
          const float a = x[2 * p], b = x[2 * p + 1], cos = turn[p].real(), sin = turn[p].imag();
          x[2 * p] = a * cos - b * sin;
          x[2 * p + 1] = b * cos + a * sin;
        }
      std::copy_n(xs + (n + 1) * W - width, width, rows + slots[n] * width);
    }
  });
}

// Keys of 16 tokens, numbers [0, D) from `offset` on, widened: out[d] holds number d of all 16; D rounded up to 8.
void transpose(const bf16* const* keys, int64_t D, int64_t offset, __m512* out) {
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  auto columns = [&](int64_t d, auto piece) {
    __m512i row[4];
    for (int t = 0; t < 4; ++t) {
      auto quarter = [&](int q) { return piece(keys[t + 4 * q] + offset + d); };
      row[t] = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(0)), quarter(1), 1);
      row[t] = _mm512_inserti32x4(_mm512_inserti32x4(row[t], quarter(2), 2), quarter(3), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(row[0], row[1]), high01 = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(row[2], row[3]), high23 = _mm512_unpackhi_epi32(row[2], row[3]);
    const __m512i pairs[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                              _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
    for (int p = 0; p < 4; ++p) {
      out[d + 2 * p] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[p], 16));
      out[d + 2 * p + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[p], high));
    }
  };
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) columns(d, [](const bf16* at) { return _mm_loadu_si128((const __m128i*)at); });
  const auto mask = __mmask8((1u << (D - d)) - 1);
  if (d < D) columns(d, [mask](const bf16* at) { return _mm_maskz_loadu_epi16(mask, at); });
}

// Scores of 16 tokens, lane by lane, so that no sum runs across lanes. `keys` is transposed.
template <int J>
void scores(const float* q, int64_t D, const __m512* keys, float scale, float* out) {
  constexpr int U = J <= 2 ? 4 : 2;
  __m512 acc[U][J];
  for (int u = 0; u < U; ++u)
    for (int j = 0; j < J; ++j) acc[u][j] = _mm512_setzero_ps();
  auto add = [&](int64_t d, __m512* sum) {
    for (int j = 0; j < J; ++j) sum[j] = _mm512_fmadd_ps(_mm512_set1_ps(q[j * D + d]), keys[d], sum[j]);
  };
  int64_t d = 0;
  for (; d + U <= D; d += U)
    for (int u = 0; u < U; ++u) add(d + u, acc[u]);
  for (; d < D; ++d) add(d, acc[0]);
  for (int j = 0; j < J; ++j) {
    for (int u = 1; u < U; ++u) acc[0][j] = _mm512_add_ps(acc[0][j], acc[u][j]);
    _mm512_storeu_ps(out + j * CHUNK, _mm512_mul_ps(acc[0][j], _mm512_set1_ps(scale)));
  }
}

template <int J>
void weigh(const float* weights, const bf16* const* values, int64_t count, int64_t offset, int64_t V, float* out) {
  constexpr int C = J <= 6 ? 2 : 1;  // vectors of a row at once: even and odd numbers of them fill the registers
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t v = 0; v < V; v += C * LANES) {
    __m512 even[C][J], odd[C][J];
    for (int c = 0; c < C; ++c)
      for (int j = 0; j < J; ++j) even[c][j] = odd[c][j] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; ++t)
      for (int c = 0; c < C; ++c) {
        const int64_t at = v + c * LANES;
        const __m512i value = _mm512_maskz_loadu_epi16(tail32(std::max<int64_t>(0, V - at)), values[t] + offset + at);
        const __m512 lower = _mm512_castsi512_ps(_mm512_slli_epi32(value, 16));
        const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(value, high));
        for (int j = 0; j < J; ++j) {
          const __m512 weight = _mm512_set1_ps(weights[j * CHUNK + t]);
          even[c][j] = _mm512_fmadd_ps(weight, lower, even[c][j]);
          odd[c][j] = _mm512_fmadd_ps(weight, upper, odd[c][j]);
        }
      }
    for (int c = 0; c < C; ++c)
      for (int j = 0; j < J; ++j) {
        const int64_t at = v + c * LANES;
        const __mmask32 mask = tail32(std::max<int64_t>(0, V - at));
        float* to = out + j * V + at;
        _mm512_mask_storeu_ps(to, __mmask16(mask), _mm512_permutex2var_ps(even[c][j], first, odd[c][j]));
        _mm512_mask_storeu_ps(to + 16, __mmask16(mask >> 16), _mm512_permutex2var_ps(even[c][j], second, odd[c][j]));
      }
  }
}

// Calls f<1>, ..., f<8> for all heads of a group, at most eight at a time and as evenly as it goes: f(first head, J as a
// type).
template <typename F>
void by_heads(int64_t heads, F&& f) {
  const int64_t parts = (heads + 7) / 8;
  for (int64_t part = 0, j = 0; part < parts; ++part) {
    const int64_t count = (heads - j + parts - part - 1) / (parts - part);
    switch (count) {
      case 1: f(j, std::integral_constant<int, 1>()); break;
      case 2: f(j, std::integral_constant<int, 2>()); break;
      case 3: f(j, std::integral_constant<int, 3>()); break;
      case 4: f(j, std::integral_constant<int, 4>()); break;
      case 5: f(j, std::integral_constant<int, 5>()); break;
      case 6: f(j, std::integral_constant<int, 6>()); break;
      case 7: f(j, std::integral_constant<int, 7>()); break;
      default: f(j, std::integral_constant<int, 8>());
    }
    j += count;
  }
}

// Softmax weights of `count` scores in place (not yet divided by their sum); returns the largest score and the sum.
std::pair<float, float> soften(float* score, int64_t count) {
  __m512 most = _mm512_set1_ps(-INF), sum = _mm512_setzero_ps();
  for (int64_t t = 0; t < count; t += 16)
    most = _mm512_mask_max_ps(most, tail16(count - t), most, _mm512_maskz_loadu_ps(tail16(count - t), score + t));
  const float top = _mm512_reduce_max_ps(most);
  for (int64_t t = 0; t < count; t += 16) {
    const __mmask16 mask = tail16(count - t);
    const __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, score + t), _mm512_set1_ps(top)));
    _mm512_mask_storeu_ps(score + t, mask, e);
    sum = _mm512_mask_add_ps(sum, mask, sum, e);
  }
  return {top, _mm512_reduce_add_ps(sum)};
}

// What the query tokens of a step see of the cache, as ops/cache_view.py describes it.
struct View {
  at::Tensor table_SB, seq_lens_S, first_S, query_start_S1;
  int64_t block_size, window;
  std::optional<at::Tensor> tree_Tn;

  int64_t sequences() const { return seq_lens_S.size(0); }
  int64_t rows(int64_t s) const { return seq_lens_S.const_data_ptr<int32_t>()[s] - first_S.const_data_ptr<int32_t>()[s]; }
  int64_t query(int64_t s) const { return query_start_S1.const_data_ptr<int32_t>()[s]; }
  int64_t queries(int64_t s) const { return query(s + 1) - query(s); }
  int64_t nodes() const { return tree_Tn ? tree_Tn->size(1) : 0; }
};

// Where a token's keys and values lie in a row of the cache: `width` numbers from one row to the next, `k_head` from one
// key head to the next.
struct Rows {
  const bf16* keys;
  int64_t width, k_head, v_head, v_offset;
};

// Attention of the last T query tokens of each sequence, T being few: one pass over the cache serves all of them. Chunks
// of the cache are tasks of their own, and their results are merged per query token: `finish(n, out [H, V], lse [H])`,
// from several threads at once.
//
// Limit: reading the rows once (G (D + V) numbers a token), or 2 H (D + V) FLOPs a token where heads share a row.
template <typename Finish>
void attend(const float* qs, int64_t H, int64_t G, int64_t D, int64_t V, const Rows& at_row, const View& view,
            float scale, Finish finish) {
  const int64_t S = view.sequences(), J = H / G, N = view.query(S), nodes = view.nodes(), window = view.window;
  const int32_t* tree = view.tree_Tn ? view.tree_Tn->const_data_ptr<int32_t>() : nullptr;
  // `place` is the first of its T * H places among the partial results.
  struct Task { int64_t sequence, begin, end, place; };
  std::vector<Task> tasks;
  std::vector<int64_t> starts(S + 1), sequence_of(N);
  int64_t places = 0, most_queries = 0;
  for (int64_t s = 0; s < S; ++s) {
    starts[s] = tasks.size();
    const int64_t rows = view.rows(s), T = view.queries(s);
    std::fill_n(sequence_of.begin() + view.query(s), T, s);
    const int64_t begin = window > 0 ? std::max<int64_t>(0, rows - (tree ? nodes : T) + 1 - window) : 0;
    for (int64_t r = begin; r < rows; r += CHUNK, places += T * H)
      tasks.push_back({s, r, std::min(r + CHUNK, rows), places});
    most_queries = std::max(most_queries, T);
  }
  starts[S] = tasks.size();

  std::vector<float> partial(places * V), most(places), sums(places);
  at::parallel_for(0, tasks.size(), 1, [&](int64_t from, int64_t to) {
    std::vector<float> score(most_queries * H * CHUNK);
    std::vector<__m512> tile((D + 7) / 8 * 8);
    const bf16* row[CHUNK + 2 * AHEAD];
    for (int64_t i = from; i < to; ++i) {
      const auto [s, begin, end, at] = tasks[i];
      const int64_t T = view.queries(s), query = view.query(s), rows = view.rows(s);
      const int32_t* blocks = view.table_SB.const_data_ptr<int32_t>() + s * view.table_SB.size(1);
      const int64_t count = end - begin;
      const int64_t reach = std::min(CHUNK + 2 * AHEAD, rows - begin);
      for (int64_t t = 0, b = begin / view.block_size, slot = begin % view.block_size; t < reach; ++t) {
        row[t] = at_row.keys + (blocks[b] * view.block_size + slot) * at_row.width;
        if (++slot == view.block_size) ++b, slot = 0;
      }
      // The last tile is filled up with its own last row.
      if (reach < CHUNK) std::fill(row + reach, row + CHUNK, row[reach - 1]);
      for (int64_t t = 0; t < count; t += 16) {
        for (int64_t ahead = t + AHEAD; ahead < std::min(t + AHEAD + 16, reach); ++ahead)
          for (int64_t w = 0; w < at_row.width; w += 32) _mm_prefetch((const char*)(row[ahead] + w), _MM_HINT_T0);
        for (int64_t g = 0; g < G; ++g) {
          transpose(row + t, D, g * at_row.k_head, tile.data());
          for (int64_t m = 0; m < T; ++m)
            by_heads(J, [&](int64_t j, auto n) {
              const int64_t h = g * J + j;
              float* to = score.data() + (m * H + h) * CHUNK + t;
              scores<n>(qs + ((query + m) * H + h) * D, D, tile.data(), scale, to);
            });
        }
      }
      for (int64_t m = 0; m < T; ++m) {
        // Query token m sees the rows low to high of this chunk.
        int64_t seen = rows - T + m + 1 - begin;
        // Where the tree's rows begin in this chunk, and how far back each of them is.
        const int64_t tail = rows - nodes - begin;
        const int32_t* back = tree + m * nodes;
        if (tree) seen = tail + *std::max_element(back, back + nodes) + 1;
        const int64_t low = window > 0 ? std::min(count, std::max<int64_t>(0, seen - window)) : 0;
        const int64_t high = tree ? count : std::min(count, seen);
        auto hidden = [&](int64_t t) {
          return tree && t >= tail && (back[t - tail] < 0 || (window > 0 && back[t - tail] >= window));
        };
        int64_t visible = 0;
        for (int64_t t = tree ? low : high; t < high; ++t) visible += !hidden(t);
        const int64_t place = at + m * H;
        if (tree ? visible == 0 : low >= high) {
          std::fill_n(most.data() + place, H, -INF);
          continue;
        }
        for (int64_t h = 0; h < H; ++h) {
          float* own = score.data() + (m * H + h) * CHUNK;
          std::fill_n(own, low, -INF);
          for (int64_t t = std::max(low, tail); tree && t < high; ++t)
            if (hidden(t)) own[t] = -INF;
          std::tie(most[place + h], sums[place + h]) = soften(own, high);
          std::fill_n(own, low, 0.0f);
          for (int64_t t = std::max(low, tail); tree && t < high; ++t)
            if (hidden(t)) own[t] = 0;
        }
        for (int64_t g = 0; g < G; ++g)
          by_heads(J, [&](int64_t j, auto n) {
            const int64_t h = g * J + j;
            weigh<n>(score.data() + (m * H + h) * CHUNK, row, high, at_row.v_offset + g * at_row.v_head, V,
                     partial.data() + (place + h) * V);
          });
      }
    }
  });

  at::parallel_for(0, N, 4, [&](int64_t from, int64_t to) {
    std::vector<float> out(H * V), lse(H);
    for (int64_t n = from; n < to; ++n) {
      const int64_t s = sequence_of[n], m = (n - view.query(s)) * H;
      std::fill(out.begin(), out.end(), 0.0f);
      for (int64_t h = 0; h < H; ++h) {
        float top = -INF, sum = 0, *total = out.data() + h * V;
        for (int64_t i = starts[s]; i < starts[s + 1]; ++i) top = std::max(top, most[tasks[i].place + m + h]);
        for (int64_t i = starts[s]; i < starts[s + 1]; ++i) {
          const int64_t place = tasks[i].place + m + h;
          if (most[place] == -INF) continue;
          const float share = std::exp(most[place] - top);
          sum += share * sums[place];
          const float* part = partial.data() + place * V;
          for (int64_t v = 0; v < V; ++v) total[v] += share * part[v];
        }
        lse[h] = sum > 0 ? top + std::log(sum) : -INF;
        for (int64_t v = 0; v < V; ++v) total[v] = sum > 0 ? total[v] / sum : 0.0f;
      }
      finish(n, out.data(), lse.data());
    }
  });
}

std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& q_NHD, const at::Tensor& k_LGD, const at::Tensor& v_LGV,
                                          const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                          const at::Tensor& first_S, const at::Tensor& query_start_S1,
                                          int64_t block_size, int64_t window, double scale,
                                          const std::optional<at::Tensor>& tree_Tn) {
  const at::Tensor q = q_NHD.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const int64_t N = q.size(0), H = q.size(1), D = q.size(2), G = k_LGD.size(1), V = v_LGV.size(2);
  const bf16* keys = k_LGD.const_data_ptr<bf16>();
  const Rows rows{keys, k_LGD.stride(0), k_LGD.stride(1), v_LGV.stride(1), v_LGV.const_data_ptr<bf16>() - keys};
  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  at::Tensor out = at::empty({N, H, V}, q_NHD.options()), lse = at::empty({N, H}, q.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  float* lses = lse.mutable_data_ptr<float>();
  attend(q.const_data_ptr<float>(), H, G, D, V, rows, view, float(scale),
         [&](int64_t n, const float* attended, const float* own) {
           for (int64_t i = 0; i < H * V; ++i) outs[n * H * V + i] = bf16(attended[i]);
           std::copy_n(own, H, lses + n * H);
         });
  return {out, lse};
}

// A few rows of x times packed weights, 16 outputs at a time: y [rows, M], `to` numbers from one row to the next.
void product(const bf16* w, const float* x, int64_t rows, int64_t stride, int64_t K, int64_t M, float* y, int64_t to) {
  float part[TILE * 16];
  for (int64_t n = 0; n < rows; n += TILE) {
    const int64_t count = std::min(TILE, rows - n);
    for (int64_t m = 0; m < M; m += 16) {
      BLOCKS[count - 1](w + m * K, x + n * stride, stride, K, part);
      for (int64_t r = 0; r < count; ++r)
        _mm512_mask_storeu_ps(y + (n + r) * to + m, tail16(M - m), _mm512_loadu_ps(part + r * 16));
    }
  }
}

// One layer of multi-head latent attention in the layout `latent_rope` (modeling/latent_attention_mla.py, absorbed), from
// its projections of the input to what o_proj reads: rows [q (H (D + E)), c (R), rotary key (E)] in; the rotary parts
// are turned, [c, rotary key] is written to its slot, queries go through W_uk, all heads attend over the same cached rows
// and what they bring goes through W_uv. Returns [N, H V].
//
// Limit: 2 (R + E) bytes and 2 H (2 R + E) FLOPs a cached token.
at::Tensor latent_rope(const at::Tensor& both_NX, const at::Tensor& turn_N1P, const at::Tensor& rope_index_P,
                       const at::Tensor& w_uk, const at::Tensor& w_uv, const at::Tensor& b_k_GD,
                       const at::Tensor& b_v_GV, const std::optional<at::Tensor>& sinks_H, at::Tensor& rows_LW,
                       const at::Tensor& slots_N, const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                       const at::Tensor& first_S, const at::Tensor& query_start_S1, int64_t block_size, int64_t window,
                       double scale, const std::optional<at::Tensor>& tree_Tn) {
  const at::Tensor both = both_NX.contiguous();
  const int64_t N = both.size(0), X = both.size(1), W = rows_LW.size(1), E = 2 * rope_index_P.size(0), R = W - E;
  const int64_t G = b_k_GD.size(0), D = b_k_GD.size(1), V = b_v_GV.size(1), H = (X - W) / (D + E), J = H / G;
  const int64_t angles = turn_N1P.size(2), K = D + E, up = w_uk.stride(0), down = w_uv.stride(0);
  const bf16 *xs = both.const_data_ptr<bf16>(), *uk = w_uk.const_data_ptr<bf16>(), *uv = w_uv.const_data_ptr<bf16>();
  const auto* turns = turn_N1P.const_data_ptr<c10::complex<float>>();
  const int64_t *pairs = rope_index_P.const_data_ptr<int64_t>(), *slots = slots_N.const_data_ptr<int64_t>();
  const float *b_k = b_k_GD.const_data_ptr<float>(), *b_v = b_v_GV.const_data_ptr<float>();
  const float* sinks = sinks_H ? sinks_H->const_data_ptr<float>() : nullptr;
  bf16* rows = rows_LW.mutable_data_ptr<bf16>();

  std::vector<float> q(N * H * W), shift(sinks ? N * H : 0);
  at::parallel_for(0, N, 1, [&](int64_t from, int64_t to) {
    std::vector<float> own(H * K);
    for (int64_t n = from; n < to; ++n) {
      const bf16* x = xs + n * X;
      const auto* turn = turns + n * angles;
      for (int64_t i = 0; i < H * K; ++i) own[i] = x[i];
      for (int64_t h = 0; h < H; ++h) {
        float *rotary = own.data() + h * K + D, *to_rotary = q.data() + (n * H + h) * W + R;
        for (int64_t p = 0; p < E / 2; ++p) {
          const float a = rotary[p], b = rotary[p + E / 2], cos = turn[pairs[p]].real(), sin = turn[pairs[p]].imag();
          to_rotary[p] = a * cos - b * sin;
          to_rotary[p + E / 2] = b * cos + a * sin;
        }
      }
      for (int64_t g = 0; g < G; ++g)
        product(uk + g * up, own.data() + g * J * K, J, K, D, R, q.data() + (n * H + g * J) * W, W);
      for (int64_t h = 0; sinks && h < H; ++h)
        for (int64_t d = 0; d < D; ++d) shift[n * H + h] += own[h * K + d] * b_k[h / J * D + d] * float(scale);
      const bf16* row = x + H * K;
      bf16* slot = rows + slots[n] * W;
      std::copy_n(row, R, slot);
      for (int64_t p = 0; p < E / 2; ++p) {
        const float a = row[R + p], b = row[R + p + E / 2], cos = turn[pairs[p]].real(), sin = turn[pairs[p]].imag();
        slot[R + p] = a * cos - b * sin;
        slot[R + p + E / 2] = b * cos + a * sin;
      }
    }
  });

  at::Tensor out = at::empty({N, H * V}, both.options());
  bf16* outs = out.mutable_data_ptr<bf16>();
  const View view{table_SB, seq_lens_S, first_S, query_start_S1, block_size, window, tree_Tn};
  attend(q.data(), H, 1, W, R, {rows, W, 0, 0, 0}, view, float(scale),
         [&](int64_t n, const float* latent, const float* lse) {
           float lifted[TILE * 256];
           for (int64_t g = 0; g < G; ++g)
             for (int64_t j = 0; j < J; j += TILE) {
               const int64_t count = std::min(TILE, J - j), h = g * J + j;
               product(uv + g * down, latent + h * R, count, R, R, V, lifted, V);
               for (int64_t r = 0; r < count; ++r) {
                 const float own = lse[h + r] + (sinks ? shift[n * H + h + r] : 0.0f);
                 const float share = sinks ? 1.0f / (1.0f + std::exp(sinks[h + r] - own)) : 1.0f;
                 bf16* y = outs + (n * H + h + r) * V;
                 for (int64_t v = 0; v < V; ++v) y[v] = bf16((lifted[r * V + v] + b_v[g * V + v]) * share);
               }
             }
         });
  return out;
}

}  // namespace

TORCH_LIBRARY(mlaforge_native, m) {
  m.def("linear(Tensor x, Tensor packed, int out_features, Tensor? bias, Tensor? plus) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("turn_and_store(Tensor(a!) qkv, Tensor turn, Tensor(b!) rows, Tensor slots, int heads, int head_dim) -> ()");
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor table, Tensor seq_lens, Tensor first, Tensor query_start, "
      "int block_size, int window, float scale, Tensor? tree) -> (Tensor, Tensor)");
  m.def(
      "latent_rope(Tensor both, Tensor turn, Tensor rope_index, Tensor w_uk, Tensor w_uv, Tensor b_k, Tensor b_v, "
      "Tensor? sinks, Tensor(a!) rows, Tensor slots, Tensor table, Tensor seq_lens, Tensor first, Tensor query_start, "
      "int block_size, int window, float scale, Tensor? tree) -> Tensor");
}

TORCH_LIBRARY_IMPL(mlaforge_native, CPU, m) {
  m.impl("linear", linear);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("turn_and_store", turn_and_store);
  m.impl("decode", decode);
  m.impl("latent_rope", latent_rope);
}
