"""SmolLM2-135M-Instruct in the forms whose speed is compared, and `mlaforge bench` on them.

    python -m benchmarks.forms SCENARIO FORM [FORM ...] [--folder runs/forms] [-- options of `mlaforge bench`]

A form is `original`, `latent` or `latent_rope` (half of the cache), followed by `, 4 bits` (coded rows) and by
`, sparse` (an index that reads 1,024 tokens) or `, 512 read`. What it was calibrated on does not matter to its speed.
--positions raises the model's context, for speeds at lengths that it was not made for. Forms are made once and kept.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import model as demo_model
from mlaforge.sparsity import sparsify
from mlaforge.sparsity.config import SparsifyConfig

LAYOUTS = r"(?P<layout>original|latent|latent_rope)"
FORM = re.compile(LAYOUTS + r"(, (?P<bits>\d) bits)?(, (?P<index>sparse|(?P<topk>\d+) read))?")
CALIBRATION: dict[str, Any] = {"calibration": "embedded", "nsamples": 8, "seqlen": 256}


def make(form: str, original: Path, folder: Path, positions: int = 0) -> Path:
    """Make a form of `original` in `folder` and return its directory, which has the form's name. positions: least
    context of its config. Raise SystemExit for an unknown form."""
    if (parsed := FORM.fullmatch(form)) is None:
        raise SystemExit(f"form {form!r} must be like `original`, `latent, 4 bits` or `latent_rope, 512 read`")
    folder.mkdir(parents=True, exist_ok=True)
    if parsed["index"]:
        dense = make(form.removesuffix(f", {parsed['index']}"), original, folder)
        sparse = folder / f"{dense.name}, sparse"
        sparsify.run(str(dense), sparse, SparsifyConfig(text="embedded", nsamples=2, topk=1024, device="cpu"))
        directory = _with_config(sparse, folder / form, index_topk=int(parsed["topk"])) if parsed["topk"] else sparse
    elif parsed["layout"] == "original":
        directory = _with_config(original, folder / form)
    else:
        size = {"bits": float(parsed["bits"])} if parsed["bits"] else {"budget": 0.5}
        config = ConvertConfig(layout=parsed["layout"], device="cpu", eval_windows=0, dense=True, **CALIBRATION, **size)
        directory = folder / form
        convert.run(str(original), directory, config)
    if positions:
        out = folder / f"{form}, {positions} positions"
        directory = _with_config(directory, out, max_position_embeddings=positions)
    return directory


def _with_config(source: Path, out: Path, **changes: Any) -> Path:
    """The model with these changes of its config; other files are links."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out, copy_function=lambda file, to: Path(to).symlink_to(Path(file).absolute()))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps({**config, **changes}, indent=1), encoding="utf-8")
    return out


def main() -> None:
    from mlaforge.cli.main import main as mlaforge

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("scenario")
    arguments.add_argument("forms", nargs="+")
    arguments.add_argument("--folder", type=Path, default=Path("runs/forms"))
    arguments.add_argument("--positions", type=int, default=0)
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options = arguments.parse_args(words[:at])
    original = demo_model.fetch()
    directories = [make(form, original, options.folder, options.positions) for form in options.forms]
    sys.argv = ["mlaforge", "bench", options.scenario, *map(str, directories), *words[at + 1 :]]
    mlaforge()


if __name__ == "__main__":
    main()
