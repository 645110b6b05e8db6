"""Matrix products that a run computes: distinct shapes with counts and times, in `gemm_shapes.json`.

A recorder replaces the calls of an engine's linear layers and experts while it is active. On CUDA times are those of
events, without a wait; products of a captured graph count at its capture, with their times in the run before it, and at
every replay. The products of keys and values with latents and of indexes are parts of kernels of attention and are not
recorded.

Legend: M rows, N outputs, K inputs of a product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.bench import machine
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.linear import PackedLinear
from mlaforge.engine.execution.mlp import GatedMlp
from mlaforge.ops import tuned
from mlaforge.ops.dispatch import Op
from mlaforge.ops.mxfp4_experts import MIXTURE
from mlaforge.ops.mxfp4_experts import OP as EXPERTS
from mlaforge.runtime import UserError

FILE = "gemm_shapes.json"
FIELDS = ("tag", "M", "N", "K", "dtype", "device", "experts", "top_k")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product. dtype: format of the weights. Of a mixture: N is the intermediate size, K the hidden size, `experts`
    and `top_k` their numbers."""

    tag: str
    M: int
    N: int
    K: int
    dtype: str
    device: str
    experts: int = 0
    top_k: int = 0

    @property
    def key(self) -> tuple[str, tuned.Key]:
        """The op and the key under which its configuration is tuned."""
        if self.experts:
            return "experts", tuned.experts_key(self.experts, self.top_k, self.K, self.N, self.M)
        if self.device != "cpu":
            return "vector_product", (self.dtype, self.N, self.K)
        return "product", tuned.product_key(self.dtype, self.N, self.K, self.M)


@dataclasses.dataclass
class Usage:
    """Calls of a shape, and the seconds that they took."""

    count: int = 0
    seconds: float = 0.0


class Shapes:
    """Usage of shapes."""

    def __init__(self) -> None:
        self.usage: dict[Shape, Usage] = {}

    def add(self, shape: Shape, count: int, seconds: float) -> None:
        usage = self.usage.setdefault(shape, Usage())
        usage.count += count
        usage.seconds += seconds

    def update(self, other: Shapes) -> None:
        for shape, usage in other.usage.items():
            self.add(shape, usage.count, usage.seconds)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the file, the shape that took most time first."""
        ordered = sorted(self.usage.items(), key=lambda item: -item[1].seconds)
        return [dataclasses.asdict(shape) | dataclasses.asdict(usage) for shape, usage in ordered]

    def write(self, path: Path) -> None:
        machine.write(path, {"kind": "gemm_shapes", "shapes": self.rows()})

    @classmethod
    def read(cls, path: Path) -> Shapes:
        """Read a file that a run wrote. Raise UserError for another one."""
        shapes = cls()
        try:
            for row in json.loads(path.read_text(encoding="utf-8"))["shapes"]:
                shapes.add(Shape(**{name: row[name] for name in FIELDS}), int(row["count"]), float(row["seconds"]))
        except OSError as error:
            raise UserError(f"shapes {str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} has no shapes; `mlaforge bench SCENARIO MODEL --perf` writes {FILE}") from error
        return shapes


# Seconds of a call, read when the device has computed it.
Clock = Callable[[], Callable[[], float]]


def host_clock() -> Callable[[], float]:
    """Begin a call on a CPU."""
    start = time.perf_counter()
    end = list[float]()

    def seconds() -> float:
        if not end:
            end.append(time.perf_counter() - start)
        return end[0]

    return seconds


class Recorder:
    """Records the products of an engine while `active`; `shapes` afterwards."""

    def __init__(self, engine: Engine):
        self.engine, self.shapes = engine, Shapes()
        # Calls whose times are not known yet, and calls of a graph's capture, once for every replay.
        self._calls: list[tuple[list[tuple[Shape, float]], Callable[[], float]]] = []
        self._inside = False
        self._captures: list[tuple[list[int], int, int]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[Shapes]:
        """Record until the end of the block."""
        linear, gated, op = PackedLinear.__call__, GatedMlp.__call__, Op.__call__

        def record_linear(layer: PackedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self._record([(_shape(layer, x), 1.0)], linear, layer, x, residual)

        def record_gated(mlp: GatedMlp, x: Tensor, residual: Tensor | None) -> Tensor:
            if mlp.gated_mlp is None:
                return gated(mlp, x, residual)
            # One kernel computes two products, which take time by their weights.
            first, last = _shape(mlp.gate_up, x), _shape(mlp.down, x)
            share = first.N * first.K / (first.N * first.K + last.N * last.K)
            return self._record([(first, share), (last, 1 - share)], gated, mlp, x, residual)

        def record_op(kernel: Op, *inputs: Any, implementation: str | None = None) -> Any:
            if kernel not in (EXPERTS, MIXTURE):
                return op(kernel, *inputs, implementation=implementation)
            shape = _experts_shape(inputs)
            return self._record([(shape, 1.0)], op, kernel, *inputs, implementation=implementation)

        with contextlib.ExitStack() as cleanup:
            for owner, call in ((PackedLinear, record_linear), (GatedMlp, record_gated), (Op, record_op)):
                cleanup.callback(setattr, owner, "__call__", owner.__call__)
                setattr(owner, "__call__", call)  # noqa: B010
            if (graphs := self.engine.runner.graphs) is not None:
                cleanup.callback(setattr, graphs, "capture", graphs.capture)
                graphs.capture = self._counting_replays(graphs.capture)
            yield self.shapes
        self._finish()

    def _record(self, shapes: list[tuple[Shape, float]], run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self._inside:
            return run(*inputs, **options)
        clock = self._clock()
        self._inside = True
        try:
            out = run(*inputs, **options)
        finally:
            self._inside = False
        self._calls.append((shapes, clock))
        clock()
        return out

    def _clock(self) -> Callable[[], float]:
        """Begin a call: seconds since then at the first call of the result. Events of CUDA cannot be read before the
        device has passed them, and a captured one has no time."""
        if self.engine.device.type != "cuda":
            return host_clock()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            start.record()
        ended = list[bool]()

        def seconds() -> float:
            if not ended:
                ended.append(True)
                if not captured:
                    end.record()
                return 0.0
            return 0.0 if captured else start.elapsed_time(end) / 1e3

        return seconds

    def _counting_replays(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Return a capture whose replays count the products of its first run again."""

        def counted(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            runs: list[tuple[int, int]] = []

            def counted_run() -> Tensor:
                first = len(self._calls)
                out = run()
                runs.append((first, len(self._calls)))
                return out

            replay, out = capture(counted_run)
            # The first run has times; a later one is the capture, whose products run at the replays.
            replays, (first, last) = [1 - len(runs)], runs[0]
            self._captures.append((replays, first, last))

            def counted_replay() -> None:
                replays[0] += 1
                self._inside = True
                try:
                    replay()
                finally:
                    self._inside = False

            return counted_replay, out

        return counted

    def _finish(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        times = [clock() for _, clock in self._calls]
        for (shapes, _), seconds in zip(self._calls, times, strict=True):
            for shape, share in shapes:
                self.shapes.add(shape, 1, seconds * share)
        for (replays,), first, last in self._captures:
            for (shapes, _), seconds in zip(self._calls[first:last], times[first:last], strict=True):
                for shape, share in shapes:
                    self.shapes.add(shape, replays, seconds * share * replays)
        self._calls.clear()
        self._captures.clear()


def _shape(layer: PackedLinear, x: Tensor) -> Shape:
    return Shape(layer.tag, len(x), layer.out_features, layer.in_features, layer.format, x.device.type)


def _experts_shape(inputs: Sequence[Any]) -> Shape:
    """Shape of a mixture from the inputs of either op: hidden states, routing (experts and weights, or logits and the
    number of experts per token), then the packed weights and two numbers."""
    *_, gate_up_bias, _, _, down_bias, _, _ = inputs
    top_k = inputs[2] if isinstance(inputs[2], int) else inputs[1].shape[1]
    experts, outputs = gate_up_bias.shape
    hidden, device = down_bias.shape[1], inputs[0].device.type
    return Shape("experts", len(inputs[0]), outputs // 2, hidden, "mxfp4", device, experts, top_k)
