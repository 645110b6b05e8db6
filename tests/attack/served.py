"""The server under attack: a real `mlaforge serve` process, its witness, and a watch that replaces a stuck one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from attack.ledger import Ledger
from attack.witness import Wait, largest, read
from mlaforge.bench.server_process import gauges, rss_mib, start

# Seconds without an answer of /metrics, or without a step although there is work, after which a server is stuck.
STUCK = 60.0
# What has to be nothing when nobody asks.
HELD = (
    "mlaforge_requests_running", "mlaforge_requests_waiting", "mlaforge_http_requests_queued",
    "mlaforge_cache_blocks_used",
)  # fmt: skip
# Tokens of a prompt that fills a step: nearly the 512 that `mlaforge serve` takes at most.
STEP = 500
# Continuations that fill a step beside the witness and one more: `mlaforge serve` decodes 64 together.
SEQUENCES = 62
# Seconds for which it is measured what the witness waits when nobody else asks.
ALONE = 3.0
# How often it is measured what it waits beside two neighbours, before the attack and after it.
MEASURED = 4
# Tokens of the witness before which a new server is not judged.
WARM_UP = 64
SHOWN = 12


class Served:
    """`async with Served(...) as served`: the server runs, the witness streams, the watch looks. So many `clients`
    attack at the same time."""

    def __init__(self, model: Path, ledger: Ledger, folder: Path, options: list[str], clients: int) -> None:
        self._clients = clients
        self._model, self._ledger, self._folder, self._options = model, ledger, folder, options
        self._lives = 0
        self._attacks: list[tuple[float, float, str]] = []
        self._running: dict[object, tuple[float, str]] = {}
        self._measuring: list[tuple[float, float, str]] = []
        # When `settled` stopped the witness.
        self._stops: list[tuple[float, float]] = []
        self._rss: list[float] = []
        self.replacing, self._looking = asyncio.Lock(), asyncio.Lock()

    async def __aenter__(self) -> Served:
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._begin()
        await self._measure()
        self._watch = asyncio.create_task(self._watching())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        try:
            await self.look()
            await self._measure()
            await self._end()
        finally:
            self._process.kill()
            self._witness.kill()
            await self.client.aclose()

    @property
    def life(self) -> int:
        """Which server of this part it is: it grows where one had to be replaced."""
        return self._lives

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self._url)
        assert url.port is not None
        return url.host, url.port

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _begin(self) -> None:
        self._lives += 1
        self._steps = -1.0
        self.log = self._folder / f"server-{self._ledger.part}-{self._lives}.log"
        with self.log.open("wb") as file:
            self._process, self._url = await asyncio.to_thread(start, str(self._model), self._options, file)
        self.client = self._new_client()
        self.waits = self.log.with_suffix(".waits")
        self.waits.unlink(missing_ok=True)
        words = [sys.executable, "-m", "attack.witness", self._url, str(self.waits.absolute())]
        self._witness = subprocess.Popen(words, cwd=Path(__file__).parents[1])
        self._alive = self._moved = time.monotonic()
        with self._measured("warm-up"):
            while len(read(self.waits)) < WARM_UP:
                await asyncio.sleep(0.05)

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=None, limits=httpx.Limits(max_connections=None))

    async def renew_client(self) -> None:
        """What the old one still holds open, requests that were cancelled among it, is closed."""
        async with self._looking:
            old, self.client = self.client, self._new_client()
            await old.aclose()

    async def _measure(self) -> None:
        """How long the witness waits alone, and beside two well-behaved neighbours who fill a step: with continuations
        that are drawn from what top_p leaves, and with a prompt."""
        with self._measured("alone"):
            await asyncio.sleep(ALONE)
        drawn = {"max_tokens": 48, "temperature": 1.0, "top_p": 0.9, "logprobs": 5}
        for number in range(MEASURED):
            # Another one each time: what is cached costs nothing.
            prompt = [(number + 3 * at + os.getpid()) % 250 for at in range(STEP)]
            with self._measured("a step"):
                several = asyncio.ensure_future(self._ask({"prompt": "The sky", "n": SEQUENCES, **drawn}))
                await asyncio.sleep(0.5)
                await self._ask({"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 5})
                await several
                await asyncio.sleep(0.2)

    async def _ask(self, body: dict[str, Any]) -> None:
        (await self.client.post("/v1/completions", json=body)).raise_for_status()

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._measuring.append((begin, time.monotonic(), what))

    @contextmanager
    def attacked_by(self, what: str) -> Iterator[None]:
        """Notes that this is what is done to the server meanwhile."""
        begin, key = time.monotonic(), object()
        self._running[key] = begin, what
        try:
            yield
        finally:
            del self._running[key]
            self._attacks.append((begin, time.monotonic(), what))

    def _during(self, wait: Wait) -> list[str]:
        """What was under way while the witness waited; what took longest comes first, for it is the likely cause."""
        now = time.monotonic()
        every = [*self._attacks, *((begin, now, what) for begin, what in self._running.values())]
        overlapping = [(end - begin, what) for begin, end, what in every if begin <= wait.at and end >= wait.since]
        return [what for _, what in sorted(overlapping, reverse=True)]

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self.look()

    async def look(self) -> None:
        """Replaces the server where it serves nobody."""
        async with self._looking:
            if why := await self._trouble():
                async with self.replacing:
                    await self._replace(why)

    async def _trouble(self) -> str:
        """Why the server is of no use any more; "" while it is."""
        now = time.monotonic()
        if self._process.poll() is not None:
            return f"the server ended with {self._process.returncode}"
        try:
            metrics = await asyncio.wait_for(gauges(self.client), 10)
        except (TimeoutError, httpx.HTTPError):
            silent = now - self._alive > STUCK
            return f"the server answers nobody for {STUCK:g} s" if silent else ""
        self._alive = now
        self._rss.append(rss_mib(self._process.pid))
        steps = metrics["mlaforge_engine_steps_total"]
        if steps != self._steps or not metrics["mlaforge_requests_running"]:
            self._moved, self._steps = now, steps
        if not metrics["mlaforge_engine_up"]:
            return "the engine has failed"
        if now - self._moved > STUCK:
            return f"no step ends for {STUCK:g} s although there is work; /health: {await self._health()}"
        return ""

    async def _health(self) -> str:
        try:
            return str((await self.client.get("/health", timeout=5)).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    async def _replace(self, why: str) -> None:
        """Another server in place of this one; what was under way shortly before is told."""
        name = f"server {self._lives}"
        during = ", ".join(self._during(Wait("", time.monotonic(), seconds=3))[:SHOWN])
        self._ledger.fail(None, name, f"{why}; under way: {during}", {"server.log": self.log})
        self._witness.terminate()
        await asyncio.to_thread(self._witness.wait)
        if self._process.poll() is None:
            for _ in range(2):
                self._process.send_signal(signal.SIGTERM)
                await asyncio.sleep(1)
            try:
                await asyncio.to_thread(self._process.wait, 15)
            except subprocess.TimeoutExpired:
                self._ledger.fail(None, name, "two SIGTERM did not end it within 15 s")
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._judge_log()
        await self.client.aclose()
        await self._begin()

    async def settled(self, seconds: float = 60) -> dict[str, float]:
        """What the metrics say is still held when nobody asks; waits until it is nothing, so long at most."""
        stopped = time.monotonic()
        self._witness.send_signal(signal.SIGSTOP)
        held: dict[str, float] = {}
        try:
            # What the witness has asked for is finished, unread.
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                metrics = await gauges(self.client)
                held = {name: metrics[name] for name in HELD if metrics[name]}
                if not held:
                    break
                await asyncio.sleep(0.2)
        finally:
            self._witness.send_signal(signal.SIGCONT)
            self._stops.append((stopped, time.monotonic()))
        return held

    async def _end(self) -> None:
        """Nothing held, no traceback in the log, and exit code 0 after SIGTERM."""
        self._witness.terminate()
        await asyncio.to_thread(self._witness.wait)
        if held := await self.settled():
            self._ledger.fail(None, "held", f"when nobody asks any more: {held}")
        self._process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self._process.wait, 60)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            self._ledger.fail(None, "end", f"exit code {code} after SIGTERM; None: it did not end within 60 s")
        self._judge_log()

    def _judge_log(self) -> None:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        if count := text.count("Traceback (most recent call last)"):
            last = next((line for line in text.split("Traceback")[1].splitlines()[1:] if line[:1].strip()), "")
            self._ledger.fail(None, "log", f"{count} tracebacks in the server's log: {last}", {"server.log": self.log})

    def facts(self) -> dict[str, Any]:
        """What the witness waited, in seconds, beside the largest step that well-behaved neighbours brought."""
        waits = [w for path in sorted(self._folder.glob(f"server-{self._ledger.part}-*.waits")) for w in read(path)]
        quiet = [(begin, end) for begin, end, _ in self._measuring]
        steps, alone = (
            [w for w in waits if any(b <= w.at and e >= w.since for b, e, what in self._measuring if what == kind)]
            for kind in ("a step", "alone")
        )
        attacked = [
            w for w in waits
            if not any(b <= w.since and w.at <= e for b, e in quiet)
            # The witness was stopped, not delayed by the server.
            and not any(b <= w.at and w.since <= e for b, e in self._stops)
        ]  # fmt: skip
        step, gap, first = largest(steps, "gap"), largest(attacked, "gap"), largest(attacked, "first")
        if gap.seconds > step.seconds:
            self._late("gap", f"{gap.seconds:.3f} s between two tokens, the largest step takes {step.seconds:.3f}", gap)
        # It may stand behind all of them.
        if first.seconds > self._clients * step.seconds:
            self._late("first", f"{first.seconds:.3f} s to a first token, {self._clients} steps take less", first)
        lost = [w for w in attacked if w.kind == "lost"]
        if lost:
            self._late("lost", f"{len(lost)} answers broke off", lost[-1])
        late = sorted((w for w in attacked if w.kind == "gap"), key=lambda w: -w.seconds)[:5]
        return {
            "witness": {
                "answers": sum(w.kind == "first" for w in waits), "lost": len(lost),
                "refused": sum(w.kind == "refused" for w in attacked), "largest_gap": round(gap.seconds, 4),
                "largest_gap_alone": round(largest(alone, "gap").seconds, 4), "largest_step": round(step.seconds, 4),
                "largest_first": round(first.seconds, 4),
                "largest_gaps": [{"seconds": round(w.seconds, 4), "during": self._during(w)[:SHOWN]} for w in late],
                "largest_first_during": self._during(first)[:SHOWN],
            },
            "servers": self._lives, "rss_mib": [round(self._rss[0]), round(max(self._rss))] if self._rss else [],
        }  # fmt: skip

    def refused_during(self, what: str) -> int:
        """How often the witness was refused while something was under way whose name begins so."""
        refused = [w for w in read(self.waits) if w.kind == "refused"]
        return sum(any(name.startswith(what) for name in self._during(Wait("", w.at, 0))) for w in refused)

    def _late(self, what: str, why: str, wait: Wait) -> None:
        during = ", ".join(self._during(wait)[:SHOWN]) or "nothing"
        self._ledger.fail(None, f"witness {what}", f"the witness waited {why}; under way: {during}")
