"""Sparse-view verification: whatever a view leaves out, the tokens are plain decoding's."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from mlaforge.engine import engine as core
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.execution.batch import AttentionProbe, Chunk, make_batch
from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation.lookup import PromptLookupDrafter, _NgramIndex
from mlaforge.engine.speculation.sparse_view import FIRST_PROVISIONAL, REFRESH_EVERY, RetrievedTokens
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError
from support.drafters import Knowing
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, renew, watched
from support.host_reads import host_reads
from support.speculating import CASES, SMALL, check_identities, partly
from support.tiny_models import load_original

NEW = 24


@pytest.fixture(params=[*CASES, ("llama", "latent_rope")], ids=str)
def model(request, tiny_models, converted):
    family, layout = request.param
    return converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]


def texts_of(llm, prompts, count=NEW):
    outputs = llm.generate(prompts, greedy(count, speculate=False))
    return [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]


def continued(llm, prompts, count=NEW, **more):
    return [
        p + o.outputs[0].token_ids for p, o in zip(prompts, llm.generate(prompts, greedy(count, **more)), strict=True)
    ]


@pytest.mark.parametrize("retrieval", [0, 32])
def test_tokens_are_those_of_plain_decoding(model, retrieval):
    """Of long and short texts together, alone, and found again."""
    llm = watched(model, dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=4)
    prompts = random_prompts(300, 40, 200, 380)
    texts = texts_of(llm, prompts)
    for drafter, count in itertools.product((Knowing(texts, 0.8), PromptLookupDrafter()), (1, 4)):
        partly(llm.engine, drafter, count, specpv_retrieval=retrieval)
        assert continued(llm, prompts) == texts
        stats = llm.engine.stats().speculation
        # Where every layer slides there is no part to read.
        assert (stats.sparse_steps > 0) == (llm.engine.speculation.sparse_view.num_layers > 0)
        assert stats.provisional >= stats.sparse_steps
        check_identities(stats)
        assert continued(llm, prompts[:1]) == texts[:1]
    idle(llm.engine)


def test_prompt_lookup_indexes_a_token_once(tiny_models, monkeypatch):
    """However many full and sparse-view steps run: the index of provisional tokens extends the sequence's own."""
    seen, grow = {True: 0, False: 0}, _NgramIndex.extend

    def counting(self, token_ids):
        seen[self._prefix is not None] += len(token_ids) - self._length
        grow(self, token_ids)

    monkeypatch.setattr(_NgramIndex, "extend", counting)
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=4)
    prompts = random_prompts(300, 380)
    stats = partly(llm.engine, PromptLookupDrafter()).stats
    texts = continued(llm, prompts)
    assert stats.sparse_steps >= stats.full_steps >= 8
    assert 0 < seen[False] <= sum(map(len, texts)) and 0 < seen[True] <= stats.provisional


def test_view_of_all_tokens_confirms_all_provisional_tokens(tiny_models):
    """A view of the whole text agrees to plain decoding's tokens and no others."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300)
    texts = texts_of(llm, prompts)
    partial = partly(llm.engine, Knowing(texts, 0.5), specpv_window=400, specpv_dtype="model")
    partial.sparse_view.applies = lambda sequence, computed=None: True
    assert continued(llm, prompts) == texts
    stats = llm.engine.stats().speculation
    assert stats.provisional == stats.confirmed > NEW / 2 and stats.sparse_steps > 2


def test_reads_nothing_outside_the_view(model):
    """Rows that a sparse view leaves out may hold anything."""
    llm = watched(model, dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    engine = llm.engine
    partial = partly(engine, Knowing([], 1.0)).sparse_view
    sequence, chunk = decoding(llm, prompt)
    if not partial.num_layers:
        assert not partial.applies(sequence)
        return
    # As if the last full step had attended to these.
    random = np.random.default_rng(0)
    some = random.permuted(np.tile(np.arange(16, 250), (partial.num_layers, 1)), axis=1)[:, :32]
    chosen = [np.concatenate((np.arange(16), np.sort(own))) for own in some]
    partial.retrieved[sequence.number] = RetrievedTokens(chosen, sequence.computed - SMALL["specpv_window"])
    view = partial._build_views([sequence], [(chunk.stop, 0)])
    before = engine.runner(partial._batch([chunk], view)).clone()
    full = [
        layer
        for layer in range(len(engine.model.layers))
        if engine.tables.groups[group_of(engine, layer)].window is None
    ]
    for at, layer in enumerate(full):
        seen = view.positions_LSK[at, 0, : chunk.stop + view.surplus[at][0]].numpy()
        assert len(set(seen)) == len(seen) < chunk.stop / 2 and set(chosen[at]) < set(seen)
        blocks = np.asarray(engine.tables.table(sequence.number, group_of(engine, layer))[1])
        left_out = np.setdiff1d(np.arange(chunk.stop), seen)
        engine.cache.rows[layer].packed[torch.from_numpy(blocks[left_out // 16] * 16 + left_out % 16)] = torch.nan
    after = engine.runner(partial._batch([chunk], view))
    assert torch.equal(after, before) and not after.isnan().any()


def group_of(engine, layer):
    return engine.model.layers[layer].attention.group


def decoding(llm, prompt):
    """The chunk of the next step of a text that has been read, with room for it."""
    engine = llm.engine
    engine.add("text", prompt, greedy(NEW))
    while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.tables.reserve(sequence.number, len(sequence.token_ids))
    return sequence, Chunk(sequence.number, sequence.token_ids, sequence.computed, len(sequence.token_ids), None, True)


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
    """transformers' own attention, and what a conversion that loses nothing makes of it; `latent` has it by the mean of
    each block."""
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
    for mass, same, rounded in zip(reference, rope, int8, strict=True):
        torch.testing.assert_close(same, mass, rtol=0.1, atol=1e-2 if dtype == "float32" else 0.15)
        torch.testing.assert_close(rounded, mass, rtol=0.1, atol=0.15)
    for mass, summary in zip(
        reference, attention_mass(converted(family, "latent", budget=1.0), ids, dtype=dtype), strict=True
    ):
        blocks = [mass_L[: len(ids) // 16 * 16].view(-1, 16).sum(1) for mass_L in (summary, mass)]
        assert summary.shape == mass.shape and not summary[len(ids) // 16 * 16 :].any()
        assert torch.corrcoef(torch.stack(blocks))[0, 1] > 0


@pytest.mark.parametrize("full_every", [1, 3])
def test_eagle_head_follows_provisional_tokens(full_every, tiny_models, tmp_path):
    """Its texts are those of the head alone, a full step after each partial one or not."""
    folder = saved(tmp_path / "head")
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(folder))
    prompts = random_prompts(300, 250)
    texts = texts_of(llm, prompts)
    assert continued(llm, prompts) == texts
    partial = partly(llm.engine, llm.engine.speculation.drafter, specpv_full_every=full_every)
    assert continued(llm, prompts) == texts
    assert partial.stats.sparse_steps >= partial.stats.full_steps > 0
    assert full_every > 1 or partial.stats.sparse_steps == partial.stats.full_steps
    idle(llm.engine)


@pytest.mark.parametrize("tree", [0, 6])
def test_host_reads_a_sparse_view_step_once(tree, tiny_models, tmp_path, monkeypatch):
    """For its argmax tokens; a probed full step once for all layers; building a view never."""
    monkeypatch.setattr(core, "BlockTables", DeviceTables)
    folder, prompts = saved(tmp_path / "head"), random_prompts(300, *(() if tree else (250,)))
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(folder))
    partial = partly(llm.engine, llm.engine.speculation.drafter, speculative_tree_tokens=tree).sparse_view
    counts = {"_step": [], "_build_views": [], "record_attention": []}

    def counted(name, former):
        def counting(*inputs):
            with host_reads() as reads:
                for owner, method in ((partial, "runner"), (partial.drafter, "observe")):
                    uncounted(owner, method, reads)
                returned = former(*inputs)
            counts[name].append(reads)
            return returned

        return counting

    def uncounted(owner, method, reads):
        former = getattr(owner, method)

        def running(*inputs):
            before = len(reads)
            returned = former(*inputs)
            del reads[before:]
            return returned

        monkeypatch.setattr(owner, method, running)

    for name in counts:
        monkeypatch.setattr(partial, name, counted(name, getattr(partial, name)))
    llm.generate(prompts, greedy(NEW))
    assert len(counts["_step"]) > 3 and len(counts["_build_views"]) > 1 and len(counts["record_attention"]) > 1
    assert all(reads == ["tolist"] for reads in counts["_step"]), counts["_step"]
    assert not any(counts["_build_views"]), counts["_build_views"]
    assert all(reads == ["cpu"] for reads in counts["record_attention"]), counts["record_attention"]


def test_preempted_forked_and_stopped(tiny_models):
    """Nothing that is pending is anybody's prefix, and no text goes on past its end."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(200, 220)
    texts = texts_of(llm, prompts)
    engine = llm.engine
    stop = texts[0][len(prompts[0]) + 10]
    (wanted,) = llm.generate(prompts[:1], greedy(NEW, stop_token_ids=(stop,), ignore_eos=False, speculate=False))
    for caching in (True, False):
        renew(engine, 12, 220 + NEW, block_size=16, max_step=64, caching=caching)
        before = engine.stats().preemptions
        partly(engine, Knowing(texts, 0.8))
        assert continued(llm, prompts) == texts
        assert engine.stats().preemptions > before
        partly(engine, Knowing(texts, 0.8))
        (forked,) = llm.generate(prompts[:1], greedy(NEW, n=2))
        assert [prompts[0] + each.token_ids for each in forked.outputs] == 2 * texts[:1]
        (stopped,) = llm.generate(prompts[:1], greedy(NEW, stop_token_ids=(stop,), ignore_eos=False))
        assert stopped.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert stopped.outputs[0].finish_reason == "stop"
    idle(engine)


@pytest.mark.parametrize("layout", [None, "latent", "latent_rope"])
def test_quantized_weights_verify_provisional_tokens(layout, tiny_models, converted):
    """Their tokens are a draft: the model's own come out, whatever they agree to."""
    model = converted("llama", layout, budget=0.75, layers="all") if layout else tiny_models["llama"]
    options = {"dtype": "bfloat16", "cache_bytes": 64 << 20, "specpv": "lossless", "speculative": "ngram", **SMALL}
    prompts = random_prompts(300, 250)
    for format in ("model", "int8", "int4"):
        llm = watched(model, specpv_dtype=format, **options)
        judge = llm.engine.speculation.sparse_view.model
        assert judge.format == ("bfloat16" if format == "model" else format)
        assert (judge is llm.engine.model) == (format == "model")
        texts = texts_of(llm, prompts)
        partly(llm.engine, Knowing(texts, 0.8), specpv_dtype=format)
        assert continued(llm, prompts) == texts
        assert llm.engine.stats().speculation.sparse_steps > 2
    if kernels() is not None:
        assert watched(model, **options).engine.speculation.sparse_view.model.format == "int4"


def test_lossy_keeps_provisional_tokens(tiny_models):
    """The text is that of sparse views, and what a full step would have said otherwise is counted; its rows are full
    ones all the same."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300, 250)
    texts = texts_of(llm, prompts)
    lossy = {"specpv": "lossy", "specpv_retrieval": 0, "specpv_dtype": "model"}
    stats = partly(llm.engine, Knowing(texts, 0.8), **lossy).stats
    lossy_texts = continued(llm, prompts)
    assert stats.sparse_steps > 2 and 0 <= stats.confirmed < stats.provisional == stats.drafted
    assert lossy_texts != texts and [len(text) for text in lossy_texts] == [len(text) for text in texts]
    # A lossy text goes on as any text does: what its rows hold is the model's own.
    continuation = continued(llm, [lossy_texts[0]], 4, speculate=False)
    llm.engine.reset_prefix_cache()
    assert continued(llm, [lossy_texts[0]], 4, speculate=False) == continuation
    (asked,) = llm.generate(prompts[:1], greedy(NEW, logprobs=1))
    assert prompts[0] + asked.outputs[0].token_ids == texts[0]
    seeing = partly(llm.engine, Knowing(texts, 0.8), **{**lossy, "specpv_window": 400})
    seeing.sparse_view.applies = lambda sequence, computed=None: True
    assert continued(llm, prompts) == texts
    idle(llm.engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": "none"}, "specpv = lossless verifies drafted tokens; speculative must be ngram or a head"),
        (
            {"specpv_dtype": "int8", "dtype": "float32"},
            "specpv_dtype = int8 is for bfloat16 models on a CPU; this one is",
        ),
        ({"kv_cache_dtype": "int4"}, "specpv = lossless reads tokens one by one, and kv_cache_dtype int4 packs"),
    ],
)
def test_refuses_contradicting_options(options, words, tiny_models):
    with pytest.raises(UserError, match=words):
        LLM(tiny_models["llama"], **{"device": "cpu", "specpv": "lossless", "speculative": "ngram", **options})


def test_limit_of_provisional_tokens_follows_acceptance(tiny_models):
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    speculation = partly(llm.engine, Knowing([], 1.0))
    partial, controller = speculation.sparse_view, speculation.controller
    sequence, _ = decoding(llm, prompt)
    assert controller.decide([sequence], False).tokens(sequence) == FIRST_PROVISIONAL
    rooms = []
    for pending, kept in ((4, 4), (8, 8), (9, 5), (5, 0), (2, 2)):
        partial.record_verification(sequence, pending, kept)
        # No more room is reserved than may be used.
        rooms.append(controller.decide([sequence], False).tokens(sequence))
    assert rooms == [8, SMALL["specpv_max_pending"], 5, 2, 4]


def test_retrieval_is_refreshed_after_some_tokens(tiny_models):
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    partial = partly(llm.engine, Knowing([], 1.0)).sparse_view
    sequence, _ = decoding(llm, prompt)
    # Since the prompt was read.
    assert sequence.number in partial.retrieved and sequence.computed == len(prompt)
    assert partial.probe([(sequence, len(prompt) + 1)]) is None
    sequence.token_ids += [0] * REFRESH_EVERY
    # Not before the text is computed to its end.
    assert partial.probe([(sequence, len(prompt) + REFRESH_EVERY)]) is None
    ends = [(sequence, len(prompt) + REFRESH_EVERY + 1)]
    assert partial.probe(ends).sequences == [0]
    partial.record_attention(
        ends, AttentionProbe([0], [[torch.rand(len(prompt) + REFRESH_EVERY + 1)] for _ in range(partial.num_layers)])
    )
    assert partial.probe(ends) is None
