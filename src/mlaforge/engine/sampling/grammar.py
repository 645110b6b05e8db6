"""Grammars as the engine sees them: each is compiled and followed in a process of its own (grammar_process.py), and its
masks are waited for only as long as the engine wants to."""

from __future__ import annotations

import array
import contextlib
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
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

from mlaforge.engine.sampling import grammar_process
from mlaforge.engine.sampling.grammar_process import FAILED, LAST_MASK, pack, receive, unpack
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

# Seconds by the clock after which a check is given up, on a machine that is too busy for it.
PATIENCE = 30.0
# A check takes what the others leave of the processors: many bad grammars at once must not slow down anybody.
CHECK = {"seconds": grammar_process.CHECK_SECONDS, "nice": 19}
FOLLOW = {"seconds": grammar_process.SECONDS, "nice": 0}
# How many grammars are remembered as good or bad.
REMEMBERED = 4096


class Grammars:
    """Where the grammars of one engine are followed: a process that reads the tokenizer, started with the first
    grammar, and forks one for each. Any thread may use it.

    `eos_token_ids`: what ends a text; by default the tokenizer's own. Those that the tokenizer lacks are left out, and
    `vocab_size` is the tokenizer's: both are known once a grammar was checked.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()):
        self.eos_token_ids, self.vocab_size = frozenset(t for t in eos_token_ids if t < len(tokenizer)), 0
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Digest of a grammar -> why it cannot be followed; None where it can.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Raises UserError where the parameters' grammar cannot be followed or takes more than its budget, and where
        llguidance is missing. Waits until it is compiled, unless it was checked before."""
        if (grammar := self.of(params, CHECK)) is None:
            return
        key = hashlib.sha256(f"{grammar.name} {grammar.text}".encode()).digest()
        if key not in self._verdicts:
            with contextlib.closing(grammar):
                grammar.ask(0, ())
                wait_for([grammar], PATIENCE)
            if grammar.waiting:
                raise UserError(f"{grammar.name} was not compiled within {PATIENCE:g} s; try again later")
            with self._lock:
                self._verdicts[key] = grammar.error
                if len(self._verdicts) > REMEMBERED:
                    self._verdicts.popitem(last=False)
        if (reason := self._verdicts[key]) is not None:
            raise UserError(reason)

    def of(self, params: SamplingParams, purpose: Mapping[str, float] = FOLLOW) -> Grammar | None:
        """The grammar of a request, which has no process yet; None where the parameters ask for none."""
        if params.regex is not None:
            return Grammar(self, "regex", params.regex, purpose)
        return None if params.json_schema is None else Grammar(self, "json_schema", params.schema_text, purpose)

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
            raise UserError("json_schema and regex need llguidance: pip install 'mlaforge[constrained]'")
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


class Grammar:
    """One request's grammar in its process, which starts with the first question and ends with `close`.

    Of each of the request's continuations it has one mask, of what may follow the tokens that it was asked with.
    `error` says why there will be no more of them. `masks`: continuation -> (a bit per token of the tokenizer, the
    lowest first, as bytes; whether they allow nothing but the end of text).
    """

    def __init__(self, owner: Grammars, name: str, text: str, purpose: Mapping[str, float]):
        self.owner, self.name, self.text = owner, name, text
        self.error: str | None = None
        self.masks: dict[int, tuple[bytes, bool]] = {}
        self._purpose = purpose
        self._connection: socket.socket | None = None
        # Continuations that have asked, in this order.
        self._asked: deque[int] = deque()
        self._received = bytearray()

    @property
    def waiting(self) -> bool:
        """Masks were asked for that have not come."""
        return bool(self._asked) and self.error is None

    def ask(self, continuation: int, token_ids: Sequence[int]) -> None:
        """These tokens come next in the continuation: its mask is now that of what may follow them."""
        self.masks.pop(continuation, None)
        self._asked.append(continuation)
        try:
            if self._connection is None:
                self._connection = self.owner.open()
                job = {"name": self.name, "text": self.text, **self._purpose}
                self._connection.sendall(pack(json.dumps(job).encode()))
            self._connection.sendall(pack(array.array("I", [continuation, *token_ids]).tobytes()))
        except OSError as error:
            # Its last words may still be unread.
            if self._connection is None:
                self._fail(f"its process cannot be started ({error.strerror})")

    def read(self) -> None:
        """Takes what has come. Does not wait."""
        while self.waiting and self._connection is not None:
            try:
                some = self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                some = b""
            if not some:
                self._fail("its process has died")
            self._received += some
            while (message := unpack(self._received)) is not None:
                kind, payload, length = message
                del self._received[:length]
                if kind == FAILED:
                    self._fail(payload.decode())
                else:
                    self.masks[self._asked.popleft()] = payload, kind == LAST_MASK

    def _fail(self, reason: str) -> None:
        self.error = self.error or f"{self.name} cannot be followed: {reason}"

    def fileno(self) -> int:
        """For `select`: something can be read."""
        assert self._connection is not None
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the process, which has nothing more to do."""
        if self._connection is not None:
            self._connection.close()


def wait_for(grammars: Collection[Grammar], seconds: float) -> None:
    """Returns when all the masks that were asked for are there or will never be, or after so long."""
    until = time.monotonic() + seconds
    for grammar in grammars:
        grammar.read()
    while waiting := [grammar for grammar in grammars if grammar.waiting]:
        left = until - time.monotonic()
        if left <= 0:
            return
        poll = select.poll()
        for grammar in waiting:
            poll.register(grammar, select.POLLIN)
        # Rounded up, or the last millisecond would be spent asking.
        poll.poll(int(1000 * left) + 1)
        for grammar in waiting:
            grammar.read()
