"""Constrained decoding: which tokens a JSON schema or regex allows next, by llguidance (the extra `constrained`).

All of it is host work, some tens of microseconds a token. Nothing here is imported where no request asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

# Between two parts of a JSON text: a line break with an indent, at most one. A small model that loves line breaks would
# fill its answer with them.
WHITE_SPACE = r"[\x20\x09]{0,8}(\x0D?\x0A[\x20\x09]{0,64})?"

# tokenizer -> its ends of text -> llguidance's view of it, which takes half a second for 50,000 tokens.
_TOKENIZERS: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _llguidance() -> ModuleType:
    try:
        import llguidance.hf
    except ImportError as error:
        raise UserError("json_schema and regex need llguidance: pip install 'mlaforge[constrained]'") from error
    return llguidance


def _wrapped(tokenizer: Any, eos_token_ids: Sequence[int]) -> Any:
    """llguidance's view of the tokenizer. Ends of text that the tokenizer has no token for are left out."""
    llguidance = _llguidance()
    ends = tuple(sorted({int(token) for token in eos_token_ids if token < len(tokenizer)}))
    views = _TOKENIZERS.setdefault(tokenizer, {})
    if ends not in views:
        views[ends] = llguidance.hf.from_tokenizer(tokenizer, eos_token=list(ends) or None)
    return views[ends]


class Constraint:
    """Where one continuation stands in its grammar.

    The end of text is allowed only where the grammar may end; after it nothing else is.
    """

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], vocab_size: int):
        self._matcher = matcher
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        # Whether an end of text was taken. The matcher never sees one.
        self._ended = False

    @classmethod
    def for_params(cls, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> Constraint | None:
        """The constraint of a new continuation; None where the parameters ask for none.

        `eos_token_ids`: what ends the text; by default the tokenizer's own. Raises UserError where llguidance is
        missing or refuses the grammar, with its reason.
        """
        if params.regex is None and params.json_schema is None:
            return None
        llguidance = _llguidance()
        view = _wrapped(tokenizer, eos_token_ids)
        if params.regex is not None:
            name, grammar = "regex", llguidance.LLMatcher.grammar_from_regex(params.regex)
        else:
            overrides = {"whitespace_pattern": WHITE_SPACE}
            text = params.schema_text
            name, grammar = "json_schema", llguidance.LLMatcher.grammar_from_json_schema(text, overrides=overrides)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(view, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            # After the reason it quotes the grammar that was made from what the user gave.
            reason = matcher.get_error().split("\n   1 | ")[0].replace("<non-verbose/>", "")
            raise UserError(f"{name} cannot be followed: {' '.join(reason.split())[:400]}")
        return cls(matcher, view.eos_tokens, view.vocab_size)

    @property
    def finished(self) -> bool:
        """Nothing but the end of text is allowed."""
        return self._ended or self._matcher.is_stopped()

    def mask(self, vocab_size: int | None = None) -> Tensor:
        """bool [vocab_size] on the host: the tokens allowed next. Logits beyond the tokenizer's tokens never are."""
        size = self._vocab_size if vocab_size is None else vocab_size
        allowed = np.zeros(size, dtype=bool)
        if self._ended:
            allowed[[token for token in self._eos if token < size]] = True
        else:
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, count=min(size, self._vocab_size), bitorder="little")
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Goes on by the longest prefix of the tokens that the grammar allows; returns how many that are.

        Fewer than given happens only to tokens that were not drawn under `mask` (a draft model's).
        """
        for accepted, token in enumerate(token_ids):
            if token in self._eos:
                # A matcher that gave up (a grammar too costly to follow) has stopped too: the text may only end.
                if not (self._ended or self._matcher.is_accepting() or self._matcher.is_stopped()):
                    return accepted
                self._ended = True
            elif self._ended or self._matcher.try_consume_tokens([token]) != 1:
                return accepted
        return len(token_ids)
