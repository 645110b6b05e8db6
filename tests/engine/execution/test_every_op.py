"""`MLAFORGE_OPS=check` over whole engine steps: prompts, decoding, verification and sparse steps of every layout
compare every op with its reference, and detect an error in any of them."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlaforge import LLM, SamplingParams
from mlaforge.ops import dispatch, native
from mlaforge.ops.dispatch import MODULES, OPS
from mlaforge.ops.external.library import EXTERNAL
from mlaforge.ops.mxfp4 import quantize, unpack
from mlaforge.ops.token_selection import KEY_TILE
from support.drafters import Knowing
from support.speculating import partly, speculate
from support.tiny_models import save_packed

# Two sequences beside each other, longer than a selection, a sparse view, and a block of int4 rows.
PROMPTS = [[*range(60, 125), *range(30, 105)], [*range(10, 130)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Layout, options of the engine, and whether it drafts: a chain that is verified, or under sparse views.
CASES = {
    "gqa": ("gqa", {}, "chain"),
    "gqa in int8": ("gqa", {"dtype": "int8", "kv_cache_dtype": "int8"}, "chain"),
    "gqa in int4": ("gqa", {"dtype": "int4", "kv_cache_dtype": "int4"}, None),
    "gqa, sparse": ("sparse gqa", {}, "chain"),
    "gqa under sparse views": ("gqa", {}, "sparse view"),
    "latent": ("latent", {}, "chain"),
    "latent, sparse": ("sparse latent", {}, "chain"),
    "latent, coded": ("coded", {}, "chain"),
    "latent_rope": ("latent_rope", {"kv_cache_dtype": "int8"}, "sparse view"),
    "packed experts": ("packed", {}, "chain"),
}  # fmt: skip
for name in set(MODULES.values()):
    importlib.import_module(f"mlaforge.ops.{name}")


@pytest.fixture(scope="module")
def models(sparse, converted, tiny_models, tmp_path_factory) -> Callable[[str], Any]:
    """The model of a layout."""
    packed = save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("every-op") / "packed")

    def model(layout: str) -> Any:
        if layout == "coded":
            return converted("llama", "latent", bits=6)
        if layout.startswith("sparse "):
            return sparse("llama", layout.removeprefix("sparse "))
        return {"gqa": tiny_models["llama"], "packed": packed}.get(layout) or converted("llama", layout)

    return model


@pytest.fixture(scope="module")
def run(models) -> Callable[[str], None]:
    """Run a case on the CPU, including the load of its model."""

    def run(case: str) -> None:
        layout, options, drafting = CASES[case]
        options = {"dtype": "bfloat16", "cache_bytes": 1 << 22, **options}
        llm = LLM(models(layout), device="cpu", **options)
        # Sparse views begin at about 300 tokens.
        prompts = [2 * prompt for prompt in PROMPTS] if drafting == "sparse view" else PROMPTS
        texts = [[*prompt, *range(12)] for prompt in prompts]
        if drafting == "chain":
            speculate(llm.engine, Knowing(texts, 0.5))
        elif drafting == "sparse view":
            partly(llm.engine, Knowing(texts, 0.5))
        llm.generate(prompts, GREEDY)
        if case == "packed experts":
            # As in training, which unpacks weights.
            unpack(*quantize(torch.randn(1, 32, 16)))

    return run


@pytest.fixture
def checking(monkeypatch, tmp_path):
    """MLAFORGE_OPS=check with a home of its own for mismatches; counts start at zero."""
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("MLAFORGE_OPS", "check")
    monkeypatch.setattr(dispatch, "comparisons", dispatch.Counter())


def compiled_ops() -> set[str]:
    return {name for name, op in OPS.items() if "native" in op.implementations}


@pytest.mark.skipif(not native.is_available(), reason="there is nothing to be compared")
def test_every_op_is_compared(run, checking):
    for case in CASES:
        run(case)
    external = {name for name, op in OPS.items() if EXTERNAL.keys() & op.implementations.keys()}
    assert compiled_ops() | triton_ops() | external == set(MODULES)
    assert {name for name, implementation in dispatch.comparisons if implementation == "native"} == compiled_ops()


# One case for every op.
CASE_OF_OP = {
    "gqa": ["gated_mlp", "linear", "paged_attention", "rms_norm", "rope_and_store"],
    "gqa in int8": ["linear_int8", "packed_attention", "silu_mul"],
    "gqa in int4": ["linear_int4", "pack_blocks"],
    "latent, sparse": ["latent", "select_tokens", "write_index"],
    "gqa under sparse views": ["attention_with_mass"],
    "latent_rope": ["attention_mass", "latent_rope"],
    "packed experts": ["mxfp4_experts", "unpack_mxfp4"],
}  # fmt: skip


def with_error(name: str, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Change one element of what an op returns or writes."""
    if name == "rope_and_store":
        inputs[0][-1, 0] += 1
    elif name == "pack_blocks":
        rows, packs_2K, _ = inputs
        rows.packed[packs_2K[1, 0], 0] ^= 0xF0
    elif name == "write_index":
        keys, slot = inputs[3], inputs[4][0]
        key = keys[slot // KEY_TILE, :, slot % KEY_TILE]
        key[0] = key[0] - 9 if key[0] > 0 else key[0] + 9
    elif name == "select_tokens":
        slots, positions = outputs
        # The second token instead of the first, with its slot: both are read where the pattern has two first tokens.
        slots[0, 0], positions[0, 0] = slots[0, 1], positions[0, 1]
    else:
        first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        first.flatten()[0] += max(1.0, float(first.flatten()[0].abs()))
    return outputs


@pytest.mark.skipif(not native.is_available(), reason="there is nothing to be compared")
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in CASE_OF_OP.items() for name in names])
def test_check_detects_an_error_of_an_op(case, name, run, checking, monkeypatch):
    op = OPS[name]
    correct = op.implementations["native"]

    def wrong(*inputs: Any) -> Any:
        return with_error(name, inputs, correct.run(*inputs))

    monkeypatch.setitem(op.implementations, "native", dataclasses.replace(correct, run=wrong, resolve=None))
    with pytest.raises(AssertionError, match=f"^{name} native, output "):
        run(case)


def test_every_op_has_a_case_with_an_error():
    assert sorted(name for names in CASE_OF_OP.values() for name in names) == sorted(compiled_ops())


def triton_ops() -> set[str]:
    return {name for name, op in OPS.items() if "triton" in op.implementations}


@pytest.mark.slow
def test_every_triton_op_is_compared(models, checking, cuda):
    """On the simulated device, a minute; in steps of their own they are compared in tests/ops."""
    for layout in ("gqa", "gqa in int8", "sparse gqa", "latent_rope", "coded", "packed"):
        layout, _, stored = layout.partition(" in ")
        llm = LLM(models(layout), device="cuda", dtype="float32", cache_bytes=1 << 22, kv_cache_dtype=stored or "auto")
        # One token more than a selection has.
        prompt = PROMPTS[0][: 40 if layout.startswith("sparse") else 9]
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    compared = {name for name, implementation in dispatch.comparisons if implementation == "triton"}
    # Only a tuned table chooses the products of a few rows.
    assert compared == triton_ops() - {"vector_product"}


@pytest.mark.parametrize(
    "case",
    ["gqa in int8", "latent, sparse", "packed experts",
     *(pytest.param(case, marks=pytest.mark.slow) for case in ("gqa in int4", "latent_rope"))],
)  # fmt: skip
def test_reference_runs_no_kernel(case, run, monkeypatch):
    """With MLAFORGE_OPS=reference no op runs another implementation."""
    monkeypatch.setenv("MLAFORGE_OPS", "reference")
    names = set()
    with dispatch.hooked(lambda op, name, inputs: names.add(name)):
        run(case)
    assert names == {"reference"}
