"""Cases of tuning: a kernel at a shape, its candidates, a check against the reference, and a call to time.

Weights are copied until a pass over them reads COLD bytes, as a step reads those of all layers. On a CPU a candidate
must give the default's result to the bit.

Legend: M rows, N outputs, K inputs of a product; E experts, C hidden size, I intermediate size.
"""

from __future__ import annotations

import abc
import time
from typing import Any

import torch
from torch import Tensor

from mlaforge.bench import kernels
from mlaforge.bench.gemm_shapes import Shape
from mlaforge.bench.layer_operations import experts_inputs
from mlaforge.engine.execution.linear import PackedLinear
from mlaforge.ops import tuned
from mlaforge.ops.linear import LINEAR, LINEAR_INT4, LINEAR_INT8
from mlaforge.ops.mxfp4_experts import OP as EXPERTS
from mlaforge.ops.native import pack
from mlaforge.ops.rounded_weights import packed4, packed8
from mlaforge.ops.tuned import Configuration, Key
from mlaforge.ops.vector_product import OP as VECTOR_PRODUCT
from mlaforge.runtime import log

# Bytes of weights that a pass reads, and seconds that it may take.
COLD, LONGEST_PASS = 64 << 20, 0.03
MOST_ROWS, MOST_EXPERT_ROWS = 512, 128
# In the tags of products whose results are logits, in fp32.
LOGITS = "lm_head"
# Largest error of a result, relative to its norm: of a product that is rounded to bf16, and of 16-bit activations.
TOLERANCES = {"product": 2.0**-7, "experts": 3e-2, "vector_product": 2.0**-7, "latent": 2.0**-6}
# Values of the constants in ops/cpu/simd/configuration.h.
AHEAD = (1024, 2048, 4096, 8192, 16384)
PANELS = (1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21)
TASKS = (64, 128, 256, 512, 1024)


class WrongResult(Exception):
    """A candidate's result is not the reference's, or on a CPU not the default's."""


class Case(abc.ABC):
    """A kernel at a shape."""

    op: str
    key: Key
    device: torch.device

    @abc.abstractmethod
    def candidates(self) -> list[Configuration]:
        """Return the configurations to measure, the default ({}) first."""

    @abc.abstractmethod
    def result(self) -> Tensor:
        """Return the kernel's result with the configuration in use."""

    @abc.abstractmethod
    def expected(self) -> Tensor:
        """Return the reference's result, fp32, of the first rows at least."""

    @abc.abstractmethod
    def run(self) -> int:
        """Run the kernel on all copies of its weights and return their number."""

    def error(self, configuration: Configuration, expected: Tensor | None = None) -> float:
        """Return the error of a candidate relative to the norm of the reference, whose result is `expected` if it is
        known. Raises WrongResult."""
        out = self._with(configuration, self.result)
        if self.device.type == "cpu" and not torch.equal(out, self._with({}, self.result)):
            raise WrongResult(f"{self.op} {tuned.text(self.key)}: {configuration} changes the result")
        expected = self.expected() if expected is None else expected
        difference = (out[: len(expected)].float() - expected).norm() / expected.norm()
        error = float(difference)
        if not error <= TOLERANCES[self.op]:
            raise WrongResult(f"{self.op} {tuned.text(self.key)}: {configuration} has an error of {error:.2e}")
        return error

    def seconds(self, configuration: Configuration) -> float:
        """Return the seconds of one call."""
        return self._with(configuration, self._timed)

    def _timed(self) -> float:
        start = time.perf_counter()
        calls = self.run()
        if self.device.type == "cuda":
            # Within a graph, as the engine replays them. The call before compiled the kernels.
            return kernels.seconds(self.run, "cuda", milliseconds=1) / calls
        return (time.perf_counter() - start) / calls

    def _with(self, configuration: Configuration, call: Any) -> Any:
        tuned.use([tuned.candidate(self.op, self.key, configuration)], self.device)
        return call()


class ProductCase(Case):
    """A product with packed weights on a CPU."""

    op, device = "product", torch.device("cpu")

    def __init__(self, shape: Shape, threads: bool = True):
        self.key, self.threads = shape.key[1], torch.get_num_threads() if threads else 1
        self.rows, self.outputs = min(shape.M, MOST_ROWS), shape.N
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(shape.N, shape.K, generator=draw)
        self.x = torch.randn(self.rows, shape.K, generator=draw).bfloat16()
        packers = {"bfloat16": (LINEAR, _packed), "int8": (LINEAR_INT8, packed8), "int4": (LINEAR_INT4, packed4)}
        self.kernel, packer = packers[shape.dtype]
        packed = packer(weight)
        size = sum(tensor.numel() * tensor.element_size() for tensor in packed)
        self.copies = [packed]
        for _ in range(max(0, COLD // size - 1)):
            self.copies.append(tuple(tensor.clone() for tensor in packed))
        # Many rows are limited by arithmetic: their weights need not be cold.
        started = time.perf_counter()
        self.result()
        once = max(time.perf_counter() - started, 1e-6)
        self.copies = self.copies[: max(1, int(LONGEST_PASS / once))]

    def candidates(self) -> list[Configuration]:
        tasks = {0, *(-(-self.outputs // count) for count in (1, self.threads // 2) if 0 < count < self.threads)}
        if self.rows > tuned.ROWS[-1]:
            # Panels of all rows are alike.
            whole = self.rows * 2 * self.x.shape[1]
            name, values = "panel", (0, *(panel for panel in PANELS if panel < whole), PANELS[-1])
        else:
            name, values = "ahead", (0, *AHEAD)
        pairs = [{name: value, "task": task} for value in dict.fromkeys(values) for task in sorted(tasks)]
        return [{name: value for name, value in pair.items() if value} for pair in pairs]

    def result(self) -> Tensor:
        return self._product(self.copies[0])

    def expected(self) -> Tensor:
        out: Tensor = self.kernel.reference(self.x, *self.copies[0], self.outputs, None, None)
        return out.float()

    def run(self) -> int:
        for packed in self.copies:
            self._product(packed)
        return len(self.copies)

    def _product(self, packed: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.kernel(self.x, *packed, self.outputs, None, None, implementation="native")
        return out


def _packed(weight: Tensor) -> tuple[Tensor, ...]:
    return (pack(weight),)


class ExpertsCase(Case):
    """A mixture of MXFP4 experts, whose weights are larger than a cache."""

    op = "experts"
    checked_rows = 2

    def __init__(self, shape: Shape, device: torch.device):
        self.key, self.device = shape.key[1], device
        dtype = torch.bfloat16
        sizes = (shape.experts, shape.top_k, shape.K, shape.N)
        self.inputs = experts_inputs(min(shape.M, MOST_EXPERT_ROWS), sizes, dtype, device)
        self.implementation = "native" if device.type == "cpu" else "triton"

    def candidates(self) -> list[Configuration]:
        if self.device.type == "cpu":
            return [{}, *({"task": task} for task in TASKS)]
        from mlaforge.ops import mxfp4_experts_triton

        return [{}, *mxfp4_experts_triton.candidates()]

    def result(self) -> Tensor:
        (out,) = EXPERTS(*self.inputs, implementation=self.implementation)
        result: Tensor = out
        return result

    def expected(self) -> Tensor:
        x, ids, weights, *packed = self.inputs
        rows = slice(self.checked_rows)
        (out,) = EXPERTS.reference(x[rows].float(), ids[rows], weights[rows].float(), *packed)
        result: Tensor = out.float()
        return result

    def run(self) -> int:
        self.result()
        return 1


class VectorProductCase(Case):
    """A product of a few rows on a GPU: F.linear by default, as in the engine."""

    op = "vector_product"

    def __init__(self, shape: Shape, device: torch.device, cold: int = kernels.COLD):
        self.device, self.shape = device, shape
        dtype = getattr(torch, shape.dtype)
        torch.manual_seed(0)
        self.weight = torch.randn(shape.N, shape.K, device=device).to(dtype)
        self.key = tuned.vector_product_key(self.weight)
        self.x = torch.randn(shape.M, shape.K, device=device).to(dtype)
        size = self.weight.numel() * self.weight.element_size()
        self.copies = [
            PackedLinear(weight, None, shape.dtype, LOGITS in shape.tag, shape.tag)
            for weight in [self.weight] * max(1, min(128, cold // size))
        ]

    def candidates(self) -> list[Configuration]:
        from mlaforge.ops import vector_product_triton

        return [{}, *vector_product_triton.candidates(self.shape.K)]

    def result(self) -> Tensor:
        return self.copies[0](self.x)

    def expected(self) -> Tensor:
        out: Tensor = VECTOR_PRODUCT.reference(self.x, self.weight, None, True)
        return out

    def run(self) -> int:
        for layer in self.copies:
            layer(self.x)
        return len(self.copies)


def make_case(shape: Shape, threads: bool = True) -> Case | None:
    """Return the case of a recorded product; None if no kernel of this package with candidates computes it. threads:
    also choose the number of threads."""
    device = torch.device(shape.device)
    if shape.experts and shape.dtype == "mxfp4":
        return ExpertsCase(shape, device)
    if device.type == "cpu" and shape.dtype in tuned.PRODUCTS:
        return ProductCase(shape, threads)
    if device.type == "cuda":
        return VectorProductCase(shape, device)
    return None


def correct_candidates(case: Case) -> list[tuple[Configuration, float]]:
    """Return the candidates of a case that give the reference's result, the default first, with their errors. Raise
    WrongResult if the default does not."""
    default, *rest = case.candidates()
    expected = case.expected()
    errors = [(default, case.error(default, expected))]
    wrong: tuple[type[Exception], ...] = (WrongResult, *_out_of_resources())
    for configuration in rest:
        try:
            errors.append((configuration, case.error(configuration, expected)))
        except wrong as error:
            log(f"a candidate is left out: {str(error) or type(error).__name__}")
    return errors


def _out_of_resources() -> tuple[type[Exception], ...]:
    """Return the errors of a kernel that needs more than this GPU has: shared memory, registers or memory."""
    if not torch.cuda.is_available():
        return ()
    from triton.runtime.errors import OutOfResources

    return OutOfResources, torch.cuda.OutOfMemoryError
