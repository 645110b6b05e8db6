"""Padding of steps to buckets, capture and replay of graphs, and on a GPU the graphs themselves.

Without a GPU a graph is a closure over its static batch: the copies, and the rows that padding may write to, are the
same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.bench.host_waits import count_host_waits
from mlaforge.engine import builder
from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
from mlaforge.engine.cache.kv_cache import Cache
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.engine.execution.bucket import QUERIES, Bucket, bucket_of, fill, padded
from mlaforge.engine.execution.draft_graphs import DraftGraphs
from mlaforge.engine.execution.graphs import Graphs
from mlaforge.engine.sampling.params import SamplingParams
from support.drafters import Branching, Knowing
from support.eagle3_heads import HEADS, saved
from support.padded_steps import eager_and_padded
from support.paged_steps import need_interpreter
from support.simulated_cuda import FakeCapture
from support.speculating import speculate
from support.tiny_models import save_packed

CPU = torch.device("cpu")
MODELS = ("llama", "gpt_oss", "latent_rope", "packed")
# Models of which every op runs in Triton where one does.
WHOLE = ("coded", "sparse", "sparse coded")
# Blocks of the pools that `batch_of` allocates from.
BLOCKS = 600


@pytest.fixture(scope="module")
def models(tiny_models, converted, sparse, tmp_path_factory, cli, short) -> dict[str, Path]:
    """GQA; windows, sinks and experts, unpacked and packed; converted models that cache latents with and without rotary
    parts."""
    found = dict(tiny_models)
    found["packed"] = save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("graphs") / "packed")
    for layout, more in {"latent": (), "latent_rope": ("--qk-rope-head-dim", "8")}.items():
        found[layout] = tmp_path_factory.mktemp("graphs") / layout
        done = cli("convert", tiny_models["llama"], found[layout], *short, "--layout", layout, *more)
        assert done.exit_code == 0, done.stderr
    found["coded"] = converted("llama", "latent", bits=6)
    found["sparse"], found["sparse coded"] = (sparse("llama", layout, topk=24) for layout in ("gqa", "coded"))
    return found


def make_engine(model: Path, **options: Any) -> Engine:
    # A sparse model's index needs larger blocks.
    block_size = 16 if "sparse" in str(model) else 4
    defaults = {
        "device": "cpu", "dtype": "float32", "cache_bytes": 2**20, "block_size": block_size, "max_num_seqs": 12
    }  # fmt: skip
    return Engine(model, EngineConfig(**{**defaults, "max_model_len": 96, "max_num_batched_tokens": 64, **options}))


@pytest.fixture
def roomy(monkeypatch) -> None:
    """Give engines on the CPU a scratch block, as on CUDA."""

    def cache(*arguments: Any) -> Cache:
        return Cache(*arguments[:-1], num_scratch=1)

    monkeypatch.setattr(builder, "Cache", cache)


def tokens(engine: Engine, prompts: list[list[int]], count: int) -> dict[str, list[int]]:
    """Greedy continuations; later prompts end later, so that the batch shrinks."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=count + index, ignore_eos=True)
        engine.add(str(index), prompt, params)
    tokens_by_id: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens_by_id.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    engine.check_integrity()
    return tokens_by_id


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def test_the_first_buckets():
    assert sorted({bucket_of(n, 44) for n in range(1, 45)}) == [1, 2, 4, 8, 16, 24, 32, 40, 44]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_buckets_grow_with_their_sequences(a, b, limit):
    a, b = sorted((min(a, limit), min(b, limit)))
    assert a <= bucket_of(a, limit) <= bucket_of(b, limit) <= limit
    assert bucket_of(bucket_of(a, limit), limit) == bucket_of(a, limit)


def batch_of(*parts: tuple[int, int], windows: tuple[int | None, ...] = (None, 6), block_size: int = 4) -> Batch:
    """A batch of sequences with `stop` known tokens, the last `count` of them computed in this step: (stop, count)."""
    groups = [CacheGroup(str(window), BLOCKS, window) for window in windows]
    tables = BlockTables(groups, block_size, caching=False)
    chunks = []
    for seq, (stop, count) in enumerate(parts):
        ids = [100 * seq + position for position in range(stop)]
        tables.start(seq, ids)
        for upto in (stop - count, stop):
            assert tables.reserve(seq, upto) is not None
            if upto < stop:
                tables.commit(seq, ids, upto)
        chunks.append(Chunk(seq, ids, stop - count, stop, generating=True))
    return make_batch(chunks, tables, CPU)


@pytest.mark.parametrize("parts", [[(20, QUERIES[-1] + 1)], [(20, 1), (20, QUERIES[-1] + 1)], [(5, 1)] * 5])
def test_batches_without_a_bucket(parts):
    assert Bucket.of(batch_of(*parts), max_sequences=4) is None


def test_a_bucket_holds_every_length_up_to_the_next_power_of_two():
    def bucket(length: int) -> Bucket | None:
        return Bucket.of(batch_of((length, 1), (3, 1), (7, 1)), max_sequences=64)

    short, long = bucket(8), bucket(300)
    assert short == Bucket(4, 1, 256, (64, 4), selecting=True)
    assert long == Bucket(4, 1, 512, (128, 4), selecting=True)
    assert {bucket(length) for length in (9, 60, 61, 62, 63, 64, 256)} == {short}
    assert {bucket(length) for length in (257, 511, 512)} == {long}


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=9), st.sampled_from([1, 4, 16])
)  # fmt: skip
def test_padding_rows_read_cached_rows_at_most_and_write_to_scratch(parts, block_size):
    batch = batch_of(*((length + count - 1, count) for length, count in parts), block_size=block_size)
    bucket, scratch = Bucket.of(batch, 64), (BLOCKS, BLOCKS)
    assert bucket is not None
    T, counts = bucket.queries, [count for _, count in parts]
    assert min(most for most in QUERIES if most >= max(counts)) == T
    static, rows = padded(batch, bucket, scratch), bucket.rows(batch)
    # The former content of the buffers does not matter.
    for tensor in (static.token_ids_N, static.positions_N, static.views[0].seq_lens_S):
        tensor.fill_(7)
    for view in static.views:
        for tensor in (view.block_table_SB, view.first_S, view.slots_N):
            tensor.fill_(7)
    fill(static, batch, rows, scratch)
    S = len(parts)
    assert torch.equal(static.token_ids_N[rows], batch.token_ids_N)
    assert torch.equal(static.positions_N[rows], batch.positions_N)
    assert len(static.token_ids_N) == len(static.positions_N) == bucket.sequences * T
    # A sequence's tokens are its last rows, so that they are at the same positions of the same length.
    last = torch.arange(bucket.sequences * T).view(-1, T)
    expected = torch.cat([last[s, T - count :] for s, count in enumerate(counts)])
    assert torch.equal(torch.arange(bucket.sequences * T)[rows], expected)
    padding = torch.ones(bucket.sequences * T, dtype=torch.bool).index_fill(0, expected, False)
    for view, before in zip(static.views, batch.views, strict=True):
        assert (view.block_size, view.window, view.max_query) == (before.block_size, before.window, T)
        assert view.max_seq_len == bucket.longest >= before.max_seq_len
        width = before.block_table_SB.shape[1]
        assert torch.equal(view.block_table_SB[:S, :width], before.block_table_SB)
        assert torch.equal(view.seq_lens_S[:S], before.seq_lens_S) and not view.seq_lens_S[S:].any()
        assert torch.equal(view.first_S[:S], before.first_S)
        assert torch.equal(view.slots_N[rows], before.slots_N)
        assert view.query_start_S1.tolist() == [T * s for s in range(bucket.sequences + 1)]
        # The scratch block: pools of BLOCKS blocks do not have it.
        assert (view.slots_N[padding] == BLOCKS * block_size).all()
        assert before.slots_N.max() < BLOCKS * block_size


# Triton's interpreter is slow (packed experts take a minute); these run the kernels of others once more.
SLOW = () if torch.cuda.is_available() else pytest.mark.slow


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("name", "op"),
    [*((name, "reference") for name in MODELS), ("latent_rope", "triton"),
     *(pytest.param(name, "triton", marks=SLOW)
       for name in ("llama", "coded", "sparse", "sparse in int8", "sparse coded", "packed"))],
)  # fmt: skip
def test_padded_step_equals_the_step(models, name, op, monkeypatch):
    """For every step of a run that has a bucket."""
    if op == "triton":
        need_interpreter()
    ops = ("paged_attention", "mxfp4_experts", "mxfp4_mixture")
    name, _, stored = name.partition(" in ")
    monkeypatch.setenv("MLAFORGE_OPS", "triton" if name in WHOLE else ",".join(f"{one}={op}" for one in ops))
    engine = make_engine(models[name], kv_cache_dtype=stored or "auto")
    met, ragged = set(), []

    def compared(batch: Batch, bucket: Bucket) -> bool:
        # Latent layers compute prompts one by one, from host numbers, so that these steps are not captured.
        if bucket.prompts and name not in ("llama", "gpt_oss", "packed", "sparse"):
            return False
        met.add((bucket.queries, bucket.sequences > len(batch.last_S)))
        ragged.append(len(set(batch.views[0].queries)) > 1)
        return True

    monkeypatch.setattr(engine, "runner", eager_and_padded(engine, compared, coded="coded" in name))
    if op == "triton":
        # An interpreter is slow. Selections leave tokens out of the longer text.
        tokens(engine, prompts_of(5, 5, 30 if "sparse" in name else 5), 2)
    else:
        tokens(engine, prompts_of(*[5] * 6), 9)
        tokens(engine, prompts_of(*range(20, 38, 3)), 9)
        # Drafts of different lengths, also of texts shorter than the bucket.
        prompts = prompts_of(2, 3, 5)
        answers = tokens(engine, prompts, 14)
        speculate(engine, Knowing([p + answers[str(i)] for i, p in enumerate(prompts)], 0.7), count=8)
        assert tokens(engine, prompts, 14) == answers
        assert name == "latent_rope" or any(ragged)
    # One query token per sequence and several, with padding rows.
    assert met >= {(1, True)} | ({(5, True)} if name in ("llama", "gpt_oss", "packed") else set())


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=SLOW) for name in ("latent_rope", *WHOLE))])
def test_padded_tree_equals_the_tree(models, name, monkeypatch):
    """Verification of trees in steps that are padded with the text before them."""
    need_interpreter()
    monkeypatch.setenv("MLAFORGE_OPS", "triton")
    prompts, padding = prompts_of(30), []
    answers, engine = tokens(make_engine(models[name]), prompts, 6), make_engine(models[name])

    def compared(batch: Batch, bucket: Bucket) -> bool:
        if batch.views[0].tree_Tn is not None:
            padding.append(bucket.queries - len(batch.token_ids_N))
        return bucket.tree

    monkeypatch.setattr(engine, "runner", eager_and_padded(engine, compared, coded="coded" in name))
    speculate(engine, Branching([prompt + answers[str(i)] for i, prompt in enumerate(prompts)], 0.7), tree=6)
    assert tokens(engine, prompts, 6) == answers
    assert padding and all(padding)


@pytest.mark.parametrize("name", ["llama", "packed", "latent_rope", "latent", *WHOLE])
def test_capturable_steps(models, name, monkeypatch):
    need_interpreter()
    monkeypatch.setenv("MLAFORGE_OPS", "triton")
    engine = make_engine(models[name])
    batch = batch_of((9, 1), windows=tuple(group.window for group in engine.tables.groups))
    for choice, holds in {
        "triton": True,
        "reference": False,
        "check,triton": False,
        "triton,mxfp4_mixture=reference": name != "packed",
    }.items():
        monkeypatch.setenv("MLAFORGE_OPS", choice)
        assert engine.runner.capturable(batch) is holds


def test_a_cpu_has_no_graphs_and_no_scratch(tiny_models):
    engine = make_engine(tiny_models["llama"])
    assert engine.runner.graphs is None
    assert {len(rows) for rows in engine.cache.tensors} == {engine.tables.num_blocks * engine.cache.block_size}


def test_captures_once_per_bucket_and_copies_inputs():
    capture, ran, checked = FakeCapture(), [], []

    def run(batch: Batch) -> torch.Tensor:
        ran.append(batch)
        return torch.stack((batch.token_ids_N, batch.positions_N, batch.views[1].slots_N), dim=1).clone()

    def capturable(batch: Batch) -> bool:
        checked.append(batch)
        return batch.views[0].max_query < 3

    graphs = Graphs(run, capturable, (BLOCKS, BLOCKS), 12, capture)
    four = Bucket(4, 1, 256, (64, 4), selecting=True)
    for count, parts in enumerate([[(9, 1), (5, 1), (30, 1)], [(7, 1)] * 4, [(8, 1), (200, 1), (6, 1)]], start=1):
        batch = batch_of(*parts)
        out = graphs(batch)
        assert torch.equal(out, torch.stack((batch.token_ids_N, batch.positions_N, batch.views[1].slots_N), dim=1))
        assert (graphs.captured, capture.captures, capture.replays, len(checked)) == ([four], 1, count, 1)
    # Always on the same tensors.
    assert {id(batch) for batch in ran} == {id(ran[0])}

    batch = batch_of((9, 2), (5, 2))
    assert torch.equal(graphs(batch)[:, 0], batch.token_ids_N)
    assert graphs.captured == [four, Bucket(2, 2, 256, (64, 4), selecting=True)]
    captures = capture.captures
    for _ in range(2):
        # A batch that cannot be captured is checked once, one without a bucket never.
        assert graphs(batch_of((9, 3))) is None
        assert graphs(batch_of((9, 1), (9, 3))) is None
        assert graphs(batch_of(*[(9, 1)] * 13)) is None
    assert (len(checked), capture.captures) == (4, captures)
    # The rows of a batch with different numbers of query tokens come out in its order.
    uneven = batch_of((9, 2), (5, 1))
    assert torch.equal(graphs(uneven)[:, 0], uneven.token_ids_N)
    assert (len(checked), capture.captures) == (4, captures)
    # A graph belongs to one state; a former state finds its graph again.
    for state in ("other", None, "other"):
        assert torch.equal(graphs(batch, state)[:, 0], batch.token_ids_N)
    assert (len(checked), capture.captures, graphs.captured.count(Bucket(2, 2, 256, (64, 4), selecting=True))) == (
        5,
        captures + 1,
        2,
    )


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("name", MODELS)
def test_replayed_tokens_equal_eager_tokens(models, name, monkeypatch):
    monkeypatch.setenv("MLAFORGE_OPS", "reference")
    prompts = prompts_of(5, 17, 40, 9, 9)
    want = tokens(make_engine(models[name]), prompts, 12)
    engine, capture = make_engine(models[name]), FakeCapture()
    runner = engine.runner
    runner.graphs = Graphs(runner.eager, lambda batch: True, engine.cache.scratch, engine.config.max_num_seqs, capture)
    assert tokens(engine, prompts, 12) == want
    assert capture.replays > 12 > capture.captures


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("head", [name for name in HEADS if "mask_token_id" not in HEADS[name]])
def test_replayed_drafts_equal_eager_drafts(models, head, tmp_path, monkeypatch):
    """Chains of several sequences, which end one after another, in one graph per bucket and length."""
    monkeypatch.setenv("MLAFORGE_OPS", "reference")
    folder, prompts = saved(tmp_path / "head", **HEADS[head]), prompts_of(5, 17, 40, 9, 9)
    options = {"speculative": str(folder), "num_speculative_tokens": 3, "adaptive_speculation": False}
    eager, engine = make_engine(models["llama"], **options), make_engine(models["llama"], **options)
    capture, drafts = FakeCapture(), {}
    for one in (eager, engine):
        drafter, drafts[one] = one.speculation.drafter, []
        drafter.stops_early = False

        def propose(*arguments, call=drafter.propose, drafted=drafts[one]):
            drafted.append(call(*arguments))
            return drafted[-1]

        monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(drafter.head.attention, "capturable", lambda view: True)
    drafter.graphs = DraftGraphs(drafter._drafted, capture, engine.cache.scratch[-1], engine.config.max_num_seqs)
    assert tokens(engine, prompts, 12) == tokens(eager, prompts, 12)
    chains = [[[draft.token_ids for draft in step] for step in drafts[one]] for one in (engine, eager)]
    assert chains[0] == chains[1] and any(len(chain) == 3 for chain in chains[0][0])
    assert capture.replays > 2 * capture.captures > 0


# A GPU decodes so many tokens in a moment; the simulated device takes half a second for one.
COUNT, LENGTHS = (64, (5, 17, 40, 9, 9)) if torch.cuda.is_available() else (3, (3, 1))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "name",
    ["sparse coded",
     *(pytest.param(name, marks=SLOW)
       for name in ("int8", "llama", "latent", "latent_rope", "coded", "sparse", "packed"))],
)  # fmt: skip
def test_graph_tokens_equal_eager_tokens(models, name):
    prompts = prompts_of(*LENGTHS)
    options = {"device": "cuda", "max_model_len": 256, "cache_bytes": 2**22}
    if name == "int8":
        name, options["kv_cache_dtype"] = "llama", "int8"
    engine, plain = make_engine(models[name], **options), make_engine(models[name], **options)
    plain.runner.graphs = None
    assert tokens(engine, prompts, COUNT) == tokens(plain, prompts, COUNT)
    assert engine.runner.graphs.captured


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_warm_up_reaches_every_class_of_tiles_and_leaves_nothing(models, monkeypatch):
    from mlaforge.ops import paged_attention_triton

    options = {"device": "cuda", "max_model_len": 256, "cache_bytes": 2**22}
    engine, cold = make_engine(models["llama"], **options), make_engine(models["llama"], **options)
    make_launch, tiles = paged_attention_triton.make_launch, set()

    def recorded(*arguments: Any, **named: Any) -> Any:
        launch = make_launch(*arguments, **named)
        tiles.add(launch.arguments["BLOCK_M"])
        return launch

    monkeypatch.setattr(paged_attention_triton, "make_launch", recorded)
    engine.warm_up()
    warmed = set(tiles)
    assert engine.stats() == cold.stats()
    assert tokens(engine, prompts_of(*LENGTHS), 2) == tokens(cold, prompts_of(*LENGTHS), 2)
    assert tiles == warmed and engine.stats().cached_prompt_tokens == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
# Without windows and experts: test_host_waits.py. Waits of layers: test_kernel_count.py.
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in ("gpt_oss", "packed")])
def test_decoding_waits_only_for_its_tokens(models, name):
    engine = make_engine(models[name], device="cuda", max_model_len=256, cache_bytes=2**22)
    for index, prompt in enumerate(prompts_of(*LENGTHS[:3])):
        engine.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    # The prompts, and the capture of the bucket that all later steps have.
    while all(bucket.prompts for bucket in engine.runner.graphs.captured):
        engine.step()
    captured = list(engine.runner.graphs.captured)
    with count_host_waits(engine.device) as waits:
        for _ in range(COUNT):
            engine.step()
    assert waits.count == COUNT and {line.partition(":")[0] for line in waits.lines} == {
        "engine/speculation/verification.py"
    }, waits.lines
    assert engine.runner.graphs.captured == captured


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_an_engine_with_graphs_gets_a_draft_head(models, tmp_path):
    """As in bench's peers: with a head the model returns more columns, which no earlier graph computes."""
    options = {"device": "cuda", "cache_bytes": 2**22, "num_speculative_tokens": 1, "adaptive_speculation": False}
    engine = make_engine(models["llama"], speculative=str(saved(tmp_path / "head")), **options)
    drafter, prompts = engine.speculation.drafter, prompts_of(3, 1)
    expected = tokens(engine, prompts, 3)
    for _ in range(2):
        engine.set_drafter(None)
        assert tokens(engine, prompts, 3) == expected
        engine.set_drafter(drafter)
        assert tokens(engine, prompts, 3) == expected
    # One query token is a bucket in both states.
    buckets = [bucket for bucket in engine.runner.graphs.captured if bucket.queries == 1]
    assert len(buckets) > len(set(buckets))
