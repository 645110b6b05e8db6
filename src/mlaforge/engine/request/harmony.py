"""The harmony format: conversations as tokens with channels, and back again while they are generated.

Through oss-harmony, whose vocabulary is inside the package, so that it works offline. It installs the module
`openai_harmony`, as does the package openai-harmony, which would fetch its vocabulary from the network: never both.
"""

from __future__ import annotations

import codecs
import datetime
import importlib.metadata
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.runtime import UserError, log

SPECIAL = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
# What is read of a message; the names are OpenAI's.
FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
EFFORTS = ("low", "medium", "high")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FUNCTIONS = "functions."


class MessageError(UserError):
    """A conversation that cannot be written in harmony. `field` is the path of what is wrong: messages.0.content."""

    def __init__(self, why: str, field: str) -> None:
        super().__init__(why)
        self.field = field


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether a tokenizer has harmony's special tokens."""
    return set(SPECIAL) <= set(tokenizer.get_added_vocab())


def installed() -> bool:
    """Whether oss-harmony is there. Raises UserError where openai-harmony is, which overwrites it."""
    names = {
        name
        for name in ("oss-harmony", "openai-harmony")
        if any(importlib.metadata.distributions(name=name))  # its metadata, not its module: both bring the same one
    }
    if "openai-harmony" in names:
        raise UserError("openai-harmony is installed, which needs the network; uninstall both, install oss-harmony")
    return "oss-harmony" in names


def encoding() -> Any:
    """The one encoding that the package has."""
    import openai_harmony

    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def load(tokenizer: Any) -> Harmony:
    """Harmony for this tokenizer. Raises UserError where its token ids are others than harmony's."""
    own, ids = encoding(), tokenizer.get_added_vocab()
    for token in SPECIAL:
        if (expected := own.encode(token, allowed_special="all")) != [ids.get(token)]:
            raise UserError(f"{token} is token {ids.get(token)} here, {expected[0]} in harmony; use --no-harmony")
    return Harmony(own)


def choose(tokenizer: Any, wanted: bool) -> Harmony | None:
    """Harmony where the tokenizer speaks it and it is wanted, None for the chat template. Raises UserError."""
    if not wanted or not speaks_harmony(tokenizer):
        return None
    if not installed():
        raise UserError("this model speaks harmony: pip install 'mlaforge[harmony]', or use --no-harmony")
    log("chat: harmony")
    return load(tokenizer)


class Harmony:
    """Renders conversations and makes parsers of answers."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(encoding.stop_tokens_for_assistant_actions()))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str | None = None,
    ) -> list[int]:  # fmt: skip
        """The prompt of a conversation whose next turn is the model's, as token ids.

        messages          OpenAI's, with content and the arguments of calls as text; it never becomes a special token
        tools             OpenAI's, of type function
        reasoning_effort  low, medium or high; None is harmony's own default

        What was reasoned before the last answer is left out. Raises MessageError.
        """
        import openai_harmony as oh

        system = oh.SystemContent.new().with_conversation_start_date(datetime.date.today().isoformat())
        if reasoning_effort not in (None, *EFFORTS):
            known = ", ".join(EFFORTS)
            raise MessageError(f"reasoning_effort {reasoning_effort!r} must be one of {known}", "reasoning_effort")
        if reasoning_effort is not None:
            system = system.with_reasoning_effort(oh.ReasoningEffort(reasoning_effort.capitalize()))
        turns = [(f"messages.{i}", _checked(message, f"messages.{i}")) for i, message in enumerate(messages)]
        instructions = [
            _text(turn, "content", where) or "" for where, turn in turns if turn["role"] in ("system", "developer")
        ]
        developer = oh.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        if tools:
            developer = developer.with_function_tools([oh.ToolDescription.new(*each) for each in _described(tools)])
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

    def parser(self, tools: bool = True) -> HarmonyParser:
        """For one answer. `tools` False: whoever reads it can call none, so that a call is raw text."""
        return HarmonyParser(self.encoding, tools)


def _described(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """Name, description and parameters of each tool."""
    try:
        functions = [tool["function"] for tool in tools]
        return [(str(f["name"]), f.get("description") or "", f.get("parameters")) for f in functions]
    except (TypeError, LookupError, AttributeError) as error:
        right = '{"type": "function", "function": {"name", "description", "parameters"}}'
        raise MessageError(f"tools must be a list of {right}", "tools") from error


def _checked(message: Any, where: str) -> Mapping[str, Any]:
    """A message of a known role, without fields that would be lost."""
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} must be a message of role and content, not a {type(message).__name__}", where)
    if message.get("role") not in _ROLES:
        raise MessageError(f"{where}: role {message.get('role')!r} must be one of {', '.join(_ROLES)}", f"{where}.role")
    if unknown := sorted(str(name) for name, value in message.items() if value is not None and name not in FIELDS):
        raise MessageError(
            f"{where} has {unknown[0]!r}; harmony takes {', '.join(sorted(FIELDS))}", f"{where}.{unknown[0]}"
        )
    return message


def _text(message: Mapping[str, Any], name: str, where: str) -> str | None:
    """One of a message's texts; None where it is left out."""
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise MessageError(f"{where}: {name} must be text, not a {type(value).__name__}", f"{where}.{name}")
    return value


def _messages(message: Mapping[str, Any], where: str, calls: dict[str, str]) -> list[Any]:
    """A user's, assistant's or tool's turn as harmony messages; notes and looks up the calls' ids."""
    import openai_harmony as oh

    content = _text(message, "content", where) or ""
    if message["role"] == "user":
        return [oh.Message.from_role_and_content(oh.Role.USER, content)]
    if message["role"] == "tool":
        name = calls.get(_text(message, "tool_call_id", where) or "", _text(message, "name", where))
        if name is None:
            why = f"{where}: tool_call_id names no call of an earlier message"
            raise MessageError(why, f"{where}.tool_call_id")
        author = oh.Author.new(oh.Role.TOOL, _FUNCTIONS + name)
        result = oh.Message.from_author_and_content(author, content)
        return [result.with_channel("commentary").with_recipient("assistant")]
    turn = []
    tool_calls = _calls(message, where)
    if reasoning := _text(message, "reasoning_content", where):
        turn.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, reasoning).with_channel("analysis"))
    if content:
        # Before a call it is a preamble, which belongs to commentary; else it is the answer.
        channel = "commentary" if tool_calls else "final"
        turn.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, content).with_channel(channel))
    for call_id, name, arguments in tool_calls:
        if call_id is not None:
            calls[call_id] = name
        call = oh.Message.from_role_and_content(oh.Role.ASSISTANT, arguments)
        call = call.with_channel("commentary").with_recipient(_FUNCTIONS + name)
        turn.append(call.with_content_type("<|constrain|>json"))
    return turn


def _calls(message: Mapping[str, Any], where: str) -> list[tuple[str | None, str, str]]:
    """Id, function and arguments of each call in an assistant's message."""
    read = []
    try:
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise TypeError(name, arguments)
            read.append((call.get("id"), name, arguments))
    except (TypeError, LookupError, AttributeError) as error:
        right = 'must be calls of {"id", "function": {"name", "arguments"}}, the arguments as JSON text'
        raise MessageError(f"{where}: tool_calls {right}", f"{where}.tool_calls") from error
    return read


class HarmonyParser:
    """Generated tokens as pieces of a chat message: {"content" | "reasoning_content" | "tool_calls": ...}.

    analysis is reasoning, final and commentary to nobody are content, commentary to functions.x is a call of x (where
    there are `tools`). From the first message on that is none of these or cannot be read, raw text (its special tokens
    included) is content and `failed` is set; nothing that was generated is lost but half a character at the very end of
    a cut answer.
    """

    def __init__(self, encoding: Any, tools: bool) -> None:
        import openai_harmony as oh

        self._error = oh.HarmonyError
        self._encoding = encoding
        self._tools = tools
        self._parser = oh.StreamableParser(encoding, oh.Role.ASSISTANT)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: list[int] = []  # tokens of a message of which nothing was handed out yet
        self._open = False
        self.failed = False
        self.calls = 0

    def feed(self, token_ids: list[int], finished: bool) -> dict[str, Any]:
        """What these tokens add; with `finished`, also what was held back."""
        added: dict[str, Any] = {}
        for token_id in token_ids:
            self._process(token_id, added)
        if finished and not self.failed and self._header:
            self._fail(added)
        if finished and self.failed:
            _add(added, "content", self._decoder.decode(b"", final=True))
        return added

    def _process(self, token_id: int, added: dict[str, Any]) -> None:
        if self.failed:
            _add(added, "content", self._raw(token_id))
            return
        # The end of a message belongs to nobody's text.
        self._header.append(token_id)
        try:
            self._parser.process(token_id)
        except self._error:
            self._fail(added)
            return
        state = self._parser.state.value
        if state == "Content":
            if not self._open and not self._begin(added):
                self._fail(added)
                return
            self._open, self._header = True, []
            if delta := self._parser.last_content_delta:
                self._hand_out(delta, added)
        elif state == "ExpectStart":
            self._open, self._header = False, []

    def _begin(self, added: dict[str, Any]) -> bool:
        """A message's header was read. False: it is to somebody or on a channel that we do not know."""
        channel, recipient = self._parser.current_channel, self._parser.current_recipient
        if recipient is None:
            return channel in ("analysis", "commentary", "final")
        if not self._tools or not recipient.startswith(_FUNCTIONS):
            return False
        call = {"index": self.calls, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
        call["function"] = {"name": recipient.removeprefix(_FUNCTIONS), "arguments": ""}
        added.setdefault("tool_calls", []).append(call)
        self.calls += 1
        return True

    def _hand_out(self, text: str, added: dict[str, Any]) -> None:
        if self._parser.current_recipient is None:
            reasoning = self._parser.current_channel == "analysis"
            _add(added, "reasoning_content" if reasoning else "content", text)
            return
        calls = added.setdefault("tool_calls", [])
        if not calls or calls[-1]["index"] != self.calls - 1:
            calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text

    def _fail(self, added: dict[str, Any]) -> None:
        self.failed = True
        _add(added, "content", "".join(self._raw(token_id) for token_id in self._header))
        self._header = []

    def _raw(self, token_id: int) -> str:
        try:
            text = self._encoding.decode([token_id], errors="surrogateescape")
        except self._error:
            text = "\ufffd"  # an id that the vocabulary lacks
        return self._decoder.decode(text.encode("utf-8", "surrogateescape"))


def _add(added: dict[str, Any], name: str, text: str) -> None:
    if text:
        added[name] = added.get(name, "") + text
