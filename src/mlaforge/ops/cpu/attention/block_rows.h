// Rows that attention reads, computed in advance from the blocks of some sequences, each distinct block once.
#pragma once
#include <optional>
#include <unordered_map>

#include "attention/view.h"
#include "rows/rows.h"
#include "simd/scratch.h"

constexpr int64_t UNIT = 32;  // tokens whose rows are computed together

struct BlockRows {
  std::optional<Rows> rows = std::nullopt;  // none if no sequence is selected
  View view;  // of these rows

  // `selects(s)`: whether the blocks of sequence s are computed. `compute(slots, positions, count, rows)` writes the rows of
  // `count` tokens, a multiple of UNIT, of which the last ones may repeat a slot; rows are `width` elements apart.
  template <typename Selects, typename Compute>
  BlockRows(Scratch& scratch, const View& of, int64_t width, Selects selects, Compute compute) : view(of) {
    constexpr int64_t MAX_TASK_ROWS = 256;
    bool any = false;
    for (int64_t s = 0; s < of.sequences(); ++s) any |= selects(s);
    if (!any) return;
    const int64_t size = of.block_size;
    int32_t* table = view.copy_table();
    std::unordered_map<int32_t, int32_t> entries;
    struct Block { int32_t number, position; };
    std::vector<Block> blocks;
    for (int64_t s = 0; s < of.sequences(); ++s) {
      int32_t* entry = table + s * view.columns();
      for (int64_t p = of.first(s); selects(s) && p < of.length(s); p += size, ++entry) {
        const auto [at, inserted] = entries.try_emplace(*entry, int32_t(blocks.size()));
        if (inserted) blocks.push_back({*entry, int32_t(p)});
        *entry = at->second;
      }
    }
    // Tasks of whole units, at least one per thread if there are as many.
    const int64_t total = blocks.size() * size, units = (total + UNIT - 1) / UNIT, threads = at::get_num_threads();
    const int64_t task_rows = std::min((units + threads - 1) / threads * UNIT, MAX_TASK_ROWS);
    const int64_t tasks = (total + task_rows - 1) / task_rows;
    auto* to = scratch.get<bf16>((total + UNIT - 1) / UNIT * UNIT * width);
    at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      int32_t slots[MAX_TASK_ROWS], positions[MAX_TASK_ROWS];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * task_rows, count = std::min(task_rows, (total - first + UNIT - 1) / UNIT * UNIT);
        for (int64_t t = 0; t < count; ++t) {
          const auto [b, offset] = std::lldiv(std::min(first + t, total - 1), size);
          slots[t] = int32_t(blocks[b].number * size + offset), positions[t] = int32_t(blocks[b].position + offset);
        }
        compute(slots, positions, count, to + first * width);
      }
    });
    rows.emplace(to, width);
  }
};
