"""`LLM`: the engine in one object, for a script or a notebook."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.request import chat_template, harmony
from mlaforge.engine.request.harmony import Harmony, HarmonyParser
from mlaforge.engine.request.output import Completion, RequestOutput, merge
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that continues prompts and answers conversations. Names and meanings are vLLM's where it has them.

        llm = LLM("OUT")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
            print(output.outputs[0].text)

    Options are those of EngineConfig, by name or (not and) as one `config`. A prompt is a text or a list of token ids;
    a conversation is a list of {"role", "content"} turns. `sampling_params` is one for all, or one for each.

    `harmony` False talks by the chat template also where the tokenizer speaks harmony. For vLLM's users
    `enable_prefix_caching` is another name of prefix_caching, and `gpu_memory_utilization` of cache_fraction. vLLM's is
    a share of all memory, weights included; ours is the cache's share of what the weights leave of the free memory.

    Raises UserError for a model that cannot be loaded, an unknown option, and a prompt that does not fit.
    """

    def __init__(
        self, model: str | Path | SourceModel, config: EngineConfig | None = None, *, harmony: bool = True,
        gpu_memory_utilization: float | None = None, enable_prefix_caching: bool | None = None, **options: Any,
    ):  # fmt: skip
        for alias, name, value in (
            ("gpu_memory_utilization", "cache_fraction", gpu_memory_utilization),
            ("enable_prefix_caching", "prefix_caching", enable_prefix_caching),
        ):
            if value is not None:
                if config is not None or name in options:
                    raise UserError(f"{alias} is another name of {name}, which is given too; give one of them")
                options[name] = value
        if config is not None and options:
            raise UserError(f"{next(iter(options))} is given beside a config; put it into the config")
        self.engine = Engine(model, config or resolve(EngineConfig, **options))
        self.tokenizer = self.engine.tokenizer
        self._harmony_wanted = harmony
        self._ids = itertools.count()
        # Of every request that somebody reads what was made while somebody else was reading.
        self._unread: dict[str, deque[RequestOutput]] = {}

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continues all prompts together; one complete output per prompt, in their order."""
        return _whole(self.stream(prompts, sampling_params))

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[RequestOutput]:
        """As `generate`, but what is new as soon as it is there. Leaving the loop aborts what is unfinished."""
        several = _prompts(prompts)
        yield from self._run(several, _each(sampling_params, len(several), "prompts"))

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation or several together; one complete output per conversation, in their order.

        In harmony, where the tokenizer speaks it (UserError without oss-harmony), else by the model's chat template.
        In harmony `text` is the answer alone, `reasoning_content` what was thought before it and `tool_calls` the calls
        of `tools` (OpenAI's, of type function), whose results go into the next conversation as messages of role tool;
        a call where no tool was offered, and what cannot be read, are in `text` as they are. `token_ids` and log
        probabilities are of all tokens. `reasoning_effort` is low, medium or high; None is the model's own. A template
        is given both, and its answer is text.
        """
        return _whole(self.stream_chat(messages, sampling_params, tools=tools, reasoning_effort=reasoning_effort))

    def stream_chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> Iterator[RequestOutput]:  # fmt: skip
        """As `chat`, but what is new as soon as it is there. Leaving the loop aborts what is unfinished."""
        several = _conversations(messages)
        prompts: list[Prompt] = [self.chat_prompt(each, tools, reasoning_effort) for each in several]
        params = _each(sampling_params, len(prompts), "conversations")
        spoken = self.harmony
        if spoken is None:
            yield from self._run(prompts, params)
            return
        parsers: dict[tuple[str, int], HarmonyParser] = {}
        for output in self._run(prompts, [_until_answered(each, spoken) for each in params]):
            for new in output.outputs:
                key = output.request_id, new.index
                _read(parsers.get(key) or parsers.setdefault(key, spoken.parser(tools=bool(tools))), new)
            yield output

    def chat_prompt(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None
    ) -> list[int]:
        """Token ids of a conversation that ends where the model's turn begins. Raises UserError, also where the model
        has no chat template."""
        if self.harmony is not None:
            return self.harmony.render(messages, tools, reasoning_effort)
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.engine.model_name} has no chat template; use a plain prompt")
        told = {"tools": list(tools) or None, "reasoning_effort": reasoning_effort}
        return chat_template.render(self.tokenizer, messages, {name: value for name, value in told.items() if value})

    @functools.cached_property
    def harmony(self) -> Harmony | None:
        """How it is talked with; None: by the chat template. Raises UserError where oss-harmony is needed."""
        return harmony.choose(self.tokenizer, self._harmony_wanted)

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[RequestOutput]:
        texts: dict[str, str | None] = {}
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
                request_id = f"llm-{next(self._ids)}"
                self.engine.add(request_id, ids, wanted)
                texts[request_id] = prompt if isinstance(prompt, str) else None
                self._unread[request_id] = deque()
            unfinished = set(texts)
            while unfinished and (self.engine.has_work or any(self._unread[request_id] for request_id in texts)):
                for request_id, text in texts.items():
                    while self._unread[request_id]:
                        output = self._unread[request_id].popleft()
                        output.prompt = text
                        if output.finished:
                            unfinished.remove(request_id)
                        yield output
                for output in self.engine.step() if unfinished else ():
                    if output.request_id in self._unread:
                        self._unread[output.request_id].append(output)
        finally:
            for request_id in texts:
                self.engine.abort(request_id)
                del self._unread[request_id]


def _whole(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """A stream's outputs put together, in the order of their requests."""
    whole: dict[str, RequestOutput] = {}
    for output in outputs:
        known = whole.get(output.request_id)
        whole[output.request_id] = output if known is None else merge(known, output)
    # They are numbered in the order in which they were added.
    return sorted(whole.values(), key=lambda output: int(output.request_id.removeprefix("llm-")))


def _each(sampling_params: Params, count: int, what: str) -> Sequence[SamplingParams]:
    """Sampling parameters for each of `count`."""
    if not isinstance(sampling_params, Sequence):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        one = what.removesuffix("s")
        raise UserError(f"{len(sampling_params)} sampling parameters for {count} {what}; give one, or one per {one}")
    return sampling_params


def _until_answered(params: SamplingParams, spoken: Harmony) -> SamplingParams:
    """The parameters of an answer in harmony: it ends where harmony says."""
    for name in ("regex", "json_schema", "stop"):
        if getattr(params, name):
            raise UserError(f"{name} would bind harmony's channels too; use harmony=False, or say it in a message")
    stops = () if params.ignore_eos else spoken.stop_token_ids
    return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *stops))


def _read(parser: HarmonyParser, new: Completion) -> None:
    """What the new tokens say, in place of their decoded text."""
    added = parser.feed(new.token_ids, new.finish_reason is not None)
    new.text, new.reasoning_content = added.get("content", ""), added.get("reasoning_content", "")
    new.tool_calls = added.get("tool_calls", [])
    if new.finish_reason == "stop" and parser.calls:
        new.finish_reason = "tool_calls"


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    several: list[Prompt] = []
    ids: list[int] = []
    for item in prompts:
        if isinstance(item, int):
            ids.append(item)
        else:
            several.append(item)
    if several and ids:
        raise UserError(f"token {ids[0]} stands among whole prompts; a prompt is a text or a list of token ids")
    return several or ([ids] if ids else [])


def _conversations(messages: Any) -> list[Conversation]:
    """One or several conversations as several."""
    if isinstance(messages, list | tuple) and messages:
        if all(isinstance(item, Mapping) for item in messages):
            return [messages]
        if all(isinstance(item, list | tuple) for item in messages):
            return list(messages)
    raise UserError(
        'messages must be a conversation, which is a list of {"role", "content"} turns, or a list of conversations'
    )
