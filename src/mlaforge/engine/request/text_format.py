"""Which tool calls and reasoning the text of a model's answers has, by its chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlaforge.engine.request.detokenizer import special_tokens
from mlaforge.engine.request.reasoning import END_THINK, THINK
from mlaforge.engine.request.text_parser import TextParser
from mlaforge.engine.request.tool_call_formats import CALL_FORMATS
from mlaforge.runtime import UserError

# Values of the options; "auto" is by the chat template.
TOOL_PARSERS = ("auto", "none", *CALL_FORMATS)
REASONING_PARSERS = ("auto", "none", "think")
# Last tokens of a prompt, which show whether it ends with <think>, however that is tokenized.
PROMPT_END = 16


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """Parsers of an answer's text, by name; None: none."""

    tool_parser: str | None
    reasoning_parser: str | None

    @classmethod
    def choose(
        cls, chat_template: str | Mapping[str, str] | None, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> TextFormat:
        """Return the parsers of these names, "auto" by the chat template, or by several with names.
        Raises UserError for an unknown name."""
        for option, name, names in (
            ("tool_call_parser", tool_parser, TOOL_PARSERS), ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
        ):  # fmt: skip
            if name not in names:
                raise UserError(f"{option} = {name!r} must be one of {', '.join(names)}")
        template = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
        tools = next((name for name, call_format in CALL_FORMATS.items() if call_format.matches(template)), None)
        reasoning = "think" if THINK in template or END_THINK in template else None
        explicit = {"none": None}
        return cls(
            tools if tool_parser == "auto" else explicit.get(tool_parser, tool_parser),
            reasoning if reasoning_parser == "auto" else explicit.get(reasoning_parser, reasoning_parser),
        )

    def for_tools(self, tools: Collection[str]) -> TextFormat:
        """Return the format of answers to a request with these tools: without tools no call is parsed."""
        return self if tools else dataclasses.replace(self, tool_parser=None)

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self.tool_parser is None and self.reasoning_parser is None

    @property
    def markers(self) -> frozenset[str]:
        """The texts that structure an answer."""
        tools = () if self.tool_parser is None else CALL_FORMATS[self.tool_parser].markers
        return frozenset((*tools, *(() if self.reasoning_parser is None else (THINK, END_THINK))))

    def shows_special_tokens(self, tokenizer: Any) -> bool:
        """Whether a marker is a special token, so that answers must be decoded with skip_special_tokens=False."""
        return bool(self.markers) and not self.markers.isdisjoint(special_tokens(tokenizer).values())

    def dropped_tokens(self, tokenizer: Any) -> tuple[str, ...]:
        """Return the texts of the special tokens that are no markers, for the parser of answers decoded with them."""
        return tuple(text for text in special_tokens(tokenizer).values() if text not in self.markers)

    def parser(self, tools: Iterable[str], prompt: str, dropped: tuple[str, ...] = ()) -> TextParser:
        """Return a parser for one answer.

        tools     names of the request's tools, the only ones that can be called
        prompt    the prompt's text, or its end: the answer begins with reasoning where it ends with <think>
        dropped   special tokens whose text is dropped
        """
        return TextParser(
            tools, self.tool_parser, reasoning=self.reasoning_parser is not None,
            inside=prompt.rstrip().endswith(THINK), dropped=dropped,
        )  # fmt: skip


# All text is content.
PLAIN = TextFormat(None, None)
