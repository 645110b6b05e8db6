"""How a step drafts: what was measured to be fastest, for each text that runs alone."""

import pytest

from mlaforge.engine.speculation.controller import (
    CHAIN,
    RETRY_TOKENS,
    SPARSE_TREE,
    SPARSE_VIEW,
    TREE,
    TRIAL_TOKENS,
    ModeSelector,
)
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import SMALL, tokens

MODES = (CHAIN, TREE, SPARSE_VIEW)
EVERY = (*MODES, SPARSE_TREE)


def test_selects_the_fastest_mode_and_retries_the_others():
    seconds = {CHAIN: 0.02, TREE: 0.05, SPARSE_VIEW: 0.1}
    for made, wanted in (((1, 1, 12), SPARSE_VIEW), ((1, 4, 3), TREE), ((3, 1, 3), CHAIN)):
        selector, taken = ModeSelector(), []
        for _ in range(400):
            mode = selector.choose(2, MODES)
            taken.append((mode, made[MODES.index(mode)]))
            selector.record(mode, taken[-1][1], seconds[mode])
        late = taken[100:]
        others = sum(tokens_made for mode, tokens_made in late if mode != wanted)
        # Each of two others for a trial, which a step may overshoot, in so many tokens of the fastest.
        share = 2 * (TRIAL_TOKENS + max(made)) / (RETRY_TOKENS + 2 * TRIAL_TOKENS)
        assert {mode for mode, _ in late} == set(MODES) and others <= share * sum(
            tokens_made for _, tokens_made in late
        )


def test_selects_among_the_given_modes_only():
    selector = ModeSelector()
    selector.choose(1, MODES)
    for mode, tokens_made in zip(MODES, (1, 2, 4), strict=True):
        for _ in range(TRIAL_TOKENS):
            selector.record(mode, tokens_made, 1.0)
    assert selector.choose(1, [CHAIN, TREE]) == TREE and selector.choose(1, [CHAIN]) == CHAIN
    assert selector.choose(1, MODES) == SPARSE_VIEW


def test_measures_anew_for_each_sequence_from_the_last_measurements():
    selector = ModeSelector()
    for alone in range(8):
        taken = []
        for _ in range(30):
            taken.append(selector.choose(1, (CHAIN, SPARSE_VIEW), alone))
            # Sparse-view verification pays for every second text.
            selector.record(taken[-1], 2, 0.5 if (taken[-1] == SPARSE_VIEW) == (alone % 2 == 0) else 1.0)
        assert set(taken[:6]) == {CHAIN, SPARSE_VIEW} and set(taken[10:]) == {SPARSE_VIEW if alone % 2 == 0 else CHAIN}
    # Others that come and go are no other text, and other lengths have a selector of their own.
    selector.choose(2, (CHAIN, SPARSE_VIEW))
    assert {selector.choose(1, (CHAIN, SPARSE_VIEW), 7) for _ in range(8)} == {CHAIN}
    selector.record(CHAIN, 2, 1.0)
    assert selector.choose(1, (SPARSE_VIEW, CHAIN), 7, 4096) == SPARSE_VIEW


@pytest.mark.parametrize("fastest", EVERY)
def test_sequence_settles_on_its_fastest_mode(fastest, tiny_models, tmp_path):
    """All modes are tried for a long text that runs alone, then one is kept to; its tokens are plain decoding's. Two
    together get no tree."""
    llm = watched(
        tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(saved(tmp_path / "head")),
        speculative_tree_tokens=6, specpv="lossless", **SMALL,
    )  # fmt: skip
    engine, prompts = llm.engine, random_prompts(300, 250)
    wanted = [tokens(output) for output in llm.generate(prompts, greedy(48, speculate=False))]
    controller, selector = engine.speculation.controller, engine.speculation.controller.mode_selector
    taken, decide, record = [], controller.decide, selector.record

    def deciding(running, waiting):
        taken.append(decide(running, waiting))
        return taken[-1]

    # As if that one made many tokens in no time.
    selector.record = lambda mode, made, seconds: record(mode, made, made / (9.0 if mode == fastest else 1.0))
    controller.decide = deciding
    assert tokens(llm.generate(prompts[:1], greedy(48))[0]) == wanted[0]
    modes = [decision.mode for decision in taken if decision.mode is not None]
    early = len(EVERY) * TRIAL_TOKENS
    late = modes[early:]
    # One decision of many tries another.
    assert set(modes[:early]) == set(EVERY) and len(late) > 2 and late.count(fastest) >= len(late) - 1
    assert all(
        (decision.tree > 0) == (decision.mode in (TREE, SPARSE_TREE)) for decision in taken if decision.mode is not None
    )
    taken.clear()
    assert [tokens(output) for output in llm.generate(prompts, greedy(48))] == wanted
    assert {decision.mode for decision in taken if len(decision.counts) == 2} <= {SPARSE_VIEW}
    idle(engine)
