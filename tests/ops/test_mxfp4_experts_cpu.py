"""Mixtures of MXFP4 experts, by the reference and the CPU kernel, against transformers' with unpacked weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mlaforge.ops import native
from mlaforge.ops.mxfp4 import dequantize
from mlaforge.ops.mxfp4_experts import Mxfp4Experts
from mlaforge.ops.native import kernels

# Relative errors of a token's result: 16-bit activations, whose step depends on the largest; and bf16 input and output.
EXACT, ROUNDED = 2e-3, 6e-3


def pair(experts, hidden, intermediate, seed=0, alpha=1.702, limit=7.0):
    """Random experts in packed form, and transformers' module with the same weights."""
    config = GptOssConfig(
        num_local_experts=experts, hidden_size=hidden, intermediate_size=intermediate, swiglu_alpha=alpha,
        swiglu_limit=limit,
    )  # fmt: skip
    oracle = GptOssExperts(config)
    packed = Mxfp4Experts(oracle)
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, buffer in packed.named_buffers():
        if name.endswith("bias"):
            state[name] = torch.randn(buffer.shape, generator=draw)
        else:
            low, high = (0, 256) if name.endswith("blocks") else (119, 127)
            state[name] = torch.randint(low, high, buffer.shape, dtype=torch.uint8, generator=draw)
    packed.load_state_dict(state, assign=True)
    unpacked = {name: tensor for name, tensor in state.items() if name.endswith("bias")}
    for name in ("gate_up_proj", "down_proj"):
        unpacked[name] = dequantize(state[f"{name}_blocks"], state[f"{name}_scales"], torch.float32)
    oracle.load_state_dict(unpacked)
    return packed, oracle.requires_grad_(False)


def tokens(count, hidden, experts, top_k, seed=0):
    draw = torch.Generator().manual_seed(seed)
    # Beyond the limit of the activation, within 16 times: of larger inputs 16 bits leave a gate's slope too little.
    x = torch.randn(count, hidden, generator=draw) * torch.rand(count, 1, generator=draw).mul(4).exp2()
    chosen = torch.rand(count, experts, generator=draw).topk(top_k).indices
    return x, chosen, torch.rand(count, top_k, generator=draw).softmax(dim=-1)


def mixture(compiled, packed):
    return lambda x, chosen, weights: compiled.mixture_mxfp4(x, chosen, weights, *packed.packed)


def apart(actual, expected):
    """Error relative to the norm, for the worst token."""
    return ((actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max()


# Widths that fill registers of 2 and of 4 groups, and widths with remainders of one to three groups.
@settings(max_examples=12)
@given(
    st.integers(1, 5), st.sampled_from([32, 64, 96, 128, 160, 224, 576]), st.sampled_from([32, 96, 128, 192, 288]),
    st.integers(1, 19), st.integers(0, 9),
)  # fmt: skip
def test_mixture_matches_unpacked_experts(compiled, experts, hidden, intermediate, count, seed):
    packed, oracle = pair(experts, hidden, intermediate, seed)
    x, chosen, weights = tokens(count, hidden, experts, min(2, experts), seed)
    expected = oracle(x, chosen, weights)
    assert apart(mixture(compiled, packed)(x, chosen, weights), expected) < EXACT
    actual = mixture(compiled, packed)(x.bfloat16(), chosen, weights.bfloat16())
    expected = oracle(x.bfloat16().float(), chosen, weights.bfloat16().float())
    assert actual.dtype == torch.bfloat16
    assert apart(actual, expected) < ROUNDED


def test_a_tokens_result_is_batch_invariant(compiled):
    """For any other tokens in the batch, and any number of tokens per expert."""
    packed, _ = pair(4, 160, 96)
    x, chosen, weights = tokens(41, 160, 4, 2)
    native = mixture(compiled, packed)
    whole = native(x, chosen, weights)
    for first, last in ((0, 1), (1, 3), (3, 8), (7, 41)):
        assert torch.equal(native(x[first:last], chosen[first:last], weights[first:last]), whole[first:last])


def test_inactive_experts_are_not_read(compiled):
    packed, oracle = pair(6, 64, 64)
    x, _, weights = tokens(5, 64, 6, 2)
    chosen = torch.tensor([[1, 4]]).expand(5, 2)
    expected = oracle(x, chosen, weights)
    for expert in (0, 2, 3, 5):
        packed.gate_up_proj_scales[expert] = 255
        packed.down_proj_bias[expert] = torch.nan
    assert apart(mixture(compiled, packed)(x, chosen, weights), expected) < EXACT
    assert apart(packed(x.requires_grad_(), chosen, weights), expected) < 1e-4


def test_the_gate_is_clamped_as_the_config_says(compiled):
    for alpha, limit in ((1.0, 1e4), (1.702, 0.5)):
        packed, oracle = pair(2, 64, 32, alpha=alpha, limit=limit)
        x, chosen, weights = tokens(7, 64, 2, 2)
        assert apart(mixture(compiled, packed)(x, chosen, weights), oracle(x, chosen, weights)) < EXACT


def test_nan_stays_with_its_token(compiled):
    packed, _ = pair(3, 64, 64)
    x, chosen, weights = tokens(6, 64, 3, 2)
    native = mixture(compiled, packed)
    whole = native(x, chosen, weights)
    for value in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[2, 33] = value
        actual = native(spoilt, chosen, weights)
        assert not torch.isfinite(actual[2]).any()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(actual[others], whole[others])


def test_no_tokens_and_zeros(compiled):
    packed, oracle = pair(3, 64, 64)
    x, chosen, weights = tokens(4, 64, 3, 2)
    native = mixture(compiled, packed)
    assert native(x[:0], chosen[:0], weights[:0]).shape == (0, 64)
    zeros = torch.zeros_like(x)
    assert apart(native(zeros, chosen, weights), oracle(zeros, chosen, weights)) < EXACT


def test_rejects_invalid_expert_ids(compiled):
    packed, _ = pair(3, 64, 64)
    x, chosen, weights = tokens(4, 64, 3, 2)
    with pytest.raises(RuntimeError, match="expert 3 of 3"):
        mixture(compiled, packed)(x, chosen.where(chosen != 1, 3), weights)


def test_gradients_match_unpacked_experts():
    packed, oracle = pair(4, 96, 64)
    x, chosen, weights = tokens(9, 96, 4, 2)
    grads = []
    for experts in (packed, oracle):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = experts(inputs[0], chosen, inputs[1])
        grads.append(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), inputs))
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_without_a_gradient_the_compiled_kernel_runs(monkeypatch):
    packed, oracle = pair(2, 64, 64)
    x, chosen, weights = tokens(3, 64, 2, 1)
    expected = oracle(x, chosen, weights)
    monkeypatch.setattr(native, "kernels", lambda: None)
    exact = packed(x, chosen, weights)
    assert apart(exact, expected) < 1e-5
    monkeypatch.undo()
    if kernels() is None:
        pytest.skip("no compiled kernels")
    with torch.no_grad():
        actual = packed(x, chosen, weights)
    assert not torch.equal(actual, exact)
    assert apart(actual, expected) < EXACT
    assert torch.equal(packed(x.clone().requires_grad_(), chosen, weights).detach(), exact)
