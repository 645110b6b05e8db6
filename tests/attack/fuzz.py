"""Requests as a careless, a broken and a hostile client send them, drawn at random; the same from the same dice.

Every fuzzed request is a whole HTTP request; what is no HTTP is in connections.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attack.grammars import BOMBS, PATTERNS, schema
from mlaforge.serving.app import REQUESTS
from mlaforge.serving.protocol import HARMLESS, REFUSED

COMPLETIONS, CHAT = PATHS = ("/v1/completions", "/v1/chat/completions")
RESPONSES, MESSAGES, TOKENIZE = "/v1/responses", "/v1/messages", "/tokenize"
FIELDS = {path: sorted(REQUESTS[path].model_fields) for path in (*PATHS, RESPONSES, MESSAGES, TOKENIZE)}
TEXTS = ("", "x", " ", "\n", "\u0000", "é", "\u202e", "😀", "\ufeff", "\\", '"', "</s>", "<|im_start|>", "a" * 300, "0")
NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, -1, 16, 0.5, 1.0, 1.5, -0.0, 1e-6, 1e308, -1e308, 5e-324, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64,
    -(2**63), 10**30, -(10**30), 10**400,
)  # fmt: skip
KEYS = (
    "type",
    "role",
    "content",
    "function",
    "name",
    "schema",
    "json_schema",
    "text",
    "0",
    "1",
    "x",
    "",
    "é",
    "__proto__",
)
ODD_PATHS = (
    *PATHS, *PATHS, "/v1/completions/", "/v1/chat/completions/", "//v1/completions", "/v1/../v1/completions",
    "/v1/models", "/v1/models/%00", "/v1/models/" + "x" * 5000, "/health", "/metrics", "/docs", "/", "/version",
    "/v1/embeddings", "/v1/completions?x=1", "/v1/completions%20", "/%ff", "/openapi.json", "/ping", "/detokenize",
    "/v1/responses/resp_x", "/v1/responses/" + "x" * 5000, "/v1/responses/resp_x/input_items?limit=0",
    "/v1/messages/count_tokens", "/v1/v1/messages", "/chat/completions",
)  # fmt: skip
# A client of a long answer goes after so many seconds.
LEAVES = 4.0


@dataclass
class Request:
    """`expected`: statuses, where only some would be right. `leave`: seconds after which the client goes."""

    kind: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    expected: tuple[int, ...] = ()
    stream: bool = False
    leave: float | None = None


def value(dice: random.Random, deep: int = 3) -> Any:
    """Any JSON value, and what Python's JSON writes beside these."""
    kind = dice.randrange(8 if deep else 5)
    if kind == 0:
        return dice.choice((None, True, False))
    if kind in (1, 2):
        return dice.choice((*NUMBERS, dice.randrange(-10, 1000), dice.uniform(-3, 3), float("nan"), float("inf")))
    if kind in (3, 4):
        return dice.choice((*TEXTS, "auto", "none", "\ud800", "".join(map(chr, dice.choices(range(32, 0x3000), k=5)))))
    if kind == 5:
        return [value(dice, deep - 1) for _ in range(dice.randrange(5))]
    return {dice.choice(KEYS): value(dice, deep - 1) for _ in range(dice.randrange(5))}


def base(dice: random.Random, path: str) -> dict[str, Any]:
    """A body that is answered."""
    words = " ".join(
        dice.choices(("the", "sky", "is", "blue", "why", "and", "what", "1", "2", "é", "\n"), k=dice.randrange(1, 24))
    )
    most = dice.randrange(1, 9)
    if path == RESPONSES:
        return {"input": words, "max_output_tokens": most}
    if path in (COMPLETIONS, TOKENIZE):
        return {"prompt": words, **({"max_tokens": most} if path == COMPLETIONS else {})}
    return {"messages": [{"role": "user", "content": words}], "max_tokens": most}


def encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=bool(_surrogates(body))).encode()


def _surrogates(body: Any) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def request(kind: str, path: str, body: Any, **more: Any) -> Request:
    """Of a body as Python has it; how long its answer may become decides when the client goes."""
    known = body if isinstance(body, dict) else {}
    limits = [known.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in known]
    short = any(type(limit) is int and limit <= 64 for limit in limits)
    raw = body if isinstance(body, bytes) else encode(body)
    if not short and not isinstance(body, bytes):
        more.setdefault("leave", LEAVES)
    return Request(kind, path, raw, stream=known.get("stream") is True, **more)


def valid(dice: random.Random) -> Request:
    """What the docs offer: it must be answered."""
    path = dice.choice((*PATHS, *PATHS, RESPONSES, MESSAGES, TOKENIZE))
    body = base(dice, path)
    if path not in PATHS:
        offered = {"stream": True, "temperature": 0.5, "metadata": {"user_id": "x"}, "store": False, "unknown": 1}
        names = ("metadata", "unknown") if path == TOKENIZE else sorted(offered)
        body |= {name: offered[name] for name in dice.sample(names, dice.randrange(3))}
        return request("valid", path, body, expected=(200,), leave=None if dice.random() > 0.15 else dice.random() / 2)
    offers: dict[str, Callable[[], Any]] = {
        "stream": lambda: True, "n": lambda: dice.randrange(1, 5), "temperature": lambda: dice.uniform(0, 2),
        "top_p": lambda: dice.uniform(0.01, 1), "top_k": lambda: dice.choice((-1, 0, 1, 50)),
        "min_p": lambda: dice.random(), "seed": lambda: dice.randrange(2**31), "stop": lambda: ["zq", "\n\n\n"],
        "presence_penalty": lambda: dice.uniform(-2, 2), "frequency_penalty": lambda: dice.uniform(-2, 2),
        "repetition_penalty": lambda: dice.uniform(0.5, 2), "ignore_eos": lambda: True,
        "logit_bias": lambda: {str(dice.randrange(200)): dice.uniform(-100, 100)},
        "stop_token_ids": lambda: [dice.randrange(200)], "speculate": lambda: False, "user": lambda: "someone",
        "response_format": lambda: {"type": "json_object"}, "prompt_logprobs": lambda: dice.randrange(5),
    }  # fmt: skip
    body |= {name: offers[name]() for name in dice.sample(sorted(offers), dice.randrange(6))}
    if path == COMPLETIONS and dice.random() < 0.3:
        body |= {"logprobs": dice.randrange(21), "echo": dice.random() < 0.5}
    if path == CHAT and dice.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": dice.randrange(21)}
    if body.get("stream") and dice.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    hangs_up = dice.random() < 0.15
    return request("valid", path, body, expected=(200,), leave=dice.uniform(0, 0.5) if hangs_up else None)


def fields(dice: random.Random) -> Request:
    """Any value in any field."""
    path = dice.choice(sorted(FIELDS))
    names = (*FIELDS[path], *FIELDS[path], *HARMLESS, *REFUSED, "prompt", "messages", "temprature", "x" * 300)
    return request(
        "fields", path, base(dice, path) | {n: value(dice) for n in dice.sample(names, dice.randrange(1, 4))}
    )


def anything(dice: random.Random) -> Request:
    return request("any JSON", dice.choice(sorted(FIELDS)), value(dice, 5), expected=(200, 400, 404, 422))


def damaged(dice: random.Random) -> Request:
    """A body with bytes cut out, put in or changed."""
    path = dice.choice(sorted(FIELDS))
    raw = bytearray(encode(base(dice, path) | {"temperature": 0.5, "stop": ["é"]}))
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(raw) + 1)
        raw[at : at + dice.randrange(5)] = dice.randbytes(dice.randrange(4))
    return request("damaged JSON", path, bytes(raw), leave=LEAVES)


def messages(dice: random.Random) -> Request:
    roles = ("system", "developer", "user", "assistant", "tool", "wizard", "", None)
    turns = []
    for _ in range(dice.randrange(1, 8)):
        turn: dict[str, Any] = {"role": dice.choice(roles[: dice.choice((5, 8))]), "content": dice.choice(TEXTS)}
        if dice.random() < 0.3:
            parts = [{"type": "text", "text": dice.choice(TEXTS)}, {"type": "image_url", "image_url": {"url": "x"}}]
            turn["content"] = dice.sample(parts, dice.randrange(3))
        if dice.random() < 0.2:
            turn["tool_calls"] = [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": value(dice, 1)}}
            ]
        if dice.random() < 0.2:
            turn[dice.choice(("name", "tool_call_id", "refusal", "audio", "mood"))] = value(dice, 1)
        turns.append(turn)
    body: dict[str, Any] = {"messages": turns, "max_tokens": 4}
    if dice.random() < 0.3:
        body["tools"] = [{"type": "function", "function": {"name": dice.choice(("f", "a b", "x" * 70)),
                                                           "parameters": value(dice, 3)}}]  # fmt: skip
        body["tool_choice"] = dice.choice(("auto", "none", "required", {"type": "function", "function": {"name": "f"}}))
    if dice.random() < 0.2:
        body["chat_template_kwargs"] = {dice.choice(("messages", "tools", "x", "bos_token")): value(dice, 2)}
    return request("messages", CHAT, body)


def prompts(dice: random.Random) -> Request:
    """Lists of prompts, token ids, and mixtures of them."""
    ids = [dice.randrange(dice.choice((250, 250, 60_000, 2**40))) for _ in range(dice.choice((1, 8, 600, 1100)))]
    every = [ids, [ids[:4]] * dice.choice((1, 8, 2000)), ["x"] * dice.choice((2, 40, 2000)), [], [[]], "", ["", ""],
             [1, "x"], [[1], "x"], [True], [-1], [1.0], {"x": 1}, None]  # fmt: skip
    body = {"prompt": dice.choice(every), "max_tokens": dice.randrange(3), "echo": dice.random() < 0.3}
    return request("prompts", COMPLETIONS, body | {"n": dice.choice((1, 1, 4))})


def many(dice: random.Random) -> Request:
    """Thousands of answers to one request."""
    body = {"prompt": ["x"] * dice.choice((8, 64, 1024)), "n": dice.choice((8, 64, 128)), "max_tokens": 2}
    return request("many", COMPLETIONS, body, leave=20.0)


def scoring(dice: random.Random) -> Request:
    """Log probabilities of long prompts."""
    ids = [dice.randrange(250) for _ in range(dice.choice((16, 500, 960)))]
    ways = ({"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}, {"echo": True, "logprobs": 0, "max_tokens": 0})
    body = {"prompt": ids, "max_tokens": 1, **dice.choice(ways)}
    return request("scoring", COMPLETIONS, body, expected=(200,))


def head(dice: random.Random) -> Request:
    """Paths, methods and headers that are not those of the docs."""
    path = dice.choice(ODD_PATHS)
    method = dice.choice(("POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"))
    kinds = (
        "application/json",
        "application/json; charset=utf-8",
        "application/json; charset=latin-1",
        "text/plain",
        "application/json; charset=utf-16",
        "APPLICATION/JSON",
        "application/x-www-form-urlencoded",
        "",
        ";",
        "x" * 900,
    )
    headers = {"content-type": dice.choice(kinds)}
    for name in dice.sample(("authorization", "accept", "accept-encoding", "origin", "expect", "x-y", "cookie"), 2):
        headers[name] = dice.choice(("", "x", "Bearer", "gzip;q=0", "*/*", "x" * 3000, "1" * 20))
    if dice.random() < 0.1:
        headers["content-encoding"] = dice.choice(("gzip", "identity", "br"))
    raw = encode(base(dice, CHAT if "chat" in path else COMPLETIONS))
    return Request("head", path, b"" if dice.random() < 0.1 else raw, method, headers, leave=LEAVES)


def nested(dice: random.Random) -> Request:
    depth = dice.choice((50, 99, 101, 1000, 100_000))
    open_, close = dice.choice((("[", "]"), ('{"a":', "}")))
    inner = open_ * depth + ("1" if open_ != "[" else "") + close * depth
    name = dice.choice(("tools", "metadata", "guided_json", "chat_template_kwargs", "prompt"))
    return request("nested", dice.choice(PATHS), f'{{"prompt": "x", "max_tokens": 2, "{name}": {inner}}}'.encode())


def constrained(dice: random.Random) -> Request:
    """Small grammars, right and wrong ones."""
    path = dice.choice(PATHS)
    own: dict[str, Any] = dice.choice((
        {"guided_json": schema(dice)}, {"regex": dice.choice(PATTERNS)}, {"guided_regex": dice.choice(PATTERNS)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(dice)}}},
        {"guided_json": json.dumps(schema(dice))}, {"structured_outputs": {"json": schema(dice)}},
        {"structured_outputs": {"regex": dice.choice(PATTERNS)}}, {"guided_json": value(dice, 3)},
    ))  # fmt: skip
    return request("constrained", path, base(dice, path) | own)


def bomb(dice: random.Random) -> Request:
    """A grammar that costs more than it says."""
    path, name = dice.choice(PATHS), dice.choice(sorted(BOMBS))
    body = base(dice, path) | {"max_tokens": 4} | BOMBS[name]()
    return request(f"grammar bomb: {name}", path, body, expected=(200, 400, 413))


def crowd(dice: random.Random) -> Request:
    """A million of something."""
    many = dice.choice((10**5, 10**6))
    every: dict[str, Any] = {
        "messages": [1] * many, "stop": ["x"] * many, "stop_token_ids": ["a"] * many, "tools": [{}] * many,
        "logit_bias": {str(i): 1 for i in range(many // 10)}, "prompt": [1] * many, "metadata": {"x": [0] * many},
        "chat_template_kwargs": {f"k{i}": 0 for i in range(many // 10)},
    }  # fmt: skip
    name = dice.choice(sorted(every))
    path = CHAT if name in ("messages", "tools", "chat_template_kwargs") else COMPLETIONS
    return request(f"crowd: {many} {name}", path, base(dice, path) | {name: every[name]}, leave=30.0)


def giant(dice: random.Random) -> Request:
    """A prompt of millions of characters, up to the largest body; or a body that is larger."""
    size = dice.choice((10**5, 10**6, 3 * 10**6, 7 * 10**6, 8_380_000, 9 * 10**6))
    unit = dice.choice(
        ("a", " ", "the sky is ", "é", "\n", "0", "a b ", "😀", "".join(map(chr, range(0x4E00, 0x4F00))))
    )
    text = (unit * (size // len(unit.encode()) + 1)).encode()[:size].decode(errors="ignore")
    path = dice.choice(PATHS)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    body = body if path == CHAT else {"prompt": dice.choice((text, [text, "x"])), "max_tokens": 2}
    return request(f"giant: {size} bytes of {unit[:4]!r}", path, body, expected=(400, 413))


# How often each is drawn.
WEIGHTS: dict[Callable[[random.Random], Request], float] = {
    valid: 18, fields: 32, anything: 6, damaged: 12, messages: 9, prompts: 4, scoring: 0.5, head: 8, nested: 2,
    constrained: 7, many: 0.1, bomb: 1, crowd: 0.5, giant: 0.5,
}  # fmt: skip


def draw(dice: random.Random) -> Request:
    (make,) = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return make(dice)
