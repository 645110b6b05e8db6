// Which cached tokens a step's newest query tokens read in sparse attention: modeling/token_index_mla.py says what is
// computed. Index keys lie sixteen tokens together, number by number: [L / 16, I, 16] of int8.
#pragma once
#include <bit>
#include <numeric>

#include "product.h"
#include "view.h"

constexpr int64_t TOKENS = 16;     // whose index keys lie together
constexpr int64_t SCORED = 1024;   // cached tokens of a task

// What index keys and queries have in common: pairs (n, n + I / 2), each turned by one of the model's frequencies.
struct IndexPairs {
  const c10::complex<float>* turns;  // [N, P]; none where they are turned already
  const int64_t* frequency;          // -1: not turned
  int64_t P, I;

  void turn(int64_t n, float* x) const {
    for (int64_t i = 0; turns && i < I / 2; ++i) {
      if (frequency[i] < 0) continue;
      const auto by = turns[n * P + frequency[i]];
      const float a = x[i], b = x[i + I / 2];
      x[i] = a * by.real() - b * by.imag();
      x[i + I / 2] = b * by.real() + a * by.imag();
    }
  }
};

inline float product(const float* w, const float* x, int64_t count) {
  Floats to = all(0.0f);
  for (int64_t f = 0; f < count; f += 16) {
    const int64_t some = std::min<int64_t>(16, count - f);
    to = fma(load(w + f, some), load(x + f, some), to);
  }
  return sum(to);
}

// Index keys of a step's tokens, from their features, each to its slot. `halves`: of the first features, those of coded
// rows, which are read as whole numbers from -half to half - 1.
void write_index(const at::Tensor& features_NF, const std::optional<at::Tensor>& halves_R, const at::Tensor& weight_IF,
                 const at::Tensor& bias_I, const std::optional<at::Tensor>& rotation_N1P, const at::Tensor& frequency,
                 at::Tensor& keys, const at::Tensor& slots_N) {
  const int64_t N = features_NF.size(0), F = features_NF.size(1), I = weight_IF.size(0), stride = features_NF.stride(0);
  TORCH_CHECK(features_NF.stride(1) == 1 && weight_IF.is_contiguous() && keys.is_contiguous(), "numbers lie apart");
  const bf16* features = features_NF.const_data_ptr<bf16>();
  const float *weight = weight_IF.const_data_ptr<float>(), *bias = bias_I.const_data_ptr<float>();
  const float* halves = halves_R ? halves_R->const_data_ptr<float>() : nullptr;
  const int64_t R = halves_R ? halves_R->size(0) : 0;
  const IndexPairs pairs{rotation_N1P ? rotation_N1P->const_data_ptr<c10::complex<float>>() : nullptr,
                         frequency.const_data_ptr<int64_t>(), rotation_N1P ? rotation_N1P->size(2) : 0, I};
  const int64_t* slots = slots_N.const_data_ptr<int64_t>();
  int8_t* to = keys.mutable_data_ptr<int8_t>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> x(F), y(I);
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t f = 0; f < F; ++f) x[f] = features[n * stride + f];
      for (int64_t f = 0; f < R; ++f) x[f] = std::clamp(std::nearbyint(x[f]), -halves[f], halves[f] - 1);
      for (int64_t i = 0; i < I; ++i) y[i] = product(weight + i * F, x.data(), F) + bias[i];
      pairs.turn(n, y.data());
      int8_t* own = to + slots[n] / TOKENS * I * TOKENS + slots[n] % TOKENS;
      for (int64_t i = 0; i < I; ++i) {
        const float whole = std::isnan(y[i]) ? 0.0f : std::nearbyint(y[i]);
        own[i * TOKENS] = int8_t(std::clamp(whole, -127.0f, 127.0f));
      }
    }
  });
}

// The `count` largest of scores, each 0 or at least the least normal number, in rising order of place; of equal ones the last.
inline void largest(const float* scores, int64_t size, int64_t count, int32_t* places) {
  auto bits = [&](int64_t t) {
    uint32_t x;
    std::memcpy(&x, scores + t, 4);
    return x;
  };
  // f(place) for those from `low` on, to before `high`: floats that are no less than 0 are in order of their bits.
  auto among = [&](uint32_t low, uint32_t high, auto&& f) {
    auto bound = [](uint32_t from) {  // the largest float before it
      float x;
      from -= 1;
      std::memcpy(&x, &from, 4);
      return all(from + 1 == 0 ? -1.0f : x);
    };
    const Floats before = bound(low), last = bound(high);
    for (int64_t t = 0; t < size; t += 16) {
      const Floats own = load(scores + t, size - t);
      for (Bits some = above(own, before) & ~above(own, last) & between(0, size - t); some; some &= some - 1)
        f(t + std::countr_zero(some));
    }
  };
  // Digit by digit, where the count-th largest lies; after the first one few are left.
  constexpr uint32_t END = 0x7f800001;  // behind infinity
  static thread_local std::vector<int32_t> rest;
  uint32_t prefix = 0;
  int64_t left = count;
  for (int shift : {20, 10, 0}) {
    std::array<int32_t, 2048> of{};
    if (shift == 20) for (int64_t t = 0; t < size; ++t) ++of[bits(t) >> shift];
    else for (int32_t t : rest) of[bits(t) >> shift & 1023] += bits(t) >> (shift + 10) == prefix >> (shift + 10);
    int64_t digit = shift == 20 ? 2047 : 1023;
    while (of[digit] < left) left -= of[digit--];
    prefix |= uint32_t(digit) << shift;
    if (shift != 20) continue;
    rest.clear();
    among(prefix, prefix + (1u << shift), [&](int64_t t) { rest.push_back(int32_t(t)); });
  }
  int64_t equal = std::count_if(rest.begin(), rest.end(), [&](int32_t t) { return bits(t) == prefix; });
  among(prefix, END, [&](int64_t t) {
    if (bits(t) != prefix || --equal < left) *places++ = int32_t(t);
  });
}

// For each sequence the slots and positions [S, K] of the tokens that its query tokens read, in rising order: as many as
// `counts` says, all of them where there are no more; K is a multiple of `apart`. The last query token decides for all.
// Rows [q (H E), ...] in.
std::tuple<at::Tensor, at::Tensor> select_tokens(const at::Tensor& q_NX, int64_t heads, const at::Tensor& weight_GIE,
                                                 const std::optional<at::Tensor>& rotation_N1P, const at::Tensor& frequency,
                                                 const std::optional<at::Tensor>& sinks_H, const at::Tensor& keys,
                                                 const at::Tensor& table_SB, const at::Tensor& seq_lens_S,
                                                 const at::Tensor& query_start_S1, int64_t block_size, at::IntArrayRef counts,
                                                 int64_t sink, int64_t window, int64_t stride,
                                                 int64_t apart) {
  const int64_t S = seq_lens_S.size(0), H = heads, G = weight_GIE.size(0), I = weight_GIE.size(1), E = weight_GIE.size(2);
  TORCH_CHECK(q_NX.stride(1) == 1 && weight_GIE.is_contiguous() && keys.is_contiguous(), "numbers lie apart");
  TORCH_CHECK(block_size % TOKENS == 0, "index keys lie ", TOKENS, " tokens together, blocks have ", block_size);
  const View view{table_SB, seq_lens_S, at::zeros_like(seq_lens_S), query_start_S1, block_size, 0, std::nullopt};
  const int64_t most = *std::max_element(counts.begin(), counts.end()), K = (most + apart - 1) / apart * apart;
  at::Tensor slots = at::zeros({S, K}, table_SB.options()), positions = at::zeros({S, K}, table_SB.options());
  int32_t *slot = slots.mutable_data_ptr<int32_t>(), *position = positions.mutable_data_ptr<int32_t>();

  const bf16* qs = q_NX.const_data_ptr<bf16>();
  const float *weight = weight_GIE.const_data_ptr<float>(), *sinks = sinks_H ? sinks_H->const_data_ptr<float>() : nullptr;
  const IndexPairs pairs{rotation_N1P ? rotation_N1P->const_data_ptr<c10::complex<float>>() : nullptr,
                         frequency.const_data_ptr<int64_t>(), rotation_N1P ? rotation_N1P->size(2) : 0, I};
  const int8_t* from = keys.const_data_ptr<int8_t>();
  // Sequences that there is something to choose for: index queries [H, I], weights [H, tokens] and scores; and for each
  // task and head its largest logit and the sum of weights, which count from that.
  struct Chosen { int64_t s, length, padded, tasks; float *u, *weights, *scores, *most, *sums; };
  std::vector<Chosen> some;
  std::vector<std::pair<int64_t, int64_t>> tasks;
  int64_t numbers = 0;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t length = view.length(s), padded = (length + TOKENS - 1) / TOKENS * TOKENS;
    if (counts[s] >= length) continue;
    for (int64_t t = 0; t < padded; t += SCORED) tasks.push_back({some.size(), t});
    some.push_back({s, length, padded, (padded + SCORED - 1) / SCORED, nullptr, nullptr, nullptr, nullptr, nullptr});
    numbers += H * I + (H + 1) * padded + 2 * H * some.back().tasks;
  }
  // Kept from layer to layer: fresh memory would be given page by page.
  static thread_local std::vector<float> scratch;
  scratch.resize(std::max<size_t>(scratch.size(), numbers));
  float* next = scratch.data();
  for (Chosen& own : some) {
    own.u = next, own.weights = own.u + H * I, own.scores = own.weights + H * own.padded;
    own.most = own.scores + own.padded, own.sums = own.most + H * own.tasks, next = own.sums + H * own.tasks;
  }
  at::parallel_for(0, some.size() * H, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> x(E);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t h = at % H, n = view.query(some[at / H].s + 1) - 1;
      float* u = some[at / H].u + h * I;
      for (int64_t e = 0; e < E; ++e) x[e] = qs[n * q_NX.stride(0) + h * E + e];
      for (int64_t i = 0; i < I; ++i) u[i] = product(weight + (h / (H / G) * I + i) * E, x.data(), E);
      pairs.turn(n, u);
    }
  });
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const auto [i, first] = tasks[task];
      const Chosen& own = some[i];
      const int64_t last = std::min(own.padded, first + SCORED), at = first / SCORED * H;
      const int32_t* blocks = view.blocks(own.s).data();
      in_parts<12>(H, [&](int64_t h, auto heads) {
        constexpr int N = heads;
        Floats most[N];
        for (Floats& each : most) each = all(-INF);
        for (int64_t t = first; t < last; t += TOKENS) {
          const int8_t* key = from + (blocks[t / block_size] * block_size + t % block_size) * I;
          Floats sums[N];
#pragma GCC unroll 12
          for (int n = 0; n < N; ++n) sums[n] = all(0.0f);
          const float* u = own.u + h * I;
          for (int64_t i = 0; i < I; ++i) {
            const Floats y = widened(key + i * TOKENS);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) sums[n] = fma(all(u[n * I + i]), y, sums[n]);
          }
          const Bits there = between(0, own.length - t);
#pragma GCC unroll 12
          for (int n = 0; n < N; ++n) {
            const Floats logits = select(there, sums[n], all(-INF));
            most[n] = max(most[n], logits);
            store(own.weights + (h + n) * own.padded + t, logits);
          }
        }
        for (int n = 0; n < N; ++n) {
          const float peak = greatest(most[n]);
          Floats total = all(0.0f);
          for (int64_t t = first; t < last; t += TOKENS) {
            float* to = own.weights + (h + n) * own.padded + t;
            const Floats weight = exponential(load(to) - all(peak));
            total = total + weight;
            store(to, weight);
          }
          own.most[at + h + n] = peak, own.sums[at + h + n] = sum(total);
        }
      });
    }
  });
  // The mean of the heads' softmax over all that is there.
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> share(H);
    for (int64_t task = begin; task < end; ++task) {
      const auto [i, first] = tasks[task];
      const Chosen& own = some[i];
      for (int64_t h = 0; h < H; ++h) {
        float peak = sinks ? sinks[h] : -INF, total = 0;
        for (int64_t j = 0; j < own.tasks; ++j) peak = std::max(peak, own.most[j * H + h]);
        for (int64_t j = 0; j < own.tasks; ++j) total += own.sums[j * H + h] * std::exp(own.most[j * H + h] - peak);
        if (sinks) total += std::exp(sinks[h] - peak);
        share[h] = std::exp(own.most[first / SCORED * H + h] - peak) / (total * H);
      }
      for (int64_t t = first; t < std::min(own.padded, first + SCORED); t += TOKENS) {
        Floats score = all(0.0f);
        for (int64_t h = 0; h < H; ++h) score = fma(load(own.weights + h * own.padded + t), all(share[h]), score);
        // What is next to nothing is nothing, and so is what is no number: `largest` takes neither.
        store(own.scores + t, select(above(score, all(std::numeric_limits<float>::min())), score, all(0.0f)));
      }
    }
  });
  at::parallel_for(0, S, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t length = view.length(s), count = std::min(counts[s], length);
      int32_t* places = position + s * K;
      const auto own = std::find_if(some.begin(), some.end(), [&](const Chosen& each) { return each.s == s; });
      if (own == some.end()) {
        std::iota(places, places + count, 0);
      } else {
        float* scores = own->scores;
        std::fill(scores, scores + std::min(sink, length), INF);
        std::fill(scores + std::max<int64_t>(0, length - window), scores + length, INF);
        for (int64_t t = 0; stride && t < length; t += stride) scores[t] = INF;
        largest(scores, length, count, places);
      }
      const int32_t *blocks = view.blocks(s).data(), size = int32_t(block_size);
      for (int64_t i = 0; i < count; ++i) slot[s * K + i] = blocks[places[i] / size] * size + places[i] % size;
    }
  });
  return {slots, positions};
}
