"""Prompts of converted layers on a GPU, over decompressed keys and values, against the layers' modules on a CPU."""

import pytest
import torch

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution import latent_prompts
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.modeling.latent_attention_mla import LatentAttention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it needs the simulated device")
# Windows, sinks and norms of keys are those of families.
CASES = [("gpt_oss", "latent_rope", {}), ("llama", "coded", {"topk": 24})]
MORE = [("qwen3", "latent", {}), ("llama", "latent_rope", {}), ("llama", "latent", {"bits": 6}),
        ("llama", "latent", {"topk": 24}), ("llama", "latent_rope", {"topk": 24})]  # fmt: skip
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def answers(model, device):
    """Tokens and their logprobs; prompts in chunks, beside answers of others."""
    config = EngineConfig(
        device=device,
        dtype="float32",
        cache_bytes=1 << 22,
        block_size=16,
        max_model_len=128,
        max_num_batched_tokens=20,
        max_num_seqs=4,
    )
    engine = Engine(model, config)
    results: dict[str, list[tuple[int, float]]] = {}
    prompts = [[*range(3, 8)], [*range(60, 90)]]
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1))
    while engine.has_work:
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            for token, logprobs in zip(tokens, output.outputs[0].logprobs, strict=True):
                results.setdefault(output.request_id, []).append((token, logprobs.logprob))
    return results


@pytest.mark.parametrize(("family", "layout", "options"), CASES)
def test_prompts_on_a_gpu(family, layout, options, converted, sparse, request, monkeypatch):
    """Sparse layers read the whole prompt in its steps, and a selection in those of answers beside it."""
    model = (sparse if "topk" in options else converted)(family, layout, **options)
    up_projections = LatentAttention.up_projections

    def rounded(layer):
        """Weights as the kernels multiply integers with them."""
        w_uk, *others = up_projections(layer)
        if layer.coded is not None and not layer.rope_dim:
            scales = w_uk.abs().amax(-1, keepdim=True) / 127
            w_uk = (w_uk / scales).round() * scales
        return w_uk, *others

    with monkeypatch.context() as patch:
        patch.setattr(LatentAttention, "up_projections", rounded)
        expected = answers(model, "cpu")
    request.getfixturevalue("cuda")
    # One KV head and one block at a time.
    monkeypatch.setattr(latent_prompts, "WORKSPACE", 1)
    monkeypatch.setattr(latent_prompts, "STRETCH", 1)
    calls = []
    attend_prompt = latent_prompts.attend_prompt
    monkeypatch.setattr(
        "mlaforge.engine.execution.attention.attend_prompt", lambda *x: calls.append(1) or attend_prompt(*x)
    )
    actual = answers(model, "cuda")
    assert len(calls) >= 3
    for name, tokens in expected.items():
        assert [token for token, _ in actual[name]] == [token for token, _ in tokens]
        torch.testing.assert_close(
            torch.tensor([logprob for _, logprob in actual[name]]), torch.tensor([logprob for _, logprob in tokens]),
            atol=1e-3, rtol=1e-3,
        )  # fmt: skip
