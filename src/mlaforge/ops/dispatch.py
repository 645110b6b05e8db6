"""Which implementation of an op runs, and the mode that compares it with the reference.

Order: the explicit argument, then $MLAFORGE_OPS, then the first registered one that supports the inputs; the reference
stands last. MLAFORGE_OPS is a list of words with commas: an implementation's name for every op, `op=name` for one, and
`check`, which runs the reference too and compares (it waits for the device: not inside a captured graph).
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
    """`supports` and `run` take the op's arguments; `supports` answers True or the reason why not, in a few words.

    It is chosen unasked only on devices of `device_type`; there, passing it over is logged with the reason, unless it
    is `quiet`, being made for some inputs only. `capturable`: it launches from host numbers alone, so that a CUDA graph
    can hold it.
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
        # Called before each run with the implementation's name and its inputs, for who counts calls.
        self.watch: Callable[[str, Sequence[Any]], None] | None = None
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
        """Runs the chosen implementation on `inputs`, whose first is a tensor on the device that counts.

        Raises UserError where a name is not known or the named one does not support the inputs.
        """
        wanted, checked = self._from_environment()
        name, run = self.choose(*inputs, implementation=implementation or wanted)
        if self.watch is not None:
            self.watch(name, inputs)
        outputs = run(*inputs)
        if checked and name != "reference":
            check(f"{self.name} {name}", inputs, outputs, self.reference(*inputs))
        return outputs

    def choose(self, *inputs: Any, implementation: str | None = None) -> tuple[str, Run]:
        """Name and function of what would run on `inputs`; raises as calling does."""
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
                runtime.log(f"{self.name}: not {name}: {reason}")
        return "reference", self.reference

    def capturable(self, *inputs: Any) -> bool:
        """Whether a CUDA graph can hold what calling with `inputs` would run; raises as calling does."""
        wanted, checked = self._from_environment()
        name, _ = self.choose(*inputs, implementation=wanted)
        return not checked and name in self.implementations and self.implementations[name].capturable

    def _from_environment(self) -> tuple[str | None, bool]:
        """The implementation that $MLAFORGE_OPS names for this op, if any, and whether to check it."""
        everywhere = here = None
        checked = False
        if not runtime.ops_choice():
            return None, False
        for word in filter(None, map(str.strip, runtime.ops_choice().split(","))):
            op, equals, name = word.partition("=")
            if word == "check":
                checked = True
            elif not equals:
                everywhere = word
            elif op == self.name:
                here = name
            elif find_spec(f"mlaforge.ops.{op}") is None:
                raise runtime.UserError(f"MLAFORGE_OPS names {op!r}, which is no op; this one is {self.name}")
        return here or everywhere, checked


# Every op that was made, by its name.
OPS: dict[str, Op] = {}
