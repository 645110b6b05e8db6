"""`calibrate`: text in, calibration sets out, one for sliding-window and one for full-attention layers.

Documents (sources.py) are cut into windows, and runs of windows are passages (window_store.py); both are embedded
(embedder.py) and clustered, and each cluster gives its typical and its hard texts (selection.py). Embeddings wait on
disk for a run that was killed. The datasheet counts what was chosen (datasheet.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlaforge.artifact import WORK, Manifest, existing, finished, record_name, record_names, writing
from mlaforge.calibration import datasheet, embedder, selection
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.calibration.sources import Notes, Source, licences, names, shares
from mlaforge.calibration.window_store import LEAST, Passage, Shards, long_enough, passages
from mlaforge.checkpoint.reader import fingerprint
from mlaforge.checkpoint.resolve import locate
from mlaforge.checkpoint.source_model import SourceModel, load_tokenizer
from mlaforge.config import by_keywords
from mlaforge.data import corpus
from mlaforge.runtime import UserError, log, progress, resolve_device, timed
from mlaforge.synthesis.own_text import MOST, own_text

# In the work folder: that all text is cut, and what was noted on the way.
CUT = "notes.json"
# Digits of a distance and a score that are written.
DIGITS = 5


def run(out: Path, config: CalibrateConfig, overwrite: bool = False, embedded: Path | None = None) -> Manifest:
    """Writes the calibration sets of the sources into the new directory `out` and returns its manifest.

    Several runs over one text that are given the same folder `embedded` embed it once.
    The same sources, embedder and options again return the finished result, or go on where a killed run stopped.
    Raises UserError for the user's mistakes; whatever happens, `out` is either complete or untouched.
    """
    device = resolve_device(config.device)
    sources = [Source.of(argument) for argument in dict.fromkeys(config.source or (corpus.EMBEDDED,))]
    known, parts = licences(config.license or (), sources), shares(config.share or (), sources)
    own = embedder.directory(config.embedder)
    counter = locate(config.tokenizer) if config.tokenizer else own
    tokenizer = load_tokenizer(counter)
    # Before a model is asked for text, which takes minutes.
    reads: list[str | Path | None] = [own, counter, *(source.place for source in sources)]
    existing(out, reads)
    sources = [_written(source, config) for source in sources]
    left = ("device", "source", "share", "license")
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in left}
    called, places = names(sources), record_names(config, "embedder", "tokenizer")
    manifest = Manifest(
        "calibrate",
        config=settings | places | {"share": {called[source]: part for source, part in parts.items()}},
        inputs={
            "sources": {called[source.argument]: source.describe(known.get(source.argument)) for source in sources},
            "embedder": {"name": places["embedder"], "sha256": fingerprint(own)},
            "tokenizer": {
                "name": places["tokenizer"] or f"the embedder {places['embedder']}",
                "sha256": _hash(tokenizer),
            },
        },
    )  # fmt: skip
    if done := finished(out, manifest, overwrite, reads):
        log(f"{out} is finished already")
        return done
    embed = embedder.Embedder(own, device, config.trust_remote_code)
    with writing(out, manifest, resumable=True) as unfinished:
        _calibrate(sources, embed, tokenizer, config, manifest, unfinished, embedded)
    return manifest


def _written(source: Source, config: CalibrateConfig) -> Source:
    """The source, with what the model wrote where it is the model's own text."""
    if source.kind != corpus.SELF:
        return source
    if not config.tokenizer:
        raise UserError("source self is what a model writes; name the model with --tokenizer MODEL")
    written = own_text(SourceModel.open(config.tokenizer), MOST, config.seed, config.device)
    return dataclasses.replace(source, own=written)


def _hash(tokenizer: Any) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _calibrate(
    sources: list[Source], embed: embedder.Embedder, tokenizer: Any, config: CalibrateConfig, manifest: Manifest,
    unfinished: Path, embedded: Path | None,
) -> None:  # fmt: skip
    """The work itself: fills `unfinished` and the manifest's metrics."""
    seconds, inputs = manifest.seconds, manifest.inputs
    key = str([inputs["sources"], inputs["embedder"]["sha256"], config.window, config.passage])
    folder = embedded or unfinished / WORK / "embedded"
    shards = Shards(folder / hashlib.sha256(key.encode()).hexdigest()[:16])
    with timed(seconds, "cut"):
        notes = _cut(sources, shards, config)
    with timed(seconds, "embed"):
        for number in progress(range(len(shards)), "embed windows", len(shards)):
            if not shards.embedded(number):
                shards.embed(number, embed, config.window)
    with timed(seconds, "choose"):
        chosen, metrics = _choose(shards, config)
    with timed(seconds, "write"):
        sets = {
            name: _shared(_records(shards, name, choices, tokenizer), manifest.config["share"])
            for name, choices in chosen.items()
        }
        sets["mixed"] = _mixed(sets["swa"], sets["full"])
        for name, records in sets.items():
            # Where a text lies is for _mixed alone.
            lines = ({k: v for k, v in record.items() if k != "passage"} for record in records)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (unfinished / corpus.CALIBRATION_SETS[name]).write_text(text, encoding="utf-8")
        facts = {
            **inputs, "options": manifest.config, "files": corpus.CALIBRATION_SETS, "counts": metrics,
            "measures": _measures(config, embed), "notes": notes,
        }  # fmt: skip
        datasheet.write(unfinished, facts, sets)
    manifest.metrics = {**metrics, "notes": notes}
    manifest.metrics["sets"] = {name: datasheet.summary(records) for name, records in sets.items()}


def _cut(sources: list[Source], shards: Shards, config: CalibrateConfig) -> dict[str, Any]:
    """Cuts all text once, also over a run that was killed; returns what was noted on the way.

    Raises UserError where there are fewer windows than clusters.
    """
    done = shards.folder / CUT
    if done.exists():
        summary: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return summary
    notes, windows, called = Notes(), 0, names(sources)

    def all_passages() -> Iterator[Passage]:
        nonlocal windows
        for source in sources:
            documents = progress(source.documents(notes), f"cut {source.argument}")
            for passage in passages(called[source.argument], documents, config.window, config.passage):
                usable = sum(long_enough(window, config.window) for window in passage.windows)
                windows += usable
                if short := len(passage.windows) - usable:
                    notes.counts["windows too short to be chosen"] += short
                yield passage

    shards.write(all_passages())
    if windows < config.clusters:
        raise UserError(
            f"the sources give {windows} windows of {config.window} characters, fewer than {config.clusters} clusters: "
            "give more text, or a smaller --clusters or --window"
        )
    done.write_text(json.dumps(notes.describe(), ensure_ascii=False), encoding="utf-8")
    return notes.describe()


def _choose(shards: Shards, config: CalibrateConfig) -> tuple[dict[str, list[selection.Choice]], dict[str, int]]:
    """The choices of the sliding-window and the full-attention set, and how much they were taken from."""
    chosen, metrics = {}, {}
    # Passages have about as many clusters for their number as windows have for theirs.
    few = max(1, config.clusters // config.passage)
    for name, unit, score, clusters in (
        ("swa", "windows", "density", config.clusters), ("full", "passages", "complexity", few),
    ):  # fmt: skip
        usable = shards.column(f"{unit}_usable")
        count = min(clusters, int(usable.sum()))
        chosen[name], duplicates = selection.choose(
            partial(shards.vectors, unit), shards.column(score), usable, count, config.neighbours, config.seed
        )
        metrics[unit], metrics[f"near-duplicate {unit} left out"] = len(usable), duplicates
    return chosen, metrics


def _records(shards: Shards, name: str, choices: list[selection.Choice], tokenizer: Any) -> list[dict[str, Any]]:
    """The lines of a set, in the order of `choices`; `passage` is the number of the passage that the text lies in."""
    places = {choice.row: at for at, choice in enumerate(choices)}
    scores = shards.column("density" if name == "swa" else "complexity")
    records: list[dict[str, Any]] = [{} for _ in choices]
    row = passage_number = 0
    for number in range(len(shards)):
        for passage in shards.read(number):
            for text in passage.windows if name == "swa" else (passage.text,):
                if row in places:
                    choice, text = choices[places[row]], text.strip()
                    records[places[row]] = {
                        "text": text,
                        "tokens": len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
                        "source": passage.source,
                        "document": passage.document,
                        "set": name,
                        "cluster": choice.cluster,
                        "distance": round(choice.distance, DIGITS),
                        "kind": choice.kind,
                        "score": round(float(scores[row]), DIGITS),
                        "passage": passage_number,
                    }
                row += 1
            passage_number += 1
    return records


def _shared(records: list[dict[str, Any]], shares: dict[str, float]) -> list[dict[str, Any]]:
    """The first records of every source, until each has its share of the tokens; all of them without shares."""
    if not shares:
        return records
    tokens = dict.fromkeys(shares, 0)
    for record in records:
        tokens[record["source"]] += record["tokens"]
    whole = min(tokens[source] / share for source, share in shares.items())
    kept, taken = [], dict.fromkeys(shares, 0)
    for record in records:
        source = record["source"]
        if taken[source] < whole * shares[source]:
            taken[source] += record["tokens"]
            kept.append(record)
    return kept


def _mixed(swa: list[dict[str, Any]], full: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both sets in turn, so that each has half of the tokens, until one is used up; no text twice."""
    inside = {record["passage"] for record in full}
    queues = [list(reversed(full)), [record for record in reversed(swa) if record["passage"] not in inside]]
    tokens, mixed = [0, 0], []
    while queues[turn := tokens[1] < tokens[0]]:
        record = queues[turn].pop()
        tokens[turn] += record["tokens"]
        mixed.append(record)
    return mixed


def _measures(config: CalibrateConfig, embed: embedder.Embedder) -> dict[str, str]:
    """What the datasheet says of the method."""
    longer = "the passage is the mean of its windows' embeddings, weighted by characters"
    return {
        "windows": f"slices of a document of at most {config.window} characters, cut where a paragraph, line, sentence "
        f"or word ends; of less than {config.window * LEAST:g} characters, none is chosen",
        "passages": f"{config.passage} consecutive windows of one document, or the whole of a shorter one",
        "embeddings": f"{record_name(config.embedder)}, {embed.context} tokens at once: a longer window is embedded by "
        "parts, whose mean counts each by its tokens; a passage that fits is embedded whole, of one that does not "
        f"{longer}",
        "clusters": f"mini-batch k-means, {config.clusters} of windows and {max(1, config.clusters // config.passage)} "
        f"of passages, seed {config.seed}; distances are Euclidean, of vectors of length one",
        "dense (swa)": "bytes after zlib (level 9) by bytes before; of each cluster only the denser half counts",
        "complex (full)": "characters times spread, 1 - |mean| of the windows' embeddings: long text that does not "
        "stay with one thing; of each cluster only the more complex half counts",
        "typical": f"the {config.neighbours} texts of that half that are nearest the centroid",
        "hard": f"the {100 * selection.FARTHEST:g} % of that half that are farthest from it",
        "near-duplicates": f"a text whose cosine to one that was taken reaches {selection.SAME} is left out",
        "mixed": "both sets in turn, half of the tokens each, until one is used up, windows within a chosen passage "
        "left out",
    }


calibrate = by_keywords(run, CalibrateConfig)
