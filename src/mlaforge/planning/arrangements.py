"""Arrangements of several equal GPUs: replicas of a model, one on each GPU or divided (ranks.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mlaforge.planning.ranks import divisions
from mlaforge.planning.roofline import Row


@dataclass(frozen=True)
class Arrangement:
    """`replicas` of `row`, which is divided among its ranks."""

    replicas: int
    row: Row

    @property
    def label(self) -> str:
        return f"{self.replicas} x {self.row.ranks.label}" if self.replicas > 1 else self.row.ranks.label

    @property
    def requests(self) -> int:
        """Requests that all GPUs hold together."""
        return self.replicas * self.row.requests


def arrangements(row: Row, gpus: int) -> list[Arrangement]:
    """Return every arrangement of so many GPUs that the model allows, by ranks."""
    return [
        Arrangement(gpus // ranks.tensor, dataclasses.replace(row, ranks=ranks))
        for ranks in divisions(row.plan.spec, gpus)
    ]


def largest(row: Row, gpus: int) -> Arrangement:
    """Return the arrangement that holds most requests; among equals that of the fewest exchanges."""
    return max(arrangements(row, gpus), key=lambda arrangement: arrangement.requests)
