"""Token selection: the compiled kernels against the reference, and the reference against the model."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.view import query_token_view, select_view
from mlaforge.engine.execution.indexer import Selections
from mlaforge.modeling import token_index_mla
from mlaforge.modeling.token_index_mla import PairsIndex
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.host_view import host_view
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.token_selection import (
    TokenIndex,
    empty_keys,
    keys_at,
    select_reference,
    visible_slots,
    write_reference,
)
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin.heads import Heads
from support.paged_steps import DEVICE, SHAPES, make_step, needs_triton

G, P = 2, 6


def make_view(lengths, queries, block_size=16, seed=0):
    """A view of sequences with shuffled blocks, and the number of slots."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3, generator=generator).int()
    table, at = torch.zeros(len(lengths), max(counts), dtype=torch.int32), 0
    for s, count in enumerate(counts):
        table[s, :count], at = blocks[at : at + count], at + count
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    slots = [
        int(table[s, p // block_size]) * block_size + p % block_size
        for s, (length, T) in enumerate(zip(lengths, queries, strict=True))
        for p in range(length - T, length)
    ]
    view = CacheView(
        table, torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int32), starts,
        torch.tensor(slots), block_size, max(queries), max(lengths), queries=tuple(queries),
        runs=tuple(((0, length),) for length in lengths), generating=(True,) * len(lengths),
        selecting=(True,) * len(lengths),
        lengths=tuple(lengths),
    )  # fmt: skip
    return view, len(blocks) * block_size


def turns(positions):
    return torch.polar(torch.ones(()), torch.outer(positions.float(), 0.7 ** torch.arange(float(P))))[:, None]


def index(H, W, E, F, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    frequency = torch.randint(-1, P, (W // 2,), generator=generator)
    return TokenIndex(8 * normal(W, F), normal(W), normal(G, W, E) / 800, frequency, H, **more)


cases = st.tuples(
    st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(12, 80), st.integers(0, 4), st.integers(1, 8),
    st.sampled_from([0, 7]), st.booleans(), st.sampled_from([2, 10]), st.sampled_from([8, 16, 32]), st.integers(0, 99),
)  # fmt: skip


@settings(max_examples=40)
@given(case=cases)
def test_kernels_select_as_the_reference(compiled, case):
    lengths, topk, sink, window, stride, sinks, H, W, seed = case
    view, slots = make_view(lengths, [min(length, 3) for length in lengths], seed=seed)
    token_index = index(
        H, W, 12, 20, seed, sink=sink, window=window, stride=stride, topk=topk,
        sinks=torch.linspace(-1, 2, H) if sinks else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    keys = empty_keys(slots, W, torch.device("cpu"))
    keys.copy_(torch.randint(-127, 128, keys.shape, generator=generator))
    N = len(view.slots_N)
    q = torch.randn(N, H * 12 + 5, generator=generator).bfloat16()
    turn = turns(torch.arange(N))
    counts = tuple(min(topk, length) for length in lengths)
    actual = token_index.choose(keys, q, turn, view, counts, implementation="native")
    expected = token_index.choose(keys, q, turn, view, counts, implementation="reference")
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        places = actual[1][s, :count].tolist()
        assert places == sorted(set(places)) and places[-1] == length - 1
        always = {*range(min(sink, length)), *range(max(0, length - window), length)}
        always |= set(range(0, length, stride)) if stride else set()
        assert always <= set(places) or len(always) > count
        # Rounding may swap two tokens with adjacent scores.
        assert len(set(places) & set(expected[1][s, :count].tolist())) >= count - 1
        block = view.block_table_SB[s].long()
        for slot, place in zip(actual[0][s, :count].tolist(), places, strict=True):
            assert slot == block[place // 16] * 16 + place % 16


def test_ranks_select_what_all_heads_select():
    """The heads of two ranks, whose scores are averaged, and the features of two, whose keys are added."""
    view, slots = make_view([90, 200, 12], [1, 2, 1])
    whole = index(6, 8, 12, 20, sink=2, window=5, topk=30, sinks=torch.linspace(-1, 2, 6))
    generator = torch.Generator().manual_seed(1)
    keys, N = empty_keys(slots, 8, torch.device("cpu")), len(view.slots_N)
    keys.copy_(torch.randint(-127, 128, keys.shape, generator=generator))
    q, turn, counts = torch.randn(N, 72, generator=generator), turns(torch.arange(N)), (30, 30, 12)
    ranks = [
        dataclasses.replace(whole, query=whole.query[r : r + 1], heads=3, sinks=whole.sinks[3 * r : 3 * r + 3])
        for r in range(G)
    ]
    scores = []
    select_reference(q[:, 36:], ranks[1], turn, keys, view, counts, 1, merge=lambda x: scores.append(x) or x)
    actual = select_reference(q[:, :36], ranks[0], turn, keys, view, counts, 1, merge=lambda x: (x + scores[0]) / 2)
    expected = select_reference(q, whole, turn, keys, view, counts, 1)
    alone = select_reference(q[:, :36], ranks[0], turn, keys, view, counts, 1)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert not torch.equal(alone[1], expected[1])

    features, heads = torch.randn(N, 20, generator=generator), [Heads(2, r, 4) for r in range(4)]
    parts = [
        features[:, 10 * own.kv_part : 10 * own.kv_part + 10] @ own.share("index.key.weight", whole.key, True).T
        + own.share("index.key.bias", whole.bias, True)
        for own in heads
    ]
    written, merged = torch.zeros_like(keys), torch.zeros_like(keys)
    write_reference(features, whole, turn, written, view.slots_N)
    nothing = dataclasses.replace(whole, key=whole.key * 0, bias=whole.bias * 0)
    write_reference(features, nothing, turn, merged, view.slots_N, merge=lambda x: x + sum(parts))
    assert int((written.int() - merged.int()).abs().max()) <= 1 and bool(written.any())
    assert torch.equal(torch.cat([own.share("index.query", whole.query) for own in heads[::2]]), whole.query)


def on_device(index, view):
    """Move an index and a view to DEVICE."""
    fields = {f.name: getattr(index, f.name) for f in dataclasses.fields(index)}
    moved = {name: value.to(DEVICE) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    tensors = ("block_table_SB", "seq_lens_S", "first_S", "query_start_S1", "slots_N")
    there = dataclasses.replace(view, **{name: getattr(view, name).to(DEVICE) for name in tensors})
    return dataclasses.replace(index, **moved), there


@pytest.mark.gpu
@needs_triton
@settings(max_examples=12)
@given(case=cases)
def test_triton_selects_as_the_reference(case):
    lengths, topk, sink, window, stride, sinks, H, W, seed = case
    view, slots = make_view(lengths, [min(length, 3) for length in lengths], seed=seed)
    token_index, view = on_device(index(
        H, W, 12, 20, seed, sink=sink, window=window, stride=stride, topk=topk,
        sinks=torch.linspace(-1, 2, H) if sinks else None,
    ), view)  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    keys = empty_keys(slots, W, torch.device("cpu"))
    keys = keys.copy_(torch.randint(-127, 128, keys.shape, generator=generator)).to(DEVICE)
    N = len(view.slots_N)
    q, turn = torch.randn(N, H * 12 + 5, generator=generator).to(DEVICE), turns(torch.arange(N)).to(DEVICE)
    # The first sequence reads all of its tokens, like a prompt in a mixed step.
    counts = (lengths[0], *(min(topk, length) for length in lengths[1:]))
    actual = token_index.choose(keys, q, turn, view, counts, 16, "triton")
    expected = token_index.choose(keys, q, turn, view, counts, 16, "reference")
    assert actual[0].shape == expected[0].shape and actual[0].dtype == torch.int32
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        places = actual[1][s, :count].tolist()
        assert places == sorted(set(places)) and places[-1] < length
        # Tokens that are always read have equal scores.
        always = {*range(min(sink, length)), *range(max(0, length - window), length)}
        always |= set(range(0, length, stride)) if stride else set()
        assert always <= set(places) or set(places) <= always
        if always <= set(places):
            assert len(set(places) & set(expected[1][s, :count].tolist())) >= count - 1
        block = view.block_table_SB[s].tolist()
        assert actual[0][s, :count].tolist() == [block[place // 16] * 16 + place % 16 for place in places]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("coded", "rotated"), [(0, False), (13, False), (20, False), (0, True)])
def test_triton_writes_the_keys_of_the_reference(coded, rotated):
    """Rounded features, pairs without a frequency, and slots in any order. A key may be rounded to its neighbour."""
    generator = torch.Generator().manual_seed(coded)
    token_index = index(4, 12, 12, 20, coded, pre_rotated=rotated)
    view, slots = make_view([40, 23], [7, 12])
    if coded:
        token_index = dataclasses.replace(
            token_index, halves=torch.randint(1, 5, (coded,), generator=generator).float()
        )
    token_index, view = on_device(token_index, view)
    # Triton's interpreter truncates to bf16.
    features = (3 * torch.randn(19, 20, generator=generator)).bfloat16().float().to(DEVICE)
    written = []
    for name in ("triton", "reference"):
        keys = empty_keys(slots, 12, torch.device(DEVICE))
        token_index.write(keys, features, turns(torch.arange(19)).to(DEVICE), view.slots_N, name)
        written.append(keys.int())
    assert written[1].abs().max() > 3 and (written[0] - written[1]).abs().max() <= 1
    assert (written[0] != written[1]).float().mean() < 0.01


@pytest.mark.gpu
@needs_triton
def test_the_last_of_equal_scores_are_selected():
    """Over several steps of the selection; scores differ in each of its digits."""
    from mlaforge.ops import token_selection_triton as selection

    lengths, counts = [300, 64, 5], [40, 64, 9]
    view, _ = make_view(lengths, [1] * 3)
    _, view = on_device(index(2, 8, 12, 20), view)
    scores = torch.randint(0, 12, (3, 512), generator=torch.Generator().manual_seed(0)).to(DEVICE) * (1 + 2**-20) / 7
    scores[0, 17] = torch.inf
    for s, length in enumerate(lengths):
        scores[s, length:] = -1
    arguments = selection.select_launch(scores, counts, view, 64) | {"BLOCK_L": 128}
    selection.select_kernel[(3,)](**arguments)
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        best = sorted(range(length), key=lambda t: (-float(scores[s, t]), -t))[:count]
        assert arguments["positions"][s].tolist() == sorted(best) + [0] * (64 - len(best))


@needs_triton
def test_triton_rejects_unsupported_inputs(monkeypatch):
    """A wrong dtype, and CPU tensors if kernels are compiled."""
    from mlaforge.ops import token_selection_triton

    view, slots = make_view([40], [1])
    token_index, keys = index(2, 8, 12, 20), empty_keys(slots, 8, torch.device("cpu"))
    q, turn = torch.randn(1, 24), turns(torch.arange(1))
    with pytest.raises(UserError, match="index keys are torch.float32, not int8" if DEVICE == "cpu" else "on cpu"):
        token_index.choose(keys.float(), q, turn, view, (10,), 1, "triton")
    monkeypatch.setattr(token_selection_triton, "INTERPRETED", False)
    with pytest.raises(UserError, match=r"it needs CUDA tensors, .* on cpu"):
        token_index.choose(keys, q, turn, view, (10,), 1, "triton")


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape", ["mha", "mla"])
def test_triton_attends_to_a_selection(shape):
    """The paged attention kernel over selected rows, against the reference."""
    step = make_step(SHAPES[shape], [(300, 1), (90, 3), (40, 1)])
    q, k, v, view, scale = step.inputs
    chosen = [torch.cat((torch.arange(0, length - 8, 7), torch.arange(length - 8, length))) for length in (300, 90, 40)]
    positions = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True).int().to(DEVICE)
    slots = view.block_table_SB.long().gather(1, positions.long() // view.block_size) * view.block_size
    slots = (slots + positions % view.block_size).int()
    some = select_view(view, slots, positions, tuple(map(len, chosen)), False)
    actual, expected = (paged_attention(q, k, v, some, scale, implementation=name) for name in ("triton", "reference"))
    whole = paged_attention(q, k, v, view, scale, implementation="reference")
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    assert not torch.allclose(actual[0], whole[0], atol=1e-2)


@pytest.mark.parametrize("pre_rotated", [False, True])
@pytest.mark.parametrize("coded", [False, True])
def test_kernels_write_as_the_reference(compiled, pre_rotated, coded):
    view, slots = make_view([40, 70], [40, 5])
    halves = torch.full((12,), 4.0) if coded else None
    token_index = index(4, 16, 12, 20, pre_rotated=pre_rotated, halves=halves)
    features_and_q = (3 * torch.randn(45, 50)).bfloat16()
    features_and_q[3, 35] = torch.nan
    planes = []
    for implementation in ("native", "reference"):
        keys = empty_keys(slots, 16, torch.device("cpu"))
        token_index.write(keys, features_and_q[:, 30:], turns(torch.arange(45)), view.slots_N, implementation)
        planes.append(keys_at(keys, view.slots_N).int())
    assert (planes[0] - planes[1]).abs().max() <= 1 and (planes[0] == planes[1]).float().mean() > 0.99
    assert planes[0].abs().float().mean() > 5


def test_the_reference_matches_the_model():
    """One contiguous sequence, by the module in checkpoints."""
    torch.manual_seed(0)
    H, W, E, F, L, k = 4, 16, 12, 24, 90, 30
    module = PairsIndex(G, W, F, E)
    for parameter, scale in ((module.key.weight, 8.0), (module.query, 0.02)):
        torch.nn.init.normal_(parameter, std=scale)
    module.frequency.copy_(torch.randint(-1, P, (W // 2,)))
    config = type("Config", (), {"index_sink": 3, "index_window": 8, "index_stride": 0})
    sparsity = token_index_mla.Sparsity(config)
    features, q = torch.randn(1, L, F), torch.randn(1, H, 1, E)
    turn = turns(torch.arange(L))
    cos, sin = turn.real[None, :, 0], turn.imag[None, :, 0]
    keys = module.keys(features, cos, sin)
    index_queries = module.queries(q, cos[:, -1:], sin[:, -1:])
    expected = sparsity.choose(index_queries, keys, torch.ones(1, 1, 1, L, dtype=torch.bool), k, None)[0, 0]
    token_index = TokenIndex(
        module.key.weight.detach(), module.key.bias.detach(), module.query.detach(), module.frequency, H, sink=3,
        window=8, topk=k,
    )  # fmt: skip
    view, slots = make_view([L], [1])
    whole, _ = make_view([L], [L])
    plane = empty_keys(slots, W, torch.device("cpu"))
    token_index.write(plane, features[0], turn, whole.slots_N)
    assert torch.equal(keys_at(plane, whole.slots_N).float(), keys[0].detach())
    _, positions = token_index.choose(plane, q.flatten(1)[:1], turn[-1:], view, (k,))
    assert positions[0].tolist() == expected.tolist()


def test_a_view_of_selected_tokens():
    view, _ = make_view([50, 20, 90], [1, 1, 2])
    assert Selections().counts(view, 100) is None and Selections().counts(view, 30) == (30, 20, 30)
    slots = torch.arange(96, dtype=torch.int32).view(3, 32)
    some = select_view(view, slots, slots, (30, 20, 30), True)
    assert some.first_S.tolist() == [0, 32, 64] and some.seq_lens_S.tolist() == [30, 52, 94]
    assert select_view(view, slots, slots, (30, 20, 30), False).seq_lens_S.tolist() == [30, 20, 30]
    assert some.block_size == 1 and some.runs == () and torch.equal(some.slots_N, view.slots_N)


def test_a_view_of_query_tokens():
    """Generated tokens become sequences that end with them; prompts stay whole."""
    view, _ = make_view([50, 20, 90], [1, 7, 3])
    view = dataclasses.replace(view, generating=(True,) * 3, selecting=(True, False, True))
    tokens = query_token_view(view)
    assert (
        tokens.lengths == (50, 20, 88, 89, 90) == tuple(tokens.seq_lens_S.tolist()) == host_view(tokens).visible_lengths
    )
    assert tokens.queries == (1, 7, 1, 1, 1) and tokens.query_start_S1.tolist() == [0, 1, 8, 9, 10, 11]
    assert tokens.selecting == (True, False, True, True, True) and tokens.max_query == 7
    assert torch.equal(tokens.block_table_SB, view.block_table_SB[[0, 1, 2, 2, 2]])
    assert torch.equal(tokens.slots_N, view.slots_N)
    for selecting in ((False,) * 3, (True, False, False), ()):
        unchanged = dataclasses.replace(view, selecting=selecting)
        assert query_token_view(unchanged) is unchanged


# Distances of the nodes of a tree: 0 has children 1 and 2, 1 has child 3, and 3 has child 4.
TREE = [[0, -1, -1, -1, -1], [1, 0, -1, -1, -1], [1, -1, 0, -1, -1], [2, 1, -1, 0, -1], [3, 2, -1, 1, 0]]


@settings(max_examples=20)
@given(length=st.integers(6, 200), topk=st.integers(8, 60), stride=st.sampled_from([0, 7]), seed=st.integers(0, 99))
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_nodes_of_a_tree_select_from_their_paths(compiled, implementation, length, topk, stride, seed):
    """As from a text that consists of the path alone, to the bit."""
    view, slots = make_view([length], [5], seed=seed)
    view = dataclasses.replace(view, tree_Tn=torch.tensor(TREE, dtype=torch.int32))
    token_index = index(4, 16, 12, 20, seed, sink=2, window=4, stride=stride, topk=topk)
    generator = torch.Generator().manual_seed(seed)
    keys = empty_keys(slots, 16, torch.device("cpu"))
    keys.copy_(torch.randint(-127, 128, keys.shape, generator=generator))
    q = torch.randn(5, 48, generator=generator).bfloat16()
    turn = turns(torch.arange(5))
    nodes = query_token_view(view)
    assert host_view(nodes).visible_lengths == tuple(length - 4 + depth for depth in (0, 1, 1, 2, 3))
    counts = tuple(min(topk, visible) for visible in host_view(nodes).visible_lengths)
    selected_slots, positions = token_index.choose(keys, q, turn, nodes, counts, implementation=implementation)
    for node, (count, visible) in enumerate(zip(counts, host_view(nodes).visible_lengths, strict=True)):
        path = [j for j in range(5) if TREE[node][j] >= 0]
        (alone, slots_of_alone), places = make_view([visible], [1], seed=seed + 1), visible_slots(nodes, node)
        assert places[length - 5 :].tolist() == view.slots_N[path].tolist()
        copied = empty_keys(slots_of_alone, 16, torch.device("cpu"))
        to = visible_slots(alone, 0)
        copied[to // 16, :, to % 16] = keys_at(keys, places)
        one = (copied, q[node : node + 1], turn[node : node + 1], alone, (count,))
        expected = token_index.choose(*one, implementation=implementation)[1]
        assert positions[node, :count].tolist() == expected[0].tolist()
        assert selected_slots[node, :count].tolist() == places[positions[node, :count].long()].tolist()


@pytest.mark.gpu
@needs_triton
def test_an_entry_changes_the_launch_and_not_the_selection(with_entry, monkeypatch):

    from mlaforge.ops import token_selection_triton as selection

    view, slots = make_view([3000, 40], [1, 1])
    token_index, view = on_device(index(4, 8, 12, 20, topk=24), view)
    draw = torch.Generator().manual_seed(0)
    keys = empty_keys(slots, 8, torch.device("cpu"))
    keys = keys.copy_(torch.randint(-127, 128, keys.shape, generator=draw)).to(DEVICE)
    q, turn = torch.randn(2, 4 * 12 + 5, generator=draw).to(DEVICE), turns(torch.arange(2)).to(DEVICE)
    usual = selection.stretch_of(2, 3000, gpu_properties(keys.device))
    stretch = next(stretch for stretch in selection.STRETCHES if stretch != usual)
    grids = []
    original = selection.launches

    def recorded(*arguments, **options):
        grid, sizes = original(*arguments, **options)
        grids.append((grid, sizes["STRETCH"]))
        return grid, sizes

    monkeypatch.setattr(selection, "launches", recorded)
    default, changed, _ = with_entry(
        "selection", {"stretch": stretch}, lambda: token_index.choose(keys, q, turn, view, (24, 24), 16, "triton")
    )
    # Rounding may swap two tokens with adjacent scores.
    assert len(set(default[1][0].tolist()) & set(changed[1][0].tolist())) >= 23
    assert [size for _, size in grids] == [usual, stretch] and grids[0][0] != grids[1][0]
