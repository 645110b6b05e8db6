"""`verify-gpu` loses only faulty cases and reports cases that it did not reach; tested without a GPU."""

import dataclasses
import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import mlaforge.ops
from mlaforge.gpu_verification import summary, supervisor
from mlaforge.gpu_verification.case import AT_LEAST, AT_MOST, EXACTLY, WITHIN, Prediction
from mlaforge.gpu_verification.config import VerifyGpuConfig
from mlaforge.gpu_verification.stage import FULL_SECONDS, STAGES, Stage
from mlaforge.gpu_verification.supervisor import Supervisor

PLANTED = Stage("planted", "support.planted_faults", FULL_SECONDS, "planted faults")


@pytest.fixture
def children_find_support(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.mark.usefixtures("children_find_support")
def test_a_fault_loses_only_its_case(tmp_path):
    config = VerifyGpuConfig(twin="cpu", seconds=120)
    rows = Supervisor(tmp_path / "out", config, (STAGES[0], PLANTED)).run()
    assert {row["status"] for row in rows if row["stage"] == "probe"} == {"ok"}
    planted = {row["case"]: row for row in rows if row["stage"] == "planted"}
    assert {name: row["status"] for name, row in planted.items()} == {
        "right merge": "ok", "wrong merge": "off", "crash": "crashed", "after the crash": "ok",
        "broken context": "crashed", "exception": "failed", "hang": "timed out", "too large": "skipped", "last": "ok",
    }  # fmt: skip
    assert len(rows) == 6 + 9
    assert planted["wrong merge"]["measured"] == pytest.approx(0.01, rel=0.01)
    # A crashed case is repeated alone.
    assert "SIGSEGV" in planted["crash"]["detail"] and "SIGSEGV" in planted["crash"]["repeated"]
    assert "illegal memory access" in planted["broken context"]["repeated"]
    assert planted["exception"]["detail"].startswith("IndexError")
    assert "repeated" not in planted["hang"]

    written = [json.loads(line) for line in (tmp_path / "out" / "cases.jsonl").read_text().splitlines()]
    assert written == rows
    assert all(row["predicted"]["unit"] for row in rows)
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "15 cases" in page and page.index("## Not ok") < page.index("## probe")
    assert "| planted: hang | at most 1e-05 relative error |  |  | timed out | longer than 1 s |" in page
    # The inputs of the wrong case are among the results.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.md", "cases.jsonl", "log.txt", "mismatch.safetensors"
    }  # fmt: skip


@pytest.mark.usefixtures("children_find_support")
def test_cases_beyond_the_time_limit_are_skipped(tmp_path):
    late = dataclasses.replace(PLANTED, name="late")
    run = Supervisor(tmp_path, VerifyGpuConfig(twin="cpu", seconds=10), (PLANTED, late))
    # Enough time to start a process, at most.
    run.deadline = run.start_time + 1.0
    rows = run.run()
    (late_row,) = (row for row in rows if row["stage"] == "late")
    assert late_row["case"] == "all" and late_row["status"] == "skipped"
    assert rows[-1]["detail"] == "the run's time is over"
    assert "the run's time is over" in (tmp_path / "summary.md").read_text()


def test_parent_does_not_import_torch():
    code = "import sys; from mlaforge.gpu_verification import supervisor; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rejects_directories_with_other_files(refused, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(("notes.txt", "verify-gpu did not write"), "verify-gpu", "--out", tmp_path, "--twin", "cpu")


def test_rejects_unknown_stages(refused, tmp_path):
    refused(("probes", "probe"), "verify-gpu", "--out", tmp_path / "out", "--only", "probes")


def test_every_triton_kernel_is_compiled():
    """Every kernel in ops/ is in the table of launches."""
    pytest.importorskip("triton")
    from mlaforge.gpu_verification.kernel_launches import LAUNCHES
    from mlaforge.ops.gpu_properties import GpuProperties

    listed = {make(GpuProperties.of_capability(9, 0)).kernel for make in LAUNCHES.values()}
    files = sorted(Path(inspect.getfile(mlaforge.ops)).parent.glob("*_triton.py"))
    modules = [import_module(f"mlaforge.ops.{path.stem}") for path in files]
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(kernels) >= 6
    assert {name for name, kernel in kernels.items() if kernel not in listed} == set()


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (WITHIN, (50, 100, 200), (49, 201)), (AT_MOST, (0, 100), (101,)), (AT_LEAST, (100,), (99,)),
        (EXACTLY, (100,), (99, 101)),
    ],
)  # fmt: skip
def test_prediction_rules(rule, right, wrong):
    prediction = Prediction(100, "us", rule)
    assert all(prediction.holds(value) for value in right)
    assert not any(prediction.holds(value) for value in (*wrong, float("nan")))


def test_counts_by_status():
    rows = [{"status": status} for status in ("ok", "off", "ok")]
    assert summary.counts(rows) == "2 ok, 1 off"


def test_exit_code_is_0_if_all_predictions_hold(cli, monkeypatch, tmp_path):
    def results(status):
        def run(out, config):
            out.mkdir(exist_ok=True)
            (out / "summary.md").write_text("# verify-gpu\n" + "line\n" * 300)
            return [{"status": "ok"}, {"status": "skipped"}, {"status": status}]

        return run

    for status, code in {"ok": 0, "off": 1, "crashed": 1, "timed out": 1, "failed": 1}.items():
        monkeypatch.setattr(supervisor, "run", results(status))
        done = cli("verify-gpu", "--out", tmp_path / "out")
        assert done.exit_code == code and len(done.stdout.splitlines()) == 100
