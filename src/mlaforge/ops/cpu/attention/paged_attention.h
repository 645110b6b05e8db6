// Attention over the paged cache for any number of query tokens: decoding, verification and prompts.
//
// A column is a query token and a head of one sequence. A column's result depends on itself alone: the cache is cut into
// chunks at fixed positions, each column has its own result per chunk, and results are merged in order. So a query token has
// the same result, bitwise, alone, among others, in a prompt, in a tree or decoded. vector_attention.h and tiled_attention.h
// compute a task's columns over one chunk.
//
// Legend: N rows, S sequences, T query tokens of a sequence, H query heads, G KV heads, J = H / G, D key and V value
// dimensions.
//
// Limit: few query tokens, reading the rows once (G (D + V) elements per token); many, or heads that share a row, 2 H (D +
// V) FLOPs per cached and query token. For a tree, chunks before its first node are read as for any text; the one or two
// chunks with nodes are read once per query token, by separate tasks.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>

#include "attention/block_rows.h"

constexpr int64_t COLUMNS = 64;  // columns per task
constexpr int64_t GROUPS = COLUMNS / 16;
constexpr int64_t SHARING = 16;  // tasks with the same rows that a thread takes together
constexpr int64_t STRETCH = 32;  // cached tokens whose rows are staged at a time

// Offsets in a cached row: keys of the first KV head at 0 and of the next ones every `k_head` elements, values from
// `v_offset` on, every `v_head` elements.
struct Layout {
  int64_t k_head, v_head, v_offset;
  bool operator==(const Layout&) const = default;
};

// Computes the rows that attention reads from cached ones. One instance per thread.
class RowSource {
 public:
  virtual ~RowSource() = default;
  // Sets `row` to the rows of `count` tokens of a chunk, from `position` on, at these slots. Valid until the next call.
  virtual void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) = 0;
  // Prefetches what `stage` reads for a slot.
  virtual void prefetch(int32_t slot) = 0;
};

// Whether a sequence has more columns than a task, so that every task reads all chunks. Otherwise every chunk is a task.
inline bool is_prompt(const View& view, int64_t s, int64_t H) { return view.queries(s) * H > COLUMNS && !view.is_tree(); }

// Unnormalized softmax weights of the last query tokens of some sequences: per such token and head e^(score - chunk maximum)
// [chunks, CHUNK], and that maximum [chunks]. Views with windows are not supported.
struct ProbeWeights {
  Scratch scratch;
  int64_t H, chunks;
  int64_t* query_index;  // by sequence; -1 if it is not probed
  float *chunk_max, *weights;

  ProbeWeights(const View& view, int64_t H, at::IntArrayRef sequences)
      : H(H), chunks(0), query_index(scratch.filled<int64_t>(view.sequences(), -1)) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      query_index[sequences[i]] = i;
      chunks = std::max(chunks, (view.length(sequences[i]) + CHUNK - 1) / CHUNK);
    }
    const int64_t count = int64_t(sequences.size()) * H * chunks;
    chunk_max = scratch.filled(count, -INF), weights = scratch.get<float>(count * CHUNK);
  }
  // Weights of a probed sequence's head; nullptr for other sequences.
  float* for_head(int64_t s, int64_t h) {
    return query_index[s] < 0 ? nullptr : weights + (query_index[s] * H + h) * chunks * CHUNK;
  }
  // Maximum of the chunk to which these weights belong.
  float& max_of(const float* chunk_weights) { return chunk_max[(chunk_weights - weights) / CHUNK]; }
};

// Attention of one step. Queries are [N, H, D].
struct Attention {
  const float* q;
  int64_t H, G, D, V;
  Layout row;
  Rows rows;
  View view;
  float scale;

  // Prompts read packed rows many times: rows decoded in advance, and a view of them.
  std::optional<Rows> decoded = std::nullopt;
  std::optional<View> decoded_view = std::nullopt;

  // If set, computes the rows of all sequences but prompts; `rows` then only defines the width.
  std::function<std::unique_ptr<RowSource>()> source = nullptr;
  // If set, vector kernels record the softmax weights here.
  ProbeWeights* probe = nullptr;

  int64_t J() const { return H / G; }
  // Whether kernels multiply the rows' codes in place: one scale per head of keys and of values, at most a register of
  // scales per row, and D a multiple of 4 for tiles.
  bool reads_codes() const {
    const Layout separate{D, V, G * D};
    const RowCodes* codes = rows.codes();
    return codes && codes->group_sizes == std::vector<int64_t>(2 * G, D) && V == D && row == separate && G <= 16 && D % 4 == 0;
  }
  // Maximum columns of a sequence whose chunks are separate tasks: several tasks may read rows that need no decoding.
  int64_t split_columns = COLUMNS;
  bool prompt(int64_t s) const { return is_prompt(view, s, H) && view.queries(s) * H > split_columns; }
  const Rows& rows_of(int64_t s) const { return decoded && prompt(s) ? *decoded : rows; }
  const View& view_of(int64_t s) const { return decoded && prompt(s) ? *decoded_view : view; }
};

// Heads that are computed together. They read keys [k, k + D) and values [v, v + V) of a row; v is relative to the first
// value.
struct HeadSet {
  int64_t first, heads, k, D, v, V;

  // Values are often a part of the keys.
  ColumnRange keys() const { return {k, D}; }
  // Values [at, at + count) of the set.
  ColumnRange values(const Layout& row, int64_t at, int64_t count) const {
    return {row.v_offset + v + at, std::min(count, V - at)};
  }
  // Values that are not a part of the keys; empty otherwise.
  ColumnRange values_outside_keys(const Layout& row) const {
    return row.v_offset + v >= k + D ? values(row, 0, V) : ColumnRange{0, 0};
  }
};

// Columns [first, first + count) of a sequence and a set of heads, token by token, over one chunk, or all (-1).
struct Task {
  int64_t sequence, first, count, chunk, first_partial;
  HeadSet set;

  int64_t token(int64_t c) const { return (first + c) / set.heads; }
  int64_t head(int64_t c) const { return set.first + (first + c) % set.heads; }
};

// A chunk of a task.
struct TaskChunk {
  const Task* task = nullptr;
  int64_t chunk = 0;
};

// Reads a thread's cached rows chunk by chunk: staged as elements (T = bf16), or in place (T = int8_t: codes, then scales).
//
// Keeps memory busy. Rows that are read in place or computed are prefetched for the next chunk one by one, about once per
// row of the current chunk: many prefetches at once would stall the core. For rows that are decoded, values are prefetched
// while keys are staged, and the next chunk's keys while values are.
template <typename T>
class RowReader {
 public:
  const T* row[CHUNK];  // the rows that were staged last

  // `scratch_rows` rows stay valid until others are staged. `tiled`: the kernel reads 16 rows, from a position that is a
  // multiple of 16, as one tile, of which only the first row's address counts.
  RowReader(const Attention& attention, int64_t scratch_rows, bool tiled)
      : attention_(attention), scratch_rows_(CODES ? CHUNK : scratch_rows),
        stride_(CODES ? attention.rows.stride() : attention.rows.element_stride()),
        source_(attention.source ? attention.source() : nullptr),
        in_place_(CODES || (!attention.rows.packed() && !attention.source)),
        gathered_(tiled && attention.view.block_size % 16) {
    const int64_t elements = attention.view.is_tree() || gathered_ ? scratch_rows_ * stride_
                           : CODES                             ? 0
                                                               : attention.rows.scratch_elements(scratch_rows_);
    scratch_ = memory_.get<T>(elements);
  }

  void begin_chunk(const TaskChunk& current, const TaskChunk& next) {
    const bool prefetched = next_.task == current.task && next_.chunk == current.chunk;
    if (prefetched) std::swap(current_slots_, next_slots_);
    else locate(current, current_slots_);
    current_ = current, next_ = next, prefetched_ = prefetched;
    if (next.task) locate(next, next_slots_);
    prefetch_at_ = next_slots_.from;
    from_source_ = source_ && !attention_.prompt(current.task->sequence);
    if (!from_source_) return;
    const int64_t position = std::max(current.chunk * CHUNK, attention_.view.first(current.task->sequence));
    const int64_t low = position % CHUNK;
    if constexpr (!CODES) {
      const int64_t end = gathered_ ? current_slots_.to : current_slots_.end;
      source_->stage(position, current_slots_.slots + low, end - low, row + low);
      // A source writes a chunk's rows contiguously.
      for (int64_t i = low / 16 * 16; i < low; ++i) row[i] = row[low] - (low - i) * stride_;
    }
  }

  // Prefetches one row of the next chunk, if rows are read in place or computed.
  void prefetch_step() {
    if (!(in_place_ || source_) || !next_.task || prefetch_at_ >= next_slots_.to) return;
    if (source_) {
      if (!attention_.prompt(next_.task->sequence)) source_->prefetch(next_slots_.slots[prefetch_at_++]);
      return;
    }
    for (const ColumnRange& range : {next_.task->set.keys(), next_.task->set.values_outside_keys(attention_.row)}) {
      if constexpr (CODES) attention_.rows.prefetch_codes(next_slots_.slots[prefetch_at_], range);
      else attention_.rows.prefetch(next_slots_.slots + prefetch_at_, 1, range);
    }
    ++prefetch_at_;
  }

  // Stages the keys of tokens [from, to) of the chunk; `to` may exceed the sequence's end within its last 16 tokens.
  void keys(int64_t from, int64_t to) {
    if (from_source_) return;
    const HeadSet& set = current_.task->set;
    const Rows& rows = attention_.rows_of(current_.task->sequence);
    // Rows before the first one in its tile are not visible, but need an address.
    for (int64_t i = from / 16 * 16; gathered_ && i < from; ++i) row[i] = scratch_ + i % scratch_rows_ * stride_;
    for (int64_t t = from, end; t < to; t = end) {
      end = std::min(to, t + STRETCH);
      if (!in_place_ || !prefetched_) rows.prefetch(current_slots_.slots + t, end - t, set.values_outside_keys(attention_.row));
      if (!prefetched_) rows.prefetch(current_slots_.slots + end, std::min(STRETCH, current_slots_.to - end), set.keys());
      rows.stage(current_slots_.slots + t, end - t, {set.keys()}, scratch_ + t % scratch_rows_ * stride_, row + t);
      // Rows of a tile that may belong to several blocks are copied next to each other.
      const ColumnRange copied = CODES ? ColumnRange{0, rows.unit_bytes()} : set.keys();
      for (int64_t i = std::max(t, current_slots_.path_begin); i < end; ++i) {
        T* scratch_row = scratch_ + i % scratch_rows_ * stride_;
        if (row[i] != scratch_row) std::copy_n(row[i] + copied.first, copied.count, scratch_row + copied.first);
        row[i] = scratch_row;
      }
    }
  }

  // Stages values [at, at + count) of the task for tokens [from, to).
  void values(int64_t from, int64_t to, int64_t at, int64_t count) {
    if (CODES || from_source_) return;
    const Rows& rows = attention_.rows_of(current_.task->sequence);
    for (int64_t t = from, end; t < to; t = end) {
      end = std::min(to, t + STRETCH);
      if (!in_place_ && next_.task && !(source_ && !attention_.prompt(next_.task->sequence))) {
        // This call's share of the next chunk's keys.
        const HeadSet& set = next_.task->set;
        const int64_t first = set.D * at / set.V, last = set.D * std::min(at + count, set.V) / set.V;
        const int64_t begin = std::max(t, next_slots_.from), until = std::min(end, next_slots_.to);
        attention_.rows_of(next_.task->sequence).prefetch(next_slots_.slots + begin, until - begin,
                                                               {set.k + first, last - first});
      }
      // Unquantized rows are in place already, except those that were copied.
      const ColumnRanges range{current_.task->set.values(attention_.row, at, count)};
      if (rows.packed() || end > current_slots_.path_begin)
        rows.stage(current_slots_.slots + t, end - t, range, scratch_ + t % scratch_rows_ * stride_, row + t);
    }
  }

 private:
  // Slots of a chunk: known up to `end`, visible in [from, to), and possibly of several blocks per tile from `path_begin`
  // on: from the first tile with a tree's path, or all.
  struct Slots {
    int32_t slots[CHUNK];
    int64_t end, from, to, path_begin;
  };

  void locate(const TaskChunk& chunk, Slots& slots) const {
    const View& view = attention_.view;
    const int64_t s = chunk.task->sequence, base = chunk.chunk * CHUNK, first_row = std::max(base, view.first(s));
    // If a chunk has nodes of a tree, the task has one query token.
    const int64_t first = chunk.task->token(0), last = chunk.task->token(chunk.task->count - 1);
    const int64_t visible_end = std::min(base + CHUNK, view.position(s, last) + 1);
    const int64_t window_begin = view.window_begin(view.position(s, first));
    // The rest of the last tile belongs to the same block if block sizes are multiples of 16; otherwise it repeats the last
    // row.
    const int64_t tile_end = (visible_end + 15) / 16 * 16, row_end = view.block_size % 16 ? visible_end : tile_end;
    attention_.view_of(s).visible_slots(s, last, first_row, row_end - first_row, slots.slots + first_row - base);
    std::fill(slots.slots + row_end - base, slots.slots + tile_end - base, slots.slots[row_end - base - 1]);
    slots.end = (gathered_ ? tile_end : row_end) - base;
    slots.from = std::max(first_row, window_begin) - base, slots.to = visible_end - base;
    slots.path_begin = gathered_ ? 0 : std::max<int64_t>(0, view.tree_begin(s) - base) / 16 * 16;
  }

  static constexpr bool CODES = std::is_same_v<T, int8_t>;

  const Attention& attention_;
  const int64_t scratch_rows_, stride_;  // rows of scratch, and their distance in elements
  const std::unique_ptr<RowSource> source_;
  const bool in_place_;  // whether rows are read where they are cached
  const bool gathered_;  // whether all rows are copied to scratch, to make tiles contiguous
  Scratch memory_;
  T* scratch_;
  bool from_source_ = false;  // whether the chunk's rows come from the source
  TaskChunk current_, next_;
  int64_t prefetch_at_ = 0;  // the next chunk's first token that is not prefetched yet
  bool prefetched_ = false;
  Slots current_slots_, next_slots_;
};

// Merges one more chunk's partial result into the running total.
inline void merge_partial(float* total, float& total_max, float& total_sum, const float* part, float part_max,
                          float part_sum, int64_t V) {
  if (part_max == -INF) return;
  // The larger maximum's factor is 1.
  const float smaller_factor = exponential(-std::abs(total_max - part_max));
  const float total_factor = total_max < part_max ? smaller_factor : 1.0f;
  const float part_factor = total_max < part_max ? 1.0f : smaller_factor;
  const Floats a = splat(total_factor), b = splat(part_factor);
  int64_t v = 0;
  for (; v + 16 <= V; v += 16) store(total + v, fma(load(part + v), b, load(total + v) * a));
  if (v < V) store(total + v, fma(load(part + v, V - v), b, load(total + v, V - v) * a), V - v);
  total_sum = total_sum * total_factor + part_sum * part_factor;
  total_max = std::max(total_max, part_max);
}

// Flash decoding with `Kernel(attention)`, one instance per thread. `pack(task)` packs a task's queries; `attend(current,
// next, out, maxima, sums)` returns per column the unnormalized weighted sum of values [V] over the chunk, the largest score
// and the sum of weights. `Kernel::fuses_heads(attention)`: whether all KV heads in one task give, bitwise, the results of
// separate tasks.
template <typename Kernel>
class PagedAttention {
 public:
  explicit PagedAttention(const Attention& of) : of_(of), view_(of_.view) {
    if (!of_.source && (!of_.rows.packed() || of_.reads_codes())) of_.split_columns = 4 * COLUMNS;
    decode_prompts();
  }

  // Calls finish(n, out [H, V], lse [H]) for every query token, from several threads concurrently.
  template <typename Finish>
  void run(Finish finish) {
    const int64_t S = view_.sequences(), N = view_.query(S), H = of_.H, G = of_.G, V = of_.V;
    const HeadSet all_heads{0, H, 0, (G - 1) * of_.row.k_head + of_.D, 0, (G - 1) * of_.row.v_head + V};
    std::vector<Task> tasks;
    std::vector<Partials> partials(S);
    std::vector<int64_t> sequence_of(N);
    int64_t num_partials = 0, chunks = 0;
    for (int64_t s = 0; s < S; ++s) {
      const auto [from, to] = view_.chunks(s, 0, view_.queries(s));
      chunks += to - from;
    }
    // Separate KV heads if cores would be idle otherwise and rows are read in place. Steps of single tokens are too short to
    // gain.
    const bool few_chunks = chunks < at::get_num_threads() && N > S && of_.split_columns > COLUMNS;
    const bool fuse_heads = Kernel::fuses_heads(of_);
    for (int64_t s = 0; s < S; ++s) {
      const int64_t T = view_.queries(s), J = of_.J(), head_columns = T * J;
      std::fill_n(sequence_of.begin() + view_.query(s), T, s);
      auto single_head = [&](int64_t g) { return HeadSet{g * J, J, g * of_.row.k_head, of_.D, g * of_.row.v_head, V}; };
      if (of_.prompt(s)) {
        // Prompts: one KV head per task. The last columns see the most tokens, and the longest tasks go first.
        for (int64_t first = (head_columns - 1) / COLUMNS * COLUMNS; first >= 0; first -= COLUMNS)
          for (int64_t g = 0; g < G; ++g)
            tasks.push_back({s, first, std::min(COLUMNS, head_columns - first), -1, 0, single_head(g)});
        continue;
      }
      // Otherwise every chunk is a task, and results are merged afterwards. A tree has more tasks: chunks before it per
      // group of query tokens, chunks with nodes per query token.
      std::vector<HeadSet> sets;
      if (fuse_heads && H <= COLUMNS && !few_chunks && (T * H <= COLUMNS || view_.is_tree() || of_.split_columns == COLUMNS))
        sets = {all_heads};
      else for (int64_t g = 0; g < G; ++g) sets.push_back(single_head(g));
      const auto [from, to] = view_.chunks(s, 0, T);
      partials[s] = {num_partials, to - from, sets[0].heads};
      for (int64_t chunk = from; chunk < to; ++chunk)
        for (const HeadSet& set : sets) {
          const int64_t tokens = chunk < view_.tree_begin(s) / CHUNK ? std::max<int64_t>(1, COLUMNS / set.heads) : 1;
          const int64_t columns = T * set.heads, task_columns = tokens * set.heads;
          for (int64_t first = 0, end; first < columns; first = end) {
            end = std::min({columns, (first / task_columns + 1) * task_columns, first + COLUMNS});
            const auto [begin, until] = view_.chunks(s, first / set.heads, (end - 1) / set.heads + 1);
            if (chunk >= begin && chunk < until) tasks.push_back({s, first, end - first, chunk, num_partials + first, set});
          }
          num_partials += columns;
        }
    }
    const std::vector<int64_t> begins = order_by_rows(tasks);
    partial_ = scratch_.get<float>(num_partials * V), sums_ = scratch_.get<float>(num_partials);
    maxima_ = scratch_.filled(num_partials, -INF);
    out_ = scratch_.filled(N * H * V, 0.0f), lse_ = scratch_.get<float>(N * H);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      Kernel kernel(of_);
      const int64_t count = begins.size() - 1;
      for (int64_t i = next++, then; i < count; i = then) {
        then = next++;
        for (int64_t task = begins[i]; task < begins[i + 1]; ++task) {
          const int64_t following = task + 1 < begins[i + 1] ? task + 1 : then < count ? begins[then] : -1;
          run_task(tasks[task], following < 0 ? nullptr : &tasks[following], kernel);
        }
      }
    });
    at::parallel_for(0, N, 4, [&](int64_t from, int64_t to) {
      for (int64_t n = from; n < to; ++n) {
        const int64_t s = sequence_of[n];
        if (!of_.prompt(s)) merge(n, s, partials[s]);
        finish(n, out_ + n * H * V, lse_ + n * H);
      }
    });
  }

 private:
  // Partial results of a sequence: the first one, the number of chunks, and the heads of a set.
  struct Partials { int64_t first, chunks, heads; };

  // Decodes the rows of prompts, which many tasks read: each distinct block once.
  void decode_prompts() {
    if (!of_.rows.packed() || of_.reads_codes()) return;
    const int64_t width = of_.rows.width;
    const BlockRows read(scratch_, view_, width, [&](int64_t s) { return of_.prompt(s); },
                         [&](const int32_t* slots, const int32_t*, int64_t count, bf16* rows) {
                           of_.rows.read(slots, count, width, rows, width);
                         });
    of_.decoded = read.rows, of_.decoded_view = read.view;
  }

  // Groups tasks whose chunks begin with the same row, so that sequences that share rows read them together. Returns the
  // first task of each group, and the number of tasks.
  std::vector<int64_t> order_by_rows(std::vector<Task>& tasks) const {
    const int64_t count = tasks.size();
    std::vector<std::tuple<int64_t, int32_t, int64_t>> order;  // chunk, its first slot, task
    for (int64_t i = 0; i < count; ++i) {
      const auto [chunk, s] = std::pair(tasks[i].chunk, tasks[i].sequence);
      int32_t first = int32_t(i);
      if (chunk >= 0) view_.visible_slots(s, tasks[i].token(0), std::max(chunk * CHUNK, view_.first(s)), 1, &first);
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

  void run_task(const Task& task, const Task* following, Kernel& kernel) {
    const int64_t V = of_.V;
    const TaskChunk next{following, following ? first_chunk(*following) : 0};
    kernel.pack(task);
    if (task.chunk >= 0) {
      kernel.attend({&task, task.chunk}, next, partial_ + task.first_partial * V, maxima_ + task.first_partial,
                    sums_ + task.first_partial);
      return;
    }
    Scratch scratch;
    float *total = scratch.filled(task.count * V, 0.0f), *part = scratch.get<float>(task.count * V);
    float *total_max = scratch.filled(task.count, -INF), *total_sum = scratch.filled(task.count, 0.0f);
    float *part_max = scratch.get<float>(task.count), *part_sum = scratch.get<float>(task.count);
    const auto [from, to] = view_.chunks(task.sequence, task.token(0), task.token(task.count - 1) + 1);
    for (int64_t chunk = from; chunk < to; ++chunk) {
      kernel.attend({&task, chunk}, chunk + 1 < to ? TaskChunk{&task, chunk + 1} : next, part, part_max, part_sum);
      for (int64_t c = 0; c < task.count; ++c)
        merge_partial(total + c * V, total_max[c], total_sum[c], part + c * V, part_max[c], part_sum[c], V);
    }
    for (int64_t c = 0; c < task.count; ++c)
      normalize((view_.query(task.sequence) + task.token(c)) * of_.H + task.head(c), total + c * V, total_max[c],
                total_sum[c]);
  }

  void merge(int64_t n, int64_t s, const Partials& partials) {
    const int64_t H = of_.H, V = of_.V, T = view_.queries(s), m = n - view_.query(s), heads = partials.heads;
    for (int64_t h = 0; h < H; ++h) {
      float total_max = -INF, total_sum = 0, *total = out_ + (n * H + h) * V;
      for (int64_t i = 0; i < partials.chunks; ++i) {
        const int64_t partial = partials.first + i * T * H + h / heads * T * heads + m * heads + h % heads;
        merge_partial(total, total_max, total_sum, partial_ + partial * V, maxima_[partial], sums_[partial], V);
      }
      normalize(n * H + h, total, total_max, total_sum);
    }
  }

  void normalize(int64_t row, const float* total, float total_max, float total_sum) {
    lse_[row] = total_sum > 0 ? total_max + std::log(total_sum) : -INF;
    for (int64_t v = 0; v < of_.V; ++v) out_[row * of_.V + v] = total_sum > 0 ? total[v] / total_sum : 0.0f;
  }

  Attention of_;
  const View& view_;
  Scratch scratch_;
  float *partial_ = nullptr, *maxima_ = nullptr, *sums_ = nullptr, *out_ = nullptr, *lse_ = nullptr;
};
