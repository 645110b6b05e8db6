"""Sampling parameters and stop conditions of a request."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from mlaforge.engine.sampling.grammar_limits import check_schema, check_size
from mlaforge.runtime import UserError

# Lower temperatures count as 0, as in vLLM: the division would only yield infinities.
GREEDY_BELOW = 1e-5
# Smallest and largest seed of torch.Generator.
SEED_RANGE = (-(2**63), 2**64 - 1)
# Numbers that fp32 logits can be divided and multiplied by and stay finite.
SMALLEST, LARGEST = 1e-30, 1e30


def _wrong(name: str, value: object, right: str) -> UserError:
    # A repr may be long or have several lines.
    return UserError(f"{name} = {' '.join(reprlib.repr(value).split())} must be {right}")


def _whole(name: str, value: object, low: int, right: str, high: int | None = None) -> int:
    """Return `value` if it is an int in low..high. A bool is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _wrong(name, value, right)
    return value


def _number(name: str, value: object, low: float, high: float, right: str) -> float:
    """Return `value` as a float if it is a number in low..high (both finite)."""
    # Compared before the conversion: an int may be too large for a float. NaN compares false.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(name, value, right)
    return float(value)


def _items(name: str, value: object, right: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, right)
    return tuple(value)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings are vLLM's and OpenAI's.

    `logprobs` and `prompt_logprobs`: number of likeliest alternatives to report for each token (0: only the token
    itself); None reports nothing. `max_tokens` None generates up to the end of the model's context; 0 only reads the
    prompt and needs `prompt_logprobs`. `top_k` 0 or -1 keeps all tokens. `seed` None or -1 is fresh entropy.
    `json_schema` is a schema or its JSON text; docs/serving.md has its limits. At most one of json_schema, regex and
    grammar is set. Lists become tuples, one `stop` string a tuple of one.

    Raises UserError for the first field whose value is wrong.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    # A grammar in llguidance's dialect of Lark.
    grammar: str | None = None
    # Harmony channel to whose text `stop` is restricted; None: all of the text.
    stop_channel: str | None = None
    # False: this request's tokens are not drafted, whatever the engine's drafter.
    speculate: bool = True
    # Whether this request's generated tokens read all tokens of a sparse model.
    dense: bool = False

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_distribution()
        self._check_stops()
        self._check_grammar()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_lengths(self) -> None:
        _whole("n", self.n, 1, "a whole number of at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, "a whole number of at least 0, or None")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, "a whole number of at least 1, or None")
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise _wrong("max_tokens", 0, "at least 1; 0 is for prompt_logprobs alone")
        _whole("min_tokens", self.min_tokens, 0, "a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")

    def _check_distribution(self) -> None:
        at_least_0 = "a finite number of at least 0"
        self._set("temperature", _number("temperature", self.temperature, 0, LARGEST, at_least_0))
        self._set("top_k", max(0, _whole("top_k", self.top_k, -1, "a whole number of at least 0, or -1 (off)")))
        self._set("top_p", _number("top_p", self.top_p, SMALLEST, 1, "above 0 and at most 1"))
        self._set("min_p", _number("min_p", self.min_p, 0, 1, "between 0 and 1"))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2, 2, "between -2 and 2"))
        above_0 = "a finite number above 0 (1 is off)"
        repetition = _number("repetition_penalty", self.repetition_penalty, SMALLEST, LARGEST, above_0)
        self._set("repetition_penalty", repetition)
        if self.seed is not None:
            seed = _whole("seed", self.seed, SEED_RANGE[0], "a whole number of 64 bits, or None", SEED_RANGE[1])
            self._set("seed", None if seed == -1 else seed)
        if not isinstance(self.logit_bias, Mapping | None):
            raise _wrong("logit_bias", self.logit_bias, "a mapping of token ids to numbers between -100 and 100")
        bias = {
            _whole("logit_bias's token id", token, 0, "a whole number of at least 0"): _number(
                f"logit_bias[{token}]", value, -100, 100, "between -100 and 100"
            )
            for token, value in (self.logit_bias or {}).items()
        }
        self._set("logit_bias", bias)

    def _check_stops(self) -> None:
        items = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _items("stop", items, "a text or a list of texts")
        for index, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise _wrong("stop" if items is not self.stop else f"stop[{index}]", text, "a text that is not empty")
        self._set("stop", stop)
        ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for index, token in enumerate(ids):
            _whole(f"stop_token_ids[{index}]", token, 0, "a whole number of at least 0")
        self._set("stop_token_ids", ids)
        if self.stop_channel is not None and not isinstance(self.stop_channel, str):
            raise _wrong("stop_channel", self.stop_channel, "the name of a harmony channel, or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculate", "dense"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")

    def _check_grammar(self) -> None:
        if self.regex is not None and (not isinstance(self.regex, str) or not self.regex):
            raise _wrong("regex", self.regex, "a regular expression that is not empty")
        if self.regex is not None:
            if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
                raise _wrong("regex", self.regex, "a regular expression; a backslash at its end escapes nothing")
            check_size("regex", self.regex)
        if self.grammar is not None and (not isinstance(self.grammar, str) or not self.grammar):
            raise _wrong("grammar", self.grammar, "a Lark grammar that is not empty")
        if self.grammar is not None:
            check_size("grammar", self.grammar)
        constraints = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise UserError(f"{constraints[1]} stands beside {constraints[0]}; give one of them")
        if self.json_schema is None:
            return
        if not isinstance(self.json_schema, str | Mapping):
            raise _wrong("json_schema", self.json_schema, "a JSON schema: a mapping or its JSON text")
        if isinstance(self.json_schema, str):
            check_size("json_schema", self.json_schema)
        try:
            check_schema(json.loads(self.json_schema) if isinstance(self.json_schema, str) else self.json_schema)
            check_size("json_schema", self.schema_text)
        except UserError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("json_schema", self.json_schema, f"JSON ({' '.join(str(error).split())})") from error

    @property
    def schema_text(self) -> str:
        """The schema as canonical JSON text. Requires a schema."""
        schema = self.json_schema
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema or {})
        return json.dumps(parsed, allow_nan=False)

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrains the text."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a random one."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether penalties change the logits of earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError for a token id in logit_bias or stop_token_ids that the vocabulary lacks."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise UserError(f"{name} names token {token}, but the vocabulary has {vocab_size}")
