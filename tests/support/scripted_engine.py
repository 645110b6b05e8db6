"""An engine without a model: the server's interface, deterministic tokens and scripted failures.

Token t of continuation c of a prompt is a function of the prompt, c and t alone (`expected`), so that answers are
predictable. One token per sequence and step; every 16 tokens of a sequence hold a block until it ends.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from mlaforge.engine.request.output import Completion, RequestOutput
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
    request_id: str
    prompt: list[int]
    params: SamplingParams
    index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


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
        self.running: dict[str, list[Sequence]] = {}
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
        if len(prompt_ids) + (params.max_tokens or 1) > self.max_model_len:
            raise UserError(f"prompt of {len(prompt_ids)} tokens is too long")
        self.running[request_id] = [Sequence(request_id, prompt_ids, params, i) for i in range(params.n)]
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

    def _advance(self, sequence: Sequence) -> Completion | None:
        if sequence.finish_reason:
            return None
        params = sequence.params
        token = self.expected(sequence.prompt, sequence.index, len(sequence.token_ids))
        sequence.token_ids.append(token)
        self.counts["generated_tokens"] += 1
        text = self.tokenizer.decode(sequence.token_ids, skip_special_tokens=params.skip_special_tokens)
        stop_reason = None
        if stops := [s for s in params.stop if s in text]:
            sequence.finish_reason, stop_reason = "stop", stops[0]
            text = text[: text.index(stops[0])]
        elif token in params.stop_token_ids:
            sequence.finish_reason, stop_reason = "stop", token
        elif token == self.tokenizer.eos_token_id and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif len(sequence.token_ids) >= min(params.max_tokens or 10**9, self.max_model_len - len(sequence.prompt)):
            sequence.finish_reason = "length"
        # Withhold text that may still change: half a character, the beginning of a stop string.
        incomplete = "" if sequence.finish_reason else "\ufffd"
        stable = text.rstrip(incomplete) if incomplete else text
        for stop in () if sequence.finish_reason else params.stop:
            for size in range(len(stop) - 1, 0, -1):
                if stable.endswith(stop[:size]):
                    stable = stable[:-size]
                    break
        new, sequence.text = stable[len(sequence.text) :], max(stable, sequence.text, key=len)
        logprobs = None if params.logprobs is None else [self._logprobs(token, params.logprobs)]
        return Completion(sequence.index, [token], new, logprobs, sequence.finish_reason, stop_reason)

    def step(self) -> list[RequestOutput]:
        self.began.set()
        self.hold.wait()
        if self.delay:
            time.sleep(self.delay)
        self.counts["steps"] += 1
        if self.fail_after is not None and self.counts["steps"] > self.fail_after:
            raise RuntimeError("scripted failure")
        outputs = []
        for request_id, sequences in list(self.running.items()):
            params, prompt = sequences[0].params, sequences[0].prompt
            first = not sequences[0].token_ids
            completions = [c for c in map(self._advance, sequences) if c is not None]
            finished = all(s.finish_reason for s in sequences)
            prompt_logprobs: list[Logprobs | None] | None = None
            if first and params.prompt_logprobs is not None:
                prompt_logprobs = [None, *(self._logprobs(t, params.prompt_logprobs) for t in prompt[1:])]
            outputs.append(RequestOutput(request_id, prompt, completions, finished, prompt_logprobs))
            if finished:
                del self.running[request_id]
                self.counts["finished_requests"] += 1
        return outputs

    def stats(self) -> EngineStats:
        lengths = [len(s.prompt) + len(s.token_ids) for group in self.running.values() for s in group]
        used = sum(-(-length // BLOCK) for length in lengths)
        return EngineStats(running=len(self.running), cache_blocks=4096, cache_blocks_used=used, **self.counts)


class ByteTokenizer:
    """Minimal tokenizer for the server, without the slow import of transformers."""

    eos_token_id = 256
    all_special_ids = (256,)
    chat_template = None

    def __len__(self) -> int:
        return 257

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def get_added_vocab(self) -> dict[str, int]:
        return {"</s>": 256}

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.get_added_vocab()


def main() -> None:
    """python scripted_engine.py DELAY PORT DRAIN_TIMEOUT: serve it, for tests of signals."""
    import sys

    from mlaforge.serving import server
    from mlaforge.serving.config import ServeConfig

    delay, port, drain = sys.argv[1:]
    engine = ScriptedEngine(ByteTokenizer(), float(delay))
    server.run(engine, ServeConfig(port=int(port), drain_timeout=float(drain)))


if __name__ == "__main__":
    main()
