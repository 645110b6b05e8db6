"""Trees of drafted tokens: what their queries see, and which tokens a head proposes."""

import dataclasses
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.checkpoint.eagle3 import read_head
from mlaforge.runtime import triton_interpreted
from support.eagle3_heads import HEADS, draft_logits, recorded, saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.forests import Nodes, forests, path
from support.speculating import check_identities

TRITON = triton_interpreted() and importlib.util.find_spec("triton") is not None
BASES = random_prompts(40, 40, seed=12)


@settings(max_examples=40)
@given(parents=forests, before=st.integers(0, 20), window=st.none() | st.integers(1, 14),
       block_size=st.sampled_from([1, 3, 8]), queries=st.integers(1, 12),
       heads=st.sampled_from([(4, 2, 8, 8), (6, 1, 24, 16)]))  # fmt: skip
def test_attention_sees_path_and_prefix(parents, before, window, block_size, queries, heads):
    """Of every implementation that takes trees (compiled ones: tests/ops/test_tree_attention.py). With all nodes as
    queries, positions of the rows too."""
    nodes = Nodes(parents, before, window, block_size, queries, heads)
    levels, n = [len(path(parents, node)) - 1 for node in range(len(parents))], len(parents)
    assert nodes.batch.positions_N.tolist() == [before + level for level in levels[n - nodes.T :]]
    # Triton's interpreter is slow.
    names = ["reference", "runs"] + ["triton"] * (TRITON and before % 4 == 0)
    nodes.check({name: nodes.attend(name) for name in names}, 1e-5)
    if n == nodes.T:
        L = min(before + n - nodes.first, (window or 10**6) - 1 + n)
        positions = [*range(before), *(before + level for level in levels)][-L:]
        assert nodes.view.positions(0, L).tolist() == [p - (before + n - L) for p in positions]


# Trees of a head


def plain_tree(head, oracle, text, count, depth, branches=8):
    """Paths and their log probabilities by a whole pass of the plain head per node: what EAGLE-2 proposes."""
    width = count if depth == 1 else max(1, min(branches, (count + 1) // (depth - 1)))
    scores, level = {}, {(): 0.0}
    for at in range(depth):
        new = {}
        for nodes, score in level.items():
            # One more token than drafted gives the logits after all of them.
            logprobs = draft_logits(head, oracle, text, [*nodes, 0])[-1].double().log_softmax(-1)
            top = logprobs.topk(min(max(width, branches), len(logprobs)))
            for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                new[*nodes, int(head.target_ids[index])] = score + value
        scores |= new
        if at + 1 < depth:
            level = dict(sorted(new.items(), key=lambda item: -item[1])[:width])
    return scores


@pytest.mark.parametrize(
    ("name", "family", "layout", "few"),
    [*(("plain", "llama", None, few) for few in (0, 2, 4)), ("another size", "qwen3", None, 0),
     ("all norms", "mistral", "latent_rope", 0), ("window", "gpt_oss", "latent", 0)],
)  # fmt: skip
def test_head_trees_match_the_reference(name, family, layout, few, tiny_models, converted, tmp_path):
    """The likeliest paths of the plain head; the tokens that come out are the target's. Target and head may be confined
    to a few tokens, so that drafts are accepted."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    few = range(40, 40 + few)
    oracle, folder = Oracle(directory), saved(tmp_path / "head", **HEADS[name], tokens=list(few) or None)
    llm = watched(
        directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=3,
        speculative_tree_tokens=9, cache_bytes=2 << 20,
    )  # fmt: skip
    head, engine, proposed = read_head(folder, 3), llm.engine, []
    drafter = engine.speculation.drafter
    propose_tree = drafter.propose_tree

    def watched_tree(sequence, count, depth):
        proposed.append((list(sequence.token_ids), count, depth, propose_tree(sequence, count, depth)))
        return proposed[-1][-1]

    drafter.propose_tree = watched_tree
    renew(engine, 60, 80, block_size=4, max_step=16)
    how = greedy(30 if few else 12, logit_bias=dict.fromkeys(few, 100.0))
    # From the cache that the first one left.
    for prompt in (BASES[0], [*BASES[0][:33], 7]):
        (output,) = llm.generate([prompt], how)
        if few:
            assert output.outputs == llm.generate([prompt], dataclasses.replace(how, speculate=False))[0].outputs
        else:
            oracle.check(prompt, output.outputs[0].token_ids, 12)
    assert output.num_cached_tokens >= 32
    stats = engine.stats().speculation
    check_identities(stats)
    assert not few or stats.block()["mean_acceptance_length"] > 1.5
    assert sum(draft.parents is not None for *_, draft in proposed) > len(proposed) / 2
    for text, count, depth, draft in proposed[::7]:
        parents = draft.parents or list(range(-1, len(draft.token_ids) - 1))
        paths = [tuple(draft.token_ids[at] for at in path(parents, node)) for node in range(len(parents))]
        expected = plain_tree(head, oracle, text, count, depth)
        # Ties and near ties may be taken in another order.
        least = sorted(expected.values())[-min(count, len(expected))]
        assert len(set(paths)) == min(count, len(expected))
        assert all(expected.get(tokens, -torch.inf) > least - 1e-3 for tokens in paths), (paths, expected)
    # Two together get chains.
    seen = recorded(drafter)
    before = len(proposed)
    for output in llm.generate(BASES, greedy(6)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 6)
    assert seen and len(proposed) - before < 6
    idle(engine)
