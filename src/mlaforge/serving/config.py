"""Options of `generate`, `chat` and `serve`, beside those of the engine."""

from __future__ import annotations

import dataclasses

from mlaforge.config import option
from mlaforge.engine import vllm_names
from mlaforge.engine.config import MAX_DRAFT_TOKENS, EngineConfig
from mlaforge.engine.request.harmony import EFFORTS
from mlaforge.engine.request.text_format import REASONING_PARSERS, TOOL_PARSERS


@dataclasses.dataclass(frozen=True)
class GenerateConfig(EngineConfig):
    """Options of `generate`."""

    other_names = vllm_names.GENERATION
    first = ("prompt", "chat", "against", "max_new_tokens", "temperature")

    prompt: str = option(
        "The capital of France is", "text to continue, or the user's turn with --chat; - is standard input"
    )
    against: str | None = option(None, "a second model that continues the same prompt")
    max_new_tokens: int = option(64, "length of the continuation", "tokens", least=1)
    chat: bool = option(False, "ask the prompt as a user's turn: in harmony, else in the model's chat template")
    reasoning_effort: str | None = option(
        None, "with --chat, how long the model thinks (default: the model's own)", choices=EFFORTS
    )
    harmony: bool = option(True, "with --chat, read and write the harmony format where the tokenizer has it")
    temperature: float | None = option(
        None, "0 takes the likeliest token, 1 samples from the model's distribution (default: the model's own, else 0)"
    )
    top_p: float | None = option(
        None, "sample among the likeliest tokens that together have this probability (default: the model's own, else "
        "1)", "fraction",
    )  # fmt: skip
    seed: int | None = option(None, "seed of sampling (default: a random one)")
    diffusion: bool = option(
        False, "experimental: print how the block head of --speculative fills masked places, and which of its tokens "
        "the model accepts and replaces",
    )  # fmt: skip
    denoise_steps: int = option(
        1, "with --diffusion, passes that fill a block; later ones fill its less likely places again", "passes",
        least=1, most=MAX_DRAFT_TOKENS,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ChatConfig(EngineConfig):
    """Options of `chat`."""

    other_names = vllm_names.GENERATION
    first = ("system", "max_new_tokens", "temperature", "speculative", "dtype")

    system: str | None = option(None, "system message of the conversation")
    reasoning_effort: str | None = option(
        None, "how long the model thinks before it answers (default: the model's own)", choices=EFFORTS
    )
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")
    max_new_tokens: int = option(1024, "length of an answer", "tokens", least=1)
    temperature: float | None = option(
        None, "0 takes the likeliest token, 1 samples from the model's distribution (default: the model's own, else "
        "0.7)",
    )  # fmt: skip
    top_p: float | None = option(
        None, "sample among the likeliest tokens that together have this probability (default: the model's own, else "
        "0.95)", "fraction",
    )  # fmt: skip
    seed: int | None = option(None, "seed of sampling (default: a random one)")


@dataclasses.dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Options of `serve`: those of the engine and of HTTP."""

    other_names = vllm_names.SERVER
    first = ("host", "port", "api_key", "max_model_len", "speculative")

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every network of the machine")
    port: int = option(8000, "port to listen on, 0 for a free one", least=0, most=65535)
    api_key: str | None = option(None, "key that clients must send; $MLAFORGE_API_KEY hides it from `ps`")
    served_model_name: str | None = option(None, "the model's name in the API (default: the name of MODEL)")
    max_concurrent: int = option(256, "requests processed concurrently", "requests", least=1)
    max_queue: int = option(1024, "further requests that may wait; more are refused with 429", "requests", least=0)
    max_body: int = option(8 * 2**20, "largest body of a request", "bytes", least=1)
    max_n: int | None = option(None, "largest n of a request (default: --max-num-seqs)", "continuations", least=1)
    max_prompts: int = option(1024, "maximum number of prompts in one request", "prompts", least=1)
    allowed_origins: str = option(
        "", "origins of web pages that may use the server, separated by commas; * is any (default: none)"
    )
    public_metrics: bool = option(False, "with --api-key, also serve /metrics without the key, as /health")
    client_timeout: float = option(
        60.0, "time limit for sending a request, and for a client that stops reading", "seconds", above=0, most=86400
    )
    verify: bool = option(False, "first compare every file of model and head with its hash, as `mlaforge verify` does")
    drain_timeout: float = option(30.0, "time limit for running requests after SIGTERM", "seconds", least=0)
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")
    tool_call_parser: str = option(
        "auto", "format of tool calls in answers without harmony; auto is by the chat template", choices=TOOL_PARSERS
    )
    reasoning_parser: str = option(
        "auto", "format of reasoning in answers without harmony; auto is by the chat template",
        choices=REASONING_PARSERS,
    )  # fmt: skip
    require_tool_template: bool = option(
        False, "refuse requests with tools if the chat template ignores them, instead of a line in the log"
    )
    strict_fields: bool = option(False, "refuse requests with unknown fields instead of ignoring these")
