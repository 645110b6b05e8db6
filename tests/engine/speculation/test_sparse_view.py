"""Sparse-view verification: what a view holds and reads, when it is made, and which drafts come of it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.sparse_view import (
    FIRST_PROVISIONAL,
    REFRESH_EVERY,
    ProvisionalText,
    RetrievedTokens,
    SparseViewConfig,
)
from mlaforge.ops.native import kernels
from support.drafters import Knowing
from support.eagle3_heads import recorded, saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.host_reads import reads_of
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
    view.retrieved[sequence] = RetrievedTokens(chosen, sequence.computed - SMALL.window)
    views = view._build_views([ProvisionalText(sequence, 0)])
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
@pytest.mark.parametrize(
    ("family", "layout", "options", "topk"),
    [("llama", "gqa", {}, 40), ("gpt_oss", "gqa", {}, 40), ("llama", "latent", {"share": 2}, 40),
     ("llama", "gqa", {}, 48)],
)  # fmt: skip
def test_view_holds_the_index_selection(family, layout, options, topk, sparse, tmp_path):
    """For the prompt's last token too, whose step reads all; and the newest tokens once. In chunks or not, and where
    layers select different numbers of tokens."""
    model, (prompt,) = shutil.copytree(sparse(family, layout, **options), tmp_path / "model"), random_prompts(300)
    config = json.loads((model / "config.json").read_text())
    if topk != 40:
        config["index_topk_per_layer"] = [topk, *[24] * (len(config["indexer_types"]) - 1)]
        (model / "config.json").write_text(json.dumps(config))
    for chunk in (16, 512):
        llm, selected = bf16(model, max_num_batched_tokens=chunk, max_num_seqs=4), []
        watch_selections(llm, lambda inputs, outputs, to=selected: to.append(outputs[1][0, : inputs[5][0]].tolist()))
        # Not the option's, but the largest selection.
        assert SparseViewConfig.from_options(llm.engine.config, llm.engine.model.layers).retrieval == topk
        view = partly(llm.engine, Knowing([]), retrieval=topk, sink=1).sparse_view
        sequence, _ = decoding(llm, prompt)
        # Once in each layer that has an index.
        assert len(selected) == sum(rows.index is not None for rows in llm.engine.cache.rows)
        retrieved, end = view.retrieved[sequence], len(prompt) + 4
        assert retrieved.stop == len(prompt) - 1 - 32 and len(retrieved.positions) == view.num_layers
        assert (max(map(len, retrieved.positions)) > 24) and len(retrieved.positions[-1]) < topk
        for places in retrieved.positions:
            assert places.tolist() in [[place for place in own if place < retrieved.stop] for own in selected]
        llm.engine.tables.reserve(sequence.number, end)
        views = view._build_views([ProvisionalText(sequence, 3)])
        for places, places_SK, more in zip(retrieved.positions, views.positions_LSK, views.surplus, strict=True):
            assert places_SK[0, : end + more[0]].tolist() == [*places, *range(retrieved.stop, end)]
        llm.engine.abort("text")
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
    assert sequence in view.retrieved and sequence.computed == len(prompt)
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
    # The first tokens, and those with the largest attention mass up to the window before the newest token.
    stop = ends[0][1] - 1 - SMALL.window
    for positions, (mass,) in zip(view.retrieved[sequence].positions, probe.layers, strict=True):
        likeliest = mass[SMALL.sink : stop].argsort(descending=True)[: SMALL.retrieval] + SMALL.sink
        assert positions.tolist() == [*range(SMALL.sink), *sorted(likeliest.tolist())]


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
    view = partly(llm.engine, llm.engine.speculation.drafter).sparse_view
    # What the model and the head read is not theirs.
    others = [(view, "runner"), (view.drafter, "propose"), (view.drafter, "observe")]
    with reads_of(*others, *((view, name) for name in ("_step", "_build_views", "retrieve"))) as seen:
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
