// Cache of decompressed keys of the `latent` layout, for selections of tokens: consecutive tokens select mostly the same
// tokens. Keys are stored as int8 rows, a scale per KV head. A selection reads rounded keys whether they are cached or new,
// and a key depends only on its token's row and position, so results do not depend on what is cached. Writing a row must
// invalidate its key.
//
// Legend: L slots of the paged cache, E entries, G KV heads, D key dimensions.
#pragma once
#include <atomic>

#include "attention/latent_keys.h"
#include "attention/prompt_attention.h"

class DecompressedKeys {
 public:
  // keys [E, bytes]; metadata: see ops/decompressed_keys.py.
  DecompressedKeys(const at::Tensor& keys, const at::Tensor& metadata, int64_t G, int64_t D)
      : keys_(keys.mutable_data_ptr<uint8_t>()), E_(keys.size(0)), rounded_(std::vector<int64_t>(G, D)),
        entries_(metadata.mutable_data_ptr<int32_t>()), owners_(entries_ + metadata.numel() - E_ - 1), hand_(owners_ + E_) {
    TORCH_CHECK(keys.size(1) == rounded_.unit_bytes(), "keys have ", keys.size(1), " bytes, not ", rounded_.unit_bytes());
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

  bool has(int32_t slot) const { return entries_[slot] >= 0; }
  // Reads the keys at a slot, which are cached.
  void read(int32_t slot, bf16* to) const {
    rounded_.read({keys_, rounded_.unit_bytes()}, &entries_[slot], 1, 0, rounded_.width, to, 0);
  }
  void prefetch(int32_t slot) const {
    if (has(slot)) prefetch_bytes(keys_ + entries_[slot] * rounded_.unit_bytes(), rounded_.unit_bytes());
  }
  // Rounds a token's keys as if they were cached.
  void round(const bf16* keys, bf16* to) const {
    static thread_local std::vector<uint8_t> bytes;
    bytes.resize(rounded_.unit_bytes());
    rounded_.write(keys, bytes.data());
    const int32_t first = 0;
    rounded_.read({bytes.data(), 0}, &first, 1, 0, rounded_.width, to, 0);
  }

  // Decompresses the keys that `view` reads and the cache lacks, as many as it has entries for. Nodes of a tree are not at
  // their final positions, so their keys are not cached.
  void decompress_missing(const View& view, const LatentKeys& keys, const Rows& cached) const {
    struct Missing { int32_t slot, position; };
    const int64_t S = view.sequences(), size = view.block_size;
    std::vector<uint8_t> is_read(E_);  // entries that this step reads
    std::vector<std::vector<Missing>> missing_of(S);
    at::parallel_for(0, S, 1, [&](int64_t begin, int64_t until) {
      for (int64_t s = begin; s < until; ++s) {
        const int64_t end = std::min(view.length(s), view.tree_begin(s));
        int64_t position = view.first(s);
        for (int32_t block : view.blocks(s))
          for (int64_t slot = block * size; slot < (block + 1) * size && position < end; ++slot, ++position) {
            if (entries_[slot] < 0) missing_of[s].push_back({int32_t(slot), int32_t(position)});
            else std::atomic_ref(is_read[entries_[slot]]).store(1, std::memory_order_relaxed);
          }
      }
    });
    int64_t available = E_ - std::count(is_read.begin(), is_read.end(), 1);
    std::vector<Missing> missing;
    for (const std::vector<Missing>& of_sequence : missing_of)
      for (const Missing& row : of_sequence) {
        // Sequences may share a row.
        if (entries_[row.slot] >= 0 || !available) continue;
        --available;
        // Clock eviction, except of entries that this step reads.
        while (is_read[*hand_]) *hand_ = (*hand_ + 1) % E_;
        if (owners_[*hand_] >= 0) entries_[owners_[*hand_]] = -1;
        owners_[*hand_] = row.slot, is_read[*hand_] = 1, entries_[row.slot] = *hand_;
        missing.push_back(row);
        cached.prefetch(&row.slot, 1, {0, keys.up.R});
      }
    const CachedLatents latents{keys.up, cached};
    const int64_t stride = latents.width(), count = missing.size();
    at::parallel_for(0, (count + UNIT - 1) / UNIT, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      bf16 *loaded = scratch.get<bf16>(UNIT * stride), *unit_keys = scratch.get<bf16>(UNIT * rounded_.width);
      for (int64_t unit = begin; unit < end; ++unit) {
        const Missing* batch = missing.data() + unit * UNIT;
        const int64_t batch_size = std::min(UNIT, count - unit * UNIT);
        int32_t slots[UNIT], positions[UNIT] = {};
        for (int64_t i = 0; i < batch_size; ++i) slots[i] = batch[i].slot, positions[i] = batch[i].position;
        latents.load(slots, batch_size, loaded, stride);
        keys.decompress(loaded, stride, positions, UNIT, unit_keys, rounded_.width);
        for (int64_t i = 0; i < batch_size; ++i)
          rounded_.write(unit_keys + i * rounded_.width, keys_ + entries_[slots[i]] * rounded_.unit_bytes());
      }
    });
  }

 private:
  uint8_t* keys_;
  const int64_t E_;
  const Int8Rows rounded_;
  int32_t *entries_, *owners_, *hand_;
};
