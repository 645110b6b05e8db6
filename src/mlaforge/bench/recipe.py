"""Recipe of a scenario: its YAML file in bench/scenarios for one scope, overridden by the user's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mlaforge.bench.config import BenchConfig
from mlaforge.config import nearest, read_recipe, resolve
from mlaforge.runtime import UserError

FOLDER = Path(__file__).with_name("scenarios")
SCENARIOS = ("baseline", "single", "batch", "large-context", "stress")
# Benchmarks of the engine's and of speculation's documented speed, in the same form.
OTHERS = ("speed", "engine", "draft")
SCOPES = ("micro", "cpu")
# Defaults of keys that a scenario's file may omit.
DEFAULTS = {
    "warm_up": 1, "cache_fraction": 0.75, "prefix_caching": True, "draft": "ngram", "specpv": "off",
    "dtype": "auto", "kv_cache_dtype": "auto", "transformers": "auto", "text": ["embedded"],
}  # fmt: skip
DRAFTERS = ("ngram", "replay", "tree", "default")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A fully resolved scenario. head: directory of the draft head among `drafts`. prompts: file of conversations, or
    None for cut text. prompts_once: keep cached prompts from case to case, so that each prompt is computed once."""

    scenario: str
    scope: str
    description: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    counts: tuple[int, ...]
    drafts: tuple[str, ...]
    head: Path | None
    specpvs: tuple[str, ...]
    tokens: int
    rounds: int
    warm_up: int
    cache_fractions: tuple[float, ...]
    prefix_caching: bool
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    transformers: tuple[str, ...]
    text: tuple[str, ...]
    prompts: str | None
    prompts_once: bool


def scope_of(config: BenchConfig, device: torch.device) -> str:
    """Resolve the scope `auto`: micro on CUDA, else cpu."""
    if config.scope != "auto":
        return config.scope
    return "micro" if device.type == "cuda" else "cpu"


def read(scenario: str, scope: str, config: BenchConfig) -> Recipe:
    """Return the recipe of a shipped scenario, overridden by `config`. Raise UserError for an invalid value."""
    known = (*SCENARIOS, *OTHERS)
    if scenario not in known:
        raise UserError(f"scenario {scenario!r} must be one of {', '.join(known)}{nearest(scenario, known)}")
    file = read_recipe(FOLDER / f"{scenario}.yaml")
    scopes = {name: file.pop(name) for name in SCOPES}
    description, prompts_once = file.pop("description"), file.pop("prompts_once", False)
    defaults = resolve(BenchConfig, None, **{**DEFAULTS, **file, **scopes.get(scope, {})})
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in options.items()}
    drafts, head = _drafts(chosen["draft"])
    if config.prompts is not None and config.context is None:
        chosen["context"] = (0,)
    recipe = Recipe(
        scenario, scope, description, _distinct(chosen["context"]), _distinct(chosen["batch"]),
        tuple(sorted(set(chosen["num_speculative_tokens"]))), drafts, head, _distinct(chosen["specpv"]),
        chosen["tokens"], chosen["rounds"], chosen["warm_up"], chosen["cache_fraction"], chosen["prefix_caching"],
        _distinct(chosen["dtype"]), _distinct(chosen["kv_cache_dtype"]), chosen["transformers"], chosen["text"],
        config.prompts, prompts_once,
    )  # fmt: skip
    if "replay" in recipe.drafts and max(recipe.counts) and 0 not in recipe.counts:
        raise UserError("draft replay needs the output of plain decoding; add 0 to num_speculative_tokens")
    if recipe.prompts is None and min(recipe.contexts) < 2:
        raise UserError(f"context {min(recipe.contexts)} must be at least 2, except with --prompts")
    if recipe.prompts is not None and max(recipe.batches) > 1 and set(recipe.transformers) != {"none"}:
        raise UserError("transformers needs prompts of equal lengths: give --transformers none, or --batch 1")
    if "tree" in recipe.drafts and recipe.head is None:
        raise UserError("draft tree needs a head: --draft tree,HEAD")
    if "none" in recipe.transformers and set(recipe.transformers) != {"none"}:
        raise UserError(f"transformers {','.join(recipe.transformers)} must be either none or a list of dtypes")
    return recipe


def _distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove duplicates, keeping the order."""
    return tuple(dict.fromkeys(items))


def _drafts(words: tuple[str, ...]) -> tuple[tuple[str, ...], Path | None]:
    """Split the option `draft` into kinds (ngram, replay, head) and the head's directory."""
    heads = [word for word in words if word not in DRAFTERS]
    for head in heads:
        if not Path(head).is_dir():
            raise UserError(f"draft {head!r} must be {', '.join(DRAFTERS)} or the directory of a draft head")
    if len(heads) > 1:
        raise UserError(f"draft {','.join(words)} names {len(heads)} heads; give one, as an engine loads only one")
    return _distinct(tuple("head" if word in heads else word for word in words)), Path(heads[0]) if heads else None
