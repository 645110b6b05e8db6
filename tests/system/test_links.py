"""Every link of README and the documentation leads somewhere: files, and headings by their anchors; the site has every
page."""

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)|\b(?:src|srcset|href)=\"([^\"]+)\"", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without what is code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> list[str]:
    """What a page links to, but for other hosts."""
    found = ["".join(match) for match in LINK.findall(prose(page))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    made = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def test_every_link_leads_somewhere():
    broken = []
    for page in PAGES:
        for link in links(page):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link} leads nowhere")
            # The site has nothing of the repository but docs/.
            elif page.parent == DOCS and not target.is_relative_to(DOCS):
                broken.append(f"{page.relative_to(ROOT)}: {link} leaves docs/")
    assert not broken, "\n".join(broken)


def test_broken_links_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('# A `b`, c\n[x](gone.md) `[code](none.md)` [y](#a-b-c)\n\n[Z]: other.md\n<img src="z.svg">\n')
    assert links(page) == ["gone.md", "#a-b-c", "other.md", "z.svg"]
    assert anchors(page) == {"a-b-c"}


class Tagged(yaml.SafeLoader):
    """YAML whose tags for Python's functions are not followed."""


Tagged.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_the_site_and_the_index_have_every_page():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Tagged)
    named = [
        page for section in config["nav"] for pages in section.values() for entry in pages for page in entry.values()
    ]
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(named) == pages
    assert set(links(DOCS / "index.md")) | {"index.md"} == set(pages)


def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra mlaforge[docs] is not installed")
    pytest.importorskip("latex2mathml", reason="the extra mlaforge[docs] is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    own = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "conversion.html").read_text(encoding="utf-8")
    # Every formula was understood, and the page asks nothing of another host.
    assert page.count("<math") > 100 and "arithmatex" not in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)"', page)
