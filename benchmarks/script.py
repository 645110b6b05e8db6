"""What the scripts share: options, evaluation texts, and how their rows become a committed table.

`python -m benchmarks.NAME` measures, keeps its rows in --raw, from which an interrupted run resumes, and writes a short
table of them into the file of tables --out. `--summarize FILE` writes the table from such rows without measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlaforge.bench import machine
from mlaforge.bench.results import Results, add_table, read_table
from mlaforge.data import corpus, overlap
from mlaforge.runtime import log

ROOT = Path(__file__).parents[1]


def parser(doc: str | None, out: str, table: str, data: bool = True) -> argparse.ArgumentParser:
    """Parser with the options of every script. out: file of tables, by its path in the repository; table: name of this
    script's table in it; data: whether it reads text."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    raw = f"runs/measurements/{table.replace(' ', '-')}.json"
    arguments.add_argument("--out", type=Path, default=ROOT / out, help=f"file of tables (default: {out})")
    arguments.add_argument("--table", default=table, help=f"name of the table in it (default: {table})")
    arguments.add_argument("--raw", type=Path, default=Path(raw), help=f"all rows (default: {raw})")
    arguments.add_argument("--summarize", type=Path, metavar="FILE", help="write the table of these rows only")
    return arguments


def command() -> str:
    """Command of this script as recorded in its results."""
    spec = sys.modules["__main__"].__spec__
    return machine.command("python", *(("-m", spec.name) if spec else (Path(sys.argv[0]).name,)))


def run(
    arguments: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Results],
    short: Callable[[dict[str, Any]], list[dict[str, Any]]], show: Callable[[list[dict[str, Any]]], str],
) -> None:  # fmt: skip
    """Measure, write the table and print it. short: rows of the table from the content of the raw file; show: their
    text. options.rest: words after `--`."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options = arguments.parse_args(words[:at])
    options.rest = words[at + 1 :]
    if options.summarize:
        body = json.loads(options.summarize.read_text(encoding="utf-8"))
    else:
        results = measure(options)
        results.body.setdefault("command", command())
        results.save()
        body = results.body
    facts = {key: value for key, value in body.items() if key != "rows"}
    add_table(options.out, options.table, {**facts, "rows": short(body)})
    print(show(read_table(options.out, options.table)["rows"]))


@contextlib.contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    """Folder of intermediate files: --scratch, which is kept, or a temporary one beside the rows."""
    with contextlib.ExitStack() as stack:
        options.raw.parent.mkdir(parents=True, exist_ok=True)
        folder = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.raw.parent)))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


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
