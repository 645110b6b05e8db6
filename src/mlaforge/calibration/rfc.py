"""Sections of IETF RFCs, without page headers and footers."""

from __future__ import annotations

import re

# `Postel                                                                 [Page 12]`
FOOTER = re.compile(r"^.*\[Page [0-9ivxlc]+\]\s*$")
# `RFC 791           Internet Protocol          September 1981`; drafts begin with Internet-Draft.
HEADER = re.compile(r"^(RFC[ -]?\d+|Internet[- ]Draft)\s{2,}\S.*\d{4}\s*$", re.IGNORECASE)
# `3.1.  Internet Header Format`, `Appendix B.  Examples`; entries of the table of contents end with a page number.
HEADING = re.compile(r"^(\d+(\.\d+)*\.?|[A-Z](\.\d+)+\.?|Appendix [A-Z][.:]?)\s+\S")
CONTENTS = re.compile(r"(\s\.){2,}|\.{3,}|\s{3,}\d+\s*$")
# Sections of fewer characters are merged with the next one: a heading alone is no text.
MIN_SECTION = 200


def unpaged(text: str) -> str:
    """Remove page headers and footers from `text`, and rejoin paragraphs that a page break divided."""
    lines: list[str] = []
    # Whether a page break was seen since the last line of text.
    page_break = False
    for line in text.replace("\r\n", "\n").replace("\f", "\n\f\n").split("\n"):
        if line == "\f" or FOOTER.match(line) or HEADER.match(line):
            page_break = True
            continue
        if not line.strip():
            if not page_break:
                lines.append("")
            continue
        if page_break:
            while lines and not lines[-1]:
                lines.pop()
            # A sentence that did not end before the break continues after it.
            continues = lines and not re.search(r"[.:;!?>)]\s*$", lines[-1]) and _indent(lines[-1]) == _indent(line)
            if lines and not continues:
                lines.append("")
            page_break = False
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def sections(text: str) -> list[str]:
    """Return the sections of an RFC, each with its heading, without page breaks."""
    section_lines: list[list[str]] = [[]]
    for line in unpaged(text).split("\n"):
        if HEADING.match(line) and not CONTENTS.search(line) and sum(map(len, section_lines[-1])) >= MIN_SECTION:
            section_lines.append([])
        section_lines[-1].append(line)
    return [joined for lines in section_lines if (joined := "\n".join(lines).strip("\n"))]
