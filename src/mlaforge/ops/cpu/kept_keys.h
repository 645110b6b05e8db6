// Decompressed keys of the layout latent that a selection of tokens was read with, kept from step to step: most of
// what one token reads the next one reads too. A key depends on its token's row and position alone, so a kept one is the
// same to the bit; whoever writes a row forgets its key.
//
// Legend: L slots of the cache, E places for keys.
#pragma once
#include "latent_rows.h"

class KeptKeys {
 public:
  // keys [E, G D]; `places` as ops/kept_keys.py describes it.
  KeptKeys(const at::Tensor& keys, const at::Tensor& places, int64_t slots)
      : keys_(keys.mutable_data_ptr<bf16>()), E_(keys.size(0)), GD_(keys.size(1)),
        entry_(places.mutable_data_ptr<int32_t>()), owner_(entry_ + slots), used_(owner_ + E_), hand_(used_ + E_),
        now_(hand_ + 1) {
    TORCH_CHECK(keys.is_contiguous() && places.is_contiguous(), "kept keys have gaps between them");
    TORCH_CHECK(places.numel() == slots + 2 * E_ + 2, "places are not those of ", slots, " slots and ", E_, " keys");
  }

  void forget(const int64_t* slots, int64_t count) const {
    for (int64_t n = 0; n < count; ++n) {
      int32_t& entry = entry_[slots[n]];
      if (entry >= 0) owner_[entry] = -1;
      entry = -1;
    }
  }

  const bf16* key(int32_t slot) const { return keys_ + entry_[slot] * GD_; }

  // Makes the keys of all rows that `view` reads which are not there. False, and nothing is done, where there are not
  // places for all of them.
  bool make(const View& view, const LatentKeys& keys, const Rows& cached) const {
    const int64_t S = view.sequences();
    int64_t all = 0;
    for (int64_t s = 0; s < S; ++s) all += view.rows(s);
    if (all > E_ || view.block_size != 1) return false;
    if (*now_ == std::numeric_limits<int32_t>::max()) std::fill_n(used_, E_, 0), *now_ = 0;
    const int32_t now = ++*now_;
    for (int64_t s = 0; s < S; ++s)
      for (int32_t slot : view.blocks(s))
        if (entry_[slot] >= 0) used_[entry_[slot]] = now;
    struct Missing { int32_t slot, position; };
    std::vector<Missing> missing;
    for (int64_t s = 0; s < S; ++s) {
      int32_t position = int32_t(view.first(s)) - 1;
      for (int32_t slot : view.blocks(s)) {
        ++position;
        if (entry_[slot] >= 0) continue;
        // In turn, but for what this step reads.
        while (used_[*hand_] == now) *hand_ = (*hand_ + 1) % E_;
        if (owner_[*hand_] >= 0) entry_[owner_[*hand_]] = -1;
        owner_[*hand_] = slot, used_[*hand_] = now, entry_[slot] = *hand_;
        missing.push_back({slot, position});
      }
    }
    const int64_t width = keys.width(), count = missing.size();
    at::parallel_for(0, (count + UNIT - 1) / UNIT, 1, [&](int64_t begin, int64_t end) {
      static thread_local std::vector<bf16> rows, scratch;
      rows.resize(std::max<size_t>(rows.size(), UNIT * width + LINE));
      scratch.resize(std::max<size_t>(scratch.size(), cached.scratch(UNIT)));
      bf16* own = align64(rows.data());
      for (int64_t unit = begin; unit < end; ++unit) {
        const Missing* some = missing.data() + unit * UNIT;
        const int64_t number = std::min(UNIT, count - unit * UNIT);
        int32_t slots[UNIT], positions[UNIT] = {};
        const bf16* row[UNIT];
        for (int64_t i = 0; i < number; ++i) slots[i] = some[i].slot, positions[i] = some[i].position;
        cached.stage(slots, number, {Part{0, keys.R}, Part{}}, scratch.data(), row);
        for (int64_t i = 0; i < number; ++i) keys.put(row[i], own + i * width);
        keys.make(own, positions, UNIT);
        for (int64_t i = 0; i < number; ++i) std::copy_n(own + i * width, GD_, keys_ + entry_[slots[i]] * GD_);
      }
    });
    return true;
  }

 private:
  bf16* keys_;
  const int64_t E_, GD_;
  int32_t *entry_, *owner_, *used_, *hand_, *now_;
};

// Rows of a chunk whose keys are kept.
class KeptRows : public Source {
 public:
  KeptRows(const LatentCache& of, const KeptKeys& kept) : of_(of), kept_(kept) {
    static thread_local std::vector<bf16> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), CHUNK * of.keys.width() + LINE));
    rows_ = align64(scratch.data());
  }

  void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) override {
    const int64_t GD = of_.keys.GD, width = of_.keys.width();
    bf16* rows = rows_ + position % CHUNK * width;
    int32_t positions[CHUNK];
    for (int64_t t = 0; t < count; ++t) prefetch_bytes(kept_.key(slots[t]), 2 * GD);
    of_.cached.fetch(slots, count, {0, of_.keys.R});
    of_.bring(position, slots, count, rows, positions);
    for (int64_t t = 0; t < count; ++t) row[t] = std::copy_n(kept_.key(slots[t]), GD, rows + t * width) - GD;
  }

 private:
  const LatentCache& of_;
  const KeptKeys& kept_;
  bf16* rows_;
};
