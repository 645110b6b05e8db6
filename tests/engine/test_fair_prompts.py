"""Short prompts do not wait behind long ones, and no stream of short prompts stops a long one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.scheduler import TURN
from support.engine_driver import greedy, idle, random_prompts, watched
from support.simulated_steps import SimulatedSteps

# Enough for every prompt of a test at once.
MANY_BLOCKS, MANY_PLACES = 2000, 32


def step(simulated):
    """Run a step within its budget; return the number of tokens of each request."""
    plan = simulated.scheduler.schedule()
    chunks = {sequence.request.id: upto - sequence.computed for sequence, upto in plan.chunks}
    assert sum(chunks.values()) <= simulated.scheduler.max_num_batched_tokens
    simulated.run(plan)
    simulated.scheduler.tables.check_integrity()
    return chunks


def test_short_prompt_overtakes_a_long_one_in_one_step():
    simulated = SimulatedSteps(MANY_BLOCKS, MANY_PLACES, 64)
    simulated.add("long", 640, 1, token=1)
    assert step(simulated) == {"long": 64}
    simulated.add("short", 40, 1, token=2)
    # The long prompt has the rest of the step, and then all of it.
    assert step(simulated) == {"short": 40, "long": 24}
    assert step(simulated) == {"long": 64}


def test_starting_many_prompts_sums_what_running_ones_need_once(monkeypatch):
    """Blocks that a sequence still needs are computed a few times per prompt, however many start in the step."""
    counted, growth = [], BlockTables._growth
    monkeypatch.setattr(BlockTables, "_growth", lambda *arguments: counted.append(1) or growth(*arguments))
    simulated = SimulatedSteps(MANY_BLOCKS, 200, 4096)
    for number in range(200):
        simulated.add(str(number), 8, 1, token=number)
    assert len(step(simulated)) == 200
    # Of two groups of blocks: before and after each prompt gets its own.
    assert len(counted) <= 2 * 2 * 200


def test_long_prompts_follow_in_order_of_arrival_until_they_are_short():
    simulated = SimulatedSteps(MANY_BLOCKS, MANY_PLACES, 64)
    for token, (name, length) in enumerate({"a": 200, "b": 100, "c": 65}.items()):
        simulated.add(name, length, 1, token=token)
    steps = [step(simulated) for _ in range(6)]
    assert steps == [
        {"a": 64}, {"a": 64}, {"a": 64}, {"a": 8, "b": 56}, {"b": 44, "c": 20}, {"c": 45}
    ]  # fmt: skip


def test_stream_of_short_prompts_leaves_a_long_one_its_turns():
    simulated, steps = SimulatedSteps(MANY_BLOCKS, MANY_PLACES, 64), []
    simulated.add("long", 640, 1, token=1)
    for number in range(40):
        simulated.add(f"short {number}", 64, 1, token=2 + number)
        steps.append(step(simulated).get("long", 0))
    # Nine turns, after which it is the oldest of short prompts.
    assert steps == [0, 0, 0, 64] * 9 + [64, 0, 0, 0]


def test_cached_prefix_makes_a_prompt_short():
    simulated = SimulatedSteps(MANY_BLOCKS, MANY_PLACES, 64)
    simulated.add("earlier turn", 200, 1, token=1)
    while simulated.scheduler.running or simulated.scheduler.waiting:
        step(simulated)
    simulated.add("long", 640, 1, token=2)
    step(simulated)
    simulated.add("next turn", 230, 1, token=1)
    assert step(simulated) == {"next turn": 30, "long": 34}


@settings(max_examples=50)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(1, 3), st.booleans()), min_size=1, max_size=30
    ),
    max_step=st.integers(40, 60),
)
def test_prompt_waits_at_most_for_the_turns_of_older_ones(requests, max_step):
    """With room for all, a prompt is complete after TURN steps for each step's budget of tokens of its own and of the
    prompts that were there before it, whatever comes later."""
    simulated = SimulatedSteps(MANY_BLOCKS, MANY_PLACES, max_step)
    arrivals = list(itertools.accumulate(gap for gap, *_ in requests))
    incomplete, latest = [], {}
    for number in itertools.count():
        for index, (_, length, max_tokens, scored) in enumerate(requests):
            if arrivals[index] == number:
                request = simulated.add(str(index), length, max_tokens, scored=scored, token=index)
                incomplete.append(request.sequences[0])
                rest = sum(s.token_cost * (len(s.token_ids) - s.computed) for s in incomplete)
                # Decoding sequences take one token each; a token of cost 2 may not fit a rest of 1.
                latest[str(index)] = number + TURN * -(-rest // (max_step - len(requests) - 1))
        step(simulated)
        incomplete = [sequence for sequence in incomplete if not sequence.prefilled]
        assert all(number <= latest[sequence.request.id] for sequence in incomplete)
        if not incomplete and number > arrivals[-1]:
            break
    while simulated.scheduler.running:
        step(simulated)
    assert not simulated.scheduler.tables.used and not simulated.scheduler.preemptions


def test_short_prompts_do_not_take_the_blocks_of_a_long_one():
    """30 blocks of 4 tokens in each group: the long prompt needs 25. Prompts of 3 blocks start beside it only while
    its rest fits, so that nothing is preempted, and all become complete."""
    simulated = SimulatedSteps(30, MANY_PLACES, 16)
    long = simulated.add("long", 100, 1, token=1).sequences[0]
    step(simulated)
    shorts = [simulated.add(str(number), 10, 20, token=2 + number).sequences[0] for number in range(6)]
    while not long.prefilled:
        step(simulated)
    # One of them ran beside the long prompt.
    assert [short.started for short in shorts] == [True, *[False] * 5]
    assert not simulated.scheduler.preemptions
    while simulated.scheduler.running or simulated.scheduler.waiting:
        step(simulated)
    assert all(short.prefilled for short in shorts)


def test_blocks_of_its_own_are_no_cached_tokens():
    """A prompt that is preempted and finds its blocks again has used no other's."""
    simulated = SimulatedSteps(18, MANY_PLACES, 16)
    simulated.add("decoding", 12, 40, token=1)
    step(simulated)
    request = simulated.add("prompt", 60, 1, token=2)
    while not request.sequences[0].prefilled:
        step(simulated)
    assert simulated.scheduler.preemptions and request.num_cached_tokens == 0


@pytest.mark.parametrize("scored", [None, 1])
def test_overtaken_prompts_have_the_same_tokens(tiny_models, scored):
    """Prompts that share steps in another order continue as each does alone."""
    llm = watched(tiny_models["llama"], max_num_batched_tokens=16, max_num_seqs=8, block_size=4)
    prompts = random_prompts(90, 7, 60, 16, 3, 40, seed=5)
    params = greedy(6, prompt_logprobs=scored)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    llm.engine.reset_prefix_cache()
    engine, tokens, complete = llm.engine, {}, []
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    while engine.has_work:
        for output in engine.step():
            complete += [] if output.request_id in tokens else [output.request_id]
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert [tokens[str(number)] for number in range(len(prompts))] == alone
    assert list(tokens).index("4") < list(tokens).index("0"), "the short prompt waited for the long one"
    idle(engine)
