"""The files of tokenizer, processor and licence are copied with a model."""

import json
import stat

import pytest

from mlaforge.artifact import Manifest
from mlaforge.checkpoint import verify
from mlaforge.checkpoint.reader import fingerprint

FILES = (
    "additional_chat_templates/rag.jinja", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "sentencepiece.bpe.model", "USAGE_POLICY", "LICENSE.md",
)  # fmt: skip


@pytest.fixture
def companions(model):
    """A model with companion files of every kind."""
    directory = model("llama")
    for name in FILES:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps({"name": name}))
    return directory


def check(out):
    assert {name for name in FILES if (out / name).is_file()} == set(FILES)
    assert set(FILES) <= Manifest.load(out).files.keys() and verify.run(out).problems == []
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert len(modes) == 1, "every file can be read by those who can read the others"


def test_companions_are_copied_by_every_stage(companions, converts, cli, calibration_file, tmp_path):
    converts(companions, tmp_path / "mla", "--budget", 0.75, "--deepseek-style", "--qk-rope-head-dim", 16)
    check(tmp_path / "mla")
    done = cli("export", "deepseek", tmp_path / "mla", tmp_path / "exported")
    assert done.exit_code == 0, done.stderr
    check(tmp_path / "exported")
    few = ("--topk", 24, "--sink", 2, "--window", 8, "--seqlen", 64, "--nsamples", 6)
    done = cli("sparsify", companions, tmp_path / "sparse", *few, "--text", calibration_file)
    assert done.exit_code == 0, done.stderr
    check(tmp_path / "sparse")


def test_templates_are_part_of_the_fingerprint(companions):
    before = fingerprint(companions)
    (companions / FILES[0]).write_text("another")
    assert fingerprint(companions) != before
