"""Experts in MXFP4 where vLLM has no kernels for them, on a CPU: they are unpacked in memory while they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.mxfp4 import BLOCKS, SCALES, is_packed
from mlaforge.ops.mxfp4 import dequantize
from mlaforge.runtime import UserError, log


def checked_by(base: Any) -> type:
    """What vLLM checks and sets for an architecture, `base`; on a CPU it hears nothing of MXFP4, which it would refuse.
    On a GPU its own kernels read experts as they are stored, under the name that `base` gives GPT-OSS's form of it."""

    class Checked(base):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            from vllm.platforms import current_platform

            configs, read = (model_config.hf_config, model_config.hf_text_config), model_config.model_arch_config
            packed = is_packed({"quantization_config": read.quantization_config})
            if packed and current_platform.is_cpu():
                read.quantization_config = None
                for config in configs:
                    # Both may be one.
                    if hasattr(config, "quantization_config"):
                        del config.quantization_config
            base.verify_and_update_model_config(model_config)
            if packed and read.quantization_config is not None:
                # vLLM chooses by this copy, which it renames itself for the original's model_type only: by the name
                # mxfp4 it would lay gate and up apart that GPT-OSS interleaves.
                read.quantization_config = model_config.hf_config.quantization_config

    return Checked


def unpacked(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Of blocks and scales (ops/mxfp4.py), which may be in different files, one weight [E, K, N] of `dtype` each; other
    weights as they are. UserError where one of a pair is missing, ValueError where both do not belong together."""
    halves: dict[str, dict[str, Tensor]] = {}
    kept = size = 0
    for name, tensor in weights:
        weight = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if weight == name:
            yield name, tensor
            continue
        both = halves.setdefault(weight, {})
        both[name] = tensor
        if len(both) == 2:
            del halves[weight]
            whole = dequantize(both[weight + BLOCKS], both[weight + SCALES], dtype)
            kept += sum(half.nbytes for half in both.values())
            size += whole.nbytes
            yield weight, whole
    if halves:
        alone = ", ".join(name for both in halves.values() for name in both)
        raise UserError(f"blocks or scales are missing beside {alone}: fetch the checkpoint again")
    if size:
        log(
            f"experts unpacked from MXFP4, for which vLLM has no kernels on a CPU: {size:,} bytes on all ranks "
            f"together, {kept:,} stored"
        )
