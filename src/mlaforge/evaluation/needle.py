"""A needle in a haystack: whether a model finds a number again that stood somewhere in a long text.

A case is a text of a given length with one sentence about a number at a given depth (0: its beginning, 1: its end),
and a question after it that only that sentence answers. It is found where every token of the number is the model's
likeliest, which is what greedy decoding would give. After G. Kamradt's LLMTest_NeedleInAHaystack (2023).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.data import corpus
from mlaforge.runtime import UserError

NEEDLE = "\n\nThe special magic number for {name} is {number}.\n\n"
QUESTION = "\n\nQuestion: What is the special magic number for {name}?\nAnswer: The special magic number for {name} is"
NAMES = ("Oslo", "Lima", "Cairo", "Quito", "Delhi", "Perth", "Kyoto", "Turin", "Accra", "Minsk")


@dataclasses.dataclass(frozen=True)
class Case:
    """Token ids [T], of which the last `answer` are the number; and what was asked for."""

    ids: Tensor
    answer: int
    length: int
    depth: float


def cases(
    tokenizer: Any, haystack: list[str], lengths: Sequence[int], depths: Sequence[float], repeats: int, seed: int
) -> list[Case]:
    """`repeats` cases of every length (tokens, the question included) and depth, from documents. UserError where a
    length is too short for the question or longer than the documents."""
    draw = random.Random(seed)
    hay = corpus.tokens(tokenizer, "\n\n".join(haystack))
    needle_cases = []
    for length in lengths:
        for depth in depths:
            for _ in range(repeats):
                name, number = draw.choice(NAMES), draw.randint(10000, 99999)
                needle, question = (
                    corpus.tokens(tokenizer, text.format(name=name, number=number)) for text in (NEEDLE, QUESTION)
                )
                answer = corpus.tokens(tokenizer, f" {number}")
                rest = length - len(needle) - len(question) - len(answer)
                if not 0 < rest <= len(hay):
                    raise UserError(
                        f"a needle's text of {length} tokens needs between 1 and {len(hay)} of hay, not {rest}; give "
                        "another length"
                    )
                start = draw.randint(0, len(hay) - rest)
                before = round(depth * rest)
                text = hay[start : start + rest]
                ids = torch.cat((text[:before], needle, text[before:], question, answer))
                needle_cases.append(Case(ids, len(answer), length, depth))
    return needle_cases


def is_found(hidden_TC: Tensor, head_VC: Tensor, case: Case) -> bool:
    """From a model's final, normed hidden states [T, C] on the case and its head."""
    before = hidden_TC[-case.answer - 1 : -1]
    predicted = (before @ head_VC.T).argmax(-1).cpu()
    return bool((predicted == case.ids[-case.answer :]).all())
