// Tokens that a step's last query tokens read in sparse attention (modeling/token_index_mla.py). Index keys of 16 tokens are
// stored together, element by element: int8 [L / 16, I, 16].
#pragma once
#include <bit>
#include <numeric>

#include "attention/view.h"
#include "linear/product.h"
#include "simd/scratch.h"
#include "simd/tasks.h"

constexpr int64_t KEY_TILE = 16;  // tokens whose index keys are stored together
constexpr int64_t TASK_TOKENS = 1024;  // cached tokens per task
#ifdef __AVX512F__
constexpr int SCORED_HEADS = 12;  // heads per pass over a tile's keys: as many accumulators as there are registers
#else
constexpr int SCORED_HEADS = 5;
#endif
constexpr int64_t SCORING_SCRATCH = 1 << 24;  // numbers in scratch, for at least one sequence

// Rotation of index keys and queries: pairs (n, n + I / 2), each by one of the model's frequencies.
struct IndexPairs {
  const c10::complex<float>* rotations;  // [N, P]; null if the inputs are rotated already
  const int64_t* frequency;  // -1: not rotated
  int64_t P, I;

  void rotate(int64_t n, float* x) const {
    for (int64_t i = 0; rotations && i < I / 2; ++i) {
      if (frequency[i] < 0) continue;
      const auto rotation = rotations[n * P + frequency[i]];
      const float a = x[i], b = x[i + I / 2];
      x[i] = a * rotation.real() - b * rotation.imag();
      x[i + I / 2] = b * rotation.real() + a * rotation.imag();
    }
  }
};

inline float dot(const float* w, const float* x, int64_t count) {
  Floats sum = splat(0.0f);
  for (int64_t f = 0; f < count; f += 16) {
    const int64_t lanes = std::min<int64_t>(16, count - f);
    sum = fma(load(w + f, lanes), load(x + f, lanes), sum);
  }
  return reduce_add(sum);
}

// Writes the index keys of a step's tokens, from their features, to their slots. `halves`: for coded rows, the first
// features are rounded to integers from -half to half - 1.
inline void write_index(const at::Tensor& features_NF, const std::optional<at::Tensor>& halves_R, const at::Tensor& weight_IF,
                 const at::Tensor& bias_I, const std::optional<at::Tensor>& rotation_N1P, const at::Tensor& frequency,
                 at::Tensor& keys, const at::Tensor& slots_N) {
  const int64_t N = features_NF.size(0), F = features_NF.size(1), I = weight_IF.size(0), stride = features_NF.stride(0);
  TORCH_CHECK(features_NF.stride(1) == 1 && weight_IF.is_contiguous() && keys.is_contiguous(), "inputs are not contiguous");
  const bf16* features = features_NF.const_data_ptr<bf16>();
  const float *weight = weight_IF.const_data_ptr<float>(), *bias = bias_I.const_data_ptr<float>();
  const float* halves = halves_R ? halves_R->const_data_ptr<float>() : nullptr;
  const int64_t R = halves_R ? halves_R->size(0) : 0;
  const IndexPairs pairs{rotation_N1P ? rotation_N1P->const_data_ptr<c10::complex<float>>() : nullptr,
                         frequency.const_data_ptr<int64_t>(), rotation_N1P ? rotation_N1P->size(2) : 0, I};
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  int8_t* to = keys.mutable_data_ptr<int8_t>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    float *x = scratch.get<float>(F), *y = scratch.get<float>(I);
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t f = 0; f < F; ++f) x[f] = features[n * stride + f];
      for (int64_t f = 0; f < R; ++f) x[f] = std::clamp(std::nearbyint(x[f]), -halves[f], halves[f] - 1);
      for (int64_t i = 0; i < I; ++i) y[i] = dot(weight + i * F, x, F) + bias[i];
      pairs.rotate(n, y);
      int8_t* key = to + slots[n] / KEY_TILE * I * KEY_TILE + slots[n] % KEY_TILE;
      for (int64_t i = 0; i < I; ++i) {
        const float rounded = std::isnan(y[i]) ? 0.0f : std::nearbyint(y[i]);
        key[i * KEY_TILE] = int8_t(std::clamp(rounded, -127.0f, 127.0f));
      }
    }
  });
}

// Positions of the `count` largest scores, ascending; ties go to the last. Scores are 0 or at least the smallest normal
// number.
inline void select_largest(const float* scores, int64_t size, int64_t count, int32_t* places) {
  auto bits = [&](int64_t t) {
    uint32_t x;
    std::memcpy(&x, scores + t, 4);
    return x;
  };
  // Calls f(position) for scores in [low, high): non-negative floats compare like their bits.
  auto visit_between = [&](uint32_t low, uint32_t high, auto&& f) {
    auto bound = [](uint32_t from) {  // the next smaller float
      float x;
      from -= 1;
      std::memcpy(&x, &from, 4);
      return splat(from + 1 == 0 ? -1.0f : x);
    };
    const Floats lower = bound(low), upper = bound(high);
    for (int64_t t = 0; t < size; t += 16) {
      const Floats values = load(scores + t, size - t);
      for (Bits mask = greater(values, lower) & ~greater(values, upper) & lanes_between(0, size - t); mask; mask &= mask - 1)
        f(t + std::countr_zero(mask));
    }
  };
  // Radix selection of the count-th largest score. Few candidates remain after the first digit.
  constexpr uint32_t END = 0x7f800001;  // above infinity
  Scratch scratch;
  auto* candidates = scratch.get<int32_t>(size);
  int64_t num_candidates = 0;
  uint32_t prefix = 0;
  int64_t remaining = count;
  for (int shift : {20, 10, 0}) {
    std::array<int32_t, 2048> histogram{};
    if (shift == 20) for (int64_t t = 0; t < size; ++t) ++histogram[bits(t) >> shift];
    else for (int32_t t : std::span(candidates, num_candidates))
      histogram[bits(t) >> shift & 1023] += bits(t) >> (shift + 10) == prefix >> (shift + 10);
    int64_t digit = shift == 20 ? 2047 : 1023;
    while (histogram[digit] < remaining) remaining -= histogram[digit--];
    prefix |= uint32_t(digit) << shift;
    if (shift != 20) continue;
    visit_between(prefix, prefix + (1u << shift), [&](int64_t t) { candidates[num_candidates++] = int32_t(t); });
  }
  int64_t equal = std::count_if(candidates, candidates + num_candidates, [&](int32_t t) { return bits(t) == prefix; });
  visit_between(prefix, END, [&](int64_t t) {
    if (bits(t) != prefix || --equal < remaining) *places++ = int32_t(t);
  });
}

// Returns, per sequence, the slots and positions [S, K] of the tokens that its query tokens read, ascending: `counts` of
// them, or all that its last query token sees if there are no more. K is a multiple of `multiple`. That token selects for all
// of the sequence's; with a tree, from the text before the tree and its path. Rows are [q (H E), ...].
inline std::tuple<at::Tensor, at::Tensor> select_tokens(const at::Tensor& q_NX, int64_t heads, const at::Tensor& weight_GIE,
                                                 const std::optional<at::Tensor>& rotation_N1P, const at::Tensor& frequency,
                                                 const std::optional<at::Tensor>& sinks_H, const at::Tensor& keys,
                                                 const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                                 const at::Tensor& query_start_S1, int64_t block_size, at::IntArrayRef counts,
                                                 int64_t sink, int64_t window, int64_t stride,
                                                 int64_t multiple, const std::optional<at::Tensor>& tree_Tn) {
  const int64_t S = seq_lens_S.size(0), H = heads, G = weight_GIE.size(0), I = weight_GIE.size(1), E = weight_GIE.size(2);
  TORCH_CHECK(q_NX.stride(1) == 1 && weight_GIE.is_contiguous() && keys.is_contiguous(), "inputs are not contiguous");
  TORCH_CHECK(block_size % KEY_TILE == 0, "the block size ", block_size, " is not a multiple of ", KEY_TILE, " tokens");
  const View view{table_SB, seq_lens_S, std::nullopt, query_start_S1, block_size, 0, tree_Tn};
  // Number of tokens that a sequence's last query token sees, and the slot of one of them.
  auto visible_length = [&](int64_t s) { return view.position(s, view.queries(s) - 1) + 1; };
  auto visible_slot = [&](int64_t s, int64_t t) {
    int32_t slot;
    view.visible_slots(s, view.queries(s) - 1, t, 1, &slot);
    return slot;
  };
  const int64_t max_count = *std::max_element(counts.begin(), counts.end());
  const int64_t K = (max_count + multiple - 1) / multiple * multiple;
  at::Tensor slots = at::empty({S, K}, table_SB.options()), positions = at::empty({S, K}, table_SB.options());
  int32_t *slot = slots.mutable_data_ptr<int32_t>(), *position = positions.mutable_data_ptr<int32_t>();

  const bf16* qs = q_NX.const_data_ptr<bf16>();
  const float *weight = weight_GIE.const_data_ptr<float>(), *sinks = sinks_H ? sinks_H->const_data_ptr<float>() : nullptr;
  const IndexPairs pairs{rotation_N1P ? rotation_N1P->const_data_ptr<c10::complex<float>>() : nullptr,
                         frequency.const_data_ptr<int64_t>(), rotation_N1P ? rotation_N1P->size(2) : 0, I};
  const int8_t* from = keys.const_data_ptr<int8_t>();
  // Sequences with more tokens than they read: index queries [H, I], weights [H, tokens] and scores, and per task and head
  // the largest logit and the sum of the weights relative to it.
  struct Scoring { int64_t s, length, padded, tasks; float *queries, *weights, *scores, *maxima, *sums; };
  // Scored together are as many sequences as scratch may hold, at least one.
  for (int64_t first_s = 0, end_s; first_s < S; first_s = end_s) {
    std::vector<Scoring> scorings;
    std::vector<std::pair<int64_t, int64_t>> tasks;
    int64_t scratch_size = 0;
    for (end_s = first_s; end_s < S; ++end_s) {
      const int64_t length = visible_length(end_s), padded = (length + KEY_TILE - 1) / KEY_TILE * KEY_TILE;
      if (counts[end_s] >= length) continue;
      const int64_t parts = (padded + TASK_TOKENS - 1) / TASK_TOKENS, needed = H * I + (H + 1) * padded + 2 * H * parts;
      if (!scorings.empty() && scratch_size + needed > SCORING_SCRATCH) break;
      for (int64_t t = 0; t < padded; t += TASK_TOKENS) tasks.push_back({scorings.size(), t});
      scorings.push_back({end_s, length, padded, parts});
      scratch_size += needed;
    }
    // Sequences of one text, the tokens of a draft, read the same keys one after the other: from memory once.
    std::stable_sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    Scratch scratch;
    auto* next = scratch.get<float>(scratch_size);
    for (Scoring& scoring : scorings) {
      scoring.queries = next, scoring.weights = scoring.queries + H * I, scoring.scores = scoring.weights + H * scoring.padded;
      scoring.maxima = scoring.scores + scoring.padded, scoring.sums = scoring.maxima + H * scoring.tasks;
      next = scoring.sums + H * scoring.tasks;
    }
    at::parallel_for(0, scorings.size() * H, 4, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      auto* x = scratch.get<float>(E);
      for (int64_t at = begin; at < end; ++at) {
        const int64_t h = at % H, n = view.query(scorings[at / H].s + 1) - 1;
        float* u = scorings[at / H].queries + h * I;
        for (int64_t e = 0; e < E; ++e) x[e] = qs[n * q_NX.stride(0) + h * E + e];
        for (int64_t i = 0; i < I; ++i) u[i] = dot(weight + (h / (H / G) * I + i) * E, x, E);
        pairs.rotate(n, u);
      }
    });
    parallel_tasks(tasks.size(), [&](int64_t task) {
      const auto [i, first] = tasks[task];
      const Scoring& scoring = scorings[i];
      const int64_t last = std::min(scoring.padded, first + TASK_TOKENS), at = first / TASK_TOKENS * H;
      const int32_t* blocks = view.blocks(scoring.s).data();
      // Tiles with nodes of a tree are copied: those of the path lie apart.
      const int64_t copied_from = std::clamp<int64_t>(view.tree_begin(scoring.s) / KEY_TILE * KEY_TILE, first, last);
      Scratch scratch;
      auto* path = scratch.filled<int8_t>((last - copied_from) * I, 0);
      for (int64_t t = copied_from; t < last; ++t) {
        const int64_t slot = visible_slot(scoring.s, t);
        const int8_t* key = from + slot / KEY_TILE * KEY_TILE * I + slot % KEY_TILE;
        int8_t* copy = path + (t - copied_from) / KEY_TILE * KEY_TILE * I + t % KEY_TILE;
        for (int64_t i = 0; i < I; ++i) copy[i * KEY_TILE] = key[i * KEY_TILE];
      }
      run_in_batches<SCORED_HEADS>(H, [&](int64_t h, auto heads) {
        constexpr int N = heads;
        Floats maxima[N];
        for (Floats& logits_max : maxima) logits_max = splat(-INF);
        for (int64_t t = first; t < last; t += KEY_TILE) {
          const int8_t* key = t < copied_from ? from + (blocks[t / block_size] * block_size + t % block_size) * I
                                              : path + (t - copied_from) * I;
          // Tiles lie in blocks anywhere in memory, so that the processor does not foresee them.
          if (const int64_t next = t + 8 * KEY_TILE; h == 0 && next < copied_from)
            prefetch_bytes(from + (blocks[next / block_size] * block_size + next % block_size) * I, I * KEY_TILE);
          Floats sums[N];
#pragma GCC unroll 12
          for (int n = 0; n < N; ++n) sums[n] = splat(0.0f);
          const float* u = scoring.queries + h * I;
          for (int64_t i = 0; i < I; ++i) {
            const Floats y = widen(key + i * KEY_TILE);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) sums[n] = fma(splat(u[n * I + i]), y, sums[n]);
          }
          const Bits live = lanes_between(0, scoring.length - t);
#pragma GCC unroll 12
          for (int n = 0; n < N; ++n) {
            const Floats logits = select(live, sums[n], splat(-INF));
            maxima[n] = max(maxima[n], logits);
            store(scoring.weights + (h + n) * scoring.padded + t, logits);
          }
        }
        for (int n = 0; n < N; ++n) {
          const float peak = reduce_max(maxima[n]);
          Floats total = splat(0.0f);
          for (int64_t t = first; t < last; t += KEY_TILE) {
            float* to = scoring.weights + (h + n) * scoring.padded + t;
            const Floats weight = exponential(load(to) - splat(peak));
            total = total + weight;
            store(to, weight);
          }
          scoring.maxima[at + h + n] = peak, scoring.sums[at + h + n] = reduce_add(total);
        }
      });
    });
    // Mean over heads of the softmax over all tokens.
    parallel_tasks(tasks.size(), [&](int64_t task) {
      const auto [i, first] = tasks[task];
      const Scoring& scoring = scorings[i];
      Scratch scratch;
      auto* share = scratch.get<float>(H);
      for (int64_t h = 0; h < H; ++h) {
        float peak = sinks ? sinks[h] : -INF, total = 0;
        for (int64_t j = 0; j < scoring.tasks; ++j) peak = std::max(peak, scoring.maxima[j * H + h]);
        for (int64_t j = 0; j < scoring.tasks; ++j)
          total += scoring.sums[j * H + h] * std::exp(scoring.maxima[j * H + h] - peak);
        if (sinks) total += std::exp(sinks[h] - peak);
        share[h] = std::exp(scoring.maxima[first / TASK_TOKENS * H + h] - peak) / (total * H);
      }
      for (int64_t t = first; t < std::min(scoring.padded, first + TASK_TOKENS); t += KEY_TILE) {
        Floats score = splat(0.0f);
        for (int64_t h = 0; h < H; ++h) score = fma(load(scoring.weights + h * scoring.padded + t), splat(share[h]), score);
        // Subnormal scores and NaN become 0, as `select_largest` requires.
        store(scoring.scores + t, select(greater(score, splat(std::numeric_limits<float>::min())), score, splat(0.0f)));
      }
    });
    at::parallel_for(first_s, end_s, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t length = visible_length(s), count = std::min(counts[s], length);
        int32_t* places = position + s * K;
        const auto match =
            std::find_if(scorings.begin(), scorings.end(), [&](const Scoring& scoring) { return scoring.s == s; });
        if (match == scorings.end()) {
          std::iota(places, places + count, 0);
        } else {
          float* scores = match->scores;
          std::fill(scores, scores + std::min(sink, length), INF);
          std::fill(scores + std::max<int64_t>(0, length - window), scores + length, INF);
          for (int64_t t = 0; stride && t < length; t += stride) scores[t] = INF;
          select_largest(scores, length, count, places);
        }
        const int32_t *blocks = view.blocks(s).data(), size = int32_t(block_size);
        const int64_t tree_begin = view.tree_begin(s);
        for (int64_t i = 0; i < count; ++i) {
          const int32_t t = places[i];
          slot[s * K + i] = t < tree_begin ? blocks[t / size] * size + t % size : visible_slot(s, t);
        }
        std::fill(places + count, places + K, 0), std::fill(slot + s * K + count, slot + (s + 1) * K, 0);
      }
    });
  }
  return {slots, positions};
}
