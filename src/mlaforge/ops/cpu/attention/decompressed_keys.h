// Cache of decompressed keys of the `latent` layout, for selections of tokens: consecutive tokens select mostly the same
// tokens. A key depends only on its token's row and position, so a cached key is bitwise equal to a new one. Writing a row
// must invalidate its key.
//
// Legend: L slots of the paged cache, E entries.
#pragma once
#include "attention/latent_rows.h"

class DecompressedKeys {
 public:
  // keys [E, G D]; metadata: see ops/decompressed_keys.py.
  DecompressedKeys(const at::Tensor& keys, const at::Tensor& metadata)
      : keys_(keys.mutable_data_ptr<bf16>()), E_(keys.size(0)), GD_(keys.size(1)),
        entries_(metadata.mutable_data_ptr<int32_t>()), owners_(entries_ + metadata.numel() - E_ - 1), hand_(owners_ + E_) {
    TORCH_CHECK(keys.is_contiguous() && metadata.is_contiguous(), "decompressed keys are not contiguous");
    TORCH_CHECK(metadata.numel() > E_ + 1, "metadata of ", metadata.numel(), " numbers has no slots for ", E_, " keys");
  }

  void invalidate(const int64_t* slots, int64_t count) const {
    for (int64_t n = 0; n < count; ++n) {
      int32_t& entry = entries_[slots[n]];
      if (entry >= 0) owners_[entry] = -1;
      entry = -1;
    }
  }

  // The keys at a slot; nullptr if they are not cached.
  const bf16* find(int32_t slot) const { return entries_[slot] < 0 ? nullptr : keys_ + entries_[slot] * GD_; }

  // Decompresses the keys that `view` reads, a selection, and the cache lacks, as many as it has entries for.
  void decompress_missing(const View& view, const LatentKeys& keys, const Rows& cached) const {
    const int64_t S = view.sequences();
    std::vector<bool> is_read(E_);  // entries that this step reads
    for (int64_t s = 0; s < S; ++s)
      for (int32_t slot : view.blocks(s))
        if (entries_[slot] >= 0) is_read[entries_[slot]] = true;
    int64_t available = E_ - std::count(is_read.begin(), is_read.end(), true);
    struct Missing { int32_t slot, position; };
    std::vector<Missing> missing;
    for (int64_t s = 0; s < S; ++s) {
      int32_t position = int32_t(view.first(s)) - 1;
      for (int32_t slot : view.blocks(s)) {
        ++position;
        if (entries_[slot] >= 0 || !available) continue;
        --available;
        // Clock eviction, except of entries that this step reads.
        while (is_read[*hand_]) *hand_ = (*hand_ + 1) % E_;
        if (owners_[*hand_] >= 0) entries_[owners_[*hand_]] = -1;
        owners_[*hand_] = slot, is_read[*hand_] = true, entries_[slot] = *hand_;
        missing.push_back({slot, position});
        cached.prefetch(&slot, 1, {0, keys.up.R});
      }
    }
    const CachedLatents latents{keys.up, cached};
    const int64_t stride = latents.width(), count = missing.size();
    at::parallel_for(0, (count + UNIT - 1) / UNIT, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      bf16 *loaded = scratch.get<bf16>(UNIT * stride), *unit_keys = scratch.get<bf16>(UNIT * GD_);
      for (int64_t unit = begin; unit < end; ++unit) {
        const Missing* batch = missing.data() + unit * UNIT;
        const int64_t batch_size = std::min(UNIT, count - unit * UNIT);
        int32_t slots[UNIT], positions[UNIT] = {};
        for (int64_t i = 0; i < batch_size; ++i) slots[i] = batch[i].slot, positions[i] = batch[i].position;
        latents.load(slots, batch_size, loaded, stride);
        keys.decompress(loaded, stride, positions, UNIT, unit_keys, GD_);
        for (int64_t i = 0; i < batch_size; ++i) std::copy_n(unit_keys + i * GD_, GD_, keys_ + entries_[slots[i]] * GD_);
      }
    });
  }

 private:
  bf16* keys_;
  const int64_t E_, GD_;
  int32_t *entries_, *owners_, *hand_;
};

// Rows of a chunk, with keys from the cache.
class DecompressedKeyRows : public RowSource {
 public:
  DecompressedKeyRows(const LatentCache& cache, const DecompressedKeys& decompressed_keys)
      : cache_(cache), decompressed_keys_(decompressed_keys), rows_(scratch_.get<bf16>(CHUNK * cache.keys.width())) {}

  void stage(int64_t position, const int32_t* slots, int64_t count, const bf16** row) override {
    const int64_t width = cache_.keys.width();
    bf16* rows = rows_ + position % CHUNK * width;
    for (int64_t t = 0, end; t < count; t = end) {
      end = std::min(count, t + STRETCH);
      for (int64_t i = end; i < std::min(count, end + STRETCH); ++i) prefetch(slots[i]);
      cache_.load_latents(slots + t, end - t, rows + t * width);
    }
    int64_t missing[UNIT], count_missing = 0;
    for (int64_t t = 0; t < count; ++t) {
      row[t] = rows + t * width;
      if (const bf16* key = decompressed_keys_.find(slots[t])) std::copy_n(key, cache_.keys.GD, rows + t * width);
      else missing[count_missing++] = t;
      if (count_missing == UNIT || (count_missing && t + 1 == count))
        decompress(position, missing, std::exchange(count_missing, 0), rows);
    }
  }

  void prefetch(int32_t slot) override {
    if (const bf16* key = decompressed_keys_.find(slot)) prefetch_bytes(key, 2 * cache_.keys.GD);
    cache_.cached.prefetch(&slot, 1, {0, cache_.keys.up.R});
  }

 private:
  // Computes the keys of rows [keys, c] that the cache lacks, at most UNIT; `position`: of row 0.
  void decompress(int64_t position, const int64_t* missing, int64_t count, bf16* rows) {
    const LatentKeys& keys = cache_.keys;
    const int64_t width = keys.width(), stride = odd_lines(keys.up.K);
    Scratch scratch;
    bf16 *latents = scratch.get<bf16>(UNIT * stride), *unit_keys = scratch.get<bf16>(UNIT * keys.GD);
    int32_t positions[UNIT] = {};
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(rows + missing[i] * width + keys.latent_offset(), keys.up.K, latents + i * stride);
      positions[i] = int32_t(position + missing[i]);
    }
    keys.decompress(latents, stride, positions, UNIT, unit_keys, keys.GD);
    for (int64_t i = 0; i < count; ++i) std::copy_n(unit_keys + i * keys.GD, keys.GD, rows + missing[i] * width);
  }

  const LatentCache& cache_;
  const DecompressedKeys& decompressed_keys_;
  Scratch scratch_;
  bf16* const rows_;
};
