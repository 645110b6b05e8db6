"""The sweep of kernels: every candidate is measured and checked, attention has tiles; and cases of attention."""

import json

import pytest
import torch

from mlaforge.bench import draft_products, kernels
from mlaforge.bench.config import BenchConfig
from mlaforge.config import resolve
from mlaforge.ops import native, tuned
from mlaforge.tuning import sweep
from mlaforge.tuning.attention_case import AttentionCase
from mlaforge.tuning.cases import WrongResult
from support.paged_steps import need_interpreter

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("known_roof")


@pytest.mark.skipif(native.why_not() is not None, reason="needs compiled kernels")
def test_every_candidate_has_a_row_and_attention_its_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LAYOUTS", {"tiny": kernels.Layout(4, 2, 16)})
    body = sweep.run(resolve(BenchConfig, None, device="cpu"), tmp_path, small=True)
    assert json.loads((tmp_path / sweep.FILE).read_text())["rows"] == body["rows"]
    rows = {}
    for row in body["rows"]:
        rows.setdefault((row["op"], row["key"]), []).append(row)
        assert row["us"] > 0 and row["of_the_roof"] > 0
    assert {op for op, _ in rows} == {"attention", "product", "experts"}
    for (op, _), candidates in rows.items():
        assert candidates[0]["configuration"] == {}
        tiles = candidates[0]["tiles"]
        assert (tiles is None) == (op != "attention")
        if tiles:
            assert 0 < tiles["executed"] == tiles["total"] - tiles["empty_by_span"] and not tiles["empty_by_mask"]
    short = sweep.short(body)["rows"]
    assert len(short) == len(rows) and all(row["best_least_us"] <= row["least_us"] for row in short)
    table = sweep.table(body)
    assert all(f"| {op} {key} |" in table for op, key in rows)


def test_a_sweep_is_of_kernels(cli):
    done = cli("bench", "single", "--sweep", "--device", "cpu")
    assert done.exit_code == 2 and "--sweep measures kernels, not single" in done.stderr


def test_products_of_a_draft_head_are_checked_and_have_a_roof(tmp_path):
    config = resolve(BenchConfig, None, op="draft", device="cpu")
    body = kernels.run(config, tmp_path, "small")
    names = [row["layout"] for row in body["rows"]]
    assert len(names) == 2 * len(draft_products.PRODUCTS) and "draft_ffn 5 x 96 x 64 int8" in names
    assert all(row["of_the_roof"] > 0 and row["limit"] == "memory" for row in body["rows"])
    sizes = {(rows, *sizes) for (_, rows), sizes in draft_products.PRODUCTS.items()}
    assert {(3, 34560, 2880), (5, 34560, 2880), (1, 2880, 8640), (3, 32000, 2880)} == sizes


@pytest.mark.parametrize(
    ("layout", "sparse"), [(kernels.Layout(4, 2, 16), False), (kernels.Layout(4, 1, 16, 16), True)]
)
def test_cases_of_attention(monkeypatch, layout, sparse):
    need_interpreter()
    monkeypatch.setattr(tuned, "_state", tuned._State())
    case = AttentionCase(layout, 2, 70, 1, CPU, torch.float32, sparse, cold=0)
    default, *rest = case.candidates()
    assert default == {} and len(rest) > 3
    assert max(case.error(configuration) for configuration in (default, rest[0], rest[-1])) < 1e-4
    # The launch looks for the case's key.
    assert {key for op, key in tuned.seen() if op == "attention"} == {case.key}
    same = AttentionCase.of_key(case.key, CPU)
    assert same.key[:-2] == case.key[:-2] and same.layout.row == layout.row
    tiles = [case.tiles({}), case.tiles({"BLOCK_N": 64})]
    assert tiles[0].executed > tiles[1].executed > 0 and tiles[0].empty_by_mask == 0
    assert case.seconds(rest[0]) > 0
    monkeypatch.setattr(case, "expected", lambda: torch.ones(2, 4, 16))
    with pytest.raises(WrongResult, match=r"attention .* has an error"):
        case.error({})
    tuned.use([], CPU)


def test_a_key_of_packed_rows_has_no_case():
    key = tuned.attention_key("gqa", 16, 16, 4, 2, "int8", 1, 1, 64, False)
    assert AttentionCase.of_key(key, CPU) is None
