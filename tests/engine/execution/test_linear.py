"""Packed linear layers against fp64, within the error of each format."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.execution import model as loading
from mlaforge.engine.execution.linear import INT4_GROUP, QUANTIZED, WIDE, PackedLinear, fused, vocabulary_head
from mlaforge.engine.execution.mlp import make_mlp
from mlaforge.ops import native
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError
from support.engine_driver import greedy, idle, random_prompts, watched
from support.tiny_models import load_original

FORMATS = ["float32", "bfloat16", "int8", "int4"]
# Relative rounding of one bf16 number: 8 bits of mantissa, to nearest.
BF16 = 2.0**-8
ROWS = [1, 2, 7, 63, 64, 255, 256, 300]


def problem(rows, inputs, outputs, bias, format, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = QUANTIZED.get(format) or getattr(torch, format)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return x, weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None


def torchs_own(compiled=False):
    """As where the kernels cannot be compiled, unless `compiled`."""
    return mock.patch.object(native, "kernels", kernels if compiled else lambda: None)


def step(weight, format, compiled=True):
    """fp64 [M, K]: half a step of what the weights are rounded to, by the definition of the format."""
    weight = weight.double()
    M, K = weight.shape
    if format == "int4" and compiled and kernels() is not None:
        filled = F.pad(weight, (0, -K % 64)).view(M, -1, INT4_GROUP)
        span = filled.amax(-1) - filled.amin(-1)
        # Steps and zeros are whole numbers of 8 bits: the largest code is off by less than 3 of these.
        unit = torch.maximum(weight.abs().amax(1) / 127, span.amax(1) / 239)
        return (span / 15 / 2 + 3 * unit[:, None])[..., None].expand_as(filled).reshape(M, -1)[:, :K]
    if format == "int4" and K % INT4_GROUP == 0 and M % 16 == 0:
        groups = weight.view(M, -1, INT4_GROUP)
        span = groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)
        # 16 codes span the group; scale and zero point are bf16, and by that the ends may be off: 8 steps of a scale
        # that is off by BF16 / 2 of itself, and a zero point of up to 8 steps and the span that is off by as much.
        half = span / 15 / 2 + BF16 / 2 * (8 * span / 15 * 2 + span)
        return half[..., None].expand_as(groups).reshape(M, K)
    if format in QUANTIZED:
        # 127 codes to each side; the scale is bf16, so the largest weight may be cut by as much of itself.
        largest = weight.abs().amax(dim=1, keepdim=True)
        return (largest / 127 / 2 * (1 + BF16) + BF16 / 2 * largest * (weight.abs() > largest * (1 - BF16))).expand(
            M, K
        )
    return torch.zeros(M, K, dtype=torch.float64)


def bound(x, weight, bias, format, out, compiled=True):
    """fp64 [N, M]: the error that may be. Rounded weights act on |x|; the product is summed in fp32 and rounded to the
    activations' dtype; the kernels of int8 and int4 may round weights times scale and partial sums to bf16 too."""
    magnitude = x.double().abs() @ weight.double().abs().T
    offset = 0 if bias is None else bias.double().abs()
    allowed = x.double().abs() @ step(weight, format, compiled).T + 1e-5 * (magnitude + offset)
    if format != "float32":
        # Once for the product, once more where the bias is added to what was rounded.
        allowed = allowed + BF16 * (out.abs() + offset)
    if format in QUANTIZED:
        allowed = allowed + BF16 * magnitude / x.shape[1] ** 0.5 * 2
    return allowed


@settings(max_examples=60)
@given(
    rows=st.sampled_from(ROWS),
    inputs=st.sampled_from([1, 31, 32, 64, 96, 100, 160]),
    outputs=st.sampled_from([1, 5, 16, 48, 64, 100]),
    bias=st.booleans(),
    plus=st.booleans(),
    gaps=st.booleans(),
    format=st.sampled_from(FORMATS),
    compiled=st.booleans(),
)
def test_packed_linear_equals_fp64_product(rows, inputs, outputs, bias, plus, gaps, format, compiled):
    """Also of rows with gaps between them, and added to something, which stays as it is."""
    x, weight, b = problem(rows, inputs, outputs, bias, format)
    with torchs_own(compiled):
        layer = PackedLinear(weight, b, format)
    assert (layer.out_features, layer.in_features) == (outputs, inputs)
    added = torch.linspace(-3, 3, rows * outputs).view(rows, outputs).to(x.dtype) if plus else None
    before = None if added is None else added.clone()
    got = layer(torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, :inputs] if gaps else x, added)
    assert got.shape == (rows, outputs) and got.dtype == x.dtype
    want = F.linear(x.double(), weight.double(), None if b is None else b.double())
    allowed = bound(x, weight, b, format, want, compiled)
    if added is not None:
        assert torch.equal(added, before)
        want = want + added.double()
        # The sum is rounded once more.
        allowed = allowed + (BF16 if format != "float32" else 1e-6) * (want.abs() + added.double().abs())
    error = (got.double() - want).abs() - allowed
    assert error.max() <= 0, f"{float(error.max())} beyond the bound"


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (100, 5)])
def test_few_rows_and_many_rows_use_the_same_weights(inputs, outputs):
    """torch's int8: the packed product and the unpacked fp32 one agree to the rounding of activations, row by row."""
    x, weight, bias = problem(WIDE, inputs, outputs, True, "int8")
    with torchs_own():
        layer = PackedLinear(weight, bias, "int8")
    few = torch.cat([layer(x[n : n + 1]) for n in range(WIDE)])
    # The kernel for few rows rounds each product with a scale to bf16.
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert bool(((layer(x).double() - few.double()).abs() <= 3 * BF16 * magnitude).all())


def test_eight_bits_lose_less_than_four():
    x, weight, _ = problem(32, 128, 64, False, "int8")
    want = F.linear(x.double(), weight.double())
    errors = [float((PackedLinear(weight, None, f)(x).double() - want).norm() / want.norm()) for f in FORMATS[1:]]
    # Of weights of deviation 1, whose largest is about 2.7 (of 128) or 2 (of 32): steps of 0.021 and 0.27, and a
    # rounding error of step / sqrt(12).
    assert errors[0] < 0.004 < errors[1] < 0.012 < 0.05 < errors[2] < 0.1


@pytest.mark.parametrize("onednn", [False, True], ids=["plain", "onednn"])
@pytest.mark.parametrize("rows", [1, 300])
def test_bf16_without_compiled_kernels(rows, onednn, monkeypatch):
    """Nobody compiles, and oneDNN packs with AVX-512 alone."""
    if onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no AVX-512: oneDNN does not pack bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(native, "kernels", lambda: None)
    x, weight, bias = problem(rows, 64, 48, True, "bfloat16")
    plus = torch.ones(rows, 48, dtype=torch.bfloat16)
    want = F.linear(x.double(), weight.double(), bias.double())
    allowed = bound(x, weight, bias, "bfloat16", want) + BF16 * (want.abs() + 2)
    error = (PackedLinear(weight, bias, "bfloat16")(x, plus).double() - want - 1).abs()
    assert (error <= allowed).all(), float((error - allowed).max())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_constant_weights(value, format):
    """No range to divide by; also rows of zeros beside others."""
    weight = torch.full((16, 64), value, dtype=torch.bfloat16)
    weight[1] = torch.linspace(-1, 1, 64)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    for rows in (x, x.repeat(50, 1)):
        got = PackedLinear(weight, None, format)(rows)
        assert got.isfinite().all()
        torch.testing.assert_close(got[:, 2].float(), torch.full((len(rows),), 64 * value), rtol=0.02, atol=0)


def test_shapes_without_int4_use_int8():
    """Torch's kernel, a width that is no multiple of 32, or a height that is none of 16: the same numbers as int8."""
    with torchs_own():
        for inputs, outputs in ((100, 16), (64, 5)):
            x, weight, bias = problem(3, inputs, outputs, True, "int4")
            assert torch.equal(PackedLinear(weight, bias, "int4")(x), PackedLinear(weight, bias, "int8")(x))
        x, weight, bias = problem(3, 64, 16, True, "int4")
        assert not torch.equal(PackedLinear(weight, bias, "int4")(x), PackedLinear(weight, bias, "int8")(x))


def test_four_bits_keep_eight_in_the_vocabulary_head():
    x, weight, _ = problem(3, 64, 16, False, "int4")
    assert torch.equal(vocabulary_head(weight, "int4")(x), PackedLinear(weight, None, "int8", out_fp32=True)(x))
    assert vocabulary_head(weight, "bfloat16").format == "bfloat16"


@pytest.mark.parametrize("format", ["bfloat16", "float16", "float32"])
def test_logits_are_fp32_on_a_gpu(format):
    """By tensors that have no memory; a product of 16-bit numbers is not rounded to 16 bits in between."""
    calls = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(3, 32, dtype=getattr(torch, format)), torch.empty(48, 32, dtype=getattr(torch, format))
        head, projection = vocabulary_head(weight, format), PackedLinear(weight, None, format)
        with Recorded():
            logits = head(x)
        assert logits.dtype == torch.float32 and logits.shape == (3, 48)
        assert projection(x).dtype == x.dtype
    assert calls.count("aten.mm.dtype") == (format != "float32")


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("K", [100, 576])
def test_row_product_is_independent_of_batch(format, K):
    """Bitwise, whatever is computed beside it: numbers of 8 and 16 bits have exact sums."""
    if kernels() is None:
        pytest.skip("the kernels are not compiled")
    x, weight, bias = problem(70, K, 100, True, format)
    layer = PackedLinear(weight, bias, format)
    whole = layer(x)
    for first, last in ((0, 1), (5, 9), (16, 33), (3, 70)):
        assert torch.equal(layer(x[first:last]), whole[first:last])


@pytest.mark.parametrize("format", FORMATS)
def test_packing_does_not_retain_the_source(format):
    """The checkpoint's memory may go, or change."""
    x, weight, bias = problem(3, 64, 16, True, format)
    layer = PackedLinear(weight, bias, format)
    before = layer(x).clone()
    weight.fill_(torch.nan)
    bias.fill_(torch.nan)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
def test_fused_concatenates_outputs(biases, format):
    torch.manual_seed(0)
    dtype = QUANTIZED.get(format) or getattr(torch, format)
    linears = [nn.Linear(64, out, bias=bias, dtype=dtype) for out, bias in zip((48, 16, 32), biases, strict=True)]
    layer = fused(linears, format)
    for rows in (1, 300):
        x = torch.randn(rows, 64, dtype=dtype)
        parts = [
            PackedLinear(part.weight.data, None if part.bias is None else part.bias.data, format) for part in linears
        ]
        expected = torch.cat([part(x) for part in parts], dim=-1)
        torch.testing.assert_close(layer(x), expected, rtol=2 * BF16 if format != "float32" else 1e-5, atol=1e-5)
    assert (layer.bias is None) == (not any(biases))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_mlp_equals_the_source(family, rows, tiny_models):
    """Dense, and a mixture of which some experts get no token; added to what went before."""
    layer = load_original(tiny_models[family]).model.layers[0]
    x, plus = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = layer.mlp(x[None])
        before = plus.clone()
        got = make_mlp(layer.mlp, "float32", torch.device("cpu"))(x, plus)
    if family == "gpt_oss":
        expected = expected[0]
    torch.testing.assert_close(got, expected[0] + plus, rtol=1e-4, atol=1e-5)
    assert torch.equal(plus, before)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_mlp_in_bf16(family, tiny_models):
    layer = load_original(tiny_models[family]).model.layers[0].bfloat16()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = layer.mlp.float()(x[None].float())
        got = make_mlp(layer.mlp.bfloat16(), "bfloat16", torch.device("cpu"))(x, torch.zeros_like(x))
    expected = (expected[0] if family == "gpt_oss" else expected)[0]
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_rms_norm_by_layer_norm(tiny_models):
    norm = load_original(tiny_models["llama"]).model.norm
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator().manual_seed(0))
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2 * BF16)):
            # A mean that is not 0, and rows so small that eps counts.
            x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) + 3
            x = (x * torch.tensor([1e-4, 1e-2, 1, 100, 0])[:, None]).to(dtype)
            want = norm.to(dtype)(x)
            torch.testing.assert_close(loading.RmsNorm(norm.to(dtype))(x), want, rtol=tolerance, atol=tolerance)


# Which format


@pytest.mark.parametrize(
    ("amx", "avx512", "compiled", "chosen", "why"),
    [
        (True, True, True, "bfloat16", "by AMX"),
        (False, True, False, "bfloat16", "by AVX-512 BF16"),
        (False, False, True, "bfloat16", "by compiled kernels"),
        (False, False, False, "float32", "neither AMX, AVX-512 BF16 nor compiled kernels"),
    ],
)
def test_auto_is_the_fastest_format_and_is_logged(amx, avx512, compiled, chosen, why, tiny_models, monkeypatch, capsys):
    """Nothing is timed: what else the machine does cannot matter."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(native, "kernels", lambda: object() if compiled else None)
    source = SourceModel.open(tiny_models["llama"])
    assert loading.choose_format("auto", source, torch.device("cpu")) == chosen
    line = capsys.readouterr().err
    assert line.startswith(f"dtype auto: {chosen} (") and why in line
    for name in FORMATS:
        assert loading.choose_format(name, source, torch.device("cpu")) == name
    assert capsys.readouterr().err == ""


def test_auto_on_a_gpu_is_the_checkpoint_dtype(converted, tiny_models, capsys):
    half = SourceModel.open(converted("llama", "latent", dtype="bfloat16"))
    assert loading.choose_format("auto", half, torch.device("cuda")) == "bfloat16"
    assert "dtype auto: bfloat16 (that of model)" in capsys.readouterr().err
    assert loading.choose_format("auto", SourceModel.open(tiny_models["llama"]), torch.device("cuda")) == "float32"


# In the engine


def rounded(model, format):
    """transformers' model with its weights as the format holds them, computing in fp32."""

    def dequantized(weight, format=format):
        if format not in QUANTIZED:
            return weight.to(getattr(torch, format)).float()
        layer = PackedLinear(weight.to(QUANTIZED[format]), None, format)
        return layer(torch.eye(weight.shape[1], dtype=torch.bfloat16)).T.float()

    with torch.no_grad():
        for name, module in model.named_modules():
            if name == "lm_head":
                module.weight = nn.Parameter(dequantized(module.weight, "int8" if format == "int4" else format))
            elif isinstance(module, nn.Linear):
                module.weight.copy_(dequantized(module.weight))
            elif name.endswith("experts"):
                for weights in (module.gate_up_proj, module.down_proj):
                    for weight in weights:
                        weight.copy_(dequantized(weight.T).T)
    return model


# Products with biases and without, mixtures, and every format; the rest is slow.
FEW = [("llama", "int4"), ("qwen2", "bfloat16"), ("qwen2", "int8"), ("gpt_oss", "float16"), ("gpt_oss", "int8")]
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
    for case in itertools.product(("llama", "qwen2", "gpt_oss"), ("bfloat16", "float16", "int8", "int4"))
]


@pytest.mark.parametrize(("family", "format"), CASES)
def test_formats_in_the_engine(family, format, tiny_models):
    """Several rows at once and one, few and many: the logits are those of the rounded weights, but for the rounding of
    activations in three layers."""
    llm = watched(tiny_models[family], dtype=format)
    assert llm.engine.model.dtype == QUANTIZED.get(format, getattr(torch, format, None))
    seen = []
    logits = llm.engine.model.logits
    llm.engine.model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    prompts = random_prompts(70, 9)
    outputs = llm.generate(prompts, greedy(6))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6] and len(seen) == 6
    idle(llm.engine)
    model = rounded(load_original(tiny_models[family]), format)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        got = torch.stack([rows[index] for rows in seen]).float()
        with torch.no_grad():
            want = model(torch.tensor([[*prompt, *output.outputs[0].token_ids]])).logits[0, len(prompt) - 1 : -1]
        cosine = torch.cosine_similarity(got, want, dim=-1).min()
        assert cosine > (0.9999 if format == "float16" else 0.99), cosine


@pytest.mark.parametrize(("layout", "format"), [("latent", "int8"), ("latent_rope", "int4")])
def test_formats_of_converted_models(format, layout, converted):
    """Log probabilities of a text change by the rounding of weights, and by no more than that."""
    directory, (ids,) = converted("llama", layout, budget=0.75), random_prompts(70)
    scores = []
    for dtype in ("float32", format):
        llm = watched(directory, dtype=dtype)
        (output,) = llm.generate([ids], greedy(1, prompt_logprobs=0))
        scores.append(torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]]))
        idle(llm.engine)
    change = (scores[0] - scores[1]).abs().mean()
    assert 0 < change < (0.5 if format == "int4" else 0.05), change


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rejects_quantized_weights_off_the_cpu(format):
    with pytest.raises(UserError, match=rf"^dtype '{format}' exists on the CPU only; use bfloat16 on meta$"):
        PackedLinear(torch.empty(16, 32, device="meta"), None, format)
