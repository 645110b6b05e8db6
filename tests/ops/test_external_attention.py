"""Adapters of other libraries' attention, run on stand-ins that have the libraries' signatures and checks
(tests/support/mock_kernels): results equal dense attention, arguments equal what the libraries take."""

import dataclasses
import inspect
import sys

import pytest
import torch

from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import AttentionCase
from mlaforge.ops.external.library import EXTERNAL
from mlaforge.ops.packed_attention import LATENTS, packed_latent_attention
from mlaforge.ops.paged_attention import LIBRARIES, OP, paged_attention
from mlaforge.ops.paged_attention import reference as paged_reference
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla
from mlaforge.runtime import UserError
from support import mock_kernels
from support.mock_kernels import flash_mla, flashinfer, vllm_unified
from support.paged_steps import Shape, assert_right, expected, make_step

HALF = torch.float16
MLA, NARROW = Shape(64, 1, 576, 512, aliased=True), Shape(4, 1, 296, 264, aliased=True)
GQA, WIDE = Shape(8, 2, 64, 64), Shape(6, 2, 128, 128)
# Lengths and query tokens: single ones with an empty sequence, several, ragged, more tokens than rows.
STEPS = {
    "single": [(1, 1), (63, 1), (64, 1), (0, 1), (129, 1)],
    "several": [(64, 3), (3, 3), (70, 3)],
    "ragged": [(5, 2), (100, 7), (64, 1)],
    "padding": [(2, 4), (9, 4)],
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    mock_kernels.install(monkeypatch)
    monkeypatch.delenv("MLAFORGE_OPS", raising=False)


def run(step, name, sinks=None):
    return paged_attention(*step.inputs, sinks, implementation=name)


CASES = [
    *(("flash_mla", shape, 64, None) for shape in (MLA, NARROW)),
    *(("flashinfer", shape, size, None) for shape in (MLA, NARROW) for size in (1, 16)),
    *(("flashinfer", shape, size, window) for shape in (GQA, WIDE) for size in (1, 16) for window in (None, 7)),
    *(("vllm", shape, size, None) for shape in (MLA, NARROW) for size in (1, 16)),
    *(("vllm", shape, size, window) for shape in (GQA, WIDE) for size in (1, 16) for window in (None, 7)),
]


@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("name", "shape", "size", "window"), CASES)
def test_result_is_that_of_dense_attention(name, shape, size, window, sequences):
    step = make_step(shape, sequences, block_size=size, window=window, dtype=HALF)
    assert_right(step, run(step, name), tolerance=2e-3)


@pytest.mark.parametrize("name", ["flash_mla", "flashinfer", "vllm"])
def test_sinks_are_applied_to_out_alone(name):
    shape, sinks = (MLA if name == "flash_mla" else GQA), torch.linspace(-2, 2, 64)
    step = make_step(shape, STEPS["single"], block_size=64, dtype=HALF)
    sinks = sinks[: shape.heads]
    out, lse = run(step, name, sinks)
    plain, plain_lse = expected(step)
    torch.testing.assert_close(out.float(), plain * (plain_lse - sinks).sigmoid()[..., None], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, plain_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["flashinfer", "vllm"])
def test_fp8_rows_are_read_as_cast(name):
    step = make_step(MLA, STEPS["ragged"], block_size=16, dtype=torch.bfloat16)
    k = step.k.to(torch.float8_e4m3fn)
    out, lse = paged_attention(step.q, k, k[..., :512], step.view, 0.3, implementation=name)
    want = paged_reference(step.q, k.float(), k[..., :512].float(), step.view, 0.3)
    torch.testing.assert_close(out, want[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want[1], atol=2e-3, rtol=2e-3)


def test_layers_with_one_view_share_a_plan(monkeypatch):
    step = make_step(MLA, STEPS["several"], block_size=64, dtype=HALF)
    plans = []
    plan, metadata = flashinfer_plan(), flash_mla.get_mla_metadata
    monkeypatch.setattr(*plan[:2], lambda *arguments, **named: (plans.append("plan"), plan[2](*arguments, **named)))
    monkeypatch.setattr(flash_mla, "get_mla_metadata", lambda: (plans.append("metadata"), metadata())[1])
    for name in ("flash_mla", "flashinfer"):
        for _ in range(3):
            run(step, name)
    assert plans == ["metadata", "plan"]
    # A later step has other lengths.
    later = make_step(MLA, [(65, 3), (4, 3), (71, 3)], block_size=64, dtype=HALF)
    assert_right(later, run(later, "flash_mla"), tolerance=2e-3)
    assert plans == ["metadata", "plan", "metadata"]


def flashinfer_plan():
    from support.mock_kernels.flashinfer_mla import BatchMLAPagedAttentionWrapper as wrapper

    return wrapper, "plan", wrapper.plan


# Rows of 656 bytes


def packed(step, rank):
    """A step's rows in 656 bytes, and a step over the rows that they decode to."""
    used = ~step.k.isnan().any((1, 2))
    rows = PagedRows.empty(Fp8DsMla(rank), len(step.k), torch.bfloat16, torch.device("cpu"))
    rows.packed.fill_(255)
    at = used.nonzero()[:, 0]
    rows.write(at, step.k[at, 0])
    k = torch.full_like(step.k, torch.nan)
    k[at, 0] = rows.format.read(rows.packed, at)
    return rows, dataclasses.replace(step, k=k, v=k[..., :rank])


@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("rank", "size", "heads"), [(512, 64, 64), (384, 64, 70), (512, 1, 9)])
def test_packed_rows_are_attended_as_their_decoded_values(rank, size, heads, sequences):
    """Slots that no token sees hold NaN; with blocks of one row, a selection. Heads are filled up to 64 or 128."""
    shape, values = Shape(heads, 1, rank + 64, rank, aliased=True), torch.linspace(-2, 2, heads)
    step = make_step(shape, sequences, block_size=size, dtype=torch.bfloat16)
    if size == 1:
        step = whole_pages(step)
    rows, decoded = packed(step, rank)
    out, lse = packed_latent_attention(step.q, rows, rank, step.view, 0.3, values, implementation="flash_mla")
    want = paged_reference(*decoded.inputs, values)
    torch.testing.assert_close(out, want[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want[1], atol=2e-4, rtol=2e-4)
    again = LATENTS(step.q, rows, rank, step.view, 0.3, values, implementation="reference")
    torch.testing.assert_close(again[0], want[0], atol=2e-2, rtol=2e-2)


def whole_pages(step):
    more = -len(step.k) % 64
    k = torch.cat((step.k, torch.full((more, *step.k.shape[1:]), torch.nan, dtype=step.k.dtype)))
    return dataclasses.replace(step, k=k, v=k[..., : step.v.shape[2]])


@pytest.mark.parametrize("window", [None, 5])
def test_slots_are_block_times_size_plus_offset(window):
    step = make_step(MLA, STEPS["ragged"], block_size=4, window=window, dtype=HALF)
    tokens = arguments.QueryTokens.of(step.view)
    slots = tokens.slots(step.view, 64)
    assert slots.dtype == torch.int32 and slots.shape == (10, 128 if window is None else 64)
    n = 0
    for s, T in enumerate(step.view.queries):
        for t in range(T):
            end = len(step.slots[s]) - (T - 1 - t)
            visible = step.slots[s][max(0, end - window) if window else 0 : max(end, 0)]
            assert slots[n][slots[n] >= 0].tolist() == visible
            n += 1


# What is refused

LATENT = AttentionCase(64, 1, 576, 512, True, torch.bfloat16, torch.bfloat16, 64, (9, 0))
HEADS = AttentionCase(64, 8, 64, 64, False, torch.bfloat16, torch.bfloat16, 16, (9, 0))
ADAPTERS = {adapter.library.name: adapter for adapter in LIBRARIES}


@pytest.mark.parametrize(
    ("name", "case", "changes", "reason"),
    [
        ("flash_mla", LATENT, {}, None),
        ("flash_mla", LATENT, {"key": 320, "value": 256}, None),
        ("flash_mla", HEADS, {}, "keys and values of heads"),
        ("flash_mla", LATENT, {"capability": (10, 0)}, "this GPU has 10.0"),
        ("flash_mla", LATENT, {"dtype": torch.float32, "rows": torch.float32}, "torch.float32"),
        ("flash_mla", LATENT, {"rows": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ("flash_mla", LATENT, {"page": 16}, "blocks must have 64 tokens, not 16"),
        ("flash_mla", LATENT, {"page": 1}, "fp8_ds_mla"),
        ("flash_mla", LATENT, {"window": 128}, "window"),
        ("flash_mla", LATENT, {"key": 832, "value": 768}, "do not fit"),
        ("flashinfer", LATENT, {"rows": torch.float8_e4m3fn}, None),
        ("flashinfer", LATENT, {"rows": torch.float8_e4m3fn, "capability": (8, 9)}, "capability 9.0"),
        ("flashinfer", LATENT, {"capability": (7, 5)}, "this GPU has 7.5"),
        ("flashinfer", LATENT, {"window": 128}, "window"),
        ("flashinfer", LATENT, {"key": 612, "value": 512}, "do not fit"),
        ("flashinfer", HEADS, {"window": 128}, None),
        ("flashinfer", HEADS, {"rows": torch.float8_e4m3fn}, "rows must be"),
        ("flashinfer", HEADS, {"key": 96, "value": 64}, "96 and 64"),
        ("flashinfer", HEADS, {"kv_heads": 7}, "not a multiple of 7"),
        ("vllm", LATENT, {"key": 832, "value": 768, "rows": torch.float8_e4m3fn}, None),
        ("vllm", LATENT, {"rows": torch.float8_e4m3fn, "capability": (8, 0)}, "does not read"),
        ("vllm", LATENT, {"window": 128}, "window"),
        ("vllm", HEADS, {"window": 128, "key": 80, "value": 80}, None),
        ("vllm", HEADS, {"key": 96}, "one width"),
        ("vllm", HEADS, {"rows": torch.float8_e4m3fn}, "rows must be"),
        ("vllm", HEADS, {"dtype": torch.float32, "rows": torch.float32}, "torch.float32"),
    ],
)
def test_refusals(name, case, changes, reason):
    refused = ADAPTERS[name].refusal(dataclasses.replace(case, **changes))
    assert refused is None if reason is None else reason in refused and "\n" not in refused


def test_trees_and_unknown_lengths_are_refused():
    step = make_step(MLA, [(70, 3)], block_size=64, dtype=HALF)
    tree = dataclasses.replace(step.view, tree_Tn=torch.zeros(3, 3, dtype=torch.int32))
    for view, reason in ((tree, "trees"), (dataclasses.replace(step.view, lengths=()), "captured step")):
        for adapter in LIBRARIES:
            assert reason in adapter.supports(step.q, step.k, step.v, view)


def test_heads_and_slots_of_packed_rows():
    for heads, slots, reason in ((160, 64, "at most 128 query heads, not 160"), (64, 48, "use block_size 64")):
        rows = PagedRows.empty(Fp8DsMla(512), slots, torch.bfloat16, torch.device("cpu"))
        q, view = torch.zeros(1, heads, 576).bfloat16(), make_step(MLA, [(5, 1)], block_size=64).view
        with pytest.raises(UserError, match=reason):
            packed_latent_attention(q, rows, 512, view, 0.3, implementation="flash_mla")


# How they are chosen


def test_a_library_is_used_only_where_it_is_named(monkeypatch, capsys):
    step = make_step(MLA, STEPS["single"], block_size=64, dtype=HALF)
    monkeypatch.setattr("mlaforge.ops.paged_attention._native_supports", lambda *inputs: "not here")
    assert OP.choose(*step.inputs)[0] not in EXTERNAL
    monkeypatch.setattr(OP, "_logged", set())
    for _ in range(2):
        monkeypatch.setenv("MLAFORGE_OPS", "flash_mla")
        assert_right(step, paged_attention(*step.inputs), tolerance=2e-3)
    assert capsys.readouterr().err.splitlines() == ["paged_attention: flash_mla is used"]
    heads = make_step(GQA, STEPS["single"], dtype=HALF)
    with pytest.raises(UserError, match=r"^paged_attention: flash_mla cannot run here: it computes absorbed MLA"):
        paged_attention(*heads.inputs)
    monkeypatch.setenv("MLAFORGE_OPS", "flash_mla+reference")
    assert_right(heads, paged_attention(*heads.inputs), tolerance=2e-3)
    assert "flash_mla is not used: it computes absorbed MLA" in capsys.readouterr().err
    monkeypatch.setenv("MLAFORGE_OPS", "flash_mla+vlm")
    with pytest.raises(UserError, match=r"'vlm', which is no implementation; they are .* flash_mla, flashinfer, vllm"):
        paged_attention(*heads.inputs)


def test_check_compares_a_library_with_the_reference(monkeypatch):
    step = make_step(MLA, STEPS["several"], block_size=64, dtype=HALF)
    monkeypatch.setenv("MLAFORGE_OPS", "check,flash_mla")
    paged_attention(*step.inputs)
    right = flash_mla.flash_mla_with_kvcache

    def wrong(*inputs, **named):
        out, lse = right(*inputs, **named)
        return out, lse / 2

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", wrong)
    with pytest.raises(AssertionError, match="paged_attention flash_mla"):
        paged_attention(*step.inputs)


def test_a_library_that_is_not_installed_is_an_error_that_names_it(monkeypatch):
    monkeypatch.undo()
    step = make_step(MLA, STEPS["single"], block_size=64, dtype=HALF)
    for name in ("flash_mla", "flashinfer"):
        with pytest.raises(UserError, match=f"paged_attention: {name} cannot run here: {name} is not installed"):
            run(step, name)


def test_another_version_of_vllm_is_an_error(monkeypatch):
    step = make_step(GQA, STEPS["single"], dtype=HALF)
    monkeypatch.setattr(vllm_unified, "is_batch_invariant", True)
    with pytest.raises(UserError, match="VLLM_BATCH_INVARIANT"):
        run(step, "vllm")
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention")
    with pytest.raises(UserError, match=r"follows version 0\.32\.0"):
        run(step, "vllm")


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (flash_mla.flash_mla_with_kvcache, "softmax_scale causal is_fp8_kvcache indices"),
        (flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan, "causal sm_scale window_left q_data_type kv_data_type"),
        (flashinfer_plan()[0].run, "return_lse return_lse_base_on_e ckv_scale kpe_scale"),
    ],
)
def test_stand_ins_refuse_misnamed_arguments(function, named):
    """So that an adapter that passes one fails."""
    signature = inspect.signature(function)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name != "args"]
    signature.bind(*required, **dict.fromkeys(named.split()))
    with pytest.raises(TypeError):
        signature.bind(*required, sm_scal=0.3)


def test_wrong_dtypes_of_arguments_fail():
    step = make_step(MLA, STEPS["single"], block_size=64, dtype=HALF)
    with pytest.raises(RuntimeError, match="block_table"):
        run(dataclasses.replace(step, view=dataclasses.replace(
            step.view, block_table_SB=step.view.block_table_SB.long())), "flash_mla")  # fmt: skip
