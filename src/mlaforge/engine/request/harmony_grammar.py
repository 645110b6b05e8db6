"""Grammars of answers in the harmony format, in llguidance's dialect of Lark.

The structure of channels is part of the grammar, so that a constraint on the answer leaves the reasoning free and
begins with the message that it applies to. Special tokens such as <|message|> are terminals of that dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.engine.request.harmony_parser import FUNCTIONS
from mlaforge.engine.sampling.grammar_process import WHITE_SPACE
from mlaforge.engine.sampling.params import SamplingParams

# Messages before the answer: reasoning, and preambles of calls.
_THOUGHTS = r"""
thought: <|channel|> /analysis|commentary/ <|message|> TEXT <|end|> <|start|> "assistant"
TEXT: /(.|\n)*/
"""
_FINAL = '<|channel|> "final" (" "? <|constrain|> "json")? <|message|> '
_ANY_OBJECT = {"type": "object"}


def answer_grammar(params: SamplingParams, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the grammar of an answer whose final message matches the parameters' json_schema or regex, after any
    reasoning; instead of it the answer may call one of `tools` (name -> schema of its arguments)."""
    final = _json(json.loads(params.schema_text)) if params.json_schema is not None else _regex(params.regex or "")
    calls, rules = _calls(tools)
    return f"start: thought* ({' | '.join(['final', *calls])})\nfinal: {_FINAL}{final}\n{rules}{_THOUGHTS}"


def calls_grammar(tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the grammar of an answer that is a call of one of `tools`, from its header on."""
    calls, rules = _calls(tools)
    return f"start: {' | '.join(calls)}\n{rules}"


def _calls(tools: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return the names and the text of the rules for calls."""
    rules = {}
    for index, (name, schema) in enumerate(tools.items()):
        header = json.dumps(f"commentary to={FUNCTIONS}{name} ")
        rules[f"call_{index}"] = f'<|channel|> {header} <|constrain|> "json" <|message|> {_json(schema)}'
    return list(rules), "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _json(schema: Mapping[str, Any]) -> str:
    settings = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(settings if isinstance(settings, Mapping) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _regex(pattern: str) -> str:
    """Return a regex as a terminal: slashes and line breaks, which would end it, are escaped."""
    escaped, backslash = "", False
    for character in pattern:
        character = {"\n": "n", "\r": "r"}.get(character, character) if backslash else character
        if character in "/\n\r" and not backslash:
            escaped += {"/": r"\/", "\n": r"\n", "\r": r"\r"}[character]
        else:
            escaped += character
        backslash = character == "\\" and not backslash
    return f"/{escaped}/"


def strict_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the name of each of OpenAI's tools with the schema of its arguments if it is strict, else of any
    object."""
    functions = [tool["function"] for tool in tools]
    return {f["name"]: f.get("parameters") or _ANY_OBJECT if f.get("strict") else _ANY_OBJECT for f in functions}
