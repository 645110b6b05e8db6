"""`draft compare` accepts equal stages of a head, and locates the first stage that differs."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.drafting.config import DraftCompareConfig
from mlaforge.drafting.parity import STAGES, STATES, failed_tolerances
from support.eagle3_heads import ALL, HEADS, make
from support.tiny_models import load_original

DOCS = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
(RECIPE,) = (code for code in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "register_forward_hook" in code)
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture
def compare_head(cli, tiny_models, tmp_path):
    """compared(head, ...) -> exit code, and stage -> its row."""

    def run(head, *more, target=None, dtype="float32"):
        folder = tmp_path / "head"
        folder.mkdir(exist_ok=True)
        write_head(head, folder, torch.float32)
        done = cli("draft", "compare", folder, "--target", target or tiny_models["llama"], "--dtype", dtype, "--json",
                   *more)  # fmt: skip
        assert done.exit_code in (0, 1) and done.stdout, done.stderr
        result = json.loads(done.stdout)
        return done.exit_code, {row["stage"]: row for row in result["stages"]}, result["failed"]

    return run


@torch.no_grad()
def reference(folder, directory, head, change=None):
    """Write a reference with the recipe of the documentation, for a head on transformers' hidden states."""
    model = load_original(directory)
    hidden_states = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden_states[b] for b in head.config.boundaries], dim=-1)
    embedding = head.embed_tokens if head.config.has_embed_tokens else model.get_input_embeddings()
    embedded, T = embedding(torch.tensor([IDS[1:]])), len(IDS) - 1
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < (head.config.sliding_window or T))

    def forward(head):
        head.logits(head(head.fuse(states[:, :-1]), embedded, torch.arange(T)[None], mask))

    path = folder / "reference.safetensors"
    code = RECIPE.replace('"reference.safetensors"', repr(str(path)))
    exec(compile(code, "<documentation>", "exec"),
         {"token_ids": IDS, "states": states, "head": head, "forward": forward})  # fmt: skip
    if change is not None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    return path


@pytest.mark.parametrize("name", HEADS)
def test_another_runtimes_reference_agrees(name, compare_head, tiny_models, tmp_path):
    head = make(**HEADS[name])
    code, rows, failed_tolerances = compare_head(head, "--reference", reference(tmp_path, tiny_models["llama"], head))
    assert code == 0 and failed_tolerances == []
    assert list(rows) == [STATES, *STAGES]
    for row in rows.values():
        assert row["worst_cosine"] > 1 - 1e-6 and row["max_difference"] < 1e-4 * max(1, row["size"]), row
    assert rows["logits"]["overlap"] == 1


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [("mistral", "latent_rope", "float32"), ("gpt_oss", None, "float32"), ("llama", None, "bfloat16")],
)
def test_plain_pytorch_reference_agrees(family, layout, dtype, compare_head, tiny_models, converted, evaluation_file):
    target = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    code, rows, failed_tolerances = compare_head(
        make(**ALL, boundaries=(0, 2, -1)), "--text", evaluation_file, "--tokens", 48, target=target, dtype=dtype
    )
    assert code == 0 and failed_tolerances == []
    exact = dtype == "float32"
    for row in rows.values():
        assert 1 - row["worst_cosine"] < (1e-5 if exact else 0.02), row
    # The rounding differs somewhere: these are two computations, not one compared with itself.
    assert max(row["max_difference"] for row in rows.values()) > 0


def test_locates_the_first_difference(compare_head, tiny_models, tmp_path):
    """The MLP of the other head has another input: fc and attention agree, later stages do not."""
    other_head = make(norm_before_residual=True)
    path = reference(tmp_path, tiny_models["llama"], other_head)
    code, rows, (failures,) = compare_head(make(), "--reference", path)
    assert code == 1 and "logits: cosine" in failures and "below 0.98" in failures
    assert [name for name in STAGES if rows[name]["cosine"] < 0.999] == ["ffn_out", "pre_head_hidden", "logits"]


def test_tolerances_are_applied(compare_head, tiny_models, tmp_path):
    def noisy(tensors):
        noise = torch.randn(tensors["logits"].shape, generator=torch.Generator().manual_seed(0))
        tensors["logits"] += 0.05 * tensors["logits"].std() * noise

    head = make()
    path = reference(tmp_path, tiny_models["llama"], head, noisy)
    code, rows, failures = compare_head(head, "--reference", path, "--cosine", 0.9999, "--overlap", 1.0)
    assert code == 1 and len(failures) == 2
    row = rows["logits"]
    assert 0.99 < row["cosine"] < 0.9995 and row["overlap"] < 1
    assert failed_tolerances(row, DraftCompareConfig()) == []
    for factor, count in ((0.99, 1), (1.01, 0)):
        assert len(failed_tolerances(row, DraftCompareConfig(max_difference=factor * row["max_difference"]))) == count
    nothing = dict.fromkeys(row, float("nan"))
    assert (
        len(failed_tolerances({**nothing, "stage": "logits"}, DraftCompareConfig(max_difference=1e9, overlap=0.0))) == 3
    )


def test_partial_references_are_compared(compare_head, tiny_models, tmp_path):
    """Logits over the whole vocabulary without states, with a batch of one; NaN in a stage fails."""
    head = make()

    def bare(tensors):
        wide = torch.full((1, len(IDS) - 1, 260), -torch.inf)
        wide[..., head.target_ids] = tensors["logits"]
        for name in (STATES, *STAGES):
            del tensors[name]
        tensors["logits"] = wide

    code, rows, _ = compare_head(head, "--reference", reference(tmp_path, tiny_models["llama"], head, bare))
    assert code == 0 and list(rows) == [STATES, "logits"] and rows["logits"]["worst_cosine"] > 1 - 1e-6
    path = reference(tmp_path, tiny_models["llama"], head, lambda tensors: tensors["logits"][0, 3].fill_(torch.nan))
    assert compare_head(head, "--reference", path)[0] == 1


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


INVALID = {
    "no ids": (drop("input_ids"), "must hold input_ids"),
    "no stage": (drop(*STAGES), "at least one of fc_out"),
    "shape": (lambda t: t.update(ffn_out=t["ffn_out"][:, :-1].contiguous()), "ffn_out is float32 [38, 64]"),
    "states": (lambda t: t.update({STATES: t[STATES][..., :64].contiguous()}), "[40, 192]"),
    "kind": (lambda t: t.update(input_ids=t["input_ids"].float()), "input_ids is float32 [40]"),
    "vocabulary": (lambda t: t.update(input_ids=t["input_ids"] + 9), "vocabulary has 260"),
}


@pytest.mark.parametrize("name", INVALID)
def test_rejects_invalid_references(name, refused, tiny_models, tmp_path):
    change, words = INVALID[name]
    head = make()
    (tmp_path / "head").mkdir()
    write_head(head, tmp_path / "head", torch.float32)
    path = reference(tmp_path, tiny_models["llama"], head, change)
    command = ("draft", "compare", tmp_path / "head", "--target", tiny_models["llama"])
    refused(words, *command, "--reference", path)
    if name == "no ids":
        refused("no safetensors file", *command, "--reference", tmp_path / "head" / "config.json")
        refused("tokens = 1", *command, "--tokens", 1)
