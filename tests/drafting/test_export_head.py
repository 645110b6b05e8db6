"""`draft export`, and every command on the same head in int8 and in a float dtype."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mlaforge.artifact import Manifest
from mlaforge.checkpoint.eagle3 import read_head, write_head
from mlaforge.drafting import dataset
from support.eagle3_heads import make


@pytest.fixture
def heads(tmp_path):
    """One head in int8, and the same dequantised to fp32."""
    folders = tmp_path / "int8", tmp_path / "float32"
    for folder in folders:
        folder.mkdir()
    write_head(make(norm_before_residual=True, fc_norm=True), folders[0], torch.int8)
    write_head(read_head(folders[0], 3), folders[1], torch.float32)
    return folders


def run(cli, *arguments):
    done = cli(*arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_exports_fp16_as_a_plain_checkpoint(cli, heads, tmp_path):
    int8, _ = heads
    stdout = run(cli, "draft", "export", int8, tmp_path / "fp16")
    head = read_head(int8, 3)
    tensors = load_file(tmp_path / "fp16" / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensors[name], tensor.half() if tensor.is_floating_point() else tensor), name
    written, source = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "fp16", int8))
    assert source.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert written == source and written["torch_dtype"] == "float16"
    manifest = Manifest.load(tmp_path / "fp16")
    assert manifest.stage == dataset.EXPORT_STAGE and manifest.config == {"dtype": "float16"}
    assert manifest.files.keys() == {"config.json", "model.safetensors"} and manifest.seconds["export"] > 0
    assert run(cli, "verify", tmp_path / "fp16")
    # The same export again is not repeated.
    before = (tmp_path / "fp16" / "model.safetensors").stat().st_mtime_ns
    assert run(cli, "draft", "export", int8, tmp_path / "fp16") == stdout
    assert (tmp_path / "fp16" / "model.safetensors").stat().st_mtime_ns == before


def test_int8_survives_a_round_trip(cli, heads, tmp_path):
    """The int8 codes survive an export to fp16."""
    int8, _ = heads
    run(cli, "draft", "export", int8, tmp_path / "fp16")
    run(cli, "draft", "export", tmp_path / "fp16", tmp_path / "again", "--dtype", "int8")
    first, second = (load_file(folder / "model.safetensors") for folder in (int8, tmp_path / "again"))
    codes = [name for name, tensor in first.items() if tensor.dtype == torch.int8]
    assert len(codes) == 9 and all(torch.equal(first[name], second[name]) for name in codes)


def test_rejects_invalid_heads(cli, refused, heads, tiny_models, tmp_path):
    int8, _ = heads
    refused("no EAGLE-3 head", "draft", "export", tiny_models["llama"], tmp_path / "out")
    refused("is not a directory", "draft", "export", tmp_path / "nowhere", tmp_path / "out")
    refused("which is read and never written to", "draft", "export", int8, int8)
    refused("float16, int8", "draft", "export", int8, tmp_path / "out", "--dtype", "int4")
    config = json.loads((int8 / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (int8 / "config.json").write_text(json.dumps(config))
    refused(("eagle_aux_hidden_state_layer_ids", "draft import"), "draft", "export", int8, tmp_path / "out")
    (int8 / "manifest.json").write_text("{")
    refused("manifest.json cannot be read", "draft", "export", int8, tmp_path / "out")


def test_exports_record_the_training_text(cli, heads, tmp_path):
    """Also through exports of exports; for a head of unknown origin it stays unknown."""
    int8, plain = heads
    first, two = ({"path": f"{name}.jsonl", "sha256": name} for name in ("one", "two"))
    text = [{"sha256": "t", "written_by": "m", "exclude": ["one"]}]
    metrics = {"curve": [1.5, 2.0], "losses": [3.0], "tokens": 8}
    Manifest("draft train", {"steps": 3}, {"text": text, "init": None}, metrics).save(int8)
    run(cli, "draft", "export", int8, tmp_path / "fp16")
    run(cli, "draft", "export", tmp_path / "fp16", tmp_path / "again", "--dtype", "int8")
    assert dataset.check_unseen(tmp_path / "again", [first]) == ""
    assert dataset.training_texts(tmp_path / "again") == text
    with pytest.raises(dataset.UserError, match=r"does not exclude two\.jsonl"):
        dataset.check_unseen(tmp_path / "again", [two])
    source = Manifest.load(tmp_path / "again").inputs["head"]["manifest"]["inputs"]["head"]["manifest"]
    assert source["config"] == {"steps": 3} and source["metrics"] == {"first": 1.5, "tokens": 8}
    run(cli, "draft", "export", plain, tmp_path / "unknown")
    assert "no manifest records" in dataset.check_unseen(tmp_path / "unknown", [first])
    assert dataset.training_texts(tmp_path / "unknown") is None
    for damaged in ({}, {"head": None}, {"head": {"manifest": [1]}}, {"head": {"manifest": {"stage": "draft train"}}}):
        Manifest("draft export", {}, damaged).save(tmp_path / "unknown")
        with pytest.raises(dataset.UserError, match="damaged"):
            dataset.check_unseen(tmp_path / "unknown", [first])


def test_check_and_compare_give_equal_results_for_both(cli, heads, tiny_models, evaluation_file):
    text_options = ("--text", evaluation_file, "--dtype", "float32", "--device", "cpu", "--json")
    options = {"check": ("--windows", 2, "--seqlen", 64, *text_options), "compare": ("--tokens", 64, *text_options)}
    for verb, more in options.items():
        first, second = (cli("draft", verb, folder, "--target", tiny_models["llama"], *more) for folder in heads)
        assert first.stdout and json.loads(first.stdout) == json.loads(second.stdout), first.stderr
    assert json.loads(first.stdout)["failed"] == []


def test_import_preserves_int8(cli, heads, tiny_models, tmp_path):
    """int8 tensors are imported bitwise."""
    for folder in heads:
        run(cli, "draft", "import", folder, tmp_path / f"imported {folder.name}", "--target", tiny_models["llama"])
    first, second = (read_head(tmp_path / f"imported {folder.name}", 3).state_dict() for folder in heads)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    source, imported = (load_file(folder / "model.safetensors") for folder in (heads[0], tmp_path / "imported int8"))
    assert imported.keys() == source.keys() and all(torch.equal(imported[name], source[name]) for name in source)


def test_import_drops_an_int8_copy_of_the_targets_embedding(cli, tiny_models, tmp_path):
    head = make(has_embed_tokens=True)
    head.embed_tokens.weight.copy_(load_file(tiny_models["llama"] / "model.safetensors")["model.embed_tokens.weight"])
    (tmp_path / "head").mkdir()
    write_head(head, tmp_path / "head", torch.int8)
    stdout = run(cli, "draft", "import", tmp_path / "head", tmp_path / "out", "--target", tiny_models["llama"])
    assert "embed_tokens the target's" in stdout
    assert not read_head(tmp_path / "out", 3).config.has_embed_tokens


def test_generation_is_equal_for_both(cli, heads, tiny_models):
    """The same tokens in the same number of steps."""
    from mlaforge.engine.llm import LLM
    from mlaforge.engine.sampling.params import SamplingParams

    results = []
    for folder in heads:
        llm = LLM(tiny_models["llama"], dtype="float32", device="cpu", cache_bytes=1 << 24, speculative=str(folder),
                  adaptive_speculation=False)  # fmt: skip
        outputs = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        block = llm.engine.stats().speculation.block()
        results.append((outputs[0].outputs[0].token_ids, block["steps"], block["drafted"], block["accepted_drafts"]))
    assert results[0] == results[1]


def test_publish_and_verify_accept_exports(cli, heads, tmp_path):
    from mlaforge.report import publish

    assert publish.PLACES[dataset.EXPORT_STAGE] == publish.PLACES[dataset.TRAIN_STAGE]
    # Without a manifest the tensors are compared with config.json.
    for folder in heads:
        assert "tensors by config.json" in run(cli, "verify", folder)
