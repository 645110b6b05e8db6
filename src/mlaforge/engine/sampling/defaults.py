"""Default sampling parameters from a model's generation_config.json, for those that a caller leaves unset.

As vLLM's `--generation-config auto`. Like vLLM, ignores `do_sample`: greedy decoding is a temperature of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, log

# Field of generation_config.json -> field of SamplingParams.
FIELDS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json's values as fields of SamplingParams. Raises UserError for an invalid value."""
    defaults = {
        field: generation_config[name] for name, field in FIELDS.items() if generation_config.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except UserError as error:
        raise UserError(f"generation_config.json: {error}; or use --generation-config none") from error
    return defaults


def announce(defaults: Mapping[str, Any]) -> None:
    """Log the defaults in one line, if there are any."""
    if defaults:
        parameters = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        log(
            f"generation_config.json sets what requests leave unset: {parameters} (--generation-config none ignores it)"
        )
