"""The requests of /v1/completions and /v1/chat/completions: OpenAI's fields and vLLM's extensions, strictly typed.

A field is one of: declared below; harmless and ignored (it does not affect the text of the answer); refused by name,
because ignoring it would change the meaning of the request; or unknown, which is ignored with a line in the log and a
response header, or with --strict-fields refused. null is the same as leaving a field out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema

from mlaforge.config import nearest
from mlaforge.engine.request.output import NonFiniteLogits
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving.messages import AllowedToolChoice, ChatMessage, NamedTool, Tool
from mlaforge.serving.strict import RequestModel, Strict, Whole, api_error, are_fields_strict, log_ignored
from mlaforge.serving.structured_outputs import Constraint, ResponseFormat, StructuredOutputs
from mlaforge.serving.tool_calls import ToolSchemas, calls_schema
from mlaforge.serving.wire import ApiError

# Limits of the server; SamplingParams has the ranges of the other fields.
MAX_LOGPROBS = 20
MAX_BIASES = 10_000
# OpenAI's limit; SamplingParams accepts any temperature that leaves the logits finite.
MAX_TEMPERATURE = 2.0
Count = Annotated[Whole, Field(ge=0, le=2**31 - 1)]
Logprobs = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
ToolMode = Literal["none", "auto", "required"]
StopString = Annotated[str, Field(max_length=1000)]

HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "request_id", "verbosity", "include_reasoning",
})  # fmt: skip
# Field -> (alternative, values that request nothing).
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": ("text is only continued", ("",)),
    "use_beam_search": ("there is no beam search", (False,)),
    "length_penalty": ("there is no beam search", (1, 1.0)),
    "early_stopping": ("there is no beam search", (False,)),
    "bad_words": ("use logit_bias", ([],)),
    "allowed_token_ids": ("use logit_bias or regex", ()),
    "logits_processors": ("use logit_bias", ([],)),
    "guided_choice": ("use structured_outputs.choice", ()),
    "guided_grammar": ("use structured_outputs.regex or .json", ()),
    "truncate_prompt_tokens": ("shorten the prompt", ()),
    "prompt_embeds": ("send text or token ids", ()),
    "priority": ("requests are served in order", (0,)),
    "cache_salt": ("prefixes are shared between requests", ()),
    "kv_transfer_params": ("there is one engine", ()),
    "chat_template": ("the model's own template is used", ()),
    "documents": ("put them into a message", ([],)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none", "auto")),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "web_search_options": ("there is no web search", ()),
    "background": ("answers are not stored", (False,)),
    "conversation": ("send the whole conversation in messages", ()),
    "mm_processor_kwargs": ("prompts are text", ()),
}


class StreamOptions(Strict):
    """Options of a streamed answer. `continuous_usage_stats`, vLLM's, adds the usage so far to every chunk."""

    harmless: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(RequestModel):
    """Fields that both endpoints share."""

    # Fields refused by this endpoint, beside REFUSED.
    refused: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {}

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Whole = 1
    best_of: Whole | None = None
    max_tokens: Count | None = None
    min_tokens: Whole = 0
    temperature: Annotated[float, Field(le=MAX_TEMPERATURE)] = 1.0
    top_k: Whole = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # Signed, as in OpenAI's and vLLM's APIs.
    seed: Annotated[Whole, Field(le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Whole], Field(max_length=1024)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculate: bool = True
    dense: bool = False
    spaces_between_special_tokens: Literal[True] = True
    add_special_tokens: bool | None = None
    logit_bias: dict[str, float] = Field(default_factory=dict)
    prompt_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool = False

    @classmethod
    def read(cls, payload: dict[str, Any]) -> Self:
        """Parse the request from a JSON object. Raises ApiError (400) that names the field."""
        refused = {**REFUSED, **cls.refused}
        values: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in payload.items():
            if value is None or (name in HARMLESS and name not in cls.model_fields):
                continue
            if name in refused:
                instead, neutral_values = refused[name]
                if any(value == neutral and type(value) is type(neutral) for neutral in neutral_values):
                    continue
                raise ApiError(400, f"{name} is not supported: {instead}", name, "unsupported_parameter")
            if name not in cls.model_fields:
                hint = nearest(name[:100], cls.model_fields)
                if are_fields_strict():
                    raise ApiError(400, f"unknown field {name[:100]!r}{hint}", name[:100], "unknown_parameter")
                log_ignored("the request", name)
                unknown.append(f"unknown field {name[:100]!r}{hint}")
                continue
            values[name] = value
        biases = values.get("logit_bias")
        if isinstance(biases, dict) and len(biases) > MAX_BIASES:
            raise ApiError(400, f"logit_bias names {len(biases)} tokens; at most {MAX_BIASES}", "logit_bias")
        try:
            request = cls.model_validate(values)
        except ValidationError as error:
            raise api_error(error, values) from error
        if request.best_of is not None and request.best_of != request.n:
            raise ApiError(400, "best_of other than n is not supported", "best_of", "unsupported_parameter")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options is only for stream = true", "stream_options")
        request._warnings += unknown[:10]
        return request

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer. Raises ApiError (400)."""
        constraints: list[Constraint] = []
        if self.response_format is not None and (constraint := self.response_format.constraint()) is not None:
            constraints.append(constraint)
        for name in ("regex", "guided_regex"):
            if (pattern := getattr(self, name)) is not None:
                constraints.append(Constraint(name, "regex", pattern))
        if self.guided_json is not None:
            constraints.append(Constraint("guided_json", "json_schema", self.guided_json))
        if self.structured_outputs is not None:
            constraints.append(self.structured_outputs.constraint())
        if len(constraints) > 1:
            names = " and ".join(constraint.field for constraint in constraints)
            raise ApiError(400, f"{names} exclude each other", constraints[1].field)
        return constraints[0] if constraints else None

    def grammars(self) -> list[dict[str, Any]]:
        """Return the constraint as fields of SamplingParams, and its fallbacks. Raises ApiError (400)."""
        constraint = self.constraint()
        return [{}] if constraint is None else [{constraint.kind: value} for value in constraint.candidates()]

    def params(
        self, vocab_size: int, defaults: Mapping[str, Any], grammars: list[dict[str, Any]], **changes: Any
    ) -> list[SamplingParams]:
        """Return the sampling parameters for each of `grammars`, with the model's `defaults` for unset fields. Raises
        ApiError (400)."""
        values = {
            name: getattr(self, name)
            for name in (
                "n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
                "skip_special_tokens", "prompt_logprobs", "speculate", "dense",
            )
        }  # fmt: skip
        values |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        if values.get("top_p") == 0:
            # The limit of ever smaller values.
            values |= {"top_p": 1.0, "temperature": 0.0}
        values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        try:
            candidates = [SamplingParams(**(values | grammar | changes)) for grammar in grammars]
            candidates[0].check_vocabulary(vocab_size)
        except UserError as error:
            raise refusal(error) from error
        return candidates


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, _TEXTS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS, "minItems": 1}]
}


class CompletionRequest(Generation):
    """Request of /v1/completions. `logprobs` is the number of alternatives of each token."""

    refused: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = dict.fromkeys(
        ("messages", "tools", "tool_choice"), ("it belongs to /v1/chat/completions", ())
    )

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    # Validated by `prompts`, which stops at the first error: a list may hold a million of them.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool = False
    logprobs: Logprobs | None = None

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
        """Return the prompts, each text or token ids. Raises ApiError (400), also for more than `max_prompts`."""
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            kinds = "a string, a list of strings, a list of token ids or a list of such lists"
            raise ApiError(400, f"prompt is needed: {kinds}, not empty", "prompt")
        prompts = [value] if type(value[0]) is int else value
        if len(prompts) > max_prompts:
            raise ApiError(400, f"{len(prompts)} prompts in one request; at most {max_prompts}", "prompt")
        for prompt in prompts:
            if type(prompt) is not type(prompts[0]) or not isinstance(prompt, str | list):
                raise ApiError(400, "prompt must hold strings only, token ids only, or lists of token ids", "prompt")
            if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
                raise ApiError(400, "prompt: token ids are whole numbers", "prompt")
        return prompts


class ChatRequest(Generation):
    """Request of /v1/chat/completions. `logprobs` is a switch, `top_logprobs` the number of alternatives."""

    refused: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "prompt": ("it belongs to /v1/completions", ()),
        "echo": ("it belongs to /v1/completions", (False,)),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=512, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolMode | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def tool_mode(self) -> str:
        """Whether the answer calls tools: "none", "auto", or "required" for at least one."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode
        return "required" if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes. Raises ApiError (400) if `tools` lacks one of allowed_tools."""
        if self.tool_mode == "none":
            return []
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return self.tools
        allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        if missing := sorted(allowed - {tool.function.name for tool in self.tools}):
            raise ApiError(400, f"allowed_tools names {missing[0][:100]!r}, which tools lacks", "tool_choice")
        return [tool for tool in self.tools if tool.function.name in allowed]

    @property
    def forced_tools(self) -> list[Tool] | None:
        """The tools of which the answer must call one, or None if no call is required. Raises ApiError (400) if
        `tools` has no such tool."""
        if self.tool_mode != "required":
            return None
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool for tool in self.offered_tools if name in (None, tool.function.name)]
        if not tools:
            missing = "at least one" if name is None else f"one named {name[:100]!r}"
            raise ApiError(400, f"tool_choice needs {missing} in tools", "tool_choice")
        return tools

    def forced_schemas(self) -> ToolSchemas | None:
        """Return the schemas of the calls that the answer must make, or None if no call is required. Raises ApiError
        (400)."""
        if (tools := self.forced_tools) is None:
            return None
        parameters = {tool.function.name: tool.function.parameters for tool in tools}
        return ToolSchemas(parameters, strict=any(tool.function.strict for tool in tools))

    def grammars(self) -> list[dict[str, Any]]:
        """A forced call takes precedence over response_format."""
        if (schemas := self.forced_schemas()) is None:
            return super().grammars()
        if (constraint := self.constraint()) is not None and constraint.field != "response_format":
            raise ApiError(400, f"tool_choice and {constraint.field} exclude each other", "tool_choice")
        named = isinstance(self.tool_choice, NamedTool)
        return [
            {"json_schema": next(iter(tools.values())) if named else calls_schema(tools, self.parallel_tool_calls)}
            for tools in schemas.candidates()
        ]

    def limit(self) -> int | None:
        """Return max_completion_tokens or its older name max_tokens. Raises ApiError (400) if it is 0."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit == 0:
            raise ApiError(400, "max_completion_tokens must be at least 1", "max_completion_tokens")
        return limit

    def num_top_logprobs(self) -> int | None:
        """Return the number of alternatives of each token, or None for no log probabilities. Raises ApiError (400)."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(400, f"logit_bias: {key[:20]!r} is not a token id", "logit_bias")
    return int(key)


def refusal(error: UserError) -> ApiError:
    """Return the API error of an engine error. `param` is the field at the beginning of its message, if any, with the
    index in it. Non-finite logits are a fault of the model, not of the request: status 500."""
    if isinstance(error, NonFiniteLogits):
        return ApiError(500, str(error), code="non_finite_logits")
    match = re.match(r"(\w+)(?:\[(\w+)\])?", str(error))
    field, index = match.groups() if match else ("", None)
    is_field = field in CompletionRequest.model_fields or field in ChatRequest.model_fields
    return ApiError(400, str(error), (f"{field}.{index}" if index else field) if is_field else None)
