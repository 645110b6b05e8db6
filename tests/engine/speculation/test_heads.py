"""Drafts of EAGLE-3 and block heads are those of plain PyTorch: modeling/eagle3.py and block_head.py on whole texts,
with transformers' own hidden states."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mlaforge.checkpoint.draft_head import read_head
from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.draft_sampling import sample_distribution
from support import block_heads, eagle3_heads
from support.eagle3_heads import check_drafts, recorded
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.host_reads import reads_of
from support.speculating import check_identities, speculate

BASES = random_prompts(40, 40, seed=4)


def check_tokens(llm, oracle, prompts):
    """Assert plain decoding's twelve tokens; return the last output."""
    for output in llm.generate(prompts, greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    return output


@pytest.mark.parametrize(
    ("heads", "name", "family", "layout"),
    [
        *((heads, name, "llama", None) for heads in (eagle3_heads, block_heads) for name in heads.HEADS),
        (eagle3_heads, "plain", "mistral", "latent_rope"),
        (eagle3_heads, "window", "gpt_oss", None),
        (eagle3_heads, "all norms", "qwen3", "latent"),
        (eagle3_heads, "window", "gpt_oss", "latent"),
        (block_heads, "plain", "mistral", "latent_rope"),
        (block_heads, "window", "gpt_oss", None),
        (block_heads, "two layers", "qwen3", "latent"),
    ],
)
def test_drafts_match_the_reference_head_and_tokens_plain_decoding(
    heads, name, family, layout, tiny_models, converted, tmp_path
):
    """Also after chunks, rejected drafts, a found prefix and preemption; in batches of texts of several lengths."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    oracle, folder = Oracle(directory), heads.saved(tmp_path / "head", **heads.HEADS[name])
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    head, engine, drafter = read_head(folder, 3), llm.engine, llm.engine.speculation.drafter
    seen = recorded(drafter)
    assert engine.tables.groups[-1].name == "draft"
    block_size = getattr(head.config, "block_size", 4)
    assert engine.speculation.policy.max_tokens == block_size - 1
    renew(engine, 60, 80, block_size=4, max_step=7)
    check_tokens(llm, oracle, BASES[:1])
    assert check_tokens(llm, oracle, [BASES[0] + oracle.continuation(BASES[0], 2) + [3, 4]]).num_cached_tokens >= 36
    # A draft shorter than a block has fewer masked places.
    speculate(engine, drafter, 3 if heads is block_heads else 5)
    before = engine.stats().preemptions
    renew(engine, 4, 40 + 12, block_size=4, max_step=16, caching=False)
    check_tokens(llm, oracle, [*BASES, BASES[0][:9]])
    assert engine.stats().preemptions > before and {count for _, count, _ in seen} >= {1, 2, 3}
    check_drafts(seen, head, oracle, heads.draft_logits)
    check_identities(engine.stats().speculation)
    idle(engine)


@pytest.mark.parametrize(("heads", "early"), [(eagle3_heads, True), (eagle3_heads, False), (block_heads, False)])
def test_draft_ends_before_an_unlikely_path(heads, early, tiny_models, tmp_path):
    """By the product of the reference's highest probabilities: while it is drafted as on a CPU, or afterwards as on a
    GPU."""
    directory, folder, least = tiny_models["llama"], heads.saved(tmp_path / "head"), 0.15
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=4)
    llm.engine.speculation.drafter.stops_early = early
    seen = recorded(llm.engine.speculation.drafter, least)
    check_tokens(llm, oracle, [*BASES, *random_prompts(9, 30, 21)])
    for text, count, draft in seen:
        # Past the draft, whichever tokens.
        logits, n = (
            heads.draft_logits(head, oracle, text, [*draft.token_ids, *[0] * count][:count]),
            len(draft.token_ids),
        )
        likely = logits.softmax(-1).amax(-1).cumprod(0)
        assert (likely[:n] > least - 1e-4).all() and (n == count or likely[n] < least + 1e-4)
        gaps = logits.amax(-1)[:n] - logits[range(n), [head.target_ids.tolist().index(t) for t in draft.token_ids]]
        assert (gaps < 1e-3).all()
    assert {0, 1, 2} <= {len(draft.token_ids) for _, _, draft in seen}
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


@pytest.mark.parametrize("heads", [eagle3_heads, block_heads], ids=["eagle3", "block"])
def test_host_reads_drafts_once_per_step(heads, tiny_models, tmp_path, monkeypatch):
    """As on a GPU, where every read is a wait, and so is an index that is a host list; texts of several lengths end at
    several depths."""
    monkeypatch.setattr(builder, "BlockTables", DeviceTables)
    options = {"adaptive_speculation": False, "num_speculative_tokens": 4}
    llm = watched(tiny_models["llama"], speculative=str(heads.saved(tmp_path / "head")), **options)
    drafter = llm.engine.speculation.drafter
    drafter.stops_early, propose = False, drafter.propose
    for least, temperature in itertools.product((0.0, 0.15), (0.0, 1.0)):
        drafter.propose = propose
        seen = recorded(drafter, least)
        how = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=n) for n in (9, 12, 14)]
        with reads_of((drafter, "propose")) as reads:
            llm.generate(random_prompts(9, 30, 21), how)
        proposals = [names for names in reads["propose"] if names]
        assert len(proposals) > 5 and all(names == ["tolist"] for names in proposals), proposals
        assert len({len(draft.token_ids) for *_, draft in seen if draft}) > 1
    idle(llm.engine)


def test_sampling_equals_multinomial():
    """Which waits for the device: to the bit the same tokens of the same random numbers."""
    for seed in range(60):
        p_V = (3 * torch.randn(87, generator=torch.Generator().manual_seed(seed))).softmax(-1)
        ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert sample_distribution(p_V, ours) == torch.multinomial(p_V, 1, generator=theirs)[0]
        assert torch.equal(ours.get_state(), theirs.get_state())


# Block heads


def test_a_continuation_drafts_from_its_first_step(tiny_models, tmp_path):
    """A forked text has all rows of the head: they depend on the target's states alone."""
    directory, folder = tiny_models["llama"], block_heads.saved(tmp_path / "head")
    oracle, llm = Oracle(directory), watched(directory, speculative=str(folder), adaptive_speculation=False)
    seen = recorded(llm.engine.speculation.drafter)
    llm.generate([BASES[0]], SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True))
    assert sum(len(text) == len(BASES[0]) + 1 for text, _, _ in seen) == 2
    head = read_head(folder, 3)
    for text, count, draft in seen:
        expected = block_heads.draft_logits(head, oracle, text, draft.token_ids).softmax(-1)
        torch.testing.assert_close(draft.q_KV[:, head.target_ids], expected, rtol=1e-3, atol=1e-4)
        assert (draft.q_KV[range(count), draft.token_ids] > 0).all()
    idle(llm.engine)


def test_a_second_pass_fills_the_less_likely_places_again(tiny_models, tmp_path):
    """In view of the likelier tokens. Greedy tokens stay plain decoding's; sampled requests take one pass."""
    directory, folder = tiny_models["llama"], block_heads.saved(tmp_path / "head", layers=2)
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    drafter, passes = llm.engine.speculation.drafter, []
    drafter.denoise_steps = 2
    drafter.watcher = SimpleNamespace(
        filled=lambda sequence, _: passes.append(len(sequence.token_ids)), verified=lambda *_: None
    )
    seen = recorded(drafter)
    check_tokens(llm, oracle, [BASES[0], BASES[1][:9]])
    embedding, masks = oracle.model.get_input_embeddings().weight, head.mask_embedding.detach().clone()
    head_ids, changed = head.target_ids.tolist(), 0
    for text, count, draft in seen:
        first = block_heads.draft_logits(head, oracle, text, draft.token_ids)
        highest, indices = first.softmax(-1).max(-1)
        chosen = highest.topk(max(1, round(count / 2))).indices.tolist()
        for place in chosen:
            head.mask_embedding[place] = embedding[head.target_ids[indices[place]]]
        second = block_heads.draft_logits(head, oracle, text, draft.token_ids)
        head.mask_embedding.copy_(masks)
        for place, token in enumerate(draft.token_ids):
            logits = (first if place in chosen else second)[place]
            assert float(logits.max() - logits[head_ids.index(token)]) < 1e-3
        changed += bool((second.argmax(-1) != indices)[[p for p in range(count) if p not in chosen]].any())
    assert changed > 3 and len(passes) == 2 * len(seen)
    passes.clear()
    llm.generate([BASES[0]], SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True))
    assert len(passes) == len(set(passes)) > 0
    idle(llm.engine)
