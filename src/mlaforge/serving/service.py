"""State of a server, and the conversion of requests to replies."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlaforge.engine.request import harmony
from mlaforge.engine.request.sequence import PromptTooLong, check_prompt
from mlaforge.engine.request.text_format import TextFormat
from mlaforge.runtime import UserError
from mlaforge.serving.admission import AdmissionControl
from mlaforge.serving.async_engine import AsyncEngine
from mlaforge.serving.bodies import Bodies
from mlaforge.serving.chat import Chat
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.metrics import Metrics
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatRequest, CompletionRequest, Generation, refusal
from mlaforge.serving.replies import ChatForm, ChunkReply, Form, Prompt, Reply, TextForm
from mlaforge.serving.token_text import TokenText
from mlaforge.serving.wire import ApiError

# Bodies of maximal size that fit in memory at once: as many unfinished ones, and as many that wait for a slot.
MAX_BODIES = 16
# Grammars compiled concurrently, each in a process.
GRAMMAR_CHECKS = 16


class Service:
    """State shared by the endpoints: the engine, limits, metrics, and the conversion of requests to replies."""

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        inner = engine.engine
        self.engine, self.config = engine, config
        self.model = config.served_model_name or inner.model_name
        self.created = int(time.time())
        max_bytes = MAX_BODIES * config.max_body
        self.bodies = Bodies(config.max_body, config.client_timeout, max_bytes)
        self.admission = AdmissionControl(config.max_concurrent, config.max_queue, max_bytes)
        self.metrics = Metrics(engine, self.admission)
        self.tokens = TokenText(inner.tokenizer)
        self.prompts = Prompts(inner.tokenizer, inner.max_model_len)
        self.chat = Chat(
            inner.tokenizer,
            harmony.choose(inner.tokenizer, config.harmony),
            self.prompts,
            config.require_tool_template,
            TextFormat.choose(inner.tokenizer.chat_template, config.tool_call_parser, config.reasoning_parser),
        )
        self.grammar_pool = ThreadPoolExecutor(GRAMMAR_CHECKS, thread_name_prefix="mlaforge-grammar")

    async def check_grammar(self, form: Form) -> None:
        """Compile the request's grammar without blocking other requests. One that cannot be followed is replaced by its
        first fallback that can, with a warning. Raises ApiError (400) where there is none."""
        if not form.params.constrained:
            return
        loop, check = asyncio.get_running_loop(), self.engine.engine.check_grammar
        while True:
            try:
                await loop.run_in_executor(self.grammar_pool, check, form.params)
                return
            except UserError as error:
                if not form.fallbacks:
                    raise refusal(error) from error
                form.warnings.append(str(error))
                form.params = form.fallbacks.pop(0)

    def text_reply(self, payload: dict[str, Any]) -> Reply:
        """Parse and tokenize a completion request. Raises ApiError."""
        inner, request = self.engine.engine, CompletionRequest.read(payload)
        self.check_request(request)
        if request.max_tokens == 0 and not request.echo:
            raise ApiError(400, "max_tokens must be at least 1, or echo true", "max_tokens")
        prompts = []
        for prompt in request.prompts(self.config.max_prompts):
            if isinstance(prompt, str):
                ids = self.prompts.encode(prompt, request.add_special_tokens is not False)
                self._check_prompt(ids, request.max_tokens)
                prompts.append(Prompt(ids, prompt))
            else:
                self._check_prompt(prompt, request.max_tokens)
                echo = request.echo and inner.tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens)
                prompts.append(Prompt(prompt, echo or ""))
        scoring_only = request.max_tokens == 0
        defaults = inner.sampling_defaults
        max_tokens = defaults.get("max_tokens", 16) if request.max_tokens is None else max(request.max_tokens, 1)
        changes: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
        if request.echo and request.prompt_logprobs is None:
            changes["prompt_logprobs"] = request.logprobs
        params, *fallbacks = request.params(inner.vocab_size, defaults, request.grammars(), **changes)
        with_prompt_logprobs = request.prompt_logprobs is not None
        form = TextForm(
            self.model, prompts, params, self.tokens, request.logprobs, with_prompt_logprobs,
            request.return_tokens_as_token_ids, request.warnings, fallbacks, echo=request.echo,
            scoring_only=scoring_only,
        )  # fmt: skip
        return ChunkReply(form, request.stream, request.stream_options)

    def chat_form(self, payload: dict[str, Any]) -> tuple[ChatRequest, ChatForm]:
        """Parse and tokenize a chat request. Raises ApiError."""
        request = ChatRequest.read(payload)
        self.check_request(request)
        defaults = self.engine.engine.sampling_defaults
        limit, top_logprobs = request.limit(), request.num_top_logprobs()
        max_tokens = defaults.get("max_tokens") if limit is None else limit
        changes = {"max_tokens": max_tokens, "logprobs": top_logprobs}
        params, *fallbacks = self.chat.params(request, self.engine.engine.vocab_size, defaults, **changes)
        ids = self.chat.prompt(request)
        if self.chat.ignores_tools and request.offered_tools and request.tool_mode == "auto":
            request.warnings.append("the model's chat template ignores tools")
        self._check_prompt(ids, limit)
        with_prompt_logprobs = request.prompt_logprobs is not None
        form = ChatForm(
            self.model, [Prompt(ids)], params, self.tokens, top_logprobs, with_prompt_logprobs,
            request.return_tokens_as_token_ids, request.warnings, fallbacks,
            parser=self.chat.parser(request, params, ids),
        )  # fmt: skip
        return request, form

    def chat_reply(self, payload: dict[str, Any]) -> Reply:
        """Parse and tokenize a chat request. Raises ApiError."""
        request, form = self.chat_form(payload)
        return ChunkReply(form, request.stream, request.stream_options)

    def check_request(self, request: Generation) -> None:
        """Raises ApiError for another model than the served one, and for too many continuations."""
        self.check_model(request.model)
        if request.n > (max_n := self.config.max_n or self.config.max_num_seqs):
            raise ApiError(400, f"n = {request.n} is too large; at most {max_n}", "n")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for another model than the served one."""
        if name is not None and name != self.model:
            message = f"the model {name[:200]!r} does not exist here; use {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _check_prompt(self, token_ids: list[int], max_tokens: int | None) -> None:
        inner = self.engine.engine
        try:
            check_prompt(token_ids, inner.vocab_size, inner.max_model_len, max_tokens or 1)
        except PromptTooLong:
            raise
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error

    async def drain(self) -> None:
        """Refuse new requests with 503, wait up to `drain_timeout` for the running ones, then end them."""
        start = time.perf_counter()
        await self.admission.drain(self.config.drain_timeout)
        await self.engine.drain(max(self.config.drain_timeout - (time.perf_counter() - start), 0))

    def close(self) -> None:
        self.engine.close()
        self.chat.close()
        self.prompts.close()
        self.grammar_pool.shutdown(wait=False, cancel_futures=True)
