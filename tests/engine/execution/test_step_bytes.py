"""Bytes that steps read, compared with the tensors in memory and with the plan."""

import math

import pytest
import torch

from mlaforge.engine.execution.linear import BITS
from mlaforge.planning.costs import attention_op
from mlaforge.planning.plan import plan_of
from support.engine_driver import greedy, random_prompts, watched
from support.speculating import CASES, SMALL, partly
from support.tiny_models import load_original, save_packed


@pytest.fixture(params=[*CASES, ("llama", "latent_rope")], ids=str)
def llm(request, tiny_models, converted):
    family, layout = request.param
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    return watched(directory, cache_bytes=8 << 20)


def test_the_cache_is_read_as_the_plan_says(llm):
    """Layer by layer, rows of fp32."""
    spec = llm.engine.model.spec
    plan = plan_of(llm.engine.model.config.to_dict(), spec)
    for length in (1, 5, 40, 400):
        layers = zip(spec.layers, plan.layers, strict=True)
        expected = sum(attention_op(layer, chosen, length, stored="fp32").bytes for layer, chosen in layers)
        assert llm.engine.step_bytes([(1, length, length)]).cache == expected
        assert llm.engine.step_bytes([(1, length, length)] * 3).cache == 3 * expected


def test_weights_are_all_matrices_once(tiny_models):
    """But for the embedding, of which a step reads a row for each token."""
    for family in ("llama", "qwen3"):
        engine, oracle = watched(tiny_models[family]).engine, load_original(tiny_models[family])
        layers = sum(p.numel() for p in oracle.model.layers.parameters() if p.dim() > 1)
        expected = 4 * (layers + oracle.lm_head.weight.numel())
        for rows in (1, 7):
            assert engine.step_bytes([(rows, rows, rows)]).weights == expected
    # Of experts those that so many tokens may choose.
    engine, oracle = watched(tiny_models["gpt_oss"]).engine, load_original(tiny_models["gpt_oss"])
    every = 4 * sum(p.numel() for name, p in oracle.named_parameters() if "experts" in name and p.dim() > 2)
    few, all_of_them = (engine.step_bytes([(rows, rows, rows)]).weights for rows in (1, 10_000))
    moe = engine.model.spec.layers[0].moe
    assert all_of_them - few == pytest.approx(every * (1 - moe.top_k / moe.num_experts))


def test_packed_experts_are_read_as_they_are_stored(tiny_models, tmp_path):
    oracle = load_original(tiny_models["gpt_oss"])
    plain = watched(tiny_models["gpt_oss"]).engine
    packed = watched(save_packed(tiny_models["gpt_oss"], tmp_path / "packed", torch.float32)).engine
    one = sum(layer.mlp.experts.gate_up_proj[0].numel() + layer.mlp.experts.down_proj[0].numel()
              for layer in oracle.model.layers)  # fmt: skip
    touched = oracle.config.num_experts_per_tok
    saved = plain.step_bytes([(1, 1, 1)]).weights - packed.step_bytes([(1, 1, 1)]).weights
    assert saved == pytest.approx(touched * one * (4 - 4.25 / 8))


def test_sparse_view_steps_read_a_part(tiny_models):
    """What is counted of them, from what ran."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative="ngram")
    engine, (prompt,) = llm.engine, random_prompts(300)
    partial = partly(engine, engine.speculation.drafter, dtype="int8").sparse_view
    ran = []
    runner = partial.runner
    partial.runner = lambda batch: ran.append(batch) or runner(batch)
    before = engine.stats()
    llm.generate([prompt], greedy(20))
    stats, now = engine.stats().speculation, engine.stats()
    spec = engine.model.spec
    row = sum(2 * layer.num_kv_heads * layer.head_dim * 2 for layer in spec.layers)
    assert len(ran) == stats.sparse_steps > 2
    assert stats.sparse_bytes.cache == row * sum(batch.sparse_views[0].counts[0] for batch in ran)
    assert max(batch.sparse_views[0].counts[0] for batch in ran) < 16 + 32 + 32 + SMALL.max_provisional * 3
    assert stats.sparse_bytes.weights * BITS["bfloat16"] == pytest.approx(
        len(ran) * engine.step_bytes([(1, 1, 1)]).weights * BITS["int8"]
    )
    # The prompt's own step, and full ones.
    assert (
        now.weight_bytes_read - before.weight_bytes_read
        == stats.sparse_bytes.weights + (now.steps - before.steps) * engine.step_bytes([(1, 1, 1)]).weights
    )
    assert stats.full_bytes.cache > stats.steps * row * len(prompt) and stats.bytes_tokens == 19
    assert stats.block()["mean_pending_length"] == stats.provisional / stats.full_steps
    per_token = stats.block()["bytes_per_token"]
    assert per_token["partial"] == {
        "weights": stats.sparse_bytes.weights / 19,
        "cache": stats.sparse_bytes.cache / 19,
    }
    assert per_token["full"]["cache"] == stats.full_bytes.cache / 19 and math.isfinite(per_token["full"]["weights"])
