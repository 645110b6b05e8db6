"""Results of one request, independent of others: continuations, log probabilities, work, memory.

Every engine here is watched (engine_driver.py): a cache full of NaN, tables checked after every step.
"""

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched

PROMPT, OTHER, LONG = random_prompts(21, 30, 75, seed=5)


@pytest.fixture(scope="module")
def llama(tiny_models):
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def oracle(llama):
    return Oracle(llama)


@pytest.fixture(scope="module")
def reused(llama):
    """One engine for tests that give it new tables."""
    return watched(llama)


def draw(n=3, **more):
    return SamplingParams(**{"n": n, "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True, **more})


def texts(output):
    return [completion.token_ids for completion in output.outputs]


# n continuations


def test_continuations_begin_at_the_prompts_last_token(llama, oracle):
    """Also where the step computes as many tokens as there are continuations."""
    llm = watched(llama)
    for n, length in itertools.product((2, 3, 4), range(1, 7)):
        (output,) = llm.generate([PROMPT[:length]], greedy(5, n=n))
        for tokens in texts(output):
            oracle.check(PROMPT[:length], tokens, 5)
        idle(llm.engine)


def test_continuations_differ_and_a_seed_repeats_them(llama):
    llm = watched(llama)
    first = texts(llm.generate([PROMPT], draw())[0])
    assert len({tuple(tokens) for tokens in first}) == 3
    assert texts(llm.generate([PROMPT], draw())[0]) == first
    assert texts(llm.generate([PROMPT], draw(seed=8))[0]) != first
    free = [texts(llm.generate([PROMPT], draw(seed=None))[0]) for _ in range(2)]
    assert free[0] != free[1]
    # The first continuation is what n = 1 gives.
    assert texts(llm.generate([PROMPT], draw(n=1))[0]) == first[:1]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"prefix_caching": False}])
def test_seeded_request_is_independent_of_its_batch(options, llama):
    alone = texts(watched(llama).generate([PROMPT], draw())[0])
    llm = watched(llama, **options)
    prompts, params = [OTHER, PROMPT, LONG, PROMPT[:9]], [draw(1), draw(), greedy(20), draw(2, seed=1)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert texts(outputs[order.index(1)]) == alone
    idle(llm.engine)


def test_seeded_request_is_independent_of_preemption(llama, reused):
    """Its continuations are preempted between two draws, because an older request grows."""
    alone = texts(watched(llama).generate([PROMPT], draw())[0])
    engine, drawn, preempted = reused.engine, [[], [], []], set()
    renew(engine, 4, 75 + 20, block_size=4, max_num_seqs=4)
    engine.add("older", LONG, greedy(20))
    while not engine.scheduler.running or not engine.scheduler.running[0].decoding:
        engine.step()
    engine.add("drawn", PROMPT, draw())
    while engine.has_work:
        for output in engine.step():
            for completion in output.outputs if output.request_id == "drawn" else ():
                drawn[completion.index] += completion.token_ids
        preempted |= {sequence.index for sequence in engine.scheduler.waiting if sequence.state.generated}
    assert drawn == alone
    assert {1, 2} <= preempted
    idle(engine)


def test_continuations_share_the_prompts_blocks(llama):
    """Four full blocks of 16 once; the rest of the prompt and the new tokens per continuation."""
    llm = watched(llama)
    used_blocks = []
    for _ in llm.stream([LONG[:70]], greedy(6, n=4)):
        used_blocks.append(llm.engine.stats().cache_blocks_used)
    # After the first step all still share the prompt's partial fifth block.
    assert used_blocks == [5, 8, 8, 8, 8, 0]
    assert llm.engine.stats().computed_tokens == 70 + 4 * 5


# Log probabilities


def check_logprobs(found, logits, tokens, count):
    expected = logits.double().log_softmax(-1)
    assert len(found) == len(tokens)
    for entry, row, token in zip(found, expected, tokens, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert len(entry.top) == count
        likeliest = row.topk(count).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(likeliest, abs=1e-4)
        for other, logprob in entry.top:
            assert logprob == pytest.approx(float(row[other]), abs=1e-4)


@pytest.mark.parametrize("how", [greedy(9, logprobs=3), draw(2, logprobs=3), draw(1, logprobs=0)], ids=["0", "1", "2"])
def test_logprobs_equal_transformers(how, llama, oracle):
    (output,) = watched(llama).generate([PROMPT], how)
    assert output.prompt_logprobs is None
    for completion in output.outputs:
        logits = oracle.logits([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1]
        check_logprobs(completion.logprobs, logits, completion.token_ids, how.logprobs)


def check_prompt_logprobs(output, prompt, oracle, count=2):
    first, *rest = output.prompt_logprobs
    assert first is None
    check_logprobs(rest, oracle.logits(prompt)[:-1], prompt[1:], count)


@pytest.mark.parametrize("chunk", [5, 6, 512])
def test_prompt_logprobs_equal_transformers(chunk, llama, oracle):
    """Whole and in chunks (75 tokens end in a full chunk of 5), in a batch, and after the prefix was cached."""
    llm = watched(llama, max_num_batched_tokens=chunk, max_num_seqs=4)
    asks = greedy(4, prompt_logprobs=2)
    for _ in range(2):
        several = [LONG, LONG[:30], PROMPT[:1], LONG, PROMPT[:2]]
        outputs = llm.generate(several, [asks, greedy(8), asks, greedy(3, n=2, prompt_logprobs=2), asks])
        for prompt, output in zip(several, outputs, strict=True):
            if prompt is several[1]:
                assert output.prompt_logprobs is None
                continue
            check_prompt_logprobs(output, prompt, oracle)
            # The prompt's own logits are wanted, so nothing of it is taken from the cache.
            assert output.num_cached_tokens == 0
            oracle.check(prompt, output.outputs[0].token_ids, len(output.outputs[0].token_ids))
    idle(llm.engine)


def test_prompt_logprobs_of_more_rows_than_are_projected_at_once(llama, oracle):
    prompt = random_prompts(300, seed=9)[0]
    (output,) = watched(llama).generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2))
    check_prompt_logprobs(output, prompt, oracle)


@pytest.mark.parametrize("n", [1, 3])
def test_reading_a_prompt_only(n, llama, oracle):
    """max_tokens 0: one answer without tokens, no more cache than the prompt needs."""
    llm = watched(llama, cache_bytes=10 * 16 * 768, max_num_batched_tokens=32, max_num_seqs=8)
    assert llm.engine.stats().cache_blocks == 10
    asks = SamplingParams(n=n, max_tokens=0, prompt_logprobs=2)
    for output in llm.generate([LONG, PROMPT], asks):
        check_prompt_logprobs(output, output.prompt_token_ids, oracle)
        assert output.finished and output.first_token is not None
        assert [(c.index, c.token_ids, c.text, c.finish_reason) for c in output.outputs] == [
            (index, [], "", "length") for index in range(n)
        ]
    stats = llm.engine.stats()
    assert (stats.generated_tokens, stats.computed_tokens) == (0, len(LONG) + len(PROMPT))
    assert stats.finished_requests == 2
    idle(llm.engine)


def test_prompt_logprobs_survive_preemption(reused, oracle):
    """In the middle of the prompt, which is then computed anew, and after it, when only the answer continues."""
    engine = reused.engine
    seen = set()
    for spare in range(4, 12):
        renew(engine, spare, 75 + 20, block_size=4, max_step=8)
        before = engine.stats().preemptions
        engine.add("first", OTHER, greedy(40))
        engine.add("asks", LONG, greedy(20, prompt_logprobs=2))
        found, asks = [], engine._requests["asks"].sequences[0]
        while engine.has_work:
            count = engine.stats().preemptions
            found += [output for output in engine.step() if output.request_id == "asks"]
            if engine.stats().preemptions > count and asks in engine.scheduler.waiting:
                seen.add(asks.prefilled)
        check_prompt_logprobs(found[0], LONG, oracle)
        assert all(output.prompt_logprobs is None for output in found[1:])
        oracle.check(LONG, [token for output in found for token in output.outputs[0].token_ids], 20)
        assert engine.stats().preemptions >= before
        idle(engine)
    assert seen == {False, True}


# Work


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15), st.integers(1, 3)), min_size=1, max_size=6),
    st.sampled_from([6, 16, 64]),
    st.booleans(),
)
def test_finished_sequences_cost_nothing(reused, requests, chunk, caching):
    """Rows through the model: prompt tokens that were not cached, and one for each token but a sequence's last."""
    engine = reused.engine
    renew(engine, 60, 60, block_size=4, caching=caching, max_num_seqs=6, max_step=chunk)
    before = engine.stats()
    prompts = random_prompts(*(length for length, _, _ in requests), seed=3)
    outputs = reused.generate(prompts, [greedy(tokens, n=n) for _, tokens, n in requests])
    after = engine.stats()
    assert after.preemptions == before.preemptions, "this cache is large enough"

    def more(name):
        return getattr(after, name) - getattr(before, name)

    cached = sum(output.num_cached_tokens for output in outputs)
    assert more("cached_prompt_tokens") == cached
    assert caching or not cached
    assert more("prompt_tokens") == sum(length for length, _, _ in requests)
    assert more("generated_tokens") == sum(tokens * n for _, tokens, n in requests)
    assert more("finished_requests") == len(requests)
    computed = sum(length + n * (tokens - 1) for length, tokens, n in requests)
    assert more("computed_tokens") == computed - cached


def test_a_step_computes_its_active_sequences_only(llama):
    """Lengths 1 to 8 together: the batch shrinks by one row a step."""
    llm = watched(llama)
    rows = []
    prompts, params = random_prompts(*[9] * 8), [greedy(count) for count in range(1, 9)]
    for prompt, wanted in zip(prompts, params, strict=True):
        llm.engine.add(f"{len(rows)} {wanted.max_tokens}", prompt, wanted)
    while llm.engine.has_work:
        before = llm.engine.stats().computed_tokens
        llm.engine.step()
        rows.append(llm.engine.stats().computed_tokens - before)
    assert rows == [8 * 9, 7, 6, 5, 4, 3, 2, 1]


# Memory


def most_bytes(directory):
    llm = watched(directory, prefix_caching=False)
    most, blocks = 0, 0
    for _ in llm.stream(random_prompts(40, 13, 70), greedy(20)):
        stats = llm.engine.stats()
        most, blocks = max(most, stats.cache_bytes_used), max(blocks, stats.cache_blocks_used)
    idle(llm.engine)
    assert stats.cache_bytes == llm.engine.cache.bytes <= 1 << 20
    return most, blocks


@pytest.mark.parametrize(("family", "layout"), [("llama", "latent"), ("mistral", "latent_rope"), ("gpt_oss", "latent")])
def test_half_the_budget_is_half_the_bytes(family, layout, converted, tiny_models):
    """For the same tokens in the same blocks, all layers converted."""
    directory = converted(family, layout, budget=0.5, layers="all")
    cache_metrics = json.loads((directory / "manifest.json").read_text())["metrics"]["cache"]
    original, blocks = most_bytes(tiny_models[family])
    halved, same_blocks = most_bytes(directory)
    assert blocks == same_blocks
    assert cache_metrics["mla_per_token"] * 2 == cache_metrics["gqa_per_token"]
    if family != "gpt_oss":
        assert halved * 2 == original
    else:
        # Its two kinds of layers hold different numbers of tokens, and the ranks favour one kind.
        assert halved / original == pytest.approx(0.5, abs=0.1)


# The outside


def test_the_example_of_the_docstring(llama, capsys):
    lines = [line[8:] for line in LLM.__doc__.splitlines() if line.startswith(" " * 8)]
    source = "\n".join(lines).replace('"OUT"', "directory")
    assert "llm = LLM(" in source and "generate(" in source
    scope = {"LLM": LLM, "SamplingParams": SamplingParams, "directory": llama}
    exec(source, scope)
    assert capsys.readouterr().out == scope["output"].outputs[0].text + "\n"


def test_texts_and_token_ids_are_prompts(llama, oracle):
    llm = watched(llama)
    ids = llm.tokenizer("The capital")["input_ids"]
    for prompts in ("The capital", ["The capital"], ids, [ids], tuple(ids), [tuple(ids)]):
        (output,) = llm.generate(prompts, greedy(6))
        assert output.prompt_token_ids == ids
        assert output.prompt == ("The capital" if "The capital" in (prompts, prompts[0]) else None)
        oracle.check(ids, output.outputs[0].token_ids, 6)
    pair_outputs = llm.generate(["The capital", PROMPT, "of"], [greedy(3), greedy(4), greedy(5)])
    assert [len(output.outputs[0].token_ids) for output in pair_outputs] == [3, 4, 5]
    assert [output.outputs[0].text for output in pair_outputs] == [
        llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) for output in pair_outputs
    ]
    assert llm.generate("The capital")[0].outputs[0].finish_reason in ("stop", "length")


def test_stream_equals_generate(llama):
    llm = watched(llama)
    prompts, params = [PROMPT, OTHER], draw(2, logprobs=1)
    whole = {output.request_id[-1]: output for output in llm.generate(prompts, params)}
    parts: dict = {}
    finished = []
    for output in llm.stream(prompts, params):
        assert output.request_id not in finished
        finished += [output.request_id] * output.finished
        for completion in output.outputs:
            parts.setdefault((output.request_id, completion.index), []).append(completion)
    assert len(finished) == 2
    for (request, index), pieces in parts.items():
        want = whole[str(int(request[-1]) - 2)].outputs[index]
        assert [token for piece in pieces for token in piece.token_ids] == want.token_ids
        assert "".join(piece.text for piece in pieces) == want.text
        # Of another batch shape, so the last digits may differ.
        for piece, found in zip(pieces, want.logprobs, strict=True):
            assert piece.logprobs[0].token_id == found.token_id
            assert piece.logprobs[0].logprob == pytest.approx(found.logprob, abs=1e-5)
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == want.finish_reason


def test_leaving_a_stream_frees_its_blocks(llama, oracle):
    llm = watched(llama)
    for count, _ in enumerate(llm.stream([PROMPT, OTHER, LONG], greedy(20, n=2))):
        if count == 4:
            break
    idle(llm.engine)
    assert llm.engine.stats().aborted_requests == 3
    oracle.check(PROMPT, llm.generate([PROMPT], greedy(9))[0].outputs[0].token_ids, 9)


def test_concurrent_streams_lose_no_output(llama, oracle):
    """Outputs that one reader's steps compute for another wait for that reader, even after all work is done."""
    llm = watched(llama)
    first, second = llm.stream([PROMPT, OTHER], greedy(9)), llm.stream([LONG], greedy(20))
    got = {name: [next(stream)] for name, stream in (("first", first), ("second", second))}
    oracle.check(PROMPT, texts(llm.generate([PROMPT], greedy(12))[0])[0], 12)
    # Nobody works for others longer than for oneself.
    assert llm.engine.has_work
    got["second"] += second
    got["first"] += first
    assert not llm.engine.has_work
    for name, prompts, count in (("first", [PROMPT, OTHER], 9), ("second", [LONG], 20)):
        assert sum(output.finished for output in got[name]) == len(prompts)
        for prompt in prompts:
            mine = [output for output in got[name] if output.prompt_token_ids == prompt]
            oracle.check(prompt, [token for output in mine for token in output.outputs[0].token_ids], count)
    assert not llm._unread
    idle(llm.engine)


def test_a_chat_ends_where_the_model_begins(llama):
    llm = watched(llama)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    prompt = llm.chat_prompt(turns)
    assert llm.tokenizer.decode(prompt) == "<s>user: Hi\n<s>assistant: Yes?\nassistant:"
    (answer,) = llm.chat(turns, greedy(7))
    assert (answer.prompt_token_ids, answer.prompt) == (prompt, None)
    assert texts(answer) == texts(llm.generate([prompt], greedy(7))[0])
    # The next turn computes what is new.
    (longer,) = llm.chat([*turns, {"role": "user", "content": "What?"}], greedy(7))
    assert longer.num_cached_tokens == (len(prompt) - len("assistant:")) // 16 * 16


def test_several_conversations(llama):
    """Each answer is as if its conversation were alone."""
    llm = watched(llama)
    talks = [[{"role": "user", "content": text}] for text in ("Hi", "A longer one, to be read in more than one step")]
    alone = [llm.chat(talk, sampling_params=greedy(7))[0] for talk in talks]
    for params in (greedy(7), [greedy(7), greedy(7)]):
        pair_outputs = llm.chat(talks, sampling_params=params)
        assert [texts(output) for output in pair_outputs] == [texts(output) for output in alone]
        assert [output.prompt_token_ids for output in pair_outputs] == [output.prompt_token_ids for output in alone]
    pieces = [output for output in llm.stream_chat(talks, sampling_params=greedy(7)) if output.outputs[0].token_ids]
    assert len(pieces) == 14


def test_answers_end_at_the_context_limit(llama, oracle):
    llm = watched(llama, max_model_len=32)
    (output,) = llm.generate([PROMPT], dataclasses.replace(greedy(1), max_tokens=None))
    (completion,) = output.outputs
    assert completion.finish_reason == "length"
    oracle.check(PROMPT, completion.token_ids, 32 - len(PROMPT))
    idle(llm.engine)


def test_an_end_of_text_ends_a_sequence_and_frees_it(llama):
    """By the tokenizer's end of text, which a bias makes the only token."""
    llm = watched(llama)
    end = llm.tokenizer.eos_token_id
    assert end in llm.engine.eos_token_ids
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=9, logit_bias={end: 100.0}, temperature=0.0))
    assert (texts(output), output.outputs[0].text, output.outputs[0].finish_reason) == ([[end]], "", "stop")
    idle(llm.engine)


@pytest.mark.parametrize("ways", ["a foreign prefix", "an evicted one"])
def test_only_cached_rows_of_the_prompt_are_read(ways, llama, oracle):
    """Between two requests every block that is not cached becomes NaN; then all that is not the prompt's."""
    llm = watched(llama)
    llm.generate([LONG, OTHER], greedy(8))
    pool, size = llm.engine.tables._pools[0], llm.engine.config.block_size
    keep = torch.zeros(pool.num_blocks, dtype=torch.bool)
    keep[list(pool._quantized.evictable)] = True
    if ways == "a foreign prefix":
        from mlaforge.engine.cache.block_pool import block_digests

        keep[:] = False
        keep[pool.match(block_digests(LONG, size))] = True
    for rows in llm.engine.cache.tensors:
        rows[~keep.repeat_interleave(size)] = torch.nan
    (output,) = llm.generate([LONG], greedy(12))
    assert output.num_cached_tokens == len(LONG) // size * size
    oracle.check(LONG, output.outputs[0].token_ids, 12)
