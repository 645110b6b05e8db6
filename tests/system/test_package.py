"""Size limit of the wheel."""

import tomllib
import zlib
from pathlib import Path

import mlaforge

ROOT = Path(mlaforge.__file__).parent
LARGEST = 25e6


def test_the_packaged_files_fit_into_the_wheel():
    """Compressed as a wheel's files are."""
    settings = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["mlaforge"]
    matched = {pattern: {path for path in ROOT.glob(pattern) if path.is_file()} for pattern in patterns}
    assert all(matched.values()), matched
    files = set(ROOT.rglob("*.py")).union(*matched.values())
    sizes = {str(path.relative_to(ROOT)): len(zlib.compress(path.read_bytes())) for path in files}
    assert sum(size for name, size in sizes.items() if name.startswith("demo/heads/")) > 10e6
    assert sum(sizes.values()) < LARGEST, sorted(sizes.items(), key=lambda item: -item[1])[:8]
