"""Damaged checkpoints, heads, GGUF files, manifests, plans, recipes and texts, against the verbs that read them.

Whatever they hold: a verb does its work or says in one line why not (exit code 2), and then has left nothing behind. It
prints no traceback, ends in time, and changes nothing of what it was given.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from random import Random
from typing import Any

from attack import damages
from attack.ledger import Ledger
from attack.processes import Command, Ended
from attack.specimens import FAMILIES, SHORT, Specimens
from mlaforge.artifact import MANIFEST

Words = list[str | Path]
# Verbs that end with 1 where what they judge does not hold.
JUDGES = ("draft check", "draft compare", "gate")
# What a specimen's files are read by only sometimes; no damage of theirs is certain to be seen.
UNREAD = (MANIFEST, "generation_config.json", "calibration_passages.json", "special_tokens_map.json")
WEIGHTS = (".safetensors", ".gguf")
RECIPE = "device: cpu\ndtype: float32\n"


class Case:
    """One damage and the verbs that meet it. `victim`: what is damaged, a copy; `out`: where results go."""

    def __init__(self, dice: Random, have: Specimens, folder: Path) -> None:
        self.dice, self.have, self.folder = dice, have, folder
        self.out = folder / "results" / "out"
        (self.kind,) = dice.choices(list(KINDS), [weight for weight, *_ in KINDS.values()])
        _, make, verbs = KINDS[self.kind]
        self.victim: Path = make(self)
        files = [path for path in sorted(self.victim.rglob("*")) if path.is_file()] or [self.victim]
        # Weights and configs as often as all the rest.
        likely = [file for file in files if file.suffix in WEIGHTS or file.name in ("config.json", "plan.json")]
        self.file = dice.choice(likely if likely and dice.random() < 0.5 else files)
        self.damage = damages.damage(dice, self.file)
        offered = verbs(self)
        self.commands = dice.sample(offered, min(2, len(offered)))

    def copy(self, name: str) -> Path:
        source, target = self.have[name], self.folder / "victim" / name
        target.parent.mkdir(parents=True)
        return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target))

    def text(self) -> Words:
        return ["--text", self.have["evaluation.txt"], "--seqlen", "64", "--windows", "2", "--device", "cpu"]

    def convert(self, model: Path, *more: str | Path) -> Words:
        return ["convert", model, self.out, *self.have.texts, *SHORT, *more]


def _few() -> Words:
    return ["--max-new-tokens", "4", "--dtype", "float32", "--device", "cpu", "--cache-bytes", "16777216"]


def _training(case: Case) -> Words:
    return ["--out", case.out, "--steps", "1", "--batch-tokens", "128", "--micro-tokens", "128", "--seqlen", "64",
            "--device", "cpu"]  # fmt: skip


def original(case: Case) -> Path:
    return case.copy(case.dice.choice((*FAMILIES, "sharded")))


def reading_originals(case: Case) -> list[Words]:
    model = case.victim
    heal: Words = ["heal", "--teacher", model, "--student", case.have["latent"], "--text", case.have["healing.txt"]]
    return [
        ["plan", model], case.convert(model), ["eval", model, case.out, *case.text()],
        ["generate", model, *_few()], ["diagnose", model, case.out, *case.text()],
        [*heal, *_training(case), "--validation-tokens", "512"],
    ]  # fmt: skip


def converted(case: Case) -> Path:
    return case.copy(case.dice.choice(("latent", "latent_rope")))


def reading_converted(case: Case) -> list[Words]:
    model = case.victim
    teacher = case.have["llama" if model.name == "latent" else "gpt_oss"]
    heal: Words = ["heal", "--teacher", teacher, "--student", model, "--text", case.have["healing.txt"]]
    # A folder of artifacts.
    folder = model.parent
    return [
        ["eval", model, case.out, *case.text()], ["generate", model, *_few()], case.convert(model),
        ["export", "deepseek", model, case.out], [*heal, *_training(case), "--validation-tokens", "512"],
        ["list", folder], ["report", folder, "--out", case.out.with_suffix(".html")],
        ["card", folder, "--out", case.out], ["publish", model, "--repo", "owner/name"],
        *([["verify", model]] * 3 if has_verify() else []),
    ]  # fmt: skip


def gguf(case: Case) -> Path:
    return case.copy("tiny.gguf")


def reading_gguf(case: Case) -> list[Words]:
    return [["plan", case.victim], case.convert(case.victim), ["generate", case.victim, *_few()],
            ["eval", case.victim, *case.text()]]  # fmt: skip


def head(case: Case) -> Path:
    return case.copy("head")


def reading_heads(case: Case) -> list[Words]:
    target, text = case.have["llama"], case.have["evaluation.txt"]
    speculative = ["generate", target, "--speculative", case.victim, "--num-speculative-tokens", "2"]
    train: Words = ["draft", "train", target, "--text", case.have["answers"], "--init", case.victim]
    return [
        ["draft", "check", case.victim, "--target", target, "--text", text, "--windows", "2", "--seqlen", "64"],
        ["draft", "compare", case.victim, "--target", target, "--text", text, "--tokens", "32", "--dtype", "float32"],
        ["draft", "import", case.victim, case.out, "--target", target], [*speculative, *_few()],
        [*train, *_training(case)],
    ]  # fmt: skip


def plan(case: Case) -> Path:
    return case.copy("diagnosed")


def reading_plans(case: Case) -> list[Words]:
    return [case.convert(case.have["llama"], "--plan", case.victim), ["list", case.victim.parent],
            ["report", case.victim.parent, "--out", case.out.with_suffix(".html")]]  # fmt: skip


def recipe(case: Case) -> Path:
    path = case.folder / "victim" / "recipe.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(RECIPE, encoding="utf-8")
    return path


def reading_recipes(case: Case) -> list[Words]:
    """The options that the recipe could hold are left to it."""
    model = case.have["llama"]
    return [
        ["convert", model, case.out, *case.have.texts, *SHORT[:-2], "--recipe", case.victim],
        ["eval", model, *case.text()[:-2], "--recipe", case.victim],
        ["heal", "--teacher", model, "--student", case.have["latent"], "--text", case.have["healing.txt"],
         *_training(case)[:-2], "--validation-tokens", "512", "--recipe", case.victim],
    ]  # fmt: skip


def golden(case: Case) -> Path:
    return case.copy("golden")


def reading_golden(case: Case) -> list[Words]:
    text: Words = ["--calibration", case.victim, "--evaluation", case.have["evaluation.txt"]]
    return [["convert", case.have[family], case.out, *text, *SHORT] for family in ("llama", "gpt_oss")]


def answers(case: Case) -> Path:
    return case.copy("answers")


def reading_answers(case: Case) -> list[Words]:
    model = case.have["llama"]
    return [["draft", "train", model, "--text", case.victim, *_training(case)],
            ["draft", "vocab", model, case.victim, "--out", case.out, "--size", "128"]]  # fmt: skip


# How often it is drawn, what is damaged, and what reads it.
KINDS: dict[str, tuple[int, Callable[[Case], Path], Callable[[Case], list[Words]]]] = {
    "checkpoint": (4, original, reading_originals), "converted": (4, converted, reading_converted),
    "gguf": (1, gguf, reading_gguf), "head": (2, head, reading_heads), "plan": (1, plan, reading_plans),
    "recipe": (2, recipe, reading_recipes), "calibration sets": (1, golden, reading_golden),
    "answers": (1, answers, reading_answers),
}  # fmt: skip


def has_verify() -> bool:
    """Whether this mlaforge has `verify`."""
    from mlaforge.cli.main import app

    return any("verify" in (verb.name, getattr(verb.callback, "__name__", "")) for verb in app.registered_commands)


def run(ledger: Ledger, count: int, have: Specimens, work: Path) -> dict[str, Any]:
    def one(number: int) -> None:
        folder = work / str(number)
        case = Case(ledger.dice(number), have, folder)
        before = tree(folder / "victim")
        for at, words in enumerate(case.commands):
            ended = Command(words, folder / f"run-{at}", have.home).wait()
            why = fault(case, ended)
            if not why and tree(folder / "victim") != before:
                why = "its victim is no longer what it was"
            shown = " ".join(word.name if isinstance(word, Path) else word for word in words)
            said = f"{case.damage.what}; {shown}: {ended.last_line}"
            ledger.ended_as(number, case.kind, "refused" if ended.code == 2 else f"exit code {ended.code}", said)
            if why:
                ledger.fail(number, case.kind, f"{case.damage.what}; {shown}: {why}", {"case": folder})
            shutil.rmtree(folder / "results", ignore_errors=True)
        shutil.rmtree(folder)

    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(one, range(count)))
    return {"corruptions": count}


def fault(case: Case, ended: Ended) -> str:
    """What is wrong with how a verb ended; "" where nothing is."""
    if ended.fault:
        return ended.fault
    verb = " ".join(word for word in ended.words[:2] if word.isalpha())
    if ended.code not in (0, 2) and not (ended.code == 1 and verb.startswith((*JUDGES, "verify"))):
        return f"exit code {ended.code}: {ended.last_line}"
    results = case.out.parent
    if ended.code == 2 and results.exists() and (left := sorted(path.name for path in results.iterdir())):
        return f"refused, and left {left}"
    if ended.code == 0 and verb.startswith("verify") and case.file.name != MANIFEST:
        return "verify accepts it"
    if ended.code == 0 and case.damage.certain and case.file.name not in UNREAD and _reads(verb, case.file):
        return "it was accepted"
    return ""


def _reads(verb: str, file: Path) -> bool:
    """Whether the verb must read that file of its victim."""
    if verb in ("list", "report", "card", "publish"):
        return False
    if verb.startswith("plan"):
        return file.name == "config.json"
    return file.suffix in (*WEIGHTS, ".yaml") or file.name in ("config.json", "tokenizer.json")


def tree(folder: Path) -> dict[str, str]:
    """Everything below a folder: name -> what it is."""
    return dict(_described(folder))


def _described(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield name, f"link to {os.readlink(path)}"
        elif path.is_file():
            yield name, hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            yield name, "folder" if path.is_dir() else "pipe"
