"""Late masks change no token and delay no other request."""

import os
import random
import signal
from pathlib import Path

import pytest

from mlaforge.checkpoint.eagle3 import read_head
from mlaforge.engine.sampling import grammar
from mlaforge.engine.sampling.constraint import Constraint
from mlaforge.engine.sampling.params import SamplingParams
from support.drafters import Branching, Knowing
from support.eagle3_heads import check_drafts, recorded, saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import HOW, check_identities, speculate

pytest.importorskip("llguidance")

PROMPTS = random_prompts(9, 30, 21, seed=3)


class Lateness:
    """`chance` that a mask seems not to be ready when it is read, and how many times it seemed so."""

    chance, times = 0.0, 0


@pytest.fixture
def late(monkeypatch):
    coin, there, lateness = random.Random(0), Constraint.ready.fget, Lateness()

    def ready(constraint):
        lateness.times += (unlucky := coin.random() < lateness.chance)
        return there(constraint) and not unlucky

    monkeypatch.setattr(Constraint, "ready", property(ready))
    return lateness


@pytest.fixture(scope="module")
def llama(tiny_models):
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def plain(llama):
    return watched(llama)


def params_of(name, **more):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "n": 2}
    return SamplingParams(**{**options, **HOW[name], **more})


def assert_same_outputs(expected, got):
    for want, have in zip(expected, got, strict=True):
        for a, b in zip(want.outputs, have.outputs, strict=True):
            assert (b.token_ids, b.text, b.finish_reason) == (a.token_ids, a.text, a.finish_reason)
            logprobs = [*a.logprobs, *(want.prompt_logprobs or [])], [*b.logprobs, *(have.prompt_logprobs or [])]
            for x, y in zip(*logprobs, strict=True):
                if x is not None:
                    assert (y.token_id, y.logprob) == (x.token_id, pytest.approx(x.logprob, abs=1e-4))


@pytest.mark.parametrize("spare", [4, 60])
def test_late_masks_change_no_token(llama, plain, late, spare):
    """Beside an unconstrained request; with several continuations, chunked and scored prompts, and preemption."""
    params = [params_of(name, prompt_logprobs=1) for name in ("json", "regex", "plain")]
    expected = plain.generate(PROMPTS, params)
    llm = watched(llama)
    renew(llm.engine, spare, 60, block_size=4, max_step=16, max_num_seqs=6)
    late.chance = 0.5
    assert_same_outputs(expected, llm.generate(PROMPTS, params))
    assert late.times > 50 and (llm.engine.stats().preemptions > 0) == (spare == 4)
    idle(llm.engine)


@pytest.mark.parametrize("name", ["json", "regex"])
@pytest.mark.parametrize("tree", [False, True])
def test_late_masks_change_no_token_with_drafts(llama, plain, late, name, tree):
    """A draft may be followed in part, and a tree computed in vain."""
    params = params_of(name, n=1)
    expected = plain.generate([PROMPTS[1]], params)
    llm = watched(llama, cache_bytes=4 << 20)
    texts = [PROMPTS[1] + expected[0].outputs[0].token_ids]
    late.chance = 0.4
    for seed in range(4):
        if tree:
            speculate(llm.engine, Branching(texts, 0.8, seed=seed), 4, 16)
        else:
            speculate(llm.engine, Knowing(texts, 0.8, seed=seed), 4)
        assert_same_outputs(expected, llm.generate([PROMPTS[1]], params))
        assert llm.engine.stats().speculation.accepted > 0
        check_identities(llm.engine.stats().speculation)
    assert late.times > 50
    idle(llm.engine)


def test_late_masks_change_no_draft_of_a_head(llama, plain, late, tmp_path):
    """The head's cache holds accepted tokens, and none of sequences that wait for a grammar."""
    folder = saved(tmp_path / "head")
    llm = watched(llama, speculative=str(folder), adaptive_speculation=False)
    params = [params_of("json", n=1, temperature=0.0), params_of("regex", n=1, temperature=0.0), greedy(20, logprobs=2)]
    expected = plain.generate(PROMPTS, params)
    seen = recorded(llm.engine.speculation.drafter)
    renew(llm.engine, 60, 60, block_size=4, max_step=16)
    late.chance = 0.5
    assert_same_outputs(expected, llm.generate(PROMPTS, params))
    assert late.times > 50
    greedy_drafts = [each for each in seen if each[0][: len(PROMPTS[2])] == PROMPTS[2]]
    check_drafts(greedy_drafts, read_head(folder, 3), Oracle(llama))
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


def children(number):
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def test_stopped_grammar_process_delays_no_other_request(llama):
    """Only its request gets no tokens, and it can be aborted."""
    engine = watched(llama).engine
    free = params_of("plain", n=1, max_tokens=60)
    stuck = SamplingParams(regex="[ab]{400}", max_tokens=400, seed=1)
    other = SamplingParams(regex="[xy]{60}", max_tokens=60, seed=1)
    lengths = dict.fromkeys(("stuck", "free", "other"), 0)

    def step():
        for output in engine.step():
            lengths[output.request_id] += len(output.outputs[0].token_ids)

    engine.add("stuck", PROMPTS[0], stuck)
    # The process that checked the grammar ends by and by; the one that follows it stays.
    while not lengths["stuck"] or len(followers := children(engine.grammars._process.pid)) > 1:
        step()
    for name, params in (("free", free), ("other", other)):
        engine.add(name, PROMPTS[1], params)
    (first,) = followers
    os.kill(first, signal.SIGSTOP)
    before = lengths["stuck"]
    while lengths["free"] < 60 or lengths["other"] < 60:
        step()
    # A mask may have been on its way.
    assert lengths["stuck"] <= before + 1
    engine.abort("stuck")
    os.kill(first, signal.SIGCONT)
    assert not engine.has_work
    idle(engine)


@pytest.mark.parametrize("n", [1, 2])
def test_costly_grammar_fails_only_its_request(llama, monkeypatch, n):
    monkeypatch.setattr(grammar, "FOLLOW", {**grammar.FOLLOW, "seconds": 0.5})
    llm = watched(llama)
    costly = SamplingParams(regex="x(a{100000})", max_tokens=400, n=n)
    failed, free = llm.generate(PROMPTS[:2], [costly, params_of("plain")])
    assert failed.finished and "it takes more processor time" in failed.error
    assert {c.finish_reason for c in failed.outputs} == {"error"}
    assert len(failed.outputs) == n and all(0 < len(c.token_ids) < 400 for c in failed.outputs)
    assert_same_outputs(llm.generate([PROMPTS[1]], params_of("plain")), [free])
    assert free.error is None
    idle(llm.engine)
