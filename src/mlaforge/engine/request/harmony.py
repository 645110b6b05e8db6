"""The harmony format: renders conversations as tokens with channels. harmony_parser.py parses the answers.

Uses oss-harmony, whose vocabulary is inside the package, so that it works offline. It installs the module
`openai_harmony`. So does the package openai-harmony, which would download its vocabulary: never install both.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.engine.request.conversation import MessageError, described, plain
from mlaforge.engine.request.harmony_grammar import answer_grammar, strict_tools
from mlaforge.engine.request.harmony_parser import FUNCTIONS, HarmonyParser
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, install, log

SPECIAL = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
# The fields of a message that are read; the names are OpenAI's.
FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
EFFORTS = ("low", "medium", "high")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether a tokenizer has harmony's special tokens."""
    return set(SPECIAL) <= set(tokenizer.get_added_vocab())


def installed() -> bool:
    """Whether oss-harmony is installed. Raises UserError where openai-harmony is, which overwrites it."""
    names = {
        name
        for name in ("oss-harmony", "openai-harmony")
        if any(importlib.metadata.distributions(name=name))  # by metadata: both packages install the same module
    }
    if "openai-harmony" in names:
        raise UserError("openai-harmony is installed, which needs the network; uninstall both, install oss-harmony")
    return "oss-harmony" in names


def encoding() -> Any:
    """Return the only encoding of the package."""
    import openai_harmony

    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def load(tokenizer: Any) -> Harmony:
    """Return Harmony for this tokenizer. Raises UserError where its token ids differ from harmony's."""
    harmony_encoding, ids = encoding(), tokenizer.get_added_vocab()
    for token in SPECIAL:
        if (expected := harmony_encoding.encode(token, allowed_special="all")) != [ids.get(token)]:
            raise UserError(f"{token} is token {ids.get(token)} here, {expected[0]} in harmony; use --no-harmony")
    return Harmony(harmony_encoding)


def choose(tokenizer: Any, enabled: bool) -> Harmony | None:
    """Return Harmony if it is enabled and the tokenizer has its special tokens, else None, for the chat template.
    Raises UserError."""
    if not enabled or not speaks_harmony(tokenizer):
        return None
    if not installed():
        raise UserError(f"this model speaks harmony: {install('harmony')}, or use --no-harmony")
    log("chat: harmony")
    return load(tokenizer)


class Harmony:
    """Renders conversations and creates parsers of answers."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(encoding.stop_tokens_for_assistant_actions()))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the prompt of a conversation whose next turn is the model's, as token ids.

        messages          OpenAI's: content as text or text parts, the arguments of calls as JSON text or objects; none
                          of it becomes a special token
        tools             OpenAI's, of type function
        reasoning_effort  low, medium or high; None is harmony's own default

        Leaves out the reasoning before the last answer. Raises MessageError.
        """
        import openai_harmony as oh

        system = oh.SystemContent.new().with_conversation_start_date(datetime.date.today().isoformat())
        if reasoning_effort not in (None, *EFFORTS):
            known = ", ".join(EFFORTS)
            raise MessageError(f"reasoning_effort {reasoning_effort!r} must be one of {known}", "reasoning_effort")
        if reasoning_effort is not None:
            system = system.with_reasoning_effort(oh.ReasoningEffort(reasoning_effort.capitalize()))
        fields = plain(messages, arguments_as_text=True)
        turns = [(f"messages.{i}", _checked(message, f"messages.{i}")) for i, message in enumerate(fields)]
        instructions = [turn["content"] for _, turn in turns if turn["role"] in ("system", "developer")]
        developer = oh.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        if tools:
            developer = developer.with_function_tools([oh.ToolDescription.new(*tool) for tool in described(tools)])
        rendered = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
        if instructions or tools:
            rendered.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
        calls: dict[str, str] = {}  # id of a call -> the function called
        for where, turn in turns:
            if turn["role"] not in ("system", "developer"):
                rendered += _messages(turn, where, calls)
        conversation = oh.Conversation.from_messages(rendered)
        try:
            return list(self.encoding.render_conversation_for_completion(conversation, oh.Role.ASSISTANT))
        except oh.HarmonyError as error:
            raise MessageError(f"harmony cannot render this: {str(error)[:300]}", "messages") from error

    def parser(self, tools: Sequence[Mapping[str, Any]] = (), params: SamplingParams | None = None) -> HarmonyParser:
        """Return a parser for one answer to a request with these tools, the only ones that it can call, and these
        parameters, as `adapted` returns them."""
        stops = () if params is None or params.include_stop_str_in_output else params.stop
        return HarmonyParser(self.encoding, [name for name, _, _ in described(tools)], stops)

    def adapted(self, params: SamplingParams, tools: Sequence[Mapping[str, Any]] = ()) -> SamplingParams:
        """Return parameters for an answer in harmony: it ends at harmony's stop tokens; `stop`, json_schema and regex
        apply to the final message only, and with a schema or regex the answer may call one of `tools` instead."""
        changes: dict[str, Any] = {"stop_channel": "final"}
        if not params.ignore_eos:
            changes["stop_token_ids"] = (*params.stop_token_ids, *self.stop_token_ids)
        if params.json_schema is not None or params.regex is not None:
            grammar = answer_grammar(params, strict_tools(tools))
            changes |= {"json_schema": None, "regex": None, "grammar": grammar}
        return dataclasses.replace(params, **changes)


def _checked(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a message after checking that its role is known and that no field would be lost."""
    if message["role"] not in _ROLES:
        raise MessageError(f"{where}: role {message['role']!r} must be one of {', '.join(_ROLES)}", f"{where}.role")
    if unknown := sorted(str(name) for name in message if name not in FIELDS):
        raise MessageError(
            f"{where} has {unknown[0]!r}; harmony takes {', '.join(sorted(FIELDS))}", f"{where}.{unknown[0]}"
        )
    return message


def _text(message: Mapping[str, Any], name: str, where: str) -> str | None:
    """One of a message's text fields; None where it is missing."""
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise MessageError(f"{where}: {name} must be text, not a {type(value).__name__}", f"{where}.{name}")
    return value


def _messages(message: Mapping[str, Any], where: str, calls: dict[str, str]) -> list[Any]:
    """A user's, assistant's or tool's turn as harmony messages; records and looks up the ids of calls."""
    import openai_harmony as oh

    content = message["content"]
    if message["role"] == "user":
        return [oh.Message.from_role_and_content(oh.Role.USER, content)]
    if message["role"] == "tool":
        name = calls.get(_text(message, "tool_call_id", where) or "", _text(message, "name", where))
        if name is None:
            why = f"{where}: tool_call_id names no call of an earlier message"
            raise MessageError(why, f"{where}.tool_call_id")
        author = oh.Author.new(oh.Role.TOOL, FUNCTIONS + name)
        result = oh.Message.from_author_and_content(author, content)
        return [result.with_channel("commentary").with_recipient("assistant")]
    turn = []
    tool_calls = _calls(message)
    if reasoning := _text(message, "reasoning_content", where):
        turn.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, reasoning).with_channel("analysis"))
    if content:
        # Content before a call is a preamble, in the channel commentary; otherwise it is the answer.
        channel = "commentary" if tool_calls else "final"
        turn.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, content).with_channel(channel))
    for call_id, name, arguments in tool_calls:
        if call_id is not None:
            calls[call_id] = name
        call = oh.Message.from_role_and_content(oh.Role.ASSISTANT, arguments)
        call = call.with_channel("commentary").with_recipient(FUNCTIONS + name)
        turn.append(call.with_content_type("<|constrain|>json"))
    return turn


def _calls(message: Mapping[str, Any]) -> list[tuple[str | None, str, str]]:
    """Id, function and arguments of the calls in an assistant's message."""
    calls = message.get("tool_calls", ())
    return [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
