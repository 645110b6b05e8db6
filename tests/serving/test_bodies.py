"""Request bodies that are too large, slow or unfinished."""

import asyncio
import http.client
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import httpx
import openai
import pytest

from mlaforge.serving.bodies import Bodies, BodyReceive
from mlaforge.serving.wire import ApiError
from support.raw_client import BODY, HEAD, answer, connected, request
from support.scripted_engine import ByteTokenizer, ScriptedEngine
from support.serving import serving, until

# Larger than the socket buffers of both sides: a client that sends it before reading needs a server that reads on.
LARGE = b"x" * (8 << 20)


@pytest.fixture
def served(http_protocol):
    with serving(ScriptedEngine(ByteTokenizer()), max_body=1000) as served:
        yield served
        served.settles()


@pytest.mark.parametrize("fields", [(), (b"Connection: close",)], ids=["kept", "closed"])
def test_clients_that_send_before_reading_get_the_413(served, fields):
    for body in (b"x" * 1001, LARGE):
        with connected(served.port) as client:
            client.sendall(request(body, *fields))
            head, response_body = answer(client)
            assert head.startswith(b"HTTP/1.1 413") and b"body_too_large" in response_body
            if not fields:
                client.sendall(request())
                assert answer(client)[0].startswith(b"HTTP/1.1 200")


def test_a_chunked_body_that_is_too_large_gets_413(served):
    with connected(served.port) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(64):
            client.sendall(b"20000\r\n" + b"x" * 0x20000 + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert answer(client)[0].startswith(b"HTTP/1.1 413")


def test_python_clients_get_the_413(served):
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    for _ in range(2):
        client.request("POST", "/v1/completions", LARGE, {"Content-Type": "application/json"})
        response = client.getresponse()
        assert response.status == 413 and b"body_too_large" in response.read()
    client.close()
    with pytest.raises(urllib.error.HTTPError) as refused:
        http_request = urllib.request.Request(
            f"{served.url}/v1/completions", LARGE, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(http_request, timeout=20)
    assert refused.value.code == 413


def test_openai_and_httpx_clients_get_the_413(served):
    with pytest.raises(openai.APIStatusError) as refused:
        served.client().completions.create(model="scripted", prompt="x" * len(LARGE))
    assert refused.value.status_code == 413 and refused.value.code == "body_too_large"
    headers = {"content-type": "application/json"}
    for content in (LARGE, iter([LARGE[: 1 << 20]] * 8)):
        served.refused(served.post("/v1/completions", content=content, headers=headers), 413)

    async def several():
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
            answers = [client.post("/v1/completions", content=LARGE, headers=headers) for _ in range(4)]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    assert asyncio.run(several()) == [413] * 4


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("expect", ["Expect: 100-continue", "Expect:"])
def test_curl_gets_the_413(served, expect, tmp_path):
    (tmp_path / "large").write_bytes(LARGE)
    fields = ["-H", "Content-Type: application/json", "-H", expect]
    command = ["curl", "-s", *fields, "--data-binary", f"@{tmp_path}/large", f"{served.url}/v1/completions"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert b"body_too_large" in done.stdout


def test_unfinished_bodies_occupy_no_slot(http_protocol):
    """More clients than slots and queue have sent half a request."""
    with serving(ScriptedEngine(ByteTokenizer()), max_concurrent=2, max_queue=2, client_timeout=20.0) as served:
        half = request()[: -len(BODY) // 2]
        clients = [connected(served.port) for _ in range(8)]
        for client in clients:
            client.sendall(half)
        until(lambda: len(served.server.server_state.tasks) == 8)
        assert served.service.admission.admitted == 0
        assert served.post("/v1/completions", content=BODY, headers={"content-type": "application/json"}).is_success
        for client in clients:
            client.sendall(request()[len(half) :])
            assert answer(client)[0].startswith(b"HTTP/1.1 200")
            client.close()
        served.settles()


def test_waiting_requests_are_limited_by_bytes():
    engine = ScriptedEngine(ByteTokenizer())
    engine.hold.clear()
    body = BODY.ljust(1000)
    with serving(engine, max_concurrent=1, max_body=1000) as served:
        clients = [connected(served.port) for _ in range(17)]
        clients[0].sendall(request(body))
        until(lambda: served.service.admission.running == 1)
        # Sixteen bodies reach the byte limit of waiting requests.
        for client in clients[1:]:
            client.sendall(request(body))
        until(lambda: served.service.admission.admitted == 17)
        with connected(served.port) as client:
            client.sendall(request(body))
            head, response_body = answer(client)
            assert head.startswith(b"HTTP/1.1 429") and b"queue_full" in response_body and b"retry-after" in head
        # A client that disconnects makes room for another.
        clients.pop().close()
        until(lambda: served.service.admission.admitted == 16)
        clients.append(connected(served.port))
        clients[-1].sendall(request(body))
        until(lambda: served.service.admission.admitted == 17)
        engine.hold.set()
        for client in clients:
            assert answer(client)[0].startswith(b"HTTP/1.1 200")
            client.close()
        served.settles()


class Sender:
    """A request whose body is sent by the test."""

    def __init__(self, bodies, announced=100):
        self.parts = asyncio.Queue()
        scope = {"headers": [(b"content-length", str(announced).encode())]}
        self.read = asyncio.ensure_future(bodies.read(scope, BodyReceive(self.parts.get)))

    async def send(self, size, more=True):
        self.parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)


def test_the_idlest_body_is_abandoned_when_memory_is_short():
    async def run():
        bodies = Bodies(max_size=100, timeout=60, max_total=250)
        silent, slow, quick = Sender(bodies), Sender(bodies), Sender(bodies)
        await slow.send(50)
        await silent.send(90)
        await slow.send(40)
        for _ in range(6):
            await quick.send(10)
        assert not silent.read.done()
        await quick.send(20)
        with pytest.raises(ApiError) as late:
            await silent.read
        assert late.value.status == 408
        await slow.send(10, more=False)
        await quick.send(20, more=False)
        assert (len(await slow.read), len(await quick.read)) == (100, 100)
        # Abandoned and complete bodies occupy no memory.
        others = [Sender(bodies) for _ in range(2)]
        for other in others:
            await other.send(99)
        for other in others:
            await other.send(1, more=False)
            assert len(await other.read) == 100

    asyncio.run(run())


def test_a_slow_body_times_out():
    async def run():
        sender = Sender(Bodies(max_size=100, timeout=0.05, max_total=100))
        await sender.send(50)
        with pytest.raises(ApiError) as late:
            await sender.read
        assert late.value.status == 408

    asyncio.run(run())


def test_a_slow_oversized_body_is_not_read_to_its_end(http_protocol):
    with serving(ScriptedEngine(ByteTokenizer()), max_body=1000, client_timeout=0.3) as served:
        with connected(served.port) as client, pytest.raises(OSError):
            client.sendall(HEAD + b"Content-Length: 100000000\r\n\r\nx")
            assert answer(client)[0].startswith(b"HTTP/1.1 413")
            while True:
                client.sendall(b"x")
                time.sleep(0.01)
        served.settles()
