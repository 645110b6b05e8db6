"""A stage's options: one dataclass, filled from defaults, then a recipe file, then the command line.

Every field is declared with `option(default, help, ...)`; the command line and the documentation are made from these
declarations, so that a key means the same everywhere. What a field may hold is checked here and nowhere else, whoever
makes the object: a recipe, the command line or Python. Stages check what depends on a model or on several fields.
Imports nothing of ours but `runtime`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mlaforge.runtime import UserError

C = TypeVar("C", bound="Options")
R = TypeVar("R")
# Choices of the options that name a dtype.
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Tokens of the shortest window: of a shorter one nobody could tell whether a model was tuned on it (data/overlap.py).
SHORTEST_WINDOW = 48
# How a bound is called, and when a value is within it. NaN is within none.
BOUNDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def option(
    default: Any, help: str, unit: str = "", choices: tuple[str, ...] = (), *, least: float | None = None,
    above: float | None = None, most: float | None = None, below: float | None = None, repeat: bool = False,
) -> Any:  # fmt: skip
    """A dataclass field with what a user must know about it: its meaning, its unit, its legal values.

    A tuple's text form is its items with commas between; choices and bounds are those of each item. `repeat`: a tuple
    of text that may hold commas, such as paths, so that it is given several times instead.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    bounds = {word: bound for word, bound in bounds.items() if bound is not None}
    words = {"help": help, "unit": unit, "choices": choices, "bounds": bounds, "repeat": repeat}
    return dataclasses.field(default=default, metadata=words)


@dataclasses.dataclass(frozen=True)
class Options:
    """What all classes of options are: none of their objects holds a value that its declaration forbids.

    `first` names the options that people need first, in the order in which they are shown; the others are advanced,
    but for those that `panels` puts under a title of their own.
    Making one raises UserError for a wrong type or an illegal value. Comma lists may be given as text.
    """

    first: ClassVar[tuple[str, ...]] = ()
    panels: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        kinds = field_types(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field, kinds[field.name], getattr(self, field.name), "")
            object.__setattr__(self, field.name, value)


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def field_types(cls: type[Options]) -> dict[str, Any]:
    """Field name -> its type without `| None`."""
    plain, hints = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        plain[field.name] = arms[0] if isinstance(hint, types.UnionType) and len(arms) == 1 else hint
    return plain


# How a person calls what a field holds, and the items of a list.
WORDS: dict[Any, tuple[str, str]] = {
    float: ("a number", "numbers"), int: ("a whole number", "whole numbers"), bool: ("true or false", ""),
    str: ("text", "words"),
}  # fmt: skip


def item_type(kind: Any) -> Any:
    """Of the items of a tuple type; None for a type that is no tuple."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def within(field: dataclasses.Field[Any]) -> str:
    """`at least 1 and at most 8`, or nothing where the field has no bounds."""
    return " and ".join(f"{word} {bound}" for word, bound in field.metadata["bounds"].items())


def described(field: dataclasses.Field[Any]) -> str:
    """What a field means, with its unit and bounds in brackets."""
    limits = ", ".join(filter(None, (field.metadata["unit"], within(field))))
    return field.metadata["help"] + (f" [{limits}]" if limits else "")


def whole_number(text: str) -> int:
    """`4096` -> 4096, `32k` -> 32768, `1m` -> 1048576. Raises ValueError for other text."""
    match = re.fullmatch(r"(-?\d+)([km]?)", text.strip().lower(), re.ASCII)
    if not match:
        raise ValueError(text)
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def _typed(value: Any, kind: Any, choices: tuple[str, ...]) -> Any:
    """`value` as `kind`; what YAML takes for another type than the writer meant is put right. Raises ValueError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and (number or isinstance(value, str)):
        return float(value)  # 1 is an integer to YAML, 1e-4 is text
    if kind is str and isinstance(value, bool) and (word := "on" if value else "off") in choices:
        return word
    if kind is str and number:
        return str(value)  # --layers 2
    if not isinstance(value, kind) or (kind is int and not number):
        raise ValueError(value)
    return value


def _listed(value: Any, item: Any, field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The items of a list field, each as the type `item`. Raises ValueError."""
    split = isinstance(value, str) and not field.metadata["repeat"]
    items = value if isinstance(value, list | tuple) else value.split(",") if split else [value]
    if split:
        items = [part.strip() for part in items]
    if not field.metadata["repeat"] and (not items or "" in items):
        raise ValueError(value)
    if item is int:
        items = [whole_number(each) if isinstance(each, str) else each for each in items]
    return tuple(_typed(each, item, field.metadata["choices"]) for each in items)


def _checked(field: dataclasses.Field[Any], kind: Any, value: Any, where: str) -> Any:
    """`value` as the field's type. Raises UserError, `where` before its words, for a wrong type or illegal value."""
    name, choices, bounds = field.name, field.metadata["choices"], field.metadata["bounds"]
    if (item := item_type(kind)) is None:
        right = WORDS[kind][0]
    else:
        right = "text, or a list of it" if field.metadata["repeat"] else f"{WORDS[item][1]} with commas between"
    if value is None:
        if field.default is None:
            return None
        raise UserError(f"{where}{name} needs {right}, not nothing")
    try:
        value = _typed(value, kind, choices) if item is None else _listed(value, item, field)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}{name} = {value!r} must be {right}") from error
    for each in value if item else (value,):
        if choices and each not in choices:
            hint = nearest(str(each), choices)
            raise UserError(f"{where}{name} = {each!r} must be one of {', '.join(choices)}{hint}")
        if not all(BOUNDS[word](each, bound) for word, bound in bounds.items()):
            raise UserError(f"{where}{name} = {each!r} must be {within(field)}")
        if isinstance(each, float) and not math.isfinite(each):
            raise UserError(f"{where}{name} = {each!r} must be a finite number")
    return value


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys of a recipe file, dashes in them as underscores. Raises UserError where it is missing, not YAML, or not
    a mapping, and where a key is given twice, here or further down."""
    import yaml

    class Strict(yaml.SafeLoader):
        """YAML itself lets the last of several equal keys win."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys: set[str] = set()
            for name, _ in node.value:
                if (key := str(name.value).replace("-", "_")) in keys:
                    line = name.start_mark.line + 1
                    raise UserError(f"recipe {path}: {name.value} is given twice (line {line}); give it once")
                keys.add(key)
            return super().construct_mapping(node, deep)

    try:
        keys = yaml.load(path.read_text(encoding="utf-8"), Strict)
    except FileNotFoundError as error:
        raise UserError(f"recipe {path} does not exist") from error
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    except UserError:
        raise
    # ValueError: bytes that are no text, numbers and dates that are none.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
    fields, kinds = {field.name: field for field in dataclasses.fields(cls)}, field_types(cls)
    values: dict[str, Any] = {}
    for where, keys in (
        (f"recipe {recipe}: ", read_recipe(recipe) if recipe else {}),
        ("", {k: v for k, v in overrides.items() if v not in (None, [])}),
    ):
        for key, value in keys.items():
            # Fields whose name is a word of Python's end in an underscore; a recipe's key need not.
            key = f"{key}_" if f"{key}_" in fields else key
            if key not in fields:
                raise UserError(f"{where}unknown key {key!r}{nearest(key, fields)}")
            if where and key in values:
                raise UserError(f"{where}{key} is given twice; give it once")
            values[key] = _checked(fields[key], kinds[key], value, where)
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

    lines = [f"{f.name}: {described(f)} (default {f.default!r})" for f in dataclasses.fields(options)]
    call.__doc__ = "\n".join([inspect.getdoc(run) or "", "", "Options, by keyword:", "", *lines])
    call.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
    return call
