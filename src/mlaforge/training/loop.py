"""The training loop: optimiser steps with evaluation, gradual unfreezing, checkpoints and logs.

An interrupted run resumes from its work folder: `state-N` (the optimiser's state), `state-N.json` (the loop's history)
and `best` (the trained tensors of the best evaluation).
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
from mlaforge.training.optimizer import Hyperparameters, NonFiniteLoss, Optimizer

# Relative decrease of the metric that counts as an improvement.
MIN_IMPROVEMENT = 0.01
# The weights after the last step, if they are not those of the best evaluation.
LAST_WEIGHTS = "last_step.safetensors"


class Evaluator(Protocol):
    """Evaluates a student on validation text, such as distillation.Validation.

    metric_for_best: name of the metric to minimise. progress_metrics: names of those in the progress bar.
    """

    metric_for_best: str
    progress_metrics: tuple[str, ...]

    def measure(self, model: Any) -> dict[str, Any]: ...

    def summary(self, metrics: dict[str, Any]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps between evaluations and between checkpoints; evaluations without improvement before the next unfreezing."""

    evaluate_every: int
    checkpoint_every: int
    patience: int = 1


class Options(Protocol):
    """Options common to all stages that train; each stage's config.py describes them."""

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
    """Runs an Optimizer to its last step, resuming from the last checkpoint in `work`.

    subsets: names of parameter subsets; the first is trained from the start, the others are unfrozen in order.
    trainable: subset -> parameter names.
    """

    def __init__(
        self, stage: str, optimizer: Optimizer, evaluator: Evaluator, intervals: Intervals, subsets: Sequence[str],
        trainable: Callable[[str], list[str]], work: Path, group: distributed.ProcessGroup, writer: Any = None,
    ):  # fmt: skip
        self.stage, self.optimizer, self.evaluator, self.intervals = stage, optimizer, evaluator, intervals
        self.subsets, self.trainable = subsets, trainable
        self.work, self.group, self.writer = work, group, writer
        self.store = TensorStore(work)
        # subset: index of the last unfrozen subset; mark: the metric at the last improvement; stale: evaluations since.
        self.history: dict[str, Any] = {
            "subset": 0, "mark": None, "stale": 0, "best": None, "curve": [], "losses": [], "seconds": 0.0
        }  # fmt: skip

    def run(self) -> None:
        """Train to the last step; the store then contains the weights of the best evaluation as `best`."""
        self._resume()
        optimizer, steps = self.optimizer, self.optimizer.feed.steps
        if not self.history["curve"]:
            self._evaluate()
        started, tokens = time.perf_counter(), 0
        with progress_bar(self.stage, steps, initial=optimizer.step, disable=not self.group.is_main_process) as bar:
            while optimizer.step < steps:
                start = time.perf_counter()
                terms = optimizer.training_step()
                tokens += self.tokens_in_step(optimizer.step - 1)
                self.history["seconds"] += time.perf_counter() - start
                self.history["losses"].append(float(f"{terms['loss']:.6g}"))
                speed = tokens / (time.perf_counter() - started)
                last = self.history["curve"][-1]
                metrics = {name: f"{last[name]:.4g}" for name in self.evaluator.progress_metrics}
                bar.set_postfix(loss=f"{terms['loss']:.4g}", **metrics, tok_s=f"{speed:.0f}")
                bar.update()
                self._write_scalars({**terms, "tokens_per_second": speed}, "train")
                is_last_step = optimizer.step == steps
                if optimizer.step % self.intervals.evaluate_every == 0 or is_last_step:
                    self._evaluate(speed)
                if optimizer.step % self.intervals.checkpoint_every == 0 or is_last_step:
                    self._save()

    def tokens_in_step(self, step: int) -> int:
        """Return the number of tokens that a step reads."""
        number, _ = self.optimizer.feed.phase(step)
        return self.optimizer.feed.rows_per_step(number) * self.optimizer.feed.phases[number].rows.ids.shape[1]

    def _write_scalars(self, values: dict[str, Any], prefix: str) -> None:
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"{prefix}/{name}", value, self.optimizer.step)

    def _evaluate(self, speed: float = 0.0) -> None:
        """Evaluate on validation text; store the best weights so far; unfreeze the next subset if patience is spent."""
        history, step = self.history, self.optimizer.step
        metrics = self.evaluator.measure(self.optimizer.objective)
        tokens = sum(self.tokens_in_step(n) for n in range(step))
        point = {"step": step, "tokens": tokens, "seconds": round(history["seconds"], 1), **metrics}
        recent = history["losses"][-self.intervals.evaluate_every :]
        point |= {"loss": sum(recent) / len(recent) if recent else None, "subset": self.subsets[history["subset"]]}
        history["curve"].append(point)
        self._write_scalars(metrics, "validation")
        if self.group.is_main_process:
            minutes_left = (self.optimizer.feed.steps - step) * history["seconds"] / max(1, step) / 60
            speeds = f"{speed:.0f} tokens/s, {minutes_left:.0f} min left"
            progress = f", loss {point['loss']:.4g}, {speeds}" if recent else ""
            log(f"step {step} of {self.optimizer.feed.steps}: {self.evaluator.summary(metrics)}{progress}")
        best, value = history["best"], metrics[self.evaluator.metric_for_best]
        if history["mark"] is None or value < (1 - MIN_IMPROVEMENT) * history["mark"]:
            history["mark"], history["stale"] = value, 0
        else:
            history["stale"] += 1
        if best is None or value < best[self.evaluator.metric_for_best]:
            history["best"] = point
            tensors = {name: distributed.full_tensor(tensor) for name, tensor in self.optimizer.weights().items()}
            if self.group.is_main_process:
                self.store["best"] = tensors
        if history["stale"] >= self.intervals.patience and history["subset"] + 1 < len(self.subsets):
            history["subset"] += 1
            history["mark"], history["stale"] = value, 0
            self._unfreeze()

    def _unfreeze(self) -> None:
        subset = self.subsets[self.history["subset"]]
        self.optimizer.add_parameters(self.trainable(subset))
        if self.group.is_main_process:
            metric = self.evaluator.metric_for_best
            log(f"step {self.optimizer.step}: the validation {metric} has stopped falling; unfreezing {subset}")

    def _save(self) -> None:
        """Write a checkpoint atomically, then delete the earlier ones."""
        name, state = f"state-{self.optimizer.step:08d}", self.optimizer.state()
        if self.group.is_main_process:
            (self.work / f"{name}.json").write_text(json.dumps(self.history), encoding="utf-8")
        if self.group.world_size == 1:
            self.store[name] = state
        else:
            unfinished = self.work / f"{name}.unfinished"
            distributed.save(unfinished, state)
            self.group.barrier()
            if self.group.is_main_process:
                os.replace(unfinished, self.work / name)
        if self.group.is_main_process:
            for path in self.work.glob("state-*"):
                if not path.name.startswith(name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.group.barrier()

    def _resume(self) -> None:
        # A folder with a suffix is unfinished.
        paths = self.work.glob("state-*")
        names = sorted(p.stem for p in paths if p.suffix == ".safetensors" or (p.is_dir() and not p.suffix))
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
            state = {key: distributed.distribute(tensor, state[key]) for key, tensor in self.store[name].items()}
        self.optimizer.restore(state)
        if self.group.is_main_process:
            log(f"resuming after step {self.optimizer.step}")

    def trained_weights(self, best: bool) -> dict[str, Tensor]:
        """Return the trained weights by name, fp32: those of the best evaluation, or the current ones (collective)."""
        if best:
            return self.store["best"]
        return {name: distributed.full_tensor(tensor).cpu() for name, tensor in self.optimizer.weights().items()}

    def write_last_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """Write LAST_WEIGHTS into `folder`, unless the last step is the best one (collective)."""
        from safetensors.torch import save_file

        if self.history["best"]["step"] == self.optimizer.step:
            return
        last = self.trained_weights(best=False)
        if self.group.is_main_process:
            save_file({name: tensor.to(dtype) for name, tensor in last.items()}, folder / LAST_WEIGHTS)

    def metrics(self) -> dict[str, Any]:
        """Return the manifest's metrics: evaluations, the loss of every step, speed."""
        history, last = self.history, self.history["curve"][-1]
        return {
            "best": history["best"],
            "last": last,
            "tokens": last["tokens"],
            "tokens_per_second": last["tokens"] / history["seconds"] if history["seconds"] else None,
            "processes": self.group.world_size,
            "curve": history["curve"],
            "losses": history["losses"],
        }


def student_dtypes(name: str, group: distributed.ProcessGroup) -> tuple[torch.dtype, torch.dtype]:
    """Return the student's compute dtype (option --dtype) and the dtype of its parameters.

    Sharded parameters are stored in fp32; otherwise the optimiser has fp32 master weights.
    """
    compute_dtype = resolve_dtype(name, torch.float32 if group.device.type == "cpu" else torch.bfloat16)
    return compute_dtype, torch.float32 if group.world_size > 1 else compute_dtype


def train(
    stage: str, objective: Any, feed: Feed, evaluator: Evaluator, options: Options, partial: Path,
    group: distributed.ProcessGroup, *, dtype: torch.dtype, subsets: Sequence[str],
    trainable: Callable[[str], list[str]], patience: int = 1, targets: Callable[[int, Rows], Any] | None = None,
    windowed: Collection[int] = (),
) -> Trainer:  # fmt: skip
    """Minimise an Objective to the last step, resuming an interrupted run; sharded if there are several processes.

    partial: directory of the unfinished artifact. dtype: compute dtype. For the others see Trainer and Optimizer.
    """
    if group.world_size > 1:
        distributed.shard(objective, group, dtype)
    hyperparameters = Hyperparameters(
        options.learning_rate, options.warm_up, options.weight_decay, options.micro_tokens
    )
    optimizer = Optimizer(
        objective, feed, hyperparameters, trainable(subsets[0]), device=group.device, rank=group.rank,
        world_size=group.world_size, targets=targets, windowed=windowed,
    )  # fmt: skip
    intervals = Intervals(options.evaluate_every, options.checkpoint_every, patience)
    writer = tensorboard_writer(options.tensorboard, group)
    trainer = Trainer(stage, optimizer, evaluator, intervals, subsets, trainable, partial / WORK, group, writer)
    trainer.run()
    group.barrier()
    return trainer


@contextmanager
def training_artifact(out: Path, manifest: Manifest, group: distributed.ProcessGroup) -> Iterator[Path]:
    """`artifact.writing` (resumable) for all processes, written by rank 0.

    On a non-finite loss, save the batch beside `out` and raise Resumable with its path.
    """
    with _writing(out, manifest, group) as partial:
        try:
            yield partial
        except NonFiniteLoss as error:
            batch_file = out.with_name(f"{out.name}.diverged.safetensors")
            if group.is_main_process:
                store = TensorStore(batch_file.parent)
                store[batch_file.stem] = {"input_ids": error.rows.ids, "position_ids": error.rows.positions}
            raise Resumable(
                f"the loss is not finite at step {error.step + 1}; its batch is in {batch_file}, the checkpoints in "
                f"{partial / WORK}; use a smaller --learning-rate or another --dtype"
            ) from error


@contextmanager
def _writing(out: Path, manifest: Manifest, group: distributed.ProcessGroup) -> Iterator[Path]:
    with ExitStack() as opened:
        partial, failure = unfinished(out), None
        if group.is_main_process:
            try:
                partial = opened.enter_context(writing(out, manifest, resumable=True))
            except UserError as error:
                failure = str(error)
        if failure := group.broadcast(failure):
            raise UserError(failure)
        yield partial
        group.barrier()


def tensorboard_writer(folder: str | None, group: distributed.ProcessGroup) -> Any:
    """Return TensorBoard's writer, or None without a folder and on other ranks than 0."""
    if folder is None or not group.is_main_process:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(f"tensorboard is missing: {install('heal')}") from error
    return SummaryWriter(folder)


def check_divisible(feed: Feed, world_size: int) -> None:
    """Raise UserError unless the rows of every step divide evenly among the processes."""
    for number, phase in enumerate(feed.phases):
        if phase.steps and (count := feed.rows_per_step(number)) % world_size:
            raise UserError(f"{world_size} processes cannot share the {count} rows of a step; change batch_tokens")
