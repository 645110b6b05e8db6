"""What a scenario runs: its file in bench/scenarios for a scope, overridden by the user's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from mlaforge.bench.config import BenchConfig
from mlaforge.config import DTYPES, nearest, read_recipe, resolve
from mlaforge.runtime import UserError

FOLDER = Path(__file__).with_name("scenarios")
SCENARIOS = ("baseline", "single", "batch", "large-context", "stress")
# The benchmarks of what the engine and speculation promise, in the same form.
OTHERS = ("engine", "draft")
SCOPES = ("micro", "cpu")
# What a scenario's file need not say.
DEFAULTS = {
    "warm_up": 1, "cache_fraction": "0.75", "prefix_caching": True, "draft": "ngram", "dtype": "auto",
    "transformers": "auto", "text": ["embedded"],
}  # fmt: skip
ENGINE_DTYPES = (*DTYPES, "int8", "int4")
DRAFTERS = ("ngram", "replay")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A scenario with nothing left open. `head` is the directory of the EAGLE-3 head among `drafts`."""

    scenario: str
    scope: str
    description: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    counts: tuple[int, ...]
    drafts: tuple[str, ...]
    head: Path | None
    tokens: int
    rounds: int
    warm_up: int
    cache_fractions: tuple[float, ...]
    prefix_caching: bool
    dtypes: tuple[str, ...]
    transformers: tuple[str, ...]
    text: tuple[str, ...]


def scope_of(config: BenchConfig, device: torch.device) -> str:
    """`auto` resolved: twins where there is no GPU."""
    if config.scope != "auto":
        return config.scope
    return "micro" if device.type == "cuda" else "cpu"


def read(scenario: str, scope: str, config: BenchConfig) -> Recipe:
    """The recipe of a shipped scenario, `config` over it. Raises UserError for a value that is out of range."""
    known = (*SCENARIOS, *OTHERS)
    if scenario not in known:
        raise UserError(f"scenario {scenario!r} must be one of {', '.join(known)}{nearest(scenario, known)}")
    file = read_recipe(FOLDER / f"{scenario}.yaml")
    scopes = {name: file.pop(name) for name in SCOPES}
    description = file.pop("told")
    shipped = resolve(BenchConfig, None, **{**DEFAULTS, **file, **scopes.get(scope, {})})
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    chosen = {name: getattr(shipped, name) if value is None else value for name, value in options.items()}
    drafts, head = _drafts(str(chosen["draft"]))
    recipe = Recipe(
        scenario, scope, description, whole("context", chosen["context"], 2), whole("batch", chosen["batch"], 1),
        tuple(sorted(whole("num_speculative_tokens", chosen["num_speculative_tokens"], 0, 8))), drafts, head,
        _least("tokens", chosen["tokens"]), _least("rounds", chosen["rounds"]), chosen["warm_up"],
        _fractions(chosen["cache_fraction"]), chosen["prefix_caching"], _words("dtype", chosen["dtype"], ENGINE_DTYPES),
        _words("transformers", chosen["transformers"], DTYPES), tuple(chosen["text"]),
    )  # fmt: skip
    if "replay" in recipe.drafts and max(recipe.counts) and 0 not in recipe.counts:
        raise UserError("draft replay needs plain decoding beside it; add 0 to num_speculative_tokens")
    return recipe


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def whole(name: str, text: str, low: int, high: int | None = None) -> tuple[int, ...]:
    """`8k,512` -> (8192, 512), each of low..high, none twice. Raises UserError."""
    numbers = []
    for item in _items(text):
        digits, unit = item.removesuffix("k"), 1024 if item.endswith("k") else 1
        if not digits.isascii() or not digits.isdigit() or int(digits) * unit < low or (high and int(digits) > high):
            most = f" to {high}" if high else " or more"
            raise UserError(f"{name} = {text!r}: {item!r} must be a whole number, {low}{most}, such as 3 or 8k")
        numbers.append(int(digits) * unit)
    if not numbers:
        raise UserError(f"{name} = {text!r} names nothing; give whole numbers with commas between")
    return tuple(dict.fromkeys(numbers))


def _least(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name} = {value} must be at least 1")
    return value


def _fractions(text: str) -> tuple[float, ...]:
    try:
        fractions = tuple(float(item) for item in _items(text))
    except ValueError:
        fractions = ()
    if not fractions or not all(0 < share <= 1 for share in fractions):
        raise UserError(f"cache_fraction = {text!r} must be numbers above 0 and at most 1, with commas between")
    return fractions


def _words(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    for word in _items(text):
        if word not in known:
            raise UserError(f"{name} = {word!r} must be one of {', '.join(known)}{nearest(word, known)}")
    return tuple(_items(text)) or ("auto",)


def _drafts(text: str) -> tuple[tuple[str, ...], Path | None]:
    """Drafters by kind, and the head's directory."""
    heads = [word for word in _items(text) if word not in DRAFTERS]
    for head in heads:
        if not Path(head).is_dir():
            raise UserError(f"draft {head!r} must be {', '.join(DRAFTERS)} or the directory of an EAGLE-3 head")
    if len(heads) > 1:
        raise UserError(f"draft {text!r} names {len(heads)} heads; give one, an engine holds no more")
    kinds = ["head" if word in heads else word for word in _items(text)]
    return tuple(dict.fromkeys(kinds)), Path(heads[0]) if heads else None
