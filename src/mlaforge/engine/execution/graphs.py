"""CUDA graphs of steps with few query tokens per sequence, captured at the first use of a bucket with a state of the
model. Not measured on a GPU yet (docs/ops.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.bucket import Bucket, blank, fill

Run = Callable[[], Tensor]
# Captures a function; returns what replays it, and the tensor that a replay overwrites with the function's result.
Capture = Callable[[Run], tuple[Callable[[], None], Tensor]]


class CudaCapture:
    """Captures graphs that share one memory pool, so that they must be replayed one at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> tuple[Callable[[], None], Tensor]:
        """Call `run` twice and capture the second call. A second run must compute the same as the first."""
        current = torch.cuda.current_stream(self.device)
        # A run before the capture: Triton compiles, cuBLAS allocates.
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            run()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a server's, may use CUDA at the same time.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out


@dataclasses.dataclass(frozen=True)
class _Graph:
    static: Batch
    replay: Callable[[], None]
    out_NC: Tensor


class Graphs:
    """The graphs of `run`, by bucket and by the state that `run` depends on besides its batch.

    run           from a batch to hidden states [N, C], on the device
    capturable    whether a step is launched from host numbers alone; called once per bucket and state
    scratch       the scratch block of every cache group
    max_num_seqs  the most sequences of a batch
    """

    def __init__(
        self, run: Callable[[Batch], Tensor], capturable: Callable[[Batch], bool], scratch: Sequence[int],
        max_num_seqs: int, capture: Capture,
    ):  # fmt: skip
        self._run, self._capturable, self.capture = run, capturable, capture
        self.scratch, self.max_num_seqs = tuple(scratch), max_num_seqs
        self._graphs: dict[tuple[Bucket, Hashable], _Graph | None] = {}

    @property
    def captured(self) -> list[Bucket]:
        """The buckets that have a graph, in the order of their capture, once per state."""
        return [bucket for (bucket, _), graph in self._graphs.items() if graph is not None]

    def __call__(self, batch: Batch, state: Hashable = None) -> Tensor | None:
        """Return hidden states [N, C] of the batch, valid until the next call; None where it must run without a graph.
        `state` is everything that can change in a running engine and that a captured graph would not follow."""
        bucket = Bucket.of(batch, self.max_num_seqs)
        if bucket is None:
            return None
        key = bucket, state
        if key not in self._graphs:
            self._graphs[key] = self._capture_graph(bucket, batch) if self._capturable(batch) else None
        graph = self._graphs[key]
        if graph is None:
            return None
        rows = bucket.rows(batch)
        fill(graph.static, batch, rows, self.scratch)
        graph.replay()
        return graph.out_NC[rows] if isinstance(rows, slice) else graph.out_NC.index_select(0, rows)

    def _capture_graph(self, bucket: Bucket, batch: Batch) -> _Graph:
        static = blank(bucket, batch)
        # The run before the capture computes this step.
        fill(static, batch, bucket.rows(batch), self.scratch)
        replay, out_NC = self.capture(lambda: self._run(static))
        return _Graph(static, replay, out_NC)
