"""Sparse attention in the engine: tokens and logits equal those of the model's class, in any batch."""

import dataclasses

import pytest
import torch

from mlaforge import LLM, SamplingParams
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.execution.indexer import Indexer, Selections
from mlaforge.ops import decompressed_keys, native, token_selection
from mlaforge.ops.host_view import host_view
from mlaforge.runtime import UserError
from support.drafters import Branching, Knowing
from support.speculating import speculate, watch_selections

CASES = [("llama", "coded"), ("gpt_oss", "gqa"), ("qwen3", "latent"), ("qwen2", "latent_rope")]
MORE = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("gpt_oss", "latent")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
PROMPTS = [[*range(60, 125)], [*range(10, 30)], [*range(200, 110, -1)]]


def engine(model, **options):
    return LLM(model, device="cpu", **{"dtype": "float32", "cache_bytes": 1 << 22, **options})


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def greedy(n):
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@torch.no_grad()
def expected(model, prompt, n):
    """The class's own greedy continuation, the prompt read densely; and by how much each token won."""
    out = model(torch.tensor([prompt]), use_cache=True)
    expected_ids, margins = [], []
    for _ in range(n):
        best = out.logits[0, -1].topk(2)
        expected_ids.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        out = model(torch.tensor([[expected_ids[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return expected_ids, margins


def agree(ours, model, prompt):
    """Up to a token that hardly won: there rounding decides."""
    expected_ids, margins = expected(model, prompt, len(ours))
    upto = next((i for i, margin in enumerate(margins) if margin < 2e-3), len(ours))
    assert ours[:upto] == expected_ids[:upto], (ours, expected_ids, margins)
    return upto


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_sparse_tokens_equal_those_of_the_model_class(family, layout, sparse):
    directory = sparse(family, layout)
    llm, model = engine(directory), loading.load_model(directory, "float32")
    alone = [tokens(llm.generate([prompt], greedy(12)))[0] for prompt in PROMPTS]
    agreed = sum(agree(ours, model, prompt) for ours, prompt in zip(alone, PROMPTS, strict=True))
    assert agreed > 12
    assert tokens(llm.generate(PROMPTS, greedy(12))) == alone
    # It reads other than a dense one does; gpt_oss, tiny, says one word again and again.
    assert family == "gpt_oss" or tokens(engine(directory, dense=True).generate(PROMPTS, greedy(12))) != alone


@pytest.mark.parametrize(
    ("layout", "dtype"),
    # Coded rows are integers, which cannot be NaN.
    [("gqa", "bfloat16"), ("latent", "float32"), ("latent", "bfloat16"), ("latent_rope", "bfloat16"),
     pytest.param("gqa", "float32", marks=pytest.mark.slow),
     pytest.param("latent_rope", "float32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_only_selected_rows_are_read(layout, dtype, sparse, monkeypatch):
    """NaN in every row that is not selected changes nothing."""
    llm = engine(sparse("llama", layout), dtype=dtype, prefix_caching=False)
    plain = tokens(llm.generate(PROMPTS, greedy(4)))
    seen = []

    def poison(inputs, outputs):
        (_, _, _, keys, view, counts, _), (slots, _) = inputs, outputs
        kept = {int(slot) for s, count in enumerate(counts) for slot in slots[s, :count]}
        for rows in llm.engine.cache.rows:
            if rows.index is keys:
                held = {16 * int(block) + i for block in view.block_table_SB.flatten() for i in range(16)}
                others = sorted(held - kept)
                saved.append((rows.packed, others, rows.packed[others].clone()))
                rows.packed[others] = torch.nan
        seen.append(counts)

    saved = []
    watch_selections(llm, poison)
    step = llm.engine.runner.eager

    def restored(batch):
        out = step(batch)
        for packed, others, rows in reversed(saved):
            packed[others] = rows
        saved.clear()
        return out

    monkeypatch.setattr(llm.engine.runner, "eager", restored)
    assert tokens(llm.generate(PROMPTS, greedy(4))) == plain
    assert seen and any(count == 40 for counts in seen for count in counts)


@pytest.fixture
def everything(monkeypatch):
    """Generated tokens read a selection of all tokens. Returns the index keys that each layer with an index selects."""
    seen, call = [], Indexer.__call__

    def counts(self, view, topk):
        return host_view(view).visible_lengths if any(view.selecting) else None

    def recorded_call(self, features, q, turn, rows, view, *others):
        selected = call(self, features, q, turn, rows, view, *others)
        if self.index is not None and selected is not view:
            slots = selected.block_table_SB[0, : selected.counts[0]].long()
            seen.append(token_selection.keys_at(rows.index, slots).clone())
        return selected

    monkeypatch.setattr(Selections, "counts", counts)
    monkeypatch.setattr(Indexer, "__call__", recorded_call)
    return seen


@pytest.mark.parametrize("layout", ["gqa", "latent", "latent_rope", "coded"])
def test_selecting_all_tokens_equals_dense(layout, sparse, everything):
    """Through the gathering path."""
    llm, dense = engine(sparse("llama", layout)), engine(sparse("llama", layout), dense=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    ours, theirs = llm.generate(PROMPTS, params), dense.generate(PROMPTS, params)
    assert everything and tokens(ours) == tokens(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert x.token_id == y.token_id and dict(x.top) == pytest.approx(dict(y.top), abs=1e-4)


@pytest.mark.parametrize(
    ("layout", "tree"),
    [("gqa", True), ("latent", False), ("latent_rope", True), pytest.param("gqa", False, marks=pytest.mark.slow),
     pytest.param("latent", True, marks=pytest.mark.slow), pytest.param("latent_rope", False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_drafts_keep_rows_and_index_keys(layout, tree, sparse, everything):
    """Chains and trees, of which some tokens are refused: text and index keys are those of decoding without drafts."""
    directory, prompt = sparse("llama", layout), PROMPTS[0]
    (text,) = tokens(engine(directory).generate([prompt], greedy(24)))
    expected = everything[-2]
    everything.clear()
    llm = engine(directory)
    if tree:
        speculate(llm.engine, Branching([prompt + text], 0.7), 4, 12)
    else:
        speculate(llm.engine, Knowing([prompt + text], 0.7))
    assert tokens(llm.generate([prompt], greedy(24))) == [text]
    assert llm.engine.stats().speculation.accepted > 4
    ours = everything[-2]
    length = min(len(ours), len(expected)) - 13
    assert length > len(prompt) + 6
    assert (ours[:length].int() - expected[:length].int()).abs().max() <= 1
    llm.engine.check_integrity()


def test_every_draft_has_its_own_selection(sparse):
    llm, asked = engine(sparse("llama", "latent")), []
    watch_selections(llm, lambda inputs, outputs: asked.append((len(inputs[0]), inputs[5])))
    (text,) = tokens(llm.generate([PROMPTS[0]], greedy(16)))
    speculate(llm.engine, Knowing([PROMPTS[0] + text], 1.0))
    assert tokens(llm.generate([PROMPTS[0]], greedy(16))) == [text]
    assert (4, (40,) * 4) in asked and (1, (40,)) in asked
    llm.engine.check_integrity()


def test_lookup_drafts_are_as_long_as_on_dense_models(sparse):
    speculation = engine(sparse("llama", "latent"), speculative="ngram").engine.speculation
    assert speculation.policy.lookup_tokens == 8


@pytest.mark.parametrize("layout", ["gqa", "latent"])
def test_prefixes_forks_and_chunks(layout, sparse):
    directory = sparse("llama", layout)
    plain = tokens(engine(directory, prefix_caching=False).generate(PROMPTS, greedy(10)))
    llm = engine(directory)
    assert tokens(llm.generate(PROMPTS, greedy(10))) == plain
    # Found in the cache, index keys too.
    assert tokens(llm.generate(PROMPTS, greedy(10))) == plain
    assert tokens(engine(directory, max_num_batched_tokens=16, max_num_seqs=8).generate(PROMPTS, greedy(10))) == plain
    several = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, n=2)
    forked = llm.generate([PROMPTS[0]], several)[0].outputs
    assert [output.token_ids for output in forked] == [plain[0]] * 2


def test_a_selection_is_shared(sparse):
    directory = sparse("llama", "latent", share=2)
    llm, model = engine(directory), loading.load_model(directory, "float32")
    assert sum(row.index is not None for row in llm.engine.cache.rows) == 2
    for prompt in PROMPTS:
        agree(tokens(llm.generate([prompt], greedy(8)))[0], model, prompt)


@pytest.mark.parametrize(
    ("layout", "stored"),
    [("latent", "int8"), ("coded", "auto"), pytest.param("latent", "auto", marks=pytest.mark.slow)],
)
def test_cached_keys_change_no_token(layout, stored, sparse, monkeypatch):
    """To the bit, where rows are shared, copied, moved, given up and written again. The kernels of other forms are
    compared in tests/ops."""
    if not native.is_available():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    directory = sparse("llama", layout)
    plain, sizes = engine(directory, dtype="bfloat16", kv_cache_dtype=stored), {}
    texts = tokens(plain.generate(PROMPTS, greedy(16)))

    def scores(tokens_per_key, drafter=None, blocks=200):
        with monkeypatch.context() as patch:
            patch.setattr(decompressed_keys, "TOKENS_PER_KEY", tokens_per_key)
            options = {"dtype": "bfloat16", "kv_cache_dtype": stored}
            if tokens_per_key not in sizes:
                layers = engine(directory, **options).engine.cache.layers
                sizes[tokens_per_key] = sum(layer.block_bytes(16) for layer in layers)
            llm = engine(directory, **options, cache_bytes=blocks * sizes[tokens_per_key])
            assert llm.engine.stats().cache_blocks == blocks
        rows = llm.engine.cache.rows
        if drafter == "tree":
            speculate(llm.engine, Branching([p + t for p, t in zip(PROMPTS, texts, strict=True)], 0.7), 4, 12)
        elif drafter == "chain":
            speculate(llm.engine, Knowing([p + t for p, t in zip(PROMPTS, texts, strict=True)], 0.7))
        drawn = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=2, n=2)
        several = [drawn] if drafter is None else []
        found = []
        for params in (SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2), *several):
            for output in llm.generate(PROMPTS, params) + llm.generate(PROMPTS[::-1], params):
                found += [(x.token_id, x.top) for completion in output.outputs for x in completion.logprobs]
        llm.engine.check_integrity()
        assert bool((rows[0].decompressed_keys.metadata[: rows[0].slots] >= 0).any()) == (tokens_per_key < 1000)
        return found, llm.engine.stats()

    for options in ({}, {"drafter": "chain"}, {"drafter": "tree"}, {"blocks": 14}):
        # An entry for every token, and none.
        ours, stats = scores(1, **options)
        assert ours == scores(1 << 30, **options)[0], options
        # For some of a selection.
        assert options or ours == scores(100)[0]
    assert stats.preemptions


@pytest.mark.parametrize(
    ("layout", "stored"),
    [("latent", "int8"), ("coded", "auto"), pytest.param("latent", "auto", marks=pytest.mark.slow)],
)
def test_logits_in_bf16_do_not_depend_on_neighbours_or_drafts(layout, stored, sparse):
    """To the bit, though keys are rounded for tokens with selections: beside prompts, dense requests and shorter
    ones."""
    if not native.is_available():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    options = {"dtype": "bfloat16", "kv_cache_dtype": stored, "prefix_caching": False}
    llm = engine(sparse("llama", layout), **options, max_num_seqs=4)
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2, dense=dense)
        for n, dense in ((16, False), (12, True), (5, False))
    ]
    requests = [(prompt, param) for param in params for prompt in PROMPTS]

    def answers(outputs):
        return [[(x.token_id, x.top) for x in output.outputs[0].logprobs] for output in outputs]

    alone = [answers(llm.generate([prompt], [param]))[0] for prompt, param in requests]
    assert answers(llm.generate(*map(list, zip(*requests, strict=True)))) == alone
    texts = [prompt + [token for token, _ in answer] for (prompt, _), answer in zip(requests, alone, strict=True)]
    drafting = engine(sparse("llama", layout), **options)
    speculate(drafting.engine, Knowing(texts, 0.9), count=8)
    assert [answers(drafting.generate([prompt], [param]))[0] for prompt, param in requests] == alone
    assert drafting.engine.stats().speculation.accepted


@pytest.mark.parametrize(
    ("layout", "caching"),
    [("gqa", True), ("latent", False), ("latent_rope", True), pytest.param("gqa", False, marks=pytest.mark.slow),
     pytest.param("latent", True, marks=pytest.mark.slow), pytest.param("latent_rope", False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_preemption_changes_nothing(layout, caching, sparse):
    """What was generated before is computed anew as it was, and not as a prompt."""
    directory = sparse("llama", layout)
    whole = engine(directory, prefix_caching=caching)
    block = sum(layer.block_bytes(16) for layer in whole.engine.cache.layers)
    found = {}
    for blocks in (200, 14):
        llm = engine(directory, prefix_caching=caching, cache_bytes=blocks * block)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1))
        found[blocks] = tokens(outputs), [x.logprob for o in outputs for x in o.outputs[0].logprobs]
        assert (llm.engine.stats().preemptions > 0) == (blocks == 14)
        llm.engine.check_integrity()
    assert found[14][0] == found[200][0]
    assert found[14][1] == pytest.approx(found[200][1], abs=1e-4)


@pytest.mark.parametrize(
    ("layout", "generated", "caching", "steps"),
    [("gqa", 128, False, 5), ("gqa", 80, True, 1), ("latent", 80, False, 4), ("latent_rope", 80, False, 4),
     ("coded", 80, False, 4)],
)  # fmt: skip
def test_an_answer_is_restored_in_few_steps(layout, generated, caching, steps, sparse):
    """In chunks of generated tokens, each with its selection: in bf16 the rest of the answer is equal to the bit."""
    if not native.is_available():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    directory, options = sparse("llama", layout), {"dtype": "bfloat16", "prefix_caching": caching}
    params = SamplingParams(temperature=0.0, max_tokens=generated + 8, ignore_eos=True, logprobs=1)
    whole = engine(directory, **options)
    alone = whole.generate([PROMPTS[0]], params)[0].outputs[0].logprobs
    # One block less than the next tokens of both need: the newer one is preempted, and the older one ends.
    blocks = sum(-(-(len(prompt) + generated) // 16) for prompt in PROMPTS[:2]) - 1
    block_bytes = sum(layer.block_bytes(16) for layer in whole.engine.cache.layers)
    llm = engine(directory, **options, cache_bytes=blocks * block_bytes)
    llm.engine.add("older", PROMPTS[1], greedy(generated + 1))
    llm.engine.add("answer", PROMPTS[0], params)
    logprobs, preempted_at, restored_at = [], None, None
    while llm.engine.has_work:
        for output in llm.engine.step():
            if output.request_id == "answer":
                logprobs += output.outputs[0].logprobs
        stats = llm.engine.stats()
        if stats.preemptions and preempted_at is None:
            assert len(logprobs) == generated
            preempted_at = stats.steps
        if len(logprobs) == generated + 1:
            restored_at = stats.steps
    assert [(x.token_id, x.logprob) for x in logprobs] == [(x.token_id, x.logprob) for x in alone]
    # The prompt, then 32 tokens a step; with the prefix cache only those of the last block.
    assert restored_at - preempted_at == steps and stats.preemptions == 1
    llm.engine.check_integrity()


def test_index_and_key_bytes_are_counted(sparse):
    both = [engine(sparse("llama", "latent"), dense=dense) for dense in (False, True)]
    for llm in both:
        llm.generate([PROMPTS[0]], greedy(2))
    layer, bare = (llm.engine.cache.layers[0] for llm in both)
    assert layer.block_bytes(16) == bare.block_bytes(16) + 16 * 16
    if native.is_available():
        both.append(engine(sparse("llama", "latent"), dtype="bfloat16"))
        kept = both[-1].engine.cache.rows[0].decompressed_keys
        size = both[-1].engine.cache.layers[0].block_bytes(16) - layer.block_bytes(16) + 16 * layer.width * 2
        assert size == 2 * (kept.keys.shape[1] + 4) + 16 * 4
    for llm in both:
        assert llm.engine.cache.bytes == sum(t.nbytes for t in llm.engine.cache.tensors)


def test_rejects_unquantized_blocks_of_sparse_models(sparse):
    with pytest.raises(UserError, match="int4 keeps unquantized blocks, which sparse attention cannot select from"):
        engine(sparse("llama", "gqa"), kv_cache_dtype="int4")
    with pytest.raises(UserError, match="a multiple of 16"):
        engine(sparse("llama", "gqa"), block_size=8)


@pytest.mark.parametrize(("layout", "stored", "dtype"), [("gqa", "int8", "float32"), ("latent", "bf16", "float32")])
def test_sparse_reads_rounded_rows(layout, stored, dtype, sparse):
    """Log probabilities of generated tokens change by rounding, and by no more than that."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    scores = []
    for options in ({}, {"kv_cache_dtype": stored}):
        outputs = engine(sparse("llama", layout), dtype=dtype, **options).generate(PROMPTS, params)
        scores.append(torch.tensor([[entry.logprob for entry in output.outputs[0].logprobs] for output in outputs]))
    change = (scores[0] - scores[1])[:, 0].abs()
    assert 0 < change.max() < 0.2, change


@pytest.mark.parametrize("layout", ["gqa", "coded"])
def test_a_dense_request_reads_everything_among_sparse_ones(layout, sparse):
    """Its tokens are those of the engine that reads densely; the other requests of the batch are unaffected."""
    directory = sparse("llama", layout)
    llm, dense = engine(directory, prefix_caching=False), engine(directory, dense=True, prefix_caching=False)
    expected_sparse, expected_dense = (tokens(each.generate(PROMPTS, greedy(12))) for each in (llm, dense))
    assert expected_sparse != expected_dense
    requests = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, dense=n == 0) for n in range(3)]
    assert tokens(llm.generate(PROMPTS, requests)) == [expected_dense[0], *expected_sparse[1:]]


def test_topk_at_load_replaces_that_of_the_model(sparse):
    """As if the model had been written with it; budgets of layers change in proportion."""
    written, directory = sparse("llama", "latent"), sparse("llama", "latent", topk=20)
    params = greedy(12)
    texts = [tokens(engine(model, topk=20).generate(PROMPTS, params)) for model in (written, directory)]
    assert texts[0] == texts[1] == tokens(engine(directory).generate(PROMPTS, params))
    assert texts[0] != tokens(engine(written).generate(PROMPTS, params))
    source = SourceModel.open(written)
    budgets = {"index_topk": 40, "index_topk_per_layer": [16, 40, 64]}
    scaled = dataclasses.replace(source, config=source.config | budgets).with_selection(False, 20)
    assert scaled.config["index_topk_per_layer"] == [15, 20, 32] and scaled.spec.num_layers == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": 14}, "topk = 14 must be above the 14 tokens that are always read"),
        ({"topk": 20, "dense": True}, "dense reads all tokens, and topk = 20 selects some of them; leave one out"),
    ],
)
def test_rejects_a_topk_that_selects_nothing(options, words, sparse):
    with pytest.raises(UserError, match=words):
        engine(sparse("llama", "latent"), **options)


def test_rejects_a_topk_for_a_dense_model(tiny_models):
    with pytest.raises(UserError, match=r"not sparse: it has no index for topk = 40 \(mlaforge sparsify adds one\)"):
        engine(tiny_models["llama"], topk=40)
