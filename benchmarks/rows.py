"""What these scripts share: their options, the text that they judge on, and files of results that grow row by row.

A script is run by its own path, so that Python finds this file beside it.
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
    """The options of every script: --out, and --data where it reads text."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments.add_argument("--out", type=Path, default=Path(out))
    return arguments


def command() -> str:
    """This script's command as its results record it."""
    return machine.command("python", record_path(sys.argv[0]))


class Results:
    """A file of results, written whole after every row, so that a run that was cut off loses no row.

    `body` is what it holds: `facts`, `rows` and `environment`. With `resume` it begins as the file that is there, if
    that one has the same facts: what a run that was cut off had measured is not measured again.
    """

    def __init__(self, path: Path, rows: Any, resume: bool = False, **facts: Any):
        self.path = path
        self.body: dict[str, Any] = {**facts, "rows": rows, "environment": environment()}
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if facts.items() <= before.items():
                self.body = before

    @property
    def rows(self) -> Any:
        """A list of rows, or rows by name."""
        return self.body["rows"]

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The fact `name`, measured where the file does not have it."""
        if name not in self.body:
            self.body[name] = measure()
            self.save()
        return self.body[name]

    def missing(self, keys: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Those of `keys` that no row has all items of."""
        return (key for key in keys if not any(key.items() <= row.items() for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        log(json.dumps(row))
        self.save()

    def save(self) -> None:
        machine.write(self.path, self.body)


def wikitext(data: Path) -> tuple[str, str]:
    """WikiText-2's validation text, to tune on, and its test text, to judge on."""
    folder = data / "wikitext-2"
    return str(folder / "wiki.valid.tokens"), str(folder / "wiki.test.raw")


def judged_texts(
    tokenizer: Any, data: Path, windows: dict[str, int], seqlen: int, scratch: Path
) -> dict[str, corpus.Windows]:
    """Of `maths`, `chat`, `wiki` and `code` those that `windows` names: at most so many windows of `seqlen` tokens.

    Calibration never sees the embedded source text that `held_out` gives.
    """

    def prompts(name: str) -> Iterator[str]:
        for line in (data / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield "\n".join([*record["turns"], *map(str, record.get("reference") or [])])

    held = {n: t for n, t in corpus.embedded_documents()["code"].items() if corpus.is_evaluation_document(n)}
    parts = {"maths": prompts("gsm8k"), "chat": prompts("mt_bench"), "code": (held[name] for name in sorted(held))}
    texts = {"wiki": wikitext(data)[1]}
    for name in windows.keys() & parts.keys():
        (path := scratch / f"{name}.txt").write_text("\n\n".join(parts[name]), encoding="utf-8")
        texts[name] = str(path)
    return {name: corpus.windows(tokenizer, texts[name], count, seqlen) for name, count in windows.items()}


def without_repeats(judged: dict[str, corpus.Windows], known: list[int]) -> dict[str, corpus.Windows]:
    """The judged texts without the windows that share a passage with what is tuned on; `known`: its passages."""
    kept = {}
    for name, windows in judged.items():
        shared = overlap.overlapping(windows, known)
        keep = [i for i in range(len(windows.ids)) if i not in shared]
        kept[name] = corpus.Windows(windows.ids[keep], windows.source)
        log(f"{name}: {len(keep)} windows, {len(shared)} dropped because they repeat text that is tuned on")
    return kept
