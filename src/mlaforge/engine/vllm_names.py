"""vLLM's names of options and of their values: what means the same here, and what is right in place of the rest.

Source: vLLM 0.32, `vllm/engine/arg_utils.py`, `vllm/config/{speculative,cache,model}.py` and
`vllm/entrypoints/launchers/cli_args.py`. A name that vLLM and mlaforge share needs no entry; every other option of vLLM
is an unknown one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlaforge.config import OtherName
from mlaforge.runtime import UserError

# Values of --dtype, --kv-cache-dtype and --generation-config.
DTYPES = {
    "half": "float16", "float": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}  # fmt: skip
CACHE_DTYPES = {"fp8_e4m3": "fp8", "bfloat16": "bf16"}
GENERATION_CONFIGS = {"vllm": "none"}

_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_ONE_DEVICE = "the engine runs on one device; vLLM with this package's plugin divides a converted model (docs/vllm.md)"
_ONE_CONFIG = "give speculative_config, or speculative and num_speculative_tokens"
_NGRAMS = "prompt lookup matches the newest 4, else 3, else 2 tokens; leave it out"

# Keys of speculative_config beside method and model.
SPECULATIVE = {
    "num_speculative_tokens": OtherName(int, "num_speculative_tokens"),
    "prompt_lookup_max": OtherName(int, instead=_NGRAMS),
    "prompt_lookup_min": OtherName(int, instead=_NGRAMS),
    "draft_tensor_parallel_size": OtherName(int, neutral=1, instead=_ONE_DEVICE),
}


def speculative_options(config: Any) -> dict[str, Any]:
    """Return the options that mean the same as a speculative_config, a mapping or its JSON text. Raises UserError for a
    method or a key that has no counterpart."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise UserError(f"speculative_config is not JSON ({error}); give a mapping such as {_EXAMPLE}") from None
    if not isinstance(config, Mapping):
        raise UserError(f"speculative_config = {config!r} must be a mapping such as {_EXAMPLE}")
    keys = {key: value for key, value in config.items() if value is not None}
    method, model = keys.pop("method", None), keys.pop("model", None)
    options = {"speculative": _drafter(method, model)}
    for key, value in keys.items():
        if key not in SPECULATIVE:
            raise UserError(f"speculative_config: {key!r} is not supported; use method, model, num_speculative_tokens")
        options |= SPECULATIVE[key].options(f"speculative_config: {key}", value)
    return options


def _drafter(method: Any, model: Any) -> Any:
    """Return the value of `speculative`. As in vLLM, a model needs no method."""
    if method == "ngram":
        if model not in (None, "ngram"):
            raise UserError(f"speculative_config: method ngram needs no model, and model is {model!r}; leave it out")
        return "ngram"
    if method not in (None, "eagle3", "dflash"):
        raise UserError(
            f"speculative_config: method {method!r} is not supported; use ngram, or eagle3 or dflash with a model"
        )
    if not model or (method and model in ("none", "ngram")):
        raise UserError("speculative_config: model must be the directory of a draft head, or method must be ngram")
    return model


# Of `LLM` and of every command that runs the engine.
ENGINE = {
    "enable_prefix_caching": OtherName(bool, "prefix_caching"),
    "kv_cache_memory_bytes": OtherName(int, "cache_bytes"),
    "speculative_config": OtherName(str, expand=speculative_options),
    "spec_method": OtherName(str, instead=_ONE_CONFIG),
    "spec_model": OtherName(str, instead=_ONE_CONFIG),
    "spec_tokens": OtherName(int, instead=_ONE_CONFIG),
    "gpu_memory_utilization": OtherName(
        float, instead="it is a share of all memory, weights included; give cache_fraction, the cache's share of the "
        "memory that the weights leave, or cache_bytes",
    ),
    "tensor_parallel_size": OtherName(int, neutral=1, instead=_ONE_DEVICE),
    "pipeline_parallel_size": OtherName(int, neutral=1, instead=_ONE_DEVICE),
    "data_parallel_size": OtherName(int, neutral=1, instead=_ONE_DEVICE),
    "quantization": OtherName(str, instead="dtype int8 or int4 quantizes the weights (CPU)"),
    "enforce_eager": OtherName(bool, neutral=False, instead="CUDA graphs cannot be switched off; leave it out"),
    "enable_chunked_prefill": OtherName(
        bool, neutral=True, instead="long prompts are always computed in chunks, of max_num_batched_tokens at most"
    ),
    "trust_remote_code": OtherName(bool, neutral=False, instead="code of a checkpoint never runs; leave it out"),
    "chat_template": OtherName(str, instead="the template is the model's, in MODEL/chat_template.jinja"),
    "seed": OtherName(int, instead="requests have their own seeds, SamplingParams(seed=...)"),
}  # fmt: skip
# Of `generate`, `chat` and `draft regenerate`.
GENERATION = {**ENGINE, "max_tokens": OtherName(int, "max_new_tokens")}
# Of `serve`.
SERVER = {
    **ENGINE,
    "enable_auto_tool_choice": OtherName(
        bool, neutral=True, instead="the model may always call tools; tool_call_parser none leaves calls in the text"
    ),
}
