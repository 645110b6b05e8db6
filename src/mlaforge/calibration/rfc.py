"""The text of IETF RFCs by section, without the headers and footers of their pages."""

from __future__ import annotations

import re

# `Postel                                                                 [Page 12]`
FOOTER = re.compile(r"^.*\[Page [0-9ivxlc]+\]\s*$")
# `RFC 791           Internet Protocol          September 1981`; drafts say Internet-Draft on the left.
HEADER = re.compile(r"^(RFC[ -]?\d+|Internet[- ]Draft)\s{2,}\S.*\d{4}\s*$", re.IGNORECASE)
# `3.1.  Internet Header Format`, `Appendix B.  Examples`; an entry of the table of contents ends in its page's number.
HEADING = re.compile(r"^(\d+(\.\d+)*\.?|[A-Z](\.\d+)+\.?|Appendix [A-Z][.:]?)\s+\S")
CONTENTS = re.compile(r"(\s\.){2,}|\.{3,}|\s{3,}\d+\s*$")
# A shorter section goes with the next one: a heading alone says nothing.
SHORT = 200


def unpaged(text: str) -> str:
    """`text` without the headers and footers of its pages; a paragraph that a page broke is whole again."""
    lines: list[str] = []
    # A break was seen, and no text after it.
    broken = False
    for line in text.replace("\r\n", "\n").replace("\f", "\n\f\n").split("\n"):
        if line == "\f" or FOOTER.match(line) or HEADER.match(line):
            broken = True
            continue
        if not line.strip():
            if not broken:
                lines.append("")
            continue
        if broken:
            while lines and not lines[-1]:
                lines.pop()
            # The sentence goes on after the break where it did not end before it.
            goes_on = lines and not re.search(r"[.:;!?>)]\s*$", lines[-1]) and _indent(lines[-1]) == _indent(line)
            if lines and not goes_on:
                lines.append("")
            broken = False
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def sections(text: str) -> list[str]:
    """An RFC's text as its sections, each beginning with its heading, pages taken away."""
    section_lines: list[list[str]] = [[]]
    for line in unpaged(text).split("\n"):
        if HEADING.match(line) and not CONTENTS.search(line) and sum(map(len, section_lines[-1])) >= SHORT:
            section_lines.append([])
        section_lines[-1].append(line)
    return [joined for lines in section_lines if (joined := "\n".join(lines).strip("\n"))]
