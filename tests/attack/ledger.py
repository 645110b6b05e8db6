"""What a part of the attack tried, how it ended, and the cases that failed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlaforge.runtime import log

# Of the failures, so many are named in the results; all of them are kept as files.
SHOWN = 50


class Ledger:
    """Counts of one part. A case that fails is printed with what it is drawn from, and kept in `folder`/failures."""

    def __init__(self, part: str, seed: int, folder: Path) -> None:
        self.part, self.seed, self.folder = part, seed, folder / "failures"
        self._tried = folder / f"tried-{part}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._tried.unlink(missing_ok=True)
        self.tried: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.failures: list[str] = []

    def dice(self, number: int) -> random.Random:
        """What case `number` is drawn from; the same for the same seed, whatever ran before."""
        return random.Random(f"{self.seed}/{self.part}/{number}")

    def ended_as(self, number: int, kind: str, outcome: str, what: str = "") -> None:
        """A line of tried-PART.txt, for who wants to know what exactly was accepted."""
        self.tried[kind] += 1
        self.ended[outcome] += 1
        with self._tried.open("a", encoding="utf-8") as file:
            file.write(" ".join(f"{self.part}-{number} {kind}: {outcome}; {what}".split()) + "\n")

    def fail(self, number: int | None, kind: str, why: str, keep: Mapping[str, bytes | Path] | None = None) -> None:
        """A case that broke the bar; `number` None: the part as a whole. `keep`: name -> content, or what to copy."""
        case = f"{self.part}-{kind}" if number is None else f"{self.part}-{number}"
        why = " ".join(why.split())[:600]
        log(f"FAILED {case} (seed {self.seed}, {kind}): {why}")
        self.failures.append(case)
        folder = self.folder / case
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "why.txt").open("a", encoding="utf-8") as file:
            file.write(f"{case}, seed {self.seed}, {kind}\n{why}\n")
        for name, content in (keep or {}).items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            elif content.is_dir():
                # A pipe in it would be read for ever.
                shutil.copytree(content, folder / name, symlinks=True, dirs_exist_ok=True, ignore=_no_files)
            elif content.is_file():
                shutil.copyfile(content, folder / name)

    def row(self, **facts: Any) -> dict[str, Any]:
        return {
            "part": self.part, "tried": sum(self.tried.values()), "ended": dict(self.ended.most_common()),
            "kinds": dict(sorted(self.tried.items())), "failed": len(self.failures),
            "failures": list(dict.fromkeys(self.failures))[:SHOWN], **facts,
        }  # fmt: skip


def _no_files(folder: str, names: list[str]) -> set[str]:
    """Those that are neither files, folders nor links: copytree would wait for what nobody writes."""
    paths = {name: Path(folder) / name for name in names}
    return {n for n, path in paths.items() if not (path.is_symlink() or path.is_file() or path.is_dir())}
