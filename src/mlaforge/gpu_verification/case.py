"""Cases of `verify-gpu`: a prediction, recorded before the case runs, and the measured outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Rules for comparing a measurement with its prediction. A time is `ok` within FACTOR of the predicted one: a slower one
# is a performance fault, a faster one a fault of the measurement or of the prediction.
WITHIN, AT_MOST, AT_LEAST, EXACTLY = "within", "at most", "at least", "exactly"
FACTOR = 2.0


class Unsupported(Exception):
    """The machine does not meet the case's needs, which the message states. The case is reported as skipped."""


class WrongResult(Exception):
    """The case ran with a wrong result, which the message describes. The case is reported as off."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted `value` in `unit`, compared by `rule`. share: expected share of the roofline, if there is one."""

    value: float
    unit: str
    rule: str = WITHIN
    share: float | None = None

    def holds(self, measured: float) -> bool:
        """Whether a measurement agrees with the prediction; False for NaN."""
        if self.rule == AT_MOST:
            return measured <= self.value
        if self.rule == AT_LEAST:
            return measured >= self.value
        if self.rule == EXACTLY:
            return measured == self.value
        return self.value / FACTOR <= measured <= self.value * FACTOR


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Measurement of a case, in the unit of its prediction. share: of the roofline. detail: text for the summary's
    table. more: further numbers for cases.jsonl. facts: figures for later stages (from the probe)."""

    measured: float
    share: float | None = None
    detail: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """A case. run: measures; raises WrongResult, or Unsupported if the machine is too small. limit: seconds after which
    the process is killed."""

    name: str
    prediction: Prediction
    run: Callable[[], Outcome]
    limit: float = 60.0


def describe(prediction: Prediction) -> dict[str, Any]:
    """Prediction as a JSON object."""
    return dataclasses.asdict(prediction)
