"""Sparse-view verification of sparse models: what the last full step chose serves the sparse-view ones after it."""

import dataclasses
import json
import shutil

import pytest

from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.sparse_view import SparseViewDrafter
from support.drafters import Knowing
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import check_identities, partly, speculate, watch_selections

# Layers read 40 tokens (conftest.py); views hold the newest 32 beside what was chosen before them.
VIEW = {"specpv_sink": 1, "specpv_window": 32, "specpv_full_every": 3, "specpv_max_pending": 8}
CASES = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("llama", "coded"), ("gpt_oss", "gqa")]
NEW = 24


@pytest.fixture(params=[*CASES, ("llama", "latent", 2)], ids=str)
def model(request, sparse):
    family, layout, *share = request.param
    return sparse(family, layout, **({"share": share[0]} if share else {}))


def continued(llm, prompts, **more):
    outputs = llm.generate(prompts, greedy(NEW, **more))
    return [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]


class Recorded:
    """Proposes, step by step, what is given for texts of these lengths."""

    boundaries: tuple[int, ...] = ()

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, budgets, min_probability):
        return [self._draft(self.drafts.get(len(sequence.token_ids)), count) for sequence, count in budgets]

    def _draft(self, tokens, count):
        assert not tokens or len(tokens) <= count
        return Draft(tokens) if tokens else None


def test_provisional_tokens_are_verified_like_any_draft(model, monkeypatch):
    """The same drafts without sparse-view steps make the same text, to the bit."""
    llm = watched(model, dtype="bfloat16", cache_bytes=16 << 20)
    (prompt,) = random_prompts(300)
    (text,) = continued(llm, [prompt], speculate=False)
    drafts, propose = {}, SparseViewDrafter.propose

    def recording(self, budgets, *rest):
        made = propose(self, budgets, *rest)
        drafts.update({len(sequence.token_ids): draft.token_ids for sequence, draft in made.items()})
        return made

    monkeypatch.setattr(SparseViewDrafter, "propose", recording)
    stats = partly(llm.engine, Knowing([text], 0.8), **VIEW).stats
    (made,) = continued(llm, [prompt])
    assert stats.sparse_steps > 4 and stats.provisional == sum(map(len, drafts.values())) > 8
    check_identities(stats)
    llm.engine.config = dataclasses.replace(llm.engine.config, specpv="off")
    speculate(llm.engine, Recorded(drafts), 8)
    assert continued(llm, [prompt]) == [made]
    assert llm.engine.speculation.stats.drafted == stats.drafted
    idle(llm.engine)


def test_view_of_all_tokens_is_plain_decoding(model):
    """Read densely, a sparse model's tokens are those of plain decoding, in batches too."""
    llm = watched(model, dtype="bfloat16", cache_bytes=16 << 20, dense=True)
    prompts = random_prompts(300, 250, 40)
    texts = continued(llm, prompts, speculate=False)
    for drafter in (Knowing(texts, 0.8), PromptLookupDrafter()):
        stats = partly(llm.engine, drafter, specpv_retrieval=40, **VIEW).stats
        assert continued(llm, prompts) == texts and stats.sparse_steps > 2


@pytest.mark.parametrize("chunk", [16, 512])
def test_view_holds_the_index_selection(chunk, model):
    """For the prompt's last token too, whose step reads all; and the newest tokens, once."""
    llm = watched(model, dtype="bfloat16", cache_bytes=16 << 20, max_num_batched_tokens=chunk, max_num_seqs=4)
    chosen = []
    watch_selections(llm, lambda inputs, outputs: chosen.append(outputs[1][0, : inputs[5][0]].tolist()))
    (prompt,) = random_prompts(300)
    engine = llm.engine
    partial = partly(engine, Knowing([], 1.0), **VIEW).sparse_view
    engine.add("text", prompt, greedy(NEW))
    while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
        engine.step()
    # Once in each layer that has an index, however the prompt was cut.
    assert len(chosen) == sum(rows.index is not None for rows in engine.cache.rows)
    (sequence,) = engine.scheduler.running
    known, end = partial.retrieved[sequence.number], len(prompt) + 4
    assert known.stop == len(prompt) - 1 - VIEW["specpv_window"] and len(known.positions) == partial.num_layers
    for places in known.positions:
        assert places.tolist() in [[place for place in each if place < known.stop] for each in chosen]
    engine.tables.reserve(sequence.number, end)
    view = partial._build_views([sequence], [(len(prompt) + 1, 3)])
    for places, places_SK, more in zip(known.positions, view.positions_LSK, view.surplus, strict=True):
        assert places_SK[0, : end + more[0]].tolist() == [*places, *range(known.stop, end)]
    engine.abort("text")
    idle(engine)


def test_layers_may_have_different_topk(sparse, tmp_path):
    """Layers that read different numbers of tokens have views of different lengths."""
    copy = tmp_path / "model"
    shutil.copytree(sparse("llama", "gqa"), copy)
    config = json.loads((copy / "config.json").read_text())
    budgets = [48, *[24] * (len(config["indexer_types"]) - 1)]
    (copy / "config.json").write_text(json.dumps(config | {"index_topk_per_layer": budgets}))
    llm = LLM(copy, device="cpu", dtype="bfloat16", cache_bytes=16 << 20)
    prompts = random_prompts(300, 310)
    texts = continued(llm, prompts, speculate=False)
    speculation = partly(llm.engine, Knowing(texts, 0.9), **VIEW)
    assert speculation.sparse_view.config.retrieval == 48
    made = continued(llm, prompts)
    assert [len(text) for text in made] == [len(text) for text in texts]
    assert speculation.stats.sparse_steps > 2
    (first, *others) = next(iter(speculation.sparse_view.retrieved.values())).positions
    # The newest twelve of a selection stand among the newest 32 of a view.
    assert 24 < len(first) <= 48 and all(2 < len(own) <= 24 for own in others)
    llm.engine.check_integrity()
