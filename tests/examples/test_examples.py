"""Every script in examples/ runs as it stands, on a tiny model with tiny settings."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaforge.artifact import Manifest
from mlaforge.cli.main import app
from support.serving import free_port, name_vllm

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = os.environ.get("MLAFORGE_VLLM_PYTHON")


@pytest.fixture
def shown(monkeypatch, capfd):
    """shown("heal", ...) -> what examples/heal.py prints, run in this process."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.fixture
def model(tiny_models):
    return tiny_models["llama"]


def test_examples_are_short_and_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {
        "convert_and_serve", "calibrate_on_your_text", "heal", "heal_with_ray", "draft", "generate_with_vllm"
    }  # fmt: skip
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 40, path


def test_convert_and_serve(shown, model, calibration_file, tmp_path):
    out = shown("convert_and_serve", model, tmp_path / "out", "--calibration", calibration_file, "--seqlen", 64,
                "--port", free_port())  # fmt: skip
    assert out.strip()


def test_calibrate_on_your_text(shown, model, calibration_file, evaluation_file, offline_embedder, tmp_path):
    out = shown("calibrate_on_your_text", model, tmp_path / "out", calibration_file, evaluation_file, "--clusters", 4,
                "--seqlen", 64)  # fmt: skip
    assert 0.5 < float(out.split()[-1]) < 2


def test_heal(shown, model, calibration_file, evaluation_file, tmp_path):
    out = shown("heal", model, tmp_path / "out", calibration_file, evaluation_file, "--steps", 2, "--seqlen", 64)
    assert [line.split(": ")[0] for line in out.splitlines()] == [
        str(model), str(tmp_path / "out"), str(tmp_path / "out-healed"),
    ]  # fmt: skip


# Slurm's commands, as if two nodes were this machine.
SLURM = {
    "scontrol": "echo localhost; echo localhost",
    "srun": 'for _ in 1 2; do "$@" & started+=($!); done; for it in "${started[@]}"; do wait "$it" || exit 1; done',
}


@pytest.mark.slow
def test_heal_with_slurm(model, converted, healing_file, tmp_path):
    for name, script in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]",
        "PORT": str(free_port()),
    }  # fmt: skip
    out = tmp_path / "healed"
    command = [EXAMPLES / "heal.sbatch", "heal", "--teacher", model, "--student", converted("llama", "latent"), "--out",
               out, "--device", "cpu", "--text", healing_file, "--steps", "2", "--seqlen", "64"]  # fmt: skip
    done = subprocess.run(["bash", *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Manifest.load(out).metrics["processes"] == 2
    assert done.stdout.count("validation KL") == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'")
def test_heal_with_ray(model, converted, healing_file, tmp_path):
    out = tmp_path / "healed"
    command = [EXAMPLES / "heal_with_ray.py", model, converted("llama", "latent"), out, "--cpu", "--workers", "2",
               "--text", healing_file, "--steps", "2", "--seqlen", "64"]  # fmt: skip
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Manifest.load(out).metrics["processes"] == 2


def test_draft(shown, model, monkeypatch, tmp_path):
    def in_this_process(command, check):
        done = CliRunner().invoke(app, command[command.index("draft") :])
        assert done.exit_code == 0, (command, done.output)

    monkeypatch.setattr(subprocess, "run", in_this_process)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"Tell me about {n}."]}) + "\n" for n in range(60)))
    out = shown("draft", model, tmp_path / "head", prompts, "--tokens", 12, "--vocabulary", 64, "--steps", 2)
    assert 1 <= float(out.splitlines()[-1].split()[0]) <= 4


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="MLAFORGE_VLLM_PYTHON names no Python that has vLLM: make test-vllm")
def test_generate_with_vllm(converted, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(name_vllm(tmp_path)), "VLLM_CPU_KVCACHE_SPACE": "1"}
    script = [VLLM, EXAMPLES / "generate_with_vllm.py", converted("llama", "latent"), "--dtype", "float32"]
    done = subprocess.run([*script, "--max-model-len", "256"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The capital of France is" in done.stdout
