"""Experts that stay packed, where they are unpacked while they are used: transformers' results, and its gradients."""

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mlaforge.ops import mxfp4_experts
from mlaforge.ops.mxfp4 import dequantize, quantize
from mlaforge.ops.mxfp4_experts import Mxfp4Experts


@pytest.fixture
def both():
    """transformers' experts with weights that MXFP4 holds, and ours with the same ones packed."""
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=5, num_experts_per_tok=2)
    torch.manual_seed(0)
    theirs, tensors = GptOssExperts(config), {}
    for name in ("gate_up_proj", "down_proj"):
        packed = quantize(torch.randn(getattr(theirs, name).shape))
        getattr(theirs, name).data = dequantize(*packed, torch.float32)
        bias = getattr(theirs, f"{name}_bias")
        bias.data.normal_()
        tensors |= {f"{name}_blocks": packed[0], f"{name}_scales": packed[1], f"{name}_bias": bias.data}
    ours = Mxfp4Experts(theirs)
    ours.load_state_dict(tensors, assign=True)
    return theirs.requires_grad_(False), ours


@pytest.mark.parametrize("chunk", [1024, 50])
def test_results_and_gradients_are_transformers_own(both, chunk, monkeypatch):
    monkeypatch.setattr(mxfp4_experts, "CHUNK", chunk)
    results = []
    for experts in both:
        torch.manual_seed(1)
        x = torch.randn(40, 64, requires_grad=True)
        chosen = torch.rand(40, 4).topk(2).indices  # the fifth expert is nobody's
        weights = torch.rand(40, 2, requires_grad=True)
        out = experts(x, chosen, weights)
        out.backward(torch.randn(40, 64))
        results.append((out.detach(), x.grad, weights.grad))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_no_weight_is_unpacked_whole(both, monkeypatch):
    """Of one expert no more than CHUNK outputs at once; what nobody chose not at all."""
    monkeypatch.setattr(mxfp4_experts, "CHUNK", 50)
    _, ours = both
    unpack, seen = mxfp4_experts.unpack, []

    def watched(blocks, scales):
        seen.append(tuple(scales.shape))
        return unpack(blocks, scales)

    monkeypatch.setattr(mxfp4_experts, "unpack", watched)
    ours(torch.randn(8, 64, requires_grad=True), torch.tensor([[0, 1]] * 8), torch.ones(8, 2)).sum().backward()
    # gate_up has 192 outputs of 2 blocks, down 64 of 3; two experts, forward and backward.
    assert set(seen) == {(50, 2), (42, 2), (50, 3), (14, 3)} and len(seen) == 2 * 2 * (4 + 2)
