"""AsyncEngine and its streams, without HTTP."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving import async_engine
from mlaforge.serving.async_engine import AsyncEngine, EngineUnavailable, merge
from support.scripted_engine import ScriptedEngine

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def run(tokenizer):
    """run(test, **options of ScriptedEngine): `await test(AsyncEngine)` with the engine closed afterwards."""

    def go(test, **options):
        async def whole():
            engine = AsyncEngine(ScriptedEngine(tokenizer, **options))
            try:
                await asyncio.wait_for(test(engine), 60)
            finally:
                engine.engine.hold.set()
                engine.close()

        asyncio.run(whole())

    return go


async def settled(engine):
    while engine.engine.has_work or engine.stats.cache_blocks_used:
        await asyncio.sleep(0.005)


def test_thousands_of_prompts_delay_no_other_request(run):
    """The engine has a share of a stream at a time; a request of another stream is accepted at once."""

    async def test(engine):
        inner, most = engine.engine, 0
        add = inner.add

        def counted(*arguments):
            nonlocal most
            add(*arguments)
            most = max(most, sum(len(sequences) for name, sequences in inner.running.items() if name != "other"))

        inner.add, inner.delay = counted, 0.001
        params = SamplingParams(max_tokens=3, n=4, ignore_eos=True)
        async with engine.open({str(i): ([i], params) for i in range(200)}) as many:
            await many.accepted()
            async for _ in engine.generate("other", [7], SamplingParams(max_tokens=2, ignore_eos=True)):
                pass
            assert len(many._open) > 100
            outputs = await many.complete()
        assert most == 32
        assert [output.request_id for output in outputs] == [str(i) for i in range(200)]
        wide = SamplingParams(max_tokens=1, n=50, ignore_eos=True)
        async with engine.open({"x": ([1], wide), "y": ([2], wide)}) as large:
            assert [len(output.outputs) for output in await large.complete()] == [50, 50]
        assert most == 50

    run(test)


def test_deltas_concatenate_to_the_answer(run):
    async def test(engine):
        tokens, outputs = [], 0
        async for output in engine.generate("a", [1, 2, 3], LONG):
            tokens += output.outputs[0].token_ids
            outputs += 1
        assert tokens == [engine.engine.expected([1, 2, 3], 0, at) for at in range(400)]
        assert output.finished and output.outputs[0].finish_reason == "length"

    run(test)


def test_closing_the_iterator_aborts_the_request(run):
    async def test(engine):
        iterator = engine.generate("a", [1], LONG)
        await anext(iterator)
        await iterator.aclose()
        await settled(engine)
        assert engine.engine.counts["aborted_requests"] == 1

    run(test, delay=0.005)


def test_cancelling_aborts_running_and_queued_requests(run):
    async def test(engine):
        async def read(name):
            async for _ in engine.generate(name, [1], LONG):
                pass

        engine.engine.hold.clear()
        tasks = [asyncio.create_task(read(str(i))) for i in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.engine.hold.set()
        await settled(engine)
        assert not engine._streams

    run(test)


def test_a_refusal_affects_only_its_request(run):
    async def test(engine):
        good = asyncio.create_task(anext(engine.generate("good", [1], SamplingParams(max_tokens=1))))
        with pytest.raises(UserError, match="prompt has 600 tokens"):
            await anext(engine.generate("bad", [1] * 600, LONG))
        assert (await good).finished

    run(test)


def test_one_refused_request_ends_the_whole_stream(run):
    async def test(engine):
        async with engine.open({"a": ([1], LONG), "b": ([1] * 600, LONG)}) as stream:
            with pytest.raises(UserError):
                await stream.complete()
        await settled(engine)

    run(test, delay=0.002)


def test_a_dead_thread_fails_every_stream(run, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    async def test(engine):
        engine.engine.fail_after = 10

        async def read(name):
            with pytest.raises(EngineUnavailable, match="RuntimeError") as error:
                async for _ in engine.generate(name, [1], LONG):
                    pass
            assert isinstance(error.value.__cause__, RuntimeError)

        await asyncio.gather(*(read(str(i)) for i in range(8)))
        with pytest.raises(EngineUnavailable):
            await anext(engine.generate("late", [1], LONG))

    run(test)
    assert len(errors) == 1


def test_draining_waits_and_then_fails_the_rest(run):
    async def test(engine):
        short = asyncio.create_task(anext(engine.generate("s", [1], SamplingParams(max_tokens=1))))
        await asyncio.sleep(0)
        assert await engine.drain(30)
        assert (await short).finished
        with pytest.raises(EngineUnavailable):
            await anext(engine.generate("late", [1], LONG))

    run(test)

    async def cut(engine):
        async def read():
            with pytest.raises(EngineUnavailable, match="shutting down"):
                async for _ in engine.generate("a", [1], LONG):
                    pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert not await engine.drain(0.05)
        await reader
        await settled(engine)

    run(cut, delay=0.01)


def test_closing_ends_streams(run):
    async def test(engine):
        stream = engine.open({"a": ([1], LONG)})
        await stream.accepted()
        engine.close()
        async with stream:
            with pytest.raises(EngineUnavailable):
                await stream.complete()

    run(test, delay=0.005)


def test_closing_abandons_a_hanging_step(tokenizer, monkeypatch):
    monkeypatch.setattr(async_engine, "CLOSE_SECONDS", 0.1)

    async def test():
        engine = AsyncEngine(ScriptedEngine(tokenizer))
        engine.engine.hold.clear()
        async with engine.open({"a": ([1], LONG)}) as stream:
            # Without a running step the thread would end at once.
            assert engine.engine.began.wait(60)
            engine.close()
            assert engine._thread.is_alive()
            engine.engine.hold.set()
            with pytest.raises(EngineUnavailable):
                await stream.complete()
        engine._thread.join(60)

    asyncio.run(test())


def test_a_request_that_fails_in_the_engine(run):
    """Its stream raises the reason; other requests continue."""

    async def test(engine):
        step = engine.engine.step

        def fail():
            outputs = step()
            for output in outputs:
                if output.request_id == "bad":
                    output.finished, output.error = True, "regex cannot be followed: too costly"
                    engine.engine.running.pop("bad", None)
            return outputs

        engine.engine.step = fail
        good = asyncio.create_task(anext(engine.generate("good", [1], SamplingParams(max_tokens=1))))
        with pytest.raises(UserError, match="too costly"):
            async for output in engine.generate("bad", [1], LONG):
                assert output.outputs
        assert (await good).finished
        await settled(engine)

    run(test)


def test_an_idle_engine_uses_no_cpu(run):
    async def test(engine):
        await anext(engine.generate("a", [1], SamplingParams(max_tokens=1)))
        before = time.process_time(), engine.engine.counts["steps"]
        await asyncio.sleep(0.5)
        assert engine.engine.counts["steps"] == before[1]
        # Within half a second, which a polling thread would use completely.
        assert time.process_time() - before[0] < 0.25

    run(test)


def test_unread_outputs_are_merged_into_one(run):
    async def test(engine):
        async with engine.open({"a": ([1], LONG)}) as stream:
            while stream._open:
                await asyncio.sleep(0.01)
            assert len(stream._pending) == 1
            outputs = [output async for output in stream]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [400]

    run(test)


PIECES = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), min_size=1, max_size=8)


@given(st.lists(PIECES, min_size=1, max_size=5), st.integers(0, 5))
def test_merging_outputs_is_associative_and_complete(steps, cut):
    """The result is independent of the grouping; texts and tokens are the concatenation of the steps'."""
    outputs = []
    for at, step in enumerate(steps):
        completions = {i: Completion(i, [at], text, [Logprobs(at, -1.0)] if p else None) for i, text, p in step}
        outputs.append(RequestOutput("r", [1], list(completions.values()), finished=at == len(steps) - 1))

    def fold(outputs):
        result = outputs[0]
        for output in outputs[1:]:
            result = merge(result, output)
        return result

    whole = fold(outputs)
    cut = min(cut, len(outputs) - 1)
    parts = [fold(outputs[:cut]), fold(outputs[cut:])] if cut else outputs
    merged = [sorted(output.outputs, key=lambda c: c.index) for output in (fold(parts), whole)]
    assert merged[0] == merged[1]
    assert whole.finished
    for completion in whole.outputs:
        parts_of_choice = [c for output in outputs for c in output.outputs if c.index == completion.index]
        assert completion.text == "".join(c.text for c in parts_of_choice)
        assert completion.token_ids == [t for c in parts_of_choice for t in c.token_ids]
