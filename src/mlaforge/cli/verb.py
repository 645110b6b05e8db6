"""Construction of verbs (commands) from functions and the options of their stages, and code shared by verbs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mlaforge import config as configuration
from mlaforge.config import Options
from mlaforge.runtime import (
    Interrupted,
    UserError,
    disable_progress_bars,
    interrupted,
    interruptible,
    torchrun_processes,
)

# Help panel of the options that are not listed first.
ADVANCED = "Advanced options"
# Commands that `mlaforge --help` lists first, in the order of a user's work; the others are under Maintenance.
FIRST = (
    "plan", "convert", "sparsify", "serve", "chat", "generate", "eval", "heal", "draft", "diagnose", "calibrate",
    "export", "report", "publish",
)  # fmt: skip
# Longer lists of choices are moved to the help text, whose lines wrap.
MAX_METAVAR = 60

Recipe = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="YAML file with the same keys; options override it")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an earlier result of mlaforge at OUT")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="model directory, .gguf file or hub id")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="new directory")]


class Group(TyperGroup):
    """Command group whose help shows the full first sentence of each command; the root has two panels of commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        panels = {"Commands": names}
        if ctx.parent is None:
            panels = {"Commands": [*FIRST], "Maintenance": [name for name in names if name not in FIRST]}
        for title, names in panels.items():
            with formatter.section(title):
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl([(name, _sentence(command.help or "")) for name, command in commands if command])


def _sentence(help: str) -> str:
    """First sentence of a help text, without the full stop."""
    return re.split(r"[.;](?:\s|$)", " ".join(help.split()), maxsplit=1)[0]


def group(help: str) -> typer.Typer:
    """Create a group of verbs."""
    return typer.Typer(
        cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        help=help,
    )  # fmt: skip


def quiet() -> None:
    """Disable transformers' progress bars and advice, which would hide mlaforge's output."""
    disable_progress_bars()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class Command(TyperCommand):
    """Command whose help lists the advanced options in a separate section. Plain text, as Typer's boxes truncate option
    names on a terminal of 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def exit_by_verdict(
    body: dict[str, Any], table: Callable[[dict[str, Any]], str], passed: bool, json_output: bool = False
) -> None:
    """Print the table, or `body` as JSON, and exit with code 1 unless `passed`."""
    print(json.dumps(body, indent=1) if json_output else table(body))
    if not passed:
        raise typer.Exit(1)


def _flag(name: str, kind: Any) -> str:
    """Spelling of an option on the command line."""
    name = name.replace("_", "-")
    return f"--{name}/--no-{name}" if kind is bool else f"--{name}"


def _option(field: dataclasses.Field[Any], kind: Any, panel: str | None) -> Any:
    """Typer option for a stage's field. Its Typer default is None, so that a recipe's value is not overridden."""
    # The name of a field may end in an underscore to avoid a Python keyword.
    metadata, item = field.metadata, configuration.item_type(kind)
    flag = _flag(field.name.rstrip("_"), kind)
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    text = configuration.described(field) + ("" if default is None else f" (default: {default})")
    metavar = "|".join(metadata["choices"])
    if len(metavar) > MAX_METAVAR:
        text += f" (of {', '.join(metadata['choices'])})"
    if not 0 < len(metavar) <= MAX_METAVAR:
        metavar = (item or kind).__name__.upper().replace("STR", "TEXT")
    # A comma-separated list stays text until the stage's options are resolved.
    parsed = kind if item is None else list[str] if metadata["repeat"] else str
    if metadata["repeat"]:
        text += " (may be given several times)"
    elif item is not None:
        metavar, text = f"{metavar},...", f"{text} (comma-separated)"
    typer_option = typer.Option(flag, metavar=None if kind is bool else metavar, help=text, rich_help_panel=panel)
    return Annotated[parsed | None, typer_option]


def verb(
    on: typer.Typer, options: type[Options] | None = None, distributed: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command with the group `on`. options: dataclass of the stage, whose fields become options; the command
    is called with the resolved `config`. distributed: whether it runs on several processes of torchrun; other commands
    refuse them. A UserError ends with one line on stderr and exit code 2."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name != "config"]
        names: list[str] = []
        if options:
            kinds, fields = configuration.field_types(options), {f.name: f for f in dataclasses.fields(options)}
            first = options.first or tuple(fields)
            names = [*first, *(name for name in fields if name not in first)]
            for name in names:
                titles = [title for title, listed in options.panels.items() if name in listed]
                panel = titles[0] if titles else None if name in first else ADVANCED
                annotation = _option(fields[name], kinds[name], panel)
                parameters.append(keyword(name, default=None, annotation=annotation))
            for name, other in configuration.other_names(options).items():
                annotation = Annotated[other.kind | None, typer.Option(_flag(name, other.kind), hidden=True)]
                parameters.append(keyword(name, default=None, annotation=annotation))
                names.append(name)
            parameters.append(keyword("recipe", default=None, annotation=Recipe))

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            with interruptible():
                try:
                    if not distributed and (processes := torchrun_processes()) > 1:
                        raise UserError(
                            f"{wrapped.__name__} runs in one process, and torchrun started {processes}; only heal and "
                            "draft train have gradient steps to share: start it without torchrun"
                        )
                    if options:
                        recipe = arguments.pop("recipe")
                        values = {name: arguments.pop(name) for name in names}
                        arguments["config"] = configuration.resolve(options, recipe, **values)
                    command(**arguments)
                except typer.Exit:
                    raise
                except (Exception, KeyboardInterrupt) as error:
                    if interrupted(error):
                        detail = str(error) if isinstance(error, Interrupted) else "nothing half-written was left"
                        print(f"mlaforge: interrupted; {detail}", file=sys.stderr)
                        raise typer.Exit(130) from None
                    if isinstance(error, UserError):
                        print(f"mlaforge: {error}", file=sys.stderr)
                        raise typer.Exit(2) from None
                    raise

        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        # The name of a verb may end in an underscore to avoid a Python keyword.
        wrapped.__name__ = command.__name__.rstrip("_")
        return on.command(cls=Command)(wrapped)

    return register
