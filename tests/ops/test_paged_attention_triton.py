"""The Triton kernel of paged attention alone: how it cuts its work, what it refuses, and that it compiles for a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge import runtime
from mlaforge.ops.paged_attention import paged_attention
from support.paged_steps import SHAPES, assert_right, make_step, needs_triton, steps

pytestmark = [needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]


@given(steps(max_length=150), st.sampled_from([None, 1, 3]))
@settings(max_examples=12)
def test_triton_against_dense_attention(step, splits):
    from mlaforge.ops import paged_attention_triton

    assert_right(step, paged_attention_triton.attend(*step.inputs, splits=splits))


def test_many_sequences_are_found_and_splits_merged(monkeypatch):
    """More sequences than one search step looks at, most of them with nothing in the second split."""
    import triton.language as tl

    from mlaforge.ops import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "SEARCHED", tl.constexpr(4))
    step = make_step(SHAPES["mha"], [(1, 1), (7, 2)] * 3 + [(64, 60), (3, 2), (1, 1)])
    launch = paged_attention_triton.make_launch(*step.inputs)
    assert launch.arguments["TILES"] == 0
    assert_right(step, paged_attention_triton.attend(*step.inputs, splits=2))


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 264))
def test_splits_keep_the_machine_busy(programs, most, room):
    from mlaforge.ops.paged_attention_triton import choose_splits

    splits = choose_splits(programs, most, room)
    assert 1 <= splits <= min(most, 128)
    if most >= room > 10 * programs:
        assert splits * programs >= 0.8 * min(room, 128 * programs)


@given(st.integers(1, 600), st.integers(0, 200), st.booleans())
def test_pieces_cover_a_row(value, more, in_key):
    from mlaforge.ops.paged_attention_triton import cut

    keys, values = cut(value + more, value, in_key)
    for width in (*keys, *values):
        assert width == 0 or (width >= 16 and width & (width - 1) == 0)
    assert sum(values) >= value and sum(values) - value < max(16, value)
    if in_key:
        assert keys[:2] == values and keys[2] >= more
    else:
        assert sum(keys) >= value + more


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"k": torch.float16}, "differ in dtype"),
        ({"v": 700}, "do not fit"),
        ({"strided": True}, "one after another"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(change, words):
    step = make_step(SHAPES["mha"], [(5, 1)])
    q, k, v, view, scale = step.inputs
    if "dtype" in change:
        q, k, v = (x.to(change["dtype"]) for x in (q, k, v))
    if "k" in change:
        k = k.to(change["k"])
    if "v" in change:
        v = k.new_zeros(*k.shape[:2], change["v"])
    if "strided" in change:
        k = k.new_zeros(*k.shape[:2], 2 * k.shape[2])[..., ::2]
    with pytest.raises(runtime.UserError, match=words):
        paged_attention(q, k, v, view, scale, implementation="triton")


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_and_fits(monkeypatch):
    """On real shapes, without a GPU, in a process where nothing is interpreted."""
    import json

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    script = Path(__file__).parents[1] / "support" / "compile_ahead.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {"gqa-64", "gqa-128", "mla-512-64", "mla-256-64", "mla-320-32", "selection-score"} <= set(told)
    assert {"experts-20b-gate", "experts-120b-gate", "experts-20b-down", "experts-20b-sum"} <= set(told)
    for name, line in told.items():
        assert line["shared"] <= 227 * 1024, line
        assert line["spilled"] <= 256, line
        assert line["wgmma"] or line.get("tile", [0])[0] < 64, f"{name} does not use the asynchronous tensor cores"
