"""Selection of an op's implementation, and the mode that compares it with the reference.

Order: the explicit argument, then $MLAFORGE_OPS, then the first registered implementation that supports the inputs,
last the reference. MLAFORGE_OPS is a comma-separated list: an implementation's name for every op, `op=name` for one op,
and `check`, which also runs the reference and compares (it synchronises, so not within a captured graph).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor

from mlaforge import runtime
from mlaforge.ops.check import check

Supports = Callable[..., "Literal[True] | str"]
Run = Callable[..., tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of an op. `supports` and `run` take the op's arguments; `supports` returns True or a short
    reason.

    It is chosen automatically only on devices of `device_type`. If it is skipped there, the reason is logged, unless it
    is `quiet` because it supports only some inputs. `capturable`: its launches depend only on host values, so a CUDA
    graph can capture it.
    """

    name: str
    run: Run
    supports: Supports
    device_type: str
    quiet: bool = False
    capturable: bool = False


class Op:
    """An operation with a reference and any number of faster implementations, tried in the order of registration."""

    def __init__(self, name: str, reference: Run):
        self.name = name
        self.reference = reference
        self.implementations: dict[str, Implementation] = {}
        # Called before each run with the implementation's name and its inputs, e.g. to count calls.
        self.hook: Callable[[str, Sequence[Any]], None] | None = None
        assert name not in OPS, name
        OPS[name] = self
        self._logged: set[tuple[str, str]] = set()

    def register(
        self, name: str, run: Run, supports: Supports, device_type: str, quiet: bool = False, capturable: bool = False
    ) -> None:
        assert name not in self.names and name != "check", name
        self.implementations[name] = Implementation(name, run, supports, device_type, quiet, capturable)

    @property
    def names(self) -> list[str]:
        return [*self.implementations, "reference"]

    def __call__(self, *inputs: Any, implementation: str | None = None) -> tuple[Tensor, ...]:
        """Run the selected implementation on `inputs`; the device of the first one decides.

        Raises UserError if the name is unknown or the named implementation does not support the inputs.
        """
        choice, check_mode = self._from_environment()
        name, run = self.choose(*inputs, implementation=implementation or choice)
        if self.hook is not None:
            self.hook(name, inputs)
        outputs = run(*inputs)
        if check_mode and name != "reference":
            check(f"{self.name} {name}", inputs, outputs, self.reference(*inputs))
        return outputs

    def choose(self, *inputs: Any, implementation: str | None = None) -> tuple[str, Run]:
        """Return the name and function that would run on `inputs`. Raises as __call__ does."""
        if implementation == "reference":
            return "reference", self.reference
        if implementation is not None:
            if implementation not in self.implementations:
                known = ", ".join(self.names)
                raise runtime.UserError(f"{self.name} has no implementation {implementation!r}; it has {known}")
            chosen = self.implementations[implementation]
            if (reason := chosen.supports(*inputs)) is not True:
                raise runtime.UserError(f"{self.name}: {implementation} cannot run here: {reason}")
            return implementation, chosen.run
        for name, candidate in self.implementations.items():
            if candidate.device_type != inputs[0].device.type:
                continue
            reason = candidate.supports(*inputs)
            if reason is True:
                return name, candidate.run
            if not candidate.quiet and (name, reason) not in self._logged:
                self._logged.add((name, reason))
                runtime.log(f"{self.name}: {name} is not used: {reason}")
        return "reference", self.reference

    def capturable(self, *inputs: Any) -> bool:
        """Whether a CUDA graph can capture a call with `inputs`. Raises as __call__ does."""
        choice, check_mode = self._from_environment()
        name, _ = self.choose(*inputs, implementation=choice)
        return not check_mode and name in self.implementations and self.implementations[name].capturable

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
                default = word
            elif op == self.name:
                override = name
            elif find_spec(f"mlaforge.ops.{op}") is None:
                raise runtime.UserError(f"MLAFORGE_OPS names {op!r}, which is not an op; this op is {self.name}")
        return override or default, check_mode


# All ops by name.
OPS: dict[str, Op] = {}
