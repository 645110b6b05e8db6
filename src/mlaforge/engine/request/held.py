"""Held sequences: their next tokens cannot be drawn yet, because their grammars' masks are late.

A step waits for a mask as long as it has taken itself, and no longer. Then it goes on without the sequence, which is
left out of the steps that follow until its mask is there, and computes its newest token once more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Several

from mlaforge.engine.request.sequence import Request, Sequence
from mlaforge.engine.sampling.grammar import Grammar, wait_for

# Seconds for which a mask is waited for at least: most are there in a tenth of it.
LEAST_SECONDS = 0.002
# Where there is nothing else to do: no longer than an abort may take.
IDLE_SECONDS = 0.02


def _grammars(sequences: Iterable[Sequence]) -> list[Grammar]:
    """Those of their requests, each once."""
    return list(dict.fromkeys(s.request.grammar for s in sequences if s.request.grammar is not None))


def begin(sequences: Iterable[Sequence]) -> None:
    """Has the grammars compiled that are not yet; meanwhile the prompts can be computed."""
    for sequence in sequences:
        if sequence.request.grammar is not None and not sequence.prefilled:
            for each in sequence.request.sequences:
                assert each.state.constraint is not None
                each.state.constraint.begin()


def hold_late(drawing: Several[Sequence], began: float) -> None:
    """Of sequences that the step could draw for, holds those whose masks are not there soon. It began at that time
    (time.perf_counter()). At the end of a prompt all the request's continuations draw."""
    if grammars := _grammars(drawing):
        wait_for(grammars, max(LEAST_SECONDS, time.perf_counter() - began))
        for sequence in drawing:
            together = [sequence] if sequence.prefilled else sequence.request.sequences
            sequence.held = not all(each.state.ready for each in together)


def ready(sequences: Several[Sequence]) -> list[bool]:
    """Of sequences that a step has drawn for, whether it can draw once more."""
    if grammars := _grammars(sequences):
        wait_for(grammars, LEAST_SECONDS)
    return [sequence.state.ready for sequence in sequences]


def release(running: Several[Sequence], seconds: float = 0.0) -> list[Request]:
    """Those whose masks have come are held no longer; waits so long for the first of them. Returns the requests whose
    grammars can be followed no further."""
    wait_for(_grammars(sequence for sequence in running if sequence.held), seconds)
    for sequence in running:
        sequence.held = sequence.held and not sequence.state.ready
    requests = dict.fromkeys(sequence.request for sequence in running)
    return [each for each in requests if each.grammar is not None and each.grammar.error is not None]
