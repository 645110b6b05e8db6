"""Checks of engine settings that conflict with each other or with the device, whatever the model."""

from __future__ import annotations

import dataclasses

import torch

from mlaforge.engine.config import EngineConfig
from mlaforge.ops import native
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.row_formats import row_format_type
from mlaforge.runtime import UserError


def check_config(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return the config with its block size and the defaults of the device. Raises UserError for settings that conflict
    with each other or with the device."""
    config = config.for_device(device)
    assert config.max_num_batched_tokens is not None
    _check_cache_dtype(config.kv_cache_dtype, device)
    if config.deterministic and device.type == "cuda":
        raise UserError(
            "deterministic is for CPUs: on a GPU norms, attention and experts still sum in an order that depends on "
            "the batch; use device cpu"
        )
    if config.deterministic and config.kv_cache_dtype in ("fp8", "fp8_ds_mla"):
        raise UserError(
            f"deterministic: no compiled CPU kernel reads kv_cache_dtype {config.kv_cache_dtype}; use int8 or bf16"
        )
    tree, cache_dtype, size = config.speculative_tree_tokens, config.kv_cache_dtype, config.block_size
    unit = 1 if cache_dtype == "auto" else row_format_type(cache_dtype).tokens
    if unit > 1 and size not in (None, unit):
        raise UserError(
            f"block_size = {size} must be {unit}, the tokens that kv_cache_dtype {cache_dtype} packs together"
        )
    if unit > 1 and tree:
        raise UserError(
            f"kv_cache_dtype {cache_dtype} packs one text's tokens together; speculative_tree_tokens must be 0, a chain"
        )
    if tree and tree < config.max_draft_tokens:
        raise UserError(
            f"speculative_tree_tokens = {tree} must be 0 (no trees) or at least num_speculative_tokens = "
            f"{config.max_draft_tokens}"
        )
    if tree and config.speculative in ("none", "ngram"):
        raise UserError(f"speculative = {config.speculative!r} drafts no trees; speculative_tree_tokens needs a head")
    if config.specpv and config.speculative == "none":
        raise UserError("specpv verifies drafted tokens; speculative must be ngram or a head")
    if config.specpv and unit > 1:
        raise UserError(f"specpv reads tokens one by one, and kv_cache_dtype {cache_dtype} packs several; use int8")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UserError(
            f"max_num_batched_tokens = {config.max_num_batched_tokens} must be at least max_num_seqs = "
            f"{config.max_num_seqs}: every running sequence takes one"
        )
    return dataclasses.replace(config, block_size=size or (unit if unit > 1 else 16))


def _check_cache_dtype(cache_dtype: str, device: torch.device) -> None:
    """Raise UserError where the kernels of a GPU cannot read rows of this format."""
    if device.type != "cuda" or cache_dtype == "auto":
        return
    readable = "cuda" in row_format_type(cache_dtype).devices
    if readable and cache_dtype != "fp8":
        return
    reason = gpu_properties(device).why_no_fp8()
    if not readable:
        raise UserError(
            f"kv_cache_dtype {cache_dtype} is for CPUs, because tokens of a block share scales, and kernels of GPUs "
            "read rows one by one; use int8 on this GPU"
        )
    if reason:
        raise UserError(f"kv_cache_dtype fp8: {reason}; use bf16")


def check_deterministic(format: str) -> None:
    """Raise UserError where torch multiplies weights of this format, because its sums depend on the number of rows."""
    if format in ("float32", "float16"):
        raise UserError(f"deterministic: no compiled kernel multiplies {format}; use dtype bfloat16, int8 or int4")
    if not native.is_available():
        raise UserError(f"deterministic needs the compiled CPU kernels: {native.why_not() or 'the compiler failed'}")
