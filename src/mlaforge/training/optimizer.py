"""AdamW on selected parameters of a student, with gradient accumulation, fp32 master weights and bitwise resumption.

A training step accumulates the gradients of its micro-batches in fp32, clips them, and updates the master weights. A
master weight is the parameter divided by the scale of its row: rows of one converted projection differ in size by
factors of thousands, whereas AdamW changes every element by about the same amount.

`state` contains everything that the next step depends on: master weights, moments, and the step number, from which
`packing.Feed` derives the data. Nothing else is random, but the state of torch's generator is included too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlaforge.data.packing import Feed, Rows

# Minimum scale of a row, as a share of the root mean square of its matrix, so that a row of zeros can learn.
MIN_ROW_SCALE = 0.01
BETAS = (0.9, 0.98)
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of the optimiser.

    learning_rate: peak, relative to the scale of each row for matrices, absolute for vectors. warm_up: fraction of all
    steps with linear warm-up; cosine decay to zero follows. micro_tokens: tokens per micro-batch.
    """

    learning_rate: float = 1e-3
    warm_up: float = 0.05
    weight_decay: float = 0.0
    micro_tokens: int = 2048

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate at a step (from 0)."""
        warm_up_steps = max(1, int(self.warm_up * steps))
        if step < warm_up_steps:
            return (step + 1) / warm_up_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up_steps) / max(1, steps - warm_up_steps)))


def row_scales(parameter: Tensor) -> Tensor:
    """Return the scale of each row of a matrix, [..., rows, 1]: its root mean square, rounded to a power of two so that
    division is exact. Ones for a vector."""
    if parameter.ndim < 2:
        return torch.ones_like(parameter)
    squares = parameter.square().mean(-1, keepdim=True)
    minimum = MIN_ROW_SCALE * squares.mean().sqrt() + torch.finfo(torch.float32).tiny
    return torch.exp2(torch.maximum(squares.sqrt(), minimum).log2().round())


class NonFiniteLoss(ArithmeticError):
    """The loss of a batch is NaN or infinite; `rows` is that batch."""

    def __init__(self, step: int, rows: Rows):
        super().__init__(step)
        self.step, self.rows = step, rows


class Objective(Protocol):
    """A student with everything that its loss needs, such as distillation.Distillation."""

    @property
    def student(self) -> Any:
        """The module whose parameters are trained."""
        ...

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, the total loss first."""
        ...

    def __call__(self, rows: Rows, targets: Any = None) -> Tensor:
        """Return the loss terms of a micro-batch, means over its rows; only the first carries a gradient."""
        ...


class Optimizer:
    """AdamW on the parameters `names` of an Objective's student.

    rank, world_size: this process reads rows rank, rank + world_size, ... of each batch. targets: phase and rows ->
    soft targets, for an Objective without a teacher. windowed: layers with a sliding window.
    """

    def __init__(
        self, objective: Objective, feed: Feed, hyperparameters: Hyperparameters, names: list[str], *,
        device: torch.device | str = "cpu", rank: int = 0, world_size: int = 1,
        targets: Callable[[int, Rows], Any] | None = None, windowed: Collection[int] = (),
    ):  # fmt: skip
        self.objective, self.feed, self.device = objective, feed, torch.device(device)
        self.hyperparameters = hyperparameters
        self.rank, self.world_size, self.targets, self.windowed = rank, world_size, targets, windowed
        self.step = 0
        self.masters: dict[str, nn.Parameter] = {}
        self.scales: dict[str, Tensor] = {}
        # No weight decay by default: the parameters start close to the optimum.
        self.adamw = torch.optim.AdamW(
            [{"params": []}], lr=hyperparameters.learning_rate, betas=BETAS, weight_decay=hyperparameters.weight_decay
        )
        self.add_parameters(names)

    def add_parameters(self, names: list[str]) -> None:
        """Add parameters to the trained ones; unknown and already trained names are ignored."""
        parameters = dict(self.objective.student.named_parameters())
        added = [name for name in names if name in parameters and name not in self.masters]
        for name in added:
            parameter = parameters[name].requires_grad_(True).detach().float()
            self.scales[name] = row_scales(parameter)
            self.masters[name] = nn.Parameter(parameter / self.scales[name])
        if added:
            self.adamw.add_param_group({"params": [self.masters[name] for name in added]})

    def training_step(self) -> dict[str, float]:
        """Run one step. Return the terms of its loss, and the gradient norm before clipping as `gradient`.

        Raises NonFiniteLoss.
        """
        number, _ = self.feed.phase(self.step)
        batch = self.feed.batch(self.step)
        T = batch.ids.shape[1]
        rank_rows = torch.arange(self.rank, len(batch), self.world_size)
        micro_rows = max(1, self.hyperparameters.micro_tokens // T)
        terms = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=self.device)
        for rows in rank_rows.split(micro_rows):
            micro_batch = batch.take(rows).to(self.device)
            micro_terms = self.objective(micro_batch, self.targets(number, micro_batch) if self.targets else None)
            share = len(rows) / len(rank_rows)
            terms += micro_terms.detach().double() * share
            (micro_terms[0] * share).backward()
            self._accumulate_gradients()
        terms = self._mean(terms)
        if not bool(torch.isfinite(terms).all()):
            raise NonFiniteLoss(self.step, batch)
        self._mask_gradients(self.feed.phases[number].windowed)
        norm = self._update()
        self.step += 1
        return {**dict(zip(self.objective.terms, terms.tolist(), strict=True)), "gradient": norm}

    def _mean(self, terms: Tensor) -> Tensor:
        if self.world_size > 1:
            torch.distributed.all_reduce(terms)
            terms /= self.world_size
        return terms

    def _accumulate_gradients(self) -> None:
        """Move the gradients of the student's parameters to the master weights, scaled, in fp32."""
        parameters = dict(self.objective.student.named_parameters())
        for name, master in self.masters.items():
            parameter = parameters[name]
            if parameter.grad is not None:
                grad = parameter.grad.float() * self.scales[name]
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None

    def _mask_gradients(self, windowed: bool | None) -> None:
        """Drop the gradients of layers that are not trained in this phase."""
        for name, master in self.masters.items() if windowed is not None else ():
            layer = name.removeprefix("model.layers.").split(".")[0]
            if not layer.isdigit() or (int(layer) in self.windowed) != windowed:
                master.grad = None

    def _update(self) -> float:
        factor = self.hyperparameters.lr_factor(self.step, self.feed.steps)
        for group in self.adamw.param_groups:
            group["lr"] = self.hyperparameters.learning_rate * factor
        norm: Any = nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.copy_to_student()
        return float(norm)

    @torch.no_grad()
    def copy_to_student(self) -> None:
        """Copy the trained weights into the student's parameters."""
        parameters = dict(self.objective.student.named_parameters())
        for name, tensor in self.weights().items():
            parameters[name].copy_(tensor)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, fp32."""
        return {name: master.detach() * self.scales[name] for name, master in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on, by name; sharded tensors stay sharded."""
        state: dict[str, Tensor] = {"rng": torch.get_rng_state(), "step": torch.tensor([self.step])}
        for name, master in self.masters.items():
            state[f"master.{name}"] = master.detach()
            # AdamW creates moments with the first gradient; these are its initial values.
            moments = self.adamw.state.get(master) or {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)
            }  # fmt: skip
            state |= {f"{key}.{name}": value.detach().reshape(value.shape or 1) for key, value in moments.items()}
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the `state` of an optimiser of the same parameters."""
        for name, master in self.masters.items():
            master.copy_(state[f"master.{name}"])
            moments = {key: state[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[master] = {"step": state[f"step.{name}"].reshape(()), **moments}
        self.copy_to_student()
        torch.set_rng_state(state["rng"])
        self.step = int(state["step"])
