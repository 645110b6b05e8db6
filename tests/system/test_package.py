"""Size limit of the wheel."""

import tomllib
from pathlib import Path

import mlaforge

ROOT = Path(mlaforge.__file__).parent
LARGEST = 25e6


def test_the_packaged_files_fit_into_the_wheel():
    """Before compression, which hardly reduces int8 heads."""
    settings = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["mlaforge"]
    matched = {pattern: {path for path in ROOT.glob(pattern) if path.is_file()} for pattern in patterns}
    assert all(matched.values()), matched
    files = set(ROOT.rglob("*.py")).union(*matched.values())
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    assert sum(size for name, size in sizes.items() if name.startswith("demo/heads/")) > 20e6
    assert sum(sizes.values()) < LARGEST, sorted(sizes.items(), key=lambda item: -item[1])[:8]
