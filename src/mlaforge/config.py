"""A stage's options: one dataclass, filled from defaults, then a recipe file, then the command line.

Every field is declared with `option(default, help, ...)`, from which the command line and the documentation are
generated. Types and bounds are checked here alone, for values from a recipe, the command line and Python. Stages check
constraints that depend on a model or on several fields. Imports only `runtime` of this package.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mlaforge.runtime import UserError

C = TypeVar("C", bound="Options")
R = TypeVar("R")
# Choices of the options that name a dtype.
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Tokens of the shortest window: below this length overlap with tuning text cannot be detected (data/overlap.py).
SHORTEST_WINDOW = 48
# Name of a bound -> the comparison of a value with it. NaN satisfies none.
BOUNDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def option(
    default: Any, help: str, unit: str = "", choices: tuple[str, ...] = (), *, least: float | None = None,
    above: float | None = None, most: float | None = None, below: float | None = None, repeat: bool = False,
    synonyms: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Declare a dataclass field with its help text, unit, choices and bounds.

    A tuple is written as text with commas between its items; choices and bounds apply to each item. `repeat`: a tuple
    of strings that may contain commas, such as paths, so that the option is repeated instead. `synonyms`: other
    programs' words for values, and the value of each.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    metadata = {"help": help, "unit": unit, "choices": choices, "bounds": bounds, "repeat": repeat}
    metadata["synonyms"] = synonyms or {}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class OtherName:
    """Another program's name of an option.

    kind      type of its value on the command line
    option    option of the same meaning, if there is one
    neutral   without an option: the value that changes nothing
    instead   without an option: what to do instead of giving another value
    expand    function from a value to the options that mean the same, if they are several; it may raise UserError
    """

    kind: type
    option: str | None = None
    neutral: Any = None
    instead: str = ""
    expand: Callable[[Any], dict[str, Any]] | None = None

    def options(self, name: str, value: Any) -> dict[str, Any]:
        """Return the options that mean the same as `name` = `value`. Raises UserError if there are none."""
        if self.expand is not None:
            return self.expand(value)
        if self.option is not None:
            return {self.option: value}
        if value != self.neutral:
            raise UserError(f"{name} = {value!r} is not supported: {self.instead}")
        return {}


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of a stage's options, validated on construction.

    `first` names the basic options, in the order in which help lists them; `panels` groups further options under a
    title; the remaining ones are advanced. `other_names` are accepted from recipes, the command line and `resolve`. The
    constructor raises UserError for a wrong type or an illegal value. Comma-separated lists may be given as text.
    """

    first: ClassVar[tuple[str, ...]] = ()
    panels: ClassVar[dict[str, tuple[str, ...]]] = {}
    other_names: ClassVar[Mapping[str, OtherName]] = {}

    def __post_init__(self) -> None:
        kinds = field_types(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field, kinds[field.name], getattr(self, field.name), "")
            object.__setattr__(self, field.name, value)


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty string if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def field_types(cls: type[Options]) -> dict[str, Any]:
    """Return the type of each field by name, without `| None`."""
    plain, hints = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        plain[field.name] = members[0] if isinstance(hint, types.UnionType) and len(members) == 1 else hint
    return plain


# Type -> its name in messages, for one value and for the items of a list.
TYPE_NAMES: dict[Any, tuple[str, str]] = {
    float: ("a number", "numbers"), int: ("a whole number", "whole numbers"), bool: ("true or false", ""),
    str: ("text", "words"),
}  # fmt: skip


def item_type(kind: Any) -> Any:
    """Return the item type of a tuple type, None for another type."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def within(field: dataclasses.Field[Any]) -> str:
    """Return the bounds of a field as `at least 1 and at most 8`, or an empty string if it has none."""
    return " and ".join(f"{name} {bound}" for name, bound in field.metadata["bounds"].items())


def described(field: dataclasses.Field[Any]) -> str:
    """Return the help text of a field, with its unit and bounds in brackets."""
    limits = ", ".join(filter(None, (field.metadata["unit"], within(field))))
    return field.metadata["help"] + (f" [{limits}]" if limits else "")


def whole_number(text: str) -> int:
    """Parse `4096` -> 4096, `32k` -> 32768, `1m` -> 1048576. Raises ValueError for other text."""
    match = re.fullmatch(r"(-?\d+)([km]?)", text.strip().lower(), re.ASCII)
    if not match:
        raise ValueError(text)
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def _typed(value: Any, kind: Any, choices: tuple[str, ...]) -> Any:
    """Return `value` as `kind`, correcting the types that YAML guesses (`on`, `1e-4`, `2`). Raises ValueError."""
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
    """Return the items of a list field, converted to the type `item`. Raises ValueError."""
    split = isinstance(value, str) and not field.metadata["repeat"]
    items = value if isinstance(value, list | tuple) else value.split(",") if split else [value]
    if split:
        items = [part.strip() for part in items]
    if not field.metadata["repeat"] and (not items or "" in items):
        raise ValueError(value)
    if item is int:
        items = [whole_number(part) if isinstance(part, str) else part for part in items]
    return tuple(_typed(part, item, field.metadata["choices"]) for part in items)


def _checked(field: dataclasses.Field[Any], kind: Any, value: Any, where: str) -> Any:
    """Return `value` as the field's type. Raises UserError, prefixed by `where`, for a wrong type or illegal value."""
    name, choices, bounds = field.name, field.metadata["choices"], field.metadata["bounds"]
    if (item := item_type(kind)) is None:
        expected = TYPE_NAMES[kind][0]
    else:
        expected = "text, or a list of it" if field.metadata["repeat"] else f"{TYPE_NAMES[item][1]} with commas between"
    if value is None:
        if field.default is None:
            return None
        raise UserError(f"{where}{name} needs {expected}, not nothing")
    value = field.metadata["synonyms"].get(str(value), value)
    try:
        value = _typed(value, kind, choices) if item is None else _listed(value, item, field)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}{name} = {value!r} must be {expected}") from error
    for element in value if item else (value,):
        if choices and element not in choices:
            hint = nearest(str(element), choices)
            raise UserError(f"{where}{name} = {element!r} must be one of {', '.join(choices)}{hint}")
        if not all(BOUNDS[bound_name](element, bound) for bound_name, bound in bounds.items()):
            raise UserError(f"{where}{name} = {element!r} must be {within(field)}")
        if isinstance(element, float) and not math.isfinite(element):
            raise UserError(f"{where}{name} = {element!r} must be a finite number")
    return value


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the keys of a recipe file, with underscores for dashes. Raises UserError if the file is missing, not YAML,
    not a mapping, or repeats a key at any depth."""
    import yaml

    class Strict(yaml.SafeLoader):
        """Loader that refuses repeated keys, of which YAML takes the last."""

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
    # ValueError: undecodable bytes, invalid numbers and dates.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        raise UserError(f"recipe {path} must hold `key: value` lines, not a {type(keys).__name__}")
    return {str(key).replace("-", "_"): value for key, value in keys.items()}


def other_names(cls: type[Options]) -> dict[str, OtherName]:
    """Return the other names of options that are no options themselves."""
    return {name: other for name, other in cls.other_names.items() if name not in cls.__dataclass_fields__}


def _renamed(cls: type[Options], keys: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys with other names replaced by options of the same meaning. Raises UserError, prefixed by `where`,
    for a value without such options, and for an option that is set twice."""
    names = other_names(cls)
    renamed = {key: value for key, value in keys.items() if key not in names}
    for name in filter(names.__contains__, keys):
        try:
            options = names[name].options(name, keys[name])
        except UserError as error:
            raise UserError(f"{where}{error}") from None
        for key, value in options.items():
            if key in renamed:
                raise UserError(f"{where}{name} sets {key}, which is given too; give one of them")
            renamed[key] = value
    return renamed


def resolve(cls: type[C], recipe: Path | None = None, **overrides: Any) -> C:
    """Return the stage's configuration: defaults <- recipe <- overrides that are not None.

    Raises UserError for an unknown key (naming the nearest), a wrong type or an illegal value.
    """
    fields, kinds = {field.name: field for field in dataclasses.fields(cls)}, field_types(cls)
    values: dict[str, Any] = {}
    for where, keys in (
        (f"recipe {recipe}: ", read_recipe(recipe) if recipe else {}),
        ("", {k: v for k, v in overrides.items() if v not in (None, [])}),
    ):
        for key, value in _renamed(cls, keys, where).items():
            # A field named like a Python keyword ends in an underscore; the recipe's key need not.
            key = f"{key}_" if f"{key}_" in fields else key
            if key not in fields:
                raise UserError(f"{where}unknown key {key!r}{nearest(key, fields)}")
            if where and key in values:
                raise UserError(f"{where}{key} is given twice; give it once")
            values[key] = _checked(fields[key], kinds[key], value, where)
    return cls(**values)


def by_keywords(run: Callable[..., R], options: type[C]) -> Callable[..., R]:
    """Wrap a stage's `run` for the public API: every option is a keyword argument, in place of one `config`.

    Directories may be strings, and optional ones may be left out. The signature and the docstring list every option.
    The wrapper raises UserError for an unknown or illegal option, TypeError for a missing argument.
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
    def call(*args: Any, **kwargs: Any) -> R:
        values = {name: kwargs.pop(name) for name in [*kwargs] if name not in names}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in folders:
            if bound.arguments[name] is not None:
                bound.arguments[name] = Path(bound.arguments[name]).expanduser()
        return run(**bound.arguments, config=resolve(options, **values))

    lines = [f"{f.name}: {described(f)} (default {f.default!r})" for f in dataclasses.fields(options)]
    call.__doc__ = "\n".join([inspect.getdoc(run) or "", "", "Options, by keyword:", "", *lines])
    call.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
    return call
