"""The public API: its names, lazy imports, and keywords for every option."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch

import mlaforge
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.conversion.config import ConvertConfig
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.evaluation.config import EvalConfig
from mlaforge.healing.config import HealConfig
from mlaforge.planning.config import PlanConfig
from mlaforge.runtime import UserError
from mlaforge.sparsity.config import SparsifyConfig
from support.tiny_models import load_original

OPTIONS = {
    "plan": PlanConfig, "diagnose": DiagnoseConfig, "calibrate": CalibrateConfig, "convert": ConvertConfig,
    "sparsify": SparsifyConfig, "heal": HealConfig, "evaluate": EvalConfig,
}  # fmt: skip
NAMES = {"LLM", "SamplingParams", "RequestOutput", "load_model", *OPTIONS}


def test_the_public_names_are_complete_and_documented():
    assert set(mlaforge.__all__) == NAMES
    assert dir(mlaforge) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert getattr(mlaforge, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'mlaforge' has no attribute 'konvert'"):
        mlaforge.konvert  # noqa: B018 (the access is the test)


def test_importing_a_name_loads_no_unneeded_package():
    code = (
        "import sys\n"
        "from mlaforge import SamplingParams, plan\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OPTIONS)
def test_keywords_are_the_options(name):
    stage = getattr(mlaforge, name)
    parameters = inspect.signature(stage).parameters
    assert "config" not in parameters
    for field in dataclasses.fields(OPTIONS[name]):
        assert parameters[field.name].default == field.default
        assert f"\n{field.name}: {field.metadata['help']}" in stage.__doc__


def test_the_stages_run_from_python(tiny_models, calibration_file, evaluation_file, tmp_path):
    """Plan, convert, evaluate, load and generate, as in docs/start.md."""
    source = str(tiny_models["llama"])
    assert "typical loss" in mlaforge.plan(source, context="4k").render()
    out = tmp_path / "out"
    manifest = mlaforge.convert(
        source, str(out), budget=0.75, calibration=str(calibration_file), evaluation=str(evaluation_file), seqlen=64,
        nsamples=4, eval_windows=2, device="cpu",
    )  # fmt: skip
    assert manifest.stage == "convert" and manifest.config["budget"] == 0.75
    evaluation = mlaforge.evaluate(str(out), text=str(evaluation_file), windows=2, seqlen=64, device="cpu")
    assert evaluation.metrics["ppl"] == pytest.approx(manifest.metrics["mla_ppl"], rel=1e-5)
    ids = torch.arange(40)[None]
    model = mlaforge.load_model(str(out), "float32")
    assert model(ids).logits.shape == load_original(tiny_models["llama"])(ids).logits.shape
    params = mlaforge.SamplingParams(temperature=0.0, max_tokens=3)
    (output,) = mlaforge.LLM(out, device="cpu", cache_bytes=1 << 20).generate("Once", sampling_params=params)
    assert isinstance(output, mlaforge.RequestOutput) and output.prompt == "Once"
    assert len(output.outputs[0].token_ids) == 3


def test_rejects_unknown_missing_and_illegal_arguments(tmp_path):
    with pytest.raises(UserError, match="unknown key 'budgt'; did you mean 'budget'"):
        mlaforge.convert("MODEL", tmp_path / "out", budgt=0.5)
    with pytest.raises(UserError, match="layout = 'latnt' must be one of"):
        mlaforge.convert("MODEL", tmp_path / "out", layout="latnt")
    with pytest.raises(TypeError, match="out"):
        mlaforge.convert("MODEL")
