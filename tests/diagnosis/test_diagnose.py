"""`diagnose` as a stage: its artifact, its page, its plan in `convert --plan`, and rejected inputs."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlaforge.checkpoint import reader, source_model
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.token_losses import perplexity, window_losses
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.diagnosis import diagnose, held_out
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.diagnosis.geometry import Geometry
from mlaforge.diagnosis.plots import draw
from mlaforge.planning import plan_file
from mlaforge.planning.plan import make_plan
from mlaforge.runtime import UserError
from support.html_page import Page
from support.tiny_models import build, save_tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"
FILES = ["diagnosis.json", "plan.json"]


@pytest.fixture(scope="module")
def options(calibration_file):
    return DiagnoseConfig(text=str(calibration_file), seqlen=64, windows=12, device="cpu", report=False)


@pytest.fixture(scope="module")
def diagnosed(tiny_models, options, tmp_path_factory):
    """diagnosed(family, **options) -> directory of a diagnosis, cached."""
    cache = {}

    def get(family, **changes):
        key = family, *sorted(changes.items())
        if key not in cache:
            cache[key] = tmp_path_factory.mktemp("diagnosed") / family
            diagnose.run(str(tiny_models[family]), cache[key], replace(options, **changes))
        return cache[key]

    return get


def read_diagnosis(directory: Path) -> dict:
    return json.loads((directory / "diagnosis.json").read_text())


def convert_options(calibration_file, evaluation_file, **more):
    sizes = {"seqlen": 64, "nsamples": 12, "eval_windows": 4, **more}
    return ConvertConfig(calibration=(str(calibration_file),), evaluation=str(evaluation_file), device="cpu", **sizes)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3"])
def test_artifact_contents_are_consistent(family, diagnosed, tiny_models, options):
    out = diagnosed(family)
    assert sorted(p.name for p in out.iterdir()) == sorted([*FILES, "manifest.json"])
    document, spec = read_diagnosis(out), source_model.read_spec(reader.read_config(tiny_models[family]))
    assert [layer["window"] for layer in document["layers"]] == [layer.window for layer in spec.layers]
    assert (document["summary"]["routing"]["verdict"] == "dense") == (spec.layers[0].moe is None)
    rope = document["layers"][0]["first_order"]["latent_rope"]
    assert all(loss is None for loss in rope.values()) == spec.layers[0].qk_norm
    for layer in document["layers"]:
        # A smaller cache never has a smaller loss.
        losses = [loss for loss in layer["first_order"]["latent"].values() if loss is not None]
        assert len(losses) >= 5 and losses == sorted(losses) and losses[-1] > 0
        assert layer["plan"]["first_order"] is None or layer["plan"]["layout"] == "latent"
    summary = document["summary"]["plan"]
    assert 0 < summary["predicted_loss"] <= summary["uniform_loss"] + 1e-12
    assert summary["first_order"] == pytest.approx(
        sum(layer["plan"]["first_order"] or 0 for layer in document["layers"]), rel=1e-4
    )
    losses = [entry["predicted_loss"] for entry in summary["by_budget"].values()]
    assert losses == sorted(losses) and summary["by_budget"]["0.5"]["predicted_loss"] == summary["predicted_loss"]
    assert document["summary"]["held_out"] == 3 * 63 and document["held_out"]["windows"] == 3
    tokens, eval_windows = diagnose.windows(source_model.load_tokenizer(tiny_models[family]), options)
    assert (len(tokens.ids), len(eval_windows.ids)) == (12, 3)
    with LayerStream(tiny_models[family], torch.float32, torch.device("cpu")) as stream:
        assert document["summary"]["ppl"] == pytest.approx(perplexity(window_losses(stream, tokens.ids, "x")), rel=1e-4)


def test_page_is_self_contained_and_shows_every_verdict(diagnosed, tmp_path):
    document = read_diagnosis(diagnosed("gpt_oss"))
    draw(tmp_path, document)
    page = Page((tmp_path / "diagnosis.html").read_text())
    assert "script" not in page.tags and len(set(page.ids)) == len(page.ids)
    assert all(target.startswith(("#", "data:")) for target in page.targets)
    for what in ("sinks", "windows", "routing", "geometry", "cache", "plan", "bits"):
        assert document["summary"][what]["verdict"].lower() in page.text.lower()
        assert document["summary"][what]["text"] in page.text
    assert all(paths > 3 for paths in page.paths) and len(page.paths) >= 14
    assert "Load of the experts" in page.text and "On the learned sink" in page.text
    assert (tmp_path / "diagnosis.png").read_bytes().startswith(b"\x89PNG")


def test_page_without_matplotlib_has_verdicts_and_logs_the_missing_plots(diagnosed, tmp_path, monkeypatch, capsys):
    document = read_diagnosis(diagnosed("llama"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    capsys.readouterr()
    draw(tmp_path, document)
    assert [path.name for path in tmp_path.iterdir()] == ["diagnosis.html"]
    assert document["summary"]["sinks"]["text"] in Page((tmp_path / "diagnosis.html").read_text()).text
    (line,) = capsys.readouterr().err.splitlines()
    assert "diagnosis.png and the plots of diagnosis.html are left out: pip install '.[report]'" in line


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_convert_uses_the_plan_and_predicts_the_same_loss(
    layout, diagnosed, tiny_models, calibration_file, evaluation_file, tmp_path
):
    """A conversion calibrated on the diagnosed windows has the diagnosis's first-order loss in every layer."""
    out = diagnosed("gpt_oss", layout=layout)
    config = convert_options(calibration_file, evaluation_file, plan=str(out))
    manifest = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", config)
    plan = [layer["plan"] for layer in read_diagnosis(out)["layers"]]
    assert (
        [layer["layout"] for layer in manifest.metrics["layers"]]
        == [layer["layout"] for layer in plan]
        == ["gqa", layout, "gqa"]
    )
    for layer, planned in zip(manifest.metrics["layers"], plan, strict=True):
        assert (layer["kv_lora_rank"], layer["qk_rope_head_dim"]) == (
            planned["kv_lora_rank"],
            planned["qk_rope_head_dim"],
        )
        assert layer["predicted_loss"] == (planned["first_order"] and pytest.approx(planned["first_order"], rel=1e-4))
    assert "budget" not in manifest.config and len(manifest.inputs["plan"]["sha256"]) == 64
    # The path of the plan file gives the same conversion.
    again = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", replace(config, plan=str(out / "plan.json")))
    assert again.fingerprint == manifest.fingerprint


def test_coded_rows_match_the_prediction_of_convert(
    diagnosed, tiny_models, calibration_file, evaluation_file, tmp_path
):
    document = read_diagnosis(diagnosed("gpt_oss"))
    options = convert_options(calibration_file, evaluation_file, bits=3.0)
    layers = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", options).metrics["layers"]
    assert [layer["coded"] is None for layer in document["layers"]] == [True, False, True]
    assert layers[1]["code"] == document["layers"][1]["coded"]["3"]["code"]
    assert layers[1]["predicted_loss"] == pytest.approx(document["layers"][1]["coded"]["3"]["first_order"], rel=1e-4)
    by_bits = document["summary"]["bits"]["by_bits"]
    # Rows of 2 and 3 bits of 64 elements are 16 bytes.
    assert by_bits["4"]["predicted_loss"] < by_bits["3"]["predicted_loss"] == by_bits["2"]["predicted_loss"]
    assert by_bits["3"]["kept"] == [layers[1]["code"][0]] * 2


def test_suggested_ranks_differ_at_equal_cache_size(diagnosed, tiny_models):
    spec = source_model.read_spec(reader.read_config(tiny_models["llama"]))
    plan = plan_file.read(str(diagnosed("llama")), spec).plan
    uniform = make_plan(spec, 0.5, "latent", "auto")
    assert plan.cached_per_token == uniform.cached_per_token
    assert len({layer.kv_lora_rank for layer in plan.layers}) > 1


def test_finished_results_are_reused_and_interrupted_runs_resume_bitwise(
    diagnosed, tiny_models, options, tmp_path, monkeypatch, tree
):
    expected = tree(diagnosed("gpt_oss"))
    source, out = str(tiny_models["gpt_oss"]), tmp_path / "gpt_oss"
    real, calls = Geometry.add, []
    with monkeypatch.context() as patch:

        def interrupt(*args):
            calls.append(args)
            # Within the second of three layers.
            if len(calls) == 12 + 5:
                raise KeyboardInterrupt
            return real(*args)

        patch.setattr(Geometry, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            diagnose.run(source, out, options)
    assert not out.exists()
    # A second interruption, during the evaluation of conversions.
    through, layers, additions = held_out._run_layer, [], []
    monkeypatch.setattr(Geometry, "add", lambda *args: (additions.append(1), real(*args))[1])

    def interrupt_evaluation(*args):
        layers.append(args[1])
        if args[1] == 1:
            raise KeyboardInterrupt
        return through(*args)

    with monkeypatch.context() as patch:
        patch.setattr(held_out, "_run_layer", interrupt_evaluation)
        with pytest.raises(KeyboardInterrupt):
            diagnose.run(source, out, options)
    assert not out.exists() and len(additions) == 24 and set(layers) == {0, 1}
    monkeypatch.setattr(held_out, "_run_layer", lambda *args: (layers.append(args[1]), through(*args))[1])
    layers.clear()
    diagnose.run(source, out, options)
    assert len(additions) == 24 and set(layers) == {1, 2}
    files = tree(out)
    assert {n: files[n] for n in FILES} == {n: expected[n] for n in FILES}
    monkeypatch.setattr(LayerStream, "loaded", None)
    assert diagnose.run(source, out, options).metrics["ppl"] > 1


def test_prints_only_the_table_without_out(cli, tiny_models, calibration_file, tmp_path, tree):
    text = "--text", calibration_file, "--seqlen", 64, "--windows", 3, "--device", "cpu"
    done = cli("diagnose", tiny_models["gpt_oss"], *text)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["text", "sinks", "windows", "routing", "geometry", "cache", "plan", "bits"]
    assert [line.split()[0] for line in lines] == names
    assert "4 experts in 3 layers" in done.stdout and tree(tmp_path) == {}
    done = cli("diagnose", tiny_models["llama"], tmp_path / "out", *text)
    assert "no experts" in done.stdout and str(tmp_path / "out") in done.stdout
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "manifest.json", *FILES, "diagnosis.html", "diagnosis.png",
    }  # fmt: skip
    page = (tmp_path / "out" / "diagnosis.html").read_text()
    assert "Load of the experts" not in page and "On the learned sink" not in page
    assert cli("report", tmp_path, "--out", tmp_path / "report.html").exit_code == 0
    assert "no experts: the MLP of every layer is dense" in (tmp_path / "report.html").read_text()


# Rejected inputs


def test_rejects_invalid_inputs(refused, tiny_models, converted, tmp_path):
    refused("is already converted", "diagnose", converted("llama", "latent"), tmp_path / "out")
    refused("windows = 0 must be at least 1", "diagnose", tiny_models["llama"], "--windows", 0)
    refused("budget = 2.0 must be above 0 and at most 1", "diagnose", tiny_models["llama"], "--budget", 2)
    refused("does not exist", "diagnose", tiny_models["llama"], tmp_path / "out", "--text", "nothing")


def changed_plan(diagnosed, tmp_path, change) -> Path:
    """Write a copy of a plan.json changed by `change(body)`."""
    body = json.loads((diagnosed("llama") / "plan.json").read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(body) or body))
    return path


BROKEN = {
    "no layers": (lambda b: b.pop("layers") and None, "needs the keys 'model' and 'layers'"),
    "no object": (lambda b: [1], "needs the keys 'model' and 'layers'"),
    "layers no list": (lambda b: b.update(layers={}), "'layers' must be a list"),
    "too few layers": (lambda b: b.update(layers=b["layers"][:2]), "has 2 layers, the model has 3"),
    "other model": (lambda b: b["model"].update(model_type="qwen2"), "model_type is qwen2, this model's is llama"),
    "other shape": (lambda b: b["model"].update(cached=[64, 64, 32]), "its cached is [64, 64, 32]"),
    "unknown layout": (lambda b: b["layers"][1].update(layout="laten"), "did you mean 'latent'?"),
    "rank too large": (lambda b: b["layers"][1].update(kv_lora_rank=65), "must be 1 to 64 for layer 1"),
    "rank no number": (lambda b: b["layers"][1].update(kv_lora_rank="8"), "must be whole numbers"),
    "no rank": (lambda b: b["layers"][1].pop("kv_lora_rank") and None, "kv_lora_rank 0 must be 1 to 64"),
    "odd rotary": (lambda b: b["layers"][1].update(layout="latent_rope", qk_rope_head_dim=7), "7 must be even"),
    "no rotary": (lambda b: b["layers"][1].update(layout="latent_rope"), "needs a qk_rope_head_dim"),
    "code": (lambda b: b["layers"][1].update(code=[8, 8]), "`convert --bits` chooses bits"),
    "mixed": (lambda b: b["layers"][1].update(layout="latent_rope", qk_rope_head_dim=8), "several layouts"),
    "nothing": (lambda b: [layer.update(layout="gqa") for layer in b["layers"]] and None, "converts no layer"),
    "order": (lambda b: b.update(layers=b["layers"][::-1]), "entry 0 of 'layers'"),
    "passages": (lambda b: b.update(passages=["x"]), "'passages' a list of whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_rejects_an_invalid_plan(what, diagnosed, tiny_models, refused, short, tmp_path):
    change, words = BROKEN[what]
    path = changed_plan(diagnosed, tmp_path, change)
    refused((str(path), words), "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan", path)


def test_rejects_an_unreadable_plan(diagnosed, tiny_models, refused, short, tmp_path):
    args = "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan"
    refused("cannot be read", *args, tmp_path / "nothing")
    refused("cannot be read", *args, tiny_models["llama"])
    (tmp_path / "plan.json").write_text("{")
    refused("is not JSON", *args, tmp_path)
    refused("is for another model", "convert", tiny_models["qwen2"], *args[2:], diagnosed("llama"))


@pytest.mark.parametrize("option", ["--budget 0.75", "--ranks uniform", "--layers 0", "--deepseek-style"])
def test_rejects_options_that_the_plan_decides(option, diagnosed, tiny_models, refused, short, tmp_path):
    args = "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan", diagnosed("llama")
    refused("is for the plan to say", *args, *option.split())


def test_rejects_evaluation_on_the_plans_text(diagnosed, tiny_models, refused, converts, options,
                                                       calibration_file, evaluation_file, tmp_path):  # fmt: skip
    """The plan's text is rejected for evaluation, in `convert` and later in `eval`, whatever the calibration text."""
    plan, diagnosed_text = tmp_path.parent / f"{tmp_path.name}-plan", tmp_path / "looked-at.txt"
    diagnosed_text.write_text(calibration_file.read_text()[:1500])
    diagnose.run(str(tiny_models["llama"]), plan, replace(options, text=str(diagnosed_text), windows=99, report=False))
    sizes = "--seqlen", 64, "--nsamples", 4, "--eval-windows", 2, "--device", "cpu", "--plan", plan
    swapped = "--calibration", evaluation_file, "--evaluation", calibration_file
    refused("share text", "convert", tiny_models["llama"], tmp_path / "out", *sizes, *swapped)
    converts(tiny_models["llama"], tmp_path / "out", *sizes, *swapped, "--eval-windows", 0)
    refused("share text", "eval", tmp_path / "out", "--text", calibration_file, "--seqlen", 64)


def test_rejects_a_model_that_overflows(model, options, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = model("llama")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e38
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="NaN or infinity"):
        diagnose.run(str(directory), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """A tiny model trained for seconds on half of Python's topics, and two files of a quarter each; all three parts
    have the same mix of topics."""
    from pydoc_data.topics import topics

    from transformers import PreTrainedTokenizerFast

    # Some topics repeat lines of others.
    lines = dict.fromkeys(line for topic in sorted(topics) for line in topics[topic].splitlines())
    parts = ["\n".join(list(lines)[start : start + 50]) for start in range(0, len(lines), 50)]
    folder = tmp_path_factory.mktemp("trained")
    for name, start in (("looked-at", 0), ("judged", 2)):
        (folder / f"{name}.txt").write_text("\n\n".join(parts[start::4]), encoding="utf-8")
    torch.manual_seed(0)
    model = build(request.param).train()
    save_tokenizer(folder / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    text = torch.tensor(tokenizer("\n\n".join(parts[1::2]))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        starts = torch.randint(0, len(text) - 128, (16,))
        batch = torch.stack([text[start : start + 128] for start in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder / "model")
    return folder / "model", folder / "looked-at.txt", folder / "judged.txt"


@pytest.mark.parametrize(
    ("trained", "layout", "budget"),
    [
        ("llama", "latent", 0.125), ("qwen2", "latent_rope", 0.25), ("llama", "latent_rope", 0.25),
        ("qwen2", "latent", 0.125),
    ],
    indirect=["trained"],
)  # fmt: skip
@pytest.mark.slow
def test_predicted_loss_matches_conversion(layout, budget, trained, tmp_path):
    """The loss predicted on one text is within a factor of 1.5 of the loss that `convert` measures on similar text."""
    model, diagnosed_text, eval_text = trained
    config = DiagnoseConfig(
        text=str(diagnosed_text), seqlen=128, windows=128, budget=budget, layout=layout, device="cpu", report=False
    )
    prediction = diagnose.run(str(model), None, config).metrics["plan"]
    settings = convert_options(
        diagnosed_text, eval_text, budget=budget, layout=layout, seqlen=128, nsamples=128, eval_windows=90
    )
    metrics = convert.run(str(model), tmp_path / "out", settings).metrics
    measured_loss = math.log(metrics["ratio"])
    assert measured_loss > 4 * metrics["log_ratio_stderr"], "too little is lost to tell"
    assert 1 / 1.5 < prediction["predicted_loss"] / measured_loss < 1.5, (prediction["predicted_loss"], measured_loss)
    assert prediction["interval"][0] < prediction["predicted_loss"] < prediction["interval"][1]
    assert (prediction["verdict"] == "fit") == (prediction["predicted_loss"] <= 0.01)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")
@pytest.mark.parametrize(("size", "windows"), [({"budget": 0.5}, 16), ({"bits": 3.0}, 16)], ids=["plain", "coded"])
def test_predicted_losses_match_a_real_model(size, windows, smollm2, tmp_path):
    """SmolLM2: diagnosed and calibrated on validation text, evaluated on test text."""
    text = str(DATA / "wiki.valid.tokens")
    options = DiagnoseConfig(text=text, windows=windows, seqlen=1024, device="cpu", report=False)
    metrics = diagnose.run(str(smollm2), None, options).metrics
    settings = ConvertConfig(
        calibration=(text,), evaluation=str(DATA / "wiki.test.raw"), nsamples=windows, seqlen=1024, eval_windows=16,
        device="cpu", **size,
    )  # fmt: skip
    measured_loss = math.log(convert.run(str(smollm2), tmp_path / "out", settings).metrics["ratio"])
    predicted = metrics["plan"] if "budget" in size else metrics["bits"]["by_bits"]["3"]
    assert 1 / 1.5 < predicted["predicted_loss"] / measured_loss < 1.5, (predicted, measured_loss)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")
def test_suggested_ranks_are_no_worse_than_uniform_ones(smollm2, tmp_path):
    """SmolLM2 at 50 %: diagnosed and calibrated on one text, evaluated on another."""
    text = str(DATA / "wiki.valid.tokens")
    manifest = diagnose.run(str(smollm2), tmp_path / "diagnosis", DiagnoseConfig(text=text, windows=8, device="cpu"))
    # docs/conversion.md: the first token is a sink from layer 12 on.
    resting = manifest.metrics["sinks"]["sink_heads"]
    assert len(resting) > 80 and min(layer for layer, _ in resting) == 12
    ppl = {}
    for name, more in (("plan", {"plan": str(tmp_path / "diagnosis")}), ("uniform", {"ranks": "uniform"})):
        config = ConvertConfig(
            calibration=text, evaluation=str(DATA / "wiki.test.raw"), nsamples=8, eval_windows=4, device="cpu", **more
        )
        cache = convert.run(str(smollm2), tmp_path / name, config, calibrated=tmp_path / "calibration")
        ppl[name] = cache.metrics["mla_ppl"]
        shutil.rmtree(tmp_path / name)
    assert ppl["plan"] <= ppl["uniform"]
