// Constants of kernels that may differ from shape to shape: how far ahead weights are prefetched, how much of x is multiplied
// at a time, and how outputs are divided into tasks. None changes the order of a sum. ops/tuned.py fills the table once, so that
// a call costs one search.
#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>

#include <ATen/ATen.h>

enum class Kernel : int64_t { LINEAR, LINEAR_INT8, LINEAR_INT4, EXPERTS };
constexpr int64_t KERNELS = 4;

// 0: the kernel's default. ahead: bytes of weights; panel: bytes of x; task: outputs.
struct Configuration {
  int64_t ahead = 0, panel = 0, task = 0;
};

class Configurations {
 public:
  // Buckets of rows (ops/tuned.py): 1, 2, 4, 8, 16, and more.
  static int64_t bucket(int64_t rows) {
    int64_t bucket = 1;
    while (bucket < rows && bucket < 16) bucket *= 2;
    return rows > 16 ? 128 : bucket;
  }
  // Replaces the table by rows of nine numbers: kernel, outputs, inputs, experts, experts per token, bucket, configuration.
  static void set(at::IntArrayRef numbers) {
    auto table = std::make_unique<Table>();
    for (size_t i = 0; i + 9 <= numbers.size(); i += 9) {
      Key key;
      std::copy_n(numbers.begin() + i, key.size(), key.begin());
      (*table)[key] = {numbers[i + 6], numbers[i + 7], numbers[i + 8]};
    }
    // Another thread may still read the last table, so none is freed: a process sets a few.
    table_.store(table.release(), std::memory_order_release);
  }
  static Configuration find(Kernel kernel, int64_t outputs, int64_t inputs, int64_t rows, int64_t experts = 0,
                            int64_t top_k = 0) {
    calls_[int64_t(kernel)].fetch_add(1, std::memory_order_relaxed);
    const Table* table = table_.load(std::memory_order_acquire);
    if (!table) return {};
    const auto entry = table->find({int64_t(kernel), outputs, inputs, experts, top_k, bucket(rows)});
    if (entry == table->end()) return {};
    hits_[int64_t(kernel)].fetch_add(1, std::memory_order_relaxed);
    return entry->second;
  }
  // Calls since the start, and those with an entry, by kernel.
  static std::vector<int64_t> counts() {
    std::vector<int64_t> counts(calls_.begin(), calls_.end());
    counts.insert(counts.end(), hits_.begin(), hits_.end());
    return counts;
  }

 private:
  using Key = std::array<int64_t, 6>;
  using Table = std::map<Key, Configuration>;
  static inline std::atomic<const Table*> table_ = nullptr;
  static inline std::array<std::atomic<int64_t>, KERNELS> calls_{}, hits_{};
};

// The least blocks of 16 outputs per thread.
inline int64_t blocks_per_thread(const Configuration& configuration) {
  return std::max<int64_t>(1, (configuration.task + 15) / 16);
}
