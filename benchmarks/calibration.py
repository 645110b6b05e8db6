"""Does it help to calibrate on golden sets? SmolLM2 converted with golden, random and first-N text of one pool.

    python benchmarks/calibration.py --data ../shared/data [--windows 8] [--seqlen 1024] [--folder runs/calibration]

The pool is the embedded text (less what is held out) and WikiText-2's validation text, in that order. Each way takes
the same number of tokens from it: `golden` the full set of `mlaforge calibrate` (SmolLM2 has no sliding windows),
`random` windows from anywhere, `first` the first ones. Three seeds: of the clusters, of the windows, and of the labels
that calibration samples, so that `first` varies too. Judged on text of another kind than the pool's (grade-school
mathematics, questions to an assistant), and on text of its kinds (WikiText-2 test, held-out Python source).
SmolLM2-135M-Instruct, fp32, `latent` at 50 %. Less than an hour on two cores; a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mlaforge.calibration import calibrate
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.calibration.sources import Notes, Source
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.token_losses import perplexity, window_losses
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.runtime import environment, log

SEEDS = (0, 1, 2)
WAYS = ("golden", "random", "first")
# Judged text -> whether the pool holds text of its kind.
JUDGED = {"maths": False, "chat": False, "wiki": True, "code": True}


def pool(data: Path) -> tuple[str, ...]:
    return corpus.EMBEDDED, str(data / "wikitext-2" / "wiki.valid.tokens")


def judged_texts(tokenizer: Any, data: Path, windows: int, seqlen: int, scratch: Path) -> dict[str, corpus.Windows]:
    """The judged texts by name, at most `windows` of each."""

    def lines(name: str) -> Iterator[str]:
        for line in (data / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield "\n".join([*record["turns"], *map(str, record.get("reference") or [])])

    held = {n: t for n, t in corpus.embedded_documents()["code"].items() if corpus.held_out(n)}
    texts = {
        "maths": lines("gsm8k"),
        "chat": lines("mt_bench"),
        "wiki": [(data / "wikitext-2" / "wiki.test.raw").read_text(encoding="utf-8")],
        "code": (held[n] for n in sorted(held)),
    }
    found = {}
    for name, parts in texts.items():
        (path := scratch / f"{name}.txt").write_text("\n\n".join(parts), encoding="utf-8")
        found[name] = corpus.windows(tokenizer, str(path), windows, seqlen)
    return found


def perplexities(directory: Path, judged: dict[str, corpus.Windows], what: str) -> dict[str, float]:
    with LayerStream(directory, torch.float32, torch.device("cpu")) as stream:
        return {name: perplexity(window_losses(stream, w.ids, f"{what} on {name}")) for name, w in judged.items()}


def convert_one(way: str, seed: int, given: argparse.Namespace, model: Path) -> Path:
    """SmolLM2 calibrated in one way; the windows of `first` are handed over as a text of just that length."""
    scratch, seqlen = given.folder, given.seqlen
    text = scratch / "pool.txt"
    if way == "golden":
        text = scratch / f"golden-{seed}"
        wanted = CalibrateConfig(source=pool(given.data), seed=seed, tokenizer=str(model), device="cpu")
        calibrate.run(text, wanted, embedded=scratch / "embedded")
    elif way == "first":
        # Convert draws windows at random where there are more than it takes: it is given no more.
        tokenizer = loading.load_tokenizer(model)
        first = corpus.windows(tokenizer, str(text), given.windows, seqlen)
        text = scratch / "first.txt"
        # A few tokens more, because the last one may be cut otherwise.
        text.write_text(tokenizer.decode(first.ids.flatten().tolist()) + " the" * 64, encoding="utf-8")
    out = scratch / f"converted-{way}-{seed}"
    config = ConvertConfig(
        layout="latent", budget=0.5, calibration=str(text), nsamples=given.windows, seqlen=seqlen, eval_windows=0,
        seed=seed, device="cpu",
    )  # fmt: skip
    convert.run(str(model), out, config)
    return out


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments.add_argument("--windows", type=int, default=8, help="calibration windows")
    arguments.add_argument("--seqlen", type=int, default=1024, help="tokens of a window")
    arguments.add_argument("--judged-windows", type=int, default=4, help="windows of each judged text")
    arguments.add_argument("--folder", type=Path, default=Path("runs/calibration"), help="what is made on the way")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/calibration.json"))
    given = arguments.parse_args()
    model = demo_model.fetch()
    tokenizer = loading.load_tokenizer(model)
    # What a run that was cut off had measured is not measured again.
    settings = {"windows": given.windows, "seqlen": given.seqlen, "judged_windows": given.judged_windows}
    result = json.loads(given.out.read_text()) if given.out.exists() else {}
    if result.get("settings") != settings:
        result = {"settings": settings, "rows": [], "environment": environment()}
    result["calibration_tokens"] = given.windows * given.seqlen
    (scratch := given.folder).mkdir(parents=True, exist_ok=True)
    documents = [d for s in pool(given.data) for d in Source.of(s).documents(Notes())]
    (scratch / "pool.txt").write_text("\n\n".join("\n".join(d.parts) for d in documents), encoding="utf-8")
    # Nothing is judged that any of the ways could be tuned on.
    everything = overlap.passages(corpus.windows(tokenizer, str(scratch / "pool.txt"), 10**6, given.seqlen))
    judged = judged_texts(tokenizer, given.data, given.judged_windows, given.seqlen, scratch)
    for name, windows in judged.items():
        shared = overlap.overlapping(windows, everything)
        keep = [i for i in range(len(windows.ids)) if i not in shared]
        judged[name] = corpus.Windows(windows.ids[keep], windows.source)
        log(f"{name}: {len(keep)} windows, {len(shared)} dropped because they repeat text of the pool")
    result["tokens"] = {name: w.ids.numel() for name, w in judged.items()}
    if "original" not in result:
        result["original"] = perplexities(model, judged, "original")
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    for seed in SEEDS:
        for way in WAYS:
            if any((row["way"], row["seed"]) == (way, seed) for row in result["rows"]):
                continue
            out = convert_one(way, seed, given, model)
            taken = json.loads((out / "manifest.json").read_text())["inputs"]["calibration"]["tokens"]
            assert taken == result["calibration_tokens"], (way, taken)
            found = perplexities(out, judged, f"{way} {seed}")
            shutil.rmtree(out)
            ratio = {name: found[name] / result["original"][name] for name in judged}
            result["rows"].append({"way": way, "seed": seed, "ppl": found, "ratio": ratio})
            log(json.dumps(result["rows"][-1]))
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Converted / original perplexity, mean over the seeds and in brackets the least and the most."""
    names = [f"{name} ({'of the pool’s kind' if kin else 'another kind'})" for name, kin in JUDGED.items()]
    lines = ["| calibrated on | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for way in WAYS:
        cells = []
        for name in JUDGED:
            seen = [row["ratio"][name] for row in result["rows"] if row["way"] == way]
            cells.append(f"{statistics.mean(seen):.4f} ({min(seen):.4f} – {max(seen):.4f})")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
