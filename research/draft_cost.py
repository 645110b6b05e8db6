"""What drafting costs: processor time of an EAGLE-3 head's chain and of a block head's pass, in alternation.

    python -m research.draft_cost MODEL EAGLE3_HEAD [BLOCK_HEAD] [--layers 1] [--places 3] [--context 256]

Without BLOCK_HEAD a random one with the EAGLE-3 head's vocabulary, boundaries and key-value heads. Printed are medians
per step of one sequence, in ms of one thread, and of the fastest tenth of the steps: of `propose`, and of `observe` for
one and four rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mlaforge.checkpoint import block_head, eagle3
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.modeling.block_head import BlockConfig, BlockHead
from mlaforge.rendering.table import markdown_table


def write_random_block_head(directory: Path, like: Path, layers: int, places: int) -> None:
    """Write a block head with random weights and the sizes of an EAGLE-3 head."""
    head = eagle3.read_head(like, None)
    shape = head.config.layer
    shape.num_hidden_layers = layers
    config = BlockConfig(
        shape, head.config.target_hidden_size, head.config.draft_vocab_size, head.config.boundaries, places + 1,
        head.config.sliding_window, fc_norm=True,
    )  # fmt: skip
    block = BlockHead(config)
    for name, tensor in eagle3.buffers(config, head.target_ids).items():
        block.get_buffer(name).copy_(tensor)
    torch.nn.init.normal_(block.mask_embedding, std=0.02)
    block_head.write_head(block, directory)


class Timed:
    """An engine with a head and one decoding sequence, whose drafting is timed."""

    def __init__(self, model: str, head: Path, context: int, steps: int):
        self.engine = Engine(model, EngineConfig(
            speculative=str(head), adaptive_speculation=False, max_num_seqs=1, cache_bytes=1 << 28, device="cpu"
        ))  # fmt: skip
        self.seconds: dict[str, list[float]] = {"propose": [], "observe 1": [], "observe 4": []}
        self.engine.add("text", list(range(1000, 1000 + context)), SamplingParams(
            temperature=0.0, max_tokens=8 * steps, ignore_eos=True
        ))  # fmt: skip
        while not (self.engine.scheduler.running and self.engine.scheduler.running[0].decoding):
            self.engine.step()

    def step(self, places: int) -> None:
        """Draft, then compute the rows of one and of four states again, and take a real step."""
        speculation: Any = self.engine.speculation
        drafter, (sequence,) = speculation.drafter, self.engine.scheduler.running
        tables = self.engine.tables
        tables.reserve(sequence.number, len(sequence.token_ids) + places)
        self._time("propose", lambda: drafter.propose([(sequence, places)], 0.0))
        width = self.engine.model.spec.hidden_size * len(drafter.boundaries)
        for rows in (1, 4):
            states = torch.randn(rows, width, dtype=self.engine.model.dtype)
            self._time(
                f"observe {rows}", lambda n=rows, s=states: drafter.observe([(sequence, sequence.computed - n)], s)
            )
        tables.rewind(sequence.number, sequence.computed)
        self.engine.step()

    def _time(self, name: str, call: Any) -> None:
        start = time.thread_time()
        call()
        self.seconds[name].append(time.thread_time() - start)


def medians(seconds: list[float]) -> str:
    """Median of all, and of the fastest tenth, in ms."""
    fastest = sorted(seconds)[: max(1, len(seconds) // 10)]
    return f"{1000 * statistics.median(seconds):.3f} ({1000 * statistics.median(fastest):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("eagle3", type=Path)
    parser.add_argument("block", type=Path, nargs="?")
    for option, default in (("layers", 1), ("places", 3), ("context", 256), ("steps", 60)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.block is None:
            write_random_block_head(Path(folder), options.eagle3, options.layers, options.places)
        heads = {"eagle3": options.eagle3, "block": options.block or Path(folder)}
        timed = {name: Timed(options.model, head, options.context, options.steps) for name, head in heads.items()}
    for _ in range(options.steps):
        for engine in timed.values():
            engine.step(options.places)
    rows = [[name, *(medians(values[5:]) for values in engine.seconds.values())] for name, engine in timed.items()]
    print(markdown_table([["head", *timed["block"].seconds], *rows]))


if __name__ == "__main__":
    main()
