"""Selection of an op's implementation, and the mode that compares it with the reference.

Order: the explicit argument, then $MLAFORGE_OPS, then the first registered implementation that supports the inputs,
last the reference. MLAFORGE_OPS is a comma-separated list: an implementation's name for every op that has it, `op=name`
for one op, and `check`, which also runs the reference and compares (it synchronises, so not within a captured graph).
`name+other` is the first of several names that supports the inputs. Kernels of other libraries (ops/external/) run only
where they are named.

A call of an op selects by its inputs. `Op.bind` selects a compiled kernel once, for layers whose inputs differ only in
their number of tokens: a decoding step calls an op 300 times, and a selection takes as long as a small kernel. Bound
ops follow $MLAFORGE_OPS as of the last `refresh`, which every step calls (engine/execution/attention.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge import runtime
from mlaforge.ops.check import check, cloned, load
from mlaforge.ops.external.library import EXTERNAL
from mlaforge.ops.native import kernel

Supports = Callable[..., "Literal[True] | str"]
# A tensor, several, or None for an op that only writes to its inputs.
Run = Callable[..., Any]
# From the inputs and the outputs of a call to the tensors that are compared.
Observe = Callable[[Sequence[Any], Any], Sequence[Tensor]]
# Called before each run with the op's name, the implementation's name and the inputs.
Hook = Callable[["Op", str, Sequence[Any]], None]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of an op. `supports` and `run` take the op's arguments; `supports` returns True or a short
    reason.

    It is chosen automatically only on devices of `device_type`. If it is skipped there, the reason is logged, unless it
    is `quiet` because it supports only some inputs. `capturable`: its launches depend only on host values, so a CUDA
    graph can capture it. `resolve` returns a faster `run` for bound ops, once its inputs are known to be supported.
    `on_request`: it is never chosen automatically, and its first use is logged.
    """

    name: str
    run: Run
    supports: Supports
    device_type: str
    quiet: bool = False
    capturable: bool = False
    resolve: Callable[[], Run] | None = None
    on_request: bool = False


def outputs_as_tuple(inputs: Sequence[Any], outputs: Any) -> Sequence[Tensor]:
    """Compare what the op returns."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class Op:
    """An operation with a reference and any number of faster implementations, tried in the order of registration.

    mutates    indices of the inputs that the op writes to; they must be tensors or dataclasses of tensors
    observe    what `check` compares; the outputs by default
    tolerance  absolute and relative, of `check`; by the dtype of the first input by default
    """

    def __init__(
        self, name: str, reference: Run, mutates: Sequence[int] = (), observe: Observe = outputs_as_tuple,
        tolerance: tuple[float, float] | None = None,
    ):  # fmt: skip
        assert name not in OPS and name in MODULES, name
        self.name, self.reference = name, reference
        self.mutates, self.observe, self.tolerance = tuple(mutates), observe, tolerance
        self.implementations: dict[str, Implementation] = {}
        OPS[name] = self
        self._logged: set[tuple[str, str]] = set()

    def register(
        self, name: str, run: Run, supports: Supports, device_type: str, quiet: bool = False, capturable: bool = False,
        on_request: bool = False,
    ) -> None:  # fmt: skip
        assert name not in self.names and name != "check", name
        self.implementations[name] = Implementation(
            name, run, supports, device_type, quiet, capturable, on_request=on_request
        )

    def register_native(self, supports: Supports, run: Run | None = None) -> None:
        """Register the compiled CPU kernel of this name. It is skipped quietly: ops/native.py logs why kernels are not
        compiled. `run` adapts the inputs, unless the kernel takes them as they are."""
        resolve = None if run is not None else functools.partial(kernel, self.name)
        if run is None:
            run = functools.partial(_call_kernel, self.name)
        self.implementations["native"] = Implementation("native", run, supports, "cpu", quiet=True, resolve=resolve)

    @property
    def names(self) -> list[str]:
        return [*self.implementations, "reference"]

    def register_triton(
        self, module: str, function: str, supports: str = "supports", on_request: bool = False
    ) -> None:  # fmt: skip
        """Register functions of a module in ops/ that launches Triton kernels from host numbers alone. `supports` takes
        the op's inputs. The module is imported at the first use: importing Triton takes a second."""

        def run(*inputs: Any) -> Any:
            return getattr(importlib.import_module(f"mlaforge.ops.{module}"), function)(*inputs)

        def supported(*inputs: Any) -> Literal[True] | str:
            if (reason := triton_device(inputs[0].device)) is not True:
                return reason
            answer: Literal[True] | str = getattr(importlib.import_module(f"mlaforge.ops.{module}"), supports)(*inputs)
            return answer

        self.register("triton", run, supported, device_type="cuda", capturable=True, on_request=on_request)

    def __call__(self, *inputs: Any, implementation: str | None = None) -> Any:
        """Run the selected implementation on `inputs`; the device of the first one decides.

        Raises UserError if the name is unknown or the named implementation does not support the inputs, AssertionError
        if `check` finds a difference.
        """
        choice, check_mode = self._from_environment()
        name, run = self.choose(*inputs, implementation=implementation or choice)
        if _state.hook is not None:
            _state.hook(self, name, inputs)
        return self._checked(name, run, inputs) if check_mode and name != "reference" else run(*inputs)

    def bind(self, *inputs: Any) -> Bound | Op:
        """Return the op with its compiled kernel selected, if that supports inputs like these, which are not read; else
        the op itself, which selects by the inputs of each call. Later inputs may differ in the number of tokens."""
        native = self.implementations.get("native")
        if native is None or native.supports(*inputs) is not True:
            return self
        return Bound(self, native.run if native.resolve is None else native.resolve())

    def choose(self, *inputs: Any, implementation: str | None = None) -> tuple[str, Run]:
        """Return the name and function that would run on `inputs`. Raises as __call__ does."""
        if implementation is not None:
            return self._first(implementation.split("+"), inputs)
        for name, candidate in self.implementations.items():
            if candidate.device_type != inputs[0].device.type or candidate.on_request:
                continue
            reason = candidate.supports(*inputs)
            if reason is True:
                return name, candidate.run
            if not candidate.quiet:
                self._log(name, f"is not used: {reason}")
        return "reference", self.reference

    def _first(self, names: Sequence[str], inputs: Sequence[Any]) -> tuple[str, Run]:
        """As `choose`, for the first of some names that supports the inputs."""
        reasons = []
        for name in names:
            if name not in self.names:
                raise runtime.UserError(f"{self.name} has no implementation {name!r}; it has {', '.join(self.names)}")
            if name == "reference":
                return name, self.reference
            chosen = self.implementations[name]
            if (reason := chosen.supports(*inputs)) is True:
                if chosen.on_request:
                    self._log(name, "is used")
                return name, chosen.run
            reasons.append(f"{name} cannot run here: {reason}")
            if len(names) > 1:
                self._log(name, f"is not used: {reason}")
        raise runtime.UserError(f"{self.name}: {'; '.join(reasons)}")

    def _log(self, name: str, message: str) -> None:
        """Log a message about an implementation once."""
        if (name, message) not in self._logged:
            self._logged.add((name, message))
            runtime.log(f"{self.name}: {name} {message}")

    def capturable(self, *inputs: Any) -> bool:
        """Whether a CUDA graph can capture a call with `inputs`. Raises as __call__ does."""
        choice, check_mode = self._from_environment()
        name, _ = self.choose(*inputs, implementation=choice)
        return not check_mode and name in self.implementations and self.implementations[name].capturable

    def _checked(self, name: str, run: Run, inputs: Sequence[Any]) -> Any:
        """Run the implementation and the reference, the reference on copies of what the op writes to."""
        before = [cloned(x) if i in self.mutates else x for i, x in enumerate(inputs)]
        saved = [cloned(x) if i in self.mutates else x for i, x in enumerate(inputs)]
        outputs, expected = run(*inputs), self.reference(*before)
        pair = self.observe(inputs, outputs), self.observe(before, expected)
        check(f"{self.name} {name}", saved, *pair, self.tolerance)
        comparisons[self.name, name] += 1
        return outputs

    def _from_environment(self) -> tuple[str | None, bool]:
        """Return the implementation that $MLAFORGE_OPS names for this op, if any, and whether `check` is set."""
        default = override = None
        check_mode = False
        if not runtime.ops_choice():
            return None, False
        for word in filter(None, map(str.strip, runtime.ops_choice().split(","))):
            op, equals, name = word.partition("=")
            if word == "check":
                check_mode = True
            elif not equals:
                default = self._default(word)
            elif op == self.name:
                override = name
            elif op not in MODULES:
                raise runtime.UserError(f"MLAFORGE_OPS names {op!r}, which is not an op; ops are {', '.join(MODULES)}")
        return override or default, check_mode

    def _default(self, word: str) -> str | None:
        """Return the names in `word` that this op has, or None if it has none of them but another one may."""
        names = word.split("+")
        for name in names:
            if name not in self.names and name not in IMPLEMENTATIONS:
                raise runtime.UserError(
                    f"MLAFORGE_OPS names {name!r}, which is no implementation; they are {', '.join(IMPLEMENTATIONS)}"
                )
        return "+".join(name for name in names if name in self.names) or None


def triton_device(device: torch.device) -> Literal[True] | str:
    """Return True, or the reason why Triton's kernels cannot run on tensors of a device. Does not import Triton."""
    if device.type != "cuda" and not runtime.triton_interpreted():
        return f"it needs CUDA tensors, the inputs are on {device.type}"
    return True if find_spec("triton") is not None else "triton is not installed"


def prefers_triton(device: torch.device) -> bool:
    """Whether layers on a device are composed of the ops that Triton's kernels compute: on GPUs, and where
    $MLAFORGE_OPS names `triton` for every op. Compiled CPU kernels compute larger parts of a layer."""
    words = map(str.strip, runtime.ops_choice().split(","))
    return device.type == "cuda" or any("triton" in word.split("+") for word in words)


def _call_kernel(name: str, *inputs: Any) -> Any:
    return kernel(name)(*inputs)


class Bound:
    """An op whose implementation was selected for a layer: calls it, unless $MLAFORGE_OPS or a hook intervenes."""

    __slots__ = ("op", "run")

    def __init__(self, op: Op, run: Run):
        self.op, self.run = op, run

    def __call__(self, *inputs: Any) -> Any:
        return self.run(*inputs) if _state.direct else self.op(*inputs)


@dataclasses.dataclass
class _State:
    """Whether bound ops call their implementation directly, and the hook."""

    direct: bool = True
    hook: Hook | None = None


_state = _State()


def refresh() -> None:
    """Read $MLAFORGE_OPS for bound ops."""
    _state.direct = not runtime.ops_choice() and _state.hook is None


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Call `hook` before every run of an op, in the whole process."""
    assert _state.hook is None, "there is a hook already"
    _state.hook = hook
    refresh()
    try:
        yield
    finally:
        _state.hook = None
        refresh()


def replay(path: Path, implementation: str | None = None, device: str = "cpu") -> Any:
    """Run an op on the inputs of a mismatch that `check` saved; the file's name begins with the op's name."""
    name = path.name.partition("-")[0]
    importlib.import_module(f"mlaforge.ops.{MODULES[name]}")
    return OPS[name](*load(path, device), implementation=implementation)


# All ops whose module was imported, by name, and the module in ops/ of every op.
OPS: dict[str, Op] = {}
MODULES = {
    "absorb_and_store": "absorbed_latents", "add_rms_norm": "elementwise", "attention_mass": "attention_mass",
    "attention_with_mass": "attention_mass", "gated_mlp": "linear", "latent": "latent_attention",
    "latent_rope": "latent_attention", "linear": "linear", "linear_int4": "linear", "linear_int8": "linear",
    "mxfp4_experts": "mxfp4_experts", "mxfp4_mixture": "mxfp4_experts", "pack_blocks": "paged_rows",
    "pack_rows": "coded_rows", "packed_attention": "packed_attention",
    "packed_latent_attention": "packed_attention", "paged_attention": "paged_attention",
    "rms_norm": "elementwise", "rope_and_store": "rope_and_store", "select_tokens": "token_selection",
    "silu_mul": "elementwise", "unpack_mxfp4": "mxfp4", "unpack_rows": "coded_rows",
    "up_project_values": "absorbed_latents", "vector_product": "vector_product", "write_index": "token_selection",
}  # fmt: skip
IMPLEMENTATIONS = ("native", "runs", "triton", "reference", *EXTERNAL)
# Comparisons of `check` that found no difference, by op and implementation.
comparisons: Counter[tuple[str, str]] = Counter()
