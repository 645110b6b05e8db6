"""Floods of connections against a real server: what is no request must cost nobody anything, and must be closed.

They come in waves of one kind. The witness, who asks meanwhile as everybody does, may be refused only where a wave's
own requests fill the queue.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil

from attack.fuzz import base, encode
from attack.ledger import Ledger
from attack.requests import Fault
from attack.served import Served

# Of the server: seconds; and fewer places than a wave has connections.
CLIENT_TIMEOUT = 4
OPTIONS = ["--client-timeout", str(CLIENT_TIMEOUT), "--max-body", "100000", "--max-concurrent", "32",
           "--max-queue", "32"]  # fmt: skip
WAVE = 200
# Seconds beyond its time within which a connection has to be closed, and sending that is spread over time ends.
GRACE, DRIPS = 6, 3 * CLIENT_TIMEOUT
# More than buffers between two sockets hold.
FAR_TOO_LARGE = 6_000_000
PIPELINED = 20


@dataclass
class Connection:
    dice: random.Random
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def closed(self, seconds: float = CLIENT_TIMEOUT + GRACE) -> bytes:
        """All that comes until the server closes. Raises Fault where it does not, or answers with a 5xx."""
        try:
            answer = await asyncio.wait_for(self.reader.read(-1), seconds)
        except TimeoutError as error:
            raise Fault(f"still open after {seconds:g} s") from error
        except ConnectionError:
            return b""
        check_status(answer)
        return answer

    async def dripped(self, pieces: list[bytes]) -> None:
        """A piece a second, until the server has had enough."""
        ended = asyncio.create_task(self.reader.read(-1))
        for piece in pieces:
            try:
                await self.send(piece)
            except ConnectionError:
                break
            if (await asyncio.wait({ended}, timeout=1))[0]:
                break
        done, _ = await asyncio.wait({ended}, timeout=GRACE)
        ended.cancel()
        if not done:
            raise Fault(f"still open after {len(pieces) + GRACE} s of one piece a second")

    def reset(self) -> None:
        """Closes so that the other side reads an error, not an end."""
        own = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def check_status(answer: bytes) -> None:
    for part in answer.split(b"HTTP/1.1 ")[1:]:
        if part[:1] == b"5" and part[:3] != b"503":
            raise Fault(f"status {part[:300]!r}")


def request(body: bytes, *more: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A POST; `length` is announced instead of the body's own."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *more]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in more):
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def streaming(connection: Connection, tokens: int) -> bytes:
    body = base(connection.dice, "/v1/completions") | {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    return request(encode(body))


async def silence(c: Connection) -> None:
    await c.closed()


async def partial_line(c: Connection) -> None:
    await c.send(c.dice.choice((b"P", b"POST /v1/comple", b"GET / HTTP/1.1", b"\r\n", b"\r\n\r\n")))
    await c.closed()


async def partial_head(c: Connection) -> None:
    raw = request(b"{}")
    await c.send(raw[: c.dice.randrange(30, len(raw) - 4)])
    await c.closed()


async def dripped_head(c: Connection) -> None:
    await c.dripped([b"POST /v1/completions HTTP/1.1\r\n", *(f"x-{i}: y\r\n".encode() for i in range(DRIPS))])


async def half_body(c: Connection) -> None:
    await c.send(request(b'{"prompt": "x"', length=c.dice.choice((100, 90_000))))
    await c.closed()


async def dripped_body(c: Connection) -> None:
    await c.dripped([request(b"{", length=1000), *([b" "] * DRIPS)])


async def idle(c: Connection) -> None:
    """Silent after an answer."""
    await c.send(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    if b" 200 " not in (answer := await asyncio.wait_for(c.reader.readline(), 60)):
        raise Fault(f"GET /version: {answer!r}")
    await c.closed()


async def too_large(c: Connection) -> None:
    """A client that reads only when it has sent everything."""
    if c.dice.random() < 0.5:
        raw = request(b"x" * FAR_TOO_LARGE)
    else:
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        raw = request(chunk * (FAR_TOO_LARGE // 65536) + b"0\r\n\r\n", "transfer-encoding: chunked")
    try:
        await asyncio.wait_for(c.send(raw), 60)
        answer = await asyncio.wait_for(c.reader.readline(), 60)
    except ConnectionError as error:
        raise Fault(f"a body over the limit: {error!r} instead of a 413") from error
    except TimeoutError as error:
        raise Fault("a body over the limit: no 413 within 60 s") from error
    if b" 413 " not in answer:
        raise Fault(f"a body over the limit: {answer!r} instead of a 413")


async def hang_up(c: Connection) -> None:
    """In the middle of an answer."""
    await c.send(streaming(c, 200))
    if c.dice.random() < 0.7:
        await asyncio.wait_for(c.reader.read(c.dice.choice((1, 100, 2000))), 60)
    if c.dice.random() < 0.5:
        c.reset()


async def never_reads(c: Connection) -> None:
    await c.send(streaming(c, 300))
    await asyncio.sleep(CLIENT_TIMEOUT + 1)


async def garbage(c: Connection) -> None:
    hello = bytes.fromhex("16030100c8010000c40303") + c.dice.randbytes(193)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    line = c.dice.randbytes(200).replace(b"\n", b"") + b"\r\n\r\n"
    await c.send(c.dice.choice((hello, preface, line, c.dice.randbytes(5000), b"\x00" * 3000, b"\r\n" * 3000)))
    await c.closed()


async def malformed(c: Connection) -> None:
    good = b'{"prompt": "x", "max_tokens": 1}'
    heads = (
        "content-length: -1", "content-length: x", "content-length: 1e3", f"content-length: {10**30}",
        "content-length: 5\r\ncontent-length: 6", "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: gzip, chunked", "transfer-encoding: x", "content-length: 0x20", "content-length: +32",
        "x: " + "y" * 200_000, "\r\n".join(f"x{i}: y" for i in range(5000)), "x: \x00", "x y: z", ": z", "x", " x: y",
        "host: a\r\nhost: b", "connection: x, y, close", "expect: 100-continue", "expect: x", "trailer: x",
        "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13",
        "connection: upgrade\r\nupgrade: h2c",
    )  # fmt: skip
    raw = request(good, c.dice.choice(heads))
    chunks = (
        b"zz\r\nx\r\n0\r\n\r\n",
        b"-1\r\n",
        b"ffffffffffffffff\r\nx",
        b"5;" + b"x" * 70_000 + b"\r\nxxxxx\r\n0\r\n\r\n",
    )
    if c.dice.random() < 0.3:
        raw = request(c.dice.choice(chunks), "transfer-encoding: chunked")
    if c.dice.random() < 0.2:
        raw = raw.replace(b"HTTP/1.1", c.dice.choice((b"HTTP/9.9", b"HTTP/1.0", b"http/1.1", b"HTTP/1.1 x", b"")), 1)
    await c.send(raw)
    await c.closed(2 * CLIENT_TIMEOUT + GRACE)


async def pipelined(c: Connection) -> None:
    """Requests sent without waiting for the answers: each gets one."""
    await c.send(request(b'{"prompt": "x", "max_tokens": 1}') * PIPELINED)
    raw = b""
    while raw.count(b"HTTP/1.1 ") < PIPELINED:
        more = await asyncio.wait_for(c.reader.read(65536), 120)
        if not more:
            raise Fault(f"{raw.count(b'HTTP/1.1 ')} answers to {PIPELINED} requests: {raw[-200:]!r}")
        raw += more
    check_status(raw)


async def gone(c: Connection) -> None:
    """Closed as soon as it is open, or when all is sent."""
    if c.dice.random() < 0.5:
        await c.send(request(b'{"prompt": "x", "max_tokens": 50}'))
    if c.dice.random() < 0.5:
        c.reset()


async def half_closed(c: Connection) -> None:
    """A client that says it has no more to say, and reads on."""
    await c.send(request(b'{"prompt": "x", "max_tokens": 2}'))
    c.writer.write_eof()
    await c.closed(60)


Kind = Callable[[Connection], Awaitable[None]]
# Those that send no whole request: for none of them may anybody be refused.
REQUESTLESS: tuple[Kind, ...] = (
    silence, partial_line, partial_head, dripped_head, half_body, dripped_body, idle, too_large, garbage,
)  # fmt: skip
KINDS: tuple[Kind, ...] = (*REQUESTLESS, malformed, hang_up, never_reads, pipelined, gone, half_closed)


async def run(ledger: Ledger, served: Served, count: int) -> dict[str, Any]:
    """`count` connections, in waves of one kind after another."""
    size = min(WAVE, max(1, count // len(KINDS)))
    for wave, begin in enumerate(range(0, count, size)):
        kind = KINDS[wave % len(KINDS)]
        name = f"wave {wave}, {size} x {kind.__name__}"
        life = served.life
        with served.attacked_by(name):
            await asyncio.gather(*(one(ledger, served, kind, n) for n in range(begin, min(begin + size, count))))
        refused = served.refused_during(name)
        if refused and kind in REQUESTLESS and served.life == life:
            ledger.fail(None, kind.__name__, f"the witness was refused {refused} times during {name}")
    if held := await served.settled():
        ledger.fail(None, "held", f"after the last connection: {held}")
    # Connections of our own are no concern of the server's.
    await served.renew_client()
    open_ = await _open_connections(served)
    if open_ > 2:
        ledger.fail(None, "open", f"{open_} connections are still open; the witness and the watch have one each")
    return {"waves": wave + 1, "at_once": size}


async def _open_connections(served: Served) -> int:
    """Once there are two, or after 30 s."""
    process = psutil.Process(served.pid)
    for _ in range(60):
        established = sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))
        if established <= 2:
            break
        await asyncio.sleep(0.5)
    return established


async def one(ledger: Ledger, served: Served, kind: Kind, number: int) -> None:
    async with served.replacing:
        life, host, port = served.life, *served.address
    why, writer = "", None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        await kind(Connection(ledger.dice(number), reader, writer))
    except Fault as fault:
        why = str(fault)
    except ConnectionRefusedError as error:
        why = f"not accepted: {error}"
    except (ConnectionError, asyncio.IncompleteReadError):
        # The server may close on what is no request, whenever it sees that.
        pass
    except TimeoutError:
        why = "no answer"
    finally:
        if writer is not None:
            writer.close()
    if why:
        await served.look()
    if served.life != life:
        why = ""
    ledger.ended_as(number, kind.__name__, "fault" if why else "closed", why)
    if why:
        ledger.fail(number, kind.__name__, why)
