"""Context parallelism of the vLLM plugin, without vLLM: ranks are threads (test_vllm_shards.py has vLLM's)."""

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.checkpoint import loading, reader
from mlaforge.checkpoint.source_model import read_spec
from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.kv_cache import layer_caches
from mlaforge.engine.execution.attention import Step
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.modeling.attention_mla import attend, sink_share
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin import shards
from mlaforge.vllm_plugin.heads import Heads
from mlaforge.vllm_plugin.shards import (
    Shard,
    ShardedGroupedQueryAttention,
    ShardedLatentAttention,
    corrected,
    sharded_batch,
)

BLOCK = 16
# Steps of three sequences: [start, stop) of each that computes. Ranks have no row at first, then none of a sequence;
# chunks, single tokens and several drafted ones follow.
STEPS = (
    {0: (0, 1)},
    {0: (1, 2), 1: (0, 20)},
    {1: (20, 37), 2: (0, 2)},
    {0: (2, 3), 1: (37, 38), 2: (2, 6)},
    {0: (3, 9), 2: (6, 7)},
)
LENGTHS = (9, 38, 7)


@given(st.integers(0, 200), st.integers(1, 8))
def test_every_token_is_on_one_rank(tokens, size):
    """Rows of all ranks are the tokens, each at its position and at no other."""
    shards = [Shard(rank, size) for rank in range(size)]
    positions = [shard.positions(shard.count(tokens), "cpu").tolist() for shard in shards]
    assert sorted(itertools.chain(*positions)) == list(range(tokens))
    assert all(at % size == rank for rank, of_rank in enumerate(positions) for at in of_rank)
    assert all(of_rank == sorted(of_rank) for of_rank in positions)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_merged_attention_is_attention_over_all_rows(length, size, seed):
    """Ranks without a row included; a sink takes its share once."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 4, n, 8, generator=generator).double() for n in (3, length, length))
    sinks = torch.randn(4, generator=generator).double()
    visible = torch.arange(length) <= torch.arange(length - 3, length)[:, None]
    whole, lse = attend(q, k, v, visible[None, None], 0.3)
    outs, lses = [], []
    for rank in range(size):
        at = Shard(rank, size).positions(Shard(rank, size).count(length), "cpu")
        out, part = (
            attend(q, k[:, :, at], v[:, :, at], visible[None, None, :, at], 0.3) if len(at)
            else (torch.zeros_like(q), torch.full((1, 4, 3), -torch.inf))
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(part[0].T)
    parts = [corrected(out, torch.stack(lses), rank) for rank, out in enumerate(outs)]
    total, merged = sum(out for out, _ in parts).transpose(0, 1)[None], parts[0][1].T[None]
    torch.testing.assert_close(merged, lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-5)
    taken = [share(state, sinks)[..., None] for state, share in ((merged, sink_share), (lse, sink_share))]
    torch.testing.assert_close(total * taken[0], whole * taken[1], atol=1e-5, rtol=1e-5)


class Ranks:
    """The exchange of `size` threads."""

    def __init__(self, size):
        self.size, self.sent, self.barrier = size, [None] * size, threading.Barrier(size, timeout=60)

    def all(self, rank, tensor):
        self.sent[rank] = tensor
        self.barrier.wait()
        sent = list(self.sent)
        self.barrier.wait()
        return sent


def run(task, groups):
    """What the task returns for each rank of these groups."""
    count = sum(group.size for group in groups)
    results, errors = [None] * count, []

    def work(rank):
        try:
            results[rank] = task(rank)
        except Exception as error:
            errors.append(error)
            for group in groups:
                group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@dataclasses.dataclass
class Exchange:
    ranks: Ranks
    rank: int

    def gather(self, q_NHD):
        return torch.cat(self.ranks.all(self.rank, q_NHD), dim=1)

    def merge(self, out_NJV, lse_NJ):
        out, lse = corrected(out_NJV, torch.stack(self.ranks.all(self.rank, lse_NJ)), self.rank)
        heads = slice(self.rank * (H := out.shape[1] // self.ranks.size), (self.rank + 1) * H)
        return sum(self.ranks.all(self.rank, out))[:, heads], lse[:, heads]


class Tables:
    """Blocks of three sequences, not in order; block 0 is nobody's."""

    block_size, groups = BLOCK, (CacheGroup("rows", 0, None),)
    blocks = ([5], [7, 2, 3], [4])

    def __init__(self, rows):
        self.rows = rows

    def table(self, seq, group):
        return 0, self.blocks[seq][: -(-self.rows[seq] // BLOCK)]


def heads_of_ranks(raw, ranks, size):
    """The heads of so many ranks in groups of `size`, and their models without weights."""
    heads = [Heads(raw["num_key_value_heads"], number, ranks, size, grouped=True) for number in range(ranks)]
    return [(of_rank, loading.skeleton(of_rank.config(raw))) for of_rank in heads]


def outputs(model, raw, index, of_ranks, size, hidden, shard=Shard):
    """A layer's output for three sequences, [N, C] in the order of STEPS, by all ranks, added up."""
    spec = read_spec(raw).layers[index]
    groups = [Ranks(size) for _ in range(len(of_ranks) // size)]
    state = model.model.layers[index].self_attn.state_dict()

    def of_rank(number):
        (heads, skeleton), rank = of_ranks[number], number % size
        rotary = type(skeleton.model.rotary_emb)(skeleton.config)
        module = skeleton.model.layers[index].self_attn
        if hasattr(module, "table"):
            module.table.rotary = rotary
        module.load_state_dict({name: heads.share(name, tensor) for name, tensor in state.items()}, assign=True)
        cached = dataclasses.replace(spec, num_kv_heads=heads.num_kv_heads // heads.kv_parts)
        all_spec = read_spec(raw)
        layers = tuple(cached if at == index else other for at, other in enumerate(all_spec.layers))
        layer = layer_caches(dataclasses.replace(all_spec, layers=layers), skeleton.config, torch.float32)[0][index]
        rows = PagedRows.empty(layer.format, 8 * BLOCK, torch.float32, torch.device("cpu"))
        sharded = (
            ShardedGroupedQueryAttention(module, 0, rows, spec.sinks, "float32") if layer.kind == "gqa"
            else ShardedLatentAttention(module, 0, rows, "float32", heads.kv_slice)
        )  # fmt: skip
        sharded.exchange = Exchange(groups[number // size], rank)
        angles, at = RotaryEmbedding(rotary, spec.head_dim, torch.float32), shard(rank, size)
        outs = []
        for step in STEPS:
            spans = [(seq, *span) for seq, span in step.items()]
            slots = [
                (Tables.blocks[seq][p // size // BLOCK] * BLOCK + p // size % BLOCK) if p % size == rank else -1
                for seq, start, stop in spans for p in range(start, stop)
            ]  # fmt: skip
            tables = Tables({seq: Shard(rank, size).count(stop) for seq, _, stop in spans})
            batch = sharded_batch(spans, tables, torch.tensor(slots), at, torch.device("cpu"))
            x = torch.cat([hidden[seq][start:stop] for seq, start, stop in spans])
            with torch.no_grad():
                outs.append(sharded(x, batch.views[0], Step.make(batch, angles), None))
        return torch.cat(outs)

    return sum(run(of_rank, groups))


def expected(model, index, hidden):
    """transformers' output of the layer, in the order of STEPS."""
    wholes = []
    for x in hidden:
        rotation = model.model.rotary_emb(x[None], torch.arange(len(x))[None])
        causal = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            layer = model.model.layers[index].self_attn
            wholes.append(layer(x[None], position_embeddings=rotation, attention_mask=causal)[0][0])
    return torch.cat([wholes[seq][slice(*span)] for step in STEPS for seq, span in step.items()])


def inputs(directory):
    size, generator = reader.read_config(directory)["hidden_size"], torch.Generator().manual_seed(0)
    return [torch.randn(length, size, generator=generator) for length in LENGTHS]


# GPT-OSS: layers 0 and 2 slide, which stay on every rank; as full layers their mathematics is the same. Layers that
# were not converted cache the keys and values of all heads.
CASES = [("llama", "latent", {}), ("biased_llama", "latent_rope", {}), ("qwen3", "latent", {}),
         ("gpt_oss", "latent_rope", {}), ("gpt_oss", "latent", {}), ("llama", "latent", {"bits": 4.0}),
         ("llama", "latent_rope", {"bits": 4.0})]  # fmt: skip


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_compute_what_one_computes(case, ranks, size, converted):
    """Four query heads and two KV heads; steps of chunks, of single tokens and of drafts; sinks, norms and biases."""
    *names, options = case
    directory = converted(*names, **options)
    hidden, model, raw = inputs(directory), loading.load_model(directory, "float32"), reader.read_config(directory)
    of_ranks = heads_of_ranks(raw, ranks, size)
    for index in range(len(model.model.layers)):
        torch.testing.assert_close(
            outputs(model, raw, index, of_ranks, size, hidden), expected(model, index, hidden), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("heads", [1, 2])
def test_gpu_kernels_see_the_prefixes(heads):
    """Triton's kernel over the rows of a rank: tokens without any, and values that all KV heads share."""
    shard, spans, generator = Shard(1, 2), [(0, 0, 3), (1, 20, 23)], torch.Generator().manual_seed(0)
    tables, slots = Tables({seq: shard.count(stop) for seq, _, stop in spans}), torch.full((6,), -1)
    batch = sharded_batch(spans, tables, slots, shard, torch.device("cpu"))
    view = batch.by_token(batch.views[0])
    assert view.lengths == (0, 1, 1, 10, 11, 11)
    q, k, v = (torch.randn(*of, generator=generator) for of in ((6, 4, 16), (8 * BLOCK, heads, 16), (8 * BLOCK, 1, 32)))
    inputs = q, k, v.expand(-1, heads, -1), view, 0.25
    out, lse = paged_attention(*inputs, implementation="triton")
    expected_out, expected_lse = paged_attention(*inputs, implementation="reference")
    torch.testing.assert_close((out, lse), (expected_out, expected_lse), atol=1e-5, rtol=1e-5)
    assert lse[0].eq(-torch.inf).all() and out[0].eq(0).all()


@pytest.mark.parametrize(("case", "changes", "message"), [
    (("mistral", "latent"), {}, "every layer has a sliding window"),
    (("llama", "latent"), {"index_kind": "learned"}, "convert with --dense"),
    (("llama", "latent"), {"use_eagle": lambda: True}, "use the method ngram"),
    (("llama", "latent"), {"cp_kv_cache_interleave_size": 16}, "leave out --cp-kv-cache-interleave-size"),
    (("llama", "latent"), {"decode_context_parallel_size": 3}, "3 must be a power of two on a GPU"),
    (("gpt_oss", "latent"), {"use_eagle": lambda: False}, None),
])  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(case, changes, message, converted):
    """One line, which says what would be right."""
    raw = reader.read_config(converted(*case))
    hf_config = SimpleNamespace(to_dict=lambda: raw, index_kind=changes.get("index_kind"))
    parallel = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 1, "dcp_comm_backend": None,
                "dcp_q_replicate": None}  # fmt: skip
    draft = SimpleNamespace(use_eagle=changes["use_eagle"]) if "use_eagle" in changes else None
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config), speculative_config=draft,
        parallel_config=SimpleNamespace(**parallel | changes),
    )  # fmt: skip
    if message is None or "power" in message:
        shards.refuse(config, on_cpu=True)
    if message is not None:
        with pytest.raises(UserError, match=message) as refused:
            shards.refuse(config, on_cpu=False)
        assert "\n" not in str(refused.value)
