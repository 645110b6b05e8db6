"""Which way a step drafts: what was measured to be fastest, for each text that runs alone."""

import pytest

from mlaforge.engine.speculation.controller import CHAIN, PACE_STEPS, PARTIAL, TREE, Pace
from mlaforge.engine.speculation.policy import EXPLORE_EVERY
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import SMALL, tokens

WAYS = (CHAIN, TREE, PARTIAL)


def test_the_fastest_way_is_taken_and_the_others_tried():
    seconds = {CHAIN: 0.02, TREE: 0.05, PARTIAL: 0.1}
    for made, wanted in (((1, 1, 12), PARTIAL), ((1, 4, 3), TREE), ((3, 1, 3), CHAIN)):
        pace, taken = Pace(), []
        for _ in range(6 * EXPLORE_EVERY):
            taken.append(pace.choose(2, WAYS))
            pace.record(2, taken[-1], made[WAYS.index(taken[-1])], seconds[taken[-1]])
        late = taken[2 * EXPLORE_EVERY :]
        assert late.count(wanted) >= len(late) - 4 and set(late) == set(WAYS)


def test_a_way_that_is_not_there_is_not_taken():
    pace = Pace()
    for way, tokens_made in zip(WAYS, (1, 2, 9), strict=True):
        for _ in range(PACE_STEPS):
            pace.record(1, way, tokens_made, 1.0)
    assert pace.choose(1, [CHAIN, TREE]) == TREE and pace.choose(1, [CHAIN]) == CHAIN
    assert pace.choose(1, WAYS) == PARTIAL


def test_another_text_is_measured_anew():
    pace = Pace()
    for alone in (1, 2):
        taken = []
        for _ in range(20):
            taken.append(pace.choose(1, (CHAIN, PARTIAL), alone))
            # Partial verification pays for the first text alone.
            pace.record(1, taken[-1], 9 if (taken[-1] == PARTIAL) == (alone == 1) else 1, 1.0)
        assert taken[:8] == [CHAIN] * 4 + [PARTIAL] * 4 and set(taken[9:]) == {PARTIAL if alone == 1 else CHAIN}
    # Others that come and go are no other text.
    pace.choose(2, (CHAIN, PARTIAL))
    assert {pace.choose(1, (CHAIN, PARTIAL), 2) for _ in range(8)} == {CHAIN}


@pytest.mark.parametrize("fastest", WAYS)
def test_a_sequence_takes_what_is_fastest_for_it(fastest, tiny_models, tmp_path):
    """All ways are tried for a long text that runs alone, then one is kept to; its tokens are plain decoding's. Two
    together get no tree."""
    llm = watched(
        tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(saved(tmp_path / "head")),
        speculative_tree_tokens=6, specpv="lossless", **SMALL,
    )  # fmt: skip
    engine, prompts = llm.engine, random_prompts(300, 250)
    wanted = [tokens(output) for output in llm.generate(prompts, greedy(48, speculate=False))]
    controller, pace = engine.speculation.controller, engine.speculation.controller.pace
    taken, decide, record = [], controller.decide, pace.record

    def deciding(running, waiting):
        taken.append(decide(running, waiting))
        return taken[-1]

    # As if that one made many tokens in no time.
    pace.record = lambda active, way, made, seconds: record(active, way, 9 if way == fastest else 1, 1.0)
    controller.decide = deciding
    assert tokens(llm.generate(prompts[:1], greedy(48))[0]) == wanted[0]
    ways = [decision.way for decision in taken if decision.way is not None]
    late = ways[3 * PACE_STEPS :]
    # One decision of many tries another.
    assert set(ways[: 3 * PACE_STEPS]) == set(WAYS) and len(late) > 2 and late.count(fastest) >= len(late) - 1
    assert all((decision.tree > 0) == (decision.way == TREE) for decision in taken if decision.way is not None)
    taken.clear()
    assert [tokens(output) for output in llm.generate(prompts, greedy(48))] == wanted
    assert {decision.way for decision in taken if len(decision.counts) == 2} <= {PARTIAL}
    idle(engine)
