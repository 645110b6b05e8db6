"""One case of a scenario while it is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlaforge.bench.gemm_shapes import Shapes
from mlaforge.bench.invariants import Finding
from mlaforge.bench.peer import Peer, Repetition, Variant


@dataclasses.dataclass
class Row:
    """One peer with one variant of decoding, and its repetitions so far."""

    peer: Peer
    variant: Variant
    repetitions: list[Repetition] = dataclasses.field(default_factory=list)
    status: str = "ok"
    limit: dict[str, Any] | None = None
    activations: int | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)
    # Matrix products of the audit.
    shapes: Shapes = dataclasses.field(default_factory=Shapes)
