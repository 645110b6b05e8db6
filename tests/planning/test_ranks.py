"""What a rank holds and exchanges, counted one by one: elements of every token and head, rows of every matrix."""

import dataclasses
from collections import Counter

import pytest

from mlaforge.checkpoint import loading, reader, source_model
from mlaforge.families import read_spec
from mlaforge.planning.arrangements import arrangements, largest
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.costs import GPUS
from mlaforge.planning.plan import make_plan, plan_of, unconverted
from mlaforge.planning.ranks import Ranks, divisions
from mlaforge.planning.report import run_plan
from mlaforge.planning.roofline import Row
from mlaforge.planning.selection import sparse
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin.heads import Heads
from support.configs import GPT_OSS, GPT_OSS_120B, LLAMA, SMOLLM2
from support.pairwise import pairwise

CONTEXT = 333
FORMS = {
    "gqa": unconverted,
    "gqa fp8": lambda spec: unconverted(spec, "fp8"),
    "gqa sparse": lambda spec: sparse(unconverted(spec), 64),
    "latent": lambda spec: make_plan(spec, 0.5, "latent", "full"),
    "latent_rope": lambda spec: make_plan(spec, 0.5, "latent_rope", "full"),
}


def heads_of(rank: int, ranks: Ranks, layer) -> tuple[set[int], set[int], set[int]]:
    """Query heads that a rank attends with, which are those of its group; the KV heads that they read; and the KV heads
    of the rank's share of query heads."""
    per_rank = layer.num_heads // ranks.tensor
    first = rank // ranks.context * ranks.context
    of_group = set(range(first * per_rank, (first + ranks.context) * per_rank))
    of_rank = range(rank * per_rank, (rank + 1) * per_rank)
    return of_group, {head // layer.group for head in of_group}, {head // layer.group for head in of_rank}


@pairwise(
    {"config": {"20b": GPT_OSS, "llama": LLAMA, "smollm2": SMOLLM2}, "form": FORMS, "gpus": [2, 3, 4, 8]},
    more=0,
)  # fmt: skip
def test_cache_of_a_rank(config, form, gpus):
    """Every element of every token that a rank with most tokens holds."""
    spec = read_spec(config)
    plan = form(spec)
    for ranks in divisions(spec, gpus):
        bytes_of_ranks = Counter()
        for rank in range(ranks.tensor):
            for layer, chosen in zip(spec.layers, plan.layers, strict=True):
                _, kv_heads, of_rank = heads_of(rank, ranks, layer)
                tokens = sum(position % ranks.context == rank % ranks.context for position in range(CONTEXT))
                if layer.window is not None:
                    # Every rank of a group holds all of the window, with its own heads.
                    tokens, kv_heads = min(CONTEXT, layer.window), of_rank
                elements = (
                    2 * len(kv_heads) * layer.head_dim
                    if chosen.layout == "gqa" else chosen.kv_lora_rank + chosen.qk_rope_head_dim
                )  # fmt: skip
                bytes_of_ranks[rank] += tokens * (elements * (1 if plan.stored == "fp8" else 2) + chosen.index)
        row = Row(plan, GPUS["h100"], CONTEXT, 1, 0, ranks=ranks)
        assert row.cache_bytes(1) == max(bytes_of_ranks.values())


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(4), Ranks(4, 2), Ranks(4, 4)], ids=lambda ranks: ranks.label)
def test_attention_weights_of_a_rank(layout, ranks, converted):
    """Numbers of the tensors that the plugin gives a rank; with groups also the keys of the others' heads."""
    raw = reader.read_config(converted("gpt_oss", layout))
    spec = source_model.read_spec(raw)
    skeleton = loading.skeleton(raw)
    plan, group = plan_of(raw, spec), ranks.context
    for index, (layer, chosen) in enumerate(zip(spec.layers, plan.layers, strict=True)):
        state = skeleton.model.layers[index].self_attn.state_dict()
        matrices = {
            name: tensor for name, tensor in state.items() if name.endswith("proj.weight") or "kv_a_proj" in name
        }
        matrices = {name: tensor for name, tensor in matrices.items() if tensor.ndim == 2}
        for rank in range(ranks.tensor):
            heads = Heads(raw["num_key_value_heads"], rank, ranks.tensor)
            count = sum(heads.share(name, tensor).numel() for name, tensor in matrices.items())
            _, of_group, of_rank = heads_of(rank, ranks, layer)
            others = 0 if layer.window else len(of_group) - len(of_rank)
            if chosen.layout == "gqa":
                count += others * 2 * layer.head_dim * spec.hidden_size
            elif chosen.layout == "latent":
                count += others * layer.head_dim * chosen.kv_lora_rank
            assert ranks.projections(spec, layer, chosen, 1).bytes * 8 / spec.bits == count, (index, rank, group)


def test_weights_and_steps_of_all_ranks_add_up():
    """What is divided is divided without a rest: without replicated parts ranks hold and compute the whole model."""
    spec = read_spec(GPT_OSS_120B)
    whole = Row(unconverted(spec), GPUS["h100"], 32768, 4, 3)
    for ranks in divisions(spec, 8):
        row = dataclasses.replace(whole, ranks=ranks)
        flops = {part: cost.flops for part, cost in row.verify.costs.items() if part != "exchange"}
        expected = {part: whole.verify.costs[part].flops / ranks.tensor for part in flops}
        if ranks.context == 1:
            assert row.weight_bytes * ranks.tensor == pytest.approx(whole.weight_bytes)
            assert flops == pytest.approx(expected)
        else:
            # Only the keys and values of new tokens are computed on every rank of a group.
            assert row.weight_bytes * ranks.tensor > whole.weight_bytes
            assert flops["attention"] == pytest.approx(expected["attention"], rel=1e-3)
            assert flops["projections"] > expected["projections"]


def test_exchanged_bytes():
    """Two ranks that send half of every sum twice: of hidden states after the embedding and twice a layer, and half of
    the logits once. In a group of two a rank sends its queries and the other's outputs."""
    spec = read_spec(SMOLLM2)
    heads = dataclasses.replace(spec, layers=tuple(dataclasses.replace(la, num_kv_heads=3) for la in spec.layers))
    sums, logits = 1 + 2 * 30, spec.vocab_size / 3
    three = Ranks(3).exchanged_bytes(unconverted(heads), 5)
    assert three == pytest.approx(5 * 2 * (2 * 2 / 3 * 576 * sums + 2 * logits))
    grouped = Ranks(3, 3).exchanged_bytes(unconverted(heads), 5)
    assert grouped - three == pytest.approx(5 * 2 * 30 * 2 * 3 * (64 + 64))
    rope = make_plan(spec, 0.5, "latent_rope", "all", 128, 32)
    added = Ranks(3, 3).exchanged_bytes(rope, 5) - Ranks(3).exchanged_bytes(rope, 5)
    assert added == pytest.approx(5 * 2 * 30 * 2 * 3 * (160 + 128))


def test_the_report_names_the_largest_arrangement():
    """A latent is divided by tokens only, GQA by heads: of eight GPUs the converted model wants CP 8, GQA TP 8."""
    options = PlanConfig(
        context="32k", gpu="h100", tensor_parallel=8, context_parallel=4, layout="latent_rope", kv_lora_rank=512
    )
    report = run_plan(read_spec(GPT_OSS_120B), options)
    assert report.requested is not None and largest(report.requested, 8).row.ranks == Ranks(8, 8)
    assert largest(report.rows[0], 8).row.ranks == Ranks(8)
    entries = report.as_dict()["arrangements"]
    requested = [entry for entry in entries if entry["configuration"] == report.requested.label]
    assert len(requested) == len(arrangements(report.requested, 8)) == 10
    most = max(requested, key=lambda entry: entry["requests"])
    assert (most["tensor_parallel"], most["context_parallel"]) == (8, 8)
    text = report.render()
    assert f"8 h100 hold most requests of {report.requested.label} as TP 8, CP 8: {most['requests']:,}" in text
    assert "Arrangements of 8 GPUs" in text and "8 h100 (TP 8, CP 4)" in text
    row = next(entry for entry in requested if (entry["tensor_parallel"], entry["context_parallel"]) == (8, 4))
    assert row["requests"] == report.requested.requests
    one = dataclasses.replace(report.requested, ranks=Ranks())
    assert one.requests * 8 == next(entry for entry in requested if entry["replicas"] == 8)["requests"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 8, "context_parallel": 3}, "context_parallel 3 must divide tensor_parallel 8"),
        ({"tensor_parallel": 5}, "4 query and 2 KV heads cannot be divided among TP 5; of 8 GPUs: TP 1; TP 2; "),
    ],
)  # fmt: skip
def test_impossible_divisions_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        run_plan(read_spec(LLAMA), PlanConfig(gpu="h100", **options))


def test_a_cpu_has_no_ranks(cpu):
    with pytest.raises(UserError, match="name one, such as --gpu h100"):
        run_plan(read_spec(LLAMA), PlanConfig(tensor_parallel=2), gpu=cpu)


def test_windows_are_not_divided():
    """Where all layers have one, context parallelism divides nothing."""
    spec = read_spec(LLAMA)
    slides = dataclasses.replace(spec, layers=tuple(dataclasses.replace(layer, window=128) for layer in spec.layers))
    assert "every layer has a sliding window" in Ranks(2, 2).refusal(slides)
    assert not Ranks(2).refusal(slides) and not Ranks(2, 2).refusal(spec)
