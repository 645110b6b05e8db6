"""`diagnose` as a stage: its artifact, its page, the plan that `convert --plan` takes, and what goes wrong."""

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
    """diagnosed(family, **options) -> the directory, made once."""
    made = {}

    def get(family, **changes):
        key = family, *sorted(changes.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("diagnosed") / family
            diagnose.run(str(tiny_models[family]), made[key], replace(options, **changes))
        return made[key]

    return get


def numbers(directory: Path) -> dict:
    return json.loads((directory / "diagnosis.json").read_text())


def convert_options(calibration_file, evaluation_file, **more):
    sizes = {"seqlen": 64, "nsamples": 12, "eval_windows": 4, **more}
    return ConvertConfig(calibration=(str(calibration_file),), evaluation=str(evaluation_file), device="cpu", **sizes)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3"])
def test_the_artifact_holds_numbers_plan_and_pictures(family, diagnosed, tiny_models, options):
    out = diagnosed(family)
    assert sorted(p.name for p in out.iterdir()) == sorted([*FILES, "manifest.json"])
    told, spec = numbers(out), source_model.read_spec(reader.read_config(tiny_models[family]))
    assert [layer["window"] for layer in told["layers"]] == [layer.window for layer in spec.layers]
    assert (told["summary"]["routing"]["verdict"] == "dense") == (spec.layers[0].moe is None)
    rope = told["layers"][0]["first_order"]["latent_rope"]
    assert all(loss is None for loss in rope.values()) == spec.layers[0].qk_norm
    for layer in told["layers"]:
        # What keeps less costs no less.
        losses = [loss for loss in layer["first_order"]["latent"].values() if loss is not None]
        assert len(losses) >= 5 and losses == sorted(losses) and losses[-1] > 0
        assert layer["plan"]["first_order"] is None or layer["plan"]["layout"] == "latent"
    summary = told["summary"]["plan"]
    assert 0 < summary["predicted_loss"] <= summary["uniform_loss"] + 1e-12
    assert summary["first_order"] == pytest.approx(
        sum(layer["plan"]["first_order"] or 0 for layer in told["layers"]), rel=1e-4
    )
    losses = [each["predicted_loss"] for each in summary["by_budget"].values()]
    assert losses == sorted(losses) and summary["by_budget"]["0.5"]["predicted_loss"] == summary["predicted_loss"]
    assert told["summary"]["held_out"] == 3 * 63 and told["held_out"]["windows"] == 3
    tokens, held = diagnose.windows(source_model.load_tokenizer(tiny_models[family]), options)
    assert (len(tokens.ids), len(held.ids)) == (12, 3)
    with LayerStream(tiny_models[family], torch.float32, torch.device("cpu")) as stream:
        assert told["summary"]["ppl"] == pytest.approx(perplexity(window_losses(stream, tokens.ids, "x")), rel=1e-4)


def test_the_page_needs_nothing_else_and_says_every_verdict(diagnosed, tmp_path):
    told = numbers(diagnosed("gpt_oss"))
    draw(tmp_path, told)
    page = Page((tmp_path / "diagnosis.html").read_text())
    assert "script" not in page.tags and len(set(page.ids)) == len(page.ids)
    assert all(target.startswith(("#", "data:")) for target in page.targets)
    for what in ("sinks", "windows", "routing", "geometry", "cache", "plan", "bits"):
        assert told["summary"][what]["verdict"].lower() in page.text.lower()
        assert told["summary"][what]["text"] in page.text
    assert all(paths > 3 for paths in page.paths) and len(page.paths) >= 14
    assert "Load of the experts" in page.text and "On the learned sink" in page.text
    assert (tmp_path / "diagnosis.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_convert_takes_the_plan_and_predicts_the_same(layout, diagnosed, tiny_models, calibration_file, evaluation_file,
                                                      tmp_path):  # fmt: skip
    """Calibrated on the diagnosed windows, conversion finds the first-order loss of diagnosis, layer by layer."""
    out = diagnosed("gpt_oss", layout=layout)
    told = convert_options(calibration_file, evaluation_file, plan=str(out))
    found = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", told)
    plan = [layer["plan"] for layer in numbers(out)["layers"]]
    assert (
        [layer["layout"] for layer in found.metrics["layers"]]
        == [layer["layout"] for layer in plan]
        == ["gqa", layout, "gqa"]
    )
    for made, planned in zip(found.metrics["layers"], plan, strict=True):
        assert (made["kv_lora_rank"], made["qk_rope_head_dim"]) == (
            planned["kv_lora_rank"],
            planned["qk_rope_head_dim"],
        )
        assert made["predicted_loss"] == (planned["first_order"] and pytest.approx(planned["first_order"], rel=1e-4))
    assert "budget" not in found.config and len(found.inputs["plan"]["sha256"]) == 64
    # Its file will do as well, and is the same conversion.
    again = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", replace(told, plan=str(out / "plan.json")))
    assert again.fingerprint == found.fingerprint


def test_coded_rows_cost_what_convert_will_say(diagnosed, tiny_models, calibration_file, evaluation_file, tmp_path):
    told = numbers(diagnosed("gpt_oss"))
    options = convert_options(calibration_file, evaluation_file, bits=3.0)
    found = convert.run(str(tiny_models["gpt_oss"]), tmp_path / "mla", options).metrics["layers"]
    assert [layer["coded"] is None for layer in told["layers"]] == [True, False, True]
    assert found[1]["code"] == told["layers"][1]["coded"]["3"]["code"]
    assert found[1]["predicted_loss"] == pytest.approx(told["layers"][1]["coded"]["3"]["first_order"], rel=1e-4)
    by_bits = told["summary"]["bits"]["by_bits"]
    assert by_bits["4"]["predicted_loss"] < by_bits["3"]["predicted_loss"] < by_bits["2"]["predicted_loss"]
    assert by_bits["3"]["kept"] == [found[1]["code"][0]] * 2


def test_the_plans_ranks_differ_and_cost_what_uniform_ones_do(diagnosed, tiny_models):
    spec = source_model.read_spec(reader.read_config(tiny_models["llama"]))
    plan = plan_file.read(str(diagnosed("llama")), spec).plan
    uniform = make_plan(spec, 0.5, "latent", "auto")
    assert plan.cached_per_token == uniform.cached_per_token
    assert len({layer.kv_lora_rank for layer in plan.layers}) > 1


def test_the_same_again_is_not_made_twice_and_a_killed_run_ends_in_the_same_bytes(
    diagnosed, tiny_models, options, tmp_path, monkeypatch, tree
):
    whole = tree(diagnosed("gpt_oss"))
    source, out = str(tiny_models["gpt_oss"]), tmp_path / "gpt_oss"
    real, calls = Geometry.add, []
    with monkeypatch.context() as patch:

        def stop(*given):
            calls.append(given)
            # In the middle of the second of the three layers.
            if len(calls) == 12 + 5:
                raise KeyboardInterrupt
            return real(*given)

        patch.setattr(Geometry, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            diagnose.run(source, out, options)
    assert not out.exists()
    # Once more, in the middle of judging conversions.
    through, layers, seen = held_out._through, [], []
    monkeypatch.setattr(Geometry, "add", lambda *given: (seen.append(1), real(*given))[1])

    def stop_judging(*given):
        layers.append(given[1])
        if given[1] == 1:
            raise KeyboardInterrupt
        return through(*given)

    with monkeypatch.context() as patch:
        patch.setattr(held_out, "_through", stop_judging)
        with pytest.raises(KeyboardInterrupt):
            diagnose.run(source, out, options)
    assert not out.exists() and len(seen) == 24 and set(layers) == {0, 1}
    monkeypatch.setattr(held_out, "_through", lambda *given: (layers.append(given[1]), through(*given))[1])
    layers.clear()
    diagnose.run(source, out, options)
    assert len(seen) == 24 and set(layers) == {1, 2}
    found = tree(out)
    assert {n: found[n] for n in FILES} == {n: whole[n] for n in FILES}
    monkeypatch.setattr(LayerStream, "loaded", None)
    assert diagnose.run(source, out, options).metrics["ppl"] > 1


def test_without_out_only_the_table(cli, tiny_models, calibration_file, tmp_path, tree):
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


# What goes wrong


def test_what_cannot_be_diagnosed(refused, tiny_models, converted, tmp_path):
    refused("is already converted", "diagnose", converted("llama", "latent"), tmp_path / "out")
    refused("windows = 0 must be at least 1", "diagnose", tiny_models["llama"], "--windows", 0)
    refused("budget = 2.0 must be above 0 and at most 1", "diagnose", tiny_models["llama"], "--budget", 2)
    refused("does not exist", "diagnose", tiny_models["llama"], tmp_path / "out", "--text", "nothing")


def changed(diagnosed, tmp_path, change) -> Path:
    """A copy of a plan.json after `change(its body)`."""
    body = json.loads((diagnosed("llama") / "plan.json").read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(body) or body))
    return path


BROKEN = {
    "no layers": (lambda b: b.pop("layers") and None, "needs the keys 'model' and 'layers'"),
    "no object": (lambda b: [1], "needs the keys 'model' and 'layers'"),
    "layers no list": (lambda b: b.update(layers={}), "'layers' must be a list"),
    "too few layers": (lambda b: b.update(layers=b["layers"][:2]), "has 2 layers, the model 3"),
    "other model": (lambda b: b["model"].update(model_type="qwen2"), "model_type is qwen2, this model's is llama"),
    "other shape": (lambda b: b["model"].update(cached=[64, 64, 32]), "its cached is [64, 64, 32]"),
    "unknown layout": (lambda b: b["layers"][1].update(layout="laten"), "did you mean 'latent'?"),
    "rank too large": (lambda b: b["layers"][1].update(kv_lora_rank=65), "must be 1 to 64 for layer 1"),
    "rank no number": (lambda b: b["layers"][1].update(kv_lora_rank="8"), "must be whole numbers"),
    "no rank": (lambda b: b["layers"][1].pop("kv_lora_rank") and None, "kv_lora_rank 0 must be 1 to 64"),
    "odd rotary": (lambda b: b["layers"][1].update(layout="latent_rope", qk_rope_head_dim=7), "7 must be even"),
    "no rotary": (lambda b: b["layers"][1].update(layout="latent_rope"), "needs a qk_rope_head_dim"),
    "code": (lambda b: b["layers"][1].update(code=[8, 8]), "by `convert --bits`; leave its code out"),
    "mixed": (lambda b: b["layers"][1].update(layout="latent_rope", qk_rope_head_dim=8), "several layouts"),
    "nothing": (lambda b: [layer.update(layout="gqa") for layer in b["layers"]] and None, "converts no layer"),
    "order": (lambda b: b.update(layers=b["layers"][::-1]), "entry 0 of 'layers'"),
    "passages": (lambda b: b.update(passages=["x"]), "'passages' a list of whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_plan_that_is_none(what, diagnosed, tiny_models, refused, short, tmp_path):
    change, words = BROKEN[what]
    path = changed(diagnosed, tmp_path, change)
    refused((str(path), words), "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan", path)


def test_a_plan_that_cannot_be_read(diagnosed, tiny_models, refused, short, tmp_path):
    given = "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan"
    refused("cannot be read", *given, tmp_path / "nothing")
    refused("cannot be read", *given, tiny_models["llama"])
    (tmp_path / "plan.json").write_text("{")
    refused("is not JSON", *given, tmp_path)
    refused("is for another model", "convert", tiny_models["qwen2"], *given[2:], diagnosed("llama"))


@pytest.mark.parametrize("option", ["--budget 0.75", "--ranks uniform", "--layers 0", "--deepseek-style"])
def test_what_the_plan_decides_is_not_asked_twice(option, diagnosed, tiny_models, refused, short, tmp_path):
    given = "convert", tiny_models["llama"], tmp_path / "out", *short, "--plan", diagnosed("llama")
    refused("is for the plan to say", *given, *option.split())


def test_nothing_is_judged_on_what_a_plan_was_made_from(diagnosed, tiny_models, refused, converts, options,
                                                       calibration_file, evaluation_file, tmp_path):  # fmt: skip
    """Calibrated on other text, the plan's own text is still refused, at once and later by `eval`."""
    plan, looked_at = tmp_path.parent / f"{tmp_path.name}-plan", tmp_path / "looked-at.txt"
    looked_at.write_text(calibration_file.read_text()[:1500])
    diagnose.run(str(tiny_models["llama"]), plan, replace(options, text=str(looked_at), windows=99, report=False))
    few = "--seqlen", 64, "--nsamples", 4, "--eval-windows", 2, "--device", "cpu", "--plan", plan
    swapped = "--calibration", evaluation_file, "--evaluation", calibration_file
    refused("share text", "convert", tiny_models["llama"], tmp_path / "out", *few, *swapped)
    converts(tiny_models["llama"], tmp_path / "out", *few, *swapped, "--eval-windows", 0)
    refused("share text", "eval", tmp_path / "out", "--text", calibration_file, "--seqlen", 64)


def test_a_model_that_overflows_is_no_diagnosis(model, options, tmp_path):
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
    """A tiny model that was trained, for seconds, on half of Python's topics, and two files of a quarter each: all
    three have some of every kind."""
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
        ("llama", "latent", 0.125), pytest.param("qwen2", "latent_rope", 0.25, marks=pytest.mark.slow),
        pytest.param("llama", "latent_rope", 0.25, marks=pytest.mark.slow),
        pytest.param("qwen2", "latent", 0.125, marks=pytest.mark.slow),
    ],
    indirect=["trained"],
)  # fmt: skip
def test_a_predicted_loss_is_what_conversion_loses(layout, budget, trained, tmp_path):
    """Measured on windows of the text that was diagnosed, judged by `convert` on other text of its kind: within a
    factor of 1.5."""
    model, looked_at, judged = trained
    config = DiagnoseConfig(
        text=str(looked_at), seqlen=128, windows=128, budget=budget, layout=layout, device="cpu", report=False
    )
    told = diagnose.run(str(model), None, config).metrics["plan"]
    settings = convert_options(
        looked_at, judged, budget=budget, layout=layout, seqlen=128, nsamples=128, eval_windows=90
    )
    found = convert.run(str(model), tmp_path / "out", settings).metrics
    lost = math.log(found["ratio"])
    assert lost > 4 * found["log_ratio_stderr"], "too little is lost to tell"
    assert 1 / 1.5 < told["predicted_loss"] / lost < 1.5, (told["predicted_loss"], lost)
    assert told["interval"][0] < told["predicted_loss"] < told["interval"][1]
    assert (told["verdict"] == "fit") == (told["predicted_loss"] <= 0.01)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")
@pytest.mark.parametrize(("size", "windows"), [({"budget": 0.5}, 16), ({"bits": 3.0}, 16)], ids=["plain", "coded"])
def test_predicted_losses_of_a_real_model(size, windows, smollm2, tmp_path):
    """SmolLM2: diagnosed on as much validation text as it is calibrated on, judged on the test text."""
    text = str(DATA / "wiki.valid.tokens")
    options = DiagnoseConfig(text=text, windows=windows, seqlen=1024, device="cpu", report=False)
    told = diagnose.run(str(smollm2), None, options).metrics
    settings = ConvertConfig(
        calibration=(text,), evaluation=str(DATA / "wiki.test.raw"), nsamples=windows, seqlen=1024, eval_windows=16,
        device="cpu", **size,
    )  # fmt: skip
    lost = math.log(convert.run(str(smollm2), tmp_path / "out", settings).metrics["ratio"])
    predicted = told["plan"] if "budget" in size else told["bits"]["by_bits"]["3"]
    assert 1 / 1.5 < predicted["predicted_loss"] / lost < 1.5, (predicted, lost)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")
def test_the_suggested_ranks_are_no_worse_than_uniform_ones(smollm2, tmp_path):
    """SmolLM2 at 50 %: diagnosed and calibrated on one text, judged on others."""
    text = str(DATA / "wiki.valid.tokens")
    found = diagnose.run(str(smollm2), tmp_path / "diagnosis", DiagnoseConfig(text=text, windows=8, device="cpu"))
    # As docs/conversion.md says: from layer 12 on the first token is a sink.
    resting = found.metrics["sinks"]["sink_heads"]
    assert len(resting) > 80 and min(layer for layer, _ in resting) == 12
    ppl = {}
    for name, more in (("plan", {"plan": str(tmp_path / "diagnosis")}), ("uniform", {"ranks": "uniform"})):
        config = ConvertConfig(
            calibration=text, evaluation=str(DATA / "wiki.test.raw"), nsamples=8, eval_windows=4, device="cpu", **more
        )
        made = convert.run(str(smollm2), tmp_path / name, config, calibrated=tmp_path / "calibration")
        ppl[name] = made.metrics["mla_ppl"]
        shutil.rmtree(tmp_path / name)
    assert ppl["plan"] <= ppl["uniform"]
