"""`tune` on a tiny model: the table that it writes serves the engine without a miss, in PERF_MODE too."""

import functools
import json
import re

import pytest
import torch

from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.gemm_shapes import Shape, Shapes
from mlaforge.bench.invariants import Audit
from mlaforge.bench.peer import PLAIN
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.ops import native, tuned
from mlaforge.runtime import UserError
from mlaforge.tuning import tune
from mlaforge.tuning.cases import Case, ExpertsCase, ProductCase, WrongResult, make_case
from mlaforge.tuning.config import TuneConfig
from support.tiny_models import save_packed

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="needs compiled kernels")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(tuned, "_state", tuned._State())
    monkeypatch.setattr(tune, "used_cores", functools.partial(tune.used_cores, 0.05))
    yield
    tuned.use([], CPU)


class FakeCase(Case):
    """A product whose times are planted: the default takes twice as long as `task` 32."""

    device = CPU

    def __init__(self, shape):
        self.op, self.key = shape.key

    def candidates(self):
        return [{}, {"task": 16}, {"task": 32}]

    def result(self):
        return torch.ones(1)

    expected = result

    def run(self):
        return 1

    def seconds(self, configuration):
        return {0: 2.0, 16: 1.9, 32: 1.0}[configuration.get("task", 0)]


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    packed = save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("tune") / "packed")
    return {"llama": tiny_models["llama"], "packed": packed}


def peer(model, table=None):
    config = EngineConfig(dtype="bfloat16", device="cpu", cache_bytes=1 << 20, tuned=str(table) if table else None)
    return EnginePeer(model, "tiny", None, config, max_length=64, max_batch=2)


def audited(model, table):
    findings = Audit(peer(model, table)).run([[3, 1, 4, 1, 5], [9, 2, 6]], 4, PLAIN)
    return next(finding for finding in findings if finding.name == "tuned_kernels")


@pytest.mark.parametrize("name", ["llama", "packed"])
def test_a_planted_bad_default_is_mended_and_perf_mode_has_no_miss(models, tmp_path, name, capfd):
    table = tmp_path / "table.json"
    tuning = tune.run(str(models[name]), TuneConfig(dtype="bfloat16", share=1.0), table, FakeCase)
    body = json.loads(table.read_text())
    entries = body["product"]
    measured = {key: entry for key, entry in entries.items() if entry["us"]}
    assert len(tuning.rows) == len(measured) + sum(bool(entry["us"]) for entry in body.get("experts", {}).values())
    assert measured and all(entry["configuration"] == {"task": 32} for entry in measured.values())
    assert {entry["default_us"] / entry["us"] for entry in measured.values()} == {2.0}
    assert ("experts" in body) == (name == "packed")
    capfd.readouterr()
    finding = audited(models[name], table)
    assert finding.passed, finding.detail
    logged = re.findall(r"tuned kernels: .*", capfd.readouterr().err)
    assert len(logged) == 1 and logged[0].startswith(
        f"tuned kernels: {sum(map(len, body.values())) - len(body['_metadata'])} entries for "
    )
    config = EngineConfig(dtype="bfloat16", device="cpu", cache_bytes=1 << 20, tuned=str(table))
    llm = LLM(models[name], config)
    llm.generate([[3, 1, 4]], SamplingParams(max_tokens=3))
    stats = llm.engine.stats()
    assert stats.tuned_hits > 0 and stats.tuned_misses == 0 and stats.tuned_ratio == 1.0


def test_a_deleted_entry_breaks_perf_mode_and_is_named(models, tmp_path):
    table = tmp_path / "table.json"
    tune.run(str(models["llama"]), TuneConfig(dtype="bfloat16"), table, FakeCase)
    body = json.loads(table.read_text())
    key = next(key for key in body["product"] if key.endswith(",2"))
    del body["product"][key]
    table.write_text(json.dumps(body))
    finding = audited(models["llama"], table)
    assert not finding.passed and finding.value == 0.0
    assert finding.detail == f"the tuned table lacks product {key}; `mlaforge tune` adds them"


def test_a_second_run_resumes(models, tmp_path):
    table, config = tmp_path / "table.json", TuneConfig(dtype="bfloat16", share=1.0)
    first = tune.run(str(models["llama"]), config, table, FakeCase)
    again = tune.run(str(models["llama"]), config, table, FakeCase)
    assert first.rows and not first.resumed and not again.rows and again.resumed == len(first.rows)
    assert again.defaults == first.defaults >= 0 and "0 shapes measured" in again.table()


def test_an_interrupted_run_keeps_what_it_measured(models, tmp_path):
    table, config = tmp_path / "table.json", TuneConfig(dtype="bfloat16", share=1.0)
    seen = []

    def interrupted(shape):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(shape)
        return FakeCase(shape)

    with pytest.raises(KeyboardInterrupt):
        tune.run(str(models["llama"]), config, table, interrupted)
    resumed = tune.run(str(models["llama"]), config, table, FakeCase)
    entries = json.loads(table.read_text())["product"].values()
    assert resumed.resumed == 2 and resumed.defaults == sum(entry["us"] is None for entry in entries)


def test_shapes_of_a_file_are_tuned_without_a_model(tmp_path, cli):
    shapes = Shapes()
    shapes.add(Shape("qkv", 1, 96, 64, "bfloat16", "cpu"), 3, 1.0)
    shapes.add(Shape("lm_head", 1, 96, 64, "float32", "cpu"), 3, 1.0)
    shapes.write(tmp_path / "gemm_shapes.json")
    done = cli("tune", "--shapes", tmp_path / "gemm_shapes.json", "--out", tmp_path / "table.json", "--budget", "0.5")
    assert done.exit_code == 0, done.stderr
    assert "product bfloat16,96,64,1 | qkv" in done.stdout and "1 shapes measured" in done.stdout
    entries = json.loads((tmp_path / "table.json").read_text())["product"]
    assert set(entries) == {f"bfloat16,96,64,{rows}" for rows in (1, 2, 4, 8, 16, 128)}
    assert 0 <= entries["bfloat16,96,64,1"]["error"] < 2**-7


def test_nothing_to_tune_is_an_error(tmp_path):
    shapes = Shapes()
    shapes.add(Shape("qkv", 1, 96, 64, "float32", "cpu"), 3, 1.0)
    shapes.write(tmp_path / "gemm_shapes.json")
    with pytest.raises(UserError, match="no product on cpu"):
        tune.run(None, TuneConfig(shapes=str(tmp_path / "gemm_shapes.json")), tmp_path / "table.json")
    with pytest.raises(UserError, match="give MODEL"):
        tune.run(None, TuneConfig(), tmp_path / "table.json")


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_candidates_of_products_give_the_defaults_result(dtype, rows):
    case = make_case(Shape("o", rows, 48, 64, dtype, "cpu"))
    assert isinstance(case, ProductCase)
    first, *rest = case.candidates()
    assert first == {} and len({tuple(candidate.items()) for candidate in rest} - {()}) == len(rest) > 0
    for candidate in rest:
        assert case.error(candidate) < 2**-7
    assert case.seconds(rest[0]) > 0


def test_a_wrong_result_is_refused(monkeypatch):
    case = make_case(Shape("experts", 3, 64, 64, "mxfp4", "cpu", 4, 2))
    assert isinstance(case, ExpertsCase) and all(case.error(candidate) < 3e-2 for candidate in case.candidates())
    monkeypatch.setattr(case, "expected", lambda: torch.ones(2, 64))
    with pytest.raises(WrongResult, match="has an error"):
        case.error({})
    results = iter([torch.ones(2, 64), torch.ones(2, 64) * 1.0001])
    monkeypatch.setattr(case, "result", lambda: next(results))
    with pytest.raises(WrongResult, match="changes the result"):
        case.error({"task": 64})


def test_a_busy_machine_keeps_its_threads(models, tmp_path, monkeypatch, capfd):
    """Where other processes use the cores, a product on all threads is slow whatever its constants are."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    cases = []

    def recorded(shape, threads):
        cases.append(ProductCase(shape, threads))
        return FakeCase(shape)

    monkeypatch.setattr(tune, "make_case", recorded)
    for name, cores in (("quiet", 0.0), ("busy", 3.0)):
        monkeypatch.setattr(tune, "used_cores", lambda cores=cores: cores)
        tune.run(str(models["llama"]), TuneConfig(dtype="bfloat16"), tmp_path / f"{name}.json")
    assert "other processes use 3.0 cores" in capfd.readouterr().err
    with_tasks = [any("task" in one for one in case.candidates()) for case in cases]
    assert with_tasks[0] and not with_tasks[-1] and with_tasks == sorted(with_tasks, reverse=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="on one thread every number of tasks is as fast")
def test_a_slow_default_of_a_real_kernel_is_replaced():
    """A product of many rows whose outputs are a single task, so that one thread computes all of them."""
    case = ProductCase(Shape("gate_up", 512, 4096, 1024, "bfloat16", "cpu"))
    choice = tune.search([{"task": 4096}, {}, {"task": 2048}], case.seconds)
    assert choice.configuration != {"task": 4096} and choice.default_seconds > 1.03 * choice.seconds
