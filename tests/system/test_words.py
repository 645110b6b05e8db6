"""The documentation stays short enough to read: words of guides and reference, and of notes."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("kind", "pattern", "limit"), [("guides and reference", "*.md", 30_000), ("notes", "notes/*.md", 14_200)]
)
def test_words_of_documents(kind, pattern, limit):
    """Words as `wc -w` counts them: tables and code included."""
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob(pattern)}
    total = sum(words.values())
    longest = ", ".join(f"{name} {words[name]:,}" for name in sorted(words, key=words.__getitem__, reverse=True)[:5])
    assert total <= limit, f"{kind} have {total - limit:,} words more than {limit:,}; the longest pages: {longest}"
