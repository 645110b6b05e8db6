"""Gates on synthetic results, the ledger, and PERF_MODE's invariants on a real engine, each broken once."""

import contextlib
import copy
import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.bench import gate, machine
from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.invariants import Audit, check_view
from mlaforge.bench.peer import Variant
from mlaforge.config import resolve
from mlaforge.engine import engine as core
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.speculation.policy import Policy
from mlaforge.planning import machines
from mlaforge.planning.costs import Gpu
from mlaforge.runtime import UserError
from support.eagle3_heads import saved

pytestmark = pytest.mark.usefixtures("known_roof")

NO = ("scenario: batch\n", "quantity: speed\n")


def case(count, runs, length=None, ceiling=None, **changes):
    fields = {
        "id": f"k{count}", "engine": "mlaforge", "model": "m", "dtype": "bfloat16", "context": 16384, "batch": 4,
        "num_speculative_tokens": count, "draft": "head" if count else "none", "layout": "gqa", "imported": None,
        "status": "ok", "limit": None, "cache": {"bytes": 1000},
        "tokens_per_second": {"median": sorted(runs)[len(runs) // 2], "min": min(runs), "max": max(runs), "runs": runs},
        "ms_per_token": {"p50": 5.0}, "eagle_speculation": {"mean_acceptance_length": length} if length else None,
        "roofline": {"tokens_per_second": 400.0, "fraction": 0.5, "limit": "weights", "speedup_ceiling": ceiling},
    }  # fmt: skip
    return {**fields, **changes}


def results(*cases, **changes):
    body = {
        "kind": "scenario", "schema": 1, "scenario": "batch", "scope": "micro", "commit": "c" * 40, "dirty": False,
        "device": "gpu", "forced": False, "time": "2026-01-01T00:00:00+00:00", "roof": {"name": "h200"},
        "perf": [{"name": "deterministic", "passed": True, "detail": "all"}], "cases": list(cases), "models": [],
    }  # fmt: skip
    return {**body, **changes}


def judge_text(text, body):
    entry = yaml.safe_load(text)
    parsed = gate._parse_gate(Path("x.yaml"), 1, {"name": "g", "scenario": "batch", **entry})
    return gate.judge(parsed, {"batch": body, "baseline": results(case(0, [50.0, 50.0]), scenario="baseline")})


DRAFTED = "case: {num_speculative_tokens: 3, context: 16k}, "
SPEED = "{quantity: tokens_per_second, " + DRAFTED + "over: {num_speculative_tokens: 0}, "
LENGTH = "{quantity: mean_acceptance_length, " + DRAFTED
PLAIN = "{quantity: tokens_per_second, case: {num_speculative_tokens: 0}, "


@pytest.mark.parametrize(
    ("text", "verdict", "value", "ceiling"),
    [
        # Ratios of paired repetitions, 1.2 and 1.5, not the ratio of the medians.
        (SPEED + "at_least: 1.3}", "pass", 1.35, 2.0),
        (SPEED + "at_least: 1.4}", "fail", 1.35, 2.0),
        # Above the ceiling: unreachable, not failed.
        (SPEED + "at_least: 2.5}", "unreachable", 1.35, 2.0),
        (SPEED + "at_most: 1.4}", "pass", 1.35, 2.0),
        (LENGTH + "at_least: 2.2}", "pass", 2.4, 4.0),
        (LENGTH + "at_least: 4.5}", "unreachable", 2.4, 4.0),
        (PLAIN + "at_least: 500}", "unreachable", 100.0, 400.0),
        # The worst matching case decides.
        ("{quantity: tokens_per_second, at_least: 110}", "fail", 100.0, 400.0),
        ("{quantity: ms_per_token, at_most: 5}", "pass", 5.0, None),
        ("{quantity: roof_fraction, at_least: 0.4}", "pass", 0.5, 1.0),
        ("{quantity: invariants, at_least: 1}", "pass", 1.0, 1.0),
        ("{quantity: tokens_per_second, case: {context: 32k}, at_least: 1}", "missing", None, None),
        ("{quantity: tokens_per_second, case: {engine: vllm}, at_least: 1}", "missing", None, None),
        (SPEED.replace("{num_speculative_tokens: 0}", "{scenario: baseline, num_speculative_tokens: 0}")
         + "at_least: 2.4}", "pass", 2.7, 2.0),
    ],
)  # fmt: skip
def test_verdicts(text, verdict, value, ceiling):
    body = results(case(0, [100.0, 100.0]), case(3, [120.0, 150.0], 2.4, 2.0, tokens_per_second={
        "median": 135.0, "min": 120.0, "max": 150.0, "runs": [120.0, 150.0]}))  # fmt: skip
    result = judge_text(text, body)
    assert (result["verdict"], result["ceiling"]) == (verdict, ceiling), result
    assert result["value"] == (value if value is None else pytest.approx(value))


def test_missing_measurements_report_the_reason():
    too_large = case(3, [1.0], status="capacity", limit={"what": "the cache holds 9 tokens", "change": "less"})
    verdict = judge_text(SPEED + "at_least: 1}", results(case(0, [1.0]), too_large))
    assert verdict["verdict"] == "missing" and "the cache holds 9 tokens" in verdict["reason"]
    verdict = judge_text("{quantity: invariants, at_least: 1}", results(perf=None))
    assert verdict["verdict"] == "not asked" and "--perf" in verdict["reason"]
    broken = [{"name": "deterministic", "passed": False, "detail": "1 of 4 answers differ"}]
    verdict = judge_text("{quantity: invariants, at_least: 1}", results(perf=broken))
    assert verdict["verdict"] == "fail" and "1 of 4 answers differ" in verdict["reason"]
    # Imported cases are not judged.
    verdict = judge_text("{quantity: tokens_per_second, at_least: 1}", results(case(0, [9.0], imported={"file": "x"})))
    assert verdict["verdict"] == "missing"


CACHE = "{quantity: cache_bytes, case: {num_speculative_tokens: 0}, over: {layout: gqa}, needs: conversion, "


def test_unrequested_measurements_are_not_failures():
    """No draft head, no conversion, no perplexity, or a scenario that was not run."""
    drafts = SPEED + "needs: draft, at_least: 1}"
    plain = results(case(0, [100.0]), case(3, [120.0], draft="ngram"))
    verdict = judge_text(drafts, plain)
    assert verdict["verdict"] == "not asked" and "no draft head" in verdict["reason"]
    for draft in ("head", "replay"):
        assert judge_text(drafts, results(case(0, [100.0]), case(3, [120.0], draft=draft)))["verdict"] == "pass"
    verdict = judge_text(CACHE + "at_most: 0.8}", plain)
    assert verdict["verdict"] == "not asked" and "no converted model beside its original" in verdict["reason"]
    verdict = judge_text("{quantity: perplexity_ratio, at_most: 1.05}", plain)
    assert verdict["verdict"] == "not asked" and "reports its perplexity" in verdict["reason"]
    entry = {"name": "g", "scenario": "single", "quantity": "invariants", "at_least": 1}
    other_scenario = gate._parse_gate(Path("x.yaml"), 1, entry)
    assert gate.judge(other_scenario, {"batch": plain})["reason"] == "single was not run"


def test_conversion_is_compared_with_its_original():
    converted = case(0, [80.0], model="out", layout="latent", cache={"bytes": 250})
    body = results(case(0, [100.0]), converted, models=[
        {"name": "m", "layout": "gqa", "ratio": None, "ratio_interval": None},
        {"name": "out", "layout": "latent", "ratio": 1.02, "ratio_interval": [1.01, 1.03]}])  # fmt: skip
    verdict = judge_text(CACHE + "at_most: 0.8}", body)
    assert (verdict["verdict"], verdict["value"], verdict["against"]) == ("pass", 0.25, "the original")
    assert judge_text(CACHE + "at_most: 0.2}", body)["verdict"] == "fail"
    verdict = judge_text("{quantity: perplexity_ratio, at_most: 1.05}", body)
    assert (verdict["verdict"], verdict["value"], verdict["spread"], verdict["case"]) == (
        "pass",
        1.02,
        [1.01, 1.03],
        "out",
    )
    assert judge_text("{quantity: perplexity_ratio, at_most: 1.01}", body)["verdict"] == "fail"
    # The speed ratio to the original is measured if a gate needs it.
    speed = "{quantity: tokens_per_second, over: {layout: gqa}, needs: conversion, at_least: 0.9}"
    assert judge_text(speed, body)["value"] == pytest.approx(0.8)
    with_transformers = results(case(0, [100.0]), case(0, [40.0], engine="transformers"))
    verdict = judge_text("{quantity: tokens_per_second, over: {engine: transformers}, at_least: 1}", with_transformers)
    assert (verdict["verdict"], verdict["value"], verdict["against"]) == ("pass", 2.5, "transformers")


def test_shipped_gates_have_the_planned_thresholds():
    planned = {(g.name, g.scopes): g for path in gate.FOLDER.glob("*.yaml") for g in gate.read(path)}
    expected = {
        ("batch", 16384, 4, "tokens_per_second"): 1.0, ("batch", 16384, 4, "mean_acceptance_length"): 2.2,
        ("single", 32768, 1, "tokens_per_second"): 2.0, ("single", 32768, 1, "mean_acceptance_length"): 3.0,
    }  # fmt: skip
    for scope in ("micro", "full"):
        scoped = [g for g in planned.values() if scope in g.scopes]
        drafted = [g for g in scoped if g.needs == "draft"]
        thresholds = {(g.scenario, g.case["context"], g.case["batch"], g.quantity): g.at_least for g in drafted}
        assert thresholds == expected
        assert all(g.case["num_speculative_tokens"] == 3 for g in drafted)
        assert {g.scenario for g in scoped if g.quantity == "invariants"} == {"single", "batch"}
    # Gates without a head: quality, memory, speed.
    for scope in gate.SCOPES:
        rest = {g.quantity for g in planned.values() if scope in g.scopes and g.needs not in ("draft", "specpv")}
        assert rest == {"perplexity_ratio", "cache_bytes", "tokens_per_second", "invariants"}


def write_run(out, name, **changes):
    body = results(case(0, [100.0]), **{"time": name, **changes})
    machine.write(out / name / "batch.json", body)
    return out / name


@pytest.fixture
def one_gate(tmp_path, monkeypatch):
    folder = tmp_path / "gates"
    folder.mkdir()
    (folder / "g.yaml").write_text("gates:\n- {name: g, scenario: batch, quantity: tokens_per_second, at_least: 50}\n")
    monkeypatch.setattr(gate, "FOLDER", folder)
    return tmp_path / "results"


def test_full_scope_requires_three_green_runs(one_gate):
    out, header = one_gate, {"commit": "c" * 40, "device": "gpu", "dirty": False}
    slow = case(0, [10.0])

    def refused(**changes):
        with pytest.raises(UserError, match=r"green \d of 3 times"):
            gate.permit(out, False, "full", {**header, **changes})

    counts = []
    runs = [
        {},
        {},
        {"cases": [slow]},
        {},
        {},
        {"dirty": True},
        {"commit": "d" * 40},
        {"device": "cpu"},
        {"scope": "cpu"},
    ]
    for number, changes in enumerate(runs):
        gate.run(write_run(out, f"run{number}", **changes))
        counts.append(gate.in_a_row(out / gate.LEDGER, header["commit"], header["device"]))
        refused()
    assert counts == [1, 2, 0, 1, 2, 2, 2, 2, 2]
    # A run that is judged twice or copied counts once.
    gate.run(out / "run4")
    machine.write(out / "copy" / "batch.json", json.loads((out / "run4" / "batch.json").read_text()))
    gate.run(out / "copy")
    refused()
    last = gate.run(write_run(out, "run9"))
    assert last["ledger"]["in_a_row"] == 3 and last["passed"]
    assert gate.permit(out, False, "full", header) is False
    refused(dirty=True)
    refused(commit="d" * 40)
    assert gate.permit(out, True, "full", {**header, "device": "other"}) is True
    assert gate.permit(out, False, "micro", {**header, "device": "other"}) is False
    (out / gate.LEDGER).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        gate.permit(out, False, "full", header)


def test_custom_gates_do_not_count_towards_the_full_scope(one_gate, tmp_path):
    custom = tmp_path / "custom.yaml"
    custom.write_text("gates:\n- {name: mine, scenario: batch, quantity: tokens_per_second, at_least: 1}\n")
    body = gate.run(write_run(one_gate, "a"), custom)
    assert body["passed"] and body["ledger"]["in_a_row"] == 0 and body["gates"][0]["name"] == "mine"


def test_rejects_runs_without_matching_gates(one_gate):
    write_run(one_gate, "a", scenario="speed")
    with pytest.raises(UserError, match="no gate of scope micro judges speed; there are gates for batch"):
        gate.run(one_gate)
    assert not (one_gate / gate.LEDGER).exists()


def test_gate_judges_the_newest_run_and_sets_the_exit_code(one_gate, cli):
    write_run(one_gate, "20260101-000000", cases=[case(0, [10.0])])
    done = cli("gate", one_gate)
    assert (
        done.exit_code == 1
        and "FAIL" in done.stdout
        and "not 10 >= 50" in json.dumps(json.loads((one_gate / "20260101-000000" / "gates.json").read_text()))
    )
    write_run(one_gate, "20260102-000000")
    done = cli("gate", one_gate)
    assert done.exit_code == 0 and "passed: micro on gpu" in done.stdout and "1 of 3 times" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gates: 3", "must contain one key, gates"),
        ("gates:\n- {name: g}", "needs name, scenario and quantity"),
        (
            "gates:\n- {name: g, scenario: batch, quantity: tokens_per_secnd, at_least: 1}",
            "did you mean 'tokens_per_sec",
        ),
        ("gates:\n- {name: g, scenario: batch, quantity: invariants}", "needs at_least or at_most"),
        ("gates:\n- {name: g, scenario: batch, quantity: invariants, at_least: a lot}", "a number"),
        ("gates:\n- {name: g, scenario: batch, quantity: invariants, at_last: 1}", "did you mean 'at_least'?"),
        (
            "gates:\n- {name: g, scenario: batch, quantity: invariants, at_least: 1, over: {batch: 1}}",
            "over must map fields",
        ),
        ("gates:\n- {name: g, scenario: batch, quantity: invariants, at_least: 1, needs: drat}", "mean 'draft'"),
        ("gates:\n- {name: g, scope: macro, scenario: batch, quantity: invariants, at_least: 1}", "scope 'macro'"),
    ],
)
def test_rejects_invalid_gates_files(tmp_path, text, words):
    path = tmp_path / "g.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        gate.read(path)


def test_rejects_results_of_several_runs(tmp_path, refused):
    out = tmp_path / "results"
    machine.write(out / "a" / "batch.json", results())
    machine.write(out / "a" / "single.json", results(scenario="single", commit="d" * 40))
    refused("results of several commits", "gate", out / "a")
    refused("contains no results", "gate", tmp_path / "nothing")


@pytest.fixture
def engine_peer(tiny_models):
    config = resolve(EngineConfig, None, dtype="float32", device="cpu", cache_bytes=1 << 20, num_speculative_tokens=3)
    peer = EnginePeer(tiny_models["llama"], "llama", None, config, 64, 2)
    yield peer
    peer.close()


PROMPTS = [[1, 2, 3, 4, 5] * 3, [9, 8, 7] * 5]


def broken_invariants(peer, variant=None):
    variant = variant or Variant(3, "ngram")
    return {f.name: f for f in Audit(peer).run(PROMPTS, 6, variant) if not f.passed}


def test_audit_passes_and_restores_a_correct_engine(engine_peer):
    before = engine_peer.engine.runner
    assert broken_invariants(engine_peer) == {}
    repetition = engine_peer.run(PROMPTS, 6, Variant())
    assert broken_invariants(engine_peer, Variant(3, "replay")) == {} and repetition.token_ids
    assert (
        engine_peer.engine.runner is before
        and "step" not in vars(engine_peer.engine)
        and "set_variant" not in vars(engine_peer)
    )


def break_invariant(monkeypatch, engine, name):
    """Break the invariant `name`."""
    hidden, make = engine.model.hidden, core.make_batch
    if name == "tuned_kernels":
        monkeypatch.setenv("MLAFORGE_OPS", "reference")
    elif name == "drafting_goes_on":
        # Stop drafting after the first steps.
        decide, calls = Policy.decide, itertools.count()

        def fewer(self, *words):
            decision = decide(self, *words)
            return decision if next(calls) < 3 else dataclasses.replace(decision, length=0)

        monkeypatch.setattr(Policy, "decide", fewer)
    elif name == "cache_integrity":

        def shifted(*words):
            batch = make(*words)
            views = tuple(dataclasses.replace(v, slots_N=v.slots_N.flip(0)) for v in batch.views)
            return dataclasses.replace(batch, views=views)

        monkeypatch.setattr(core, "make_batch", shifted)
    elif name == "no_host_reads":
        monkeypatch.setattr(
            engine.model, "hidden", lambda *w: hidden(*w) * (1 + 0 * float(engine.model.embedding[0, 0]))
        )
    elif name == "no_debug_copies":
        monkeypatch.setattr(engine.model, "hidden", lambda *w: (engine.cache.tensors[0].clone(), hidden(*w))[1])
    else:
        logits, calls = engine.model.logits, itertools.count()
        monkeypatch.setattr(engine.model, "logits", lambda h: logits(h).roll(next(calls), -1))


@pytest.mark.parametrize(
    "name",
    ["tuned_kernels", "drafting_goes_on", "cache_integrity", "no_host_reads", "no_debug_copies", "deterministic"],
)
def test_audit_detects_each_broken_invariant(engine_peer, monkeypatch, name):
    break_invariant(monkeypatch, engine_peer.engine, name)
    broken = broken_invariants(engine_peer)
    assert name in broken, broken
    # Wrong slots change the tokens too, not always in the same way.
    assert set(broken) <= {name, "deterministic"}, broken


@pytest.mark.gpu
@pytest.mark.slow
def test_invariants_hold_on_cuda(tiny_models, cuda, monkeypatch, tmp_path):
    """Reads by the audit and graph captures do not count as waits, a head's drafts are read once per step, and a value
    that the model reads counts as a wait."""
    head, variant = saved(tmp_path / "head"), Variant(3, "head")
    config = resolve(EngineConfig, None, dtype="float32", device="cuda", cache_bytes=1 << 20)
    peer = EnginePeer(tiny_models["llama"], "llama", head, config, 32, 2)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    findings = Audit(peer).run(prompts, 6, variant)
    assert [f for f in findings if not f.passed] == []
    (reads,) = (f for f in findings if f.name == "no_host_reads")
    assert reads.allowed >= 3
    logits = peer.engine.model.logits
    monkeypatch.setattr(peer.engine.model, "logits", lambda hidden: logits(hidden * (1 + 0 * hidden[0, 0].item())))
    assert {f.name for f in Audit(peer).run(prompts, 6, variant) if not f.passed} == {"no_host_reads"}


def test_broken_invariant_ends_the_run(cli, tiny_models, monkeypatch, tmp_path, evaluation_file):
    monkeypatch.setenv("MLAFORGE_OPS", "reference")
    monkeypatch.setattr(machines, "cpu_peaks", lambda: Gpu("cpu", 0.05, 0.01, 8.0, "made up"))
    words = ["--context", 32, "--tokens", 4, "--rounds", 1, "--device", "cpu", "--perf", "--text", evaluation_file]
    words += ["--dtype", "float32"]
    done = cli("bench", "single", tiny_models["llama"], *words, "--cache-fraction", 0.001, "--out", tmp_path)
    assert done.exit_code == 1 and "an invariant is broken: tuned_kernels" in done.stderr
    assert "Traceback" not in done.stderr
    (path,) = tmp_path.glob("*/single.json")
    body = json.loads(path.read_text())
    assert [entry["name"] for entry in body["perf"] if not entry["passed"]] == ["tuned_kernels"]
    # Nothing was timed.
    assert body["cases"] == []


@pytest.fixture(scope="module")
def step_view(tiny_models):
    """A step's view, its positions and its tables: a chunk of a prompt and a drafting sequence."""
    from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
    from mlaforge.engine.execution.batch import Chunk, make_batch

    tables = BlockTables([CacheGroup("full", 32)], 4)
    chunks = []
    for number, (start, stop) in enumerate([(0, 7), (9, 13)]):
        tokens = list(range(100 * number, 100 * number + stop))
        tables.start(number, tokens, False)
        if start:
            tables.reserve(number, start)
            tables.commit(number, tokens, start)
        tables.reserve(number, stop)
        chunks.append(Chunk(number, tokens, start, stop))
    batch = make_batch(chunks, tables, torch.device("cpu"))
    return batch.views[0], batch.positions_N.tolist(), [tables.table(number, 0) for number in range(2)]


@given(data=st.data())
def test_check_view_detects_any_wrong_value(step_view, data):
    view, positions, tables = step_view
    assert check_view(view, positions, tables) == []
    field = data.draw(st.sampled_from(["slots_N", "seq_lens_S", "block_table_SB", "first_S", "runs", "positions"]))
    change = data.draw(st.integers(1, 9))
    if field == "positions":
        at = data.draw(st.integers(0, len(positions) - 1))
        positions = [p + change * (i == at) for i, p in enumerate(positions)]
    elif field == "runs":
        (start, length), *rest = view.runs[0]
        view = dataclasses.replace(view, runs=(((start + change, length), *rest), *view.runs[1:]))
    else:
        tensor = copy.deepcopy(getattr(view, field))
        used = 2 if field == "block_table_SB" else tensor.numel()
        step = view.block_size if field == "first_S" else 1
        tensor.view(-1)[data.draw(st.integers(0, used - 1))] += change * step
        view = dataclasses.replace(view, **{field: tensor})
    # A length may exceed the table.
    with contextlib.suppress(IndexError):
        assert check_view(view, positions, tables)
