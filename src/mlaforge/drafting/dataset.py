"""Prompts, and what a model itself answered to them: the text that its draft head learns from; and what a head may be
judged on.

A file of prompts is .jsonl of {"turns": [text, ...]}, of which the first turn is asked. Regenerated text is a directory
that `mlaforge draft regenerate` wrote: a manifest beside TEXT, .jsonl of {"number", "said", "prompt", "answer"}, the
last two as token ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest, record_name
from mlaforge.data.records import json_lines
from mlaforge.runtime import UserError

STAGE, TEXT = "draft regenerate", "text.jsonl"
# The stage that trains heads on it.
TRAINED = "draft train"
# The stage that copies heads into another storage format.
EXPORTED = "draft export"
# Two prompts are the same text where they share so many words in a row (Brown et al. 2020, arXiv:2005.14165), or are
# equal but for blanks and capitals.
RUN = 13
# Share of the answers that no head is trained on and no vocabulary counts: what they are judged on meanwhile.
HELD = 0.05


@dataclasses.dataclass(frozen=True)
class Answer:
    """A conversation of one turn: the whole prompt with its template, and the answer with the token that ends it."""

    number: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def held(self) -> bool:
        """Whether it is kept back. Depends on nothing but the prompt."""
        drawn = hashlib.sha256(json.dumps(self.prompt_ids).encode()).digest()
        return int.from_bytes(drawn[:6], "big") < HELD * 2**48


def read_prompts(path: Path) -> list[str]:
    """The first turns of a file of prompts. Raises UserError where it is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts {path} cannot be read: {error}") from error
    prompts = []
    for number, turn in json_lines(lines, _first_turn):
        if turn is None:
            raise UserError(f'{path} line {number} is not {{"turns": [text, ...]}}')
        prompts.append(turn)
    if not prompts:
        raise UserError(f"{path} holds no prompts")
    return prompts


def _first_turn(record: Any) -> str:
    turn: str = record["turns"][0].strip()
    turn.encode()  # fails for half a character
    return turn


def _answer(record: Any) -> Answer:
    answer = Answer(record["number"], record["prompt"], record["answer"])
    whole = [*answer.prompt_ids, *answer.answer_ids]
    if not answer.prompt_ids or not answer.answer_ids or any(type(i) is not int or i < 0 for i in whole):
        raise TypeError(whole)
    return answer


def read_judged(path: Path) -> list[str]:
    """What a file holds that something is judged on: its prompts (.jsonl), or its text."""
    return read_prompts(path) if path.suffix == ".jsonl" else [read_text(path)]


def read_text(path: Path) -> str:
    """A file of text. Raises UserError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text {path} cannot be read: {error}") from error


def _texts(head: Path, manifest: Manifest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """`inputs.text` of a trained head, and of the heads that it began as: None where that is not known."""
    try:
        own, init = manifest.inputs["text"], manifest.inputs["init"]
        texts = own, init["text"] if init else []
        if own and all(isinstance(text["exclude"], list) for some in texts for text in some or []):
            return texts
    except (KeyError, TypeError):
        pass
    raise UserError(f"the manifest of {head} is damaged: it does not say what the head was trained on")


def training_manifest(head: Path) -> Manifest | None:
    """The manifest of the training that made a head, which exports of the head carry; None where there is none. Raises
    UserError for a damaged one."""
    manifest = Manifest.load(head)
    while manifest is not None and manifest.stage == EXPORTED:
        try:
            source = manifest.inputs["head"]["manifest"]
            manifest = None if source is None else Manifest.from_dict(source)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"the manifest of {head} is damaged: it does not say what was exported") from error
    return manifest if manifest is not None and manifest.stage == TRAINED else None


def learnt_from(head: Path) -> list[dict[str, Any]] | None:
    """All text that a head and those it began as were trained on, as their manifests name it; None where that is not
    known. Raises UserError for a damaged manifest."""
    manifest = training_manifest(head)
    own, earlier = ([], None) if manifest is None else _texts(head, manifest)
    return None if earlier is None else [*own, *earlier]


def check_unseen(head: Path, judged: Iterable[Mapping[str, str]]) -> str:
    """Refuses to judge a trained head on files that its text may hold, by its manifest.

    judged: path and sha256 of each file; no sha256: the embedded text. Returns what is not known of the head, "" where
    all of its text is free of all of them. Raises UserError for a file that some of its text may share something with.
    """
    manifest = training_manifest(head)
    name = record_name(head)
    if manifest is None:
        return f"nothing says what {name} was trained on: it may have seen what it is judged on"
    own, earlier = _texts(head, manifest)
    free = set.intersection(*(set(text["exclude"]) for text in [*own, *(earlier or [])]))
    unknown = "" if earlier is not None else f"{name} began as another head, of whose text nothing is known"
    for file in judged:
        if not file["sha256"]:
            unknown = unknown or f"whether {name} was trained on text like the embedded one is not known"
        elif file["sha256"] not in free:
            raise UserError(
                f"{head} was trained on text that need not be free of {file['path']}; nothing may be judged on what it "
                "was tuned on: give another text, or train on what `draft regenerate --exclude` of that file wrote"
            )
    return unknown


def words(text: str) -> str:
    """A text without capitals and with single blanks."""
    return " ".join(text.casefold().split())


def _runs(text: str) -> Iterable[str]:
    """What tells whether a text repeats another: the whole of it, and every RUN words in a row."""
    split = words(text).split()
    yield " ".join(split)
    for at in range(len(split) - RUN + 1):
        yield " ".join(split[at : at + RUN])


class Excluded:
    """Prompts that something will be judged on."""

    def __init__(self, prompts: Iterable[str]):
        self._known = {run for prompt in prompts for run in _runs(prompt)}

    def __contains__(self, text: str) -> bool:
        return not self._known.isdisjoint(_runs(text))


def read_answers(directory: Path) -> tuple[Manifest, list[Answer]]:
    """What `draft regenerate` wrote. Raises UserError for another directory, and for a damaged file."""
    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} is not what `mlaforge draft regenerate` wrote")
    answers = []
    try:
        lines = (directory / TEXT).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{directory / TEXT} cannot be read: {error}") from error
    for number, answer in json_lines(lines, _answer):
        if answer is None:
            raise UserError(f"{directory / TEXT} line {number} is damaged; regenerate the text")
        answers.append(answer)
    if not answers:
        raise UserError(f"{directory} holds no answers; give more prompts")
    return manifest, answers


def split(answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Those to learn from, each prompt once, and those kept back. Raises UserError where one of them is empty."""
    once = list({tuple(answer.prompt_ids): answer for answer in answers}.values())
    train, validation = [a for a in once if not a.held], [a for a in once if a.held]
    if not train or not validation:
        raise UserError(f"of {len(once)} answers {len(validation)} are kept back to judge on: too few; give more text")
    return train, validation


def answer_line(number: int, prompt: str, prompt_ids: list[int], answer_ids: list[int]) -> dict[str, Any]:
    """A line of TEXT."""
    return {"number": number, "said": prompt, "prompt": prompt_ids, "answer": answer_ids}
