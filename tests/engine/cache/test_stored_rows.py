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
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats import row_format
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.planning.plan import LayerPlan, Plan
from mlaforge.runtime import UserError
from support.drafters import Branching, Knowing
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, renew, watched
from support.paged_steps import need_interpreter
from support.speculating import speculate
from support.tiny_models import load_original

# Of both lengths of a window, and of blocks.
PROMPTS = random_prompts(100, 40, 7, 230, seed=4)
NEW = 10
CASES = [
    ("llama", None, "fp8"), ("mistral", None, "bf16"), ("gpt_oss", None, "int4"), ("mistral", "latent_rope", "int8"),
    ("qwen3", "latent", "coded"), ("gpt_oss", "latent_rope", "coded"),
]  # fmt: skip
MORE = [
    ("llama", None, "int8"), ("gpt_oss", None, "int8"), ("llama", None, "int4"), ("qwen3", "latent", "int8"),
    ("gpt_oss", "latent_rope", "int8"), ("mistral", "latent", "coded"),
]  # fmt: skip
EVERY = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
# Coded rows are transformers' own too.
ROUNDED = [case for case in CASES if case[2] != "coded"]
ROUNDED += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case[2] != "coded"]


@pytest.fixture(scope="module")
def model(tiny_models, converted):
    """(family, layout, stored) -> a tiny model."""

    def get(family, layout, stored=None):
        if layout is None:
            return tiny_models[family]
        kept = {"bits": 5} if stored == "coded" else {"budget": 0.75}
        return converted(family, layout, **kept, layers="all" if family == "mistral" else "auto")

    return get


def results(outputs):
    """Tokens, and log probabilities as they are."""
    return [
        (each.outputs[0].token_ids, [(entry.logprob, entry.top) for entry in each.outputs[0].logprobs])
        for each in outputs
    ]


ASKED = greedy(NEW, logprobs=2)


@pytest.mark.skipif(kernels() is None, reason="torch's products depend on what is computed beside")
@pytest.mark.parametrize(("family", "layout", "stored"), EVERY, ids=str)
def test_result_does_not_depend_on_schedule(family, layout, stored, model):
    """Alone and in batches, in chunks of any size, with found prefixes, preempted, and speculating."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": stored, "cache_bytes": 4 << 20}
    directory = model(family, layout, stored)
    llm = watched(directory, **options, max_num_seqs=1, prefix_caching=False)
    alone = results(llm.generate(PROMPTS, ASKED))
    plain = watched(directory, **{**options, "kv_cache_dtype": "bf16"}, max_num_seqs=1)
    assert stored == "bf16" or results(plain.generate(PROMPTS, ASKED)) != alone, "rounding changes something"

    llm = watched(directory, **options, max_num_batched_tokens=37, max_num_seqs=4)
    for turn in range(2):
        assert results(llm.generate(PROMPTS, ASKED)) == alone
        assert (llm.engine.stats().cached_prompt_tokens > 300) == (turn > 0)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True)]
    for drafter in (PromptLookupDrafter(), Knowing(texts, 0.8)):
        speculate(llm.engine, drafter, 5)
        assert results(llm.generate(PROMPTS, ASKED)) == alone
    assert llm.engine.stats().speculation.accepted
    if not any(group.newest_unquantized for group in llm.engine.tables.groups):
        speculate(llm.engine, Branching(texts, 0.8), 6, tree=12)
        assert results(llm.generate(PROMPTS[:1], ASKED)) == alone[:1]
        assert llm.engine.stats().speculation.tree_tokens
    idle(llm.engine)

    llm = watched(directory, **options)
    size = llm.engine.config.block_size
    renew(llm.engine, 2, 230 + NEW, block_size=size, max_step=64, num_unquantized=6)
    assert results(llm.generate(PROMPTS, ASKED)) == alone
    assert llm.engine.stats().preemptions > 0
    idle(llm.engine)


class RoundTrip(DynamicCache):
    """A cache of transformers' whose rows went through a format: what comes is read as it was stored, or, where the
    newest block is whole, as a block of its own, of bf16, which is packed for those after it."""

    def __init__(self, stored, config):
        super().__init__()
        self.stored, self.kinds = stored, getattr(config, "mla_layer_types", None)
        self.ranks, self.packed = getattr(config, "mla_kv_lora_ranks", None), {}

    def update(self, keys, values, layer, *rest, **more):
        """[1, G, T, D] each: keys and values; or whole rows of a latent, and values without numbers."""
        super().update(keys, values, layer, *rest, **more)
        read = self.through(keys, values, layer)
        old = self.packed.get(layer, [x[:, :, :0] for x in read])
        self.packed[layer] = [torch.cat(pair, dim=2) for pair in zip(old, read, strict=True)]
        if self.stored != "int4":
            return self.packed[layer]
        return [torch.cat((x, new.bfloat16().float()), dim=2) for x, new in zip(old, (keys, values), strict=True)]

    def through(self, keys, values, layer):
        parts = [keys.shape[3]] * (2 * keys.shape[1])
        if self.kinds and self.kinds[layer] != "gqa":
            parts = [n for n in (self.ranks[layer], keys.shape[3] - self.ranks[layer]) if n]
        form = row_format(self.stored, parts, torch.float32)
        row = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (keys, values)], dim=1)
        rows = form.empty(-(-len(row) // form.tokens), row.device)
        units = torch.arange(len(rows))
        form.write(rows, units, torch.nn.functional.pad(row, (0, 0, 0, -len(row) % form.tokens)))
        read = (
            form.read(rows, units)[: len(row)].to(row).split([x.shape[1] * x.shape[3] for x in (keys, values)], dim=1)
        )
        return [x.view(len(x), *y.shape[1::2]).transpose(0, 1)[None] for x, y in zip(read, (keys, values), strict=True)]


@pytest.mark.parametrize(("family", "layout", "stored"), ROUNDED, ids=str)
@torch.no_grad()
def test_tokens_equal_transformers_with_rounded_rows(family, layout, stored, model):
    """In fp32. A number that lies between two codes may fall to either side, so few may differ by more."""
    directory, ids = model(family, layout), PROMPTS[0]
    oracle = loading.load_model(directory, "float32") if layout else load_original(directory)
    cache, step = RoundTrip(stored, oracle.config), 32 if stored == "int4" else len(ids)
    chunks = torch.tensor([ids]).split(step, dim=1)
    want = torch.cat([oracle(each, past_key_values=cache).logits[0] for each in chunks]).log_softmax(-1)
    unrounded = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)

    compare(watched(directory, kv_cache_dtype=stored), ids, want, unrounded)


@pytest.mark.parametrize(("family", "layout"), [case[:2] for case in CASES if case[2] == "coded"], ids=str)
@torch.no_grad()
def test_coded_rows_equal_those_of_transformers(family, layout, model):
    directory, ids = model(family, layout, "coded"), PROMPTS[0]
    oracle = loading.load_model(directory, "float32")
    want = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    for layer in oracle.model.layers:
        layer.self_attn.coded = None
    unrounded = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    compare(watched(directory), ids, want, unrounded)


def compare(llm, ids, want, unrounded):
    """Log probabilities [T, vocabulary] of an engine with those of an oracle, and with what nobody rounded."""
    asks = SamplingParams(max_tokens=0, prompt_logprobs=want.shape[1])
    outputs_found = llm.generate([ids], asks)[0].prompt_logprobs[1:]
    got = torch.tensor([[value for _, value in sorted(entry.top)] for entry in outputs_found])
    error, rounding = (got - want[:-1]).abs(), (unrounded - want)[:-1].abs()
    print(f"mean {error.mean():.2e} of {rounding.mean():.2e}, largest {error.max():.2e}")
    assert error.mean() < 0.05 * rounding.mean() and error.max() < rounding.max()


@pytest.mark.parametrize("layout", [None, "latent_rope"])
def test_gpu_kernel_reads_fp8_rows_in_place(layout, model, monkeypatch):
    """In Triton's interpreter: the tokens of decoded rows; a graph could hold such steps."""
    need_interpreter()
    decoded = watched(model("llama", layout), kv_cache_dtype="fp8").generate(PROMPTS[2:3], greedy(4))
    monkeypatch.setattr(PagedRows, "direct", property(lambda rows: isinstance(rows.format, Plain)))
    monkeypatch.setenv("MLAFORGE_OPS", "paged_attention=triton")
    llm = watched(model("llama", layout), kv_cache_dtype="fp8")
    batches, run = [], llm.engine.runner
    monkeypatch.setattr(llm.engine, "runner", lambda batch: (batches.append(batch), run(batch))[1])
    outputs_found = llm.generate(PROMPTS[2:3], greedy(4))
    assert outputs_found[0].outputs[0].token_ids == decoded[0].outputs[0].token_ids
    assert run.capturable(batches[-1])


# Bytes


def planned(engine, stored):
    """The plan that the engine's model is."""
    config, spec = engine.model.config, engine.model.spec
    kinds = getattr(config, "mla_layer_types", ["gqa"] * spec.num_layers)
    ropes = [config.qk_rope_head_dim if kind == "latent_rope" else 0 for kind in kinds]
    ranks = [0 if kind == "gqa" else config.mla_kv_lora_ranks[i] for i, kind in enumerate(kinds)]
    codes = [tuple(code) for code in getattr(config, "mla_code_counts", None) or [()] * spec.num_layers]
    return Plan(spec, tuple(map(LayerPlan, kinds, ranks, ropes, codes)), stored)


ROWS = [(layout, stored) for layout in (None, "latent_rope", "latent") for stored in ("bf16", "fp8", "int8")]


@pytest.mark.parametrize(
    ("family", "layout", "stored"),
    # A row's bytes depend on layout and format; the family, whose heads have the same size, on neither.
    [
        *((("qwen2", "llama")[number % 2], *row) for number, row in enumerate(ROWS)),
        ("llama", None, "int4"), ("llama", "latent", "coded"), ("llama", "latent_rope", "coded"),
    ],
    ids=str,
)  # fmt: skip
def test_plan_predicts_cache_bytes(family, layout, stored, model):
    llm = watched(model(family, layout, stored), kv_cache_dtype=stored)
    engine, ids = llm.engine, random_prompts(192)[0]
    engine.tables.start(0, ids)
    for length in (64, 192):
        engine.tables.reserve(0, length)
        engine.tables.commit(0, ids, length)
        assert engine.stats().cache_bytes_used == planned(engine, stored).cache_bytes(length)
    plan = planned(engine, stored)
    planned_rows = [chosen.rows(layer, stored) for chosen, layer in zip(plan.layers, plan.spec.layers, strict=True)]
    assert planned_rows == [layer.format for layer in engine.cache.layers]
    engine.tables.free(0)
    assert engine.stats().cache_bytes == sum(tensor.nbytes for tensor in engine.cache.tensors)


def test_draft_head_rows_are_not_quantized(tiny_models, tmp_path):
    engine = watched(tiny_models["llama"], kv_cache_dtype="int8", speculative=str(saved(tmp_path / "head"))).engine
    assert {rows.packed.dtype for rows in engine.cache.rows[:-1]} == {torch.uint8}
    assert engine.cache.rows[-1].packed.dtype == torch.float32


# What cannot be


def refused(directory, message, **options):
    with pytest.raises(UserError, match=rf"^{message}$"):
        Engine(directory, EngineConfig(device="cpu", **options))


def on_a_gpu(monkeypatch, *capability):
    """An engine is refused as if this machine had such a GPU."""
    monkeypatch.setattr("mlaforge.engine.builder.resolve_device", lambda name: torch.device("cuda"))
    gpu = GpuProperties.of_capability(*capability)
    monkeypatch.setattr("mlaforge.engine.config_checks.gpu_properties", lambda device: gpu)


def test_rejects_blocks_of_int4_on_gpus(tiny_models, monkeypatch):
    on_a_gpu(monkeypatch, 9, 0)
    message = "kv_cache_dtype int4 is for CPUs, because .*; use int8 on this GPU"
    refused(tiny_models["llama"], message, kv_cache_dtype="int4")


def test_rejects_int8_latents_on_gpus(converted, cuda):
    message = "kv_cache_dtype int8 is for grouped-query layers on a GPU, not for latents; use auto or fp8"
    with pytest.raises(UserError, match=f"^{message}$"):
        Engine(converted("llama", "latent_rope"), EngineConfig(device="cuda", kv_cache_dtype="int8"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_fp8_rows_need_a_gpu_that_converts_them(capability, tiny_models, monkeypatch):
    on_a_gpu(monkeypatch, *capability)
    major, minor = capability
    message = f"kv_cache_dtype fp8: float8_e4m3fn needs compute capability 8.9, this GPU has {major}.{minor}; use bf16"
    refused(tiny_models["llama"], message, kv_cache_dtype="fp8")


def test_rejects_unsupported_uses_of_int4(tiny_models, model, tmp_path):
    llama, int4 = tiny_models["llama"], {"kv_cache_dtype": "int4"}
    refused(
        llama, "block_size = 16 must be 32, the tokens that kv_cache_dtype int4 packs together", block_size=16, **int4
    )
    with_trees = {"speculative": str(saved(tmp_path / "head")), "speculative_tree_tokens": 8}
    trees = "kv_cache_dtype int4 packs one text's tokens together; speculative_tree_tokens must be 0, a chain"
    refused(llama, trees, **with_trees, **int4)
    for layout in ("latent", "latent_rope"):
        message = rf"kv_cache_dtype int4 is for grouped-query layers; layer \d is {layout}: use int8"
        refused(model("llama", layout), message, **int4)


def test_rejects_dtypes_of_coded_rows(model):
    coded = model("llama", "latent", "coded")
    for stored in ("int8", "fp8", "int4"):
        refused(coded, f"kv_cache_dtype {stored} is not for coded rows; use auto, coded or bf16", kv_cache_dtype=stored)
    message = "kv_cache_dtype coded is for models that were converted with --bits; use auto"
    refused(model("llama", "latent"), message, kv_cache_dtype="coded")
    assert watched(coded).engine.cache.rows[0].packed.dtype == torch.uint8


def test_rejects_unknown_cache_dtype(tiny_models):
    message = "kv_cache_dtype = 'int9' must be one of auto, bf16, fp8, int8, int4, coded.*"
    refused(tiny_models["llama"], message, kv_cache_dtype="int9")
