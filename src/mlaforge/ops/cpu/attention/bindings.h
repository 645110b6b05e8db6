// Arguments of the attention ops as the kernels take them. Schemas are flat lists (native.cpp).
#pragma once
#include "attention/decode.h"
#include "attention/latent.h"
#include "attention/latent_rope.h"
#include "attention/rope_and_store.h"

namespace ops {

using Optional = const std::optional<at::Tensor>&;

inline void rope_and_store(at::Tensor& qkv, const at::Tensor& rotation, const at::Tensor& rows, Optional unquantized,
                           at::IntArrayRef format, const at::Tensor& slots, int64_t heads, int64_t head_dim) {
  ::rope_and_store(qkv, rotation, {rows, unquantized, format}, slots, heads, head_dim);
}

inline void pack_blocks(const at::Tensor& rows, const at::Tensor& unquantized, at::IntArrayRef format, const at::Tensor& from,
                        const at::Tensor& to, int64_t block_size) {
  ::pack_blocks({rows, unquantized, format}, from, to, block_size);
}

inline std::tuple<at::Tensor, at::Tensor> decode(
    const at::Tensor& q, const at::Tensor& rows, Optional unquantized, at::IntArrayRef format, int64_t kv_heads,
    int64_t value_dim, int64_t value_offset, const at::Tensor& table, const at::Tensor& seq_lens, const at::Tensor& first,
    const at::Tensor& query_start, int64_t block_size, int64_t window, double scale, Optional tree) {
  return ::decode(q, {kv_heads, value_dim, value_offset}, {rows, unquantized, format},
                  {table, seq_lens, first, query_start, block_size, window, tree}, scale);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> decode_with_mass(
    const at::Tensor& q, const at::Tensor& rows, Optional unquantized, at::IntArrayRef format, int64_t kv_heads,
    int64_t value_dim, int64_t value_offset, const at::Tensor& table, const at::Tensor& seq_lens, const at::Tensor& first,
    const at::Tensor& query_start, int64_t block_size, int64_t window, double scale, Optional tree, at::IntArrayRef sequences) {
  return ::decode_with_mass(q, {kv_heads, value_dim, value_offset}, {rows, unquantized, format},
                            {table, seq_lens, first, query_start, block_size, window, tree}, scale, sequences);
}

inline at::Tensor attention_mass(const at::Tensor& q, const at::Tensor& rows, Optional unquantized, at::IntArrayRef format,
                                 int64_t kv_heads, const at::Tensor& table, const at::Tensor& lengths, int64_t block_size,
                                 double scale) {
  return ::attention_mass(q, kv_heads, {rows, unquantized, format}, View::text(table, lengths, block_size), scale);
}

inline at::Tensor latent(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& w_up,
                         Optional codes, Optional code_scales, Optional code_offsets, int64_t wide_steps,
                         const at::Tensor& b_k, const at::Tensor& b_v, Optional q_norm, Optional k_norm, double eps,
                         Optional sinks, const at::Tensor& rows, Optional unquantized, at::IntArrayRef format,
                         const at::Tensor& slots, const at::Tensor& table, const at::Tensor& seq_lens,
                         const at::Tensor& first, const at::Tensor& query_start, int64_t block_size, int64_t window,
                         at::IntArrayRef readings, double scale, Optional tree, Optional positions, Optional keys,
                         Optional keys_metadata) {
  std::optional<DecompressedKeys> decompressed_keys;
  if (keys) decompressed_keys.emplace(*keys, *keys_metadata, b_v.size(0), 2 * cos.size(1));
  std::optional<CodeWeights> code_weights;
  if (codes) code_weights = {*codes, *code_scales, *code_offsets, wide_steps};
  return ::latent(qkv, {cos, sin, positions}, {w_up, b_k, b_v, sinks, std::nullopt, q_norm, k_norm, eps, code_weights},
                  {rows, unquantized, format}, slots, {table, seq_lens, first, query_start, block_size, window, tree}, readings,
                  scale, decompressed_keys);
}

inline at::Tensor latent_rope(const at::Tensor& qkv, const at::Tensor& rotation, const at::Tensor& rope_index,
                              const at::Tensor& w_uk, const at::Tensor& w_up,
                              const at::Tensor& b_k, const at::Tensor& b_v, Optional sinks, const at::Tensor& rows, Optional unquantized, at::IntArrayRef format,
                              const at::Tensor& slots, const at::Tensor& table, const at::Tensor& seq_lens,
                              const at::Tensor& first, const at::Tensor& query_start, int64_t block_size, int64_t window,
                              at::IntArrayRef prompts, double scale, Optional tree) {
  return ::latent_rope(qkv, rotation, rope_index, {w_up, b_k, b_v, sinks, w_uk}, {rows, unquantized, format}, slots,
                       {table, seq_lens, first, query_start, block_size, window, tree}, prompts, scale);
}

}  // namespace ops
