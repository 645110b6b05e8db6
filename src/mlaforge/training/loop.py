"""The training loop: optimiser steps, and between them evaluation, gradual unfreezing, checkpoints and logs.

Everything that a killed run needs is in its work folder: `state-N` (what the optimiser's next step depends on) with
`state-N.json` (the loop's own history), and `best` (the trained tensors of the best evaluation).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, unfinished, writing
from mlaforge.data.packing import Feed, Rows
from mlaforge.runtime import Resumable, UserError, install, log, progress_bar, resolve_dtype
from mlaforge.tensor_store import TensorStore
from mlaforge.training import distributed
from mlaforge.training.optimizer import Hyperparameters, NotFinite, Optimizer

# The goal has to fall by this share to count as falling.
GAIN = 0.01
# The tensors after the last step, where those of the best evaluation are others.
LAST = "last_step.safetensors"


class Evaluator(Protocol):
    """Measures a student on text kept back, such as distillation.Validation. `goal` names the number that should fall,
    `shown` those that the bar shows."""

    goal: str
    shown: tuple[str, ...]

    def measure(self, model: Any) -> dict[str, Any]: ...

    def summary(self, metrics: dict[str, Any]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps between evaluations, and between checkpoints; evaluations without a gain after which more is unfrozen."""

    evaluate_every: int
    checkpoint_every: int
    patience: int = 1


class Options(Protocol):
    """What the options of every stage that trains have in common (its stage's config.py says what each is)."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def warm_up(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def micro_tokens(self) -> int: ...

    @property
    def evaluate_every(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def tensorboard(self) -> str | None: ...


class Trainer:
    """Runs an Optimizer from where it stopped to its last step. `subsets`: what learns first, and what is unfrozen
    later, by the names that `trainable` gives of each."""

    def __init__(
        self, what: str, optimizer: Optimizer, evaluator: Evaluator, intervals: Intervals, subsets: Sequence[str],
        trainable: Callable[[str], list[str]], work: Path, group: distributed.Group, writer: Any = None,
    ):  # fmt: skip
        self.what, self.optimizer, self.evaluator, self.intervals = what, optimizer, evaluator, intervals
        self.subsets, self.trainable = subsets, trainable
        self.work, self.group, self.writer = work, group, writer
        self.store = TensorStore(work)
        # subset: how many have joined the first; mark: the goal at the last gain; stale: evaluations since.
        self.history: dict[str, Any] = {
            "subset": 0, "mark": None, "stale": 0, "best": None, "curve": [], "losses": [], "seconds": 0.0
        }  # fmt: skip

    def run(self) -> None:
        """Trains to the end; the best weights are then in `best`."""
        self._resume()
        optimizer, steps = self.optimizer, self.optimizer.feed.steps
        if not self.history["curve"]:
            self._evaluate()
        begun, tokens = time.perf_counter(), 0
        with progress_bar(self.what, steps, initial=optimizer.step, disable=not self.group.first) as bar:
            while optimizer.step < steps:
                start = time.perf_counter()
                terms = optimizer.advance()
                tokens += self.tokens_of(optimizer.step - 1)
                self.history["seconds"] += time.perf_counter() - start
                self.history["losses"].append(float(f"{terms['loss']:.6g}"))
                speed = tokens / (time.perf_counter() - begun)
                last = self.history["curve"][-1]
                shown = {name: f"{last[name]:.4g}" for name in self.evaluator.shown}
                bar.set_postfix(loss=f"{terms['loss']:.4g}", **shown, tok_s=f"{speed:.0f}")
                bar.update()
                self._write_scalars({**terms, "tokens_per_second": speed}, "train")
                done = optimizer.step == steps
                if optimizer.step % self.intervals.evaluate_every == 0 or done:
                    self._evaluate(speed)
                if optimizer.step % self.intervals.checkpoint_every == 0 or done:
                    self._save()

    def tokens_of(self, step: int) -> int:
        """Tokens that a step reads."""
        number, _ = self.optimizer.feed.phase(step)
        return self.optimizer.feed.rows_per_step(number) * self.optimizer.feed.phases[number].rows.ids.shape[1]

    def _write_scalars(self, values: dict[str, Any], what: str) -> None:
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"{what}/{name}", value, self.optimizer.step)

    def _evaluate(self, speed: float = 0.0) -> None:
        """Measures on the text kept back; keeps the weights where they are the best yet, else may unfreeze more."""
        history, step = self.history, self.optimizer.step
        metrics = self.evaluator.measure(self.optimizer.objective)
        seen = sum(self.tokens_of(n) for n in range(step))
        point = {"step": step, "tokens": seen, "seconds": round(history["seconds"], 1), **metrics}
        recent = history["losses"][-self.intervals.evaluate_every :]
        point |= {"loss": sum(recent) / len(recent) if recent else None, "subset": self.subsets[history["subset"]]}
        history["curve"].append(point)
        self._write_scalars(metrics, "validation")
        if self.group.first:
            left = (self.optimizer.feed.steps - step) * history["seconds"] / max(1, step) / 60
            progress = f", loss {point['loss']:.4g}, {speed:.0f} tokens/s, {left:.0f} min left" if recent else ""
            log(f"step {step} of {self.optimizer.feed.steps}: {self.evaluator.summary(metrics)}{progress}")
        best, goal = history["best"], self.evaluator.goal
        if history["mark"] is None or metrics[goal] < (1 - GAIN) * history["mark"]:
            history["mark"], history["stale"] = metrics[goal], 0
        else:
            history["stale"] += 1
        if best is None or metrics[goal] < best[goal]:
            history["best"] = point
            tensors = {name: distributed.whole(tensor) for name, tensor in self.optimizer.weights().items()}
            if self.group.first:
                self.store["best"] = tensors
        if history["stale"] >= self.intervals.patience and history["subset"] + 1 < len(self.subsets):
            history["subset"] += 1
            history["mark"], history["stale"] = metrics[goal], 0
            self._unfreeze()

    def _unfreeze(self) -> None:
        subset = self.subsets[self.history["subset"]]
        self.optimizer.add_parameters(self.trainable(subset))
        if self.group.first:
            goal = self.evaluator.goal
            log(f"step {self.optimizer.step}: the validation {goal} has stopped falling, {subset} learns too")

    def _save(self) -> None:
        """A checkpoint: appears whole or not at all; earlier ones go when it is there."""
        name, state = f"state-{self.optimizer.step:08d}", self.optimizer.state()
        if self.group.first:
            (self.work / f"{name}.json").write_text(json.dumps(self.history), encoding="utf-8")
        if self.group.world == 1:
            self.store[name] = state
        else:
            unfinished = self.work / f"{name}.unfinished"
            distributed.save(unfinished, state)
            self.group.wait()
            if self.group.first:
                os.replace(unfinished, self.work / name)
        if self.group.first:
            for path in self.work.glob("state-*"):
                if not path.name.startswith(name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.group.wait()

    def _resume(self) -> None:
        whole = [p for p in self.work.glob("state-*") if p.suffix == ".safetensors" or (p.is_dir() and not p.suffix)]
        names = sorted(path.stem for path in whole)
        if not names:
            return
        name = names[-1]
        self.history = json.loads((self.work / f"{name}.json").read_text(encoding="utf-8"))
        for subset in self.subsets[1 : self.history["subset"] + 1]:
            self.optimizer.add_parameters(self.trainable(subset))
        state = self.optimizer.state()
        if (self.work / name).is_dir():
            distributed.load(self.work / name, state)
        else:
            state = {key: distributed.spread(tensor, state[key]) for key, tensor in self.store[name].items()}
        self.optimizer.restore(state)
        if self.group.first:
            log(f"going on after step {self.optimizer.step}")

    def trained(self, best: bool) -> dict[str, Tensor]:
        """The trained tensors by name, fp32: of the best evaluation, or as they are now (every process has to ask)."""
        if best:
            return self.store["best"]
        return {name: distributed.whole(tensor).cpu() for name, tensor in self.optimizer.weights().items()}

    def write_last(self, folder: Path, dtype: torch.dtype) -> None:
        """LAST into `folder`, where the best evaluation was an earlier step's (every process has to ask)."""
        from safetensors.torch import save_file

        if self.history["best"]["step"] == self.optimizer.step:
            return
        last = self.trained(best=False)
        if self.group.first:
            save_file({name: tensor.to(dtype) for name, tensor in last.items()}, folder / LAST)

    def metrics(self) -> dict[str, Any]:
        """What a manifest tells of the training: evaluations, the loss of every step, speed."""
        history, last = self.history, self.history["curve"][-1]
        return {
            "best": history["best"],
            "last": last,
            "tokens": last["tokens"],
            "tokens_per_second": last["tokens"] / history["seconds"] if history["seconds"] else None,
            "processes": self.group.world,
            "curve": history["curve"],
            "losses": history["losses"],
        }


def dtypes(name: str, group: distributed.Group) -> tuple[torch.dtype, torch.dtype]:
    """What a student computes in, by the option --dtype, and what its parameters are loaded in.

    Shards are kept in fp32; what is not sharded has its masters in the optimiser.
    """
    computed = resolve_dtype(name, torch.float32 if group.device.type == "cpu" else torch.bfloat16)
    return computed, torch.float32 if group.world > 1 else computed


def train(
    what: str, objective: Any, feed: Feed, evaluator: Evaluator, options: Options, partial: Path,
    group: distributed.Group, *, dtype: torch.dtype, subsets: Sequence[str], trainable: Callable[[str], list[str]],
    patience: int = 1, targets: Callable[[int, Rows], Any] | None = None, windowed: Collection[int] = (),
) -> Trainer:  # fmt: skip
    """Minimises an Objective, from where a killed run stopped to the last step, sharded where there are several
    processes.

    partial: the artifact under way; dtype: what is computed in; the rest is as Trainer and Optimizer have it.
    """
    if group.world > 1:
        distributed.shard(objective, group, dtype)
    hyperparameters = Hyperparameters(
        options.learning_rate, options.warm_up, options.weight_decay, options.micro_tokens
    )
    optimizer = Optimizer(
        objective, feed, hyperparameters, trainable(subsets[0]), device=group.device, rank=group.rank,
        world=group.world, targets=targets, windowed=windowed,
    )  # fmt: skip
    intervals = Intervals(options.evaluate_every, options.checkpoint_every, patience)
    writer = tensorboard_writer(options.tensorboard, group)
    trainer = Trainer(what, optimizer, evaluator, intervals, subsets, trainable, partial / WORK, group, writer)
    trainer.run()
    group.wait()
    return trainer


@contextmanager
def running(out: Path, manifest: Manifest, group: distributed.Group) -> Iterator[Path]:
    """`artifact.writing` by the first process, resumable, of a folder that all use. Where a loss is not finite, the
    batch is kept beside `out`, and what is raised says so."""
    with _writing(out, manifest, group) as partial:
        try:
            yield partial
        except NotFinite as error:
            kept = out.with_name(f"{out.name}.diverged.safetensors")
            if group.first:
                store = TensorStore(kept.parent)
                store[kept.stem] = {"input_ids": error.rows.ids, "position_ids": error.rows.positions}
            raise Resumable(
                f"the loss is not finite at step {error.step + 1}; its batch is in {kept}, the checkpoints in "
                f"{partial / WORK}; a smaller --learning-rate or another --dtype would help"
            ) from error


@contextmanager
def _writing(out: Path, manifest: Manifest, group: distributed.Group) -> Iterator[Path]:
    with ExitStack() as opened:
        partial, refusal = unfinished(out), None
        if group.first:
            try:
                partial = opened.enter_context(writing(out, manifest, resumable=True))
            except UserError as error:
                refusal = str(error)
        if refusal := group.from_first(refusal):
            raise UserError(refusal)
        yield partial
        group.wait()


def tensorboard_writer(folder: str | None, group: distributed.Group) -> Any:
    """TensorBoard's writer, None where no logs are wanted."""
    if folder is None or not group.first:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(f"tensorboard is missing: {install('heal')}") from error
    return SummaryWriter(folder)


def check_shares(feed: Feed, world: int) -> None:
    """UserError unless every step's rows can be dealt out evenly to the processes."""
    for number, phase in enumerate(feed.phases):
        if phase.steps and (count := feed.rows_per_step(number)) % world:
            raise UserError(f"{world} processes cannot share the {count} rows of a step; change batch_tokens")
