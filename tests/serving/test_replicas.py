"""Two servers behind nginx, with the configuration of examples/: one is killed, loads, drains."""

import asyncio
import getpass
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from support.served_process import started, wait_until_ready
from support.serving import free_port, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light"),
]
# Seconds after which a request has hung.
HANGS = 600
STREAMS, ANSWERS = 200, 20


def write_configuration(folder, ports):
    """Write the example's configuration with other ports, inside of what a distribution's nginx.conf has."""
    example = EXAMPLE.read_text(encoding="utf-8")
    for documented, port in zip((8000, 8001, 8002), ports, strict=True):
        assert example.count(f":{documented}") == 1
        example = example.replace(f":{documented}", f":{port}")
    built = subprocess.run([NGINX, "-V"], capture_output=True, text=True).stderr
    modules = ["client_body", "proxy", *(m for m in ("fastcgi", "uwsgi", "scgi") if f"without-http_{m}_" not in built)]
    folders = "\n".join(f"{name}_temp_path {folder}/{name};" for name in modules)
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; {user}\nevents {{ worker_connections 2048; }}\n"
        f"http {{\naccess_log off;\n{folders}\n{example}}}\n"
    )
    return path


class Replicas:
    """Two servers (`processes`) and nginx at `url`."""

    def __init__(self, directory, folder):
        self.directory, self.folder = directory, folder
        self.ports = [free_port() for _ in range(3)]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.logs = [folder / f"replica-{n}.log" for n in range(2)]
        self.processes = [self.start(n) for n in range(2)]
        command = [NGINX, "-e", folder / "start.log", "-c", write_configuration(folder, self.ports)]
        self.nginx = subprocess.Popen([*map(str, command)])

    def start(self, n):
        # A busy machine needs more than the 30 seconds that draining may take by default.
        return started(self.directory, self.ports[1 + n], self.logs[n], "--drain-timeout", str(HANGS))

    def wait(self, n):
        wait_until_ready(self.processes[n], self.ports[1 + n], self.logs[n])

    def requests_of(self, n):
        """Requests that a server has begun to answer with 200, by its own count."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[1 + n]}/metrics").text
        return sum(float(value) for value in re.findall(r'requests_total\{.*status="200".*\} (\S+)', text))

    def close(self):
        # Killed, nginx would leave its worker process behind.
        self.nginx.terminate()
        for process in self.processes:
            process.kill()
        for process in (self.nginx, *self.processes):
            process.wait(30)


@pytest.fixture(scope="module")
def replicas(tiny_models, tmp_path_factory):
    replicas = Replicas(tiny_models["llama"], tmp_path_factory.mktemp("replicas"))
    try:
        for n in range(2):
            replicas.wait(n)
        until(lambda: _answers(replicas.url))
        yield replicas
    finally:
        replicas.close()


def _answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def body(number, tokens, **fields):
    return {"prompt": f"Request {number}: ", "max_tokens": tokens, "ignore_eos": True, "seed": number, **fields}


async def streamed(client, number, tokens, events):
    """Stream an answer and return how it ended: "complete", "broken" after its head, a status, or its last event.
    events[number]: its events so far."""
    head = False
    try:
        async with client.stream("POST", "/v1/completions", json=body(number, tokens, stream=True)) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            head, last = True, ""
            async for line in response.aiter_lines():
                events[number] += line.startswith("data: ")
                last = line or last
            return "complete" if last == "data: [DONE]" else last
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return "broken" if head else "without an answer"


async def answered(client, number, tokens=16):
    """Return the status of a whole answer, checked to have all tokens."""
    response = await client.post("/v1/completions", json=body(number, tokens))
    assert response.status_code != 200 or response.json()["usage"]["completion_tokens"] == tokens
    return response.status_code


def client_of(replicas):
    return httpx.AsyncClient(base_url=replicas.url, timeout=HANGS, limits=httpx.Limits(max_connections=None))


async def begun(events, count, least):
    """Wait until `count` streams have so many events."""
    end = time.monotonic() + HANGS
    while sum(number >= least for number in events) < count:
        assert time.monotonic() < end, events
        await asyncio.sleep(0.02)


def test_a_killed_replica_breaks_only_streams_that_it_had_begun(replicas):
    """The other server answers everything else, also requests whose server died before the first byte; so it does while
    the replica loads again, and then both do."""

    async def kill():
        events = [0] * STREAMS
        async with client_of(replicas) as client:
            streams = [asyncio.create_task(streamed(client, n, 300, events)) for n in range(STREAMS)]
            await begun(events, STREAMS // 4, 10)
            # No byte of these is sent before their end.
            whole = [asyncio.create_task(answered(client, n, 200)) for n in range(ANSWERS)]
            await asyncio.sleep(0.3)
            replicas.processes[1].send_signal(signal.SIGKILL)
            later = [asyncio.create_task(answered(client, n)) for n in range(ANSWERS)]
            return [await asyncio.wait_for(asyncio.gather(*part), HANGS) for part in (streams, whole, later)]

    ends, whole, later = asyncio.run(kill())
    counts = {end: ends.count(end) for end in set(ends)}
    assert counts.keys() == {"complete", "broken"} and counts["broken"] <= 0.6 * STREAMS, counts
    assert {*whole, *later} == {200}, (whole, later)

    async def reload():
        statuses = []
        async with client_of(replicas) as client:
            while not await asyncio.to_thread(_answers, f"http://127.0.0.1:{replicas.ports[2]}"):
                assert replicas.processes[1].poll() is None, replicas.logs[1].read_text()
                statuses.append(await answered(client, len(statuses), 4))
                await asyncio.sleep(0.05)
            end = time.monotonic() + 60
            while not replicas.requests_of(1):
                assert time.monotonic() < end
                statuses += await asyncio.gather(*(answered(client, n, 4) for n in range(4)))
                await asyncio.sleep(0.2)
        return statuses

    replicas.processes[1] = replicas.start(1)
    statuses = asyncio.run(reload())
    assert len(statuses) > 10 and set(statuses) == {200}, statuses


def test_a_draining_replica_loses_nothing(replicas):
    """SIGTERM: its streams end complete, new requests go to the other server, and the process exits with 0."""

    async def drain():
        events, process = [0] * 40, replicas.processes[0]
        async with client_of(replicas) as client:
            streams = [asyncio.create_task(streamed(client, n, 400, events)) for n in range(len(events))]
            await begun(events, len(events), 2)
            process.terminate()
            statuses = []
            while process.poll() is None:
                statuses += await asyncio.gather(*(answered(client, n, 4) for n in range(4)))
            statuses += await asyncio.gather(*(answered(client, n, 4) for n in range(4)))
            return await asyncio.wait_for(asyncio.gather(*streams), HANGS), statuses

    running = replicas.requests_of(0)
    ends, statuses = asyncio.run(drain())
    assert running and set(ends) == {"complete"} and set(statuses) == {200}, (ends, statuses)
    assert replicas.processes[0].wait(60) == 0
    log = replicas.logs[0].read_text()
    drained = int(re.search(r"draining: (\d+) requests", log)[1])
    assert 0 < drained < 40 and "Traceback" not in log, log
