"""Sparse-view verification: what a view holds and reads, when it is made, and which drafts come of it."""

import dataclasses
import heapq
import inspect
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

import mlaforge
from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation import sparse_view
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.sparse_view import FIRST_PROVISIONAL, REFRESH_EVERY, RetrievedTokens
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError
from support.drafters import Knowing
from support.eagle3_heads import recorded, saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.host_reads import host_reads
from support.speculating import CASES, SMALL, AnyLength, check_identities, partly, watch_selections
from support.tiny_models import load_original

NEW = 24


@pytest.fixture(params=[*CASES, ("llama", "latent_rope"), ("llama", "coded")], ids=str)
def model(request, tiny_models, converted):
    family, layout = request.param
    if layout == "coded":
        return converted(family, "latent", bits=6)
    return converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]


def bf16(model, **options):
    return watched(model, **{"dtype": "bfloat16", "cache_bytes": 64 << 20, **options})


def texts_of(llm, prompts, **more):
    outputs = llm.generate(prompts, greedy(NEW, **more))
    return [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]


def decoding(llm, prompt):
    """A sequence whose prompt was computed, and the chunk of its next step, with room for it."""
    engine = llm.engine
    engine.add("text", prompt, greedy(NEW))
    while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.tables.reserve(sequence.number, len(sequence.token_ids))
    return sequence, Chunk(sequence.number, sequence.token_ids, sequence.computed, len(sequence.token_ids), None, True)


# What a view reads


def test_view_of_all_tokens_confirms_all_provisional_tokens(model):
    """The target accepts plain decoding's tokens under it and no others."""
    llm, prompts = bf16(model), random_prompts(300)
    texts = texts_of(llm, prompts)
    base = AnyLength(retrieval=32, window=400, full_every=3, max_provisional=9)
    stats = partly(llm.engine, Knowing(texts, 0.5), dtype="model", base=base).stats
    assert texts_of(llm, prompts) == texts
    # Without a layer with full attention there is nothing to leave out.
    if llm.engine.speculation.sparse_view.num_layers:
        assert stats.provisional == stats.confirmed > NEW / 2 and stats.sparse_steps > 2
    else:
        assert stats.sparse_steps == 0 < stats.accepted
    check_identities(stats)
    idle(llm.engine)


def test_reads_nothing_outside_the_view(model):
    """Rows that a sparse view leaves out may hold anything."""
    llm, (prompt,) = bf16(model), random_prompts(300)
    engine = llm.engine
    view = partly(engine, Knowing([])).sparse_view
    sequence, chunk = decoding(llm, prompt)
    if not view.num_layers:
        assert not view.covers(sequence, sequence.computed) and not view.applies([sequence], True)
        return
    assert view.covers(sequence, sequence.computed) and view.applies([sequence], False)
    # As if the last full step had attended to these.
    random = np.random.default_rng(0)
    some = random.permuted(np.tile(np.arange(16, 250), (view.num_layers, 1)), axis=1)[:, :32]
    chosen = [np.concatenate((np.arange(16), np.sort(own))) for own in some]
    view.retrieved[sequence.number] = RetrievedTokens(chosen, sequence.computed - SMALL.window)
    views = view._build_views([sequence], [(chunk.stop, 0)])
    before = engine.runner(view._batch([chunk], views)).clone()
    groups = [layer.attention.group for layer in engine.model.layers]
    full = [layer for layer, group in enumerate(groups) if engine.tables.groups[group].window is None]
    for at, layer in enumerate(full):
        seen = views.positions_LSK[at, 0, : chunk.stop + views.surplus[at][0]].numpy()
        assert len(set(seen)) == len(seen) < chunk.stop / 2 and set(chosen[at]) < set(seen)
        blocks = np.asarray(engine.tables.table(sequence.number, groups[layer])[1])
        left_out = np.setdiff1d(np.arange(chunk.stop), seen)
        packed = engine.cache.rows[layer].packed
        packed[torch.from_numpy(blocks[left_out // 16] * 16 + left_out % 16)] = (
            torch.nan if packed.is_floating_point() else 255
        )
    after = engine.runner(view._batch([chunk], views))
    assert torch.equal(after, before) and not after.isnan().any()


# What is retrieved


def attention_mass(directory, ids, **options):
    """Of the last token of a text, layer by layer."""
    llm = watched(directory, cache_bytes=64 << 20, **options)
    _, chunk = decoding(llm, ids[:-1])
    chunk, probe = dataclasses.replace(chunk, token_ids=ids), AttentionProbe([0])
    batch = make_batch([chunk], llm.engine.tables, llm.engine.device)
    llm.engine.runner(dataclasses.replace(batch, probe=probe))
    return [layer[0] for layer in probe.layers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_retrieves_the_tokens_with_most_attention_mass(family, dtype, tiny_models, converted):
    """By transformers' own attention, and that of a conversion without loss; `latent` has it by the mean of each
    block."""
    (ids,) = random_prompts(301)
    source = tiny_models[family]
    reference = attention_mass(source, ids, dtype=dtype)
    oracle = load_original(source)
    oracle.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = oracle(torch.tensor([ids]), output_attentions=True).attentions
    full = [layer for layer in attentions if float(layer[0, :, -1, 0].sum()) > 0]
    assert len(reference) == len(full) > 0
    for mass, layer in zip(reference, full, strict=True):
        p = layer[0, :, -1]
        expected = (p / p.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(mass, expected.detach(), rtol=1e-3, atol=1e-3 if dtype == "float32" else 0.05)
    rope = attention_mass(converted(family, "latent_rope", budget=1.0), ids, dtype=dtype)
    int8 = attention_mass(source, ids, dtype=dtype, kv_cache_dtype="int8")
    latent = attention_mass(converted(family, "latent", budget=1.0), ids, dtype=dtype)
    for mass, same, rounded, summary in zip(reference, rope, int8, latent, strict=True):
        torch.testing.assert_close(same, mass, rtol=0.1, atol=1e-2 if dtype == "float32" else 0.15)
        torch.testing.assert_close(rounded, mass, rtol=0.1, atol=0.15)
        blocks = [mass_L[: len(ids) // 16 * 16].view(-1, 16).sum(1) for mass_L in (summary, mass)]
        assert summary.shape == mass.shape and not summary[len(ids) // 16 * 16 :].any()
        assert torch.corrcoef(torch.stack(blocks))[0, 1] > 0


# Sparse layers read 40 tokens (conftest.py); views hold the newest 32 beside what was selected before them.
SPARSE_VIEW = {"retrieval": 40, "sink": 1, "window": 32, "full_every": 3, "max_provisional": 8}


@pytest.mark.parametrize("name", [("llama", "gqa"), ("gpt_oss", "gqa"), ("llama", "latent", 2)], ids=str)
def test_view_holds_the_index_selection(name, sparse):
    """For the prompt's last token too, whose step reads all; and the newest tokens once. In chunks or not."""
    family, layout, *share = name
    model, (prompt,) = sparse(family, layout, **({"share": share[0]} if share else {})), random_prompts(300)
    for chunk in (16, 512):
        llm, selected = bf16(model, max_num_batched_tokens=chunk, max_num_seqs=4), []
        watch_selections(llm, lambda inputs, outputs, to=selected: to.append(outputs[1][0, : inputs[5][0]].tolist()))
        view = partly(llm.engine, Knowing([]), **SPARSE_VIEW).sparse_view
        sequence, _ = decoding(llm, prompt)
        # Once in each layer that has an index.
        assert len(selected) == sum(rows.index is not None for rows in llm.engine.cache.rows)
        retrieved, end = view.retrieved[sequence.number], len(prompt) + 4
        assert retrieved.stop == len(prompt) - 1 - 32 and len(retrieved.positions) == view.num_layers
        for places in retrieved.positions:
            assert places.tolist() in [[place for place in own if place < retrieved.stop] for own in selected]
        llm.engine.tables.reserve(sequence.number, end)
        views = view._build_views([sequence], [(len(prompt) + 1, 3)])
        for places, places_SK, more in zip(retrieved.positions, views.positions_LSK, views.surplus, strict=True):
            assert places_SK[0, : end + more[0]].tolist() == [*places, *range(retrieved.stop, end)]
        llm.engine.abort("text")
        idle(llm.engine)


def test_layers_may_have_different_topk(sparse, tmp_path):
    """Layers that select different numbers of tokens have views of different lengths."""
    copy = shutil.copytree(sparse("llama", "gqa"), tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    budgets = [48, *[24] * (len(config["indexer_types"]) - 1)]
    (copy / "config.json").write_text(json.dumps(config | {"index_topk_per_layer": budgets}))
    llm, prompts = bf16(copy, speculative="ngram", specpv=True), random_prompts(300, 310)
    # Not the option's, but the largest selection.
    assert llm.engine.speculation.sparse_view.view.retrieval == 48
    texts = texts_of(llm, prompts, speculate=False)
    speculation = partly(llm.engine, Knowing(texts, 0.9), **{**SPARSE_VIEW, "retrieval": 48})
    assert texts_of(llm, prompts) == texts
    assert speculation.stats.sparse_steps > 2
    (first, *others) = next(iter(speculation.sparse_view.retrieved.values())).positions
    # The newest twelve of a selection stand among the newest 32 of a view.
    assert 24 < len(first) <= 48 and all(2 < len(own) <= 24 for own in others)
    idle(llm.engine)


# When a view is made, and how far it goes


def test_limit_of_provisional_tokens_follows_acceptance(tiny_models):
    llm, (prompt,) = bf16(tiny_models["llama"]), random_prompts(300)
    speculation = partly(llm.engine, Knowing([]), 8)
    view, policy = speculation.sparse_view, speculation.policy
    sequence, _ = decoding(llm, prompt)
    assert policy.decide([sequence], False).tokens(sequence) == FIRST_PROVISIONAL
    rooms = []
    for provisional, accepted in ((4, 4), (8, 8), (9, 5), (5, 0), (2, 2)):
        view.record(sequence, Draft([0] * provisional, steps=1), provisional, accepted)
        # No more room is reserved than may be used.
        rooms.append(policy.decide([sequence], False).tokens(sequence))
    assert rooms == [8, SMALL.max_provisional, 5, 2, 4]


def test_retrieval_is_refreshed_after_some_tokens(tiny_models):
    llm, (prompt,) = bf16(tiny_models["llama"]), random_prompts(300)
    view = partly(llm.engine, Knowing([])).sparse_view
    sequence, _ = decoding(llm, prompt)
    # Since the prompt was read.
    assert sequence.number in view.retrieved and sequence.computed == len(prompt)
    assert view.probe([(sequence, len(prompt) + 1)]) is None
    sequence.token_ids += [0] * REFRESH_EVERY
    # Not before the text is computed to its end.
    assert view.probe([(sequence, len(prompt) + REFRESH_EVERY)]) is None
    ends = [(sequence, len(prompt) + REFRESH_EVERY + 1)]
    probe = view.probe(ends)
    assert probe.sequences == [0]
    probe.layers.extend([torch.rand(len(prompt) + REFRESH_EVERY + 1)] for _ in range(view.num_layers))
    view.retrieve()
    assert view.probe(ends) is None


@pytest.mark.parametrize("full_every", [1, 3])
def test_eagle_head_follows_provisional_tokens(full_every, tiny_models, tmp_path):
    """A full step after each sparse-view step or not: under a view of all tokens the head's drafts are accepted as
    often as by full steps alone."""
    head, (prompt,) = saved(tmp_path / "head", tokens=[40, 41]), random_prompts(150)
    llm = bf16(tiny_models["llama"], speculative=str(head))
    drafter, how = llm.engine.speculation.drafter, greedy(60, logit_bias={40: 100.0, 41: 100.0})
    base = AnyLength(retrieval=0, window=400, full_every=full_every, max_provisional=16)
    llm.engine.set_drafter(drafter, 2, False, adaptive_speculation=False)
    seen = recorded(drafter)
    plain = llm.generate([prompt], how)[0].outputs[0].token_ids
    alone = {len(text): draft.token_ids for text, _, draft in seen if draft}
    seen.clear()
    stats = partly(llm.engine, drafter, 2, dtype="model", base=base).stats
    assert llm.generate([prompt], how)[0].outputs[0].token_ids == plain
    assert stats.provisional == stats.confirmed and stats.sparse_steps >= stats.full_steps > 0
    assert full_every > 1 or stats.sparse_steps == stats.full_steps
    common = [(alone[len(text)], draft.token_ids) for text, _, draft in seen if draft and len(text) in alone]
    assert len(common) > 5
    for own, other in common:
        assert own[: len(other)] == other[: len(own)]
    idle(llm.engine)


def test_host_reads_a_sparse_view_step_once(tiny_models, tmp_path, monkeypatch):
    """For its argmax tokens; a probed full step once for all layers; building a view never."""
    monkeypatch.setattr(builder, "BlockTables", DeviceTables)
    llm = bf16(tiny_models["llama"], speculative=str(saved(tmp_path / "head")))
    view, seen = partly(llm.engine, llm.engine.speculation.drafter).sparse_view, {}
    # What the model and the head read is not theirs.
    methods = [(view, "runner"), (view.drafter, "observe"), *((view, n) for n in ("_step", "_build_views", "retrieve"))]
    with host_reads() as reads:

        def count_reads(former, calls):
            def counted(*inputs):
                before = len(reads)
                returned = former(*inputs)
                calls.append(reads[before:])
                del reads[before:]
                return returned

            return counted

        for owner, name in methods:
            monkeypatch.setattr(owner, name, count_reads(getattr(owner, name), seen.setdefault(name, [])))
        llm.generate(random_prompts(300, 250), greedy(NEW))
    retrieved = [names for names in seen["retrieve"] if names]
    assert len(seen["_step"]) > 3 and len(seen["_build_views"]) > 1 and len(retrieved) > 1
    assert all(names == ["tolist"] for names in seen["_step"]), seen["_step"]
    assert not any(seen["_build_views"]), seen["_build_views"]
    assert all(names == ["cpu"] for names in retrieved), retrieved


@pytest.mark.parametrize("layout", [None, "latent", "latent_rope"])
def test_quantized_weights_verify_provisional_tokens(layout, tiny_models, converted):
    """The tokens are the model's own, whatever quantized weights accept."""
    model = converted("llama", layout, budget=0.75, layers="all") if layout else tiny_models["llama"]
    llm, prompts = bf16(model), random_prompts(300, 250)
    texts = texts_of(llm, prompts)
    for dtype, format in (("model", "bfloat16"), ("int8", "int8"), ("int4", "int4"), ("auto", "int4")):
        speculation = partly(llm.engine, Knowing(texts, 0.8), dtype=dtype)
        verifier = speculation.sparse_view.model
        assert verifier.format == format or (dtype == "auto" and kernels() is None)
        assert (verifier is llm.engine.model) == (verifier.format == "bfloat16")
        assert texts_of(llm, prompts) == texts and speculation.stats.sparse_steps > 2
    idle(llm.engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": "none"}, "specpv verifies drafted tokens; speculative must be ngram or a head"),
        (
            {"specpv_dtype": "int8", "dtype": "float32"},
            "specpv_dtype = int8 is for bfloat16 models on a CPU; this one is",
        ),
        ({"kv_cache_dtype": "int4"}, "specpv reads tokens one by one, and kv_cache_dtype int4 packs"),
    ],
)
def test_refuses_contradicting_options(options, words, tiny_models):
    with pytest.raises(UserError, match=words):
        LLM(tiny_models["llama"], **{"device": "cpu", "specpv": True, "speculative": "ngram", **options})


# A real model


def anywhere(masses, sink, tail, count):
    """As many tokens as ops/attention_mass.top_tokens returns, whichever."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([sink + torch.randperm(tail - sink, generator=generator)[:count].sort().values for _ in masses])


@pytest.mark.slow
def test_top_tokens_confirm_more_than_random_ones(smollm2, monkeypatch):
    """More of the tokens that the target accepts under the view are right; the text is plain decoding's either way.
    The drafter is always right, so that the view alone decides."""
    llm, prompts, shares = bf16(smollm2, cache_bytes=256 << 20), [], []
    for module in (heapq, statistics):
        ids = llm.tokenizer(inspect.getsource(module))["input_ids"][:2000]
        text = "Summarize this text in your own words:\n\n" + llm.tokenizer.decode(ids)
        prompts.append(llm.chat_prompt([{"role": "user", "content": text}]))
    plain = llm.generate(prompts, greedy(64))
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, plain, strict=True)]
    small = {"sink": 4, "retrieval": 256, "window": 16, "full_every": 4, "max_provisional": 8}
    for chooses in (sparse_view.top_tokens, anywhere):
        monkeypatch.setattr(sparse_view, "top_tokens", chooses)
        stats = partly(llm.engine, Knowing(texts), dtype="model", **small).stats
        outputs = llm.generate(prompts, greedy(64))
        assert [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)] == texts
        assert stats.provisional > 64
        shares.append(stats.confirmed / stats.provisional)
    print(f"confirmed: top_tokens {shares[0]:.2f}, random {shares[1]:.2f}")
    assert shares[1] < shares[0] - 0.1, shares
    idle(llm.engine)


@pytest.mark.slow
def test_long_texts_equal_plain_decoding(smollm2):
    """32 prompts of 4,096 to 8,000 tokens of source text, four together, with the head that comes with the package."""
    head = Path(mlaforge.__file__).parent / "demo" / "heads" / "smollm2-135m-instruct-original"
    llm = LLM(
        smollm2, device="cpu", dtype="bfloat16", cache_bytes=2 << 30, max_num_seqs=4, speculative=str(head),
        specpv=True, adaptive_speculation=False,
    )  # fmt: skip
    sources = sorted(Path(inspect.getfile(statistics)).parent.glob("*.py"))[:40]
    ids = llm.tokenizer("".join(source.read_text(encoding="utf-8") for source in sources))["input_ids"]
    prompts = [
        [ids[start : start + length] for length in (4096, 5400, 6700, 8000)]
        for start in range(0, len(ids) - 8000, (len(ids) - 8000) // 8 + 1)
    ]
    assert sum(map(len, prompts)) == 32
    for four in prompts:
        for prompt in four:
            # Each finds what the shorter one has computed.
            llm.generate([prompt], greedy(1, speculate=False))
        plain, sparse = (
            [output.outputs[0].token_ids for output in llm.generate(four, greedy(32, speculate=speculate))]
            for speculate in (False, True)
        )
        assert sparse == plain
    stats = llm.engine.stats().speculation
    assert stats.sparse_steps > 32 and stats.confirmed / stats.provisional > 0.5
