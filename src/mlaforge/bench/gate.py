"""Gates: a measured quantity, a comparison, a threshold, and beside it what physics allows. Data, in bench/gates.

A ledger beside the runs remembers which micro gates were green, on which commit and device: the full suite begins only
after three in a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mlaforge.artifact import record_path
from mlaforge.bench import machine
from mlaforge.bench.summary import spread
from mlaforge.config import nearest, read_recipe, whole_number
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError

FOLDER = Path(__file__).with_name("gates")
VERDICTS = "gates.json"
LEDGER = "ledger.json"
SCOPES = ("micro", "full", "cpu")
# Green runs of the micro gates before the full suite may begin.
NEEDED = 3
# What a gate may judge, and how to read it off a case: value and spread over the repetitions.
SPREADS = ("tokens_per_second", "prefill_tokens_per_second", "time_to_first_token")
COUNTED = ("mean_acceptance_length", "mean_acceptance_rate")
QUANTITIES = (*SPREADS, *COUNTED, "roof_fraction", "ms_per_token", "cache_bytes", "perplexity_ratio", "invariants")
# What a ratio may be of.
RATIOS = (*SPREADS, "cache_bytes")
# What a gate may need of a run, and what a run lacks that was never asked for it.
NEEDS = {
    "draft": "no draft head and no replay (--draft)", "conversion": "no converted model beside its original",
    "specpv": "no partial verification of what a head or a replay drafts (--specpv, --draft)",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gate:
    """One entry of a gates file. `case` and `over` are fields that a case must have; a gate with `over` judges the
    ratio to the case that has those and is otherwise the same, of `over_scenario` in the same run. `needs`: without it
    in a run, the gate was not asked."""

    name: str
    scopes: tuple[str, ...]
    scenario: str
    quantity: str
    at_least: float | None
    at_most: float | None
    case: dict[str, Any]
    over: dict[str, Any] | None
    over_scenario: str
    needs: str | None = None

    @property
    def threshold(self) -> float:
        threshold = self.at_least if self.at_least is not None else self.at_most
        assert threshold is not None
        return threshold

    def holds(self, value: float) -> bool:
        return value >= self.threshold if self.at_least is not None else value <= self.threshold


def read(path: Path) -> list[Gate]:
    """The gates of a YAML file. UserError, one line, where one is not understood."""
    body = read_recipe(path)
    entries = body.get("gates")
    if not isinstance(entries, list) or not entries or set(body) != {"gates"}:
        raise UserError(f"{path} must hold one key, gates, with a list")
    return [_gate(path, number, entry) for number, entry in enumerate(entries, start=1)]


def _gate(path: Path, number: int, entry: Any) -> Gate:
    where, known = (
        f"{path}, gate {number}",
        ("name", "scope", "scenario", "quantity", "at_least", "at_most", "case", "over", "needs"),
    )
    if not isinstance(entry, dict) or not {"name", "scenario", "quantity"} <= set(entry):
        raise UserError(f"{where} needs name, scenario and quantity")
    for key in entry:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), known)}")
    scopes = entry.get("scope", SCOPES)
    scopes = (scopes,) if isinstance(scopes, str) else tuple(scopes)
    for scope in scopes:
        if scope not in SCOPES:
            raise UserError(f"{where}: scope {scope!r} must be one of {', '.join(SCOPES)}{nearest(str(scope), SCOPES)}")
    if entry["quantity"] not in QUANTITIES:
        hint = nearest(str(entry["quantity"]), QUANTITIES)
        raise UserError(f"{where}: quantity {entry['quantity']!r} must be one of {', '.join(QUANTITIES)}{hint}")
    bounds = [entry[key] for key in ("at_least", "at_most") if key in entry]
    if len(bounds) != 1 or isinstance(bounds[0], bool) or not isinstance(bounds[0], int | float):
        raise UserError(f"{where} needs at_least or at_most, a number")
    case, over = dict(entry.get("case") or {}), entry.get("over")
    if "context" in case:
        try:
            case["context"] = whole_number(str(case["context"]))
        except ValueError as error:
            raise UserError(f"{where}: context {case['context']!r} must be a whole number such as 512 or 8k") from error
    if over is not None and (not isinstance(over, dict) or entry["quantity"] not in RATIOS):
        raise UserError(f"{where}: over names fields of a case, for a quantity out of {', '.join(RATIOS)}")
    if (needs := entry.get("needs")) is not None and needs not in NEEDS:
        raise UserError(f"{where}: needs {needs!r} must be one of {', '.join(NEEDS)}{nearest(str(needs), NEEDS)}")
    against = dict(over) if over is not None else None
    scenario = str(against.pop("scenario", entry["scenario"])) if against is not None else str(entry["scenario"])
    return Gate(
        str(entry["name"]), scopes, str(entry["scenario"]), entry["quantity"], entry.get("at_least"),
        entry.get("at_most"), case, against, scenario, needs,
    )  # fmt: skip


def judge(gate: Gate, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The verdict on one gate: of all cases that it is about the worst counts."""
    verdict: dict[str, Any] = {
        "name": gate.name, "scenario": gate.scenario, "quantity": gate.quantity,
        "comparison": "ratio" if gate.over is not None else "absolute",
        "against": None if gate.over is None else _words(gate), "operator": ">=" if gate.at_least is not None else "<=",
        "threshold": gate.threshold, "needs": gate.needs, "unit": "x" if gate.over is not None else "", "value": None,
        "spread": None, "ceiling": None, "ceiling_told": None, "case": None,
    }  # fmt: skip
    if reason := _not_asked(gate, results):
        return verdict | {"verdict": "not asked", "told": reason}
    measured = _measured(gate, results)
    if not measured:
        body = results.get(gate.scenario)
        lacking = [c["limit"]["what"] for c in (body or {}).get("cases", ()) if c["limit"] and _matches(c, gate.case)]
        why = lacking[0] if lacking else "no such case was run"
        return verdict | {"verdict": "missing", "told": f"not measured: {why}"}
    worst = (min if gate.at_least is not None else max)(measured, key=lambda measurement: measurement["value"])
    verdict |= worst
    form = f"{verdict['value']:.3g} {verdict['operator']} {gate.threshold:g}"
    ceiling, reason = verdict["ceiling"], verdict["ceiling_told"]
    beside = "" if ceiling is None else f" (ceiling {ceiling:.3g}: {reason})"
    if gate.holds(verdict["value"]):
        return verdict | {"verdict": "pass", "told": form + beside}
    if gate.at_least is not None and ceiling is not None and gate.threshold > ceiling:
        why = f"{verdict['value']:.3g}; {gate.threshold:g} lies above the ceiling {ceiling:.3g}: {reason}"
        return verdict | {"verdict": "unreachable", "told": why}
    return verdict | {"verdict": "fail", "told": f"not {form}{beside}"}


def _not_asked(gate: Gate, results: dict[str, dict[str, Any]]) -> str | None:
    """What the run was never asked for that a gate is about; None where it was."""
    body = results.get(gate.scenario)
    if body is None:
        return f"{gate.scenario} was not run"
    if gate.quantity == "invariants" and body["perf"] is None:
        return "the run was without --perf"
    own = [case for case in body["cases"] if not case["imported"]]
    layouts = {case["layout"] for case in own}
    drafted = [case for case in own if case["num_speculative_tokens"] and case["draft"] in ("head", "replay")]
    there = {
        "draft": bool(drafted), "specpv": any(case.get("specpv", "off") != "off" for case in drafted),
        "conversion": "gqa" in layouts and len(layouts) > 1,
    }  # fmt: skip
    if gate.quantity == "perplexity_ratio" and not _measured(gate, results):
        return "no converted model tells its perplexity"
    return None if gate.needs is None or there[gate.needs] else NEEDS[gate.needs]


def _words(gate: Gate) -> str:
    assert gate.over is not None
    known = {"num_speculative_tokens": "plain decoding", "layout": "the original", "engine": "transformers",
             "specpv": "full verification"}  # fmt: skip
    ours = {"num_speculative_tokens": 0, "layout": "gqa", "engine": "transformers", "specpv": "off"}
    (key, *more), words = gate.over, json.dumps(gate.over)
    words = known[key] if not more and ours.get(key) == gate.over[key] else words
    return words if gate.over_scenario == gate.scenario else f"{words} of {gate.over_scenario}"


def _matches(case: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return not case["imported"] and case["engine"] == wanted.get("engine", "mlaforge") and all(
        case.get(key) == value for key, value in wanted.items()
    )  # fmt: skip


def _measured(gate: Gate, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Value, spread, ceiling and id of every case that the gate is about."""
    body = results.get(gate.scenario)
    if body is None:
        return []
    if gate.quantity == "invariants":
        perf = body["perf"]
        if not perf:
            return []
        broken = [f"{finding['name']}: {finding['told']}" for finding in perf if not finding["passed"]]
        share = 1 - len(broken) / len(perf)
        return [{"value": share, "ceiling": 1.0, "ceiling_told": broken[0] if broken else "all of them hold"}]
    if gate.quantity == "perplexity_ratio":
        told = [model for model in body.get("models", ()) if model.get("ratio") is not None]
        return [{"value": m["ratio"], "spread": m["ratio_interval"], "case": m["name"]} for m in told]
    measurements = []
    for case in body["cases"]:
        ran = _matches(case, gate.case) and case["status"] == "ok"
        if gate.over and "layout" in gate.over and case["layout"] == gate.over["layout"]:
            # The original is what conversions are judged by.
            continue
        if ran and (value_and_spread := _value(gate, case, results)) is not None:
            value, spread = value_and_spread
            ceiling, why = _ceiling(gate, case, body)
            measurements.append(
                {"value": value, "spread": spread, "ceiling": ceiling, "ceiling_told": why, "case": case["id"]}
            )
    return measurements


def _value(
    gate: Gate, case: dict[str, Any], results: dict[str, dict[str, Any]]
) -> tuple[float, list[float] | None] | None:
    """What a case says, with its spread; None where it says nothing."""
    if gate.quantity in COUNTED:
        value = (case["eagle_speculation"] or {}).get(gate.quantity)
        return None if value is None else (value, None)
    if gate.quantity == "roof_fraction":
        return None if case["roofline"] is None else (case["roofline"]["fraction"], None)
    if gate.quantity == "ms_per_token":
        value = case["ms_per_token"]["p50"]
        return None if value is None else (value, None)
    if gate.quantity in SPREADS and case[gate.quantity] is None:
        # Prompts were found that an earlier case had computed.
        return None
    own = _quantity(gate, case)
    if gate.over is None:
        return _middle(own)
    fields = ["engine", "model", "dtype", "context", "batch", "num_speculative_tokens", "draft", "specpv"]
    # Of a conversion's original, only what was asked for is the same; plain decoding has no draft.
    plain = {"draft", "specpv"} if "num_speculative_tokens" in gate.over else set()
    dropped = {"model"} if "layout" in gate.over else plain
    if "specpv" in gate.over:
        # Only of the same cache they took turns.
        fields.append("cache_fraction")
    same = {key: case.get(key) for key in fields if key not in dropped} | gate.over
    if all(case.get(key) == value for key, value in gate.over.items()) and gate.over_scenario == gate.scenario:
        raise UserError(f"gate {gate.name!r} compares a case with itself")
    body = results.get(gate.over_scenario, {"cases": []})
    others = [c for c in body["cases"] if _matches(c, same) and c["status"] == "ok"]
    if not others:
        return None
    theirs = _quantity(gate, others[0])
    if gate.over_scenario == gate.scenario and len(own["runs"]) == len(theirs["runs"]):
        # Repetitions of one round are neighbours in time.
        return _middle(spread([a / b for a, b in zip(own["runs"], theirs["runs"], strict=True)]))
    return own["median"] / theirs["median"], None


def _quantity(gate: Gate, case: dict[str, Any]) -> dict[str, Any]:
    """Median and spread of the repetitions; a cache's bytes are the same in all of them."""
    return spread([case["cache"]["bytes"]]) if gate.quantity == "cache_bytes" else case[gate.quantity]


def _middle(runs: dict[str, Any]) -> tuple[float, list[float]]:
    return runs["median"], [runs["min"], runs["max"]]


def _ceiling(gate: Gate, case: dict[str, Any], body: dict[str, Any]) -> tuple[float | None, str | None]:
    """What physics allows, and why."""
    count, top = case["num_speculative_tokens"], case["roofline"]
    if gate.quantity == "mean_acceptance_length":
        # Of partial verification the drafts are what was pending.
        count = (case["eagle_speculation"] or {}).get("num_speculative_tokens", count)
        return 1.0 + count, f"{count} drafted tokens and the model's own"
    if gate.quantity in ("mean_acceptance_rate", "roof_fraction"):
        return 1.0, "all of it"
    if gate.quantity != "tokens_per_second" or top is None:
        return None, None
    bound = f"roofline of {body['roof']['name']}, {top['limit']}"
    if gate.over is None:
        return top["tokens_per_second"], bound
    if gate.over == {"specpv": "off"}:
        return top.get("specpv_ceiling"), f"every pending token kept, {bound}"
    if gate.over.get("num_speculative_tokens") == 0 and count:
        return top["speedup_ceiling"], f"every draft accepted and free, {bound}"
    return None, None


def _scenarios(folder: Path) -> dict[str, dict[str, Any]]:
    """The scenarios' results that lie in a folder, by name."""
    scenarios: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as results: {error}") from error
        if isinstance(body, dict) and body.get("kind") == "scenario":
            if body.get("schema") != machine.SCHEMA:
                raise UserError(f"{path} has schema {body.get('schema')!r}; this version reads {machine.SCHEMA}")
            scenarios[body["scenario"]] = body
    return scenarios


def results_of(folder: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The run in `folder`, or the newest of those below it, and its scenarios by name. UserError where there is none,
    or where they are not of one commit, device and scope."""
    below = sorted((path for path in folder.glob("*") if path.is_dir()), reverse=True)
    results: dict[str, dict[str, Any]] = {}
    for run in (folder, *below):
        if results := _scenarios(run):
            folder = run
            break
    if not results:
        raise UserError(f"{folder} holds no results of `mlaforge bench`")
    for key in ("commit", "device", "scope"):
        if len(values := {body[key] for body in results.values()}) > 1:
            raise UserError(f"{folder} holds results of several {key}s: {', '.join(sorted(map(str, values)))}")
    return folder, results


def run(folder: Path, gates: Path | None = None) -> dict[str, Any]:
    """Judges a run, writes gates.json into it and an entry into the ledger above it; returns what was written."""
    folder, results = results_of(folder)
    one = next(iter(results.values()))
    wanted = [gates] if gates else sorted(FOLDER.glob("*.yaml"))
    verdicts = [judge(gate, results) for path in wanted for gate in read(path) if one["scope"] in gate.scopes]
    if not verdicts:
        raise UserError(f"{', '.join(map(str, wanted))} hold no gate of scope {one['scope']}")
    counted = {verdict["verdict"] for verdict in verdicts}
    if counted == {"not asked"}:
        judged = ", ".join(sorted({verdict["scenario"] for verdict in verdicts}))
        raise UserError(f"no gate of scope {one['scope']} judges {', '.join(results)}; there are gates for {judged}")
    passed = "pass" in counted and not counted & {"fail", "missing"}
    # What opens the full suite was asked everything but for what a run need not have.
    whole = all(verdict["needs"] for verdict in verdicts if verdict["verdict"] == "not asked")
    dirty = any(body["dirty"] for body in results.values())
    ledger = folder.parent / LEDGER
    entry = {
        "time": one["time"], "commit": one["commit"], "device": one["device"], "scope": one["scope"],
        "passed": passed and whole, "dirty": dirty, "results": folder.name, "digest": _digest(folder),
    }  # fmt: skip
    # What other gates than the shipped ones say opens no full suite.
    if gates is None:
        _record_run(ledger, entry)
    row = in_a_row(ledger, one["commit"], one["device"])
    body = {
        "kind": "gates", "schema": machine.SCHEMA, "time": one["time"], "scope": one["scope"], "commit": one["commit"],
        "dirty": dirty, "device": one["device"], "forced": any(b["forced"] for b in results.values()), "passed": passed,
        "ledger": {"file": record_path(ledger), "in_a_row": row, "needed": NEEDED}, "gates": verdicts,
    }  # fmt: skip
    machine.write(folder / VERDICTS, body)
    return body


def _digest(folder: Path) -> str:
    """SHA-256 over the results of a run: copied to another folder they are the same run."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        if path.name != VERDICTS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _entries(ledger: Path) -> list[dict[str, Any]]:
    if not ledger.is_file():
        return []
    try:
        runs: list[dict[str, Any]] = json.loads(ledger.read_text(encoding="utf-8"))["runs"]
        return [dict(run) for run in runs]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"ledger {ledger} is damaged; move it away, and the count begins anew") from error


def _record_run(ledger: Path, entry: dict[str, Any]) -> None:
    """Adds a run, in order of time; one that was judged before is replaced, so that it counts once."""
    runs = [run for run in _entries(ledger) if run["digest"] != entry["digest"]]
    machine.write(ledger, {"runs": sorted([*runs, entry], key=lambda run: run["time"])})


def in_a_row(ledger: Path, commit: str, device: str) -> int:
    """How many of the newest micro runs of this commit and device were green one after another. A run of changed files
    is of no commit."""
    count = 0
    for run in reversed(_entries(ledger)):
        if (run["scope"], run["commit"], run["device"], run["dirty"]) == ("micro", commit, device, False):
            if not run["passed"]:
                break
            count += 1
    return count


def permit(out: Path, force: bool, scope: str, header: dict[str, Any]) -> bool:
    """Whether a run was forced. UserError where the full scope may not begin yet."""
    if scope != "full":
        return False
    row = in_a_row(out / LEDGER, header["commit"], header["device"])
    if row >= NEEDED and not header["dirty"]:
        return False
    if not force:
        changed = "; the package has changes that are not committed" if header["dirty"] else ""
        raise UserError(
            f"the micro gates were green {row} of {NEEDED} times in a row on this commit and device{changed}: run "
            "`mlaforge bench --scope micro --perf` and `mlaforge gate`, or pass --force, which is recorded"
        )
    return True


def table(body: dict[str, Any]) -> str:
    """Verdicts for the terminal."""
    lines: list[tuple[str, ...]] = [("verdict", "gate", "measured", "spread", "wanted", "ceiling", "")]
    for verdict in body["gates"]:
        unit = verdict["unit"]
        value = "–" if verdict["value"] is None else f"{verdict['value']:.3g}{unit}"
        between = "–" if not verdict["spread"] else "{:.3g}..{:.3g}".format(*verdict["spread"])
        ceiling = "–" if verdict["ceiling"] is None else f"{verdict['ceiling']:.3g}{unit}"
        unjudged = verdict["verdict"] in ("missing", "not asked", "unreachable")
        reason = verdict["told" if unjudged else "ceiling_told"]
        wanted = f"{verdict['operator']} {verdict['threshold']:g}{unit}"
        shown = verdict["verdict"] if verdict["verdict"] in ("pass", "not asked") else verdict["verdict"].upper()
        lines.append((shown, verdict["name"], value, between, wanted, ceiling, reason or ""))
    ledger = body["ledger"]
    judged = f"{'passed' if body['passed'] else 'FAILED'}: {body['scope']} on {body['device']}, {body['commit'][:12]}"
    row = f"; micro gates green {ledger['in_a_row']} of {ledger['needed']} times in a row"
    return text_table(lines) + "\n" + judged + (" with changes" if body["dirty"] else "") + row
