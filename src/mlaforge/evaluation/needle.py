"""Needle in a haystack: retrieval of a number from a long text.

A case is a text of a given length with one sentence about a number at a given depth (0: beginning, 1: end), and a
question at the end that only that sentence answers. The needle is retrieved if every token of the number is the model's
most likely one, as in greedy decoding. After G. Kamradt's LLMTest_NeedleInAHaystack (2023).
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
    """Token ids [T] with the requested length and depth; the last `answer` tokens are the number."""

    ids: Tensor
    answer: int
    length: int
    depth: float


def cases(
    tokenizer: Any, haystack: list[str], lengths: Sequence[int], depths: Sequence[float], repeats: int, seed: int
) -> list[Case]:
    """Return `repeats` cases for every length (tokens, including the question) and depth.

    Raises UserError for a length that is too short for the question or longer than the documents.
    """
    rng = random.Random(seed)
    haystack_ids = corpus.tokens(tokenizer, "\n\n".join(haystack))
    needle_cases = []
    for length in lengths:
        for depth in depths:
            for _ in range(repeats):
                name, number = rng.choice(NAMES), rng.randint(10000, 99999)
                needle, question = (
                    corpus.tokens(tokenizer, text.format(name=name, number=number)) for text in (NEEDLE, QUESTION)
                )
                answer = corpus.tokens(tokenizer, f" {number}")
                haystack_tokens = length - len(needle) - len(question) - len(answer)
                if not 0 < haystack_tokens <= len(haystack_ids):
                    raise UserError(
                        f"a needle text of {length} tokens needs between 1 and {len(haystack_ids)} tokens of haystack, "
                        f"not {haystack_tokens}; give another length"
                    )
                start = rng.randint(0, len(haystack_ids) - haystack_tokens)
                needle_position = round(depth * haystack_tokens)
                text = haystack_ids[start : start + haystack_tokens]
                ids = torch.cat((text[:needle_position], needle, text[needle_position:], question, answer))
                needle_cases.append(Case(ids, len(answer), length, depth))
    return needle_cases


def is_retrieved(hidden_TC: Tensor, head_VC: Tensor, case: Case) -> bool:
    """Return whether a model retrieves the needle. hidden_TC: its hidden states on the case, after the final norm."""
    answer_states = hidden_TC[-case.answer - 1 : -1]
    predicted = (answer_states @ head_VC.T).argmax(-1).cpu()
    return bool((predicted == case.ids[-case.answer :]).all())
