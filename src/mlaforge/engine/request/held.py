"""Held sequences: their next tokens cannot be drawn yet, because their grammars' masks are late.

A step waits for a mask as long as it has taken itself, and no longer. Then it goes on without the sequence, which is
left out of the steps that follow until its mask is there, and computes its newest token once more.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Iterable

from mlaforge.engine.request.sequence import Request, Sequence
from mlaforge.engine.sampling.grammar import Place, wait_for

# Seconds for which a mask is waited for at least: most are there in a tenth of it.
LEAST_SECONDS = 0.002
# Where there is nothing else to do: then who can go on and who has gone is seen to.
IDLE_SECONDS = 0.005


def _places(sequences: Iterable[Sequence]) -> list[Place]:
    """Where those of them that have a grammar stand in it."""
    return [s.state.constraint.place for s in sequences if s.state.constraint is not None and not s.state.ready]


def _drawing(sequence: Sequence) -> list[Sequence]:
    """At the end of a prompt all the request's continuations draw."""
    return [sequence] if sequence.prefilled else sequence.request.sequences


def begin(sequences: Iterable[Sequence]) -> None:
    """Has grammars compiled that are not yet, while the prompts are computed."""
    for sequence in sequences:
        _places(_drawing(sequence))


def hold_late(sequences: abc.Sequence[Sequence], began: float) -> None:
    """Of sequences that the step could draw for, holds those whose masks are not there soon. It began at that time
    (time.perf_counter())."""
    places = _places(each for sequence in sequences for each in _drawing(sequence))
    if places:
        wait_for(places, max(LEAST_SECONDS, time.perf_counter() - began))
        for sequence in sequences:
            sequence.held = not all(each.state.ready for each in _drawing(sequence))


def ready(sequences: abc.Sequence[Sequence]) -> list[bool]:
    """Of sequences that a step has drawn for, whether it can draw once more."""
    wait_for(_places(sequences), LEAST_SECONDS)
    return [sequence.state.ready for sequence in sequences]


def release(running: abc.Sequence[Sequence], seconds: float = 0.0) -> dict[Request, str]:
    """Those whose masks have come are held no longer; waits so long for them. Returns the requests whose grammars can
    be followed no further, and why."""
    held = [sequence for sequence in running if sequence.held]
    wait_for(_places(each for sequence in held for each in _drawing(sequence)), seconds)
    failed: dict[Request, str] = {}
    for sequence in held:
        for each in _drawing(sequence):
            if each.state.constraint is not None and each.state.constraint.place.error is not None:
                failed[sequence.request] = each.state.constraint.place.error
        sequence.held = not all(each.state.ready for each in _drawing(sequence))
    return failed
