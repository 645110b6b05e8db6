// Attention over the paged cache, for any number of query tokens: decoding, verification and prompts alike.
//
// A column is a query token and a head of one sequence. What a column gets depends on itself alone: the cache is cut into
// chunks at fixed positions, each chunk's result is a column's own, and chunks are merged in order. So a query token has
// the same result to the bit alone, among others, in a prompt, in a tree or decoded. What a processor does best with one
// chunk and a task's columns is a part of its own: vector_attention.h and tiled_attention.h.
//
// Legend: N rows, S sequences, T query tokens of a sequence, H query heads, G key heads, J = H / G, D key and V value
// dimensions.
//
// Limit: few query tokens, reading the rows once (G (D + V) numbers a token); many, or heads that share a row,
// 2 H (D + V) FLOPs a cached and query token. Of a tree, chunks before its first node are as those of any text; those that
// hold nodes, the last one or two, are read once for every query token, by tasks of their own.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <unordered_map>

#include "rows.h"
#include "view.h"

constexpr int64_t COLUMNS = 64;  // columns that one task takes through the cache
constexpr int64_t GROUPS = COLUMNS / 16;
constexpr int64_t SHARING = 16;  // tasks with the same rows that one thread takes
constexpr int64_t STRETCH = 32;  // cached tokens whose rows are staged at a time

// Where in a row of the cache keys and values lie: keys of the first key head at 0 and `k_head` numbers from one to the
// next, values from `v_offset` on.
struct Layout {
  int64_t k_head, v_head, v_offset;
  bool operator==(const Layout&) const = default;
};

// Makes rows that attention reads from others. A thread's own.
class Source {
 public:
  virtual ~Source() = default;
  // Places of the rows of `count` tokens of a chunk, from `position` on, which have these slots. They hold until it is
  // asked again.
  virtual void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) = 0;
};

// Whether a sequence has more columns than a task, and every task goes through all chunks. Else every chunk is a task.
inline bool is_prompt(const View& view, int64_t s, int64_t H) { return view.queries(s) * H > COLUMNS && !view.tree_Tn; }

// What the last query tokens of some sequences give to each cached token, before it is divided by its sum: for each of them
// and each head e^(score - the chunk's largest) [whole chunks], and that largest score [chunks]. Windows have none.
struct Shares {
  int64_t H, chunks;
  std::vector<int64_t> place;  // by sequence, -1 where nobody asks
  std::vector<float> tops;
  float* weights;

  Shares(const View& view, int64_t H, at::IntArrayRef wanted) : H(H), chunks(0), place(view.sequences(), -1) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      place[wanted[i]] = i;
      chunks = std::max(chunks, (view.length(wanted[i]) + CHUNK - 1) / CHUNK);
    }
    tops.resize(wanted.size() * H * chunks, -INF);
    // Kept from layer to layer: fresh memory would be given page by page.
    static thread_local std::vector<float> kept;
    kept.resize(std::max(kept.size(), tops.size() * CHUNK));
    weights = kept.data();
  }
  // Of a column that is asked for, its head's; nullptr for any other.
  float* of(int64_t s, int64_t h) { return place[s] < 0 ? nullptr : weights + (place[s] * H + h) * chunks * CHUNK; }
  // Of the chunk that these weights are of.
  float& top(const float* own) { return tops[(own - weights) / CHUNK]; }
};

// A step's attention. Queries are [N, H, D].
struct Attention {
  const float* q;
  int64_t H, G, D, V;
  Layout row;
  Rows rows;
  View view;
  float scale;

  // Prompts read packed rows many times: decoded ones, and a view of them.
  std::optional<Rows> decoded = std::nullopt;
  std::optional<View> decoded_view = std::nullopt;

  // Where `rows`, of which only the width counts then, are made from others, those of all but prompts.
  std::function<std::unique_ptr<Source>()> source = nullptr;
  // Filled where somebody asks and vectors attend.
  Shares* shares = nullptr;

  int64_t J() const { return H / G; }
  // Whether keys and values are read as codes of 8 bits: where every head's have a scale of their own, and a row's scales
  // are no more than a register has. Tiles take four numbers at a time.
  bool codes() const {
    const Layout apart{D, V, G * D};
    return rows.coded_by(D, 2 * G) && V == D && row == apart && G <= 16 && D % 4 == 0;
  }
  // Columns of a sequence whose chunks are tasks: rows that are read as they lie may be read by several.
  int64_t apart = COLUMNS;
  bool prompt(int64_t s) const { return is_prompt(view, s, H) && view.queries(s) * H > apart; }
  const Rows& rows_of(int64_t s) const { return decoded && prompt(s) ? *decoded : rows; }
  const View& view_of(int64_t s) const { return decoded && prompt(s) ? *decoded_view : view; }
};

// Heads that are computed together: they read keys [k, k + D) and values [v, v + V) of a row, v counted from the first
// value.
struct HeadSet {
  int64_t first, heads, k, D, v, V;

  // Values are often a part of the keys.
  Part keys() const { return {k, D}; }
  // Values [at, at + count) of them.
  Part values(const Layout& row, int64_t at, int64_t count) const { return {row.v_offset + v + at, std::min(count, V - at)}; }
  // Those that are no part of the keys.
  Part apart(const Layout& row) const { return row.v_offset + v >= k + D ? values(row, 0, V) : Part{0, 0}; }
};

// Columns first to first + count of a sequence and a set of heads, token by token; one chunk, or all (-1).
struct Task {
  int64_t sequence, first, count, chunk, place;
  HeadSet set;

  int64_t token(int64_t c) const { return (first + c) / set.heads; }
  int64_t head(int64_t c) const { return set.first + (first + c) % set.heads; }
};

// A chunk that a task goes through.
struct Stop {
  const Task* task = nullptr;
  int64_t chunk = 0;
};

// Cached rows as a thread goes through them, chunk by chunk: staged as numbers, T being bf16, or where they lie, T being
// int8_t, codes and behind them scales.
//
// Memory is to be always at work. Where rows are read as they lie, whoever multiplies them asks for the next chunk's, one by
// one, about once for every row of this one: many at once would keep the core waiting. Where they are decoded, a core's
// cache reads values while keys are staged, and the next chunk's keys while values are.
template <typename T>
class Reader {
 public:
  const T* row[CHUNK];  // places of the rows that were staged last

  // `kept` rows stay where they are until others are staged. `sixteens`: whoever reads takes sixteen rows from a position
  // that is a multiple of it as one, and only the first one's place counts.
  Reader(const Attention& of, int64_t kept, bool sixteens)
      : of_(of), kept_(CODES ? CHUNK : kept), step_(CODES ? of.rows.bytes() : of.rows.width),
        source_(of.source ? of.source() : nullptr), lie_(CODES || (!of.rows.packed() && !of.source)),
        collected_(sixteens && of.view.block_size % 16) {
    static thread_local std::vector<T> scratch;
    const int64_t needed = of.view.tree_Tn || collected_ ? kept_ * step_ : CODES ? 0 : of.rows.scratch(kept_);
    scratch.resize(std::max<size_t>(scratch.size(), needed + 64));
    scratch_ = align64(scratch.data());
  }

  void enter(const Stop& now, const Stop& next) {
    const bool known = next_.task == now.task && next_.chunk == now.chunk;
    if (known) std::swap(here_, then_);
    else locate(now, here_);
    now_ = now, next_ = next, known_ = known;
    if (next.task) locate(next, then_);
    fetched_ = then_.from;
    made_ = source_ && !of_.prompt(now.task->sequence);
    if (!made_) return;
    const int64_t position = std::max(now.chunk * CHUNK, of_.view.first(now.task->sequence)), low = position % CHUNK;
    if constexpr (!CODES) {
      source_->stage(position, here_.slots + low, (collected_ ? here_.to : here_.end) - low, row + low);
      // A source puts a chunk's rows one after another.
      for (int64_t i = low / 16 * 16; i < low; ++i) row[i] = row[low] - (low - i) * step_;
    }
  }

  // Has the core's cache read what is next of the next chunk's rows, where they are read as they lie.
  void further() {
    if (!lie_ || !next_.task || fetched_ >= then_.to) return;
    for (const Part& part : {next_.task->set.keys(), next_.task->set.apart(of_.row)})
      of_.rows.fetch(then_.slots + fetched_, 1, part);
    ++fetched_;
  }

  // Tokens [from, to) of the chunk, of which the sequence has the last sixteen or fewer, if need be.
  void keys(int64_t from, int64_t to) {
    if (made_) return;
    const HeadSet& set = now_.task->set;
    const Rows& rows = of_.rows_of(now_.task->sequence);
    // What stands before the first row of its sixteen is not seen, but has a place.
    for (int64_t i = from / 16 * 16; collected_ && i < from; ++i) row[i] = scratch_ + i % kept_ * step_;
    for (int64_t t = from, end; t < to; t = end) {
      end = std::min(to, t + STRETCH);
      if (!lie_ || !known_) rows.fetch(here_.slots + t, end - t, set.apart(of_.row));
      if (!known_) rows.fetch(here_.slots + end, std::min(STRETCH, here_.to - end), set.keys());
      rows.stage(here_.slots + t, end - t, {set.keys()}, scratch_ + t % kept_ * step_, row + t);
      // Sixteen rows that need not be of one block are put one after another.
      const Part copied = CODES ? Part{0, step_} : set.keys();
      for (int64_t i = std::max(t, here_.path); i < end; ++i) {
        T* own = scratch_ + i % kept_ * step_;
        if (row[i] != own) std::copy_n(row[i] + copied.first, copied.numbers, own + copied.first);
        row[i] = own;
      }
    }
  }

  // Values [at, at + count) of tokens [from, to), of all that the task has.
  void values(int64_t from, int64_t to, int64_t at, int64_t count) {
    if (CODES || made_) return;
    const Rows& rows = of_.rows_of(now_.task->sequence);
    for (int64_t t = from, end; t < to; t = end) {
      end = std::min(to, t + STRETCH);
      if (!lie_ && next_.task && !(source_ && !of_.prompt(next_.task->sequence))) {
        // Their share of the keys.
        const HeadSet& set = next_.task->set;
        const int64_t first = set.D * at / set.V, last = set.D * std::min(at + count, set.V) / set.V;
        const int64_t begin = std::max(t, then_.from), until = std::min(end, then_.to);
        of_.rows_of(next_.task->sequence).fetch(then_.slots + begin, until - begin, {set.k + first, last - first});
      }
      // Rows that all are whole are where they were, but for those that were put together.
      const Parts part{now_.task->set.values(of_.row, at, count)};
      if (rows.packed() || end > here_.path)
        rows.stage(here_.slots + t, end - t, part, scratch_ + t % kept_ * step_, row + t);
    }
  }

 private:
  // Of a chunk: where its rows lie, to before `end`, which of them are to be seen, and from which sixteen on rows need not
  // be of one block: those with a path's rows among them, or all.
  struct Slots {
    int32_t slots[CHUNK];
    int64_t end, from, to, path;
  };

  void locate(const Stop& stop, Slots& to) const {
    const View& view = of_.view;
    const int64_t s = stop.task->sequence, base = stop.chunk * CHUNK, low = std::max(base, view.first(s));
    // Where a chunk holds nodes of a tree, the task is of one query token.
    const int64_t first = stop.task->token(0), last = stop.task->token(stop.task->count - 1);
    const int64_t high = std::min(base + CHUNK, view.position(s, last) + 1), seen = view.since(view.position(s, first));
    // The rest of the last sixteen is of the same block, where blocks are sixteens; else it is the last row again.
    const int64_t sixteens = (high + 15) / 16 * 16, whole = view.block_size % 16 ? high : sixteens;
    of_.view_of(s).seen(s, last, low, whole - low, to.slots + low - base);
    std::fill(to.slots + whole - base, to.slots + sixteens - base, to.slots[whole - base - 1]);
    to.end = (collected_ ? sixteens : whole) - base, to.from = std::max(low, seen) - base, to.to = high - base;
    to.path = collected_ ? 0 : std::max<int64_t>(0, view.tail(s) - base) / 16 * 16;
  }

  static constexpr bool CODES = std::is_same_v<T, int8_t>;

  const Attention& of_;
  const int64_t kept_, step_;  // rows of scratch, and how far they are apart
  const std::unique_ptr<Source> source_;
  const bool lie_;  // whether rows are read where they lie
  const bool collected_;  // whether all are copied, so that sixteen lie one after another
  T* scratch_;
  bool made_ = false;  // whether the chunk's rows are the source's
  Stop now_, next_;
  int64_t fetched_ = 0;  // tokens of the next chunk whose codes were asked for
  bool known_ = false;
  Slots here_, then_;
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

// `Kernel(attention)` is a thread's own: `pack(task)` takes a task's queries, `attend(now, next, out, most, sums)` gives for
// every column its values' weighted sum [V] over the chunk, not yet divided, its largest score and the sum of its weights.
// `Kernel::together(attention)`: whether all key heads in one task give each the bits that it has in a task of its own.
template <typename Kernel>
class PagedAttention {
 public:
  explicit PagedAttention(const Attention& of) : of_(of), view_(of_.view) {
    if (!of_.source && (!of_.rows.packed() || of_.codes())) of_.apart = 4 * COLUMNS;
    decode();
  }

  // `finish(n, out [H, V], lse [H])` for every query token, from several threads at once.
  template <typename Finish>
  void run(Finish finish) {
    const int64_t S = view_.sequences(), N = view_.query(S), H = of_.H, G = of_.G, V = of_.V;
    const HeadSet every{0, H, 0, (G - 1) * of_.row.k_head + of_.D, 0, (G - 1) * of_.row.v_head + V};
    std::vector<Task> tasks;
    std::vector<Places> places(S);
    std::vector<int64_t> sequence_of(N);
    int64_t all_places = 0, chunks = 0;
    for (int64_t s = 0; s < S; ++s) {
      const auto [from, to] = view_.chunks(s, 0, view_.queries(s));
      chunks += to - from;
    }
    // Where others would have nothing to do, and rows are read as they lie, key heads go apart; single tokens are quickly
    // done.
    const bool scarce = chunks < at::get_num_threads() && N > S && of_.apart > COLUMNS, together = Kernel::together(of_);
    for (int64_t s = 0; s < S; ++s) {
      const int64_t T = view_.queries(s), J = of_.J(), own = T * J;
      std::fill_n(sequence_of.begin() + view_.query(s), T, s);
      auto one = [&](int64_t g) { return HeadSet{g * J, J, g * of_.row.k_head, of_.D, g * of_.row.v_head, V}; };
      if (of_.prompt(s)) {
        // Each key head for itself. The last columns see most: longest tasks first.
        for (int64_t first = (own - 1) / COLUMNS * COLUMNS; first >= 0; first -= COLUMNS)
          for (int64_t g = 0; g < G; ++g) tasks.push_back({s, first, std::min(COLUMNS, own - first), -1, 0, one(g)});
        continue;
      }
      // Every chunk is a task; the results are merged afterwards. A tree has more of them: of as many query tokens as one
      // takes, and where nodes are of one.
      std::vector<HeadSet> sets;
      if (together && H <= COLUMNS && !scarce && (T * H <= COLUMNS || view_.tree_Tn || of_.apart == COLUMNS)) sets = {every};
      else for (int64_t g = 0; g < G; ++g) sets.push_back(one(g));
      const auto [from, to] = view_.chunks(s, 0, T);
      places[s] = {all_places, to - from, sets[0].heads};
      for (int64_t chunk = from; chunk < to; ++chunk)
        for (const HeadSet& set : sets) {
          const int64_t tokens = chunk < view_.tail(s) / CHUNK ? std::max<int64_t>(1, COLUMNS / set.heads) : 1;
          const int64_t columns = T * set.heads, together = tokens * set.heads;
          for (int64_t first = 0, end; first < columns; first = end) {
            end = std::min({columns, (first / together + 1) * together, first + COLUMNS});
            const auto [begin, until] = view_.chunks(s, first / set.heads, (end - 1) / set.heads + 1);
            if (chunk >= begin && chunk < until) tasks.push_back({s, first, end - first, chunk, all_places + first, set});
          }
          all_places += columns;
        }
    }
    const std::vector<int64_t> begins = share(tasks);
    partial_.resize(all_places * V), most_.resize(all_places, -INF), sums_.resize(all_places);
    out_.resize(N * H * V), lse_.resize(N * H);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      Kernel kernel(of_);
      const int64_t count = begins.size() - 1;
      for (int64_t i = next++, then; i < count; i = then) {
        then = next++;
        for (int64_t task = begins[i]; task < begins[i + 1]; ++task) {
          const int64_t following = task + 1 < begins[i + 1] ? task + 1 : then < count ? begins[then] : -1;
          work(tasks[task], following < 0 ? nullptr : &tasks[following], kernel);
        }
      }
    });
    at::parallel_for(0, N, 4, [&](int64_t from, int64_t to) {
      for (int64_t n = from; n < to; ++n) {
        const int64_t s = sequence_of[n];
        if (!of_.prompt(s)) merge(n, s, places[s]);
        finish(n, out_.data() + n * H * V, lse_.data() + n * H);
      }
    });
  }

 private:
  // Results of chunks that were tasks of their own: the first one of a sequence, how many chunks, and heads of a set.
  struct Places { int64_t first, chunks, heads; };

  // Decodes the rows of prompts, which many tasks read, each block once, however many sequences have it.
  void decode() {
    if (!of_.rows.packed() || of_.codes()) return;
    const int64_t size = view_.block_size, width = of_.rows.width;
    at::Tensor table = view_.table_SB.clone();
    std::unordered_map<int32_t, int32_t> places;
    std::vector<int32_t> blocks;
    for (int64_t s = 0; s < view_.sequences(); ++s) {
      int32_t* own = table.mutable_data_ptr<int32_t>() + s * table.size(1);
      for (int64_t b = 0; of_.prompt(s) && b * size < view_.rows(s); ++b) {
        const auto [place, fresh] = places.try_emplace(own[b], int32_t(blocks.size()));
        if (fresh) blocks.push_back(own[b]);
        own[b] = place->second;
      }
    }
    if (blocks.empty()) return;
    static thread_local std::vector<bf16> decoded;
    decoded.resize(std::max<size_t>(decoded.size(), blocks.size() * size * width));
    bf16* to = decoded.data();
    at::parallel_for(0, blocks.size(), 1, [&](int64_t from, int64_t until) {
      std::vector<int32_t> slots(size);
      std::vector<const bf16*> row(size);
      for (int64_t i = from; i < until; ++i) {
        bf16* own = to + i * size * width;
        std::iota(slots.begin(), slots.end(), int32_t(blocks[i] * size));
        of_.rows.stage(slots.data(), size, {Part{0, width}}, own, row.data());
        // Whole rows lie one after another.
        if (row[0] != own) std::copy_n(row[0], size * width, own);
      }
    });
    of_.decoded.emplace(to, width);
    of_.decoded_view = View{table, view_.seq_lens_S, view_.first_S, view_.query_start_S1, size, view_.window, view_.tree_Tn};
  }

  // Puts chunks that several sequences have of the same rows beside each other. Returns where the tasks that a thread
  // takes at a time begin, and their end.
  std::vector<int64_t> share(std::vector<Task>& tasks) const {
    const int64_t count = tasks.size();
    std::vector<std::tuple<int64_t, int32_t, int64_t>> order;  // chunk, its first slot, task
    for (int64_t i = 0; i < count; ++i) {
      const auto [chunk, s] = std::pair(tasks[i].chunk, tasks[i].sequence);
      int32_t first = int32_t(i);
      if (chunk >= 0) view_.seen(s, tasks[i].token(0), std::max(chunk * CHUNK, view_.first(s)), 1, &first);
      order.push_back({chunk, first, i});
    }
    if (view_.sequences() > 1) std::sort(order.begin(), order.end());
    std::vector<int64_t> begins;
    std::vector<Task> ordered;
    for (int64_t i = 0; i < count; ++i) {
      const auto [chunk, slot, task] = order[i];
      if (i == 0 || chunk != std::get<0>(order[i - 1]) || slot != std::get<1>(order[i - 1]) || i - begins.back() == SHARING)
        begins.push_back(i);
      ordered.push_back(tasks[task]);
    }
    begins.push_back(count);
    tasks.swap(ordered);
    return begins;
  }

  int64_t first_chunk(const Task& task) const {
    return task.chunk >= 0 ? task.chunk : view_.chunks(task.sequence, task.token(0), task.token(task.count - 1) + 1).first;
  }

  void work(const Task& task, const Task* following, Kernel& kernel) {
    const int64_t V = of_.V;
    const Stop then{following, following ? first_chunk(*following) : 0};
    kernel.pack(task);
    if (task.chunk >= 0) {
      kernel.attend({&task, task.chunk}, then, partial_.data() + task.place * V, most_.data() + task.place, sums_.data() + task.place);
      return;
    }
    std::vector<float> total(task.count * V), part(task.count * V), numbers(4 * task.count);
    float *top = numbers.data(), *sum = top + task.count, *most = sum + task.count, *own = most + task.count;
    std::fill_n(top, task.count, -INF);
    const auto [from, to] = view_.chunks(task.sequence, task.token(0), task.token(task.count - 1) + 1);
    for (int64_t chunk = from; chunk < to; ++chunk) {
      kernel.attend({&task, chunk}, chunk + 1 < to ? Stop{&task, chunk + 1} : then, part.data(), most, own);
      for (int64_t c = 0; c < task.count; ++c)
        merge_chunk(total.data() + c * V, top[c], sum[c], part.data() + c * V, most[c], own[c], V);
    }
    for (int64_t c = 0; c < task.count; ++c)
      give((view_.query(task.sequence) + task.token(c)) * of_.H + task.head(c), total.data() + c * V, top[c], sum[c]);
  }

  void merge(int64_t n, int64_t s, const Places& places) {
    const int64_t H = of_.H, V = of_.V, T = view_.queries(s), m = n - view_.query(s), heads = places.heads;
    for (int64_t h = 0; h < H; ++h) {
      float top = -INF, sum = 0, *total = out_.data() + (n * H + h) * V;
      for (int64_t i = 0; i < places.chunks; ++i) {
        const int64_t place = places.first + i * T * H + h / heads * T * heads + m * heads + h % heads;
        merge_chunk(total, top, sum, partial_.data() + place * V, most_[place], sums_[place], V);
      }
      give(n * H + h, total, top, sum);
    }
  }

  void give(int64_t place, const float* total, float top, float sum) {
    lse_[place] = sum > 0 ? top + std::log(sum) : -INF;
    for (int64_t v = 0; v < of_.V; ++v) out_[place * of_.V + v] = sum > 0 ? total[v] / sum : 0.0f;
  }

  Attention of_;
  const View& view_;
  std::vector<float> partial_, most_, sums_, out_, lse_;
};
