"""The process that compiles and follows grammars: a script that imports neither mlaforge nor torch.

It reads the tokenizer once. Every new connection is a grammar: a forked child compiles it and answers each request (a
text's new tokens) with the mask of the tokens allowed next. The kernel ends a child that exceeds its budget of
processor time or memory, whatever it is doing, without an effect on other children.

A message is a byte for its kind, the length of the payload, and the payload.
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

# Budgets of processor time in seconds: to compile a grammar, and for the masks of one text. Larger for following than
# for the check, because a grammar that has passed the check must not fail later. Every token adds a little, up to the
# initial budget. A normal schema takes a few milliseconds, then 20 microseconds a token.
CHECK_SECONDS, SECONDS, SECONDS_PER_TOKEN = 1.0, 2.0, 0.01
# Memory of a grammar besides the tokenizer, which all grammars share: a normal one takes 5 MiB.
BYTES = 128 * 2**20

# Requests: 32-bit numbers, the first is that of the text.
ASK, FORGET = range(2)
# Answers: a mask; a mask that allows only the end of text; why there will be none; why the process died.
MASK, LAST_MASK, FAILED, DIED = range(4)
# White space between two parts of a JSON text: at most one line break with an indent, because a small model may fill
# its answer with line breaks.
WHITE_SPACE = r"[\x20\x09]{0,8}(\x0D?\x0A[\x20\x09]{0,64})?"
TOO_SLOW = (
    f"it takes more processor time than {CHECK_SECONDS:g} s to compile and {1000 * SECONDS_PER_TOKEN:g} ms a token"
)
TOO_LARGE = f"it takes more than {BYTES // 2**20} MiB of memory"
# Probably not caused by the grammar.
ENDED = "its process was ended"
_OUT_OF_MEMORY = 3


def pack(payload: bytes, kind: int = 0) -> bytes:
    """Return a message."""
    return struct.pack("<BI", kind, len(payload)) + payload


def unpack(received: bytes | bytearray) -> tuple[int, bytes, int] | None:
    """Return (kind, payload, length) of the first message in these bytes; None where it is incomplete."""
    if len(received) < 5:
        return None
    kind, size = struct.unpack_from("<BI", received)
    return (kind, bytes(received[5 : 5 + size]), 5 + size) if len(received) >= 5 + size else None


def receive(connection: socket.socket) -> tuple[int, bytes] | None:
    """Wait for the next message and return (kind, payload); None where the other side is gone."""
    received = bytearray()
    while (message := unpack(received)) is None:
        size = 5 if len(received) < 5 else 5 + struct.unpack_from("<BI", received)[1]
        data = connection.recv(size - len(received))
        if not data:
            return None
        received += data
    return message[:2]


class _Budget:
    """A budget of processor time. When it is exhausted inside `spending`, the kernel ends the process."""

    def __init__(self, seconds: float) -> None:
        self._limit = self._remaining = seconds

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._remaining)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            # Never 0, which would be no limit.
            self._remaining = max(self._remaining - (time.process_time() - began), 0.001)

    def earn(self, tokens: int) -> None:
        self._remaining = min(self._remaining + tokens * SECONDS_PER_TOKEN, self._limit)


class _Failed(Exception):
    """The grammar cannot be followed; the message says why."""


def _compile(tokenizer: Any, name: str, text: str) -> Any:
    """Return llguidance's matcher of a regex, a Lark grammar or a JSON schema."""
    from llguidance import LLMatcher, LLParserLimits

    if name == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif name == "grammar":
        grammar = LLMatcher.grammar_from_lark(text)
    else:
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
        except ValueError as error:
            raise _Failed(str(error)) from error
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _mask(matcher: Any, token_ids: list[int]) -> bytes:
    """Return the mask after these tokens, each of which was allowed."""
    consumed = matcher.try_consume_tokens(token_ids)
    mask: bytes = matcher.compute_bitmask() if consumed == len(token_ids) else b""
    if matcher.is_error():
        # The reason is followed by a quote of the grammar that llguidance generated from the user's.
        reason = matcher.get_error().split("\n   1 | ")[0].replace("<non-verbose/>", "")
        raise _Failed(" ".join(reason.split())[:400])
    if not mask:
        raise _Failed(f"it does not allow token {token_ids[consumed]}")
    return mask


def _follow(connection: socket.socket, tokenizer: Any) -> None:
    """Serve one grammar, from its text to the last mask."""
    message = receive(connection)
    if message is None:
        return
    job = json.loads(message[1])
    os.nice(job["nice"])
    if sys.platform == "linux":
        # Elsewhere the limit is not enforced.
        with open("/proc/self/statm", encoding="ascii") as sizes:
            limit = int(sizes.read().split()[0]) * resource.getpagesize() + job["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    compiled: Any = None
    texts: dict[int, tuple[Any, _Budget]] = {}
    while (message := receive(connection)) is not None:
        number, *token_ids = array.array("I", message[1])
        if message[0] == FORGET:
            texts.pop(number, None)
            continue
        try:
            if compiled is None:
                with _Budget(job["seconds"]).spending():
                    compiled = _compile(tokenizer, job["name"], job["text"])
            if number not in texts:
                texts[number] = compiled.deep_copy(), _Budget(job["seconds"])
            matcher, budget = texts[number]
            budget.earn(len(token_ids))
            with budget.spending():
                mask = _mask(matcher, token_ids)
            answer = pack(mask, LAST_MASK if matcher.is_stopped() else MASK)
        except _Failed as error:
            answer = pack(str(error).encode(), FAILED)
        connection.sendall(answer)


def _child(connection: socket.socket, tokenizer: Any) -> None:
    """Main function of a forked child. Does not return."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open("/dev/null", "wb") as nowhere:
            # The last messages of a library must not get into the server's log.
            os.dup2(nowhere.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _follow(connection, tokenizer)
        os._exit(0)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except OSError:
        # The other side is gone.
        os._exit(0)
    finally:
        os._exit(1)


def _reason(status: int) -> str | None:
    """Return why a child failed, by its exit status; None where it ended normally."""
    if status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        return TOO_SLOW
    # An allocation that fails aborts.
    return TOO_LARGE if code in (_OUT_OF_MEMORY, -signal.SIGABRT) else f"{ENDED} ({code})"


class _Parent:
    """Forks a child per connection; if a child fails, sends the reason on its connection."""

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
                data, connections, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    return
                with socket.socket(fileno=connections[0]) as connection:
                    self._fork(connection)

    def _fork(self, connection: socket.socket) -> None:
        parent_copy = connection.dup()
        number = os.fork()
        if number:
            self._children[number] = parent_copy
            return
        for inherited in (self._control, parent_copy, *self._children.values()):
            inherited.close()
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
    """Read {"path", "tokenizer", "ends"} (module search path, the tokenizer's JSON, ends of text) from the socket that
    is standard input, answer with {"vocab_size", "ends"}, and fork until the other side closes."""
    # Ends with the other side, not with the terminal.
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
        # Initialize before the first fork what all grammars share.
        _mask(_compile(tokenizer, "json_schema", "{}"), [])
        answer = {"vocab_size": tokenizer.vocab_size, "ends": tokenizer.eos_tokens}
        control.sendall(pack(json.dumps(answer).encode()))
        _Parent(control, tokenizer).run()


if __name__ == "__main__":
    main()
