"""The process in which grammars are compiled and followed: a script that imports nothing of mlaforge and no torch.

It reads the tokenizer once. Then every connection that comes is a grammar: a child is forked, which compiles it and
answers each question (a text's new tokens) with the mask of the tokens that may come next. The kernel ends a child that
takes more than its budget of processor time or memory, whatever it is doing; nobody else notices.

A message is a byte that says what it is, the length of the rest, and the rest.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

# Processor time, in seconds: to compile a grammar, and for the masks of one text. More when it is followed than when it
# was checked, because what has passed the check must not fail afterwards. Every token brings a little more, up to what
# it began with. A normal schema takes a few milliseconds, then 20 microseconds a token.
CHECK_SECONDS, SECONDS, SECONDS_PER_TOKEN = 1.0, 2.0, 0.01
# What a grammar may take beside the tokenizer, which it shares with the others: a normal one takes 5 MiB.
BYTES = 128 * 2**20

# Questions: numbers of 32 bits, the first that of the text.
ASK, FORGET = range(2)
# Answers: a mask; one that allows nothing but the end of text; why there will be none; why the process died.
MASK, LAST_MASK, FAILED, DIED = range(4)
# Between two parts of a JSON text: a line break with an indent, at most one. A small model that loves line breaks would
# fill its answer with them.
WHITE_SPACE = r"[\x20\x09]{0,8}(\x0D?\x0A[\x20\x09]{0,64})?"
TOO_SLOW = (
    f"it takes more processor time than {CHECK_SECONDS:g} s to compile and {1000 * SECONDS_PER_TOKEN:g} ms a token"
)
TOO_LARGE = f"it takes more than {BYTES // 2**20} MiB of memory"
# No fault of the grammar's, as far as can be known.
ENDED = "its process was ended"
_OUT_OF_MEMORY = 3


def pack(payload: bytes, kind: int = 0) -> bytes:
    """A message."""
    return struct.pack("<BI", kind, len(payload)) + payload


def unpack(received: bytes | bytearray) -> tuple[int, bytes, int] | None:
    """(kind, payload, length) of the message that these bytes begin with; None where it has not come whole."""
    if len(received) < 5:
        return None
    kind, size = struct.unpack_from("<BI", received)
    return (kind, bytes(received[5 : 5 + size]), 5 + size) if len(received) >= 5 + size else None


def receive(connection: socket.socket) -> tuple[int, bytes] | None:
    """(kind, payload) of the next message, waited for; None where the other side is gone."""
    received = bytearray()
    while (message := unpack(received)) is None:
        size = 5 if len(received) < 5 else 5 + struct.unpack_from("<BI", received)[1]
        some = connection.recv(size - len(received))
        if not some:
            return None
        received += some
    return message[:2]


class _Budget:
    """Processor time. When it runs out inside `spending`, the kernel ends the process."""

    def __init__(self, seconds: float) -> None:
        self._most = self._left = seconds

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            # Never 0, which is no limit at all.
            self._left = max(self._left - (time.process_time() - began), 0.001)

    def earn(self, tokens: int) -> None:
        self._left = min(self._left + tokens * SECONDS_PER_TOKEN, self._most)


class _Failed(Exception):
    """Why the grammar cannot be followed."""


def _compiled(tokenizer: Any, name: str, text: str) -> Any:
    """llguidance's matcher of a regex or a JSON schema."""
    from llguidance import LLMatcher, LLParserLimits

    if name == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    else:
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
        except ValueError as error:
            raise _Failed(str(error)) from error
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _mask(matcher: Any, token_ids: list[int]) -> bytes:
    """What may follow these tokens, each of which was allowed."""
    taken = matcher.try_consume_tokens(token_ids)
    mask: bytes = matcher.compute_bitmask() if taken == len(token_ids) else b""
    if matcher.is_error():
        # After the reason it quotes the grammar that was made from what the user gave.
        reason = matcher.get_error().split("\n   1 | ")[0].replace("<non-verbose/>", "")
        raise _Failed(" ".join(reason.split())[:400])
    if not mask:
        raise _Failed(f"token {token_ids[taken]} is not what it allows")
    return mask


def _follow(connection: socket.socket, tokenizer: Any) -> None:
    """One grammar, from its text to the last mask of any text that follows it."""
    message = receive(connection)
    if message is None:
        return
    job = json.loads(message[1])
    os.nice(job["nice"])
    if sys.platform == "linux":
        # Elsewhere the limit is not enforced.
        with open("/proc/self/statm", encoding="ascii") as sizes:
            most = int(sizes.read().split()[0]) * resource.getpagesize() + job["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    first: Any = None
    texts: dict[int, tuple[Any, _Budget]] = {}
    while (message := receive(connection)) is not None:
        number, *token_ids = array.array("I", message[1])
        if message[0] == FORGET:
            texts.pop(number, None)
            continue
        try:
            if first is None:
                with _Budget(job["seconds"]).spending():
                    first = _compiled(tokenizer, job["name"], job["text"])
            if number not in texts:
                texts[number] = first.deep_copy(), _Budget(job["seconds"])
            matcher, budget = texts[number]
            budget.earn(len(token_ids))
            with budget.spending():
                mask = _mask(matcher, token_ids)
            answer = pack(mask, LAST_MASK if matcher.is_stopped() else MASK)
        except _Failed as error:
            answer = pack(str(error).encode(), FAILED)
        connection.sendall(answer)


def _child(connection: socket.socket, tokenizer: Any) -> None:
    """Runs in a forked process, which ends with it."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open("/dev/null", "wb") as nowhere:
            # What a library says when it dies is no concern of the server's log.
            os.dup2(nowhere.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _follow(connection, tokenizer)
        os._exit(0)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except OSError:
        # Who asked is gone.
        os._exit(0)
    finally:
        os._exit(1)


def _reason(status: int) -> str | None:
    """Why a child ended before it was to; None where it was to."""
    if status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        return TOO_SLOW
    # An allocation that fails aborts.
    return TOO_LARGE if code in (_OUT_OF_MEMORY, -signal.SIGABRT) else f"{ENDED} ({code})"


class _Parent:
    """Forks a child per connection, and says why on its connection where it ends too early."""

    def __init__(self, control: socket.socket, tokenizer: Any) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._children: dict[int, socket.socket] = {}
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 512)
                self._reap()
            if self._control.fileno() in ready:
                some, connections, _, _ = socket.recv_fds(self._control, 1, 1)
                if not some:
                    return
                with socket.socket(fileno=connections[0]) as connection:
                    self._fork(connection)

    def _fork(self, connection: socket.socket) -> None:
        kept = connection.dup()
        number = os.fork()
        if number:
            self._children[number] = kept
            return
        for mine in (self._control, kept, *self._children.values()):
            mine.close()
        _child(connection, self._tokenizer)

    def _reap(self) -> None:
        while self._children:
            number, status = os.waitpid(-1, os.WNOHANG)
            if not number:
                return
            with self._children.pop(number) as connection:
                if (reason := _reason(status)) is not None:
                    with contextlib.suppress(OSError):
                        connection.send(pack(reason.encode(), DIED), socket.MSG_DONTWAIT)


def main() -> None:
    """Reads {"path", "tokenizer", "ends"} (where modules are, the tokenizer's JSON, ends of text) from the socket that
    is its standard input, answers with {"vocab_size", "ends"}, and forks until the other side closes."""
    # Its life is the other side's, not the terminal's.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as control:
        first = receive(control)
        if first is None:
            return
        start = json.loads(first[1])
        sys.path[:] = start["path"]
        from llguidance import LLTokenizer

        try:
            tokenizer = LLTokenizer(start["tokenizer"], eos_token=start["ends"])
        except ValueError as error:
            control.sendall(pack(str(error).encode(), FAILED))
            return
        # What every grammar needs once is made before the first fork, and shared.
        _mask(_compiled(tokenizer, "json_schema", "{}"), [])
        answer = {"vocab_size": tokenizer.vocab_size, "ends": tokenizer.eos_tokens}
        control.sendall(pack(json.dumps(answer).encode()))
        _Parent(control, tokenizer).run()


if __name__ == "__main__":
    main()
