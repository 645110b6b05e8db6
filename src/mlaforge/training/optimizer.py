"""The optimiser: AdamW on chosen parameters of a student, resumable to the bit, sharded or not.

A step reads its rows in micro-batches, sums their gradients in fp32, clips, and steps on fp32 masters. A master is
the parameter in units of its own size, row by row: rows of one converted projection differ by factors of thousands in
size, and AdamW moves every number by about the same.

All that the next step depends on is in `state`: masters, moments, and the number of the step, from which `packing.Feed`
knows the data. There is no other randomness, but torch's generator is kept too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlaforge.data.packing import Feed, Rows

# The unit of a row is at least this share of its matrix's size: a row of zeros may learn.
LEAST = 0.01
BETAS = (0.9, 0.98)
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The learning rate after `warm_up` (a share of all steps), from there a cosine down to 0; `micro_tokens`: tokens
    of a micro-batch. A matrix's rate is in units of each row's own size, a vector's is absolute."""

    learning_rate: float = 1e-3
    warm_up: float = 0.05
    weight_decay: float = 0.0
    micro_tokens: int = 2048

    def schedule(self, step: int, steps: int) -> float:
        """The share of the learning rate at a step (from 0)."""
        warm = max(1, int(self.warm_up * steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def unit(parameter: Tensor) -> Tensor:
    """The size of a matrix's rows, [..., rows, 1]: powers of two, so that division by it is exact. 1 for a vector."""
    if parameter.ndim < 2:
        return torch.ones_like(parameter)
    squares = parameter.square().mean(-1, keepdim=True)
    least = LEAST * squares.mean().sqrt() + torch.finfo(torch.float32).tiny
    return torch.exp2(torch.maximum(squares.sqrt(), least).log2().round())


class NotFinite(ArithmeticError):
    """The loss of a batch is NaN or infinite; `rows` are that batch."""

    def __init__(self, step: int, rows: Rows):
        super().__init__(step)
        self.step, self.rows = step, rows


class Objective(Protocol):
    """A student with all that its loss needs, such as distillation.Distillation."""

    @property
    def student(self) -> Any:
        """The module whose parameters are trained."""
        ...

    @property
    def terms(self) -> tuple[str, ...]:
        """What the loss is made of, itself first."""
        ...

    def __call__(self, rows: Rows, targets: Any = None) -> Tensor:
        """The terms of a batch, the first with its gradient. Means over rows: a batch may come in parts."""
        ...


class Optimizer:
    """AdamW on the parameters `names` of an Objective's student. `rank` and `world` say which share of a step's rows is
    its own; `targets` gives the soft targets of rows of a phase, where the Objective has no teacher; `windowed` are the
    layers with a sliding window."""

    def __init__(
        self, objective: Objective, feed: Feed, hyperparameters: Hyperparameters, names: list[str], *,
        device: torch.device | str = "cpu", rank: int = 0, world: int = 1,
        targets: Callable[[int, Rows], Any] | None = None, windowed: Collection[int] = (),
    ):  # fmt: skip
        self.objective, self.feed, self.device = objective, feed, torch.device(device)
        self.hyperparameters = hyperparameters
        self.rank, self.world, self.targets, self.windowed = rank, world, targets, windowed
        self.step = 0
        self.masters: dict[str, nn.Parameter] = {}
        self.units: dict[str, Tensor] = {}
        # Nothing decays by default: the parameters start where the function is nearly right.
        self.adamw = torch.optim.AdamW(
            [{"params": []}], lr=hyperparameters.learning_rate, betas=BETAS, weight_decay=hyperparameters.weight_decay
        )
        self.add_parameters(names)

    def add_parameters(self, names: list[str]) -> None:
        """Adds parameters to those that are trained."""
        own = dict(self.objective.student.named_parameters())
        fresh = [name for name in names if name in own and name not in self.masters]
        for name in fresh:
            parameter = own[name].requires_grad_(True).detach().float()
            self.units[name] = unit(parameter)
            self.masters[name] = nn.Parameter(parameter / self.units[name])
        if fresh:
            self.adamw.add_param_group({"params": [self.masters[name] for name in fresh]})

    def advance(self) -> dict[str, float]:
        """One step: the terms of its loss, and the norm of its gradient before clipping. Raises NotFinite."""
        number, _ = self.feed.phase(self.step)
        batch = self.feed.batch(self.step)
        T = batch.ids.shape[1]
        own = torch.arange(self.rank, len(batch), self.world)
        at_once = max(1, self.hyperparameters.micro_tokens // T)
        terms = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=self.device)
        for rows in own.split(at_once):
            part = batch.take(rows).to(self.device)
            part_terms = self.objective(part, self.targets(number, part) if self.targets else None)
            share = len(rows) / len(own)
            terms += part_terms.detach().double() * share
            (part_terms[0] * share).backward()
            self._collect()
        terms = self._mean(terms)
        if not bool(torch.isfinite(terms).all()):
            raise NotFinite(self.step, batch)
        self._freeze(self.feed.phases[number].windowed)
        norm = self._apply()
        self.step += 1
        return {**dict(zip(self.objective.terms, terms.tolist(), strict=True)), "gradient": norm}

    def _mean(self, terms: Tensor) -> Tensor:
        if self.world > 1:
            torch.distributed.all_reduce(terms)
            terms /= self.world
        return terms

    def _collect(self) -> None:
        """Adds gradients to their masters'."""
        own = dict(self.objective.student.named_parameters())
        for name, master in self.masters.items():
            parameter = own[name]
            if parameter.grad is not None:
                grad = parameter.grad.float() * self.units[name]
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None

    def _freeze(self, windowed: bool | None) -> None:
        """Forgets the gradients of what does not learn in this phase."""
        for name, master in self.masters.items() if windowed is not None else ():
            layer = name.removeprefix("model.layers.").split(".")[0]
            if not layer.isdigit() or (int(layer) in self.windowed) != windowed:
                master.grad = None

    def _apply(self) -> float:
        share = self.hyperparameters.schedule(self.step, self.feed.steps)
        for group in self.adamw.param_groups:
            group["lr"] = self.hyperparameters.learning_rate * share
        norm: Any = nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.push()
        return float(norm)

    @torch.no_grad()
    def push(self) -> None:
        """Masters -> the student's own parameters."""
        own = dict(self.objective.student.named_parameters())
        for name, tensor in self.weights().items():
            own[name].copy_(tensor)

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, fp32."""
        return {name: master.detach() * self.units[name] for name, master in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on, by name; sharded tensors stay sharded."""
        kept: dict[str, Tensor] = {"rng": torch.get_rng_state(), "step": torch.tensor([self.step])}
        for name, master in self.masters.items():
            kept[f"master.{name}"] = master.detach()
            # What has had no gradient yet has no moments; these are what it would begin with.
            moments = self.adamw.state.get(master) or {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)
            }  # fmt: skip
            kept |= {f"{key}.{name}": value.detach().reshape(value.shape or 1) for key, value in moments.items()}
        return kept

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        """Takes up the `state` of an optimiser of the same parameters."""
        for name, master in self.masters.items():
            master.copy_(kept[f"master.{name}"])
            moments = {key: kept[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[master] = {"step": kept[f"step.{name}"].reshape(()), **moments}
        self.push()
        torch.set_rng_state(kept["rng"])
        self.step = int(kept["step"])
