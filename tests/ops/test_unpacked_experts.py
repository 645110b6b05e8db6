"""Packed experts that are unpacked during use: transformers' results and gradients."""

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mlaforge.ops import mxfp4_experts
from mlaforge.ops.mxfp4 import dequantize, quantize
from mlaforge.ops.mxfp4_experts import Mxfp4Experts


@pytest.fixture
def experts_pair():
    """transformers' experts with weights that MXFP4 represents exactly, and packed experts with the same weights."""
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=5, num_experts_per_tok=2)
    torch.manual_seed(0)
    theirs, tensors = GptOssExperts(config), {}
    for name in ("gate_up_proj", "down_proj"):
        packed = quantize(torch.randn(getattr(theirs, name).shape))
        getattr(theirs, name).data = dequantize(*packed, torch.float32)
        bias = getattr(theirs, f"{name}_bias")
        bias.data.normal_()
        tensors |= {f"{name}_blocks": packed[0], f"{name}_scales": packed[1], f"{name}_bias": bias.data}
    packed = Mxfp4Experts(theirs)
    packed.load_state_dict(tensors, assign=True)
    return theirs.requires_grad_(False), packed


@pytest.mark.parametrize("chunk", [1024, 50])
def test_results_and_gradients_match_transformers(experts_pair, chunk, monkeypatch):
    monkeypatch.setattr(mxfp4_experts, "CHUNK", chunk)
    results = []
    for experts in experts_pair:
        torch.manual_seed(1)
        x = torch.randn(40, 64, requires_grad=True)
        chosen = torch.rand(40, 4).topk(2).indices  # the fifth expert is inactive
        weights = torch.rand(40, 2, requires_grad=True)
        out = experts(x, chosen, weights)
        out.backward(torch.randn(40, 64))
        results.append((out.detach(), x.grad, weights.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_no_weight_is_unpacked_at_once(experts_pair, monkeypatch):
    """At most CHUNK outputs of an expert at a time; inactive experts never."""
    monkeypatch.setattr(mxfp4_experts, "CHUNK", 50)
    _, packed = experts_pair
    unpack, seen = mxfp4_experts.unpack, []

    def watched(blocks, scales):
        seen.append(tuple(scales.shape))
        return unpack(blocks, scales)

    monkeypatch.setattr(mxfp4_experts, "unpack", watched)
    packed(torch.randn(8, 64, requires_grad=True), torch.tensor([[0, 1]] * 8), torch.ones(8, 2)).sum().backward()
    # gate_up has 192 outputs of 2 blocks, down 64 of 3; two experts, forward and backward.
    assert set(seen) == {(50, 2), (42, 2), (50, 3), (14, 3)} and len(seen) == 2 * 2 * (4 + 2)
