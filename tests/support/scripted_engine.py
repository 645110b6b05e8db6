"""An engine without a model: the server's interface, deterministic tokens and scripted failures.

Only the tokens are scripted: token t of continuation c of a prompt is a function of the prompt, c and t alone
(`expected`). Prompts are checked, decoded and ended by the engine's own code. One token per sequence and step; every
16 tokens of a sequence hold a block until it ends.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.engine.request.sequence import check_prompt
from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.stats import EngineStats
from mlaforge.runtime import UserError

BLOCK = 16
WORDS = "the quick brown fox jumps over the lazy dög 漢字 🙂 and "


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    from support.tiny_models import save_tokenizer

    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@dataclasses.dataclass
class Sequence:
    """A continuation: its tokens so far, and where it stops."""

    index: int
    stopping: Stopping
    token_ids: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Running:
    """A request and its continuations."""

    prompt: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    started: bool = False

    def __len__(self) -> int:
        return len(self.sequences)


class ScriptedEngine:
    """`delay`: seconds per step; `fail_after`: number of steps; `hold`: event that each step waits for."""

    max_model_len = 512
    model_name = "scripted"
    sampling_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, tokenizer: Any, delay: float = 0.0, script: list[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.delay, self.script = delay, script
        self.fail_after: int | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.began = threading.Event()
        self.running: dict[str, Running] = {}
        self.counts = dict.fromkeys(
            ("steps", "prompt_tokens", "generated_tokens", "finished_requests", "aborted_requests"), 0
        )

    def expected(self, prompt: list[int], index: int, at: int) -> int:
        if self.script is not None:
            return self.script[at] if at < len(self.script) else self.tokenizer.eos_token_id
        text = self.tokenizer(WORDS)["input_ids"]
        return text[(sum(prompt) + 7 * index + at) % len(text)]

    def check_grammar(self, params: SamplingParams) -> None:
        if params.regex == "(":
            raise UserError("regex '(' is not a regular expression")

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        assert request_id not in self.running, f"{request_id} is running"
        check_prompt(prompt_ids, self.vocab_size, self.max_model_len, 0 if params.max_tokens == 0 else 1)
        params.check_vocabulary(self.vocab_size)
        ends = [self.tokenizer.eos_token_id]
        sequences = [
            Sequence(index, Stopping(self.tokenizer, params, prompt_ids, ends, self.max_model_len))
            for index in range(params.n)
        ]
        self.running[request_id] = Running(prompt_ids, params, sequences)
        self.counts["prompt_tokens"] += len(prompt_ids)

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.counts["aborted_requests"] += 1

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def _logprobs(self, token: int, top: int) -> Logprobs:
        others = tuple(((token + i) % self.vocab_size, -0.5 - i) for i in range(top))
        return Logprobs(token, -0.5, others)

    def _advance(self, request: Running, sequence: Sequence) -> Completion:
        params = request.params
        if params.max_tokens == 0:
            sequence.stopping.finished = True
            return Completion(sequence.index, [], "", None, "length")
        token = self.expected(request.prompt, sequence.index, len(sequence.token_ids))
        sequence.token_ids.append(token)
        self.counts["generated_tokens"] += 1
        progress = sequence.stopping.append([token])
        logprobs = None if params.logprobs is None else [self._logprobs(token, params.logprobs)]
        return Completion(
            sequence.index, [token], progress.text, logprobs, progress.finish_reason, progress.stop_reason
        )

    def step(self) -> list[RequestOutput]:
        self.began.set()
        self.hold.wait()
        if self.delay:
            time.sleep(self.delay)
        self.counts["steps"] += 1
        if self.fail_after is not None and self.counts["steps"] > self.fail_after:
            raise RuntimeError("scripted failure")
        outputs = []
        for request_id, request in list(self.running.items()):
            prompt, count = request.prompt, request.params.prompt_logprobs
            continuing = [sequence for sequence in request.sequences if not sequence.stopping.finished]
            completions = [self._advance(request, sequence) for sequence in continuing]
            finished = all(sequence.stopping.finished for sequence in continuing)
            prompt_logprobs: list[Logprobs | None] | None = None
            if not request.started and count is not None:
                prompt_logprobs = [None, *(self._logprobs(token, count) for token in prompt[1:])]
            request.started = True
            outputs.append(RequestOutput(request_id, prompt, completions, finished, prompt_logprobs))
            if finished:
                del self.running[request_id]
                self.counts["finished_requests"] += 1
        return outputs

    def stats(self) -> EngineStats:
        lengths = [
            len(request.prompt) + len(sequence.token_ids)
            for request in self.running.values()
            for sequence in request.sequences
        ]
        used = sum(-(-length // BLOCK) for length in lengths)
        return EngineStats(running=len(self.running), cache_blocks=4096, cache_blocks_used=used, **self.counts)


class ByteTokenizer:
    """Minimal tokenizer for the server, without the slow import of transformers."""

    eos_token_id = 256
    all_special_ids = (256,)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {256: SimpleNamespace(content="</s>", special=True)}
    chat_template = None

    def __len__(self) -> int:
        return 257

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id) if token_id < 256 else "</s>"

    def get_added_vocab(self) -> dict[str, int]:
        return {"</s>": 256}

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.get_added_vocab()


def serve(delay: float, drain_timeout: float, log: Path) -> None:
    """Serve it on a free port until a signal, with stderr in the file `log`."""
    from mlaforge.serving import server
    from mlaforge.serving.config import ServeConfig

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    server.run(ScriptedEngine(ByteTokenizer(), delay), ServeConfig(port=0, drain_timeout=drain_timeout))
