"""Any schedule of requests, in a cache of any size, gives the same tokens and leaves no state behind."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.cache.kv_cache import LayerCache, size_groups
from mlaforge.ops.row_formats.int4 import Int4
from mlaforge.ops.row_formats.plain import Plain, dtype_name
from mlaforge.runtime import UserError
from support.engine_driver import Oracle, greedy, idle, most_blocks, random_prompts, renew, watched
from support.simulated_steps import SimulatedSteps

BASES = random_prompts(40, 40, 40, seed=11)
CASES = [("llama", None), ("mistral", "latent_rope"), ("gpt_oss", "latent")]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in (("gpt_oss", None), ("qwen3", "latent"))]
LONGEST = 40 + 1 + 12


@dataclasses.dataclass(frozen=True)
class TimedRequest:
    """A request: the beginning of a base text, optionally one more token, and the steps of its arrival and its
    abort."""

    base: int
    length: int
    extra: int | None
    max_tokens: int
    n: int
    arrives: int
    leaves: int | None
    prompt_logprobs: int | None

    @property
    def prompt(self):
        return BASES[self.base][: self.length] + ([] if self.extra is None else [self.extra])


timed_requests = st.builds(
    TimedRequest,
    base=st.integers(0, 2),
    length=st.integers(1, 40),
    extra=st.none() | st.integers(0, 3),
    max_tokens=st.integers(1, 12),
    n=st.integers(1, 3),
    arrives=st.integers(0, 25),
    leaves=st.none() | st.none() | st.integers(0, 40),
    prompt_logprobs=st.none() | st.none() | st.just(1),
)


@pytest.fixture(scope="module", params=CASES, ids=str)
def loaded(request, tiny_models, converted):
    family, layout = request.param
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    return watched(directory).engine, Oracle(directory)


@settings(max_examples=20)
@given(
    requests=st.lists(timed_requests, min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_step=st.integers(4, 40),
    max_num_seqs=st.integers(3, 4),
    spare=st.integers(0, 8),
    caching=st.booleans(),
)
def test_any_schedule_gives_the_same_tokens(loaded, requests, block_size, max_step, max_num_seqs, spare, caching):
    engine, oracle = loaded
    renew(
        engine, spare, LONGEST, block_size=block_size, caching=caching, max_num_seqs=max_num_seqs, max_step=max_step
    )  # fmt: skip
    before = engine.stats()
    tokens: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str | None] = {}
    finished, aborted, step = set(), set(), 0
    while step <= 40 or engine.has_work:
        for number, request in enumerate(requests):
            if request.arrives == step:
                how = greedy(request.max_tokens, n=request.n, prompt_logprobs=request.prompt_logprobs)
                engine.add(str(number), request.prompt, how)
            if request.leaves == step > request.arrives and number not in finished:
                engine.abort(str(number))
                aborted.add(number)
        for output in engine.step():
            number = int(output.request_id)
            assert number not in finished | aborted
            finished |= {number} if output.finished else set()
            for completion in output.outputs:
                key = number, completion.index
                assert reasons.get(key) is None
                reasons[key] = completion.finish_reason
                tokens.setdefault(key, []).extend(completion.token_ids)
        step += 1
        assert step < 1500, "this does not come to an end"
    assert finished | aborted == set(range(len(requests))) and not finished & aborted
    for number, request in enumerate(requests):
        for index in range(request.n):
            got = tokens.get((number, index), [])
            assert number in aborted or (len(got), reasons[number, index]) == (request.max_tokens, "length")
            if got:
                oracle.check(request.prompt, got, len(got))
    after = engine.stats()
    assert after.finished_requests - before.finished_requests == len(finished)
    assert after.aborted_requests - before.aborted_requests == len(aborted)
    idle(engine)


def test_random_schedules_preempt(loaded):
    """The property above is not vacuous: in so small a cache such requests are preempted many times."""
    engine = loaded[0]
    renew(engine, 0, LONGEST, block_size=4)
    before = engine.stats().preemptions
    for number in range(6):
        engine.add(str(number), BASES[number % 3][: 30 + number], greedy(12, n=number % 3 + 1))
    while engine.has_work:
        for output in engine.step():
            assert output.outputs
    assert engine.stats().preemptions - before >= 3
    idle(engine)


@pytest.fixture
def engine(tiny_models):
    return watched(tiny_models["llama"], max_num_batched_tokens=16, max_num_seqs=4, block_size=4).engine


def names(sequences):
    return [sequence.request.id for sequence in sequences]


def test_decoding_precedes_prompts_which_share_the_rest(engine):
    engine.add("a", BASES[0][:6], greedy(9))
    engine.step()
    engine.add("b", BASES[1][:20], greedy(9))
    engine.add("c", BASES[2][:30], greedy(9))
    rows = []
    for _ in range(4):
        engine.step()
        rows.append({sequence.request.id: sequence.computed for sequence in engine.scheduler.running})
    assert rows == [
        {"a": 7, "b": 15},
        {"a": 8, "b": 20, "c": 10},
        {"a": 9, "b": 21, "c": 24},
        {"a": 10, "b": 22, "c": 30},
    ]


def test_a_long_prompt_leaves_every_continuation_its_token(engine):
    """A running prompt takes the rest of the budget, though three continuations began after it."""
    engine.add("several", BASES[0][:10], greedy(30, n=3))
    engine.add("long", BASES[1] + BASES[2], greedy(4))
    engine.step()
    long = engine.scheduler.running[1]
    assert names(engine.scheduler.running) == ["several", "long", "several", "several"] and long.computed == 6
    while long.computed < 80:
        before = long.computed
        outputs = {output.request_id: output for output in engine.step()}
        assert sorted(done.index for done in outputs["several"].outputs) == [0, 1, 2]
        assert long.computed == min(80, before + 13)
    engine.abort("several")
    engine.abort("long")


# The scheduler without a model


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.booleans()),
        min_size=1, max_size=8,
    ),
    max_num_seqs=st.integers(4, 6),
    more=st.integers(0, 30),
    spare=st.integers(0, 40),
    drafts=st.integers(0, 3),
    late=st.sets(st.integers(0, 40)),
)  # fmt: skip
@example(
    # A short prompt goes first, and lacks blocks.
    requests=[(0, 1, 1, 1, False), (0, 1, 7, 1, False), (0, 57, 1, 1, False), (6, 1, 1, 1, False)],
    max_num_seqs=4, more=0, spare=0, drafts=2, late=set(),
)  # fmt: skip
@example(
    # A running prompt lacks a block, which decoding sequences hold; nobody is preempted.
    requests=[(0, 1, 1, 1, False)] * 5 + [(0, 47, 2, 2, False), (0, 14, 1, 1, True), (2, 13, 1, 1, True)],
    max_num_seqs=4, more=22, spare=0, drafts=1, late=set(),
)  # fmt: skip
def test_decoding_sequences_miss_no_step_unless_blocks_are_short(requests, max_num_seqs, more, spare, drafts, late):
    simulated = SimulatedSteps(18 + spare, max_num_seqs, max_num_seqs + more)
    scheduler, step = simulated.scheduler, 0
    while step <= 12 or scheduler.running or scheduler.waiting:
        for name, (arrives, *what) in enumerate(requests):
            if arrives == step:
                simulated.add(str(name), *what)
        for sequence in scheduler.running:
            sequence.waiting_for_grammar = (sequence.number + step) % 41 in late and step < 100
        decoding = {
            sequence for sequence in scheduler.running if sequence.decoding and not sequence.waiting_for_grammar
        }
        prompts = [
            sequence for sequence in scheduler.running if not (sequence.decoding or sequence.waiting_for_grammar)
        ]
        preempted = scheduler.preemptions
        plan = scheduler.schedule(lambda sequence: drafts)
        assert sum(upto - sequence.computed for sequence, upto in plan.chunks) <= scheduler.max_num_batched_tokens
        scheduled = {sequence for sequence, _ in plan.chunks}
        assert len(scheduled) == len(plan.chunks) and not any(s.waiting_for_grammar for s in scheduled)
        assert scheduled <= set(scheduler.running), "none was preempted after it was scheduled"
        if scheduler.preemptions == preempted:
            assert decoding <= scheduled
            # And neither decoding sequences nor their drafts stop all prompts that have blocks.
            assert not any(map(simulated.has_blocks, prompts)) or scheduled - decoding
        simulated.run(plan, drafts)
        scheduler.tables.check_integrity()
        step += 1
        assert step < 2000, "this does not come to an end"


def test_newest_sequence_is_preempted_and_resumes_first(engine):
    renew(engine, 2, 48, block_size=4, max_num_seqs=4, max_step=32)
    for name, base in zip("abc", BASES, strict=True):
        engine.add(name, base[:16], greedy(30))
    seen = []
    while engine.has_work:
        engine.step()
        state = names(engine.scheduler.running), names(engine.scheduler.waiting)
        seen += [state] if not seen or seen[-1] != state else []
    orders = [running + waiting for running, waiting in seen]
    assert orders == [sorted(order) for order in orders]
    assert engine.stats().preemptions > 0
    assert (["a", "b"], ["c"]) in seen and (["a"], ["b", "c"]) in seen


def test_continuations_count_before_they_exist(engine):
    """Two requests of n = 3 are six sequences: the second waits, though one place is taken while prompts are read."""
    for name, base in zip("abc", BASES, strict=True):
        engine.add(name, base[:30], greedy(4, n=3 if name != "c" else 1))
    engine.step()
    assert names(engine.scheduler.running) == ["a"]
    engine.step()
    # First come, first served: c would fit, but b was there before.
    assert names(engine.scheduler.running) == ["a"] * 3
    most = 3
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 4
    idle(engine)


def test_small_cache_bytes_preempt_and_change_nothing(tiny_models):
    """The same through the option, as a user meets it: 14 blocks of 16 tokens for eight requests."""
    oracle = Oracle(tiny_models["llama"])
    llm = watched(tiny_models["llama"], cache_bytes=14 * 16 * 768 + 100)
    assert llm.engine.stats().cache_blocks == 14
    prompts = random_prompts(30, 40, 17, 60, 3, 29, 31, 50)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(40)), strict=True):
        oracle.check(prompt, output.outputs[0].token_ids, 40)
    assert llm.engine.stats().preemptions > 0
    idle(llm.engine)


# How the bytes are shared


@settings(max_examples=200)
@given(
    widths=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2)), min_size=1, max_size=6),
    windows=st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=3, unique=True),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, "int4"]),
    max_num_seqs=st.integers(1, 64),
    max_model_len=st.integers(1, 4096),
    max_step=st.integers(64, 512),
    budget=st.integers(1, 1 << 26),
)
def test_groups_fit_the_budget_and_error_names_a_sufficient_one(
    widths, windows, block_size, dtype, max_num_seqs, max_model_len, max_step, budget
):
    windows = sorted(windows, key=lambda w: (w is not None, w))
    numbers, places = [width for width, _ in widths] + [8] * len(windows), [i % len(windows) for _, i in widths]
    if isinstance(dtype, str):
        block_size = 32 * -(-block_size // 32)
        formats = [Int4(1, 2 * width) for width in numbers]
    else:
        formats = [Plain(width, dtype_name(dtype)) for width in numbers]
    newest_unquantized = isinstance(dtype, str)
    places += range(len(windows))
    layers = [LayerCache("gqa", form, index) for form, index in zip(formats, places, strict=True)]
    rest = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_step": max_step}
    try:
        groups = size_groups(layers, windows, budget, block_size, **rest)
    except UserError as error:
        need = int(str(error).split("at least ")[1].split()[0])
        assert need > budget
        budget = need
        groups = size_groups(layers, windows, budget, block_size, **rest)
    sizes = [sum(la.block_bytes(block_size) for la in layers if la.group == g) for g in range(len(groups))]
    whole = [sum(la.unquantized_block_bytes(block_size) for la in layers if la.group == g) for g in range(len(groups))]
    used = sum(
        group.num_blocks * size + group.num_unquantized * more
        for group, size, more in zip(groups, sizes, whole, strict=True)
    )
    assert used <= budget
    touched = min(-(-max_model_len // block_size), (max_step - 1) // block_size + 2)
    for group in groups:
        assert group.newest_unquantized == newest_unquantized
        assert group.num_unquantized >= touched if newest_unquantized else group.num_unquantized == 0
    if not newest_unquantized:
        widths = [sum(la.width for la in layers if la.group == g) for g in range(len(groups))]
        assert sizes == [width * block_size * dtype.itemsize for width in widths]
    assert [group.window for group in groups] == windows
    most = max_num_seqs * -(-max_model_len // block_size) + 1
    for group in groups:
        # A single sequence always fits: windows hold what a step of it needs.
        least = 2
        if group.window is not None:
            least = most_blocks(BlockTables([group], block_size), 0, max_model_len, max_step)
        assert min(least, -(-max_model_len // block_size)) <= group.num_blocks <= most
    # Nothing that full attention could use is left over.
    if windows[0] is None and groups[0].num_blocks < most:
        assert budget - used < sizes[0]


def test_prompt_logprobs_use_step_budget(engine, monkeypatch):
    """As much is computed beside those who decode as for any other prompt, logits of the whole vocabulary included; and
    every step brings them a token."""
    scored, rows = random_prompts(41, seed=3)[0], []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    (whole,) = engine_outputs(engine, scored)
    engine.add("decoding", BASES[0], greedy(40))
    while not engine.step():
        pass
    engine.add("scored", scored, greedy(1, prompt_logprobs=2))
    steps = 0
    while "scored" in engine._requests:
        rows.clear()
        before = engine.stats().computed_tokens
        outputs = {output.request_id: output for output in engine.step()}
        drawn = sum(len(output.outputs) for output in outputs.values())
        assert len(outputs["decoding"].outputs[0].token_ids) == 1
        assert engine.stats().computed_tokens - before + sum(rows) - drawn <= 16
        steps += 1
    # One of 16 is the other's, two each are the prompt's.
    assert steps == 6
    for one, other in zip(outputs["scored"].prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert (one.token_id, [token for token, _ in one.top]) == (other.token_id, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    engine.abort("decoding")


def engine_outputs(engine, prompt):
    """A prompt read alone, with its log probabilities."""
    engine.add("alone", prompt, greedy(1, prompt_logprobs=2))
    return [output for _ in range(20) for output in engine.step()]
