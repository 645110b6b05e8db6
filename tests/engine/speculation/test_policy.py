"""What a step drafts: the mode and the length that were measured to be fastest, for each text and length anew."""

import dataclasses
import math
import random
from collections import Counter

import pytest

from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.policy import FIRST_RETRY_TOKENS, RETRY_TOKENS, Policy
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import SMALL, tokens

MODES = ("chain", "tree", "sparse view")


@dataclasses.dataclass(eq=False)
class Text:
    """What a policy reads of a sequence."""

    number: int = 0
    computed: int = 1000
    decoding: bool = True


class Mode(Drafter):
    """A mode of a simulation.

    accepts   probability that a drafted token is accepted: one, or several that the drafter knows, each as frequent
    seconds   from the length of a draft, without and with unlikely tokens, and the number of decoding sequences to the
              seconds of a step"""

    usable = True

    def __init__(self, name, accepts, seconds):
        self.name, self.accepts, self.seconds = name, accepts, seconds

    def applies(self, decoding, alone):
        return self.usable

    def propose(self, budgets, min_probability):
        raise AssertionError("simulated")

    def run(self, chance, length, least):
        """Return the number of accepted, drafted and tried tokens."""
        path, drafted, accepted = 1.0, 0, 0
        for tried in range(1, length + 1):
            probability = chance.choice(self.accepts) if isinstance(self.accepts, list) else self.accepts
            path *= probability
            if path < least and isinstance(self.accepts, list):
                return accepted, drafted, tried
            accepted += accepted == drafted and chance.random() < probability
            drafted += 1
        return accepted, drafted, length


def simulate(policy, steps, active=1, text=0, computed=1000, warm=100, seed=0):
    """Run so many steps; return decisions (mode, length), and tokens per second after the first `warm` steps."""
    chance, taken, generated, seconds = random.Random(seed), [], 0, 0.0
    for step in range(steps):
        decision = policy.decide([Text(text + i, computed // active) for i in range(active)], active > 1)
        mode, length = decision.drafter, decision.length
        assert length <= policy.max_tokens
        runs = [mode.run(chance, length, decision.min_probability) for _ in range(active)]
        for accepted, drafted, _ in runs:
            mode.record(None, Draft([0] * drafted), length, accepted)
        count = active + sum(accepted for accepted, *_ in runs)
        took = mode.seconds(*runs[0][1:], active)
        policy.record(decision, count, active * (1 + length), took * (1 + 0.1 * chance.random()))
        taken.append((mode.name, length))
        if step >= warm:
            generated, seconds = generated + count, seconds + took
    return taken, generated / max(seconds, 1e-9)


def chain(accepts, dear):
    """A chain where a row more costs `dear` of a step."""
    return Mode("chain", accepts, lambda length, _, active: 1 + dear * (active * (1 + length) - 1))


@pytest.mark.parametrize("accepts", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("dear", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("active", [1, 4])
def test_chains_are_never_slower_than_plain_decoding(accepts, dear, active):
    mode = chain(accepts, dear)
    _, speed = simulate(Policy([mode], 4, True), 1500, active)
    # By tokens per step and its seconds, of each constant length.
    constant = [active * sum(accepts**j for j in range(n + 1)) / mode.seconds(n, n, active) for n in range(5)]
    assert speed >= 0.95 * constant[0]
    assert speed >= 0.85 * max(constant)


@pytest.mark.parametrize(("accepts", "fastest"), [((0.0, 0.0, 0.9), 2), ((0.1, 0.95, 0.3), 1), ((0.9, 0.2, 0.0), 0)])
def test_settles_on_the_fastest_mode_and_retries_the_others(accepts, fastest):
    modes = [chain(accepts[0], 0.1), *(Mode(MODES[i], accepts[i], lambda *_: 2.5) for i in (1, 2))]
    policy = Policy(modes, 8, True)
    taken, _ = simulate(policy, 1500)
    late = Counter(name for name, _ in taken[100:])
    assert set(late) == set(MODES) and late.most_common()[0][0] == MODES[fastest]
    # Each of two others for a step in so many tokens, sooner after they were the fastest.
    retries = 9 * late.total() / RETRY_TOKENS + math.log2(RETRY_TOKENS / FIRST_RETRY_TOKENS)
    assert late.total() - late[MODES[fastest]] <= 2 * (retries + 1)


def test_chooses_among_the_modes_that_apply():
    modes = [
        chain(0.5, 0.1),
        *(Mode(name, accepts, lambda *_: 1.5) for name, accepts in (("tree", 0.7), ("view", 0.9))),
    ]
    policy = Policy(modes, 4, True)
    for usable, fastest in (((True, True), "view"), ((True, False), "tree"), ((False, False), "chain")):
        modes[1].usable, modes[2].usable = usable
        taken = [name for name, _ in simulate(policy, 400)[0]]
        assert set(taken) <= {mode.name for mode in modes if mode.usable}
        assert Counter(taken).most_common()[0][0] == fastest
    # Without measurements the last one that applies, at full length.
    fixed = Policy(modes, 4, False)
    modes[1].usable = True
    assert set(simulate(fixed, 20)[0]) == {("tree", 4)}


def test_measures_anew_for_another_text_and_length():
    slow, mode = chain(0.0, 0.3), Mode("sparse view", 1.0, lambda *_: 4.0)
    policy = Policy([slow, mode], 3, True)
    for text in range(6):
        # Chains pay for every second text.
        slow.accepts = text % 2
        taken = [name for name, _ in simulate(policy, 40, text=text, seed=text)[0]]
        assert set(taken[:10]) == {"chain", "sparse view"}
        assert Counter(taken[10:]).most_common()[0][0] == ("chain" if text % 2 else "sparse view"), text
    # Nothing of the first text is accepted, all of the second: it does not suffer for the first.
    mode = chain(0.0, 0.3)
    policy = Policy([mode], 3, True)
    assert Counter(simulate(policy, 60, text=1)[0][30:])["chain", 0] > 25
    mode.accepts = 1.0
    assert Counter(simulate(policy, 60, text=2)[0][10:])["chain", 3] > 45
    # At another length a row costs another time: plain decoding first, and what was known of the shorter stays.
    mode.seconds = lambda length, *_: 9 * (1 + 3 * length)
    assert simulate(policy, 60, text=2, computed=9000)[0][:2] == [("chain", 0)] * 2
    assert simulate(policy, 1, text=2, computed=9000)[0] == [("chain", 0)]
    assert policy.step_seconds(1) > 8
    assert simulate(policy, 1, text=2)[0] == [("chain", 3)] and policy.step_seconds(1) < 2


def test_slow_first_step_does_not_favour_drafts():
    """Plain decoding is measured twice, and again now and then."""
    seconds = iter([9.0])
    mode = Mode("chain", 0.0, lambda length, *_: next(seconds, 1.5 if length else 1.0))
    taken = [length for _, length in simulate(Policy([mode], 3, True), 300)[0]]
    assert taken[:2] == [0, 0] and taken[20:].count(0) > 270
    # Where plain decoding becomes fast long after drafts have paid, that is noticed.
    mode = Mode("chain", 1.0, lambda length, *_: 1.1 if length else 1.0)
    policy = Policy([mode], 1, True)
    assert [length for _, length in simulate(policy, 300)[0][100:]].count(1) > 190
    mode.seconds = lambda length, *_: 1.1 if length else 0.4
    assert [length for _, length in simulate(policy, 7700)[0][-1000:]].count(0) > 900


def test_unlikely_drafts_are_not_verified():
    """Where the drafter knows which of its tokens are likely: faster than any length that is always drafted, and hardly
    slower than plain decoding where all are unlikely."""
    mode = Mode("chain", [0.02, 0.1, 0.9], lambda drafted, tried, _: 1 + 0.08 * tried + 0.05 * drafted)
    always = max(simulate(Policy([mode], count, False), 3000)[1] for count in range(5))
    assert simulate(Policy([mode], 4, True), 3000)[1] > always
    mode.accepts = [0.02, 0.1]
    assert simulate(Policy([mode], 4, True), 3000)[1] > 0.97


def test_lookup_drafts_are_as_long_as_their_acceptance_pays():
    lookup, mode = PromptLookupDrafter(), chain(0.0, 0.3)
    policy = Policy([mode], 4, True, lookup, 8)
    assert policy.decide([Text()], False).lookup == 8
    simulate(policy, 100)
    lengths = []
    for accepted in (8, 2, 0):
        for _ in range(120):
            lookup.confident_acceptance.record(8, accepted)
        lengths.append(policy.decide([Text()], False).lookup)
    assert lengths == [8, 2, 0] and Policy([mode], 4, False, lookup, 8).decide([Text()], False).lookup == 8


def test_engine_uses_each_mode_where_it_is_fastest(tiny_models, tmp_path):
    """All modes are tried for a long text that runs alone, then one stays; tokens are plain decoding's. Two get
    no tree."""
    llm = watched(
        tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(saved(tmp_path / "head")),
        speculative_tree_tokens=6, specpv=True,
    )  # fmt: skip
    engine, prompts, taken = llm.engine, random_prompts(300, 250), []
    want = [tokens(output) for output in llm.generate(prompts, greedy(40, speculate=False))]
    for fastest in MODES:
        engine.set_drafter(engine.speculation.drafter, view=SMALL)

        def recorded(decision, count, rows, seconds, fastest=fastest, record=engine.speculation.policy.record):
            """As if every token took a second, and less in one mode."""
            taken.append((decision.drafter.name, len(engine.scheduler.running)))
            record(decision, count, rows, count / (9.0 if taken[-1][0] == fastest else 1.0))

        engine.speculation.policy.record = recorded
        taken.clear()
        assert tokens(llm.generate(prompts[:1], greedy(40))[0]) == want[0]
        names = [name for name, _ in taken]
        assert set(names[:3]) == set(MODES) and len(names) > 6
        assert Counter(names[3:])[fastest] >= len(names) - 3 - 2 * 2  # each of two others at 16 and 32 tokens
    taken.clear()
    assert [tokens(output) for output in llm.generate(prompts, greedy(40))] == want
    assert {name for name, running in taken if running == 2} == {"chain", "sparse view"}
    idle(engine)
