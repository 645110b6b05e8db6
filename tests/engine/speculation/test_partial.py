"""Partial verification: whatever a view leaves out, the tokens are plain decoding's."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from mlaforge.engine import engine as core
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.execution.batch import AttentionProbe, Chunk, make_batch
from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation.drafter import PromptLookupDrafter, _Index
from mlaforge.engine.speculation.partial import FIRST_PENDING, FRESH, Retrieved
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
        assert (stats.partial_steps > 0) == (llm.engine.speculation.partial.layers > 0)
        assert stats.pending >= stats.partial_steps
        check_identities(stats)
        assert continued(llm, prompts[:1]) == texts[:1]
    idle(llm.engine)


def test_prompt_lookup_looks_at_a_token_once(tiny_models, monkeypatch):
    """However many full steps and partial ones there are: what runs ahead of a text adds its own tokens alone."""
    seen, grow = {True: 0, False: 0}, _Index.grow

    def counting(self, token_ids):
        seen[self._before is not None] += len(token_ids) - self._length
        grow(self, token_ids)

    monkeypatch.setattr(_Index, "grow", counting)
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=4)
    prompts = random_prompts(300, 380)
    stats = partly(llm.engine, PromptLookupDrafter()).stats
    texts = continued(llm, prompts)
    assert stats.partial_steps >= stats.judging_steps >= 8
    assert 0 < seen[False] <= sum(map(len, texts)) and 0 < seen[True] <= stats.pending


def test_what_sees_all_is_right_about_all(tiny_models):
    """A view of the whole text agrees to plain decoding's tokens and no others."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300)
    texts = texts_of(llm, prompts)
    partial = partly(llm.engine, Knowing(texts, 0.5), specpv_window=400, specpv_dtype="model")
    partial.partial.applies = lambda sequence, computed=None: True
    assert continued(llm, prompts) == texts
    stats = llm.engine.stats().speculation
    assert stats.pending == stats.kept > NEW / 2 and stats.partial_steps > 2


def test_nothing_is_read_outside_a_view(model):
    """Rows that a partial view leaves out may hold anything."""
    llm = watched(model, dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    engine = llm.engine
    partial = partly(engine, Knowing([], 1.0)).partial
    sequence, chunk = decoding(llm, prompt)
    if not partial.layers:
        assert not partial.applies(sequence)
        return
    # As if the last full step had attended to these.
    random = np.random.default_rng(0)
    some = random.permuted(np.tile(np.arange(16, 250), (partial.layers, 1)), axis=1)[:, :32]
    chosen = [np.concatenate((np.arange(16), np.sort(own))) for own in some]
    partial.retrieved[sequence.number] = Retrieved(chosen, sequence.computed - SMALL["specpv_window"])
    view = partial._view([sequence], [(chunk.stop, 0)])
    before = engine.runner(partial._seen([chunk], view)).clone()
    full = [
        layer
        for layer in range(len(engine.model.layers))
        if engine.tables.groups[group_of(engine, layer)].window is None
    ]
    for at, layer in enumerate(full):
        seen = view.places_LSK[at, 0, : chunk.stop + view.more[at][0]].numpy()
        assert len(set(seen)) == len(seen) < chunk.stop / 2 and set(chosen[at]) < set(seen)
        blocks = np.asarray(engine.tables.table(sequence.number, group_of(engine, layer))[1])
        left_out = np.setdiff1d(np.arange(chunk.stop), seen)
        engine.cache.rows[layer].packed[torch.from_numpy(blocks[left_out // 16] * 16 + left_out % 16)] = torch.nan
    after = engine.runner(partial._seen([chunk], view))
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
def test_what_is_retrieved_is_what_was_attended_to(family, dtype, tiny_models, converted):
    """transformers' own attention, and what a conversion that loses nothing makes of it; `latent` has it by the mean of
    each block."""
    (ids,) = random_prompts(301)
    source = tiny_models[family]
    own = attention_mass(source, ids, dtype=dtype)
    oracle = load_original(source)
    oracle.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = oracle(torch.tensor([ids]), output_attentions=True).attentions
    full = [layer for layer in attentions if float(layer[0, :, -1, 0].sum()) > 0]
    assert len(own) == len(full) > 0
    for mass, layer in zip(own, full, strict=True):
        p = layer[0, :, -1]
        wanted = (p / p.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(mass, wanted.detach(), rtol=1e-3, atol=1e-3 if dtype == "float32" else 0.05)
    rope = attention_mass(converted(family, "latent_rope", budget=1.0), ids, dtype=dtype)
    int8 = attention_mass(source, ids, dtype=dtype, kv_cache_dtype="int8")
    for mass, same, rounded in zip(own, rope, int8, strict=True):
        torch.testing.assert_close(same, mass, rtol=0.1, atol=1e-2 if dtype == "float32" else 0.15)
        torch.testing.assert_close(rounded, mass, rtol=0.1, atol=0.15)
    for mass, summary in zip(
        own, attention_mass(converted(family, "latent", budget=1.0), ids, dtype=dtype), strict=True
    ):
        blocks = [each[: len(ids) // 16 * 16].view(-1, 16).sum(1) for each in (summary, mass)]
        assert summary.shape == mass.shape and not summary[len(ids) // 16 * 16 :].any()
        assert torch.corrcoef(torch.stack(blocks))[0, 1] > 0


@pytest.mark.parametrize("full_every", [1, 3])
def test_an_eagle_head_follows_what_is_pending(full_every, tiny_models, tmp_path):
    """Its texts are those of the head alone, a full step after each partial one or not."""
    folder = saved(tmp_path / "head")
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(folder))
    prompts = random_prompts(300, 250)
    texts = texts_of(llm, prompts)
    assert continued(llm, prompts) == texts
    partial = partly(llm.engine, llm.engine.speculation.drafter, specpv_full_every=full_every)
    assert continued(llm, prompts) == texts
    assert partial.stats.partial_steps >= partial.stats.judging_steps > 0
    assert full_every > 1 or partial.stats.partial_steps == partial.stats.judging_steps
    idle(llm.engine)


@pytest.mark.parametrize("tree", [0, 6])
def test_a_partial_step_is_read_once(tree, tiny_models, tmp_path, monkeypatch):
    """Its likeliest tokens, and of a full step what all layers attended to; a view is made without a reading."""
    monkeypatch.setattr(core, "BlockTables", DeviceTables)
    folder, prompts = saved(tmp_path / "head"), random_prompts(300, *(() if tree else (250,)))
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(folder))
    partial = partly(llm.engine, llm.engine.speculation.drafter, speculative_tree_tokens=tree).partial
    counts = {"_judge": [], "_view": [], "record": []}

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
    assert len(counts["_judge"]) > 3 and len(counts["_view"]) > 1 and len(counts["record"]) > 1
    assert all(reads == ["tolist"] for reads in counts["_judge"]), counts["_judge"]
    assert not any(counts["_view"]), counts["_view"]
    assert all(reads == ["cpu"] for reads in counts["record"]), counts["record"]


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
def test_rounded_weights_judge_what_is_pending(layout, tiny_models, converted):
    """Their tokens are a draft: the model's own come out, whatever they agree to."""
    model = converted("llama", layout, budget=0.75, layers="all") if layout else tiny_models["llama"]
    options = {"dtype": "bfloat16", "cache_bytes": 64 << 20, "specpv": "lossless", "speculative": "ngram", **SMALL}
    prompts = random_prompts(300, 250)
    for format in ("model", "int8", "int4"):
        llm = watched(model, specpv_dtype=format, **options)
        judge = llm.engine.speculation.partial.model
        assert judge.format == ("bfloat16" if format == "model" else format)
        assert (judge is llm.engine.model) == (format == "model")
        texts = texts_of(llm, prompts)
        partly(llm.engine, Knowing(texts, 0.8), specpv_dtype=format)
        assert continued(llm, prompts) == texts
        assert llm.engine.stats().speculation.partial_steps > 2
    if kernels() is not None:
        assert watched(model, **options).engine.speculation.partial.model.format == "int4"


def test_lossy_keeps_what_a_part_agreed_to(tiny_models):
    """The text is that of partial views, and what a full step would have said otherwise is counted; its rows are full
    ones all the same."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300, 250)
    texts = texts_of(llm, prompts)
    lossy = {"specpv": "lossy", "specpv_retrieval": 0, "specpv_dtype": "model"}
    stats = partly(llm.engine, Knowing(texts, 0.8), **lossy).stats
    made = continued(llm, prompts)
    assert stats.partial_steps > 2 and 0 <= stats.kept < stats.pending == stats.drafted
    assert made != texts and [len(text) for text in made] == [len(text) for text in texts]
    # A lossy text goes on as any text does: what its rows hold is the model's own.
    found = continued(llm, [made[0]], 4, speculate=False)
    llm.engine.reset_prefix_cache()
    assert continued(llm, [made[0]], 4, speculate=False) == found
    (asked,) = llm.generate(prompts[:1], greedy(NEW, logprobs=1))
    assert prompts[0] + asked.outputs[0].token_ids == texts[0]
    seeing = partly(llm.engine, Knowing(texts, 0.8), **{**lossy, "specpv_window": 400})
    seeing.partial.applies = lambda sequence, computed=None: True
    assert continued(llm, prompts) == texts
    idle(llm.engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": "none"}, "specpv = lossless judges drafted tokens; speculative must be ngram or a head"),
        (
            {"specpv_dtype": "int8", "dtype": "float32"},
            "specpv_dtype = int8 is for bfloat16 models on a CPU; this one is",
        ),
        ({"kv_cache_dtype": "int4"}, "specpv = lossless reads tokens one by one, and kv_cache_dtype int4 packs"),
    ],
)
def test_what_contradicts(options, words, tiny_models):
    with pytest.raises(UserError, match=words):
        LLM(tiny_models["llama"], **{"device": "cpu", "specpv": "lossless", "speculative": "ngram", **options})


def test_easy_stretches_wait_longer_than_hard_ones(tiny_models):
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    speculation = partly(llm.engine, Knowing([], 1.0))
    partial, controller = speculation.partial, speculation.controller
    sequence, _ = decoding(llm, prompt)
    assert controller.decide([sequence], False).tokens(sequence) == FIRST_PENDING
    rooms = []
    for pending, kept in ((4, 4), (8, 8), (9, 5), (5, 0), (2, 2)):
        partial.learn(sequence, pending, kept)
        # No more room is reserved than may be used.
        rooms.append(controller.decide([sequence], False).tokens(sequence))
    assert rooms == [8, SMALL["specpv_max_pending"], 5, 2, 4]


def test_what_was_retrieved_is_looked_for_anew_after_some_tokens(tiny_models):
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    (prompt,) = random_prompts(300)
    partial = partly(llm.engine, Knowing([], 1.0)).partial
    sequence, _ = decoding(llm, prompt)
    # Since the prompt was read.
    assert sequence.number in partial.retrieved and sequence.computed == len(prompt)
    assert partial.watch([(sequence, len(prompt) + 1)]) is None
    sequence.token_ids += [0] * FRESH
    # Not before the text is computed to its end.
    assert partial.watch([(sequence, len(prompt) + FRESH)]) is None
    ends = [(sequence, len(prompt) + FRESH + 1)]
    assert partial.watch(ends).sequences == [0]
    partial.record(ends, AttentionProbe([0], [[torch.rand(len(prompt) + FRESH + 1)] for _ in range(partial.layers)]))
    assert partial.watch(ends) is None
