"""A case of a scenario in the making."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlaforge.bench.invariants import Finding
from mlaforge.bench.peer import Peer, Repetition, Variant


@dataclasses.dataclass
class Row:
    """A case in the making: one peer decoding in one way."""

    peer: Peer
    variant: Variant
    repetitions: list[Repetition] = dataclasses.field(default_factory=list)
    status: str = "ok"
    limit: dict[str, Any] | None = None
    activations: int | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)
