"""Load test of the server: 64 streaming clients at once, mixed lengths, random disconnects, for minutes.

    python -m benchmarks.load MODEL [--minutes 10] [--clients 64] [-- options of `mlaforge serve`]
    python -m benchmarks.load --url http://127.0.0.1:8000 [--key KEY] ...

With MODEL it starts `mlaforge serve` itself on a free port, watches its memory, and ends it with SIGTERM. Each client
sends one request after another: prompts of up to 512 words (a third share a prefix), answers of 4 to 256 tokens.
One request in eight is cancelled by its client at a random time. `lost` counts requests that were neither cancelled nor
completed with all tokens and [DONE]; it must be 0, as must `cache_blocks_used` at the end. RSS is sampled every 5 s;
its slope over the second half, in MiB per minute, distinguishes a leak from a cache that fills. Exit code 1, and no
table, if a request was lost, a block is in use at the end, or the server's exit code is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx

from benchmarks.script import parser, run
from mlaforge.bench.results import Results
from mlaforge.bench.server_process import gauges, rss_mib, start

TEXT = "the of and a to in is was he for it with as his on be at by had not are but from or have an they"
WORDS = TEXT.split()
SHARED = [WORDS[i * 7 % len(WORDS)] for i in range(1000)]


class Lost(Exception):
    """An answer is missing or incomplete."""


@contextlib.asynccontextmanager
async def completion(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[AsyncIterator[tuple[float, dict[str, Any]]]]:
    """Events of a streamed completion with their arrival times (time.perf_counter()), up to [DONE]. Raise Lost if the
    stream ends otherwise."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise Lost(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Lost(line)
            yield time.perf_counter(), event
    raise Lost("no [DONE]")


class Tally:
    """Counts and times in seconds of all clients."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = 0

    def lost(self, reason: str) -> None:
        self.ended["lost"] += 1
        self.problems.append(reason[:300])


async def one_request(client: httpx.AsyncClient, dice: random.Random, words: int, tally: Tally) -> None:
    prompt = dice.choices(WORDS, k=int(words ** dice.uniform(0.3, 1)))
    if dice.random() < 1 / 3:
        prompt = SHARED[: words // 2] + prompt[: words // 2]
    count = int(2 ** dice.uniform(2, 8))
    # Number of chunks after which the client cancels; None: never.
    leave = dice.randrange(count) if dice.random() < 1 / 8 else None
    body = {"prompt": " ".join(prompt), "max_tokens": count, "ignore_eos": True, "temperature": 0.8}
    body |= {"seed": dice.randrange(2**31), "stream_options": {"include_usage": True}}
    chunks, usage, last = 0, None, time.perf_counter()
    async with completion(client, body) as events:
        if leave == 0:
            tally.ended["given up"] += 1
            return
        async for at, event in events:
            usage = event.get("usage") or usage
            if event.get("choices"):
                (tally.between if chunks else tally.first).append(at - last)
                chunks, last = chunks + 1, at
            if leave is not None and chunks >= leave:
                tally.ended["given up"] += 1
                return
    if not usage or usage["completion_tokens"] != count:
        raise Lost(f"{usage} instead of {count} tokens")
    tally.tokens += count
    tally.ended["finished"] += 1


async def one_client(client: httpx.AsyncClient, seed: int, words: int, until: float, tally: Tally) -> None:
    dice = random.Random(seed)
    while time.monotonic() < until:
        try:
            await one_request(client, dice, words, tally)
        except Lost as error:
            tally.lost(str(error))
        except httpx.HTTPError as error:
            tally.lost(repr(error))
            await asyncio.sleep(1)


async def watch(pid: int, samples: list[tuple[float, float]]) -> None:
    start = time.monotonic()
    while True:
        samples.append((time.monotonic() - start, rss_mib(pid)))
        await asyncio.sleep(5)


async def settle(client: httpx.AsyncClient) -> dict[str, float]:
    """Metrics of the server once it is idle, or after 30 s."""
    for _ in range(60):
        metrics = await gauges(client)
        if not metrics["mlaforge_requests_running"] and not metrics["mlaforge_cache_blocks_used"]:
            break
        await asyncio.sleep(0.5)
    return metrics


async def load(options: argparse.Namespace, pid: int | None) -> dict[str, Any]:
    """Run the clients and return their and the server's measurements."""
    tally, samples = Tally(), []
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    limits = httpx.Limits(max_connections=options.clients + 4)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=300, limits=limits) as client:
        watcher = asyncio.create_task(watch(pid, samples)) if pid else None
        start = time.monotonic()
        until = start + 60 * options.minutes
        await asyncio.gather(
            *(one_client(client, seed, options.words, until, tally) for seed in range(options.clients))
        )
        seconds = time.monotonic() - start
        if watcher:
            watcher.cancel()
        metrics = await settle(client)
    return {
        "clients": options.clients, "seconds": round(seconds, 1), "requests": sum(tally.ended.values()),
        "finished": tally.ended["finished"], "given_up": tally.ended["given up"], "lost": tally.ended["lost"],
        "problems": tally.problems[:10], "tokens_per_second": round(tally.tokens / seconds, 1),
        "ttft_seconds": percentiles(tally.first), "itl_seconds": percentiles(tally.between),
        "cache_blocks_used": metrics["mlaforge_cache_blocks_used"],
        "preemptions": metrics["mlaforge_preemptions_total"],
        "prefix_hit_tokens": metrics["mlaforge_prefix_cache_hit_tokens_total"], **memory(samples),
    }  # fmt: skip


def percentiles(times: list[float]) -> dict[str, float]:
    if len(times) < 2:
        return {}
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {f"p{at}": round(cuts[at - 1], 4) for at in (50, 90, 99)}


def memory(samples: list[tuple[float, float]]) -> dict[str, Any]:
    """RSS in MiB over time, and its slope over the second half in MiB per minute."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return {}
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope * 60
    shown = samples[:: max(len(samples) // 20, 1)]
    return {"rss_mib": [[round(at), round(mib, 1)] for at, mib in shown], "rss_slope_mib_per_minute": round(slope, 3)}


def measure(options: argparse.Namespace) -> Results:
    if bool(options.model) == bool(options.url):
        raise SystemExit("give MODEL or --url")
    process = None
    if options.model:
        process, options.url = start(options.model, options.rest)
    try:
        result = asyncio.run(load(options, process.pid if process else None))
        if process:
            process.send_signal(signal.SIGTERM)
            result["exit_code"] = process.wait(120)
    finally:
        if process:
            process.kill()
    results = Results(options.raw, [])
    results.add(result)
    if result["lost"] or result["cache_blocks_used"] or result.get("exit_code"):
        raise SystemExit(f"failed: see {options.raw}")
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The row with the first and the last sample of memory."""
    return [
        {**row, **({"rss_mib": [row["rss_mib"][0], row["rss_mib"][-1]]} if row.get("rss_mib") else {})}
        for row in body["rows"]
    ]


def show(rows: list[dict[str, Any]]) -> str:
    return "\n".join(f"{name}: {value}" for row in rows for name, value in row.items())


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/serving.json", "load", data=False)
    arguments.add_argument("model", nargs="?")
    arguments.add_argument("--url")
    arguments.add_argument("--key")
    arguments.add_argument("--clients", type=int, default=64)
    arguments.add_argument("--words", type=int, default=512, help="longest prompt")
    arguments.add_argument("--minutes", type=float, default=10)
    run(arguments, measure, short, show)
