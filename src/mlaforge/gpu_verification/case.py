"""A case of `verify-gpu`: a prediction that is written down before the case runs, and the outcome beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# How a measurement is compared with its prediction. A time is `ok` within this factor of the predicted one: a slower
# one is a performance fault, a faster one a fault of the measurement or of the prediction.
WITHIN, AT_MOST, AT_LEAST, EXACTLY = "within", "at most", "at least", "exactly"
FACTOR = 2.0


class Unfit(Exception):
    """The case does not fit this machine; the text says what it needs. It is reported as skipped."""


class Wrong(Exception):
    """The case ran and its result is wrong; the text says how. It is reported as off."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """`value` in `unit`, compared by `rule`; `share` is the expected share of the roof, where there is one."""

    value: float
    unit: str
    rule: str = WITHIN
    share: float | None = None

    def holds(self, measured: float) -> bool:
        """Whether a measurement agrees with the prediction. NaN never does."""
        if self.rule == AT_MOST:
            return measured <= self.value
        if self.rule == AT_LEAST:
            return measured >= self.value
        if self.rule == EXACTLY:
            return measured == self.value
        return self.value / FACTOR <= measured <= self.value * FACTOR


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a case measured, in the unit of its prediction. `share`: of the roof; `detail`: for the summary's table;
    `more`: further numbers for cases.jsonl; `facts`: figures that later stages use (the probe's)."""

    measured: float
    share: float | None = None
    detail: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """`run` measures; it raises Wrong for a wrong result and Unfit where the machine is too small. `limit`: seconds
    after which the process is ended."""

    name: str
    prediction: Prediction
    run: Callable[[], Outcome]
    limit: float = 60.0


def describe(prediction: Prediction) -> dict[str, Any]:
    """The prediction for a JSON line."""
    return dataclasses.asdict(prediction)
