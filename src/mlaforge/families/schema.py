"""Validation rules for the fields of a model's JSON files.

The fields of config.json of all families are in one table. Absent fields and null pass; the reader of a family requires
its mandatory fields (`family.require`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlaforge.runtime import UserError

# Limits beyond any model, but within those of memory and of tensor shapes.
LARGEST, MOST_LAYERS, LARGEST_HEAD = 2**31 - 1, 4096, 2**16


@dataclass(frozen=True)
class Rule:
    """A predicate of a value and its description."""

    description: str
    holds: Callable[[Any], bool]


def whole(minimum: int, maximum: int = LARGEST) -> Rule:
    """Rule for an integer, not a boolean."""
    return Rule(
        f"a whole number from {minimum} to {maximum}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum,
    )


def number(above: float = -math.inf) -> Rule:
    """Rule for a finite number."""
    return Rule(
        "a number" if above == -math.inf else f"a number above {above:g}",
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and float(value) > above
        ),
    )


def list_of(rule: Rule) -> Rule:
    """Rule for a list, possibly empty, whose items satisfy a rule."""
    return Rule(
        f"a list, each item {rule.description}", lambda value: isinstance(value, list) and all(map(rule.holds, value))
    )


def one_or_list_of(rule: Rule) -> Rule:
    """Rule for a value that satisfies a rule, or a list of such values."""
    items = list_of(rule)
    return Rule(f"{rule.description}, or a list of such", lambda value: rule.holds(value) or items.holds(value))


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices)


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


TEXT = Rule("text", lambda value: isinstance(value, str))
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, Mapping))
COUNT = whole(1)
TOKENS = one_or_list_of(whole(0))

CONFIG = {
    "architectures": list_of(TEXT),
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "vocab_size": COUNT,
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": whole(1, LARGEST_HEAD),
    "max_position_embeddings": COUNT,
    "sliding_window": COUNT,
    "use_sliding_window": FLAG,
    "max_window_layers": whole(0),
    "layer_types": list_of(one_of("full_attention", "sliding_attention")),
    "num_local_experts": COUNT,
    "num_experts_per_tok": COUNT,
    "experts_per_token": COUNT,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "tie_word_embeddings": FLAG,
    "hidden_act": TEXT,
    "rms_norm_eps": number(above=0),
    "dtype": TEXT,
    "torch_dtype": TEXT,
    "rope_theta": number(above=0),
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "quantization_config": OBJECT,
    "bos_token_id": TOKENS,
    "eos_token_id": TOKENS,
}  # fmt: skip
ROPE = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": number(above=0),
    "factor": number(above=0),
    "attention_factor": number(above=0),
    "beta_fast": number(above=0),
    "beta_slow": number(above=0),
    "mscale": number(),
    "mscale_all_dim": number(),
    "low_freq_factor": number(above=0),
    "high_freq_factor": number(above=0),
    "original_max_position_embeddings": COUNT,
    "truncate": FLAG,
}
QUANTIZATION = {
    "quant_method": TEXT,
    "modules_to_not_convert": list_of(Rule("a name or pattern", _is_pattern)),
}
GENERATION = {"bos_token_id": TOKENS, "eos_token_id": TOKENS}


def check(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    """Raises UserError for the first of `values` that violates its rule. where: the file, and the path in it."""
    for name, rule in rules.items():
        value = values.get(name)
        if value is not None and not rule.holds(value):
            raise invalid(where, name, value, rule.description)


def invalid(where: str, name: str, value: Any, expected: str) -> UserError:
    """Return the error of an invalid field; `expected` describes the valid values."""
    text = repr(value)
    return UserError(f"{where}: {name} = {text if len(text) <= 100 else text[:100] + '…'} must be {expected}")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UserError for the first invalid field of a config.json."""
    check(config, CONFIG, "config.json")
    for name in ("rope_parameters", "rope_scaling"):
        check(config.get(name) or {}, ROPE, f"config.json: {name}")
    check(config.get("quantization_config") or {}, QUANTIZATION, "config.json: quantization_config")
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and len(kinds) != layers:
        raise invalid("config.json", "layer_types", kinds, f"a list that names each of the {layers} layers")
