"""Stage external: its cases on stand-ins of the libraries, and what it lists without them."""

import sys
from pathlib import Path

import pytest
import torch

from mlaforge.gpu_verification import external
from mlaforge.gpu_verification.case import Unsupported
from mlaforge.gpu_verification.context import Context
from mlaforge.ops.external.library import EXTERNAL
from support import mock_kernels


@pytest.fixture
def context(monkeypatch):
    """As on a GPU in which the Triton kernels are the reference, at small sizes."""
    mock_kernels.install(monkeypatch)
    monkeypatch.setattr(external, "SEQUENCES", 1)
    monkeypatch.setattr(external, "CACHED", 65)
    monkeypatch.setattr(external, "SIZES", (4, 2, 256, 128))
    monkeypatch.setattr(external, "LENGTHS", {1: (0, 1, 66), 4: (0, 66)})
    layouts = {name: external.LAYOUTS[name] for name in ("gqa-64 window 128", "mla 512+64", "mla 264+64")}
    monkeypatch.setattr(external, "LAYOUTS", layouts)
    for name in ("paged_attention", "EXPERTS"):
        op = getattr(external, name)
        monkeypatch.setattr(external, name, Untimed(op))
    return Context(torch.device("cpu"), False, {}, Path("unused"))


class Untimed:
    """An op whose Triton kernel is not run: its interpreter multiplies bf16 wrongly."""

    def __init__(self, op):
        self.op, self.implementations = op, getattr(op, "implementations", {})

    def __call__(self, *inputs, implementation):
        return self.op(*inputs, implementation="reference" if implementation == "triton" else implementation)


def test_cases_agree_with_their_predictions(context):
    refused, ran = [], []
    for case in external.cases(context):
        try:
            outcome = case.run()
        except Unsupported as reason:
            refused.append((case.name, str(reason)))
            continue
        ran.append(case.name)
        assert case.prediction.holds(outcome.measured), (case.name, outcome)
        assert {"triton_us"} < outcome.more.keys()
    assert {name.partition(",")[0] for name in ran} == set(EXTERNAL)
    assert all(name.startswith("flash_mla, gqa") and "keys and values of heads" in reason for name, reason in refused)


def test_a_wrong_kernel_is_off(context, monkeypatch):
    flash_mla = sys.modules["flash_mla"]
    right = flash_mla.flash_mla_with_kvcache
    monkeypatch.setattr(
        flash_mla, "flash_mla_with_kvcache", lambda *inputs, **named: [x * 1.02 for x in right(*inputs, **named)]
    )
    case = next(case for case in external.cases(context) if case.name == "flash_mla, mla 512+64, T=1")
    assert not case.prediction.holds(case.run().measured)


def test_a_twin_lists_libraries_that_cannot_run():
    cases = list(external.cases(Context(torch.device("cpu"), True, {}, Path("unused"))))
    assert [case.name for case in cases] == list(EXTERNAL)
    for case in cases:
        with pytest.raises(Unsupported, match=f"^{case.name} is not installed$|needs CUDA"):
            case.run()
