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
from mlaforge.engine.request.conversation import described
from mlaforge.engine.request.harmony import Harmony
from mlaforge.engine.request.harmony_parser import HarmonyParser
from mlaforge.engine.request.output import NonFiniteLogits, RequestOutput, merge
from mlaforge.engine.request.text_format import PROMPT_END, TextFormat
from mlaforge.engine.request.text_parser import TextParser
from mlaforge.engine.sampling.defaults import announce
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

# A text, token ids, or vLLM's form of either: {"prompt": ...} or {"prompt_token_ids": ...}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that continues prompts and answers conversations. Names and meanings are vLLM's where it has them.

        llm = LLM("OUT")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
            print(output.outputs[0].text)

    Options are those of EngineConfig, by mlaforge's or vLLM's name (vllm_names.py), or as one `config`, not both. A
    prompt is a text or a list of token ids, or vLLM's form of either, {"prompt": text} or {"prompt_token_ids": ids}; a
    conversation is a list of {"role", "content"} turns, content as text or text parts. `sampling_params` is one for
    all, or one per request; None uses the model's own (generation_config.json, unless `generation_config` is "none").

    `harmony` False uses the chat template even where the tokenizer has harmony's tokens. `ignored_tools`: the reaction
    to a chat template that ignores `tools`, "error" or "log". `tool_call_parser` and `reasoning_parser` name the format
    of tool calls and of reasoning in answers without harmony (TOOL_PARSERS and REASONING_PARSERS of text_format.py):
    "auto" is by the chat template, "none" leaves them in the text.

    Several threads may use it: their requests run in the same steps. Reading a stream runs the engine's steps.

    Raises UserError for a model that cannot be loaded, an unknown option, and a prompt that does not fit.
    """

    def __init__(
        self, model: str | Path | SourceModel, config: EngineConfig | None = None, *, harmony: bool = True,
        ignored_tools: str = "error", tool_call_parser: str = "auto", reasoning_parser: str = "auto", **options: Any,
    ):  # fmt: skip
        if config is not None and options:
            raise UserError(f"{next(iter(options))} is given beside a config; put it into the config")
        self.engine = Engine(model, config or resolve(EngineConfig, **options))
        self.tokenizer = self.engine.tokenizer
        self._use_harmony = harmony
        if ignored_tools not in chat_template.IGNORED_TOOLS:
            raise UserError(
                f"ignored_tools = {ignored_tools!r} must be one of {', '.join(chat_template.IGNORED_TOOLS)}"
            )
        self._ignored_tools = ignored_tools
        self._text_format = TextFormat.choose(self.tokenizer.chat_template, tool_call_parser, reasoning_parser)
        self._ids = itertools.count()
        # The engine and the tokenizer serve one thread at a time; several threads take turns, step by step.
        self._lock = threading.RLock()
        # By request: outputs of steps that another thread ran, until the request's reader takes them.
        self._unread: dict[str, deque[RequestOutput]] = {}

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continue all prompts together; return one complete output per prompt, in their order.

        Raises NonFiniteLogits, once all are finished, where the model's logits had NaN or infinity for one of them.
        """
        return _merged(self.stream(prompts, sampling_params))

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[RequestOutput]:
        """As `generate`, but yield new outputs as soon as they are there, outputs with an `error` too, which is raised
        at the end. Leaving the loop aborts unfinished requests."""
        prompt_list = _prompts(prompts)
        params = _params_per_request(sampling_params, len(prompt_list), "prompts", lambda: self.default_params)
        yield from self._run(self._requests(prompt_list, params))

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one or several conversations together; return one complete output per conversation, in their order.

        Uses harmony where the tokenizer has its tokens (UserError without oss-harmony), else the model's chat template
        and the parsers of its answers. `text` is only the answer, `reasoning_content` the reasoning before it and
        `tool_calls` the calls of `tools` (OpenAI's, of type function); the next conversation has their results as
        messages of role tool. Other calls, and parts that cannot be parsed, are in `text` as they are, with
        `harmony_parse_error` in harmony. `token_ids` and log probabilities are those of all tokens. `reasoning_effort`
        is low, medium or high; None is the model's default.
        """
        return _merged(self.stream_chat(messages, sampling_params, tools=tools, reasoning_effort=reasoning_effort))

    def stream_chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: Params = None, *,
        tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None,
    ) -> Iterator[RequestOutput]:  # fmt: skip
        """As `chat`, but yield new outputs as soon as they are there. Leaving the loop aborts unfinished requests."""
        conversations = _conversations(messages)
        with self._lock:
            prompts: list[str | list[int]] = [
                self.chat_prompt(conversation, tools, reasoning_effort) for conversation in conversations
            ]
        params = _params_per_request(sampling_params, len(prompts), "conversations", lambda: self.default_params)
        if self.harmony is None:
            yield from self._stream_text(prompts, params, [name for name, _, _ in described(tools)])
            return
        chat_format = self.harmony
        requests = self._requests(prompts, [chat_format.adapted(request_params, tools) for request_params in params])
        yield from _parsed(
            self._run(requests), lambda output: chat_format.parser(tools, requests[output.request_id][1])
        )

    def _stream_text(
        self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], tools: Sequence[str]
    ) -> Iterator[RequestOutput]:
        """As `stream`, with the text parsed for the reasoning and the calls of these tools that it has."""
        requests = self._requests(prompts, params)
        text_format = self._text_format.for_tools(tools)
        if text_format.plain:
            yield from self._run(requests)
            return
        dropped: dict[str, tuple[str, ...]] = {}
        with self._lock:
            if text_format.shows_special_tokens(self.tokenizer):
                for request_id, (prompt, request_params) in requests.items():
                    if request_params.skip_special_tokens:
                        dropped[request_id] = text_format.dropped_tokens(self.tokenizer)
                        requests[request_id] = prompt, dataclasses.replace(request_params, skip_special_tokens=False)

        def parser(output: RequestOutput) -> TextParser:
            with self._lock:
                prompt_end = self.tokenizer.decode(output.prompt_token_ids[-PROMPT_END:], skip_special_tokens=False)
            return text_format.parser(tools, prompt_end, dropped.get(output.request_id, ()))

        yield from _parsed(self._run(requests), parser)

    def chat_prompt(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] = (), reasoning_effort: str | None = None
    ) -> list[int]:
        """Return the token ids of a conversation that ends where the model's turn begins. Raises UserError, also where
        the model has no chat template."""
        if self.harmony is not None:
            return self.harmony.render(messages, tools, reasoning_effort)
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.engine.model_name} has no chat template; use a plain prompt")
        return chat_template.render(
            self.tokenizer, messages, tools=tools, reasoning_effort=reasoning_effort, ignored_tools=self._ignored_tools
        )

    @functools.cached_property
    def default_params(self) -> SamplingParams:
        """Parameters for None; a log line names those from the model's generation_config.json."""
        announce(self.engine.sampling_defaults)
        return SamplingParams(**self.engine.sampling_defaults)

    @functools.cached_property
    def harmony(self) -> Harmony | None:
        """Harmony, or None for the chat template. Raises UserError where oss-harmony is missing."""
        return harmony.choose(self.tokenizer, self._use_harmony)

    def _requests(
        self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams]
    ) -> dict[str, tuple[str | list[int], SamplingParams]]:
        """Number the requests: id -> prompt and sampling parameters."""
        return {f"llm-{next(self._ids)}": request for request in zip(prompts, params, strict=True)}

    def _run(self, requests: Mapping[str, tuple[str | list[int], SamplingParams]]) -> Iterator[RequestOutput]:
        texts: dict[str, str | None] = {}
        failed: list[RequestOutput] = []
        try:
            with self._lock:
                for request_id, (prompt, sampling_params) in requests.items():
                    ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
                    self.engine.add(request_id, ids, sampling_params)
                    texts[request_id] = prompt if isinstance(prompt, str) else None
                    self._unread[request_id] = deque()
            unfinished = set(texts)
            while unfinished and (outputs := self._next_outputs(list(texts))) is not None:
                for output in outputs:
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

    def _next_outputs(self, request_ids: list[str]) -> list[RequestOutput] | None:
        """Return outputs of these requests from steps that other threads ran, else from one new step; None where the
        engine has no work."""
        with self._lock:
            if not any(self._unread[request_id] for request_id in request_ids):
                if not self.engine.has_work:
                    return None
                for output in self.engine.step():
                    if output.request_id in self._unread:
                        self._unread[output.request_id].append(output)
            outputs: list[RequestOutput] = []
            for request_id in request_ids:
                outputs += self._unread[request_id]
                self._unread[request_id].clear()
            return outputs


def _merged(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Merge a stream's outputs per request, in the order of the requests."""
    merged: dict[str, RequestOutput] = {}

    def in_order() -> list[RequestOutput]:
        # Request ids are numbered in the order of `add`.
        return sorted(merged.values(), key=lambda output: int(output.request_id.removeprefix("llm-")))

    try:
        for output in outputs:
            earlier = merged.get(output.request_id)
            merged[output.request_id] = output if earlier is None else merge(earlier, output)
    except NonFiniteLogits as error:
        error.outputs = in_order()
        raise
    return in_order()


def _params_per_request(
    sampling_params: Params, count: int, what: str, default: Callable[[], SamplingParams]
) -> Sequence[SamplingParams]:
    """Return sampling parameters for each of `count` requests."""
    if not isinstance(sampling_params, Sequence):
        return [sampling_params or default()] * count
    if len(sampling_params) != count:
        singular = what.removesuffix("s")
        raise UserError(
            f"{len(sampling_params)} sampling parameters for {count} {what}; give one, or one per {singular}"
        )
    return sampling_params


def _parsed(
    outputs: Iterable[RequestOutput], new_parser: Callable[[RequestOutput], HarmonyParser | TextParser]
) -> Iterator[RequestOutput]:
    """Replace the decoded text of new tokens by what it means: content, reasoning and tool calls."""
    parsers: dict[tuple[str, int], HarmonyParser | TextParser] = {}
    for output in outputs:
        for completion in output.outputs:
            key = output.request_id, completion.index
            parser = parsers.get(key) or parsers.setdefault(key, new_parser(output))
            finished = completion.finish_reason is not None
            if isinstance(parser, HarmonyParser):
                added = parser.feed(completion.token_ids, finished, isinstance(completion.stop_reason, str))
            else:
                added = parser.feed(completion.text, finished)
            completion.text, completion.reasoning_content = added.get("content", ""), added.get("reasoning_content", "")
            completion.tool_calls, completion.harmony_parse_error = added.get("tool_calls", []), parser.failed
            if completion.finish_reason == "stop" and parser.calls:
                completion.finish_reason = "tool_calls"
        yield output


_PROMPT = 'a prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def _prompts(prompts: Any) -> list[str | list[int]]:
    """Return one or several prompts as a list of texts and token ids. Raises UserError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise UserError(f"a {type(prompts).__name__} is not a prompt; {_PROMPT}, or give a list of prompts")
    ids = [item for item in prompts if _is_id(item)]
    if ids and len(ids) < len(prompts):
        raise UserError(f"token {ids[0]} is in a list of prompts; {_PROMPT}")
    return [ids] if ids else [_prompt(item) for item in prompts]


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        # As in vLLM, token ids take precedence over the text.
        fields = {name: value for name, value in prompt.items() if value is not None}
        if unknown := sorted(map(str, fields.keys() - {"prompt", "prompt_token_ids"})):
            raise UserError(f"a prompt with {unknown[0]!r} is not supported; {_PROMPT}")
        if not fields:
            raise UserError(f"the prompt {{}} has no text; {_PROMPT}")
        prompt = fields.get("prompt_token_ids", fields.get("prompt"))
        if "prompt_token_ids" in fields and isinstance(prompt, str):
            raise UserError(f"prompt_token_ids is a text; {_PROMPT}")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and all(map(_is_id, prompt)):
        return list(prompt)
    wrong = next((item for item in prompt if not _is_id(item)), None) if isinstance(prompt, list | tuple) else prompt
    raise UserError(f"a {type(wrong).__name__} is neither a prompt nor a token id; {_PROMPT}")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _conversations(messages: Any) -> list[Conversation]:
    """Return one or several conversations as a list."""
    if isinstance(messages, list | tuple) and messages:
        if all(isinstance(item, Mapping) for item in messages):
            return [messages]
        if all(isinstance(item, list | tuple) for item in messages):
            return list(messages)
    raise UserError(
        'messages must be a conversation, which is a list of {"role", "content"} turns, or a list of conversations'
    )
