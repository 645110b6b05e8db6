"""The versions of vLLM that the plugin is tested with, everything of vLLM that it touches, and a check whether an
installed vLLM has it.

    python -m mlaforge.vllm_plugin.internals      # in vLLM's environment: prints what is missing

A test compares the list with the imports of this package, another with the vLLM that is tested.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect

from mlaforge.runtime import any_vllm_version

# Releases with which `make test-vllm` passed, without what follows a + (the build).
TESTED_VERSIONS = ("0.32.0",)

# Object, as module:name -> attributes that are read, called, overridden or written.
TOUCHED: dict[str, tuple[str, ...]] = {
    # Registration (__init__.py), in the entry point group vllm.general_plugins.
    "vllm:ModelRegistry": ("models", "register_model"),
    "vllm:__version__": (),
    "vllm.model_executor.models.config:MODELS_CONFIG_MAP": (),
    "vllm.model_executor.models.config:VerifyAndUpdateConfig": (
        "verify_and_update_config", "verify_and_update_model_config",
    ),
    # Configuration (model.py, row_cache.py, experts.py).
    "vllm.config:VllmConfig": (
        "cache_config", "compilation_config", "kv_transfer_config", "model_config", "parallel_config", "quant_config",
        "speculative_config",
    ),
    "vllm.config:ModelConfig": ("dtype", "get_head_size", "get_num_kv_heads", "hf_config", "hf_text_config"),
    "vllm.config.model_arch:ModelArchitectureConfig": ("quantization_config", "total_num_kv_heads"),
    "vllm.config:ParallelConfig": (
        "cp_kv_cache_interleave_size", "dcp_comm_backend", "dcp_q_replicate", "decode_context_parallel_size",
        "pipeline_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size",
    ),
    "vllm.config:CacheConfig": ("block_size", "cache_dtype"),
    "vllm.config:CompilationConfig": ("splitting_ops", "static_forward_context"),
    "vllm.config:SpeculativeConfig": ("draft_model_config", "use_eagle"),
    "vllm.config:KVTransferConfig": ("kv_connector",),
    "vllm.platforms:current_platform": ("is_cpu",),
    # The model (model.py): a subclass of vLLM's class, whose attention layers are replaced.
    "vllm.model_executor.layers.attention:Attention": (),
    # Attention as one operation (attention.py).
    "vllm.utils.torch_utils:direct_register_custom_op": (),
    "vllm.forward_context:get_forward_context": (),
    "vllm.forward_context:ForwardContext": ("attn_metadata", "no_compile_layers"),
    "vllm.distributed:get_tensor_model_parallel_rank": (),
    "vllm.distributed:get_tensor_model_parallel_world_size": (),
    "vllm.distributed.communication_op:tensor_model_parallel_all_reduce": (),
    # Context parallelism (attention.py, row_cache.py): its group, the merge of partial attention, and a block that no
    # request has, number 0.
    "vllm.distributed:get_dcp_group": (),
    "vllm.distributed.parallel_state:GroupCoordinator": ("all_gather",),
    "vllm.distributed.parallel_state:get_dcp_world_size_and_rank": (),
    "vllm.v1.attention.ops.dcp:cp_lse_ag_out_rs": (),
    "vllm.v1.core.block_pool:BlockPool": (),
    # The same on a CPU (cpu_shards.py): two kernels that are replaced.
    "vllm.triton_utils.dispatcher:KernelOverride": (),
    "vllm.v1.worker.block_table:ComputeSlotMappingKernel": ("kernel",),
    "vllm.v1.attention.ops:dcp": ("correct_attn_out",),
    # The cache (row_cache.py): its layer, its backend, its specification and the metadata of a step.
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": (
        "bind_kv_cache", "get_attn_backend", "get_kv_cache_spec",
    ),
    "vllm.v1.attention.backend:AttentionBackend": ("get_builder_cls", "get_name", "supported_kv_cache_layouts"),
    "vllm.v1.attention.backend:AttentionMetadataBuilder": ("build",),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "block_table_tensor", "is_prefilling", "num_reqs", "query_start_loc_cpu", "seq_lens", "slot_mapping",
    ),
    "vllm.v1.kv_cache_interface:KVCacheSpec": ("block_size", "dcp_sharded"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("dtype", "head_size", "head_size_v", "num_kv_heads"),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": (
        "dtype", "head_size", "head_size_v", "num_kv_heads", "sliding_window",
    ),
    "vllm.v1.kv_cache_layout:KVCacheLayout": ("LBHNC", "LBNHC"),
}  # fmt: skip


def refusal() -> str | None:
    """Return why converted models are not served by the installed vLLM, in one line; None if its version is tested, or
    the user allows any ($MLAFORGE_VLLM_ANY_VERSION)."""
    from vllm import __version__

    if any_vllm_version() or __version__.partition("+")[0] in TESTED_VERSIONS:
        return None
    return (
        f"mlaforge's vLLM plugin is tested with vLLM {', '.join(TESTED_VERSIONS)}, and this is {__version__}: install "
        "a tested version, or set MLAFORGE_VLLM_ANY_VERSION=1 to try this one"
    )


def missing() -> list[str]:
    """Return what the installed vLLM lacks."""
    lacking = []
    for path, attributes in TOUCHED.items():
        module, name = path.split(":")
        try:
            holder = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            lacking.append(path)
            continue
        declared = {field.name for field in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else set()
        if inspect.isclass(holder):
            declared |= {name for base in holder.__mro__ for name in getattr(base, "__annotations__", {})}
        lacking += [f"{path}.{name}" for name in attributes if name not in declared and not hasattr(holder, name)]
    return lacking


if __name__ == "__main__":
    print("\n".join(missing()) or "nothing is missing")
