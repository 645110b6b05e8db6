"""Selection of implementations, its log lines and errors, and `MLAFORGE_OPS=check`."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge import runtime
from mlaforge.ops import dispatch
from mlaforge.ops import paged_attention as paged
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import check, differences, load, save
from mlaforge.ops.dispatch import Op, replay
from mlaforge.ops.host_view import Runs


@pytest.fixture
def op(monkeypatch):
    """An op: `fast` supports rows of even length, `other` everything, `far` another kind of device."""
    monkeypatch.delenv("MLAFORGE_OPS", raising=False)
    # Restores the real op of this name in the registry.
    monkeypatch.setattr(dispatch, "OPS", {})
    op = Op("paged_attention", lambda x: (x * 2,))
    op.register("fast", lambda x: (x + x,), lambda x: True if len(x) % 2 == 0 else "an odd number", device_type="cpu")
    op.register("wrong", lambda x: (x * 2 + (x == 3),), lambda x: True if len(x) < 8 else "too long", device_type="cpu")
    op.register("far", lambda x: (x * 0,), lambda x: "it is far away", device_type="cuda")
    return op


EVEN, ODD, LONG = torch.arange(4.0), torch.arange(5.0), torch.arange(9.0)


def test_first_supporting_implementation_runs_and_skips_are_logged_once(op, capsys):
    assert op.choose(EVEN)[0] == "fast"
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert op.choose(ODD)[0] == "wrong"
        assert op.choose(LONG)[0] == "reference"
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["paged_attention: fast is not used: an odd number", "paged_attention: wrong is not used: too long"]


def test_argument_before_environment_before_support(op, monkeypatch):
    monkeypatch.setenv("MLAFORGE_OPS", "wrong")
    assert op(EVEN)[0][3] == 7
    assert op(EVEN, implementation="reference")[0][3] == 6
    monkeypatch.setenv("MLAFORGE_OPS", "reference, paged_attention=wrong")
    assert op(EVEN)[0][3] == 7
    # A word for another op.
    monkeypatch.setenv("MLAFORGE_OPS", "mxfp4_experts=wrong")
    assert op(EVEN)[0][3] == 6


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("far", "paged_attention: far cannot run here: it is far away"),
        ("fsat", "'fsat'"),
        ("attention=fast", "MLAFORGE_OPS names 'attention', which is not an op; ops are absorb_and_store, "),
    ],
)
def test_rejects_unknown_and_unsupported_implementations(op, monkeypatch, choice, words):
    if "=" not in choice:
        with pytest.raises(runtime.UserError, match=re.escape(words)):
            op(EVEN, implementation=choice)
    monkeypatch.setenv("MLAFORGE_OPS", choice)
    with pytest.raises(runtime.UserError, match=re.escape(words)):
        op(EVEN)


def test_check_compares_and_saves_the_inputs(op, monkeypatch, tmp_path):
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("MLAFORGE_OPS", "check")
    assert op(EVEN)[0].tolist() == [0, 2, 4, 6]
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        AssertionError, match=r"wrong, output 0: 1 of 5 elements differ, worst \(3,\): 7 instead"
    ) as error:
        op(ODD)
    path = Path(str(error.value).split("saved as ")[1])
    assert load(path)[0].equal(ODD)


NUMBERS = st.floats(width=32)


@given(st.lists(NUMBERS, max_size=5), st.lists(NUMBERS, max_size=5))
def test_differences_finds_exactly_the_mismatches(a, b):
    b = (b + a)[: len(a)]
    said = differences(torch.tensor(a), torch.tensor(b), 1e-5, 1e-4)
    same = all(
        x == y
        or (x != x and y != y)
        or (abs(x) != torch.inf and abs(y) != torch.inf and abs(x - y) <= 1e-5 + 1e-4 * abs(y))
        for x, y in zip(a, b, strict=True)
    )
    assert (said == "") == same, said


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([0.0, torch.nan, 2.0], "1 elements differ in nan, first (1,): nan instead of 1"),
        ([0.0, torch.inf, 2.0], "1 elements differ in +inf, first (1,)"),
        ([0.0, 1.1, 2.5], "2 of 3 elements differ, worst (2,): 2.5 instead of 2"),
        ([0.0, 1.0], "[2] torch.float32 instead of [3]"),
    ],
)
def test_differences_name_the_worst_position(actual, words):
    assert differences(torch.tensor(actual), torch.tensor([0.0, 1.0, 2.0]), 1e-5, 1e-4).startswith(words)


def test_saved_inputs_are_restored_exactly(tmp_path):
    """Including strides and shared memory, on which an implementation's code path may depend."""
    rows = torch.randn(12, 1, 10, dtype=torch.bfloat16)
    view = CacheView(
        torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([10]),
        4, 1, 7, None, (1,), Runs([[0, 2]], (7,), 4), lengths=(7,),
    )  # fmt: skip
    q = torch.randn(2, 1, 10, dtype=torch.bfloat16).transpose(0, 1)
    path = tmp_path / "paged_attention-1-0.safetensors"
    save(path, (q, rows, rows[..., :6], view, 0.25))
    again = load(path)
    assert again[0].equal(q) and again[0].stride() == q.stride()
    assert again[1].equal(rows) and again[2].equal(rows[..., :6])
    assert again[2].data_ptr() == again[1].data_ptr() and again[2].stride() == rows.stride()
    for field in dataclasses.fields(view):
        ours, theirs = getattr(view, field.name), getattr(again[3], field.name)
        ours = tuple(ours) if field.name == "runs" else ours
        assert ours.equal(theirs) if isinstance(ours, torch.Tensor) else ours == theirs, field.name
    assert again[4] == 0.25
    out, lse = replay(path, "reference")
    expected = paged.paged_attention(q, rows, rows[..., :6], view, 0.25, implementation="reference")
    check("replay", (q,), (out, lse), expected)


def test_ops_are_the_only_door_to_the_kernels():
    """Outside ops/ nothing calls a compiled or a Triton kernel."""
    package = Path(runtime.__file__).parent
    call = re.compile(r"\bkernels?\(\)|\bkernel\(\"|torch\.ops\.mlaforge|from mlaforge\.ops\.native import .*kernel")
    callers = [path for path in package.rglob("*.py") if call.search(path.read_text(encoding="utf-8"))]
    assert {path.parent.name for path in callers} == {"ops"}


def test_modules_are_those_of_the_ops():
    for module in set(dispatch.MODULES.values()):
        importlib.import_module(f"mlaforge.ops.{module}")
    assert set(dispatch.OPS) == set(dispatch.MODULES)
