"""Sparse models compared with their dense sources, for every family and layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge import modeling
from mlaforge.artifact import Manifest
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.index_files import INDEX_SHARD
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.data import corpus, overlap
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.factorization import refit
from mlaforge.healing import heal
from mlaforge.healing.config import HealConfig
from mlaforge.modeling.coded_layout_mla import VERSION
from mlaforge.runtime import UserError
from mlaforge.sparsity import placement, sparsify
from mlaforge.sparsity.config import SparsifyConfig
from mlaforge.tensor_store import TensorStore
from mlaforge.training.kl_loss import compare
from support.tiny_models import load_original

# Every family with layers without a window, original and converted.
CASES = [("llama", "coded"), ("qwen2", "latent_rope"), ("gpt_oss", "gqa"), ("qwen3", "latent"), ("mimo", "latent")]
MORE = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("qwen2", "gqa"), ("qwen2", "latent"),
        ("gpt_oss", "latent"), ("gpt_oss", "latent_rope"), ("qwen3", "gqa")]  # fmt: skip
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
SMALL = {"width": 16, "sink": 2, "window": 8, "seqlen": 64, "nsamples": 6, "device": "cpu"}


@pytest.fixture(scope="module")
def dense(converted, tiny_models):
    def get(family, layout):
        if layout == "gqa":
            return tiny_models[family]
        return converted(family, "latent", bits=6) if layout == "coded" else converted(family, layout)

    return get


@pytest.fixture(scope="module")
def sparse(dense, calibration_file, tmp_path_factory):
    """(family, layout, **options) -> directory of a sparse model, cached."""
    made = {}

    def get(family, layout, **options):
        key = (family, layout, *options.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("sparse") / "model"
            config = SparsifyConfig(text=str(calibration_file), **{"topk": 24, **SMALL, **options})
            sparsify.run(str(dense(family, layout)), made[key], config)
        return made[key]

    return get


def tokens(n=2, t=60):
    return torch.randint(0, 250, (n, t), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def decode(model, ids, prompt=20):
    out = model(ids[:, :prompt], use_cache=True)
    logits = [out.logits]
    for t in range(prompt, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1), out.past_key_values


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_selecting_all_tokens_gives_the_dense_logits(family, layout, sparse, dense):
    """The gathering path is forced, and a smaller selection gives other logits."""
    directory, ids = sparse(family, layout), tokens()
    model = loading.load_model(directory, "float32")
    dense_model = (
        load_original(dense(family, layout))
        if layout == "gqa"
        else loading.load_model(dense(family, layout), "float32")
    )
    with torch.no_grad():
        expected = dense_model(ids).logits
    model.model.sparsity.shortcut = False
    selected, _ = decode(model, ids)
    for layer in model.model.layers:
        if getattr(layer.self_attn, "sparse", None):
            layer.self_attn.sparse.topk = 60
    all_tokens, cache = decode(model, ids)
    torch.testing.assert_close(all_tokens, expected, rtol=1e-4, atol=1e-4)
    # A prompt is read densely.
    torch.testing.assert_close(selected[:, :20], expected[:, :20], rtol=1e-4, atol=1e-4)
    assert (selected[:, 30:] - expected[:, 30:]).abs().max() > 1e-3
    # The cache contains rows and index keys only.
    kinds = model.config.indexer_types
    assert "full" in kinds
    for kind, layer in zip(kinds, cache.layers, strict=True):
        assert kind == "dense" or (layer.keys.shape[1] == 1 and layer.values.shape[1:] == (1, 60, 16))


@pytest.mark.parametrize(("family", "layout"), [
    ("gpt_oss", "gqa"), ("qwen2", "latent_rope"), pytest.param("llama", "latent", marks=pytest.mark.slow)
])  # fmt: skip
def test_the_index_beats_random_selection(family, layout, sparse):
    """An index as wide as the keys selects by attention scores, and loses less than a random selection."""
    full = {"gqa": 32, "latent": 32, "latent_rope": 24}[layout]
    model = loading.load_model(sparse(family, layout, width=full), "float32")
    torch.manual_seed(0)
    model.model.sparsity.prompts = True
    ids = tokens(1, 200)
    with torch.no_grad():
        chosen = model(ids).logits
        model.model.sparsity.score = lambda q, k, visible, sinks: torch.rand(visible.shape)
        blind = model(ids).logits
        model.model.sparsity.prompts = False
        expected = model(ids).logits

    def error(logits):
        return float((logits - expected)[:, 40:].square().mean())

    assert error(chosen) < 0.8 * error(blind)


def test_unmeasured_sharing_is_logged(dense, calibration_file, tmp_path, capsys):
    said = "share = 2: the sharing layers are not measured"
    for share in (1, 2):
        config = SparsifyConfig(text=str(calibration_file), **{**SMALL, "topk": 24, "share": share})
        sparsify.run(str(dense("llama", "latent")), tmp_path / str(share), config)
        assert (said in capsys.readouterr().err) == (share == 2)


def test_sharing_layers_read_the_same_selection(sparse):
    model = loading.load_model(sparse("llama", "latent", share=2), "float32")
    assert model.config.indexer_types == ["full", "shared", "full"]
    assert [layer.self_attn.index is not None for layer in model.model.layers] == [True, False, True]
    read = []
    for layer in model.model.layers:
        selector = layer.self_attn.sparse

        def record(*arguments, selector=selector, read_by=selector.read):
            divergences = read_by(*arguments)
            read.append(divergences[2])
            return divergences

        selector.read = record
    decode(model, tokens(1, 40), prompt=39)
    assert torch.equal(read[-3], read[-2]) and read[-3].shape == (1, 24)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_measured_placement_keeps_the_mean_budget_and_resumes(family, sparse, dense, tmp_path, calibration_file):
    """The mean budget is at most topk, the number of indexes is as requested, and an interrupted run resumes."""
    options = {"topk": 24, "placement": "measured", "nsamples": 2, "share": 2 if family == "llama" else 1}
    directory = sparse(family, "latent", **options)
    model = loading.load_model(directory, "float32")
    kinds, read = model.config.indexer_types, model.config.index_topk_per_layer
    chosen = [k for kind, k in zip(kinds, read, strict=True) if kind != "dense"]
    assert sum(chosen) <= 24 * len(chosen) and min(chosen) >= 12 and max(chosen) <= 48
    assert kinds.count("full") == (2 if family == "llama" else len(chosen))
    layers = Manifest.load(directory).metrics["layers"]
    assert [(layer["kind"], layer["topk"] or 24) for layer in layers] == [*zip(kinds, read, strict=True)]
    assert all((layer["kl"] is None) == (layer["kind"] == "dense") for layer in layers)
    assert max(layer["kl"] or 0.0 for layer in layers) > 0
    indexes = {name.split(".")[2] for name in load_file(directory / "model-index.safetensors")}
    assert indexes == {str(i) for i, kind in enumerate(kinds) if kind == "full"}
    # A second run that is interrupted resumes and gives the same config.
    config = SparsifyConfig(text=str(calibration_file), **{**SMALL, **options})
    measured = placement.Divergences._window
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def interrupt_second(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return measured(*arguments)

        patch.setattr(placement.Divergences, "_window", interrupt_second)
        with pytest.raises(KeyboardInterrupt):
            sparsify.run(str(dense(family, "latent")), tmp_path / "again", config)
        sparsify.run(str(dense(family, "latent")), tmp_path / "again", config)
        assert len(calls) == 3
    assert (tmp_path / "again" / "config.json").read_bytes() == (directory / "config.json").read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_budget_of_all_tokens_has_no_divergence(family, sparse, tmp_path):
    with LayerStream(sparse(family, "latent"), torch.float32, torch.device("cpu")) as stream:
        divergences = placement.Divergences(stream, 32, 1)
        divergences.measure([tokens(1, 64)[0]], TensorStore(tmp_path))
    assert divergences.indexed[:, 2].abs().max() < 1e-6 < divergences.indexed[:, 0].min()
    assert (divergences.shared[1:] > 0).all() and (divergences.shared[0] == 0).all()


def test_placement_minimises_given_divergences():
    """Indexes are placed where sharing costs most, and tokens where they reduce the divergence most."""

    class Given(placement.Divergences):
        def __init__(self):
            self.layers, self.topk, self.distances, self.budgets = [0, 1, 2, 3], 512, 3, [256, 512, 1024]
            self.stream = type("Stream", (), {"num_layers": 5})
            self.indexed = torch.tensor([[4.0, 2.0, 1.0], [0.04, 0.02, 0.01], [4.0, 2.0, 1.0], [0.04, 0.02, 0.01]])
            self.shared = torch.full((4, 3), 9.0)
            self.shared[1, 0], self.shared[3, 0] = 0.03, 0.03

    placed = placement.place_indexes(Given(), 2)
    assert placed["indexer_types"] == ["full", "shared", "full", "shared", "dense"]
    assert placed["index_topk_per_layer"] == [512] * 5
    even = placement.place_indexes(Given(), 1)
    assert even["indexer_types"] == ["full"] * 4 + ["dense"]
    first, second, third, fourth, _ = even["index_topk_per_layer"]
    assert first == third > 700 and second == fourth == 256 and sum((first, second, third, fourth)) <= 4 * 512


def test_shards_are_unchanged_and_the_index_is_removable(sparse, dense):
    for layout in ("gqa", "latent"):
        source, directory = dense("llama", layout), sparse("llama", layout)
        shard_bytes = {p.read_bytes() for p in directory.glob("*.safetensors")}
        assert shard_bytes > {p.read_bytes() for p in source.glob("*.safetensors")} and len(shard_bytes) == 2
        without = SourceModel.open(directory).dense()
        assert without.converted == (layout == "latent") and without.model_type == SourceModel.open(source).model_type
        ids = tokens()
        with torch.no_grad():
            logits = [loading.load_model(each, "float32")(ids).logits for each in (without, source)]
        assert torch.equal(*logits)
    with pytest.raises(UserError, match="is not sparse"):
        SourceModel.open(dense("llama", "latent")).dense()


def test_an_old_checkpoint_of_coded_rows_is_rewritten(dense, calibration_file, tmp_path):
    """Files and version of the model code are the current ones, the counts unchanged."""
    start = shutil.copytree(dense("llama", "coded"), tmp_path / "old")
    config = json.loads((start / "config.json").read_text())
    assert config.pop("mla_code_version") == VERSION
    (start / "config.json").write_text(json.dumps(config))
    (start / "coded_rows_mla.py").write_text("raise NotImplementedError\n")
    sparsify.run(str(start), tmp_path / "out", SparsifyConfig(text=str(calibration_file), topk=24, **SMALL))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["mla_code_version"] == VERSION and written["mla_code_counts"] == config["mla_code_counts"]
    for path in Path(modeling.__path__[0]).glob("*_mla.py"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_sparsify_replaces_the_indexes_of_a_sparse_model(sparse, tmp_path, calibration_file):
    """As if it had been dense, whatever the former options."""
    config = SparsifyConfig(text=str(calibration_file), **{**SMALL, "topk": 24})
    for layout in ("gqa", "latent"):
        sparsify.run(str(sparse("llama", layout, topk=40, share=2, width=8)), tmp_path / layout, config)
        expected = sparse("llama", layout)
        assert SourceModel.open(tmp_path / layout).config == SourceModel.open(expected).config
        for name in ("model-index.safetensors", "model.safetensors.index.json"):
            assert (tmp_path / layout / name).read_bytes() == (expected / name).read_bytes()
        assert loading.load_model(tmp_path / layout, "float32").config.index_topk == 24


def test_calibration_passages_are_recorded(sparse, dense):
    passages = [set(overlap.read_passages(d("llama", "latent") / overlap.PASSAGES)) for d in (sparse, dense)]
    assert passages[0] > passages[1]
    assert overlap.read_passages(sparse("llama", "gqa") / overlap.PASSAGES)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("latent", ("--topk", "100"), "above the 132 tokens that are always read (sink 4, window 128)"),
        ("latent", ("--width", "20"), "width = 20 must be a multiple of 8"),
        ("latent", ("--width", "64"), "width 64 exceeds the maximum of this layer, 32"),
        ("mistral", (), "no layer without a sliding window"),
        ("latent", ("--placement", "measured", "--topk", "1024"), "8192 tokens, and the model's context is"),
        ("latent", ("--placement", "best"), "even, measured"),
    ],
)
def test_rejects_invalid_options(source, options, words, dense, tiny_models, calibration_file, refused, tmp_path):
    model = dense("llama", "latent") if source == "latent" else tiny_models[source]
    text = ("--text", calibration_file, "--seqlen", "64", "--nsamples", "2", "--device", "cpu")
    refused(words, "sparsify", model, tmp_path / "out", *text, *options)


def test_rejects_text_too_short_for_placement(dense, refused, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A few words, enough for an index. " * 8)
    options = ("--text", text, "--seqlen", "64", "--nsamples", "1", "--sink", "2", "--window", "8", "--topk", "60")
    words = f"measured on windows of 480 tokens, and text '{text}' has fewer; give more text, a smaller --topk, or"
    refused(words, "sparsify", dense("llama", "latent"), tmp_path / "out", *options, "--placement", "measured")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_topk": None}, "no 'index_topk'"),
        ({"index_kind": None}, "no 'index_kind'"),
        ({"index_kind": "trees"}, "index_kind"),
        ({"index_topk": 10}, "above the 10 tokens that are always selected"),
        ({"indexer_types": ["full", "full"]}, "a list of 3"),
        ({"indexer_types": ["shared", "full", "full"]}, "full before the first shared"),
        ({"indexer_types": ["full", "dense", "full"]}, "does not call for"),
        ({"indexer_types": ["full", "shared", "full"], "index_topk_per_layer": [24, 20, 24]}, "of the layer before it"),
        ({"index_head_dim": 24}, "shape"),
    ],
)
def test_rejects_a_damaged_config(change, words, sparse, tmp_path):
    directory = shutil.copytree(sparse("llama", "latent"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | change
    (directory / "config.json").write_text(json.dumps({n: v for n, v in config.items() if v is not None}))
    with pytest.raises(UserError, match=words):
        loading.load_model(directory)


def test_rejects_a_missing_tensor(sparse, tmp_path):
    directory = shutil.copytree(sparse("llama", "latent"), tmp_path / "model")
    tensors = load_file(directory / INDEX_SHARD)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, directory / INDEX_SHARD, metadata={"format": "pt"})
    with pytest.raises(UserError, match=name):
        loading.load_model(directory)


@pytest.mark.parametrize("options", [{}, {"share": 2}])
def test_evaluation_uses_the_selection_of_decoding(options, sparse, dense, evaluation_file, capsys):
    config = {"text": str(evaluation_file), "windows": 2, "dtype": "float32", "device": "cpu"}
    directory = sparse("llama", "latent", topk=50, **options)
    untested = "the index is not tested: windows have 48 tokens"
    short = perplexity.run(str(directory), None, EvalConfig(seqlen=48, **config)).metrics["nll"]
    assert untested in capsys.readouterr().err
    expected = perplexity.run(str(dense("llama", "latent")), None, EvalConfig(seqlen=48, **config)).metrics["nll"]
    assert short == pytest.approx(expected, rel=1e-5)
    long = perplexity.run(str(directory), None, EvalConfig(seqlen=128, **config)).metrics["nll"]
    assert untested not in capsys.readouterr().err
    # The same files read densely, and with other numbers of tokens.
    nll = [
        perplexity.run(str(directory), None, EvalConfig(seqlen=128, **config, **read)).metrics["nll"]
        for read in ({"dense": True}, {"topk": 127}, {"topk": 20})
    ]
    original = perplexity.run(str(dense("llama", "latent")), None, EvalConfig(seqlen=128, **config)).metrics["nll"]
    assert nll[0] == original and nll[1] == pytest.approx(original, abs=2e-4)
    assert abs(nll[2] - original) > 1e-3 and nll[2] != long
    # Reference: the whole model on each window.
    source = SourceModel.open(directory)
    ids = corpus.windows(source.tokenizer, str(evaluation_file), 2, 128, evaluation=True).ids
    model = loading.load_model(source, "float32")
    losses = []
    for model.model.sparsity.prompts in (True, False):
        with torch.no_grad():
            losses.append(float(model(ids, labels=ids).loss))
    assert long == pytest.approx(losses[0], rel=1e-5) and abs(losses[1] - losses[0]) > 1e-4


def test_the_shipped_recipe_is_valid():
    config = resolve(SparsifyConfig, Path(__file__).parents[2] / "recipes" / "sparse-gptoss.yaml")
    assert (config.topk, config.width, config.window) == (4096, 64, 128)


@pytest.mark.parametrize(
    "subset", ["attention", *(pytest.param(subset, marks=pytest.mark.slow) for subset in ("projections", "all"))]
)
def test_healing_trains_through_the_selection(subset, sparse, dense, tiny_models, healing_file, tmp_path):
    """With selections for every token, the divergence from the original falls; the index is unchanged."""
    options = {
        "steps": 12, "batch_tokens": 256, "micro_tokens": 128, "seqlen": "64", "validation_tokens": 512,
        "evaluate_every": 4, "learning_rate": 2e-3, "refit": "auto", "device": "cpu", "subset": subset,
    }  # fmt: skip
    student, out, teacher = sparse("llama", "latent"), tmp_path / "healed", load_original(tiny_models["llama"])
    manifest = heal.run(str(tiny_models["llama"]), str(student), out, HealConfig(text=str(healing_file), **options))
    with Reader(student) as before, Reader(out) as after:
        index = [name for name in before if ".index." in name]
        assert index and all(torch.equal(before[name], after[name]) for name in index)
    ids = corpus.windows(SourceModel.open(out).tokenizer, str(healing_file), 1, 256).ids

    @torch.no_grad()
    def divergence(directory, prompts):
        model = loading.load_model(directory, "float32")
        model.model.sparsity.prompts = prompts
        states = [(m.model(ids).last_hidden_state[0], m.lm_head.weight) for m in (model, teacher)]
        return float(compare(*states, ids[0])[2].mean())

    assert divergence(out, True) < divergence(student, True)
    # A dense student starts at another divergence.
    dense_manifest = heal.run(
        str(tiny_models["llama"]), str(dense("llama", "latent")), tmp_path / "dense",
        HealConfig(text=str(healing_file), **(options | {"steps": 1})),
    )  # fmt: skip
    assert abs(dense_manifest.metrics["curve"][0]["kl"] - manifest.metrics["curve"][0]["kl"]) > 1e-4


def test_refits_use_the_selection_of_each_text(sparse, tiny_models, monkeypatch):
    """Several texts run through the layers together; a sharing layer must read the selection of the same text."""
    calls: list[list[torch.Tensor]] = []
    monkeypatch.setattr(refit, "solve", lambda linear, inputs, targets: calls.append([z.clone() for z in inputs]))
    student, teacher = (SourceModel.open(model) for model in (sparse("llama", "latent", share=2), tiny_models["llama"]))
    windows = tokens(3, 64)
    with (
        LayerStream(student, torch.float32, "cpu") as student_stream,
        LayerStream(teacher, torch.float32, "cpu") as teacher_stream,
    ):
        for chosen in (windows, *windows.split(1)):
            refit.refit_student(student_stream, teacher_stream, chosen)
    layers = student_stream.num_layers
    for n in range(3):
        for layer in range(layers):
            (alone,) = calls[layers * (1 + n) + layer]
            torch.testing.assert_close(calls[layer][n], alone)


def test_stages_without_sparsity_reject_sparse_models(sparse, tiny_models, refused, tmp_path):
    model, out = sparse("llama", "latent"), tmp_path / "out"
    shared = sparse("llama", "latent", share=2)
    heals = ("heal", "--teacher", tiny_models["llama"], "--student", shared, "--out", out)
    refused("shares token selections", *heals, "--gradient-checkpointing")
    original = ("heal", "--teacher", tiny_models["llama"], "--student", sparse("llama", "gqa"), "--out", out)
    refused("has no converted layer, so only all of it can be trained: give --subset all", *original)
    refused("`mlaforge convert MODEL OUT --deepseek-style`", "export", "deepseek", model, out)


def test_rejects_a_model_that_overflows(tiny_models, calibration_file, tmp_path):
    directory = shutil.copytree(tiny_models["llama"], tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1e38
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="keys or queries are NaN or infinity"):
        sparsify.run(str(directory), tmp_path / "out", SparsifyConfig(text=str(calibration_file), topk=24, **SMALL))
    assert not (tmp_path / "out").exists()
