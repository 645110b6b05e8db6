"""Training data of draft heads: prompts with the target's own answers, and the check that evaluation text is unseen.

A file of prompts is .jsonl of {"turns": [text, ...]}; the first turn is the prompt. Regenerated text is a directory
written by `mlaforge draft regenerate`: a manifest and TEXT_FILE, .jsonl of {"number", "said", "prompt", "answer"}, the
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

STAGE, TEXT_FILE = "draft regenerate", "text.jsonl"
TRAIN_STAGE = "draft train"
EXPORT_STAGE = "draft export"
# Two prompts overlap if they share this many consecutive words (Brown et al. 2020, arXiv:2005.14165), or are equal up
# to blanks and case.
OVERLAP_WORDS = 13
# Share of the answers held out for validation from training and from vocabulary counts.
VALIDATION_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Answer:
    """A conversation of one turn: the prompt with its chat template, and the answer with its end token."""

    number: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def is_validation(self) -> bool:
        """Whether the answer is held out for validation; depends on the prompt alone."""
        digest = hashlib.sha256(json.dumps(self.prompt_ids).encode()).digest()
        return int.from_bytes(digest[:6], "big") < VALIDATION_SHARE * 2**48


def read_prompts(path: Path) -> list[str]:
    """Read the first turns of a file of prompts. Raises UserError for an invalid or empty file."""
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
        raise UserError(f"{path} contains no prompts")
    return prompts


def _first_turn(record: Any) -> str:
    turn: str = record["turns"][0].strip()
    turn.encode()  # raises for lone surrogates
    return turn


def _answer(record: Any) -> Answer:
    answer = Answer(record["number"], record["prompt"], record["answer"])
    ids = [*answer.prompt_ids, *answer.answer_ids]
    if not answer.prompt_ids or not answer.answer_ids or any(type(i) is not int or i < 0 for i in ids):
        raise TypeError(ids)
    return answer


def read_eval_texts(path: Path) -> list[str]:
    """Read evaluation text from a file: its prompts (.jsonl), or the whole text."""
    return read_prompts(path) if path.suffix == ".jsonl" else [read_text(path)]


def read_text(path: Path) -> str:
    """Read a text file. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text {path} cannot be read: {error}") from error


def _recorded_texts(head: Path, manifest: Manifest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return `inputs.text` of a trained head, and that of the heads it was initialised from (None if unknown)."""
    try:
        texts, init = manifest.inputs["text"], manifest.inputs["init"]
        earlier = init["text"] if init else []
        if texts and all(isinstance(text["exclude"], list) for text in [*texts, *(earlier or [])]):
            return texts, earlier
    except (KeyError, TypeError):
        pass
    raise UserError(f"the manifest of {head} is damaged: it does not record what the head was trained on")


def training_manifest(head: Path) -> Manifest | None:
    """Return the manifest of the training run of a head, which its exports contain; None if there is none.

    Raises UserError for a damaged manifest.
    """
    manifest = Manifest.load(head)
    while manifest is not None and manifest.stage == EXPORT_STAGE:
        try:
            source = manifest.inputs["head"]["manifest"]
            manifest = None if source is None else Manifest.from_dict(source)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"the manifest of {head} is damaged: it does not record what was exported") from error
    return manifest if manifest is not None and manifest.stage == TRAIN_STAGE else None


def training_texts(head: Path) -> list[dict[str, Any]] | None:
    """Return the manifest records of all text that a head and its initial heads were trained on; None if unknown.

    Raises UserError for a damaged manifest.
    """
    manifest = training_manifest(head)
    texts, earlier = ([], None) if manifest is None else _recorded_texts(head, manifest)
    return None if earlier is None else [*texts, *earlier]


def check_unseen(head: Path, eval_files: Iterable[Mapping[str, str]]) -> str:
    """Check by its manifest that a trained head has not seen the evaluation files.

    eval_files: path and sha256 of each file; an empty sha256 means the embedded text. Returns what is unknown, "" if
    all of its training text excludes all files. Raises UserError for a file that its training text may overlap.
    """
    manifest = training_manifest(head)
    name = record_name(head)
    if manifest is None:
        return f"no manifest records what {name} was trained on: it may have seen the evaluation text"
    texts, earlier = _recorded_texts(head, manifest)
    free = set.intersection(*(set(text["exclude"]) for text in [*texts, *(earlier or [])]))
    unknown = "" if earlier is not None else f"{name} was initialised from a head whose training text is unknown"
    for file in eval_files:
        if not file["sha256"]:
            unknown = unknown or f"it is unknown whether {name} was trained on text like the embedded one"
        elif file["sha256"] not in free:
            raise UserError(
                f"{head} was trained on text that does not exclude {file['path']}; evaluation needs unseen text: give "
                "another, or train on text from `draft regenerate --exclude` with that file"
            )
    return unknown


def normalize(text: str) -> str:
    """Lower the case of a text and collapse its blanks."""
    return " ".join(text.casefold().split())


def _ngrams(text: str) -> Iterable[str]:
    """Yield the normalised text and its n-grams of OVERLAP_WORDS words, by which overlap is detected."""
    split = normalize(text).split()
    yield " ".join(split)
    for at in range(len(split) - OVERLAP_WORDS + 1):
        yield " ".join(split[at : at + OVERLAP_WORDS])


class Excluded:
    """Evaluation prompts to exclude: `text in excluded` is whether the text overlaps one of them."""

    def __init__(self, prompts: Iterable[str]):
        self._known = {ngram for prompt in prompts for ngram in _ngrams(prompt)}

    def __contains__(self, text: str) -> bool:
        return not self._known.isdisjoint(_ngrams(text))


def read_answers(directory: Path) -> tuple[Manifest, list[Answer]]:
    """Read a directory written by `draft regenerate`. Raises UserError for another one, and for a damaged file."""
    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} was not written by `mlaforge draft regenerate`")
    answers = []
    try:
        lines = (directory / TEXT_FILE).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{directory / TEXT_FILE} cannot be read: {error}") from error
    for number, answer in json_lines(lines, _answer):
        if answer is None:
            raise UserError(f"{directory / TEXT_FILE} line {number} is damaged; regenerate the text")
        answers.append(answer)
    if not answers:
        raise UserError(f"{directory} contains no answers; give more prompts")
    return manifest, answers


def split(answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Split answers with distinct prompts into training and validation. Raises UserError if one of them is empty."""
    distinct = list({tuple(answer.prompt_ids): answer for answer in answers}.values())
    train, validation = [a for a in distinct if not a.is_validation], [a for a in distinct if a.is_validation]
    if not train or not validation:
        raise UserError(
            f"{len(distinct)} answers give {len(validation)} for validation: too few for a split; give more text"
        )
    return train, validation


def answer_line(number: int, prompt: str, prompt_ids: list[int], answer_ids: list[int]) -> dict[str, Any]:
    """Return a line of TEXT_FILE."""
    return {"number": number, "said": prompt, "prompt": prompt_ids, "answer": answer_ids}
