"""Code shared by the scripts: options, evaluation texts, and results files that grow row by row.

Scripts are run by their path, so that Python finds this file in the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mlaforge.artifact import record_path
from mlaforge.bench import machine
from mlaforge.data import corpus, overlap
from mlaforge.runtime import environment, log


def parser(doc: str | None, out: str, data: bool = True) -> argparse.ArgumentParser:
    """Parser with the options of every script: --out, and --data if it reads text."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments.add_argument("--out", type=Path, default=Path(out))
    return arguments


def command() -> str:
    """Command of this script as recorded in its results."""
    return machine.command("python", record_path(sys.argv[0]))


class Results:
    """Results file, written atomically after every row, so that an interrupted run loses no row.

    body: content of the file: `facts`, `rows` and `environment`. resume: start from an existing file with the same
    facts, so that its rows are not measured again.
    """

    def __init__(self, path: Path, rows: Any, resume: bool = False, **facts: Any):
        self.path = path
        self.body: dict[str, Any] = {**facts, "rows": rows, "environment": environment()}
        if resume and path.exists():
            existing = json.loads(path.read_text(encoding="utf-8"))
            if facts.items() <= existing.items():
                self.body = existing

    @property
    def rows(self) -> Any:
        """A list of rows, or rows by name."""
        return self.body["rows"]

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the fact `name`, measured if the file lacks it."""
        if name not in self.body:
            self.body[name] = measure()
            self.save()
        return self.body[name]

    def missing(self, keys: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Keys whose items no row contains."""
        return (key for key in keys if not any(key.items() <= row.items() for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        log(json.dumps(row))
        self.save()

    def save(self) -> None:
        machine.write(self.path, self.body)


def wikitext(data: Path) -> tuple[str, str]:
    """Files of WikiText-2: validation text, for tuning, and test text, for evaluation."""
    folder = data / "wikitext-2"
    return str(folder / "wiki.valid.tokens"), str(folder / "wiki.test.raw")


def evaluation_texts(
    tokenizer: Any, data: Path, windows: dict[str, int], seqlen: int, scratch: Path
) -> dict[str, corpus.Windows]:
    """Windows of evaluation texts. windows: name (`maths`, `chat`, `wiki`, `code`) -> maximum number of windows of
    `seqlen` tokens. `code` is the held-out part of the embedded text, which calibration never uses."""

    def prompts(name: str) -> Iterator[str]:
        for line in (data / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield "\n".join([*record["turns"], *map(str, record.get("reference") or [])])

    held_out = {n: t for n, t in corpus.embedded_documents()["code"].items() if corpus.is_evaluation_document(n)}
    parts = {
        "maths": prompts("gsm8k"),
        "chat": prompts("mt_bench"),
        "code": (held_out[name] for name in sorted(held_out)),
    }
    texts = {"wiki": wikitext(data)[1]}
    for name in windows.keys() & parts.keys():
        (path := scratch / f"{name}.txt").write_text("\n\n".join(parts[name]), encoding="utf-8")
        texts[name] = str(path)
    return {name: corpus.windows(tokenizer, texts[name], count, seqlen) for name, count in windows.items()}


def without_repeats(eval_windows: dict[str, corpus.Windows], known: list[int]) -> dict[str, corpus.Windows]:
    """Remove windows that share a passage with the tuned text. known: passages of that text."""
    remaining = {}
    for name, windows in eval_windows.items():
        shared = overlap.overlapping(windows, known)
        keep = [i for i in range(len(windows.ids)) if i not in shared]
        remaining[name] = corpus.Windows(windows.ids[keep], windows.source)
        log(f"{name}: {len(keep)} windows, {len(shared)} dropped because they repeat tuned text")
    return remaining
