"""The user turn of a chat template, and user questions sampled from the model itself.

An instruct model that continues its template's user header writes a question (Magpie, Xu et al. 2024,
arXiv:2406.08464).
"""

from __future__ import annotations

from typing import Any

from mlaforge.engine.request import chat_template
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.synthesis.journal import GenerationRequest
from mlaforge.synthesis.repetition import distinct_ngram_ratio

# User message for which a template is rendered, to find the tokens around it.
PLACEHOLDER = "WHAT THE USER SAYS"
# A question is accepted between these lengths and from this share of distinct 4-grams on.
MIN_WORDS, MAX_QUESTION_TOKENS, MIN_DISTINCT_RATIO = 4, 256, 0.7
# Sampling temperature: 1 is the model's distribution; openings add variety already, so less is needed after them.
TEMPERATURE, TEMPERATURE_AFTER_OPENING = 1.0, 0.7


class UserTurn:
    """The tokens that a chat template puts around a user message.

    header: the token ids before the message; end: the first token id after it. Raises UserError if the model has no
    chat template that shows them.
    """

    def __init__(self, tokenizer: Any, model_name: str):
        self.tokenizer = tokenizer
        rendered: str = tokenizer.apply_chat_template([{"role": "user", "content": PLACEHOLDER}], tokenize=False) \
            if tokenizer.chat_template else ""  # fmt: skip
        before, _, after = rendered.partition(PLACEHOLDER)
        if not before or not after:
            raise UserError(f"{model_name} has no chat template that marks the user turn")
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after)]
        self.header, self.end = ids[0], ids[1][0]
        self.special = set(tokenizer.all_special_ids)

    def sample_question(self, seed: int, opening: list[int]) -> GenerationRequest:
        """Return a request for a user question that begins with the token ids of `opening`."""
        params = SamplingParams(
            max_tokens=MAX_QUESTION_TOKENS, temperature=TEMPERATURE_AFTER_OPENING if opening else TEMPERATURE,
            seed=seed, stop_token_ids=(self.end,),
        )  # fmt: skip
        return GenerationRequest(self.header + opening, params)

    def parse_question(self, request: GenerationRequest, token_ids: list[int]) -> tuple[str, str]:
        """Return the text of the sampled question, and why it is rejected ("" if it is accepted)."""
        question = request.prompt_ids[len(self.header) :] + token_ids[:-1]
        text = self.tokenizer.decode(question).strip()
        share = distinct_ngram_ratio(question)
        if token_ids[-1] != self.end or self.special.intersection(question):
            return text, "no end"
        if len(text.split()) < MIN_WORDS:
            return text, "too short"
        return text, "repeats itself" if share is not None and share < MIN_DISTINCT_RATIO else ""

    def conversation_ids(self, text: str) -> list[int]:
        """Return the prompt of a conversation with the user message `text`, with the generation prompt."""
        return chat_template.render(self.tokenizer, [{"role": "user", "content": text}])
