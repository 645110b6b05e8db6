"""A client that sends what a test says, byte by byte if need be, and reads when it likes."""

from __future__ import annotations

import socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 3}'


def request(body: bytes = BODY, *fields: bytes) -> bytes:
    """A whole request with these further header fields."""
    length = b"Content-Length: %d" % len(body)
    return HEAD + b"\r\n".join([*fields, length]) + b"\r\n\r\n" + body


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(20)
    return client


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """The head and the body of one answer, which must come whole."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(client)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < int(length[15:]):
        body += _some(client)
    return head, body


def _some(client: socket.socket) -> bytes:
    some = client.recv(1 << 16)
    assert some, "the connection was closed before the answer's end"
    return some


def cut(client: socket.socket) -> bool:
    """Whether the server closes the connection without a word; waited for."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
