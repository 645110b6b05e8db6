"""Drafts of EAGLE-3 heads are those of plain PyTorch.

The reference is modeling/eagle3.py on whole texts, with transformers' own hidden states.
"""

import itertools

import pytest
import torch

from mlaforge.checkpoint.eagle3 import read_head
from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.draft_sampling import sample_distribution
from support.eagle3_heads import HEADS, check_drafts, draft_logits, recorded, saved
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
        ("all norms", "qwen3", "latent"),
        ("window", "gpt_oss", "latent"),
    ],
)
def test_drafts_match_the_reference_head_and_tokens_plain_decoding(
    name, family, layout, tiny_models, converted, tmp_path
):
    """Also after chunks, rejected drafts, a found prefix and preemption."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    oracle, folder = Oracle(directory), saved(tmp_path / "head", **HEADS[name])
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    head, engine = read_head(folder, 3), llm.engine
    seen = recorded(engine.speculation.drafter)
    assert engine.tables.groups[-1].name == "draft"
    renew(engine, 60, 80, block_size=4, max_step=7)
    for prompts in ([BASES[0]], [BASES[0] + oracle.continuation(BASES[0], 2) + [3, 4]]):
        for output in llm.generate(prompts, greedy(12)):
            oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert output.num_cached_tokens >= 36
    speculate(engine, engine.speculation.drafter, 5)
    before = engine.stats().preemptions
    renew(engine, 4, 40 + 12, block_size=4, max_step=16, caching=False)
    for output in llm.generate([*BASES, BASES[0][:9]], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert engine.stats().preemptions > before
    check_drafts(seen, head, oracle)
    check_identities(engine.stats().speculation)
    idle(engine)


@pytest.mark.parametrize("early", [True, False])
def test_draft_ends_before_an_unlikely_path(early, tiny_models, tmp_path):
    """By the product of the reference's highest probabilities: while it is drafted as on a CPU, or afterwards as on a
    GPU."""
    directory, folder, least = tiny_models["llama"], saved(tmp_path / "head"), 0.15
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=4)
    llm.engine.speculation.drafter.stops_early = early
    seen = recorded(llm.engine.speculation.drafter, least)
    for output in llm.generate([*BASES, *random_prompts(9, 30, 21)], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    check_drafts([record for record in seen if record[2].token_ids], head, oracle)
    for text, count, draft in seen:
        # One token more than was drafted, whichever.
        logits = draft_logits(head, oracle, text, [*draft.token_ids, 0])
        likely = logits.softmax(-1).amax(-1).cumprod(0)
        assert (likely[:-1] > least - 1e-4).all()
        assert len(draft.token_ids) == count or likely[-1] < least + 1e-4
    assert {0, 1, 2} <= {len(draft.token_ids) for _, _, draft in seen}
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


def test_host_reads_chains_once_per_step(tiny_models, tmp_path, monkeypatch):
    """As on a GPU, where every read is a wait, and so is an index that is a host list; texts of several lengths end at
    several depths."""
    monkeypatch.setattr(builder, "BlockTables", DeviceTables)
    llm = watched(
        tiny_models["llama"], speculative=str(saved(tmp_path / "head")), adaptive_speculation=False,
        num_speculative_tokens=4,
    )  # fmt: skip
    drafter, proposals, limit = llm.engine.speculation.drafter, [], {}
    drafter.stops_early = False
    propose = drafter.propose

    def counted(budgets, _):
        with host_reads() as reads:
            drafts = propose(budgets, limit["least"])
        if any(draft is not None for draft in drafts):
            proposals.append((reads, {len(draft.token_ids) for draft in drafts if draft is not None}))
        return drafts

    drafter.propose = counted
    for limit["least"], temperature in itertools.product((0.0, 0.15), (0.0, 1.0)):
        proposals.clear()
        how = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=n) for n in (9, 12, 14)]
        llm.generate(random_prompts(9, 30, 21), how)
        assert len(proposals) > 5 and all(names == ["tolist"] for names, _ in proposals), proposals
        assert max(len(lengths) for _, lengths in proposals) > 1
    idle(llm.engine)


def test_sampling_equals_multinomial():
    """Which waits for the device: to the bit the same tokens of the same random numbers."""
    for seed in range(60):
        p_V = (3 * torch.randn(87, generator=torch.Generator().manual_seed(seed))).softmax(-1)
        ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert sample_distribution(p_V, ours) == torch.multinomial(p_V, 1, generator=theirs)[0]
        assert torch.equal(ours.get_state(), theirs.get_state())
