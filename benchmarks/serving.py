"""Steady serving: requests with random (Poisson) arrivals while others decode, as in `vllm bench serve`.

    python -m benchmarks.serving MODEL [--base CHECKOUT] [--rates 1 2 4] [--requests 60] [--rounds 3] [--long 0.2]
        [--table NAME] [-- options of `mlaforge serve`]

Serves MODEL and, from a second checkout of mlaforge, the same (`base`). Both get the same requests, in turn in every
round, while the idle server only occupies memory. At each of --rates (requests per second) --requests arrive, with
prompts and answers of 0.5 to 1.5 times --prompt and --answer tokens; no two prompts share a prefix; greedy, ignoring
EOS. `requests_per_second` and `tokens_per_second` (generated) count from the first arrival
to the last token; `ttft` is from arrival to the first token, `gap` between two tokens of one answer as they reach the
client: median, 90th and 99th percentile over the run. If the rate exceeds the server's capacity, `requests_per_second`
stays below it. With --long, this share of the prompts has a length between the two of --long-prompt; `short` and
`long` are the times to the first token of the two kinds. `together`: --crowd prompts of --crowd-prompt tokens arrive at
once; time to the first token of each, in the order of arrival.

The table has the medians over the rounds, and percentiles over all rounds for `short` and `long`; `over_base` is the
mean ratio of tokens per second to the base in the same round, with the ends of its 95 % interval from 4 rounds on.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import WORDS, completion, percentiles
from benchmarks.script import parser, run
from mlaforge.bench.results import Results
from mlaforge.bench.server_process import commit_of, start
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.rendering.page import interval
from mlaforge.rendering.table import text_table

# Seconds between simultaneous prompts, so that they arrive in the order in which they were sent.
APART = 0.005

# Kinds of prompts where --long mixes them.
KINDS = ("short", "long")


@dataclasses.dataclass
class Answer:
    """A request: arrival time (seconds), prompt, requested tokens, whether --long made it `long`, and arrival times of
    its chunks. A chunk may contain several tokens whose text was incomplete before."""

    arrives: float
    prompt: list[int]
    tokens: int
    long: bool = False
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds from arrival to the first token."""
        return self.times[0] - self.arrives

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(client: httpx.AsyncClient, answer: Answer, start_time: float) -> None:
    """Send the request at its arrival time."""
    await asyncio.sleep(start_time + answer.arrives - time.perf_counter())
    body = {"prompt": answer.prompt, "max_tokens": answer.tokens, "ignore_eos": True, "temperature": 0.0}
    async with completion(client, body) as events:
        async for at, event in events:
            if event.get("choices"):
                answer.times.append(at - start_time)


async def play(url: str, answers: list[Answer]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start_time = time.perf_counter()
        await asyncio.gather(*(ask(client, answer, start_time) for answer in answers))


class Texts:
    """Random prompts of common words, without shared prefixes."""

    def __init__(self, tokenizer: Any):
        self.token_ids = sorted(set(tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]))

    def steady(self, dice: random.Random, rate: float, options: argparse.Namespace) -> Iterator[Answer]:
        """Requests with exponential inter-arrival times."""
        at = 0.0
        for _ in range(options.requests):
            prompt, tokens = (max(2, round(mean * dice.uniform(0.5, 1.5))) for mean in (options.prompt, options.answer))
            if long := options.long > 0 and dice.random() < options.long:
                prompt = dice.randint(*options.long_prompt)
            yield Answer(at, dice.choices(self.token_ids, k=prompt), tokens, long)
            at += dice.expovariate(rate)

    def together(self, dice: random.Random, options: argparse.Namespace) -> list[Answer]:
        return [
            Answer(APART * number, dice.choices(self.token_ids, k=options.crowd_prompt), 2)
            for number in range(options.crowd)
        ]


def measured(answers: list[Answer]) -> dict[str, Any]:
    """Measurements of a run with steady arrivals; times in seconds."""
    seconds = max(answer.times[-1] for answer in answers)
    firsts = [[round(answer.first, 4) for answer in answers if answer.long == long] for long in (False, True)]
    return {
        **(dict(zip(KINDS, firsts, strict=True)) if firsts[1] else {}),
        "requests_per_second": round(len(answers) / seconds, 3),
        "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 1),
        "ttft": percentiles([answer.first for answer in answers]),
        "gap": percentiles([gap for answer in answers for gap in answer.gaps]),
    }


def rounds(options: argparse.Namespace, texts: Texts, urls: dict[str, str], results: Results) -> None:
    for number in range(-1, options.rounds):
        for rate in (*options.rates, *([None] if options.crowd else [])):
            for side in sorted(urls, reverse=bool(number % 2)):
                # The same for both sides, with new prompts in every round, so that no prefix is cached.
                dice = random.Random(f"{number} {rate}")
                answers = texts.together(dice, options) if rate is None else list(texts.steady(dice, rate, options))
                if number < 0:
                    answers = answers[:4]
                asyncio.run(play(urls[side], answers))
                # The first round warms up.
                if number >= 0:
                    row = {"together": [round(a.first, 3) for a in answers]} if rate is None else measured(answers)
                    results.add({"side": side, "rate": rate, "round": number, **row})


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians over the rounds, one line per rate and side."""
    lines, rows = [], body["rows"]
    over_base = ratios(rows) if body["base"] else {}
    for rate in dict.fromkeys(row["rate"] for row in rows):
        for side in dict.fromkeys(row["side"] for row in rows):
            side_rows = [row for row in rows if (row["side"], row["rate"]) == (side, rate)]
            line: dict[str, Any] = {"rate": rate, "side": side}
            if rate is None:
                firsts = zip(*(row["together"] for row in side_rows), strict=True)
                line["together"] = [round(statistics.median(first), 3) for first in firsts]
            else:
                for name in ("requests_per_second", "tokens_per_second"):
                    line[name] = statistics.median(row[name] for row in side_rows)
                times = {name: [row[name] for row in side_rows] for name in ("ttft", "gap")}
                for kind in [kind for kind in KINDS if kind in side_rows[0]]:
                    times[kind] = [percentiles([first for row in side_rows for first in row[kind]])]
                for name in times:
                    for at in ("p50", "p99"):
                        line[f"{name}_{at}"] = round(statistics.median(cuts[at] for cuts in times[name]), 4)
                if side == "today" and str(rate) in over_base:
                    line["over_base"] = over_base[str(rate)]
            lines.append(line)
    return lines


def ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean ratio to the base of the generated tokens per second, by rate, and the ends of its 95 % interval."""
    result = {}
    for rate in {row["rate"] for row in rows} - {None}:
        by_side = {
            side: [row["tokens_per_second"] for row in rows if (row["rate"], row["side"]) == (rate, side)]
            for side in ("today", "base")
        }
        values = [today / base for today, base in zip(by_side["today"], by_side["base"], strict=True)]
        mean = statistics.mean(values)
        ends = interval(mean, statistics.stdev(values) / len(values) ** 0.5, len(values)) if len(values) > 1 else None
        result[str(rate)] = [round(value, 4) for value in (mean, *(ends or ()))]
    return result


def table(lines: list[dict[str, Any]]) -> str:
    steady = [line for line in lines if line["rate"] is not None]
    heads = list(dict.fromkeys(name for line in steady for name in line))
    shown = text_table([heads, *([str(line.get(name, "–")) for name in heads] for line in steady)])
    crowds = [f"first tokens of prompts that come together, {line['side']}: {line['together']}"
              for line in lines if line["rate"] is None]  # fmt: skip
    return "\n".join([shown, *crowds])


def measure(options: argparse.Namespace) -> Results:
    if options.model is None:
        raise SystemExit("MODEL is missing")
    texts = Texts(SourceModel.open(options.model).tokenizer)
    results = Results(options.raw, [], base=commit_of(options.base) if options.base else None)
    servers: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
    try:
        servers["today"] = start(options.model, options.rest)
        if options.base:
            servers["base"] = start(options.model, options.rest, checkout=options.base)
        rounds(options, texts, {side: url for side, (_, url) in servers.items()}, results)
    finally:
        for process, _ in servers.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in servers.values():
            process.wait(120)
    return results


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/serving.json", "steady", data=False)
    arguments.add_argument("model", nargs="?")
    arguments.add_argument("--base", type=Path, help="a second checkout of mlaforge")
    arguments.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="requests per second")
    arguments.add_argument("--requests", type=int, default=60, help="per rate and round")
    arguments.add_argument("--prompt", type=int, default=512, help="mean tokens of a prompt")
    arguments.add_argument("--answer", type=int, default=64, help="mean tokens of an answer")
    arguments.add_argument("--long", type=float, default=0.0, help="share of long prompts")
    arguments.add_argument("--long-prompt", type=int, nargs=2, default=[2000, 6000], help="their least and most tokens")
    arguments.add_argument("--crowd", type=int, default=8, help="simultaneous prompts; 0: none")
    arguments.add_argument("--crowd-prompt", type=int, default=2048, help="tokens of each simultaneous prompt")
    arguments.add_argument("--rounds", type=int, default=3)
    run(arguments, measure, short, table)
