"""A hook of mkdocs: formulas become MathML while the site is built, so that a page needs no script to show them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of $...$ and of ```math.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# \mathbb E: the converter wants the letter in braces to take the letter's own character.
ALPHABET = re.compile(r"(\\math[a-z]+)\s+([A-Za-z])")


def mathml(formula: str, display: str) -> str:
    """A formula of the page's HTML as MathML; `display` is inline or block."""
    return str(convert(ALPHABET.sub(r"\1{\2}", html.unescape(formula)), display=display))


def on_page_content(content: str, **_: Any) -> str:
    """The HTML of a page, its formulas as MathML."""
    content = BLOCK.sub(lambda match: f"<p>{mathml(match[1], 'block')}</p>", content)
    return INLINE.sub(lambda match: mathml(match[1], "inline"), content)
