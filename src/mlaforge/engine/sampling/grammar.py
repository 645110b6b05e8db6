"""Grammars of constrained decoding, each compiled and followed in a process of its own (grammar_process.py), so that
the engine decides how long it waits for a mask."""

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

# Wall-clock seconds after which a check is given up, on a machine that is too busy for it.
TIMEOUT = 30.0
# Checks run at a low priority: many bad grammars at once must not take the processors from the engine.
CHECK = {"seconds": grammar_process.CHECK_SECONDS, "bytes": grammar_process.BYTES, "nice": 10}
FOLLOW = {"seconds": grammar_process.SECONDS, "bytes": grammar_process.BYTES, "nice": 0}
# Most verdicts in the cache, and most idle processes that wait for another request with their grammar.
MAX_VERDICTS, MAX_IDLE = 4096, 8


class Grammars:
    """The grammars of one engine. A process that reads the tokenizer starts with the first grammar and forks a child
    for each. `check` may be called in any thread, everything else in one.

    `eos_token_ids`: ends of text; by default the tokenizer's. Those that the tokenizer lacks are left out, and
    `vocab_size` is the tokenizer's: both are valid once a grammar was checked.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int] = ()):
        self.eos_token_ids, self.vocab_size = frozenset(t for t in eos_token_ids if t < len(tokenizer)), 0
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Digest of a grammar -> why it cannot be followed; None where it can.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        # Grammars in use, least recently used first.
        self._followed: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Raise UserError where the parameters' grammar cannot be followed or exceeds its budget, and where llguidance
        is missing. Waits until it is compiled, unless it was checked before."""
        if (source := _source(params)) is None:
            return
        key = hashlib.sha256(" ".join(source).encode("utf-8", "replace")).digest()
        if key in self._verdicts:
            reason = self._verdicts[key]
        else:
            reason = self._verdict(source)
            if reason is None or ENDED not in reason:
                with self._lock:
                    self._verdicts[key] = reason
                    if len(self._verdicts) > MAX_VERDICTS:
                        self._verdicts.popitem(last=False)
        if reason is not None:
            raise UserError(reason)

    def _verdict(self, source: tuple[str, str]) -> str | None:
        with contextlib.closing(Grammar(self, *source, CHECK)) as grammar:
            place = grammar.place()
            wait_for([place], TIMEOUT)
        if place.waiting:
            raise UserError(f"{source[0]} was not compiled within {TIMEOUT:g} s; try again later")
        return place.error

    def follow(self, params: SamplingParams) -> Place:
        """Return a place at the beginning of the parameters' grammar. Requests with the same grammar share a
        process."""
        source = _source(params)
        assert source is not None
        grammar = self._followed.get(source) or self._followed.setdefault(source, Grammar(self, *source, FOLLOW))
        self._followed.move_to_end(source)
        idle = [key for key, other in self._followed.items() if not other.places and key != source]
        for key in idle[:-MAX_IDLE]:
            self._followed.pop(key).close()
        return grammar.place()

    def open(self) -> socket.socket:
        """Return a connection to a new process for one grammar. Raises OSError where none can be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            connection, child_end = socket.socketpair()
            with child_end:
                socket.send_fds(self._control, [b"+"], [child_end.fileno()])
        return connection

    def _start(self) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise UserError(f"json_schema and regex need llguidance: {install('constrained')}")
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        ends = sorted(self.eos_token_ids) or self._tokenizer.eos_token_id
        self._control, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-I", grammar_process.__file__]
            self._process = subprocess.Popen(command, stdin=child_end.fileno(), stdout=subprocess.DEVNULL)
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


def _source(params: SamplingParams) -> tuple[str, str] | None:
    """(field of SamplingParams, text) of the parameters' grammar."""
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    return None if params.json_schema is None else ("json_schema", params.schema_text)


@dataclasses.dataclass(eq=False)
class Place:
    """Position of one text in its grammar: after `token_ids`. `mask` has a bit per token of the tokenizer, the lowest
    first: the tokens allowed next. `last`: only the end of text is allowed. `error`: why there will be no mask."""

    grammar: Grammar
    number: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    mask: bytes | None = None
    last: bool = False
    error: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether the mask is still being computed."""
        return self.mask is None and self.error is None

    def advance(self, token_ids: list[int]) -> None:
        """Append these tokens, which were allowed."""
        self.token_ids += token_ids
        self.mask = None
        self.grammar.request_mask(self, token_ids)

    def close(self) -> None:
        """Remove the place from its grammar."""
        self.grammar.remove(self)


class Grammar:
    """One grammar in its process, which starts with the first place and ends with `close`.

    If the process dies, the place whose mask it was computing fails, and the others continue in a new process.
    """

    def __init__(self, owner: Grammars, name: str, text: str, budget: Mapping[str, float]):
        self.places: dict[int, Place] = {}
        self._owner, self._name, self._text, self._budget = owner, name, text, budget
        self._numbers: Iterator[int] = iter(range(2**32))
        self._connection: socket.socket | None = None
        # Places that the process knows, and those whose masks were requested, in the order of the answers.
        self._known: set[int] = set()
        self._requested: deque[Place] = deque()
        self._received = bytearray()

    def place(self) -> Place:
        """Return a new place at the beginning."""
        place = Place(self, next(self._numbers))
        self.places[place.number] = place
        self.request_mask(place, [])
        return place

    def request_mask(self, place: Place, token_ids: list[int]) -> None:
        """Request the mask of a place to which these tokens were appended."""
        if self._connection is not None and not self._requested and self._has_died():
            # An idle process died, which is not the fault of any place.
            self.close()
        self._requested.append(place)
        try:
            if self._connection is None:
                self._connection = self._owner.open()
                job = {"name": self._name, "text": self._text, **self._budget}
                self._connection.sendall(pack(json.dumps(job).encode()))
            tokens = token_ids if place.number in self._known else place.token_ids
            self._known.add(place.number)
            self._connection.sendall(pack(array.array("I", [place.number, *tokens]).tobytes(), ASK))
        except OSError as error:
            # If the process has died, `read` will receive the reason.
            if self._connection is None:
                self._fail(place, f"its process cannot be started ({error.strerror})")

    def remove(self, place: Place) -> None:
        """Forget a place."""
        del self.places[place.number]
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(pack(array.array("I", [place.number]).tobytes(), FORGET))

    def read(self) -> None:
        """Receive the available answers. Does not wait."""
        while self._requested and self._connection is not None:
            try:
                data = self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._received += data or pack(ENDED.encode(), DIED)
            while (message := unpack(self._received)) is not None:
                kind, payload, length = message
                del self._received[:length]
                place = self._requested.popleft()
                if kind in (FAILED, DIED):
                    self._fail(place, payload.decode())
                elif place not in self._requested:
                    # The place has not advanced since.
                    place.mask, place.last = payload, kind == LAST_MASK
                if kind == DIED:
                    self._restart()
                    break

    def _has_died(self) -> bool:
        """Whether an idle process has closed its connection: an idle process sends nothing else."""
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

    def _restart(self) -> None:
        requested, self._requested = [place for place in self._requested if place.number in self.places], deque()
        self.close()
        for place in requested:
            self.request_mask(place, [])

    def fileno(self) -> int:
        """File descriptor for `select`."""
        assert self._connection is not None
        return self._connection.fileno()

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._known = None, set()
        self._received.clear()


def wait_for(places: Collection[Place], seconds: float) -> None:
    """Wait until each place has its mask or an error, at most this long."""
    until = time.monotonic() + seconds
    for grammar in {place.grammar for place in places}:
        grammar.read()
    while grammars := {place.grammar for place in places if place.waiting}:
        remaining = until - time.monotonic()
        if remaining <= 0:
            return
        poll = select.poll()
        for grammar in grammars:
            poll.register(grammar, select.POLLIN)
        # Rounded up, or the last millisecond would be busy polling.
        poll.poll(int(1000 * remaining) + 1)
        for grammar in grammars:
            grammar.read()
