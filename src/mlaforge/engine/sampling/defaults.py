"""A model's own sampling parameters, from its generation_config.json, for what a caller leaves unset.

As vLLM's `--generation-config auto`. `do_sample` is not read, as in vLLM: a temperature of 0 asks for the likeliest.
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
    """What generation_config.json says of SamplingParams, by its names. Raises UserError for a value that is none."""
    defaults = {
        field: generation_config[name] for name, field in FIELDS.items() if generation_config.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except UserError as error:
        raise UserError(f"generation_config.json: {error}; or use --generation-config none") from error
    return defaults


def announce(defaults: Mapping[str, Any]) -> None:
    """One line in the log, where there are any."""
    if defaults:
        parameters = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        log(
            f"generation_config.json sets what requests leave unset: {parameters} (--generation-config none ignores it)"
        )
