// Attention of a few query tokens per sequence over the paged cache.
//
// Legend: N rows, S sequences, H query heads, G key heads, J = H / G, D key and V value dimensions, L slots, W numbers of a
// cached row.
#pragma once
#include "vectors.h"

constexpr int64_t CHUNK = 256;  // cached tokens of one task
constexpr int64_t AHEAD = 16;   // cached tokens that are fetched before they are needed

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
void attend_by_vectors(const float* qs, int64_t H, int64_t G, int64_t D, int64_t V, const Rows& at_row, const View& view,
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

