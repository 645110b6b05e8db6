"""Command line: imports, help of options, and output of each verb."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import typing

import pytest
import yaml
from typer.testing import CliRunner

from mlaforge.cli.main import app
from mlaforge.cli.verb import ADVANCED, FIRST
from mlaforge.config import within
from mlaforge.conversion.config import ConvertConfig
from mlaforge.engine.config import EngineConfig
from support.eagle3_heads import saved
from support.option_classes import option_classes

# Verb, with its group if any ("draft import") -> dataclass of its options, or None.
VERBS = {
    f"{prefix}{command.callback.__name__.replace('_', '-')}":
    typing.get_type_hints(inspect.unwrap(command.callback)).get("config")
    for prefix, group in [("", app), *((f"{entry.name} ", entry.typer_instance) for entry in app.registered_groups)]
    for command in group.registered_commands
}  # fmt: skip
HEAVY = {"torch", "transformers", "triton", "datasets", "vllm", "fastapi", "matplotlib", "sklearn"}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def printed(done: typing.Any) -> str:
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def halved(tiny_models, cli, short, tmp_path_factory):
    """The tiny llama converted to half its cache."""
    out = tmp_path_factory.mktemp("halved") / "out"
    printed(cli("convert", tiny_models["llama"], out, *short, "--budget", 0.5))
    return out


def test_help_imports_no_heavy_packages():
    code = f"""
import sys
from mlaforge.cli.main import main
for verb in {[[], *(verb.split() for verb in VERBS)]}:
    sys.argv = ["mlaforge", *verb, "--help"]
    try:
        main()
    except SystemExit as done:
        assert done.code == 0, verb
heavy = {HEAVY} & set(sys.modules)
assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert all(f"mlaforge {verb} [OPTIONS]" in done.stdout for verb in VERBS)


def test_every_class_of_options_belongs_to_a_verb():
    classes = set(option_classes())
    # Options shared by several verbs are base classes of theirs.
    shared = {c for c in classes if any(c in other.__mro__[1:] for other in classes)}
    assert shared == {EngineConfig}
    assert classes - shared < set(VERBS.values())


@pytest.mark.parametrize("verb", [verb for verb, config in VERBS.items() if config])
def test_help_explains_every_option(verb):
    # Wide enough that no line is wrapped.
    text = printed(CliRunner().invoke(app, [*verb.split(), "--help"], terminal_width=1000))
    sections = {re.match(r"  (--[a-z0-9-]+)", part)[1]: part for part in re.split(r"\n(?=  --)", text)[1:]}
    for field in dataclasses.fields(VERBS[verb]):
        metadata, section = field.metadata, sections["--" + field.name.rstrip("_").replace("_", "-")]
        assert len(metadata["help"]) > 10 and metadata["help"] in section
        limits = [limit for limit in (metadata["unit"], within(field)) if limit]
        assert f"[{', '.join(limits)}]" in section or not limits
        default = field.default if isinstance(field.default, tuple) else (field.default,)
        assert f"(default: {','.join(map(str, default))})" in section or field.default is None
        assert all(choice in section for choice in metadata["choices"])
        assert set(default) <= {*metadata["choices"]} or field.default is None or not metadata["choices"]
    assert "--recipe" in sections


@pytest.mark.parametrize("verb", [verb for verb, config in VERBS.items() if config])
def test_help_lists_first_options_first(verb):
    text = printed(CliRunner().invoke(app, [*verb.split(), "--help"], terminal_width=80))
    for title, names in VERBS[verb].panels.items():
        text, _, panel = text.partition(f"\n{title}:\n")
        assert {*re.findall(r"^  --([a-z0-9-]+)", panel, re.MULTILINE)} == {name.replace("_", "-") for name in names}
    before, _, advanced = text.partition(f"\n{ADVANCED}:\n")
    shown, hidden = ([*re.findall(r"^  --([a-z0-9-]+)", part, re.MULTILINE)] for part in (before, advanced))
    flags = {field.name: field.name.rstrip("_").replace("_", "-") for field in dataclasses.fields(VERBS[verb])}
    first = [flags[name] for name in VERBS[verb].first]
    elsewhere = {flags[name] for names in VERBS[verb].panels.values() for name in names}
    assert set(hidden) == (set(flags.values()) - set(first) - elsewhere if first else set())
    # The verb's parameters precede the options, the recipe follows them.
    assert shown[-2:] == ["recipe", "help"] and "recipe" not in hidden
    assert not first or shown[-7:-2] == first
    assert max(map(len, text.splitlines())) <= 80


def test_help_lists_every_command_once_in_its_panel():
    """Long sentences are wrapped at 80 columns and never truncated."""
    text = printed(CliRunner().invoke(app, ["--help"], terminal_width=80))
    listed = re.findall(r"^  ([a-z-]+)  ", text, re.MULTILINE)
    names = [name for name in listed if name != "--help"]
    assert names[: len(FIRST)] == [*FIRST] and len(names) == len(set(names))
    assert {verb.split()[0] for verb in VERBS} == set(names)
    assert not re.search(r"\.\.\.$", text.partition("\n")[2], re.MULTILINE) and max(map(len, text.splitlines())) <= 80


def test_misspelt_verb_suggests_the_nearest(cli):
    done = cli("convrt", "MODEL", "OUT")
    assert done.exit_code == 2
    assert "'convrt'" in done.stderr and "'convert'" in done.stderr and "Traceback" not in done.stderr


def test_misspelt_option_suggests_the_nearest(cli):
    done = cli("convert", "MODEL", "OUT", "--bugdet", "0.5")
    assert done.exit_code == 2
    assert "--bugdet" in done.stderr and "--budget" in done.stderr and "Traceback" not in done.stderr


# Recipes


@pytest.fixture
def recipe(short, tmp_path):
    """The options of `short` as a recipe, with changes."""

    def write(**changes):
        keys = {
            name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(short[::2], short[1::2], strict=True)
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**keys, **changes}))
        return path

    return write


def test_recipe_is_equivalent_to_its_options(recipe, tiny_models, cli, short, tmp_path):
    path = recipe(budget=0.75, layout="latent_rope", refit="off")
    printed(cli("convert", tiny_models["llama"], tmp_path / "out", "--recipe", path))
    same = ("--budget", 0.75, "--layout", "latent_rope", "--refit", "off")
    again = cli("convert", tiny_models["llama"], tmp_path / "out", *short, *same)
    assert printed(again) and "finished already" in again.stderr


def test_options_override_the_recipe_and_the_manifest_records_the_result(recipe, tiny_models, cli, tmp_path):
    path = recipe(budget=0.25, seed=7)
    printed(cli("convert", tiny_models["llama"], tmp_path / "out", "--recipe", path, "--budget", 0.75))
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    keys = {name.replace("-", "_"): value for name, value in yaml.safe_load(path.read_text()).items()}
    expected = dataclasses.asdict(ConvertConfig(**{**keys, "budget": 0.75}))
    # The device is recorded in the environment, and a plan among the inputs.
    del expected["device"], expected["plan"]
    expected |= {"calibration": ["calibration.txt"], "evaluation": "evaluation.txt", "layout": "latent"}
    # A tiny model's context is shorter than a selection.
    expected["dense"] = True
    assert stored == expected


def test_invalid_recipe_is_rejected_before_any_work(recipe, refused, tmp_path):
    path = recipe(bugdet=0.5)
    refused("unknown key 'bugdet'; did you mean 'budget'?", "convert", "no model", tmp_path / "out", "--recipe", path)


# Several processes of torchrun


def test_only_training_runs_on_several_processes(refused, tiny_models, monkeypatch, tmp_path):
    """`sparsify` computes its index in closed form: N processes would compute it N times."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, out = tiny_models["llama"], tmp_path / "out"
    refused("sparsify runs in one process, and torchrun started 2; only heal and draft train", "sparsify", model, out)
    refused("convert runs in one process", "convert", model, out)
    refused("vocab runs in one process", "draft", "vocab", model, "text", "--out", out)
    # The stages that train start, and then miss their inputs.
    refused("is not converted", "heal", "--teacher", model, "--student", model, "--out", out)
    refused("--text is missing", "draft", "train", model, "--out", out)
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused("does not exist", "sparsify", tmp_path / "none", out)


# Verbs


def test_plan_needs_only_a_config(tiny_models, cli, tmp_path):
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "config.json"
    bare.write_bytes((tiny_models["qwen2"] / "config.json").read_bytes())
    plan = json.loads(printed(cli("plan", bare, "--json", "--context", "1k", "--gpu", "h200")))
    assert plan == json.loads(printed(cli("plan", bare.parent, "--json", "--context", "1k", "--gpu", "h200")))
    # 3 layers of 2 KV heads of 16, keys and values.
    assert plan["rows"][0]["configuration"] == "gqa"
    assert plan["rows"][0]["cached_per_token"] == 3 * 2 * 2 * 16
    assert printed(cli("plan", bare, "--context", "1k")).startswith(("Keep the original", "Convert to"))


def test_convert_prints_perplexities_and_cache(halved, tiny_models, cli, short):
    again = printed(cli("convert", tiny_models["llama"], halved, *short, "--budget", 0.5)).split("\n")
    heads, row = (re.split(r" {2,}", line.strip()) for line in again[:2])
    shown, metrics = dict(zip(heads, row, strict=True)), json.loads((halved / "manifest.json").read_text())["metrics"]
    assert shown["layout"] == "latent" and shown["of GQA"] == "50.0 %"
    assert shown["Original ppl"] == f"{metrics['original_ppl']:.3f}"
    assert shown["MLA ppl"] == f"{metrics['mla_ppl']:.3f}"
    assert shown["ratio"] == f"{metrics['mla_ppl'] / metrics['original_ppl']:.4f}"
    assert shown["Partial RoPE ppl"] == "–"
    assert shown["cache bytes/token"] == "768 -> 384"


def test_convert_codes_rows_by_default(tiny_models, cli, short, tmp_path):
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *short)
    assert "latent, 4 bits" in printed(done) and "384 -> 96" in done.stdout and "25.0 %" in done.stdout
    assert "rows are coded: bits 4, 25% of bf16's bytes; --budget for plain ones" in done.stderr
    config = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    assert (config["bits"], config["budget"], config["layout"]) == (4.0, None, "latent")
    # An explicit --bits 4 is the same conversion.
    assert "finished already" in cli("convert", tiny_models["llama"], tmp_path / "out", *short, "--bits", 4).stderr


def test_eval_agrees_with_convert(halved, tiny_models, cli, evaluation_file, tmp_path):
    metrics = json.loads((halved / "manifest.json").read_text())["metrics"]
    more = ("--text", evaluation_file, "--seqlen", 64, "--windows", 2, "--device", "cpu")
    for model, name in ((tiny_models["llama"], "original_ppl"), (halved, "mla_ppl")):
        line = printed(cli("eval", model, tmp_path / name, *more))
        assert re.match(r"ppl ([\d.]+) ± [\d.]+ \(standard error over 2 windows, 126 tokens\)$", line)
        stored = json.loads((tmp_path / name / "manifest.json").read_text())
        assert stored["metrics"]["ppl"] == pytest.approx(metrics[name], rel=1e-5)
        assert line.startswith(f"ppl {stored['metrics']['ppl']:.4f} ")
        # A second run reads the result.
        assert printed(cli("eval", model, tmp_path / name, *more)) == line


def test_generate_compares_two_models(halved, tiny_models, cli):
    text = printed(
        cli("generate", tiny_models["llama"], "--against", halved, "--max-new-tokens", 5, "--dtype", "float32")
    )
    assert text.startswith("\n> The capital of France is\n")
    runs = re.findall(r"^\[(.+): [\d.]+ tokens/s, cache (\d+) bytes for (\d+) tokens\]$", text, re.MULTILINE)
    assert [name for name, *_ in runs] == ["llama", "out"]
    # Whole blocks of 16 tokens in fp32; 192 and 96 elements per token.
    blocks = [-(-int(tokens) // 16) for *_, tokens in runs]
    assert [int(size) for _, size, _ in runs] == [blocks[0] * 16 * 4 * 192, blocks[1] * 16 * 4 * 96]


def test_model_in_the_current_folder_has_a_name(halved, cli, monkeypatch):
    monkeypatch.chdir(halved)
    assert "\n[out: " in printed(cli("generate", ".", "--max-new-tokens", 1, "--dtype", "float32"))


def test_report_prints_its_path(halved, cli, refused, tmp_path):
    page = tmp_path / "new" / "report.html"
    assert printed(cli("report", halved.parent, "--out", page)).strip() == str(page)
    assert json.loads(page.with_suffix(".json").read_text())["conversions"][0]["name"] == "out"
    refused("does not exist", "report", tmp_path / "nowhere", "--out", page)


def test_demo_runs_all_stages_and_reuses_finished_ones(tiny_models, cli, tree, monkeypatch, tmp_path):
    monkeypatch.setattr("mlaforge.demo.model.fetch", lambda: tiny_models["llama"])
    monkeypatch.setattr("mlaforge.demo.model.head", lambda form: saved(tmp_path / form))
    more = ("--nsamples", 1, "--eval-windows", 1, "--prompt", "Hello")
    first = cli("demo", tmp_path / "demo", *more)
    # The plan and the original's answer come before the conversion, the converted model's answers after it.
    out = tmp_path / "demo" / "smollm2-latent-4-bits"
    parts = ["plan: ", "> Hello", "[llama: ", "latent, 4 bits", f"[{out.name}: ", f"[{out.name}: ", "report: ", "Next:"]
    at = 0
    for part in parts:
        at = printed(first).index(part, at) + 1
    assert first.stdout.count("> Hello") == 3
    # The drafted answer reports its tokens per step.
    assert len(re.findall(r"tokens/s, \d\.\d\d a step, cache", first.stdout)) == 1
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in first.stdout
    assert f"mlaforge chat {out}\n" in first.stdout
    files = tree(tmp_path)
    again = cli("demo", tmp_path / "demo", *more)
    assert printed(again) == first.stdout
    assert again.stderr.count("finished already") == 1
    assert tree(tmp_path) == files


def test_internal_errors_show_a_traceback_and_exit_with_1():
    code = """
import sys
import mlaforge.runtime

def broken():
    raise ZeroDivisionError("ours")

mlaforge.runtime.environment = broken
from mlaforge.cli.main import main

sys.argv = ["mlaforge", "env"]
main()
"""
    done = python(code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("ZeroDivisionError: ours\n")
    assert "mlaforge: " not in done.stderr


def test_interrupt_before_a_verb_begins():
    code = """
import mlaforge.cli.main as cli

def interrupted():
    raise KeyboardInterrupt

cli.app = interrupted
cli.main()
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (130, "mlaforge: interrupted before any work began\n")


@pytest.mark.parametrize(("word", "encoding"), [("größe/m".encode(), "ascii"), (b"gr\xf6sse/m", "utf-8")])
def test_path_that_the_locale_cannot_decode(word, encoding):
    """The error names the encoding; otherwise a library would fail later."""
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"} if encoding == "ascii" else {}
    command = [sys.executable, "-m", "mlaforge", "plan", word]
    done = subprocess.run(command, capture_output=True, env=os.environ | environment)
    assert done.returncode == 2
    assert done.stderr.decode().strip().endswith(f"is not {encoding}: set PYTHONUTF8=1, or rename the file")
