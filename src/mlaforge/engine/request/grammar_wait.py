"""Sequences that wait for a grammar mask: their next token cannot be drawn until the mask is computed.

A step waits for masks as long as the step itself has taken. It then continues without the sequences whose masks are
missing: later steps skip these until the mask is there, and then compute their newest token once more.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Iterable

from mlaforge.engine.request.sequence import Request, Sequence
from mlaforge.engine.sampling.grammar import Place, wait_for

# Shortest wait for a mask, in seconds. Most masks take a tenth of it.
MIN_WAIT_SECONDS = 0.002
# Wait where no sequence can run: short, so that finished masks and aborted requests are noticed.
IDLE_SECONDS = 0.005


def _places(sequences: Iterable[Sequence]) -> list[Place]:
    """The grammar positions of sequences whose masks are missing."""
    return [s.state.constraint.place for s in sequences if s.state.constraint is not None and not s.state.ready]


def _drawing(sequence: Sequence) -> list[Sequence]:
    """The sequences that draw together: at the end of a prompt, all continuations of the request."""
    return [sequence] if sequence.prefilled else sequence.request.sequences


def start_compilation(sequences: Iterable[Sequence]) -> None:
    """Start to compile the grammars of these sequences, so that they compile while the prompts are computed."""
    for sequence in sequences:
        # Reading a place starts its compilation.
        _places(_drawing(sequence))


def wait_for_masks(sequences: abc.Sequence[Sequence], began: float) -> None:
    """Wait for the masks of sequences that a step is about to draw for, and mark those whose masks stay missing.
    `began`: start of the step (time.perf_counter())."""
    places = _places(drawing for sequence in sequences for drawing in _drawing(sequence))
    if places:
        wait_for(places, max(MIN_WAIT_SECONDS, time.perf_counter() - began))
        for sequence in sequences:
            sequence.waiting_for_grammar = not all(drawing.state.ready for drawing in _drawing(sequence))


def can_draw_again(sequences: abc.Sequence[Sequence]) -> list[bool]:
    """Whether the step that has drawn a token of these sequences can draw one more of each."""
    wait_for(_places(sequences), MIN_WAIT_SECONDS)
    return [sequence.state.ready for sequence in sequences]


def resume(running: abc.Sequence[Sequence], seconds: float = 0.0) -> dict[Request, str]:
    """Unmark sequences whose masks are there, after a wait of at most `seconds`. Return the requests whose grammars
    cannot be followed any further, with the reason."""
    waiting = [sequence for sequence in running if sequence.waiting_for_grammar]
    wait_for(_places(drawing for sequence in waiting for drawing in _drawing(sequence)), seconds)
    failed: dict[Request, str] = {}
    for sequence in waiting:
        for drawing in _drawing(sequence):
            if drawing.state.constraint is not None and drawing.state.constraint.place.error is not None:
                failed[sequence.request] = drawing.state.constraint.place.error
        sequence.waiting_for_grammar = not all(drawing.state.ready for drawing in _drawing(sequence))
    return failed
