"""What is damaged and what is killed: tiny random models, what the stages make of them, and text for them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from pydoc_data.topics import topics

from attack.processes import Command
from mlaforge.artifact import Manifest
from mlaforge.checkpoint.reader import fingerprint
from mlaforge.drafting import dataset
from support.eagle3_heads import saved
from support.gguf_file import save_gguf
from support.tiny_models import save_model, shard

FAMILIES = ("llama", "qwen3", "gpt_oss", "mimo")
# Options with which `convert` takes a second on a tiny model.
SHORT = ("--seqlen", "64", "--nsamples", "4", "--eval-windows", "2", "--device", "cpu")
_TEXTS = ("--calibration", "{folder}/calibration.txt", "--evaluation", "{folder}/evaluation.txt")
# Name -> the command that makes it when it is first asked for.
ARTIFACTS = {
    "latent": ("convert", "{folder}/llama", "{out}", *_TEXTS, *SHORT[:-2]),
    "latent_rope": ("convert", "{folder}/gpt_oss", "{out}", *_TEXTS, *SHORT[:-2], "--layout", "latent_rope"),
    "diagnosed": ("diagnose", "{folder}/llama", "{out}", "--text", "{folder}/calibration.txt", "--seqlen", "64",
                  "--windows", "2"),
    "golden": ("calibrate", "--source", "{folder}/prose", "--out", "{out}", "--window", "120", "--passage", "4",
               "--clusters", "6", "--neighbours", "3"),
}  # fmt: skip
ANSWERS = 64


class Specimens:
    """Everything in `folder`, by its name there; made once, and nothing of it is changed."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home, self._making = folder, home, threading.Lock()
        folder.mkdir(parents=True)
        self._write_texts()
        for seed, family in enumerate(FAMILIES):
            save_model(folder / family, family, seed)
        shard(save_model(folder / "sharded", "llama", 9))
        save_gguf(folder / "tiny.gguf")
        saved(folder / "head")
        self._write_answers()

    def __getitem__(self, name: str) -> Path:
        path = self.folder / name
        with self._making:
            if not path.exists() and name in ARTIFACTS:
                self._make(name)
        return path

    def _make(self, name: str) -> None:
        """What a stage makes of the others."""
        words = [
            word.format(folder=self.folder, out=self.folder / name) for word in (*ARTIFACTS[name], "--device", "cpu")
        ]
        ended = Command(words, self.folder / "logs", self.home).wait()
        if ended.code:
            raise SystemExit(f"{' '.join(words)} ended with {ended.code}: {ended.stderr}")

    @property
    def texts(self) -> tuple[str | Path, ...]:
        return ("--calibration", self["calibration.txt"], "--evaluation", self["evaluation.txt"])

    def _write_texts(self) -> None:
        """Disjoint ones."""
        keys = sorted(topics)
        for name, part in (("calibration", keys[:20]), ("evaluation", keys[-20:]), ("healing", keys[25:50])):
            text = "\n\n".join(topics[key] for key in part)[:20000]
            self[f"{name}.txt"].write_text(text, encoding="utf-8")
        self["prose"].mkdir()
        for i, key in enumerate(keys[:8]):
            (self["prose"] / f"{i:02d}.txt").write_text(topics[key][:1200], encoding="utf-8")

    def _write_answers(self) -> None:
        """As `draft regenerate` writes them; what is said is runs of bytes, of which a head can learn something."""
        out = self["answers"]
        out.mkdir()
        with (out / dataset.TEXT_FILE).open("w", encoding="utf-8") as file:
            for n in range(ANSWERS):
                ids = [(11 * n + (1 + n % 4) * k) % 256 for k in range(29)]
                file.write(json.dumps(dataset.answer_line(n, "", ids[:5], ids[5:])) + "\n")
        inputs = {"model": {"sha256": fingerprint(self["llama"])}, "exclude": []}
        Manifest(dataset.STAGE, {}, inputs, files=[dataset.TEXT_FILE]).save(out)
