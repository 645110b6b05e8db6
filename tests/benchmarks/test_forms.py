"""Forms whose speed is compared: what their names mean."""

import json

import pytest

from benchmarks.forms import make
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.planning.plan import plan_of


def test_a_forms_directory_is_what_its_name_says(tiny_models, tmp_path):
    original = tiny_models["llama"]
    plain, coded = (make(name, original, tmp_path) for name in ("latent_rope", "latent, 4 bits"))
    plans = {path.name: plan_of(SourceModel.open(path).config, SourceModel.open(path).spec) for path in (plain, coded)}
    assert {layer.layout for layer in plans["latent_rope"].layers} == {"latent_rope"}
    assert plans["latent, 4 bits"].stored == "coded" and not any(layer.topk for layer in plans["latent_rope"].layers)
    # Made once.
    before = (coded / "manifest.json").stat().st_mtime_ns
    assert make("latent, 4 bits", original, tmp_path) == coded
    assert (coded / "manifest.json").stat().st_mtime_ns == before
    # Another config beside links to the same weights.
    longer = make("original", original, tmp_path, positions=4096)
    assert json.loads((longer / "config.json").read_text())["max_position_embeddings"] == 4096
    assert (longer / "model.safetensors").resolve() == (original / "model.safetensors").resolve()
    assert SourceModel.open(original).spec.max_position_embeddings < 4096


@pytest.mark.parametrize("name", ["dense", "latent, 4", "latent_rope, read", "original, sparse, 4 bits"])
def test_unknown_forms_are_refused(name, tmp_path):
    with pytest.raises(SystemExit, match="must be like"):
        make(name, tmp_path, tmp_path)
