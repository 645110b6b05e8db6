"""`LLM`: the engine in one object, for a script or a notebook."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlaforge.config import resolve
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.request.output import RequestOutput, merge
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

Prompt = str | Sequence[int]


class LLM:
    """A model that continues prompts.

        llm = LLM("OUT")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
            print(output.outputs[0].text)

    Options are those of EngineConfig, by name or (not and) as one `config`. A prompt is a text or a list of token ids.
    Raises UserError for a model that cannot be loaded, an unknown option, and a prompt that does not fit.
    """

    def __init__(self, model: str | Path, config: EngineConfig | None = None, **options: Any):
        assert config is None or not options
        self.engine = Engine(model, config or resolve(EngineConfig, **options))
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()
        # Of every request that somebody reads what was made while somebody else was reading.
        self._unread: dict[str, deque[RequestOutput]] = {}

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continues all prompts together; one complete output per prompt, in their order."""
        whole: dict[str, RequestOutput] = {}
        order: list[str] = []
        for output in self._run(prompts, params, order):
            known = whole.get(output.request_id)
            whole[output.request_id] = output if known is None else merge(known, output)
        return [whole[request_id] for request_id in order]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """As `generate`, but what is new as soon as it is there. Leaving the loop aborts what is unfinished."""
        yield from self._run(prompts, params, [])

    def _run(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
        order: list[str],
    ) -> Iterator[RequestOutput]:  # fmt: skip
        several = _prompts(prompts)
        asked = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(asked) != len(several):
            raise UserError(f"{len(asked)} sampling parameters for {len(several)} prompts; give one, or one per prompt")
        try:
            for prompt, wanted in zip(several, asked, strict=True):
                ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
                request_id = f"llm-{next(self._ids)}"
                self.engine.add(request_id, ids, wanted)
                order.append(request_id)
                self._unread[request_id] = deque()
            unfinished = set(order)
            while unfinished and (self.engine.has_work or any(self._unread[request_id] for request_id in order)):
                for request_id in order:
                    while self._unread[request_id]:
                        output = self._unread[request_id].popleft()
                        if output.finished:
                            unfinished.remove(request_id)
                        yield output
                for output in self.engine.step() if unfinished else ():
                    if output.request_id in self._unread:
                        self._unread[output.request_id].append(output)
        finally:
            for request_id in order:
                self.engine.abort(request_id)
                del self._unread[request_id]

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """Answers a conversation of {"role", "content"} turns through the model's chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation that ends where the model's turn begins; UserError without a chat template."""
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.engine.model_name} has no chat template; use a plain prompt")
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids


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
