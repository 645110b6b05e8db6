// Attention over the paged cache, for any number of query tokens: decoding, verification and prompts alike.
//
// A column is a query token and a head of one sequence. What a column gets depends on itself alone: the cache is cut into
// chunks at fixed positions, each chunk's result is a column's own, and chunks are merged in order. So a query token has
// the same result to the bit alone, among others, in a prompt or decoded. What a processor does best with one chunk and a
// task's columns is a part of its own: vector_attention.h and tiled_attention.h.
//
// Legend: N rows, S sequences, T query tokens of a sequence, H query heads, G key heads, J = H / G, D key and V value
// dimensions.
//
// Limit: few query tokens, reading the rows once (G (D + V) numbers a token); many, or heads that share a row,
// 2 H (D + V) FLOPs a cached and query token.
#pragma once
#include <atomic>

#include "rows.h"

constexpr int64_t CHUNK = 256;   // cached tokens of a chunk
constexpr int64_t COLUMNS = 64;  // columns that one task takes through the cache
constexpr int64_t STRETCH = 32;  // cached tokens that are staged at a time

// Where in a row of the cache keys and values lie: keys of the first key head at 0 and `k_head` numbers from one to the
// next, values from `v_offset` on.
struct Layout { int64_t k_head, v_head, v_offset; };

// What the query tokens of a step see of the cache, as ops/cache_view.py describes it.
struct View {
  at::Tensor table_SB, seq_lens_S, first_S, query_start_S1;
  int64_t block_size, window;
  std::optional<at::Tensor> tree_Tn;

  int64_t sequences() const { return seq_lens_S.size(0); }
  int64_t length(int64_t s) const { return seq_lens_S.const_data_ptr<int32_t>()[s]; }
  int64_t first(int64_t s) const { return first_S.const_data_ptr<int32_t>()[s]; }
  int64_t rows(int64_t s) const { return length(s) - first(s); }
  int64_t query(int64_t s) const { return query_start_S1.const_data_ptr<int32_t>()[s]; }
  int64_t queries(int64_t s) const { return query(s + 1) - query(s); }
  int64_t nodes() const { return tree_Tn ? tree_Tn->size(1) : 0; }
  // How far before query token m each node of the tree stands, -1 where it is not seen.
  const int32_t* back(int64_t m) const { return tree_Tn->const_data_ptr<int32_t>() + m * nodes(); }
  // Position of the tree's first node, and past every position where there is no tree.
  int64_t tail(int64_t s) const { return tree_Tn ? length(s) - nodes() : std::numeric_limits<int32_t>::max(); }

  // Places of the rows of `count` tokens from `position` on, as `Rows::stage`; scratch is [count, width].
  void stage(int64_t s, int64_t position, int64_t count, const Rows& rows, const Parts& parts, bf16* scratch,
             const bf16** row) const {
    const int32_t* blocks = table_SB.const_data_ptr<int32_t>() + s * table_SB.size(1);
    const int64_t at = position - first(s);
    auto slot = [&](int64_t row) { return blocks[row / block_size] * block_size + row % block_size; };
    for (int64_t t = 0, own; t < count; t += own) {
      // Formats pack 32 tokens together at most.
      own = std::min({block_size - (at + t) % block_size, STRETCH - (at + t) % STRETCH, count - t});
      const int64_t next = t + own < count ? slot(at + t + own) : -1;
      rows.stage(slot(at + t), own, next, parts, scratch + t * rows.width, row + t);
    }
  }

  // Where query token m of a sequence stands.
  int64_t position(int64_t s, int64_t m) const {
    return tree_Tn ? tail(s) + *std::max_element(back(m), back(m) + nodes()) : length(s) - queries(s) + m;
  }

  // The first position that a token at `position` sees.
  int64_t since(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }

  // Whether query token m sees node j of the tree.
  bool sees(int64_t m, int64_t j) const { return back(m)[j] >= 0 && (window <= 0 || back(m)[j] < window); }

  // Chunks that query tokens m to before n of a sequence see, at fixed positions.
  std::pair<int64_t, int64_t> chunks(int64_t s, int64_t m, int64_t n) const {
    const int64_t last = tree_Tn ? length(s) : position(s, n - 1) + 1;
    const int64_t begin = std::max(first(s), since(tree_Tn ? tail(s) : position(s, m)));
    return {begin / CHUNK, (last + CHUNK - 1) / CHUNK};
  }
};

// A step's attention. Queries are [N, H, D].
struct Attention {
  const float* q;
  int64_t H, G, D, V;
  Layout row;
  Rows rows;
  View view;
  float scale;

  int64_t J() const { return H / G; }
};

// Heads that are computed together: they read keys [k, k + D) and values [v, v + V) of a row, v counted from the first
// value.
struct HeadSet {
  int64_t first, heads, k, D, v, V;

  // Values are often a part of the keys.
  bool apart(const Layout& row) const { return row.v_offset + v >= k + D; }
  Parts parts(const Layout& row) const { return {Part{k, D}, Part{row.v_offset + v, apart(row) ? V : 0}}; }
};

// Columns first to first + count of a sequence and a set of heads, token by token; one chunk, or all (-1).
struct Task {
  int64_t sequence, first, count, chunk, place;
  HeadSet set;

  int64_t token(int64_t c) const { return (first + c) / set.heads; }
  int64_t head(int64_t c) const { return set.first + (first + c) % set.heads; }
};

// A running result of attention over what came before, and that of one more chunk.
inline void merge_chunk(float* total, float& top, float& sum, const float* part, float most, float own, int64_t V) {
  if (most == -INF) return;
  // Of both, one keeps its size.
  const float smaller = exponential(-std::abs(top - most)), kept = top < most ? smaller : 1.0f;
  const float share = top < most ? 1.0f : smaller;
  const Floats a = all(kept), b = all(share);
  int64_t v = 0;
  for (; v + 16 <= V; v += 16) store(total + v, fma(load(part + v), b, load(total + v) * a));
  if (v < V) store(total + v, fma(load(part + v, V - v), b, load(total + v, V - v) * a), V - v);
  sum = sum * kept + own * share;
  top = std::max(top, most);
}

// `Kernel(attention)` is a thread's own: `pack(task)` takes a task's queries, `attend(task, chunk, out, most, sums)` gives
// for every column its values' weighted sum [V], not yet divided, its largest score and the sum of its weights.
template <typename Kernel>
class PagedAttention {
 public:
  explicit PagedAttention(const Attention& of) : of_(of), view_(of.view) {}

  // `finish(n, out [H, V], lse [H])` for every query token, from several threads at once.
  template <typename Finish>
  void run(Finish finish) {
    const int64_t S = view_.sequences(), N = view_.query(S), H = of_.H, G = of_.G, V = of_.V;
    const HeadSet every{0, H, 0, (G - 1) * of_.row.k_head + of_.D, 0, (G - 1) * of_.row.v_head + V};
    std::vector<Task> tasks;
    std::vector<Places> places(S);
    std::vector<int64_t> sequence_of(N);
    int64_t all_places = 0;
    for (int64_t s = 0; s < S; ++s) {
      const int64_t T = view_.queries(s), columns = T * H;
      std::fill_n(sequence_of.begin() + view_.query(s), T, s);
      if (columns <= COLUMNS) {
        // Every chunk is a task; the results are merged afterwards.
        const auto [from, to] = view_.chunks(s, 0, T);
        places[s] = {all_places, to - from};
        for (int64_t chunk = from; chunk < to; ++chunk, all_places += columns)
          tasks.push_back({s, 0, columns, chunk, all_places, every});
        continue;
      }
      // Each key head for itself. The last columns see most: longest tasks first.
      const int64_t J = of_.J(), own = T * J;
      for (int64_t first = (own - 1) / COLUMNS * COLUMNS; first >= 0; first -= COLUMNS)
        for (int64_t g = 0; g < G; ++g)
          tasks.push_back({s, first, std::min(COLUMNS, own - first), -1, 0,
                           {g * J, J, g * of_.row.k_head, of_.D, g * of_.row.v_head, V}});
    }
    partial_.resize(all_places * V), most_.resize(all_places), sums_.resize(all_places);
    out_.resize(N * H * V), lse_.resize(N * H);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      Kernel kernel(of_);
      for (int64_t i = next++; i < int64_t(tasks.size()); i = next++) work(tasks[i], kernel);
    });
    at::parallel_for(0, N, 4, [&](int64_t from, int64_t to) {
      for (int64_t n = from; n < to; ++n) {
        const int64_t s = sequence_of[n];
        if (view_.queries(s) * H <= COLUMNS) merge(n, s, places[s]);
        finish(n, out_.data() + n * H * V, lse_.data() + n * H);
      }
    });
  }

 private:
  // Results of chunks that were tasks of their own: the first one of a sequence, and how many chunks.
  struct Places { int64_t first, chunks; };

  void work(const Task& task, Kernel& kernel) {
    const int64_t V = of_.V;
    kernel.pack(task);
    if (task.chunk >= 0) {
      kernel.attend(task, task.chunk, partial_.data() + task.place * V, most_.data() + task.place, sums_.data() + task.place);
      return;
    }
    std::vector<float> total(task.count * V), part(task.count * V), numbers(4 * task.count);
    float *top = numbers.data(), *sum = top + task.count, *most = sum + task.count, *own = most + task.count;
    std::fill_n(top, task.count, -INF);
    const auto [from, to] = view_.chunks(task.sequence, task.token(0), task.token(task.count - 1) + 1);
    for (int64_t chunk = from; chunk < to; ++chunk) {
      kernel.attend(task, chunk, part.data(), most, own);
      for (int64_t c = 0; c < task.count; ++c)
        merge_chunk(total.data() + c * V, top[c], sum[c], part.data() + c * V, most[c], own[c], V);
    }
    for (int64_t c = 0; c < task.count; ++c)
      give((view_.query(task.sequence) + task.token(c)) * of_.H + task.head(c), total.data() + c * V, top[c], sum[c]);
  }

  void merge(int64_t n, int64_t s, const Places& places) {
    const int64_t H = of_.H, V = of_.V, columns = view_.queries(s) * H;
    for (int64_t h = 0; h < H; ++h) {
      float top = -INF, sum = 0, *total = out_.data() + (n * H + h) * V;
      for (int64_t i = 0; i < places.chunks; ++i) {
        const int64_t place = places.first + i * columns + (n - view_.query(s)) * H + h;
        merge_chunk(total, top, sum, partial_.data() + place * V, most_[place], sums_[place], V);
      }
      give(n * H + h, total, top, sum);
    }
  }

  void give(int64_t place, const float* total, float top, float sum) {
    lse_[place] = sum > 0 ? top + std::log(sum) : -INF;
    for (int64_t v = 0; v < of_.V; ++v) out_[place * of_.V + v] = sum > 0 ? total[v] / sum : 0.0f;
  }

  const Attention& of_;
  const View& view_;
  std::vector<float> partial_, most_, sums_, out_, lse_;
};
