"""The server with the real engine and a tiny random model: all endpoints, released blocks."""

import asyncio
import contextlib
import itertools
import json
import threading
import time

import httpx
import openai
import pytest

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling import grammar
from support.serving import serving, until


@pytest.fixture(scope="module")
def served(tiny_models):
    # The cache is so small that 24 clients preempt each other.
    config = EngineConfig(device="cpu", dtype="float32", cache_bytes=2**20)
    with serving(Engine(tiny_models["llama"], config)) as served:
        yield served


def test_streamed_equals_whole_equals_batched(served):
    client = served.client()
    payload = {"model": served.service.model, "max_tokens": 40, "temperature": 0}
    prompts = ["Hello", "the quick brown fox", "x"]
    batched = [c.text for c in client.completions.create(**payload, prompt=prompts).choices]
    for prompt, expected in zip(prompts, batched, strict=True):
        chunks = client.completions.create(**payload, prompt=prompt, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    served.settles()


def test_echoed_scores_equal_those_of_generation(served):
    """Echoed log probabilities of a greedy continuation equal those of generating it."""
    client, model = served.client(), served.service.model
    prompt = served.engine.tokenizer("Hello")["input_ids"]
    payload = {"model": model, "temperature": 0, "logprobs": 1}
    generation = client.completions.create(**payload, prompt=prompt, max_tokens=20, extra_body={"ignore_eos": True})
    generated = generation.choices[0].logprobs
    ids = _generated(served, prompt, 20)
    for max_tokens in (0, 1):
        scoring = client.completions.create(**payload, prompt=[prompt + ids], max_tokens=max_tokens, echo=True)
        scored = scoring.choices[0].logprobs
        assert scored.tokens[len(prompt) : len(prompt) + 20] == generated.tokens
        assert scored.token_logprobs[len(prompt) : len(prompt) + 20] == pytest.approx(
            generated.token_logprobs, abs=1e-4
        )
        assert len(scored.tokens) == len(prompt) + 20 + max_tokens


def _generated(served, prompt, count):
    from mlaforge.engine.sampling.params import SamplingParams

    async def run():
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        engine = served.service.engine
        return [t async for o in engine.generate("ids", prompt, params) for t in o.outputs[0].token_ids]

    return asyncio.run_coroutine_threadsafe(run(), served.service.engine._loop).result(60)


def test_chat_and_constraints(served):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    answer = served.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] <= 8
    served.refused(served.post("/v1/completions", json={"prompt": "x", "n": 100}), 400, "n")
    pytest.importorskip("llguidance")
    payload = {"prompt": "x", "regex": "[ab]{5}", "max_tokens": 20}
    text = served.post("/v1/completions", json=payload).json()["choices"][0]["text"]
    assert len(text) == 5 and set(text) <= {"a", "b"}
    served.refused(served.post("/v1/completions", json=payload | {"regex": "a("}), 400, "regex")
    served.settles()


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
BOMBS = [
    {"guided_json": {"type": "integer", "multipleOf": 1000003}},
    {"guided_json": {"allOf": [{"multipleOf": prime} for prime in PRIMES]}},
    {"guided_regex": "(a{1000}){1000}"},
]


@contextlib.contextmanager
def another_client(served):
    """Stream endless answers; yield the arrival times of the tokens."""
    times, done = [], threading.Event()

    def read():
        while not done.is_set():
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
                    if done.is_set():
                        return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        until(lambda: times)
        yield times
    finally:
        done.set()
        reader.join(60)


@pytest.mark.parametrize("bomb", BOMBS, ids=str)
def test_a_costly_grammar_delays_no_other_request(served, bomb, monkeypatch):
    """It is refused with the reason, while another request keeps generating."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "CHECK", {**grammar.CHECK, "seconds": 0.5, "nice": 0})
    served.post("/v1/completions", json={"prompt": "x", "regex": "a"})
    with another_client(served) as times:
        began = time.perf_counter()
        reason = served.refused(served.post("/v1/completions", json={"prompt": "x", **bomb}, timeout=60), 400)
        ended = time.perf_counter()
        assert "cannot be followed: it takes more" in reason
        came = [began, *(at for at in times if began < at < ended), ended]
        # In an interval of one or two seconds with steps of milliseconds.
        longest = max(after - before for before, after in itertools.pairwise(came))
        assert len(came) > 20 and longest < 0.5 * (ended - began), (len(came), longest, ended - began)
        assert served.http.get("/health").status_code == 200
    served.settles()


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_costly_ends_its_request(served, monkeypatch, stream):
    """It compiles quickly, but each mask takes 25 ms. Other requests are not delayed, and it is ended finally."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "FOLLOW", {**grammar.FOLLOW, "seconds": 0.5})
    payload = {"prompt": "x", "regex": f"x(a{{{100_000 + stream}}})", "max_tokens": 400, "stream": stream}
    with another_client(served) as times:
        began = len(times)
        answer = served.post("/v1/completions", json=payload, timeout=60)
        if stream:
            events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert "processor time" in json.loads(events[-1][6:])["error"]["message"]
            assert json.loads(events[0][6:])["choices"][0]["text"].startswith("x")
        else:
            assert "processor time" in served.refused(answer, 400, "regex")
        assert len(times) - began > 8
    served.settles()


def test_many_clients_with_disconnects(served):
    async def one(client, i):
        stream = await client.completions.create(
            model=served.service.model, prompt=f"{i % 5} " * (i % 9 + 1), max_tokens=150 + 5 * i, stream=True,
            extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
        )  # fmt: skip
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            if i % 6 == 1:
                await stream.close()
                return
        assert usage.completion_tokens == 150 + 5 * i

    async def everybody():
        options = {"base_url": f"{served.url}/v1", "api_key": "x", "max_retries": 0, "timeout": 120}
        async with openai.AsyncOpenAI(**options) as client:
            await asyncio.gather(*(one(client, i) for i in range(24)))

    asyncio.run(everybody())
    served.settles()
    served.engine.check_integrity()
    assert served.service.engine.stats.preemptions > 0


def test_metrics_of_speculation(tiny_models):
    """Counters agree with each other and with the engine; a request can disable speculation."""
    config = EngineConfig(device="cpu", dtype="float32", cache_bytes=2**20, speculative="ngram")
    with serving(Engine(tiny_models["llama"], config)) as served:
        payload = {"prompt": [1, 2, 3, 4] * 9, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        plain = served.post("/v1/completions", json={**payload, "speculate": False}).json()
        assert "mlaforge_speculation_steps_total 0.0" in served.http.get("/metrics").text
        assert served.post("/v1/completions", json=payload).json()["choices"] == plain["choices"]
        lines = dict(line.rsplit(" ", 1) for line in served.http.get("/metrics").text.splitlines() if line[0] != "#")
        counters = {
            name[21:]: float(value) for name, value in lines.items() if name.startswith("mlaforge_speculation_")
        }
        stats = served.engine.stats().speculation
        assert counters["steps_total"] == stats.steps > 0 and counters["tokens_total"] == stats.tokens == 59
        assert counters["drafted_tokens_total"] == stats.drafted >= counters["accepted_tokens_total"] == stats.accepted
        per_position = [v for name, v in counters.items() if name.startswith("accepted_tokens_per_position")]
        assert sum(per_position) == stats.accepted
        assert counters["draft_seconds_total"] + counters["verify_seconds_total"] <= counters["step_seconds_total"]
