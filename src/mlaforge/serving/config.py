"""What a user may set of `generate`, `chat` and `serve`, beside what the engine takes."""

from __future__ import annotations

import dataclasses

from mlaforge.config import option
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.request.chat_template import IGNORED_TOOLS
from mlaforge.engine.request.harmony import EFFORTS


@dataclasses.dataclass(frozen=True)
class GenerateConfig(EngineConfig):
    """Options of `generate`."""

    first = ("prompt", "chat", "against", "max_new_tokens", "temperature")

    prompt: str = option(
        "The capital of France is", "what the text starts with, or the user's turn with --chat; - is standard input"
    )
    against: str | None = option(None, "a second model that continues the same prompt")
    max_new_tokens: int = option(64, "length of the continuation", "tokens", least=1)
    chat: bool = option(False, "ask the prompt as a user's turn: in harmony, else in the model's chat template")
    reasoning_effort: str | None = option(None, "with --chat, how long the model thinks (its own)", choices=EFFORTS)
    harmony: bool = option(True, "with --chat, read and write the harmony format where the tokenizer has it")
    temperature: float | None = option(
        None, "0 takes the likeliest token, 1 draws from the model's own distribution (the model's own setting, else 0)"
    )
    top_p: float | None = option(
        None, "draw among the likeliest tokens that together have this probability (the model's own setting, else 1)",
        "fraction",
    )  # fmt: skip
    seed: int | None = option(None, "seed of the draws (default: a fresh one)")


@dataclasses.dataclass(frozen=True)
class ChatConfig(EngineConfig):
    """Options of `chat`."""

    first = ("system", "max_new_tokens", "temperature", "speculative", "dtype")

    system: str | None = option(None, "what the model is told before the conversation")
    reasoning_effort: str | None = option(
        None, "how long the model thinks before it answers (its own)", choices=EFFORTS
    )
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")
    max_new_tokens: int = option(1024, "length of an answer", "tokens", least=1)
    temperature: float | None = option(
        None, "0 takes the likeliest token, 1 draws from the model's own distribution (the model's own setting, else "
        "0.7)",
    )  # fmt: skip
    top_p: float | None = option(
        None, "draw among the likeliest tokens that together have this probability (the model's own setting, else "
        "0.95)", "fraction",
    )  # fmt: skip
    seed: int | None = option(None, "seed of the draws (default: a fresh one)")


@dataclasses.dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Options of `serve`: the engine's, and what concerns HTTP."""

    first = ("host", "port", "api_key", "max_model_len", "speculative")

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every network of the machine")
    port: int = option(8000, "port to listen on, 0 for a free one", least=0, most=65535)
    api_key: str | None = option(None, "what clients must show; $MLAFORGE_API_KEY is not seen by `ps`")
    served_model_name: str | None = option(None, "the model's name in the API (default: MODEL's own)")
    max_concurrent: int = option(256, "requests that are worked on at once", "requests", least=1)
    max_queue: int = option(1024, "requests that may wait beyond these; more get 429", "requests", least=0)
    max_body: int = option(8 * 2**20, "largest body of a request", "bytes", least=1)
    max_n: int | None = option(None, "largest n of a request (default: --max-num-seqs)", "continuations", least=1)
    max_prompts: int = option(1024, "most prompts of one request", "prompts", least=1)
    client_timeout: float = option(
        60.0, "how long a client may take to send a request, or may read nothing", "seconds", above=0, most=86400
    )
    verify: bool = option(False, "first compare every file of model and head with its hash, as `mlaforge verify` does")
    drain_timeout: float = option(30.0, "how long running requests may go on after SIGTERM", "seconds", least=0)
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")
    ignored_tools: str = option(
        "error", "what a request with tools leads to where the chat template ignores them: a 400, or a line in the log",
        choices=IGNORED_TOOLS,
    )  # fmt: skip
