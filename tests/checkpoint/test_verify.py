"""`verify`: every damaged file is reported; without hashes tensors are compared with config.json."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mlaforge.artifact import MANIFEST, Manifest, sha256, writing
from support.eagle3_heads import saved

SHARD = "model-00001-of-00001.safetensors"


def flip(path, where=0.5):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)


def older(directory):
    """Rewrite the manifest in the older format without hashes."""
    body = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**body, "files": sorted(body["files"])}))


def damage_tensor(directory):
    path = directory / SHARD
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


DAMAGES = {
    "a bit in the middle of a shard": (lambda d: flip(d / SHARD), [f"{SHARD}: changed since it was written"]),
    "a bit at the end of a shard": (lambda d: flip(d / SHARD, 0.9999), [f"{SHARD}: changed since it was written"]),
    "a shard cut short": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-1]), [f"{SHARD}: changed"]),
    "an edited config": (lambda d: (d / "config.json").write_text("{}"), ["config.json: changed since it was written"]),
    "edited code": (
        lambda d: (d / "modeling_mla.py").write_text("evil"),
        ["modeling_mla.py: changed since it was written"],
    ),
    "a missing shard": (lambda d: (d / SHARD).unlink(), [f"{SHARD}: missing"]),
    "a shard that is a folder": (lambda d: ((d / SHARD).unlink(), (d / SHARD).mkdir()), [f"{SHARD}: missing"]),
    "an extra shard": (lambda d: shutil.copy(d / SHARD, d / "x.safetensors"), [f"x.safetensors: not in {MANIFEST}"]),
    "several": (
        lambda d: ((d / "tokenizer.json").unlink(), flip(d / SHARD), flip(d / "config.json")),
        ["config.json: changed", f"{SHARD}: changed", "tokenizer.json: missing"],
    ),
    "no manifest that can be read": (lambda d: (d / MANIFEST).write_text("{"), [f"{MANIFEST}: cannot be read"]),
}


@pytest.fixture
def made(converted, tmp_path):
    return Path(shutil.copytree(converted("llama", "latent"), tmp_path / "made"))


def test_the_manifest_holds_the_hash_of_every_file(made):
    files = json.loads((made / MANIFEST).read_text())["files"]
    assert files == {path.name: sha256(path) for path in made.iterdir() if path.name != MANIFEST}


def test_an_unchanged_artifact_is_correct(made, cli):
    (made / "README.md").write_text("mine")
    done = cli("verify", made)
    count = len(list(made.iterdir())) - 2
    assert done.exit_code == 0, done.stdout
    assert done.stdout == f"{made}: {count} files by their SHA-256 in {MANIFEST}: correct\n"


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damaged_file_has_a_line(how, made, cli):
    damage, lines = DAMAGES[how]
    damage(made)
    done = cli("verify", made)
    assert done.exit_code == 1 and done.stderr == "", done.stderr
    *problems, last = done.stdout.splitlines()
    assert len(problems) == len(lines) and last.startswith(f"{made}: {len(lines)} wrong; ")
    assert all(line.startswith(begin) for line, begin in zip(problems, lines, strict=True)), problems


@pytest.mark.parametrize("what", ["an original", "an older manifest", "an older head"])
def test_without_hashes_the_tensors_are_compared_with_the_config(what, made, model, cli, tmp_path):
    directory = {"an original": lambda: model("llama"), "an older manifest": lambda: made,
                 "an older head": lambda: saved(tmp_path / "head")}[what]()  # fmt: skip
    if what == "an older manifest":
        older(made)
    done = cli("verify", directory)
    why = f"a {MANIFEST} without hashes" if what == "an older manifest" else f"no {MANIFEST}"
    assert done.exit_code == 0 and f"{why}; tensors by config.json" in done.stdout, done.stdout
    weights = next(directory.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    done = cli("verify", directory)
    assert done.exit_code == 1 and f"{weights} is truncated" in done.stdout.splitlines()[0], done.stdout


def test_detects_nan_without_hashes(made, cli):
    older(made)
    damage_tensor(made)
    done = cli("verify", made)
    assert done.exit_code == 1 and "'model.norm.weight' holds NaN or infinity" in done.stdout


def test_artifacts_without_a_model_are_verified(cli, tiny_models, evaluation_file, tmp_path):
    out = tmp_path / "talk"
    assert cli("generate", tiny_models["llama"], out, "--max-new-tokens", 2, "--dtype", "float32").exit_code == 0
    assert cli("verify", out).exit_code == 0


def test_rejects_directories_without_manifest_and_config(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    refused(("neither", "nothing to compare it with"), "verify", tmp_path / "folder")
    refused("is not a directory", "verify", tmp_path / "nowhere")


def test_serve_refuses_what_is_damaged(made, refused, tmp_path):
    flip(made / SHARD)
    refused((SHARD, "changed since it was written", "mlaforge verify"), "serve", made, "--verify")


def test_serve_refuses_a_damaged_head(made, cli, tmp_path):
    head = tmp_path / "head"
    with writing(head, Manifest("draft train", {}, {})) as partial:
        saved(partial)
    flip(head / "model.safetensors")
    done = cli("serve", made, "--verify", "--speculative", head)
    assert done.exit_code == 2 and f"{made}: " in done.stderr and ": correct" in done.stderr, done.stderr
    assert f"mlaforge: {head}: model.safetensors: changed since it was written" in done.stderr
