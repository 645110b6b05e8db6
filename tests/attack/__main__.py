"""The attack: fuzzed requests, floods of connections, corrupted files, kills.

    python -m tests.attack [PART ...] [--share 1] [--seed 0] [--model MODEL] [--out runs/attack]

`--share` scales all counts. Requests and connections go to a real `mlaforge serve` of MODEL (the demo's), while a
witness streams short greedy answers; files and kills are those of tiny random models. Everything is drawn from the
seed; a case that fails is printed with it and kept in OUT/failures. OUT/results.json grows part by part, and a run that
was cut off goes on with the parts it lacks, unless mlaforge or the attack has changed. Exit code 1 where a case failed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# This package, tiny models, heads and killed processes are those of the tests.
sys.path.insert(0, str(ROOT / "tests"))

import mlaforge  # noqa: E402
from attack import connections, corruptions, kills, requests  # noqa: E402
from attack.ledger import Ledger  # noqa: E402
from attack.processes import IMPORTED, make_home  # noqa: E402
from attack.served import Served  # noqa: E402
from attack.specimens import Specimens  # noqa: E402
from mlaforge.bench.results import Results  # noqa: E402
from mlaforge.cli.verb import quiet  # noqa: E402
from mlaforge.demo import model as demo_model  # noqa: E402
from mlaforge.rendering.table import text_table  # noqa: E402
from support import killed  # noqa: E402

# How many of each at --share 1; kills are those of all stages.
COUNTS = {"requests": 10_000, "connections": 6_000, "corruptions": 300, "kills": 200}
SERVE = ["--device", "cpu", "--cache-bytes", str(2**28), "--max-model-len", "1024", "--drain-timeout", "10"]


class Attack:
    """The parts of one run, and what they share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        killed.PROCESSES.set_forkserver_preload(IMPORTED)
        self.work = self.out / "work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.home = make_home(self.work / "home")
        self._specimens: Specimens | None = None

    @property
    def specimens(self) -> Specimens:
        if self._specimens is None:
            quiet()
            self._specimens = Specimens(self.work / "specimens", self.home)
        return self._specimens

    def count(self, part: str) -> int:
        return max(1, math.ceil(COUNTS[part] * self.options.share))

    def run(self, part: str, of: str | None = None) -> dict[str, Any]:
        """One part's row."""
        ledger = Ledger(f"{part}-{of.replace(' ', '-')}" if of else part, self.options.seed, self.out)
        begin = time.perf_counter()
        match part:
            case "requests":
                facts = asyncio.run(self._serve(ledger, requests.run, requests.CLIENTS, []))
            case "connections":
                facts = asyncio.run(self._serve(ledger, connections.run, connections.WAVE, connections.OPTIONS))
            case "corruptions":
                facts = corruptions.run(ledger, self.count(part), self.specimens, self.work / part)
            case _:
                assert of is not None
                count = math.ceil(self.count(part) * kills.STAGES[of])
                facts = kills.run(ledger, of, count, self.specimens, self.work / ledger.part)
        row = ledger.row(**facts, minutes=round((time.perf_counter() - begin) / 60, 2))
        return {**row, **_key(part, of)}

    async def _serve(self, ledger: Ledger, attack: Callable[..., Any], clients: int, own: list[str]) -> dict[str, Any]:
        served = Served(self.options.model or demo_model.fetch(), ledger, self.out, [*SERVE, *own], clients)
        async with served:
            facts: dict[str, Any] = await attack(ledger, served, self.count(ledger.part))
        return {**facts, **served.facts()}


def _key(part: str, of: str | None) -> dict[str, Any]:
    return {"part": part, "of": of}


def _source() -> str:
    """SHA-256 over mlaforge and the attack itself."""
    files = [*Path(mlaforge.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def table(rows: list[dict[str, Any]]) -> str:
    """What was tried and what failed, a line for each part."""
    lines = [("part", "tried", "failed", "minutes", "largest gap", "largest step", "how it ended")]
    for row in rows:
        witness = row.get("witness", {})
        ended = ", ".join(f"{count} {outcome}" for outcome, count in list(row["ended"].items())[:6])
        gap, step = (f"{witness[name]:.3f} s" if witness else "–" for name in ("largest_gap", "largest_step"))
        name = f"{row['part']} {row['of'] or ''}".strip()
        lines.append((name, str(row["tried"]), str(row["failed"]), f"{row['minutes']:.1f}", gap, step, ended))
    return text_table(lines, "<")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(COUNTS)} (default: all)")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/attack"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(COUNTS):
        parser.error(f"{', '.join(sorted(unknown))}: parts are {', '.join(COUNTS)}")
    parts = options.parts or list(COUNTS)
    keys = [_key(p, of) for p in parts for of in (kills.STAGES if p == "kills" else (None,))]
    facts = {"seed": options.seed, "share": options.share, "model": options.model and options.model.name}
    path = options.out / "results.json"
    results = Results(path, [], resume=True, **facts, source=_source())
    if not list(results.missing(keys)):
        results = Results(path, [], **facts, source=_source())
    if not results.rows:
        shutil.rmtree(options.out / "failures", ignore_errors=True)
    attack = Attack(options)
    for key in results.missing(keys):
        results.add(attack.run(**key))
    shutil.rmtree(attack.work)
    print(table(results.rows))
    for row in results.rows:
        for each in row.get("witness", {}).get("largest_gaps", [])[:1]:
            print(f"{row['part']}: the witness waited {each['seconds']:.3f} s during {'; '.join(each['during'][:4])}")
    failed = sum(row["failed"] for row in results.rows)
    print(f"{failed} failed; they are in {options.out / 'failures'}" if failed else "nothing failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
