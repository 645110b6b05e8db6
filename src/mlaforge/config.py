"""A stage's options: one dataclass, filled from defaults, then a recipe file, then the command line.

Every field is declared with `option(default, help, unit)`; the command line and the documentation are made
from these declarations, so that a key means the same everywhere. Imports nothing of ours but `runtime`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlaforge.runtime import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
R = TypeVar("R")
# Choices of the options that name a dtype.
DTYPES = ("auto", "float32", "bfloat16", "float16")


def option(default: Any, help: str, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with what a user must know about it: its meaning, its unit, its legal values."""
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, "choices": choices})


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def field_types(cls: type) -> dict[str, type]:
    """Field name -> its type without `| None`."""
    plain: dict[str, type] = {}
    for name, hint in typing.get_type_hints(cls).items():
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        plain[name] = arms[0] if isinstance(hint, types.UnionType) and len(arms) == 1 else hint
    return plain


# Text that an option or a recipe may give several times.
MANY = tuple[str, ...]
# How a person calls what a field holds.
WORDS: dict[Any, str] = {
    float: "a number", int: "a whole number", bool: "true or false", str: "text", MANY: "text, or a list of it",
}  # fmt: skip


def _checked(cls: type, name: str, value: Any, where: str) -> Any:
    """`value` as the field's type. What YAML takes for another type than the writer meant is put right."""
    field = {f.name: f for f in dataclasses.fields(cls)}[name]
    kind = field_types(cls)[name]
    if value is None:
        if field.default is None:
            return None
        raise UserError(f"{where}: {name} needs {WORDS[kind]}, not nothing")
    if kind == MANY:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise UserError(f"{where}: {name} = {value!r} must be {WORDS[kind]}")
        return tuple(items)
    choices = field.metadata.get("choices", ())
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):  # 1 is an integer to YAML, 1e-4 is text
            value = float(value)
    if kind is str and isinstance(value, bool) and (word := "on" if value else "off") in choices:
        value = word
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # --layers 2
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: {name} = {value!r} must be {WORDS[kind]}")
    if choices and value not in choices:
        hint = nearest(str(value), choices)
        raise UserError(f"{where}: {name} = {value!r} must be one of {', '.join(choices)}{hint}")
    return value


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys of a recipe file. Raises UserError where it is missing, not YAML, or not a mapping."""
    import yaml

    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"recipe {path} does not exist") from error
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        raise UserError(f"recipe {path} must hold `key: value` lines, not a {type(keys).__name__}")
    return {str(key).replace("-", "_"): value for key, value in keys.items()}


def resolve(cls: type[C], recipe: Path | None = None, **overrides: Any) -> C:
    """The stage's configuration: defaults <- recipe <- overrides that are not None.

    Raises UserError for an unknown key (naming the nearest), a wrong type or an illegal value.
    """
    names = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for where, given in (
        (f"recipe {recipe}", read_recipe(recipe) if recipe else {}),
        ("option", {k: v for k, v in overrides.items() if v not in (None, [])}),
    ):
        for key, value in given.items():
            # Fields whose name is a word of Python's end in an underscore; a recipe's key need not.
            key = f"{key}_" if f"{key}_" in names else key
            if key not in names:
                raise UserError(f"{where}: unknown key {key!r}{nearest(key, names)}")
            values[key] = _checked(cls, key, value, where)
    return cls(**values)


def by_keywords(run: Callable[..., R], options: type[C]) -> Callable[..., R]:
    """A stage's `run` as the public API has it: every option is a keyword, in place of one `config`.

    Directories may be text, and those that `run` does not need may be left out. The signature and the docstring name
    every option. Raises UserError for an unknown or illegal option, TypeError for a missing argument.
    """
    hints = typing.get_type_hints(run)
    plain = [parameter for name, parameter in inspect.signature(run).parameters.items() if name != "config"]
    parameters = [
        parameter.replace(default=None) if hints[parameter.name] == Path | None else parameter for parameter in plain
    ]
    names = {parameter.name for parameter in parameters}
    folders = {name for name in names if hints[name] in (Path, Path | None)}
    keywords = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in dataclasses.fields(options)
    ]
    signature = inspect.Signature(parameters)

    @functools.wraps(run)
    def call(*arguments: Any, **named: Any) -> R:
        values = {name: named.pop(name) for name in [*named] if name not in names}
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        for name in folders:
            if bound.arguments[name] is not None:
                bound.arguments[name] = Path(bound.arguments[name]).expanduser()
        return run(**bound.arguments, config=resolve(options, **values))

    lines = [
        f"{f.name}: {f.metadata['help']}{f' [{unit}]' if (unit := f.metadata['unit']) else ''} (default {f.default!r})"
        for f in dataclasses.fields(options)
    ]
    call.__doc__ = "\n".join([inspect.getdoc(run) or "", "", "Options, by keyword:", "", *lines])
    call.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
    return call
