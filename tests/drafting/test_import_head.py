"""Heads written by other tools: differences resolved from tensors and target, and rejected heads."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint import draft_head, loading
from mlaforge.checkpoint.eagle3 import LAYER_FIELDS, boundary, read_head, target_ids, write_head
from mlaforge.drafting.import_block import default_layers
from mlaforge.modeling.eagle3 import AFTER_NORM
from mlaforge.runtime import UserError
from support import block_heads
from support.eagle3_heads import LAYER, make

# Ascending with neighbours: its offsets are invalid as ids (repeated), its ids invalid as offsets (descending).
TOKENS = [3, 4, 5, 9, 40, 41, 100, 250]


def write_foreign(folder, rename=None, drop=(), change=None, config=None, **fields):
    """Write a head as another tool would, and return it."""
    folder.mkdir()
    head = make(**{"tokens": TOKENS, **fields})
    write_head(head, folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    if change is not None:
        change(tensors)
    save_file({(rename or (lambda name: name))(k): v.contiguous() for k, v in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    config_json = json.loads((folder / "config.json").read_text())
    if config is not None:
        config(config_json)
    (folder / "config.json").write_text(json.dumps(config_json))
    return head


def check_same_tensors(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.fixture
def import_head(cli, tiny_models, tmp_path):
    """imports(...) -> the head that `draft import` makes of tmp_path / "wild", and what it said."""

    def run(*more):
        done = cli("draft", "import", tmp_path / "wild", tmp_path / "out", "--target", tiny_models["llama"], *more)
        assert done.exit_code == 0, done.stderr
        return read_head(tmp_path / "out", 3), done

    return run


def shuffled(tensors):
    """lm_head by falling frequency, d2t as the target's ids, no t2d: an FR-Spec map."""
    order = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(TOKENS, dtype=torch.int32)[order]
    del tensors["t2d"]


def nested(config_json):
    """config.json as the library `speculators` writes it; its layer's theta is not LlamaConfig's default."""
    layer = {name: config_json.pop(name) for name in (*LAYER_FIELDS, "model_type") if name in config_json}
    assert layer["rope_parameters"]["rope_theta"] != 10000.0
    for name in ("eagle_aux_hidden_state_convention", "norm_before_residual"):
        del config_json[name]
    config_json |= {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(TOKENS),
    }
    config_json["transformer_layer_config"] = layer


SPELLINGS = {
    "ours": {},
    "layers.0": {"rename": lambda name: name.replace("midlayer.", "layers.0.")},
    "below model": {"rename": lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}"},
    "no t2d": {"drop": ["t2d"]},
    "absolute ids by frequency": {"change": shuffled},
    "absolute ids beside t2d": {"change": lambda tensors: tensors.update(d2t=torch.tensor(TOKENS))},
    "nothing said": {"config": lambda config_json: [config_json.pop(name) for name in (
        "draft_vocab_size", "target_hidden_size", "head_dim", "attention_bias", "norm_before_fc", "fc_norm",
        "eagle_aux_hidden_state_convention")], "norm_before_fc": True, "fc_norm": True},
    "speculators": {"config": nested, "norm_before_residual": True},
    "another name": {"config": lambda config_json: config_json.update(architectures=["Eagle3LlamaForCausalLM"])},
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_imports_every_spelling(name, import_head, tmp_path):
    head = write_foreign(tmp_path / "wild", **SPELLINGS[name])
    imported, done = import_head()
    check_same_tensors(imported, head)
    assert ("d2t read as ids" in done.stdout) == name.startswith("absolute"), done.stdout
    assert (
        imported.config.norm_before_fc == head.config.norm_before_fc and imported.config.fc_norm == head.config.fc_norm
    )
    # The same again is not made again.
    assert import_head()[1].stdout == done.stdout


def test_missing_and_copied_target_tensors(import_head, tiny_models, tmp_path):
    """A missing lm_head becomes the target's rows; a copy of its embedding is dropped, another embedding is kept."""
    target_tensors = load_file(tiny_models["llama"] / "model.safetensors")
    embedding = target_tensors["model.embed_tokens.weight"]
    head = write_foreign(tmp_path / "wild", drop=["lm_head.weight"],
                change=lambda tensors: tensors.update({"embed_tokens.weight": embedding}))  # fmt: skip
    imported, done = import_head()
    assert torch.equal(imported.lm_head.weight, target_tensors["lm_head.weight"][TOKENS])
    assert torch.equal(imported.fc.weight, head.fc.weight)
    assert not imported.config.has_embed_tokens and "embed_tokens the target's" in done.stdout
    (tmp_path / "second").mkdir()
    other = write_foreign(tmp_path / "second" / "wild", has_embed_tokens=True)
    (tmp_path / "wild").rename(tmp_path / "first")
    (tmp_path / "second" / "wild").rename(tmp_path / "wild")
    imported, _ = import_head("--overwrite")
    check_same_tensors(imported, other)


def test_imports_a_whole_vocabulary_with_a_map(import_head, tmp_path):
    """An identity d2t is accepted."""
    head = write_foreign(tmp_path / "wild", tokens=range(260), change=lambda tensors: tensors.update(
        d2t=torch.zeros(260, dtype=torch.int64), t2d=torch.ones(260, dtype=torch.bool)))  # fmt: skip
    imported, _ = import_head()
    check_same_tensors(imported, head)


@pytest.mark.parametrize(
    ("convention", "numbers", "boundaries"),
    [
        ("boundary", [0, 1, 3], (0, 1, 3)),
        ("output", [0, 1, 2], (1, 2, 3)),
        ("hidden_states", [0, 2, 3], (0, 2, AFTER_NORM)),
    ],
)
def test_stores_captured_layers_as_boundaries(convention, numbers, boundaries, import_head, tmp_path):
    write_foreign(
        tmp_path / "wild", config=lambda config_json: config_json.update(eagle_aux_hidden_state_layer_ids=numbers)
    )
    imported, _ = import_head("--convention", convention)
    assert imported.config.boundaries == boundaries
    for wrong in (4, -2):
        with pytest.raises(UserError, match="3 layers"):
            boundary(wrong, convention, 3)


def widen(name):
    return lambda tensors: tensors.update({name: torch.cat((tensors[name], tensors[name][:1]))})


INVALID = {
    "both names": ({"change": lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()})}, "two names"),
    "no fc": ({"drop": ["fc.weight"]}, "no tensor 'fc.weight'"),
    "another class": (
        {"config": lambda config_json: config_json.update(architectures=["LlamaForCausalLM"])},
        "not an EAGLE-3 head",
    ),
    "a missing tensor": ({"drop": ["midlayer.mlp.up_proj.weight"]}, "lacks the tensor"),
    "a strange tensor": ({"change": lambda t: t.update(scale=torch.ones(1))}, "'scale'"),
    "a wrong shape": ({"change": widen("midlayer.self_attn.k_proj.weight")}, "has shape"),
    "NaN": ({"change": lambda t: t["fc.weight"].fill_(torch.nan)}, "holds NaN"),
    "outside": ({"change": lambda t: t["d2t"].add_(253)}, "names token 262, the target has 260"),
    "twice": ({"change": lambda t: t.update(d2t=torch.tensor([5] * 8).cumsum(0) % 25)}, "d2t is wrong"),
    "t2d": ({"change": lambda t: t["t2d"].logical_not_()}, "other tokens than t2d marks"),
    "no numbers": ({"change": lambda t: t.update(d2t=t["d2t"].float())}, "whole numbers"),
    "a lone lm_head": ({"drop": ["d2t", "t2d"]}, "8 rows, the target 260 tokens"),
    "another model": ({"layer": {"vocab_size": 300}}, "vocab_size is 300"),
    "a layer too many": (
        {"config": lambda config_json: config_json.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4])},
        "3 layers",
    ),
    "two readings": ({"tokens": [0, 3, 6], "drop": ["t2d"]}, "--d2t"),
}


@pytest.mark.parametrize("name", INVALID)
def test_rejects_invalid_heads(name, refused, tiny_models, tmp_path):
    changes, words = INVALID[name]
    write_foreign(tmp_path / "wild", **changes)
    refused(words, "draft", "import", tmp_path / "wild", tmp_path / "out", "--target", tiny_models["llama"])


def test_the_user_resolves_ambiguous_d2t(import_head, tmp_path):
    write_foreign(tmp_path / "wild", tokens=[0, 3, 6], drop=["t2d"])
    assert import_head("--d2t", "offsets")[0].target_ids.tolist() == [0, 3, 6]
    assert import_head("--d2t", "ids", "--overwrite")[0].target_ids.tolist() == [0, 2, 4]


@given(st.sets(st.integers(0, 99), min_size=1), st.randoms(use_true_random=False))
def test_d2t_readings_round_trip(tokens, random):
    """Either reading returns the original ids, or reports that both are possible."""
    rising = sorted(tokens)
    offsets = torch.tensor([token - draft_id for draft_id, token in enumerate(rising)])
    t2d = torch.zeros(100, dtype=torch.bool)
    t2d[rising] = True
    mixed = random.sample(rising, len(rising))
    for reading, stored, expected in (("offsets", offsets, rising), ("ids", torch.tensor(mixed), mixed)):
        assert target_ids(stored, None, 100, reading)[1].tolist() == expected
        for marks in (t2d, None):
            try:
                name, ids = target_ids(stored, marks, 100)
            except UserError as error:
                assert "--d2t" in str(error)
            else:
                assert ids.tolist() == expected, (name, reading)
        # With t2d both are possible only where they say the same set in another order.
    assert LAYER["vocab_size"] >= 100


BLOCK_LAYER = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-6, "vocab_size": 260, "max_position_embeddings": 512, "rope_theta": 500.0, "hidden_act": "silu",
    "attention_bias": False, "num_hidden_layers": 2,
}  # fmt: skip


def write_foreign_block(folder, **changes):
    """Write a head with the names that z-lab/dflash publishes, and return its tensors."""
    head = block_heads.make(layers=2, draft_vocab_size=260, boundaries=(1, 2), block_size=6)
    taken = ("mask_embedding", "lm_head.weight")
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name not in taken}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **BLOCK_LAYER, "block_size": 6,
        "num_target_layers": 3, "dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1]}, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_imports_a_published_block_head(cli, tiny_models, tmp_path):
    """Layer j is captured as the output of layer j, masks are embedded and logits are made by the target."""
    tensors = write_foreign_block(tmp_path / "wild")
    done = cli("draft", "import", tmp_path / "wild", tmp_path / "out", "--target", tiny_models["llama"])
    assert done.exit_code == 0, done.stderr
    head, target = draft_head.read_head(tmp_path / "out", 3), loading.load_model(tiny_models["llama"], "float32")
    assert (head.config.boundaries, head.config.block_size, head.config.sliding_window) == ((1, 2), 6, None)
    for name, tensor in tensors.items():
        assert torch.equal(head.state_dict()[name], tensor), name
    assert torch.equal(head.lm_head.weight, target.lm_head.weight)
    assert torch.equal(head.mask_embedding, target.get_input_embeddings().weight[259].expand(5, -1))
    for command in (
        ("verify", tmp_path / "out"),
        ("draft", "export", tmp_path / "out", tmp_path / "int8", "--dtype", "int8"),
    ):
        assert cli(*command).exit_code == 0
    exported = draft_head.read_head(tmp_path / "int8", None)
    torch.testing.assert_close(
        exported.layers[1].mlp.up_proj.weight, head.layers[1].mlp.up_proj.weight, atol=0.01, rtol=0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "block heads of DFlashDraftModel are read"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "causal mask within a block"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "of several kinds"),
        ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 1]}}, "the target embeds 260 tokens"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 3]}}, "it captures layer 3"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "no 'mask_token_id'"),
        ({"output_multiplier": 0.5}, "output_multiplier = 0.5 is not supported"),
        ({"num_hidden_layers": 3}, "layers.2."),
        ({"vocab_size": 300}, "it was trained for another model"),
    ],
)
def test_rejects_block_heads_that_it_would_compute_otherwise(changes, words, refused, tiny_models, tmp_path):
    write_foreign_block(tmp_path / "wild", **changes)
    refused(words, "draft", "import", tmp_path / "wild", tmp_path / "out", "--target", tiny_models["llama"])
    assert not (tmp_path / "out").exists()


def test_default_layers_of_published_block_heads():
    """The numbers of z-lab/dflash for a target of 36 layers and a head of 5."""
    assert default_layers(36, 5) == [1, 9, 17, 25, 33] and default_layers(30, 1) == [15]
