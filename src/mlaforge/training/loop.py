"""The course of a training: steps, and between them evaluation, growing subsets, checkpoints, and what a person sees.

Everything that a killed run needs is in its work folder: `state-N` (what the trainer's next step depends on) with
`state-N.json` (this file's own memory), and `best` (the trained tensors of the best evaluation).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, writing
from mlaforge.data.packing import Feed, Rows
from mlaforge.runtime import Resumable, UserError, log, resolve_dtype
from mlaforge.tensor_store import Spill
from mlaforge.training import distributed
from mlaforge.training.optimizer import NotFinite, Pace, Trainer

# The goal has to fall by this share to count as falling.
GAIN = 0.01
# The tensors after the last step, where those of the best evaluation are others.
LAST = "last_step.safetensors"


class Judge(Protocol):
    """Measures what is trained on text kept back, such as distill.Validation. `goal` names the number that should
    fall, `shown` those that the bar shows."""

    goal: str
    shown: tuple[str, ...]

    def measure(self, model: Any) -> dict[str, Any]: ...

    def told(self, found: dict[str, Any]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Marks:
    """Steps between evaluations, and between checkpoints; evaluations without a gain after which the subset grows."""

    evaluate_every: int
    checkpoint_every: int
    patience: int = 1


class Options(Protocol):
    """What the options of every stage that trains have in common (options.py says what each is)."""

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


class Course:
    """Runs a Trainer from where it stopped to its last step. `subsets`: what learns first, and what joins later, by the
    names that `trainable` gives of each."""

    def __init__(
        self, what: str, trainer: Trainer, judge: Judge, marks: Marks, subsets: Sequence[str],
        trainable: Callable[[str], list[str]], work: Path, group: distributed.Group, board: Any = None,
    ):  # fmt: skip
        self.what, self.trainer, self.judge, self.marks = what, trainer, judge, marks
        self.subsets, self.trainable = subsets, trainable
        self.work, self.group, self.board = work, group, board
        self.spill = Spill(work)
        # subset: how many have joined the first; mark: the goal at the last gain; stale: evaluations since.
        self.memory: dict[str, Any] = {
            "subset": 0, "mark": None, "stale": 0, "best": None, "curve": [], "losses": [], "seconds": 0.0
        }  # fmt: skip

    def run(self) -> None:
        """Trains to the end; the best weights are then in `best`."""
        from tqdm import tqdm

        self._resume()
        trainer, steps = self.trainer, self.trainer.feed.steps
        if not self.memory["curve"]:
            self._evaluate()
        begun, tokens = time.perf_counter(), 0
        with tqdm(
            total=steps, initial=trainer.step, desc=self.what, delay=2.0, leave=False, dynamic_ncols=True,
            disable=not self.group.first,
        ) as bar:  # fmt: skip
            while trainer.step < steps:
                start = time.perf_counter()
                found = trainer.advance()
                tokens += self.tokens_of(trainer.step - 1)
                self.memory["seconds"] += time.perf_counter() - start
                self.memory["losses"].append(float(f"{found['loss']:.6g}"))
                speed = tokens / (time.perf_counter() - begun)
                last = self.memory["curve"][-1]
                shown = {name: f"{last[name]:.4g}" for name in self.judge.shown}
                bar.set_postfix(loss=f"{found['loss']:.4g}", **shown, tok_s=f"{speed:.0f}")
                bar.update()
                self._chart({**found, "tokens_per_second": speed}, "train")
                done = trainer.step == steps
                if trainer.step % self.marks.evaluate_every == 0 or done:
                    self._evaluate(speed)
                if trainer.step % self.marks.checkpoint_every == 0 or done:
                    self._save()

    def tokens_of(self, step: int) -> int:
        """Tokens that a step reads."""
        number, _ = self.trainer.feed.phase(step)
        return self.trainer.feed.rows_per_step(number) * self.trainer.feed.phases[number].rows.ids.shape[1]

    def _chart(self, values: dict[str, Any], what: str) -> None:
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{what}/{name}", value, self.trainer.step)

    def _evaluate(self, speed: float = 0.0) -> None:
        """Measures on the text kept back; keeps the weights where they are the best yet, else may grow the subset."""
        memory, step = self.memory, self.trainer.step
        found = self.judge.measure(self.trainer.model)
        seen = sum(self.tokens_of(n) for n in range(step))
        point = {"step": step, "tokens": seen, "seconds": round(memory["seconds"], 1), **found}
        recent = memory["losses"][-self.marks.evaluate_every :]
        point |= {"loss": sum(recent) / len(recent) if recent else None, "subset": self.subsets[memory["subset"]]}
        memory["curve"].append(point)
        self._chart(found, "validation")
        if self.group.first:
            left = (self.trainer.feed.steps - step) * memory["seconds"] / max(1, step) / 60
            told = f", loss {point['loss']:.4g}, {speed:.0f} tokens/s, {left:.0f} min left" if recent else ""
            log(f"step {step} of {self.trainer.feed.steps}: {self.judge.told(found)}{told}")
        best, goal = memory["best"], self.judge.goal
        if memory["mark"] is None or found[goal] < (1 - GAIN) * memory["mark"]:
            memory["mark"], memory["stale"] = found[goal], 0
        else:
            memory["stale"] += 1
        if best is None or found[goal] < best[goal]:
            memory["best"] = point
            tensors = {name: distributed.whole(tensor) for name, tensor in self.trainer.weights().items()}
            if self.group.first:
                self.spill["best"] = tensors
        if memory["stale"] >= self.marks.patience and memory["subset"] + 1 < len(self.subsets):
            memory["subset"] += 1
            memory["mark"], memory["stale"] = found[goal], 0
            self._grow()

    def _grow(self) -> None:
        subset = self.subsets[self.memory["subset"]]
        self.trainer.train(self.trainable(subset))
        if self.group.first:
            log(f"step {self.trainer.step}: the validation {self.judge.goal} has stopped falling, {subset} learns too")

    def _save(self) -> None:
        """A checkpoint: appears whole or not at all; earlier ones go when it is there."""
        name, state = f"state-{self.trainer.step:08d}", self.trainer.state()
        if self.group.first:
            (self.work / f"{name}.json").write_text(json.dumps(self.memory), encoding="utf-8")
        if self.group.world == 1:
            self.spill[name] = state
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
        self.memory = json.loads((self.work / f"{name}.json").read_text(encoding="utf-8"))
        for subset in self.subsets[1 : self.memory["subset"] + 1]:
            self.trainer.train(self.trainable(subset))
        state = self.trainer.state()
        if (self.work / name).is_dir():
            distributed.load(self.work / name, state)
        else:
            state = {key: distributed.spread(tensor, state[key]) for key, tensor in self.spill[name].items()}
        self.trainer.restore(state)
        if self.group.first:
            log(f"going on after step {self.trainer.step}")

    def trained(self, best: bool) -> dict[str, Tensor]:
        """The trained tensors by name, fp32: of the best evaluation, or as they are now (every process has to ask)."""
        if best:
            return self.spill["best"]
        return {name: distributed.whole(tensor).cpu() for name, tensor in self.trainer.weights().items()}

    def write_last(self, folder: Path, dtype: torch.dtype) -> None:
        """LAST into `folder`, where the best evaluation was an earlier step's (every process has to ask)."""
        from safetensors.torch import save_file

        if self.memory["best"]["step"] == self.trainer.step:
            return
        last = self.trained(best=False)
        if self.group.first:
            save_file({name: tensor.to(dtype) for name, tensor in last.items()}, folder / LAST)

    def metrics(self) -> dict[str, Any]:
        """What a manifest tells of the training: evaluations, the loss of every step, speed."""
        memory, last = self.memory, self.memory["curve"][-1]
        return {
            "best": memory["best"],
            "last": last,
            "tokens": last["tokens"],
            "tokens_per_second": last["tokens"] / memory["seconds"] if memory["seconds"] else None,
            "processes": self.group.world,
            "curve": memory["curve"],
            "losses": memory["losses"],
        }


def dtypes(asked: str, group: distributed.Group) -> tuple[torch.dtype, torch.dtype]:
    """What a student computes in, by the option --dtype, and what its parameters are loaded in.

    Shards are kept in fp32; what is not sharded has its masters in the trainer.
    """
    computed = resolve_dtype(asked, torch.float32 if group.device.type == "cpu" else torch.bfloat16)
    return computed, torch.float32 if group.world > 1 else computed


def train(
    what: str, lesson: Any, feed: Feed, judge: Judge, options: Options, partial: Path, group: distributed.Group, *,
    dtype: torch.dtype, subsets: Sequence[str], trainable: Callable[[str], list[str]], patience: int = 1,
    targets: Callable[[int, Rows], Any] | None = None, windowed: Collection[int] = (),
) -> Course:  # fmt: skip
    """Trains a Lesson from where a killed run stopped to its last step, sharded where there are several processes.

    partial: the artifact under way; dtype: what is computed in; the rest is as Course and Trainer have it.
    """
    if group.world > 1:
        distributed.shard(lesson, group, dtype)
    pace = Pace(options.learning_rate, options.warm_up, options.weight_decay, options.micro_tokens)
    trainer = Trainer(
        lesson, feed, pace, trainable(subsets[0]), device=group.device, rank=group.rank, world=group.world,
        targets=targets, windowed=windowed,
    )  # fmt: skip
    marks = Marks(options.evaluate_every, options.checkpoint_every, patience)
    logs = board(options.tensorboard, group)
    course = Course(what, trainer, judge, marks, subsets, trainable, partial / WORK, group, logs)
    course.run()
    group.wait()
    return course


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
                spill = Spill(kept.parent)
                spill[kept.stem] = {"input_ids": error.rows.ids, "position_ids": error.rows.positions}
            raise Resumable(
                f"the loss is not finite at step {error.step + 1}; its batch is in {kept}, the checkpoints in "
                f"{partial / WORK}; a smaller --learning-rate or another --dtype would help"
            ) from error


@contextmanager
def _writing(out: Path, manifest: Manifest, group: distributed.Group) -> Iterator[Path]:
    if group.first:
        with writing(out, manifest, resumable=True) as partial:
            group.wait()
            yield partial
            group.wait()
    else:
        group.wait()
        resolved = out.resolve()
        yield resolved.with_name(f".{resolved.name}.partial")
        group.wait()


def board(folder: str | None, group: distributed.Group) -> Any:
    """TensorBoard's writer where logs are asked for."""
    if folder is None or not group.first:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError("tensorboard is missing: pip install 'mlaforge[heal]'") from error
    return SummaryWriter(folder)


def check_shares(feed: Feed, world: int) -> None:
    """UserError unless every step's rows can be dealt out evenly to the processes."""
    for number, phase in enumerate(feed.phases):
        if phase.steps and (count := feed.rows_per_step(number)) % world:
            raise UserError(f"{world} processes cannot share the {count} rows of a step; change batch_tokens")
