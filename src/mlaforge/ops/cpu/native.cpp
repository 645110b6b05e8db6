// CPU kernels for bf16: products with packed weights, attention over the paged cache, and the elementwise ops between them.
// Compiled by ops/kernel_library.py, once per form; FORM names the library. The references are in Python. Threads are
// torch's.
#include <torch/library.h>

#include "attention/bindings.h"
#include "attention/token_selection.h"
#include "experts/mixture_mxfp4.h"
#include "experts/unpack_mxfp4.h"
#include "linear/elementwise.h"
#include "linear/linear.h"
#include "linear/linear_int4.h"
#include "linear/linear_int8.h"
#include "mapped_files.h"

// The extra level expands FORM before TORCH_LIBRARY pastes tokens.
#define LIBRARY(name, m) TORCH_LIBRARY(name, m)
#define LIBRARY_OF_CPU(name, m) TORCH_LIBRARY_IMPL(name, CPU, m)

LIBRARY(FORM, m) {
  m.def("linear(Tensor x, Tensor packed, int out_features, Tensor? bias, Tensor? residual, bool fp32_out=False, "
        "Tensor? norm=None, float eps=0) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor packed, Tensor scales, int out_features, Tensor? bias, Tensor? residual, bool fp32_out=False) "
        "-> Tensor");
  m.def("linear_int4(Tensor x, Tensor packed, Tensor scales, int out_features, Tensor? bias, Tensor? residual, bool fp32_out=False) "
        "-> Tensor");
  m.def("mixture_mxfp4(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor up_blocks, Tensor up_scales, Tensor up_bias, "
        "Tensor down_blocks, Tensor down_scales, Tensor down_bias, float alpha, float limit) -> Tensor");
  m.def("configure(int[] numbers) -> ()", Configurations::set);
  m.def("configured() -> int[]", Configurations::counts);
  m.def("install_sigbus_handler(str message) -> ()", install_sigbus_handler);
  m.def("row_formats() -> int[]", RowFormats::ids);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("gated_mlp(Tensor x, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, Tensor residual, "
        "int intermediate, Tensor? norm=None, float eps=0) -> Tensor");
  m.def("rope_and_store(Tensor(a!) qkv, Tensor rotation, Tensor(b!) rows, Tensor(c!)? unquantized, int[] format, "
        "Tensor slots, int heads, int head_dim) -> ()");
  m.def("pack_blocks(Tensor(a!) rows, Tensor unquantized, int[] format, Tensor from, Tensor to, int block_size) -> ()");
  m.def(
      "decode(Tensor q, Tensor rows, Tensor? unquantized, int[] format, int kv_heads, int value_dim, int value_offset, "
      "Tensor table, Tensor seq_lens, Tensor first, Tensor query_start, int block_size, int window, float scale, "
      "Tensor? tree) -> (Tensor, Tensor)");
  m.def(
      "decode_with_mass(Tensor q, Tensor rows, Tensor? unquantized, int[] format, int kv_heads, int value_dim, int value_offset, "
      "Tensor table, Tensor seq_lens, Tensor first, Tensor query_start, int block_size, int window, float scale, "
      "Tensor? tree, int[] sequences) -> (Tensor, Tensor, Tensor)");
  m.def("attention_mass(Tensor q, Tensor rows, Tensor? unquantized, int[] format, int kv_heads, Tensor table, Tensor lengths, "
        "int block_size, float scale) -> Tensor");
  m.def(
      "latent(Tensor qkv, Tensor cos, Tensor sin, Tensor w_up, Tensor? codes, Tensor? code_scales, "
      "Tensor? code_offsets, int wide_steps, Tensor b_k, Tensor b_v, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? sinks, Tensor(a!) rows, Tensor(b!)? unquantized, int[] format, Tensor slots, "
      "Tensor table, Tensor seq_lens, Tensor first, Tensor query_start, int block_size, int window, int[] prompts, "
      "float scale, Tensor? tree, Tensor? positions=None, Tensor(c!)? keys=None, Tensor(d!)? keys_metadata=None) -> Tensor");
  m.def(
      "latent_rope(Tensor qkv, Tensor rotation, Tensor rope_index, Tensor w_uk, Tensor w_up, "
      "Tensor b_k, Tensor b_v, Tensor? sinks, Tensor(a!) rows, Tensor(b!)? unquantized, int[] format, Tensor slots, Tensor table, Tensor seq_lens, "
      "Tensor first, Tensor query_start, int block_size, int window, int[] prompts, float scale, Tensor? tree) -> Tensor");
  m.def("write_index(Tensor features, Tensor? halves, Tensor weight, Tensor bias, Tensor? rotation, Tensor frequency, "
        "Tensor(a!) keys, Tensor slots) -> ()");
  m.def(
      "select_tokens(Tensor q, int heads, Tensor weight, Tensor? rotation, Tensor frequency, Tensor? sinks, Tensor keys, "
      "Tensor table, Tensor seq_lens, Tensor query_start, int block_size, int[] counts, int sink, int window, int stride, "
      "int multiple, Tensor? tree) -> (Tensor, Tensor)");
  m.def("unpack_mxfp4(Tensor blocks, Tensor scales) -> Tensor");
}

LIBRARY_OF_CPU(FORM, m) {
  m.impl("linear", linear);
  m.impl("linear_int8", linear_int8);
  m.impl("linear_int4", linear_int4);
  m.impl("mixture_mxfp4", mixture_mxfp4);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("gated_mlp", gated_mlp);
  m.impl("rope_and_store", ops::rope_and_store);
  m.impl("pack_blocks", ops::pack_blocks);
  m.impl("decode", ops::decode);
  m.impl("decode_with_mass", ops::decode_with_mass);
  m.impl("attention_mass", ops::attention_mass);
  m.impl("latent", ops::latent);
  m.impl("latent_rope", ops::latent_rope);
  m.impl("write_index", write_index);
  m.impl("select_tokens", select_tokens);
  m.impl("unpack_mxfp4", unpack_mxfp4);
}
