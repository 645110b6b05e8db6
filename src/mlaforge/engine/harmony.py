"""The harmony format: conversations as tokens with channels, and back again while they are generated.

Through oss-harmony, whose vocabulary is inside the package, so that it works offline. It installs the module
`openai_harmony`, as does the package openai-harmony, which would fetch its vocabulary from the network: never both.
"""

from __future__ import annotations

import codecs
import datetime
import importlib.metadata
import uuid
from typing import Any

from mlaforge.runtime import UserError
from mlaforge.serving.protocol import ChatMessage, ChatRequest
from mlaforge.serving.wire import ApiError

SPECIAL = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
_FUNCTIONS = "functions."


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


def load(tokenizer: Any) -> Harmony:
    """Harmony for this tokenizer. Raises UserError where its token ids are others than harmony's."""
    import openai_harmony

    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    ids = tokenizer.get_added_vocab()
    for token in SPECIAL:
        if (expected := encoding.encode(token, allowed_special="all")) != [ids.get(token)]:
            raise UserError(f"{token} is token {ids.get(token)} here, {expected[0]} in harmony; use --no-harmony")
    return Harmony(encoding)


class Harmony:
    """Renders requests and makes parsers of answers."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(encoding.stop_tokens_for_assistant_actions()))

    def render(self, request: ChatRequest) -> list[int]:
        """The prompt of a chat request. Text of messages never becomes a special token. Raises ApiError (400)."""
        import openai_harmony as oh

        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "with harmony the answer is always a new message", "add_generation_prompt")
        if request.chat_template_kwargs:
            raise ApiError(400, "with harmony there is no chat template", "chat_template_kwargs")
        system = oh.SystemContent.new().with_conversation_start_date(datetime.date.today().isoformat())
        if request.reasoning_effort is not None:
            system = system.with_reasoning_effort(oh.ReasoningEffort(request.reasoning_effort.capitalize()))
        tools = request.tools if request.tool_choice == "auto" else []
        turns = list(enumerate(request.messages))
        told = [m.text for _, m in turns if m.role in ("system", "developer")]
        developer = oh.DeveloperContent.new()
        if told:
            developer = developer.with_instructions("\n\n".join(told))
        if tools:
            developer = developer.with_function_tools([
                oh.ToolDescription.new(t.function.name, t.function.description or "", t.function.parameters)
                for t in tools
            ])  # fmt: skip
        messages = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
        if told or tools:
            messages.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
        calls: dict[str, str] = {}  # id of a call -> the function called
        for position, message in turns:
            if message.role not in ("system", "developer"):
                messages += _messages(message, f"messages.{position}", calls)
        conversation = oh.Conversation.from_messages(messages)
        try:
            return list(self.encoding.render_conversation_for_completion(conversation, oh.Role.ASSISTANT))
        except oh.HarmonyError as error:
            raise ApiError(400, f"harmony cannot render this: {str(error)[:300]}", "messages") from error

    def parser(self) -> HarmonyParser:
        return HarmonyParser(self.encoding)


def _messages(message: ChatMessage, where: str, calls: dict[str, str]) -> list[Any]:
    """A user's, assistant's or tool's turn as harmony messages; notes and looks up the calls' ids."""
    import openai_harmony as oh

    if message.role == "user":
        return [oh.Message.from_role_and_content(oh.Role.USER, message.text)]
    if message.role == "tool":
        name = calls.get(message.tool_call_id or "", message.name)
        if name is None:
            raise ApiError(400, f"{where}: tool_call_id names no call of an earlier message", f"{where}.tool_call_id")
        author = oh.Author.new(oh.Role.TOOL, _FUNCTIONS + name)
        result = oh.Message.from_author_and_content(author, message.text)
        return [result.with_channel("commentary").with_recipient("assistant")]
    made = []
    if message.reasoning_content:
        thought = oh.Message.from_role_and_content(oh.Role.ASSISTANT, message.reasoning_content)
        made.append(thought.with_channel("analysis"))
    if message.text:
        # Before a call it is a preamble, which belongs to commentary; else it is the answer.
        channel = "commentary" if message.tool_calls else "final"
        made.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, message.text).with_channel(channel))
    for call in message.tool_calls or ():
        if call.id is not None:
            calls[call.id] = call.function.name
        asked = oh.Message.from_role_and_content(oh.Role.ASSISTANT, call.function.arguments)
        asked = asked.with_channel("commentary").with_recipient(_FUNCTIONS + call.function.name)
        made.append(asked.with_content_type("<|constrain|>json"))
    return made


class HarmonyParser:
    """Generated tokens as pieces of a chat message: {"content" | "reasoning_content" | "tool_calls": ...}.

    analysis is reasoning, final and commentary to nobody are content, commentary to functions.x is a call of x. From
    the first message on that is none of these or cannot be read, raw text (its special tokens included) is content and
    `failed` is set; nothing that was generated is lost but half a character at the very end of a cut answer.
    """

    def __init__(self, encoding: Any) -> None:
        import openai_harmony as oh

        self._error = oh.HarmonyError
        self._encoding = encoding
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
        if not recipient.startswith(_FUNCTIONS):
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
