"""Block tables on the device: uploads per step, and engines that read them. Random lifetimes: test_table_machine.py."""

import pytest
import torch

from mlaforge.engine import builder
from mlaforge.engine.cache import device_tables
from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.device_tables import COLUMNS, ROWS, DeviceTables
from mlaforge.engine.cache.view import make_views
from support import engine_driver
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, renew, watched

CPU = torch.device("cpu")
SEQUENCES = 3


@pytest.fixture
def uploads(monkeypatch):
    """How many numbers each upload has."""
    counts, on_device = [], device_tables.on_device
    monkeypatch.setattr(
        device_tables, "on_device", lambda values, *rest: counts.append(len(values)) or on_device(values, *rest)
    )
    return counts


def decode(context, groups, steps, uploads):
    """Uploaded numbers of steps in which sequences of so many tokens decode one token each."""
    tables, ids = DeviceTables(groups, 4, caching=False), list(range(context + steps))
    for seq in range(SEQUENCES):
        tables.start(seq, ids[:context])
        assert tables.reserve(seq, context) == []
        tables.commit(seq, ids, context)
    counts = []
    for length in range(context, context + steps):
        assert all(tables.reserve(seq, length + 1) == [] for seq in range(SEQUENCES))
        uploads.clear()
        spans = [(seq, length, length + 1) for seq in range(SEQUENCES)]
        for group, view in enumerate(make_views(spans, tables, CPU)):
            for seq, row in enumerate(view.block_table_SB.tolist()):
                blocks = tables.table(seq, group)[1]
                assert row[: len(blocks)] == blocks
        counts.append(sum(uploads))
        for seq in range(SEQUENCES):
            tables.commit(seq, ids, length + 1)
    return counts


def test_decode_step_uploads_few_numbers_at_any_context(uploads):
    """Of each group the sequences' rows, and of each new block its place and number."""
    full = [CacheGroup("full", 10_000)]
    first, *later = decode(4000, full, 9, uploads)
    assert first == SEQUENCES + 2 * SEQUENCES * 1001
    assert later == [SEQUENCES * (3 if length % 4 == 0 else 1) for length in range(4001, 4009)]
    assert later == decode(400, full, 9, uploads)[1:]
    # A window's short row is uploaded whole where its first block moves.
    groups = [*full, CacheGroup("window", 10_000, 8)]
    assert max(decode(4000, groups, 9, uploads)[1:]) <= SEQUENCES * (2 + 2 + 2 * 4)


def test_device_copy_grows_and_reuses_rows(uploads):
    tables, ids = DeviceTables([CacheGroup("full", 20 * ROWS * COLUMNS)], 1, caching=False), list(range(3 * COLUMNS))
    many = range(3 * ROWS)
    for seq in many:
        tables.start(seq, ids)
        assert tables.reserve(seq, 1 + seq) == []
        assert tables.table_SB([seq], 0).tolist() == [tables.table(seq, 0)[1]]
    assert tables.reserve(7, len(ids)) == []
    uploads.clear()
    for seq, row in zip(many, tables.table_SB(many, 0).tolist(), strict=True):
        blocks = tables.table(seq, 0)[1]
        assert row[: len(blocks)] == blocks
    # What was there before it grew is not uploaded again.
    assert uploads == [len(many) + 2 * (len(ids) - 8)]
    shape = tables._copy_GRC.shape
    for _ in range(3):
        for seq in many:
            tables.free(seq)
            tables.start(seq, ids)
            assert tables.reserve(seq, 2) == []
            assert tables.table_SB([seq], 0).tolist() == [tables.table(seq, 0)[1]]
    assert tables._copy_GRC.shape == shape


def test_engine_tokens_equal_with_device_tables(tiny_models, tmp_path, monkeypatch):
    """Windows, prefixes, continuations, preemption, and a head's own batches for each drafted token."""
    options = {"speculative": str(saved(tmp_path / "head", sliding_window=9)), "adaptive_speculation": False}
    prompts = random_prompts(40, 40, 9, 21)

    def tokens():
        llm = watched(tiny_models["gpt_oss"], **options)
        renew(llm.engine, 12, 40 + 24, block_size=4)
        outputs = [*llm.generate(prompts, greedy(24)), *llm.generate(prompts[:1], greedy(9, n=2))]
        outputs += llm.generate([prompts[0] + [5, 6]], greedy(9))
        assert llm.engine.stats().preemptions and outputs[-1].num_cached_tokens
        idle(llm.engine)
        return [completion.token_ids for output in outputs for completion in output.outputs], llm.engine.tables

    plain, _ = tokens()
    for module in (builder, engine_driver):
        monkeypatch.setattr(module, "BlockTables", DeviceTables)
    ours, tables = tokens()
    assert ours == plain and isinstance(tables, DeviceTables) and tables._copy_GRC.any()
