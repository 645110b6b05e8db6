"""End-of-text tokens: one rule for stopping, `min_tokens`, grammars and everything else that uses the engine."""

from __future__ import annotations

from typing import Any

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.runtime import log


def end_token_ids(source: SourceModel) -> tuple[int, ...]:
    """Return the ascending ids of generation_config.json's eos_token_id, if it has any, else of config.json's; and the
    tokenizer's eos_token_id.

    Logs where these differ from the ends that transformers uses, which are those of generation_config.json alone where
    there is one, and where no token ends a text.
    """
    generation, config = _ids(source.generation_config), _ids(source.config)
    tokenizer_end = getattr(source.tokenizer, "eos_token_id", None)
    ends = tuple(sorted({*(generation or config), *([] if tokenizer_end is None else [tokenizer_end])}))
    transformers_ends = generation if source.generation_config else config
    if not ends:
        log(
            "no token ends a text of this model: answers run to max_tokens; name eos_token_id in generation_config.json"
        )
    elif set(ends) != transformers_ends:
        where = f"at {_named(source.tokenizer, transformers_ends)}" if transformers_ends else "nowhere"
        log(f"a text ends at {_named(source.tokenizer, ends)}; transformers ends it {where}")
    return ends


def _ids(config: dict[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def _named(tokenizer: Any, ids: set[int] | tuple[int, ...]) -> str:
    """The ids with their texts."""
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)})" for token in sorted(ids))
