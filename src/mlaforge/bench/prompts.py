"""Prompts of a given length, cut from real text (short documents are joined), and conversations from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlaforge.artifact import record_path, sha256
from mlaforge.data import corpus
from mlaforge.drafting.dataset import read_prompts
from mlaforge.engine.request import chat_template
from mlaforge.runtime import UserError


class Prompts:
    """Source text and its tokenizer. Deterministic: equal calls return equal prompts."""

    def __init__(self, sources: tuple[str, ...], tokenizer: Any):
        self.sources, self.tokenizer = sources, tokenizer
        texts = (text for source in sources for text in corpus.documents(source, evaluation=True, tokenizer=tokenizer))
        self.text = "\n\n".join(text for text in texts if text.strip())
        # Special tokens that the tokenizer puts before any text, such as BOS.
        self.prefix: list[int] = list(tokenizer("")["input_ids"])

    def __call__(self, context: int, batch: int, rounds: int) -> list[list[list[int]]]:
        """Return [round][request] -> token ids, `context` tokens each. Each prompt starts at a different line, so no
        two share a prefix; they may overlap otherwise. Raise UserError if the text is too short."""
        count = batch * rounds
        starts = [self.text.find("\n", number * len(self.text) // count) + 1 for number in range(count)]
        if len(set(starts)) < count:
            raise UserError(f"the text has too few lines for {count} prompts; give more --text or fewer --rounds")
        prompts = [self._prompt_at(start, context) for start in starts]
        return [prompts[first : first + batch] for first in range(0, count, batch)]

    def _prompt_at(self, start: int, context: int) -> list[int]:
        length = context - len(self.prefix)
        # The text wraps around at its end.
        ids = corpus.tokens(self.tokenizer, self.text[start:] + "\n\n" + self.text[:start], length)
        if len(ids) < length:
            raise UserError(
                f"the text has {len(ids)} tokens, prompts need {context}; give more --text or a smaller --context"
            )
        return self.prefix + ids[:length].tolist()

    def describe(self) -> list[dict[str, str]]:
        """Files and their hashes, as results record them."""
        files = [p for source in self.sources if source != corpus.EMBEDDED for p in _files(Path(source).expanduser())]
        records = [{"path": record_path(path), "sha256": sha256(path)} for path in files]
        return [*records, *({"path": s, "sha256": ""} for s in self.sources if s == corpus.EMBEDDED)]


class Conversations(Prompts):
    """Conversations with the first turns of a file of prompts, in its order. file: .jsonl of {"turns": [text, ...]}."""

    def __init__(self, file: str, sources: tuple[str, ...], tokenizer: Any):
        super().__init__(sources, tokenizer)
        self.file, self.turns = Path(file).expanduser(), read_prompts(Path(file).expanduser())

    def __call__(self, context: int, batch: int, rounds: int) -> list[list[list[int]]]:
        """Return [round][request] -> token ids. A passage of `context` tokens of the text stands before each turn, a
        different one each time. Raise UserError if there are too few prompts or too little text."""
        if (count := batch * rounds) > len(self.turns):
            raise UserError(
                f"{self.file} has {len(self.turns)} prompts, {count} are needed; reduce --rounds or --batch"
            )
        passages = self._passages(context, count) if context else [""] * count
        prompts = [
            chat_template.render(self.tokenizer, [{"role": "user", "content": passage + turn}])
            for passage, turn in zip(passages, self.turns, strict=False)
        ]
        return [prompts[first : first + batch] for first in range(0, count, batch)]

    def _passages(self, context: int, count: int) -> list[str]:
        """Consecutive passages of the text."""
        ids = corpus.tokens(self.tokenizer, self.text, count * context)
        if len(ids) < count * context:
            raise UserError(
                f"the text has {len(ids)} tokens, {count} passages of {context} are needed; give more --text or reduce "
                "--rounds or --context"
            )
        return [self.tokenizer.decode(ids[n * context : (n + 1) * context]) + "\n\n" for n in range(count)]

    def describe(self) -> list[dict[str, str]]:
        """See Prompts.describe; the file of prompts is the first."""
        return [{"path": record_path(self.file), "sha256": sha256(self.file)}, *super().describe()]


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
