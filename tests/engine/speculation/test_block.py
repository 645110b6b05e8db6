"""Drafts of block heads are those of plain PyTorch: modeling/block_head.py on whole texts, with transformers' own
hidden states."""

from types import SimpleNamespace

import pytest
import torch

from mlaforge.checkpoint.block_head import read_head
from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from support.block_heads import HEADS, check_drafts, draft_logits, saved
from support.eagle3_heads import recorded
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.host_reads import host_reads
from support.speculating import check_identities, speculate

BASES = random_prompts(40, 40, seed=4)


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        *((name, "llama", None) for name in HEADS),
        ("plain", "mistral", "latent_rope"),
        ("window", "gpt_oss", None),
        ("two layers", "qwen3", "latent"),
    ],
)
def test_drafts_match_the_reference_head_and_tokens_plain_decoding(
    name, family, layout, tiny_models, converted, tmp_path
):
    """Also after chunks, rejected drafts, a found prefix and preemption; in batches of texts of several lengths."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    oracle, folder = Oracle(directory), saved(tmp_path / "head", **HEADS[name])
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    head, engine = read_head(folder, 3), llm.engine
    seen = recorded(engine.speculation.drafter)
    assert engine.tables.groups[-1].name == "draft"
    assert engine.speculation.policy.max_tokens == head.config.block_size - 1
    renew(engine, 60, 80, block_size=4, max_step=7)
    for prompts in ([BASES[0]], [BASES[0] + oracle.continuation(BASES[0], 2) + [3, 4]]):
        for output in llm.generate(prompts, greedy(12)):
            oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert output.num_cached_tokens >= 36
    # A draft shorter than the block has fewer masked places.
    speculate(engine, engine.speculation.drafter, 3)
    before = engine.stats().preemptions
    renew(engine, 4, 40 + 12, block_size=4, max_step=16, caching=False)
    for output in llm.generate([*BASES, BASES[0][:9]], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert engine.stats().preemptions > before
    assert {count for _, count, _ in seen} >= {1, 2, 3, 4}
    check_drafts(seen, head, oracle)
    check_identities(engine.stats().speculation)
    idle(engine)


def test_a_continuation_drafts_from_its_first_step(tiny_models, tmp_path):
    """A forked text has all rows of the head: they depend on the target's states alone."""
    directory, folder = tiny_models["llama"], saved(tmp_path / "head")
    oracle, llm = Oracle(directory), watched(directory, speculative=str(folder), adaptive_speculation=False)
    seen = recorded(llm.engine.speculation.drafter)
    llm.generate([BASES[0]], SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True))
    assert sum(len(text) == len(BASES[0]) + 1 for text, _, _ in seen) == 2
    head = read_head(folder, 3)
    for text, count, draft in seen:
        expected = draft_logits(head, oracle, text, count).softmax(-1)
        torch.testing.assert_close(draft.q_KV[:, head.target_ids], expected, rtol=1e-3, atol=1e-4)
        assert (draft.q_KV[range(count), draft.token_ids] > 0).all()
    idle(llm.engine)


def test_draft_ends_before_an_unlikely_path(tiny_models, tmp_path):
    """By the product of the reference's highest probabilities."""
    directory, folder, least = tiny_models["llama"], saved(tmp_path / "head"), 0.15
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    seen = recorded(llm.engine.speculation.drafter, least)
    llm.generate([*BASES, *random_prompts(9, 30, 21)], greedy(12))
    for text, count, draft in seen:
        paths = draft_logits(head, oracle, text, count).softmax(-1).amax(-1).cumprod(0)
        length = len(draft.token_ids)
        assert (paths[:length] > least - 1e-4).all() and (length == count or paths[length] < least + 1e-4)
    assert {0, 1, 2} <= {len(draft.token_ids) for _, _, draft in seen}
    idle(llm.engine)


def test_host_reads_blocks_once_per_step(tiny_models, tmp_path, monkeypatch):
    """As on a GPU, where every read is a wait."""
    monkeypatch.setattr(builder, "BlockTables", DeviceTables)
    llm = watched(tiny_models["llama"], speculative=str(saved(tmp_path / "head")), adaptive_speculation=False)
    drafter, proposals = llm.engine.speculation.drafter, []
    propose = drafter.propose

    def counted(budgets, _):
        with host_reads() as reads:
            drafts = propose(budgets, 0.1)
        proposals.append(reads)
        return drafts

    drafter.propose = counted
    how = [SamplingParams(temperature=n % 2, max_tokens=n, ignore_eos=True, seed=n) for n in (9, 12, 15)]
    llm.generate(random_prompts(9, 30, 21), how)
    assert len(proposals) > 5 and all(reads == ["tolist"] for reads in proposals), proposals
    idle(llm.engine)


def test_rejects_trees(tiny_models, tmp_path):
    with pytest.raises(UserError, match="drafts in one pass, and no trees"):
        watched(tiny_models["llama"], speculative=str(saved(tmp_path / "head")), speculative_tree_tokens=8)


def test_a_second_pass_fills_the_less_likely_places_again(tiny_models, tmp_path):
    """In view of the likelier tokens. Greedy tokens stay plain decoding's; sampled requests take one pass."""
    directory, folder = tiny_models["llama"], saved(tmp_path / "head", layers=2)
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    drafter, passes = llm.engine.speculation.drafter, []
    drafter.denoise_steps, drafter.watcher = (
        2,
        SimpleNamespace(
            filled=lambda sequence, ids: passes.append((len(sequence.token_ids), ids)), verified=lambda *_: None
        ),
    )
    seen = recorded(drafter)
    for output in llm.generate([BASES[0], BASES[1][:9]], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    embedding, masks = oracle.model.get_input_embeddings().weight, head.mask_embedding.detach().clone()
    head_ids = head.target_ids.tolist()
    changed = 0
    for text, count, draft in seen:
        first = draft_logits(head, oracle, text, count)
        highest, indices = first.softmax(-1).max(-1)
        chosen = highest.topk(max(1, round(count / 2))).indices.tolist()
        for place in chosen:
            head.mask_embedding[place] = embedding[head.target_ids[indices[place]]]
        second = draft_logits(head, oracle, text, count)
        head.mask_embedding.copy_(masks)
        for place, token in enumerate(draft.token_ids):
            logits = (first if place in chosen else second)[place]
            assert float(logits.max() - logits[head_ids.index(token)]) < 1e-3
        changed += bool((second.argmax(-1) != indices)[[p for p in range(count) if p not in chosen]].any())
    assert changed > 3 and len(passes) == 2 * len(seen)
    passes.clear()
    llm.generate([BASES[0]], SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True))
    lengths = [length for length, _ in passes]
    assert len(lengths) == len(set(lengths)) > 0
    idle(llm.engine)
