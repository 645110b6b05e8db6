"""Late masks: they change no token, and nobody waits for another's."""

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
from support.speculating import HOW, branch, check_identities, speculate

pytest.importorskip("llguidance")

PROMPTS = random_prompts(9, 30, 21, seed=3)


class Lateness:
    """How likely a mask seems not to be there, each time that somebody asks, and how often that was."""

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


def asked(name, **more):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "n": 2}
    return SamplingParams(**{**options, **HOW[name], **more})


def same(wanted, got):
    for want, have in zip(wanted, got, strict=True):
        for a, b in zip(want.outputs, have.outputs, strict=True):
            assert (b.token_ids, b.text, b.finish_reason) == (a.token_ids, a.text, a.finish_reason)
            logprobs = [*a.logprobs, *(want.prompt_logprobs or [])], [*b.logprobs, *(have.prompt_logprobs or [])]
            for x, y in zip(*logprobs, strict=True):
                if x is not None:
                    assert (y.token_id, y.logprob) == (x.token_id, pytest.approx(x.logprob, abs=1e-4))


@pytest.mark.parametrize("spare", [4, 60])
def test_tokens_are_the_same_whatever_is_late(llama, plain, late, spare):
    """Beside a free one; with several continuations, prompts in chunks and scored, and through preemption."""
    params = [asked(name, prompt_logprobs=1) for name in ("json", "regex", "plain")]
    wanted = plain.generate(PROMPTS, params)
    llm = watched(llama)
    renew(llm.engine, spare, 60, block_size=4, max_step=16, max_num_seqs=6)
    late.chance = 0.5
    same(wanted, llm.generate(PROMPTS, params))
    assert late.times > 50 and (llm.engine.stats().preemptions > 0) == (spare == 4)
    idle(llm.engine)


@pytest.mark.parametrize("name", ["json", "regex"])
@pytest.mark.parametrize("tree", [False, True])
def test_drafted_tokens_too(llama, plain, late, name, tree):
    """A draft may be followed in part, and a tree be computed for nothing."""
    params = asked(name, n=1)
    wanted = plain.generate([PROMPTS[1]], params)
    llm = watched(llama, cache_bytes=4 << 20)
    texts = [PROMPTS[1] + wanted[0].outputs[0].token_ids]
    late.chance = 0.4
    for seed in range(4):
        if tree:
            branch(llm.engine, Branching(texts, 0.8, seed=seed), 4, 16)
        else:
            speculate(llm.engine, Knowing(texts, 0.8, seed=seed), 4)
        same(wanted, llm.generate([PROMPTS[1]], params))
        assert llm.engine.stats().speculation.accepted > 0
        check_identities(llm.engine.stats().speculation)
    assert late.times > 50
    idle(llm.engine)


def test_a_head_drafts_as_it_does(llama, plain, late, tmp_path):
    """Its cache holds what was settled, and nothing of those that were held."""
    folder = saved(tmp_path / "head")
    llm = watched(llama, speculative=str(folder), adaptive_speculation=False)
    params = [asked("json", n=1, temperature=0.0), asked("regex", n=1, temperature=0.0), greedy(20, logprobs=2)]
    wanted = plain.generate(PROMPTS, params)
    seen = recorded(llm.engine.speculation.drafter)
    renew(llm.engine, 60, 60, block_size=4, max_step=16)
    late.chance = 0.5
    same(wanted, llm.generate(PROMPTS, params))
    assert late.times > 50
    greedily = [each for each in seen if each[0][: len(PROMPTS[2])] == PROMPTS[2]]
    check_drafts(greedily, read_head(folder, 3), Oracle(llama))
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


def children(number):
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def test_nobody_waits_for_a_process_that_does_not_answer(llama):
    """It is the only one that gets no tokens, and can be aborted."""
    engine = watched(llama).engine
    free = asked("plain", n=1, max_tokens=60)
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
def test_a_grammar_that_becomes_too_costly_ends_its_request_alone(llama, monkeypatch, n):
    monkeypatch.setattr(grammar, "FOLLOW", {**grammar.FOLLOW, "seconds": 0.5})
    llm = watched(llama)
    costly = SamplingParams(regex="x(a{100000})", max_tokens=400, n=n)
    failed, free = llm.generate(PROMPTS[:2], [costly, asked("plain")])
    assert failed.finished and "it takes more processor time" in failed.error
    assert {c.finish_reason for c in failed.outputs} == {"error"}
    assert len(failed.outputs) == n and all(0 < len(c.token_ids) < 400 for c in failed.outputs)
    same(llm.generate([PROMPTS[1]], asked("plain")), [free])
    assert free.error is None
    idle(llm.engine)
