"""The report in a real browser: light and dark, wide and narrow, every drawing with ink, nothing said on the console.

Takes the machine's Chromium (Debian: apt-get install chromium) through the extra mlaforge[browser]; skips where either
is missing.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlaforge.diagnosis import diagnose
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.report.report import write_report
from support import recorded

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = {"wide": (1280, 900), "phone": (360, 740)}
# Of a drawing's pixels, at least these differ from its paper.
INK = 0.004
# WCAG 2: contrast of text (AA).
CONTRAST = 4.5
# The place of every drawing on the page; text in them that is cut off; the worst contrast of text in them.
LOOK = """() => {
  const luminance = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = luminance(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('figure svg, svg.probe')].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => {
      const b = text.getBoundingClientRect(), ink = luminance(getComputedStyle(text).fill);
      const out = Math.max(box.left - b.left, b.right - box.right, box.top - b.top, b.bottom - box.bottom);
      return {said: text.textContent, out, contrast: (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)};
    });
    return {title: svg.getAttribute('aria-label'), texts,
            box: [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY]};
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Any:
    api = pytest.importorskip("playwright.sync_api", reason="the extra mlaforge[browser] is not installed")
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], calibration_file: Path) -> Path:
    """A report with every part."""
    folder = tmp_path_factory.mktemp("everything")
    for name, layout, ratio in (("latent", "latent", 1.02), ("rope", "latent_rope", 1.27)):
        conversion = recorded.conversion(layout, ratio)
        conversion.metrics |= {"log_ratio_stderr": 0.004, "windows": 8}
        recorded.save(conversion, folder / f"tiny-{name}")
    recorded.save(recorded.healing(), folder / "healed")
    recorded.save(recorded.judged(), folder / "judged")
    recorded.save(recorded.evaluation(), folder / "a-folder-with-quite-a-long-name-as-people-give-them" / "eval")
    recorded.save(recorded.talk("The sky is blue.", "The sky is green."), folder / "talk")
    config = DiagnoseConfig(text=str(calibration_file), seqlen=64, windows=3, device="cpu", report=False)
    diagnose.run(str(tiny_models["gpt_oss"]), folder / "diagnosis", config)
    cases = recorded.cases()
    for case in cases:
        case["model"] = case["model"].replace(
            "tiny-latent", "smollm2-135m-instruct-converted-to-latent-at-37.5-percent"
        )
    recorded.put(folder, single=recorded.scenario(cases), gates=recorded.gates(), kernels=recorded.kernels())
    write_report(folder, folder / "report.html")
    return folder / "report.html"


class Seen:
    """A page opened in the browser, and its errors."""

    def __init__(self, browser: Any, path: Path):
        self.page, self.complaints = browser.new_page(), list[str]()
        # In ms; generous, as shared machines are slow.
        self.page.set_default_timeout(300_000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda r: self.complaints.append(r.url) if not r.url.startswith("file:") else None)
        self.page.goto(path.as_uri())
        self.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")

    def turn(self, scheme: str, size: str) -> None:
        """Show the page in a colour scheme and screen size."""
        width, height = SIZES[size]
        self.page.emulate_media(color_scheme=scheme)
        self.page.set_viewport_size({"width": width, "height": height})

    def overflow(self) -> int:
        """Pixels by which the page exceeds the width of the screen."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def blank(self) -> list[str]:
        """Titles of blank plots."""
        drawings = self.page.evaluate(LOOK)
        shot = Image.open(io.BytesIO(self.page.screenshot(full_page=True, scale="css"))).convert("RGB")
        return [d["title"] for d in drawings if ink(shot.crop([round(edge) for edge in d["box"]])) < INK]


def ink(picture: Image.Image) -> float:
    """Share of the pixels that differ from the most common colour; 0 for an empty picture."""
    pixels = picture.width * picture.height
    return 1 - max(count for count, _ in picture.getcolors(pixels)) / pixels if pixels else 0.0


def test_page_is_readable(browser: Any, page_file: Path) -> None:
    seen = Seen(browser, page_file)
    for scheme, size in (("light", "wide"), ("light", "phone"), ("dark", "wide"), ("dark", "phone")):
        seen.turn(scheme, size)
        drawings = seen.page.evaluate(LOOK)
        # Two conversions with four drawings and three of both, two of healing, one of criteria, five of speed, one of
        # kernels, and a diagnosis.
        assert len(drawings) > 8 + 3 + 2 + 1 + 5 + 1 + 12
        assert seen.overflow() <= 0, (scheme, size)
        texts = [(d["title"], text) for d in drawings for text in d["texts"]]
        assert [(title, t["said"]) for title, t in texts if t["out"] > 2] == []
        assert [(title, t["said"]) for title, t in texts if t["contrast"] < CONTRAST] == [], scheme
        paper = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        if (scheme, size) in (("light", "wide"), ("dark", "phone")):
            assert seen.blank() == []
    assert seen.complaints == []
    seen.page.close()


def test_empty_report_is_readable(browser: Any, tmp_path: Path) -> None:
    write_report(tmp_path, tmp_path / "r.html")
    seen = Seen(browser, tmp_path / "r.html")
    for size in SIZES:
        seen.turn("dark", size)
        assert seen.overflow() <= 0
    assert seen.complaints == []
    assert seen.page.get_by_text("mlaforge convert MODEL OUT").is_visible()
    seen.page.close()


def test_checks_detect_errors(browser: Any, tmp_path: Path) -> None:
    """The checks above detect planted errors."""
    svg = '<svg class="probe" aria-label="{}" width="90" height="50">{}</svg>'
    (tmp_path / "bad.html").write_text(
        '<body style="background: white">'
        + svg.format("empty", "")
        + svg.format("cut", '<text x="80" y="20" fill="#eee">too long</text>')
        + '<div style="width: 3000px">wide</div><script>console.error("oh"); nothing()</script><img src="nowhere:x">'
    )
    seen = Seen(browser, tmp_path / "bad.html")
    seen.turn("light", "wide")
    assert seen.overflow() > 1000 and "empty" in seen.blank()
    (text,) = seen.page.evaluate(LOOK)[1]["texts"]
    assert text["out"] > 2 and text["contrast"] < CONTRAST
    assert {"oh", "nowhere:x"} <= set(seen.complaints) and any("nothing" in said for said in seen.complaints)
    seen.page.close()
