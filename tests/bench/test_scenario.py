"""Scenarios on tiny models: recorded results, limits and errors. No assertion depends on timing."""

import dataclasses
import json
import os
import statistics
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mlaforge.artifact import Manifest
from mlaforge.bench import kernels, layer_operations, machine, recipe, scenario
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.prompts import Prompts
from mlaforge.checkpoint import source_model
from mlaforge.config import resolve
from mlaforge.engine.engine import Engine
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.ops.elementwise import SILU_MUL
from mlaforge.ops.paged_attention import OP
from mlaforge.planning.costs import GPUS
from mlaforge.runtime import UserError
from mlaforge.synthesis.repetition import distinct_ngram_ratio

STUB = Path(__file__).parents[1] / "support" / "endpoint_stub.py"
# float32, as the dtype must not depend on the machine.
SHORT = ["--context", "48", "--tokens", "8", "--rounds", "2", "--warm-up", "0", "--device", "cpu", "--cache-fraction",
         "0.001", "--dtype", "float32"]  # fmt: skip
pytestmark = pytest.mark.usefixtures("known_roof")


@pytest.fixture(scope="module")
def bench(cli, evaluation_file, tmp_path_factory):
    """bench(WHAT, MODEL, ..., fails=None) -> the run's folder; with an exit code `fails`: stderr and the folder."""

    def run(*words, fails=None):
        out = tmp_path_factory.mktemp("runs")
        done = cli("bench", *SHORT, "--text", evaluation_file, "--out", out, *words)
        if fails is not None:
            assert done.exit_code == fails, (done.stdout, done.stderr)
            return done.stderr, out
        assert done.exit_code == 0, done.stderr
        return Path(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def cpu_results(bench, tiny_models, converted, known_roof):
    """The scaled-down `single` and `batch` scenarios, original and converted model, with the invariants."""
    options = ("--perf", "--num-speculative-tokens", "0,3", "--scope", "cpu")
    return bench("single,batch", tiny_models["llama"], converted("llama", "latent_rope"), *options)


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def cases(body, **fields):
    return [case for case in body["cases"] if all(case[key] == value for key, value in fields.items())]


def test_all_models_of_a_run_share_one_dtype(bench, tiny_models, converted, monkeypatch):
    """`auto` is resolved for the first model only."""
    units = iter(["AMX", None, None])
    monkeypatch.setattr("mlaforge.engine.execution.model.bfloat16_unit", lambda: next(units))
    out = bench("single", tiny_models["llama"], converted("llama", "latent"), "--dtype", "auto", "--rounds", "1",
                "--num-speculative-tokens", "0", "--scope", "cpu")  # fmt: skip
    assert {case["dtype"] for case in read(out, "single")["cases"]} == {"bfloat16"}


def test_cases_summarize_their_repetitions(cpu_results, tiny_models, known_roof):
    body = read(cpu_results, "single")
    assert [m["layout"] for m in body["models"]] == ["gqa", "latent_rope"]
    assert body["commit"] == machine.commit()[0] and body["environment"]["torch"] == torch.__version__
    ids = [case["id"] for case in body["cases"]]
    assert len(set(ids)) == len(ids) == 6  # two models, plain and drafted, and transformers for both
    plain, drafted = cases(body, engine="mlaforge", layout="gqa")
    peer = cases(body, engine="transformers", layout="gqa")[0]
    for case in (plain, drafted, peer):
        rate = case["tokens_per_second"]
        assert case["repetitions"] == len(rate["runs"]) == 2 and case["status"] == "ok"
        assert rate["median"] == statistics.median(rate["runs"]) and rate["min"] == min(rate["runs"])
        assert 0 < case["ms_per_token"]["p50"] <= case["ms_per_token"]["p99"]
        firsts = case["time_to_first_token"]["runs"]
        assert case["prefill_tokens_per_second"]["runs"] == [48 / first for first in firsts]
    for key, other in (("speedup", plain), ("over_transformers", peer)):
        expected = [a / b for a, b in zip(*(c["tokens_per_second"]["runs"] for c in (drafted, other)), strict=True)]
        assert drafted[key]["runs"] == expected
    assert plain["speedup"] is None and peer["over_transformers"] is None
    # Greedy decoding in fp32 gives the same tokens in all three.
    assert plain["output_sha256"] == drafted["output_sha256"] == peer["output_sha256"]
    # An oracle drafter needs 2 steps of 1 + 3 tokens in each of two repetitions.
    block = drafted["eagle_speculation"]
    assert (block["steps"], block["mean_acceptance_length"], block["mean_acceptance_rate"]) == (4, 4.0, 1.0)
    assert plain["eagle_speculation"] is None


def test_cache_size_is_planned_size_rounded_up_to_blocks(cpu_results):
    for name, batch in (("single", 1), ("batch", 4)):
        for case in cases(read(cpu_results, name), engine="mlaforge", batch=batch):
            numbers = {"gqa": 3 * 2 * 2 * 16, "latent_rope": 3 * 32}[case["layout"]]
            assert case["cache"]["planned_bytes"] == batch * (48 + 8) * numbers * 4
            assert case["cache"]["bytes"] == batch * 64 * numbers * 4  # blocks of 16
            assert case["peak_memory"]["cache"] == case["cache"]["bytes"]


def test_roofline_reads_weights_and_cache_once(cpu_results, tiny_models, known_roof):
    """Compared with the sizes of the checkpoint's tensors; norms are negligible."""
    case = cases(read(cpu_results, "single"), engine="mlaforge", layout="gqa", num_speculative_tokens=0)[0]
    tensors = load_file(tiny_models["llama"] / "model.safetensors")
    weights = sum(4 * t.numel() for name, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in name)
    seconds = (weights + 52 * 192 * 4) / known_roof.bandwidth
    top = case["roofline"]
    assert top["tokens_per_second"] == pytest.approx(1 / seconds, rel=1e-3)
    assert top["fraction"] == case["tokens_per_second"]["median"] / top["tokens_per_second"]


def test_gates_judge_the_cpu_scope(cpu_results, cli):
    """As in CI. Speed is judged but not asserted."""
    done = cli("gate", cpu_results)
    body = read(cpu_results, "gates")
    run_gates = [gate for gate in body["gates"] if gate["scenario"] != "large-context"]
    assert {gate["verdict"] for gate in body["gates"] if gate not in run_gates} == {"not asked"}
    verdicts = {gate["name"]: gate["verdict"] for gate in run_gates}
    assert len(verdicts) == 9 and set(verdicts.values()) <= {"pass", "fail"}
    for name, verdict in verdicts.items():
        # The tiny model is untrained, so conversion quality cannot be judged.
        assert verdict == "pass" or "speed" in name or "over" in name, body
        assert name in done.stdout
    assert done.exit_code == (0 if body["passed"] else 1)
    perf = read(cpu_results, "batch")["perf"]
    # Plain and drafted, both models, batches of 4 and 8.
    assert {f["name"]: (f["passed"], f["cases"]) for f in perf} == {
        "tuned_kernels": (True, 8), "cache_integrity": (True, 8), "no_host_reads": (True, 8),
        "no_debug_copies": (True, 8), "deterministic": (True, 8), "drafting_goes_on": (True, 4),
    }  # fmt: skip


def test_prompts_are_deterministic_text_of_the_requested_length(tiny_models, evaluation_file):
    tokenizer = source_model.load_tokenizer(tiny_models["llama"])
    prompts = Prompts((str(evaluation_file),), tokenizer)
    rounds = prompts(300, 2, 3)
    assert rounds == Prompts((str(evaluation_file),), tokenizer)(300, 2, 3)
    flat = [ids for batch in rounds for ids in batch]
    assert [len(ids) for ids in flat] == [300] * 6
    assert len({tuple(ids[:32]) for ids in flat}) == 6
    text = evaluation_file.read_text()
    assert all(tokenizer.decode(ids) in text + "\n\n" + text for ids in flat)
    with pytest.raises(UserError, match=r"tokens, prompts need \d+"):
        prompts(20 * len(text), 1, 1)
    assert distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5


def test_draft_head_is_compared_with_plain_decoding(bench, tiny_models, tmp_path):
    from support.eagle3_heads import saved

    head = saved(tmp_path / "head")
    words = ["--draft", head, "--num-speculative-tokens", "0,2", "--perf"]
    body = read(bench("single", tiny_models["llama"], *words), "single")
    assert body["unknown"].startswith("no manifest records what")
    plain, drafted = cases(body, engine="mlaforge")
    assert (drafted["draft"], drafted["eagle_speculation"]["drafted"] > 0) == ("head", True)
    assert drafted["output_sha256"] == plain["output_sha256"]
    # The rows of the target, without the head's.
    assert drafted["cache"]["bytes"] == plain["cache"]["bytes"] == 64 * 192 * 4
    Manifest("draft train", {}, {"text": [{"exclude": []}], "init": None}).save(head)
    stderr, out = bench("single", tiny_models["llama"], *words, fails=2)
    assert "does not exclude" in stderr and list(out.iterdir()) == []


def test_cases_beyond_the_model_or_cache_report_a_limit(bench, tiny_models, monkeypatch):
    folder = bench("baseline", tiny_models["llama"], "--batch", "1", "--context", "64,600", "--tokens", "4")
    small, large = cases(read(folder, "baseline"), engine="mlaforge")
    assert small["status"] == "ok" and large["status"] == "capacity"
    assert "512" in large["limit"]["what"] and "--context" in large["limit"]["change"]
    folder = bench("baseline", tiny_models["llama"], "--batch", "1", "--cache-fraction", "1e-9")
    engine, peer = read(folder, "baseline")["cases"]
    assert (engine["status"], peer["status"]) == ("capacity", "ok") and "--cache-fraction" in engine["limit"]["change"]


def test_out_of_memory_is_a_limit_and_the_run_continues(bench, tiny_models, monkeypatch):
    step = Engine.step

    def full(self):
        if len(self.scheduler.running) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return step(self)

    monkeypatch.setattr(Engine, "step", full)
    folder = bench("baseline", tiny_models["llama"], "--batch", "1,2")
    one, two = cases(read(folder, "baseline"), engine="mlaforge")
    assert one["status"] == "ok" and two["status"] == "capacity"
    assert two["limit"]["what"] == "CUDA out of memory. Tried to allocate 2.00 GiB." and two["limit"]["change"]
    monkeypatch.setattr(Engine, "step", lambda self: (_ for _ in ()).throw(RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError, match="a mistake of ours"), scenario.capacity("nothing"):
        Engine.step(None)


def peer_file(tmp_path, **changes):
    log = tmp_path / "requests.jsonl"
    keys = {"name": "stub", "command": f"{sys.executable} {STUB} {{port}} {log} 99", "model": "{model}", **changes}
    path = tmp_path / "stub.yaml"
    path.write_text(json.dumps(keys))
    return path, log


def test_other_engines_get_the_same_prompts(bench, tiny_models, tmp_path, evaluation_file):
    path, log = peer_file(tmp_path)
    folder = bench("baseline", tiny_models["llama"], "--batch", "2", "--peer", path)
    (case,) = cases(read(folder, "baseline"), engine="stub")
    assert case["status"] == "ok" and case["over_transformers"]["runs"]
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    tokenizer = source_model.load_tokenizer(tiny_models["llama"])
    expected = [ids for batch in Prompts((str(evaluation_file),), tokenizer)(48, 2, 2) for ids in batch]
    assert sorted(body["prompt"] for body in requests) == sorted(expected)
    assert all((b["max_tokens"], b["temperature"], b["ignore_eos"]) == (9, 0, True) for b in requests)
    # The server ends with the run.
    servers = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    assert not [command for command in servers if str(log) in " ".join(command)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": f"{sys.executable} -c 'import sys; sys.exit(\"no such model\")'"}, "no such model"),
        ({"command": f"{sys.executable} {STUB} {{port}} /dev/null 3"}, "generated 3 of 9 tokens"),
    ],
)
def test_failed_peer_is_reported_and_the_run_continues(bench, tiny_models, tmp_path, changes, words):
    path, _ = peer_file(tmp_path, **changes)
    folder = bench("baseline", tiny_models["llama"], "--batch", "1", "--peer", path)
    body = read(folder, "baseline")
    (case,) = [case for case in body["cases"] if case["status"] == "failed"]
    assert words in case["limit"]["what"] and case["engine"] == "stub"
    assert cases(body, engine="mlaforge")[0]["status"] == "ok"


def test_imported_results_are_marked(bench, cpu_results, tiny_models):
    folder = bench(
        "single", tiny_models["llama"], "--num-speculative-tokens", "0", "--import", cpu_results / "single.json"
    )
    imported = [case for case in read(folder, "single")["cases"] if case["imported"]]
    assert len(imported) == 6
    assert imported[0]["imported"]["device"] == read(cpu_results, "single")["device"]
    again = bench("single", tiny_models["llama"], "--num-speculative-tokens", "0", "--import", folder / "single.json")
    # Imported cases are not imported again.
    assert len([case for case in read(again, "single")["cases"] if case["imported"]]) == 2
    stderr, out = bench("batch", tiny_models["llama"], "--import", cpu_results / "single.json", fails=2)
    assert "contains results of single" in stderr and not list(out.iterdir())


@pytest.mark.parametrize("scope", (*recipe.SCOPES, "full"))
@pytest.mark.parametrize("name", recipe.SCENARIOS + recipe.OTHERS)
def test_shipped_scenarios_are_valid(name, scope):
    scaled = recipe.read(name, scope, BenchConfig())
    assert scaled.prefix_caching
    # Scenarios that compute prompts once compare no times.
    assert scaled.prompts_once == (name == "stress") and (scaled.prompts_once or scaled.rounds >= 2)
    assert scaled.prompts_once or scaled.warm_up >= 1
    assert {path.stem for path in recipe.FOLDER.glob("*.yaml")} == {*recipe.SCENARIOS, *recipe.OTHERS}
    if scope != "full":
        full = recipe.read(name, "full", BenchConfig())
        assert max(scaled.contexts) * max(scaled.batches) <= max(full.contexts) * max(full.batches)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("did you mean 'single'?", ["sinle", "MODEL"]),
        ("MODEL is missing", ["single"]),
        ("context = '3x'", ["single", "MODEL", "--context", "3x"]),
        (
            "num_speculative_tokens = 9 must be at least 0 and at most 8",
            ["single", "MODEL", "--num-speculative-tokens", "9"],
        ),
        ("cache_fraction = 2.0 must be above 0 and at most 1", ["single", "MODEL", "--cache-fraction", "2"]),
        ("dtype = 'int9'", ["single", "MODEL", "--dtype", "int9"]),
        ("draft 'nobody'", ["single", "MODEL", "--draft", "nobody"]),
        ("add 0 to num_speculative_tokens", ["single", "MODEL", "--draft", "replay", "--num-speculative-tokens", "3"]),
        (
            "transformers none,float32 must be either none or a list of dtypes",
            ["single", "MODEL", "--transformers", "none,float32"],
        ),
        ("rounds = 0", ["single", "MODEL", "--rounds", "0"]),
        ("micro gates were green 0 of 3 times", ["single", "MODEL", "--scope", "full"]),
        ("roof 'gtx' must be auto, cpu or one of", ["kernels", "--roof", "gtx", "--device", "cpu"]),
        ("op 'sort' has no benchmark", ["kernels", "--op", "sort"]),
        ("at least one conversion", ["conversion", "MODEL"]),
        ("two models are called", ["single", "MODEL", "MODEL"]),
    ],
)
def test_user_errors_are_one_line(refused, tiny_models, tmp_path, words, options):
    arguments = [str(tiny_models["llama"]) if word == "MODEL" else word for word in options]
    refused(words, "bench", *arguments, "--out", tmp_path / "results")


def test_kernels_are_checked_before_timing(monkeypatch, tmp_path, known_roof):
    monkeypatch.setattr(kernels, "LAYOUTS", {"tiny": kernels.Layout(4, 2, 16)})
    config = resolve(BenchConfig, None, device="cpu", dtype="float32")
    body = kernels.run(config, tmp_path, "small")
    assert len(body["rows"]) == 3 and "| tiny | 1 | 512 | 1 | runs |" in kernels.table(body)
    row, (S, P) = body["rows"][1], (2, 256)
    rows = S * P * 2 * (16 + 16) * 4 + S * 4 * 4 * (16 + 16) * 4  # cached once, queries and outputs of 4 tokens
    assert row["gbs"] == pytest.approx(rows / (row["us"] * 1e-6) / 1e9)
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == body["rows"]
    runs = OP.implementations["runs"]
    broken = dataclasses.replace(runs, run=lambda *inputs: tuple(2 * out for out in runs.run(*inputs)))
    monkeypatch.setitem(OP.implementations, "runs", broken)
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    with pytest.raises(AssertionError, match="paged_attention"):
        kernels.run(config, tmp_path, "small")


def test_small_operations_are_checked_before_timing(monkeypatch, tmp_path, known_roof):
    config = resolve(BenchConfig, None, op="layer", device="cpu", dtype="float32")
    body = kernels.run(config, tmp_path, "small")
    assert len(body["rows"]) == 8 and "| routing | 3 |" in kernels.table(body)
    (mixture,) = kernels.run(dataclasses.replace(config, op="experts"), tmp_path, "small")["rows"]
    assert mixture["op"] == mixture["layout"] == "experts" and mixture["us"] > 0
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    monkeypatch.setattr(SILU_MUL, "reference", lambda gate_up: gate_up[:, ::2])
    _, gate = layer_operations.operations(3, torch.float32, torch.device("cpu"), small=True)["gate"]
    with pytest.raises(AssertionError, match="gate"):
        kernels.measure_operation(
            "gate", 3, 1, lambda name: gate(name) if name else [torch.zeros(3, 128)], None, torch.device("cpu"),
            GPUS["h100"],
        )  # fmt: skip


def test_conversion_benchmark_agrees_with_eval(cli, tiny_models, converted, evaluation_file, tmp_path):
    original, out = tiny_models["llama"], converted("llama", "latent")
    words = ["--text", evaluation_file, "--context", "64", "--rounds", "4", "--device", "cpu", "--out", tmp_path]
    done = cli("bench", "conversion", original, out, *words)
    assert done.exit_code == 0, done.stderr
    rows = read(Path(done.stdout.splitlines()[-1]), "conversion")["rows"]
    config = EvalConfig(text=str(evaluation_file), windows=4, seqlen=64, device="cpu")
    expected = [perplexity.run(str(model), None, config).metrics["ppl"] for model in (original, out)]
    name = evaluation_file.name
    assert [row["ppl"][name] for row in rows] == pytest.approx(expected)
    assert rows[1]["ratio"][name] == pytest.approx(expected[1] / expected[0])
    assert (rows[1]["layout"], rows[1]["budget"], rows[1]["cache_fraction"]) == ("latent", 0.5, 0.5)


def test_forget_clears_the_prefix_cache(tiny_models):
    engine = Engine(tiny_models["llama"], resolve(scenario.EngineConfig, None, dtype="float32", cache_bytes=1 << 20))
    decode = scenario.EnginePeer.decode
    holder = type("Holder", (), {"engine": engine, "used_cache_bytes": lambda self: 0})()
    prompt = list(range(40))
    decode(holder, [prompt], 2)
    before = engine.stats()
    decode(holder, [prompt], 2)
    assert engine.stats().cached_prompt_tokens - before.cached_prompt_tokens == 32
    engine.reset_prefix_cache()
    before = engine.stats()
    decode(holder, [prompt], 2)
    assert engine.stats().cached_prompt_tokens == before.cached_prompt_tokens
    engine.check_integrity()
    engine.add("active", prompt, scenario_params())
    with pytest.raises(UserError, match="only be reset while no request"):
        engine.reset_prefix_cache()


def scenario_params():
    from mlaforge.engine.sampling.params import SamplingParams

    return SamplingParams(max_tokens=4)


def test_results_are_written_atomically(tmp_path):
    """A concurrent reader only sees complete files."""
    path, wrong, stop = tmp_path / "x.json", [], threading.Event()
    machine.write(path, {"rows": []})

    def look():
        while not stop.is_set():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                wrong.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for count in range(50):
        machine.write(path, {"rows": list(range(100 * count))})
    stop.set()
    reader.join()
    assert not wrong and os.listdir(tmp_path) == ["x.json"]
