"""`LLM`: the engine in one object, for a script or a notebook."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.request import chat_template, harmony
from mlaforge.engine.request.harmony import Harmony
from mlaforge.engine.request.harmony_parser import HarmonyParser
from mlaforge.engine.request.output import Completion, NonFiniteLogits, RequestOutput, merge
from mlaforge.engine.sampling.defaults import announce
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

# A text, token ids, or one of them as vLLM has it: {"prompt": ...} or {"prompt_token_ids": ...}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that continues prompts and answers conversations. Names and meanings are vLLM's where it has them.

        llm = LLM("OUT")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
            print(output.outputs[0].text)

    Options are those of EngineConfig, by name or (not and) as one `config`. A prompt is a text or a list of token ids,
    or one of them as vLLM has it, {"prompt": text} or {"prompt_token_ids": ids}; a conversation is a list of {"role",
    "content"} turns, content as text or text parts. `sampling_params` is one for all, or one for each; None
    is the model's own (generation_config.json, unless `generation_config` is "none").

    `harmony` False talks by the chat template also where the tokenizer speaks harmony. `ignored_tools`: what `tools`
    lead to where the chat template ignores them, "error" or "log". For vLLM's users `enable_prefix_caching` is another
    name of prefix_caching, and `gpu_memory_utilization` of cache_fraction. vLLM's is a share of all memory, weights
    included; ours is the cache's share of what the weights leave of the free memory.

    Several threads may use it: what they ask for runs together. Reading a stream takes part in the engine's steps.

    Raises UserError for a model that cannot be loaded, an unknown option, and a prompt that does not fit.
    """

    def __init__(
        self, model: str | Path | SourceModel, config: EngineConfig | None = None, *, harmony: bool = True,
        ignored_tools: str = "error", gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool | None = None, **options: Any,
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
        if ignored_tools not in chat_template.IGNORED_TOOLS:
            raise UserError(
                f"ignored_tools = {ignored_tools!r} must be one of {', '.join(chat_template.IGNORED_TOOLS)}"
            )
        self._ignored_tools = ignored_tools
        self._ids = itertools.count()
        # The engine and the tokenizer are for one thread at a time; several threads take turns, step by step.
        self._lock = threading.RLock()
        # Of every request that somebody reads what was made while somebody else was reading.
        self._unread: dict[str, deque[RequestOutput]] = {}

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continues all prompts together; one complete output per prompt, in their order.

        Raises NonFiniteLogits, once all are through, where the model's logits had NaN or infinity for one of them."""
        return _whole(self.stream(prompts, sampling_params))

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[RequestOutput]:
        """As `generate`, but what is new as soon as it is there, an `error` too, which is raised at the end. Leaving
        the loop aborts what is unfinished."""
        several = _prompts(prompts)
        yield from self._run(several, _each(sampling_params, len(several), "prompts", lambda: self.default_params))

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation or several together; one complete output per conversation, in their order.

        In harmony, where the tokenizer speaks it (UserError without oss-harmony), else by the model's chat template.
        In harmony `text` is the answer alone, `reasoning_content` what was thought before it and `tool_calls` the calls
        of `tools` (OpenAI's, of type function), whose results go into the next conversation as messages of role tool.
        A call of anything else, and what cannot be read, is in `text` as it is, with `harmony_parse_error`. `token_ids`
        and log probabilities are of all tokens. `reasoning_effort` is low, medium or high; None is the model's own. A
        template is given both, and its answer is text.
        """
        return _whole(self.stream_chat(messages, sampling_params, tools=tools, reasoning_effort=reasoning_effort))

    def stream_chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> Iterator[RequestOutput]:  # fmt: skip
        """As `chat`, but what is new as soon as it is there. Leaving the loop aborts what is unfinished."""
        several = _conversations(messages)
        with self._lock:
            prompts: list[str | list[int]] = [self.chat_prompt(each, tools, reasoning_effort) for each in several]
        params = _each(sampling_params, len(prompts), "conversations", lambda: self.default_params)
        spoken = self.harmony
        if spoken is None:
            yield from self._run(prompts, params)
            return
        parsers: dict[tuple[str, int], HarmonyParser] = {}
        for output in self._run(prompts, [_until_answered(each, spoken) for each in params]):
            for new in output.outputs:
                key = output.request_id, new.index
                _read(parsers.get(key) or parsers.setdefault(key, spoken.parser(tools)), new)
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
        return chat_template.render(
            self.tokenizer, messages, tools=tools, reasoning_effort=reasoning_effort, ignored_tools=self._ignored_tools
        )

    @functools.cached_property
    def default_params(self) -> SamplingParams:
        """What None stands for; a line in the log says what of it is the model's own."""
        announce(self.engine.sampling_defaults)
        return SamplingParams(**self.engine.sampling_defaults)

    @functools.cached_property
    def harmony(self) -> Harmony | None:
        """How it is talked with; None: by the chat template. Raises UserError where oss-harmony is needed."""
        return harmony.choose(self.tokenizer, self._harmony_wanted)

    def _run(self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams]) -> Iterator[RequestOutput]:
        texts: dict[str, str | None] = {}
        failed: list[RequestOutput] = []
        try:
            with self._lock:
                for prompt, sampling_params in zip(prompts, params, strict=True):
                    ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
                    request_id = f"llm-{next(self._ids)}"
                    self.engine.add(request_id, ids, sampling_params)
                    texts[request_id] = prompt if isinstance(prompt, str) else None
                    self._unread[request_id] = deque()
            unfinished = set(texts)
            while unfinished and (news := self._news(list(texts))) is not None:
                for output in news:
                    output.prompt = texts[output.request_id]
                    failed += [output] if output.non_finite else []
                    if output.finished:
                        unfinished.remove(output.request_id)
                    yield output
        finally:
            with self._lock:
                for request_id in texts:
                    self.engine.abort(request_id)
                    del self._unread[request_id]
        for output in failed:
            output.raise_for_error()

    def _news(self, request_ids: list[str]) -> list[RequestOutput] | None:
        """What was made of these requests while others read, else what a step makes of them; None where the engine has
        nothing to do any more."""
        with self._lock:
            if not any(self._unread[request_id] for request_id in request_ids):
                if not self.engine.has_work:
                    return None
                for output in self.engine.step():
                    if output.request_id in self._unread:
                        self._unread[output.request_id].append(output)
            news: list[RequestOutput] = []
            for request_id in request_ids:
                news += self._unread[request_id]
                self._unread[request_id].clear()
            return news


def _whole(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """A stream's outputs put together, in the order of their requests."""
    whole: dict[str, RequestOutput] = {}

    def in_order() -> list[RequestOutput]:
        # They are numbered in the order in which they were added.
        return sorted(whole.values(), key=lambda output: int(output.request_id.removeprefix("llm-")))

    try:
        for output in outputs:
            known = whole.get(output.request_id)
            whole[output.request_id] = output if known is None else merge(known, output)
    except NonFiniteLogits as error:
        error.outputs = in_order()
        raise
    return in_order()


def _each(
    sampling_params: Params, count: int, what: str, default: Callable[[], SamplingParams]
) -> Sequence[SamplingParams]:
    """Sampling parameters for each of `count`."""
    if not isinstance(sampling_params, Sequence):
        return [sampling_params or default()] * count
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
    new.tool_calls, new.harmony_parse_error = added.get("tool_calls", []), parser.failed
    if new.finish_reason == "stop" and parser.calls:
        new.finish_reason = "tool_calls"


_PROMPT = 'a prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def _prompts(prompts: Any) -> list[str | list[int]]:
    """One or several prompts as several, each a text or token ids. Raises UserError for what is none."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise UserError(f"a {type(prompts).__name__} is no prompt; {_PROMPT}, or give a list of prompts")
    ids = [item for item in prompts if _is_id(item)]
    if ids and len(ids) < len(prompts):
        raise UserError(f"token {ids[0]} stands among whole prompts; {_PROMPT}")
    return [ids] if ids else [_prompt(item) for item in prompts]


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        # vLLM's: the token ids count where both are given.
        fields = {name: value for name, value in prompt.items() if value is not None}
        if unknown := sorted(map(str, fields.keys() - {"prompt", "prompt_token_ids"})):
            raise UserError(f"a prompt with {unknown[0]!r} is not read; {_PROMPT}")
        if not fields:
            raise UserError(f"the prompt {{}} has no text; {_PROMPT}")
        prompt = fields.get("prompt_token_ids", fields.get("prompt"))
        if "prompt_token_ids" in fields and isinstance(prompt, str):
            raise UserError(f"prompt_token_ids is a text; {_PROMPT}")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and all(map(_is_id, prompt)):
        return list(prompt)
    odd = next((item for item in prompt if not _is_id(item)), None) if isinstance(prompt, list | tuple) else prompt
    raise UserError(f"a {type(odd).__name__} is no prompt, nor a token id; {_PROMPT}")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


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
