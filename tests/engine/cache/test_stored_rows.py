"""Engines whose cache stores rows in other formats than the model's dtype: a request's result is the same to the bit
however it is run, it is what transformers gives with keys and values that went through the format, and bytes are what
the plan says."""

import pytest
import torch
from transformers import DynamicCache

from mlaforge.checkpoint import loading
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import NgramDrafter
from mlaforge.ops.native import kernels
from mlaforge.ops.row_format import row_format
from mlaforge.planning.plan import LayerPlan, Plan
from mlaforge.runtime import UserError
from support.drafters import Branching, Knowing
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, renew, watched
from support.speculating import branch, speculate
from support.tiny_models import load_original

# Of both lengths of a window, and of blocks.
PROMPTS = random_prompts(100, 40, 7, 230, seed=4)
NEW = 20
CASES = [
    ("llama", None, "int8"), ("llama", None, "fp8"), ("gpt_oss", None, "int8"), ("mistral", None, "bf16"),
    ("qwen3", "latent", "int8"), ("mistral", "latent_rope", "int8"), ("gpt_oss", "latent_rope", "int8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_models, converted):
    """(family, layout) -> a tiny model."""
    return lambda family, layout: (
        converted(family, layout, budget=0.75, layers="all" if family == "mistral" else "auto")
        if layout
        else tiny_models[family]
    )


def results(outputs):
    """Tokens, and log probabilities as they are."""
    return [
        (each.outputs[0].token_ids, [(entry.logprob, entry.top) for entry in each.outputs[0].logprobs])
        for each in outputs
    ]


ASKED = greedy(NEW, logprobs=2)


@pytest.mark.skipif(kernels() is None, reason="torch's products depend on what is computed beside")
@pytest.mark.parametrize(("family", "layout", "stored"), CASES, ids=str)
def test_a_request_has_one_result(family, layout, stored, model):
    """Alone and in batches, in chunks of any size, with found prefixes, preempted, and speculating."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": stored, "cache_bytes": 4 << 20}
    llm = watched(model(family, layout), **options, max_num_seqs=1, prefix_caching=False)
    alone = results(llm.generate(PROMPTS, ASKED))
    plain = watched(model(family, layout), **{**options, "kv_cache_dtype": "auto"}, max_num_seqs=1)
    assert stored == "bf16" or results(plain.generate(PROMPTS, ASKED)) != alone, "rounding changes something"

    llm = watched(model(family, layout), **options, max_num_batched_tokens=37, max_num_seqs=4)
    for turn in range(2):
        assert results(llm.generate(PROMPTS, ASKED)) == alone
        assert (llm.engine.stats().cached_prompt_tokens > 300) == (turn > 0)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True)]
    for drafter in (NgramDrafter(), Knowing(texts, 0.8)):
        speculate(llm.engine, drafter, 5)
        assert results(llm.generate(PROMPTS, ASKED)) == alone
    assert llm.engine.stats().speculation.accepted
    if stored != "int4":
        branch(llm.engine, Branching(texts, 0.8), 6, tree=12)
        assert results(llm.generate(PROMPTS[:1], ASKED)) == alone[:1]
        assert llm.engine.stats().speculation.tree_tokens
    idle(llm.engine)

    llm = watched(model(family, layout), **options)
    size = llm.engine.config.block_size
    renew(llm.engine, 2, 230 + NEW, block_size=size, max_step=64)
    assert results(llm.generate(PROMPTS, ASKED)) == alone
    assert llm.engine.stats().preemptions > 0
    idle(llm.engine)


class RoundTrip(DynamicCache):
    """A cache of transformers' whose rows went through a format. `parts` -> format."""

    def __init__(self, stored: str):
        super().__init__()
        self.stored = stored

    def update(self, keys, values, layer, *rest, **more):
        """[1, G, T, D] each: keys and values; or a latent row whole (values then have no numbers)."""
        both = [x[0].transpose(0, 1).flatten(1) for x in (keys, values)]
        parts = self.parts(keys, values, layer)
        form = row_format(self.stored, parts, torch.float32)
        row = torch.cat(both, dim=1)
        rows, units = form.empty(len(row), row.device), torch.arange(len(row))
        form.write(rows, units, row)
        read = form.read(rows, units).to(row).split([part.shape[1] for part in both], dim=1)
        shaped = [x.view(x.shape[0], -1, y.shape[3]).transpose(0, 1)[None] if y.shape[3] else y
                  for x, y in zip(read, (keys, values), strict=True)]  # fmt: skip
        return super().update(*shaped, layer, *rest, **more)

    def parts(self, keys, values, layer):
        return [keys.shape[3]] * (2 * keys.shape[1])


class LatentRoundTrip(RoundTrip):
    def __init__(self, stored, config):
        super().__init__(stored)
        self.config = config

    def parts(self, keys, values, layer):
        if self.config.mla_layer_types[layer] == "gqa":
            return super().parts(keys, values, layer)
        rank = self.config.mla_kv_lora_ranks[layer]
        return [rank, keys.shape[3] - rank] if keys.shape[3] > rank else [rank]


@pytest.mark.parametrize(("family", "layout", "stored"), CASES, ids=str)
@torch.no_grad()
def test_it_is_transformers_with_rounded_rows(family, layout, stored, model):
    """In fp32. A number that lies between two codes may fall to either side, so few may differ by more."""
    directory, ids = model(family, layout), PROMPTS[0]
    oracle = loading.load_model(directory, "float32") if layout else load_original(directory)
    cache = LatentRoundTrip(stored, oracle.config) if layout else RoundTrip(stored)
    want = oracle(torch.tensor([ids]), past_key_values=cache).logits[0].log_softmax(-1)
    unrounded = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)

    llm = watched(directory, kv_cache_dtype=stored)
    asks = SamplingParams(max_tokens=0, prompt_logprobs=want.shape[1])
    found = llm.generate([ids], asks)[0].prompt_logprobs[1:]
    got = torch.tensor([[value for _, value in sorted(entry.top)] for entry in found])
    error, rounding = (got - want[:-1]).abs(), (unrounded - want)[:-1].abs()
    print(f"mean {error.mean():.2e} of {rounding.mean():.2e}, largest {error.max():.2e}")
    assert error.mean() < 0.05 * rounding.mean() and error.max() < rounding.max()


# Bytes


def planned(engine, stored):
    """The plan that the engine's model is."""
    config, spec = engine.model.config, engine.model.spec
    kinds = getattr(config, "mla_layer_types", ["gqa"] * spec.num_layers)
    ropes = [config.qk_rope_head_dim if kind == "latent_rope" else 0 for kind in kinds]
    ranks = [0 if kind == "gqa" else config.mla_kv_lora_ranks[i] for i, kind in enumerate(kinds)]
    return Plan(spec, tuple(map(LayerPlan, kinds, ranks, ropes)), stored)


@pytest.mark.parametrize("stored", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(("family", "layout"), [("qwen2", None), ("llama", "latent_rope"), ("qwen2", "latent")])
def test_the_plan_counts_the_bytes(family, layout, stored, model):
    llm = watched(model(family, layout), kv_cache_dtype=stored)
    engine, ids = llm.engine, random_prompts(192)[0]
    engine.tables.start(0, ids)
    for length in (64, 192):
        engine.tables.reserve(0, length)
        engine.tables.commit(0, ids, length)
        assert engine.stats().cache_bytes_used == planned(engine, stored).cache_bytes(length)
    engine.tables.free(0)
    assert engine.stats().cache_bytes == sum(tensor.nbytes for tensor in engine.cache.tensors)


def test_a_head_keeps_its_rows_as_they_are(tiny_models, tmp_path):
    engine = watched(tiny_models["llama"], kv_cache_dtype="int8", speculative=str(saved(tmp_path / "head"))).engine
    assert {rows.packed.dtype for rows in engine.cache.rows[:-1]} == {torch.uint8}
    assert engine.cache.rows[-1].packed.dtype == torch.float32


# What cannot be


def test_int8_is_for_cpus(tiny_models, monkeypatch):
    monkeypatch.setattr("mlaforge.engine.engine.resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(UserError, match=r"^kv_cache_dtype int8 is for CPUs; use fp8 on a GPU$"):
        Engine(tiny_models["llama"], EngineConfig(kv_cache_dtype="int8"))
