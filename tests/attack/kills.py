"""Stages killed at random moments, each followed by the same command again: its result must be the undisturbed one's.

SIGINT, SIGKILL and SIGTERM in turn. Most stages are forked when their imports are done, so that the moments fall into
their work; every tenth begins as from a shell, imports and all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from typing import Any

from attack.ledger import Ledger
from attack.processes import Command, Ended
from attack.specimens import Specimens
from mlaforge.artifact import MANIFEST

# Stage -> its share of all kills; calibrate's embedder takes its time.
STAGES = {"convert": 0.3, "heal": 0.25, "calibrate": 0.15, "draft train": 0.3}
SIGNALS = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
FRESH = 10
# Exit codes after each signal; 0 where it came too late.
CODES = {
    signal.SIGKILL: (-signal.SIGKILL,),
    signal.SIGTERM: (-signal.SIGTERM, 128 + signal.SIGTERM),
    signal.SIGINT: (-signal.SIGINT, 128 + signal.SIGINT),
}


def command(stage: str, have: Specimens, out: Path) -> list[str | Path]:
    """The stage on tiny models, with every phase and several checkpoints, in about a second."""
    trained = ("--batch-tokens", "256", "--micro-tokens", "128", "--seqlen", "64", "--evaluate-every", "4",
               "--checkpoint-every", "2", "--device", "cpu")  # fmt: skip
    match stage:
        case "convert":
            more = ("--seqlen", "64", "--nsamples", "30", "--eval-windows", "8", "--layout", "latent_rope")
            return ["convert", have["gpt_oss"], out, *have.texts, *more, "--device", "cpu"]
        case "heal":
            models = ("--teacher", have["llama"], "--student", have["latent"], "--text", have["healing.txt"])
            subsets = ("--subset", "projections,attention", "--patience", "1", "--validation-tokens", "512")
            return ["heal", *models, "--out", out, *trained, "--steps", "16", *subsets]
        case "calibrate":
            return ["calibrate", "--source", have["healing.txt"], "--source", have["prose"], "--out", out,
                    "--window", "50", "--passage", "4", "--clusters", "6", "--device", "cpu"]  # fmt: skip
        case _:
            return ["draft", "train", have["llama"], "--text", have["answers"], "--out", out, *trained,
                    "--steps", "16", "--unroll", "3", "--boundaries", "0,1,3"]  # fmt: skip


def run(ledger: Ledger, stage: str, count: int, have: Specimens, work: Path) -> dict[str, Any]:
    """`count` kills of one stage; how long it takes undisturbed, in seconds."""
    seconds, wanted = {}, {}
    for fresh in (False, True)[: 1 + (count >= FRESH)]:
        out = work / f"whole-{fresh}" / "out"
        ended = Command(command(stage, have, out), out.parent / "logs", have.home, fresh).wait()
        if ended.code:
            ledger.fail(None, stage, f"undisturbed it ended with {ended.code}: {ended.last_line}")
            return {}
        seconds[fresh], wanted[fresh] = ended.seconds, contents(out)
    if wanted[False] != wanted.get(True, wanted[False]):
        ledger.fail(None, stage, f"two undisturbed runs differ: {difference(wanted[False], wanted[True])}")

    def one(number: int) -> None:
        fresh, folder = number % FRESH == FRESH - 1, work / str(number)
        dice, signal_number = ledger.dice(number), SIGNALS[number % len(SIGNALS)]
        for _ in range(20):
            # Again where it came too late.
            shutil.rmtree(folder, ignore_errors=True)
            moment = dice.uniform(0, seconds[fresh])
            killed = kill(command(stage, have, folder / "out"), folder, have.home, fresh, signal_number, moment)
            if killed.code:
                break
        why = judge(killed, signal_number, folder / "out", wanted[fresh])
        if not why:
            again = Command(command(stage, have, folder / "out"), folder / "again", have.home).wait()
            why = resumed(again, folder / "out", wanted[fresh])
        ledger.ended_as(number, signal_number.name, f"exit code {killed.code}", f"after {moment:.3f} s")
        if why:
            ledger.fail(number, signal_number.name, f"{stage}, {moment:.3f} s after its start: {why}", {"work": folder})
        shutil.rmtree(folder)

    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(one, range(count)))
    return {"undisturbed_seconds": {("forked", "fresh")[fresh]: round(took, 2) for fresh, took in seconds.items()}}


def kill(
    words: list[str | Path], folder: Path, home: Path, fresh: bool, number: signal.Signals, moment: float
) -> Ended:
    """The command, sent a signal so many seconds after its start."""
    running = Command(words, folder / "killed", home, fresh)
    while running.running and time.monotonic() - running.start < moment:
        time.sleep(0.002)
    running.send(number)
    return running.wait()


def judge(killed: Ended, number: signal.Signals, out: Path, wanted: dict[str, str]) -> str:
    """What is wrong with how it ended; "" where nothing is."""
    if not killed.stopped and "init_import_site" in killed.stderr and not out.exists():
        # Python itself had not begun.
        return ""
    if killed.stopped or "Traceback" in killed.stderr:
        return killed.stopped or f"a traceback: {killed.last_line}"
    if killed.code and killed.code not in CODES[number]:
        return f"exit code {killed.code} after {number.name}: {killed.last_line}"
    if out.exists() and (left := contents(out)) != wanted:
        return f"it left half a result: {difference(left, wanted)}"
    return ""


def resumed(again: Ended, out: Path, wanted: dict[str, str]) -> str:
    """What is wrong with the same command's second run."""
    if again.fault or again.code:
        return f"the same command again: exit code {again.code}, {again.fault or again.last_line}"
    if (files := contents(out)) != wanted:
        return f"the same command again makes something else: {difference(files, wanted)}"
    # What belongs to the watch lies beside it.
    left = {path.name for path in out.parent.iterdir()} - {"killed", "again", out.name}
    return f"it leaves {sorted(left)}" if left else ""


def contents(out: Path) -> dict[str, str]:
    """Every file's SHA-256; the manifest's without what is a time."""
    files = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        raw = path.read_bytes()
        if path.name == MANIFEST:
            raw = json.dumps(timeless(json.loads(raw)), sort_keys=True).encode()
        files[path.relative_to(out).as_posix()] = hashlib.sha256(raw).hexdigest()
    return files


def timeless(value: Any) -> Any:
    """A JSON value without the keys that hold seconds."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if "second" not in key}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def difference(files: dict[str, str], wanted: dict[str, str]) -> str:
    names = sorted(name for name in files.keys() | wanted.keys() if files.get(name) != wanted.get(name))
    return ", ".join(f"{name} {'differs' if name in files and name in wanted else 'is in one only'}" for name in names)
