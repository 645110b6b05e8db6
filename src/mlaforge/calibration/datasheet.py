"""The datasheet of calibration sets: contents, sources, licences and omissions, as JSON, Markdown and a histogram.

The output is deterministic: the same sets give the same bytes.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from mlaforge.rendering.page import can_draw
from mlaforge.rendering.table import markdown_table

JSON, MARKDOWN, PICTURE = "datasheet.json", "datasheet.md", "token_histograms.png"
COLOURS = {"typical": "#31688e", "hard": "#e07b39"}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of one set's records."""
    tokens = sorted(record["tokens"] for record in records)
    return {
        "texts": len(records),
        "tokens": sum(tokens),
        "typical": sum(record["kind"] == "typical" for record in records),
        "hard": sum(record["kind"] == "hard" for record in records),
        "clusters": len({(record["set"], record["cluster"]) for record in records}),
        "tokens_least_median_most": [tokens[0], statistics.median_high(tokens), tokens[-1]] if tokens else [0, 0, 0],
        "tokens_by_source": {
            source: sum(r["tokens"] for r in records if r["source"] == source)
            for source in sorted({record["source"] for record in records})
        },
    }


def write(folder: Path, facts: dict[str, Any], sets: dict[str, list[dict[str, Any]]]) -> None:
    """Write datasheet.json, datasheet.md and the histograms.

    facts: sources, embedder, tokenizer, options, measures, files and notes. sets: name -> records.
    """
    sheet = {**facts, "sets": {name: summary(records) for name, records in sets.items()}}
    (folder / JSON).write_text(json.dumps(sheet, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with_picture = can_draw(f"the histograms of {PICTURE}")
    (folder / MARKDOWN).write_text(_markdown(sheet, with_picture), encoding="utf-8")
    if with_picture:
        _picture(folder / PICTURE, sets)


def _markdown(sheet: dict[str, Any], with_picture: bool) -> str:
    sets = [("file", "texts", "typical", "hard", "clusters", "tokens", "tokens per text: min, median, max")]
    for name, counts in sheet["sets"].items():
        spans = ", ".join(map(str, counts["tokens_least_median_most"]))
        columns = (counts[key] for key in ("texts", "typical", "hard", "clusters", "tokens"))
        sets.append((f"`{sheet['files'][name]}`", *columns, spans))
    sources = [("source", "licence", "hash or revision", *(f"tokens in {name}" for name in sheet["sets"]))]
    for source, facts in sheet["sources"].items():
        shares = (counts["tokens_by_source"].get(source, 0) for counts in sheet["sets"].values())
        sources.append((source, facts["licence"], facts.get("sha256") or facts.get("revision"), *shares))
    notes = [("issue", "count", "examples")]
    notes += [(issue, note["count"], ", ".join(note["examples"])) for issue, note in sheet["notes"].items()]
    unknown = [source for source, facts in sheet["sources"].items() if facts["licence"] == "unknown"]
    warning = f"\nThe licence of {', '.join(unknown)} is unknown: clarify it before use.\n" if unknown else ""
    return "\n".join([
        "# Calibration sets\n",
        "Written by `mlaforge calibrate`; each line of a file is a JSON object with text, tokens (counted by "
        f"{sheet['tokenizer']['name']}), source, document, set, cluster, distance, kind and score.\n",
        markdown_table(sets),
        f"\n![Tokens of the texts]({PICTURE})\n" if with_picture else "",
        "## Sources\n",
        markdown_table(sources),
        warning,
        "## Selection method\n",
        *(f"- **{what}**: {how}" for what, how in sheet["measures"].items()),
        "\n## Issues with the input\n",
        markdown_table(notes) if len(notes) > 1 else "None.",
        "",
    ])  # fmt: skip


def _picture(path: Path, sets: dict[str, list[dict[str, Any]]]) -> None:
    """Write one histogram of tokens per set, typical and hard texts stacked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(sets), 3.2), dpi=110, layout="constrained")
    for column, (name, records) in enumerate(sets.items(), 1):
        axes = figure.add_subplot(1, len(sets), column)
        parts = {kind: [r["tokens"] for r in records if r["kind"] == kind] for kind in COLOURS}
        axes.hist(list(parts.values()), bins=30, stacked=True, color=list(COLOURS.values()), label=list(parts))
        total = sum(map(sum, parts.values()))
        axes.set(title=f"{name}: {len(records):,} texts, {total:,} tokens", xlabel="tokens per text", ylabel="texts")
        axes.spines[["top", "right"]].set_visible(False)
        if column == 1:
            axes.legend(frameon=False)
    # By default the metadata contains the version of matplotlib.
    figure.savefig(path, metadata={"Software": None})
