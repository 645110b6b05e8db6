"""Options of `card`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option


@dataclasses.dataclass(frozen=True)
class CardConfig(Options):
    """Options of `card`."""

    model: str | None = option(
        None, "artifact of the card, as named by `mlaforge list` (default: the only one, or the canonical one)"
    )
    license: str | None = option(None, "identifier of the model's licence, such as apache-2.0")
    base_model: str | None = option(None, "hub id of the original, such as HuggingFaceTB/SmolLM2-135M-Instruct")
