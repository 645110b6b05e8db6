"""Trees of drafted tokens: what their queries see, the tokens that come out, and which tokens a head proposes."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.checkpoint.eagle3 import read_head
from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Draft, ancestry
from mlaforge.engine.speculation.policy import DraftPolicy
from mlaforge.ops.paged_attention import OP
from mlaforge.runtime import triton_interpreted
from support.drafters import Branching
from support.eagle3_heads import HEADS, draft_logits, recorded, saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import CASES, HOW, branch, check_identities, tokens

TRITON = triton_interpreted() and importlib.util.find_spec("triton") is not None

BASES = random_prompts(40, 40, seed=12)
LONGEST = 40 + 12 + 24

forests = st.lists(st.integers(-1, 30), min_size=1, max_size=12).map(
    lambda parents: [min(parent, at - 1) for at, parent in enumerate(parents)]
)


def path(parents, node):
    """From the root to the node."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


@given(forests)
def test_ancestry_counts_edges_to_ancestors(parents):
    rows = ancestry(parents)
    for node, row in enumerate(rows):
        own = path(parents, node)
        assert row == [own[::-1].index(at) if at in own else -1 for at in range(len(parents))]
    draft = Draft(list(range(len(parents))), parents=parents)
    assert draft.depth == max(len(path(parents, node)) for node in range(len(parents)))
    for node, parent in enumerate(parents):
        assert draft.child(parent, node) == node
        assert draft.child(node, node) is None


def test_child_follows_a_chain():
    draft = Draft([5, 6, 6])
    assert [draft.child(-1, 5), draft.child(0, 6), draft.child(1, 6), draft.child(2, 6)] == [0, 1, 2, None]
    assert draft.child(-1, 6) is None and draft.depth == 3


@settings(max_examples=40)
@given(
    parents=forests,
    before=st.integers(0, 20),
    window=st.none() | st.integers(1, 14),
    block_size=st.sampled_from([1, 3, 8]),
    asked=st.integers(1, 12),
    heads=st.sampled_from([(4, 2, 8, 8), (6, 1, 24, 16)]),
)
def test_reference_attention_sees_path_and_prefix(parents, before, window, block_size, asked, heads):
    """Every implementation that takes trees, against each path on its own. The last `asked` nodes have queries, as when
    a head grows a tree; with all of them, positions of the rows too."""
    H, G, D, V = heads
    n, T = len(parents), min(asked, len(parents))
    tables = BlockTables([CacheGroup("it", 60, window)], block_size)
    tables.start(0, [])
    tables.reserve(0, before + n)
    tables.commit(0, list(range(before)), before)
    tree = ancestry(parents)[n - T :]
    batch = make_batch([Chunk(0, range(100), before + n - T, before + n, tree)], tables, torch.device("cpu"))
    levels = [len(path(parents, node)) - 1 for node in range(n)]
    assert batch.positions_N.tolist() == [before + level for level in levels[n - T :]]
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((60 * block_size, G, D), torch.nan)
    (view,) = batch.views
    first, blocks = tables.table(0, 0)
    slots = [blocks[(p - first) // block_size] * block_size + (p - first) % block_size
             for p in range(first, before + n)]  # fmt: skip
    rows[slots] = torch.randn(len(slots), G, D, generator=generator)
    values = rows[..., :V]
    q = torch.randn(T, H, D, generator=generator)
    # Triton's interpreter is slow.
    names = ["reference", "runs"] + ["triton"] * (TRITON and before % 4 == 0)
    results = {name: OP(q, rows, values, view, 0.3, implementation=name) for name in names}
    for t, node in enumerate(range(n - T, n)):
        own = path(parents, node)
        line = [*range(before), *(before + at for at in own)][-window if window else None :]
        keys = rows[[slots[p - first] for p in line]].double().repeat_interleave(H // G, dim=1)
        scores = torch.einsum("hd,lhd->hl", q[t].double(), keys) * 0.3
        wanted = torch.einsum("hl,lhv->hv", scores.softmax(-1), keys[..., :V])
        for name, (out, lse) in results.items():
            assert torch.allclose(out[t].double(), wanted, atol=1e-5), (name, node)
            assert torch.allclose(lse[t].double(), scores.logsumexp(-1), atol=1e-5), (name, node)
    if n == T:
        L = min(before + n - first, (window or 10**6) - 1 + n)
        positions = [*range(before), *(before + level for level in levels)][-L:]
        assert view.positions(0, L).tolist() == [p - (before + n - L) for p in positions]


@settings(max_examples=30)
@given(parents=forests, before=st.integers(0, 300), window=st.none() | st.integers(1, 14), asked=st.integers(1, 12),
       heads=st.sampled_from([(4, 2, 8, 8), (6, 1, 24, 16), (9, 3, 64, 64)]))  # fmt: skip
def test_compiled_attention_sees_path_and_prefix(compiled, parents, before, window, asked, heads):
    """In bf16, chunks of the cache that end inside the tree, and what nobody wrote beside it."""
    H, G, D, V = heads
    n, T = len(parents), min(asked, len(parents))
    tables = BlockTables([CacheGroup("it", 60, window)], 8)
    tables.start(0, [])
    for computed in (before, before + n):
        tables.reserve(0, computed)
        if computed == before:
            tables.commit(0, list(range(before)), before)
    chunk = Chunk(0, range(400), before + n - T, before + n, ancestry(parents)[n - T :])
    (view,) = make_batch([chunk], tables, torch.device("cpu")).views
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((480, G, D), torch.nan, dtype=torch.bfloat16)
    for start, length in view.runs[0]:
        rows[start : start + length] = torch.randn(length, G, D, generator=generator).bfloat16()
    q = torch.randn(T, H, D, generator=generator).bfloat16()
    want, want_lse = OP.reference(q, rows, rows[..., :V], view, 0.3)
    out, lse = OP(q, rows, rows[..., :V], view, 0.3, implementation="native")
    assert torch.allclose(out.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert torch.allclose(lse, want_lse, atol=1e-3)


@pytest.fixture(scope="module", params=CASES, ids=str)
def loaded(request, tiny_models, converted):
    family, layout = request.param
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    return watched(directory, cache_bytes=2 << 20).engine, Oracle(directory)


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    count=st.integers(1, 8),
    more=st.integers(0, 16),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_step=st.integers(4, 40),
    spare=st.integers(0, 30),
    caching=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_tree_gives_the_same_tokens(
    loaded, lengths, count, more, right, block_size, max_step, spare, caching, seed
):
    """Requests one after another, the last two together: trees while one runs alone, chains while there are two."""
    engine, oracle = loaded
    renew(engine, spare, LONGEST, block_size=block_size, caching=caching, max_step=max_step)
    prompts = [BASES[number % 2][:length] for number, length in enumerate(lengths)]
    texts = [prompt + oracle.continuation(prompt, 12) for prompt in prompts]
    branch(engine, Branching(texts, right, seed=seed), count, count + more)
    got = {}
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(12))
        got[str(number)] = []
        while engine.has_work and number != len(prompts) - 2:
            for output in engine.step():
                got[output.request_id] += output.outputs[0].token_ids
    for number, prompt in enumerate(prompts):
        oracle.check(prompt, got[str(number)], 12)
    check_identities(engine.stats().speculation)
    idle(engine)


@pytest.mark.parametrize("name", ["filters", "penalties", "greedy penalties", "stop", "min_tokens", "bias"])
def test_seeded_tokens_with_trees_equal_plain_decoding(name, tiny_models):
    """Token by token, with text, end and log probabilities, and often through a branch."""
    params = SamplingParams(
        **{"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, **HOW[name]}
    )
    plain, llm = watched(tiny_models["llama"]), watched(tiny_models["llama"], cache_bytes=4 << 20)
    for seed in range(3):
        (want,) = plain.generate([BASES[0]], params)
        texts = [BASES[0] + want.outputs[0].token_ids]
        branch(llm.engine, Branching(texts, 0.8, seed=seed), 4, 16)
        (got,) = llm.generate([BASES[0]], params)
        for a, b in zip(want.outputs, got.outputs, strict=True):
            assert (b.token_ids, b.text, b.finish_reason) == (a.token_ids, a.text, a.finish_reason)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert (y.token_id, y.logprob) == (x.token_id, pytest.approx(x.logprob, abs=1e-4))
        stats = llm.engine.stats().speculation
        assert stats.accepted > 0 and stats.tree_tokens > stats.drafted
        check_identities(stats)
    idle(llm.engine)


def test_text_ends_within_an_accepted_path(tiny_models):
    """At each place: by stop id, length, and the end of the context."""
    plain = watched(tiny_models["llama"], max_model_len=60)
    llm = watched(tiny_models["llama"], cache_bytes=4 << 20, max_model_len=60)
    (whole,) = plain.generate([BASES[0]], greedy(20))
    text = whole.outputs[0].token_ids
    for at in range(1, 20, 3):
        branch(llm.engine, Branching([BASES[0] + text], 1.0, seed=at), 8, 24)
        for params in (greedy(at), greedy(20, stop_token_ids=(text[at],)), greedy(30)):
            (want,), (got,) = plain.generate([BASES[0]], params), llm.generate([BASES[0]], params)
            assert got.outputs[0] == want.outputs[0]
            idle(llm.engine)


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
            for value, own in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                new[*nodes, int(head.target_ids[own])] = score + value
        scores |= new
        if at + 1 < depth:
            level = dict(sorted(new.items(), key=lambda item: -item[1])[:width])
    return scores


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [("plain", "llama", None), ("all norms", "mistral", "latent_rope"), ("window", "gpt_oss", "latent"),
     ("another size", "qwen3", None)],
)  # fmt: skip
def test_head_trees_match_the_reference(name, family, layout, tiny_models, converted, tmp_path):
    """The likeliest paths of the plain head; the tokens that come out are the target's."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    oracle, folder = Oracle(directory), saved(tmp_path / "head", **HEADS[name])
    llm = watched(
        directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=3,
        speculative_tree_tokens=9, cache_bytes=2 << 20,
    )  # fmt: skip
    head, engine, proposed = read_head(folder, 3), llm.engine, []
    drafter = engine.speculation.drafter
    propose_tree = drafter.propose_tree

    def watching(sequence, count, depth):
        proposed.append((list(sequence.token_ids), count, depth, propose_tree(sequence, count, depth)))
        return proposed[-1][-1]

    drafter.propose_tree = watching
    renew(engine, 60, 80, block_size=4, max_step=16)
    # From the cache that the first one left.
    for prompt in (BASES[0], [*BASES[0][:33], 7]):
        (output,) = llm.generate([prompt], greedy(12))
        oracle.check(prompt, output.outputs[0].token_ids, 12)
    assert output.num_cached_tokens >= 32
    check_identities(engine.stats().speculation)
    branched = [each for each in proposed if each[3].parents is not None]
    assert len(branched) > len(proposed) / 2
    for text, count, depth, draft in proposed[::5]:
        parents = draft.parents or list(range(-1, len(draft.token_ids) - 1))
        paths = [tuple(draft.token_ids[at] for at in path(parents, node)) for node in range(len(parents))]
        wanted = plain_tree(head, oracle, text, count, depth)
        # Ties and near ties may be taken in another order.
        least = sorted(wanted.values())[-min(count, len(wanted))]
        assert len(set(paths)) == min(count, len(wanted))
        assert all(wanted.get(each, -torch.inf) > least - 1e-3 for each in paths), (paths, wanted)
    # Two together are drafted chains for.
    seen = recorded(drafter)
    before = len(proposed)
    for output in llm.generate(BASES, greedy(6)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 6)
    assert seen and len(proposed) - before < 6
    idle(engine)


def test_a_tree_accepts_more_than_a_chain(tiny_models, tmp_path):
    """Target and head confined to four tokens: a tree that holds most of their pairs is accepted further."""
    words = [40, 41, 42, 43]
    params = greedy(60, logit_bias=dict.fromkeys(words, 100.0))
    folder = saved(tmp_path / "head", tokens=words)
    lengths = {}
    for tree in (0, 16):
        llm = watched(tiny_models["llama"], speculative=str(folder), num_speculative_tokens=2,
                      speculative_tree_tokens=tree, adaptive_speculation=False)  # fmt: skip
        (output,) = llm.generate([BASES[0]], params)
        block = llm.engine.stats().speculation.block()
        lengths[tree] = block["mean_acceptance_length"], tokens(output)
        assert (block["tree_tokens"] > 0) == (tree > 0)
    assert lengths[16][1] == lengths[0][1]
    assert lengths[16][0] > lengths[0][0] + 0.3


@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("dear", [0.02, 0.3])
def test_the_draft_policy_of_trees_is_never_slower_than_plain_decoding(accepts, dear):
    torch.manual_seed(0)
    policy, generated, seconds = DraftPolicy(3, tree=12), 0, 0.0
    for step in range(2000):
        count = policy.choose(1)
        assert count in (0, 3)
        rows = 13 if count else 1
        draws = [*torch.rand(count).lt(accepts).tolist(), False]
        took = 1 + dear * (rows - 1)
        policy.acceptance.record(count, draws.index(False))
        policy.record_time(rows, took * float(1 + 0.1 * torch.rand(())))
        if step >= 100:
            generated, seconds = generated + 1 + draws.index(False), seconds + took
    best = max(1, sum(accepts**at for at in range(4)) / (1 + dear * 12))
    assert generated / seconds >= 0.95 and generated / seconds >= 0.85 * best


def test_tree_options(refused, tiny_models, tmp_path):
    folder = saved(tmp_path / "head")
    asked = ("generate", tiny_models["llama"], "--speculative-tree-tokens")
    refused(
        "speculative_tree_tokens = 2 must be 0 (no trees) or at least num_speculative_tokens = 3",
        *asked,
        2,
        "--speculative",
        folder,
    )
    refused("= 65", *asked, 65, "--speculative", folder)
    refused("drafts no trees", *asked, 8, "--speculative", "ngram")
    refused("needs a head", *asked, 8)
