"""API keys, limits, disconnected, slow and silent clients, shutdown, engine failure."""

import asyncio
import contextlib
import itertools
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from mlaforge.runtime import UserError
from mlaforge.serving import app, server
from mlaforge.serving.config import ServeConfig
from support import killed
from support.scripted_engine import ByteTokenizer, ScriptedEngine, serve
from support.serving import serving, until

LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


def test_api_key(tokenizer):
    with serving(ScriptedEngine(tokenizer), api_key="sécret") as served:
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            served.refused(served.http.get(path), 401)
        for header in ("", "Bearer", "Bearer wrong", "sécret", "Basic sécret", "Bearer s\xff", "Bearer sécret2"):
            answer = served.http.get("/v1/models", headers={b"authorization": header.encode()})
            served.refused(answer, 401)
        served.refused(served.post("/v1/completions", content=b"not even json"), 401)
        assert served.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="wrong").models.list()
        headers = {b"authorization": "Bearer sécret".encode()}
        assert served.http.get("/v1/models", headers=headers).status_code == 200


def test_body_size_is_limited_with_and_without_content_length(tokenizer):
    with serving(ScriptedEngine(tokenizer), max_body=1000) as served:
        json_type = {"content-type": "application/json"}
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            served.refused(served.post("/v1/completions", content=content, headers=json_type), 413)
        fits = b'{"prompt": "x", "max_tokens": 1}'
        for content in (fits.ljust(1000), iter([fits, b" " * 600])):
            assert served.post("/v1/completions", content=content, headers=json_type).status_code == 200


def test_a_full_queue_refuses_with_429(tokenizer):
    engine = ScriptedEngine(tokenizer)
    engine.hold.clear()
    with serving(engine, max_concurrent=2, max_queue=1) as served, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG, timeout=60) for _ in range(3)]
        until(lambda: served.service.admission.admitted == 3)
        answer = served.post("/v1/completions", json=LONG)
        served.refused(answer, 429)
        assert int(answer.headers["retry-after"]) > 0
        until(lambda: served.service.admission.running == 2)
        assert "mlaforge_http_requests_queued 1.0" in served.http.get("/metrics").text
        engine.hold.set()
        assert [done.result().status_code for done in waiting] == [200, 200, 200]
        assert served.post("/v1/completions", json=LONG).status_code == 200
        served.settles()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_blocks(tokenizer, stream):
    engine = ScriptedEngine(tokenizer, delay=0.01)
    with serving(engine, max_concurrent=1) as served:
        body = LONG | {"stream": stream, "n": 3}
        with _raw(served, httpx.Request("POST", "http://x", json=body).content):
            until(lambda: engine.counts["steps"] > 3)
        served.settles()
        assert engine.counts["aborted_requests"] == 1 and engine.counts["generated_tokens"] < 1500
        # A client that disconnects while it waits for a slot.
        engine.hold.clear()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60)
            until(lambda: served.service.admission.running == 1)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.2)
            until(lambda: served.service.admission.admitted == 1)
            engine.hold.set()
            assert first.result().status_code == 200
        served.settles()
        assert 'mlaforge_requests_total{endpoint="completions",status="499"} 2.0' in served.http.get("/metrics").text


def test_closing_a_stream_aborts_its_request(tokenizer):
    engine = ScriptedEngine(tokenizer, delay=0.005)
    with serving(engine) as served:
        with served.client().completions.create(model="scripted", stream=True, **_no_eos()) as stream:
            assert len(list(itertools.islice(stream, 3))) == 3
        served.settles()
        assert engine.counts["aborted_requests"] == 1


def _no_eos():
    return {"prompt": "x", "max_tokens": 500, "extra_body": {"ignore_eos": True}}


def _raw(served, body, buffer=None):
    """Open a connection that has sent a request and does not read."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", served.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    return connection


def test_a_slow_reader_delays_no_other_client_and_gets_everything(tokenizer):
    engine = ScriptedEngine(tokenizer)
    with serving(engine) as served:
        # Logprobs make chunks large enough to fill the sockets' buffers.
        payload = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "n": 8, "stream": True, "logprobs": 20}
        body = httpx.Request("POST", "http://x", json=payload).content
        with _raw(served, body, buffer=4096) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            # The engine does not wait for the reader, and others are served.
            until(lambda: engine.counts["finished_requests"] == 1, 60)
            assert served.service.admission.admitted == 1
            assert served.post("/v1/completions", json={"prompt": "y", "max_tokens": 3}).status_code == 200
            received = b""
            while part := connection.recv(1 << 20):
                received += part
        assert received.count(b"data: [DONE]") == 1
        assert received.count(b'"finish_reason":"length"') == 8
        served.settles()


def test_a_client_that_never_reads_loses_its_slot(tokenizer):
    with serving(ScriptedEngine(tokenizer), client_timeout=0.3) as served:
        payload = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "n": 8, "stream": True, "logprobs": 20}
        with _raw(served, httpx.Request("POST", "http://x", json=payload).content, buffer=4096):
            until(lambda: served.engine.counts["steps"] > 0)
            served.settles()


def test_an_unfinished_body_times_out_with_408(tokenizer):
    with serving(ScriptedEngine(tokenizer), client_timeout=0.2) as served, socket.socket() as connection:
        connection.connect(("127.0.0.1", served.port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        served.settles()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_failure_reaches_every_client(tokenizer):
    engine = ScriptedEngine(tokenizer)
    engine.fail_after = 20
    engine.hold.clear()
    with serving(engine) as served, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG, timeout=60)
        streamed = pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG | {"stream": True}, timeout=60)
        until(lambda: served.service.admission.running == 2)
        engine.hold.set()
        message = served.refused(whole.result(), 503)
        assert "RuntimeError" in message and "scripted failure" not in message
        *_, last = streamed.result().text.strip().split("\n\n")
        assert '"error"' in last and "503" not in last
        served.refused(served.http.get("/health"), 503)
        answer = served.post("/v1/completions", json=LONG)
        served.refused(answer, 503)
        assert "retry-after" in answer.headers
        assert "mlaforge_engine_up 0.0" in served.http.get("/metrics").text
        assert served.service.admission.admitted == 0


def test_draining_finishes_running_requests_and_refuses_new_ones(tokenizer):
    engine = ScriptedEngine(tokenizer)
    engine.hold.clear()
    with serving(engine, max_concurrent=1) as served, ThreadPoolExecutor(2) as pool:
        # One runs, one waits for a slot: both were admitted.
        running = [pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG, timeout=60) for _ in range(2)]
        until(lambda: served.service.admission.admitted == 2)
        loop = served.service.engine._loop
        drained = asyncio.run_coroutine_threadsafe(served.service.drain(), loop)
        until(lambda: served.service.admission.draining)
        served.refused(served.post("/v1/completions", json=LONG), 503)
        served.refused(served.http.get("/health"), 503)
        engine.hold.set()
        assert [done.result().json()["usage"]["completion_tokens"] for done in running] == [500, 500]
        drained.result(30)


@contextlib.contextmanager
def _served_process(log, delay, drain):
    """Serve in another process on a free port; yield (process, url) once it answers."""
    process = killed.started(serve, delay, drain, log)

    def answers():
        assert process.exitcode is None, log.read_text()
        address = re.search(r"on (http://[\d.]+:\d+)/v1\n", log.read_text() if log.exists() else "")
        with contextlib.suppress(httpx.TransportError):
            return address and httpx.get(f"{address[1]}/health").status_code == 200 and address[1]

    try:
        yield process, until(answers, 120)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("delay", "drain", "finished"), [(0.005, 60, True), (0.02, 0.5, False)])
def test_sigterm_drains_and_exits_with_0(delay, drain, finished, tmp_path):
    with _served_process(tmp_path / "log", delay, drain) as (process, url):
        lines = []
        started = threading.Event()

        def read():
            body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(60)
        process.terminate()
        # It still listens and refuses new requests.
        statuses = []

        def refuses():
            try:
                statuses.append(httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 1}).status_code)
            except httpx.TransportError:
                return True
            return statuses[-1] == 503

        until(refuses)
        reader.join(60)
        process.join(60)
        assert process.exitcode == 0
    events = [line for line in lines if line]
    assert (events[-1] == "data: [DONE]") == finished
    assert ('"error"' in events[-1]) == (not finished)
    stderr = (tmp_path / "log").read_text()
    assert "Traceback" not in stderr and "draining" in stderr
    assert statuses[-1:] in ([503], [])


def test_a_second_sigterm_ends_it_whatever_it_is_doing(tmp_path):
    """Here a step that goes on for ten minutes, which the shutdown waits for."""
    with _served_process(tmp_path / "log", 600, 0.1) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
            # The engine has taken it.
            assert answer.status_code == 200
            process.terminate()

            def listens():
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{url}/health").status_code > 0

            until(lambda: not listens())
        process.terminate()
        process.join(8)
        assert process.exitcode == -signal.SIGTERM


def test_health_fails_if_no_step_finishes(tokenizer, monkeypatch):
    monkeypatch.setattr(app, "STUCK_SECONDS", 0.3)
    engine = ScriptedEngine(tokenizer)
    with serving(engine) as served, ThreadPoolExecutor() as pool:
        health = lambda: served.http.get("/health")  # noqa: E731
        assert health().status_code == 200
        engine.hold.clear()
        pending = pool.submit(served.post, "/v1/completions", json=LONG | {"max_tokens": 5})
        until(lambda: health().status_code == 503)
        assert re.search(r"no engine step has finished for \d+ s", served.refused(health(), 503))
        engine.hold.set()
        assert pending.result().status_code == 200
        # A long idle time is no failure.
        time.sleep(0.5)
        assert health().status_code == 200


def test_64_streaming_clients(tokenizer):
    """A short version of benchmarks/load.py: mixed lengths, some clients disconnect early, no other one loses
    tokens."""
    engine = ScriptedEngine(tokenizer)
    with serving(engine, max_concurrent=24) as served:

        async def one(client, i):
            prompt, count = f"{i} " * (i % 9 + 1), 5 + 7 * i % 90
            stream = await client.completions.create(
                model="scripted", prompt=prompt, max_tokens=count, stream=True, extra_body={"ignore_eos": True}
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text
                if i % 7 == 3:
                    await stream.close()
                    return
            ids = tokenizer(prompt)["input_ids"]
            expected = tokenizer.decode([engine.expected(ids, 0, at) for at in range(count)])
            # The end may lack a part of a character, which the tokenizer writes as U+FFFD.
            assert text == expected

        async def everybody():
            options = {"base_url": f"{served.url}/v1", "api_key": "x", "max_retries": 0, "timeout": 60}
            async with openai.AsyncOpenAI(**options) as client:
                await asyncio.gather(*(one(client, i) for i in range(64)))

        asyncio.run(everybody())
        served.settles()
        assert engine.counts["finished_requests"] + engine.counts["aborted_requests"] == 64


@pytest.mark.parametrize(("options", "word"), [
    ({"port": 70000}, "port"), ({"max_concurrent": 0}, "max_concurrent"), ({"max_queue": -1}, "max_queue"),
    ({"client_timeout": 0.0}, "client_timeout"), ({"drain_timeout": -1.0}, "drain_timeout"), ({"max_n": 0}, "max_n"),
    ({"client_timeout": float("nan")}, "client_timeout = nan must be above 0 and at most 86400"),
    ({"client_timeout": float("inf")}, "client_timeout = inf must be above 0 and at most 86400"),
])  # fmt: skip
def test_rejects_illegal_options(options, word):
    with pytest.raises(UserError, match=word):
        ServeConfig(**options)


@pytest.mark.parametrize(("option", "words"), [
    (("--api-key", ""), "--api-key is empty, as an unset variable is; give a key, or omit it to serve without a key"),
    (("--api-key", " "), "--api-key is empty"), (("--client-timeout", "nan"), "client_timeout = nan must be above 0"),
    (("--allowed-origins", '["*"]'), """allowed_origins = '["*"]' must be origins separated by commas, or *"""),
    (("--max-n", "100"), "max_n = 100 must be at most max_num_seqs = 64"),
    (("--max-n", "5", "--max-num-seqs", "4"), "max_n = 5 must be at most max_num_seqs = 4"),
])  # fmt: skip
def test_illegal_options_are_refused_before_loading(option, words, refused, tmp_path):
    refused(words, "serve", tmp_path / "no such model", *option)


def test_api_key_from_the_environment(monkeypatch, refused, tmp_path):
    monkeypatch.setenv("MLAFORGE_API_KEY", "k")
    assert server.validated(ServeConfig()).api_key == "k" and server.validated(ServeConfig(api_key="o")).api_key == "o"
    monkeypatch.delenv("MLAFORGE_API_KEY")
    assert server.validated(ServeConfig()).api_key is None
    # An empty variable is no wish to serve without a key.
    monkeypatch.setenv("MLAFORGE_API_KEY", "")
    refused("MLAFORGE_API_KEY is empty; set it to a key, or unset it", "serve", tmp_path / "no such model")


def test_rejects_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on .*:{port}"):
            server.run(ScriptedEngine(ByteTokenizer()), ServeConfig(port=port))
