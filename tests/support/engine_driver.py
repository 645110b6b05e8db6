"""Helpers of the engine's tests: an engine that is checked after every step, and transformers as the oracle of its
tokens.

A watched engine starts with NaN in every row of its cache, so that reading a slot before it is written shows. After
every step its tables, its limits and its counts of work are checked.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from mlaforge.checkpoint import loading
from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.scheduler import Scheduler
from support.tiny_models import load_original

# Two orders of summation of a tiny model's fp32 logits (about 5 in size) differ by some 1e-5.
TIE = 1e-4


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Exactly `max_tokens` greedy tokens."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


class Oracle:
    """transformers' greedy continuations in fp32, each computed once."""

    def __init__(self, directory: Path):
        converted = "mla_layer_types" in json.loads((directory / "config.json").read_text())
        self.model = loading.load_model(directory, "float32") if converted else load_original(directory)
        self.model.generation_config.eos_token_id = None
        self._known: dict[tuple[int, ...], list[int]] = {}

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
            known = self._known[tuple(prompt)] = out[0, len(prompt) :].tolist()
            assert len(known) == count
        return known[:count]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocabulary] in one pass."""
        return self.model(torch.tensor([ids])).logits[0].float()

    def check(self, prompt: list[int], got: list[int], count: int, tie: float = TIE) -> None:
        """Assert that `got` is the greedy continuation of `count` tokens. Where it first differs from transformers'
        both candidates must be a tie, with logits less than `tie` apart, and the rest must be greedy after its own
        beginning, up to ties."""
        want = self.continuation(prompt, count)
        if got == want:
            return
        assert len(got) == count, f"{len(got)} tokens instead of {count}"
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        logits = self.logits([*prompt, *got])[len(prompt) - 1 : -1]
        gap = logits.max(-1).values - logits[range(count), got]
        message = (
            f"token {at} of {count} after {len(prompt)}: {got[at]}, transformers has {want[at]}; gaps {gap.tolist()}"
        )
        assert float(logits[at, want[at]] - logits[at, got[at]]) < tie, message
        assert float(gap.max()) < tie, message


def prompt_logprobs(directory: Path, ids: list[int]) -> torch.Tensor:
    """Log probabilities of all tokens but the first, by the engine in fp32: [len(ids) - 1]."""
    (output,) = watched(directory).generate([ids], greedy(1, prompt_logprobs=0))
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])


def watched(model: Path, **options: Any) -> LLM:
    """Return an LLM in fp32 with a small cache full of NaN, whose engine is checked after every step."""
    llm = LLM(model, **{"dtype": "float32", "device": "cpu", "cache_bytes": 1 << 20, **options})
    poison(llm.engine)
    watch(llm.engine)
    return llm


def poison(engine: Engine) -> None:
    """Fill the cache with NaN, in every format."""
    numbers = {
        rows.decompressed_keys.metadata.data_ptr() for rows in engine.cache.rows if rows.decompressed_keys is not None
    }
    for tensor in engine.cache.tensors:
        if tensor.data_ptr() not in numbers:
            tensor.view(torch.uint8).fill_(255)


def watch(engine: Engine) -> None:
    step, config = engine.step, engine.config

    def checked() -> list[Any]:
        before = engine.stats()
        outputs = step()
        engine.check_integrity()
        stats = engine.stats()
        assert stats.computed_tokens - before.computed_tokens <= engine.scheduler.max_num_batched_tokens
        assert stats.running <= engine.scheduler.max_num_seqs
        for sequence in engine.scheduler.running:
            for index, group in enumerate(engine.tables.groups):
                _, blocks = engine.tables.table(sequence.number, index)
                most = most_blocks(engine.tables, index, len(sequence.token_ids), config.max_num_batched_tokens)
                assert len(blocks) <= most, f"{group.name}: {len(blocks)} blocks, at most {most} are needed"
        return outputs

    engine.step = checked  # type: ignore[method-assign]


def most_blocks(tables: BlockTables, group: int, length: int, chunk: int) -> int:
    """Most blocks that one sequence of up to `length` tokens uses in this group when every `reserve` adds at most
    `chunk` tokens to the computed ones."""
    all_blocks = -(-length // tables.block_size)
    window = tables.groups[group].window
    if window is None:
        return all_blocks
    # Neighbouring positions, at the worst alignment.
    span = window - 1 + tables.lookback + chunk
    return min(all_blocks, (span + 2 * tables.block_size - 2) // tables.block_size)


def vars_of(tables: BlockTables) -> Any:
    """The whole state of tables, comparable."""
    return [vars(pool) for pool in tables._pools], tables._sequences


def renew(
    engine: Engine, spare: int, longest: int, *, block_size: int, caching: bool = True, max_num_seqs: int = 4,
    max_step: int = 16, num_unquantized: int = 0,
) -> None:  # fmt: skip
    """Give a loaded engine new, empty tables of other sizes: one sequence of `longest` tokens fits, plus `spare`
    blocks, and `num_unquantized` ones where the group has such blocks. The cache's memory stays, filled with NaN."""
    engine.config = dataclasses.replace(
        engine.config, block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_step
    )
    cache = engine.cache
    slots = {layer.group: rows.slots for layer, rows in zip(cache.layers, cache.rows, strict=True)}
    probe = BlockTables(engine.tables.groups, block_size)
    groups = []
    for index, group in enumerate(engine.tables.groups):
        blocks = most_blocks(probe, index, longest, max_step) + spare
        assert blocks * block_size <= slots[index], f"{group.name} has {slots[index]} slots, not {blocks * block_size}"
        groups.append(
            dataclasses.replace(
                group, num_blocks=blocks, num_unquantized=num_unquantized if group.newest_unquantized else 0
            )
        )
    engine.cache.groups, engine.cache.block_size = groups, block_size
    for index, (layer, rows) in enumerate(zip(cache.layers, cache.rows, strict=True)):
        # Unquantized blocks follow the others.
        if rows.unquantized is not None:
            units = groups[layer.group].num_blocks * block_size // rows.format.tokens
            cache.rows[index] = dataclasses.replace(rows, packed=rows.packed[:units])
            engine.model.layers[index].attention.bind_cache(cache.rows[index])
    engine.tables = engine._builder.tables = BlockTables(groups, block_size, caching)
    engine.scheduler = Scheduler(engine.tables, max_num_seqs, max_step, engine.scheduler.replays)
    poison(engine)


def idle(engine: Engine) -> None:
    """Assert that nothing runs, waits, is remembered or uses a block."""
    stats = engine.stats()
    assert not engine.has_work and not engine._requests
    assert (stats.running, stats.waiting, stats.cache_blocks_used, stats.cache_bytes_used) == (0, 0, 0, 0)
    engine.check_integrity()
