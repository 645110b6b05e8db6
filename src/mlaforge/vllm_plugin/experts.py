"""MXFP4 experts on platforms for which vLLM has no kernels (CPU): unpacked in memory while weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.mxfp4 import BLOCKS, SCALES, is_packed
from mlaforge.ops.mxfp4 import dequantize
from mlaforge.runtime import UserError, log


def checked_by(base: Any) -> type:
    """Return vLLM's config checks of an architecture, `base`, adapted to MXFP4 and to context parallelism. On a CPU the
    quantization is hidden, because vLLM would reject it. On a GPU vLLM's kernels read experts as stored, under the name
    that `base` gives GPT-OSS's variant."""

    class Checked(base):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            base.verify_and_update_config(vllm_config)
            config = vllm_config.model_config
            if vllm_config.parallel_config.decode_context_parallel_size > 1:
                from vllm.platforms import current_platform

                from mlaforge.vllm_plugin.shards import refuse

                # Here, because what a worker raises is not what vLLM prints last.
                refuse(vllm_config, current_platform.is_cpu())
            else:
                config.model_arch_config.total_num_kv_heads = config.hf_text_config.num_key_value_heads

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            from vllm.platforms import current_platform

            configs, read = (model_config.hf_config, model_config.hf_text_config), model_config.model_arch_config
            packed = is_packed({"quantization_config": read.quantization_config})
            if packed and current_platform.is_cpu():
                read.quantization_config = None
                for config in configs:
                    # The two configs may be one object.
                    if hasattr(config, "quantization_config"):
                        del config.quantization_config
            base.verify_and_update_model_config(model_config)
            # For context parallelism vLLM wants more ranks than KV heads, of which rows have none. Checked before the
            # number of ranks is known here.
            read.total_num_kv_heads = 1
            if packed and read.quantization_config is not None:
                # vLLM reads the method from this copy, which it renames only for the original's model_type. As plain
                # mxfp4 it would separate gate and up rows that GPT-OSS interleaves.
                read.quantization_config = model_config.hf_config.quantization_config

    return Checked


def unpacked(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, with each pair of blocks and scales (ops/mxfp4.py) replaced by one weight [E, K, N] of `dtype`. A
    pair may be split over files. UserError if one of a pair is missing, ValueError if their shapes do not match."""
    pairs: dict[str, dict[str, Tensor]] = {}
    packed_bytes = unpacked_bytes = 0
    for name, tensor in weights:
        weight = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if weight == name:
            yield name, tensor
            continue
        pair = pairs.setdefault(weight, {})
        pair[name] = tensor
        if len(pair) == 2:
            del pairs[weight]
            weight_EKN = dequantize(pair[weight + BLOCKS], pair[weight + SCALES], dtype)
            packed_bytes += sum(half.nbytes for half in pair.values())
            unpacked_bytes += weight_EKN.nbytes
            yield weight, weight_EKN
    if pairs:
        alone = ", ".join(name for pair in pairs.values() for name in pair)
        raise UserError(f"the checkpoint has {alone} without the matching blocks or scales: download it again")
    if unpacked_bytes:
        log(
            "vLLM has no MXFP4 kernels for a CPU: experts were unpacked from "
            f"{packed_bytes:,} to {unpacked_bytes:,} bytes on all ranks together"
        )
