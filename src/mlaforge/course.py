"""The course of a healing: steps, and between them evaluation, growing subsets, checkpoints, and what a person sees.

Everything that a killed run needs is in its work folder: `state-N` (what the trainer's next step depends on) with
`state-N.json` (this file's own memory), and `best` (the trained tensors of the least validation KL).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from mlaforge import sharding
from mlaforge.distill import Validation, trainable
from mlaforge.options import HealConfig
from mlaforge.runtime import log
from mlaforge.spill import Spill
from mlaforge.trainer import Trainer

# The validation KL has to fall by this share to count as falling.
GAIN = 0.01


class Course:
    """Runs a Trainer from where it stopped to its last step. `subsets`: what learns first, and what joins later."""

    def __init__(
        self, trainer: Trainer, validation: Validation, config: HealConfig, subsets: list[str], work: Path,
        group: sharding.Group, board: Any = None,
    ):  # fmt: skip
        self.trainer, self.validation, self.config, self.subsets = trainer, validation, config, subsets
        self.work, self.group, self.board = work, group, board
        self.spill = Spill(work)
        # subset: how many have joined the first; mark: the KL of the last gain; stale: evaluations since.
        self.memory: dict[str, Any] = {
            "subset": 0, "mark": None, "stale": 0, "best": None, "curve": [], "losses": [], "seconds": 0.0
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns what is remembered; the best weights are in `best`."""
        from tqdm import tqdm

        self._resume()
        trainer, steps = self.trainer, self.trainer.feed.steps
        if not self.memory["curve"]:
            self._evaluate()
        begun, tokens = time.perf_counter(), 0
        with tqdm(
            total=steps, initial=trainer.step, desc="heal", delay=2.0, leave=False, dynamic_ncols=True,
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
                bar.set_postfix(
                    loss=f"{found['loss']:.4g}", kl=f"{last['kl']:.4g}", ppl=f"{last['ppl']:.4g}", tok_s=f"{speed:.0f}"
                )
                bar.update()
                self._chart({**found, "tokens_per_second": speed}, "train")
                done = trainer.step == steps
                if trainer.step % self.config.evaluate_every == 0 or done:
                    self._evaluate(speed)
                if trainer.step % self.config.checkpoint_every == 0 or done:
                    self._save()
        return self.memory

    def tokens_of(self, step: int) -> int:
        """Tokens that a step reads."""
        number, _ = self.trainer.feed.phase(step)
        return self.trainer.feed.rows_per_step(number) * self.trainer.feed.phases[number].rows.ids.shape[1]

    def _chart(self, values: dict[str, float], what: str) -> None:
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{what}/{name}", value, self.trainer.step)

    def _evaluate(self, speed: float = 0.0) -> None:
        """Measures on the text kept back; keeps the weights where they are the best yet, else may grow the subset."""
        memory, step = self.memory, self.trainer.step
        found = self.validation.measure(self.trainer.model)
        seen = sum(self.tokens_of(n) for n in range(step))
        point = {"step": step, "tokens": seen, "seconds": round(memory["seconds"], 1), **found}
        recent = memory["losses"][-self.config.evaluate_every :]
        point |= {"loss": sum(recent) / len(recent) if recent else None, "subset": self.subsets[memory["subset"]]}
        memory["curve"].append(point)
        self._chart(found, "validation")
        if self.group.first:
            left = (self.trainer.feed.steps - step) * memory["seconds"] / max(1, step) / 60
            told = f", loss {point['loss']:.4g}, {speed:.0f} tokens/s, {left:.0f} min left" if recent else ""
            line = (
                f"step {step} of {self.trainer.feed.steps}: validation ppl {found['ppl']:.4f} (teacher "
                f"{found['teacher_ppl']:.4f}), KL {found['kl']:.5f}{told}"
            )
            log(line)
        best = memory["best"]
        if memory["mark"] is None or found["kl"] < (1 - GAIN) * memory["mark"]:
            memory["mark"], memory["stale"] = found["kl"], 0
        else:
            memory["stale"] += 1
        if best is None or found["kl"] < best["kl"]:
            memory["best"] = point
            tensors = {name: sharding.whole(tensor) for name, tensor in self.trainer.weights().items()}
            if self.group.first:
                self.spill["best"] = tensors
        if memory["stale"] >= self.config.patience and memory["subset"] + 1 < len(self.subsets):
            memory["subset"] += 1
            memory["mark"], memory["stale"] = found["kl"], 0
            self._grow()

    def _grow(self) -> None:
        subset = self.subsets[self.memory["subset"]]
        self.trainer.train(trainable(self.trainer.model.student, subset))
        if self.group.first:
            log(f"step {self.trainer.step}: the validation KL has stopped falling, {subset} learns from here on")

    def _save(self) -> None:
        """A checkpoint: appears whole or not at all; earlier ones go when it is there."""
        name, state = f"state-{self.trainer.step:08d}", self.trainer.state()
        if self.group.first:
            (self.work / f"{name}.json").write_text(json.dumps(self.memory), encoding="utf-8")
        if self.group.world == 1:
            self.spill[name] = state
        else:
            unfinished = self.work / f"{name}.unfinished"
            sharding.save(unfinished, state)
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
            self.trainer.train(trainable(self.trainer.model.student, subset))
        state = self.trainer.state()
        if (self.work / name).is_dir():
            sharding.load(self.work / name, state)
        else:
            state = {key: sharding.spread(tensor, state[key]) for key, tensor in self.spill[name].items()}
        self.trainer.restore(state)
        if self.group.first:
            log(f"going on after step {self.trainer.step}")

    def trained(self, best: bool) -> dict[str, Tensor]:
        """The trained tensors by name, fp32: of the best evaluation, or as they are now (every process has to ask)."""
        if best:
            return self.spill["best"]
        return {name: sharding.whole(tensor).cpu() for name, tensor in self.trainer.weights().items()}
