"""summary.md of `verify-gpu`: prediction, measurement, share of the roofline and verdict of every case."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mlaforge.rendering.table import markdown_table

# Printed lines of the summary and their width: a rented machine may return at most 12,000 characters.
PRINTED, WIDTH = 100, 115
GOOD = ("ok", "skipped")


def render(rows: list[dict[str, Any]], facts: dict[str, Any], twin: bool, seconds: float) -> str:
    """Markdown: the machine, counts by status, the cases that are not ok, then all cases by stage."""
    parts = [
        "# verify-gpu" + (" (twin on a CPU: times are not judged)" if twin else ""),
        _machine(facts),
        f"{len(rows)} cases in {seconds:.0f} s: {counts(rows)}.",
    ]
    if bad := [row for row in rows if row["status"] not in GOOD]:
        parts += ["## Not ok", _table([{**row, "case": f"{row['stage']}: {row['case']}"} for row in bad])]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        parts += [f"## {stage}", _table([row for row in rows if row["stage"] == stage])]
    return "\n\n".join(filter(None, parts)) + "\n"


def clipped(page: str) -> str:
    """Beginning of a summary for the terminal."""
    return "\n".join(line[:WIDTH] for line in page.splitlines()[:PRINTED])


def counts(rows: list[dict[str, Any]]) -> str:
    """`12 ok, 1 off`."""
    return ", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows).most_common())


def _machine(facts: dict[str, Any]) -> str:
    names = ("device", "driver", "torch", "triton", "transformers")
    items = [f"{name} {facts[name]}" for name in names if facts.get(name)]
    if "bandwidth" in facts:
        items.append(f"copy {facts['bandwidth'] / 1e9:,.0f} GB/s")
    if "flops" in facts:
        items.append(f"product {facts['flops'] / 1e12:,.1f} TFLOP/s")
    return "; ".join(items)


def _table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [("case", "predicted", "measured", "share", "verdict", "remark")]
    for row in rows:
        predicted = row.get("predicted") or {}
        unit = predicted.get("unit", "")
        rule = predicted.get("rule", "within")
        bound = "" if rule == "within" else f"{rule} "
        remarks = [row.get("detail") or "", *(f"{key}: {row[key]}" for key in ("repeated", "sanitizer") if key in row)]
        lines.append((
            row["case"], f"{bound}{number(predicted['value'])} {unit}" if predicted else "",
            f"{number(row['measured'])} {unit}" if row.get("measured") is not None else "",
            "" if row.get("share") is None else f"{row['share']:.0%}", row["status"],
            "; ".join(filter(None, remarks)).replace("|", "/").replace("\n", " ")[:200],
        ))  # fmt: skip
    return markdown_table(lines)


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
