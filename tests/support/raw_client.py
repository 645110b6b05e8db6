"""A raw socket client, for tests that control every byte."""

from __future__ import annotations

import socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 3}'


def request(body: bytes = BODY, *fields: bytes) -> bytes:
    """Return a complete request with additional header fields."""
    length = b"Content-Length: %d" % len(body)
    return HEAD + b"\r\n".join([*fields, length]) + b"\r\n\r\n" + body


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(20)
    return client


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Read one complete response; return its head and body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(client)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < int(length[15:]):
        body += _receive(client)
    return head, body


def _receive(client: socket.socket) -> bytes:
    part = client.recv(1 << 16)
    assert part, "the connection was closed before the end of the answer"
    return part


def cut(client: socket.socket) -> bool:
    """Wait, and return whether the server closes the connection without a response."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
