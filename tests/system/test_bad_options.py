"""Illegal options and occupied output directories: one line of error, and no file is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

OPTIONS = {
    "--kv-lora-rank 65": "must be 1 to 64",
    "--kv-lora-rank 0": "must be 1 to 64",
    "--budget 0": "budget = 0.0 must be above 0 and at most 1",
    "--budget -1": "budget = -1.0",
    "--budget 1.5": "budget = 1.5",
    "--budget nan": "budget = nan",
    "--budget 0.05": "use a budget of at least 0.125",
    "--layout laten": "did you mean 'latent'?",
    "--layout latent --qk-rope-head-dim 8": "does not fit layout latent",
    "--layout latent_rope --qk-rope-head-dim 7": "qk_rope_head_dim 7 must be even",
    "--layout latent_rope --qk-rope-head-dim 0": "qk_rope_head_dim = 0 must be at least 2",
    "--layout latent --qk-rope-head-dim 0": "qk_rope_head_dim = 0 must be at least 2",
    "--qk-rope-head-dim 0": "qk_rope_head_dim = 0 must be at least 2",
    "--layout latent --qk-mqa-dim 8": "qk_mqa_dim means layout latent_rope, but layout is latent; leave one of them",
    "--layout latent --collapse 2": "collapse means layout latent_rope",
    "--layout latent --freqfold 2": "freqfold means layout latent_rope",
    "--layout latent --deepseek-style": "deepseek_style means layout latent_rope",
    "--layout latent_rope --qk-rope-head-dim 34": "at most 32",
    "--layout latent_rope --budget 0.5 --qk-rope-head-dim 32": "leaves 0 for the latent",
    "--layers 3": "the model has layers 0-2",
    "--layers one": "'one' is not a layer",
    "--layers 2-1": "write 1-2",
    "--layers 0,,1": "is not a layer",
    "--layers -1": "'-1' is not a layer",
    "--layers fulll": "did you mean 'full'?",
    "--q-lora-rank 0": "at least 1",
    "--q-lora-rank 65": "above the hidden size 64",
    "--nsamples 0": "nsamples = 0",
    "--batch-size 0": "batch_size = 0",
    "--seqlen 47": "at least 48",
    "--eval-windows -1": "eval_windows = -1",
    "--refit maybe": "auto, on, off",
    "--ranks same": "allocated, uniform",
    "--dtype float64": "float32, bfloat16, float16",
    "--dtype float23": "did you mean 'float32'?",
    "--device gpu": "use auto, cpu or cuda",
    "--device meta": "use auto, cpu or cuda",
    "--device mps": "use auto, cpu or cuda",
    "--device cpu:9": "'cpu:9' was requested, but a machine's processors are one device; use cpu",
    "--collapse 3": "divides head_dim / 2 = 8",
    "--collapse 0": "divides head_dim / 2 = 8",
    "--collapse two": "divides head_dim / 2 = 8",
    "--collapse 2 --qk-mqa-dim 16": "contradicts 8 rotary dimensions",
    "--collapse 2 --qk-rope-head-dim 16": "contradicts 16 rotary dimensions",
    "--qk-mqa-dim 8 --qk-rope-head-dim 16": "contradicts 16 rotary dimensions",
    "--qk-mqa-dim 7": "must be even",
    "--freqfold 3": "divides 8 pairs",
    "--freqfold 0": "divides 8 pairs",
    "--freqfold 2 --deepseek-style --qk-rope-head-dim 16": "give one of them",
    "--deepseek-style --qk-rope-head-dim 12": "divide head_dim 16, not 12",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_rejects_options_that_do_not_fit_the_model(options, tiny_models, refused, short, tmp_path):
    refused(OPTIONS[options], "convert", tiny_models["llama"], tmp_path / "out", *short, *options.split())


def test_full_layers_of_a_model_that_slides_everywhere(tiny_models, refused, short, tmp_path):
    refused(
        "all layers have a sliding window",
        "convert",
        tiny_models["mistral"],
        tmp_path / "out",
        *short,
        "--layers",
        "full",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("verb", ["convert", "eval", "generate"])
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_rejects_cuda_without_a_gpu(verb, device, tiny_models, refused, tmp_path, calibration_file):
    more = [tmp_path / "out"] if verb == "convert" else []
    refused((f"'{device}'", "--device cpu"), verb, tiny_models["llama"], *more, "--device", device)


@pytest.mark.parametrize("wrong", [["--budget", "half"], ["--rank", "8"], ["--nsamples", "2.5"]])
def test_parser_errors_name_the_option(wrong, tiny_models, cli, tree, tmp_path):
    """They have another form, but exit with 2, name the option and leave no files."""
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *wrong)
    assert done.exit_code == 2
    assert wrong[0] in done.stderr and "Traceback" not in done.stderr
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("verb", "more", "word"),
    [
        ("eval", ["--windows", 0], "windows = 0"),
        ("eval", ["--seqlen", 47], "seqlen = 47"),
        ("generate", ["--max-new-tokens", 0], "max_new_tokens = 0"),
        ("generate", ["--prompt", "", "--dtype", "float32"], "the prompt is empty"),
        ("generate", ["--against", "nothing"], "nothing does not exist"),
        ("plan", ["--gpu", "h300"], "h200"),
        ("plan", ["--layout", "latent", "--qk-rope-head-dim", 0], "qk_rope_head_dim = 0 must be at least 2"),
        ("serve", ["--device", "cpu:9"], "processors are one device"),
    ],
)
def test_rejects_illegal_options_of_other_verbs(verb, more, word, tiny_models, refused, tmp_path):
    refused(word, verb, tiny_models["llama"], *more)


def test_chat_without_a_template(model, refused):
    directory = model("llama")
    (directory / "chat_template.jinja").unlink()
    refused("has no chat template", "generate", directory, "--chat", "--dtype", "float32")


# OUT


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    "occupy",
    [
        lambda out: (out.mkdir(), (out / "thesis.txt").write_text("x")),
        lambda out: out.write_text("x"),
        lambda out: out.symlink_to("nowhere"),
        lambda out: (out.mkdir(), (out / "manifest.json").write_text('{"name": "my web app"}')),
        lambda out: (
            out.mkdir(),
            (out / "manifest.json").write_text('{"stage": "convert", "config": [], "inputs": {}}'),
        ),
    ],
    ids=["folder with a file", "file", "dangling link", "another tool's manifest", "nearly our manifest"],
)
def test_rejects_an_out_not_made_by_mlaforge(occupy, overwrite, tiny_models, refused, short, tmp_path):
    occupy(tmp_path / "out")
    refused("not made by mlaforge", "convert", tiny_models["llama"], tmp_path / "out", *short, *overwrite)


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["plain", "overwrite"])
def test_rejects_the_source_as_out(overwrite, model, refused, short):
    directory = model("llama")
    refused("read and never written to", "convert", directory, directory, *short, *overwrite)


def test_rejects_an_out_inside_an_input(model, converts, refused, short, evaluation_file, tmp_path):
    """For every stage, also through relative paths and for folders of text."""
    words, directory, texts = "read and never written to", model("llama"), tmp_path / "texts"
    texts.mkdir()
    (texts / "text.txt").write_text(evaluation_file.read_text())
    (tmp_path / "link").symlink_to(directory)
    converts(directory, tmp_path / "converted")
    for out in (directory / "sub", tmp_path / "link" / "a" / "b", tmp_path / "converted" / ".." / "llama" / "sub"):
        refused(words, "convert", directory, out, *short)
    refused(words, "convert", directory, texts / "out", *short, "--evaluation", texts)
    few = ("--text", evaluation_file, "--seqlen", 64)
    refused(words, "eval", directory, texts / "out", "--text", texts, "--seqlen", 64)
    refused(words, "eval", tmp_path / "converted", tmp_path / "converted" / "eval", *few, "--overwrite")
    refused(words, "diagnose", directory, directory / "diagnosis", *few)
    refused(words, "generate", directory, directory / "talk", "--dtype", "float32")
    converts(directory, tmp_path / "d", "--deepseek-style", "--qk-rope-head-dim", 16, "--budget", 0.75)
    refused(words, "export", "deepseek", tmp_path / "d", tmp_path / "d" / "e")
    refused(words, "calibrate", "--source", texts, "--out", texts / "sets", "--embedder", directory)
    heal = ("heal", "--teacher", directory, "--student", tmp_path / "converted", "--text", texts, "--steps", 1)
    heal += ("--seqlen", 64, "--batch-tokens", 64, "--validation-tokens", 64)
    for out in (directory / "healed", tmp_path / "converted", texts / "healed"):
        refused(words, *heal, "--out", out, "--overwrite")


def test_rejects_an_out_below_a_file(tiny_models, refused, short, tmp_path):
    (tmp_path / "file").write_text("x")
    refused("Not a directory", "convert", tiny_models["llama"], tmp_path / "file" / "out", *short)


@pytest.mark.parametrize("make", [Path.mkdir, lambda out: None, lambda out: out.symlink_to(out.parent / "real")])
def test_out_may_be_empty_absent_or_a_link(make, tiny_models, converts, tmp_path):
    (tmp_path / "real").mkdir()
    make(tmp_path / "out")
    linked = (tmp_path / "out").is_symlink()
    converts(tiny_models["llama"], tmp_path / "out")
    converts(tiny_models["llama"], tmp_path / "out", "--budget", 0.75, "--overwrite")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]["budget"] == 0.75
    assert (tmp_path / "out").is_symlink() == linked
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_out_with_another_config_is_replaced_only_with_overwrite(tiny_models, converts, refused, short, tmp_path):
    out, source = tmp_path / "out", tiny_models["llama"]
    converts(source, out, "--budget", 0.5)
    refused(("budget was 0.5, now 0.75", "--overwrite"), "convert", source, out, *short, "--budget", 0.75)
    refused("model path was llama, now qwen2", "convert", tiny_models["qwen2"], out, *short, "--budget", 0.5)
    converts(source, out, "--budget", 0.75, "--overwrite")
    assert json.loads((out / "manifest.json").read_text())["config"]["budget"] == 0.75


def test_a_finished_result_is_not_computed_again(tiny_models, converts, tree, tmp_path, monkeypatch):
    out, source = tmp_path / "out", tiny_models["llama"]
    first = converts(source, out)
    before, times = tree(tmp_path), {p: p.stat().st_mtime_ns for p in [out, *out.iterdir()]}
    monkeypatch.setattr("mlaforge.checkpoint.loading.load_model", None)
    for more in ([], ["--overwrite"]):
        again = converts(source, out, *more)
        assert again.stdout == first.stdout
        assert "finished already" in again.stderr
    assert tree(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in [out, *out.iterdir()]} == times


def test_a_result_with_a_missing_file_is_not_finished(tiny_models, converts, refused, short, tmp_path):
    out, source = tmp_path / "out", tiny_models["llama"]
    converts(source, out)
    (out / "tokenizer.json").unlink()
    refused("files are missing", "convert", source, out, *short)
    converts(source, out, "--overwrite")
    assert (out / "tokenizer.json").is_file()


def test_overwrite_keeps_the_users_files(tiny_models, converts, refused, short, tmp_path):
    out, source = tmp_path / "out", tiny_models["llama"]
    converts(source, out)
    (out / "notes.txt").write_text("three weeks of work")
    more = ("--budget", 0.75, "--overwrite")
    refused("notes.txt", "convert", source, out, *short, *more)
    (out / "notes.txt").unlink()
    converts(source, out, *more)
