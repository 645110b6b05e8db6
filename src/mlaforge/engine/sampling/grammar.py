"""Grammars as the engine sees them: each is compiled and followed in a process of its own (grammar_process.py), and its
masks are waited for only as long as the engine wants to."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from typing import Any

from mlaforge.engine.sampling import grammar_process
from mlaforge.engine.sampling.grammar_process import ASK, DIED, ENDED, FAILED, FORGET, LAST_MASK, pack, receive, unpack
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, install

# Seconds by the clock after which a check is given up, on a machine that is too busy for it.
PATIENCE = 30.0
# A check yields to everybody else: many bad grammars at once must not take the processors from the engine.
CHECK = {"seconds": grammar_process.CHECK_SECONDS, "bytes": grammar_process.BYTES, "nice": 10}
FOLLOW = {"seconds": grammar_process.SECONDS, "bytes": grammar_process.BYTES, "nice": 0}
# How many grammars are remembered as good or bad, and how many processes wait for another request with their grammar.
REMEMBERED, IDLE = 4096, 8


class Grammars:
    """Where the grammars of one engine are followed: a process that reads the tokenizer, started with the first
    grammar, and forks one for each. `check` may be called in any thread, all else in one.

    `eos_token_ids`: what ends a text; by default the tokenizer's own. Those that the tokenizer lacks are left out, and
    `vocab_size` is the tokenizer's: both are known once a grammar was checked.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int] = ()):
        self.eos_token_ids, self.vocab_size = frozenset(t for t in eos_token_ids if t < len(tokenizer)), 0
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Digest of a grammar -> why it cannot be followed; None where it can.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        # Grammars that are followed, those without a place last used first.
        self._followed: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Raises UserError where the parameters' grammar cannot be followed or takes more than its budget, and where
        llguidance is missing. Waits until it is compiled, unless it was checked before."""
        if (named := _named(params)) is None:
            return
        key = hashlib.sha256(" ".join(named).encode("utf-8", "replace")).digest()
        if key in self._verdicts:
            reason = self._verdicts[key]
        else:
            reason = self._verdict(named)
            if reason is None or ENDED not in reason:
                with self._lock:
                    self._verdicts[key] = reason
                    if len(self._verdicts) > REMEMBERED:
                        self._verdicts.popitem(last=False)
        if reason is not None:
            raise UserError(reason)

    def _verdict(self, named: tuple[str, str]) -> str | None:
        with contextlib.closing(Grammar(self, *named, CHECK)) as grammar:
            place = grammar.place()
            wait_for([place], PATIENCE)
        if place.waiting:
            raise UserError(f"{named[0]} was not compiled within {PATIENCE:g} s; try again later")
        return place.error

    def follow(self, params: SamplingParams) -> Place:
        """The beginning of the parameters' grammar. Requests with the same one share a process."""
        named = _named(params)
        assert named is not None
        grammar = self._followed.get(named) or self._followed.setdefault(named, Grammar(self, *named, FOLLOW))
        self._followed.move_to_end(named)
        idle = [each for each, other in self._followed.items() if not other.places and each != named]
        for each in idle[:-IDLE]:
            self._followed.pop(each).close()
        return grammar.place()

    def open(self) -> socket.socket:
        """A connection to a new process for one grammar. Raises OSError where none can be had."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            ours, its = socket.socketpair()
            with its:
                socket.send_fds(self._control, [b"+"], [its.fileno()])
        return ours

    def _start(self) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise UserError(f"json_schema and regex need llguidance: {install('constrained')}")
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        ends = sorted(self.eos_token_ids) or self._tokenizer.eos_token_id
        self._control, its = socket.socketpair()
        with its:
            command = [sys.executable, "-I", grammar_process.__file__]
            self._process = subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process, self._control)
        start = {"path": sys.path, "tokenizer": backend.to_str(), "ends": ends}
        self._control.sendall(pack(json.dumps(start).encode()))
        answer = receive(self._control)
        if answer is None or answer[0] == FAILED:
            raise UserError(f"llguidance cannot read the tokenizer: {answer[1].decode() if answer else 'it died'}")
        ready = json.loads(answer[1])
        self.vocab_size, self.eos_token_ids = ready["vocab_size"], frozenset(ready["ends"])


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.wait()


def _named(params: SamplingParams) -> tuple[str, str] | None:
    """(name, text) of the parameters' grammar."""
    if params.regex is not None:
        return "regex", params.regex
    return None if params.json_schema is None else ("json_schema", params.schema_text)


@dataclasses.dataclass(eq=False)
class Place:
    """Where one text stands in its grammar: after `token_ids`. `mask` is what may come next, a bit per token of the
    tokenizer, the lowest first; `last`: nothing but the end of text. `error` says why it will never come."""

    grammar: Grammar
    number: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    mask: bytes | None = None
    last: bool = False
    error: str | None = None

    @property
    def waiting(self) -> bool:
        """The mask has not come, but may."""
        return self.mask is None and self.error is None

    def advance(self, token_ids: list[int]) -> None:
        """Goes on by these tokens, of which each was allowed."""
        self.token_ids += token_ids
        self.mask = None
        self.grammar.ask(self, token_ids)

    def close(self) -> None:
        """It is left for good."""
        self.grammar.leave(self)


class Grammar:
    """One grammar in its process, which starts with the first place and ends with `close`.

    Where the process dies, it is the fault of the place whose mask it was making, and the others go on in a new one.
    """

    def __init__(self, owner: Grammars, name: str, text: str, budget: Mapping[str, float]):
        self.places: dict[int, Place] = {}
        self._owner, self._name, self._text, self._budget = owner, name, text, budget
        self._numbers: Iterator[int] = iter(range(2**32))
        self._connection: socket.socket | None = None
        # Places that the process knows, and those that wait for its answers, in this order.
        self._known: set[int] = set()
        self._asked: deque[Place] = deque()
        self._received = bytearray()

    def place(self) -> Place:
        """A new one, at the beginning."""
        place = Place(self, next(self._numbers))
        self.places[place.number] = place
        self.ask(place, [])
        return place

    def ask(self, place: Place, token_ids: list[int]) -> None:
        """Has the mask made of a place that these tokens have been added to."""
        if self._connection is not None and not self._asked and self._has_died():
            # Nobody's fault: it had nothing to do.
            self.close()
        self._asked.append(place)
        try:
            if self._connection is None:
                self._connection = self._owner.open()
                job = {"name": self._name, "text": self._text, **self._budget}
                self._connection.sendall(pack(json.dumps(job).encode()))
            tokens = token_ids if place.number in self._known else place.token_ids
            self._known.add(place.number)
            self._connection.sendall(pack(array.array("I", [place.number, *tokens]).tobytes(), ASK))
        except OSError as error:
            # Where it has died, its last words are still to be read.
            if self._connection is None:
                self._fail(place, f"its process cannot be started ({error.strerror})")

    def leave(self, place: Place) -> None:
        """Forgets a place."""
        del self.places[place.number]
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(pack(array.array("I", [place.number]).tobytes(), FORGET))

    def read(self) -> None:
        """Takes what has come. Does not wait."""
        while self._asked and self._connection is not None:
            try:
                some = self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                some = b""
            self._received += some or pack(ENDED.encode(), DIED)
            while (message := unpack(self._received)) is not None:
                kind, payload, length = message
                del self._received[:length]
                place = self._asked.popleft()
                if kind in (FAILED, DIED):
                    self._fail(place, payload.decode())
                elif place not in self._asked:
                    # It has not gone on since.
                    place.mask, place.last = payload, kind == LAST_MASK
                if kind == DIED:
                    self._begin_anew()
                    break

    def _has_died(self) -> bool:
        """Of a process that was asked nothing: it has nothing to say but that."""
        assert self._connection is not None
        try:
            self._connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _fail(self, place: Place, reason: str) -> None:
        place.error = f"{self._name} cannot be followed: {reason}"

    def _begin_anew(self) -> None:
        asked, self._asked = [place for place in self._asked if place.number in self.places], deque()
        self.close()
        for place in asked:
            self.ask(place, [])

    def fileno(self) -> int:
        """For `select`: something can be read."""
        assert self._connection is not None
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the process, which has nothing more to do."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._known = None, set()
        self._received.clear()


def wait_for(places: Collection[Place], seconds: float) -> None:
    """Returns when each of these has its mask or will never have it, or after so long."""
    until = time.monotonic() + seconds
    for grammar in {place.grammar for place in places}:
        grammar.read()
    while grammars := {place.grammar for place in places if place.waiting}:
        left = until - time.monotonic()
        if left <= 0:
            return
        poll = select.poll()
        for grammar in grammars:
            poll.register(grammar, select.POLLIN)
        # Rounded up, or the last millisecond would be spent asking.
        poll.poll(int(1000 * left) + 1)
        for grammar in grammars:
            grammar.read()
