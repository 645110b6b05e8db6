"""Gates: a measured quantity, a comparison, a threshold, and the physical ceiling. Defined in bench/gates/*.yaml.

A ledger next to the runs records which micro gates were green, with commit and device: the full scope requires three
green runs in a row.
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
# Green runs of the micro gates that the full scope requires.
NEEDED = 3
# Quantities of a gate: those with a spread over the repetitions, counters, and others.
SPREADS = ("tokens_per_second", "prefill_tokens_per_second", "time_to_first_token")
COUNTED = ("mean_acceptance_length", "mean_acceptance_rate")
QUANTITIES = (*SPREADS, *COUNTED, "roof_fraction", "ms_per_token", "cache_bytes", "perplexity_ratio", "invariants")
# Quantities that a gate may compare as a ratio.
RATIOS = (*SPREADS, "cache_bytes")
# Values of `needs`, with the reason for the verdict "not asked" if a run lacks it.
NEEDS = {
    "draft": "no draft head and no replay (--draft)", "conversion": "no converted model beside its original",
    "specpv": "no partial verification of what a head or a replay drafts (--specpv, --draft)",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gate:
    """One entry of a gates file. case: fields that a case must match. over: fields of the baseline case, which is
    otherwise the same, of `over_scenario` in the same run; the gate then judges the ratio to it. needs: a run without
    it gets the verdict "not asked"."""

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

    def passes(self, value: float) -> bool:
        return value >= self.threshold if self.at_least is not None else value <= self.threshold


def read(path: Path) -> list[Gate]:
    """Read the gates of a YAML file. Raise UserError for an invalid entry."""
    body = read_recipe(path)
    entries = body.get("gates")
    if not isinstance(entries, list) or not entries or set(body) != {"gates"}:
        raise UserError(f"{path} must contain one key, gates, with a list")
    return [_parse_gate(path, number, entry) for number, entry in enumerate(entries, start=1)]


def _parse_gate(path: Path, number: int, entry: Any) -> Gate:
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
        raise UserError(f"{where}: over must map fields of a case to values, for a quantity of {', '.join(RATIOS)}")
    if (needs := entry.get("needs")) is not None and needs not in NEEDS:
        raise UserError(f"{where}: needs {needs!r} must be one of {', '.join(NEEDS)}{nearest(str(needs), NEEDS)}")
    against = dict(over) if over is not None else None
    scenario = str(against.pop("scenario", entry["scenario"])) if against is not None else str(entry["scenario"])
    return Gate(
        str(entry["name"]), scopes, str(entry["scenario"]), entry["quantity"], entry.get("at_least"),
        entry.get("at_most"), case, against, scenario, needs,
    )  # fmt: skip


def judge(gate: Gate, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Verdict on one gate. The worst of all matching cases decides."""
    verdict: dict[str, Any] = {
        "name": gate.name, "scenario": gate.scenario, "quantity": gate.quantity,
        "comparison": "ratio" if gate.over is not None else "absolute",
        "against": None if gate.over is None else _baseline_label(gate),
        "operator": ">=" if gate.at_least is not None else "<=",
        "threshold": gate.threshold, "needs": gate.needs, "unit": "x" if gate.over is not None else "", "value": None,
        "spread": None, "ceiling": None, "ceiling_reason": None, "case": None,
    }  # fmt: skip
    if reason := _missing_request(gate, results):
        return verdict | {"verdict": "not asked", "reason": reason}
    measurements = _measure(gate, results)
    if not measurements:
        body = results.get(gate.scenario)
        limits = [c["limit"]["what"] for c in (body or {}).get("cases", ()) if c["limit"] and _matches(c, gate.case)]
        reason = limits[0] if limits else "no such case was run"
        return verdict | {"verdict": "missing", "reason": f"not measured: {reason}"}
    worst = (min if gate.at_least is not None else max)(measurements, key=lambda measurement: measurement["value"])
    verdict |= worst
    comparison = f"{verdict['value']:.3g} {verdict['operator']} {gate.threshold:g}"
    ceiling, reason = verdict["ceiling"], verdict["ceiling_reason"]
    suffix = "" if ceiling is None else f" (ceiling {ceiling:.3g}: {reason})"
    if gate.passes(verdict["value"]):
        return verdict | {"verdict": "pass", "reason": comparison + suffix}
    if gate.at_least is not None and ceiling is not None and gate.threshold > ceiling:
        detail = f"{verdict['value']:.3g}; {gate.threshold:g} is above the ceiling {ceiling:.3g}: {reason}"
        return verdict | {"verdict": "unreachable", "reason": detail}
    return verdict | {"verdict": "fail", "reason": f"not {comparison}{suffix}"}


def _missing_request(gate: Gate, results: dict[str, dict[str, Any]]) -> str | None:
    """Why the run could not measure the gate's quantity by its options; None if it could."""
    body = results.get(gate.scenario)
    if body is None:
        return f"{gate.scenario} was not run"
    if gate.quantity == "invariants" and body["perf"] is None:
        return "the run was without --perf"
    cases = [case for case in body["cases"] if not case["imported"]]
    layouts = {case["layout"] for case in cases}
    drafted = [case for case in cases if case["num_speculative_tokens"] and case["draft"] in ("head", "replay")]
    available = {
        "draft": bool(drafted), "specpv": any(case.get("specpv", "off") != "off" for case in drafted),
        "conversion": "gqa" in layouts and len(layouts) > 1,
    }  # fmt: skip
    if gate.quantity == "perplexity_ratio" and not _measure(gate, results):
        return "no converted model reports its perplexity"
    return None if gate.needs is None or available[gate.needs] else NEEDS[gate.needs]


def _baseline_label(gate: Gate) -> str:
    assert gate.over is not None
    labels = {"num_speculative_tokens": "plain decoding", "layout": "the original", "engine": "transformers",
              "specpv": "full verification"}  # fmt: skip
    values = {"num_speculative_tokens": 0, "layout": "gqa", "engine": "transformers", "specpv": "off"}
    (key, *rest), label = gate.over, json.dumps(gate.over)
    label = labels[key] if not rest and values.get(key) == gate.over[key] else label
    return label if gate.over_scenario == gate.scenario else f"{label} of {gate.over_scenario}"


def _matches(case: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether a measured case has the given fields; the engine is mlaforge's unless they name another."""
    return not case["imported"] and case["engine"] == fields.get("engine", "mlaforge") and all(
        case.get(key) == value for key, value in fields.items()
    )  # fmt: skip


def _measure(gate: Gate, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Value, spread, ceiling and id of every case that the gate matches."""
    body = results.get(gate.scenario)
    if body is None:
        return []
    if gate.quantity == "invariants":
        perf = body["perf"]
        if not perf:
            return []
        broken = [f"{finding['name']}: {finding['detail']}" for finding in perf if not finding["passed"]]
        share = 1 - len(broken) / len(perf)
        return [{"value": share, "ceiling": 1.0, "ceiling_reason": broken[0] if broken else "all of them hold"}]
    if gate.quantity == "perplexity_ratio":
        models = [model for model in body.get("models", ()) if model.get("ratio") is not None]
        return [{"value": m["ratio"], "spread": m["ratio_interval"], "case": m["name"]} for m in models]
    measurements = []
    for case in body["cases"]:
        matches = _matches(case, gate.case) and case["status"] == "ok"
        if gate.over and "layout" in gate.over and case["layout"] == gate.over["layout"]:
            # The original is the baseline of conversions.
            continue
        if matches and (value_and_spread := _value(gate, case, results)) is not None:
            value, spread = value_and_spread
            ceiling, reason = _ceiling(gate, case, body)
            measurements.append(
                {"value": value, "spread": spread, "ceiling": ceiling, "ceiling_reason": reason, "case": case["id"]}
            )
    return measurements


def _value(
    gate: Gate, case: dict[str, Any], results: dict[str, dict[str, Any]]
) -> tuple[float, list[float] | None] | None:
    """Value of the gate's quantity in a case, with its spread; None if it was not measured."""
    if gate.quantity in COUNTED:
        value = (case["eagle_speculation"] or {}).get(gate.quantity)
        return None if value is None else (value, None)
    if gate.quantity == "roof_fraction":
        return None if case["roofline"] is None else (case["roofline"]["fraction"], None)
    if gate.quantity == "ms_per_token":
        value = case["ms_per_token"]["p50"]
        return None if value is None else (value, None)
    if gate.quantity in SPREADS and case[gate.quantity] is None:
        # An earlier case had computed the prompts.
        return None
    quantity = _quantity(gate, case)
    if gate.over is None:
        return _median_and_range(quantity)
    fields = ["engine", "model", "dtype", "context", "batch", "num_speculative_tokens", "draft", "specpv"]
    # The original of a conversion is another model; plain decoding has no draft.
    plain = {"draft", "specpv"} if "num_speculative_tokens" in gate.over else set()
    ignored = {"model"} if "layout" in gate.over else plain
    if "engine" not in gate.over:
        fields.append("kv_cache_dtype")
    if "specpv" in gate.over:
        # Only rows with the same cache were interleaved.
        fields.append("cache_fraction")
    baseline_fields = {key: case.get(key) for key in fields if key not in ignored} | gate.over
    if all(case.get(key) == value for key, value in gate.over.items()) and gate.over_scenario == gate.scenario:
        raise UserError(f"gate {gate.name!r} compares a case with itself")
    body = results.get(gate.over_scenario, {"cases": []})
    baselines = [c for c in body["cases"] if _matches(c, baseline_fields) and c["status"] == "ok"]
    if not baselines:
        return None
    baseline = _quantity(gate, baselines[0])
    if gate.over_scenario == gate.scenario and len(quantity["runs"]) == len(baseline["runs"]):
        # Repetitions of one round are adjacent in time.
        return _median_and_range(spread([a / b for a, b in zip(quantity["runs"], baseline["runs"], strict=True)]))
    return quantity["median"] / baseline["median"], None


def _quantity(gate: Gate, case: dict[str, Any]) -> dict[str, Any]:
    """Median and spread of the repetitions; a cache's bytes are equal in all of them."""
    return spread([case["cache"]["bytes"]]) if gate.quantity == "cache_bytes" else case[gate.quantity]


def _median_and_range(runs: dict[str, Any]) -> tuple[float, list[float]]:
    return runs["median"], [runs["min"], runs["max"]]


def _ceiling(gate: Gate, case: dict[str, Any], body: dict[str, Any]) -> tuple[float | None, str | None]:
    """Physical upper bound of the gate's quantity, and its reason; None if there is none."""
    count, roofline = case["num_speculative_tokens"], case["roofline"]
    if gate.quantity == "mean_acceptance_length":
        # Under partial verification the drafts are the pending tokens.
        count = (case["eagle_speculation"] or {}).get("num_speculative_tokens", count)
        return 1.0 + count, f"{count} drafted tokens and one of the target"
    if gate.quantity in ("mean_acceptance_rate", "roof_fraction"):
        return 1.0, "a share is at most 1"
    if gate.quantity != "tokens_per_second" or roofline is None:
        return None, None
    bound = f"roofline of {body['roof']['name']}, {roofline['limit']}"
    if gate.over is None:
        return roofline["tokens_per_second"], bound
    if gate.over == {"specpv": "off"}:
        return roofline.get("specpv_ceiling"), f"every pending token kept, {bound}"
    if gate.over.get("num_speculative_tokens") == 0 and count:
        return roofline["speedup_ceiling"], f"every draft accepted and free, {bound}"
    return None, None


def _scenarios(folder: Path) -> dict[str, dict[str, Any]]:
    """Scenario results in a folder, by name."""
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
    """The run in `folder`, or the newest run in its subfolders, and its scenarios by name. Raise UserError if there is
    none, or if its results differ in commit, device or scope."""
    subfolders = sorted((path for path in folder.glob("*") if path.is_dir()), reverse=True)
    results: dict[str, dict[str, Any]] = {}
    for run in (folder, *subfolders):
        if results := _scenarios(run):
            folder = run
            break
    if not results:
        raise UserError(f"{folder} contains no results of `mlaforge bench`")
    for key in ("commit", "device", "scope"):
        if len(values := {body[key] for body in results.values()}) > 1:
            raise UserError(f"{folder} contains results of several {key}s: {', '.join(sorted(map(str, values)))}")
    return folder, results


def run(folder: Path, gates: Path | None = None) -> dict[str, Any]:
    """Judge a run, write gates.json into it and an entry into the ledger of its parent folder. Return the content of
    gates.json."""
    folder, results = results_of(folder)
    header = next(iter(results.values()))
    scope, files = header["scope"], [gates] if gates else sorted(FOLDER.glob("*.yaml"))
    verdicts = [judge(gate, results) for path in files for gate in read(path) if scope in gate.scopes]
    if not verdicts:
        raise UserError(f"{', '.join(map(str, files))} contain no gate of scope {scope}")
    outcomes = {verdict["verdict"] for verdict in verdicts}
    if outcomes == {"not asked"}:
        scenarios = ", ".join(sorted({verdict["scenario"] for verdict in verdicts}))
        raise UserError(f"no gate of scope {scope} judges {', '.join(results)}; there are gates for {scenarios}")
    passed = "pass" in outcomes and not outcomes & {"fail", "missing"}
    # A run counts towards the full scope only if every gate without `needs` was measured.
    complete = all(verdict["needs"] for verdict in verdicts if verdict["verdict"] == "not asked")
    dirty = any(body["dirty"] for body in results.values())
    ledger = folder.parent / LEDGER
    entry = {
        "time": header["time"], "commit": header["commit"], "device": header["device"], "scope": scope,
        "passed": passed and complete, "dirty": dirty, "results": folder.name, "digest": _digest(folder),
    }  # fmt: skip
    # Only the shipped gates count towards the full scope.
    if gates is None:
        _record_run(ledger, entry)
    green_runs = in_a_row(ledger, header["commit"], header["device"])
    body = {
        "kind": "gates", "schema": machine.SCHEMA, "time": header["time"], "scope": scope, "commit": header["commit"],
        "dirty": dirty, "device": header["device"], "forced": any(b["forced"] for b in results.values()),
        "passed": passed, "ledger": {"file": record_path(ledger), "in_a_row": green_runs, "needed": NEEDED},
        "gates": verdicts,
    }  # fmt: skip
    machine.write(folder / VERDICTS, body)
    return body


def _digest(folder: Path) -> str:
    """SHA-256 over the results of a run, which identifies it after a copy to another folder."""
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
        raise UserError(f"ledger {ledger} is damaged; move it away to restart the count of green runs") from error


def _record_run(ledger: Path, entry: dict[str, Any]) -> None:
    """Add a run, sorted by time. A run that was judged before is replaced, so it counts once."""
    runs = [run for run in _entries(ledger) if run["digest"] != entry["digest"]]
    machine.write(ledger, {"runs": sorted([*runs, entry], key=lambda run: run["time"])})


def in_a_row(ledger: Path, commit: str, device: str) -> int:
    """Number of consecutive green runs among the newest micro runs of this commit and device. Runs with uncommitted
    changes do not count."""
    count = 0
    for run in reversed(_entries(ledger)):
        if (run["scope"], run["commit"], run["device"], run["dirty"]) == ("micro", commit, device, False):
            if not run["passed"]:
                break
            count += 1
    return count


def permit(out: Path, force: bool, scope: str, header: dict[str, Any]) -> bool:
    """Return whether the run is forced. Raise UserError if the full scope may not begin yet."""
    if scope != "full":
        return False
    green_runs = in_a_row(out / LEDGER, header["commit"], header["device"])
    if green_runs >= NEEDED and not header["dirty"]:
        return False
    if not force:
        dirty = "; the package has uncommitted changes" if header["dirty"] else ""
        raise UserError(
            f"the micro gates were green {green_runs} of {NEEDED} times in a row on this commit and device{dirty}: run "
            "`mlaforge bench --scope micro --perf` and `mlaforge gate`, or pass --force, which results record"
        )
    return True


def table(body: dict[str, Any]) -> str:
    """Table of the verdicts for the terminal."""
    lines: list[tuple[str, ...]] = [("verdict", "gate", "measured", "spread", "threshold", "ceiling", "")]
    for verdict in body["gates"]:
        unit = verdict["unit"]
        value = "–" if verdict["value"] is None else f"{verdict['value']:.3g}{unit}"
        measured_range = "–" if not verdict["spread"] else "{:.3g}..{:.3g}".format(*verdict["spread"])
        ceiling = "–" if verdict["ceiling"] is None else f"{verdict['ceiling']:.3g}{unit}"
        unjudged = verdict["verdict"] in ("missing", "not asked", "unreachable")
        reason = verdict["reason" if unjudged else "ceiling_reason"]
        threshold = f"{verdict['operator']} {verdict['threshold']:g}{unit}"
        outcome = verdict["verdict"] if verdict["verdict"] in ("pass", "not asked") else verdict["verdict"].upper()
        lines.append((outcome, verdict["name"], value, measured_range, threshold, ceiling, reason or ""))
    ledger = body["ledger"]
    summary = f"{'passed' if body['passed'] else 'FAILED'}: {body['scope']} on {body['device']}, {body['commit'][:12]}"
    green_runs = f"; micro gates green {ledger['in_a_row']} of {ledger['needed']} times in a row"
    return text_table(lines) + "\n" + summary + (" with uncommitted changes" if body["dirty"] else "") + green_runs
