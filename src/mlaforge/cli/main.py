"""Verbs: parse, call a stage, print. Nothing else.

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 ours (with a traceback), 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mlaforge import config as configuration
from mlaforge.bench.config import BenchConfig
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.cli import answers, draft
from mlaforge.cli import verb as verbs
from mlaforge.cli.piped import text_or_input
from mlaforge.cli.verb import Json, Model, Out, Overwrite, group, judged, quiet
from mlaforge.conversion.config import EXPORTS, ConvertConfig, ExportConfig
from mlaforge.demo.config import DemoConfig, MakeGptOssConfig
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.evaluation.config import EvalConfig
from mlaforge.gpu_verification.config import VerifyGpuConfig
from mlaforge.healing.config import HealConfig
from mlaforge.planning.config import PlanConfig
from mlaforge.rendering.table import text_table
from mlaforge.report.config import CardConfig
from mlaforge.runtime import UserError, forget_interrupts, install
from mlaforge.serving.config import ChatConfig, GenerateConfig, ServeConfig
from mlaforge.sparsity.config import SparsifyConfig

app = group("Turn a grouped-query-attention model into multi-head latent attention, prove what it cost, run it.")
app.add_typer(draft.app, name="draft")
verb = functools.partial(verbs.verb, app)

# How the demo ends.
DEMO_NEXT = """\
report: {page}
Next:
  mlaforge chat {out}
  mlaforge serve {out}
  mlaforge convert MODEL OUT --calibration TEXT    # your model, on text like your traffic
  mlaforge eval OUT --text OTHER_TEXT              # what it cost, on text that it has not seen"""
OptionalOut = Annotated[Path | None, typer.Argument(metavar="OUT", help="new directory for the result")]


@verb(PlanConfig)
def plan(model: Model, config: PlanConfig, json_output: Json = False) -> None:
    """What conversion would save and what is physically possible; needs only a config.json."""
    from mlaforge.planning import report as stage

    report = stage.run(model, config)
    print(json.dumps(report.as_dict(), indent=1) if json_output else report.render())


@verb(DiagnoseConfig)
def diagnose(model: Model, config: DiagnoseConfig, out: OptionalOut = None, overwrite: Overwrite = False) -> None:
    """What MODEL's attention does on a text, and what converting it would cost; OUT gets numbers, drawings, a plan."""
    from mlaforge.diagnosis import diagnose as stage
    from mlaforge.diagnosis.verdicts import table

    quiet()
    print(table(stage.run(model, out, config, overwrite).metrics))
    if out is not None:
        print(
            f"{out}: plan.json for `mlaforge convert --plan`" + ("; diagnosis.html to look at" if config.report else "")
        )


@verb(CalibrateConfig)
def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory for the sets and their datasheet")],
    config: CalibrateConfig,
    overwrite: Overwrite = False,
) -> None:
    """Calibration sets from text: of every cluster its typical and its hard passages, for `convert`."""
    from mlaforge.calibration import calibrate as stage
    from mlaforge.data.corpus import CALIBRATION_SETS

    quiet()
    for name, counts in stage.run(out, config, overwrite).metrics["sets"].items():
        row = f"{counts['texts']} texts, {counts['tokens']} tokens, {counts['clusters']} clusters"
        print(f"{out / CALIBRATION_SETS[name]}: {row}")


@verb(ConvertConfig)
def convert(model: Model, out: Out, config: ConvertConfig, overwrite: Overwrite = False) -> None:
    """Convert MODEL's attention to MLA; OUT is an ordinary Hugging Face directory."""
    from mlaforge.conversion import convert as stage

    quiet()
    print(conversion_table([stage.run(model, out, config, overwrite)]))


@verb(SparsifyConfig)
def sparsify(model: Model, out: Out, config: SparsifyConfig, overwrite: Overwrite = False) -> None:
    """Give MODEL, original or converted, an index of its tokens: what it generates then reads a selection of them."""
    from mlaforge.sparsity import sparsify as stage

    quiet()
    size = stage.run(model, out, config, overwrite).metrics["cache"]["index_bytes_per_token"]
    print(f"{out}: a generated token reads {config.topk} tokens a layer; index keys take {size} bytes a token")


@verb(HealConfig)
def heal(
    config: HealConfig,
    teacher: Annotated[str, typer.Option("--teacher", metavar="MODEL", help="the original")],
    student: Annotated[str, typer.Option("--student", metavar="MODEL", help="what `convert` made of it")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")],
    overwrite: Overwrite = False,
) -> None:
    """Distil the original into a converted model, a coded one with its rows rounded as it is served; under torchrun
    over many processes."""
    from mlaforge.healing import heal as stage
    from mlaforge.training import distributed

    quiet()
    try:
        metrics = stage.run(teacher, student, out, config, overwrite).metrics
    finally:
        distributed.destroy_process_group()
    first, best = metrics["curve"][0], metrics["best"]
    print(
        f"validation KL {first['kl']:.5f} -> {best['kl']:.5f}, perplexity {first['ppl']:.4f} -> {best['ppl']:.4f} "
        f"(teacher {best['teacher_ppl']:.4f}) after {best['tokens']} tokens (step {best['step']})"
    )


@verb(ExportConfig)
def export(
    format: Annotated[str, typer.Argument(metavar="|".join(EXPORTS), help="what to write SRC as")],
    src: Annotated[Path, typer.Argument(metavar="SRC", help="directory that `convert` wrote")],
    out: Out,
    config: ExportConfig,
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a converted model in a stock format: deepseek is DeepseekV3ForCausalLM, without remote code."""
    from mlaforge.conversion import deepseek as stage

    if format not in EXPORTS:
        raise UserError(
            f"export format {format!r} is not known; use {', '.join(EXPORTS)}{configuration.nearest(format, EXPORTS)}"
        )
    quiet()
    model = stage.run(src, out, config, overwrite).metrics["model"]
    biases = "with" if model["attention_bias"] else "without"
    row = f"a latent of {model['kv_lora_rank']} and a rotary key of {model['qk_rope_head_dim']}"
    print(f"{out}: DeepseekV3ForCausalLM, {row} per token and layer, {biases} attention biases")


@verb(EvalConfig)
def eval(
    config: EvalConfig,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="model directory, .gguf file or hub id")] = None,
    out: OptionalOut = None,
    overwrite: Overwrite = False,
) -> None:
    """Perplexity of MODEL, original or converted, on text it was not calibrated on; or, with --criteria, whether a
    student may stand for its teacher (exit code 1 where not)."""
    quiet()
    if config.criteria or config.teacher or config.student:
        from mlaforge.evaluation import student as stage

        if model is not None and out is not None:
            raise UserError("--criteria judges --student, not MODEL; give OUT alone")
        metrics = stage.run(config, Path(model) if model else None, overwrite).metrics
        judged(metrics, stage.table, metrics["passed"])
        return
    from mlaforge.evaluation import perplexity

    if model is None:
        raise UserError("MODEL is missing: mlaforge eval MODEL, or --teacher, --student and --criteria")
    metrics = perplexity.run(model, out, config, overwrite).metrics
    error = "" if metrics["nll_stderr"] is None else f" ± {metrics['ppl'] * metrics['nll_stderr']:.4f}"
    windows = f"standard error over {metrics['windows']} windows, {metrics['tokens']} tokens"
    print(f"ppl {metrics['ppl']:.4f}{error} ({windows})")


@verb(GenerateConfig)
def generate(model: Model, config: GenerateConfig, out: OptionalOut = None, overwrite: Overwrite = False) -> None:
    """Continue a prompt with MODEL, beside a second model if --against is given; without --prompt, or with --prompt -,
    what is piped in."""
    from mlaforge.serving import generate as stage

    quiet()
    config = dataclasses.replace(config, prompt=text_or_input(config.prompt, GenerateConfig.prompt))
    print(answers.continuations(stage.run(model, out, config, overwrite).metrics))


@verb(ChatConfig)
def chat(model: Model, config: ChatConfig) -> None:
    """Talk with MODEL. An empty line or end of input ends it; /new begins anew; Ctrl-C breaks an answer off."""
    from mlaforge.serving.generate import Conversation

    quiet()
    conversation = Conversation(model, config)
    while message := _ask():
        if message == "/new":
            conversation.forget()
            continue
        answer = conversation.answer(message)
        try:
            answers.show(answer)
        except KeyboardInterrupt:
            forget_interrupts()
            answer.close()
            print(" [broken off]", end="")
        print()


def _ask() -> str:
    """The user's next turn; nothing at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@verb(ServeConfig)
def serve(model: Model, config: ServeConfig) -> None:
    """Serve MODEL over HTTP as OpenAI's API does: completions and chat."""
    try:
        from mlaforge.serving import server
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: {install('serve')}") from error
    from mlaforge.engine.engine import Engine

    quiet()
    # Before anything is loaded.
    config = server.checked(config)
    if config.verify:
        from mlaforge.checkpoint import verify as files
        from mlaforge.checkpoint.source_model import SourceModel

        files.require(SourceModel.open(model).path)
        if config.speculative not in ("none", "ngram"):
            files.require(Path(config.speculative))
    server.run(Engine(model, config), config)


@verb(MakeGptOssConfig)
def make_gptoss(out: Out, config: MakeGptOssConfig, overwrite: Overwrite = False) -> None:
    """Rewrite a small dense model as a GPT-OSS one that computes the same; options bring it closer to the real one."""
    from mlaforge.demo import gpt_oss as stage

    quiet()
    manifest = stage.run(out, config, overwrite)
    kl = f"; KL to the source in the last steps {manifest.metrics['kl_last']:.4f}" if config.heal else ""
    what = f"random, of {config.geometry}'s geometry" if config.geometry else f"of {config.experts} experts"
    print(f"{out}: GPT-OSS {what} in {sum(manifest.seconds.values()):.0f} s{kl}")


@verb(DemoConfig)
def demo(
    config: DemoConfig,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where results go")] = Path("runs/demo"),
) -> None:
    """The whole chain on a real model (SmolLM2-135M), in minutes on a CPU."""
    from mlaforge.demo import demo as stage

    quiet()
    shown: dict[str, Callable[[Any], str]] = {
        "plan": lambda plan: f"plan: {plan.chosen.sentence}",
        "answer": lambda manifest: answers.continuations(manifest.metrics),
        "conversion": lambda manifest: conversion_table([manifest]),
        "report": lambda page: DEMO_NEXT.format(page=page, out=folder / stage.CONVERTED),
    }
    for part, what in stage.run(folder, config):
        print(shown[part](what), flush=True)


@verb(BenchConfig)
def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="a scenario, all, engine, draft, kernels or conversion")],
    config: BenchConfig,
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL...", help="original and converted ones")] = None,
) -> None:
    """Measure MODELs beside transformers and other engines; a folder of results named by the time."""
    from mlaforge.bench import run as stage
    from mlaforge.bench.scenario import BrokenInvariant

    quiet()
    try:
        folder, tables = stage.run(what, models or [], config)
    except BrokenInvariant as error:
        print(f"mlaforge: an invariant is broken: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{tables}\n{folder}")


@verb()
def gate(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS", help="a run's folder, or the newest in it")] = Path(
        "results"
    ),
    gates: Annotated[Path | None, typer.Option("--gates", metavar="FILE", help="other gates than the shipped")] = None,
) -> None:
    """Judge measured results by the gates; exit code 1 where one fails."""
    from mlaforge.bench import gate as stage

    verdicts = stage.run(folder, gates)
    judged(verdicts, stage.table, verdicts["passed"])


@verb()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="what mlaforge wrote, or a model directory")],
) -> None:
    """Whether DIR still holds what was written into it, every file by its hash; exit code 1 where one is wrong."""
    from mlaforge.checkpoint import verify as stage

    quiet()
    verification = stage.run(directory)
    print(verification.render())
    if verification.problems:
        raise typer.Exit(1)


@verb()
def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder with artifacts, searched through")],
    json_output: Json = False,
) -> None:
    """The artifacts in a folder, and which of them passed their criteria."""
    from mlaforge.artifact import artifacts_below

    rows = [
        {"name": name, "stage": m.stage, "canonical": m.canonical, "seconds": round(sum(m.seconds.values()), 1)}
        for name, m in artifacts_below(folder).items()
        if m is not None
    ]
    if json_output:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']}  {row['stage']}  {row['seconds']:g} s{'  canonical' if row['canonical'] else ''}")


@verb()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder with artifacts and results")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="page to write; the numbers go beside it as .json")
    ] = Path("report.html"),
) -> None:
    """One self-contained HTML page from all artifacts and results in a folder."""
    from mlaforge.report.report import write_report

    write_report(folder, out)
    print(out)


@verb(CardConfig)
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder with artifacts and results")],
    config: CardConfig,
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")],
    overwrite: Overwrite = False,
) -> None:
    """The Hugging Face model card of a converted model, and a technical report of the whole folder, in Markdown."""
    from mlaforge.report import card as stage

    manifest = stage.run(folder, out, config, overwrite)
    print(f"{out / stage.CARD}: the card of {manifest.inputs['model']['name']}\n{out / stage.TECHNICAL}")


@verb()
def publish(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="what convert, heal, calibrate, draft and card wrote")
    ],
    repo: Annotated[str, typer.Option("--repo", metavar="OWNER/NAME", help="repository of the hub")],
    push: Annotated[bool, typer.Option("--push", help="send it; without this, only show what would go")] = False,
    json_output: Json = False,
) -> None:
    """Push a checkpoint, its draft, calibration sets and card to the Hugging Face hub; shown only, unless --push.

    The token is $HF_TOKEN, or that of `hf auth login`; it is no option, because options are seen by `ps`.
    """
    from mlaforge.report import publish as stage

    upload = stage.pack(folders, repo)
    print(json.dumps(upload.describe(), indent=1) if json_output else stage.table(upload))
    if push:
        print(stage.push(upload))


@verb(VerifyGpuConfig)
def verify_gpu(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="directory for at most 8 files: summary.md, ...")],
    config: VerifyGpuConfig,
) -> None:
    """Measure this machine's GPU with mlaforge against predictions: kernels, engine, converted models, tests (exit code
    1 where a case is not as predicted)."""
    from mlaforge.gpu_verification import summary, supervisor

    rows = supervisor.run(out, config)
    print(summary.clipped((out / supervisor.SUMMARY).read_text(encoding="utf-8")))
    if any(row["status"] not in summary.GOOD for row in rows):
        raise typer.Exit(1)


@verb()
def env() -> None:
    """Versions and devices, as recorded in every manifest."""
    from mlaforge.runtime import environment

    print(json.dumps(environment(), indent=1))


def conversion_table(manifests: list[Any]) -> str:
    """One line per conversion: perplexities and cache."""
    heads = ("layout", "Original ppl", "Partial RoPE ppl", "MLA ppl", "ratio", "cache bytes/token", "of GQA")
    rows: list[tuple[str, ...]] = [heads]
    for manifest in manifests:
        metrics, cache = manifest.metrics, manifest.metrics["cache"]
        ppl = [f"{metrics[k]:.3f}" if metrics.get(k) else "–" for k in ("original_ppl", "partial_rope_ppl", "mla_ppl")]
        ratio = f"{metrics['ratio']:.4f}" if "ratio" in metrics else "–"
        layouts = {layer["layout"] for layer in metrics["layers"]}
        numbers = f"{cache['gqa_bytes_per_token']} -> {cache['mla_bytes_per_token']}"
        bits = f", {manifest.config['bits']:g} bits" if manifest.config.get("bits") else ""
        rows.append((" + ".join(sorted(layouts)) + bits, *ppl, ratio, numbers, f"{100 * cache['fraction']:.1f} %"))
    return text_table(rows, ">")


def main() -> None:
    """Entry point of the `mlaforge` command."""
    for word in sys.argv[1:]:
        if any("\ud800" <= character <= "\udfff" for character in word):
            encoding, shown = sys.getfilesystemencoding(), word.encode(errors="replace").decode()
            print(f"mlaforge: {shown} is not {encoding}: set PYTHONUTF8=1, or rename the file", file=sys.stderr)
            raise SystemExit(2)
    try:
        app()
    except KeyboardInterrupt:
        # It came before a verb had begun: verbs end by themselves.
        print("mlaforge: interrupted; nothing had begun", file=sys.stderr)
        raise SystemExit(130) from None
