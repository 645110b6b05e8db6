"""Timeouts of slow and silent connections on both of uvicorn's HTTP protocols, and TCP options."""

import socket
import time

import pytest

from support.raw_client import HEAD, answer, connected, cut, request
from support.scripted_engine import ByteTokenizer, ScriptedEngine
from support.serving import serving, until

# Its answer is larger than the socket buffers of both sides.
LARGE = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "logprobs": 20}'


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", HEAD, HEAD + b"Content-Le"], ids=["", "line", "head", "half"])
def test_an_incomplete_request_head_times_out(http_protocol, sent):
    with serving(ScriptedEngine(ByteTokenizer()), client_timeout=0.3) as served:
        for before in (b"", request()):
            with connected(served.port) as client:
                client.sendall(before)
                if before:
                    assert answer(client)[0].startswith(b"HTTP/1.1 200")
                client.sendall(sent)
                assert cut(client)
        served.settles()


def test_a_head_sent_byte_by_byte_times_out(http_protocol):
    with serving(ScriptedEngine(ByteTokenizer()), client_timeout=0.5) as served, connected(served.port) as client:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 20:
                client.sendall(b"x")
                time.sleep(0.05)


def test_long_answers_and_pauses_do_not_time_out(http_protocol):
    """Long answers, pipelined requests and pauses between requests do not time out."""
    engine = ScriptedEngine(ByteTokenizer(), delay=0.02)
    with serving(engine, client_timeout=0.8) as served, connected(served.port) as client:
        client.sendall(request(b'{"prompt": "x", "max_tokens": 80, "ignore_eos": true}'))
        assert b'"completion_tokens":80' in answer(client)[1]
        for _ in range(3):
            time.sleep(0.2)
            client.sendall(request())
            assert b'"completion_tokens":3' in answer(client)[1]
        client.sendall(request() * 2)
        for _ in range(2):
            assert b'"completion_tokens":3' in answer(client)[1]


def test_an_answer_that_is_never_read_is_dropped(http_protocol, tokenizer):
    """The answer is complete, the client does not read: closing would wait for ever."""
    with serving(ScriptedEngine(tokenizer), client_timeout=0.5) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", served.port))
        client.sendall(request(LARGE, b"Connection: close"))
        assert client.recv(12) == b"HTTP/1.1 200"
        until(lambda: not served.server.server_state.connections)


@pytest.mark.parametrize("fields", [(), (b"Connection: close",)], ids=["kept", "closed"])
def test_a_slow_reader_gets_the_whole_answer(http_protocol, fields, tokenizer):
    """Reading takes several times the timeout after the end of the answer."""
    with serving(ScriptedEngine(tokenizer), client_timeout=0.5) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", served.port))
        client.sendall(request(LARGE, *fields))
        received, began = b"", time.monotonic()
        while not received.endswith(b"}}}"):
            part = client.recv(1 << 16)
            assert part, "it was cut"
            received += part
            time.sleep(0.02)
        assert time.monotonic() - began > 1 and b'"completion_tokens":400' in received


def test_short_answers_do_not_wait_for_acknowledgements():
    """Without TCP_NODELAY each request on a persistent connection takes 40 ms more."""
    with serving(ScriptedEngine(ByteTokenizer())) as served, connected(served.port) as client:
        client.sendall(request())
        answer(client)
        (connection,) = served.server.server_state.connections
        server_socket = connection.transport.get_extra_info("socket")
        assert server_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
