"""Reasoning between <think> and </think> at the beginning of an answer.

Source: the chat templates of DeepSeek-R1, QwQ and Qwen3, which write these tags and leave the reasoning of earlier
turns out.
"""

from __future__ import annotations

from mlaforge.engine.request.answer_text import AnswerText, Reader

THINK, END_THINK = "<think>", "</think>"


def read_reasoning(answer: AnswerText, inside: bool) -> Reader[None]:
    """Read the reasoning, and stop after it. `inside`: the prompt ends with <think>; the answer may repeat it."""
    yield from answer.skip()
    if (yield from answer.follows(THINK)):
        answer.drop()
    else:
        answer.rewind()
        if not inside:
            return
    yield from answer.skip("\n")
    answer.drop()
    answer.send_to("reasoning_content")
    if (yield from answer.find(END_THINK, space="\n")):
        answer.send_to(None)
        yield from answer.skip("\n")
        yield from answer.follows(END_THINK)
        yield from answer.skip("\n")
        answer.drop()
