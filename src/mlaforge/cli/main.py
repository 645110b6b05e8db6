"""Verbs: parse options, call a stage, print its result.

Exit codes: 0 success, 1 a negative verdict or an internal error (with a traceback), 2 a user error, 130 interrupted.
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
from mlaforge.cli import answers, draft, machine
from mlaforge.cli import verb as verbs
from mlaforge.cli.piped import text_or_input
from mlaforge.cli.tables import conversion_table
from mlaforge.cli.verb import Json, Model, Out, Overwrite, exit_by_verdict, group, quiet
from mlaforge.conversion.config import EXPORTS, ConvertConfig, ExportConfig
from mlaforge.demo.config import DemoConfig, MakeGptOssConfig
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.evaluation.config import EvalConfig
from mlaforge.gpu_verification.config import VerifyGpuConfig
from mlaforge.healing.config import HealConfig
from mlaforge.planning.config import PlanConfig
from mlaforge.report.config import CardConfig
from mlaforge.runtime import UserError, forget_interrupts, install, is_first_process
from mlaforge.serving.config import ChatConfig, GenerateConfig, ServeConfig
from mlaforge.sparsity.config import SparsifyConfig
from mlaforge.tuning.config import TuneConfig

app = group("Convert grouped-query attention to multi-head latent attention, measure the cost, and serve the result.")
app.add_typer(draft.app, name="draft")
verb = functools.partial(verbs.verb, app)

# Final message of the demo.
DEMO_NEXT = """\
report: {page}
Next:
  mlaforge chat {out}
  mlaforge serve {out}
  mlaforge convert MODEL OUT --calibration TEXT    # your model, calibrated on text like your traffic
  mlaforge eval OUT --text OTHER_TEXT              # perplexity on unseen text"""
OptionalOut = Annotated[Path | None, typer.Argument(metavar="OUT", help="new directory for the result")]


@verb(PlanConfig)
def plan(model: Model, config: PlanConfig, json_output: Json = False) -> None:
    """Estimate the savings of a conversion and the physical limits; needs only a config.json."""
    from mlaforge.planning import report as stage

    report = stage.run(model, config)
    print(json.dumps(report.as_dict(), indent=1) if json_output else report.render())


@verb(DiagnoseConfig)
def diagnose(model: Model, config: DiagnoseConfig, out: OptionalOut = None, overwrite: Overwrite = False) -> None:
    """Analyse MODEL's attention on a text and estimate the loss of a conversion; OUT gets numbers, plots, a plan."""
    from mlaforge.diagnosis import diagnose as stage
    from mlaforge.diagnosis.verdicts import table

    quiet()
    print(table(stage.run(model, out, config, overwrite).metrics))
    if out is not None:
        plots = "; diagnosis.html with plots" if config.report else ""
        print(f"{out}: plan.json for `mlaforge convert --plan`{plots}")


@verb(CalibrateConfig)
def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory for the sets and their datasheet")],
    config: CalibrateConfig,
    overwrite: Overwrite = False,
) -> None:
    """Select calibration sets from text for `convert`: typical and hard passages of every cluster."""
    from mlaforge.calibration import calibrate as stage
    from mlaforge.data.corpus import CALIBRATION_SETS

    quiet()
    for name, counts in stage.run(out, config, overwrite).metrics["sets"].items():
        row = f"{counts['texts']} texts, {counts['tokens']} tokens, {counts['clusters']} clusters"
        print(f"{out / CALIBRATION_SETS[name]}: {row}")


@verb(ConvertConfig)
def convert(model: Model, out: Out, config: ConvertConfig, overwrite: Overwrite = False) -> None:
    """Convert MODEL's attention to MLA; OUT is a standard Hugging Face directory."""
    from mlaforge.conversion import convert as stage

    quiet()
    print(conversion_table([stage.run(model, out, config, overwrite)]))


@verb(SparsifyConfig)
def sparsify(model: Model, out: Out, config: SparsifyConfig, overwrite: Overwrite = False) -> None:
    """Add a token index to MODEL, original or converted, so that generated tokens read a selection of the cache."""
    from mlaforge.sparsity import sparsify as stage

    quiet()
    size = stage.run(model, out, config, overwrite).metrics["cache"]["index_bytes_per_token"]
    print(f"{out}: a generated token reads {config.topk} tokens per layer; index keys take {size} bytes per token")


@verb(HealConfig, distributed=True)
def heal(
    config: HealConfig,
    teacher: Annotated[str, typer.Option("--teacher", metavar="MODEL", help="original model")],
    student: Annotated[str, typer.Option("--student", metavar="MODEL", help="converted model")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")],
    overwrite: Overwrite = False,
) -> None:
    """Distil the original into a converted model, with rounded rows if they are coded; with torchrun on several
    processes."""
    from mlaforge.healing import heal as stage
    from mlaforge.training import distributed

    quiet()
    try:
        metrics = stage.run(teacher, student, out, config, overwrite).metrics
    finally:
        distributed.destroy_process_group()
    if not is_first_process():
        return
    first, best = metrics["curve"][0], metrics["best"]
    print(
        f"validation KL {first['kl']:.5f} -> {best['kl']:.5f}, perplexity {first['ppl']:.4f} -> {best['ppl']:.4f} "
        f"(teacher {best['teacher_ppl']:.4f}) after {best['tokens']} tokens (step {best['step']})"
    )


@verb(ExportConfig)
def export(
    format: Annotated[str, typer.Argument(metavar="|".join(EXPORTS), help="target format")],
    src: Annotated[Path, typer.Argument(metavar="SRC", help="directory that `convert` wrote")],
    out: Out,
    config: ExportConfig,
    overwrite: Overwrite = False,
) -> None:
    """Export a converted model to a standard format: deepseek is DeepseekV3ForCausalLM, without remote code."""
    from mlaforge.conversion import deepseek as stage

    if format not in EXPORTS:
        raise UserError(
            f"export format {format!r} is unknown; use {', '.join(EXPORTS)}{configuration.nearest(format, EXPORTS)}"
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
    """Measure the perplexity of MODEL, original or converted, on text it was not calibrated on, and with --teacher its
    divergence from the original; or, with --criteria, judge whether a student may replace its teacher (exit code 1 if
    not)."""
    quiet()
    if config.criteria or config.student:
        from mlaforge.evaluation import student as stage

        if model is not None and out is not None:
            raise UserError("--criteria judges --student, not MODEL; give OUT alone")
        metrics = stage.run(config, Path(model) if model else None, overwrite).metrics
        exit_by_verdict(metrics, stage.table, metrics["passed"])
        return
    from mlaforge.evaluation import perplexity

    if model is None:
        raise UserError("MODEL is missing: mlaforge eval MODEL, or --teacher, --student and --criteria")
    print(perplexity.table(perplexity.run(model, out, config, overwrite).metrics))


@verb(GenerateConfig)
def generate(model: Model, config: GenerateConfig, out: OptionalOut = None, overwrite: Overwrite = False) -> None:
    """Continue a prompt with MODEL, compared with a second model if --against is given; without --prompt, or with
    --prompt -, the prompt is read from standard input."""
    from mlaforge.serving import generate as stage

    quiet()
    config = dataclasses.replace(config, prompt=text_or_input(config.prompt, GenerateConfig.prompt))
    print(answers.continuations(stage.run(model, out, config, overwrite, answers.show_places).metrics))


@verb(ChatConfig)
def chat(model: Model, config: ChatConfig) -> None:
    """Chat with MODEL. An empty line or end of input quits; /new starts a new conversation; Ctrl-C stops an answer."""
    from mlaforge.serving.generate import Conversation

    quiet()
    conversation = Conversation(model, config)
    while message := _read_message():
        if message == "/new":
            conversation.forget()
            continue
        answer = conversation.answer(message)
        try:
            answers.show(answer)
        except KeyboardInterrupt:
            forget_interrupts()
            answer.close()
            print(" [interrupted]", end="")
        print()


def _read_message() -> str:
    """Read the user's next message; "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@verb(ServeConfig)
def serve(model: Model, config: ServeConfig) -> None:
    """Serve MODEL over HTTP with OpenAI's API: completions and chat."""
    try:
        from mlaforge.serving import server
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: {install('serve')}") from error
    from mlaforge.engine.engine import Engine

    quiet()
    # Checked before anything is loaded.
    config = server.validated(config)
    if config.verify:
        from mlaforge.checkpoint import verify as files
        from mlaforge.checkpoint.source_model import SourceModel

        files.require(SourceModel.open(model).path)
        if config.speculative not in ("none", "ngram"):
            files.require(Path(config.speculative))
    engine = Engine(model, config)
    engine.warm_up()
    server.run(engine, config)


@verb(MakeGptOssConfig)
def make_gptoss(out: Out, config: MakeGptOssConfig, overwrite: Overwrite = False) -> None:
    """Rewrite a small dense model as an equivalent GPT-OSS model; options bring it closer to the real one."""
    from mlaforge.demo import gpt_oss as stage

    quiet()
    manifest = stage.run(out, config, overwrite)
    kl = f"; KL to the source in the last steps {manifest.metrics['kl_last']:.4f}" if config.heal else ""
    kind = f"random, of {config.geometry}'s geometry" if config.geometry else f"of {config.experts} experts"
    print(f"{out}: GPT-OSS {kind} in {sum(manifest.seconds.values()):.0f} s{kl}")


@verb(DemoConfig)
def demo(
    config: DemoConfig,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the results")] = Path("runs/demo"),
) -> None:
    """Run all stages on a real model (SmolLM2-135M), in minutes on a CPU."""
    from mlaforge.demo import demo as stage

    quiet()
    formats: dict[str, Callable[[Any], str]] = {
        "plan": lambda plan: f"plan: {plan.recommendation.sentence}",
        "answer": lambda manifest: answers.continuations(manifest.metrics),
        "conversion": lambda manifest: conversion_table([manifest]),
        "report": lambda page: DEMO_NEXT.format(page=page, out=folder / stage.CONVERTED),
    }
    for name, result in stage.run(folder, config):
        print(formats[name](result), flush=True)


@verb(BenchConfig)
def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="a scenario, all, engine, draft, kernels or conversion")],
    config: BenchConfig,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="original and converted models")
    ] = None,
) -> None:
    """Benchmark MODELs against transformers and other engines; results go to a folder named by the time."""
    from mlaforge.bench import run as stage
    from mlaforge.bench.scenario import BrokenInvariant

    quiet()
    if config.sweep:
        machine.sweep(what, config)
        return
    try:
        folder, tables = stage.run(what, models or [], config)
    except BrokenInvariant as error:
        print(f"mlaforge: an invariant is broken: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{tables}\n{folder}")


@verb()
def gate(
    folder: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="folder of a run, or of runs, of which the newest is judged")
    ] = Path("results"),
    gates: Annotated[
        Path | None, typer.Option("--gates", metavar="FILE", help="gates to use instead of the shipped ones")
    ] = None,
) -> None:
    """Judge benchmark results by the gates; exit code 1 if one fails."""
    from mlaforge.bench import gate as stage

    verdicts = stage.run(folder, gates)
    exit_by_verdict(verdicts, stage.table, verdicts["passed"])


@verb()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="artifact of mlaforge, or a model directory")],
) -> None:
    """Verify every file of DIR by its recorded hash; exit code 1 if one is wrong."""
    from mlaforge.checkpoint import verify as stage

    quiet()
    verification = stage.run(directory)
    print(verification.render())
    if verification.problems:
        raise typer.Exit(1)


@verb()
def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder with artifacts, searched recursively")],
    json_output: Json = False,
) -> None:
    """List the artifacts in a folder, and which of them passed their criteria."""
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
        Path, typer.Option("--out", metavar="FILE", help="page to write; its numbers go to the same name with .json")
    ] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page on all artifacts and results in a folder."""
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
    """Write the Hugging Face model card of a converted model and a technical report of the folder, in Markdown."""
    from mlaforge.report import card as stage

    manifest = stage.run(folder, out, config, overwrite)
    print(f"{out / stage.CARD}: the card of {manifest.inputs['model']['name']}\n{out / stage.TECHNICAL}")


@verb()
def publish(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="directories that convert, heal, calibrate, draft and card wrote"),
    ],
    repo: Annotated[str, typer.Option("--repo", metavar="OWNER/NAME", help="repository on the hub")],
    push: Annotated[bool, typer.Option("--push", help="upload; without it, only list what would be uploaded")] = False,
    json_output: Json = False,
) -> None:
    """Upload a checkpoint, its draft head, calibration sets and card to the Hugging Face hub; a dry run without --push.

    The token is $HF_TOKEN or that of `hf auth login`; it is not an option, because `ps` shows options.
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
    """Measure mlaforge on this machine's GPU against predictions: kernels, engine, converted models, tests (exit code 1
    if a prediction does not hold)."""
    from mlaforge.gpu_verification import summary, supervisor

    rows = supervisor.run(out, config)
    print(summary.clipped((out / supervisor.SUMMARY).read_text(encoding="utf-8")))
    if any(row["status"] not in summary.GOOD for row in rows):
        raise typer.Exit(1)


verb()(machine.build_kernels)
verb()(machine.env)
verb(TuneConfig)(machine.tune)


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
        # Interrupted before a verb began: verbs handle interrupts themselves.
        print("mlaforge: interrupted before any work began", file=sys.stderr)
        raise SystemExit(130) from None
