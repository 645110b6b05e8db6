"""`generate` and `chat`: text from one model or two, with measured throughput and cache bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest, finished, record_names, writing
from mlaforge.checkpoint.reader import fingerprint
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.execution.model import choose_format
from mlaforge.engine.llm import LLM
from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.engine.sampling.defaults import announce
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import resolve_device, timed
from mlaforge.serving.config import ChatConfig, GenerateConfig
from mlaforge.serving.diffusion import Diffusion, ShowPlaces
from mlaforge.synthesis.repetition import repeats_from


def continue_prompt(
    model: str | Path | SourceModel, config: GenerateConfig, show: ShowPlaces | None = None
) -> dict[str, Any]:
    """Return one model's continuation with its time and cache bytes. `tokens_per_second` excludes the first token.
    show: of Diffusion, for --diffusion."""
    if config.diffusion:
        # Whole blocks, not what pays.
        config = dataclasses.replace(config, adaptive_speculation=False)
    llm = LLM(model, config, harmony=config.harmony)

    def outputs(params: SamplingParams) -> Iterator[RequestOutput]:
        if config.chat:
            turn = [{"role": "user", "content": config.prompt}]
            return llm.stream_chat(turn, params, reasoning_effort=config.reasoning_effort)
        return llm.stream(config.prompt, params)

    params = _params(llm, config, 0.0, 1.0)
    # Generate one token first, so that warming up is not timed.
    for _ in outputs(dataclasses.replace(params, max_tokens=1)):
        pass
    if config.diffusion and show is not None:
        Diffusion(llm, config.denoise_steps, show)
    start, first, cache_bytes, prompt_tokens, ids, text, reasoning = time.perf_counter(), 0.0, 0, 0, [], [], []
    for output in outputs(params):
        first = first or time.perf_counter()
        prompt_tokens = len(output.prompt_token_ids)
        ids += output.outputs[0].token_ids
        text.append(output.outputs[0].text)
        reasoning.append(output.outputs[0].reasoning_content)
        # The last token frees the blocks.
        cache_bytes = max(cache_bytes, llm.engine.stats().cache_bytes_used)
    end = time.perf_counter()
    return {
        "text": "".join(text),
        "reasoning_content": "".join(reasoning),
        "new_tokens": len(ids),
        "repeats_from": repeats_from(ids),
        "seconds": end - start,
        "tokens_per_second": (len(ids) - 1) / (end - first) if len(ids) > 1 else len(ids) / (end - start),
        "cache_bytes": cache_bytes,
        "cached_tokens": prompt_tokens + len(ids) - 1,
        "dtype": llm.engine.model.format,
        "eagle_speculation": llm.engine.speculation.stats.block() if llm.engine.speculation else None,
    }


def _params(llm: LLM, config: GenerateConfig | ChatConfig, temperature: float, top_p: float) -> SamplingParams:
    """Return the sampling parameters: the options, else the model's generation_config.json, else `temperature` and
    `top_p`."""
    options = {"temperature": config.temperature, "top_p": config.top_p}
    overrides = {name: value for name, value in options.items() if value is not None}
    defaults = {name: value for name, value in llm.engine.sampling_defaults.items() if name != "max_tokens"}
    announce({name: value for name, value in defaults.items() if name not in overrides})
    values: dict[str, Any] = {"temperature": temperature, "top_p": top_p} | defaults | overrides
    return SamplingParams(max_tokens=config.max_new_tokens, seed=config.seed, **values)


def run(
    model: str, out: Path | None, config: GenerateConfig, overwrite: bool = False, show: ShowPlaces | None = None
) -> Manifest:
    """Continue the prompt with MODEL, and with `against` if set; write an artifact if `out` is given. show: as in
    continue_prompt."""
    head = Path(config.speculative)
    sources = [SourceModel.open(name) for name in dict.fromkeys((model, config.against)) if name]
    manifest = Manifest(
        "generate",
        config={k: v for k, v in dataclasses.asdict(config).items() if k not in ("device", "against")}
        | record_names(config, "speculative"),
        inputs={
            "models": [source.fingerprint for source in sources],
            "head": fingerprint(head) if (head / "config.json").is_file() else None,
        },
    )
    if out is not None and (done := finished(out, manifest, overwrite, (head, *(source.path for source in sources)))):
        return done
    with nullcontext() if out is None else writing(out, manifest):
        # Both models use the dtype chosen for the first, so that they differ only in the model.
        format = choose_format(config.dtype, sources[0], resolve_device(config.device))
        config = dataclasses.replace(config, dtype=format)
        with timed(manifest.seconds, "generate"):
            runs = [{"model": source.name, **continue_prompt(source, config, show)} for source in sources]
        manifest.metrics = {"prompt": config.prompt, "runs": runs}
    return manifest


class Conversation:
    """A chat with one model: its messages and streamed answers. Earlier messages are reused from the prefix cache.

    Raises UserError for a model that cannot be loaded or has no chat format.
    """

    def __init__(self, model: str, config: ChatConfig):
        self.llm, self._effort = LLM(model, config, harmony=config.harmony), config.reasoning_effort
        self.params = _params(self.llm, config, 0.7, 0.95)
        self._first = [{"role": "system", "content": config.system}] if config.system else []
        # Report a missing package before the user's first message.
        _ = self.llm.harmony
        self.forget()

    def forget(self) -> None:
        """Clear the conversation."""
        self.messages = list(self._first)

    def answer(self, text: str) -> Generator[Completion]:
        """Stream the model's answer to the user's turn. The history omits a turn whose answer was interrupted, and the
        reasoning before an answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces = []
        for output in self.llm.stream_chat(messages, self.params, reasoning_effort=self._effort):
            pieces.append(output.outputs[0].text)
            yield output.outputs[0]
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
