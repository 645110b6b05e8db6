"""The command line: what it loads, what it says of its options, and what each verb prints."""

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

from mlaforge import __version__
from mlaforge.cli.main import app
from mlaforge.cli.verb import ADVANCED, FIRST
from mlaforge.config import within
from mlaforge.conversion.config import ConvertConfig
from mlaforge.engine.config import EngineConfig
from support.eagle3_heads import saved
from support.option_classes import option_classes

# Verb, perhaps of a group ("draft import") -> the dataclass of its options, or None, as the command declares it.
VERBS = {
    f"{prefix}{command.callback.__name__.replace('_', '-')}":
    typing.get_type_hints(inspect.unwrap(command.callback)).get("config")
    for prefix, group in [("", app), *((f"{each.name} ", each.typer_instance) for each in app.registered_groups)]
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


def test_help_loads_nothing_heavy():
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
    # What several verbs share is a part of each of theirs.
    shared = {c for c in classes if any(c in other.__mro__[1:] for other in classes)}
    assert shared == {EngineConfig}
    assert classes - shared < set(VERBS.values())


@pytest.mark.parametrize("verb", [verb for verb, config in VERBS.items() if config])
def test_help_explains_every_option(verb):
    # As wide as it needs: no word is hyphenated, no line broken.
    text = printed(CliRunner().invoke(app, [*verb.split(), "--help"], terminal_width=1000))
    sections = {re.match(r"  (--[a-z0-9-]+)", part)[1]: part for part in re.split(r"\n(?=  --)", text)[1:]}
    for field in dataclasses.fields(VERBS[verb]):
        told, section = field.metadata, sections["--" + field.name.rstrip("_").replace("_", "-")]
        assert len(told["help"]) > 10 and told["help"] in section
        limits = [limit for limit in (told["unit"], within(field)) if limit]
        assert f"[{', '.join(limits)}]" in section or not limits
        default = field.default if isinstance(field.default, tuple) else (field.default,)
        assert f"(default: {','.join(map(str, default))})" in section or field.default is None
        assert all(choice in section for choice in told["choices"])
        assert set(default) <= {*told["choices"]} or field.default is None or not told["choices"]
    assert "--recipe" in sections


@pytest.mark.parametrize("verb", [verb for verb, config in VERBS.items() if config])
def test_help_begins_with_what_people_need_first(verb):
    text = printed(CliRunner().invoke(app, [*verb.split(), "--help"], terminal_width=80))
    for title, names in VERBS[verb].panels.items():
        text, _, own = text.partition(f"\n{title}:\n")
        assert {*re.findall(r"^  --([a-z0-9-]+)", own, re.MULTILINE)} == {name.replace("_", "-") for name in names}
    before, _, advanced = text.partition(f"\n{ADVANCED}:\n")
    shown, hidden = ([*re.findall(r"^  --([a-z0-9-]+)", part, re.MULTILINE)] for part in (before, advanced))
    flags = {field.name: field.name.rstrip("_").replace("_", "-") for field in dataclasses.fields(VERBS[verb])}
    first = [flags[name] for name in VERBS[verb].first]
    elsewhere = {flags[name] for names in VERBS[verb].panels.values() for name in names}
    assert set(hidden) == (set(flags.values()) - set(first) - elsewhere if first else set())
    # What the verb itself asks for stands before them, the recipe behind them.
    assert shown[-2:] == ["recipe", "help"] and "recipe" not in hidden
    assert not first or shown[-7:-2] == first
    assert max(map(len, text.splitlines())) <= 80


def test_help_lists_every_command_once_in_its_panel():
    """And in one line of 80 columns where its sentence is short enough, else wrapped, never cut off."""
    text = printed(CliRunner().invoke(app, ["--help"], terminal_width=80))
    listed = re.findall(r"^  ([a-z-]+)  ", text, re.MULTILINE)
    names = [name for name in listed if name != "--help"]
    assert names[: len(FIRST)] == [*FIRST] and len(names) == len(set(names))
    assert {verb.split()[0] for verb in VERBS} == set(names)
    assert not re.search(r"\.\.\.$", text.partition("\n")[2], re.MULTILINE) and max(map(len, text.splitlines())) <= 80


def test_a_misspelt_verb_names_the_nearest(cli):
    done = cli("convrt", "MODEL", "OUT")
    assert done.exit_code == 2
    assert "'convrt'" in done.stderr and "'convert'" in done.stderr and "Traceback" not in done.stderr


def test_a_misspelt_option_names_the_nearest(cli):
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


def test_a_recipe_is_the_same_as_its_options(recipe, tiny_models, cli, short, tmp_path):
    told = recipe(budget=0.75, layout="latent_rope", refit="off")
    printed(cli("convert", tiny_models["llama"], tmp_path / "out", "--recipe", told))
    same = ("--budget", 0.75, "--layout", "latent_rope", "--refit", "off")
    again = cli("convert", tiny_models["llama"], tmp_path / "out", *short, *same)
    assert printed(again) and "finished already" in again.stderr


def test_options_override_the_recipe_and_the_manifest_has_what_was_resolved(recipe, tiny_models, cli, tmp_path):
    told = recipe(budget=0.25, seed=7)
    printed(cli("convert", tiny_models["llama"], tmp_path / "out", "--recipe", told, "--budget", 0.75))
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    keys = {name.replace("-", "_"): value for name, value in yaml.safe_load(told.read_text()).items()}
    wanted = dataclasses.asdict(ConvertConfig(**{**keys, "budget": 0.75}))
    # Where it ran is no part of what was asked for: the environment says it; what a plan holds is among the inputs.
    del wanted["device"], wanted["plan"]
    wanted |= {"calibration": ["calibration.txt"], "evaluation": "evaluation.txt", "layout": "latent"}
    assert stored == wanted


def test_a_bad_recipe_is_refused_before_any_work(recipe, refused, tmp_path):
    told = recipe(bugdet=0.5)
    refused("unknown key 'bugdet'; did you mean 'budget'?", "convert", "no model", tmp_path / "out", "--recipe", told)


# Verbs


def test_plan_needs_only_a_config(tiny_models, cli, tmp_path):
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "config.json"
    bare.write_bytes((tiny_models["qwen2"] / "config.json").read_bytes())
    found = json.loads(printed(cli("plan", bare, "--json", "--context", "1k", "--gpu", "h200")))
    assert found == json.loads(printed(cli("plan", bare.parent, "--json", "--context", "1k", "--gpu", "h200")))
    # 3 layers of 2 KV heads of 16, keys and values.
    assert found["rows"][0]["configuration"] == "gqa"
    assert found["rows"][0]["cached_per_token"] == 3 * 2 * 2 * 16
    assert printed(cli("plan", bare, "--context", "1k")).startswith(("Keep the original", "Convert to"))


def test_convert_prints_what_it_cost(halved, tiny_models, cli, short):
    again = printed(cli("convert", tiny_models["llama"], halved, *short, "--budget", 0.5)).split("\n")
    heads, row = (re.split(r" {2,}", line.strip()) for line in again[:2])
    shown, metrics = dict(zip(heads, row, strict=True)), json.loads((halved / "manifest.json").read_text())["metrics"]
    assert shown["layout"] == "latent" and shown["of GQA"] == "50.0 %"
    assert shown["Original ppl"] == f"{metrics['original_ppl']:.3f}"
    assert shown["MLA ppl"] == f"{metrics['mla_ppl']:.3f}"
    assert shown["ratio"] == f"{metrics['mla_ppl'] / metrics['original_ppl']:.4f}"
    assert shown["Partial RoPE ppl"] == "–"
    assert shown["cache bytes/token"] == "768 -> 384"


def test_convert_codes_rows_by_itself(tiny_models, cli, short, tmp_path):
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *short)
    assert "latent, 4 bits" in printed(done) and "384 -> 96" in done.stdout and "25.0 %" in done.stdout
    assert "rows are coded: bits 4, 25% of bf16's bytes; --budget for plain ones" in done.stderr
    told = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    assert (told["bits"], told["budget"], told["layout"]) == (4.0, None, "latent")
    # Said, it is the same conversion.
    assert "finished already" in cli("convert", tiny_models["llama"], tmp_path / "out", *short, "--bits", 4).stderr


def test_eval_measures_what_convert_measured(halved, tiny_models, cli, evaluation_file, tmp_path):
    metrics = json.loads((halved / "manifest.json").read_text())["metrics"]
    more = ("--text", evaluation_file, "--seqlen", 64, "--windows", 2, "--device", "cpu")
    for model, name in ((tiny_models["llama"], "original_ppl"), (halved, "mla_ppl")):
        line = printed(cli("eval", model, tmp_path / name, *more))
        assert re.match(r"ppl ([\d.]+) ± [\d.]+ \(standard error over 2 windows, 126 tokens\)$", line)
        stored = json.loads((tmp_path / name / "manifest.json").read_text())
        assert stored["metrics"]["ppl"] == pytest.approx(metrics[name], rel=1e-5)
        assert line.startswith(f"ppl {stored['metrics']['ppl']:.4f} ")
        # A second time it is read, not measured.
        assert printed(cli("eval", model, tmp_path / name, *more)) == line


def test_generate_puts_two_models_side_by_side(halved, tiny_models, cli):
    text = printed(
        cli("generate", tiny_models["llama"], "--against", halved, "--max-new-tokens", 5, "--dtype", "float32")
    )
    assert text.startswith("\n> The capital of France is\n")
    runs = re.findall(r"^\[(.+): [\d.]+ tokens/s, cache (\d+) bytes for (\d+) tokens\]$", text, re.MULTILINE)
    assert [name for name, *_ in runs] == ["llama", "out"]
    # Whole blocks of 16 tokens in fp32; 192 and 96 numbers a token.
    blocks = [-(-int(tokens) // 16) for *_, tokens in runs]
    assert [int(size) for _, size, _ in runs] == [blocks[0] * 16 * 4 * 192, blocks[1] * 16 * 4 * 96]


def test_the_model_in_this_folder_has_a_name(halved, cli, monkeypatch):
    monkeypatch.chdir(halved)
    assert "\n[out: " in printed(cli("generate", ".", "--max-new-tokens", 1, "--dtype", "float32"))


def test_report_prints_where_it_is(halved, cli, refused, tmp_path):
    page = tmp_path / "new" / "report.html"
    assert printed(cli("report", halved.parent, "--out", page)).strip() == str(page)
    assert json.loads(page.with_suffix(".json").read_text())["conversions"][0]["name"] == "out"
    refused("does not exist", "report", tmp_path / "nowhere", "--out", page)


def test_env_prints_json(cli):
    found = json.loads(printed(cli("env")))
    assert found["mlaforge"] == __version__
    assert {"python", "torch", "transformers", "safetensors", "platform", "device"} < set(found)


def test_demo_is_the_whole_chain_and_reuses_what_is_finished(tiny_models, cli, tree, monkeypatch, tmp_path):
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
    # The drafted answer says how many tokens a step gave.
    assert len(re.findall(r"tokens/s, \d\.\d\d a step, cache", first.stdout)) == 1
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in first.stdout
    assert f"mlaforge chat {out}\n" in first.stdout
    made = tree(tmp_path)
    again = cli("demo", tmp_path / "demo", *more)
    assert printed(again) == first.stdout
    assert again.stderr.count("finished already") == 1
    assert tree(tmp_path) == made


def test_a_mistake_of_ours_is_a_traceback_and_code_1():
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


def test_an_interrupt_before_a_verb_has_begun():
    code = """
import mlaforge.cli.main as cli

def interrupted():
    raise KeyboardInterrupt

cli.app = interrupted
cli.main()
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (130, "mlaforge: interrupted; nothing had begun\n")


@pytest.mark.parametrize(("word", "encoding"), [("größe/m".encode(), "ascii"), (b"gr\xf6sse/m", "utf-8")])
def test_a_path_that_the_locale_cannot_spell(word, encoding):
    """Else a library fails on it somewhere, in words of its own."""
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"} if encoding == "ascii" else {}
    command = [sys.executable, "-m", "mlaforge", "plan", word]
    done = subprocess.run(command, capture_output=True, env=os.environ | environment)
    assert done.returncode == 2
    assert done.stderr.decode().strip().endswith(f"is not {encoding}: set PYTHONUTF8=1, or rename the file")
